"""The glossary of axes: how annotations say the shapes and dtypes of arrays, and what each axis is.

`Float32[Array, "batch time heads"]` is an array of float32 numbers with three axes. In one call of a function, axes of
one name are equally long, but for one written "#rows", which may be of length 1 instead. `""` is a scalar, `...` stands
for any axes, and "{slots}+1" for a sum with the function's argument. The words are jaxtyping's: `Float` is any
floating-point dtype, `Int` any of integers, `Shaped` any at all, `Key` are random keys.

The tests check what functions get and return against their annotations (`tests/array_checks.py`); outside of tests
nothing does, and where an argument can be wrong by a user's doing the function itself says so.

    batch        sequences that are computed together, without a cache
    rows         sequences of one launch on a cache, or rows of a carry; each has a slot
    slots        places for a sequence in a memory, the null slot 0 among them
    time         tokens of a sequence; of a launch those that it reads, the draft tokens included

    heads        of queries in softmax attention, of values in a recurrence
    kv_heads     heads of keys and values in softmax attention; key_heads: heads of q and k in a recurrence
    head_dim     numbers of a head; key_dim, value_dim: of a head's key and value in a recurrence
    hidden       numbers of a token between layers
    channels     numbers of a token in a short convolution; width: its taps
    vocab        tokens that there are; words: 32 of them a word of a bit mask

    states       checkpoint rows of a pool, the null row 0 among them
    ring         places for a slot's last tokens: entries of a recurrence, inputs of a convolution
    blocks       of a ring's entries in a pool, the null block 0 among them; max_blocks: those of a slot
    block_size   entries of a block
    pages        of keys and values in a pool, the null page 0 among them; max_pages: those of a slot
    page_size    tokens of a page
    max_pending  tokens of a launch at most

    drafts       draft tokens of a row; nodes: the same in a tree; places: drafts and the newest token before them
    capacity     tokens that a row's text can hold
"""

from jax import Array
from jaxtyping import Bool, Float, Float32, Int, Int32, Key, Shaped, UInt32

__all__ = ["Array", "Bool", "Float", "Float32", "Int", "Int32", "Key", "Shaped", "UInt32"]

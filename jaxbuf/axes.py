"""The glossary of axes: how annotations say the shapes and dtypes of arrays, and what each axis is.

`Float32[Array, "batch time heads"]` is an array of float32 numbers with three axes. In one call of a function, and in
one object of a dataclass, axes of one name are equally long, but for one written `#rows`, which may be of length 1
instead. `""` is a scalar, `...` and `*n` stand for any axes, and `{slots}+1` for a sum with the function's argument.
The words are jaxtyping's: `Float` is any floating-point dtype, `Int` any of integers, `Shaped` any at all, `Key` are
random keys.

The tests check what functions get and return (`tests/array_checks.py`). Outside of tests nothing does: what a user can
get wrong, the functions themselves say.

    batch        sequences that are computed together, without a cache
    rows         sequences of a launch on a cache, each in its slot; in the loop, running requests
    slots        places for a sequence in a memory, the null slot 0 among them
    time         tokens of a sequence; of a launch those that it reads, draft tokens among them

    heads        of queries in softmax attention, of values in a recurrence
    kv_heads     heads of keys and values in softmax attention
    group        heads that read one of them
    head_dim     numbers of a head's query, key or value in softmax attention
    latent       numbers that latent attention keeps of a token: rank, and the heads' common key part
    rank         numbers from which every head's key and value of a token are made
    copies       of the latents of a token, one on each device
    key_heads    heads of queries and keys in a recurrence
    key_dim      numbers of a head's query or key in a recurrence
    value_dim    numbers of a head's value in a recurrence; in attention if keys are of another width
    hidden       numbers of a token between layers
    channels     numbers of a token in a short convolution
    width        taps of a convolution
    channel_rows  rows in which an input of a convolution lies in its ring
    lanes        channels of such a row: 128, or all of them
    vocab        tokens that a model knows
    words        of 32 bits, one bit for each token that a model knows
    in           numbers that a projection reads
    out          numbers that it gives
    experts      MLPs among which a router chooses
    chosen       of them for one token
    summands     parts of a sum that a later kernel adds up
    inner        numbers between an MLP's projections
    tokens       that are computed together, each by itself

    states       rows of a pool of checkpoints, the null row 0 among them
    ring         places for a slot's last tokens: entries of a recurrence, inputs of a convolution
    blocks       of entries in a pool, the null block 0 among them
    max_blocks   blocks of one slot
    block_size   entries of a block
    pages        of keys and values in a pool, the null page 0 among them
    max_pages    pages of one slot
    page_size    tokens of a page
    layers       of one kind of memory
    local_pages  of the latest tokens in a write-gated layer, the null page 0 among them
    local_columns  of them for one slot
    local_places   for tokens on the local pages of one slot
    max_pending  tokens of a launch at most

    prompts      that are read at once
    begins       rows that begin to run
    capacity     tokens that a row's text has room for
    drafts       draft tokens of a row
    nodes        draft tokens of a row, as a tree
    places       draft tokens of a row, and the newest token before them
    branches     candidates for one draft
    beams        hypotheses of a prompt
    room         steps of a beam search

    n            any number: the docstring says of what
"""

from jax import Array
from jaxtyping import Bool, Float, Float32, Int, Int32, Key, Shaped, UInt32

__all__ = ["Array", "Bool", "Float", "Float32", "Int", "Int32", "Key", "Shaped", "UInt32"]

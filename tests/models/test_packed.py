"""Packed parameters: a call of a compiled program does not walk through the model."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxbuf.models.packed import pack, unpacked


class Line(nnx.Module):
    def __init__(self, slope: float):
        self.slope, self.offset = nnx.Param(jnp.asarray(slope)), nnx.Param(jnp.asarray(1.0))


@jax.tree_util.register_pytree_node_class
class Counted:
    """A number, and how often any was flattened."""

    flattened = 0

    def __init__(self, number):
        self.number = number

    def tree_flatten(self):
        Counted.flattened += 1
        return (self.number,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_what_was_packed_comes_out_as_it_was_and_anything_else_is_left_alone():
    line = Line(2.0)
    packed = pack(line)
    found = unpacked(packed)
    assert jax.tree.structure(found) == jax.tree.structure(line)
    assert all(x is y for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(line), strict=True))
    assert all(x is y for x, y in zip(jax.tree.leaves(packed), jax.tree.leaves(line), strict=True))
    assert unpacked(line) is line and unpacked(None) is None


def test_a_program_is_traced_once_for_all_that_have_a_structure():
    traced = []

    @jax.jit
    def value(line, x):
        traced.append(line)
        line = unpacked(line)
        return line.slope[...] * x + line.offset[...]

    first, second = pack(Line(2.0)), pack(Line(3.0))
    assert (value(first, 5.0), value(second, 5.0), len(traced)) == (11, 16, 1)
    assert (value(jax.tree.map(lambda x: x.astype(jnp.float16), first), jnp.float16(5)), len(traced)) == (11, 2)
    assert jax.tree.structure(first) == jax.tree.structure(second) != jax.tree.structure(pack([np.ones(()), 1.0]))


def test_a_call_does_not_flatten_what_was_packed():
    add = jax.jit(lambda whole, x: unpacked(whole).number + x)
    whole = Counted(jnp.asarray(2.0))
    packed = pack(whole)
    assert (add(packed, 1.0), add(whole, 1.0)) == (3, 3)
    before = Counted.flattened
    assert (add(packed, 2.0), Counted.flattened) == (4, before)
    assert (add(whole, 2.0), Counted.flattened > before) == (4, True)

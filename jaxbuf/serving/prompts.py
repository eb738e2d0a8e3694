"""The first chunk of a generation's prompts: programs that make the carry and read into it.

Without a mesh `read_first_chunk` runs several: one before the layers, one a layer, one behind them. The layers of a
kind share theirs, so that XLA has a few small programs to compile, side by side, and not one in which every layer is
compiled anew.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.axes import Array, Float
from jaxbuf.models import decoder
from jaxbuf.models.cache import Plans
from jaxbuf.models.config import LayerConfig
from jaxbuf.serving.admit import Placed, admit_chunk, begin_chunk, end_chunk, init_carry, with_memories
from jaxbuf.serving.arrivals import Arrivals
from jaxbuf.serving.carry import Carry, CarrySizes
from jaxbuf.serving.kept_programs import keep
from jaxbuf.serving.speculation import Drafter


def _new_carry(model: decoder.Decoder, sizes: CarrySizes, arrivals: Arrivals, drafter: Drafter | None = None) -> Carry:
    return init_carry(model.config, sizes, drafter)


@partial(jax.jit, static_argnames="sizes")
@keep(like=_new_carry)
def start(model: decoder.Decoder, sizes: CarrySizes, arrivals: Arrivals, drafter: Drafter | None = None) -> Carry:
    """`init_carry` and `admit` of the first chunk, compiled as one program: what a model on a mesh reads it by."""
    return admit_chunk(model, _new_carry(model, sizes, arrivals, drafter), arrivals, drafter, empty=True)


def _begun(
    model: decoder.Decoder, sizes: CarrySizes, arrivals: Arrivals, drafter: Drafter | None = None
) -> tuple[Carry, tuple[Any, ...], Placed, Array]:
    carry, placed, x = begin_chunk(model, init_carry(model.config, sizes, drafter), arrivals, empty=True)
    # A number that Python gave has a weak type, which a program that was kept forgets; the layers' keys depend on it.
    placed = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), placed.shared_by(model.config.layers))
    return with_memories(carry, ()), carry.cache.layers, placed, x


@partial(jax.jit, static_argnames="sizes")
@keep(like=_begun)
def begin_prompts(
    model: decoder.Decoder, sizes: CarrySizes, arrivals: Arrivals, drafter: Drafter | None = None
) -> tuple[Carry, tuple[Any, ...], Placed, Float[Array, "prompts time hidden"]]:
    """A new carry, and what `begin_chunk` does, for layers that are programs of their own.

    Args:
      model: The parameters.
      sizes: What the carry has room for (static).
      arrivals: The first chunk.
      drafter: Who will draft tokens; None: nobody.

    Returns:
      The carry without the memories of the layers, and these; and what else `begin_chunk` returns, with plans from
      `decoder.share_plans`.
    """
    return _begun(model, sizes, arrivals, drafter)


@partial(jax.jit, static_argnames="config", donate_argnames=("x", "memories"))
@keep(like=lambda config, layer, x, memories, plans: (x, memories))
def read_layer(
    config: LayerConfig,
    layer: decoder.DecoderLayer,
    x: Float[Array, "prompts time hidden"],
    memories: tuple[Any, ...],
    plans: Plans,
) -> tuple[Float[Array, "prompts time hidden"], tuple[Any, ...]]:
    """`decoder.apply_layer`; x and the memories are donated: the arguments must not be used again."""
    return decoder.apply_layer(config, layer, x, memories, plans)


@partial(jax.jit, donate_argnames=("carry", "memories"))
@keep(like=lambda model, carry, memories, placed, x, arrivals, drafter=None: with_memories(carry, memories))
def end_prompts(
    model: decoder.Decoder,
    carry: Carry,
    memories: tuple[Any, ...],
    placed: Placed,
    x: Float[Array, "prompts time hidden"],
    arrivals: Arrivals,
    drafter: Drafter | None = None,
) -> Carry:
    """What `end_chunk` does, for a carry without the memories of the layers.

    Both are donated: they must not be used again.
    """
    return end_chunk(model, with_memories(carry, memories), placed, x, arrivals, drafter)


def call(program: Callable[..., Any], *args: Any) -> Any:
    """What a jitted function returns, as arrays that count as put on their device.

    Whether they do when they come from jit depends on its arguments, on JAX's version, and on whether the program was
    kept; the key of the program that reads them depends on it. Nothing is copied. Most do, and are left alone: putting
    the results of 34 programs again took 26 to 30 ms of a CPU's time.
    """
    found = program(*args)
    arrays = jax.tree.leaves(found)
    return found if all(array.committed for array in arrays) else jax.device_put(found, arrays[0].sharding)


def program_key(program: Callable[..., Any], args: Sequence[Any]) -> Hashable:
    """The same for all calls of a jitted function that one program serves, as far as `read_first_chunk` makes them."""
    leaves, tree = jax.tree.flatten(args)
    return program, tree, tuple(map(_kind, leaves))


def _kind(leaf: Any) -> Hashable:
    if not hasattr(leaf, "dtype"):  # a static argument, or a number that jit takes for an array of its type
        return leaf
    return np.shape(leaf), leaf.dtype, getattr(leaf, "weak_type", False)


def read_first_chunk(
    model: decoder.Decoder,
    sizes: CarrySizes,
    arrivals: Arrivals,
    drafter: Drafter | None = None,
    *,
    run: Callable[..., Any] = call,
) -> Carry:
    """`init_carry` and `admit` of the first chunk, for a model that is not on a mesh; not under jit.

    Args:
      model: The parameters.
      sizes: What the carry has room for.
      arrivals: The chunk.
      drafter: Who will draft tokens; None: nobody.
      run: Gets each program and its arguments in the order in which they run. What it returns is passed on to the next:
        the shapes of the results are enough if it does not call them.
    """
    given = () if drafter is None else (drafter,)
    carry, memories, placed, x = run(begin_prompts, model, sizes, arrivals, *given)
    x, memories = decoder.apply_one_by_one(partial(run, read_layer), model.layers, x, memories, placed.plans)
    return run(end_prompts, model, carry, memories, placed, x, arrivals, *given)

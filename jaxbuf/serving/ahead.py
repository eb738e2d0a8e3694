"""Compiles the two programs of a generation before either runs, side by side where XLA takes long."""

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.stages import Lowered

from jaxbuf.models.language_model import LanguageModel
from jaxbuf.pallas.kernel_programs import compile_kernels, compiler_threads
from jaxbuf.serving.admit import Arrivals, start
from jaxbuf.serving.carry import CarrySizes
from jaxbuf.serving.kept_programs import Keeping, keeping_programs
from jaxbuf.serving.loop import generate_tokens
from jaxbuf.serving.speculation import Drafter

_known: set[Hashable] = set()  # what was compiled here, so that later generations spend no time on it


def compile_ahead(
    lm: LanguageModel, sizes: CarrySizes, arrivals: Sequence[Arrivals], drafter: Drafter | None = None
) -> None:
    """Compiles `start` for the first chunk of prompts and `generate_tokens` for what comes of it, unless it did before.

    jit finds both when they are called with these arguments, and the second with a carry that was put on its device, as
    `read_prompts` does. They are traced and lowered on the caller's thread, under its JAX settings, or found lowered
    (`jaxbuf.serving.kept_programs`). XLA runs on other threads, but on a CPU; so do small programs that compile the
    kernels of those that were not found. With a mesh nothing is done: where the carry lies is not known until the first
    program is compiled.

    Args:
      lm, sizes, arrivals, drafter: As `jaxbuf.serving.generation.read_prompts` has them.
    """
    given = () if drafter is None else (drafter,)
    leaves, tree = jax.tree.flatten((arrivals[0], given))
    # If an argument was put on a device explicitly, jit keeps its results there, too, and their sharding is in its key.
    held = lm.model.norm.get_raw_value(), *jax.tree.leaves(given)
    sharding = next((leaf.sharding for leaf in held if isinstance(leaf, jax.Array) and leaf.committed), None)
    key = lm.config, lm.target, lm.dtype, sharding, sizes, tree, tuple(jax.typeof(leaf) for leaf in leaves)
    if lm.config.mesh is not None or key in _known:
        return
    if sharding is None:
        sharding = jax.device_put(np.int32(0)).sharding  # the default device
    with keeping_programs(lm.target) as keeping:
        traced = start.trace(lm.model, sizes, arrivals[0], *given)
        first = traced.lower()
        carry = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), traced.out_info)
        if lm.target.platform == "cpu":
            # XLA's CPU compiler has crashed while another thread wrote what it had compiled to JAX's compilation cache.
            first.compile()
            generate_tokens.lower(lm.model, carry, np.int32(0), *given).compile()
        else:
            _compile_side_by_side(first, lambda: generate_tokens.lower(lm.model, carry, np.int32(0), *given), keeping)
    _known.add(key)


def _compile_side_by_side(first: Lowered, second: Callable[[], Lowered], keeping: Keeping | None) -> None:
    """Compiles a program while another one is lowered and compiled, and their kernels beside them."""
    kernels, begun = compiler_threads(), set[bytes]()

    def begin_kernels(program: Lowered) -> None:
        if keeping is None or not keeping.found:  # Else XLA's compilation of the program, too, is found.
            compile_kernels(program, kernels, begun)

    try:
        with ThreadPoolExecutor(1) as pool:
            begin_kernels(first)
            compiled = pool.submit(first.compile)
            lowered = second()
            begin_kernels(lowered)
            lowered.compile()
            compiled.result()
    finally:
        kernels.shutdown(wait=False, cancel_futures=True)  # What has not begun by now is of no use.

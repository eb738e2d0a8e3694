"""Compiles the two programs of a generation before either runs, side by side where XLA takes long."""

from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.models.language_model import LanguageModel
from jaxbuf.pallas.kernel_programs import compile_kernels, compiler_threads
from jaxbuf.serving.admit import Arrivals, start
from jaxbuf.serving.carry import CarrySizes
from jaxbuf.serving.kept_programs import keeping_programs, results_are_committed
from jaxbuf.serving.loop import generate_tokens
from jaxbuf.serving.speculation import Drafter

_known: set[Hashable] = set()  # what was compiled here, so that later generations spend no time on it


def compile_ahead(
    lm: LanguageModel, sizes: CarrySizes, arrivals: Sequence[Arrivals], drafter: Drafter | None = None
) -> None:
    """Compiles `start` for the first chunk of prompts and `generate_tokens` for what comes of it, unless it did before.

    jit finds both when they are called with these arguments. They are traced and lowered on the caller's thread, under
    its JAX settings, or found lowered (`jaxbuf.serving.kept_programs`); only XLA runs on other threads, and on a CPU
    not even that. The kernels of programs that were not found are compiled beside them. With a mesh nothing is done:
    where the carry lies is not known until the first program is compiled.

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
    with keeping_programs(lm.target) as keeping:
        traced = start.trace(lm.model, sizes, arrivals[0], *given)
        first = traced.lower()
        if sharding is None and keeping is not None and keeping.used and results_are_committed():
            sharding = jnp.zeros(()).sharding  # the default device
        carry = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), traced.out_info)
        if lm.target.platform == "cpu":
            # XLA's CPU compiler has crashed while another thread wrote what it had compiled to JAX's compilation cache.
            first.compile()
            generate_tokens.lower(lm.model, carry, np.int32(0), *given).compile()
        else:
            with ThreadPoolExecutor(1) as pool, compiler_threads() as threads:
                if keeping is None or not keeping.found:
                    compile_kernels(first, threads)
                compiled = pool.submit(first.compile)
                second = generate_tokens.lower(lm.model, carry, np.int32(0), *given)
                if keeping is None or not keeping.found:
                    compile_kernels(second, threads)
                second.compile()
                compiled.result()
    _known.add(key)

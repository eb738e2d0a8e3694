"""Compiles the programs of a generation before any of them runs, side by side where XLA takes long."""

from collections.abc import Hashable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Sharding
from jax.stages import Lowered

from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.packed import pack
from jaxbuf.pallas.kernel_programs import compile_kernels, compiler_threads
from jaxbuf.serving.admit import init_carry
from jaxbuf.serving.arrivals import Arrivals
from jaxbuf.serving.carry import CarrySizes
from jaxbuf.serving.kept_programs import Keeping, keeping_programs
from jaxbuf.serving.loop import generate_tokens
from jaxbuf.serving.prompts import program_key, read_first_chunk
from jaxbuf.serving.speculation import Drafter

_known: set[Hashable] = set()  # what was compiled here, so that later generations spend no time on it
_kernels: set[bytes] = set()  # Hashes of those that were compiled beside their programs, if they could be.


def compile_ahead(
    lm: LanguageModel, sizes: CarrySizes, arrivals: Sequence[Arrivals], drafter: Drafter | None = None
) -> None:
    """Compiles the programs of `read_first_chunk` for the first chunk of prompts, and `generate_tokens` for what comes
    of it, unless it did before.

    jit finds all of them when they are called with these arguments, and with results of each other that were put on
    their device, as `read_first_chunk` does. They are traced and lowered on the caller's thread, under its JAX
    settings, or found lowered (`jaxbuf.serving.kept_programs`), first `generate_tokens`, which XLA has the most work
    with. XLA runs on other threads, but on a CPU; so do small programs that compile the kernels of those that were not
    found. With a mesh nothing is done: where the carry lies is not known until the first program is compiled.

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
    # XLA's CPU compiler has crashed while another thread wrote what it had compiled to JAX's compilation cache.
    threads = lm.target.platform != "cpu"
    with keeping_programs(lm.target) as keeping, _Compiling(sharding, keeping, threads=threads) as compiling:
        # The carry that is decoded from is like an empty one, which is known before prompts are read.
        carry = jax.eval_shape(lambda: init_carry(lm.config, sizes, drafter))
        compiling.run(generate_tokens, pack(lm.model), compiling.placed(carry), np.int32(0), *map(pack, given))
        read_first_chunk(lm.model, sizes, arrivals[0], *given, run=compiling.run)
    _known.add(key)


class _Compiling:
    """Lowers programs, and has them and their kernels compiled on other threads; leaving the context waits for them.

    The compilers of kernels and of all else exclude each other while they make machine code. The first program is
    compiled while the others are lowered: its kernels are ready before XLA has optimized it. The others are compiled
    when all kernels are ready, or they would keep the first one waiting for its own.
    """

    def __init__(self, sharding: Sharding, keeping: Keeping | None, *, threads: bool):
        """Args:
        sharding: Of what is passed from a program to another.
        keeping: Where programs are kept.
        threads: Whether XLA runs on other threads; else a program is compiled before the next is lowered.
        """
        self.sharding, self.keeping, self.begun = sharding, keeping, set(_kernels)
        self.programs = ThreadPoolExecutor() if threads else None
        self.kernels = compiler_threads()
        self.results: dict[Hashable, Any] = {}
        self.lowered: list[Lowered] = []  # programs that wait for kernels
        self.running: list[Future[Any]] = []  # the others
        self.ready: list[Future[None]] = []  # kernels

    def placed(self, shapes: Any) -> Any:
        """The same shapes, of arrays that were put on their device."""

        def place(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding, weak_type=x.weak_type)

        return jax.tree.map(place, shapes)

    def run(self, program: Any, *args: Any) -> Any:
        """Has a program compiled, once for all calls that it serves, and returns the shapes of its results."""
        key = program_key(program, args)
        if key not in self.results:
            if self.keeping is not None:
                self.keeping.found = None  # JAX asks nobody for what it traced before
            traced = program.trace(*args)
            self._compile(traced.lower())
            self.results[key] = self.placed(traced.out_info)
        return self.results[key]

    def _compile(self, lowered: Lowered) -> None:
        if self.programs is None:
            lowered.compile()
            return
        if self.keeping is not None and self.keeping.found is not False:
            # What was found, or traced by this process before, has been compiled before, too.
            self.running.append(self.programs.submit(lowered.compile))
            return
        kernels = compile_kernels(lowered, self.kernels, self.begun)
        if self.running or self.lowered:
            self.lowered.append(lowered)
        else:
            self.running.append(self.programs.submit(lowered.compile))
        self.ready += kernels

    def _await_kernels(self) -> None:
        """Waits for all kernels; raises what a program raises that is compiled meanwhile."""
        unfinished = {*self.ready, *self.running}
        while not unfinished.isdisjoint(self.ready):
            done, unfinished = wait(unfinished, return_when=FIRST_COMPLETED)
            for each in done:
                each.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *rest: Any) -> None:
        try:
            if error is None:
                self._await_kernels()
                if self.programs is not None:
                    self.running += [self.programs.submit(program.compile) for program in self.lowered]
                for compiled in self.running:
                    compiled.result()
                _kernels.update(self.begun)
        finally:
            self.kernels.shutdown(wait=False, cancel_futures=True)  # What has not begun by now is of no use.
            if self.programs is not None:
                self.programs.shutdown(cancel_futures=True)

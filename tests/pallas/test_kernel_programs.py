"""What a program's kernels are compiled from beside it is what it holds of them."""

from concurrent.futures import Future

import jax
import jax.numpy as jnp

from jaxbuf.models.projections import project
from jaxbuf.pallas import kernel_programs
from jaxbuf.pallas.kernel_programs import compile_kernels, find_kernels


def lowered_projections():
    """A program for an H100 that multiplies two tokens with three weights, two of them of one shape."""
    x = jax.ShapeDtypeStruct((2, 1, 256), jnp.bfloat16)
    weights = [jax.ShapeDtypeStruct((out, 256), jnp.bfloat16) for out in (512, 1024, 512)]
    multiply = jax.jit(lambda x, *weights: [project(x, (weight,), target="H100")[0] for weight in weights])
    return multiply.trace(x, *weights).lower(lowering_platforms=("cuda",))


def test_each_kernel_is_a_program_that_calls_it_alone():
    first, second = kernels = find_kernels(lowered_projections())
    assert first.hash != second.hash
    assert {kernel.results[0].shape for kernel in kernels} == {(2, 512), (2, 1024)}
    for kernel in kernels:
        (found,) = find_kernels(kernel.lower())
        assert found == kernel and {"module", "kernel_hash"} < found.attributes.keys()


def test_a_kernel_that_does_not_compile_is_left_to_its_program(monkeypatch):
    begun = []

    class Pool:
        def submit(self, function):
            future = Future()
            try:
                future.set_result(function())
            except RuntimeError as error:
                future.set_exception(error)
            begun.append(future)

    def lower(kernel):
        raise RuntimeError("no such GPU")

    monkeypatch.setattr(kernel_programs.Kernel, "lower", lower)
    compile_kernels(lowered_projections(), Pool())
    assert len(begun) == 2 and all(future.exception() for future in begun)


def test_a_program_without_kernels_has_none():
    assert not find_kernels(jax.jit(jnp.sin).lower(1.0))

"""What a program's kernels are compiled from beside it is what it holds of them."""

import logging
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

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


@pytest.mark.parametrize("fails", ["lower", "find_kernels"])
def test_a_kernel_that_does_not_compile_is_left_to_its_program(monkeypatch, caplog, fails):
    def fail(*given):
        raise RuntimeError("no such GPU")

    monkeypatch.setattr(kernel_programs.Kernel if fails == "lower" else kernel_programs, fails, fail)
    with caplog.at_level(logging.DEBUG, "jaxbuf"), ThreadPoolExecutor(2) as pool:
        compile_kernels(lowered_projections(), pool, set())
    told = [record.message for record in caplog.records]
    assert len(told) == (2 if fails == "lower" else 1) and all("no such GPU" in message for message in told)


def test_a_kernel_is_compiled_once_for_several_programs(monkeypatch):
    compiled = []
    monkeypatch.setattr(kernel_programs, "_compile", lambda kernel: compiled.append(kernel.hash))
    with ThreadPoolExecutor(1) as pool:
        begun, lowered = set(), lowered_projections()
        for _ in range(2):
            compile_kernels(lowered, pool, begun)
    assert len(compiled) == 2 and set(compiled) == begun


def test_a_program_without_kernels_has_none():
    assert not find_kernels(jax.jit(jnp.sin).lower(1.0))

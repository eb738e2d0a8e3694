"""What `compile_ahead` compiles is what a generation runs: it compiles nothing else, and nothing twice."""

import dataclasses
import types

import jax
import pytest

import jaxbuf
from jaxbuf.serving import ahead
from jaxbuf.serving.ahead import compile_ahead
from jaxbuf.serving.batch import Decoding, make_batch
from jaxbuf.target import Target
from tests.serving.conftest import PROGRAMS
from tests.serving.program import carry_shape

NEW = 5


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(ahead, "_known", set())
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "placed"), [(None, False), ("ngram", True)])
def test_a_generation_compiles_each_program_once_and_ahead(lm, compiled, drafter, placed):
    """Whether or not the parameters were put on a device explicitly, on which jit's key depends."""
    if placed:
        lm = dataclasses.replace(lm, model=jax.device_put(lm.model, jax.devices()[0]))
    prompts = [[1, 2, 3]] * 3
    batch = make_batch(lm, prompts, decoding=Decoding(NEW, drafter=drafter))
    compile_ahead(batch.lm, batch.sizes, batch.arrivals, batch.drafter)
    assert compiled == PROGRAMS
    compile_ahead(batch.lm, batch.sizes, batch.arrivals, batch.drafter)
    first = jaxbuf.generate(lm, prompts, NEW, drafter=drafter)
    assert compiled == PROGRAMS
    assert first[0].tokens == jaxbuf.generate(lm, prompts, NEW, drafter=drafter)[0].tokens and compiled == PROGRAMS


@pytest.mark.parametrize("target", [None, Target("gpu", "Hopper")])
def test_an_error_of_the_first_program_is_raised(lm, monkeypatch, target):
    """Which is compiled on a thread of its own, but on a CPU; a later generation tries again."""
    if target is None:
        monkeypatch.setattr(ahead, "ThreadPoolExecutor", None)
    lm = dataclasses.replace(lm, compiled_for=target)
    batch = make_batch(lm, [[1, 2, 3]] * 3, decoding=Decoding(NEW))

    def fail():
        raise RuntimeError("no room for it")

    carry = carry_shape(batch)
    first = types.SimpleNamespace(lower=lambda: types.SimpleNamespace(compile=fail), out_info=carry)
    second = types.SimpleNamespace(compile=lambda: None)
    monkeypatch.setattr(ahead, "compile_kernels", lambda *given: None)
    monkeypatch.setattr(ahead, "start", types.SimpleNamespace(trace=lambda *given: first))
    monkeypatch.setattr(ahead, "generate_tokens", types.SimpleNamespace(lower=lambda *given: second))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no room for it"):
            compile_ahead(batch.lm, batch.sizes, batch.arrivals)

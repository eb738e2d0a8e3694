"""What `compile_ahead` compiles is what a generation runs: it compiles nothing else, and nothing twice."""

import contextlib
import dataclasses
import threading
import time
import types
from typing import Any

import jax
import pytest

import jaxbuf
from jaxbuf.serving import ahead
from jaxbuf.serving import prompts as prompts_module
from jaxbuf.serving.ahead import compile_ahead
from jaxbuf.serving.batch import Decoding, make_batch
from jaxbuf.serving.kept_programs import Keeping
from jaxbuf.target import Target
from tests.serving.conftest import PROGRAMS

NEW = 5
PARTS = "begin_prompts", "read_layer", "end_prompts"  # what reads prompts


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


@pytest.mark.slow
def test_a_drafter_compiles_only_what_has_other_shapes(lm, compiled):
    """Drafts need longer rings, but pages of the same number here: the softmax layers' program serves both."""
    for drafter in (None, "ngram"):
        jaxbuf.generate(lm, [[1, 2, 3]] * 3, NEW, drafter=drafter)
    assert compiled == {name: 2 * number for name, number in PROGRAMS.items()} | {"jit(read_layer)": 3}


@dataclasses.dataclass(frozen=True)
class Failing:
    """A program that can be traced; compiling it fails, or is no work."""

    program: Any
    fails: bool

    def trace(self, *args):
        return types.SimpleNamespace(out_info=self.program.trace(*args).out_info, lower=lambda: self)

    def compile(self):
        if self.fails:
            raise RuntimeError("no room for it")


@pytest.mark.parametrize("target", [None, Target("gpu", "Hopper")])
@pytest.mark.parametrize("name", ["generate_tokens", "begin_prompts", "read_layer", "end_prompts"])
def test_an_error_of_any_program_is_raised_and_a_later_generation_tries_again(lm, monkeypatch, target, name):
    """On a CPU nothing is compiled on other threads."""
    if target is None:
        monkeypatch.setattr(ahead, "ThreadPoolExecutor", None)
    batch = make_batch(lm, [[1, 2, 3]] * 3, decoding=Decoding(NEW))
    lm = dataclasses.replace(lm, compiled_for=target)
    monkeypatch.setattr(ahead, "compile_kernels", lambda *given: [])
    for module, program in ((ahead, "generate_tokens"), *((prompts_module, each) for each in PARTS)):
        monkeypatch.setattr(module, program, Failing(getattr(module, program), fails=program == name))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no room for it"):
            compile_ahead(batch.lm if target is None else lm, batch.sizes, batch.arrivals)


@pytest.fixture
def noted(lm, monkeypatch):
    """Compiles ahead for a GPU with programs that are traced alone; what was compiled, and how to begin."""
    compiled = []

    @dataclasses.dataclass(frozen=True)
    class Noted:
        program: Any

        def trace(self, *args):
            return types.SimpleNamespace(out_info=self.program.trace(*args).out_info, lower=lambda: self)

        def compile(self):
            compiled.append(self)

    batch = make_batch(lm, [[1, 2, 3]] * 3, decoding=Decoding(NEW))
    for module, program in ((ahead, "generate_tokens"), *((prompts_module, each) for each in PARTS)):
        monkeypatch.setattr(module, program, Noted(getattr(module, program)))
    on_gpu = dataclasses.replace(lm, compiled_for=Target("gpu", "Hopper"))
    monkeypatch.setattr(ahead, "_known", set())
    return compiled, lambda: compile_ahead(on_gpu, batch.sizes, batch.arrivals)


def test_all_programs_but_the_first_are_compiled_when_all_kernels_are(noted, monkeypatch):
    (compiled, begin), kernels = noted, []

    def compile_kernels(lowered, pool, begun):
        return [pool.submit(lambda: (time.sleep(0.2), kernels.append(len(compiled))))]

    monkeypatch.setattr(ahead, "compile_kernels", compile_kernels)
    begin()
    assert compiled[0] is ahead.generate_tokens
    assert len(compiled) == sum(PROGRAMS.values()) and kernels == [1] * len(compiled)


def test_the_other_programs_do_not_wait_for_the_first_one(noted, monkeypatch):
    (compiled, begin), others = noted, threading.Event()

    def compile_first():
        assert others.wait(30)
        compiled.append(ahead.generate_tokens)

    monkeypatch.setattr(ahead, "compile_kernels", lambda *given: [])
    object.__setattr__(ahead.generate_tokens, "compile", compile_first)
    object.__setattr__(prompts_module.end_prompts, "compile", others.set)
    begin()
    assert compiled[-1] is ahead.generate_tokens


def test_an_error_of_the_first_program_waits_for_no_kernel(noted, monkeypatch):
    (compiled, begin), ends = noted, threading.Event()

    def fail():
        raise RuntimeError("no room for it")

    monkeypatch.setattr(ahead, "compile_kernels", lambda lowered, pool, begun: [pool.submit(ends.wait, 60)])
    object.__setattr__(ahead.generate_tokens, "compile", fail)
    try:
        with pytest.raises(RuntimeError, match="no room for it"):
            begin()
        assert not compiled and not ends.is_set()
    finally:
        ends.set()


def test_kernels_of_a_program_that_was_traced_before_are_not_compiled_again(noted, monkeypatch, tmp_path):
    """Then nobody asks whether it was kept; it was compiled when it was traced, or taken from the cache."""
    (compiled, begin), asked = noted, []
    monkeypatch.setattr(ahead, "compile_kernels", lambda *given: asked.append(given) or [])
    monkeypatch.setattr(ahead, "keeping_programs", lambda target: contextlib.nullcontext(Keeping(tmp_path, "cuda")))
    begin()
    assert len(compiled) == sum(PROGRAMS.values()) and not asked

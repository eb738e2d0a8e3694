"""A process takes programs that another one lowered only where all that they follow from is the same."""

import collections
import dataclasses
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf.compilation import without_cache
from jaxbuf.models import decoder
from jaxbuf.models.config import MLP
from jaxbuf.models.known_models import known_models
from jaxbuf.serving import SamplingParams, ahead, kept_programs, loop
from jaxbuf.serving import prompts as prompts_module
from jaxbuf.serving.adaptive import Adaptive
from jaxbuf.serving.drafters import MTP, DraftModel, NGram
from jaxbuf.serving.kept_programs import FOLDER, UnknownPart, describe, keep, keeping_programs
from jaxbuf.serving.own_drafter import Unregistered
from jaxbuf.target import Target
from tests.serving.conftest import PROGRAMS

CPU = Target("cpu")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where programs are kept, for CPUs, too, and in this process, which may be as new as the sources."""
    before = {
        name: getattr(jax.config, name) for name in ("jax_compilation_cache_dir", "jax_compilation_cache_max_size")
    }
    monkeypatch.setattr(kept_programs, "KEPT_FOR", {"cpu"})
    monkeypatch.setattr(kept_programs, "MODULES_LOADED", np.inf)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_compilation_cache_max_size", -1)
    kept_programs._environment.cache_clear()
    new_process(monkeypatch)
    yield tmp_path / FOLDER
    kept_programs._environment.cache_clear()
    for name, value in before.items():
        jax.config.update(name, value)


def new_process(monkeypatch):
    """Forgets what this process traced."""
    monkeypatch.setattr(ahead, "_known", set())
    jax.clear_caches()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*")}


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_a_second_process_generates_the_same_without_tracing_a_step(lm, folder, monkeypatch, drafter, compiled):
    """And compiles, or loads, each program once, as the first one does."""
    sampling, prompts = SamplingParams(temperature=0.8, seed=3, ignore_eos=True), [[1, 2, 3], [4, 5], [1, 2, 3, 1, 2]]

    def tokens():
        return [result.tokens for result in jaxbuf.generate(lm, prompts, 7, sampling, drafter=drafter)]

    with without_cache():
        expected = tokens()
    assert not folder.exists()
    new_process(monkeypatch)
    compiled.clear()
    assert tokens() == expected and compiled == PROGRAMS
    kept = files(folder)
    names = collections.Counter(f"jit({name.split('-')[0]})" for name in kept)
    assert names == PROGRAMS
    new_process(monkeypatch)
    compiled.clear()
    with monkeypatch.context() as patched:
        patched.setattr(loop, "_step", None)
        patched.setattr(decoder, "apply_layer", None)
        patched.setattr(prompts_module, "end_chunk", None)
        assert tokens() == expected and compiled == PROGRAMS
    assert files(folder) == kept

    for path in folder.iterdir():  # half of a file, with the right beginning
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    new_process(monkeypatch)
    assert tokens() == expected and files(folder) == kept


@pytest.mark.slow
def test_programs_are_compiled_once_after_prompts_whose_programs_were_not_kept(lm, folder, compiled):
    """As after a warm-up of one token, which needs no program that decodes."""
    prompts = [[1, 2, 3]] * 3
    jaxbuf.generate(lm, prompts, 1)
    for _ in jaxbuf.generate(lm, prompts, 5, stream=True, segment=1):
        pass
    assert compiled == PROGRAMS


def scaled(x, factor, power=2):
    """The function that is kept here. It counts how often it is traced."""
    traced.append(x.shape)
    return {"out": factor["by"] * x**power}


traced: list[tuple[int, ...]] = []
# As if it were jaxbuf's own.
scaled.__module__ = "jaxbuf.scaled"


@pytest.fixture
def run(folder):
    """Calls the kept function in a new process, as far as tracing goes; returns how often that traced it."""

    def run(*args, target=CPU, like=lambda x, factor, power=2: {"out": x}, **kwargs):
        jax.clear_caches()
        traced.clear()
        jitted = jax.jit(keep(like=like)(scaled), static_argnames="power")
        with keeping_programs(target):
            compiled = jitted.trace(*args, **kwargs).lower().compile()
        dynamic = {name: value for name, value in kwargs.items() if name != "power"}
        x, factor, power = args[0], args[1], kwargs.get("power", 2)
        np.testing.assert_allclose(compiled(*args, **dynamic)["out"], factor["by"] * np.asarray(x) ** power, rtol=1e-6)
        return len(traced)

    return run


X, TWICE = np.arange(1, 4, dtype=np.float32), {"by": np.float32(2)}


def test_what_an_argument_or_a_setting_changes_is_another_program(run, folder):
    assert run(X, TWICE) == 1 and run(X, TWICE) == 0
    assert run(X + 1, {"by": np.float32(3)}) == 0  # numbers are data
    for other in (
        lambda: run(X, TWICE, power=3),
        lambda: run(X[:2], TWICE),
        lambda: run(X.astype(np.int32), {"by": np.int32(2)}),
        lambda: run(X, TWICE | {"other": np.float32(1)}),
    ):
        assert other() == 1 and other() == 0
    with jax.default_matmul_precision("highest"):
        assert run(X, TWICE) == 1 and run(X, TWICE) == 0
    assert run(X, TWICE) == 0 and len(files(folder)) == 6


@pytest.mark.parametrize("changed", ["version", "sources", "device", "ptxas"])
def test_another_environment_is_another_program(run, monkeypatch, changed, tmp_path):
    assert run(X, TWICE) == 1 and run(X, TWICE) == 0
    if changed == "version":
        monkeypatch.setattr(kept_programs.importlib.metadata, "version", lambda name: "0.0.1")
    elif changed == "sources":
        (tmp_path / "sources").mkdir()
        (tmp_path / "sources" / "module.py").write_text("x = 1\n")
        monkeypatch.setattr(kept_programs, "SOURCES", tmp_path / "sources")
    elif changed == "device":
        device = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
        monkeypatch.setattr(jax, "local_devices", lambda **_: [device])
    else:
        monkeypatch.setattr(kept_programs, "ptxas_version", lambda: 91)
    kept_programs._environment.cache_clear()
    assert run(X, TWICE) == 1 and run(X, TWICE) == 0


@pytest.mark.slow
def test_the_time_is_taken_before_any_source_is_read():
    code = "import sys, jaxbuf.models.decoder; print(*[name for name in sys.modules if name.startswith('jaxbuf')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "jaxbuf.imported"


def test_sources_that_changed_under_a_process_keep_nothing(run, folder, monkeypatch, tmp_path):
    """It may run what they were before."""
    (tmp_path / "sources").mkdir()
    monkeypatch.setattr(kept_programs, "SOURCES", tmp_path / "sources")
    assert run(X, TWICE) == 1 and run(X, TWICE) == 1 and not folder.exists()  # no sources
    source = tmp_path / "sources" / "module.py"
    source.write_text("x = 1\n")
    monkeypatch.setattr(kept_programs, "MODULES_LOADED", source.stat().st_ctime)
    assert run(X, TWICE) == 1 and run(X, TWICE) == 1 and not folder.exists()
    monkeypatch.setattr(kept_programs, "MODULES_LOADED", source.stat().st_ctime + 1)
    assert run(X, TWICE) == 1 and run(X, TWICE) == 0


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("jax_compilation_cache_dir", None),
        ("jax_compilation_cache_dir", "gs://bucket/cache"),
        ("jax_compilation_cache_max_size", 2**30),
        ("jax_enable_compilation_cache", False),
    ],
)
def test_nothing_is_kept_without_a_local_cache_that_has_no_limit(run, folder, setting, value):
    before = getattr(jax.config, setting)
    jax.config.update(setting, value)
    try:
        with keeping_programs(CPU):
            assert kept_programs._keeping.get() is None
    finally:
        jax.config.update(setting, before)
    with keeping_programs(CPU) as keeping:
        assert kept_programs._keeping.get() is keeping and (keeping.directory, keeping.platform) == (folder, "cpu")


def test_nothing_is_kept_of_other_platforms_and_outside(run, folder):
    jitted = jax.jit(keep(like=lambda x, factor: {"out": x})(scaled))
    assert jitted(X, TWICE)["out"].shape == (3,) and not folder.exists()
    assert run(X, TWICE, target=Target("tpu", "v6e")) == 1 and not folder.exists()


def test_what_is_not_known_by_name_in_other_processes_is_not_kept(run, folder, monkeypatch):
    class Power(int):
        pass

    assert run(X, TWICE, power=Power(2)) == 1 and run(X, TWICE, power=Power(2)) == 1
    wrong = {"like": lambda x, factor: {"out": x, "more": x}}
    assert run(X, TWICE, **wrong) == 2 and not folder.exists()
    monkeypatch.setattr(scaled, "__module__", "somewhere")
    assert run(X, TWICE) == 1 and not folder.exists()


def test_a_directory_that_can_not_be_written_to_is_told_and_does_no_harm(run, folder, caplog):
    folder.write_text("a file")
    assert run(X, TWICE) == 1 and "can not be written" in caplog.text


def test_descriptions_differ_where_values_do():
    values = [
        *(None, False, 0, 0.0, "0", b"0", (), (0,), [0], {0: 0}, {"0": 0}, frozenset({0}), frozenset({0, 1})),
        *(
            np.float32,
            jnp.float32,
            np.dtype("float32"),
            jnp.dtype("bfloat16"),
            np.float32(0),
            np.float64(0),
            np.zeros(2),
        ),
        *(
            CPU,
            Target("cpu", kernels=False),
            MLP(4),
            MLP(5),
            describe,
            jax.tree.structure((0, 1)),
            jax.tree.structure([0]),
        ),
    ]
    assert len({describe(value) for value in values}) == len(values)
    jitted = jax.jit(describe)  # has its name
    for unknown in (
        lambda: None,
        object(),
        np.array([None]),
        CPU.without_kernels,
        types.SimpleNamespace(),
        files,
        jitted,
    ):
        with pytest.raises(UnknownPart):
            describe(unknown)


@pytest.mark.parametrize("name", known_models())
def test_the_configuration_of_every_known_model_has_a_description(name):
    config = known_models()[name].config
    assert describe(config) != describe(dataclasses.replace(config, vocab_size=config.vocab_size + 1))


def test_drafters_have_descriptions_and_one_that_a_caller_wrote_has_none(lm):
    drafters = NGram(), NGram(branches=2), MTP(), Adaptive(NGram()), Adaptive(NGram(), cost=0.5)
    drafters += DraftModel(lm.model, 4), DraftModel(lm.model, 5)
    assert len({describe(jax.tree.structure(drafter)) for drafter in drafters}) == len(drafters)

    class Own:
        draft_tokens = 4

    with pytest.raises(UnknownPart, match="Own"):
        describe(jax.tree.structure(Unregistered(Own())))


@pytest.mark.slow
def test_descriptions_are_the_same_in_every_process():
    program = """
        from jaxbuf.models.families import config_from_dict
        from jaxbuf.serving.kept_programs import describe
        from tests.serving.conftest import CONFIG
        print(describe((config_from_dict(CONFIG), frozenset(map(str, range(9))))))
    """
    told = set()
    for seed in "12":
        environment = {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", textwrap.dedent(program)]
        root = Path(__file__).parents[2]
        told.add(subprocess.run(command, env=environment, cwd=root, capture_output=True, check=True).stdout)
    assert len(told) == 1 and told != {b""}

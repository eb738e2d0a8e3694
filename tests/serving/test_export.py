"""Exported programs give the tokens of `generate`, without the model's Python, and change their carry in place."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import jaxbuf
from jaxbuf.exported import KERNEL_CALLS, PROGRAMS, donating, program_file
from jaxbuf.models.abstract import abstract_model
from jaxbuf.serving import SamplingParams, generate
from jaxbuf.serving.export import export
from tests.serving.program import check_reused, made_in_loops, written_in_loops

NEW = 40  # crosses several folds at limit 16
SIZES = {"rows": 4, "prompt_tokens": 60, "max_new_tokens": NEW}
SETTINGS = {"plain": {}, "n-grams": {"drafter": "ngram", "draft_tokens": 3}}
RUN = """
import importlib.abc, json, sys

PARTS = "models", "serving", "recurrence", "attention", "memory", "pallas"

class Refused(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(tuple(f"jaxbuf.{part}" for part in PARTS)):
            raise ImportError(f"{name} is not to be imported")

sys.meta_path.insert(0, Refused())
import jaxbuf
exported = jaxbuf.load_exported(sys.argv[1])
print(json.dumps(exported.generate(json.loads(sys.argv[2]), int(sys.argv[3]), stop_ids=[])))
"""


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in ("plain", "n-grams")])
def exported(request, lm, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "model"
    assert export(lm, "cpu", path, **SIZES, **SETTINGS[request.param]) == path
    return request.param, path


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng()
    return [rng.integers(0, 256, n).tolist() for n in (1, 60, 17)]


def test_a_round_trip_gives_the_tokens_of_generate(lm, exported, prompts):
    """In a process that can't import the model's Python, and for greedy and sampled rows in this one."""
    name, path = exported
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    expected = [result.tokens for result in generate(lm, prompts, NEW, greedy, form="buffered", **SETTINGS[name])]
    loaded = jaxbuf.load_exported(path)
    sampling = SamplingParams(temperature=0.8, top_k=20, seed=5, ignore_eos=True)
    drawn = [result.tokens for result in generate(lm, prompts, NEW, sampling, form="buffered", **SETTINGS[name])]
    assert loaded.generate(prompts, NEW, temperature=0.8, top_k=20, seed=5, stop_ids=[]) == drawn
    command = [sys.executable, "-c", RUN, str(path), json.dumps(prompts), str(NEW)]
    cache = {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | cache)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == expected


def test_a_loaded_program_changes_its_carry_in_place(lm, exported):
    """Called within a plain jit, an artefact takes a second carry, which is why the loader donates again."""
    loaded = jaxbuf.load_exported(exported[1])
    shapes = loaded.init_carry()
    artefact = jax.export.deserialize(bytearray((exported[1] / program_file("generate_tokens")).read_bytes()))
    given = loaded._flat(None), list(shapes.values()), [np.int32(3)]
    hlo = donating(artefact).lower(*given).compile().as_text()
    check_reused(hlo, list(shapes.values()))
    assert written_in_loops(hlo, lm.config.spec.state_shape) == []
    assert made_in_loops(hlo, max(x.size for name, x in shapes.items() if name.endswith("keys"))) == []
    plain = jax.jit(lambda *given: artefact.call(*given)).lower(*given).compile().as_text()
    assert "alias" not in plain.splitlines()[0]
    after = loaded.generate_tokens(shapes, 1)
    assert all(x.is_deleted() for x in shapes.values()) and not any(x.is_deleted() for x in after.values())


def test_a_generation_may_go_on_in_slices(exported, prompts):
    loaded = jaxbuf.load_exported(exported[1])
    carry = loaded.admit(loaded.init_carry(), prompts, NEW, stop_ids=[])
    for steps in (1, 7, NEW):
        carry = loaded.generate_tokens(carry, steps)
    begin, end = np.asarray(carry["history.prompt_length"]), np.asarray(carry["history.length"])
    found = [np.asarray(carry["history.tokens"])[row, begin[row] : end[row]].tolist() for row in range(3)]
    assert found == loaded.generate(prompts, NEW, stop_ids=[])


def test_what_was_exported_says_what_it_was_made_for(exported):
    name, path = exported
    manifest = json.loads((path / "exported.json").read_text())
    assert manifest["jax"] == jax.__version__ and manifest["target"] == {"platform": "cpu", "generation": ""}
    settings = jaxbuf.load_exported(path).settings
    assert (settings["rows"], settings["prompt_tokens"], settings["limit"]) == (4, 64, 16)
    assert settings["draft_tokens"] == SETTINGS[name].get("draft_tokens", 0)
    assert {file.name for file in path.iterdir()} == {
        *map(program_file, PROGRAMS),
        *("arrivals.npz", "exported.json", "parameters.safetensors"),
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompts": [[1]] * 5}, "prompts must be 1 to 4, as the programs were made for, got 5"),
        ({"prompts": [[1] * 65]}, "prompts must have 1 to 64 tokens, got one of 65"),
        ({"prompts": [[259]]}, r"prompts must have tokens in \[0, 259\), got 259 to 259"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"temperature": -1.0}, r"temperature must be in \[0.0, inf\], got -1.0"),
        ({"top_q": 1.0}, "top_q must be one of temperature, top_k, top_p, seed, got 1.0"),
        ({"stop_ids": list(range(100))}, r"stop_ids must be at most \d+ tokens, got 100"),
        ({"parameters": {}}, r"parameters must have embed_tokens as float32\[259, 48\], got none"),
    ],
)
def test_what_the_programs_were_not_made_for_is_an_error(exported, given, message):
    loaded = jaxbuf.load_exported(exported[1])
    with pytest.raises(ValueError, match=message):
        loaded.generate(**{"prompts": [[1, 2]], "max_new_tokens": 4} | given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "platform", "named", "kernel"),
    [("v6e", "tpu", "a TPU v6e", None), ("H100", "cuda", "an NVIDIA Hopper GPU", "__cudnn$fmhaSoftmax")],
)
def test_programs_are_exported_for_chips_that_are_not_there_and_without_parameters(
    lm, tmp_path, target, platform, named, kernel
):
    """What is loaded elsewhere than on its target is an error that names both."""
    bare = abstract_model(lm.config, "tiny", target)
    path = export(bare, target, tmp_path / target, **SIZES, parameters=False)
    assert not (path / "parameters.safetensors").exists()
    artefact = jax.export.deserialize(bytearray((path / program_file("admit")).read_bytes()))
    assert artefact.platforms == (platform,)
    assert kernel is None or kernel in artefact.mlir_module()
    with pytest.raises(ValueError, match=f"programs for a CPU, which this process has, got programs for {named}"):
        jaxbuf.load_exported(path)
    export(bare, "cpu", path, **SIZES, parameters=False)  # replaced
    with pytest.raises(FileNotFoundError, match="was exported without its parameters"):
        jaxbuf.load_exported(path).init_carry()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"rows": 0}, ValueError, "rows must be at least 1, got 0"),
        ({"target": "v3"}, ValueError, "target must be a Target or one of"),
        ({"rows": 256, "prompt_tokens": 700}, ValueError, "prompt_tokens must be at most 512 for 256 rows.* got 700"),
        ({"lm": "demo"}, ValueError, "lm must be a LanguageModel"),
        ({"path": "taken"}, FileExistsError, "path must be new or an exported model's directory"),
    ],
)
def test_what_can_not_be_exported_is_an_error(lm, tmp_path, given, error, message):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    given = {"lm": lm, "target": "cpu", "path": "new", **SIZES} | given
    with pytest.raises(error, match=message):
        export(**given | {"path": tmp_path / given["path"]})
    assert not (tmp_path / "new").exists()


def test_a_model_without_numbers_has_no_parameters_to_write(lm, tmp_path):
    with pytest.raises(ValueError, match="parameters must be False for a model whose parameters are shapes alone"):
        export(abstract_model(lm.config, "tiny", "cpu"), "cpu", tmp_path / "new", **SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [True, False])
def test_mosaic_is_imported_with_a_program_that_has_its_kernels(tmp_path, kernels):
    """It tells XLA what to link them with; a process that traced no kernel has not imported it."""

    def calls(x):
        return jax.ffi.ffi_call("mosaic_gpu_v2", x)(x) if kernels else x

    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in KERNEL_CALLS]
    shape = jax.ShapeDtypeStruct((2,), np.float32)
    artefact = jax.export.export(jax.jit(calls), platforms=("cuda",), disabled_checks=checks)(shape)
    (tmp_path / "program").write_bytes(artefact.serialize())
    read = (
        "import pathlib, sys; from jaxbuf.exported import read_program; "
        "read_program(pathlib.Path(sys.argv[1]).read_bytes()); print('jax.experimental.mosaic.gpu.core' in sys.modules)"
    )
    command = [sys.executable, "-c", read, str(tmp_path / "program")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == str(kernels), done.stderr


def test_there_must_be_an_exported_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="path must be the directory of an exported model"):
        jaxbuf.load_exported(tmp_path)

"""The checks of this folder on a Hopper GPU; elsewhere, that they run, and that they see what they look for.

On a machine with a GPU: `JAX_PLATFORMS=cuda,cpu python3 -m pytest tests/gpu`, or `scripts/check_gpu` without pytest.
"""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.models.checked import read_checks
from jaxbuf.models.families import families
from jaxbuf.pallas.dispatch import unserved
from jaxbuf.recurrence import RecurrenceSpec, buffered
from jaxbuf.serving import GenerationResult
from jaxbuf.target import resolve_target
from tests.compiling import flags_for
from tests.gpu import around_checks, checks, layer_checks, mesh_checks, model_checks, prompt_checks, tiny
from tests.gpu.program import pool_sized_writes

NO_HOPPER = unserved("extend", "gpu", resolve_target(None)) is not None
ON_ONE = checks.CHECKS | model_checks.CHECKS | layer_checks.CHECKS | around_checks.CHECKS | prompt_checks.CHECKS
ON_ONE |= tiny.CHECKS
OF_FAMILY = model_checks.OF_FAMILY | mesh_checks.OF_FAMILY


def marked(names):
    """The names as parameters, those of a family's models with the mark of the family."""
    return [
        pytest.param(n, marks=pytest.mark.checks("gpu", family=OF_FAMILY[n]) if n in OF_FAMILY else ()) for n in names
    ]


TINY = RecurrenceSpec(heads=2, key_heads=1, key_dim=8, value_dim=8)


@pytest.mark.skipif(NO_HOPPER, reason="needs an NVIDIA Hopper GPU")
@pytest.mark.parametrize("name", marked(ON_ONE))
def test_on_a_gpu(name, rng):
    ON_ONE[name](rng)


@pytest.mark.skipif(NO_HOPPER or len(jax.devices()) < mesh_checks.DEVICES, reason="needs two NVIDIA Hopper GPUs")
@pytest.mark.parametrize("name", marked(mesh_checks.CHECKS))
def test_on_two_gpus(name, rng):
    mesh_checks.CHECKS[name](rng)


def test_what_a_run_on_a_gpu_wrote_is_noted_as_the_tests_of_the_family(tmp_path, capsys, monkeypatch):
    ran = {"greedy_tokens_of_two_layers_are_those_without_kernels": False, "the_tiny_program_runs": True, "gone": True}
    ran[next(iter(mesh_checks.CHECKS))] = True
    record = {"date": "2026-01-02", "device": "NVIDIA H200", "versions": {"jax": "1"}}
    (tmp_path / "ran.json").write_text(
        json.dumps(record | {"checks": {name: {"holds": holds} for name, holds in ran.items()}})
    )
    scripts = Path(__file__).parent.parent.parent / "scripts"
    monkeypatch.syspath_prepend(scripts)
    note = runpy.run_path(str(scripts / "check_gpu"))["note"]
    assert note([tmp_path / "ran.json"], tmp_path / "checked.json") == 0
    found = {check.function.split("::")[1]: check for check in read_checks(tmp_path / "checked.json")}
    assert {name: check.passed for name, check in found.items()} == {"test_on_a_gpu": False, "test_on_two_gpus": True}
    for check in found.values():
        assert (check.family, check.kind, check.date) == ("qwen3_5", "gpu", "2026-01-02")
        assert check.on == {"jax": "1", "device": "NVIDIA H200"}
    assert "noted 2 checks of families" in capsys.readouterr().out
    assert OF_FAMILY.keys() <= (ON_ONE | mesh_checks.CHECKS).keys() and {*OF_FAMILY.values()} <= families().keys()


def test_the_comparison_with_xla_runs_and_finds_no_error_of_xla(rng):
    found = checks.errors(rng, "bfloat16", spec=TINY, implementation="xla")
    assert set(found.values()) == {0.0}


@pytest.mark.slow
def test_the_checks_of_rejected_drafts_hold_of_xlas_path(rng):
    checks.check_rejected(rng, spec=TINY, implementation="xla")
    checks.check_rejected(rng, time=1, limit=1, spec=TINY, implementation="xla")
    checks.check_rejected_inputs(rng, spec=TINY, implementation="xla")


def test_a_draft_that_leaves_a_trace_is_seen(rng, monkeypatch):
    def commit_all(cache, accepted, *, slots):
        return buffered.commit(cache, cache.cursor.pending[slots], slots=slots)

    monkeypatch.setattr(checks, "commit", jax.jit(commit_all))
    with pytest.raises(AssertionError, match="differs where what is not committed is not finite"):
        checks.check_rejected(rng, spec=TINY, implementation="xla")


def test_vectors_that_threads_copy_arrive_whole_in_the_interpreter(rng):
    around_checks.check_copied_vectors(rng, interpret=True)


def test_an_error_and_a_nan_are_seen():
    expected = np.array([[3.0, 4.0], [0.0, np.nan]])
    np.testing.assert_allclose(checks.worst(expected + np.array([[0.0, 0.05], [0.0, 0.0]]), expected), 0.01, rtol=1e-4)
    with pytest.raises(AssertionError, match="NaN reached"):
        checks.worst(np.nan_to_num(expected), expected)


def test_a_sanitizer_without_a_summary_is_not_taken_for_one_that_found_nothing(tmp_path, monkeypatch, capfd):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        '#!/bin/sh\n[ "$2" = memcheck ] && echo "ERROR SUMMARY: 0 errors"\n[ "$2" = initcheck ] && kill -9 $$\nexit 0\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    scripts = Path(__file__).resolve().parents[2] / "scripts"
    monkeypatch.syspath_prepend(scripts)
    sanitize = runpy.run_path(str(scripts / "check_gpu"))["sanitize"]
    monkeypatch.setattr(subprocess, "run", lambda *_, **settings: None)  # not the tiny program

    assert sanitize(["memcheck"]) == 0
    assert sanitize(["memcheck", "racecheck"]) == 4
    assert capfd.readouterr().out.count("racecheck ended with status 0 and no summary") == 3
    assert sanitize(["initcheck"]) == 9  # a signal ended it
    capfd.readouterr()
    assert sanitize(["memcheck"], jobs=9, part="channels") == 0  # of all parts that one alone
    assert capfd.readouterr().out.count("SUMMARY") == 1


@pytest.mark.slow
def test_the_checks_of_prompts_hold_of_xlas_path(rng):
    prompt_checks.check_chunked(rng, TINY, implementation="xla")
    prompt_checks.check_prefill(rng, TINY, implementation="xla")
    assert prompt_checks.check_long(rng, TINY, 70, implementation="xla")["updates"] == 0


@pytest.mark.exhaustive
def test_the_other_checks_hold_of_xlas_path(rng):
    checks.check_at_once(rng, "bfloat16", spec=TINY, implementation="xla")
    checks.check_long_rings(rng, (checks.LONG[0], checks.MIXED[1]), spec=TINY, implementation="xla", most=9)
    checks.check_long_rings(rng, checks.ALONE[1:], max_pending=1, spec=TINY, implementation="xla", most=9)
    checks.check_poison(rng, spec=TINY, implementation="xla")
    model_checks.check_program(model_checks.two_layers())


@pytest.mark.exhaustive
def test_the_checks_of_generation_and_the_tiny_program_hold_of_xlas_path():
    model_checks.check_tokens(model_checks.two_layers(), tokens=8)
    for form in ("auto", "buffered"):
        model_checks.check_rounding(model_checks.two_layers("bfloat16"), tokens=8, form=form)
    tiny.tiny(implementation="xla")


@pytest.mark.slow
@pytest.mark.skipif(not NO_HOPPER, reason="programs are kept on GPUs")
def test_the_check_of_kept_programs_sees_that_none_was():
    with pytest.raises(AssertionError, match="no program was kept"):
        model_checks.check_kept()


def result(tokens: list[int], tops: list[dict[int, float]]) -> GenerationResult:
    logprobs = [top[token] for token, top in zip(tokens, tops, strict=True)]
    return GenerationResult("", tokens, "length", None, logprobs, tops)


def test_tokens_of_two_devices_may_differ_at_a_tie_alone():
    clear, near = {1: -0.5, 2: -1.5}, {3: -1.0, 4: -1.00005}
    one = result([1, 3, 1], [clear, near, clear])
    tied = result([1, 4, 2], [{1: -0.50001, 2: -1.5}, near, clear])  # behind a tie, the text is another one
    wrong, unlikely = result([2, 3, 1], [clear, near, clear]), result([1, 3, 9], [clear, near, {9: -0.1, 1: -0.1}])
    assert mesh_checks.compare([one, one], [one, one]) == {"same tokens": 6, "ties": 0, "log-probabilities": 0}
    found = mesh_checks.compare([one, one], [one, tied])
    assert found == {"same tokens": 4, "ties": 1, "log-probabilities": pytest.approx(1e-5)}
    with pytest.raises(AssertionError, match=r"prompt 1, token 0: \(1, 2\) differ by 1.0e\+00 on one device"):
        mesh_checks.compare([one, one], [one, wrong])
    with pytest.raises(AssertionError, match="prompt 0, token 2"):
        mesh_checks.compare([one], [unlikely])


@pytest.mark.exhaustive
def test_the_checks_of_two_devices_hold_of_simulated_ones():
    environment = os.environ | {"XLA_FLAGS": flags_for(2), "JAX_PLATFORMS": "cpu", "PYTHONPATH": "."}
    sizes = "hidden=64, ffn=96, vocabulary=64, heads=4, key_heads=2, dim=128, attention_heads=4, kv_heads=2"
    program = f"""
import dataclasses
from jaxbuf.serving.batch import Decoding
from jaxbuf.target import Target
from tests.gpu.mesh_checks import check_tokens, count_kernels, demo, random
check_tokens(random({sizes}, attention_dim=16), "ngram", tokens=24, kernels=False)
check_tokens(demo(), "mtp", tokens=24, kernels=False)
lowered = dataclasses.replace(demo()[1], compiled_for=Target("gpu", "Hopper"))
assert count_kernels(lowered, [[1, 2]] * 4, Decoding(24, form="buffered", drafter="mtp")) > 0
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_loop_that_selects_a_whole_pool_is_found():
    cache = buffered.init(TINY, slots=8, limit=4)

    def step(_, pool):
        return jax.tree.map(lambda x: jnp.where(x > 1, x, x + 1), pool)

    hlo = jax.jit(lambda pool: jax.lax.fori_loop(0, 5, step, pool), donate_argnums=0).lower(cache.pool).compile()
    found = pool_sized_writes(hlo.as_text(), checks.large_arrays(cache.pool))
    assert any("f32[9,2,8,8]" in line for line in found)


ALIASED = "custom-call(%a, %b), output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {})}"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (f'%x = (f32[2], f32[9,4], bf16[8,8]) {ALIASED}, custom_call_target="mosaic_gpu_v2"', 0),
        ('%x = (f32[2], f32[9,4], bf16[8,8]) custom-call(%a, %b), custom_call_target="mosaic_gpu_v2"', 1),
        ("%x = f32[9,4]{1,0} copy(%a)", 1),
        ("%x = f32[36]{0} copy(%a)", 1),
        ("%x = (f32[9,4], f32[9,4], u32[]) copy-start(%a)", 1),
        ("%x = bf16[9,4]{1,0} copy(%a)", 0),
        ("%x = f32[9,4]{1,0} fusion(%a), kind=kLoop, calls=%fused_add", 1),
        ("%x = f32[9,4]{1,0} fusion(%a), kind=kLoop, calls=%fused_update", 0),
        ("%x = f32[9,4]{1,0} scatter(%a, %b, %c), to_apply=%other", 0),
    ],
)
def test_what_counts_as_a_write_of_a_pool(line, found):
    program = f"""HloModule jit_step
%fused_add (p: f32[9,4]) -> f32[9,4] {{
  %p = f32[9,4]{{1,0}} parameter(0)
  ROOT %add = f32[9,4]{{1,0}} add(%p, %p)
}}
%fused_update (p: f32[9,4]) -> f32[9,4] {{
  %p = f32[9,4]{{1,0}} parameter(0)
  %s = f32[1,4]{{1,0}} slice(%p)
  %u = f32[9,4]{{1,0}} dynamic-update-slice(%p, %s, %i)
  ROOT %bitcast = f32[9,4]{{1,0}} bitcast(%u)
}}
ENTRY %main (a: f32[9,4]) -> f32[9,4] {{
  %a = f32[9,4]{{1,0}} parameter(0)
  {line}
}}
"""
    pools = jax.ShapeDtypeStruct((9, 4), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
    assert len(pool_sized_writes(program, pools)) == found

"""`jaxbuf bench step`: what it runs, counts and says; the figures themselves need a GPU."""

import argparse
import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxbuf.bench import random_model, step, step_carry, step_figures, step_parts, step_run
from jaxbuf.models.config import RECURRENCE
from jaxbuf.models.decoder import Decoder
from jaxbuf.models.known_models import find_known, known_models
from jaxbuf.models.layers import named_parameters, replace_parameters
from jaxbuf.recurrence import RecurrenceSpec
from jaxbuf.serving.carry import EMPTY, RUNNING
from jaxbuf.serving.profiling import Operation
from tests.compiling import flags_for
from tests.models.known import each_known_model

SIZES = {"layers": 2, "hidden": 32, "ffn": 40, "vocabulary": 64, "heads": 2, "key_heads": 1, "dim": 8}
SIZES |= {"attention_heads": 2, "kv_heads": 1, "attention_dim": 8}
SHAPE = [word for name, size in SIZES.items() for word in ("--" + name.replace("_", "-"), str(size))]
SMALL = ["--batches", "3", "--context", "21", "--steps", "5", "--limit", "4", "--dtype", "float32", *SHAPE]


@pytest.fixture(scope="module")
def made():
    """The options, the model and its first carry."""
    options = step.parse(SMALL)
    lm = step.make_model(options)
    return options, lm, step_carry.make_carry(lm, step_carry.make_batch(lm, 3, "buffered", options))


@pytest.fixture(scope="module")
def measured(made, tmp_path_factory):
    path = tmp_path_factory.mktemp("step") / "step.json"
    _, lm, carry = made
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "make_model", lambda options, devices: lm)
        patch.setattr(step, "make_carry", lambda lm, asked: jax.tree.map(jnp.copy, carry))
        assert step.main([*SMALL, "--json", str(path)]) == 0
    return path


@pytest.mark.slow
def test_a_run_keeps_its_figures_and_a_plot(measured):
    record = json.loads(measured.read_text())
    assert record["script"] == "scripts/bench_step" and record["read_bytes_per_s"] > 0 and record["steps"] == 8
    assert measured.with_suffix(".png").is_file()
    assert record["command_buffers"] | {"xla_flags": []} == {
        "asked": "default",
        "compiler_options": {},
        "xla_flags": [],
        "on": False,
        "in_traces": False,
    }
    assert [(row["form"], row["batch"], row["limit"]) for row in record["figures"]] == [
        ("recurrent", 3, 1),
        ("buffered", 3, 4),
    ]
    for row in record["figures"]:
        assert row["ms"] > 0 and row["device_ms"] > 0 and row["recurrence"]["us"] > 0
        np.testing.assert_allclose(row["tokens_per_s"], 3000 / row["ms"])
        np.testing.assert_allclose(sum(row["parts_ms"].values()), row["device_ms"])
        assert {"recurrence", "convolution", "projections", "attention", "mlp", "head"} <= set(row["parts_ms"])
        np.testing.assert_allclose(row["floor_ms"], 1e3 * sum(row["bytes"].values()) / record["read_bytes_per_s"])
    one, other = (row["ms"] for row in record["figures"])
    assert record["ratios"] == [{"devices": 1, "batch": 3, "drafts": 0, "buffered_over_recurrent": one / other}]
    assert record["devices"] == [1] and record["device_ratios"] == []


@pytest.mark.slow
def test_the_rows_fold_in_whole_cycles(measured):
    assert [row["folds"] for row in json.loads(measured.read_text())["figures"]] == [1.0, 0.25]


@pytest.mark.slow
def test_the_bytes_are_those_counted_by_hand(measured):
    weights = 4 * sum(leaf.size for leaf in jax.tree.leaves(shapes()))
    state, entry = 4 * 2 * 8 * 8, 4 * (8 + 2 * 8) + 4 * 2
    for row, (folds, live) in zip(json.loads(measured.read_text())["figures"], ((1, 1), (0.25, 2.5)), strict=True):
        found = row["bytes"]
        assert found["weights"] == weights
        np.testing.assert_allclose(found["checkpoints"], 3 * state * (1 + folds))
        np.testing.assert_allclose(found["entries"], 3 * entry * (live + 1))
        held = [21 + i + 2 for i in range(8)]  # those before, its own, and the append
        np.testing.assert_allclose(found["keys and values"], 3 * 4 * 2 * 8 * np.mean(held))


@pytest.mark.slow
def test_steps_that_verify_drafts_keep_as_many_as_they_should_and_fold_in_whole_cycles(made):
    options, lm, _ = made
    options = argparse.Namespace(**vars(options) | {"limit": 8})
    tokens, lm = step_carry.Tokens(drafts=3, accepted=2), random_model.repeating_model(lm)
    asked = step_carry.make_batch(lm, 3, "buffered", options, tokens)
    carry = step_carry.make_carry(lm, asked)
    first = step_carry.first_carry(step_carry.small_arrays(carry), "buffered", options, tokens)
    program, _, _ = step_run.compile_steps(lm, carry, "default", asked.drafter)
    row, _ = step_run.measure(program, lm, "buffered", carry, first, options, tokens, asked.drafter)
    assert (row["drafts"], row["accepted"], row["batch"], row["steps"]) == (3, 2, 3, 9)  # 4 tokens read of up to 8
    np.testing.assert_allclose(row["tokens_per_s"], 6000 / row["ms"])
    np.testing.assert_allclose(row["folds"], 1 / 3)
    assert row["vectors"] == 4 * 4 and row["products_ms"].keys() <= row["parts_ms"].keys()
    assert all(row["products_ms"][scope] <= ms for scope, ms in row["parts_ms"].items() if scope in row["products_ms"])
    assert {(each["out"], each["in"]) for each in row["products"]} >= {(64, 32), (40, 32), (32, 40)}
    np.testing.assert_allclose(sum(step_parts.parts(row).values()), row["device_ms"])
    state, entry = 4 * 2 * 8 * 8, 4 * (8 + 2 * 8) + 4 * 2
    np.testing.assert_allclose(row["bytes"]["checkpoints"], 3 * state * (1 + 1 / 3))
    np.testing.assert_allclose(row["bytes"]["entries"], 3 * entry * (2 * (1 + 2 + 3) / 3 + 4))
    held = [21 + 2 * i + 2 * 4 for i in range(9)]
    np.testing.assert_allclose(row["bytes"]["keys and values"], 3 * 4 * 2 * 8 * np.mean(held))
    with pytest.raises(ValueError, match="0 of 3 in each of 27 steps of rows, got 27 of 81 kept"):
        counted = carry.speculation
        assert counted is not None
        counted = dataclasses.replace(counted, drafted=np.array([81]), accepted=np.array([27]))
        step_run.check_drafts(dataclasses.replace(first, speculation=counted), 27, step_carry.Tokens(3, 1))


@pytest.mark.exhaustive
def test_a_model_without_recurrent_layers_has_one_form_and_its_head_may_be_a_table_of_its_own(tmp_path, monkeypatch):
    sizes = "--layers 1 --hidden 32 --ffn 40 --vocabulary 64 --attention-heads 2 --kv-heads 1 --attention-dim 8".split()
    words = "--batches 1 --context 9 --steps 4 --limit 4 --dtype float32 --drafts 1 --accepted 2 --peers".split()
    torch = [{"vectors": number, "out": 64, "in": 32, "count": 3, "us": 2e3} for number in (1, 2)]
    asked = []
    monkeypatch.setattr(step, "bandwidths", lambda: {"read_bytes_per_s": 1e10, "copy_bytes_per_s": 1e10})
    monkeypatch.setattr(step, "measure_torch", lambda what, cases: asked.extend(cases) or torch)
    path = tmp_path / "step.json"
    assert step.main([*words, *sizes, "--shape", "llama-3.1-8b", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    plain, drafted = record["figures"]
    assert plain["form"] == drafted["form"] == "buffered" and (plain["drafts"], drafted["drafts"]) == (0, 1)
    assert plain["floors_ms"].keys() == {"matrix products", "attention"}
    assert plain["torch_ms"] == drafted["torch_ms"] == 6.0
    assert [case[0] for case in asked] == [1, 2] and [40, 32, 2] in asked[0][1] and asked[0][2] == "float32"
    (ratio,) = record["draft_ratios"]
    np.testing.assert_allclose(ratio["over_plain"], drafted["ms"] / plain["ms"])
    assert (ratio["drafts"], ratio["accepted"]) == (1, 2) and record["model"]["config"]["model_type"] == "llama"


@pytest.mark.exhaustive
def test_two_devices_have_half_of_what_one_moves(tmp_path):
    path = tmp_path / "step.json"
    environment = os.environ | {"XLA_FLAGS": flags_for(2), "JAX_PLATFORMS": "cpu", "PYTHONPATH": ".", "COLUMNS": "200"}
    words = [str(path), *SMALL, "--forms", "buffered", "--heads", "4", "--key-heads", "2", "--kv-heads", "2"]
    command = [sys.executable, "tests/bench/two_devices.py", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads(path.read_text())
    one, both = record["figures"]
    assert (record["devices"], one["devices"], both["devices"]) == ([1, 2], 1, 2)
    for row in (one, both):
        assert row["ms"] > 0 and row["recurrence"]["us"] > 0 and row["folds"] == 0.25
        np.testing.assert_allclose(sum(row["parts_ms"].values()), row["device_ms"])
    assert one["exchange_ms"] == 0 and 0 < both["exchange_ms"] < both["device_ms"]
    for name in ("checkpoints", "entries", "keys and values"):
        assert both["bytes"][name] == one["bytes"][name] / 2
    halves = both["bytes"]["weights"] / one["bytes"]["weights"], both["model_bytes"] / one["model_bytes"]
    assert all(0.5 < half < 0.55 for half in halves)  # both have the norms
    assert 0.4 < both["operations"] / one["operations"] < 2  # those of one device
    ratio = {
        "form": "buffered",
        "batch": 3,
        "drafts": 0,
        "devices": 2,
        "fewest": 1,
        "times_faster": one["ms"] / both["ms"],
    }
    assert record["device_ratios"] == [ratio]
    assert "random in float32, on 1 device and on 2 devices" in done.stdout
    assert "buffered, batch 3: 2 devices over 1" in done.stdout


@pytest.mark.exhaustive
def test_two_devices_along_the_axis_of_experts_share_only_these(tmp_path):
    path = tmp_path / "step.json"
    environment = os.environ | {"XLA_FLAGS": flags_for(2), "JAX_PLATFORMS": "cpu", "PYTHONPATH": ".", "COLUMNS": "200"}
    sizes = "--model Qwen3-30B-A3B --layers 1 --hidden 32 --ffn 48 --vocabulary 64 --attention-heads 2 --kv-heads 1"
    sizes += " --attention-dim 8 --experts 4 --chosen 2 --expert-ffn 64 --dtype float32 --expert-devices 2"
    words = [*sizes.split(), "--batches", "2", "--context", "16", "--steps", "4", "--forms", "buffered"]
    command = [sys.executable, "tests/bench/two_devices.py", str(path), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads(path.read_text())
    one, both = record["figures"]
    assert [(row["devices"], row["expert_devices"]) for row in (one, both)] == [(1, 1), (2, 2)]
    assert both["bytes"]["keys and values"] == one["bytes"]["keys and values"]
    experts = 4 * 3 * 64 * 32 * 4
    assert one["model_bytes"] - both["model_bytes"] == experts / 2


def shapes() -> Decoder:
    config = random_model.configuration(**SIZES)
    return jax.eval_shape(lambda: random_model.random_model(config, jnp.dtype("float32")).model)


def test_the_shape_of_the_random_model_is_that_of_qwen3_5_4b():
    config = random_model.configuration()
    kinds = config.source.layer_types
    assert kinds.count("linear_attention") == 24 and kinds[3::4] == ("full_attention",) * 8
    assert gigabytes(config) == 8.41


@pytest.mark.slow
@pytest.mark.parametrize("name", each_known_model())
def test_every_known_model_can_be_asked_for_and_made_smaller(name):
    options = step.parse(["--model", name.lower(), "--layers", "4", "--batches", "1"])
    assert (options.model, find_known(options.shape)) == ("random", known_models()[name])
    found, full = random_model.configuration(options.shape, **options.sizes), known_models()[name].config
    assert found.mtp is None and len(found.layers) == 4 and found.hidden_size == full.hidden_size
    assert {*found.layers} <= {*full.layers} and bool(found.specs) == bool(full.specs)
    assert bool(found.kv_numbers) == bool(full.kv_numbers)
    most = random_model.configuration(options.shape)
    assert gigabytes(most) == gigabytes(dataclasses.replace(full, mtp=None))


def test_a_known_model_may_be_named_twice_and_not_two_of_them(capsys, tmp_path, monkeypatch):
    assert step.parse(["--model", "mamba2-2.7b", "--shape", "Mamba-2-2.7B", "--layers", "1"]).shape == "Mamba-2-2.7B"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen3-8B").mkdir()
    assert step.parse(["--model", "Qwen3-8B"]).model == "Qwen3-8B"  # a directory is that of a checkpoint
    for words, message in (
        (
            ["--model", "Llama-3.1-8B", "--shape", "Qwen3-30B-A3B"],
            "--shape must be left out or name the same as --model",
        ),
        (["--shape", "gpt"], "--shape must be the name of a known model (Qwen3-Next-80B-A3B, "),
        (["--model", "Qwen3-30B-A3B"], "a random model of full size needs a GPU"),
        (["--model", "Llama-3.1-8B", "--dim", "8"], "--model Llama-3.1-8B: dim must not be given"),
        (
            ["--shape", "Granite-4.0-Micro", "--heads", "8"],
            "heads must not be given for Granite-4.0-Micro, which has none",
        ),
        (["--model", "Qwen3-30B-A3B", "--experts", "4"], "--model Qwen3-30B-A3B: chosen must be in [1, 4]"),
    ):
        with pytest.raises(SystemExit):
            step.parse(words)
        assert message in capsys.readouterr().err


def test_of_fewer_layers_a_model_has_the_first_and_one_of_each_kind():
    kinds = [random_model.configuration("Nemotron-H-8B", layers=n).source.layers_block_type for n in (2, 3, 4, 8)]
    mamba, mlp, attention = "linear_attention", "mlp", "full_attention"
    assert kinds == [
        (mamba, attention),
        (mamba, mlp, attention),
        (mamba, mlp, mamba, attention),
        (*[mamba, mlp] * 3, mamba, attention),
    ]
    assert random_model.configuration(layers=40).source.layer_types[3::4] == (attention,) * 10


EXPERTS = {"layers": 2, "hidden": 32, "vocabulary": 64, "heads": 2, "key_heads": 1, "dim": 8, "attention_heads": 2}
EXPERTS |= {"kv_heads": 1, "attention_dim": 8, "experts": 8, "chosen": 2, "expert_ffn": 16}


def test_the_bytes_of_experts_are_those_of_as_many_as_are_touched(rng):
    config = random_model.configuration("Qwen3.5-35B-A3B", **EXPERTS)
    lm = random_model.random_model(config, jnp.dtype("float32"))
    known = step_parts.matrices(lm)
    assert {shape: count for shape, count in known.items() if len(shape) == 3} == {(8, 2 * 16, 32): 2, (8, 32, 16): 2}
    assert known[64, 32] == 1  # the head, and not the embedding
    routed = 4 * 2 * 8 * 3 * 16 * 32
    every = 4 * sum(p[...].size for name, p in named_parameters(lm.model).items() if name != "embed_tokens")
    assert step_parts.weight_bytes(lm) == every
    for tokens, touched in ((1, 2.0), (2, 8 * (1 - 0.75**2)), (1000, 8.0)):
        np.testing.assert_allclose(step_parts.weight_bytes(lm, tokens), every - routed * (1 - touched / 8))
    draws = [len({*np.concatenate([rng.permutation(8)[:2] for _ in range(3)])}) for _ in range(4000)]
    router = config.layers[0].feed_forward.router
    np.testing.assert_allclose(np.mean(draws), 8 * step_parts.share_touched(router, 3), rtol=0.03)


def test_products_with_the_matrices_of_experts_are_known_by_all_of_them():
    known = {(8, 32, 16): 2, (16, 32): 1}
    ran = [product("mlp", (12, 16), (8, 32, 16), (8,)), product("mlp", (12, 32), (8, 16, 32), (8,), us=5.0)]
    found = step_parts.products([*ran, product("mlp", (4, 16), (16, 32))], known, 4, 1)
    assert found["products_ms"] == pytest.approx({"mlp": 0.025})
    assert {"out": 32, "in": 16, "count": 2, "us": 7.5, "experts": 8} in found["products"]


@pytest.mark.slow
def test_a_run_of_a_model_with_experts_counts_those_that_are_touched(tmp_path):
    sizes = [word for name, size in EXPERTS.items() for word in ("--" + name.replace("_", "-"), str(size))]
    words = (
        "--model Qwen3.5-35B-A3B --batches 3 --context 9 --steps 4 --limit 4 --dtype float32 --forms buffered --peers"
    )
    path = tmp_path / "step.json"
    assert step.main([*words.split(), *sizes, "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    (row,) = record["figures"]
    assert record["torch"] == [] and row["torch_ms"] is None
    lm = random_model.random_model(random_model.configuration("Qwen3.5-35B-A3B", **EXPERTS), jnp.dtype("float32"))
    np.testing.assert_allclose(row["bytes"]["weights"], step_parts.weight_bytes(lm, 3))
    assert row["all_experts_bytes"] == step_parts.weight_bytes(lm) > row["bytes"]["weights"]


def gigabytes(config) -> float:
    model = jax.eval_shape(lambda: random_model.random_model(config, jnp.dtype("bfloat16")).model)
    return round(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(model)) / 1e9, 2)


def test_other_sizes_of_a_shape_are_those_of_its_own_layers():
    mamba = random_model.configuration("mamba2-2.7b", layers=2, hidden=24, heads=4, key_heads=2, dim=8)
    assert mamba.spec == RecurrenceSpec(4, 2, 8, 8, decay="head", delta=False) and len(mamba.layers) == 2
    llama = random_model.configuration("llama-3.1-8b", attention_heads=4, kv_heads=2, attention_dim=8)
    assert llama.kv_numbers == 32 * 2 * 2 * 8 and llama.spec is None
    for shape, size in (("llama-3.1-8b", "dim"), ("mamba2-2.7b", "attention_dim"), ("qwen3-8b", "key_heads")):
        with pytest.raises(ValueError, match=f"{size} must not be given for {shape}, which has none, got 8"):
            random_model.configuration(shape, **{size: 8})


def test_the_random_model_has_the_parameters_of_the_architecture_each_its_own():
    config, dtype = random_model.configuration(**(SIZES | {"layers": 12})), jnp.dtype("bfloat16")
    model = random_model.random_model(config, dtype).model
    wanted = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype))
    for parameter, shape in zip(jax.tree.leaves(model), jax.tree.leaves(wanted), strict=True):
        assert (parameter.shape, parameter.dtype) == (shape.shape, shape.dtype)
    found = named_parameters(model)
    assert found["layers.0.mixers.0.A_log"][...].dtype == jnp.float32
    values = [np.asarray(found[f"layers.{n}.mlp.up_proj"][...], np.float32) for n in range(12)]
    assert len({value.tobytes() for value in values}) == 12
    assert all(0.015 < value.std() < 0.025 for value in values)


@pytest.mark.slow
def test_every_run_of_a_form_starts_alike_and_its_rows_are_staggered(made):
    options, _, carry = made
    first = step_carry.first_carry(step_carry.small_arrays(carry), "buffered", options)
    cursor = first.cache.shared[RECURRENCE].cursor
    assert first.cache.sequences.committed.tolist() == [0, 21, 21, 21, 0]
    assert cursor.length.tolist() == [0, 2, 3, 4, 0] and cursor.limit.tolist() == [1, 4, 4, 4, 1]
    assert (cursor.folded + cursor.length).tolist() == [0, 21, 21, 21, 0]
    assert first.state.tolist() == [RUNNING] * 3 + [EMPTY]
    again = step_carry.restart(carry, first)
    assert jax.tree.structure(again) == jax.tree.structure(carry)
    for found, held in zip(again.cache.layers, carry.cache.layers, strict=True):
        assert all(x is y for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(held), strict=True))
    memory = jax.tree.leaves(carry.cache.layers)
    assert all(np.isfinite(x).all() and np.asarray(x).std() > 0 for x in memory)
    assert (np.asarray(carry.cache.layers[0].pool.gates) <= 0).all()


def operation(scope: str, name: str, us: float) -> Operation:
    return Operation("generate_tokens", scope, name, 1e-6 * us)


def test_the_kernel_is_counted_by_its_mean_and_the_parts_by_all_their_operations():
    step_of_two_layers = [
        operation("recurrence", "body_mosaic_gpu_kernel", 90.0),
        operation("recurrence", "body_mosaic_gpu_kernel", 110.0),
        operation("recurrence", "fusion_3", 20.0),
        operation("mlp", "nvjet", 300.0),
    ]
    lost_one = [*step_of_two_layers, *step_of_two_layers[1:]]
    found = step_parts.split(step_of_two_layers * 2, 2, 2)
    np.testing.assert_allclose(found["device_ms"], 0.52)
    np.testing.assert_allclose([found["parts_ms"][name] for name in ("mlp", "recurrence")], [0.3, 0.22])
    kernel = {"kernel": "body_mosaic_gpu_kernel", "launches": 1.0, "us": 100.0, "share": 0.2 / 0.52}
    assert found["recurrence"] == pytest.approx(kernel)
    assert step_parts.split(lost_one, 2, 2)["recurrence"]["us"] == pytest.approx(310 / 3)
    by_xla = step_parts.split([operation("recurrence", "fusion_3", 20.0)] * 4, 2, 2)["recurrence"]
    assert by_xla == {"kernel": None, "launches": 0.0, "us": pytest.approx(20.0), "share": pytest.approx(1.0)}


@pytest.mark.slow
def test_the_kernels_time_is_compared_with_that_of_the_kernels_benchmark(capsys, measured):
    figures = [
        {"part": part, "batch": 3, "limit": limit, "us": us, "phase": "staggered"}
        for part, limit, us in (("recurrent", 1, 100.0), ("decode", 4, 50.0), ("decode", 16, 1.0))
    ]
    record = json.loads(measured.read_text())
    for row, us in zip(record["figures"], (105.0, 60.0), strict=True):
        row["kernel_us"] = step.kernel_figure(figures, row)
        row["recurrence"]["us"] = us
    step_figures.show(step.Console(width=200), record["figures"], record)
    out = capsys.readouterr().out
    assert "recurrent, batch 3: agrees within 10%: 105.0 us a layer, 100.0 in jaxbuf bench kernels (+5.0%)" in out
    assert "buffered, batch 3: DOES NOT AGREE within 10%" in out
    assert "command buffers off in the timed runs" in out and "the prompts were not read" in out


def product(scope: str, *reads: tuple[int, ...], multiplies: bool = True, sources=None, us: float = 10.0) -> Operation:
    return Operation("generate_tokens", scope, "a", 1e-6 * us, multiplies, reads, sources or reads)


def test_matrix_products_are_known_by_the_matrices_that_they_read():
    known = {(64, 32): 1, (40, 32): 2, (32, 40): 1, (4, 32): 2}
    ran = [
        product("head", (4, 32), (64, 32)),  # the vectors have the shape of a small matrix
        product("other", (4, 1, 32), (40, 32)),  # XLA lost its name
        product("mlp", (4, 40), (40, 32)),  # [out, in] the other way round
        product("mlp", (32, 4, 10), (4, 10), sources=((32, 40), (40,)), multiplies=False, us=20.0),
        product("projections", (4, 32), (4, 32), us=6.0),  # with it
        product("projections", (4, 24), (24, 7)),  # with a part of a matrix
        product("projections", (40, 32), (64, 32), us=26.0),  # with two in one
        product("attention", (4, 2, 8), (4, 9, 2, 8)),
        product("mlp", (4, 32), (4, 32), multiplies=False),  # adds vectors
        product("embedding", (64, 32), (4,), multiplies=False),
    ]
    found = step_parts.products(ran, known, 4, 1)
    assert found["products_ms"] == pytest.approx({"head": 0.01, "other": 0.01, "mlp": 0.03, "projections": 0.042})
    us = {(each["out"], each["in"]): each["us"] * each["count"] for each in found["products"]}
    assert us == pytest.approx({(64, 32): 26.0, (40, 32): 30.0, (32, 40): 20.0, (4, 32): 6.0, (0, 0): 10.0})


def test_parts_are_what_matrix_products_leave_of_them():
    row = {"parts_ms": {"mlp": 3.0, "head": 1.0, "attention": 0.5}, "products_ms": {"mlp": 2.5, "head": 1.0}}
    assert step_parts.parts(row) == {"matrix products": 3.5, "mlp": 0.5, "attention": 0.5}
    moved = {"weights": 8e9, "checkpoints": 4e9, "entries": 1e9, "keys and values": 0.0}
    assert step_parts.floors(moved, 4e12) == {"matrix products": 2.0, "recurrence": 1.25}


def test_the_model_that_repeats_its_newest_token_does():
    lm = random_model.random_model(random_model.configuration(**SIZES), jnp.dtype("float32"))
    values = [p[...] * (40 if name.endswith("_proj") else 1) for name, p in named_parameters(lm.model).items()]
    lm = lm.replace(model=replace_parameters(lm.model, values))  # in so small a model the layers add little
    tokens = np.arange(8, dtype=np.int32)[None] * 7 % 64
    assert (np.argmax(lm.logits(tokens), axis=-1) != tokens).any()
    assert np.argmax(random_model.repeating_model(lm).logits(tokens), axis=-1).tolist() == tokens.tolist()


def test_devices_that_experts_can_not_share_are_an_error(monkeypatch, capsys):
    monkeypatch.setattr(jax, "devices", lambda *given: [None] * 4)
    with pytest.raises(SystemExit):
        step.parse(["--model", "demo", "--devices", "1,3", "--expert-devices", "2"])
    assert "--devices must be multiples of --expert-devices (2), got 3" in capsys.readouterr().err


def test_a_run_that_could_not_end_ends_before_it_begins(tmp_path, capsys):
    for words, message in (
        ([], "a random model of full size needs a GPU, this is a cpu"),
        (
            ["--model", "demo", "--devices", "1,999"],
            f"--devices must be at most {len(jax.devices())}, the devices that",
        ),
        (
            ["--model", "demo", "--devices", "1", "--expert-devices", "2"],
            "--expert-devices must be at most 1, --devices, got 2",
        ),
        (["--model", "demo", "--kernels", str(tmp_path / "none.json")], "--kernels must be the JSON of jaxbuf bench"),
        (["--model", "demo", "--drafts", "4", "--accepted", "6"], "--accepted must be at most 5, 1 + --drafts, got 6"),
        (["--model", "demo", "--drafts", "15", "--limit", "15"], "--drafts must be below --limit (15), got 15"),
        (["--shape", "llama-3.1-8b", "--dim", "8"], "--shape llama-3.1-8b: dim must not be given"),
    ):
        with pytest.raises(SystemExit):
            step.parse(words)
        assert message in capsys.readouterr().err

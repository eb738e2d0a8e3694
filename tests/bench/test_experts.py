"""`jaxbuf bench experts`: what it runs, counts and says; the figures themselves need a GPU."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxbuf.bench import expert_candidates, expert_figures, experts

SMALL = "--shapes qwen3.5-35b-a3b --hidden 16 --experts 8 --chosen 2 --size 12 --dtype float32 --layers 2".split()
CASE = experts.Case(16, 8, 2, 12, 5, "float32", "xla")


def test_bytes_and_operations_are_those_of_the_experts_that_were_drawn():
    case = experts.Case(2048, 256, 8, 512, 128, "bfloat16", "gpu")
    row = expert_figures.add_floor({"distinct": 200.5, "us": 500.0}, case, 4e12, 8e14)
    weights = 200.5 * (2 * 512 * 2048 + 2048 * 512) * 2
    assert row["bytes"] == weights + 256 * 2048 * 2 + 2 * 128 * 2048 * 2
    assert row["operations"] == 2 * 128 * (8 * 3 * 512 * 2048 + 256 * 2048)
    np.testing.assert_allclose(row["floor_us"], row["bytes"] / 4e6)
    np.testing.assert_allclose(row["over_floor"], 500 / row["floor_us"])
    many = experts.Case(2048, 256, 8, 512, 4096, "bfloat16", "gpu")
    row = expert_figures.add_floor({"distinct": 256.0, "us": 500.0}, many, 4e12, 2e14)
    np.testing.assert_allclose(row["floor_us"], row["operations"] / 2e8)


def test_the_usual_cases_are_those_of_two_models():
    options = experts.parse([])
    assert options.implementations == ["xla", "gather"]  # the others are for GPUs
    cases = experts.plan(options)
    assert {(case.hidden, case.experts, case.chosen, case.size) for case in cases} == set(experts.SHAPES.values())
    assert [case.tokens for case in cases[:8:2]] == [1, 32, 128, 4096] and len(cases) == 16
    for case in cases:
        touched = min(case.experts, case.tokens * case.chosen) * case.expert_bytes
        assert case.layers * touched > 2 * 60e6 and case.layers * case.experts * case.expert_bytes < 20e9


def test_the_distinct_experts_are_those_of_the_routing(rng):
    layer = experts.make_layer(CASE, jax.random.key(int(rng.integers(2**31))))
    logits = np.asarray(layer.x, np.float64) @ np.asarray(layer.router, np.float64).T
    known = set(np.argsort(-logits, axis=1)[:, :2].ravel().tolist())
    assert int(experts.distinct(CASE, layer)) == len(known)


def test_gathering_is_the_mixture_and_is_refused_where_it_takes_too_much(rng, monkeypatch):
    layer = experts.make_layer(CASE, jax.random.key(int(rng.integers(2**31))))
    chosen, weights = experts.route(CASE, layer)
    arrays = layer.x, layer.first, layer.second, chosen, weights
    known = expert_candidates.mixture_by("xla", *arrays)
    np.testing.assert_allclose(expert_candidates.mixture_by("gather", *arrays), known, atol=1e-5)
    monkeypatch.setattr(expert_candidates, "MOST_GATHERED", 1000)
    with pytest.raises(ValueError, match="GB of matrices would be gathered"):
        expert_candidates.gather(*arrays)


def test_the_librarys_kernel_lowers_for_few_experts():
    shapes = (64, 128), (4, 256, 128), (4, 128, 128)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    arrays += [jax.ShapeDtypeStruct((64, 2), dtype) for dtype in (jnp.int32, jnp.float32)]
    traced = jax.jit(expert_candidates.library).trace(*arrays)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shapes", "llama"], "--shapes must be of qwen3.5-35b-a3b, qwen3-next-80b-a3b, separated by commas, got"),
        (["--implementations", "xla,fast"], "--implementations must be of xla, xla-fusion, "),
        (["--implementations", "gpu"], "of those that run here, xla, gather, got gpu on a cpu"),
        ([*SMALL, "--chosen", "9"], "--chosen must be at most 8, the number of experts, got 9"),
    ],
)
def test_what_cannot_be_measured_is_an_error_before_anything_runs(words, message, capsys):
    with pytest.raises(SystemExit):
        experts.parse(words)
    assert message in capsys.readouterr().err


def test_a_small_run_keeps_its_figures_and_a_plot(tmp_path, capsys, monkeypatch):
    """One implementation can't run, which the others' figures survive."""

    def broken(*_):
        raise ValueError("no such matrices\nof any kind")

    path = tmp_path / "experts.json"
    monkeypatch.setitem(expert_candidates.CANDIDATES, "gather", broken)
    monkeypatch.setattr(experts, "bandwidths", lambda: {"read_bytes_per_s": 1e10})
    monkeypatch.setattr(experts, "product_rate", lambda dtype: 1e12)
    assert experts.main([*SMALL, "--tokens", "5", "--steps", "1", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["script"] == "scripts/bench_experts" and record["left_out"] == []
    row, other = record["figures"]
    assert row["us"] == row["wall_us"] > 0 and row["device_us"] is None and row["layers"] == 2
    assert 2 <= row["distinct"] <= 8 and row["bytes"] == row["distinct"] * 3 * 16 * 12 * 4 + (8 + 10) * 16 * 4
    np.testing.assert_allclose(row["floor_us"], 1e6 * row["bytes"] / 1e10)
    assert other["error"] == "ValueError: no such matrices" and "us" not in other
    assert record["errors"]["xla"] < 1e-5 and path.with_suffix(".png").is_file()
    (target,) = record["targets"]
    assert target["fastest"] == "xla" and target["hit"] == (row["over_floor"] <= 1.5)
    out = capsys.readouterr().out
    assert "2 of 8" in out and "gather: 8 experts, 5 tokens: ValueError: no such matrices" in out


def test_an_implementation_whose_results_are_wrong_is_not_timed(monkeypatch, capsys):
    def wrong(x, *rest):
        return expert_candidates.mixture(x, *rest) * 1.1

    monkeypatch.setitem(expert_candidates.CANDIDATES, "gather", wrong)
    assert experts.main([*SMALL, "--tokens", "5"]) == 1
    assert "WRONG: at most 1e-05 is expected" in capsys.readouterr().out


def test_a_step_that_takes_long_runs_once(monkeypatch):
    monkeypatch.setattr(experts, "SLOW", 0.0)
    monkeypatch.setattr(experts, "timed", None)
    layers = [experts.make_layer(CASE, key) for key in jax.random.split(jax.random.key(0))]
    row = experts.measure(CASE, layers, experts.parse(SMALL))
    assert row["steps"] == 1 and row["us"] == row["wall_us"] > 0
    many = dataclasses.replace(CASE, tokens=500)
    assert experts.too_slow(many, None) is None and experts.too_slow(many, {"us": 4e4, "tokens": 5}) is None
    words = "left out: a call would take about 6 s, as 5 tokens take 60000 us"
    assert experts.too_slow(many, {"us": 6e4, "tokens": 5}) == words


def test_the_table_has_every_implementation_beside_the_floor(capsys):
    def row(implementation, us, **others):
        sizes = dict(zip(expert_figures.PLACE, (2048, 256, 8, 512, 32), strict=True)) | others
        numbers = {"us": us, "wall_us": us + 1, "floor_us": 100.0, "over_floor": us / 100, "bytes": 1e6, "distinct": 9}
        return sizes | numbers | {"implementation": implementation}

    figures = [row("xla", 900.0), row("gpu", 140.0), row("xla", 160.0, tokens=1)]
    targets = expert_figures.judge(figures)
    assert [(each["fastest"], each["hit"]) for each in targets] == [("gpu", True), ("xla", False)]
    expert_figures.show(Console(width=120), figures, targets)
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if "│" in line and " 32 │" in line)
    assert line.replace("│", " ").split()[3:] == "32 9 1.0 100.0 900.0 (9.00) 140.0 (1.40)".split()
    assert "8 of 256 experts, 32 tokens: reached: at most 1.5 times the floor, got 1.40 (gpu)" in out
    assert "8 of 256 experts, 1 tokens: MISSED: at most 1.5 times the floor, got 1.60 (xla)" in out

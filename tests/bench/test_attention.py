"""`jaxbuf bench attention`: what it runs, counts and says; the figures themselves need a GPU."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxbuf.bench import attention, attention_figures, measure, torch_peer

SMALL = "--implementation xla --heads 4 --kv-heads 2 --head-dim 8 --layers 1".split()
ONE = [*SMALL, "--batches", "3", "--contexts", "5:21", "--tokens", "2", "--dtype", "float32", "--page-size", "8"]
CASE = attention.Case(4, 2, 8, 3, 5, 21, 2, "float32", 8, "xla")


def test_the_bytes_are_those_of_every_array_that_a_call_reads_or_writes():
    case = attention.Case(16, 4, 256, 128, 1024, 1024, 5)
    past, new, queries = 128 * 1024 * 4 * 256, 128 * 5 * 4 * 256, 128 * 5 * 16 * 256
    assert case.bytes == 2 * (2 * past + 2 * new + 2 * new + queries + queries)
    ragged = attention.Case(16, 4, 256, 64, 1024, 65_536, 1)
    assert ragged.bytes - attention.Case(16, 4, 256, 64, 1024, 1024, 1).bytes == (65_536 - 1024) * 2 * 2 * 4 * 256


def test_latents_are_read_once_and_their_floor_is_at_least_that_of_the_products():
    case = attention.Case(32, 1, 576, 128, 1024, 1024, 1, rank=512)
    committed, new = 128 * 1024, 128
    assert case.bytes == 2 * (576 * (committed + 2 * new) + new * 32 * (576 + 512))
    assert case.operations == 2 * 32 * (576 + 512) * (committed + new)
    row = attention.add_floor({"us": 50.0}, case, 4e12)
    np.testing.assert_allclose(row["floor_us"], 1e6 * case.bytes / 4e12)
    drafts = dataclasses.replace(case, time=16)
    row = attention.add_floor({"us": 300.0}, drafts, 4e12)
    np.testing.assert_allclose(row["floor_us"], 1e6 * drafts.operations / 800e12)
    assert row["achieved"] == row["floor_us"] / 300


def test_every_token_of_every_row_has_a_page_of_its_own(rng):
    table = attention.make_table(CASE, rng)
    assert CASE.start.tolist() == [21, 5, 5] and table.shape == (4, 3)
    assert [np.count_nonzero(row) for row in table] == [0, 3, 1, 1]  # of the context and of two tokens more
    assert sorted(table[table > 0]) == [1, 2, 3, 4, 5]
    pool = jax.eval_shape(lambda: attention.make_pool(CASE, jax.random.key(0)))
    assert pool.keys.shape == pool.values.shape == (6, 8, 2, 8)


def test_a_call_is_attention_over_the_pages_and_the_new_tokens(rng):
    case = dataclasses.replace(CASE, context=3)  # the one that is compared before CASE is timed
    tokens, table = attention.make_tokens(case, attention.new_key(rng)), attention.make_table(case, rng)
    pool = attention.make_pool(case, attention.new_key(rng))
    out, _ = attention.attend(case, pool, jnp.asarray(table), tokens)
    q, k, v = (np.asarray(x, np.float64) for x in tokens)
    for row, start in enumerate(case.start):
        pages = table[1 + row][table[1 + row] > 0]
        keys, values = (
            np.concatenate([np.asarray(x, np.float64)[pages].reshape(-1, 2, 8)[:start], new[row]])
            for x, new in ((pool.keys, k), (pool.values, v))
        )
        for time in range(2):
            for head in range(4):
                seen = slice(start + time + 1)
                scores = keys[seen, head // 2] @ q[row, time, head] / np.sqrt(8)
                weights = np.exp(scores - scores.max())
                wanted = weights @ values[seen, head // 2] / weights.sum()
                np.testing.assert_allclose(out[row, time, head], wanted, rtol=1e-4, atol=1e-5)


def test_the_usual_cases_are_those_of_the_targets_and_a_row_alone():
    options = attention.parse(["--implementation", "xla", "--tokens", "1,5"])
    found = {attention_figures.place(vars(case)) for case in attention.plan(options)}
    wanted = {(*sizes, time) for sizes, *_ in attention_figures.TARGETS for time in (1, 5)}
    assert found - wanted == {(16, 4, 256, 1, 1024, 1024, 1), (16, 4, 256, 1, 1024, 1024, 5)} and wanted < found
    timed = [dataclasses.replace(case, implementation="gpu") for case in attention.plan(options)]
    assert all(case.layers * case.bytes > 2 * 60e6 for case in timed)
    options = attention.parse([*SMALL, "--batches", "2,1", "--contexts", "9,7:30"])
    cases = attention.plan(options)
    assert [(case.batch, case.context, case.longest, case.time) for case in cases] == [
        (batch, *context, time) for time in (1, 5) for batch, context in ((2, (9, 9)), (1, (7, 30)))
    ]
    assert {(case.heads, case.kv_heads, case.head_dim) for case in cases} == {(4, 2, 8)}


def test_a_call_on_latents_is_xlas_in_float32(rng):
    options = attention.parse([*"--implementation xla --heads 4 --head-dim 24 --rank 16 --dtype float32".split(),
                               *"--batches 3 --contexts 5:21 --tokens 2 --page-size 8".split()])  # fmt: skip
    (case,) = attention.plan(options)
    assert (case.heads, case.kv_heads, case.head_dim, case.rank, case.time) == (4, 1, 24, 16, 2)
    errors, bounds = attention.check([case], rng)
    assert errors == {"4/1 heads x 24, 2 tokens": 0.0} and bounds.keys() == errors.keys()
    row = attention.measure(case, 1, options, attention.compile_case(case, 1), rng)
    assert row["us"] > 0 and row["rank"] == 16


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the kernel needs a GPU, this is a cpu: try --implementation xla"),
        ([*SMALL, "--batches", "3"], "--batches and --contexts must be given together"),
        ([*SMALL, "--batches", "3,4", "--contexts", "5"], "must name as many cases, got 2 and 1"),
        ([*SMALL, "--batches", "3", "--contexts", "5:6:7"], "two of them with a colon between, got '5:6:7'"),
        ([*SMALL, "--kv-heads", "3"], "--heads must be a multiple of --kv-heads, got 4 and 3"),
        (["--rank", "16", "--kv-heads", "2"], "--rank must be at most --head-dim (576), with one KV head, got 16"),
        (["--rank", "577"], "--rank must be at most --head-dim (576), with one KV head, got 577"),
        ([*SMALL, "--tokens", "17"], "--tokens must be at most 16 each, got 17"),
    ],
)
def test_what_cannot_be_measured_is_an_error_before_anything_runs(words, message, capsys):
    with pytest.raises(SystemExit):
        attention.parse(words)
    assert message in capsys.readouterr().err


def test_a_small_run_keeps_its_figures_and_a_plot(tmp_path, capsys, monkeypatch):
    def torch(what, cases):
        assert what == "attention" and cases == []  # torch has no ragged rows
        return [{"error": "not installed: pip install torch"}]

    path = tmp_path / "attention.json"
    monkeypatch.setattr(attention, "bandwidths", lambda: {"read_bytes_per_s": 1e10, "copy_bytes_per_s": 1e10})
    monkeypatch.setattr(attention, "measure_torch", torch)
    assert attention.main([*ONE, "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["script"] == "scripts/bench_attention" and record["left_out"] == []
    (row,) = record["figures"]
    assert row["us"] == row["wall_us"] > 0 and row["device_us"] is None and row["bytes"] == CASE.bytes
    np.testing.assert_allclose(row["floor_us"], 1e6 * CASE.bytes / 1e10)
    np.testing.assert_allclose(row["achieved"], row["floor_us"] / row["us"])
    assert max(record["errors"].values()) < 1e-5 and path.with_suffix(".png").is_file()
    assert "3 x 5, one 21" in capsys.readouterr().out


def test_a_kernel_whose_results_are_wrong_is_not_timed(monkeypatch, capsys):
    call = attention.append_and_attend

    def wrong(q, k, v, kv, table, *, implementation, **where):
        out, kv = call(q, k, v, kv, table, implementation="xla", **where)
        return (out if q.dtype == jnp.float32 else out * 1.02), kv

    monkeypatch.setattr(attention, "append_and_attend", wrong)
    assert attention.main([*ONE[:-4], "--page-size", "8"]) == 1
    assert "WRONG: at most 0.006 is expected" in capsys.readouterr().out


def test_torchs_rows_are_those_of_its_cases(monkeypatch):
    cases = [attention.Case(4, 2, 8, 3, 9, 9, time, implementation=name) for time in (1, 2) for name in ("gpu", "xla")]
    sent = []

    def torch(what, cases):
        sent.extend(cases)
        return [{"case": place, "implementation": "torch flash", "us": 1.0 + place} for place in (1, 0)]

    monkeypatch.setattr(attention, "measure_torch", torch)
    rows = [attention.add_floor(row, case, 1e9) for case, row in attention.time_torch([*cases, CASE])]
    assert [case[:6] for case in sent] == [[3, 9, 4, 2, 8, 1], [3, 9, 4, 2, 8, 2]]
    assert [(row["time"], row["us"], row["implementation"]) for row in rows] == [
        (2, 2.0, "torch flash"),
        (1, 1.0, "torch flash"),
    ]
    np.testing.assert_allclose(rows[1]["floor_us"], cases[0].bytes / 1e3)


def test_the_table_has_the_kernel_beside_the_others_and_the_targets(capsys):
    def row(implementation, us, **others):
        sizes = dict(zip(attention_figures.SIZES, attention_figures.TARGETS[0][0], strict=True)) | others
        numbers = {"us": us, "wall_us": us + 1, "floor_us": 114.0, "achieved": 114.0 / us}
        return sizes | numbers | {"time": 1, "implementation": implementation}

    figures = [row("gpu", 140.0), row("xla", 600.0), row("torch flash", 125.0)]
    figures += [row("gpu", 125.0, batch=64, longest=65_536)]
    targets = attention_figures.judge(figures)
    assert [(target["measured"], target["hit"]) for target in targets[:2]] == [(140.0, False), (None, None)]
    np.testing.assert_allclose(targets[4]["measured"], 125 / 114)
    assert targets[4]["hit"]
    attention_figures.show(Console(width=120), figures, targets)
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if "128 x 1,024" in line and "│" in line)
    assert line.replace("│", " ").split()[6:] == "1 140.0 141.0 114.0 0.814 600.0 125.0".split()
    assert "128 x 1,024, 16 heads: MISSED: us at most 130, got 140" in out
    assert "64 x 1,024, one 65,536, 16 heads: reached: us over floor at most 1.15, got 1.096" in out


def test_torch_that_is_not_there_or_fails_is_a_row_that_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert torch_peer.main(["products", "[]"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert "not installed" in row["error"] and "pip install torch" in row["error"]

    def failing(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nRuntimeError: no memory\n")

    def slow(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    for run, words in ((failing, "its process failed: RuntimeError: no memory"), (slow, "it took more than 9 s")):
        monkeypatch.setattr(subprocess, "run", run)
        assert measure.measure_torch("products", [], seconds=9) == [{"error": words}]

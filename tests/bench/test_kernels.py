"""`jaxbuf bench kernels`: what it counts and how it judges; the figures themselves need a GPU."""

import json
import sys

import numpy as np
import pytest
from rich.console import Console

from jaxbuf.bench import companions, kernel_figures, kernels, measure, peer
from jaxbuf.recurrence import RecurrenceSpec, buffered

TINY = RecurrenceSpec(heads=2, key_heads=1, key_dim=4, value_dim=4)
QWEN = RecurrenceSpec(heads=32, key_heads=16, key_dim=128, value_dim=128)
SMALL = "--implementation xla --heads 2 --key-heads 1 --dim 4 --layers 1 --batches 2 --quick".split()
CHECKPOINT, ENTRY = 4 * 32 * 128 * 128, 2 * 16 * 128 + 2 * 32 * 128 + 4 * 32
INPUTS = 2 * 2 * 16 * 128 + 2 * 2 * 32 * 128 + 2 * 4 * 32  # q and k, v and the outputs, log_decay and beta


def counted(case: kernels.Case, load: int) -> dict:
    steps = kernels.schedule(case, kernels.loads(case)[load], case.steps(1))
    return kernels.count_bytes(QWEN, steps, np.dtype("float32"))


def by_hand(lengths: list[int], time: int, accepted: int, limit: int, steps: int) -> float:
    """Bytes a step of slots with a checkpoint that hold so many entries, followed token by token."""
    total, lengths = 0, list(lengths)
    for _ in range(steps):
        for row, length in enumerate(lengths):
            folds = length > 0 and length + time > limit
            total += CHECKPOINT * (1 + folds) + ENTRY * (length + time) + INPUTS * time
            lengths[row] = (0 if folds else length) + accepted
    return total / steps


@pytest.mark.parametrize(("time", "accepted", "limit"), [(1, 1, 16), (1, 1, 1), (5, 3, 32), (9, 9, 32)])
def test_the_bytes_of_a_fold_cycle_are_those_counted_by_hand(time, accepted, limit):
    case = kernels.Case("decode", 3, time, (accepted,), limit)
    cycle = case.steps(1)
    staggered = [accepted * (1 + row % cycle) for row in range(3)]
    for load, lengths in enumerate((staggered, [accepted] * 3)):
        found = counted(case, load)
        np.testing.assert_allclose(found["bytes"], by_hand(lengths, time, accepted, limit, cycle))
        np.testing.assert_allclose(found["folds"], 1 / cycle)  # the phase changes neither: the cycles are whole


def test_kv_only_slots_read_no_checkpoint_and_reach_a_buffered_slots_bytes_at_188_entries():
    case = kernels.Case("kv", 4, longest=256)
    rows = [
        load.labels | {"part": "kv", "us": 1.0} | counted(case, place) for place, load in enumerate(kernels.loads(case))
    ]
    buffered_row, at_16 = rows[0]["bytes"] / 4, rows[1]["bytes"]
    assert rows[1]["kv_length"] == 16
    np.testing.assert_allclose(at_16, 2 * buffered_row + 2 * (17 * ENTRY + INPUTS), rtol=0.02)  # cycles of few rows
    assert 180 < kernel_figures.crossover(rows, "bytes") < 196
    assert kernel_figures.crossover(rows, "us") is None  # nothing crosses where all take the same


def test_a_crossover_lies_where_a_line_meets_the_buffered_slots():
    rows = [{"part": "kv", "kv_length": n, "us": 10.0 + (n and (n - 150) / 10)} for n in (0, 100, 200)]
    np.testing.assert_allclose(kernel_figures.crossover(rows, "us"), 150)


def test_targets_compare_staggered_figures_and_say_what_was_not_measured():
    def row(part, us, **others):
        known = {"part": part, "batch": 128, "us": us, "bytes": 100.0, "achieved": 68.6 / us}
        return known | {"phase": "staggered"} | others

    figures = [
        row("decode", 1.0, phase="lockstep"),
        row("decode", 70.0),
        row("recurrent", 130.0, bytes=178.0),
        row("verify", 90.0, time=5, accepted=3),
        {"part": "fla", "batch": 128, "us": 175.0, "state_v_first": False},
        {"part": "fla", "batch": 256, "error": "not installed"},
    ]
    found = {(row["target"], row["batch"]): row for row in kernel_figures.judge(figures)}
    assert len(found) == 21
    at_128 = [(found[name, 128]["measured"], found[name, 128]["hit"]) for name, _, _ in kernel_figures.TARGETS]
    wanted = (68.6 / 70, True), (2.5, True), (130 / 70 / 1.78, True), (68.6 / 130, False), (90 / 70, False)
    for (value, hit), (expected, reached) in zip(at_128, wanted, strict=False):
        np.testing.assert_allclose(value, expected)
        assert hit is reached
    assert at_128[5] == (None, None)
    assert all(row["measured"] is row["hit"] is None for (_, batch), row in found.items() if batch != 128)


def test_the_kernels_time_is_its_own_and_xlas_path_is_all_of_its_kernels():
    taken = {"loop_add_fusion_2": [90.0] * 4, "body_mosaic_gpu_kernel": [4.0, 6.0, 5.0, 5.0], "MemcpyD2D": [50.0] * 4}
    ours = measure.device_time(taken, 4, "gpu")
    assert (ours["kernel"], ours["device_us"], ours["most_us"], ours["rest_us"]) == (
        "body_mosaic_gpu_kernel",
        5.0,
        6.0,
        140.0,
    )
    assert measure.device_time(taken, 4, "xla")["device_us"] == 145.0
    two = taken | {"join_mosaic_gpu_kernel": [2.0] * 4, "begin_mosaic_gpu_kernel": [1.0] * 2}
    found = measure.device_time(two, 4, "gpu", "join")
    assert [found[name] for name in ("device_us", "second_us", "rest_us", "launches")] == [7.0, 2.0, 140.5, 2.0]
    assert measure.device_time(taken, 4, "gpu", "join")["device_us"] == 5.0
    assert measure.device_time({}, 4, "gpu") == measure.device_time({}, 4, "xla") == {}
    lost = {"body_mosaic_gpu_kernel": taken["body_mosaic_gpu_kernel"][1:]}  # an event that the profiler lost
    np.testing.assert_allclose(measure.device_time(lost, 4, "gpu")["device_us"], 16 / 3)


@pytest.mark.slow
def test_a_trace_in_which_xla_tried_kernels_of_other_programs_is_taken_again(monkeypatch, tmp_path):
    tried = {"stream_executor::gpu::RedzoneAllocatorKernelImpl(int)": [30.0], "body_mosaic_gpu_kernel": [9.0]}
    traces = iter([tried, tried, {"body_mosaic_gpu_kernel": [4.0]}])
    monkeypatch.setattr(measure, "durations", lambda directory: next(traces))
    calls, _, found = measure.timed(lambda calls: calls + 1, 0, tmp_path)
    assert found == {"body_mosaic_gpu_kernel": [4.0]}
    assert calls == 1 + 3 + 3
    assert measure.device_time(tried, 1, "gpu")["device_us"] == 9.0
    monkeypatch.setattr(measure, "durations", lambda directory: tried)
    with pytest.raises(RuntimeError, match="other programs in 10 traces"):
        measure.timed(lambda calls: calls, 0, tmp_path)


@pytest.mark.slow
def test_a_small_run_on_a_cpu_keeps_its_figures_and_a_plot(tmp_path, capsys):
    path = tmp_path / "kernels.json"
    assert kernels.main([*SMALL, "--only", "decode", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["script"] == "scripts/bench_kernels" and record["read_bytes_per_s"] > 0
    assert [(row["phase"], row["batch"], row["time"]) for row in record["figures"]] == [
        ("staggered", 2, 1),
        ("lockstep", 2, 1),
    ]
    for row in record["figures"]:
        assert row["us"] == row["wall_us"] > 0 and row["device_us"] is None and row["steps"] == 16
        np.testing.assert_allclose(row["floor_us"], 1e6 * row["bytes"] / record["read_bytes_per_s"])
        np.testing.assert_allclose(row["achieved"], row["floor_us"] / row["us"])
    assert record["left_out"] == [] and len(record["targets"]) == 21
    assert path.with_suffix(".png").is_file() and "staggered" in capsys.readouterr().out


@pytest.mark.slow
def test_a_spent_budget_leaves_programs_out_and_says_so(tmp_path, capsys):
    assert kernels.main([*SMALL, "--only", "decode,xla", "--budget", "0", "--json", str(tmp_path / "a.json")]) == 0
    assert "2 of 2 programs left out" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "a.json").read_text())["left_out"]) == 2


@pytest.mark.slow
def test_a_kernel_whose_results_are_wrong_is_seen(rng, monkeypatch):
    extend = buffered.extend_pool

    def wrong(*arguments, implementation):
        out, pool = extend(*arguments, implementation="xla")
        return (out * 1.02 if implementation == "gpu" else out), pool

    monkeypatch.setattr(buffered, "extend_pool", wrong)
    errors = kernels.check(TINY, kernels.compared([kernels.Case("decode", 2), kernels.Case("verify", 2, 5)]), rng)
    assert errors["bfloat16"] > kernels.BOUNDS["bfloat16"] and errors["float32"] == 0


def test_every_kind_of_launch_that_is_timed_is_compared_and_no_other():
    cases = [kernels.Case("verify", 256, 9, (9,), 32), kernels.Case("split", 32, 5, (3,), 32, state_dtype="split8")]
    found = kernels.compared(cases)
    assert [(case.time > 1, case.state_dtype) for case in found] == [(True, "float32"), (False, "split8")]
    assert {case.batch for case in found} == {128}
    planned = kernels.plan(kernels.parse(["--implementation", "xla"]))
    assert len(kernels.compared([case for case in planned if isinstance(case, kernels.Case)])) == 5


def test_the_bytes_of_a_companion_are_those_of_every_array_that_it_reads_or_writes():
    for time in (1, 5):
        past, now, gates = 32 * 3 * 8192, 32 * time * 8192, 32 * time * 32
        found = companions.count_bytes(QWEN, companions.Case("prepare", 32, time, "gpu"))
        assert found == 2 * (past + now + now + now) + 4 * (2 * gates + 2 * gates)  # inputs, appends and q, k and v
        values = 32 * time * 32 * 128
        assert companions.count_bytes(QWEN, companions.Case("gated_norm", 32, time, "xla")) == 2 * 3 * values


def test_what_xla_takes_to_read_and_to_update_arrays_is_timed():
    rows = measure.bare_passes([2**16, 2**18], footprint=2**19)
    assert [row["bytes"] for row in rows] == [2**16, 2**18]
    assert all(row["read_us"] > 0 and row["update_us"] > 0 for row in rows)


@pytest.mark.slow
def test_the_companions_are_timed_on_a_cpu_and_have_a_table_of_their_own(tmp_path, capsys, monkeypatch):
    path = tmp_path / "kernels.json"
    monkeypatch.setattr(kernels, "bandwidths", lambda: {"read_bytes_per_s": 1e10, "copy_bytes_per_s": 1e10})
    monkeypatch.setattr(kernels, "plot", lambda figures, path: None)
    assert kernels.main([*SMALL, "--only", "companions", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    keys = [(row["operation"], row["batch"], row["time"], row["implementation"]) for row in record["figures"]]
    assert keys == [(name, 2, time, "xla") for name in ("prepare", "gated_norm") for time in (1, 5)]
    for row in record["figures"]:
        assert row["part"] == "companions" and row["us"] == row["wall_us"] > 0
        assert row["device_us"] is row["launches"] is None and row["errors"] == {}
        np.testing.assert_allclose(row["floor_us"], 1e6 * row["bytes"] / record["read_bytes_per_s"])
        np.testing.assert_allclose(row["achieved"], row["floor_us"] / row["us"])
    out = capsys.readouterr().out
    assert "gated_norm" in out and "XLA us" in out and "decode" not in out


@pytest.mark.slow
def test_a_companion_that_agrees_with_xla_is_timed_and_one_that_differs_is_an_error(rng, monkeypatch):
    norm, prepare = companions.gated_norm, companions.prepare

    def same(*arguments, implementation, **settings):
        return norm(*arguments, implementation="xla", **settings)

    def wrong(*arguments, implementation, **settings):
        inputs, ring = prepare(*arguments, implementation="xla", **settings)
        return (inputs._replace(v=inputs.v * 1.05), ring.at[1].set(0)) if implementation == "gpu" else (inputs, ring)

    monkeypatch.setattr(companions, "gated_norm", same)
    monkeypatch.setattr(companions, "prepare", wrong)
    options, rows = kernels.parse([*SMALL, "--only", "companions"]), {}
    for operation, left_out in (("gated_norm", ""), ("prepare", "run")):  # what is wrong is never run
        case = companions.Case(operation, 3, 1, "gpu")
        lowered = companions.Lowered(TINY, case, options, rng).programs
        programs = {name: program.compile() for name, program in lowered.items() if name != left_out}
        (rows[operation],) = companions.measure(TINY, case, options, programs, 1e9, rng)
    assert rows["gated_norm"]["us"] > 0 and set(rows["gated_norm"]["errors"].values()) == {0.0}
    assert rows["prepare"]["error"].startswith(companions.WRONG) and "us" not in rows["prepare"]
    errors = rows["prepare"]["errors"]
    np.testing.assert_allclose([errors["bfloat16"], errors["float32"]], 0.05, atol=0.01)
    assert errors["ring"] > 0


def test_the_table_of_companions_has_a_kernel_beside_xla(capsys):
    def row(implementation, us, launches):
        sizes = {"part": "companions", "operation": "prepare", "batch": 32, "time": 1}
        known = {"us": us, "launches": launches, "floor_us": 1.5, "achieved": 1.5 / us}
        return sizes | known | {"implementation": implementation}

    wrong = {"part": "companions", "operation": "gated_norm", "batch": 32, "time": 1, "error": "WRONG: 0.1"}
    kernel_figures.show(Console(width=100), [row("gpu", 3.0, 1.0), row("xla", 12.0, 5.0), wrong], [])
    line = next(line for line in capsys.readouterr().out.splitlines() if "prepare" in line)
    assert line.replace("│", " ").split() == "prepare 32 1 3.00 1.0 1.50 0.500 12.00 5.0 4.00".split()


def test_a_library_that_is_not_installed_is_a_row_that_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fla", None)
    assert peer.main(["[32, 16, 128, 128]", "[[1, 2]]"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert "not installed" in row["error"] and "pip install fla-core torch triton" in row["error"]


@pytest.mark.parametrize(("words", "status"), [(["--only", "fla"], 1), ([], 0)], ids=["by name", "among all"])
def test_a_part_that_cannot_be_measured_is_a_failure_only_where_it_was_asked_for(words, status, monkeypatch, capsys):
    row = {"part": "fla", "error": "not installed: pip install it"}
    monkeypatch.setattr(kernels, "bandwidths", lambda: {"read_bytes_per_s": 1e10, "copy_bytes_per_s": 1e10})
    monkeypatch.setattr(kernels, "measure_peer", lambda spec, batches, layers: [row])
    all_of = kernels.plan
    monkeypatch.setattr(kernels, "plan", lambda options: [case for case in all_of(options) if case.part == "fla"])
    assert kernels.main([*SMALL, *words]) == status
    out = capsys.readouterr().out
    assert "pip install it" in out and ("--only fla: nothing could be measured" in out) == status


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--only", "decode,prefill"], "got prefill"), (["--only", "decode"], "--implementation xla")],
)
def test_what_cannot_be_measured_is_an_error_before_anything_runs(words, message, capsys):
    with pytest.raises(SystemExit):
        kernels.main(words)
    assert message in capsys.readouterr().err

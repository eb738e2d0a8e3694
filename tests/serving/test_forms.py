"""Which form `form="auto"` takes: by what was measured on the device, and buffered where nothing was."""

import dataclasses
import json

import numpy as np
import pytest

import jaxbuf
from jaxbuf.bench import form_table as writer
from jaxbuf.recurrence import RecurrenceSpec
from jaxbuf.serving import forms
from jaxbuf.serving.batch import GREEDY, Decoding, make_batch

QWEN = RecurrenceSpec(heads=32, key_heads=16, key_dim=128, value_dim=128)
BATCHES = (1, 2, 4, 8, 16, 32)


def measured(recurrent, buffered, device="a chip", heads=32) -> forms.Measured:
    return forms.Measured(device, heads, 16, 128, 128, 16, BATCHES, tuple(recurrent), tuple(buffered))


CROSSES = measured([2.0, 3.0, 5.0, 9.0, 18.0, 36.0], [4.0, 4.5, 5.4, 9.1, 14.0, 22.0])  # buffered from 16 on


def test_each_measured_batch_gets_the_faster_form():
    chosen = [forms.choose(QWEN, batch, "a chip", [CROSSES]) for batch in BATCHES]
    assert chosen == ["recurrent"] * 4 + ["buffered"] * 2


def test_between_two_batches_that_differ_it_is_the_recurrent_form_and_past_the_largest_the_last_one():
    assert [forms.choose(QWEN, batch, "a chip", [CROSSES]) for batch in (9, 15, 17, 1000)] == [
        "recurrent",
        "recurrent",
        "buffered",
        "buffered",
    ]


def test_auto_is_at_no_measured_batch_slower_than_the_recurrent_step(rng):
    for _ in range(50):
        row = measured(np.sort(rng.uniform(1, 50, 6)), np.sort(rng.uniform(1, 50, 6)))
        for batch, recurrent, buffered in zip(BATCHES, row.recurrent_us, row.buffered_us, strict=True):
            taken = buffered if forms.choose(QWEN, batch, "a chip", [row]) == "buffered" else recurrent
            assert taken <= recurrent


def test_a_batch_at_which_buffered_loses_again_moves_the_threshold_above_it():
    row = measured([2.0, 3.0, 5.0, 9.0, 18.0, 36.0], [1.0, 2.0, 4.0, 10.0, 14.0, 22.0])
    assert row.buffered_from == 16
    assert measured([1.0] * 6, [2.0] * 6).buffered_from is None
    assert forms.choose(QWEN, 1000, "a chip", [measured([1.0] * 6, [2.0] * 6)]) == "recurrent"


def test_another_device_has_no_figures_and_is_buffered():
    assert forms.choose(QWEN, 1, "another chip", [CROSSES]) == "buffered"
    assert forms.choose(QWEN, 1, "a chip", []) == "buffered"


def test_the_most_similar_heads_count_and_a_batch_is_compared_by_all_its_heads():
    wide = measured([9.0] * 6, [1.0] * 6, heads=64)  # always buffered
    assert forms.choose(QWEN, 1, "a chip", [CROSSES, wide]) == "recurrent"
    assert forms.choose(dataclasses.replace(QWEN, heads=64), 1, "a chip", [CROSSES, wide]) == "buffered"
    half = dataclasses.replace(QWEN, heads=16)
    assert [forms.choose(half, batch, "a chip", [CROSSES]) for batch in (16, 31, 32)] == [
        "recurrent",
        "recurrent",
        "buffered",
    ]


def test_generate_runs_the_form_that_the_table_says(lm, monkeypatch):
    prompts = [[1, 2, 3], [4, 5]]
    device = forms.device_kind(lm.model.norm[...])
    always, never = (measured([2.0] * 6, [us] * 6, device, heads=1) for us in (1.0, 3.0))
    for table, form in (((always,), "buffered"), ((never,), "recurrent"), ((), "buffered")):
        monkeypatch.setattr(forms, "read_table", lambda table=table: table)
        batch = make_batch(lm, prompts, GREEDY, Decoding(8))
        assert batch.form == form
        assert set(batch.begins.limit.tolist()) == {1 if form == "recurrent" else 16}
    assert make_batch(lm, prompts, GREEDY, Decoding(8, form="buffered")).form == "buffered"


@pytest.mark.slow
def test_the_stats_say_which_form_ran(lm):
    for form in ("recurrent", "buffered"):
        (result,) = jaxbuf.generate(lm, [[1, 2, 3]], 8, form=form)
        assert result.stats.form == form


def test_the_recorded_table_can_be_read_and_names_its_measurement():
    rows = json.loads(forms.TABLE.read_text())["measured"]
    assert [forms.from_dict(row) for row in rows] == list(forms.read_table())
    for row in rows:
        assert row["command"].startswith("scripts/bench_kernels") and row["date"] and row["versions"]["jax"]
        assert list(row["batches"]) == sorted(row["batches"])
        assert len(row["batches"]) == len(row["recurrent_us"]) == len(row["buffered_us"])


def record(device: str, figures: list[dict]) -> dict:
    sizes = {"heads": 32, "key_heads": 16, "dim": 128}
    known = {"command": "scripts/bench_kernels", "date": "2026-01-01", "versions": {"jax": "0"}}
    return {"device": device, "figures": figures} | sizes | known


def figure(part: str, batch: int, us: float, phase: str = "staggered") -> dict:
    return {"part": part, "batch": batch, "us": us, "phase": phase, "limit": 1 if part == "recurrent" else 16}


def test_the_script_takes_both_parts_and_replaces_what_the_device_had(tmp_path, capsys):
    path, table = tmp_path / "kernels.json", tmp_path / "forms.json"
    lockstep = [figure("decode", 4, 1.0, "lockstep"), figure("recurrent", 4, 9.0, "lockstep")]
    both = [figure(part, batch, us) for batch, us in ((64, 30.0), (4, 5.0)) for part in ("decode", "recurrent")]
    path.write_text(json.dumps(record("a chip", [*lockstep, *both, figure("decode", 8, 7.0)])))
    assert writer.main([str(path), "--table", str(table)]) == 0
    path.write_text(json.dumps(record("b chip", [figure("decode", 2, 3.0), figure("recurrent", 2, 2.0)])))
    assert writer.main([str(path), "--table", str(table)]) == 0
    assert "b chip, 32 heads: auto is recurrent at every batch" in capsys.readouterr().out
    first, second = forms.read_table(table)
    assert (first.device, first.batches, first.recurrent_us, first.limit) == ("a chip", (4, 64), (5.0, 30.0), 16)
    assert first.buffered_from == 4 and second.buffered_from is None
    path.write_text(json.dumps(record("b chip", [figure("decode", 2, 1.0), figure("recurrent", 2, 2.0)])))
    assert writer.main([str(path), "--table", str(table)]) == 0
    forms.read_table.cache_clear()
    assert [row.buffered_from for row in forms.read_table(table)] == [4, 2]


def test_figures_without_both_parts_are_an_error():
    with pytest.raises(ValueError, match="parts decode and recurrent"):
        writer.row(record("a chip", [figure("decode", 2, 1.0)]))

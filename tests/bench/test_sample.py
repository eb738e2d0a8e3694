"""`jaxbuf bench sample`: what it judges, and that it measures every setting; the figures themselves need a GPU."""

import json

import numpy as np
import pytest

from jaxbuf.bench import sample


def test_what_a_setting_costs_is_over_the_greedy_choice_of_as_many_rows():
    times = {(2, "greedy"): 1.0, (2, "top_p"): 1.5, (4, "greedy"): 2.0, (4, "top_p"): 5.0}
    rows = [{"batch": b, "setting": name, "ms": ms, "bytes": 4000 * b} for (b, name), ms in times.items()]
    judged = sample.judge(rows, 1e6)
    assert [row["over_greedy_ms"] for row in judged] == [0.0, 0.5, 0.0, 3.0]
    np.testing.assert_allclose([row["floor_ms"] for row in judged], [8.0, 8.0, 16.0, 16.0])


@pytest.mark.slow
def test_every_setting_is_measured(tmp_path):
    path = tmp_path / "sample.json"
    assert sample.main(f"--batches 2,3 --vocab 2000 --steps 2 --json {path}".split()) == 0
    record = json.loads(path.read_text())
    figures = {(row["batch"], row["setting"]): row for row in record["figures"]}
    assert figures.keys() == {(batch, setting) for batch in (2, 3) for setting in sample.SETTINGS}
    for (batch, setting), row in figures.items():
        assert row["ms"] > 0 and row["bytes"] == 4 * 2000 * batch
        assert (setting == sample.GREEDY) == (row["kept"] == 1)
    assert record["vocab"] == 2000 and figures[2, "temperature"]["kept"] == 2000
    assert all(figures[batch, "flat top_p"]["kept"] > figures[batch, "top_p"]["kept"] for batch in (2, 3))

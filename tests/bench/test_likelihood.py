"""`jaxbuf bench likelihood`: what it reads is the text's likelihood, and what it calls a difference."""

import json

import numpy as np
import pytest

from jaxbuf.bench import likelihood, texts
from jaxbuf.models.language_model import load

WORDS = "server file path default option module returns the value of a list and if error connection table".split()


@pytest.fixture(scope="module")
def demo():
    return load("demo", dtype="float32")


def prose(rng, sentences):
    """Text of words that the model knows, in an order that it does not."""
    return " ".join(f"{' '.join(rng.choice(WORDS, 9)).capitalize()}." for _ in range(sentences))


def test_rows_are_spread_over_the_joined_documents(demo):
    documents, end = [list(range(1, 40)), list(range(40, 100))], sorted(demo.stop_ids)[0]
    joined = [*documents[0], end, *documents[1], end]
    rows = likelihood.cut_rows(demo, documents, 3, 9)
    assert rows.tolist() == [joined[start : start + 10] for start in (0, 33, 66)]
    with pytest.raises(ValueError, match=r"at least 102 tokens for --rows 3 and --tokens 33, got 101"):
        likelihood.cut_rows(demo, documents, 3, 33)


def test_a_difference_is_relative_and_by_quarter():
    recurrent = np.tile(np.array([1.0, 3, 2, 2, 4, 4, 5, 1]), (2, 1))
    buffered = recurrent * np.repeat([1.0, 1.1, 0.9, 1.0], 2)
    quarters = likelihood.compare(recurrent, buffered, recurrent / 10)
    assert [quarter["tokens"] for quarter in quarters] == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert [quarter["recurrent_nats"] for quarter in quarters] == [2, 2, 4, 3]
    np.testing.assert_allclose([quarter["relative_difference"] for quarter in quarters], [0, 0.1, -0.1, 0], atol=1e-9)
    np.testing.assert_allclose([q["mean_absolute_difference_nats"] for q in quarters], [0, 0.2, 0.4, 0], atol=1e-9)
    np.testing.assert_allclose([q["divergence_nats"] for q in quarters], [0.2, 0.2, 0.4, 0.3], atol=1e-9)


@pytest.mark.exhaustive
def test_neither_bf16_entries_nor_split_checkpoints_cost_likelihood(demo, rng, tmp_path, monkeypatch, capsys):
    """On 2 rows of 512 tokens; the recurrent form's likelihood is that of the parallel forward."""
    text, path = tmp_path / "text.txt", tmp_path / "likelihood.json"
    text.write_text(prose(rng, 400))
    sizes = "--rows 2 --tokens 512 --prompts 8 --states float32,split8".split()
    words = ["--text", str(text), *sizes, "--json", str(path)]
    assert likelihood.main(words) == 0
    record = json.loads(path.read_text())
    assert record["script"] == "scripts/bench_likelihood" and record["text"][0]["file"] == "text.txt"
    rows = likelihood.cut_rows(demo, texts.read_documents(demo, [text]), 2, 512)
    exact = -np.asarray(demo.score(rows), np.float64)[:, 1:]
    assert tuple(record["quarters"]) == tuple(record["different_greedy_rows"]) == ("float32", "split8")
    assert record["different_greedy_rows"]["float32"] <= 2
    for state, quarters in record["quarters"].items():
        for quarter, part in zip(quarters, np.array_split(exact, 4, axis=1), strict=True):
            np.testing.assert_allclose(quarter["recurrent_nats"], part.mean(), rtol=1e-4)
            assert abs(quarter["relative_difference"]) <= likelihood.BOUNDS["float32"], state
            assert quarter["mean_absolute_difference_nats"] > 1e-5  # the entries were rounded
            assert 1e-8 < quarter["divergence_nats"] < 1e-3, state
    worse = exact * np.repeat([1, 1, 1, 1.01], 128)
    monkeypatch.setattr(likelihood, "decode", lambda *_, **settings: (exact, {"split8": (worse, 0 * worse)}))
    monkeypatch.setattr(likelihood, "count_different", lambda *_, **settings: {})
    assert likelihood.main(words[:-2]) == 1
    assert "DOES NOT HOLD: split8 checkpoint" in capsys.readouterr().out


def test_a_likelihood_that_is_no_number_is_no_pass(rng, tmp_path, monkeypatch, capsys):
    """Of the last quarter alone: what comes before it is within the bound."""
    text = tmp_path / "text.txt"
    text.write_text(prose(rng, 10))
    exact = np.ones((1, 8))
    broken = np.where(np.arange(8) < 6, exact, np.nan)
    monkeypatch.setattr(likelihood, "decode", lambda *_, **settings: (exact, {"float32": (broken, broken)}))
    assert likelihood.main(["--text", str(text), "--rows", "1", "--tokens", "8", "--prompts", "0"]) == 1
    assert "DOES NOT HOLD" in capsys.readouterr().out
    assert likelihood.main(["--text", str(text), "--rows", "1", "--tokens", "8193"]) == 2
    expected = "jaxbuf bench likelihood: error: --tokens must be at most 8192 for demo, got 8193\n"
    assert capsys.readouterr().err == expected


@pytest.mark.slow
def test_the_default_text_is_long_enough_for_the_default_rows(tmp_path, monkeypatch, capsys):
    read = []
    monkeypatch.setattr(likelihood, "decode", lambda model, rows, **_: (read.append(rows), (np.ones((1, 8)), {}))[1])
    assert likelihood.main(["--prompts", "0", "--json", str(tmp_path / "record.json")]) == 0, capsys.readouterr().out
    assert [rows.shape for rows in read] == [(4, 4097)] and len(np.unique(read[0][:, :8], axis=0)) == 4
    (text,) = json.loads((tmp_path / "record.json").read_text())["text"]
    assert text["file"] == "the Python standard library" and text["bytes"] > 100_000


def test_a_model_that_is_not_there_is_one_line(tmp_path, capsys):
    assert likelihood.main(["--model", "nope"]) == 2
    assert capsys.readouterr().err.startswith("jaxbuf bench likelihood: error: no model 'nope': expected ")
    (tmp_path / "config.json").write_text("{")
    assert likelihood.main(["--model", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "config.json" in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--tokens 3", "--tokens must be a whole number of at least 4, got '3'"),
        ("--limit 1", "--limit must be a whole number of at least 2, got '1'"),
        ("--states float32,int4", "--states must name some of float32, bfloat16, split, split8, got 'int4'"),
        ("--text nowhere.txt", "there is no nowhere.txt"),
    ],
)
def test_a_setting_out_of_range_is_an_error_that_names_it(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        likelihood.parse(words.split())
    assert ended.value.code == 2 and said in capsys.readouterr().err

"""`jaxbuf bench drafts`: what it cuts out of a text, what it calls accepted, and a run on a tiny model."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.progress import Progress

from jaxbuf.bench import drafts, texts
from jaxbuf.models import decoder, mtp
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.mtp import init_mtp
from jaxbuf.serving import GenerationResult
from jaxbuf.serving.stats import Stats
from tests.serving.conftest import EOS
from tests.serving.speculating import random_qwen3_5
from tests.serving.test_drafting import reference

K = 3


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return random_qwen3_5(0)


def test_windows_are_whole_and_spread_over_the_joined_documents(lm):
    documents = [list(range(100)) * 9, list(range(100)) * 12]
    joined = [*documents[0], EOS, *documents[1], EOS]
    every = texts.cut_windows(lm, documents, 10_000)
    assert every.shape == (4, texts.WINDOW) and every.reshape(-1).tolist() == joined[: every.size]
    assert texts.cut_windows(lm, documents, 2 * texts.WINDOW - 1).tolist() == every[[0, 2]].tolist()
    assert texts.cut_windows(lm, documents, 64).tolist() == [joined[:64]]
    assert texts.cut_windows(lm, [], 64).size == 0


def test_prompts_lie_inside_documents_and_follow_the_seed():
    documents = [list(range(10)), list(range(20, 24)), list(range(30, 35))]
    prompts = texts.cut_prompts(documents, 20, 5, 1)
    assert all(np.array_equal(np.diff(prompt), np.ones(4)) for prompt in prompts)
    assert {prompt[0] for prompt in prompts} <= {*range(6), 30}
    assert prompts == texts.cut_prompts(documents, 20, 5, 1) != texts.cut_prompts(documents, 20, 5, 2)
    with pytest.raises(ValueError, match=r"--prompt-tokens must be at most the longest document's \(10\), got 11"):
        texts.cut_prompts(documents, 1, 11, 0)


def test_a_draft_is_right_where_the_model_chooses_it(rng):
    window, rows = 9, 4
    tokens, best = rng.integers(2, size=(2, rows, window))
    drafted = rng.integers(2, size=(window - K, rows, K))
    right, followed = drafts.compare(drafted, best, tokens)
    for i, row, k in np.ndindex(drafted.shape):
        newest = i + 1
        assert right[i, row, k] == (drafted[i, row, k] == best[row, newest + k])
        assert followed[i, row, k] == (
            drafted[i, row, :k].tolist() == tokens[row, newest + 1 : newest + 1 + k].tolist()
        )


@pytest.mark.slow
def test_drafts_are_those_of_a_chain_that_reads_the_text(lm, rng):
    window, rows = 16, 2
    tokens = rng.integers(EOS, size=(rows, window)).astype(np.int32)
    hidden, best = drafts.read(lm.model, tokens)
    memory = init_mtp(lm.config, slots=rows, capacity=window, max_pending=1 + K)
    found = drafts.draft_all(lm.model, memory, hidden, jnp.asarray(tokens), draft_tokens=K)
    assert found.shape == (window - K, rows, K) and best.shape == tokens.shape

    @jax.jit
    def layer(hidden, following):  # causal: what lies past a place does not matter to it
        further = mtp.mtp_forward(lm.model, hidden, following)
        return further, decoder.logits(lm.model, further)

    following = jnp.roll(jnp.asarray(tokens), -1, axis=1)
    for newest in (1, 7, window - K):
        chained = hidden
        for k in range(K):
            further, scores = layer(chained, following)
            place = newest - 1 + k
            scored = np.asarray(scores[:, place])
            # The best token, or one as good: another program's rounding decides between two.
            np.testing.assert_allclose(scored[np.arange(rows), found[newest - 1, :, k]], scored.max(axis=1), rtol=1e-5)
            chained = chained.at[:, place + 1].set(further[:, place])


def test_drafts_of_ngrams_are_those_of_the_text_before_them(rng):
    tokens = rng.integers(4, size=(3, 12)).astype(np.int32)
    found = np.asarray(drafts.draft_all_ngram(jnp.asarray(tokens), draft_tokens=K))
    assert found.shape == (12 - K, 3, K)
    for i, row in np.ndindex(12 - K, 3):
        text = tokens[row, : i + 2].tolist()
        follows, count = reference(text, K, 3)
        assert found[i, row].tolist() == (follows if count else [-1] * K)


def test_made_up_logs_follow_the_seed_and_code_is_pythons(lm):
    logs = list(texts.make_logs(3))
    assert logs == list(texts.make_logs(3)) != list(texts.make_logs(4))
    assert len(logs) == texts.LOGS and {log.count("\n") for log in logs} == {texts.LINES}
    documents, (told,) = texts.documents_of(lm, "logs", (), 3)
    assert documents == [lm.encode(log) for log in logs] and told["file"] == "logs of seed 3"
    lm = SimpleNamespace(encode=len)
    documents, (told,) = texts.documents_of(lm, "code", (), 3)
    assert len(documents) > 50 and sum(documents) + len(documents) - 1 <= told["bytes"]


def stand_in(batches):
    """A `generate` of fixed counts, one draft in two kept, and says something else where it drafts."""

    def generate(lm, prompts, max_new_tokens, sampling, *, drafter, draft_tokens, **settings):
        batches.append((drafter, len(prompts), [one.seed for one in sampling]))
        stats = Stats(4, 7, 3 if drafter else 6, 1, 3, 9, 6 * bool(drafter), 3 * bool(drafter), "buffered", 100, 400)
        return [GenerationResult("", [one.seed % 10 if drafter == "ngram" else 1], "length", stats) for one in sampling]

    return generate


def test_batches_have_one_size_and_rows_that_differ_are_counted(lm, monkeypatch):
    batches: list = []
    monkeypatch.setattr(drafts, "generate", stand_in(batches))
    words = "--prompts 70 --max-new-tokens 8 --seed 5".split()
    prompts = [[token] for token in range(70)]
    with Progress(disable=True) as progress:
        figures = drafts.measure_generated(lm, prompts, drafts.parse(words), progress)
    assert len(batches) == 5 * 3 and {size for _, size, _ in batches} == {24}
    assert [seed for _, _, seeds in batches[:3] for seed in seeds][:70] == list(range(5, 75))
    plain, mtp, _, ngram, _ = figures
    assert plain["tokens_per_step"] == 1 and mtp["tokens_per_step"] == 2 and plain["steps"] == 2 * mtp["steps"]
    assert mtp["accepted_share"] == 0.5 and mtp["snapshot_ratio"] == 4
    assert mtp["rows_that_differ"] == 0 and ngram["rows_that_differ"] == 70 - 7


@pytest.mark.exhaustive
def test_a_run_keeps_its_figures(lm, tmp_path, monkeypatch, capsys):
    text, path = tmp_path / "text.txt", tmp_path / "drafts.json"
    text.write_text("abcabcabcabc" * 9 + texts.DOCUMENT_BREAK + "\nno more of it")
    monkeypatch.setattr(drafts, "load", lambda name, dtype: lm)
    words = "--prompts 2 --tokens 64 --prompt-tokens 16 --max-new-tokens 8 --draft-tokens 3".split()
    assert drafts.main([*words, "--text", str(text), "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["script"] == "scripts/bench_drafts" and list(record["kinds"]) == ["text"]
    figures = record["kinds"]["text"]
    assert figures["text"][0]["file"] == "text.txt" and list(figures["teacher_forced"]) == ["mtp", "ngram"]
    for forced in figures["teacher_forced"].values():
        assert forced["tokens"] == 64 and forced["places"] == 64 - K >= forced["places_with_drafts"]
    rows = [(row["drafter"], row["temperature"]) for row in figures["generated"]]
    assert rows == [(None, 0), ("mtp", 0), ("mtp", 0.8), ("ngram", 0), ("ngram", 0.8)]
    for row in figures["generated"]:
        assert row["accepted"] <= row["drafted"] <= K * row["steps"] and row["steps"] <= row["new_tokens"] - 2
        assert row.get("rows_that_differ", 0) == 0
    assert "seed 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--drafters mtp,oracle", "--drafters must name drafters among mtp, ngram, got oracle"),
        ("--kinds code,poems", "--kinds must name kinds among text, code, logs, got poems"),
        ("--draft-tokens 16", "--draft-tokens must be a whole number from 1 to 15, got '16'"),
        ("--temperature 0", "--temperature must be a number above 0, got '0'"),
        ("--prompts 0", "--prompts must be a whole number of at least 1, got '0'"),
        ("--text nowhere.txt", "there is no nowhere.txt"),
        ("--kinds code,logs --text README.md", "--text is read as the kind text, which --kinds leaves out"),
    ],
)
def test_a_setting_out_of_range_is_an_error_that_names_it(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        drafts.parse(words.split())
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_what_the_model_or_the_text_cannot_serve_is_said(lm, tmp_path, monkeypatch, capsys):
    assert drafts.main(["--model", "nope"]) == 2
    assert capsys.readouterr().err.startswith("jaxbuf bench drafts: error: no model 'nope': expected ")
    text = tmp_path / "text.txt"
    text.write_text("too short")
    monkeypatch.setattr(drafts, "load", lambda name, dtype: lm)
    assert drafts.main(["--text", str(text)]) == 2
    assert "--prompt-tokens must be at most the longest document's (9), got 64" in capsys.readouterr().err
    monkeypatch.setattr(drafts.report, "ROOT", tmp_path)
    with pytest.raises(SystemExit):
        drafts.parse([])
    assert "--text must name files" in capsys.readouterr().err
    assert drafts.parse(["--kinds", "code,logs"]).text is None, "these need no files"

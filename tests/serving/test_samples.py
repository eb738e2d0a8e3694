"""Several samples of a prompt: the tokens of separate requests, for one reading of it, in memory that they share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

from jaxbuf.cli import app
from jaxbuf.models import cache as caches
from jaxbuf.models.config import ATTENTION, RECURRENCE
from jaxbuf.serving import SamplingParams, generate, generate_tokens
from jaxbuf.serving.batch import Decoding, make_batch
from jaxbuf.serving.drafters import MTP
from jaxbuf.serving.drafting import propose_ngram
from jaxbuf.serving.generation import read_prompts
from jaxbuf.serving.speculation import Proposal
from tests.serving.program import (
    carry_shape,
    check_on_device,
    check_reused,
    made_in_loops,
    programs_compiled,
    written_in_loops,
)
from tests.serving.speculating import random_qwen3_5
from tests.serving.ties import are_clear

NEW = 40  # crosses several folds at limit 16
# Log-probabilities are asked for everywhere, so that all tests share their programs.
ASKED = {"ignore_eos": True, "logprobs": 5, "prompt_logprobs": 2}
SETTINGS = [
    SamplingParams(temperature=0.9, seed=2**32 - 3, n=8, **ASKED),  # seeds that wrap around
    SamplingParams(temperature=0.0, **ASKED),
    SamplingParams(temperature=0.8, top_p=0.95, seed=5, presence_penalty=0.5, n=3, **ASKED),
    SamplingParams(temperature=0.0, frequency_penalty=0.3, n=2, **ASKED),
]
ROWS = [(0, j) for j in range(8)] + [(1, 0), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1)]


def draw_prompts(rng):
    """One that fills its pages, one of a single token, and others."""
    return [rng.integers(0, 256, n).tolist() for n in (64, 1, *rng.integers(2, 64, 2))]


@pytest.fixture(scope="module")
def case(lm):
    """Prompts and their samples, none of whose tokens is near a tie."""
    while True:
        prompts = draw_prompts(np.random.default_rng())
        with jax.numpy_dtype_promotion("strict"):  # as in the tests: it is part of what was compiled
            results = generate(lm, prompts, NEW, SETTINGS)
            samples = [results[index].samples[sample] for index, sample in ROWS]
            own = [separate(SETTINGS, *row) for row in ROWS]
            if all(are_clear(lm, [prompts[index] for index, _ in ROWS], samples, own)):
                return prompts, results


@pytest.fixture(scope="module")
def prompts(case):
    return case[0]


@pytest.fixture(scope="module")
def results(case):
    return case[1]


def separate(settings, index, sample):
    """The settings of a request that a sample should equal."""
    seed = (settings[index].seed + sample) % 2**32
    return dataclasses.replace(settings[index], seed=seed, n=1)


def check_separate(lm, prompts, results, settings=SETTINGS, **arguments):
    """Every sample is the result of a request of its own."""
    own = [separate(settings, *row) for row in ROWS]
    expected = generate(lm, [prompts[index] for index, _ in ROWS], NEW, own, **arguments)
    assert [len(result.samples) for result in results] == [setting.n for setting in settings]
    for (index, sample), theirs in zip(ROWS, expected, strict=True):
        ours = results[index].samples[sample]
        assert ours.tokens == theirs.tokens, (index, sample)
        same = ("text", "finish_reason", "stats")
        assert [getattr(ours, name) for name in same] == [getattr(theirs, name) for name in same]
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-4)
        np.testing.assert_allclose(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], rtol=0, atol=1e-4)
        assert [*map(len, ours.top_logprobs)] == [5] * NEW and len(ours.prompt_top_logprobs) == len(prompts[index])


@pytest.mark.slow
@pytest.mark.checks("samples", family="qwen3_5")
def test_samples_are_the_requests_with_the_seeds_that_follow(lm, prompts, results):
    check_separate(lm, prompts, results)
    assert [result.samples[0] is result for result in results] == [True] * 4
    different = [len({tuple(sample.tokens) for sample in result.samples}) for result in results]
    assert different == [8, 1, 3, 1], "greedy samples are all the same"


@pytest.mark.slow
@pytest.mark.checks("samples", family="qwen3_5")
def test_the_recurrent_form_gives_the_same_samples(lm, prompts, results):
    for ours, theirs in zip(generate(lm, prompts, NEW, SETTINGS, form="recurrent"), results, strict=True):
        assert [sample.tokens for sample in ours.samples] == [sample.tokens for sample in theirs.samples]
        assert all(sample.stats.folds == NEW - 2 for sample in ours.samples)


@pytest.mark.slow
@pytest.mark.checks("samples", family="qwen3_5")
def test_streams_and_stop_strings_of_each_sample(lm, prompts, results):
    """A stop string from the middle of the fourth sample's text stops that one, and others where they have it."""
    texts = [sample.text for sample in results[0].samples]
    # Random bytes are often no UTF-8: most of these strings are two replacement characters, which every text has.
    stop = min((texts[3][i : i + 2] for i in range(8, 30)), key=lambda string: sum(string in text for text in texts))
    settings = [dataclasses.replace(SETTINGS[0], stop=stop), *SETTINGS[1:]]
    whole = generate(lm, prompts, NEW, settings)
    for segment in (1, 7):
        text, last, done = dict.fromkeys(ROWS, ""), {}, []
        for event in generate(lm, prompts, NEW, settings, stream=True, segment=segment):
            row = event.index, event.sample
            text[row] += event.text
            last[row] = event.result
            done += [row] * event.done
        assert sorted(done) == ROWS
        for index, sample in ROWS:
            expected = whole[index].samples[sample]
            assert text[index, sample] == expected.text
            assert dataclasses.replace(last[index, sample], stats=expected.stats) == dataclasses.replace(
                expected, other_samples=()
            )
    for ours, theirs in zip(whole[0].samples, texts, strict=True):
        assert (ours.text, ours.finish_reason) == (theirs.split(stop)[0], "stop" if stop in theirs else "length")
    assert {sample.finish_reason for sample in whole[0].samples} == {"stop", "length"}


def batch_of(lm, prompts, settings, new=NEW):
    return make_batch(lm, prompts, settings, Decoding(new))


def cursor_of(cache):
    return cache.shared[RECURRENCE].cursor


def table_of(cache):
    return cache.shared[ATTENTION].table


def test_all_rows_of_a_prompt_name_the_same_pages_and_the_same_checkpoint(lm, prompts, results):
    """Once they are read; at the end each has a checkpoint of its own, and still the pages that its prompt fills."""
    batch = batch_of(lm, prompts, SETTINGS)
    carry = read_prompts(lm, batch.sizes, batch.arrivals)
    tables, before = np.asarray(table_of(carry.cache)), cursor_of(carry.cache)
    checkpoints, blocks = np.asarray(before.checkpoint_of), np.asarray(before.block_table)
    assert not blocks.any(), "prefill folds all of the prompt: there is no entry yet"
    slots = {index: [1 + i for i, row in enumerate(ROWS) if row[0] == index] for index in range(4)}
    for index, prompt in enumerate(prompts):
        full, (first, *others) = len(prompt) // 16, slots[index]
        assert (tables[first, :full] > 0).all() and checkpoints[first] > 0
        assert (checkpoints[others] == checkpoints[first]).all()
        assert (tables[others, :full] == tables[first, :full]).all()
        last = tables[slots[index], full]
        assert len(set(last)) == len(last) if len(prompt) % 16 else not last.any()
    assert len(set(checkpoints[[slots[index][0] for index in range(4)]])) == 4
    after = generate_tokens(lm.model, carry, np.int32(NEW)).cache
    assert len(set(np.asarray(cursor_of(after).checkpoint_of)[1 : 1 + len(ROWS)])) == len(ROWS)
    assert (np.asarray(table_of(after))[1:9, :4] == tables[1:9, :4]).all(), "64 tokens are four full pages"


def nbytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def test_eight_samples_of_a_long_prompt_take_little_more_memory_than_one(lm):
    """Counted from the pytrees: what is attention's grows by what is generated, not by the prompt."""

    def cache_of(prompts, n):
        return carry_shape(batch_of(lm, prompts, SamplingParams(n=n), 24)).cache

    prompt = [1] * 900
    one, eight, separate = cache_of([prompt], 1), cache_of([prompt], 8), cache_of([prompt] * 8, 1)
    assert nbytes(eight) < 0.35 * nbytes(separate)
    pages = [cache.layers[1].keys.shape[0] - 1 for cache in (one, eight, separate)]
    # 1,024 tokens and 32 new ones: 66 pages each; of a prompt that ends on a page's first token 63 are shared.
    assert pages == [66, 63 + 8 * 3, 8 * 66]
    states = [cache.layers[0].pool.checkpoints.shape[0] - 1 for cache in (one, eight, separate)]
    assert states == [1, 8 + 1, 8]
    assert nbytes(eight.layers[0].pool.keys) == nbytes(separate.layers[0].pool.keys)


def test_one_sample_each_costs_nothing(lm, prompts):
    batch = batch_of(lm, prompts, SamplingParams(n=1))
    carry = carry_shape(batch)
    assert not batch.begins.forks and carry.cache.shared[ATTENTION].owners is None
    assert cursor_of(carry.cache).sharing is None


def test_a_generation_is_one_compilation_for_any_numbers_with_that_sum(lm, prompts, results):
    before = programs_compiled()
    for numbers in ((3, 3, 3, 3), (1, 13, 1, 1), (2, 5, 2, 1)):
        settings = [dataclasses.replace(setting, n=n) for setting, n in zip(SETTINGS, numbers, strict=True)]
        found = generate(lm, prompts, NEW, settings)
        assert [len(result.samples) for result in found] == list(numbers)
        for ours, theirs in zip(found, results, strict=True):
            for a, b in zip(ours.samples, theirs.samples, strict=False):
                assert a.tokens == b.tokens
    assert programs_compiled() == before


@pytest.fixture(scope="module")
def carry(lm):
    return carry_shape(batch_of(lm, [[1] * 30, [2] * 4], SamplingParams(temperature=0.5, n=4), 200))


@pytest.mark.slow
def test_the_loop_transfers_nothing_and_copies_no_pool(lm, carry):
    text = generate_tokens.lower(lm.model, carry, np.int32(9)).compile().as_text()
    check_on_device(text)
    assert written_in_loops(text, lm.config.spec.state_shape) == []
    assert made_in_loops(text, carry.cache.layers[1].keys.size) == []
    check_reused(text, carry)


@pytest.mark.exhaustive
def test_rows_that_memory_does_not_suffice_for_go_on_when_others_have_ended(lm, prompts, monkeypatch):
    settings = [dataclasses.replace(setting, n=4) for setting in SETTINGS]
    expected = generate(lm, prompts, NEW, settings)
    monkeypatch.setattr(
        "jaxbuf.serving.batch.forked_sizes", lambda **sizes: caches.forked_sizes(**sizes) | {"states": 11}
    )
    for ours, theirs in zip(generate(lm, prompts, NEW, settings), expected, strict=True):
        assert [sample.tokens for sample in ours.samples] == [sample.tokens for sample in theirs.samples]
        assert {sample.finish_reason for sample in ours.samples} == {"length"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Following:
    """Drafts as "ngram" does, as long as its state, which follows the tokens, knows the newest one."""

    draft_tokens: int = dataclasses.field(default=2, metadata={"static": True})

    def init(self, config, sizes):
        return jnp.zeros(sizes.rows, jnp.int32), jnp.zeros(sizes.rows)

    def admit(self, model, carry, reading):
        assert reading.hidden.shape[:2] == reading.tokens.shape
        return carry.last, carry.hidden[:, 0]

    def propose(self, model, carry, most):
        last, _ = carry.speculation.state
        drafts, count = propose_ngram(carry.history, self.draft_tokens)
        count = jnp.where(last == carry.last, jnp.minimum(count, most), 0)
        return Proposal(drafts, count), carry.speculation.state

    def settle(self, model, state, hidden, tokens, number):
        newest = jnp.take_along_axis(tokens, jnp.maximum(number - 1, 0)[:, None], axis=1)[:, 0]
        return jnp.where(number > 0, newest, state[0]), state[1]


@pytest.fixture(scope="module")
def drafting():
    """A model that drafts, and another."""
    return random_qwen3_5(3), random_qwen3_5(4)


def outcome_of(results):
    """The tokens, and the counts of drafts: a draft may change, and be right or wrong, without another token."""
    return [(sample.tokens, sample.stats) for result in results for sample in result.samples]


def models_beside(lm, rng):
    """The model with its embedding, which is its head too, moved a little, in two directions there and back: logits
    change by some 1e-4, a hundred times what they differ by between programs."""
    embedding = lm.model.embed_tokens[...]
    for change in jnp.asarray(1e-5 * rng.standard_normal((2, *embedding.shape)), embedding.dtype):
        for moved in (embedding + change, embedding - change):
            model = nnx.clone(lm.model)
            model.embed_tokens[...] = moved
            yield dataclasses.replace(lm, model=model)


@pytest.mark.checks("samples", family="qwen3_5")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("user", marks=pytest.mark.exhaustive),
        pytest.param("MTP tree", marks=pytest.mark.slow),
        pytest.param("model", marks=pytest.mark.exhaustive),
    ],
)
def test_drafters_take_samples(drafting, rng, name):
    lm, other = drafting
    drafter = {"model": other, "user": Following(), "MTP tree": MTP(5, branches=2)}[name]
    while True:
        prompts = draw_prompts(rng)
        found = generate(lm, prompts, NEW, SETTINGS, drafter=drafter)
        drafters = models_beside(other, rng) if name == "model" else [drafter] * 4
        pairs = zip(models_beside(lm, rng), drafters, strict=True)
        beside = (generate(near, prompts, NEW, SETTINGS, drafter=drafts) for near, drafts in pairs)
        if all(outcome_of(near) == outcome_of(found) for near in beside):
            break  # rounding decides nothing
    check_separate(lm, prompts, found, drafter=drafter)
    assert sum(sample.stats.drafted for result in found for sample in result.samples) > 100


def test_a_draft_models_memory_is_shared_and_an_mtp_layers_is_forked(drafting):
    lm, other = drafting

    def state_of(drafter, prompts, n):
        batch = make_batch(lm, prompts, SamplingParams(n=n), Decoding(24, drafter=drafter))
        return carry_shape(batch).speculation.state

    prompt = [1] * 900
    shared, separate = state_of(other, [prompt], 8), state_of(other, [prompt] * 8, 1)
    assert nbytes(shared) < 0.4 * nbytes(separate)
    forked, separate = state_of("mtp", [prompt], 8), state_of("mtp", [prompt] * 8, 1)
    assert jax.tree.map(jnp.shape, forked) == jax.tree.map(jnp.shape, separate)


def test_the_command_line_prints_each_text_under_its_heading(lm, prompts, results, monkeypatch):
    asked = {}

    def answer(model, prompts_given, *, stream, **settings):
        asked.update(settings)
        sample_events = generate(lm, prompts, NEW, SETTINGS, stream=True)
        yield from (event for event in sample_events if event.index == 0)

    monkeypatch.setattr("jaxbuf.generate", answer)
    done = CliRunner().invoke(app, ["generate", "A", "--samples", "8", "--temperature", "0.5", "--seed", "3"])
    assert done.exit_code == 0, done.stderr
    assert asked["sampling"] == SamplingParams(n=8, temperature=0.5, seed=3)
    expected = [f"sample {i} of 8 (length):\n{sample.text}\n" for i, sample in enumerate(results[0].samples, 1)]
    assert done.stdout_bytes.decode() == "".join(expected)  # done.stdout changes "\r\n", which random text may have
    stats = [sample.stats for sample in results[0].samples]
    assert f"64 tokens read, {8 * NEW} tokens in " in done.stderr
    assert f"{max(s.steps for s in stats)} steps of 8 samples, {sum(s.folds for s in stats)} folds" in done.stderr
    done = CliRunner().invoke(app, ["generate", "A", "--samples", "8"])
    assert "the samples are all the same" in done.stderr
    for samples in ("0", "1025", "99999999999"):
        done = CliRunner().invoke(app, ["generate", "A", "--samples", samples, "--model", "no-such-model"])
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr == f"error: --samples must be a whole number from 1 to 1024, got '{samples}'\n"


def test_prompts_that_draw_the_same_are_told(lm, caplog):
    """A loop that repeats a prompt, and not its seeds, would get one text several times."""

    def told(prompts, settings):
        caplog.clear()
        generate(lm, prompts, 4, settings, stream=True).close()  # it is told before anything runs
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    drawn, text, other = SamplingParams(temperature=0.9), [1, 2, 3], [1, 2]
    (message,) = told([text, other, text, text], drawn)
    assert message.startswith("prompts 0 and 2 are the same and have samples of the same seed, 0: ")
    (message,) = told([text, text], [dataclasses.replace(drawn, n=4), dataclasses.replace(drawn, seed=3)])
    assert "of the same seed, 3" in message
    assert told([text, text], [dataclasses.replace(drawn, n=4), dataclasses.replace(drawn, seed=4)]) == []
    assert told([text, text], SamplingParams(temperature=0.0)) == told([text, other], drawn) == []
    assert told([text, text], [drawn, dataclasses.replace(drawn, temperature=0.8)]) == []

"""Speculative decoding: a drafter changes no greedy token and no distribution, whatever it drafts."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

from jaxbuf.attention.paged import PagedKV
from jaxbuf.cli import app
from jaxbuf.models.language_model import LanguageModel, load
from jaxbuf.recurrence.traffic import entry_bytes
from jaxbuf.serving import SamplingParams, acceptance, generate, generate_tokens, speculation
from jaxbuf.serving.adaptive import Adaptive
from jaxbuf.serving.batch import Decoding, make_batch
from jaxbuf.serving.beams import beam_search
from jaxbuf.serving.drafters import MTP, DraftModel, NGram
from jaxbuf.serving.own_drafter import MOST_DRAFTS
from jaxbuf.serving.sampling import noise, pack
from jaxbuf.serving.stats import checkpoint_bytes
from jaxbuf.serving.token_masks import pack_mask
from tests.serving.goodness import RARE
from tests.serving.program import carry_shape, check_on_device, check_reused, programs_compiled, written_in_loops
from tests.serving.speculating import (
    DRAFTS,
    GREEDY,
    NEW,
    ROWS,
    VOCAB,
    check_equal,
    model_named,
    p_value,
    script,
    tiny_models,
)
from tests.serving.speculating import architecture as architecture
from tests.serving.speculating import greedy as greedy
from tests.serving.speculating import lm as lm
from tests.serving.speculating import prompts as prompts
from tests.serving.texts import history_of


def some_slow(*slow, exhaustive):
    """Parameters `name`, of which the latter run under --exhaustive alone."""
    marked = [pytest.param(name, marks=pytest.mark.slow) for name in slow]
    marked += [pytest.param(name, marks=pytest.mark.exhaustive) for name in exhaustive]
    return pytest.mark.parametrize("name", marked)


@pytest.fixture(scope="module")
def other(architecture):
    return model_named(architecture, 4)


def drafter_named(name, lm, other):
    if name == "mtp" and lm.model.mtp is None:
        pytest.skip("the architecture has no MTP layer")
    return {"model": other, "itself": lm}.get(name, name)


@pytest.mark.checks("drafters")
@some_slow("mtp", exhaustive=("itself", "ngram", "model"))
def test_greedy_tokens_are_those_without_a_drafter(lm, other, prompts, greedy, name):
    """Random models: the MTP layer and the other model are nearly always wrong, the model itself is always right."""
    drafter = drafter_named(name, lm, other)
    results = generate(lm, prompts, NEW, GREEDY, drafter=drafter, draft_tokens=DRAFTS)
    check_equal(lm, prompts, results, greedy)
    for result in results:
        stats = result.stats
        assert 0 <= stats.accepted <= stats.drafted <= DRAFTS * stats.steps
        assert stats.accepted + stats.steps == NEW - 1
        assert stats.mean_accepted_length == (NEW - 1) / stats.steps
    accepted, drafted = (sum(getattr(r.stats, name) for r in results) for name in ("accepted", "drafted"))
    if name in ("mtp", "model"):
        assert drafted > 100 and accepted < 0.2 * drafted
    if name == "itself":
        assert accepted == drafted and all(r.stats.steps == -(-(NEW - 1) // (1 + DRAFTS)) for r in results)


@pytest.mark.checks("drafters")
def test_drafts_that_are_right_wrong_or_both_change_no_token(lm, prompts, greedy):
    """By row: all right, all wrong, right then wrong, none, fewer, and in turns; the steps are counted by hand."""
    alternating = [[4, 0], [0, 4]]
    right = [[4, 4], [0, 0], [2, 2], [4, 4], [3, 3], *alternating, [1, 3]]
    count = [[4, 4], [4, 4], [4, 4], [0, 0], [2, 2], [4, 4], [4, 4], [4, 1]]
    results = generate(lm, prompts, NEW, GREEDY, drafter=script(greedy, right, count))
    assert check_equal(lm, prompts, results, greedy) == 0
    for row, result in enumerate(results):
        tokens, steps, drafted, accepted = 1, 0, 0, 0
        while tokens < NEW:
            drafts = min(count[row][tokens % 2], NEW - tokens - 1)
            kept = min(right[row][tokens % 2], drafts)
            tokens, steps, drafted, accepted = tokens + kept + 1, steps + 1, drafted + drafts, accepted + kept
        stats = result.stats
        assert (stats.steps, stats.drafted, stats.accepted) == (steps, drafted, accepted), row


@pytest.mark.checks("drafters")
def test_the_recurrent_form_and_small_limits_take_drafts_too(lm, prompts, greedy):
    """Every step folds what was accepted before, and never a draft that was rejected."""
    drafter = script(greedy, [0, 1, 2, 3, 4, 2, 1, 0])
    for form in ("recurrent", "buffered"):
        results = generate(lm, prompts, NEW, GREEDY, drafter=drafter, form=form)
        assert check_equal(lm, prompts, results, greedy) == 0
        for result in results:
            assert form == "buffered" or not lm.config.specs or result.stats.folds == result.stats.steps - 1


def test_bytes_of_the_state_are_those_of_a_count_by_hand(lm, prompts, greedy):
    spec, layers = lm.config.spec, len(lm.config.specs)
    if spec is None:
        (result, *_) = generate(lm, prompts, NEW, GREEDY, drafter=script(greedy, 2))
        assert (result.stats.bytes, result.stats.folds, result.stats.snapshot_bytes) == (0, 0, 0)
        return
    state, entry = checkpoint_bytes(spec, "float32"), entry_bytes(spec, "float32")
    right = 2
    for result in generate(lm, prompts, NEW, GREEDY, drafter=script(greedy, right)):
        steps = folds = live = length = read = 0
        tokens = 1
        while tokens < NEW:
            drafts = min(DRAFTS, NEW - tokens - 1)
            live += length
            if length and length + 1 + drafts > 16:
                folds, length = folds + 1, 0
            kept = min(right, drafts) + 1
            tokens, length, steps, read = tokens + kept, length + kept, steps + 1, read + 1 + drafts
        stats = result.stats
        assert (stats.steps, stats.folds, stats.live_entries, stats.drafted) == (steps, folds, live, read - steps)
        assert stats.bytes == layers * (state * (steps + folds) + entry * (live + read))
        assert stats.snapshot_bytes == layers * state * (steps + read)


@pytest.mark.checks("drafters")
def test_a_stop_token_inside_an_accepted_run_ends_the_row_there(lm, prompts, greedy):
    stops = [result.tokens[5 + row] for row, result in enumerate(greedy)]
    sampling = [dataclasses.replace(GREEDY, stop_token_ids=(stop,)) for stop in stops]
    plain = generate(lm, prompts, NEW, sampling)
    found = generate(lm, prompts, NEW, sampling, drafter=script(greedy, DRAFTS))
    for stop, ours, theirs in zip(stops, found, plain, strict=True):
        assert ours.tokens == theirs.tokens and ours.tokens.count(stop) == 1
        assert (ours.finish_reason, ours.text) == ("stop", theirs.text)
    assert any((len(result.tokens) - 1) % (1 + DRAFTS) for result in found)  # not the last of its run


def test_no_step_goes_past_max_new_tokens(lm, prompts, greedy):
    for new in (33, 34, 35, 36, 37):
        results = generate(lm, prompts, new, GREEDY, drafter=script(greedy, DRAFTS))
        assert [r.tokens for r in results] == [r.tokens[:new] for r in greedy]
        assert all(r.finish_reason == "length" for r in results)
        assert all(r.stats.accepted + r.stats.steps == new - 1 for r in results)


def test_streams_give_the_same_text(lm, prompts, greedy):
    drafter = script(greedy, [0, 1, 2, 3, 4, 0, 4, 2])
    stops = [result.text[9 + row : 12 + row] for row, result in enumerate(greedy)]
    stopping = [dataclasses.replace(GREEDY, stop=stop) for stop in stops]
    for sampling in (GREEDY, stopping):
        plain = generate(lm, prompts, NEW, sampling)
        for segment in (1, 3):
            text, last = [""] * ROWS, {}
            for event in generate(lm, prompts, NEW, sampling, drafter=drafter, stream=True, segment=segment):
                text[event.index] += event.text
                last[event.index] = event.result
            assert text == [result.text for result in plain]
            for row, result in enumerate(plain):
                assert (last[row].tokens, last[row].finish_reason) == (result.tokens, result.finish_reason)


@pytest.mark.checks("drafters")
def test_settings_see_the_drafts_before_a_token_as_generated(lm, prompts, greedy):
    """Penalties and min_tokens of every row, with drafts that are right, and with those of the text without them."""
    extras = [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.0},
        {"logit_bias": {greedy[3].tokens[0]: -np.inf, 66: 1.0}, "frequency_penalty": 0.5},
        {"stop_token_ids": (greedy[4].tokens[2],), "min_tokens": 7},
        {"min_tokens": 12, "presence_penalty": -1.0, "stop_token_ids": tuple(greedy[5].tokens[:3])},
        {"frequency_penalty": -0.5},
        {},
    ]
    sampling = [dataclasses.replace(GREEDY, **extra) for extra in extras]
    plain = generate(lm, prompts, NEW, sampling)
    assert sum(a.tokens != b.tokens for a, b in zip(plain, greedy, strict=True)) >= 5
    for known in (plain, greedy):
        results = generate(lm, prompts, NEW, sampling, drafter=script(known, DRAFTS))
        same = [ours.tokens == theirs.tokens for ours, theirs in zip(results, plain, strict=True)]
        assert sum(same) >= ROWS - 1  # one may be a tie
        if known is plain:
            assert sum(r.stats.accepted == r.stats.drafted for r in results[:4]) >= 3


@pytest.mark.checks("drafters")
def test_logprobs_are_those_without_a_drafter(lm, prompts, greedy):
    for result, plain in zip(
        generate(lm, prompts, NEW, GREEDY, drafter=script(greedy, [4, 3, 2, 1, 0, 4, 2, 0])), greedy, strict=True
    ):
        np.testing.assert_allclose(result.logprobs, plain.logprobs, rtol=0, atol=1e-4)
        for ours, theirs in zip(result.top_logprobs, plain.top_logprobs, strict=True):
            np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=0, atol=1e-4)


@some_slow("mtp", exhaustive=("ngram", "model"))
def test_a_rows_tokens_depend_neither_on_the_other_rows_nor_on_the_cut_into_calls(lm, other, prompts, greedy, name):
    """Sampled and greedy rows in one batch; then every other row has another prompt, and the calls are short."""
    drafter = drafter_named(name, lm, other)
    sampled = [SamplingParams(temperature=0.8, top_p=0.9, seed=i, ignore_eos=True, logprobs=5) for i in range(ROWS)]
    mixed = [GREEDY if i % 4 == 0 else setting for i, setting in enumerate(sampled)]
    results = generate(lm, prompts, NEW, mixed, drafter=drafter)
    check_equal(lm, prompts[::4], results[::4], greedy[::4])
    others = [prompt if i % 2 else prompts[0] for i, prompt in enumerate(prompts)]
    events = generate(lm, others, NEW, sampled, drafter=drafter, stream=True, segment=5)
    last = {event.index: event.result for event in events}
    assert [last[i].tokens for i in range(1, ROWS, 2)] == [results[i].tokens for i in range(1, ROWS, 2)]
    assert all(results[i].tokens != greedy[i].tokens for i in range(1, ROWS, 2))


def test_a_generation_is_one_compilation(lm, prompts, greedy):
    """The same one whatever the settings, the form, the number of tokens and the calls that it is cut into."""

    def compiled():
        return np.array(programs_compiled())

    before = None
    for sampling in (GREEDY, dataclasses.replace(GREEDY, temperature=1.0, presence_penalty=0.5, stop="e")):
        generate(lm, prompts, NEW, sampling, drafter=script(greedy, DRAFTS))
        before = compiled() if before is None else before
        other = script(greedy, 1, 2)
        list(generate(lm, prompts[1:], NEW - 3, sampling, drafter=other, form="recurrent", stream=True, segment=2))
    assert (compiled() == before).all()


def carry_of(lm, prompts, drafter):
    batch = make_batch(lm, prompts, GREEDY, Decoding(NEW, drafter=drafter, draft_tokens=DRAFTS))
    return batch.drafter, carry_shape(batch)


def test_drafts_cost_entries_and_no_states(lm, prompts):
    """From the carry's bytes: at most max_pending entries' blocks a layer and slot, and inputs of the convolution; a
    tree costs what a chain does, and places of the softmax layers that it may leave open."""

    def nbytes(tree):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    drafters = (None, "ngram", NGram(DRAFTS, branches=2))
    plain, *verifying = (carry_of(lm, prompts, drafter)[1].cache for drafter in drafters)
    spec, blocks = lm.config.spec, 8 * -(-(1 + DRAFTS) // 8)
    for cache, page in zip(verifying, (0, 16), strict=True):
        for before, after in zip(plain.layers, cache.layers, strict=True):
            if isinstance(before, PagedKV):
                places = [layer.keys.shape[0] * layer.keys.shape[1] for layer in (before, after)]
                assert places[1] - places[0] <= ROWS * page
                assert before.keys.shape[1:] == after.keys.shape[1:]
                continue
            assert after.pool.checkpoints.shape == before.pool.checkpoints.shape
            assert 0 <= nbytes(after.pool) - nbytes(before.pool) <= ROWS * blocks * entry_bytes(spec, "float32")
            assert after.ring.size - before.ring.size == (ROWS + 1) * DRAFTS * next(lm.config.mixers).channels


@some_slow("mtp", exhaustive=("ngram", "model"))
def test_the_loop_never_talks_to_the_host_and_writes_no_state_unless_a_slot_folds(lm, other, prompts, name):
    drafter, carry = carry_of(lm, prompts, drafter_named(name, lm, other))
    text = generate_tokens.lower(lm.model, carry, np.int32(9), drafter).compile().as_text()
    check_on_device(text)
    spec = lm.config.spec
    if spec is not None and spec.delta:  # without the rule XLA's CPU compiler gathers the states, and makes a dot
        assert written_in_loops(text, spec.state_shape) == []
    check_reused(text, carry)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"drafter": "beam"}, 'drafter must be None, "ngram", "mtp", a LanguageModel or a Drafter .*, got \'beam\'$'),
        ({"drafter": 4}, "drafter must be .* got 4$"),
        ({"drafter": MTP}, "drafter must be .* got <class .*MTP'>$"),
        ({"drafter": nnx.Param(0)}, "drafter must be .* got a Param$"),
        ({"drafter": Adaptive("mtp")}, "drafter must be .* got 'mtp' in an Adaptive$"),
        ({"drafter": SimpleNamespace(draft_tokens=2, init=0)}, "drafter must be .* without admit, propose, settle$"),
        ({"drafter": DraftModel("demo", 4)}, "model of a DraftModel must be .* got a str"),
        ({"stream": "yes"}, "stream must be True or False, got 'yes'"),
        ({"draft_tokens": 0}, rf"draft_tokens must be a whole number in \[1, {MOST_DRAFTS}\], got 0"),
        ({"drafter": "ngram", "draft_tokens": 16}, rf"draft_tokens must be .* \[1, {MOST_DRAFTS}\], got 16"),
        ({"draft_tokens": 2.0}, "draft_tokens must be a whole number .* got 2.0"),
    ],
)
def test_a_wrong_argument_is_named(lm, arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(lm, [[1]], **arguments)


def test_what_is_no_model_is_named():
    for call in (generate, beam_search):
        with pytest.raises(ValueError, match=r"lm must be a LanguageModel, as jaxbuf.load returns it, got 'demo'"):
            call("demo", [[1]])


def test_a_drafter_must_fit_the_model(lm):
    without = dataclasses.replace(lm, model=nnx.clone(lm.model))
    without.model.mtp = None
    for drafter in ("mtp", MTP(6, branches=2), Adaptive(MTP(2))):
        with pytest.raises(ValueError, match='drafter "mtp" needs a model with an MTP layer'):
            generate(without, [[1]], drafter=drafter, stream=True)  # before a stream is read
    small = dataclasses.replace(lm, config=dataclasses.replace(lm.config, vocab_size=100))
    with pytest.raises(ValueError, match=r"drafter must have the model's vocabulary \(259 tokens\), got .* with 100"):
        generate(lm, [[1]], drafter=small)


WORDS = ["the", "configuration", "file", "error", "server", "build", "tests", "install", "cat", "path"]


@pytest.fixture(scope="module")
def hundred():
    """The demo model, 100 prompts, of which the last 40 repeat themselves, and their greedy results."""
    demo, rng = load("demo"), np.random.default_rng()
    prompts = [" ".join(rng.choice(WORDS, rng.integers(1, 8))) for _ in range(60)]
    prompts += [f"{' '.join(rng.choice(WORDS, 3))}. " * 3 for _ in range(40)]
    prompts = [demo.encode(prompt[0].upper() + prompt[1:]) for prompt in prompts]
    return demo, prompts, generate(demo, prompts, NEW, GREEDY)


@some_slow(exhaustive=("mtp", "tree", "ngram", "model"))
def test_the_demo_models_greedy_tokens_are_the_same_with_every_drafter(hundred, name):
    """The draft model is the demo model in bfloat16; on repetitive prompts n-grams save forwards too."""
    demo, prompts, plain = hundred
    drafter = {"model": load("demo", "bfloat16"), "tree": MTP(6, branches=2)}.get(name, name)
    results = generate(demo, prompts, NEW, GREEDY, drafter=drafter)
    check_equal(demo, prompts, results, plain)
    lengths = [result.stats.mean_accepted_length for result in results]
    print(f"{name}: {np.mean(lengths[:60]):.2f} tokens a step, on repetitive prompts {np.mean(lengths[60:]):.2f}")
    assert np.mean(lengths[60:]) > 1.2


@pytest.mark.checks("drafters")
@some_slow("ngram", exhaustive=("mtp", "model"))
def test_sampled_tokens_are_distributed_as_by_exact_enumeration(architecture, rng, monkeypatch, name):
    lm, other = tiny_models(architecture)
    p = p_value(lm, drafter_named(name, lm, other), rng, monkeypatch)
    print(f"{name}: p = {p:.3g}")
    assert p > RARE


@pytest.mark.exhaustive
@pytest.mark.parametrize("mutant", ["always accept", "no residual"])
def test_the_same_check_flags_wrong_acceptance(architecture, rng, monkeypatch, mutant):
    def wrong(target, draft, drafts, count, key):
        accepted = count if mutant == "always accept" else acceptance.accept(target, draft, drafts, count, key)[0]
        after = jnp.take_along_axis(target, accepted[:, None, None], axis=1)[:, 0]
        return accepted, jnp.argmax(after + noise(key, VOCAB), axis=-1).astype(jnp.int32)

    monkeypatch.setattr(speculation, "accept", wrong)
    generate_tokens.clear_cache()
    try:
        assert p_value(*tiny_models(architecture), rng, monkeypatch, batches=1) < 1e-9
    finally:
        generate_tokens.clear_cache()


def test_the_command_line_names_a_drafter_or_loads_one(monkeypatch):
    asked = {}

    def stop_there(lm, prompts, **settings):
        asked.update(settings)
        raise ValueError("enough")

    monkeypatch.setattr("jaxbuf.generate", stop_there)
    for name in ("ngram", "mtp", "demo"):
        done = CliRunner().invoke(app, ["generate", "A", "--drafter", name, "--draft-tokens", "3"])
        assert done.exit_code == 2 and "enough" in done.stderr
        drafter = asked["drafter"]
        assert drafter == name or (name == "demo" and isinstance(drafter, LanguageModel))
        assert asked["draft_tokens"] == 3 and "adaptive_drafts" not in asked
    for name, tree in (("ngram", NGram(6, branches=2)), ("mtp", MTP(6, branches=2))):
        options = ["--drafter", name, "--draft-tokens", "6", "--branches", "2", "--adaptive-drafts"]
        done = CliRunner().invoke(app, ["generate", "A", *options])
        assert done.exit_code == 2 and "enough" in done.stderr
        assert (asked["drafter"], asked["adaptive_drafts"]) == (tree, True)


@pytest.mark.parametrize("command", [["generate", "A"], ["chat"]])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--draft-tokens 16", "--draft-tokens must be a whole number from 1 to 15, got '16'"),
        ("--draft-tokens 3", "--draft-tokens must come with a --drafter: ngram, mtp or a model"),
        ("--branches 2 --adaptive-drafts", "--branches, --adaptive-drafts must come with a --drafter: ngram, mtp or"),
        ("--drafter a/b --branches 2", "--branches must come with --drafter ngram or mtp, got a/b: it drafts no"),
        ("--drafter mtp --branches 5", "--branches must be a whole number in [1, 4], up to --draft-tokens, got 5"),
    ],
)
def test_the_command_line_ignores_no_option_of_drafts(command, options, message):
    done = CliRunner().invoke(app, [*command, "--model", "no-such-model", *options.split()])
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {message}")


@pytest.mark.parametrize("tree", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("drawn", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_rows_that_are_judged_in_blocks_get_what_all_together_get(rng, monkeypatch, tree, drawn):
    """As a TPU judges them: six rows, greedy and drawn ones, two at a time, or one."""
    rows, places, vocab, capacity = 6, 4, 300, 24
    logits = rng.standard_normal((rows, places, vocab)).astype(np.float32) * 3
    drafts = rng.integers(0, vocab, (rows, places - 1)).astype(np.int32)
    drafts[::2, 0] = logits[::2, 0].argmax(-1)
    log_q = jax.nn.log_softmax(jnp.asarray(rng.standard_normal((rows, places - 1, vocab)), jnp.float32))
    parents = jnp.asarray(np.array([[-1, -1, 0], [-1, 0, 0], [-1, 0, 1]] * 2), jnp.int32) if tree else None
    settings = [
        SamplingParams(temperature=temperature, top_k=top_k, presence_penalty=penalty, seed=int(rng.integers(2**32)))
        for temperature, top_k, penalty in zip(
            [0, 0.7, 1, 0, 0.9, 1], [0, 0, 20, 0, 200, 0], [0, 0, 0, 1, 1, 0], strict=True
        )
    ]
    texts = rng.integers(0, vocab, (2, rows, capacity // 2))
    judged = speculation.Judged(
        pack(settings),
        history_of(texts[0], np.full(rows, 8), texts[1], rng.integers(1, 6, rows), np.full((rows, 1), -1)),
        jnp.asarray(np.tile(pack_mask(rng.random(vocab) < 0.9), (rows, 1))),
        jnp.asarray(rng.integers(9, 14, rows), jnp.int32),
        speculation.Proposal(
            jnp.asarray(drafts), jnp.asarray([3, 2, 3, 1, 3, 0], jnp.int32), log_q if drawn else None, parents
        ),
        jnp.asarray(logits),
    )
    judge, sizes = speculation.judge, []
    whole = jax.jit(judge)(judged)
    monkeypatch.setattr(speculation, "judge", lambda part: sizes.append(part.logits.shape[0]) or judge(part))
    for at_once in (2, 0):
        monkeypatch.setattr(speculation, "JUDGED_BYTES", at_once * logits[0].nbytes)
        parts = jax.jit(lambda judged: speculation.judge_in_blocks(judged))(judged)
        assert len(parts) == len(whole) == 3 + tree
        for part, expected in zip(parts, whole, strict=True):
            np.testing.assert_array_equal(part, expected)
    assert set(sizes) == {2, 1}

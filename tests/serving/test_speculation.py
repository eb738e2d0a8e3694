"""Speculative decoding: a drafter changes no greedy token and no distribution, whatever it drafts."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

from jaxbuf.attention.paged import PagedKV
from jaxbuf.cli import app
from jaxbuf.models.language_model import LanguageModel, load
from jaxbuf.models.qwen3_5 import Qwen3_5
from jaxbuf.models.qwen3_5_config import Config
from jaxbuf.recurrence.traffic import entry_bytes
from jaxbuf.serving import SamplingParams, acceptance, generate, generate_tokens, request, speculation, start
from jaxbuf.serving.sampling import noise
from jaxbuf.serving.speculation import MOST_DRAFTS, Proposal
from jaxbuf.serving.stats import checkpoint_bytes
from tests.serving.conftest import CONFIG, byte_tokenizer
from tests.serving.goodness import chi_square_tail
from tests.serving.program import loop_bodies, written_in_loops

NEW, DRAFTS, ROWS = 40, 4, 8
# Log-probabilities are asked for everywhere, so that all tests share their programs.
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=5)
TIE = 1e-4


def random_model(seed: int, **changes) -> LanguageModel:
    """A model whose parameters are all random; `changes` are of its configuration."""
    config = Config.from_dict({**CONFIG, "mtp_num_hidden_layers": 1, **changes})
    leaves, tree = jax.tree.flatten(nnx.eval_shape(lambda: Qwen3_5(config, rngs=nnx.Rngs(seed))))
    rng = np.random.default_rng(seed)
    noisy = [jnp.asarray(0.15 * rng.standard_normal(x.shape), x.dtype) for x in leaves]
    tokenizer = byte_tokenizer() if config.vocab_size == CONFIG["vocab_size"] else None
    return LanguageModel(jax.tree.unflatten(tree, noisy), config, tokenizer, {}, jnp.dtype("float32"), "tiny")


@pytest.fixture(scope="module")
def lm():
    return random_model(3)


@pytest.fixture(scope="module")
def other():
    return random_model(4)


@pytest.fixture(scope="module")
def case(lm):
    """Prompts of lengths 1 to 64, the ends included, and their greedy results, none of which is near a tie."""
    rng = np.random.default_rng()
    while True:
        prompts = [rng.integers(0, 256, n).tolist() for n in [1, 64, *rng.integers(2, 64, ROWS - 2)]]
        with jax.numpy_dtype_promotion("strict"):  # as in the tests: it is part of what was compiled
            results = generate(lm, prompts, NEW, GREEDY)
        if all(not near_tie(lm, result) for result in results):
            return prompts, results


@pytest.fixture(scope="module")
def prompts(case):
    return case[0]


@pytest.fixture(scope="module")
def greedy(case):
    return case[1]


def near_tie(lm, result) -> bool:
    """Whether some token was hardly better than another."""
    steps = zip(result.tokens, result.logprobs, result.top_logprobs, strict=True)
    return any(
        chosen - other < TIE
        for token, chosen, top in steps
        for candidate, other in top.items()
        if candidate != token and lm.known_ids[candidate]
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scripted:
    """Knows the tokens that will come, and drafts some of them right, the next one wrong and the others right again.

    Its state counts the tokens so far.

    Attributes:
      answers: int32 [rows, n], the tokens that will come.
      right, count: int32 [rows, m]: right drafts before a wrong one, and drafts, when m divides the tokens so far with
        the remainder of the column.
    """

    answers: jax.Array
    right: jax.Array
    count: jax.Array
    draft_tokens: int = dataclasses.field(default=DRAFTS, metadata={"static": True})

    def start(self, model, carry, hidden, *, capacity, limit):
        return carry.history.count

    def propose(self, model, carry, most):
        so_far = carry.speculation.state
        now = (so_far % self.right.shape[1])[:, None]
        right, count = (jnp.take_along_axis(x, now, axis=1) for x in (self.right, self.count))
        ahead = jnp.arange(self.draft_tokens, dtype=jnp.int32)[None]
        place = jnp.minimum(so_far[:, None] + ahead, self.answers.shape[1] - 1)
        drafts = jnp.take_along_axis(self.answers, place, axis=1)
        return Proposal(jnp.where(ahead == right, (drafts + 1) % 256, drafts), jnp.minimum(count[:, 0], most)), so_far

    def settle(self, model, state, hidden, tokens, number):
        return state + number


def script(results, right, count=DRAFTS) -> Scripted:
    """From the results of a generation; right and count are a number, one a row, or a table."""

    def table(x):
        x = np.asarray(x, np.int32)
        return jnp.asarray(np.broadcast_to(x if x.ndim == 2 else x.reshape(-1, 1), (ROWS, 2)))

    answers = np.zeros((ROWS, NEW), np.int32)
    for row, result in enumerate(results):
        answers[row, : len(result.tokens)] = result.tokens
    return Scripted(jnp.asarray(answers), table(right), table(count))


def check_equal(lm, prompts, found, expected) -> int:
    """Tokens are equal, or first differ where the two best logits are a tie; returns in how many rows they do."""
    ties = 0
    for prompt, ours, theirs in zip(prompts, found, expected, strict=True):
        assert len(ours.tokens) == len(theirs.tokens)
        if ours.tokens == theirs.tokens:
            continue
        place = next(i for i, (a, b) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)) if a != b)
        logits = np.asarray(lm.logits(np.array([prompt + theirs.tokens[:place]])))[0, -1]
        second, first = np.sort(np.where(lm.known_ids, logits, -np.inf))[-2:]
        assert first - second < TIE, place
        ties += 1
    print(f"{ties} of {len(found)} rows differ from a tie on")
    return ties


def drafter_named(name, lm, other):
    return {"model": other, "itself": lm}.get(name, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ngram", "mtp", "model", "itself"])
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


def test_the_recurrent_form_and_small_limits_take_drafts_too(lm, prompts, greedy):
    """Every step folds what was accepted before, and never a draft that was rejected."""
    drafter = script(greedy, [0, 1, 2, 3, 4, 2, 1, 0])
    for form in ("recurrent", "buffered"):
        results = generate(lm, prompts, NEW, GREEDY, drafter=drafter, form=form)
        assert check_equal(lm, prompts, results, greedy) == 0
        for result in results:
            assert form == "buffered" or result.stats.folds == result.stats.steps - 1


def test_bytes_of_the_state_are_those_of_a_count_by_hand(lm, prompts, greedy):
    spec, layers = lm.config.spec, lm.config.layer_types.count("linear_attention")
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


def test_logprobs_are_those_without_a_drafter(lm, prompts, greedy):
    for result, plain in zip(
        generate(lm, prompts, NEW, GREEDY, drafter=script(greedy, [4, 3, 2, 1, 0, 4, 2, 0])), greedy, strict=True
    ):
        np.testing.assert_allclose(result.logprobs, plain.logprobs, rtol=0, atol=1e-4)
        for ours, theirs in zip(result.top_logprobs, plain.top_logprobs, strict=True):
            np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ngram", "mtp", "model"])
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
        return np.array([start._cache_size(), generate_tokens._cache_size()])

    before = None
    for sampling in (GREEDY, dataclasses.replace(GREEDY, temperature=1.0, presence_penalty=0.5, stop="e")):
        generate(lm, prompts, NEW, sampling, drafter=script(greedy, DRAFTS))
        before = compiled() if before is None else before
        other = script(greedy, 1, 2)
        list(generate(lm, prompts[1:], NEW - 3, sampling, drafter=other, form="recurrent", stream=True, segment=2))
    assert (compiled() == before).all()


def carry_of(lm, prompts, drafter):
    arguments = request.check(lm, prompts, NEW, GREEDY, 16, "auto", None, drafter, DRAFTS).arguments
    return arguments["drafter"], jax.eval_shape(lambda model: start(model, **arguments), lm.model)


def test_drafts_cost_entries_and_no_states(lm, prompts):
    """From the carry's bytes: at most max_pending entries' blocks a layer and slot, and inputs of the convolution."""

    def nbytes(tree):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    plain, verifying = (carry_of(lm, prompts, drafter)[1].cache for drafter in (None, "ngram"))
    spec, blocks = lm.config.spec, 8 * -(-(1 + DRAFTS) // 8)
    for before, after in zip(plain.layers, verifying.layers, strict=True):
        if isinstance(before, PagedKV):
            assert jax.tree.map(jnp.shape, before) == jax.tree.map(jnp.shape, after)
            continue
        assert after.pool.checkpoints.shape == before.pool.checkpoints.shape
        assert 0 <= nbytes(after.pool) - nbytes(before.pool) <= ROWS * blocks * entry_bytes(spec, "float32")
        assert after.ring.size - before.ring.size == (ROWS + 1) * DRAFTS * lm.config.convolution_channels


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ngram", "mtp", "model"])
def test_the_loop_never_talks_to_the_host_and_writes_no_state_unless_a_slot_folds(lm, other, prompts, name):
    drafter, carry = carry_of(lm, prompts, drafter_named(name, lm, other))
    text = generate_tokens.lower(lm.model, carry, np.int32(9), drafter).compile().as_text()
    assert loop_bodies(text)
    for word in ("infeed", "outfeed", "send(", "recv(", "callback", "host_"):
        assert word not in text, word
    assert written_in_loops(text, lm.config.spec.state_shape) == []
    header = text.splitlines()[0]
    assert header.count("may-alias") + header.count("must-alias") == len(jax.tree.leaves(carry))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"drafter": "beam"}, 'drafter must be None, "ngram", "mtp", a LanguageModel or a Drafter, got \'beam\''),
        ({"drafter": 4}, "drafter must be .* got 4"),
        ({"draft_tokens": 0}, rf"draft_tokens must be a whole number in \[1, {MOST_DRAFTS}\], got 0"),
        ({"drafter": "ngram", "draft_tokens": 16}, rf"draft_tokens must be .* \[1, {MOST_DRAFTS}\], got 16"),
        ({"draft_tokens": 2.0}, "draft_tokens must be a whole number .* got 2.0"),
    ],
)
def test_a_wrong_argument_is_named(lm, arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(lm, [[1]], **arguments)


def test_a_drafter_must_fit_the_model(lm):
    without = dataclasses.replace(lm, model=nnx.clone(lm.model))
    without.model.mtp = None
    with pytest.raises(ValueError, match='drafter "mtp" needs a model with an MTP layer'):
        generate(without, [[1]], drafter="mtp")
    small = dataclasses.replace(lm, config=dataclasses.replace(lm.config, vocab_size=100))
    with pytest.raises(ValueError, match=r"drafter must have the model's vocabulary \(259 tokens\), got .* with 100"):
        generate(lm, [[1]], drafter=small)


WORDS = ["the", "configuration", "file", "error", "server", "build", "tests", "install", "cat", "path"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ngram", "mtp", "model"])
def test_the_demo_models_greedy_text_is_the_same_with_every_drafter(rng, name):
    """The draft model is the demo model in bfloat16; on repetitive prompts n-grams save forwards too."""
    demo = load("demo")
    prompts = [" ".join(rng.choice(WORDS, 4)) for _ in range(8)] + [f"{' '.join(rng.choice(WORDS, 3))}. " * 3] * 8
    prompts = [prompt[0].upper() + prompt[1:] for prompt in prompts]
    plain = generate(demo, prompts, 60, GREEDY)
    results = generate(demo, prompts, 60, GREEDY, drafter=load("demo", "bfloat16") if name == "model" else name)
    check_equal(demo, [demo.encode(prompt) for prompt in prompts], results, plain)
    lengths = [result.stats.mean_accepted_length for result in results]
    print(f"{name}: {np.mean(lengths[:8]):.2f} tokens a step, on repetitive prompts {np.mean(lengths[8:]):.2f}")
    assert np.mean(lengths[8:]) > 1.2


VOCAB, PROMPT, EACH, BATCHES = 5, [1, 3, 0, 2, 1, 4, 1, 3], 4096, 8
SETTINGS = {"temperature": 0.9, "top_p": 0.85, "frequency_penalty": 0.3, "ignore_eos": True}


def filtered(logits, generated):
    """The distribution that SETTINGS make of logits, float64 [VOCAB], after these generated tokens."""
    scaled = (logits - 0.3 * np.bincount(generated, minlength=VOCAB)) / 0.9
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p)
    kept = order[: 1 + np.searchsorted(np.cumsum(p[order]), 0.85)]
    out = np.zeros(VOCAB)
    out[kept] = p[kept] / p[kept].sum()
    return out


def joint_distribution(lm):
    """Of the second, third and fourth token after PROMPT, float64 [VOCAB] * 3, from the plain forward."""
    prefixes = np.stack(np.meshgrid(*[np.arange(VOCAB)] * 3, indexing="ij"), -1).reshape(-1, 3)
    logits = np.asarray(lm.logits(np.concatenate([np.tile(PROMPT, (len(prefixes), 1)), prefixes], 1)), np.float64)
    joint = np.zeros([VOCAB] * 4)
    for prefix, rows in zip(prefixes, logits[:, len(PROMPT) - 1 :], strict=True):
        p = [filtered(rows[i], prefix[:i]) for i in range(4)]
        joint[tuple(prefix)] = np.prod([p[i][prefix[i]] for i in range(3)]) * p[3]
    np.testing.assert_allclose(joint.sum(), 1)
    return joint.sum(0)


def p_value(lm, drafter, rng):
    """Of three tokens of each of BATCHES * EACH rows, against exact enumeration."""
    counts, drafted = collections.Counter(), 0
    for _ in range(BATCHES):
        sampling = [SamplingParams(**SETTINGS, seed=int(seed)) for seed in rng.integers(0, 2**32, EACH)]
        for result in generate(lm, [PROMPT] * EACH, 5, sampling, drafter=drafter, draft_tokens=2):
            counts[tuple(result.tokens[1:4])] += 1
            drafted += result.stats.drafted
    assert drafted > EACH * BATCHES
    expected = {cell: p * EACH * BATCHES for cell, p in np.ndenumerate(joint_distribution(lm))}
    return chi_square_tail(counts, expected)


@pytest.fixture(scope="module")
def tiny():
    """Two models of five tokens; drafts are kept about as often as not."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "eos_token_id": 4}
    heads = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 8}
    return random_model(1, **sizes, **heads), random_model(2, **sizes, **heads)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ngram", "mtp", "model"])
def test_sampled_tokens_are_distributed_as_by_exact_enumeration(tiny, rng, monkeypatch, name):
    monkeypatch.setattr(request, "PROMPT_BUCKET", 8)
    monkeypatch.setattr(request, "ROOM", 8)
    lm, other = tiny
    p = p_value(lm, drafter_named(name, lm, other), rng)
    print(f"{name}: p = {p:.3g}")
    assert p > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ["always accept", "no residual"])
def test_the_same_check_flags_wrong_acceptance(tiny, rng, monkeypatch, mutant):
    def wrong(target, draft, drafts, count, key):
        accepted = count if mutant == "always accept" else acceptance.accept(target, draft, drafts, count, key)[0]
        after = jnp.take_along_axis(target, accepted[:, None, None], axis=1)[:, 0]
        return accepted, jnp.argmax(after + noise(key, VOCAB), axis=-1).astype(jnp.int32)

    monkeypatch.setattr(request, "PROMPT_BUCKET", 8)
    monkeypatch.setattr(request, "ROOM", 8)
    monkeypatch.setattr(speculation, "accept", wrong)
    monkeypatch.setattr("tests.serving.test_speculation.BATCHES", 2)
    generate_tokens.clear_cache()
    try:
        assert p_value(*tiny, rng) < 1e-9
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
        assert asked["draft_tokens"] == 3
    done = CliRunner().invoke(app, ["generate", "A", "--draft-tokens", "16"])
    assert done.exit_code == 2 and "draft_tokens must be a whole number in [1, 15], got 16" in done.stderr

"""Generation as people call it. Prompts and lengths are chosen so that few shapes are compiled."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from jaxbuf.models.decoder import Decoder
from jaxbuf.recurrence import RecurrenceSpec
from jaxbuf.serving import SamplingParams, generate, generate_tokens
from jaxbuf.serving import batch as batches
from jaxbuf.serving.batch import Decoding, make_batch
from jaxbuf.serving.generation import read_prompts
from jaxbuf.serving.prompts import begin_prompts, end_prompts, read_layer, start
from jaxbuf.serving.stats import checkpoint_bytes, entry_bytes
from tests.serving.program import programs_compiled
from tests.serving.ties import are_clear
from tests.tiny import changed

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
NEW = 40  # crosses several folds at limit 16


@pytest.fixture(scope="module")
def case(lm):
    """Eight prompts of lengths 1 to 200, the ends included, and their greedy results; none of their tokens, greedy or
    sampled, is near a tie: programs of other shapes must give the same."""
    rng = np.random.default_rng()
    while True:
        prompts = [rng.integers(0, 256, n).tolist() for n in [1, 200, *rng.integers(2, 200, 6)]]
        with jax.numpy_dtype_promotion("strict"):  # as in the tests: it is part of what was compiled
            greedy, sampled = (generate(lm, prompts, NEW, sampling) for sampling in (GREEDY, settings(8)))
            clear = are_clear(lm, prompts, greedy, [GREEDY] * 8) + are_clear(lm, prompts, sampled, settings(8))
        if all(clear):
            return prompts, greedy


@pytest.fixture(scope="module")
def prompts(case):
    return case[0]


@pytest.fixture(scope="module")
def greedy(case):
    return case[1]


def settings(count):
    return [
        SamplingParams(temperature=0.9, top_k=(0, 20)[i % 2], top_p=0.95, seed=i, ignore_eos=True) for i in range(count)
    ]


def test_greedy_tokens_are_the_full_forwards(lm, prompts, greedy):
    """Every token is the best one that the tokenizer has, by the plain forward over everything before it, or ties."""
    for row in (0, 1, 5):
        prompt, new = prompts[row], greedy[row].tokens
        assert len(new) == NEW
        logits = np.asarray(lm.logits(np.array([(prompt + new)[:-1] + [0] * (256 - len(prompt) - NEW + 1)])))[0]
        scores = np.where(lm.known_ids, logits[len(prompt) - 1 : len(prompt) + NEW - 1], -np.inf)
        assert (scores.max(-1) - scores[np.arange(NEW), new] < 1e-3).all()


@pytest.mark.slow
def test_batched_equals_one_by_one(lm, prompts, greedy, monkeypatch):
    monkeypatch.setattr(batches, "PROMPT_BUCKET", 256)  # every prompt alone in the long one's shape: compiled once
    sampled = generate(lm, prompts, NEW, settings(8))
    for row, prompt in enumerate(prompts):
        assert generate(lm, [prompt], NEW, GREEDY)[0].tokens == greedy[row].tokens, row
        assert generate(lm, [prompt], NEW, settings(8)[row])[0].tokens == sampled[row].tokens, row
    assert any(a.tokens != b.tokens for a, b in zip(sampled, greedy, strict=True))


@pytest.mark.slow
def test_recurrent_and_buffered_give_the_same_tokens(lm, prompts, greedy):
    for form, limit in (("recurrent", 16), ("buffered", 16)):
        results = generate(lm, prompts, NEW, GREEDY, form=form, limit=limit)
        assert [r.tokens for r in results] == [r.tokens for r in greedy], form


@pytest.mark.slow
def test_rings_of_one_entry_give_the_same_tokens(lm, prompts, greedy):
    sizes = [make_batch(lm, prompts, GREEDY, Decoding(NEW, form=form)).sizes for form in ("recurrent", "buffered")]
    assert [size.limit for size in sizes] == [1, 16]
    results = generate(lm, prompts, NEW, GREEDY, form="recurrent")
    assert [r.tokens for r in results] == [r.tokens for r in greedy]
    assert all(r.stats.folds == r.stats.steps - 1 for r in results)


@pytest.mark.parametrize("form", ["recurrent", "buffered"])
def test_stats_are_what_a_count_by_hand_gives(lm, prompts, form):
    """The ring is empty after prefill; each step reads it, appends one, and folds first if one more would exceed."""
    spec: RecurrenceSpec = lm.config.spec
    results = generate(lm, prompts, NEW, GREEDY, form=form)
    limit = 1 if form == "recurrent" else 16
    folds = live = length = 0
    for _ in range(NEW - 1):
        live += length
        if length and length + 1 > limit:
            folds, length = folds + 1, 0
        length += 1
    state = 4 * spec.heads * spec.value_dim * spec.key_dim
    entry = 4 * (spec.key_heads * spec.key_dim + spec.heads * spec.value_dim + spec.heads)
    assert (state, entry) == (checkpoint_bytes(spec, "float32"), entry_bytes(spec, "float32"))
    layers = len(lm.config.specs)
    expected = layers * (state * (NEW - 1 + folds) + entry * (live + NEW - 1))
    for prompt, result in zip(prompts, results, strict=True):
        stats = result.stats
        assert (stats.steps, stats.checkpoint_reads, stats.folds) == (NEW - 1, NEW - 1, folds)
        assert (stats.live_entries, stats.bytes) == (live, expected)
        assert (stats.prompt_tokens, stats.new_tokens, stats.drafted, stats.accepted) == (len(prompt), NEW, 0, 0)


def test_a_stop_token_ends_its_row_and_no_other(lm, prompts, greedy):
    row, place = 3, 17
    stop = greedy[row].tokens[place]
    first = greedy[row].tokens.index(stop)
    sampling = [dataclasses.replace(GREEDY, stop_token_ids=(stop,)) if i == row else GREEDY for i in range(8)]
    results = generate(lm, prompts, NEW, sampling)
    assert (results[row].tokens, results[row].finish_reason) == (greedy[row].tokens[: first + 1], "stop")
    for i in set(range(8)) - {row}:
        assert (results[i].tokens, results[i].finish_reason) == (greedy[i].tokens, "length")
    assert results[row].stats.steps == first
    assert results[row].text == lm.decode(greedy[row].tokens[:first])  # an ordinary token, but not of the text
    assert [result.stop_reason for result in results] == [stop if i == row else None for i in range(8)]


@pytest.mark.slow
def test_a_generation_in_slices_is_the_whole_one(lm, prompts, greedy):
    for segment in (16, 7):
        events = list(generate(lm, [prompts[1]], NEW, GREEDY, stream=True, segment=segment))
        assert [t for e in events for t in e.tokens] == events[-1].result.tokens
        assert "".join(e.text for e in events) == events[-1].result.text
        assert [e.done for e in events] == [False] * (len(events) - 1) + [True]
        whole = generate(lm, [prompts[1]], NEW, GREEDY)[0]
        assert events[-1].result == whole
        assert whole.tokens == greedy[1].tokens


@pytest.mark.slow
def test_settings_do_not_compile_again_and_a_second_bucket_does_once(lm):
    for program in (begin_prompts, end_prompts, read_layer, generate_tokens):
        program.clear_cache()
    rng = np.random.default_rng()
    some = [rng.integers(0, 256, n).tolist() for n in (3, 20, 63, 64)]
    for sampling in (GREEDY, SamplingParams(temperature=0.7, top_k=5, seed=9), SamplingParams(top_p=0.5, seed=3)):
        generate(lm, some[:2], 12, sampling)
        generate(lm, some[2:], 9, dataclasses.replace(sampling, stop="e"))
        list(generate(lm, some[2:], 9, dataclasses.replace(sampling, stop=["a", "o"]), stream=True, segment=3))
    assert programs_compiled() == (1, 1, 1, 2)
    generate(lm, [rng.integers(0, 256, 65).tolist(), some[0]], 12, GREEDY)
    assert programs_compiled() == (2, 2, 2, 4)
    for limit in (16, 8):  # rings of one entry, whatever the limit is: softmax layers have none
        generate(lm, some[:2], 12, GREEDY, form="recurrent", limit=limit)
    assert programs_compiled() == (3, 3, 3, 5)


def test_the_carry_is_reused_in_place(lm):
    batch = make_batch(lm, [[1, 2, 3], [4] * 20], GREEDY, Decoding(12))
    carry = read_prompts(lm, batch.sizes, batch.arrivals)
    generate_tokens(lm.model, carry, np.int32(2))
    assert all(x.is_deleted() for x in jax.tree.leaves(carry.cache))


@pytest.mark.slow
def test_logprobs_are_what_score_gives_for_the_prompt_and_the_tokens(lm, prompts, greedy):
    """Of the unchanged distribution, whatever was drawn from; the tokens stay what they were without them."""
    plain = [setting if i % 2 else GREEDY for i, setting in enumerate(settings(8))]
    asked = [{}, {"logprobs": 0}, {"prompt_logprobs": 2}, {"logprobs": 3, "prompt_logprobs": 0}]
    sampling = [dataclasses.replace(setting, **asked[i // 2]) for i, setting in enumerate(plain)]
    results = generate(lm, prompts, NEW, sampling)
    assert [r.tokens for r in results] == [r.tokens for r in generate(lm, prompts, NEW, plain)]
    padded = np.array([(p + r.tokens + [0] * 256)[:256] for p, r in zip(prompts, results, strict=True)])
    scores = np.asarray(lm.score(padded))
    for row, (setting, prompt, result) in enumerate(zip(sampling, prompts, results, strict=True)):
        read, end = len(prompt), len(prompt) + NEW
        logits = np.asarray(lm.logits(padded[row : row + 1])[0], np.float64)
        assert (result.logprobs is None) == (result.top_logprobs is None) == (setting.logprobs is None)
        if result.logprobs is not None:
            np.testing.assert_allclose(result.logprobs, scores[row, read:end], rtol=0, atol=1e-4)
            check_top(result.top_logprobs, logits[read - 1 : end - 1], setting.logprobs)
        nothing = setting.prompt_logprobs is None
        assert (result.prompt_logprobs is None) == (result.prompt_top_logprobs is None) == nothing
        if result.prompt_logprobs is not None:
            assert result.prompt_logprobs[0] is result.prompt_top_logprobs[0] is None
            np.testing.assert_allclose(result.prompt_logprobs[1:], scores[row, 1:read], rtol=0, atol=1e-4)
            check_top(result.prompt_top_logprobs[1:], logits[: read - 1], setting.prompt_logprobs)


def check_top(found, logits, number):
    """A dict of the `number` best tokens for each row of logits, by a log-softmax in float64."""
    norm = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    assert len(found) == len(logits)
    for top, row, total in zip(found, logits, norm, strict=True):
        best = np.sort(row)[::-1][:number]
        assert len(top) == number
        np.testing.assert_allclose(list(top.values()), best - total, rtol=0, atol=1e-4)
        np.testing.assert_allclose(row[list(top)], best, rtol=0, atol=1e-4)


def test_prompt_logprobs_never_hold_the_logits_of_a_whole_prompt(lm):
    """Of 2,048 tokens at a vocabulary of 248,320: no array of the program comes near [rows, time, vocab]."""
    config = changed(lm.config, vocab_size=248_320, max_position_embeddings=4096)
    wide = dataclasses.replace(lm, config=config, tokenizer=None)
    sampling = SamplingParams(prompt_logprobs=5)
    batch = make_batch(wide, [[1] * 2048], sampling, Decoding(12))
    (arrivals,) = batch.arrivals
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    traced = jax.make_jaxpr(lambda *data: start(data[0], batch.sizes, data[1]))(model, arrivals)
    sizes = [var.aval.size for equation in equations(traced.jaxpr) for var in equation.outvars]
    assert 248_320 * 64 < max(sizes) < 2048 * 248_320 / 8


def equations(jaxpr):
    """All equations of a jaxpr and of those inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def test_settings_that_change_greedy_choices(lm, prompts, greedy):
    """A forbidden token never comes, a pushed one always does, and ids that the tokenizer lacks never come."""
    first = [r.tokens[0] for r in greedy]
    sampling = [dataclasses.replace(GREEDY, logit_bias={first[i]: -np.inf}) for i in range(4)]
    sampling += [dataclasses.replace(GREEDY, logit_bias={97: 1e4})] * 2
    sampling += [dataclasses.replace(GREEDY, logit_bias={257: 1e9, 258: 1e9})] * 2
    results = generate(lm, prompts, NEW, sampling)
    assert all(first[i] not in results[i].tokens for i in range(4))
    assert all(results[i].tokens == [97] * NEW for i in (4, 5))
    assert all(results[i].tokens == greedy[i].tokens for i in (6, 7))
    assert lm.known_ids.sum() == 257


def test_min_tokens_holds_stop_tokens_back(lm, prompts):
    pushed = {"logit_bias": {65: 1e4, 66: 1e3}, "stop_token_ids": (65,), "temperature": 0.0, "ignore_eos": True}
    sampling = [SamplingParams(**pushed, min_tokens=i) for i in range(8)]
    for i, result in enumerate(generate(lm, prompts, NEW, sampling)):
        assert result.tokens == [66] * i + [65]
        assert result.finish_reason == "stop"


def test_a_stop_string_ends_the_text_before_it_across_tokens(lm, prompts, greedy):
    """Every token is one byte here, so a longer stop string always spans tokens."""
    stops = [greedy[i].text[10 + i : 13 + i] for i in range(8)]
    sampling = [dataclasses.replace(GREEDY, stop=(stops[i], "never there")) for i in range(8)]
    results = generate(lm, prompts, NEW, sampling)
    for i, result in enumerate(results):
        assert result.text == greedy[i].text[: greedy[i].text.find(stops[i])]
        assert result.finish_reason == "stop"
        assert result.tokens == greedy[i].tokens[: len(result.tokens)]
        assert stops[i] in lm.decode(result.tokens) and stops[i] not in lm.decode(result.tokens[:-1])
        assert result.stop_reason == stops[i]


def test_prompts_are_any_iterable_of_texts_lists_and_integer_arrays(lm, prompts, greedy):
    arrays = [np.asarray(prompt, np.int64) for prompt in prompts]
    kinds = {
        "numpy rows": arrays,
        "jax rows": [jax.numpy.asarray(row) for row in arrays],
        "a generator": (tuple(prompt) for prompt in prompts),
        "mixed": [prompts[0], arrays[1], *prompts[2:]],
    }
    for kind, given in kinds.items():
        assert [result.tokens for result in generate(lm, given, NEW, GREEDY)] == [r.tokens for r in greedy], kind
    square = np.stack([np.resize(row, 200) for row in arrays])
    expected = [result.tokens for result in generate(lm, square.tolist(), NEW, GREEDY)]
    for given in (square, jax.numpy.asarray(square)):
        assert [result.tokens for result in generate(lm, given, NEW, GREEDY)] == expected


def test_numbers_may_be_numpys(lm, prompts, greedy):
    """Sizes, and token ids as an array."""
    stop = greedy[2].tokens[5]
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, stop_token_ids=np.array([stop]))
    results = generate(lm, prompts, np.int64(NEW), sampling, limit=np.int32(16), segment=np.int16(7))
    assert results[2].tokens == greedy[2].tokens[: greedy[2].tokens.index(stop) + 1]
    assert results[2].stop_reason == stop


def test_a_limit_beyond_all_tokens_makes_no_longer_rings(lm, prompts, greedy):
    for limit in (10**9, 2**31, 2**70):
        batch = make_batch(lm, prompts, GREEDY, Decoding(NEW, limit=limit, form="buffered"))
        assert batch.sizes.limit == batch.sizes.capacity == 256 + 64
        assert (batch.begins.limit == 256 + 64).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": None}, "prompts must be a list of texts or token lists, got None"),
        ({"prompts": 5}, "prompts must be a list of texts or token lists, got 5"),
        ({"prompts": b"text"}, "prompts must be a list of texts or token lists, got b'text'"),
        ({"prompts": {"text": 1}}, "prompts must be a list of texts or token lists, got {'text': 1}"),
        ({"prompts": np.ones(3, int)}, r"prompts must be .*, got one row, an array int64 \(3,\): put it in a list"),
        ({"prompts": [[1]], "stream": True, "progress": True}, "progress must be None or False with stream=True"),
        ({"prompts": np.int32(3)}, "prompts must be a list of texts or token lists, got an array int32"),
        ({"prompts": [np.ones(3)]}, r"prompts\[0\] must be a text or a list of token ids, got an array float64 \(3,\)"),
        ({"prompts": np.ones((1, 2, 3), int)}, r"prompts\[0\] must be a text .*, got an array int64 \(2, 3\)"),
        ({"prompts": [1, 2]}, r"prompts\[0\] must be a text or a list of token ids, got 1"),
        ({"prompts": [[True]]}, r"prompts\[0\] must be a text or a list of token ids, got \[True\]"),
        ({"prompts": [b"text"]}, r"prompts\[0\] must be a text or a list of token ids, got b'text'"),
        ({"prompts": [["a"] * 999]}, r"prompts\[0\] must be a text or a list of token ids, got \['a', .*, \.\.\.\]$"),
        ({"prompts": [np.zeros(0, int)]}, r"prompts\[0\] must hold at least one token, got an array int64 \(0,\)"),
        ({"prompts": [[1]], "progress": 1}, "progress must be None, True or False, got 1"),
        ({"prompts": [[]]}, r"prompts\[0\] must hold at least one token, got \[\]"),
        ({"prompts": ["fine", ""]}, r"prompts\[1\] must hold at least one token, got ''"),
        ({"prompts": "text"}, r"prompts must be a list of texts or token lists"),
        ({"prompts": [[1, 259]]}, r"prompts\[0\] must hold token ids in \[0, 259\), got 259"),
        ({"prompts": [[1] * 1000], "max_new_tokens": 25}, r"prompts\[0\] \(1000 tokens\).*\(25\).*at most.*\(1024\)"),
        ({"prompts": [[1.7]]}, r"prompts\[0\] must be a text or a list of token ids, got \[1.7\]"),
        ({"prompts": [None]}, r"prompts\[0\] must be a text or a list of token ids, got None"),
        ({"prompts": [[1]], "max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, got 0"),
        ({"prompts": [[1]], "max_new_tokens": 2.5}, "max_new_tokens must be a whole number of at least 1, got 2.5"),
        ({"prompts": [[1]], "limit": 0}, "limit must be a whole number of at least 1, got 0"),
        ({"prompts": [[1]], "form": "linear"}, "form must be .* got 'linear'"),
        ({"prompts": [[1]], "entry_dtype": "int8"}, "entry_dtype must be .* got 'int8'"),
        ({"prompts": [[1]], "sampling": SamplingParams(logit_bias={259: 1.0})}, "logit_bias must name .* got 259"),
        ({"prompts": [[1]], "sampling": SamplingParams(stop_token_ids=[259])}, "stop_token_ids must name .* got 259"),
        ({"prompts": [[1]], "sampling": [GREEDY] * 2}, r"sampling must be one .* \(1\), got 2"),
        ({"prompts": [[1]], "sampling": None}, "sampling must be one SamplingParams or a list of them, got None"),
        ({"prompts": [[1]], "segment": 0}, "segment must be a whole number of at least 1, got 0"),
    ],
)
def test_a_wrong_argument_is_named(lm, arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(lm, **arguments)

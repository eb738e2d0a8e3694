"""Generation with states that are kept in bfloat16 or split: what it gives, what it counts, what it refuses."""

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from jaxbuf.cli import app
from jaxbuf.recurrence.state_format import state_format
from jaxbuf.serving import SamplingParams, beam_search, generate, generate_tokens
from jaxbuf.serving.batch import Decoding, make_batch
from jaxbuf.serving.stats import entry_bytes
from tests.serving.goodness import RARE
from tests.serving.program import carry_shape, check_reused, written_in_loops
from tests.serving.speculating import p_value, tiny_models

NEW = 40
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng()
    return [rng.integers(0, 256, n).tolist() for n in (1, 40, 64)]


@pytest.fixture(scope="module")
def exact(lm, prompts):
    with jax.numpy_dtype_promotion("strict"):
        return generate(lm, prompts, NEW, GREEDY, form="buffered")


def apart(results, others):
    """By how much log-probabilities differ, as long as the tokens are the same: on average, and at most."""
    found = []
    for ours, theirs in zip(results, others, strict=True):
        same = np.cumprod(np.equal(ours.tokens, theirs.tokens)).sum()
        found.append(np.abs(np.subtract(ours.logprobs[:same], theirs.logprobs[:same])))
    found = np.concatenate(found)
    assert found.size > NEW // 2
    return found.mean(), found.max()


@pytest.mark.slow
def test_split_states_give_nearly_the_same_distributions_for_half_the_bytes_of_a_read(lm, prompts, exact):
    spec, layers = lm.config.spec, len(lm.config.specs)
    entry = entry_bytes(spec, "float32")
    for name in ("split", "split8"):
        form = state_format(name)
        results = generate(lm, prompts, NEW, GREEDY, state_dtype=name, form="buffered")
        mean, most = apart(results, exact)
        assert 1e-7 < mean < 5e-3 and most < 5e-2, name
        for ours, theirs in zip(results, exact, strict=True):
            stats = ours.stats
            assert stats.folds > 1 and stats.folds == theirs.stats.folds
            moved = form.read_bytes(spec) * stats.checkpoint_reads + form.fold_bytes(spec) * stats.folds
            assert stats.bytes == layers * (moved + entry * (stats.live_entries + stats.steps))
            assert stats.snapshot_bytes == theirs.stats.snapshot_bytes  # which keeps float32 states
            assert form.read_bytes(spec) == 2 * spec.heads * spec.value_dim * spec.key_dim


@pytest.mark.exhaustive
def test_every_way_to_decode_takes_split_states(lm, prompts, exact):
    """In the recurrent form, with drafts, several samples and beams."""
    split = {"state_dtype": "split"}
    ways = {
        "recurrent": generate(lm, prompts, NEW, GREEDY, form="recurrent", **split),
        "drafts": generate(lm, prompts, NEW, GREEDY, drafter="ngram", **split),
    }
    for name, results in ways.items():
        mean, most = apart(results, exact)
        assert mean < 1e-2 and most < 0.1, name
    several = SamplingParams(temperature=0.8, n=3, ignore_eos=True)
    assert [len(result.samples) for result in generate(lm, prompts, NEW, several, **split)] == [3] * 3
    for found, prompt in zip(beam_search(lm, prompts, 12, beams=2, ignore_eos=True, **split), prompts, strict=True):
        for beam in found:
            score = lm.score(np.array([prompt + beam.tokens]))[0, len(prompt) :].sum()
            assert abs(beam.score - score) < 0.1


@pytest.mark.exhaustive
def test_sampled_tokens_with_drafts_are_distributed_as_by_exact_enumeration(rng, monkeypatch):
    """Whatever split states do to the logits is far below what so many samples show."""
    monkeypatch.setattr("jaxbuf.serving.batch.choose_state_dtype", lambda state_dtype: "split8")
    lm, _ = tiny_models("qwen3_5")
    assert p_value(lm, "ngram", rng, monkeypatch) > RARE


@pytest.mark.exhaustive
def test_the_program_copies_no_half_of_a_state(lm, prompts):
    carry = carry_shape(make_batch(lm, prompts, GREEDY, Decoding(12, form="buffered", state_dtype="split8")))
    (pool,) = (layer.pool for layer in carry.cache.layers if hasattr(layer, "pool"))
    assert [x.dtype.name for x in (pool.checkpoints, pool.low, pool.low_scales)] == ["bfloat16", "int8", "float32"]
    text = generate_tokens.lower(lm.model, carry, np.int32(4)).compile().as_text()
    check_reused(text, carry)
    assert written_in_loops(text, lm.config.spec.state_shape) == []


def test_an_unknown_state_dtype_is_named(lm):
    expected = 'state_dtype must be None, "float32", "bfloat16", "split" or "split8", got '
    for wrong, shown in (("int8", "'int8'"), (4, "4"), ([], r"\[\]"), ("float16", "'float16'")):
        with pytest.raises(ValueError, match=expected + shown):
            generate(lm, [[1]], 1, state_dtype=wrong)
        with pytest.raises(ValueError, match=expected + shown):
            beam_search(lm, [[1]], 1, state_dtype=wrong)
    done = CliRunner().invoke(app, ["generate", "A", "--state-dtype", "int4"])
    assert done.exit_code == 2 and "--state-dtype" in done.stderr and "split8" in done.stderr

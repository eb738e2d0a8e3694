"""What transformers computes, from the fixtures that scripts/make_parity_fixtures wrote: random models and the demo."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxbuf.models import decoder, mtp
from jaxbuf.models.cache import with_limits
from jaxbuf.models.families import config_from_dict
from jaxbuf.models.language_model import load


def tensor_names(file):
    """The names of a file's tensors, which are not read."""
    with safe_open(file, "np") as opened:
        return opened.keys()


FIXTURES = Path(__file__).parent.parent / "fixtures"
DEMO = Path(decoder.__file__).parent / "demo"
QWEN3_5 = ("tied", "untied_mtp", "vision_language")
STRETCHED = ("llama_yarn", "llama_linear", "qwen3_yarn", "qwen3_linear")
EXPERTS = ("qwen3_moe", "qwen3_5_moe", "qwen3_next", "nemotron_h_moe", "granitemoehybrid_moe")
LATENT = ("kimi_linear", "bailing_hybrid")
OTHERS = (
    *("llama", "mamba2", "qwen2", "qwen3", "nemotron_h", "falcon_h1", "granitemoehybrid", "olmo_hybrid"),
    *LATENT,
    *EXPERTS,
)
RANDOM = (*QWEN3_5, *(f"{family}_{kind}" for family in OTHERS for kind in ("plain", "full")), *STRETCHED)
FOUND = sorted(file.parent.name for file in FIXTURES.glob("*/expected.safetensors"))
LIKE_ANOTHER = (
    *("qwen2", "nemotron_h", "granitemoehybrid", "granitemoehybrid_moe"),
    *("qwen3_moe", "qwen3_next", "kimi_linear"),
)
WITH_MTP = [name for name in FOUND if "mtp_logits" in tensor_names(FIXTURES / name / "expected.safetensors")]
# To decode; the others have more options, or parts that these do not have.
BY_HAND = (
    *STRETCHED,
    *("tied", "vision_language", "demo", "qwen3_full", "qwen3_5_moe_full", "olmo_hybrid_full"),
    *(f"{family}_full" for family in LIKE_ANOTHER),
    *(name for name in RANDOM if name.endswith("_plain")),
)
LONGEST = "falcon_h1_full", "bailing_hybrid_full"
MARKS = dict.fromkeys(BY_HAND, pytest.mark.exhaustive) | dict.fromkeys(LONGEST, pytest.mark.slow)
DECODED = [pytest.param(name, marks=MARKS.get(name, ())) for name in FOUND]

TOLERANCE = 2e-3
TIE = 2 * TOLERANCE  # two scores closer than this may change places within the tolerance
CAPACITY, PADDED = 256, 192


@functools.cache
def read(name):
    """The model, what is expected of it, its logits over the whole inputs, and those of its MTP layer or None."""
    fixture = FIXTURES / name
    lm = load("demo" if name == "demo" else fixture / "checkpoint", dtype="float32")
    expected = SimpleNamespace(**load_file(fixture / "expected.safetensors"))
    if lm.model.mtp is None:
        return lm, expected, np.asarray(lm.logits(expected.tokens)), None
    logits, further = forward_with_mtp(lm.model, expected.tokens)
    return lm, expected, np.asarray(logits), np.asarray(further)


@jax.jit
def forward_with_mtp(model, tokens):
    hidden = decoder.forward(model, tokens)
    further = mtp.mtp_forward(model, hidden[:, :-1], tokens[:, 1:])
    return decoder.logits(model, hidden), decoder.logits(model, further)


@jax.jit
def decode(model, cache, first, forced, use_forced):
    """Reads one token a step through the cache: those of forced int32 [steps, rows], or the best after `first`.

    Returns the tokens read and f32 [steps, rows, vocab], the scores after each.
    """

    def step(carry, forced_token):
        cache, token = carry
        token = jnp.where(use_forced, forced_token, token)
        hidden, cache = decoder.extend(model, cache, token[:, None])
        cache = decoder.commit(cache, jnp.ones_like(token))
        scores = decoder.logits(model, hidden)[:, 0]
        return (cache, jnp.argmax(scores, axis=-1).astype(jnp.int32)), (token, scores)

    return jax.lax.scan(step, (cache, first), forced)[1]


@jax.jit
def prefill(model, cache, tokens, lengths):
    hidden, cache = decoder.prefill(model, cache, tokens, lengths=lengths)
    last = jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)[:, 0]
    return decoder.logits(model, last), cache


def start(lm, expected, lengths, limit=16):
    """The scores after the first `lengths` tokens of each row, and the cache that read them, all in float32.

    The rings have room for 16 entries, whatever the limit: it is data.
    """
    rows = expected.tokens.shape[0]
    cache = decoder.init_cache(lm.config, slots=rows, capacity=CAPACITY, limit=16)
    cache = with_limits(cache, limit)
    tokens = np.pad(expected.tokens, ((0, 0), (0, PADDED - expected.tokens.shape[1])))
    tokens[np.arange(PADDED)[None] >= lengths[:, None]] = 0
    return prefill(lm.model, cache, tokens, lengths)


def test_fixtures_are_there():
    assert set(FOUND) >= set(RANDOM), f"run scripts/make_parity_fixtures; found {FOUND}"
    assert set(FOUND) <= {*RANDOM, "demo"}


def test_demo_has_its_fixture():
    if (DEMO / "config.json").exists():
        assert "demo" in FOUND, "run scripts/make_parity_fixtures --checkpoint jaxbuf/models/demo --name demo"


def test_fixtures_are_small():
    """Each in all: a new one must not have to be smaller than those before."""
    for fixture in FIXTURES.iterdir():
        assert sum(file.stat().st_size for file in fixture.rglob("*") if file.is_file()) <= 2**20, fixture


@pytest.mark.slow
def test_random_fixtures_cover_what_differs_between_checkpoints():
    models = [read(name)[0] for name in QWEN3_5]
    configs = [lm.config.source for lm in models]
    assert {config.tie_word_embeddings for config in configs} == {True, False}
    assert any(config.vocab_size % 2 for config in configs)
    assert any(config.num_attention_heads == 3 * config.num_key_value_heads for config in configs)
    assert any(config.linear_key_head_dim != config.linear_value_head_dim for config in configs)
    assert any(lm.model.mtp is not None for lm in models)
    for lm in models:
        assert all(np.std(leaf) > 0 for leaf in jax.tree.leaves(lm.model)), "every parameter must be random"


@pytest.mark.slow
@pytest.mark.checks("parity")
@pytest.mark.parametrize("name", FOUND)
def test_logits(name):
    lm, expected, logits, further = read(name)
    assert (further is not None) == (name in WITH_MTP)
    assert expected.tokens.shape == (8, 150) and logits.shape == (8, 150, lm.vocab_size)
    assert np.abs(logits[..., expected.columns] - expected.logits).max() < TOLERANCE
    assert np.abs(logits[tuple(expected.places.T)] - expected.place_logits).max() < TOLERANCE


@pytest.mark.checks("parity")
@pytest.mark.parametrize("name", WITH_MTP)
def test_mtp_logits(name):
    _, expected, _, logits = read(name)
    assert np.abs(logits[..., expected.columns] - expected.mtp_logits).max() < TOLERANCE
    assert np.abs(logits[tuple(expected.places.T)] - expected.mtp_place_logits).max() < TOLERANCE


@pytest.mark.slow
@pytest.mark.checks("parity")
@pytest.mark.parametrize("name", DECODED)
def test_stepwise_decoding_is_the_full_forward(name, rng):
    lm, expected, logits, _ = read(name)
    rows, time = expected.tokens.shape
    steps = expected.greedy.shape[1]
    lengths = rng.integers(1, time - steps + 1, rows, dtype=np.int32)
    last, cache = start(lm, expected, lengths)
    np.testing.assert_allclose(last, logits[np.arange(rows), lengths - 1], rtol=0, atol=TOLERANCE)
    read_at = lengths[None] + np.arange(steps)[:, None]
    forced = expected.tokens[np.arange(rows)[None], read_at]
    tokens, scores = decode(lm.model, cache, forced[0], forced, True)
    np.testing.assert_array_equal(tokens, forced)
    np.testing.assert_allclose(scores, logits[np.arange(rows)[None], read_at], rtol=0, atol=TOLERANCE)


@functools.cache
def first_differences(name, limit=16):
    """The reference's top-2 gap where each row's 64 greedy tokens first differ; rows that are equal are left out."""
    lm, expected, _, _ = read(name)
    last, cache = start(lm, expected, expected.prompt_lengths, limit)
    first = np.argmax(last, axis=-1).astype(np.int32)
    tokens, _ = decode(lm.model, cache, first, np.zeros_like(expected.greedy.T), False)
    differs = expected.greedy != np.asarray(tokens).T
    return [expected.gaps[row, differs[row].argmax()] for row in np.flatnonzero(differs.any(axis=1))]


@pytest.mark.checks("parity")
@pytest.mark.parametrize("limit", [1, 16])
@pytest.mark.parametrize("name", DECODED)
def test_greedy_tokens(name, limit):
    gaps = first_differences(name, limit)
    assert all(gap < TIE for gap in gaps) and len(gaps) <= 1, f"gaps at the first differences: {gaps}"


@pytest.mark.exhaustive
def test_at_most_one_greedy_row_in_24_differs():
    rows = sum(read(name)[1].greedy.shape[0] for name in RANDOM)
    assert rows == 8 * len(RANDOM)
    assert sum(len(first_differences(name)) for name in RANDOM) <= rows // 24


@pytest.mark.slow
@pytest.mark.checks("parity")
@pytest.mark.parametrize("name", [name for name in RANDOM if name not in QWEN3_5])
def test_a_saved_checkpoint_has_the_bits_that_were_loaded(name, tmp_path):
    source = FIXTURES / name / "checkpoint"
    lm = load(source, dtype="bfloat16")
    lm.save(tmp_path)
    given, kept = (load_file(folder / "model.safetensors") for folder in (source, tmp_path))
    # Of a vision-language checkpoint the text model is saved, as a checkpoint of its own.
    given = {name: value for name, value in given.items() if not name.startswith("model.visual.")}
    given = {name.replace("model.language_model.", "model."): value for name, value in given.items()}
    assert given.keys() == kept.keys()
    for tensor, value in given.items():
        assert value.astype(np.float32).tobytes() == kept[tensor].astype(np.float32).tobytes(), tensor
    again = load(tmp_path, dtype="bfloat16")
    assert again.config == lm.config
    written, read_back = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path))
    assert config_from_dict(written) == config_from_dict(read_back)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from demo_text import data
from flax import nnx

from jaxbuf.models import decoder, mtp
from jaxbuf.models import language_model as models
from jaxbuf.train import evaluation
from tests.tiny import changed
from tests.train.test_demo import CONFIG


@pytest.fixture(scope="module")
def lm():
    tokenizer = data.train_tokenizer(["some text about a language model, and about text"], 300)
    layers = ("linear_attention", "full_attention")
    config = changed(CONFIG, layer_types=layers, vocab_size=tokenizer.get_vocab_size())
    model = jax.jit(lambda: decoder.Decoder(config, rngs=nnx.Rngs(1)))()
    model = jax.tree.map(lambda x: x * 8 if x.ndim == 2 else x, model)  # sharp enough for the choices to differ
    return models.LanguageModel(model, config, tokenizer, {}, jnp.dtype("float32"), "tiny")


@jax.jit
def choices(model, ids):
    """Log-probabilities of the next token, and the MTP layer's first choice of the one after it."""
    hidden = decoder.forward(model, ids)
    further = mtp.mtp_forward(model, hidden[:, :-1], ids[:, 1:])
    scores = jax.nn.log_softmax(decoder.logits(model, hidden), axis=-1)
    return scores[0], jnp.argmax(decoder.logits(model, further), axis=-1)[0]


def reference(lm, texts):
    """Bits, hits and agreements, document by document, without lengths or windows."""
    bits = hits = agreements = pairs = tokens = 0
    for text in texts:
        ids = np.asarray([0, *lm.encode(text)])
        padded = np.pad(ids, (0, 64 - ids.size))[None]
        scores, drafted = (np.asarray(x) for x in choices(lm.model, jnp.asarray(padded, jnp.int32)))
        best, last = scores.argmax(-1), ids.size - 1
        bits -= scores[np.arange(last), ids[1:]].sum() / np.log(2)
        hits += (best[:last] == ids[1:]).sum()
        agreements += (drafted[: last - 1] == best[1:last]).sum()
        pairs += last - 1
        tokens += last
    return bits, hits / tokens, agreements / pairs, tokens


@pytest.mark.slow
def test_scores_are_those_of_whole_documents(lm):
    texts = ["a language model", "some text — naïve", "and about text " * 3, "x y"]
    scores = evaluation.score(lm, texts, context=64, rows=3)
    bits, accuracy, agreement, tokens = reference(lm, texts)
    assert scores.tokens == tokens and scores.bytes == sum(len(text.encode()) for text in texts)
    np.testing.assert_allclose(scores.bits, bits, rtol=1e-5)
    np.testing.assert_allclose([scores.accuracy, scores.mtp_agreement], [accuracy, agreement], atol=1e-6)
    np.testing.assert_allclose(scores.bits_per_byte, bits / scores.bytes, rtol=1e-5)


@pytest.mark.parametrize("size", [2, 63, 64, 65, 100, 129, 1000])
def test_windows_score_every_token_once_with_enough_before_it(size):
    tokens = np.arange(size)
    scored = []
    for number, window in enumerate(evaluation.windows(tokens, 64)):
        assert window.tokens.size <= 64
        assert window.first == 1 if number == 0 else window.first >= 32
        scored += window.tokens[window.first :].tolist()
    assert scored == list(range(1, size))


def test_progress_counts_all_windows_whether_or_not_they_fill_the_last_batch(lm):
    texts = ["about text " * 80, "x y", "x"]
    total = sum(len(evaluation.windows(np.asarray([0, *lm.encode(text)]), 64)) for text in texts)
    assert total > 3 and total % 3
    calls = []
    evaluation.score(lm, texts, context=64, rows=3, progress=lambda *call: calls.append(call))
    assert calls == [(done, total) for done in [*range(0, total, 3), total]]


def test_what_cannot_be_scored_is_refused(lm):
    with pytest.raises(ValueError, match="no text"):
        evaluation.score(lm, [""])
    with pytest.raises(ValueError, match="context must be a power of two"):
        evaluation.score(lm, ["x"], context=100)

"""A model of five tokens whose head is not its embedding, and the distribution that settings make of its logits."""

import functools

import numpy as np

from jaxbuf.serving import SamplingParams
from tests.serving.speculating import TINY, VOCAB, random_qwen3_5

PROMPTS = [[1, 3, 0, 2], [4, 1], [2, 2, 0, 1, 3, 3], [0]]
NEW = 12


@functools.cache
def five_token_model():
    """A LanguageModel without a tokenizer, with an MTP layer; all programs of its tests share its shapes."""
    return random_qwen3_5(5, **TINY, tie_word_embeddings=False)


def greedy(**settings):
    """Log-probabilities of tokens and prompts are asked for, so that all tests share their programs."""
    reported = {"logprobs": 3, "prompt_logprobs": 0}
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True} | reported | settings)


def distribution(logits, setting, generated):
    """float64 [VOCAB]: what a token is drawn from, of raw logits [VOCAB], after the generated tokens."""
    scores = np.float64(logits) - setting.frequency_penalty * np.bincount(generated, minlength=VOCAB)
    for token, bias in setting.logit_bias.items():
        scores[token] += bias
    if setting.temperature == 0:
        return np.eye(VOCAB)[scores.argmax()]
    p = np.exp((scores - scores.max()) / setting.temperature)
    p /= p.sum()
    order = np.argsort(-p)
    kept = order[: 1 + np.searchsorted(np.cumsum(p[order]), setting.top_p)][: setting.top_k or VOCAB]
    out = np.zeros(VOCAB)
    out[kept] = p[kept] / p[kept].sum()
    return out

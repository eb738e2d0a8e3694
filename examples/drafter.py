"""A drafter of your own: a glossary of phrases, which it drafts on as soon as their first tokens were generated."""

import jax.numpy as jnp
import numpy as np

import jaxbuf
from jaxbuf.serving.speculation import Proposal

PHRASES = ["The number of workers to use is determined by the", "used to determine the number of workers to use"]
DRAFTS, BEGINNING = 4, 2


class Glossary:
    """A plain class with `draft_tokens` and four methods, which JAX traces: what they compute with are its arrays."""

    draft_tokens = DRAFTS  # the most drafts of one step

    def __init__(self, lm, phrases):
        """Every place of every phrase is a row: the two tokens before it, and those that follow."""
        padded = [lm.encode(phrase) + [-1] * DRAFTS for phrase in phrases]  # -1 is no token, so drafting ends there
        rows = [ids[i : i + BEGINNING + DRAFTS] for ids in padded for i in range(len(ids) - DRAFTS - BEGINNING)]
        self.before, self.after = np.split(np.array(rows, np.int32), [BEGINNING], axis=1)

    def init(self, config, sizes):
        return jnp.zeros(sizes.rows, jnp.int32)  # its state, any arrays: here the token before each row's newest one

    def admit(self, model, carry, reading):
        """The state once prompts were read: where rows begin, the last token of their prompts."""
        last = jnp.maximum(carry.history.prompt_length - 1, 0)[reading.source]  # a prompt may be read for several rows
        return reading.begun(carry.speculation.state, carry.history.tokens[reading.source, last])

    def propose(self, model, carry, most):
        """The drafts of every row, and the state; `most` says how many a row can use."""
        newest = jnp.stack([carry.speculation.state, carry.last], axis=1)
        found = jnp.all(newest[:, None] == jnp.asarray(self.before)[None], axis=2)  # [rows, places of phrases]
        drafts = jnp.asarray(self.after)[jnp.argmax(found, axis=1)]
        return Proposal(drafts, jnp.where(jnp.any(found, axis=1), most, 0)), carry.last

    def settle(self, model, state, hidden, tokens, number):
        """The state after the step: the last but one of its new tokens, int32 [rows, 1 + DRAFTS], `number` are real."""
        before = jnp.take_along_axis(tokens, jnp.maximum(number - 2, 0)[:, None], axis=1)[:, 0]
        return jnp.where(number > 1, before, state)


lm = jaxbuf.load("demo")
prompts = ["The number of", "More about this can be used to"]
plain, drafted = (jaxbuf.generate(lm, prompts, 24, drafter=drafter) for drafter in (None, Glossary(lm, PHRASES)))
for prompt, result, alone in zip(prompts, drafted, plain, strict=True):
    print(f"{prompt}|{result.text}")
    print(f"  {result.stats.steps} steps instead of {alone.stats.steps}, same tokens: {result.tokens == alone.tokens}")

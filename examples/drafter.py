"""A drafter of your own: a glossary of phrases, which it drafts on as soon as their first tokens were generated."""

import jax.numpy as jnp
import numpy as np

import jaxbuf
from jaxbuf.serving.speculation import Proposal

PHRASES = ["The number of workers to use is determined by the", "used to determine the number of workers to use"]
DRAFTS, BEGINNING = 4, 2


class Glossary:
    """A plain class with `draft_tokens` and three methods, which JAX traces: what they compute with are its arrays."""

    draft_tokens = DRAFTS  # the most drafts of one step

    def __init__(self, lm, phrases):
        """Every place of every phrase is a row: the two tokens before it, and those that follow."""
        rows = []
        for tokens in map(lm.encode, phrases):
            padded = tokens + [-1] * DRAFTS  # -1 is no token, so drafting ends there
            rows += [padded[i : i + BEGINNING + DRAFTS] for i in range(len(tokens) - BEGINNING)]
        self.before, self.after = np.split(np.array(rows, np.int32), [BEGINNING], axis=1)

    def start(self, model, carry, hidden, *, capacity, limit):
        """Its state, any arrays that the loop carries: here the token before the newest one, int32 [rows]."""
        last = jnp.maximum(carry.history.lengths - 1, 0)[:, None]
        return jnp.take_along_axis(carry.history.prompts, last, axis=1)[:, 0]

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
plain = jaxbuf.generate(lm, prompts, 24)
drafted = jaxbuf.generate(lm, prompts, 24, drafter=Glossary(lm, PHRASES))
for prompt, result, alone in zip(prompts, drafted, plain, strict=True):
    print(f"{prompt}|{result.text}")
    print(f"  {result.stats.steps} steps instead of {alone.stats.steps}, same tokens: {result.tokens == alone.tokens}")

"""Scores: how probable a model finds a text, as a whole and token by token."""

import numpy as np

import jaxbuf

TEXT = "The configuration file is read once, when the server starts."

lm = jaxbuf.load("demo")
tokens = np.asarray([lm.encode(TEXT)], np.int32)

# score[:, i] is the log-probability of token i given those before it; nothing comes before the first.
score = np.asarray(lm.score(tokens))[0, 1:]
print(f"perplexity {np.exp(-score.mean()):.2f} over {score.size} tokens")

surprising = np.argsort(score)[:3]
for place in surprising:
    print(f"  {lm.decode([int(tokens[0, place + 1])])!r}: {score[place]:.2f} nats")

# The same numbers come with a generation, for its prompt and for what it adds.
sampling = jaxbuf.SamplingParams(prompt_logprobs=0, logprobs=2)
(result,) = jaxbuf.generate(lm, [TEXT], 4, sampling)
print(f"largest difference {np.abs(np.asarray(result.prompt_logprobs[1:]) - score).max():.1e}")
for token, logprob, top in zip(result.tokens, result.logprobs, result.top_logprobs, strict=True):
    print(f"  {lm.decode([token])!r}: {logprob:.2f}, best two: {[lm.decode([other]) for other in top]}")

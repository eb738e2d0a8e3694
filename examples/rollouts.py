"""Policy gradients on the embedded model: generate, score by the training forward, step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxbuf
from jaxbuf.serving import generate_tokens

PROMPTS = ["The number of", "If the file", "This function returns", "A list of"]
STEPS, SAMPLES, NEW, LENGTH = 6, 8, 24, 32
ASKED = {"temperature": 1.0, "n": SAMPLES, "logprobs": 0, "ignore_eos": True}


@jax.jit
def step(model, moments, tokens, lengths, old, advantage):
    """A step up the gradient of mean(ratio · advantage), and the ratios.

    A ratio is a token's probability by the training forward over that by the generation.
    """

    def loss(model):
        # Of each token but the first, given those before it.
        logprobs = jaxbuf.sequence_logprobs(model, tokens)[:, 1:]
        places = lengths[:, None] - 1 + jnp.arange(NEW)[None]  # of the generated tokens
        ratio = jnp.exp(jnp.take_along_axis(logprobs, places, axis=1) - old)
        return -jnp.mean(ratio * advantage[:, None]), ratio

    (_, ratio), gradient = jax.value_and_grad(loss, has_aux=True)(model)
    updates, moments = optimiser.update(gradient, moments)
    return optax.apply_updates(model, updates), moments, ratio


lm = jaxbuf.load("demo", dtype="float32")
optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
moments = optimiser.init(lm.model)
for number in range(STEPS):
    seeds = [100 * number + 10 * row for row in range(len(PROMPTS))]
    settings = [jaxbuf.SamplingParams(**ASKED, seed=seed) for seed in seeds]
    found = jaxbuf.generate(lm, PROMPTS, NEW, settings, drafter="ngram", progress=False)
    prompts = [lm.encode(prompt) for prompt in PROMPTS for _ in range(SAMPLES)]
    samples = [sample for result in found for sample in result.samples]
    # How much of the text is an "e".
    rewards = [sample.text.count("e") / max(1, len(sample.text)) for sample in samples]
    rewards = np.array(rewards, np.float32).reshape(-1, SAMPLES)
    spread = rewards.std(1, keepdims=True) + 1e-3
    advantage = (rewards - rewards.mean(1, keepdims=True)) / spread
    texts = [ids + sample.tokens for ids, sample in zip(prompts, samples, strict=True)]
    texts = np.array([(text + [0] * LENGTH)[:LENGTH] for text in texts], np.int32)
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    old = np.float32([sample.logprobs for sample in samples])
    model, moments, ratio = step(lm.model, moments, texts, lengths, old, advantage.reshape(-1))
    lm = lm.replace(model=model)  # what was compiled serves it, too
    programs = generate_tokens._cache_size() + step._cache_size()
    told = f"ratios {ratio.min():.5f} to {ratio.max():.5f}, programs {programs}"
    print(f"step {number}: reward {rewards.mean():.3f}, {told}")

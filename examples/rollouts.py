"""Policy gradients on the embedded model: generate with a drafter, score what came by the training forward, step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxbuf
from jaxbuf.models import decoder
from jaxbuf.serving import generate_tokens

PROMPTS = ["The number of", "If the file", "This function returns", "A list of"]
STEPS, SAMPLES, NEW, LENGTH = 6, 8, 24, 32
ASKED = {"temperature": 1.0, "n": SAMPLES, "logprobs": 0, "ignore_eos": True}


@jax.jit
def step(model, moments, tokens, lengths, old, advantage):
    """A step up the gradient of mean(ratio · advantage), and the ratios: the training forward's to the generation's."""

    def loss(model):
        scores = jax.nn.log_softmax(decoder.logits(model, decoder.forward(model, tokens[:, :-1])), axis=-1)
        logprobs = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=2)[:, :, 0]
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
    settings = [jaxbuf.SamplingParams(**ASKED, seed=100 * number + 10 * row) for row in range(len(PROMPTS))]
    found = jaxbuf.generate(lm, PROMPTS, NEW, settings, drafter="ngram", progress=False)
    samples = [(lm.encode(p), sample) for p, result in zip(PROMPTS, found, strict=True) for sample in result.samples]
    rewards = [sample.text.count("e") / max(1, len(sample.text)) for _, sample in samples]  # how much of it is an "e"
    rewards = np.array(rewards, np.float32).reshape(-1, SAMPLES)
    advantage = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-3)
    texts = np.array([(ids + sample.tokens + [0] * LENGTH)[:LENGTH] for ids, sample in samples], np.int32)
    lengths, old = np.array([len(ids) for ids, _ in samples], np.int32), np.float32([s.logprobs for _, s in samples])
    model, moments, ratio = step(lm.model, moments, texts, lengths, old, advantage.reshape(-1))
    lm = lm.replace(model=model)  # what was compiled serves it, too
    programs = generate_tokens._cache_size() + step._cache_size()
    told = f"ratios {ratio.min():.5f} to {ratio.max():.5f}, programs {programs}"
    print(f"step {number}: reward {rewards.mean():.3f}, {told}")

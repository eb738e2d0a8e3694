"""What must hold of a model on two GPUs: as `checks.py`, and `scripts/check_gpu` runs these where there are as many.

Sums over the heads have another order on two GPUs than on one, so that of two tokens that are nearly as good either may
be chosen. Those count as ties; after one the texts differ, and nothing behind it is compared.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jaxbuf
from jaxbuf.bench.random_model import configuration, random_model, spread_model
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.layers import named_parameters, replace_parameters
from jaxbuf.models.tensor_parallel import TENSOR
from jaxbuf.serving import GenerationResult, SamplingParams, generate_tokens
from jaxbuf.serving.batch import Decoding, make_batch
from jaxbuf.serving.generation import read_prompts
from tests.gpu.checks import Figures
from tests.serving.program import carry_shape

DEVICES = 2
TIE = 1e-4  # of two log-probabilities
SHARE = 0.55  # of the bytes of one GPU, at most, on each of two: half, and what both have
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=5)


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:DEVICES]), (TENSOR,))


def demo() -> tuple[LanguageModel, LanguageModel]:
    """The demo model on one device and on two."""
    alone, spread = (jaxbuf.load("demo", dtype="float32", mesh=where) for where in (None, mesh()))
    return alone, spread


def random(**sizes: int) -> tuple[LanguageModel, LanguageModel]:
    """A random Qwen3.5-4B of four layers, or of other sizes, in float32, on one device and on two.

    Of initial parameters all logits are nearly the same. Here the rows of matrices have a norm of 3 or so, which makes
    the best logit better than the next by some 0.5 on average.
    """
    alone = random_model(configuration(**({"layers": 4} | sizes)), jnp.dtype("float32"))
    parameters = [param[...] for param in named_parameters(alone.model).values()]
    keys = jax.random.split(jax.random.key(7), len(parameters))
    noisy = [_add_noise(x, key) for x, key in zip(parameters, keys, strict=True)]
    alone = dataclasses.replace(alone, model=replace_parameters(alone.model, noisy))
    return alone, spread_model(alone, mesh())


@jax.jit
def _add_noise(x: jax.Array, key: jax.Array) -> jax.Array:
    scale = 0.15 if x.ndim == 1 else 3 * x.shape[-1] ** -0.5
    return x + scale * jax.random.normal(key, x.shape)


def check_tokens(
    models: tuple[LanguageModel, LanguageModel], drafter: str | None = None, tokens: int = 64, kernels: bool = True
) -> Figures:
    """Greedy tokens on two devices are those of one, ties aside; each device has its share, and runs the kernels."""
    rng, (alone, spread) = np.random.default_rng(3), models
    prompts = [rng.integers(1, alone.vocab_size, length).tolist() for length in (3, 17, 40, 5)]
    figures = check_shares(alone, spread, prompts, Decoding(tokens, form="buffered", drafter=drafter))
    if kernels:
        figures["kernels"] = float(count_kernels(spread, prompts, Decoding(tokens, form="buffered", drafter=drafter)))
        assert figures["kernels"] > 0, "no kernel is in the program of two devices"
    given = {"form": "buffered", "drafter": drafter}
    expected, found = (jaxbuf.generate(lm, prompts, tokens, GREEDY, **given) for lm in models)
    assert sum(result.stats.folds for result in found) > 0, "no row folded"
    if drafter is not None:
        figures |= {name: float(sum(getattr(x.stats, name) for x in found)) for name in ("drafted", "accepted")}
        assert figures["drafted"] > 0, "nothing was drafted"
    return figures | compare(expected, found)


def compare(expected: Sequence[GenerationResult], found: Sequence[GenerationResult]) -> Figures:
    """How many tokens are the same before each text's first tie, how many ties there are, and by how much the
    log-probabilities of the same tokens differ at most.

    Raises:
      AssertionError: Two tokens differ that are no tie.
    """
    same, ties, worst = 0, 0, 0.0
    for row, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert len(one.tokens) == len(other.tokens), f"prompt {row}: {len(one.tokens)} and {len(other.tokens)} tokens"
        differ = np.array(one.tokens) != np.array(other.tokens)
        until = int(np.argmax(np.append(differ, True)))
        same += until
        away = np.abs(np.array(one.logprobs[:until]) - np.array(other.logprobs[:until]))
        worst = max(worst, float(away.max(initial=0.0)))
        if until == len(one.tokens):
            continue
        ties += 1
        chosen = one.tokens[until], other.tokens[until]
        for which, result in (("one device", one), ("two devices", other)):
            top = result.top_logprobs[until]
            assert all(token in top for token in chosen), f"prompt {row}, token {until}: {chosen} on {which}: {top}"
            gap = abs(top[chosen[0]] - top[chosen[1]])
            words = f"prompt {row}, token {until}: {chosen} differ by {gap:.1e} on {which}"
            assert gap <= TIE, f"{words}, at most {TIE} for a tie; log-probabilities before by {worst:.1e}"
    return {"same tokens": float(same), "ties": float(ties), "log-probabilities": worst}


def check_shares(alone: LanguageModel, spread: LanguageModel, prompts: list[list[int]], decoding: Decoding) -> Figures:
    """Of parameters, and of the layers' memory once the prompts are read, each device has about half."""
    figures = {}
    held = [[lm.model, memory(lm, prompts, decoding)] for lm in (alone, spread)]
    for what, one, both in zip(("parameters", "memory"), *held, strict=True):
        (whole,), parts = bytes_held(one), bytes_held(both)
        assert len(parts) == DEVICES, f"{what} on {len(parts)} devices, expected {DEVICES}"
        figures[f"share of the {what}"] = max(parts) / whole
        assert max(parts) <= SHARE * whole, f"{what}: {parts} bytes of {whole}, at most {SHARE} of them each"
        assert sum(parts) >= whole, f"{what}: {parts} bytes of {whole}"
    return figures


def memory(lm: LanguageModel, prompts: list[list[int]], decoding: Decoding) -> tuple:
    batch = make_batch(lm, prompts, GREEDY, decoding)
    return read_prompts(lm, batch.sizes, batch.arrivals, batch.drafter).cache.layers


def bytes_held(arrays) -> list[int]:
    """The bytes of arrays on each of the devices that they lie on."""
    each: dict[jax.Device, int] = {}
    for array in jax.tree.leaves(arrays):
        for shard in array.addressable_shards:
            each[shard.device] = each.get(shard.device, 0) + shard.data.nbytes
    return list(each.values())


def count_kernels(lm: LanguageModel, prompts: list[list[int]], decoding: Decoding) -> int:
    """How many different calls of kernels are in the decoding program, as lowered for the devices."""
    batch = make_batch(lm, prompts, GREEDY, decoding)
    drafter = () if batch.drafter is None else (batch.drafter,)
    traced = generate_tokens.trace(lm.model, carry_shape(batch), np.int32(9), *drafter)
    platforms = {"lowering_platforms": ("cuda",)} if lm.target.platform == "gpu" else {}
    return traced.lower(**platforms).as_text().count("@mosaic_gpu")


CHECKS: dict[str, Callable[[np.random.Generator], Figures]] = {
    "greedy_tokens_of_the_demo_model_on_two_gpus_are_those_of_one": lambda rng: check_tokens(demo()),
    "greedy_tokens_of_the_demo_model_on_two_gpus_are_those_of_one_with_n_grams": lambda rng: check_tokens(
        demo(), "ngram"
    ),
    "greedy_tokens_of_the_demo_model_on_two_gpus_are_those_of_one_with_its_mtp_layer": lambda rng: check_tokens(
        demo(), "mtp"
    ),
    "greedy_tokens_of_a_random_qwen3_5_4b_of_four_layers_on_two_gpus_are_those_of_one": lambda rng: check_tokens(
        random()
    ),
    # With few tokens, so that some come again.
    "greedy_tokens_of_a_random_qwen3_5_4b_of_four_layers_on_two_gpus_are_those_of_one_with_n_grams": (
        lambda rng: check_tokens(random(vocabulary=64), "ngram")
    ),
}
OF_FAMILY: dict[str, str] = dict.fromkeys(CHECKS, "qwen3_5")

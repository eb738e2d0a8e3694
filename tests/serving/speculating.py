"""What every test of speculative decoding stands on: random models, drafters that know the text, and two judgements.

Greedy tokens must be those without a drafter (`check_equal`); of sampled ones, three in a row must have the joint
distribution of exact enumeration (`p_value`). An architecture joins by a line in MODELS.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.memory.tree import ancestors
from jaxbuf.models.families import config_from_dict
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.layers import named_parameters, replace_parameters
from jaxbuf.serving import SamplingParams, generate
from jaxbuf.serving.batch import Decoding, make_batch
from jaxbuf.serving.speculation import Proposal
from tests.serving.conftest import CONFIG, byte_tokenizer
from tests.serving.goodness import tail_bound
from tests.serving.program import generate_batch
from tests.tiny import random_model

NEW, DRAFTS, ROWS = 40, 4, 8
# Log-probabilities are asked for everywhere, so that all tests share their programs.
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=5)
TIE = 1e-4


def random_qwen3_5(seed: int, **changes) -> LanguageModel:
    """A Qwen3.5 model with an MTP layer whose parameters are all random; `changes` are of its configuration."""
    return _random(seed, {**CONFIG, "mtp_num_hidden_layers": 1, **changes})


def random_llama(seed: int, **changes) -> LanguageModel:
    """The same of a Llama model: it has no recurrent layer, no convolution and no MTP layer."""
    return _random(seed, {**CONFIG, "model_type": "llama", "attention_bias": True, **changes})


def random_mamba2(seed: int, **changes) -> LanguageModel:
    """The same of a Mamba-2 model: it has no softmax layer, no MLP, no MTP layer and no limit of length."""
    fields = {**CONFIG, "model_type": "mamba2", "state_size": 16, "n_groups": 2, **changes}
    return _random(seed, fields | {"num_heads": 2 * fields["hidden_size"] // fields["head_dim"]})


def random_qwen3(seed: int, **changes) -> LanguageModel:
    """The same of a Qwen3 model: as Llama's, and its queries and keys have norms."""
    return _random(seed, {**CONFIG, "model_type": "qwen3", "attention_bias": True, **changes})


def random_qwen2(seed: int, **changes) -> LanguageModel:
    """The same of a Qwen2 model: as Llama's, without a bias of the output."""
    return _random(seed, {**CONFIG, "model_type": "qwen2", **changes})


def random_nemotron_h(seed: int, **changes) -> LanguageModel:
    """The same of a Nemotron-H model: Mamba-2, an MLP and softmax attention without positions, a layer each."""
    mamba = {"mamba_num_heads": 4, "mamba_head_dim": 24, "ssm_state_size": 16, "n_groups": 2}
    layers = {"num_hidden_layers": 3, "layers_block_type": ["mamba", "mlp", "attention"]}
    return _random(seed, {**CONFIG, "model_type": "nemotron_h", **mamba, **layers, **changes})


def random_falcon_h1(seed: int, **changes) -> LanguageModel:
    """The same of a Falcon-H1 model: Mamba-2 and softmax attention in one layer, and multipliers."""
    mamba = {"mamba_d_ssm": 96, "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_n_groups": 2}
    scales = {"key_multiplier": 0.5, "ssm_in_multiplier": 1.5, "mlp_multipliers": [0.8, 1.25]}
    return _random(seed, {**CONFIG, "model_type": "falcon_h1", **mamba, **scales, **changes})


def random_granitemoehybrid(seed: int, **changes) -> LanguageModel:
    """The same of a Granite 4 model: a layer of Mamba-2 and one of softmax attention without positions."""
    mamba = {"mamba_n_heads": 4, "mamba_d_state": 16, "mamba_n_groups": 2, "layer_types": ["mamba", "attention"]}
    rest = {"num_local_experts": 0, "attention_multiplier": 0.25, "residual_multiplier": 0.5}
    fields = {**CONFIG, "model_type": "granitemoehybrid", **mamba, **rest, **changes}
    return _random(seed, fields | {"shared_intermediate_size": fields["intermediate_size"]})


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def random_qwen3_moe(seed: int, **changes) -> LanguageModel:
    """The same of a Qwen3-MoE model: a layer with an MLP, and one with experts."""
    return _random(seed, {**CONFIG, "model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": [0], **changes})


def random_qwen3_5_moe(seed: int, **changes) -> LanguageModel:
    """The same of a Qwen3.5-MoE model: experts in every layer and in the MTP layer, and a shared one."""
    shared = {"shared_expert_intermediate_size": 24, "mtp_num_hidden_layers": 1}
    return _random(seed, {**CONFIG, "model_type": "qwen3_5_moe_text", **EXPERTS, **shared, **changes})


def random_qwen3_next(seed: int, **changes) -> LanguageModel:
    """The same of a Qwen3-Next model: as Qwen3.5-MoE's, saved with fused projections."""
    shared = {"shared_expert_intermediate_size": 24, "mtp_num_hidden_layers": 1}
    return _random(seed, {**CONFIG, "model_type": "qwen3_next", **EXPERTS, **shared, **changes})


def random_nemotron_h_moe(seed: int, **changes) -> LanguageModel:
    """The same of a Nemotron 3 model with experts: as Nemotron-H's, and latent experts in groups."""
    mamba = {"mamba_num_heads": 4, "mamba_head_dim": 24, "ssm_state_size": 16, "n_groups": 2}
    layers = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "moe", "attention", "moe"]}
    experts = {"n_routed_experts": 6, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 24}
    experts |= {"num_experts_per_tok": 2, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5}
    rest = {"moe_latent_size": 20, "mlp_bias": True}
    return _random(seed, {**CONFIG, "model_type": "nemotron_h", **mamba, **layers, **experts, **rest, **changes})


def random_granitemoehybrid_moe(seed: int, **changes) -> LanguageModel:
    """The same of a Granite 4 model with experts: as Granite 4's, and experts in both layers."""
    experts = {"num_local_experts": 6, "num_experts_per_tok": 2}
    return random_granitemoehybrid(seed, **{**experts, **changes})


def random_olmo_hybrid(seed: int, **changes) -> LanguageModel:
    """The same of an Olmo Hybrid model: beta up to 2, and norms over all heads; it has no MTP layer."""
    return _random(
        seed, {**CONFIG, "model_type": "olmo_hybrid", "layer_types": ["linear_attention", "full_attention"]} | changes
    )


LATENT = {
    **{"kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
    **{"num_key_value_heads": None, "num_experts": 6, "num_experts_per_token": 2, "moe_intermediate_size": 16},
    **{"layer_types": ["linear_attention", "full_attention"], "tie_word_embeddings": False},
}


def random_kimi_linear(seed: int, **changes) -> LanguageModel:
    """The same of a Kimi Linear model: Kimi Delta Attention with an MLP, and latent attention with experts."""
    linear = {"linear_num_heads": 4, "linear_head_dim": 16}
    return _random(seed, {**CONFIG, "model_type": "kimi_linear", **LATENT, **linear, **changes})


def random_bailing_hybrid(seed: int, **changes) -> LanguageModel:
    """The same of a Ling 3.0 model: as Kimi Linear's with positions, bounded decays and groups of experts."""
    groups = {"first_k_dense_replace": 1, "num_expert_group": 3, "topk_group": 2}
    return _random(seed, {**CONFIG, "model_type": "bailing_hybrid", **LATENT, **groups, **changes})


def _random(seed: int, fields: dict) -> LanguageModel:
    config = config_from_dict(fields)
    model = random_model(config, scale=0.15, seed=seed)
    tokenizer = byte_tokenizer() if config.vocab_size == CONFIG["vocab_size"] else None
    return LanguageModel(model, config, tokenizer, {}, jnp.dtype("float32"), "tiny")


# name -> (seed, changes of the configuration) -> a random model
MODELS: dict[str, Callable[..., LanguageModel]] = {
    "qwen3_5": random_qwen3_5,
    "llama": random_llama,
    "mamba2": random_mamba2,
    "qwen3": random_qwen3,
    "nemotron_h": random_nemotron_h,
    "falcon_h1": random_falcon_h1,
    "granitemoehybrid": random_granitemoehybrid,
    "qwen3_moe": random_qwen3_moe,
    "qwen3_5_moe": random_qwen3_5_moe,
    "qwen3_next": random_qwen3_next,
    "olmo_hybrid": random_olmo_hybrid,
    "nemotron_h_moe": random_nemotron_h_moe,
    "granitemoehybrid_moe": random_granitemoehybrid_moe,
    "kimi_linear": random_kimi_linear,
    "bailing_hybrid": random_bailing_hybrid,
    "qwen2": random_qwen2,
}
# Every test of these files compiles programs of its own for each architecture: `test_architectures.py` has for all of
# them what each must hold.
FIRST, *OTHERS = MODELS


@functools.cache
def model_named(architecture: str, seed: int) -> LanguageModel:
    return MODELS[architecture](seed)


@functools.cache
def greedy_case(architecture: str) -> tuple[list[list[int]], list]:
    """Prompts of lengths 1 to 64, the ends included, and their greedy results, none of which is near a tie."""
    rng, lm = np.random.default_rng(), model_named(architecture, 3)
    while True:
        prompts = [rng.integers(0, 256, n).tolist() for n in [1, 64, *rng.integers(2, 64, ROWS - 2)]]
        with jax.numpy_dtype_promotion("strict"):  # as in the tests: it is part of what was compiled
            results = generate(lm, prompts, NEW, GREEDY)
        if all(not near_tie(lm, result) for result in results):
            return prompts, results


@pytest.fixture(scope="module", params=[FIRST, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in OTHERS)])
def architecture(request):
    return request.param


@pytest.fixture(scope="module")
def lm(architecture):
    return model_named(architecture, 3)


@pytest.fixture(scope="module")
def prompts(architecture):
    return greedy_case(architecture)[0]


@pytest.fixture(scope="module")
def greedy(architecture):
    return greedy_case(architecture)[1]


def near_tie(lm, result) -> bool:
    """Whether some token was hardly better than another."""
    steps = zip(result.tokens, result.logprobs, result.top_logprobs, strict=True)
    return any(
        chosen - other < TIE
        for token, chosen, top in steps
        for candidate, other in top.items()
        if candidate != token and lm.known_ids[candidate]
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scripted:
    """Knows the tokens that will come, and drafts some of them right, the next one wrong and the others right again.

    Its state counts the tokens so far.

    Attributes:
      answers: int32 [rows, n], the tokens that will come.
      right, count: int32 [rows, m]: right drafts before a wrong one, and drafts, when m divides the tokens so far with
        the remainder of the column.
    """

    answers: jax.Array
    right: jax.Array
    count: jax.Array
    draft_tokens: int = dataclasses.field(default=DRAFTS, metadata={"static": True})

    def init(self, config, sizes):
        return jnp.zeros(sizes.rows, jnp.int32)

    def admit(self, model, carry, reading):
        return carry.history.count

    def propose(self, model, carry, most):
        so_far = carry.speculation.state
        now = (so_far % self.right.shape[1])[:, None]
        right, count = (jnp.take_along_axis(x, now, axis=1) for x in (self.right, self.count))
        ahead = jnp.arange(self.draft_tokens, dtype=jnp.int32)[None]
        place = jnp.minimum(so_far[:, None] + ahead, self.answers.shape[1] - 1)
        drafts = jnp.take_along_axis(self.answers, place, axis=1)
        return Proposal(jnp.where(ahead == right, (drafts + 1) % 256, drafts), jnp.minimum(count[:, 0], most)), so_far

    def settle(self, model, state, hidden, tokens, number):
        return state + number


def script(results, right, count=DRAFTS) -> Scripted:
    """From the results of a generation; right and count are a number, one a row, or a table."""

    def table(x):
        x = np.asarray(x, np.int32)
        return jnp.asarray(np.broadcast_to(x if x.ndim == 2 else x.reshape(-1, 1), (ROWS, 2)))

    answers = np.zeros((ROWS, NEW), np.int32)
    for row, result in enumerate(results):
        answers[row, : len(result.tokens)] = result.tokens
    return Scripted(jnp.asarray(answers), table(right), table(count))


def check_equal(lm, prompts, found, expected) -> int:
    """Tokens are equal, or first differ where the two best logits are a tie; returns in how many rows they do."""
    ties = 0
    for prompt, ours, theirs in zip(prompts, found, expected, strict=True):
        assert len(ours.tokens) == len(theirs.tokens)
        if ours.tokens == theirs.tokens:
            continue
        place = next(i for i, (a, b) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)) if a != b)
        logits = np.asarray(lm.logits(np.array([prompt + theirs.tokens[:place]])))[0, -1]
        second, first = np.sort(np.where(lm.known_ids, logits, -np.inf))[-2:]
        assert first - second < TIE, place
        ties += 1
    print(f"{ties} of {len(found)} rows differ from a tie on")
    return ties


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScriptedTree:
    """Knows the tokens that will come, and drafts trees whose nodes are right or wrong.

    A node that is right is the token that will come at its depth, so it is kept if all before it are. Its state counts
    the tokens so far.

    Attributes:
      answers: int32 [rows, n], the tokens that will come.
      parents: int32 [rows, m, drafts], when m divides the tokens so far with the remainder of the middle index.
      right: bool [rows, m, drafts].
      count: int32 [rows, m].
    """

    answers: jax.Array
    parents: jax.Array
    right: jax.Array
    count: jax.Array

    trees = True

    @property
    def draft_tokens(self):
        return self.parents.shape[2]

    def init(self, config, sizes):
        return jnp.zeros(sizes.rows, jnp.int32)

    def admit(self, model, carry, reading):
        return carry.history.count

    def propose(self, model, carry, most):
        so_far = carry.speculation.state
        row, now = jnp.arange(so_far.shape[0], dtype=jnp.int32), so_far % self.parents.shape[1]
        parents, right, count = (x[row, now] for x in (self.parents, self.right, self.count))
        depth = jnp.sum(ancestors(parents), axis=2, dtype=jnp.int32) - 1
        place = jnp.minimum(so_far[:, None] + depth, self.answers.shape[1] - 1)
        drafts = jnp.take_along_axis(self.answers, place, axis=1)
        wrong = (drafts + 1 + jnp.arange(self.draft_tokens, dtype=jnp.int32)[None]) % 256
        return Proposal(jnp.where(right, drafts, wrong), jnp.where(most > 0, count, 0), parents=parents), so_far

    def settle(self, model, state, hidden, tokens, number):
        return state + number


VOCAB, PROMPT, EACH, BATCHES = 5, [1, 3, 0, 2, 1, 4, 1, 3], 4096, 8
SETTINGS = {"temperature": 0.9, "top_p": 0.85, "frequency_penalty": 0.3, "ignore_eos": True}
TINY = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "eos_token_id": 4} | {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
}


@functools.cache
def tiny_models(architecture: str) -> tuple[LanguageModel, LanguageModel]:
    """Two models of five tokens; drafts are kept about as often as not."""
    return tuple(_decided(MODELS[architecture](seed, **TINY)) for seed in (1, 2))


def _decided(lm: LanguageModel) -> LanguageModel:
    """The model with logits of a spread of 1, whatever its final norm: if all tokens were about as probable, no mistake
    in accepting drafts could be seen."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (8, 8))
    parameters = {name: parameter[...] for name, parameter in named_parameters(lm.model).items()}
    parameters["norm"] = parameters["norm"] / np.std(np.asarray(lm.logits(tokens)), dtype=np.float32)
    return lm.replace(model=replace_parameters(lm.model, parameters.values()))


def filtered(logits, generated):
    """The distribution that SETTINGS make of logits, float64 [VOCAB], after these generated tokens."""
    scaled = (logits - 0.3 * np.bincount(generated, minlength=VOCAB)) / 0.9
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p)
    kept = order[: 1 + np.searchsorted(np.cumsum(p[order]), 0.85)]
    out = np.zeros(VOCAB)
    out[kept] = p[kept] / p[kept].sum()
    return out


def joint_distribution(lm):
    """Of the second, third and fourth token after PROMPT, float64 [VOCAB] * 3, from the plain forward."""
    prefixes = np.stack(np.meshgrid(*[np.arange(VOCAB)] * 3, indexing="ij"), -1).reshape(-1, 3)
    logits = np.asarray(lm.logits(np.concatenate([np.tile(PROMPT, (len(prefixes), 1)), prefixes], 1)), np.float64)
    joint = np.zeros([VOCAB] * 4)
    for prefix, rows in zip(prefixes, logits[:, len(PROMPT) - 1 :], strict=True):
        p = [filtered(rows[i], prefix[:i]) for i in range(4)]
        joint[tuple(prefix)] = np.prod([p[i][prefix[i]] for i in range(3)]) * p[3]
    np.testing.assert_allclose(joint.sum(), 1)
    return joint.sum(0)


def p_value(lm, drafter, rng, monkeypatch, *, batches=BATCHES):
    """A bound of it (`tail_bound`), of three tokens of each of batches * EACH rows, against exact enumeration."""
    monkeypatch.setattr("jaxbuf.serving.batch.PROMPT_BUCKET", 8)
    monkeypatch.setattr("jaxbuf.serving.batch.ROOM", 8)
    counts, drafted = collections.Counter(), 0
    for seeds in rng.choice(2**32, (batches, EACH), replace=False).tolist():
        sampling = [SamplingParams(**SETTINGS, seed=seed) for seed in seeds]
        decoding = Decoding(max_new_tokens=5, form="buffered", drafter=drafter, draft_tokens=2)
        carry = generate_batch(make_batch(lm, [PROMPT] * EACH, sampling, decoding))
        assert np.asarray(carry.history.count).tolist() == [5] * EACH
        counts.update(map(tuple, np.asarray(carry.history.tokens)[:, len(PROMPT) + 1 : len(PROMPT) + 4].tolist()))
        drafted += int(np.asarray(carry.speculation.drafted).sum())
    assert drafted > EACH * batches
    expected = {cell: p * EACH * batches for cell, p in np.ndenumerate(joint_distribution(lm))}
    return tail_bound(counts, expected)

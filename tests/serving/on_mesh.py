"""Generates on one device and on a mesh of simulated ones, and prints as JSON which results differ, and bytes.

A program of its own, because XLA makes the devices when it starts."""

import dataclasses
import json
import math
import re
import sys
import tempfile
import warnings

import jax
import numpy as np

import jaxbuf
from jaxbuf.models.layers import named_parameters
from jaxbuf.serving import batch, generate_tokens
from jaxbuf.serving.batch import Decoding, make_batch
from jaxbuf.serving.generation import read_prompts
from jaxbuf.target import Target
from tests.serving.program import carry_shape, gpu_kernels
from tests.serving.speculating import MODELS, near_tie

# Eight heads, and two of keys, fewer than four devices; eight experts.
SIZES = {
    "qwen3_5": {"linear_num_value_heads": 8, "num_attention_heads": 8, "head_dim": 8},
    "llama": {"num_attention_heads": 8, "head_dim": 8},
    "qwen2": {"num_attention_heads": 8, "head_dim": 8},
    "qwen3": {"num_attention_heads": 8, "head_dim": 8},
    "mamba2": {"head_dim": 12},
    "nemotron_h": {"num_attention_heads": 8, "head_dim": 8, "mamba_num_heads": 8, "mamba_head_dim": 12},
    "falcon_h1": {"num_attention_heads": 8, "head_dim": 8, "mamba_n_heads": 8, "mamba_rms_norm": True},
    "granitemoehybrid": {"num_attention_heads": 8, "head_dim": 8, "mamba_n_heads": 8},
    "qwen3_moe": {"num_attention_heads": 8, "head_dim": 8, "num_experts": 8},
    "qwen3_5_moe": {"linear_num_value_heads": 8, "num_attention_heads": 8, "head_dim": 8, "num_experts": 8},
    "qwen3_next": {"linear_num_value_heads": 8, "num_attention_heads": 8, "head_dim": 8, "num_experts": 8},
    "olmo_hybrid": {"linear_num_value_heads": 8, "num_attention_heads": 8, "head_dim": 8},
    "nemotron_h_moe": {"num_attention_heads": 8, "head_dim": 8, "mamba_num_heads": 8, "mamba_head_dim": 12},
    "granitemoehybrid_moe": {"num_attention_heads": 8, "head_dim": 8, "mamba_n_heads": 8, "num_local_experts": 8},
    "kimi_linear": {"num_attention_heads": 8, "linear_num_heads": 8, "linear_head_dim": 8, "num_experts": 8}
    | {"q_lora_rank": 12, "attention_bias": True},
    "bailing_hybrid": {"num_attention_heads": 8, "head_dim": 8, "num_experts": 12},
}
# Families whose mixers have a norm with a number for each channel of their heads.
SPREAD_NORMS = ("mamba2", "nemotron_h", "falcon_h1", "granitemoehybrid")
NEW = 12
GREEDY = jaxbuf.SamplingParams(temperature=0.0, ignore_eos=True, logprobs=5)
CASES = {
    "plain": {},
    "n-grams": {"drafter": "ngram"},
    "mtp": {"drafter": "mtp"},
    "chunks": {},
    "samples": {"sampling": jaxbuf.SamplingParams(temperature=0.0, ignore_eos=True, n=2)},
}


def run(lm, name, prompts):
    if name == "beams":
        return [[beam.tokens for beam in found] for found in jaxbuf.beam_search(lm, prompts, 8, beams=2)]
    if name == "score":
        return np.asarray(lm.score(prompts)).tolist()
    if name == "logits":
        return np.asarray(lm.logits([prompts[1] * 2] * 2))
    batch.CHUNK_TOKENS = batch.LEAST_CHUNK = 16 if name == "chunks" else 2**16
    given = {"sampling": GREEDY} | CASES[name]
    return [[x.tokens for x in one.samples] for one in jaxbuf.generate(lm, prompts, NEW, **given)]


def held(arrays, devices):
    """The bytes of arrays on each device."""
    each = dict.fromkeys(jax.devices()[:devices], 0)
    for array in jax.tree.leaves(arrays):
        for shard in array.addressable_shards:
            each[shard.device] += shard.data.nbytes
    return list(each.values())


def memory(lm):
    """What the layers hold after some steps of the compiled loop."""
    batch = make_batch(lm, [[1, 2, 3]] * 4, GREEDY, Decoding(NEW))
    carry = read_prompts(lm, batch.sizes, batch.arrivals)
    return generate_tokens(lm.model, carry, np.int32(3)).cache.layers


REPEATED = re.compile(
    r"norm(_\w+)?|(before|after)_\w+|\w*\.fc|o_bias|out_bias|(\w+_)?down_bias|router(_bias)?|latent_\w+|shared_gate"
    r"|(kv|q)_down"
)


def equal(name, found, alone):
    if name == "logits":
        return np.sqrt(np.mean(np.square(found - alone))) <= 1e-4
    return np.allclose(found, alone, atol=1e-3) if name == "score" else found == alone


def repeated(lm, devices):
    """How many bytes of parameters and of memory are on more devices than one, counted by hand: all but one of each."""
    spec, found = lm.config.spec, [0, 0]
    for name, param in named_parameters(lm.model).items():
        array, last = param[...], name.split(".")[-1]
        odd = last in ("embed_tokens", "lm_head") and lm.vocab_size % devices
        all_heads = lm.config.family == "olmo_hybrid" and last in ("q_norm", "k_norm")
        inner = all_heads or (last == "norm" and lm.config.family in SPREAD_NORMS and "mixers" in name)
        low_rank = lm.config.family == "kimi_linear" and name.endswith(("mixers.0.decay", "mixers.0.gate"))
        if odd or low_rank or ((REPEATED.fullmatch(last) or last == "fc" or last.endswith("_norm")) and not inner):
            found[0] += (devices - 1) * array.nbytes
        elif last in ("k_proj", "v_proj", "k_bias", "v_bias", "k_norm"):
            found[0] += (max(1, devices // 2) - 1) * array.nbytes
        elif last in ("in_proj_qkv", "in_proj", "in_bias", "conv1d", "conv1d_bias"):
            keys = 2 * spec.key_heads * spec.key_dim
            found[0] += (max(1, devices // spec.key_heads) - 1) * keys * array.nbytes // array.shape[0]
    for layer in memory(lm):
        if hasattr(layer, "pool"):
            keys = 2 * spec.key_heads * spec.key_dim
            found[1] += (max(1, devices // spec.key_heads) - 1) * layer.pool.keys.nbytes
            found[1] += (
                (max(1, devices // spec.key_heads) - 1) * layer.ring.nbytes * keys // math.prod(layer.ring.shape[2:])
            )
        elif hasattr(layer, "latents"):
            found[1] += (devices - 1) * layer.latents.nbytes
        else:
            found[1] += (max(1, devices // 2) - 1) * (layer.keys.nbytes + layer.values.nbytes)
    return found


def routed(lm):
    """Bytes of the routed experts' matrices."""
    return sum(p[...].nbytes for p in named_parameters(lm.model).values() if p[...].ndim == 3)


def unlike(lm, spread, axes):
    """What of parameters and memory is not where it should be, 3 % aside: experts are spread over the axes "tensor" and
    "expert", the rest over "tensor"."""
    found, devices, expert_devices = [], axes.get("tensor", 1), axes.get("expert", 1)
    every = math.prod(axes.values())
    elsewhere = routed(lm) * (1 - 1 / expert_devices), 0
    kinds = {"parameters": (lm.model, spread.model), "memory": (memory(lm), memory(spread))}
    for (kind, (alone, on_mesh)), copies, less in zip(kinds.items(), repeated(lm, devices), elsewhere, strict=True):
        each, expected = held(on_mesh, every), (sum(held(alone, 1)) + copies - less) / devices
        if not np.allclose(each, expected, rtol=0.03):
            found.append(f"{kind}: {each}, expected {expected} each, of which {copies / devices} repeated")
    return found


def lowered_kernels(devices):
    """The kernels of the demo's decode loop, lowered for H100s, with the shapes of the arrays that each takes."""
    lm = jaxbuf.load("demo", mesh=jax.make_mesh((devices,), ("tensor",)))
    lm = dataclasses.replace(lm, compiled_for=Target("gpu", "Hopper"))
    carry = carry_shape(make_batch(lm, [[1] * 30] * 8, decoding=Decoding(200)))
    text = generate_tokens.trace(lm.model, carry, np.int32(9)).lower(lowering_platforms=("cuda",)).as_text()
    return gpu_kernels(text)


def main(architecture: str, axes: dict[str, int], names: list[str]) -> None:
    warnings.simplefilter("error")
    rng, lm = np.random.default_rng(), MODELS[architecture](3, **SIZES[architecture])
    while True:
        prompts = [rng.integers(0, 256, n).tolist() for n in (3, 20, 60, 40)]
        if not any(near_tie(lm, result) for result in jaxbuf.generate(lm, prompts, NEW, GREEDY)):
            break
    alone = {name: run(lm, name, prompts) for name in names}
    differ, shape = [], tuple(axes.values())
    devices = math.prod(shape)
    with tempfile.TemporaryDirectory() as directory:
        lm.save(directory, dtype=lm.dtype)
        for mesh in (
            jax.make_mesh(shape, tuple(axes)),  # explicit axes
            jax.sharding.Mesh(np.array(jax.devices()[:devices]).reshape(shape), tuple(axes)),  # automatic ones
        ):
            spread = jaxbuf.load(directory, mesh=mesh)
            assert len(spread.model.embed_tokens[...].sharding.device_set) == devices
            differ += unlike(lm, spread, axes)
            with tempfile.TemporaryDirectory() as again:
                spread.save(again, dtype=lm.dtype)
                read = named_parameters(jaxbuf.load(again, dtype=lm.dtype).model)
            same = [np.array_equal(p[...], read[name][...]) for name, p in named_parameters(lm.model).items()]
            differ += [] if all(same) else ["saved"]
            for name in names:
                differ += [] if equal(name, run(spread, name, prompts), alone[name]) else [name]
            names = names[:1]  # the second mesh is the first one to the programs
    print(json.dumps(differ))


if __name__ == "__main__":
    if sys.argv[1] == "demo":
        print(json.dumps(lowered_kernels(json.loads(sys.argv[2])["tensor"])))
    else:
        main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3].split(","))

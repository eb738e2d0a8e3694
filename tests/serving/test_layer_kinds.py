"""Layers of one kind are traced and lowered once, however many a model has: in serving, training, and for a GPU."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.bench.random_model import configuration
from jaxbuf.models.decoder import forward
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.layers import cast
from jaxbuf.models.mixers.attention import Attention
from jaxbuf.models.mixers.gated_delta_net import GatedDeltaNet
from jaxbuf.serving import generate_tokens
from jaxbuf.serving.batch import Decoding, make_batch
from jaxbuf.serving.prompts import program_key, read_first_chunk, start
from jaxbuf.target import as_target
from tests.serving.program import carry_shape
from tests.tiny import random_model

SIZES = {"hidden": 256, "ffn": 512, "vocabulary": 512, "heads": 4, "key_heads": 2, "dim": 128}
SIZES |= {"attention_heads": 4, "kv_heads": 2, "attention_dim": 128}
# Six recurrent layers and two softmax layers. The first layer adds to nothing, the others to the layer before.
ONCE = {"GatedDeltaNet": 2, "Attention": 1}


@pytest.fixture(scope="module")
def made():
    config, dtype = configuration(layers=8, **SIZES), jnp.dtype(jnp.bfloat16)
    model = cast(random_model(config), dtype)
    return LanguageModel(model, config, None, {}, dtype, "random", compiled_for=as_target("H100"))


@pytest.fixture
def calls(monkeypatch):
    """How often each kind of mixer is called."""
    counts = collections.Counter()

    def count(kind):
        call = kind.__call__

        def counted(*given):
            counts[kind.__name__] += 1
            return call(*given)

        monkeypatch.setattr(kind, "__call__", counted)

    count(GatedDeltaNet)
    count(Attention)
    jax.clear_caches()
    return counts


@pytest.fixture(scope="module")
def batch(made):
    return make_batch(made, [[1] * 70] * 4, decoding=Decoding(40, form="buffered"))


@pytest.mark.slow
def test_a_step_traces_a_layer_of_each_kind_and_lowers_each_kernel_once(made, batch, calls):
    traced = generate_tokens.trace(made.model, carry_shape(batch), np.int32(9))
    assert calls == ONCE
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"call @_apply_layer", text)) == 8
    assert len(re.findall(r"func\.func private @_apply_layer", text)) == sum(ONCE.values())
    kernels = [re.sub(r"%[\w#]+", "", line) for line in text.splitlines() if "@mosaic_gpu" in line]
    assert len(kernels) == len(set(kernels)) and len(kernels) >= 5
    names = collections.Counter(name for line in kernels for name in re.findall(r"\\00(\w+?)_mosaic_gpu\\00", line))
    assert names["extend_heads"] == names["gated_norm_heads"] == names["attend_blocks"] == 1, names


def test_reading_prompts_traces_a_layer_of_each_kind(made, batch, calls):
    """In the one program, and in those of the layers."""
    start.trace(made.model, batch.sizes, batch.arrivals[0])
    assert calls == ONCE
    calls.clear()
    keys = set()

    def trace(program, *args):
        keys.add(program_key(program, args))
        return program.trace(*args).out_info

    read_first_chunk(made.model, batch.sizes, batch.arrivals[0], run=trace)
    assert len(keys) == 2 + len(ONCE) and all(number <= ONCE[kind] for kind, number in calls.items())


def test_a_gradient_traces_a_layer_of_each_kind(made, calls):
    def loss(model, tokens):
        return jnp.sum(forward(model, tokens, target="CPU").astype(jnp.float32))

    jax.jit(jax.grad(loss)).trace(made.model, jax.ShapeDtypeStruct((2, 96), jnp.int32))
    assert calls == ONCE

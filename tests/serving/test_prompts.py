"""The programs that read the first prompts make the carry that `admit` makes, and share and reuse what they can."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxbuf.models.decoder import Decoder
from jaxbuf.models.families import config_from_dict
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.serving import SamplingParams, admit, init_carry
from jaxbuf.serving.batch import Decoding, make_batch
from jaxbuf.serving.prompts import begin_prompts, call, end_prompts, read_first_chunk, read_layer
from tests.serving.conftest import CONFIG, byte_tokenizer

LAYERS = 4
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 4, 5, 6], [9]]
SETTINGS = {
    "plain": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.8, seed=3, n=2),
    "reported": SamplingParams(temperature=0.8, seed=3, logprobs=2, prompt_logprobs=3),
}


@pytest.fixture(scope="module")
def hybrid() -> LanguageModel:
    """Two layers of each of two kinds."""
    config = config_from_dict(CONFIG | {"num_hidden_layers": LAYERS})
    model = Decoder(config, rngs=nnx.Rngs(5))
    return LanguageModel(model, config, byte_tokenizer(), {}, jnp.dtype("float32"), "tiny")


def batch_of(lm, setting, drafter):
    return make_batch(lm, PROMPTS, SETTINGS[setting], Decoding(6, drafter=drafter))


@pytest.mark.parametrize(
    ("setting", "drafter"),
    [
        ("sampled", None),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("reported", "ngram"), ("sampled", "ngram"), ("plain", "model"))
        ),
    ],
)
def test_the_carry_is_that_of_admit(hybrid, lm, setting, drafter):
    batch = batch_of(hybrid, setting, lm if drafter == "model" else drafter)
    (arrivals,), model = batch.arrivals, hybrid.model
    assert arrivals.begins.forks == (setting == "sampled") and arrivals.report_prompt == (setting == "reported")
    given = () if batch.drafter is None else (batch.drafter,)
    expected = admit(model, init_carry(hybrid.config, batch.sizes, *given), arrivals, *given)
    found = read_first_chunk(model, batch.sizes, arrivals, *given)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert (x.dtype, x.shape, x.weak_type, x.committed) == (y.dtype, y.shape, y.weak_type, True), path
        compare = np.testing.assert_allclose if jnp.issubdtype(x.dtype, jnp.floating) else np.testing.assert_array_equal
        how = {"rtol": 1e-5, "atol": 1e-5} if compare is np.testing.assert_allclose else {}
        compare(np.asarray(x), np.asarray(y), **how, err_msg=str(path))


def test_only_what_the_first_program_returns_has_to_be_put_on_its_device(hybrid, monkeypatch):
    """What the others return counts as put there, as their arguments do; putting it again takes the host a while."""
    batch, put, device_put = batch_of(hybrid, "sampled", None), [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda *given: put.append(given) or device_put(*given))
    carry = read_first_chunk(hybrid.model, batch.sizes, batch.arrivals[0])
    assert len(put) == 1 and all(x.committed for x in jax.tree.leaves(carry))


def test_layers_of_a_kind_share_a_program_and_all_memory_is_reused(hybrid):
    """What is donated is gone, and what the layers return lies where it lay."""
    batch = batch_of(hybrid, "sampled", "ngram")
    for program in (begin_prompts, read_layer, end_prompts):
        program.clear_cache()
    called = []

    def run(program, *args):
        donated = {read_layer: args[2:4], end_prompts: args[1:3]}.get(program, ())
        held = [x for x in jax.tree.leaves(donated) if x.size]
        places = [x.unsafe_buffer_pointer() for x in held]
        found = call(program, *args)
        assert all(x.is_deleted() for x in held)
        if program is read_layer:
            x, memories = found
            assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves((x, memories))] == places
        called.append(program)
        return found

    given = () if batch.drafter is None else (batch.drafter,)
    carry = read_first_chunk(hybrid.model, batch.sizes, batch.arrivals[0], *given, run=run)
    assert called == [begin_prompts, *[read_layer] * LAYERS, end_prompts]
    assert (begin_prompts._cache_size(), read_layer._cache_size(), end_prompts._cache_size()) == (1, 2, 1)
    assert not any(x.is_deleted() for x in jax.tree.leaves((carry, hybrid.model)))


@pytest.mark.slow
def test_a_layer_without_mixers_reads_any_plans(hybrid):
    """It has none of its own, but learns from them what it is compiled for."""
    layers = [dataclasses.replace(layer, mixers=()) for layer in hybrid.config.layers[:1]]
    config = dataclasses.replace(hybrid.config, layers=(*layers, *hybrid.config.layers[1:]))
    model = Decoder(config, rngs=nnx.Rngs(6))
    lm = dataclasses.replace(hybrid, model=model, config=config)
    batch = batch_of(lm, "plain", None)
    expected = admit(model, init_carry(config, batch.sizes), batch.arrivals[0])
    found = read_first_chunk(model, batch.sizes, batch.arrivals[0])
    np.testing.assert_allclose(found.hidden, expected.hidden, rtol=1e-5, atol=1e-5)

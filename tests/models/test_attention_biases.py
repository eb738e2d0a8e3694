"""Which of the projections of softmax attention add a bias."""

import dataclasses

import numpy as np
import pytest

from jaxbuf.models.decoder import Decoder, forward
from jaxbuf.models.families import config_from_dict
from jaxbuf.models.layers import named_parameters, replace_parameters
from tests.tiny import SIZES, abstract, random_model


def with_biases(**which):
    """The configuration of a model of one layer, whose mixer has these settings."""
    config = config_from_dict(SIZES | {"model_type": "llama", "num_hidden_layers": 1})
    (layer,) = config.layers
    mixer = dataclasses.replace(layer.mixers[0], **which)
    return dataclasses.replace(config, layers=(dataclasses.replace(layer, mixers=(mixer,)),))


def biases(model: Decoder) -> list[str]:
    return [path for path in named_parameters(model) if path.endswith("_bias")]


@pytest.mark.parametrize(
    ("which", "parts"),
    [({}, ""), ({"bias": True}, "qkvo"), ({"bias": True, "output_bias": False}, "qkv"), ({"output_bias": True}, "o")],
)
def test_only_projections_that_add_a_bias_have_one(which, parts):
    found = biases(abstract(with_biases(**which)))
    assert sorted(found) == sorted(f"layers.0.mixers.0.{part}_bias" for part in parts)


def test_an_output_without_a_bias_is_one_whose_bias_is_zero(rng):
    full = random_model(with_biases(bias=True))
    values = {path: parameter[...] for path, parameter in named_parameters(full).items()}
    (path,) = (path for path in values if path.endswith(".o_bias"))
    less = abstract(with_biases(bias=True, output_bias=False))
    less = replace_parameters(less, [values[name] for name in named_parameters(less)])
    zeroed = replace_parameters(full, (values | {path: 0 * values[path]}).values())
    tokens = rng.integers(0, SIZES["vocab_size"], (2, 9)).astype(np.int32)
    with_it, without, expected = (np.asarray(forward(model, tokens)) for model in (full, less, zeroed))
    np.testing.assert_allclose(without, expected, rtol=0, atol=1e-5)
    assert np.abs(with_it - without).max() > 1e-2

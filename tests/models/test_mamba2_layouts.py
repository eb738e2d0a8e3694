"""Mamba-2 checkpoints in the layout of the authors' library are read as transformers' are."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxbuf
from jaxbuf.models.families import config_from_dict, config_json
from jaxbuf.models.language_model import load
from jaxbuf.models.loading.checkpoint import CheckpointError
from jaxbuf.planning.model_sizes import find_sizes

FIXTURES = Path(__file__).parent.parent / "fixtures"
# As in the published mamba2-2.7b, but for the sizes.
ORIGINAL = {
    "d_model": 40,
    "d_intermediate": 0,
    "n_layer": 2,
    "vocab_size": 197,
    "ssm_cfg": {"layer": "Mamba2", "d_state": 24, "headdim": 16},
    "attn_layer_idx": [],
    "attn_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 7,
    "tie_embeddings": True,
}
FULL = ORIGINAL | {
    "d_model": 36,
    "n_layer": 3,
    "vocab_size": 193,
    "pad_vocab_size_multiple": 6,
    "tie_embeddings": False,
}
FULL["ssm_cfg"] = {"layer": "Mamba2", "d_state": 16, "headdim": 12, "ngroups": 2, "bias": True, "d_ssm": 72} | {
    "dt_limit": [0.15, 1.25],
    "expand": 2,
    "d_conv": 4,
    "chunk_size": 32,
    "dt_min": 0.01,
    "rmsnorm": True,
}


def write(directory, config, tensors):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def original_tensors(name, head):
    """A fixture's tensors under the names of mamba_ssm, if asked for with a head that is the table once more."""
    tensors = load_file(FIXTURES / name / "checkpoint" / "model.safetensors")
    found = {each.replace("backbone.embeddings.", "backbone.embedding."): x for each, x in tensors.items()}
    assert "backbone.embedding.weight" in found
    return found | ({"lm_head.weight": found["backbone.embedding.weight"].copy()} if head else {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config", "head"),
    [
        ("plain", ORIGINAL, True),
        pytest.param("plain", ORIGINAL, False, marks=pytest.mark.exhaustive),
        pytest.param("full", FULL, False, marks=pytest.mark.exhaustive),
    ],
)
def test_logits_are_those_of_the_same_weights_in_transformers_layout(name, config, head, tmp_path, rng):
    source = FIXTURES / f"mamba2_{name}" / "checkpoint"
    known = json.loads((source / "config.json").read_text()) | {"layer_norm_epsilon": 1e-5}  # as mamba_ssm's always is
    write(tmp_path / "known", known, load_file(source / "model.safetensors"))
    lm = load(write(tmp_path / "original", config, original_tensors(f"mamba2_{name}", head)))
    expected = load(tmp_path / "known")
    tokens = rng.integers(0, lm.vocab_size, (3, 70))
    np.testing.assert_array_equal(lm.logits(tokens), expected.logits(tokens))
    greedy = jaxbuf.SamplingParams(temperature=0.0, ignore_eos=True)  # the file of one of them names such a token
    prompts = tokens[:, :9].tolist()
    generated = [[x.tokens for x in jaxbuf.generate(each, prompts, 6, greedy)] for each in (lm, expected)]
    assert generated[0] == generated[1] and all(len(each) == 6 for each in generated[0])
    lm.save(tmp_path / "saved", dtype="float32")
    again = load(tmp_path / "saved")
    assert again.config == lm.config and config_json(again.config)["model_type"] == "mamba2"
    np.testing.assert_array_equal(again.logits(tokens), lm.logits(tokens))
    assert find_sizes(tmp_path / "original").spec == lm.config.spec


def test_a_configuration_takes_what_the_library_takes_where_it_says_nothing():
    """The published 2.7B model: its config.json says layer alone of the mixer. Counted by hand from its tensors."""
    published = ORIGINAL | {"d_model": 2560, "n_layer": 64, "vocab_size": 50_277, "pad_vocab_size_multiple": 16}
    published["ssm_cfg"] = {"layer": "Mamba2"}
    source = config_from_dict(published).source
    assert (source.num_heads, source.head_dim, source.state_size, source.n_groups, source.conv_kernel) == (
        80,
        64,
        128,
        1,
        4,
    )
    assert (source.vocab_size, source.layer_norm_epsilon, source.use_bias, source.use_conv_bias) == (
        50_288,
        1e-5,
        False,
        True,
    )
    short = {name: published[name] for name in ("d_model", "n_layer", "vocab_size", "ssm_cfg")}
    assert config_from_dict(short).source.vocab_size == 50_280  # padded to a multiple of 8
    assert config_from_dict(short | {"eos_token_id": 0}).eos_token_ids == (0,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm_cfg": {}}, r"ssm_cfg\.layer must be 'Mamba2', got 'Mamba1'"),
        ({"ssm_cfg": {"layer": "Mamba3"}}, r"ssm_cfg\.layer must be 'Mamba2', got 'Mamba3'"),
        ({"ssm_cfg": "Mamba2"}, "ssm_cfg must be an object, got 'Mamba2'"),
        ({"d_intermediate": 128}, "d_intermediate must be 0 .*MLP.*, got 128"),
        ({"attn_layer_idx": [1]}, r"attn_layer_idx must be \[\] .*attention.*, got \[1\]"),
        ({"rms_norm": False}, "rms_norm must be True, got False"),
        ({"residual_in_fp32": "yes"}, "residual_in_fp32 must be true or false, got 'yes'"),
        ({"fused_add_norm": 1}, "fused_add_norm must be true or false, got 1"),
        ({"tie_embeddings": None}, "tie_embeddings must be true or false, got None"),
        ({"pad_vocab_size_multiple": 0}, "pad_vocab_size_multiple must be a whole number .*, got 0"),
        ({"n_layer": 1025}, r"n_layer must be a whole number in \[1, 1024\], got 1025"),
        ({"d_model": "40"}, "d_model must be a whole number"),
        ({"d_model": 36}, r"ssm_cfg\.expand \(2\) times d_model \(36\) must be a multiple of ssm_cfg\.headdim \(16\)"),
        ({"vocab_size": 2**31 - 1}, r"must be at most 2\*\*40 elements"),
    ],
)
def test_what_is_not_served_of_a_model_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(ORIGINAL | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ngroups": 2}, r"the heads \(5, .*\) must be a multiple of ssm_cfg\.ngroups \(2\)"),
        ({"d_ssm": 64}, r"ssm_cfg\.d_ssm must be one of \(None, 80\), got 64"),
        ({"rmsnorm": False}, r"ssm_cfg\.rmsnorm must be True"),
        ({"norm_before_gate": True}, r"ssm_cfg\.norm_before_gate must be False"),
        ({"D_has_hdim": True}, r"ssm_cfg\.D_has_hdim must be False"),
        ({"dt_limit": [1.0, 0.5]}, r"dt_limit must be two numbers"),
        ({"d_conv": 1}, r"ssm_cfg\.d_conv must be a whole number in \[2"),
        ({"headdim": 64.0}, r"ssm_cfg\.headdim must be a whole number"),
        ({"bias": 0}, r"ssm_cfg\.bias must be true or false"),
        ({"d_states": 5}, r"ssm_cfg\.d_states must be None \(jaxbuf does not know this field\), got 5"),
    ],
)
def test_what_is_not_served_of_a_mixer_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(ORIGINAL | {"ssm_cfg": ORIGINAL["ssm_cfg"] | changes})


def test_fields_that_lack(tmp_path):
    for name in ("d_model", "n_layer", "vocab_size"):
        config = {each: value for each, value in ORIGINAL.items() if each != name}
        with pytest.raises(ValueError, match=f"lacks {name}$"):
            config_from_dict(config)
    without = {name: value for name, value in ORIGINAL.items() if name != "ssm_cfg"}
    with pytest.raises(ValueError, match=r"model_type must be one of .*, got None"):
        config_from_dict(without)
    directory = write(tmp_path / "model", without | {"ssm_cfg": 5}, {"x": np.ones(3)})
    with pytest.raises(CheckpointError, match=r"config\.json: ssm_cfg must be an object, got 5"):
        load(directory)


def test_weights_that_torch_wrote_are_an_error_that_says_how_to_convert_them(tmp_path):
    directory = write(tmp_path / "model", ORIGINAL, original_tensors("mamba2_plain", False))
    (directory / "model.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"has no \*\.safetensors .*; torch's \*\.bin cannot be read\. .*save_file"
    ):
        load(directory)
    (directory / "pytorch_model.bin").write_bytes(b"x")
    message = (
        r"; pytorch_model\.bin of torch cannot be read\. .*load\('pytorch_model.bin'.*'pytorch_model\.safetensors'"
    )
    with pytest.raises(FileNotFoundError, match=message):
        load(directory)

"""What families read of a config.json beside the numbers that parity fixtures have: older files, and refusals."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxbuf.attention.rotary import Llama3Scaling, Rotary, YarnScaling
from jaxbuf.models.families import config_from_dict, config_json, families
from jaxbuf.models.language_model import load
from jaxbuf.planning.model_sizes import NAMED, from_config

FIXTURES = Path(__file__).parent.parent / "fixtures"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


def described(name, **changes):
    return json.loads((FIXTURES / name / "checkpoint" / "config.json").read_text()) | changes


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama_plain", {"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ("llama_plain", {"rope_parameters": {"rope_type": "dynamic"}}, "rope_type must be one of .*, got 'dynamic'"),
        (
            "llama_plain",
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "rope_scaling.type must be .* 'longrope'",
        ),
        ("llama_plain", {"rope_parameters": {"rope_type": "linear"}}, "lacks rope_parameters.factor"),
        ("llama_plain", {"rope_parameters": {"rope_type": "linear", "factor": 0}}, "rope_parameters.factor must be"),
        (
            "llama_plain",
            {"rope_parameters": YARN | {"beta_fast": 1, "beta_slow": 2}},
            r"beta_slow \(2.0\) must be at most",
        ),
        ("llama_plain", {"rope_parameters": YARN | {"truncate": 1}}, "rope_parameters.truncate must be true or false"),
        ("llama_plain", {"rope_parameters": YARN | {"rope_theta": 1.0}}, "rope_theta must be above 1"),
        (
            "qwen3_plain",
            {"rope_parameters": YARN | {"attention_factor": -1.0}},
            "rope_parameters.attention_factor must",
        ),
        ("llama_plain", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "lacks rope_parameters.low_freq"),
        (
            "llama_plain",
            {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "low_freq_factor": 4.0}},
            r"low_freq_factor \(4.0\) must be below high_freq_factor \(4.0\)",
        ),
        ("llama_plain", {"num_attention_heads": 5}, r"num_attention_heads \(5\) must be a multiple of"),
        ("llama_plain", {"head_dim": 7}, "head_dim must be even"),
        ("llama_plain", {"intermediate_size": 2**31 - 1}, r"at most 2\*\*40 elements"),
        ("qwen3_plain", {"use_sliding_window": True}, "use_sliding_window must be False, got True"),
        ("qwen3_plain", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must be"),
        ("qwen3_plain", {"rope_scaling": {"rope_type": "yarn"}}, "lacks rope_scaling.factor"),
        ("tied", {"rope_parameters": YARN}, "rope_type must be 'default', got 'yarn'"),
        (
            "qwen3_moe_plain",
            {"num_experts_per_tok": 7},
            r"num_experts_per_tok must be a whole number in \[1, 6\], got 7",
        ),
        ("qwen3_moe_plain", {"num_local_experts": 2**20}, r"num_local_experts must be a whole number in \[1, 16384\]"),
        ("qwen3_moe_plain", {"mlp_only_layers": [2]}, r"mlp_only_layers must be a list of whole numbers in \[0, 1\]"),
        ("qwen3_moe_plain", {"moe_intermediate_size": 2**31 - 1}, r"at most 2\*\*40 elements"),
        ("qwen3_moe_plain", {"use_sliding_window": True}, "use_sliding_window must be False, got True"),
        ("qwen3_5_moe_plain", {"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ("qwen3_5_moe_plain", {"attn_output_gate": False}, "attn_output_gate must be True, got False"),
        ("qwen3_next_plain", {"attention_bias": True}, "attention_bias must be False, got True"),
        ("qwen3_next_plain", {"decoder_sparse_step": 0}, r"decoder_sparse_step must be a whole number in \[1"),
        ("qwen3_next_plain", {"linear_num_key_heads": 4}, r"linear_num_value_heads \(6\) must be a multiple of"),
        ("qwen3_next_plain", {"rope_scaling": {"rope_type": "yarn"}}, "rope_type must be 'default', got 'yarn'"),
        ("mamba2_plain", {"rms_norm": False}, "rms_norm must be True, got False"),
        ("mamba2_plain", {"n_groups": 2}, r"num_heads \(5\) must be a multiple of n_groups \(2\)"),
        ("mamba2_plain", {"expand": 3}, r"expand \(3.0\) times hidden_size \(40\) must be num_heads \(5\) times"),
        ("mamba2_plain", {"time_step_limit": [1.0, 0.5]}, "time_step_limit must be two numbers"),
        ("mamba2_plain", {"time_step_limit": "inf"}, "time_step_limit must be two numbers"),
        ("mamba2_plain", {"conv_kernel": 1}, r"conv_kernel must be a whole number in \[2"),
        ("nemotron_h_plain", {"layers_block_type": ["mamba", "moe"], "num_hidden_layers": 2}, r'experts \("moe"\)'),
        ("nemotron_h_plain", {"layers_block_type": ["mamba", "linear"]}, "layers_block_type must be made of 'mamba'"),
        (
            "nemotron_h_plain",
            {"layers_block_type": None, "hybrid_override_pattern": "M?"},
            "pattern must be made of 'M'",
        ),
        ("nemotron_h_plain", {"num_hidden_layers": 4}, "layers_block_type has 5 layers, num_hidden_layers is 4"),
        ("nemotron_h_plain", {"layers_block_type": ["mlp"]}, "must be a Mamba-2 or an attention layer"),
        ("nemotron_h_plain", {"mlp_hidden_act": "silu"}, "mlp_hidden_act must be 'relu2', got 'silu'"),
        ("nemotron_h_plain", {"attention_bias": True}, "attention_bias must be False, got True"),
        ("nemotron_h_plain", {"sliding_window": 512}, "sliding_window must be None, got 512"),
        ("nemotron_h_plain", {"n_groups": 2}, r"mamba_num_heads \(5\) must be a multiple of n_groups \(2\)"),
        ("nemotron_h_plain", {"num_key_value_heads": 4}, r"num_attention_heads \(6\) must be a multiple of"),
        ("falcon_h1_plain", {"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ("falcon_h1_plain", {"mlp_multipliers": [1.0]}, "mlp_multipliers must be a list of 2 finite numbers"),
        ("falcon_h1_plain", {"ssm_multipliers": [1.0, 1, 1, 1, "1"]}, "ssm_multipliers must be a list of 5 finite"),
        ("falcon_h1_plain", {"key_multiplier": None}, "key_multiplier must be a finite number, got None"),
        ("falcon_h1_plain", {"mamba_d_head": 12}, r"mamba_n_heads \(5\) times mamba_d_head \(12\) must be the width"),
        ("falcon_h1_plain", {"mamba_n_groups": 3}, r"mamba_n_heads \(5\) must be a multiple of mamba_n_groups \(3\)"),
        ("falcon_h1_plain", {"head_dim": 7}, "head_dim must be even"),
        ("falcon_h1_plain", {"rope_scaling": {"rope_type": "yarn"}}, "rope_type must be 'default', got 'yarn'"),
        (
            "granitemoehybrid_plain",
            {"num_local_experts": 62},
            r"must be 0 \(routed experts are not served",
        ),
        ("granitemoehybrid_plain", {"position_embedding_type": "alibi"}, "position_embedding_type must be one of"),
        ("granitemoehybrid_plain", {"layer_types": ["mamba", "mlp"]}, r"layer_types must be 2 \(num_hidden_layers\)"),
        ("granitemoehybrid_plain", {"logits_scaling": 0}, "logits_scaling must be a finite number above 0"),
        ("granitemoehybrid_full", {"mamba_n_groups": 4}, r"mamba_n_heads \(6\) must be a multiple of mamba_n_groups"),
        ("granitemoehybrid_full", {"normalization_function": "layernorm"}, "normalization_function must be 'rmsnorm'"),
    ],
)
def test_what_is_not_served_is_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(described(name, **changes))


def test_positions_of_older_files():
    """The base lies beside rope_scaling, which counts where rope_parameters are there, too."""
    data = described("llama_plain", rope_theta=5e5, rope_scaling=LLAMA3 | {"type": "llama3"})
    without = {name: value for name, value in data.items() if name != "rope_parameters"}
    for each, theta in ((without, 5e5), (data, 1e4)):  # rope_parameters has a base of its own
        rotary = config_from_dict(each).layers[0].mixers[0].rotary
        assert (rotary.theta, rotary.scaling) == (theta, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    del without["rope_scaling"]
    rotary = config_from_dict(without).layers[0].mixers[0].rotary
    assert (rotary.theta, rotary.scaling) == (5e5, None)


def test_what_yarn_takes_where_a_configuration_says_nothing():
    """Null is as absent; an original context beside the positions counts first, and without any it is the whole one."""

    def read(changes, **beside):
        return config_from_dict(described("qwen3_plain", rope_parameters=YARN | changes, **beside)).layers[0].mixers[0]

    amplitude = 0.1 * np.log(4) + 1
    plain = read(dict.fromkeys(("attention_factor", "beta_fast", "beta_slow", "mscale", "truncate"))).rotary.scaling
    assert plain == YarnScaling(4.0, 32, amplitude) == read({"mscale": 0.7}).rotary.scaling
    assert read({"attention_factor": 1.5, "mscale": 2.0, "mscale_all_dim": 1.0}).rotary.scaling.amplitude == 1.5
    scales = read({"mscale": 2.0, "mscale_all_dim": 1.0}).rotary.scaling
    np.testing.assert_allclose(scales.amplitude, (0.2 * np.log(4) + 1) / amplitude, rtol=1e-12)
    assert read({"factor": 0.5}).rotary.scaling.amplitude == 1
    assert read({}, original_max_position_embeddings=77).rotary.scaling.context == 77
    assert read({"original_max_position_embeddings": None}).rotary.scaling.context == 512
    assert read({"factor": None}).rotary.scaling == YarnScaling(16.0, 32, 0.1 * np.log(16) + 1)


def test_yarns_frequencies_keep_fast_pairs_and_stretch_slow_ones(rng):
    for _ in range(20):
        dim, theta, context = 2 * int(rng.integers(8, 65)), float(rng.uniform(1e3, 1e6)), int(rng.integers(64, 8192))
        scaling = YarnScaling(float(rng.uniform(2, 40)), context, 1.3, 16.0, 2.0, bool(rng.integers(2)))
        plain = theta ** (-np.arange(0, dim, 2) / dim)
        turns, found = context * plain / (2 * np.pi), scaling.frequencies(dim, theta)
        kept, slow = found / plain, 1 / scaling.factor
        room = theta ** (2 / dim) if scaling.whole else 1 + 1e-9  # a pair more on either side
        np.testing.assert_allclose(kept[turns >= 16 * room], 1, rtol=1e-12)
        np.testing.assert_allclose(kept[turns <= 2 / room], slow, rtol=1e-12)
        assert np.all(np.diff(kept) <= 1e-12)
        cos, sin = Rotary(dim, theta, scaling).angles(np.array([[0, 3]], np.int32))
        np.testing.assert_allclose(cos[0, 0, 0], 1.3, rtol=1e-6)
        np.testing.assert_allclose(sin[0, 1, 0], 1.3 * np.sin(3 * found), rtol=0, atol=1e-5)


def test_heads_without_a_size_of_their_own_share_the_hidden_size():
    data = {name: value for name, value in described("llama_plain").items() if name != "head_dim"}
    assert config_from_dict(data).layers[0].mixers[0].head_dim == 8
    with pytest.raises(ValueError, match=r"hidden_size \(50\) must be a multiple of num_attention_heads \(6\)"):
        config_from_dict(data | {"hidden_size": 50})


def test_steps_without_a_limit_however_infinity_is_written():
    for limit in (None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}]):
        mixer = config_from_dict(described("mamba2_plain", time_step_limit=limit)).layers[0].mixers[0]
        assert (mixer.least_step, mixer.most_step) == (0.0, np.inf)


def test_layers_of_granite_by_old_names_and_without_a_list():
    data = described("granitemoehybrid_full")
    old = ["mamba", "attention", "mamba"]
    assert config_from_dict(data | {"layer_types": old, "position_embedding_type": "nope"}) == config_from_dict(data)
    without = config_from_dict({name: value for name, value in data.items() if name != "layer_types"})
    assert without.source.layer_types == ("linear_attention",) * 3


def test_layers_of_nemotron_h_by_letters_or_by_names():
    """Released files have one or the other, and attention_head_dim where they are older."""
    data = described("nemotron_h_plain")
    config = config_from_dict(data)
    for changes in (
        {"layers_block_type": None, "hybrid_override_pattern": "M-*--"},
        {"layers_block_type": ["mamba", "mlp", "full_attention", "mlp", "mlp"]},
        {"head_dim": None, "attention_head_dim": 12},
    ):
        assert config_from_dict(data | changes) == config
    assert [len(layer.mixers) for layer in config.layers] == [1, 0, 1, 0, 0]


NEMOTRON_H = {"model_type": "nemotron_h", "vocab_size": 131_072, "num_key_value_heads": 8, "n_groups": 8}
FALCON_H1 = {"model_type": "falcon_h1", "num_key_value_heads": 2, "mamba_n_groups": 1, "tie_word_embeddings": False}
GRANITE = {"model_type": "granitemoehybrid", "vocab_size": 100_352, "num_hidden_layers": 40, "num_local_experts": 0} | {
    "num_key_value_heads": 8,
    "shared_intermediate_size": 8192,
    "tie_word_embeddings": True,
}
HYBRID = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256} | {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "mtp_num_hidden_layers": 1,
}
QWEN3_MOE = {"model_type": "qwen3_moe", "vocab_size": 151_936, "num_key_value_heads": 4, "head_dim": 128} | {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
# Configurations of record, and the parameters of the published checkpoints, embedding and head counted.
PUBLISHED = {
    "Nemotron-3-Nano-4B": (
        NEMOTRON_H
        | {"hidden_size": 3136, "intermediate_size": 12_544, "num_attention_heads": 40, "head_dim": 128}
        | {"mamba_num_heads": 96, "mamba_head_dim": 80, "ssm_state_size": 128}
        | {"hybrid_override_pattern": "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-"},
        3.97e9,
    ),
    "Nemotron-H-8B": (
        NEMOTRON_H
        | {"hidden_size": 4096, "intermediate_size": 21_504, "num_attention_heads": 32, "attention_head_dim": 128}
        | {"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128}
        | {"hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"},
        8.10e9,
    ),
    "Falcon-H1-0.5B": (
        FALCON_H1
        | {"vocab_size": 32_784, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 36}
        | {"num_attention_heads": 8, "head_dim": 64}
        | {"mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128},
        0.5214e9,
    ),
    "Falcon-H1-7B": (
        FALCON_H1
        | {"vocab_size": 130_048, "hidden_size": 3072, "intermediate_size": 12_288, "num_hidden_layers": 44}
        | {"num_attention_heads": 12, "head_dim": 128}
        | {"mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256},
        7.59e9,
    ),
    "Granite-4.0-H-Micro": (
        GRANITE
        | {"hidden_size": 2048, "num_attention_heads": 32, "mamba_n_heads": 64, "mamba_d_head": 64}
        | {"mamba_d_state": 128, "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4},
        3.19e9,
    ),
    "Granite-4.0-Micro": (
        GRANITE
        | {"hidden_size": 2560, "num_attention_heads": 40, "layer_types": ["attention"] * 40}
        | {"position_embedding_type": "rope"},
        3.40e9,
    ),
    "Qwen3-30B-A3B": (
        QWEN3_MOE
        | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32}
        | {"moe_intermediate_size": 768},
        30_532_122_624,
    ),
    "Qwen3-235B-A22B": (
        QWEN3_MOE
        | {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 94, "num_attention_heads": 64}
        | {"moe_intermediate_size": 1536},
        235_093_634_560,
    ),
    "Qwen3-Next-80B-A3B": (
        HYBRID
        | {"model_type": "qwen3_next", "vocab_size": 151_936, "intermediate_size": 5120, "num_hidden_layers": 48}
        | {"num_experts": 512, "num_experts_per_tok": 10},
        81_324_862_720,  # with the MTP layer
    ),
    "Qwen3.5-35B-A3B": (
        HYBRID
        | {"model_type": "qwen3_5_moe_text", "vocab_size": 248_320, "num_hidden_layers": 40}
        | {"num_experts": 256, "num_experts_per_tok": 8},
        35_951_822_704 - 446_571_248,  # with the MTP layer, without the vision tower
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_full_sizes_have_the_parameters_of_the_published_checkpoints(name):
    data, expected = PUBLISHED[name]
    sizes = from_config(config_from_dict(data), name)
    assert sizes.parameter_bytes("float32") / 4 == pytest.approx(expected, rel=0.005)
    if name in NAMED:
        of_record = dataclasses.replace(NAMED[name], config=sizes.config, parameters=None)
        assert of_record == sizes


def test_frequencies_that_older_files_hold_are_not_read(tmp_path):
    source = FIXTURES / "llama_plain" / "checkpoint"
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    assert load(tmp_path).config == load(source).config


@pytest.mark.parametrize("name", [folder.name for folder in FIXTURES.iterdir() if (folder / "checkpoint").is_dir()])
def test_a_configuration_survives_its_file(name):
    config = config_from_dict(described(name))
    assert config.family in families() and config.source.model() == config
    assert config_from_dict(json.loads(json.dumps(config_json(config)))) == config

"""What families read of a config.json beside the numbers that parity fixtures have: older files, and refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxbuf.attention.rotary import Llama3Scaling, Rotary, YarnScaling
from jaxbuf.models.config import SquaredReluMLP
from jaxbuf.models.experts import Router
from jaxbuf.models.families import config_from_dict, config_json, families
from jaxbuf.models.language_model import load
from jaxbuf.models.layers import named_parameters

FULL = "full_attention"
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
        (
            "qwen2_plain",
            {"use_sliding_window": True},
            r"use_sliding_window must be False \(layers with a sliding window are not served\), got True",
        ),
        (
            "qwen2_plain",
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types must be .* \(layers with a sliding window are not served\), got",
        ),
        ("qwen2_plain", {"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ("qwen2_plain", {"num_attention_heads": 5, "head_dim": 8}, r"num_attention_heads \(5\) must be a multiple of"),
        ("qwen2_plain", {"rope_scaling": {"rope_type": "yarn"}}, "lacks rope_scaling.factor"),
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
        ("nemotron_h_moe_plain", {"n_shared_experts": 2}, "n_shared_experts must be 1, got 2"),
        (
            "nemotron_h_moe_plain",
            {"n_routed_experts": 2**20},
            r"n_routed_experts must be a whole number in \[1, 16384\]",
        ),
        ("nemotron_h_moe_plain", {"num_experts_per_tok": 7}, r"num_experts_per_tok must be a whole number in \[1, 6\]"),
        ("nemotron_h_moe_plain", {"n_group": 4}, r"n_routed_experts \(6\) must be a multiple of n_group \(4\)"),
        ("nemotron_h_moe_plain", {"n_group": 6}, r"n_routed_experts \(6\) must be at least 2 times n_group \(6\)"),
        ("nemotron_h_moe_full", {"topk_group": 5}, r"topk_group must be a whole number in \[1, 4\], got 5"),
        (
            "nemotron_h_moe_full",
            {"num_experts_per_tok": 7},
            r"num_experts_per_tok \(7\) must be at most topk_group \(2\) times the 3 experts of a group",
        ),
        ("nemotron_h_moe_full", {"moe_latent_size": 0}, "moe_latent_size must be a whole number"),
        ("nemotron_h_moe_full", {"moe_intermediate_size": 2**31 - 1}, r"at most 2\*\*40 elements"),
        ("nemotron_h_moe_full", {"moe_latent_size": 2**31 - 1}, r"at most 2\*\*40 elements"),
        ("nemotron_h_moe_full", {"routed_scaling_factor": None}, "routed_scaling_factor must be a finite number"),
        ("nemotron_h_plain", {"layers_block_type": ["mamba", "linear"]}, "layers_block_type must be made of 'mamba'"),
        (
            "nemotron_h_plain",
            {"layers_block_type": None, "hybrid_override_pattern": "M?"},
            "pattern must be made of 'M'",
        ),
        ("nemotron_h_plain", {"num_hidden_layers": 4}, "layers_block_type has 5 layers, num_hidden_layers is 4"),
        ("nemotron_h_plain", {"layers_block_type": ["mlp"]}, "must be a Mamba-2 or an attention layer"),
        ("nemotron_h_moe_plain", {"layers_block_type": ["moe", "mlp"]}, "layer, all are MLPs or experts"),
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
            {"num_local_experts": -1},
            r"num_local_experts must be a whole number in \[0, 16384\]",
        ),
        ("granitemoehybrid_moe_plain", {"num_experts_per_tok": 7}, r"must be a whole number in \[1, 6\], got 7"),
        ("granitemoehybrid_moe_plain", {"intermediate_size": 2**31 - 1}, r"at most 2\*\*40 elements"),
        ("granitemoehybrid_plain", {"position_embedding_type": "alibi"}, "position_embedding_type must be one of"),
        ("granitemoehybrid_plain", {"layer_types": ["mamba", "mlp"]}, r"layer_types must be 2 \(num_hidden_layers\)"),
        ("granitemoehybrid_plain", {"logits_scaling": 0}, "logits_scaling must be a finite number above 0"),
        ("granitemoehybrid_full", {"mamba_n_groups": 4}, r"mamba_n_heads \(6\) must be a multiple of mamba_n_groups"),
        ("granitemoehybrid_full", {"normalization_function": "layernorm"}, "normalization_function must be 'rmsnorm'"),
        ("olmo_hybrid_plain", {"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        (
            "olmo_hybrid_plain",
            {"layer_types": ["linear_attention"]},
            r"must be a list of 2 \(num_hidden_layers\) out of",
        ),
        ("olmo_hybrid_plain", {"layer_types": ["linear_attention", "mamba"]}, "layer_types must be a list of 2"),
        ("olmo_hybrid_plain", {"head_dim": 7}, "head_dim must be even"),
        ("olmo_hybrid_plain", {"linear_allow_neg_eigval": 2}, "linear_allow_neg_eigval must be true or false"),
        ("olmo_hybrid_plain", {"linear_num_key_heads": 4}, r"linear_num_value_heads \(6\) must be a multiple of"),
        ("olmo_hybrid_plain", {"linear_conv_kernel_dim": 1}, r"linear_conv_kernel_dim must be a whole number in \[2"),
        ("kimi_linear_plain", {"mla_use_nope": False}, "mla_use_nope must be True, got False"),
        (
            "kimi_linear_plain",
            {"moe_router_activation_func": "softmax"},
            "moe_router_activation_func must be 'sigmoid'",
        ),
        ("kimi_linear_plain", {"num_key_value_heads": 1}, "num_key_value_heads must be 3, got 1"),
        ("kimi_linear_plain", {"mlp_layer_types": ["dense", "sparse"]}, r"must be a list of 3 \(num_hidden_layers\)"),
        ("kimi_linear_plain", {"tie_word_embeddings": True}, "tie_word_embeddings must be False, got True"),
        (
            "kimi_linear_plain",
            {"layer_types": None, "linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2]}},
            r"linear_attn_config.kda_layers and linear_attn_config.full_attn_layers must have each layer from 1 to 3",
        ),
        (
            "kimi_linear_full",
            {"num_experts_per_token": 5},
            r"num_experts_per_tok \(5\) must be at most topk_group \(2\)",
        ),
        ("bailing_hybrid_plain", {"q_lora_rank": 1536}, "q_lora_rank must be None, got 1536"),
        ("bailing_hybrid_plain", {"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even, got 7"),
        ("bailing_hybrid_full", {"kda_lower_bound": 1.0}, "kda_lower_bound must be a finite number of at most 0"),
        (
            "bailing_hybrid_full",
            {"num_expert_group": 3},
            r"num_local_experts \(8\) must be a multiple of n_group \(3\)",
        ),
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
    sparse = described("nemotron_h_moe_full")
    letters = {"layers_block_type": None, "hybrid_override_pattern": "EM*-ME"}
    assert config_from_dict(sparse | letters) == config_from_dict(sparse)


def test_facts_of_experts_count_where_layers_have_some():
    """Configurations of dense models have them, too, and what is written does not."""
    for name, fact in (("nemotron_h_plain", "n_routed_experts"), ("granitemoehybrid_plain", "num_experts_per_tok")):
        config = config_from_dict(described(name))
        assert config == config_from_dict(described(name, **{fact: 3})) and fact not in config_json(config)
    for name, fact in (
        ("nemotron_h_moe_plain", "n_routed_experts"),
        ("granitemoehybrid_moe_plain", "intermediate_size"),
    ):
        assert config_from_dict(described(name)) != config_from_dict(described(name, **{fact: 3}))


def test_what_experts_take_where_a_configuration_says_nothing():
    """What transformers takes."""
    names = [
        "n_routed_experts",
        "num_experts_per_tok",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "norm_topk_prob",
    ]
    names += ["moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size", "n_shared_experts"]
    data = {name: value for name, value in described("nemotron_h_moe_full").items() if name not in names}
    experts = config_from_dict(data).layers[0].feed_forward
    assert experts.router == Router(8, 2, scores="sigmoid", bias=True)
    assert (experts.size, experts.shared, experts.latent) == (7688, SquaredReluMLP(7688, bias=True), None)
    names = ["num_local_experts", "num_experts_per_tok", "intermediate_size"]
    data = {name: value for name, value in described("granitemoehybrid_moe_full").items() if name not in names}
    experts = config_from_dict(data).layers[0].feed_forward
    assert (experts.router, experts.size) == (Router(8, 2), 11_008)


def test_sizes_and_positions_of_olmo_hybrid_that_are_null():
    """Sizes follow from others; a base that is null says that nothing is turned, positions that are null do not."""
    data = described("olmo_hybrid_plain")
    names = [f"linear_{what}" for what in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")]
    assert config_from_dict(data | dict.fromkeys([*names, "layer_types", "head_dim"])).source.layer_types[1] == FULL
    assert config_from_dict(data | dict.fromkeys(names)) == config_from_dict(data)
    full = described("olmo_hybrid_full")
    for changes, theta in (
        ({}, None),
        ({"rope_parameters": None}, 1e4),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5}, 5e5),
        ({"rope_parameters": None, "rope_theta": None}, None),
    ):
        config = config_from_dict(full | changes)
        rotary = config.layers[0].mixers[0].rotary
        assert (config.source.rope_theta, rotary and rotary.theta) == (theta, theta)


def test_norms_of_olmo_hybrid_under_their_other_names(tmp_path):
    """In files that transformers wrote, and in the first released ones."""
    source = FIXTURES / "olmo_hybrid_full" / "checkpoint"
    tensors, renamed = load_file(source / "model.safetensors"), {}
    others = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
    for name, tensor in tensors.items():
        part = name.split(".")[-2]
        renamed[name.replace(part, others.get(part, part))] = tensor
    assert len(renamed.keys() - tensors.keys()) == 6
    save_file(renamed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    given, found = (named_parameters(load(folder).model) for folder in (source, tmp_path))
    assert all(np.array_equal(value[...], found[path][...]) for path, value in given.items())


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


def test_layers_of_kimi_linear_by_numbers_by_names_or_by_neither():
    """Released files have numbers from 1 on; names count where there are both."""
    data = described("kimi_linear_plain") | {"num_hidden_layers": 6, "mlp_layer_types": None, "layer_types": None}
    numbered = {"linear_attn_config": {"kda_layers": [1, 3, 4, 6], "full_attn_layers": [2, 5]}}
    for changes, full in (
        (numbered, [1, 4]),
        ({}, [4]),
        (numbered | {"layer_types": [FULL] + ["linear_attention"] * 5}, [0]),
    ):
        config = config_from_dict(data | changes)
        assert [number for number, kind in enumerate(config.source.layer_types) if kind == FULL] == full
        assert config.source.mlp_layer_types == ("dense", *["sparse"] * 5)
    sizes = {"num_heads": 5, "head_dim": 14, "short_conv_kernel_size": 3}
    spec = config_from_dict(data | {"linear_attn_config": sizes}).spec
    assert (spec.heads, spec.key_heads, spec.key_dim, spec.value_dim) == (5, 5, 14, 14)


def test_mlps_of_kimi_linear_under_the_names_that_transformers_writes(tmp_path):
    source = FIXTURES / "kimi_linear_full" / "checkpoint"
    tensors = load_file(source / "model.safetensors")
    renamed = {name.replace(".mlp.", ".block_sparse_moe."): tensor for name, tensor in tensors.items()}
    assert len(renamed.keys() - tensors.keys()) == 3
    save_file(renamed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    given, found = (named_parameters(load(folder).model) for folder in (source, tmp_path))
    assert all(np.array_equal(value[...], found[path][...]) for path, value in given.items())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kimi_linear_plain", (2.446, 1, 1, 1e-5, 1_048_576, 32, 128, 4)),
        ("bailing_hybrid_plain", (2.5, 8, 4, 1e-6, 262_144, 3, 128, 4)),
    ],
)
def test_what_kimi_linear_and_ling_take_where_a_configuration_says_nothing(name, expected):
    absent = ("routed_scaling_factor", "num_expert_group", "topk_group", "rms_norm_eps", "model_max_length")
    absent += ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim", "head_dim", "short_conv_kernel_size")
    data = described(name) | {"num_experts": 16}
    source = config_from_dict({key: value for key, value in data.items() if key not in absent}).source
    names = ("routed_scaling_factor", "n_group", "topk_group", "rms_norm_eps", "max_position_embeddings")
    names += ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    assert tuple(getattr(source, name) for name in names) == expected


def test_the_base_of_lings_positions_is_its_own_where_none_is_given():
    data = {key: value for key, value in described("bailing_hybrid_full").items() if key != "rope_theta"}
    for described_as, theta in (({}, 6e6), ({"rope_parameters": {"rope_type": "default"}}, 6e6)):
        found = config_from_dict({**data, "rope_parameters": None, **described_as})
        assert found.source.rope_theta == theta
    heads = {"linear_num_heads": 2, "linear_conv_kernel_dim": 5}
    source = config_from_dict(data | heads).source
    assert (source.linear_num_heads, source.linear_conv_kernel_dim) == (2, 5)


def test_sizes_of_ling_under_both_of_their_names():
    """Released files say head_dim for the recurrent heads; transformers writes another number there."""
    data = described("bailing_hybrid_full")
    written = data | {"head_dim": data["qk_rope_head_dim"], "linear_head_dim": data["head_dim"]}
    others = {"num_experts": "num_local_experts", "num_experts_per_token": "num_experts_per_tok"}
    others |= {"num_expert_group": "n_group", "moe_renormalize": "norm_topk_prob"}
    renamed = {others.get(name, name): value for name, value in data.items()}
    assert len(renamed.keys() - data.keys()) == len(others)
    assert config_from_dict(written) == config_from_dict(renamed) == config_from_dict(data)


def test_a_layer_of_ling_that_predicts_further_tokens_is_not_read(tmp_path):
    source = FIXTURES / "bailing_hybrid_full" / "checkpoint"
    tensors = load_file(source / "model.safetensors")
    further = "model.layers.3.eh_proj.weight", "model.layers.3.attention.dense.weight"
    save_file(tensors | dict.fromkeys(further, tensors["lm_head.weight"]), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    given, found = (named_parameters(load(folder).model) for folder in (source, tmp_path))
    assert all(np.array_equal(value[...], found[path][...]) for path, value in given.items())

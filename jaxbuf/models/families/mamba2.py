"""Mamba-2: recurrent layers alone, without an MLP and without a limit of length.

Checkpoints are read in transformers' layout, and in that of the authors' own library, mamba_ssm, whose config.json has
no model_type and other names. They are written in transformers'.

Source: transformers, Mamba2Config; state-spaces/mamba, MambaConfig and the arguments of its Mamba2.
"""

import dataclasses
import math
from collections.abc import Collection
from typing import Any

from jaxbuf.models.config import LayerConfig, ModelConfig, Norm
from jaxbuf.models.families import Source
from jaxbuf.models.loading.common_fields import (
    check_multiple,
    eos_json,
    make,
    model_config,
    read_limits,
    read_sizes,
    untied_if_stored,
    write_limits,
)
from jaxbuf.models.loading.fields import MOST_LAYERS, SIZE, Fields, check_arrays
from jaxbuf.models.loading.tensor_names import mamba2_tensors, placed
from jaxbuf.models.mixers.mamba2_mixer import Mamba2
from jaxbuf.recurrence.spec import RecurrenceSpec

MODEL_TYPES = ("mamba2",)
UNTYPED = "ssm_cfg"
SERVED = "Mamba-2 text models"
IGNORED = ()
NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "head_dim", "state_size")
ARRAYS = (
    ("vocab_size", "hidden_size"),
    ("num_heads", "head_dim", "hidden_size"),
    ("n_groups", "state_size", "hidden_size"),
    ("num_heads", "head_dim", "state_size"),
    ("num_heads", "head_dim", "conv_kernel"),
)
# Of ssm_cfg: how new weights are drawn, and how the authors' kernels compute.
UNREAD = ("A_init_range", "conv_init", "dt_init_floor", "dt_max", "dt_min", "chunk_size", "use_mem_eff_path")
READ = ("layer", "D_has_hdim", "bias", "conv_bias", "d_conv", "d_ssm", "d_state", "dt_limit", "expand", "headdim")
READ += ("ngroups", "norm_before_gate", "rmsnorm")


@dataclasses.dataclass(frozen=True)
class Config:
    """The static facts of a Mamba-2 model, under the names that its config.json uses; `eos_token_ids` is
    `eos_token_id` there.

    Raises:
      ValueError: Heads that the groups do not divide, sizes that do not fit each other, or whose arrays nobody could
        hold.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    head_dim: int
    state_size: int
    n_groups: int = 8
    conv_kernel: int = 4
    expand: int | float = 2
    layer_norm_epsilon: float = 1e-5
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    use_bias: bool = False
    use_conv_bias: bool = True
    tie_word_embeddings: bool = False
    initializer_range: float = 0.1
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        heads, inner = self.num_heads, self.num_heads * self.head_dim
        check_multiple(self, "num_heads", "n_groups")
        if int(self.expand * self.hidden_size) != inner:
            product = f"expand ({self.expand}) times hidden_size ({self.hidden_size})"
            raise ValueError(f"{product} must be num_heads ({heads}) times head_dim ({self.head_dim})")
        if self.conv_kernel < 2:
            raise ValueError(f"conv_kernel must be at least 2, got {self.conv_kernel}")
        check_arrays(vars(self), ARRAYS)

    def model(self) -> ModelConfig:
        """What the decoder is built from."""
        norm = Norm(self.layer_norm_epsilon)
        spec = RecurrenceSpec(self.num_heads, self.n_groups, self.state_size, self.head_dim, decay="head", delta=False)
        mixer = Mamba2(
            spec=spec,
            width=self.conv_kernel,
            eps=self.layer_norm_epsilon,
            least_step=self.time_step_limit[0],
            most_step=self.time_step_limit[1],
            bias=self.use_bias,
            output_bias=self.use_bias,
            convolution_bias=self.use_conv_bias,
        )
        layer = LayerConfig((mixer,), None, norm)
        return model_config("mamba2", self, (layer,) * self.num_hidden_layers, norm, max_length=None)


def read_config(fields: Fields) -> ModelConfig:
    if "model_type" not in fields.values:
        return make(Config, _read_original(fields), fields)
    fields.serve("hidden_act", "silu", default="silu")
    fields.serve("rms_norm", True, default=True)
    values = read_sizes(fields, NEEDED)
    values |= {
        "n_groups": fields.size("n_groups", 8),
        "conv_kernel": fields.integer("conv_kernel", 4, least=2, most=SIZE),
        "expand": fields.number("expand", 2, above=0),
        "layer_norm_epsilon": fields.number("layer_norm_epsilon", 1e-5, above=0, most=1),
        "time_step_limit": read_limits(fields),
        "initializer_range": fields.number("initializer_range", 0.1, least=0),
        "eos_token_ids": fields.token_ids("eos_token_id", vocab_size=values["vocab_size"]),
    }
    for name, default in (("use_bias", False), ("use_conv_bias", True), ("tie_word_embeddings", False)):
        values[name] = fields.flag(name, default)
    return make(Config, values, fields)


def _read_original(fields: Fields) -> dict[str, Any]:
    """The facts that a config.json of mamba_ssm says; what it lacks is what that library's classes take."""
    fields.require("d_model", "n_layer", "vocab_size")
    mixer = fields.nested("ssm_cfg")
    mixer.serve("layer", "Mamba2", default="Mamba1")
    for name in mixer.values:
        if name not in (*READ, *UNREAD):
            mixer.serve(name, None, words=" (jaxbuf does not know this field)")
    fields.serve("d_intermediate", 0, default=0, words=" (an MLP beside the mixers is not served)")
    fields.serve("attn_layer_idx", [], default=[], words=" (attention beside the mixers is not served)")
    fields.serve("rms_norm", True, default=True)
    for name in ("residual_in_fp32", "fused_add_norm"):  # of the authors' kernels; residuals are as in transformers
        fields.flag(name, True)
    for name, served in (("rmsnorm", True), ("norm_before_gate", False), ("D_has_hdim", False)):
        mixer.serve(name, served, default=served)
    hidden, rows, multiple = (
        fields.size("d_model"),
        fields.size("vocab_size"),
        fields.size("pad_vocab_size_multiple", 8),
    )
    expand, size, groups = (mixer.size(*each) for each in (("expand", 2), ("headdim", 64), ("ngroups", 1)))
    inner = expand * hidden
    mixer.serve("d_ssm", None, inner)
    if inner % size:
        product = f"ssm_cfg.expand ({expand}) times d_model ({hidden})"
        raise fields.error(f"{product} must be a multiple of ssm_cfg.headdim ({size})")
    if inner // size % groups:
        heads = f"the heads ({inner // size}, ssm_cfg.expand times d_model by ssm_cfg.headdim)"
        raise fields.error(f"{heads} must be a multiple of ssm_cfg.ngroups ({groups})")
    vocabulary = -(-rows // multiple) * multiple
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": fields.integer("n_layer", least=1, most=MOST_LAYERS),
        "num_heads": inner // size,
        "head_dim": size,
        "state_size": mixer.size("d_state", 128),
        "n_groups": groups,
        "conv_kernel": mixer.integer("d_conv", 4, least=2, most=SIZE),
        "expand": expand,
        "time_step_limit": read_limits(mixer, "dt_limit"),
        "use_bias": mixer.flag("bias", False),
        "use_conv_bias": mixer.flag("conv_bias", True),
        "tie_word_embeddings": fields.flag("tie_embeddings", True),
        "initializer_range": 0.02,
        "eos_token_ids": fields.token_ids("eos_token_id", vocab_size=vocabulary),
    }


def config_json(config: ModelConfig) -> dict[str, Any]:
    data = dataclasses.asdict(config.source)
    eos = data.pop("eos_token_ids")
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        **data,
        "time_step_limit": write_limits(config.source.time_step_limit),
        "hidden_act": "silu",
        "rms_norm": True,
        "eos_token_id": eos_json(eos),
    }


as_stored = untied_if_stored


def tensors(config: ModelConfig, names: Collection[str] = ()) -> dict[str, Source]:
    # mamba_ssm and the first released models call the table "embedding", transformers "embeddings".
    table = next((name for name in names if name == "backbone.embedding.weight"), "backbone.embeddings.weight")
    found = {"embed_tokens": Source(table), "norm": Source("backbone.norm_f.weight")}
    if not config.tied:
        found["lm_head"] = Source("lm_head.weight")
    for number, layer in enumerate(config.layers):
        mixer = placed(mamba2_tensors(layer.mixers[0]), "mixers.0.", "mixer.")
        parts = {"before_mixers": Source("norm.weight")} | mixer
        found |= placed(parts, f"layers.{number}.", f"backbone.layers.{number}.")
    return found

"""The sizes of a model that decide how much memory serving takes, from its configuration or by the model's name.

No weights are read: the parameters are counted from the configuration, or are the nominal number in a model's name.
"""

import dataclasses
import difflib
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from jaxbuf.models.config import RECURRENCE, ModelConfig
from jaxbuf.models.decoder import Decoder
from jaxbuf.models.families import read_config
from jaxbuf.models.loading.checkpoint import CONFIG, read_description
from jaxbuf.models.loading.hub import ACCEPTED, download, find_directory, parse_id
from jaxbuf.recurrence.spec import RecurrenceSpec
from jaxbuf.shown import shown


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model's memories.

    Attributes:
      name: As it was asked for.
      spec: The recurrence of each recurrent layer; None without such layers.
      recurrent_layers, attention_layers: How many there are of each.
      convolution_channels, convolution_width: Of the short convolution in front of each recurrent layer.
      kv_numbers: Numbers that a softmax layer keeps for a token: 2 · KV heads · head size, or MLA's latent and its
        rotated key.
      parameters: The nominal number of parameters; None where `config` tells the real one.
      config: What it was made from, or None.
      dtype: What the checkpoint is stored in, as far as its configuration says.
    """

    name: str
    spec: RecurrenceSpec | None
    recurrent_layers: int
    attention_layers: int
    convolution_channels: int
    convolution_width: int
    kv_numbers: int
    parameters: int | None = None
    config: ModelConfig | None = None
    dtype: str = "bfloat16"

    def parameter_bytes(self, dtype) -> int:
        """Bytes of the parameters as `load` holds them, in `dtype` but for the gates' float32; nominal without config.

        Of a head or an MTP layer that the configuration does not mention nothing is known, though `load` would find it.
        """
        if self.config is None:
            return (self.parameters or 0) * jnp.dtype(dtype).itemsize
        config = self.config
        model = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.dtype(dtype)))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(model))


def from_config(config: ModelConfig, name: str, dtype: str = "bfloat16") -> ModelSizes:
    """The sizes of a model."""
    recurrent = [mixer for mixer in config.mixers if mixer.kind == RECURRENCE]
    softmax = [mixer.kv_numbers for mixer in config.mixers if mixer.kind != RECURRENCE]
    return ModelSizes(
        name=name,
        spec=config.spec,
        recurrent_layers=len(recurrent),
        attention_layers=len(softmax),
        convolution_channels=recurrent[0].channels if recurrent else 0,
        convolution_width=recurrent[0].width if recurrent else 1,
        kv_numbers=softmax[0] if softmax else 0,
        config=config,
        dtype=dtype,
    )


def find_sizes(source: str | Path) -> ModelSizes:
    """The sizes of "demo", of a directory with a config.json, of a shape in `NAMED`, or of a Hugging Face id.

    Of an id only config.json is downloaded, unless it is in huggingface-hub's cache.

    Raises:
      FileNotFoundError: None of the four, or an id that cannot be had; the message says what is accepted.
      CheckpointError: config.json cannot be read, or holds a value of a wrong type or out of range.
      ValueError: It is of an architecture or setting that is not served, or the source is no name.
    """
    directory = find_directory(source)
    named, asked = {name.lower(): shape for name, shape in NAMED.items()}, str(source).lower().replace(" ", "-")
    if directory is None and asked in named:
        return named[asked]
    if directory is None and isinstance(source, str) and (identity := parse_id(source)) is not None:
        directory = download(*identity, files=(CONFIG,))
    if directory is None:
        close = difflib.get_close_matches(asked, named, n=3, cutoff=0.5)
        names = [named[name].name for name in close] or list(NAMED)
        raise FileNotFoundError(
            f"no model {shown(str(source))}: expected {ACCEPTED}, or the name of a known shape: {', '.join(names)}"
        )
    fields = read_description(directory)
    try:
        config = read_config(fields)
    except ValueError as error:
        raise ValueError(f"{error}; the shapes known by name are {', '.join(NAMED)}") from error
    nested = [fields.nested("text_config")] if isinstance(fields.values.get("text_config"), dict) else []
    places = [(each, key) for each in (fields, *nested) for key in ("dtype", "torch_dtype") if each.has(key)]
    return from_config(config, str(source), places[0][0].text(places[0][1]) if places else "bfloat16")


def _shape(name: str, spec: RecurrenceSpec, layers: tuple[int, int], kv_numbers: int, billions: float) -> ModelSizes:
    # The width is 4 in all of these. q, k and v pass the convolution; Mamba-2's groups are its key heads.
    return ModelSizes(name, spec, *layers, spec.channels, 4, kv_numbers, round(billions * 1e9))


def _gdn(heads: int) -> RecurrenceSpec:
    return RecurrenceSpec(heads, 16, 128, 128, decay="head", delta=True)


def _mamba2(heads: int, value_dim: int, groups: int) -> RecurrenceSpec:
    return RecurrenceSpec(heads, groups, 128, value_dim, decay="head", delta=False)


_KDA = RecurrenceSpec(32, 32, 128, 128, decay="channel", delta=True)

# (recurrent, softmax) layers; numbers a token and softmax layer; billions of parameters as in the name. Kimi's softmax
# layers are MLA: 512 numbers of a latent and 64 of a rotated key.
NAMED = {
    shape.name: shape
    for shape in (
        _shape("Qwen3-Next-80B-A3B", _gdn(32), (36, 12), 2 * 2 * 256, 80),
        _shape("Qwen3.5-0.8B", _gdn(16), (18, 6), 2 * 2 * 256, 0.8),
        _shape("Qwen3.5-2B", _gdn(16), (18, 6), 2 * 2 * 256, 2),
        _shape("Qwen3.5-4B", _gdn(32), (24, 8), 2 * 4 * 256, 4),
        _shape("Qwen3.5-27B", _gdn(48), (48, 16), 2 * 4 * 256, 27),
        _shape("Qwen3.5-35B-A3B", _gdn(32), (30, 10), 2 * 2 * 256, 35),
        _shape("Nemotron-3-Nano-4B", _mamba2(96, 80, 8), (21, 4), 2 * 8 * 128, 4),
        _shape("Nemotron-H-8B", _mamba2(128, 64, 8), (24, 4), 2 * 8 * 128, 8),
        _shape("Kimi-Linear-48B-A3B", _KDA, (20, 7), 512 + 64, 48),
        _shape("Mamba-2-2.7B", _mamba2(80, 64, 1), (64, 0), 0, 2.7),
        _shape("Codestral-Mamba-7B", _mamba2(128, 64, 8), (64, 0), 0, 7),
    )
}

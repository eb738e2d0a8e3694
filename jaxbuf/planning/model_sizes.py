"""The sizes of a model that decide how much memory serving takes, from its configuration or by the model's name.

No weights are read: the parameters are counted from the configuration.
"""

import dataclasses
import difflib
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh

from jaxbuf.models.admission import Admission
from jaxbuf.models.config import RECURRENCE, ModelConfig
from jaxbuf.models.decoder import Decoder
from jaxbuf.models.families import read_config
from jaxbuf.models.gates import gated_layers
from jaxbuf.models.known_models import find_known, known_models, plain
from jaxbuf.models.layers import named_parameters
from jaxbuf.models.loading.checkpoint import CONFIG, read_description
from jaxbuf.models.loading.hub import ACCEPTED, download, find_directory, parse_id
from jaxbuf.models.mixers.attention import Attention
from jaxbuf.models.tensor_parallel import TENSOR, spread_over
from jaxbuf.recurrence.spec import RecurrenceSpec
from jaxbuf.recurrence.state_format import state_format
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
      config: What it was made from.
      dtype: What the checkpoint is stored in, as far as its configuration says.
      whole: The configuration of the whole model where these are the sizes of one of several devices, and over how many
        its heads are spread; else None.
    """

    name: str
    spec: RecurrenceSpec | None
    recurrent_layers: int
    attention_layers: int
    convolution_channels: int
    convolution_width: int
    kv_numbers: int
    config: ModelConfig
    dtype: str = "bfloat16"
    whole: tuple[ModelConfig, int] | None = None

    def spread(self, devices: int) -> "ModelSizes":
        """What one device has, of so many over which the heads are spread, see `jaxbuf.models.tensor_parallel`.

        Raises:
          ValueError: The heads can't be shared by so many.
        """
        config = self.config.spread(devices)
        return dataclasses.replace(from_config(config, self.name, self.dtype), whole=(self.config, devices))

    @property
    def gated(self) -> list[Attention]:
        """The softmax mixers with write gates."""
        return list(gated_layers(self.config).values())

    @property
    def admission(self) -> Admission | None:
        """Which keys these keep; None without write gates."""
        return self.gated[0].admission if self.gated else None

    def parameter_bytes(self, dtype) -> int:
        """Bytes of the parameters as `load` holds them, in `dtype` but for the gates' float32.

        Of a head or an MTP layer that the configuration does not mention nothing is known, though `load` would find it.
        """
        return sum(leaf.size * leaf.dtype.itemsize for leaf in self._parameters(dtype))

    def count_parameters(self) -> int:
        """How many numbers the parameters are."""
        return sum(leaf.size for leaf in self._parameters(self.dtype))

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of a request in float32, over all layers."""
        return 0 if self.spec is None else self.recurrent_layers * state_format("float32").stored_bytes(self.spec)

    def kv_bytes(self, dtype) -> int:
        """Bytes of a token's keys and values in `dtype`, over all layers."""
        return self.attention_layers * self.kv_numbers * jnp.dtype(dtype).itemsize

    def _parameters(self, dtype) -> list[jax.ShapeDtypeStruct]:
        config, devices = (self.config, 1) if self.whole is None else self.whole
        model = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.dtype(dtype)))
        if devices == 1:
            return jax.tree.leaves(model)
        mesh, held = AbstractMesh((devices,), (TENSOR,)), []
        for param in named_parameters(model).values():
            # Along experts there is no axis: all devices have all of them.
            spread = [parts if spread_over(parts, mesh) else None for parts in param.axes]
            raw = param.get_raw_value()
            shape = [
                size if parts is None else sum(part.size * len(part.blocks(0, devices)) for part in parts)
                for parts, size in zip(spread, raw.shape, strict=True)
            ]
            held.append(jax.ShapeDtypeStruct(shape, raw.dtype))
        return held


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
    """The sizes of "demo", of a directory with a config.json, of a known model (known.json), or of a Hugging Face id.

    Of an id only config.json is downloaded, unless it is in huggingface-hub's cache.

    Raises:
      FileNotFoundError: None of the four, or an id that cannot be had; the message says what is accepted.
      CheckpointError: config.json cannot be read, or holds a value of a wrong type or out of range.
      ValueError: It is of an architecture or setting that is not served, or the source is no name.
    """
    directory = find_directory(source)
    if directory is None and isinstance(source, str) and (known := find_known(source)) is not None:
        return from_config(known.config, known.name)
    if directory is None and isinstance(source, str) and (identity := parse_id(source)) is not None:
        directory = download(*identity, files=(CONFIG,))
    if directory is None:
        raise FileNotFoundError(
            f"no model {shown(str(source))}: expected {ACCEPTED}, or the name of a known shape: "
            f"{', '.join(close_names(str(source)))}"
        )
    fields = read_description(directory)
    try:
        config = read_config(fields)
    except ValueError as error:
        raise ValueError(f"{error}; the shapes known by name are {', '.join(known_models())}") from error
    nested = [fields.nested("text_config")] if isinstance(fields.values.get("text_config"), dict) else []
    places = [(each, key) for each in (fields, *nested) for key in ("dtype", "torch_dtype") if each.has(key)]
    return from_config(config, str(source), places[0][0].text(places[0][1]) if places else "bfloat16")


def close_names(name: str) -> list[str]:
    """The names of known models that are most like a name, three at most; all, if none is like it."""
    named = {plain(known): known for known in known_models()}
    return [named[close] for close in difflib.get_close_matches(plain(name), named, n=3, cutoff=0.5)] or [
        *named.values()
    ]

"""A model together with what its directory says about it: `load` and `LanguageModel`."""

import dataclasses
import functools
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from jaxbuf.models import qwen3_5
from jaxbuf.models.checkpoint import CheckpointError, compute_dtype, load_model, read_json
from jaxbuf.models.qwen3_5_config import Config, token_ids

type Array = jax.Array

DEMO = "demo"
PADDED_TO = 64  # lengths that `logits` compiles for are multiples of this


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A loaded model.

    Attributes:
      model: The parameters.
      config: What it was built from.
      tokenizer: From tokenizer.json, or None.
      generation_config: generation_config.json as it is, or {}.
      dtype: The compute dtype.
      name: "demo", or the directory's name.
    """

    model: qwen3_5.Qwen3_5
    config: Config
    tokenizer: Tokenizer | None
    generation_config: dict[str, Any]
    dtype: jnp.dtype
    name: str

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; token ids are below it."""
        return self.config.vocab_size

    @property
    def max_length(self) -> int:
        """The most tokens of a sequence."""
        return self.config.max_position_embeddings

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a text: those of generation_config.json, or else of config.json."""
        return token_ids(self.generation_config.get("eos_token_id")) or self.config.eos_token_ids

    @functools.cached_property
    def known_ids(self) -> np.ndarray:
        """bool [vocab_size]: the ids that the tokenizer has. Embeddings are often padded past them."""
        if self.tokenizer is None:
            return np.ones(self.vocab_size, bool)
        known = np.zeros(self.vocab_size, bool)
        known[[token for token in self.tokenizer.get_vocab().values() if token < self.vocab_size]] = True
        return known

    def encode(self, text: str) -> list[int]:
        """The token ids of a text.

        Raises:
          ValueError: The model has no tokenizer.
        """
        return self._tokenizer().encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens.

        Raises:
          ValueError: The model has no tokenizer.
        """
        return self._tokenizer().decode(list(ids))

    def logits(self, tokens: Array | np.ndarray | Sequence[Sequence[int]]) -> Array:
        """Scores of the token after each position: for parity and small inputs, the whole result is kept.

        Args:
          tokens: int32 [batch, time].

        Returns:
          f32 [batch, time, vocab].

        Raises:
          ValueError: Not a two-dimensional integer array, no tokens, too many, or an id outside the vocabulary.
        """
        tokens = np.asarray(tokens)
        if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer) or tokens.size == 0:
            raise ValueError(f"tokens must be int32 [batch, time] and not empty, got {tokens.dtype} {tokens.shape}")
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise ValueError(f"tokens must be in [0, {self.vocab_size}), got {tokens.min()} to {tokens.max()}")
        time = tokens.shape[1]
        if time > self.max_length:
            raise ValueError(f"tokens must be at most max_length ({self.max_length}) long, got {time}")
        padded = np.pad(tokens.astype(np.int32), ((0, 0), (0, -time % PADDED_TO)))
        return _logits(self.model, jnp.asarray(padded))[:, :time]

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"the model {self.name!r} has no tokenizer.json; pass token ids instead of text")
        return self.tokenizer


@jax.jit
def _logits(model: qwen3_5.Qwen3_5, tokens: Array) -> Array:
    return qwen3_5.logits(model, qwen3_5.forward(model, tokens))


def load(
    source: str | Path, dtype: str | jnp.dtype | None = None, mesh: jax.sharding.Mesh | None = None
) -> LanguageModel:
    """Loads a model: "demo", the small one in this package, or a directory in Hugging Face's format.

    A directory has config.json and *.safetensors (or shards with an index), and may have tokenizer.json and
    generation_config.json.

    Args:
      source: "demo" or a directory.
      dtype: "float32", "bfloat16" or "float16"; None: float32 on a CPU, else the checkpoint's own.
      mesh: Spreads the parameters over its axis "tensor"; None: everything on the default device.

    Raises:
      FileNotFoundError: Neither "demo" nor a directory, or a directory without config.json or safetensors.
      ValueError: An unknown dtype, an architecture or setting that is not served, or a mesh that does not fit.
      CheckpointError: Tensors that are missing, unexpected or misshapen, or a file that cannot be read.
    """
    wanted = compute_dtype(dtype)
    directory = _directory(source)
    try:
        data = read_json(directory / "config.json")
    except FileNotFoundError:
        raise FileNotFoundError(f"{directory} has no config.json; expected a model in Hugging Face's format") from None
    model, config = load_model(directory, Config.from_dict(data), dtype=wanted, mesh=mesh)
    generation = directory / "generation_config.json"
    return LanguageModel(
        model=model,
        config=config,
        tokenizer=_read_tokenizer(directory / "tokenizer.json"),
        generation_config=read_json(generation) if generation.exists() else {},
        dtype=model.embed_tokens[...].dtype,
        name=DEMO if source == DEMO else directory.name,
    )


def _directory(source: str | Path) -> Path:
    if source == DEMO:
        return Path(str(resources.files("jaxbuf.models") / DEMO))
    directory = Path(source)
    if not directory.is_dir():
        raise FileNotFoundError(f'no model {str(source)!r}: expected "{DEMO}" or a directory with a config.json')
    return directory.resolve()


def _read_tokenizer(path: Path) -> Tokenizer | None:
    if not path.exists():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise CheckpointError(f"{path} cannot be read: {error}") from error

"""A model together with what its directory says about it: `load` and `LanguageModel`."""

import contextlib
import dataclasses
import functools
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from jaxbuf.arguments import MOST, check_range
from jaxbuf.axes import Array, Float32
from jaxbuf.models import decoder
from jaxbuf.models.chat_template import TEMPLATE, TOKENIZER_CONFIG, ChatTemplate, Message, read_chat_template
from jaxbuf.models.config import GATED, ModelConfig
from jaxbuf.models.families import read_config
from jaxbuf.models.layers import named_parameters
from jaxbuf.models.loading.block_scaled import read_block
from jaxbuf.models.loading.checkpoint import Progress, compute_dtype, load_model, read_description
from jaxbuf.models.loading.checkpoint import save as save_checkpoint
from jaxbuf.models.loading.fields import CheckpointError, Fields, is_there, read_json, read_text
from jaxbuf.models.loading.hub import ACCEPTED, COMPANIONS, DEMO, download, find_directory, parse_id
from jaxbuf.models.loading.sharding import check_mesh
from jaxbuf.models.scoring import score_tokens
from jaxbuf.pallas.dispatch import told
from jaxbuf.progress import check_progress, progress_bar
from jaxbuf.shown import shown
from jaxbuf.target import Target, resolve_target

log = logging.getLogger("jaxbuf")

type Tokens = Array | np.ndarray | Sequence[int] | Sequence[Sequence[int]]

GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
# Of generation_config.json, with the ranges that SamplingParams has.
SAMPLING = {"temperature": {"least": 0}, "top_p": {"above": 0, "most": 1}, "min_p": {"least": 0, "most": 1}}
SAMPLING |= {"repetition_penalty": {"above": 0}}
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
      name: "demo", the Hugging Face id, or the directory's name.
      chat_template: From chat_template.jinja or tokenizer_config.json, or None.
      directory: What it was loaded from, or None.
      compiled_for: What programs are compiled for; None: what the parameters lie on.
    """

    model: decoder.Decoder
    config: ModelConfig
    tokenizer: Tokenizer | None
    generation_config: dict[str, Any]
    dtype: jnp.dtype
    name: str
    chat_template: ChatTemplate | None = None
    directory: Path | None = None
    compiled_for: Target | None = None

    def __repr__(self) -> str:
        return f"LanguageModel({self.name!r}, {len(self.config.layers)} layers, {jnp.dtype(self.dtype).name})"

    def replace(self, *, model: decoder.Decoder) -> "LanguageModel":
        """The same with other parameters, as training makes them. What was compiled serves them, too.

        Args:
          model: With the structure, shapes and dtypes of this one's; its arrays are not copied.

        Raises:
          ValueError: It is no model, or one of another structure, or a parameter has another shape or dtype.
        """
        if not isinstance(model, decoder.Decoder):
            raise ValueError(f"model must be a Decoder, as LanguageModel.model is, got {shown(model)}")
        ours, theirs = (named_parameters(each) for each in (self.model, model))
        if jax.tree.structure(self.model) != jax.tree.structure(model):
            raise ValueError(f"model must have the structure of {self!r}, got one of another configuration")
        for name, parameter in ours.items():
            was, now = parameter[...], theirs[name][...]
            if (was.shape, was.dtype) != (now.shape, now.dtype):
                raise ValueError(f"{name} must be {was.dtype} {was.shape}, got {now.dtype} {now.shape}")
        return dataclasses.replace(self, model=model)

    @property
    def target(self) -> Target:
        """What programs are compiled for, which decides their kernels."""
        return resolve_target(self.compiled_for, self.model.norm.get_raw_value())

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; token ids are below it."""
        return self.config.vocab_size

    @property
    def max_length(self) -> int:
        """The most tokens of a sequence: 2**30 where the architecture knows no limit."""
        return MOST if self.config.max_length is None else self.config.max_length

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a text: those of generation_config.json, or else of config.json.

        Raises:
          CheckpointError: eos_token_id of generation_config.json is not token ids of the vocabulary (a ValueError if
            the model is of no directory); `load` looks.
        """
        return self._generation.token_ids("eos_token_id", vocab_size=self.vocab_size) or self.config.eos_token_ids

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """How the checkpoint's makers sample: keyword arguments of SamplingParams, from generation_config.json.

        The temperature is 0 (greedy) unless the file's do_sample is true. The command line starts from these;
        `jaxbuf.generate` is greedy whatever the file says, unless it is given `SamplingParams(**lm.sampling_defaults)`.

        Raises:
          CheckpointError: A value is of another type, or out of the range that SamplingParams has (a ValueError if the
            model is of no directory).
        """
        fields = self._generation
        sampled = fields.has("do_sample") and fields.flag("do_sample")
        found: dict[str, Any] = {
            name: fields.number(name, **bounds)
            for name, bounds in SAMPLING.items()
            if fields.has(name) and (sampled or name != "temperature")
        }
        if fields.has("top_k"):
            found["top_k"] = fields.integer("top_k", least=0)
        return found if sampled else found | {"temperature": 0.0}

    @property
    def _generation(self) -> Fields:
        return Fields(self.generation_config, self.directory and self.directory / GENERATION_CONFIG)

    @functools.cached_property
    def known_ids(self) -> np.ndarray:
        """bool [vocab_size]: the ids that the tokenizer has. Embeddings are often padded past them."""
        if self.tokenizer is None:
            return np.ones(self.vocab_size, bool)
        known = np.zeros(self.vocab_size, bool)
        known[[token for token in self.tokenizer.get_vocab().values() if token < self.vocab_size]] = True
        return known

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text.

        Args:
          text: Special tokens that are written out in it are encoded as such.
          add_special_tokens: Also add those that the tokenizer puts around a text; a chat prompt has its own.

        Raises:
          ValueError: The model has no tokenizer, or it is no text (half a surrogate pair cannot be encoded).
          CheckpointError: The tokenizer fails, or its id of a token is outside the model's vocabulary.
        """
        tokenizer = self._tokenizer()
        try:
            with _tokenizer_errors(f"{self._tokenizer_name} cannot encode the text"):
                encoded = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except TypeError:
            raise ValueError(f"text must be a text that UTF-8 can encode, got {shown(text)}") from None
        ids = encoded.ids
        if ids and max(ids) >= self.vocab_size:
            token, found = encoded.tokens[int(np.argmax(ids))], max(ids)
            raise CheckpointError(
                f"{self._tokenizer_name} has id {found} for {shown(token)}, and the model's ids are below vocab_size "
                f"({self.vocab_size})"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens.

        Raises:
          ValueError: The model has no tokenizer, or they are not whole numbers from 0 on.
          CheckpointError: The tokenizer fails.
        """
        tokenizer = self._tokenizer()
        try:
            with _tokenizer_errors(f"{self._tokenizer_name} cannot decode token ids"):
                return tokenizer.decode(list(ids))
        except (OverflowError, TypeError):
            raise ValueError(f"ids must be token ids in [0, {self.vocab_size}), got {shown(ids)}") from None

    def chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation, from the model's own template: `encode` it without adding special tokens.

        Args:
          messages: {"role": "system" | "user" | "assistant", "content": text}, oldest first.
          add_generation_prompt: End with what opens the assistant's answer.

        Raises:
          ValueError: The model has no chat template, messages is empty or of another form, or the template refuses it.

        Source: the chat_template of Hugging Face tokenizers.
        """
        if self.chat_template is None:
            raise ValueError(
                f"the model {self.name!r} has no chat template: its directory has no {TEMPLATE}, and no chat_template "
                f"in a {TOKENIZER_CONFIG}; `jaxbuf generate` continues plain text"
            )
        return self.chat_template.render(messages, add_generation_prompt=add_generation_prompt)

    def logits(self, tokens: Tokens) -> Float32[Array, "... time vocab"]:
        """Scores of the token after each position: for parity and small inputs, the whole result is kept.

        A training loop calls `jaxbuf.sequence_logprobs`, or `jaxbuf.models.decoder.forward` and `logits`, which take
        tokens that jit traces.

        Args:
          tokens: int32 [batch, time], or one row [time].

        Returns:
          [batch, time, vocab], or [time, vocab] for one row.

        Raises:
          ValueError: Not integers, rows that differ in length, no tokens, too many, or an id outside the vocabulary.
        """
        tokens, lengths, one = self._rows_of(tokens, None)
        time = tokens.shape[1]
        if (lengths < time).any():
            raise ValueError("tokens must have rows of one length, got rows of several")
        padded = np.pad(tokens, ((0, 0), (0, -time % PADDED_TO)))
        found = _logits(self.model, jnp.asarray(padded), self.target)[:, :time]
        return found[0] if one else found

    def score(
        self, tokens: Tokens, *, lengths: Array | np.ndarray | Sequence[int] | None = None, progress: bool | None = None
    ) -> Float32[Array, "... time"]:
        """Log-probability of each token given those before it in its row.

        The rows are read through a cache in pieces, and logits exist for a block of a piece only, so a hundred thousand
        tokens fit at a large vocabulary: beside the parameters and the cache it takes a gigabyte or so.

        Args:
          tokens: int32 [batch, time], or one row [time], or a list of rows that differ in length.
          lengths: int32 [batch], the real tokens of each row of an array, which come first; None: all.
          progress: Whether to show a bar on standard error; None: on a terminal and in a notebook.

        Returns:
          [batch, time], or [time] for one row: natural logarithms. The first column is 0, for nothing comes before
          it; so is what lies past a row's length.

        Raises:
          ValueError: Not integers, no tokens, too many, an id outside the vocabulary, or lengths that do not fit.
        """
        tokens, lengths, one = self._rows_of(tokens, lengths)
        done = 0
        with progress_bar(int(lengths.sum()), progress) as report:
            report("compiling", 0)

            def advance(read: int) -> None:
                nonlocal done
                done += read
                report("scoring", done)

            found = jnp.asarray(score_tokens(self.model, tokens, lengths=lengths, target=self.target, progress=advance))
        return found[0] if one else found

    def save(
        self, directory: str | Path, *, dtype: str | jnp.dtype | None = None, shard_bytes: int = 5_000_000_000
    ) -> None:
        """Writes a checkpoint in Hugging Face's format that `load` and transformers read.

        It holds the text model without gates (those are for `jaxbuf.models.gates.save_gates`), its tokenizer,
        generation_config.json, and what else of the tokenizer's files and the chat template lies in the directory that
        the model was loaded from. It takes its name when all of it is on the disk: a process that dies before leaves
        what was there. A checkpoint under the name is replaced; files that do not belong to it stay. What was loaded
        from float8 weights is written in `dtype`, without quantization_config.

        Args:
          directory: Made if it is not there.
          dtype: "float32", "bfloat16" or "float16"; None: the compute dtype. The gates' A_log and dt_bias, and the
            biases by which experts are chosen, are written in float32.
          shard_bytes: A file holds at most this many bytes of tensors, or one tensor; more make several and an index.

        Raises:
          FileExistsError: The directory holds files, but none of a checkpoint.
          NotADirectoryError: The name is that of a file.
          ValueError: An unknown dtype, shard_bytes that is no whole number of at least 1, or a directory that is no
            name.
        """
        if any(mixer.kind == GATED for mixer in self.config.mixers):
            from jaxbuf.models.gates import without_gates

            without_gates(self).save(directory, dtype=dtype, shard_bytes=shard_bytes)
            return
        companions = {}
        if self.directory is not None:
            files = [file for pattern in COMPANIONS for file in self.directory.glob(pattern)]
            companions = {file.name: file.read_bytes() for file in files if file.is_file()}
        companions.pop(TOKENIZER, None)
        companions.pop(GENERATION_CONFIG, None)
        if self.tokenizer is not None:
            companions[TOKENIZER] = self.tokenizer.to_str(pretty=True).encode()
        if self.generation_config:
            companions[GENERATION_CONFIG] = (json.dumps(self.generation_config, indent=2) + "\n").encode()
        save_checkpoint(
            self.model,
            self.config,
            directory,
            dtype=self.dtype if dtype is None else dtype,
            shard_bytes=shard_bytes,
            companions=companions,
        )

    def _rows_of(
        self, tokens: Tokens, lengths: Array | np.ndarray | Sequence[int] | None
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        """int32 [batch, time] right-padded, int32 [batch] how many of each row are real, and whether it is one row."""
        if isinstance(tokens, str):
            raise ValueError(
                "tokens must be ids, int32 [batch, time] or [time], got a text: lm.encode(text) makes them"
            )
        try:
            array = np.asarray(tokens)
            one = array.ndim == 1
            rows = list(array) if array.ndim > 1 else [array]
        except ValueError:  # lists that differ in length
            one, rows = False, [np.asarray(row) for row in tokens]
        for row in rows:
            if row.ndim != 1 or not np.issubdtype(row.dtype, np.integer) or not row.size:
                raise ValueError(
                    f"tokens must be int32 [batch, time] or [time] and not empty, got {row.dtype} "
                    f"{row.shape if one else np.shape(tokens) if len(rows) == 1 else (len(rows), *row.shape)}"
                )
        if not rows:
            raise ValueError("tokens must be int32 [batch, time] or [time] and not empty, got no rows")
        sizes = np.array([row.size for row in rows], np.int32)
        padded = np.zeros((len(rows), sizes.max()), np.int64)
        for row, target in zip(rows, padded, strict=True):
            target[: row.size] = row
        if lengths is not None:
            sizes = self._check_lengths(lengths, sizes)
        real = padded[np.arange(padded.shape[1])[None] < sizes[:, None]]
        if real.min() < 0 or real.max() >= self.vocab_size:
            raise ValueError(f"tokens must be in [0, {self.vocab_size}), got {real.min()} to {real.max()}")
        padded = np.where(np.arange(padded.shape[1])[None] < sizes[:, None], padded, 0)
        if padded.shape[1] > self.max_length:
            raise ValueError(f"tokens must be at most max_length ({self.max_length}) long, got {padded.shape[1]}")
        return padded.astype(np.int32), sizes, one

    def _check_lengths(self, lengths: Array | np.ndarray | Sequence[int], sizes: np.ndarray) -> np.ndarray:
        given = np.asarray(lengths)
        if given.shape != sizes.shape or not np.issubdtype(given.dtype, np.integer):
            raise ValueError(f"lengths must be int32 [{sizes.size}], one a row, got {given.dtype} {given.shape}")
        check_range("lengths", given, 1, sizes)
        return given.astype(np.int32)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"the model {self.name!r} has no tokenizer.json; pass token ids instead of text")
        return self.tokenizer

    @property
    def _tokenizer_name(self) -> str:
        return f"the tokenizer of {self.name!r}" if self.directory is None else str(self.directory / TOKENIZER)


@functools.partial(jax.jit, static_argnums=2)
def _logits(model: decoder.Decoder, tokens: Array, target: Target) -> Array:
    return decoder.logits(model, decoder.forward(model, tokens, target=target))


def load(
    source: str | Path,
    dtype: str | jnp.dtype | None = None,
    mesh: jax.sharding.Mesh | None = None,
    *,
    gates: str | Path | None = None,
    progress: Progress | bool | None = None,
) -> LanguageModel:
    """Loads a model: "demo", the small one in this package, a directory in Hugging Face's format, or an id there.

    A directory has config.json and `*.safetensors` (or shards with an index), and may have tokenizer.json,
    generation_config.json and a chat template (chat_template.jinja or tokenizer_config.json). An id is "org/name" or
    "org/name@revision", of a branch, tag or commit; a directory of that name comes first. Its files come from
    huggingface-hub's cache, or are downloaded into it; HF_HOME, HF_TOKEN and HF_HUB_OFFLINE say what they always do.

    Beside the parameters, the host holds one tensor at most while it loads. Weights in float8 with a scale for each
    block (quantization_config says "fp8" and weight_block_size) are multiplied out to the compute dtype; other
    quantizations are not served.

    Args:
      source: "demo", a directory or a Hugging Face id.
      dtype: "float32", "bfloat16" or "float16"; None: float32 on a CPU, else the checkpoint's own, which is that of its
        embedding.
      mesh: Spreads the layers' heads over its axis "tensor", with their parameters and their memory, and routed experts
        over its axis "expert", see `jaxbuf.models.tensor_parallel`; it has one of the two, or both. None: everything on
        the default device.
      gates: A file of gates that were trained for the model, see `jaxbuf.models.gates`, or "demo", those of the
        embedded model: its softmax layers then keep the keys that these admit. None: they keep all.
      progress: Whether to show a bar on standard error; None: on a terminal and in a notebook. Or a function, called
        with the bytes of the checkpoint that were read and how many there are, before the first tensor and after each
        one. (Downloads show huggingface-hub's own progress bar.)

    Raises:
      FileNotFoundError: None of the three, an id that cannot be had (without access, or offline and not in the cache),
        or a directory without config.json or safetensors.
      ValueError: A source that is no name, an unknown dtype, an architecture, setting or quantization that is not
        served, or a mesh that does not fit.
      CheckpointError: A file that cannot be read, or that holds a value of a wrong type or out of range (the message
        names file and field), tensors that are missing, unexpected or misshapen, or float8 weights that do not fit
        their scales.
    """
    wanted = compute_dtype(dtype)
    check_mesh(mesh)
    if not callable(progress):
        check_progress(progress)
    directory, name = _directory(source)
    fields = read_description(directory)
    config = read_config(fields)
    file = directory / GENERATION_CONFIG
    generation_config = read_json(file) if is_there(file) else {}
    Fields(generation_config, file).token_ids("eos_token_id", vocab_size=config.vocab_size)
    tokenizer = _read_tokenizer(directory / TOKENIZER)
    chat_template = read_chat_template(directory)
    # The tensors come last: a mistake in a small file is told before gigabytes are read.
    with _reporting(progress) as report:
        block = read_block(fields)
        model, config = load_model(directory, config, block=block, dtype=wanted, mesh=mesh, progress=report)
    lm = LanguageModel(
        model=model,
        config=config,
        tokenizer=tokenizer,
        generation_config=generation_config,
        dtype=model.embed_tokens[...].dtype,
        name=name,
        chat_template=chat_template,
        directory=directory,
    )
    if message := told(lm.target):
        log.warning(message)
    if gates is None:
        return lm
    from jaxbuf.models.gates import load_gates

    return load_gates(lm, gates)


@contextlib.contextmanager
def _reporting(progress: Progress | bool | None) -> Iterator[Progress]:
    """What `load_model` calls: the function that was given, or one that moves a bar."""
    if callable(progress):
        yield progress
        return
    with progress_bar(None, progress) as report:
        yield lambda read, total: report("loading, MB", read // 1_000_000, total // 1_000_000)


def _directory(source: str | Path) -> tuple[Path, str]:
    """Where a model's files are, and its name."""
    directory = find_directory(source)
    if source == DEMO and directory is not None:
        return directory, DEMO
    if directory is not None:
        directory = directory.resolve()
        return directory, directory.name
    identity = parse_id(source) if isinstance(source, str) else None
    if identity is None:
        found = " (it is a file)" if os.path.isfile(source) else ""
        raise FileNotFoundError(f"no model {shown(str(source))}{found}: expected {ACCEPTED}")
    return download(*identity), str(source)


def _read_tokenizer(path: Path) -> Tokenizer | None:
    if not is_there(path):
        return None
    content = read_text(path)
    with _tokenizer_errors(f"{path} cannot be read"):
        tokenizer = Tokenizer.from_str(content)
    # What a text is cut to or filled up to is for training; transformers does neither unless it is asked to, too.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextlib.contextmanager
def _tokenizer_errors(what: str) -> Iterator[None]:
    """The tokenizers library raises bare Exceptions, and Rust's panics, which are none."""
    try:
        yield
    except Exception as error:
        if type(error) is not Exception:  # of an argument
            raise
        raise CheckpointError(f"{what}: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{what}: {error}") from error

"""Runs programs that `jaxbuf.export` wrote, without the Python of the model: JAX, numpy and the files are enough."""

import dataclasses
import functools
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
from safetensors import safe_open

from jaxbuf.axes import Array
from jaxbuf.shown import shown
from jaxbuf.target import Target, resolve_target

FORMAT = 1
MANIFEST, ARRIVALS, PARAMETERS = "exported.json", "arrivals.npz", "parameters.safetensors"
PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}  # of a target, as JAX names them where it lowers
# Calls of kernels, and of cuDNN's attention, whose formats are as stable as the jax that a file was made with.
MOSAIC_CALL = "mosaic_gpu_v2"
KERNEL_CALLS = MOSAIC_CALL, "tpu_custom_call", "__gpu$xla.gpu.triton", "__cudnn$fmhaSoftmax"
PROGRAMS = "init_carry", "admit", "generate_tokens"
SETTINGS = {"temperature": (0.0, np.inf), "top_k": (0, 2**31 - 1), "top_p": (0.0, 1.0), "seed": (0, 2**32 - 1)}


def program_file(name: str) -> str:
    """The name of the file that a program lies in."""
    return f"{name}.jaxexport"


@dataclasses.dataclass(frozen=True)
class ExportedModel:
    """A model's programs for one target.

    A carry is a dictionary of arrays here, by their places in `jaxbuf.serving.carry.Carry`; `admit` and
    `generate_tokens` donate it, so that it must not be used again.

    Attributes:
      directory: Where it lies.
      target: The chips that the programs are for.
      settings: What they were made for: model, rows, prompt_tokens, capacity, limit, form, state_dtype, drafter,
        draft_tokens, vocab_size, stop_ids.
      parameters: Shape and dtype of each parameter that the programs take, by name; a draft model's begin with
        "drafter.".
      carry_names: Of the arrays of a carry, in the programs' order.
    """

    directory: Path
    target: Target
    settings: dict[str, Any]
    parameters: dict[str, jax.ShapeDtypeStruct]
    carry_names: tuple[str, ...]

    def __repr__(self) -> str:
        return f"ExportedModel({self.settings['model']!r}, for {self.target})"

    @functools.cached_property
    def loaded_parameters(self) -> dict[str, Array]:
        """The parameters that were written with the programs, on the default device.

        Raises:
          FileNotFoundError: The model was exported without them.
        """
        file = self.directory / PARAMETERS
        if not file.is_file():
            raise FileNotFoundError(f"{file} is not there: the model was exported without its parameters")
        with safe_open(file, "flax") as stored:
            return {name: stored.get_tensor(name) for name in self.parameters}

    def init_carry(self, parameters: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """A carry whose rows are all empty.

        Args:
          parameters: As in `admit`.
        """
        return self._named(self._program("init_carry")(self._flat(parameters)))

    def admit(
        self,
        carry: Mapping[str, Array],
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        parameters: Mapping[str, Array] | None = None,
        stop_ids: Sequence[int] | None = None,
        **sampling: float,
    ) -> dict[str, Array]:
        """Reads prompts into the first rows of an empty carry, and draws the first token of each.

        Args:
          carry: From `init_carry`; donated.
          prompts: Token ids; no more prompts than settings["rows"], each of at most settings["prompt_tokens"].
          max_new_tokens: Of each row; what has no room behind its prompt is left out.
          parameters: By name, with the shapes and dtypes of `self.parameters`; None: those that were exported.
          stop_ids: Tokens that end a text; None: those of the model.
          sampling: Keyword arguments: temperature (0 unless given: greedy), top_k, top_p, seed, the same for all rows.

        Raises:
          ValueError: A prompt, a token or a setting out of range, or other parameters.
        """
        given = dict(np.load(self.directory / ARRIVALS))
        rows, width = given["tokens"].shape
        if not 1 <= len(prompts) <= rows:
            raise ValueError(f"prompts must be 1 to {rows}, as the programs were made for, got {len(prompts)}")
        tokens, lengths = np.zeros_like(given["tokens"]), np.zeros_like(given["lengths"])
        for row, prompt in enumerate(prompts):
            if not 1 <= len(prompt) <= width:
                raise ValueError(f"prompts must have 1 to {width} tokens, got one of {len(prompt)}")
            least, most, vocabulary = min(prompt), max(prompt), self.settings["vocab_size"]
            if least < 0 or most >= vocabulary:
                raise ValueError(f"prompts must have tokens in [0, {vocabulary}), got {least} to {most}")
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        row = np.arange(rows, dtype=np.int32)
        given |= {"tokens": tokens, "lengths": lengths, "rows": np.where(row < len(prompts), row, -1)}
        given |= {"start": np.zeros_like(given["start"]), "last": np.ones_like(given["last"])}
        begins = given["begins.rows"].shape[0]
        place = np.arange(begins, dtype=np.int32)
        given["begins.rows"] = np.where(place < len(prompts), place, -1)
        given["begins.prompt"] = np.minimum(place, len(prompts) - 1)
        given["begins.max_new_tokens"][:] = max_new_tokens
        for name, value in {"temperature": 0.0, **sampling}.items():
            if name not in SETTINGS:
                raise ValueError(f"{name} must be one of {', '.join(SETTINGS)}, got {value!r}")
            least, most = SETTINGS[name]
            if not least <= value <= most:
                raise ValueError(f"{name} must be in [{least}, {most}], got {value!r}")
            given[f"begins.sampling.{name}"][:] = value
        stops = self.settings["stop_ids"] if stop_ids is None else list(stop_ids)
        room = given["begins.stop_ids"].shape[1]
        if len(stops) > room:
            raise ValueError(f"stop_ids must be at most {room} tokens, got {len(stops)}")
        given["begins.stop_ids"][:] = stops + [-1] * (room - len(stops))
        leaves = [np.asarray(given[name], stored.dtype) for name, stored in np.load(self.directory / ARRIVALS).items()]
        return self._named(self._program("admit")(self._flat(parameters), self._held(carry), leaves))

    def generate_tokens(
        self, carry: Mapping[str, Array], steps: int, *, parameters: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """Runs up to `steps` decoding steps; ends early when no row runs.

        Args:
          carry: From `admit`, or from here; donated.
          steps: Another number compiles nothing.
          parameters: As in `admit`.
        """
        given = self._flat(parameters), self._held(carry), [np.int32(steps)]
        return self._named(self._program("generate_tokens")(*given))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        parameters: Mapping[str, Array] | None = None,
        stop_ids: Sequence[int] | None = None,
        **sampling: float,
    ) -> list[list[int]]:
        """Continues prompts of token ids: the new tokens of each, a stop token that ended it included.

        Args:
          prompts, max_new_tokens, parameters, stop_ids, sampling: As in `admit`.

        Raises:
          ValueError: As in `admit`.
        """
        chosen = {"parameters": parameters, "stop_ids": stop_ids, **sampling}
        carry = self.admit(self.init_carry(parameters), prompts, max_new_tokens, **chosen)
        carry = self.generate_tokens(carry, max_new_tokens, parameters=parameters)
        begin, end = np.asarray(carry["history.prompt_length"]), np.asarray(carry["history.length"])
        text = np.asarray(carry["history.tokens"])
        return [text[row, begin[row] : end[row]].tolist() for row in range(len(prompts))]

    def _program(self, name: str) -> Any:
        if name not in self._programs:
            self._programs[name] = donating(read_program((self.directory / program_file(name)).read_bytes()))
        return self._programs[name]

    @functools.cached_property
    def _programs(self) -> dict[str, Any]:
        return {}

    def _flat(self, parameters: Mapping[str, Array] | None) -> list[Array]:
        found = self.loaded_parameters if parameters is None else parameters
        for name, expected in self.parameters.items():
            if name not in found or (found[name].shape, found[name].dtype) != (expected.shape, expected.dtype):
                got = f"{found[name].dtype}{list(found[name].shape)}" if name in found else "none"
                raise ValueError(f"parameters must have {name} as {expected.dtype}{list(expected.shape)}, got {got}")
        return [found[name] for name in self.parameters]

    def _held(self, carry: Mapping[str, Array]) -> list[Array]:
        if missing := [name for name in self.carry_names if name not in carry]:
            raise ValueError(f"carry must be one of this model, got one without {missing[0]}")
        return [carry[name] for name in self.carry_names]

    def _named(self, leaves: Sequence[Array]) -> dict[str, Array]:
        return dict(zip(self.carry_names, leaves, strict=True))


def read_program(stored: bytes) -> jax.export.Exported:
    """The artefact that a file holds.

    If it has kernels of Mosaic GPU, that is imported: by an environment variable it tells XLA which library to link
    them with.
    """
    artefact = jax.export.deserialize(bytearray(stored))
    if MOSAIC_CALL.encode() in artefact.mlir_module_serialized:
        importlib.import_module("jax.experimental.mosaic.gpu")
    return artefact


def donating(exported: jax.export.Exported) -> Any:
    """An artefact as a jitted function that donates its carry, the second argument if it has one.

    An artefact does not remember what was donated to the function that it was made from: called within a plain jit, it
    takes a second carry.
    """
    has_carry = exported.in_tree.children()[0].num_nodes > 1 and len(exported.in_tree.children()[0].children()) > 1
    return jax.jit(lambda *given: exported.call(*given), donate_argnums=(1,) if has_carry else ())


def load_exported(path: str | Path) -> ExportedModel:
    """The programs that `jaxbuf.export` wrote to a directory, for the chips that this process has.

    Args:
      path: The directory.

    Raises:
      FileNotFoundError: There is none, or no exported model in it.
      ValueError: It is for other chips than those of this process, or of another format.
    """
    directory = Path(path)
    file = directory / MANIFEST
    if not file.is_file():
        raise FileNotFoundError(f"path must be the directory of an exported model, got {shown(str(directory))}")
    manifest = json.loads(file.read_text(encoding="utf-8"))
    if manifest["format"] != FORMAT:
        raise ValueError(f"path must hold an exported model of format {FORMAT}, got format {manifest['format']}")
    target, here = Target(**manifest["target"]), resolve_target(None)
    if (target.platform, target.generation) != (here.platform, here.generation):
        raise ValueError(f"path must hold programs for {here}, which this process has, got programs for {target}")
    shapes = {
        each["name"]: jax.ShapeDtypeStruct(tuple(each["shape"]), jax.numpy.dtype(each["dtype"]))
        for each in manifest["parameters"]
    }
    names = tuple(each["name"] for each in manifest["carry"])
    return ExportedModel(directory, target, manifest["settings"], shapes, names)

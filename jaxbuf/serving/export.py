"""Programs as files: `export` writes `admit` and `generate_tokens` of a model for one target, with all that running
them takes; `jaxbuf.exported` runs them without the model's Python."""

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.flax import save_file

from jaxbuf.arguments import check_sizes
from jaxbuf.exported import ARRIVALS, FORMAT, KERNEL_CALLS, MANIFEST, PARAMETERS, PLATFORMS, program_file
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.layers import named_parameters
from jaxbuf.serving import batch as batches
from jaxbuf.serving.admit import admit, init_carry
from jaxbuf.serving.batch import Batch, Decoding, make_batch
from jaxbuf.serving.loop import generate_tokens
from jaxbuf.shown import shown
from jaxbuf.target import Target, as_target, lowering_for
from jaxbuf.version import __version__


def export(
    lm: LanguageModel,
    target: Target | str,
    path: str | Path,
    *,
    rows: int = 8,
    prompt_tokens: int = 128,
    max_new_tokens: int = 256,
    drafter: object = None,
    draft_tokens: int = 4,
    limit: int = 16,
    form: batches.Form = "buffered",
    state_dtype: str | None = None,
    parameters: bool = True,
) -> Path:
    """Writes a model's programs for a target, and its parameters, to a directory that `jaxbuf.load_exported` runs.

    The programs are `jax.export` artefacts: they hold what was traced and lowered, kernels included, and are compiled
    where they are loaded. The machine that writes them needs none of the target's chips.

    Args:
      lm: On one device, or of `jaxbuf.models.abstract.abstract_model`, without parameters.
      target: The chips: a `Target` or a name ("v6e", "H200", "cpu").
      path: The directory; one that an earlier export wrote is replaced.
      rows: Prompts that are continued at once, rounded up to a power of two.
      prompt_tokens: The longest prompt's, rounded up likewise.
      max_new_tokens: The longest text's that is generated, rounded up likewise.
      drafter, draft_tokens, limit, form, state_dtype: As `generate` takes them; a draft model's parameters are written
        beside the model's.
      parameters: Whether the parameters are written. Without them who loads it brings his own.

    Returns:
      The directory.

    Raises:
      FileExistsError: The directory holds something else.
      ValueError: A size or setting out of range, a model on a mesh, parameters that are shapes alone, or longer prompts
        than one program reads of so many rows.
    """
    check_sizes(rows=rows, prompt_tokens=prompt_tokens, max_new_tokens=max_new_tokens)
    batches.check_model(lm)
    if lm.config.mesh is not None:
        raise ValueError(f"lm must lie on one device to be exported, got {lm!r} on a mesh of {lm.config.mesh.size}")
    directory, made_for = Path(path), as_target(target)
    if (
        directory.exists()
        and not (directory / MANIFEST).is_file()
        and (not directory.is_dir() or any(directory.iterdir()))
    ):
        raise FileExistsError(f"path must be new or an exported model's directory, got {shown(str(directory))}")
    lm = dataclasses.replace(lm, compiled_for=made_for)
    how: dict[str, Any] = {"state_dtype": state_dtype, "drafter": drafter, "draft_tokens": draft_tokens}
    asked = make_batch(lm, [[0] * prompt_tokens] * rows, decoding=Decoding(max_new_tokens, limit, form, **how))
    if len(asked.arrivals) > 1:
        most = asked.arrivals[0].tokens.shape[1]
        raise ValueError(
            f"prompt_tokens must be at most {most} for {rows} rows, which one program reads, got {prompt_tokens}"
        )
    named = _named_arrays(asked)
    if parameters and any(isinstance(array, jax.ShapeDtypeStruct) for array in named.values()):
        raise ValueError("parameters must be False for a model whose parameters are shapes alone, got True")
    programs, carry = _programs(asked, named)
    settings = {
        "model": lm.name,
        "rows": asked.sizes.rows,
        "prompt_tokens": int(asked.arrivals[0].tokens.shape[1]),
        "capacity": asked.sizes.capacity,
        "limit": asked.sizes.limit,
        "form": form,
        "state_dtype": asked.sizes.state_dtype,
        "drafter": None if asked.drafter is None else type(asked.drafter).__name__,
        "draft_tokens": 0 if asked.drafter is None else asked.drafter.draft_tokens,
        "vocab_size": lm.vocab_size,
        "stop_ids": list(lm.config.eos_token_ids),
    }
    manifest = {
        "format": FORMAT,
        "jaxbuf": __version__,
        "jax": jax.__version__,
        "target": {"platform": made_for.platform, "generation": made_for.generation},
        "settings": settings,
        "parameters": [_described(name, array) for name, array in named.items()],
        "carry": [_described(name, leaf) for name, leaf in carry.items()],
    }
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        for name, artefact in programs.items():
            (new / program_file(name)).write_bytes(artefact)
        chunk: dict[str, Any] = {name: np.asarray(leaf) for name, leaf in _leaves(asked.arrivals[0]).items()}
        np.savez(new / ARRIVALS, **chunk)
        if parameters:
            save_file(named, new / PARAMETERS)
        (new / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        if directory.exists():
            shutil.rmtree(directory)
        os.replace(new, directory)
    return directory


def _leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their place in it."""
    found = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in found}


def _named_arrays(asked: Batch) -> dict[str, Any]:
    """The parameters of a model, and of a draft model beside it, in the order of their leaves."""
    found = {name: param.get_raw_value() for name, param in named_parameters(asked.lm.model).items()}
    return found | {f"drafter.{name}": leaf for name, leaf in _leaves(asked.drafter).items()}


def _described(name: str, array: Any) -> dict[str, Any]:
    return {"name": name, "shape": list(array.shape), "dtype": np.dtype(array.dtype).name}


def _programs(asked: Batch, named: dict[str, Any]) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The serialised programs, and the shapes of the carry by name. Their arguments and results are lists of arrays."""
    model, drafter = jax.tree.structure(asked.lm.model), jax.tree.structure(asked.drafter)
    arrivals, config, sizes = jax.tree.structure(asked.arrivals[0]), asked.lm.config, asked.sizes

    def begin(parameters: Sequence[Any]) -> Any:
        return init_carry(config, sizes, jax.tree.unflatten(drafter, parameters[model.num_leaves :]))

    parameters = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in named.values()]
    shapes = jax.eval_shape(begin, parameters)
    carry = jax.tree.structure(shapes)

    def flat(program: Callable[..., Any], third: Any) -> Callable[..., list[Any]]:
        def run(parameters: Sequence[Any], held: Sequence[Any], given: Sequence[Any]) -> list[Any]:
            own = jax.tree.unflatten(model, parameters[: model.num_leaves])
            drafts = jax.tree.unflatten(drafter, parameters[model.num_leaves :])
            more = () if asked.drafter is None else (drafts,)
            return jax.tree.leaves(
                program(own, jax.tree.unflatten(carry, held), jax.tree.unflatten(third, given), *more)
            )

        return run

    held = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(shapes)]
    chunk = [jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype) for leaf in jax.tree.leaves(asked.arrivals[0])]
    steps = [jax.ShapeDtypeStruct((), np.int32)]
    platform = PLATFORMS[asked.lm.target.platform]
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in KERNEL_CALLS]

    def written(function: Callable[..., Any], *given: Any) -> bytes:
        made = jax.export.export(jax.jit(function), platforms=(platform,), disabled_checks=checks)(*given)
        return bytes(made.serialize())

    with lowering_for(asked.lm.target):
        programs = {
            "init_carry": written(lambda parameters: jax.tree.leaves(begin(parameters)), parameters),
            "admit": written(flat(admit, arrivals), parameters, held, chunk),
            "generate_tokens": written(flat(generate_tokens, jax.tree.structure(0)), parameters, held, steps),
        }
    return programs, _leaves(shapes)

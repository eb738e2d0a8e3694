"""Which model a benchmark runs: the options that say it, and the model that they ask for."""

import argparse
import os
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxbuf.bench.parser import whole
from jaxbuf.bench.random_model import FIRST, configuration, random_model
from jaxbuf.models.known_models import find_known, known_models
from jaxbuf.models.language_model import LanguageModel, load
from jaxbuf.models.resizing import SIZES

DTYPES = ("float32", "bfloat16", "float16")
TOO_LARGE = "a random model of full size needs a GPU, this is a cpu: try --model demo, or"


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """--model, --dtype, and what a random model is like: a shape, and other sizes than its."""
    words = "random; a known model such as Qwen3.5-0.8B, with random parameters; demo; or a checkpoint's directory"
    parser.add_argument("--model", default="random", help=words)
    words = "of the parameters; default: bfloat16, or as a checkpoint is"
    parser.add_argument("--dtype", choices=DTYPES, default=None, help=words)
    shape = parser.add_argument_group("the random model")
    words = (
        f"the known model whose sizes it has, which --model names as well; jaxbuf models lists them; default: {FIRST}"
    )
    shape.add_argument("--shape", type=_shape, default=None, help=words)
    for name in SIZES:
        shape.add_argument(option(name), type=whole(1), default=None, help="default: the shape's")


def _shape(text: str) -> str:
    """The name of a known model, as it is typed.

    Raises:
      ArgumentTypeError: None is called so.
    """
    if find_known(text) is None:
        names = ", ".join(known_models())
        raise argparse.ArgumentTypeError(f"must be the name of a known model ({names}), got {text!r}")
    return text


def option(size: str) -> str:
    """What the option of a size of SIZES is called."""
    return "--" + size.replace("_", "-")


def read_model_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Adds `sizes`, those that were given; a known model's name becomes the `shape` of a random one. Ends the program
    unless the sizes fit the shape."""
    options.sizes = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    known = None if options.model == "random" or os.path.isdir(options.model) else find_known(options.model)
    asked_by = "--model" if known else "--shape"
    if known is not None:
        if options.shape is not None and find_known(options.shape) is not known:
            parser.error(f"--shape must be left out or name the same as --model ({options.model}), got {options.shape}")
        options.shape, options.model = known.name, "random"
    options.shape = options.shape or FIRST
    if options.model == "random":
        try:
            configuration(options.shape, **options.sizes)
        except ValueError as error:
            parser.error(f"{asked_by} {options.shape}: {error}")


def check_full_size(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program if a random model of full size is asked for on a CPU."""
    if is_too_large(options.model, options.sizes):
        parser.error(f"{TOO_LARGE} {' and '.join(map(option, list(SIZES)[:2]))}")


def is_too_large(model: str, sizes: Mapping[str, int]) -> bool:
    """Whether a model is a random one of full size, and this is a CPU."""
    return model == "random" and not sizes and jax.default_backend() == "cpu"


def asked_model(
    model: str,
    shape: str,
    sizes: Mapping[str, int],
    dtype: str | None,
    *,
    mesh: Mesh | None = None,
    name: str = "random",
    progress: bool | None = None,
) -> LanguageModel:
    """The model that the options ask for.

    Args:
      model, shape, sizes, dtype: The options.
      mesh: What it is spread over, as in `jaxbuf.load`.
      name: Of a random one.
      progress: As in `jaxbuf.load`.

    Raises:
      ValueError: As `load`, or a random model's sizes do not fit each other or the mesh.
    """
    if model == "random":
        return random_model(configuration(shape, **sizes), jnp.dtype(dtype or "bfloat16"), mesh=mesh, name=name)
    return load(model, dtype=dtype, mesh=mesh, progress=progress)

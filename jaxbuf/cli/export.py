"""`jaxbuf export`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from jaxbuf.cli import options
from jaxbuf.cli.errors import busy, error_console
from jaxbuf.cli.session import load_model
from jaxbuf.terminal import text_console


def export(
    directory: Annotated[Path, typer.Argument(help="Where the programs are written to.", metavar="DIRECTORY")],
    model: options.Model = "demo",
    target: Annotated[
        str,
        typer.Option(
            metavar="CHIP",
            help="What the programs are for: cpu, H100, H200, v4, v5e, v5p, v6e, tpu7x or another chip of NVIDIA's. "
            "This machine needs none of it.",
        ),
    ] = "cpu",
    rows: Annotated[int, typer.Option(help="Prompts that are continued at once.", **options.whole(1))] = 8,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the longest prompt.", **options.whole(1))] = 128,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens of the longest text.", **options.whole(1))] = 256,
    drafter: Annotated[
        Literal["none", "ngram", "mtp"], typer.Option(help="Who drafts tokens that a step verifies.")
    ] = "none",
    draft_tokens: Annotated[int, typer.Option(help="Draft tokens of a step.", **options.whole(1))] = 4,
    limit: Annotated[int, typer.Option(help="Entries that a ring holds before a fold.", **options.whole(1))] = 16,
    form: Annotated[
        Literal["recurrent", "buffered", "kv"], typer.Option(help="How recurrent layers hold a request.")
    ] = "buffered",
    dtype: options.Dtype = None,
    without_parameters: Annotated[
        bool,
        typer.Option(
            "--without-parameters",
            help="Write the programs alone. MODEL may then be a known model (jaxbuf models lists them), and nothing is "
            "downloaded or allocated.",
        ),
    ] = False,
) -> None:
    """Write a model's compiled loop for a chip as files, which run without the model's Python.

    DIRECTORY gets the programs that read prompts and that decode, as jax.export writes them, what they were made for,
    and the parameters. jaxbuf.load_exported(DIRECTORY) runs them in Python, on the chip that they are for, with prompts
    up to the sizes that are given here.

    [bold]Examples[/bold]

      jaxbuf export demo-cpu

      jaxbuf export qwen-v6e --model Qwen3.5-4B --target v6e --without-parameters
    """
    with busy("starting JAX"):
        from jaxbuf.models.abstract import abstract_model
        from jaxbuf.models.loading.checkpoint import compute_dtype
        from jaxbuf.planning.model_sizes import find_sizes
        from jaxbuf.serving.export import export as write
        from jaxbuf.target import as_target

    chip = as_target(target)
    if without_parameters:
        sizes = find_sizes(model)
        lm = abstract_model(sizes.config, sizes.name, chip, compute_dtype(dtype) or sizes.dtype)
    else:
        lm = load_model(error_console(), model, dtype)
    with busy(f"writing the programs for {chip}"):
        written = write(
            lm,
            chip,
            directory,
            rows=rows,
            prompt_tokens=prompt_tokens,
            max_new_tokens=max_new_tokens,
            drafter=None if drafter == "none" else drafter,
            draft_tokens=draft_tokens,
            limit=limit,
            form=form,
            parameters=not without_parameters,
        )
    size = sum(file.stat().st_size for file in written.iterdir())
    text_console().print(f"wrote {written}: {lm.name} for {chip}, {size / 1e6:.1f} MB", markup=False)

"""`jaxbuf export`."""

from pathlib import Path
from typing import Annotated

import typer

from jaxbuf.cli import options
from jaxbuf.cli.errors import busy, error_console
from jaxbuf.cli.session import load_model, stay_on_cpu
from jaxbuf.terminal import text_console


def export(
    directory: Annotated[Path, typer.Argument(help="Where the programs are written to.", metavar="DIRECTORY")],
    model: options.Model = "demo",
    target: Annotated[
        str,
        typer.Option(
            metavar="CHIP",
            help="What the programs are for: cpu, H100, H200, v4, v5e, v5p, v6e, tpu7x or another chip of NVIDIA's, of "
            "which they use one device. This machine needs none.",
        ),
    ] = "cpu",
    rows: options.Rows = 8,
    prompt_tokens: options.PromptTokens = 128,
    max_new_tokens: options.MaxNewTokens = 256,
    drafter: options.OwnDrafter = "none",
    draft_tokens: options.OwnDraftTokens = 4,
    limit: options.Limit = 16,
    form: options.FixedForm = "buffered",
    state_dtype: options.StateDtype = None,
    dtype: Annotated[
        options.DtypeName | None,
        typer.Option(
            help="Of the parameters: float32, bfloat16 or float16; by default the checkpoint's, for a CPU float32."
        ),
    ] = None,
    without_parameters: Annotated[
        bool,
        typer.Option(
            "--without-parameters",
            help="Write the programs alone. MODEL may then be a known model (jaxbuf models lists them), and nothing is "
            "downloaded or allocated.",
        ),
    ] = False,
) -> None:
    """Write the programs that serve a model on a chip as files, which run without the model's Python.

    DIRECTORY gets the programs that read prompts and that decode, as jax.export writes them: lowered for the chip, and
    compiled where they run. Beside them it gets what they were made for, and the parameters.
    jaxbuf.load_exported(DIRECTORY) runs them in Python, on the chip that they are for, with prompts up to the sizes
    that are given here. To see what they will take on TPUs: jaxbuf compile.

    [bold]Examples[/bold]

      jaxbuf export demo-cpu

      jaxbuf export qwen-v6e --model Qwen3.5-4B --target v6e --without-parameters
    """
    with busy("starting JAX"):
        stay_on_cpu()
        from jaxbuf.models.abstract import abstract_model
        from jaxbuf.models.known_models import find_known
        from jaxbuf.models.loading.hub import find_directory
        from jaxbuf.planning.model_sizes import find_sizes
        from jaxbuf.serving.export import export as write
        from jaxbuf.target import CHIPS, as_target

    try:
        chip = as_target(target)
    except ValueError:
        raise ValueError(f"target must be one of {', '.join(CHIPS)}, got {target!r}") from None
    sizes = find_sizes(model)
    kept = dtype or ("float32" if chip.platform == "cpu" else sizes.dtype)
    if without_parameters:
        lm = abstract_model(sizes.config, sizes.name, chip, kept)
    elif find_directory(model) is None and find_known(model) is not None:
        raise ValueError(
            f"model {model!r} is known by its shape, of which --without-parameters writes the programs alone"
        )
    else:
        lm = load_model(error_console(), model, kept)
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
            state_dtype=state_dtype,
            parameters=not without_parameters,
        )
    size = sum(file.stat().st_size for file in written.iterdir())
    text_console().print(f"wrote {written}: {lm.name} for {chip}, {size / 1e6:.1f} MB", markup=False)
    error_console().print(f"jaxbuf.load_exported({str(written)!r}) runs it there", style="dim", markup=False)

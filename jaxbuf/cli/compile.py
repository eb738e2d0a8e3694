"""`jaxbuf compile`."""

import dataclasses
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from jaxbuf.cli import options
from jaxbuf.cli.errors import busy, error_console
from jaxbuf.cli.plan import size
from jaxbuf.cli.session import end_at_interrupt, stay_on_cpu, waiting
from jaxbuf.terminal import print_table, text_console

if TYPE_CHECKING:
    from jaxbuf.models.language_model import LanguageModel
    from jaxbuf.planning.tpu_slices import Slice
    from jaxbuf.serving.tpu_programs import CompiledProgram

MOST_DEVICES = 8


def compile_model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="[bold]demo[/bold], a checkpoint's directory or Hugging Face id (config.json is all it takes), or a "
            "known model such as Qwen3.5-4B ([bold]jaxbuf models[/bold] lists them).",
        ),
    ] = "demo",
    device: Annotated[
        str,
        typer.Option(
            metavar="CHIPS",
            help="TPUs: v4, v5e, v5p, v6e or tpu7x, and how many chips (not cores), as in v6e-4; a tpu7x has two "
            f"devices. Over several devices, {MOST_DEVICES} at most, the model is spread by its heads.",
        ),
    ] = "v6e",
    rows: options.Rows = 64,
    prompt_tokens: options.PromptTokens = 128,
    max_new_tokens: options.MaxNewTokens = 256,
    layers: Annotated[
        int | None,
        typer.Option(
            help="Only so many of its layers, the first ones, which compile faster; by default all.",
            show_default=False,
            **options.whole(1),
        ),
    ] = None,
    drafter: options.OwnDrafter = "none",
    draft_tokens: options.OwnDraftTokens = 4,
    limit: options.Limit = 16,
    form: options.FixedForm = "buffered",
    state_dtype: options.StateDtype = None,
    dtype: options.Dtype = None,
) -> None:
    """Compile the programs that serve a model for TPUs that are not there, and tell what they take.

    There are two, one that reads prompts and one that decodes, for as many requests and tokens as
    [bold]jaxbuf.generate[/bold] makes of what you give: it rounds them up to powers of two.
    The TPU's own compiler makes them from shapes: no TPU, no weights and no memory for them are needed, but the
    compiler is: the extra "tpu" of this package, on any machine.
    A model of 32 layers takes two minutes or more on two idle cores, a drafter another one or two, fewer --layers less.
    Nothing is kept: what is compiled for a chip that is not there can't be taken from a --compilation-cache.
    Of a v4 that is not there the compiler takes each core for a device with half the memory, and so does this command.

    Of each program it tells what one device holds all the time (parameters, and the memory of all requests), and what
    on top for the time of a call: reading all prompts at once takes most.
    Arrays not in place: of that memory, what is written to another place than it was in.
    Exchanges between devices stand in every layer, and in what makes logits and samples from them, there mostly in
    branches of which few are taken; a step of generate_tokens has each once.
    The estimate of a step is how long the chip takes to read all that a device holds once, at the bandwidth that its
    makers give: contexts are at their full length, and no program reaches it. A drafter has none: it reads its
    layers and the logits' matrix again for each draft.
    Kernels are counted by what they compute: chunked the recurrence of prompts, extend that of steps, prepare or
    convolve what stands before it, gated_norm behind it, put_rows writes what stays of a prompt, attend the softmax
    attention of steps, experts routed ones. Everything else is XLA's. Whether results are right only a chip can tell.

    [bold]Examples[/bold]

      jaxbuf compile --device v5e

      jaxbuf compile Qwen3.5-4B --layers 4

      jaxbuf compile Qwen3.5-27B --device v6e-4 --drafter mtp --draft-tokens 3
    """
    with busy("starting JAX"):
        import jax

        stay_on_cpu()
        from jaxbuf.pallas.dispatch import told
        from jaxbuf.planning.tpu_slices import find_slice
        from jaxbuf.serving.tpu_programs import PROGRAMS, abstract_batch, compiled_program, held_bytes
        from jaxbuf.tpu_compiler import device_memory

    where = find_slice(device)
    room = device_memory(where)
    if where.devices > MOST_DEVICES:
        raise ValueError(f"device must have at most {MOST_DEVICES} devices to compile for, got {device!r}")
    drafts = None if drafter == "none" else drafter
    with busy("counting bytes"):
        lm = _abstract(model, where, layers, dtype, mtp=drafts == "mtp")
        batch = abstract_batch(
            lm,
            rows,
            prompt_tokens,
            max_new_tokens,
            limit=limit,
            form=form,
            state_dtype=state_dtype,
            drafter=drafts,
            draft_tokens=draft_tokens,
        )
        held = held_bytes(batch)
    if held > room:
        raise ValueError(
            f"device must have room for parameters and requests of {lm.name}, which take {size(held)} a device, got "
            f"{device!r} with {size(room)}: more chips have less each, fewer rows and tokens take less"
        )
    console, count, reading = text_console(), len(lm.config.layers), batch.arrivals[0].tokens.shape[1]
    console.print(
        f"{lm.name}, {count} {'layer' if count == 1 else 'layers'}, for {where.devices} "
        f"{'device' if where.devices == 1 else 'devices'} of a TPU {where.generation}, {size(room)} "
        f"each: {batch.sizes.rows} {'request' if rows == 1 else 'requests'} of at most {batch.sizes.capacity} tokens, "
        f"{reading} tokens of each prompt at once",
        markup=False,
    )
    made = []
    for name in PROGRAMS:
        try:
            with waiting(error_console(), f"compiling {name}"), end_at_interrupt():
                made.append(compiled_program(name, batch))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise MemoryError(
                f"{name} does not fit on {device}, the TPU's compiler says ({_taken(str(error))}): more chips have "
                "less each, fewer --rows and shorter --prompt-tokens take less"
            ) from error
    _print(made, room, None if drafts else where.bandwidth, console)
    if message := told(where.target):
        console.print(message, markup=False)


def _taken(message: str) -> str:
    """The sizes in the compiler's words, or their beginning."""
    found = re.search(r"the total memory required.*?exceeds available HBM \([\d.]+\w*\)", message)
    return found[0] if found else message.splitlines()[0][:200]


def _abstract(model: str, where: "Slice", layers: int | None, dtype: str | None, *, mtp: bool) -> "LanguageModel":
    """The model as shapes, spread over the devices."""
    from jaxbuf.models.abstract import abstract_model
    from jaxbuf.models.loading.checkpoint import compute_dtype
    from jaxbuf.models.resizing import resized
    from jaxbuf.models.tensor_parallel import automatic
    from jaxbuf.planning.model_sizes import find_sizes
    from jaxbuf.tpu_compiler import tpu_mesh

    sizes = find_sizes(model)
    if layers is not None and layers > len(sizes.config.layers):
        raise ValueError(f"layers must be at most {len(sizes.config.layers)}, got {layers}")
    config = resized(sizes.config, sizes.name, {} if layers is None else {"layers": layers}, mtp=mtp)
    mesh = tpu_mesh(where.generation, where.devices)
    config = dataclasses.replace(config, mesh=automatic(mesh) if where.devices > 1 else None)
    try:
        _ = config.on_device
    except ValueError as error:
        raise ValueError(f"device {where.name} can not serve {sizes.name}: {error}") from None
    return abstract_model(config, sizes.name, where.target, compute_dtype(dtype) or sizes.dtype)


def _estimate(program: "CompiledProgram", bandwidth: float | None) -> str:
    """How long the memory takes to give all that a device holds; "-" for a program that makes no steps, and without a
    bandwidth."""
    if bandwidth is None or program.name != "generate_tokens":
        return "-"
    return f"{1e3 * program.held_bytes / bandwidth:.3g} ms"


def _print(made: "list[CompiledProgram]", room: int, bandwidth: float | None, console: Console) -> None:
    table = Table()
    table.add_column("of one device", no_wrap=True)
    for program in made:
        table.add_column(program.name, no_wrap=True, justify="right")

    def add(name: str, cell: "Callable[[CompiledProgram], str]", *, end_section: bool = False) -> None:
        table.add_row(name, *map(cell, made), end_section=end_section)

    add("compiled in", lambda program: f"{program.seconds:.0f} s", end_section=True)
    add("parameters, requests", lambda program: size(program.held_bytes))
    add("for the time of a call", lambda program: size(program.temporary_bytes))
    add("of its memory", lambda program: f"{program.used_bytes / room:.0%}")
    add("a step, estimate", lambda program: _estimate(program, bandwidth), end_section=True)
    add("arrays not in place", lambda program: str(len(program.moved)))
    add("exchanges of layers", lambda program: str(program.layer_exchanges))
    add("other exchanges", lambda program: str(program.other_exchanges))
    for kernel in sorted({kernel for program in made for kernel in program.kernels}):
        add(f"kernels: {kernel}", lambda program, kernel=kernel: str(program.kernels.get(kernel, 0)))
    print_table(table, console)

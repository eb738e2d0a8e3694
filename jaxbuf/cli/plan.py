"""`jaxbuf plan`."""

import contextlib
import json as json_module
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from jaxbuf.cli import options
from jaxbuf.cli.errors import busy
from jaxbuf.terminal import print_table, text_console

if TYPE_CHECKING:
    from jaxbuf.planning.memory_plan import FormCost, Plan

UNITS = {"": 1, "B": 1} | {f"{unit}B": 1000**i for i, unit in enumerate("kMGT", 1)}
MOST_BYTES, DEFAULT_MEMORY = 2**63 - 1, 80_000_000_000
UNITS |= {f"{unit}iB": 1024**i for i, unit in enumerate("KMGT", 1)}


def parse_size(text: str | int) -> int:
    """Bytes of "80GB", "94.5 GiB", "141e9"; a small number without a unit is taken for a forgotten one.

    Raises:
      typer.BadParameter: It is no such size.
    """
    found = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([a-z]*)\s*", str(text), re.IGNORECASE)
    unit = {name.lower(): size for name, size in UNITS.items()}.get(found[2].lower()) if found else None
    try:
        number = float(found[1]) if found else -1.0
    except ValueError:
        number = -1.0
    if unit is None or not number >= 0 or (found and not found[2] and 0 < number < 1e6):
        raise typer.BadParameter(f"must be a size such as 80GB, 80GiB or 80e9 (bytes, from 1e6 on), got {text!r}")
    if number * unit > MOST_BYTES:
        raise typer.BadParameter(f"must be a size of at most 9.2e18 bytes, got {text!r}")
    return round(number * unit)


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            show_default="demo",
            help="[bold]demo[/bold], a checkpoint's directory or Hugging Face id (config.json is all it takes), or a "
            "known model such as Qwen3-Next-80B-A3B ([bold]jaxbuf models[/bold] lists them).",
        ),
    ] = None,
    named: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", show_default=False, help="The same, as other commands take it."),
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            show_default="80GB",
            help="What there is, of all devices together: 80GB, 1.1TB, 80GiB.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="CHIPS",
            show_default=False,
            help="TPUs in place of --memory: v4, v5e, v5p, v6e or tpu7x, and how many chips "
            "(not cores), as in v6e-4, over whose devices the heads are spread. Counts what one of them holds, and "
            "estimates a step from its bandwidth.",
        ),
    ] = None,
    draft_tokens: Annotated[int, typer.Option(help="Draft tokens that a step verifies.", **options.whole(0))] = 0,
    accepted: Annotated[
        float | None,
        typer.Option(help="Tokens that a step keeps on average; by default all, 1 + drafts.", **options.number()),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens of a request; may be repeated. By default 1024 and 8192.",
            show_default=False,
            **options.whole(1),
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            help="Also tell how much memory so many requests take, parameters and workspace included, and with "
            "--device how long a step of theirs.",
            show_default=False,
            **options.whole(1),
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option(help="Entries that the buffered form holds before a fold.", **options.whole(1, 2**20))
    ] = 16,
    block_size: Annotated[int, typer.Option(help="Entries of a block of the ring.", **options.whole(1))] = 8,
    dtype: Annotated[
        options.DtypeName | None,
        typer.Option(help="Of parameters, keys and values: float32, bfloat16, float16; by default the checkpoint's."),
    ] = None,
    state_dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "split", "split8"],
        typer.Option(
            help="Of the recurrent states: float32, bfloat16, float16, split (4 bytes a number, of which a step reads "
            "2) or split8 (3, of which it reads 2). Where a state is written in every step, split ones are float32."
        ),
    ] = "float32",
    entry_dtype: Annotated[
        options.DtypeName | None, typer.Option(help="Of the ring's entries; by default as --dtype.")
    ] = None,
    workspace: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            show_default=False,
            help="Left for activations, programs and the allocator; by default a tenth of the memory.",
        ),
    ] = None,
    parameters: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            show_default=False,
            help="Of the weights, where they are not what the configuration says (quantised ones).",
        ),
    ] = None,
    keep: Annotated[
        float | None,
        typer.Option(
            help="Share of the keys behind the window that write gates keep in softmax layers; by default there are no "
            "gates.",
            show_default=False,
            **options.number(),
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            help="With --keep: latest tokens that are kept whatever their gates are; by default 256.",
            show_default=False,
            **options.whole(1),
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON: a list with a plan for each context; --requests is not in it.")
    ] = False,
) -> None:
    """Tell what a request costs in memory, and how many fit; no weights are loaded.

    A linear-attention layer holds a request in one of several forms.
    recurrent writes the request's state in every step.
    buffered reads the state and a ring of recent entries, and writes the state only when the ring has --limit entries.
    kv-only has entries and no state: the fewest bytes for requests shorter than the crossover, and only for those: its
    column is for that many tokens at most, whatever --context says.
    The recurrent form fits most requests, the buffered one moves the fewest bytes for long ones.
    snapshots is for comparison, what others do to verify drafts: a state for each draft position, and no ring.
    A model without such layers has one form, keys and values, which is called buffered.

    States, entries, the convolutions' inputs, keys and values are counted to the byte, as a cache has them.
    The workspace is an allowance, and a drafter's own memory is not counted. Reading many long prompts at once takes
    more than that, and so do drafts: of TPUs jaxbuf compile tells how much.
    The requests that fit are a server's: [bold]jaxbuf.generate[/bold] rounds requests and tokens up to powers of two.
    "moved" is what a request reads and writes in a step, or for a token that is kept, on average.
    Parameters are not in it: they are read at most once a step, for all requests together.

    [bold]Examples[/bold]

      jaxbuf plan

      jaxbuf plan Qwen3-Next-80B-A3B --memory 320GB --draft-tokens 4

      jaxbuf plan Llama-3.1-8B --context 32768 --keep 0.25

      jaxbuf plan Qwen3.5-27B --device v6e-4

      jaxbuf plan ./checkpoint --memory 24GB --context 4096 --json
    """
    if model is not None and named is not None and model != named:
        raise ValueError(f"--model must be left out or the same as MODEL ({model!r}), got {named!r}")
    if window is not None and keep is None:
        raise ValueError("window must come with --keep: without gates there is none")
    if memory is not None and device is not None:
        raise ValueError(f"memory must be left out with --device, which says what there is, got {memory}")
    near: dict[str, int] = {} if window is None else {"window": window}
    source = "demo" if model is None and named is None else named if model is None else model
    with busy("counting bytes"):
        from jaxbuf.planning.memory_plan import plan as make_plan

        try:
            plans = [
                make_plan(
                    source or "",
                    DEFAULT_MEMORY if memory is None and device is None else memory,
                    draft_tokens,
                    tokens,
                    device=device,
                    accepted=accepted,
                    limit=limit,
                    block_size=block_size,
                    dtype=dtype,
                    state_dtype=state_dtype,
                    entry_dtype=entry_dtype,
                    workspace_bytes=workspace,
                    parameter_bytes=parameters,
                    keep=keep,
                    **near,
                )
                for tokens in context or (1024, 8192)
            ]
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{'MODEL' if named is None else '--model'}: {error}") from error
    if json:
        typer.echo(json_module.dumps([found.to_dict() for found in plans], indent=2))
        return
    console = text_console()
    _print_model(console, plans[0])
    if plans[0].request_memory_bytes < 0:
        console.print("The parameters and the workspace do not fit.")
        if device is not None:
            more = _enough(
                lambda name: make_plan(source or "", device=name, dtype=dtype, parameter_bytes=parameters), device
            )
            console.print(f"They do on {more}." if more else "Nor do they on more chips.")
    for found in plans:
        _print_forms(console, found, requests)


def _enough(planned: "Callable[[str], Plan]", device: str | None) -> str | None:
    """The fewest chips, a power of two, of which the parameters leave room for requests; None: too many."""
    generation, _, chips = (device or "").partition("-")
    for count in (2**power for power in range(1, 9)):
        with contextlib.suppress(ValueError):  # the heads can't be spread over so many
            if count > int(chips or 1) and planned(f"{generation}-{count}").request_memory_bytes > 0:
                return f"{generation}-{count}"
    return None


def _print_model(console: Console, found: "Plan") -> None:
    room = max(0, found.request_memory_bytes)
    layers = f"{found.recurrent_layers} recurrent and {found.attention_layers} softmax layers"
    console.print(f"{found.model}: {layers}", markup=False)
    if found.device is not None:
        where = found.device
        chips = "1 chip" if where.chips == 1 else f"{where.chips} chips"
        devices = "" if where.devices == where.chips else f", {where.devices} devices"
        console.print(
            f"{chips} of a TPU {where.generation}{devices}; what follows is of one device, with "
            f"{size(where.bandwidth)} a second{'' if where.devices == 1 else ': the heads are spread over all'}",
            markup=False,
        )
    console.print(
        f"{size(found.memory_bytes)} of memory: {size(found.parameter_bytes)} parameters ({found.dtype}), "
        f"{size(found.workspace_bytes)} workspace, {size(room)} for requests"
    )
    if found.keep is not None:
        console.print(f"write gates: the latest {found.window} keys, and {found.keep:.0%} of those before")
    drafts = f", {found.draft_tokens} drafts, {found.accepted:g} tokens kept a step" if found.draft_tokens else ""
    states = found.state_dtype
    if states in ("split", "split8"):
        states += " (float32 in the recurrent form and in snapshots)"
    if not found.recurrent_layers:
        console.print(f"keys and values {found.dtype}{drafts}")
        return
    console.print(f"states {states}, entries {found.entry_dtype}, keys and values {found.dtype}{drafts}")
    console.print(
        f"fewest bytes: --limit {found.best_limit}; crossover: up to about {found.crossover} tokens KV-only is cheaper"
    )


def _print_forms(console: Console, found: "Plan", requests: int | None) -> None:
    table, recurrent = Table(), found.recurrent_layers > 0
    table.add_column("a request", no_wrap=True)
    for cost in found.forms:
        table.add_column(cost.form if recurrent else "any form", justify="right", no_wrap=True)

    def add(name: str, cell, **settings) -> None:
        table.add_row(name, *(cell(cost) for cost in found.forms), **settings)

    add("tokens", lambda cost: str(cost.context), end_section=not recurrent)
    if recurrent:
        add("limit, ring", _ring, end_section=True)
        add("states", lambda cost: size(cost.checkpoint_bytes))
        add("entries", lambda cost: size(cost.entry_bytes))
        add("convolution", lambda cost: size(cost.convolution_bytes))
    add("keys and values", lambda cost: size(cost.kv_bytes))
    add("all", lambda cost: size(cost.request_bytes), end_section=True)
    add("requests that fit", lambda cost: str(cost.requests), end_section=requests is None)
    if requests is not None:
        add(f"memory for {requests}", lambda cost: size(found.memory_for(cost.form, requests)), end_section=True)
    if recurrent:
        add("state moved a step", lambda cost: size(cost.state_step_bytes))
    add("moved a step", lambda cost: size(cost.step_bytes))
    add("moved a token", lambda cost: size(cost.token_bytes), end_section=found.device is not None)
    if found.device is not None:
        add("a step of all, estimate", lambda cost: f"{1e3 * (cost.step_seconds or 0.0):.3g} ms")
    if found.device is not None and requests is not None:
        add(
            f"a step of {requests}, estimate",
            lambda cost: f"{1e3 * found.step_seconds_for(cost.form, requests):.3g} ms",
        )
    console.print()
    print_table(table, console)
    if found.draft_tokens and found.recurrent_layers:
        console.print(
            f"A state for each draft takes {found.recurrent_ratio:.2f} times the recurrent memory of the buffered form"
            f"\n(ring of {found['buffered'].ring} entries), and {found.request_ratio:.2f} times all of it at "
            f"{found.context} tokens."
        )


def _ring(cost: "FormCost") -> str:
    return "-" if cost.limit is None else f"{cost.limit}, {cost.ring}"


def size(number: float) -> str:
    """Three or four digits of a number of bytes, in decimal units as memories are sold."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= factor:
            return f"{number / factor:.{2 if number < 10 * factor else 1}f} {unit}"
    return f"{number:.0f} B"

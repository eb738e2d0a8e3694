"""`jaxbuf models`."""

import json as json_module
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxbuf.cli.errors import busy
from jaxbuf.cli.plan import size
from jaxbuf.terminal import print_table, text_console

if TYPE_CHECKING:
    from jaxbuf.models.checked import Check
    from jaxbuf.planning.model_sizes import ModelSizes

NOT_CHECKED = "-"
LEGEND = f"passed checks of each kind; {NOT_CHECKED}: not checked; 3 of 4: the others failed when they last ran"


def models(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            show_default=False,
            help="A family such as qwen3_5, a known model such as Qwen3.5-4B, [bold]demo[/bold], or a checkpoint's "
            "directory or Hugging Face id; without it all families are listed.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with every test that was noted.")] = False,
) -> None:
    """Tell which models are served, what was checked of each family, and how large the known models are.

    A family is served if its config.json and its tensors are read. What was checked of it is what the tests noted: each
    number counts tests that passed, and the dates say when they last ran.
    parity compares logits and greedy tokens with transformers, forms the recurrent, buffered and KV-only memory.
    drafters, trees, samples and beams have random models of the family generate in each way, mesh on simulated devices.
    gpu counts what ran on NVIDIA Hopper GPUs with whole models of the family: kernels by themselves are not in it.

    A known model needs no download: [bold]jaxbuf plan NAME[/bold] tells what serving it takes, and
    [bold]jaxbuf bench step --model NAME[/bold] times it with random weights.

    [bold]Examples[/bold]

      jaxbuf models

      jaxbuf models qwen3_next

      jaxbuf models Qwen3-Next-80B-A3B --json
    """
    with busy("looking at models"):
        from jaxbuf.models.checked import read_checks
        from jaxbuf.models.families import families

        checks = read_checks()
        if name is None:
            found: Any = [_family(family, checks) for family in families()]
            show = _print_families
        elif name in families():
            found, show = _family(name, checks) | {"checks": _listed(checks, name)}, _print_family
        else:
            found, show = _model(name, checks), _print_model
    if json:
        typer.echo(json_module.dumps(found, indent=2))
    else:
        show(text_console(), found)


def _family(name: str, checks: "Iterable[Check]") -> dict[str, Any]:
    from jaxbuf.models.families import families
    from jaxbuf.models.known_models import known_models

    served = {known: model.config.family for known, model in known_models().items()}
    return {
        "family": name,
        "model_types": list(families()[name].MODEL_TYPES),
        "serves": families()[name].SERVED,
        "checked": _summary([check for check in checks if check.family == name]),
        "known_models": [known for known, family in served.items() if family == name],
    }


def _summary(checks: "Sequence[Check]") -> dict[str, dict[str, Any] | None]:
    """Of each kind how many passed and failed, and when; None: not checked."""
    from jaxbuf.models.checked import KINDS

    found: dict[str, dict[str, Any] | None] = dict.fromkeys(KINDS)
    for kind in KINDS:
        own = [check for check in checks if check.kind == kind]
        if own:
            dates = sorted(check.date for check in own)
            passed = sum(check.passed for check in own)
            found[kind] = {"passed": passed, "failed": len(own) - passed, "oldest": dates[0], "newest": dates[-1]}
    return found


def _listed(checks: "Iterable[Check]", family: str) -> list[dict[str, Any]]:
    """Every test of a family that was noted."""
    names = ("kind", "test", "date", "passed", "on")
    return [{name: getattr(check, name) for name in names} for check in checks if check.family == family]


def _model(name: str, checks: "Iterable[Check]") -> dict[str, Any]:
    """The sizes of a model, and of its family what was checked."""
    from jaxbuf.models.families import families
    from jaxbuf.models.known_models import find_known
    from jaxbuf.planning.model_sizes import find_sizes

    try:
        sizes = find_sizes(name)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"NAME: {error}; or a family: {', '.join(families())}") from error
    known = None if os.path.isdir(name) else find_known(name)
    found = _sizes(sizes) | {"published": known and known.published, "counted": known and known.counted}
    family = _family(sizes.config.family, checks)
    return found | {"family": family["family"], "serves": family["serves"], "checked": family["checked"]}


def _sizes(sizes: "ModelSizes") -> dict[str, Any]:
    spec, config = sizes.spec, sizes.config
    return {
        "model": sizes.name,
        "layers": len(config.layers),
        "recurrent_layers": sizes.recurrent_layers,
        "attention_layers": sizes.attention_layers,
        "state": None if spec is None else [spec.heads, spec.value_dim, spec.key_dim],
        "state_bytes": sizes.state_bytes,
        "dtype": sizes.dtype,
        "kv_bytes_per_token": sizes.kv_bytes(sizes.dtype),
        "parameters": sizes.count_parameters(),
        "parameter_bytes": sizes.parameter_bytes(sizes.dtype),
    }


def _print_families(console: Console, found: list[dict[str, Any]]) -> None:
    from jaxbuf.models.known_models import known_models

    kinds = list(found[0]["checked"])
    table = Table(caption=LEGEND)
    table.add_column("family", no_wrap=True)
    for kind in kinds:
        table.add_column(kind, justify="right", no_wrap=True)
    for family in found:
        table.add_row(escape(family["family"]), *(_cell(family["checked"][kind]) for kind in kinds))
    print_table(table, console)
    console.print()
    table = Table()
    for heading, whole in (("family", True), ("serves", False), ("model_type", False), ("checked", True)):
        table.add_column(heading, no_wrap=whole)
    for family in found:
        done = [kind for kind in family["checked"].values() if kind]
        dates = [min(kind["oldest"] for kind in done), max(kind["newest"] for kind in done)] if done else []
        told = " to ".join(dict.fromkeys(dates)) or "not checked"
        table.add_row(*map(escape, (family["family"], family["serves"], ", ".join(family["model_types"]), told)))
    print_table(table, console)
    console.print()
    console.print(f"Models known by name: {', '.join(known_models())}.")
    console.print("jaxbuf models NAME tells more of a family or of a model.")


def _cell(kind: dict[str, Any] | None) -> str:
    if kind is None:
        return NOT_CHECKED
    passed, failed = kind["passed"], kind["failed"]
    return f"[red]{passed} of {passed + failed}[/red]" if failed else str(passed)


def _print_family(console: Console, found: dict[str, Any]) -> None:
    types = ", ".join(found["model_types"])
    console.print(f"{found['family']}: {found['serves']} (model_type {types})", markup=False)
    _print_checks(console, found["checked"])
    tests: dict[str, list[bool]] = {}
    for check in found["checks"]:
        tests.setdefault(check["test"].partition("[")[0], []).append(check["passed"])
    if tests:
        table = Table()
        table.add_column("test", no_wrap=True)
        table.add_column("passed", justify="right", no_wrap=True)
        for test, passed in tests.items():
            table.add_row(escape(test), _cell({"passed": sum(passed), "failed": len(passed) - sum(passed)}))
        console.print()
        print_table(table, console)
    if found["known_models"]:
        from jaxbuf.planning.model_sizes import find_sizes

        console.print()
        print_table(_table_of_sizes([_sizes(find_sizes(known)) for known in found["known_models"]]), console)


def _table_of_sizes(models: Iterable[dict[str, Any]]) -> Table:
    table = Table(caption="states: of a request, in float32; keys and values: of a token")
    table.add_column("model", no_wrap=True)
    for heading in ("recurrent, softmax", "states", "keys and values", "parameters"):
        table.add_column(heading, justify="right", no_wrap=True)
    for model in models:
        layers = f"{model['recurrent_layers']}, {model['attention_layers']}"
        sizes = size(model["state_bytes"]), size(model["kv_bytes_per_token"]), _billions(model["parameters"])
        table.add_row(escape(model["model"]), layers, *sizes)
    return table


def _billions(number: int) -> str:
    return f"{number / 1e9:.3g} B" if number >= 1e8 else f"{number / 1e6:.3g} M"


def _print_model(console: Console, found: dict[str, Any]) -> None:
    def say(text: str) -> None:
        console.print(text, markup=False)

    say(f"{found['model']}: family {found['family']}, {found['serves']}")
    mixers = f"{found['recurrent_layers']} recurrent and {found['attention_layers']} softmax ones"
    say(f"{found['layers']} layers, of which {mixers}")
    if found["state"]:
        heads, values, keys = found["state"]
        say(
            f"states of a request: {size(found['state_bytes'])} in float32, {heads} heads of {values} by {keys} a layer"
        )
    say(f"keys and values of a token: {size(found['kv_bytes_per_token'])} in {found['dtype']}")
    held = f"{size(found['parameter_bytes'])} in {found['dtype']}"
    say(f"parameters: {found['parameters']:,}, {held}")
    if found["published"] is not None:
        say(f"published: {found['published']:,} ({found['counted']})")
    console.print()
    say(f"What was checked of {found['family']}:")
    _print_checks(console, found["checked"])


def _print_checks(console: Console, checked: dict[str, dict[str, Any] | None]) -> None:
    from jaxbuf.models.checked import KINDS

    table = Table()
    table.add_column("check", no_wrap=True)
    table.add_column("passed", justify="right", no_wrap=True)
    table.add_column("last ran", no_wrap=True)
    table.add_column("of what")
    for kind, done in checked.items():
        dates = " to ".join(dict.fromkeys((done["oldest"], done["newest"]))) if done else "not checked"
        table.add_row(kind, _cell(done), dates, KINDS[kind])
    print_table(table, console)

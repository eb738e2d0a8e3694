"""What was checked of each family, and when: checked.json, which the tests write and nobody edits.

A test that is marked `checks` (tests/recording.py) is noted there under its family and the kind of the check, with the
date and the versions, by `scripts/test --record` and, for GPUs, by `scripts/check_gpu --record`. `jaxbuf models` shows
it.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path

# Every kind of check, and what one of it compares.
KINDS = {
    "parity": "logits, stepwise decoding and greedy tokens are those of transformers, saved bits those that were read",
    "forms": "the forms and limits of the memory change no token, and no score depends on what is kept",
    "drafters": "drafts, right and wrong, change no greedy token and no distribution",
    "trees": "trees of drafts change no greedy token and no distribution",
    "samples": "samples of a prompt, whose rows fork its memory, are the requests with the seeds that follow",
    "beams": "beams are those of a search over the plain forward",
    "mesh": "on several simulated devices the tokens, scores, shares and saved bits are those of one",
    "gpu": "on NVIDIA Hopper GPUs, with kernels, the tokens are those without, and no program copies a pool",
    "tpu": "on TPUs",
}


@dataclasses.dataclass(frozen=True)
class Check:
    """A test of a family that ran.

    Attributes:
      family: The module of `jaxbuf.models.families`.
      kind: One of KINDS.
      test: Its id for pytest.
      date: When it last ran, as 2026-11-25.
      passed: Whether it held then.
      on: What it ran with: versions of jax, and of transformers where it compares with that; and the device, if that is
        no CPU.
    """

    family: str
    kind: str
    test: str
    date: str
    passed: bool
    on: Mapping[str, str]

    @property
    def function(self) -> str:
        """The test without its parameters."""
        return self.test.partition("[")[0]


def path() -> Path:
    """Where the file is."""
    return Path(str(resources.files("jaxbuf.models") / "checked.json"))


def read_checks(file: Path | None = None) -> list[Check]:
    """All checks that were noted, by family, kind and test.

    Args:
      file: Where they are; None: the package's.
    """
    file = path() if file is None else file
    noted = json.loads(file.read_text()) if file.exists() else {}
    return [
        Check(family, kind, test, entry["date"], entry["passed"], entry["on"])
        for family, kinds in noted.items()
        for kind, tests in kinds.items()
        for test, entry in tests.items()
    ]


def note_checks(
    ran: Iterable[Check], exist: Iterable[tuple[str, str, str]] | None = None, file: Path | None = None
) -> list[Check]:
    """Writes down checks that ran, in place of what was noted of the same tests, and returns all.

    Args:
      ran: Those that passed and those that failed.
      exist: Family, kind and test of all that there are, of which others are taken out; None: all stay.
      file: As in `read_checks`.
    """
    file = path() if file is None else file
    found = {(check.family, check.kind, check.test): check for check in (*read_checks(file), *ran)}
    kept = found.keys() if exist is None else found.keys() & set(exist)
    order = {kind: place for place, kind in enumerate(KINDS)}
    checks = [found[key] for key in sorted(kept, key=lambda key: (key[0], order[key[1]], key[2]))]
    noted: dict[str, dict[str, dict[str, str]]] = {}
    for check in checks:
        entry = json.dumps({"date": check.date, "passed": check.passed, "on": dict(check.on)})
        noted.setdefault(check.family, {}).setdefault(check.kind, {})[check.test] = entry
    file.write_text(_lines(noted) + "\n")
    return checks


def _lines(noted: Mapping | str, depth: int = 1) -> str:
    """JSON with a line for each test, whose entry is JSON already."""
    if isinstance(noted, str):
        return noted
    inside = [f"{' ' * depth}{json.dumps(name)}: {_lines(value, depth + 1)}" for name, value in noted.items()]
    return "{\n" + ",\n".join(inside) + f"\n{' ' * (depth - 1)}}}"

"""What scripts/check_portability says to those who ask for something that is not there."""

import os
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def main(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setenv("JAX_PLATFORMS", os.environ.get("JAX_PLATFORMS", "cpu"))
    return runpy.run_path(str(ROOT / "scripts" / "check_portability"))["main"]


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--generation", "v9"), "--generation must be one of Hopper, v4, "),
        (("--cycles", "--generation", "Hopper"), "--generation must be one of v4, "),
        (("--operation", "put"), "--operation must be one of extend, "),
    ],
)
def test_what_is_not_there_is_said_in_a_line(main, capfd, arguments, message):
    assert main(list(arguments)) == 2
    out, error = capfd.readouterr()
    assert out == "" and error.splitlines()[-1].removeprefix("scripts/check_portability: ").startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cycles", "--write"], "--cycles must be given without"),
        (["--write", "--generation", "v4"], "--write must be given without"),
    ],
)
def test_options_that_exclude_each_other(main, capfd, arguments, message):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capfd.readouterr().err

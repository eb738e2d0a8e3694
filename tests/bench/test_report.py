import argparse
import json
from pathlib import Path

import jax
import pytest

from jaxbuf.bench import report


def test_the_provenance_names_no_folder_of_the_machine():
    root = Path("/some/where/repository")
    words = ["--rows", "16", "--json", "/elsewhere/out/q.json", f"--data={root}/data/demo", "--output=/mnt/x", "a/b"]
    found = report.provenance("scripts/eval_demo", words, root)
    assert found["command"] == "scripts/eval_demo --rows 16 --json q.json --data=data/demo --output=x a/b"
    several = report.provenance("scripts/x", [f"gates:0.1={root}/runs/a.st,/elsewhere/b.st", "0.1,0.5"], root)
    assert several["command"] == "scripts/x gates:0.1=runs/a.st,b.st 0.1,0.5"
    assert found["versions"]["jax"] == jax.__version__ and found["device"] == jax.devices()[0].device_kind
    assert json.loads(json.dumps(found)) == found


def test_numbers_on_a_command_line_are_whole_and_at_least_1(capsys):
    parser = argparse.ArgumentParser(prog="bench")
    assert report.whole_numbers(parser, "--batches", "32,1") == [32, 1]
    for words in ("x", "1,,2", "0", "-1", ""):
        with pytest.raises(SystemExit):
            report.whole_numbers(parser, "--batches", words)
        said = "must be whole numbers of at least 1, separated by commas"
        assert f"bench: error: --batches {said}, got {words!r}" in capsys.readouterr().err

"""`jaxbuf export`: a directory that `jaxbuf.load_exported` takes, or a line that says why not."""

import json

import pytest
from typer.testing import CliRunner

from jaxbuf.cli import app

SMALL = ("--rows", "1", "--prompt-tokens", "8", "--max-new-tokens", "8")


def invoke(*arguments):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


@pytest.mark.slow
def test_a_known_model_is_exported_for_a_chip_that_is_not_there(tmp_path):
    done = invoke(tmp_path / "llama", "--model", "demo", "--target", "v6e", "--without-parameters", *SMALL)
    assert done.exit_code == 0, done.stderr
    assert f"wrote {tmp_path / 'llama'}: demo for a TPU v6e" in done.stdout
    manifest = json.loads((tmp_path / "llama" / "exported.json").read_text())
    assert manifest["target"] == {"platform": "tpu", "generation": "v6e"}
    assert manifest["settings"]["rows"] == 1 and manifest["settings"]["prompt_tokens"] == 64


@pytest.mark.parametrize(
    ("target", "dtype"), [pytest.param("v6e", "bfloat16", marks=pytest.mark.slow), ("cpu", "float32")]
)
def test_parameters_are_as_the_target_has_them_not_this_machine(tmp_path, target, dtype):
    done = invoke(tmp_path / "demo", "--target", target, *SMALL)
    assert done.exit_code == 0, done.stderr
    manifest = json.loads((tmp_path / "demo" / "exported.json").read_text())
    assert {each["dtype"] for each in manifest["parameters"] if len(each["shape"]) == 2} == {dtype}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--target", "v3"), "--target must be one of CPU, A100, "),
        (("--target", "v6e-4"), "got 'v6e-4'"),
        (("--model", "Qwen3.5-4B"), "'Qwen3.5-4B' is known by its shape, of which --without-parameters writes the "),
        (("--rows", "0"), "--rows must be a whole number of at least 1, got '0'"),
        (("--without-parameters", "--model", "no-such-model"), "no model 'no-such-model'"),
    ],
)
def test_what_can_not_be_exported_is_a_line(tmp_path, options, message):
    done = invoke(tmp_path / "new", *options)
    assert done.exit_code != 0 and message in done.stderr.replace("\n", " ")
    assert not (tmp_path / "new").exists()

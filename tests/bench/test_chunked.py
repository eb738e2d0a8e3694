"""`jaxbuf bench chunked`: its bytes, what it refuses, and that it measures; the figures themselves need a GPU."""

import json

import pytest

from jaxbuf.bench import chunked
from jaxbuf.recurrence import RecurrenceSpec

SMALL = "--heads 2 --key-heads 1 --dim 8 --value-dim 8 --prompts 1x16,2x8".split()


def test_what_moves_is_inputs_outputs_and_states():
    spec = RecurrenceSpec(heads=4, key_heads=2, key_dim=16, value_dim=8)
    tokens = 2 * 2 * 2 * 16 + 2 * 2 * 4 * 8 + 2 * 4 * 4  # q and k, v and out, both gates; bytes of each
    assert chunked.moved_bytes(spec, 3, 10) == 3 * (10 * tokens + 4 * 4 * 8 * 16)


@pytest.mark.slow
def test_every_size_is_measured_and_kept_with_a_plot(tmp_path, capsys):
    path = tmp_path / "chunked.json"
    assert chunked.main([*SMALL, "--family", "mamba2", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    found = [(row["implementation"], row["rows"], row["tokens"]) for row in record["figures"]]
    assert found == [("xla", 1, 16), ("xla", 2, 8)]
    assert all(row["us"] > 0 and row["floor_us"] > 0 for row in record["figures"])
    assert record["spec"]["delta"] is False and path.with_suffix(".png").stat().st_size > 0
    assert "2 x 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        ("--prompts 3", "--prompts must be NUMBERxTOKENS"),
        ("--implementations gpu", "--implementations must be of those that run here, xla, got 'gpu'"),
        ("--peers --family kda", "--peers must come with --family gdn"),
    ],
)
def test_what_cannot_be_measured_is_an_error(words, message, capsys):
    with pytest.raises(SystemExit):
        chunked.main(words.split())
    assert message in " ".join(capsys.readouterr().err.split())

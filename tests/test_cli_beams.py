"""`jaxbuf generate` with `--beams` and with `--samples`."""

import pytest
from typer.testing import CliRunner

from jaxbuf.cli import app
from jaxbuf.serving import Beam, Event, GenerationResult
from jaxbuf.serving.stats import Stats


def test_the_command_line_prints_the_beams_best_first(monkeypatch):
    asked = {}

    def answer(model, prompts, **settings):
        asked.update(settings, prompts=prompts)
        found = [Beam("one", [1], -1.0, -1.0, "stop"), Beam("two\n", [2, 3], -3.25, -9.875e-7, "length")]
        return [found[: settings["beams"]]]

    monkeypatch.setattr("jaxbuf.beam_search", answer)
    command = ["generate", "A", "--beams", "2", "--length-penalty", "0.5", "--max-new-tokens", "7", "--ignore-eos"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.stderr
    expected = {"prompts": ["A"], "beams": 2, "length_penalty": 0.5, "max_new_tokens": 7, "ignore_eos": True}
    assert asked == expected | {"limit": 16, "form": "auto", "state_dtype": None}
    first = "beam 1 of 2 (stop), log-probability -1.000, ranked by -1:\none\n"
    assert done.stdout == first + "beam 2 of 2 (length), log-probability -3.250, ranked by -9.875e-07:\ntwo\n\n"
    assert "beam 1" not in done.stderr
    done = CliRunner().invoke(app, ["generate", "A", "--beams", "1"])
    assert done.stdout == "one\n" and "beam 1 of 1 (stop), log-probability -1.000, ranked by -1:\n" in done.stderr
    text = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).stdout
    assert all(option in text for option in ("--samples", "--beams", "--length-penalty", "--beams 4"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--beams", "0"], "--beams must be a whole number in [1, 256], got 0"),
        (["--beams", "257"], "--beams must be a whole number in [1, 256], got 257"),
        (["--beams", "2", "--length-penalty", "7"], "--length-penalty must be a number in [-5, 5], got 7.0"),
        (["--beams", "2", "--samples", "2"], "--beams does not take --samples"),
        (["--beams", "2", "--drafter", "mtp", "--top-p", "0.5"], "--beams does not take --drafter, --top-p"),
        (["--beams", "2", "--draft-tokens", "3"], "--beams does not take --draft-tokens"),
        (["--beams", "2", "--profile", "traces", "--stop", "x"], "--beams does not take --profile, --stop"),
        (["--length-penalty", "2"], "--length-penalty must come with --beams: it ranks them"),
    ],
)
def test_the_command_line_says_what_does_not_go_with_beams(options, message):
    done = CliRunner().invoke(app, ["generate", "A", "--model", "no-such-model", *options])
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and line.endswith(message)


def test_samples_have_headings_and_count_their_steps_once(monkeypatch):
    def answer(model, prompts, *, sampling, **settings):
        for i, (text, reason, steps) in enumerate([("one\n", "stop", 3), ("two", "length", 7)][: sampling.n]):
            stats = Stats(4, steps + 1, steps, 1, 3, 9, 0, 0, "buffered", 100, 400)
            yield Event(0, text, [1], GenerationResult(text, [1], reason, stats), done=True, sample=i)

    monkeypatch.setattr("jaxbuf.generate", answer)
    done = CliRunner().invoke(app, ["generate", "A", "--samples", "2", "--temperature", "1"])
    assert done.exit_code == 0, done.stderr
    assert done.stdout == "sample 1 of 2 (stop):\none\n\nsample 2 of 2 (length):\ntwo\n"
    assert "4 tokens read, 12 tokens in " in done.stderr and "state: 7 steps of 2 samples, 2 folds" in done.stderr


def test_several_prompts_have_headings_and_what_was_read_of_each(monkeypatch):
    def answer(model, prompts, *, sampling, **settings):
        assert prompts == ["A", "B"]
        for index in (1, 0):
            for sample in range(sampling.n):
                stats = Stats(3 + index, 2, 1, 0, 0, 0, 0, 0, "buffered", 1, 0, 5, ((2, 1),), ((0, 1),))
                result = GenerationResult(f"{index}{sample}", [7, index], "length", stats)
                yield Event(index, "", [1], result, done=True, sample=sample)

    monkeypatch.setattr("jaxbuf.generate", answer)
    done = CliRunner().invoke(app, ["generate", "A", "B"])
    assert (done.exit_code, done.stdout) == (0, "prompt 1 of 2 (length):\n00\nprompt 2 of 2 (length):\n10\n")
    assert "7 tokens read, 4 tokens in " in done.stderr and "state: 1 steps of 2 texts" in done.stderr
    assert "gates: 10 tokens left the window, of whose keys 30% are kept (20% to 40% a head); 2 left" in done.stderr
    done = CliRunner().invoke(app, ["generate", "A", "B", "--samples", "2", "--temperature", "1"])
    assert done.stdout.splitlines()[:3] == [
        "prompt 1 of 2, sample 1 of 2 (length):",
        "00",
        "prompt 1 of 2, sample 2 of 2 (length):",
    ]
    assert "7 tokens read, 8 tokens in " in done.stderr and "1 steps of 4 texts" in done.stderr


def test_several_prompts_are_searched_at_once(monkeypatch):
    def answer(model, prompts, **settings):
        return [[Beam(f"of {prompt}", [1], -1.0, -1.0, "stop")] for prompt in prompts]

    monkeypatch.setattr("jaxbuf.beam_search", answer)
    done = CliRunner().invoke(app, ["generate", "A", "B", "--beams", "1"])
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[::2] == [
        f"prompt {i} of 2, beam 1 of 1 (stop), log-probability -1.000, ranked by -1:" for i in (1, 2)
    ]


def test_standard_input_is_one_prompt():
    done = CliRunner().invoke(app, ["generate", "A", "-"], input="text")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "error: PROMPT must be - alone, or texts: standard input is one, got 2 prompts" in done.stderr

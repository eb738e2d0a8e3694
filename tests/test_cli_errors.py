"""Whatever is typed, an error is one line that names the option, and the exit code is 2: no traceback."""

import functools
import os
import random
import subprocess
import sys
import types
from importlib import resources

import pytest
import typer
from typer.testing import CliRunner

import jaxbuf
from jaxbuf import terminal
from jaxbuf.bench import PROGRAMS, drift
from jaxbuf.cli import app, errors

COMMAND = [sys.executable, "-m", "jaxbuf.cli"]
# Each ends before a model is loaded: there is none.
COMMANDS = {
    "generate": ("generate", "text", "--model", "no-such-model"),
    "chat": ("chat", "--model", "no-such-model"),
    "score": ("score", __file__, "--model", "no-such-model"),
    "plan": ("plan", "no-such-model"),
    "models": ("models", "no-such-model"),
    "profile": ("profile", "no-such-directory"),
}
BAD = (
    "0",
    "-1",
    "1.5",
    "99999999999",
    "9" * 5000,
    "1e400",
    "1e400GB",
    "nan",
    "inf",
    "",
    "x",
    "\udce9",
    "[red]",
    "a\0b",
)
OPTIONS = [
    (name, max(parameter.opts, key=len))
    for name, command in typer.main.get_command(app).commands.items()
    if name in COMMANDS
    for parameter in command.params
    if parameter.param_type_name == "option" and not getattr(parameter, "is_flag", False)
]
WHOLE = (
    "--max-new-tokens --limit --samples --beams --top-k --seed --min-tokens --stop-token-id --draft-tokens --branches"
)
NUMBERS = "--length-penalty --temperature --top-p --min-p --repetition-penalty --presence-penalty --frequency-penalty"


@pytest.fixture(scope="module", autouse=True)
def one_tree():
    """The commands are made once: that takes longer than most of what is tested here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", functools.cache(typer.main.get_command))
        yield


def invoke(*words: str, **settings):
    return CliRunner().invoke(app, list(words), **{"input": b""} | settings)


def error_of(done) -> str:
    """The error: the only line, or on starting a model the last."""
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    *before, last = done.stderr.splitlines()
    assert last.startswith("error: ") and all(line.startswith("device: ") for line in before), done.stderr
    return last.removeprefix("error: ")


@pytest.mark.parametrize(("command", "option"), OPTIONS)
def test_no_value_of_an_option_is_a_traceback(command, option):
    for value in BAD:
        error = error_of(invoke(*COMMANDS[command], option, value))
        # A value that an option takes lets the command go on to the model, which is not there.
        assert error.startswith((option, "--model: no model", "MODEL: no model")) or option == "--model", error
        assert "UnicodeEncodeError" not in error and "codec can't encode" not in error


def test_random_command_lines_are_no_tracebacks(rng):
    draw = random.Random(int(rng.integers(2**32)))
    for _ in range(25):
        command = draw.choice([*COMMANDS])
        own = [option for name, option in OPTIONS if name == command and option not in ("--model", "--profile")]
        words = [word for option in draw.sample(own, min(3, len(own))) for word in (option, draw.choice(BAD))]
        error_of(invoke(*COMMANDS[command], *words))


@pytest.mark.parametrize("option", f"{WHOLE} {NUMBERS}".split())
def test_what_is_no_number_is_said_of_the_option_before_anything_starts(option):
    kind = "a whole number" if option in WHOLE.split() else "a finite number"
    for value in ("x", "9" * 5000):
        error = error_of(invoke(*COMMANDS["generate"], option, value))
        assert error.startswith(f"{option} must be {kind}"), error
        assert len(error) < 150


@pytest.mark.parametrize("option", ["--max-new-tokens", "--limit"])
def test_more_than_an_int32_is_an_error_that_says_so(option):
    error = error_of(invoke(*COMMANDS["generate"], option, "99999999999"))
    assert error == f"{option} must be a whole number of at most 2147483647, got '99999999999'"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("plan", "--memory", "1e400GB"), "--memory must be a size of at most"),
        (("plan", "--memory", "nan"), "--memory must be a size such as 80GB"),
        (("plan", "--limit", "99999999999"), "--limit must be a whole number"),
        (("plan", "--limit", "2000000000"), "--limit must be a whole number from 1 to 1048576"),
        (("plan", "--model", "demo", "Qwen3.5-4B"), "--model must be left out or the same as MODEL ('Qwen3.5-4B')"),
        (("models", "Qwen3.5-4"), "NAME: no model 'Qwen3.5-4': expected"),
        (("models", "caf\udce9"), r"NAME: no model 'caf\udce9': expected"),
        (("models", ""), "a model must be "),
        (("generate", "caf\udce9"), r"PROMPT must be UTF-8 text, got 'caf\udce9'"),
        (("generate", "x", "--stop", "\udce9"), "--stop must be UTF-8 text"),
        (("chat", "--model", "demo", "--system", "\udce9"), "--system must be UTF-8 text"),
        (("generate", "x", "--logit-bias", "5=1e39"), "--logit-bias must be ID=BIAS, a token id and a number:"),
        (("generate", "-"), "standard input is empty"),
        (("generate", "x", "--profile", f"{__file__}/x"), "--profile must be a directory to write to"),
        (("--log-level", "loud", "plan"), "--log-level must be debug, info, warning or error, got 'loud'"),
        (("--compilation-cache", __file__, "plan"), "--compilation-cache must be a directory to write to"),
        (("generate", "x", "--nope"), "No such option: --nope"),
        (("generate",), "Missing argument 'PROMPT...'"),
        (("translate",), "No such command 'translate'"),
        (("score", "\udce9"), r"FILE \udce9 cannot be read: No such file"),
    ],
)
def test_an_error_names_what_was_typed(words, message):
    error = error_of(invoke(*words))
    assert error.startswith(message), error


def test_a_library_error_is_told_in_the_words_of_the_options():
    parameters = typer.main.get_command(app).commands["generate"].params
    message = "prompts[0] (3 tokens) and max_new_tokens (9) together must be at most max_position_embeddings (8)"
    expected = "PROMPT (3 tokens) and --max-new-tokens (9) together must be at most max_position_embeddings (8)"
    assert errors.as_typed(message, parameters) == expected
    assert errors.as_typed(message.replace("[0]", "[1]"), parameters) == expected.replace("PROMPT", "PROMPT 2")
    assert errors.as_typed("limit must be 1, got 0", parameters) == "--limit must be 1, got 0"
    assert errors.as_typed("the limit of draft_tokens/x", parameters) == "the limit of draft_tokens/x"
    assert errors.as_typed("n must be 1", parameters) == "--samples must be 1"


def test_memory_that_runs_out_and_a_platform_that_is_not_there_are_lines(monkeypatch):
    for raised, line in (
        (MemoryError("Unable to allocate 9 TiB"), "out of memory: Unable to allocate 9 TiB"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "out of memory: RESOURCE_EXHAUSTED: Out of memory"),
        (RuntimeError("Unable to initialize backend 'x'"), "Unable to initialize backend 'x'"),
        (jaxbuf.CheckpointError("a\nb"), "a b"),
    ):

        def plan(*_, raised=raised, **__):
            raise raised

        monkeypatch.setattr("jaxbuf.planning.memory_plan.plan", plan)
        assert error_of(invoke("plan")) == line
    monkeypatch.setattr("jaxbuf.planning.memory_plan.plan", lambda *_, **__: {}["a fault of the program"])
    assert isinstance(invoke("plan").exception, KeyError), "is not hidden"


def test_input_that_is_not_utf_8_is_an_error(tmp_path):
    assert error_of(invoke("generate", "-", input=b"na\xefve")).startswith("standard input is not UTF-8 text")
    assert error_of(invoke("score", "-", input=b"na\xefve")).startswith("standard input is not UTF-8 text")
    name = tmp_path / "\udce9.txt"
    name.write_bytes(b"\xff")
    assert error_of(invoke("score", str(name))).startswith(f"FILE {tmp_path}/\\udce9.txt is not UTF-8 text")


def test_a_line_of_a_conversation_that_is_not_utf_8_is_left_out():
    said = []
    conversation = types.SimpleNamespace(answer=lambda err, text: said.append(text))
    talk = typer.Typer()
    talk.command()(lambda: sys.modules["jaxbuf.cli.chat"]._converse(errors.error_console(), conversation))
    done = CliRunner().invoke(talk, [], input=b"one\nna\xefve\ntwo\n")
    assert done.exit_code == 0 and said == ["one", "two"], done.output
    assert done.stderr.startswith("error: this line is not UTF-8 text, and is left out")


def test_a_file_that_is_no_profile_is_an_error(tmp_path):
    run = tmp_path / "plugins" / "profile" / "run"
    run.mkdir(parents=True)
    for content in (b"junk\n", b"", b"\xff" * 100):
        (run / "a.xplane.pb").write_bytes(content)
        assert str(tmp_path) in error_of(invoke("profile", str(tmp_path)))


@pytest.mark.parametrize("width", ["0", "1", "x", "-1", "40"])
def test_no_width_of_a_terminal_hides_anything(width):
    environment = {"COLUMNS": width, "TERMINAL_WIDTH": width}
    table = invoke("plan", "Qwen3.5-4B", "--context", "9", env=environment)
    assert table.exit_code == 0 and "requests that fit" in table.stdout and "Qwen3.5-4B: 24 recurrent" in table.stdout
    listed = invoke("bench", env=environment)
    recorded = [program.figures for program in PROGRAMS if program.figures]
    assert listed.exit_code == 0 and all(f"benchmarks/{name}" in listed.stdout for name in recorded)
    shown = invoke("generate", "--help", env=environment)
    assert shown.exit_code == 0 and "jaxbuf" in shown.stdout


def test_file_names_are_not_wrapped(tmp_path, monkeypatch):
    from jaxbuf.models.scoring import TextScore

    files = [tmp_path / ("a long [bold] name " * 8).strip(), tmp_path / "b"]
    for file in files:
        file.write_text("text")
    monkeypatch.setattr(
        sys.modules["jaxbuf.cli.score"], "load_model", lambda *_: types.SimpleNamespace(tokenizer=object())
    )
    monkeypatch.setattr("jaxbuf.models.scoring.score_text", lambda *_, **__: TextScore(3, 4, -5.0))
    done = invoke("score", *map(str, files), env={"COLUMNS": "40"})
    assert done.exit_code == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("│")]
    assert [row.split("│")[1].strip() for row in rows] == [*map(str, files), "total"]
    assert error_of(invoke("score", f"{files[0]}/none", env={"COLUMNS": "40"})).startswith(f"FILE {files[0]}/none ")


def test_a_json_file_that_cannot_be_written_is_an_error_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(drift, "inputs", None)
    (tmp_path / "file").write_text("")
    for program in PROGRAMS:
        for path in (tmp_path, tmp_path / "file" / "a.json", tmp_path / ("a" * 300), tmp_path / "a.png", "a\0b"):
            done = invoke("bench", program.name, "--json", str(path))
            assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1, done.stderr
            assert done.stderr.startswith(f"jaxbuf bench {program.name}: error: --json must "), done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"], "nothing is made on the way"


NUMBERS_OF_BENCHMARKS = [
    ("drift", "--steps --limit --heads --key-heads --dim --seed"),
    ("likelihood", "--rows --tokens --limit"),
    ("load", "--layers --hidden --vocab --shard-mb"),
    ("kernels", "--batches --budget --layers --heads --key-heads --dim"),
    ("drafts", "--draft-tokens --tokens --prompts --prompt-tokens --max-new-tokens --temperature --seed"),
    ("step", "--batches --context --steps --limit --layers --hidden --ffn --vocabulary --heads --key-heads --dim"),
    ("step", "--drafts --accepted"),
    ("attention", "--heads --kv-heads --head-dim --batches --contexts --tokens --page-size --layers --budget"),
    ("experts", "--hidden --experts --chosen --size --tokens --layers --steps --budget --seed"),
    ("short", "--layers --batch --lengths --steps --limit --seed"),
    ("sample", "--batches --vocab --steps --seed"),
    ("write_gate", "--examples --window --local-windows --length --stretches --rows"),
    ("step", "--attention-heads --kv-heads --attention-dim --devices --experts --chosen --expert-ffn"),
]


@pytest.mark.parametrize(("program", "names"), NUMBERS_OF_BENCHMARKS)
def test_no_number_of_a_benchmark_is_a_traceback(program, names):
    for option in names.split():
        least = () if option in ("--seed", "--budget", "--drafts") else ("0",)
        for value in (*least, "-1", "nan", "\udce9"):
            done = invoke("bench", program, f"{option}={value}")
            assert done.exit_code == 2 and done.stdout == "", (option, value, done.output)
            (line,) = done.stderr.splitlines()
            assert line.startswith(f"jaxbuf bench {program}: error: {option} must be "), line


def test_what_a_benchmark_cannot_do_is_one_line(monkeypatch):
    for words in (
        ["drift", "--heads", "3"],
        ["load", "--hidden", "65"],
        ["drift", "--nope"],
        ["step", "--dtype", "int8"],
        ["step", "--shape", "\udce9"],
    ):
        done = invoke("bench", *words)
        assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1 and words[1] in done.stderr, done.stderr

    def inputs(*_):
        raise MemoryError("Unable to allocate 9 TiB")

    monkeypatch.setattr(drift, "inputs", inputs)
    done = invoke("bench", "drift")
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1] == "jaxbuf bench drift: error: out of memory: Unable to allocate 9 TiB"


def test_numbers_are_read_as_they_are_typed():
    assert [terminal.parse_whole(text) for text in ("-3", " 7 ", "2147483647")] == [-3, 7, 2**31 - 1]
    assert [terminal.parse_number(text) for text in ("0", "-1e-3", "3.4e38")] == [0.0, -1e-3, 3.4e38]
    with pytest.raises(ValueError, match=r"^must be a whole number from 1 to 15, got '0'$"):
        terminal.parse_whole("0", 1, 15)
    with pytest.raises(ValueError, match=r"^must be a number above 0, got '0'$"):
        terminal.parse_number("0", 0, above=True)


def run(words: str, **settings) -> subprocess.CompletedProcess:
    """A command in a shell, where `jaxbuf` is ours."""
    script = f'jaxbuf() {{ "{sys.executable}" -m jaxbuf.cli "$@"; }}\n{words}'
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | settings
    return subprocess.run(["bash", "-c", script], env=environment, capture_output=True, timeout=300)


@pytest.mark.slow
def test_streams_that_are_closed_or_full_end_quietly():
    done = run("jaxbuf bench | head -c 0; echo ${PIPESTATUS[0]}")
    assert done.stdout in (b"0\n", b"1\n") and done.stderr == b""
    done = run("jaxbuf bench >&-")
    assert (done.returncode, done.stderr) == (0, b"")
    done = run("jaxbuf generate - <&-")
    assert (done.returncode, done.stderr) == (2, b"error: standard input is empty: there is no prompt\n")
    done = run("jaxbuf bench > /dev/full; jaxbuf --version > /dev/full")
    assert done.returncode == 2
    assert done.stderr == 2 * b"error: standard output: No space left on device\n"
    done = run("jaxbuf generate 'The configuration file' --max-new-tokens 200 | head -c 1")
    assert len(done.stdout) == 1 and b"Traceback" not in done.stderr and b"error" not in done.stderr.lower()


@pytest.mark.slow
def test_names_that_are_not_utf_8_and_platforms_that_are_not_there(tmp_path):
    config = (resources.files("jaxbuf.models") / "demo" / "config.json").read_bytes()
    directory = os.fsencode(tmp_path) + b"/\xe9"
    os.mkdir(directory)
    with open(directory + b"/config.json", "wb") as file:
        file.write(config)
    done = subprocess.run([*COMMAND, "plan", directory, "--context", "9"], capture_output=True, timeout=300)
    assert done.returncode == 0 and b"/\\udce9: 6 recurrent and 2" in done.stdout, done.stderr
    for words in ("generate x", "bench kernels"):
        done = run(f"jaxbuf {words}", JAX_PLATFORMS="bogus")
        assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and b"'bogus'" in done.stderr, done.stderr

"""The commands: the text alone on stdout, an error is a line, Ctrl-C keeps the text."""

import dataclasses
import io
import os
import re
import signal
import subprocess
import sys
import types

import pytest
from rich.console import Console
from typer.testing import CliRunner

import jaxbuf
from jaxbuf.cli import app, options, session
from jaxbuf.models.scoring import score_text
from jaxbuf.serving.own_drafter import MOST_DRAFTS
from tests.models.test_chat_template import write_chat_model
from tests.serving.conftest import lm as lm  # the tiny random model; a fixture

PROMPT = "The configuration file"
SHARED_OPTIONS = [f"--{name.replace('_', '-')}" for name in (*options.SAMPLING, *options.DRAFTING)]
COMMAND = [sys.executable, "-m", "jaxbuf.cli"]


def invoke(*arguments: str, **options):
    return CliRunner().invoke(app, list(arguments), **options)


def test_the_version_is_that_of_the_package():
    assert invoke("--version").stdout == f"jaxbuf {jaxbuf.__version__}\n"


def test_without_a_command_it_greets_with_three_to_try():
    done = invoke()
    assert done.exit_code == 0 and done.stdout.startswith(f"jaxbuf {jaxbuf.__version__} serves")
    tried = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("  jaxbuf ")]
    assert tried == ["generate", "plan", "models"] and "--help lists all commands" in done.stdout


def test_help_teaches_with_examples():
    text = invoke("generate", "--help", env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).stdout
    expected = (
        "--model",
        "--max-new-tokens",
        "--limit",
        "--form",
        "--dtype",
        "--profile",
        *SHARED_OPTIONS,
    )
    assert all(option in text for option in expected)
    assert f'jaxbuf generate "{PROMPT}"' in text and f"from 1 to {MOST_DRAFTS}." in text


def test_the_command_line_starts_without_jax():
    code = "import sys, jaxbuf.cli; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_stdout_holds_the_text_alone_and_stderr_the_statistics():
    lm = jaxbuf.load("demo")
    (expected,) = jaxbuf.generate(lm, [PROMPT], max_new_tokens=40)
    done = invoke("generate", PROMPT, "--max-new-tokens", "40")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == expected.text + "\n"
    assert done.stderr.startswith("device: cpu")
    assert "compiling" in done.stderr
    stats = expected.stats
    assert f"{stats.prompt_tokens} tokens read, {stats.new_tokens} tokens in " in done.stderr
    assert f"{stats.steps} steps, {stats.folds} folds, {stats.live_entries} live entries read" in done.stderr
    assert f"{stats.bytes / 1e6:.2f} MB moved" in done.stderr


@pytest.mark.slow
def test_options_reach_the_generation():
    lm = jaxbuf.load("demo")
    sampling = {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 7, "repetition_penalty": 1.1}
    sampling |= {"presence_penalty": 0.1, "frequency_penalty": 0.2, "min_tokens": 3, "ignore_eos": True}
    biases = {lm.encode(" the")[0]: 2.5, lm.encode(" a")[0]: float("-inf")}
    params = jaxbuf.SamplingParams(**sampling, logit_bias=biases)
    (whole,) = jaxbuf.generate(lm, [PROMPT], max_new_tokens=40, sampling=params, form="recurrent")
    stop = whole.text[60:63]
    params = jaxbuf.SamplingParams(**sampling, logit_bias=biases, stop=["never there", stop])
    (expected,) = jaxbuf.generate(lm, [PROMPT], max_new_tokens=40, sampling=params, form="recurrent")
    assert expected.text == whole.text[: whole.text.find(stop)]
    given = [part for name in sampling if name != "ignore_eos" for part in (f"--{name}", str(sampling[name]))]
    done = invoke(
        *("generate", "-", "--max-new-tokens", "40", "--form", "recurrent", "--ignore-eos"),
        *(part.replace("_", "-") for part in given),
        *(part for token, bias in biases.items() for part in ("--logit-bias", f"{token}={bias}")),
        *("--stop", "never there", "--stop", stop),
        input=PROMPT,
    )
    assert done.stdout == expected.text + "\n", done.stderr
    assert f"{expected.stats.folds} folds" in done.stderr


def test_token_ids_go_in_and_come_out():
    lm = jaxbuf.load("demo")
    ids = lm.encode(PROMPT)
    (expected,) = jaxbuf.generate(lm, [PROMPT], max_new_tokens=40)
    done = invoke("generate", " ".join(map(str, ids)), "--token-ids", "--max-new-tokens", "40")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == " ".join(map(str, expected.tokens)) + "\n" and len(expected.tokens) == 40
    stop = expected.tokens[20]
    words = ("--token-ids", "--max-new-tokens", "40", "--stop-token-id", "3", "--stop-token-id", str(stop))
    done = invoke("generate", "-", *words, input=",\n".join(map(str, ids)))
    assert done.stdout == " ".join(map(str, expected.tokens[: expected.tokens.index(stop) + 1])) + "\n", done.stderr


def test_a_model_without_a_tokenizer_says_that_it_needs_token_ids(lm, tmp_path):
    dataclasses.replace(lm, tokenizer=None).save(tmp_path / "bare")
    model = ("--model", str(tmp_path / "bare"))
    for words in (("generate", "text"), ("score", __file__)):
        done = invoke(*words, *model)
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr.splitlines()[-1].startswith("error: the model 'bare' has no tokenizer.json")
        assert done.stderr.rstrip().endswith("give token ids, with --token-ids")


@pytest.mark.slow
def test_a_model_without_a_tokenizer_is_served_by_token_ids(lm, tmp_path):
    dataclasses.replace(lm, tokenizer=None).save(tmp_path)
    done = invoke("generate", "65 66", "--token-ids", "--max-new-tokens", "4", "--model", str(tmp_path))
    (expected,) = jaxbuf.generate(lm, [[65, 66]], max_new_tokens=4)
    assert done.stdout == " ".join(map(str, expected.tokens)) + "\n", done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["one two"], "PROMPT must hold token ids, each of which must be a whole number of at least 0, got 'one'"),
        (["3 -4"], "PROMPT must hold token ids, each of which must be a whole number of at least 0, got '-4'"),
        ([" , "], "PROMPT must hold at least one token id, got none"),
        (["99999999999"], "PROMPT must hold token ids, each of which must be a whole number of at most 2147483647"),
        (["1", "--stop", "x"], "--stop must be left out with --token-ids, which has no text: give --stop-token-id"),
        (["1", "--stop-token-id", "-1"], "--stop-token-id must be a whole number of at least 0, got '-1'"),
    ],
)
def test_what_are_no_token_ids_is_an_error_before_anything_starts(words, message):
    done = invoke("generate", "--model", "no-such-model", "--token-ids", *words)
    (line,) = done.stderr.splitlines()
    assert (done.exit_code, done.stdout) == (2, "") and line.startswith(f"error: {message}")


def test_samples_and_beams_of_token_ids_are_token_ids(monkeypatch):
    def search(model, prompts, **settings):
        assert prompts == [[7, 8]] and settings["stop_token_ids"] == (9,)
        return [[jaxbuf.Beam("", [5, 6], -1.0, -0.5, "stop"), jaxbuf.Beam("", [4], -2.0, -2.0, "stop")]]

    monkeypatch.setattr("jaxbuf.beam_search", search)
    done = invoke("generate", "7,8", "--token-ids", "--beams", "2", "--stop-token-id", "9")
    assert done.exit_code == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if not line.startswith("beam")] == ["5 6", "4"]


def test_sampling_starts_from_the_checkpoint(lm):
    file = {"do_sample": True, "temperature": 0.6, "top_k": 20}
    lm = dataclasses.replace(lm, generation_config=file)
    assert session.sampling_params(Console(file=io.StringIO()), lm, {}) == jaxbuf.SamplingParams(
        temperature=0.6, top_k=20
    )
    given = {"temperature": 0.0, "top_p": 0.5}
    assert session.sampling_params(Console(file=io.StringIO()), lm, given) == jaxbuf.SamplingParams(
        temperature=0.0, top_k=20, top_p=0.5
    )


def test_loading_shows_its_progress_on_a_terminal_only():
    for terminal in (True, False):
        shown = io.StringIO()
        err = Console(file=shown, force_terminal=terminal, width=100)
        assert session.load_model(err, "demo", None).name == "demo"
        assert ("loading" in shown.getvalue() and "100%" in shown.getvalue()) == terminal


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "PROMPT"),
        ([PROMPT, "--model", "no-such-model"], "no-such-model"),
        ([PROMPT, "--dtype", "float7"], "float7"),
        ([PROMPT, "--max-new-tokens", "100000"], "--max-new-tokens (100000)"),
    ],
)
def test_an_error_is_one_line_that_names_what_came(arguments, message):
    done = invoke("generate", *arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    assert message in lines[-1]


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-new-tokens", "0"),
        ("--limit", "0"),
        ("--temperature", "-1"),
        ("--top-p", "1.5"),
        ("--min-p", "2"),
        ("--repetition-penalty", "0"),
        ("--logit-bias", "-1=3"),
        ("--stop", ""),
    ],
)
def test_a_setting_out_of_range_is_an_error_before_anything_starts(command, option, value):
    model = ["--model", "no-such-model"] if command == "chat" else [PROMPT, "--model", "no-such-model"]
    done = invoke(command, *model, option, value)
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {option} must be")


@pytest.mark.parametrize("name", ["MTP", "x", ""])
def test_a_drafter_that_is_none_is_an_error_before_anything_starts(name):
    done = invoke("generate", PROMPT, "--model", "no-such-model", "--drafter", name, "--branches", "2")
    (line,) = done.stderr.splitlines()
    assert (done.exit_code, done.stdout) == (2, "")
    assert line.startswith('error: --drafter must be "ngram", "mtp" or a model (a directory or an id)')
    assert line.endswith(f", got {name!r}")


def test_a_drafter_without_files_is_an_error_that_names_the_option(tmp_path):
    done = invoke("generate", PROMPT, "--drafter", str(tmp_path))
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"error: --drafter: {tmp_path} has no config.json")


def test_a_bias_of_another_form_is_an_error_that_shows_the_form():
    done = invoke("generate", PROMPT, "--logit-bias", "the=3", env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert done.exit_code == 2
    assert "--logit-bias" in done.stderr and "ID=BIAS" in done.stderr and "the=3" in done.stderr


def test_an_unknown_form_is_an_error_that_lists_the_forms():
    done = invoke("generate", PROMPT, "--form", "folded", env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert done.exit_code == 2
    assert all(form in done.stderr for form in ("folded", "auto", "recurrent", "buffered"))


def test_a_broken_checkpoint_is_an_error_that_names_it(tmp_path):
    (tmp_path / "config.json").write_text("{")
    done = invoke("generate", PROMPT, "--model", str(tmp_path))
    assert done.exit_code == 2
    assert "config.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_standard_input_that_is_no_text_is_an_error():
    done = invoke("generate", "-", input=b"\xff\xfe")
    assert done.exit_code == 2
    assert "utf-8" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_platform_that_is_not_there_is_an_error():
    environment = os.environ | {"JAX_PLATFORMS": "abacus"}
    done = subprocess.run([*COMMAND, "generate", PROMPT], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "abacus" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_ctrl_c_keeps_the_text_so_far_and_prints_its_statistics():
    process = subprocess.Popen(
        [*COMMAND, "generate", PROMPT, "--max-new-tokens", "8000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    try:
        first = os.read(process.stdout.fileno(), 65536)
        first += os.read(process.stdout.fileno(), 65536)  # the first text is the prefill's: no step has been taken yet
        process.send_signal(signal.SIGINT)
        rest, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert (first + rest).decode().strip()
    assert re.search(r"^\d+ tokens read, \d+ tokens in ", stderr.decode(), re.MULTILINE)
    assert re.search(r"\d+ steps, \d+ folds", stderr.decode())
    assert "Traceback" not in stderr.decode()


@pytest.mark.slow
def test_ctrl_c_ends_a_search_at_once():
    """It runs in one piece, of some minutes here; there is no text before its end."""
    process = subprocess.Popen(
        [*COMMAND, "generate", PROMPT, "--beams", "8", "--max-new-tokens", "8000", "--ignore-eos"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    try:
        while b"compiling" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, stdout, stderr) == (-signal.SIGINT, b"", b"")


def numbers(stdout: str) -> list[list[str]]:
    """The rows of the table that `score` prints: its cells, without the heading."""
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in stdout.splitlines() if line[0] in "│┃"]
    assert rows[0] == ["file", "tokens", "bytes", "log-likelihood", "perplexity", "bits/byte"]
    return rows[1:]


def cells(found) -> list[str]:
    counts = [str(found.tokens), str(found.bytes), f"{found.log_likelihood:.2f}"]
    return [*counts, f"{found.perplexity:.2f}", f"{found.bits_per_byte:.4f}"]


def test_score_prints_a_row_for_each_file_and_their_total(tmp_path):
    texts = ["The configuration file is read when the server starts.\n", "To install it, call the naïve script. " * 7]
    file = tmp_path / "[red]one.txt"
    file.write_text(texts[0])
    done = invoke("score", str(file), "-", "--context", "64", input=texts[1])
    assert done.exit_code == 0, done.stderr
    lm = jaxbuf.load("demo")
    first, second = (score_text(lm, text, context=64) for text in texts)
    assert first.tokens < 64 < second.tokens
    assert second.bytes == len(texts[1].encode())
    rows = numbers(done.stdout)
    assert rows == [[str(file), *cells(first)], ["-", *cells(second)], ["total", *cells(first + second)]]
    assert done.stderr.startswith("device: cpu")


def test_score_of_token_ids_is_that_of_the_text_without_its_bytes(tmp_path):
    text = "The configuration file is read when the server starts.\n"
    lm = jaxbuf.load("demo")
    found = score_text(lm, text, context=64)
    file = tmp_path / "ids"
    file.write_text("\n".join(map(str, lm.encode(text))))
    done = invoke("score", str(file), "--token-ids", "--context", "64")
    assert done.exit_code == 0, done.stderr
    tokens, _, likelihood, perplexity, _ = cells(found)
    row = [tokens, "-", likelihood, perplexity, "-"]
    assert numbers(done.stdout) == [[str(file), *row], ["total", *row]]
    for content, message in (
        ("1 x", "must hold token ids"),
        ("9999999", "token ids must be in [0, 4096), got 9999999"),
    ):
        file.write_text(content)
        done = invoke("score", str(file), "--token-ids")
        assert done.exit_code == 2 and f"error: {file}" in done.stderr and message in done.stderr


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.txt", None, "absent.txt"),
        (".", None, "directory"),
        ("empty.txt", b"", "empty.txt is empty"),
        ("latin.txt", b"na\xefve", "latin.txt is not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_scored_is_one_line(tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    done = invoke("score", name)
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and message in line


def test_a_context_that_does_not_fit_is_an_error_of_score():
    done = invoke("score", "-", "--context", "100000", input="text")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "error: --context must be in [2, 8192]" in done.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def chat_model(lm, tmp_path_factory):
    return write_chat_model(lm, tmp_path_factory.mktemp("chat"), max_position_embeddings=192)


def converse(lm, texts, system=None, **options):
    """The answers to each of the texts, the conversation so far before it."""
    messages, answers = [{"role": "system", "content": system}] if system else [], []
    for text in texts:
        messages.append({"role": "user", "content": text})
        prompt = lm.encode(lm.chat(messages), add_special_tokens=False)
        end = lm.tokenizer.token_to_id("<|im_end|>")
        sampling = jaxbuf.SamplingParams(temperature=0.0, stop_token_ids=(end,))
        (result,) = jaxbuf.generate(lm, [prompt], 8, sampling, **options)
        messages.append({"role": "assistant", "content": result.text})
        answers.append(result.text)
    return answers


def chat(model, text, *arguments):
    return invoke("chat", "--model", str(model), "--max-new-tokens", "8", *arguments, input=text)


@pytest.mark.slow
def test_chat_answers_each_line_with_the_conversation_before_it(chat_model):
    lm = jaxbuf.load(chat_model)
    done = chat(chat_model, "Hi\n\n  naïve?\n/reset\nHi\n", "--system", "Be brief.", "--form", "recurrent")
    assert done.exit_code == 0, done.stderr
    first, second = converse(lm, ["Hi", "naïve?"], system="Be brief.")
    assert first and second != converse(lm, ["naïve?"], system="Be brief.")[0]
    assert done.stdout == f"{first}\n{second}\n{first}\n"
    assert "error" not in done.stderr


def test_chat_leaves_at_exit(chat_model):
    done = chat(chat_model, "/exit\nHi\n")
    assert (done.exit_code, done.stdout) == (0, "")


@pytest.mark.slow
def test_a_conversation_that_outgrows_the_context_loses_nothing(chat_model):
    done = chat(chat_model, f"Hi\n{'long ' * 60}\nnaïve?\n")
    assert done.exit_code == 0, done.stderr
    answers = converse(jaxbuf.load(chat_model), ["Hi", "naïve?"])
    assert done.stdout == "".join(f"{answer}\n" for answer in answers)
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "tokens) fills the model's context (192)" in line and "/reset" in line


def test_a_model_without_a_chat_template_is_an_error_before_anything_is_read():
    done = invoke("chat", "--model", "demo", input="Hi\n")
    assert (done.exit_code, done.stdout) == (2, "")
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: ") and "chat_template.jinja" in line and "jaxbuf generate" in line


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--logit-bias", "999=1", "--logit-bias must"), ("--max-new-tokens", "999", "--max-new-tokens (999)")],
)
def test_settings_of_chat_are_checked_before_anything_is_read(chat_model, option, value, message):
    done = chat(chat_model, "Hi\n", option, value)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(lm, tmp_path):
    model = write_chat_model(lm, tmp_path, max_position_embeddings=65536, eos_token_ids=())
    # Without an end token the answer would be 60,000 tokens long.
    (model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages[-1].content }}"}')
    process = subprocess.Popen(
        [*COMMAND, "chat", "--model", str(model), "--max-new-tokens", "60000"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    try:
        process.stdin.write(b"Hi\n")
        process.stdin.flush()
        first = os.read(process.stdout.fileno(), 65536)
        process.send_signal(signal.SIGINT)
        rest, stderr = process.communicate(b"/reset\n/exit\n", timeout=120)
    finally:
        process.kill()
        process.wait()
    assert (first + rest).strip() and (first + rest).endswith(b"\n")
    assert process.returncode == 0, stderr.decode()
    assert "stopping" in stderr.decode() and "Traceback" not in stderr.decode()


def test_help_of_score_and_chat_teaches_with_examples():
    wide = {"COLUMNS": "200", "TERMINAL_WIDTH": "200"}
    score, chat = (invoke(command, "--help", env=wide).stdout for command in ("score", "chat"))
    assert all(option in score for option in ("--model", "--context", "--dtype", "jaxbuf score README.md"))
    shared = ("--model", "--system", "--max-new-tokens", "--limit", *SHARED_OPTIONS)
    assert all(option in chat for option in (*shared, "--form", "--dtype", "/reset", "/exit", "jaxbuf chat --model"))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"top_p": 0.9, "seed": 3}, "without a --temperature nothing is drawn, and --top-p, --seed of no effect"),
        ({"top_p": 0.9, "temperature": 0.7}, ""),
        ({"repetition_penalty": 1.2}, ""),
        ({"n": 3}, "the samples are all the same, as the temperature is 0: give a --temperature"),
    ],
)
def test_settings_that_change_nothing_are_told(given, told):
    err = Console(file=io.StringIO(), width=200)
    session.sampling_params(err, types.SimpleNamespace(sampling_defaults={"temperature": 0.0}), given)
    assert err.file.getvalue().strip() == told


def test_settings_of_the_checkpoint_are_told():
    err = Console(file=io.StringIO(), width=200)
    lm = types.SimpleNamespace(sampling_defaults={"temperature": 0.6, "top_p": 0.9, "top_k": 20})
    session.sampling_params(err, lm, {"top_p": 0.5})
    told = "from the checkpoint's generation_config.json: temperature 0.6, top_k 20\n"
    assert err.file.getvalue() == told
    session.sampling_params(err, lm, {"temperature": 0.0})
    assert err.file.getvalue() == told, "nothing is drawn"

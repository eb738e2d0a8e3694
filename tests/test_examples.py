"""The examples run as they are, and what they print is true."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


def run(name: str, capsys) -> str:
    (path,) = (path for path in EXAMPLES if path.name == name)
    runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out


def test_each_example_can_be_read_in_one_sitting():
    assert [path.name for path in EXAMPLES] == [
        "drafter.py",
        "generate.py",
        "recurrence.py",
        "rollouts.py",
        "rows.py",
        "score.py",
        "train_gates.py",
        "train_layer.py",
    ]
    texts = {path.name: path.read_text() for path in EXAMPLES}
    assert [name for name, text in texts.items() if len(text) > 3500 or len(text.splitlines()) > 64] == []


def test_examples_that_pages_show_are_as_narrow_as_these():
    """Pages have room for 98 columns; what is longer is cut off, and scrolls."""
    pages = [page.read_text() for page in (EXAMPLES[0].parent.parent / "docs").glob("*.rst")]
    shown = [path for path in EXAMPLES if any(f"literalinclude:: ../examples/{path.name}" in page for page in pages)]
    assert [path.name for path in shown] == ["recurrence.py", "rollouts.py", "train_layer.py"]
    assert [line for path in shown for line in path.read_text().splitlines() if len(line) > 98] == []


def test_the_recurrence_by_hand_gives_the_numbers_of_the_definition(capsys):
    printed = run("recurrence.py", capsys)
    assert re.findall(r"ring: (\d+) entries, checkpoint: (\d+) tokens", printed) == [("2", "12"), ("0", "14")]
    differences = [float(number) for number in re.findall(r"differ by (\S+)", printed)]
    assert len(differences) == 2 and max(differences) < 1e-5


@pytest.mark.slow
def test_the_stream_is_the_text_and_the_stop_string_cuts_it(capsys):
    printed = run("generate.py", capsys)
    text = re.search(r"^The configuration file\|(.*?) \[\w+\]$", printed, re.MULTILINE | re.DOTALL)[1]
    assert re.search(r"^stream: (.*?)\nstopped:", printed, re.MULTILINE | re.DOTALL)[1] == text
    stopped, reason = re.search(r"^stopped: (.*) \[(\w+)\]$", printed, re.MULTILINE | re.DOTALL).groups()
    assert stopped == text.partition(" the")[0]
    assert reason == ("stop" if " the" in text else "length")


@pytest.mark.slow
def test_the_scores_of_a_generation_are_those_of_score(capsys):
    printed = run("score.py", capsys)
    assert float(re.search(r"^perplexity (\S+) over", printed)[1]) > 1
    assert float(re.search(r"largest difference (\S+)", printed)[1]) < 1e-4
    assert len(re.findall(r"best two: \[", printed)) >= 1


@pytest.mark.slow
def test_requests_that_come_and_go_get_the_text_that_they_get_alone(capsys):
    assert re.findall(r"as alone: (\w+)", run("rows.py", capsys)) == ["True"] * 5


@pytest.mark.exhaustive
@pytest.mark.foreign
def test_policy_gradients_raise_the_reward_and_compile_nothing_more(capsys):
    printed = run("rollouts.py", capsys)
    steps = re.findall(r"^step \d+: reward (\S+), ratios (\S+) to (\S+), programs (\d+)$", printed, re.MULTILINE)
    rewards, least, most, programs = (np.array(column, float) for column in zip(*steps, strict=True))
    assert least.min() >= 0.999 and most.max() <= 1.001
    assert rewards[-3:].mean() > 1.2 * rewards[:2].mean()
    assert set(programs) == {programs[0]}


@pytest.mark.slow
@pytest.mark.foreign
def test_a_layer_trained_from_scratch_recalls_what_chance_does_not(capsys):
    printed = run("train_layer.py", capsys)
    steps = re.findall(r"^step \d+: loss (\S+), (\S+)% right, by chance (\S+)%$", printed, re.MULTILINE)
    losses, right, chance = (np.array(column, float) for column in zip(*steps, strict=True))
    assert right[0] < 2 * chance[0] and losses[0] > 2.5
    assert right[-1] > 80 and losses[-1] < 0.7


@pytest.mark.slow
def test_trained_gates_keep_few_keys_and_lose_less_than_a_random_choice(capsys):
    printed = run("train_gates.py", capsys)
    shares = re.findall(r"^softmax layer (\d) keeps of each head's keys: (\d+)%, (\d+)%$", printed, re.MULTILINE)
    kept = float(re.search(r"^kept: (\S+)%", printed, re.MULTILINE)[1])
    assert [layer for layer, *_ in shares] == ["0", "1"]
    assert abs(np.mean([float(share) for _, *row in shares for share in row]) - kept) <= 1
    assert kept < 80
    bits = {name: float(number) for name, number in re.findall(r"^(.+): (\S+) bits a byte$", printed, re.MULTILINE)}
    assert bits["gates"] - bits["all keys"] < 0.3 * (bits["random keys"] - bits["all keys"])
    assert bits["random keys"] - bits["all keys"] > 0.01

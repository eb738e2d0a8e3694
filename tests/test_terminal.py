"""What programs print in a terminal: tables of one style, sentences that break between words, lines that move."""

import io
import threading

import pytest
from rich.console import Console
from rich.table import Table

from jaxbuf.cli import session
from jaxbuf.cli.errors import as_typed
from jaxbuf.terminal import print_table, text_console

HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"  # what a terminal is told about its cursor


def printed(table: Table, width: int) -> list[str]:
    text = io.StringIO()
    print_table(table, Console(file=text, width=width))
    return text.getvalue().splitlines()


def some_table() -> Table:
    table = Table("layer", "keys kept", "of what")
    table.add_row("3", "0.044", "head 1")
    table.add_row("17", "-", "heads, all of them")
    return table


def test_figures_stand_at_the_right_and_words_at_the_left():
    rows = [line for line in printed(some_table(), 60) if line.startswith("│")]
    assert rows == [
        "│     3 │     0.044 │ head 1             │",
        "│    17 │         - │ heads, all of them │",
    ]


def test_a_table_that_is_too_wide_has_no_space_at_its_rules():
    table = some_table()
    for column in table.columns:
        column.no_wrap = True
    needed = len(printed(table, 60)[0])
    narrow = printed(table, needed - 1)
    assert len(narrow[0]) < needed and all("heads, all of them" in line for line in narrow if "17" in line)
    assert len({len(line) for line in printed(table, 10)}) == 1, "what is still too wide is wider, and whole"


def test_a_sentence_breaks_between_words_on_a_terminal_and_nowhere_else(monkeypatch, capsys):
    sentence = "a sentence of words that are whole, each on one line " * 3
    monkeypatch.setenv("COLUMNS", "30")
    for forced, lines in (("1", None), ("", 1)):
        monkeypatch.setenv("FORCE_COLOR", forced)
        text_console().print(sentence.strip())
        found = capsys.readouterr().out.splitlines()
        assert " ".join(line.strip() for line in found) == sentence.strip()
        assert len(found) == lines if lines else len(found) > 1 and max(map(len, found)) <= 30


def on_terminal(terminal: bool) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=terminal, width=100, highlight=False), text


@pytest.mark.parametrize("interrupted_after", [None, 1])
def test_the_first_text_waits_on_a_terminal_for_the_second_program(interrupted_after):
    """Until then a line moves, which is gone before the text comes; elsewhere events pass as they come."""
    err, text = on_terminal(True)
    interrupted, given, closed = threading.Event(), [], []

    def stream():
        try:
            for number in range(4):
                given.append(number)
                if number + 1 == interrupted_after:
                    interrupted.set()
                yield number
        finally:
            closed.append(True)

    events = session.behind_compilation(err, stream(), interrupted)
    assert next(events) == 0 and given == ([0, 1] if interrupted_after is None else [0])
    assert session.COMPILING in text.getvalue() and text.getvalue().rindex(SHOWN) > text.getvalue().rindex(HIDDEN)
    before = text.getvalue()
    assert list(events) == [1, 2, 3] and closed == [True]
    assert text.getvalue() == before, "nothing is drawn over the text"

    err, text = on_terminal(False)
    given.clear()
    events = session.behind_compilation(err, stream(), threading.Event())
    assert next(events) == 0 and given == [0]
    events.close()
    assert closed == [True, True] and text.getvalue() == f"{session.COMPILING} ...\n"


def test_a_process_that_dies_while_a_line_moves_leaves_the_cursor():
    err, text = on_terminal(True)
    with session.waiting(err, "doing this"):
        assert text.getvalue().rindex(SHOWN) > text.getvalue().rindex(HIDDEN)
    err, text = on_terminal(False)
    with session.waiting(err, "doing this"):
        assert text.getvalue() == "doing this ...\n"


def test_an_error_that_is_about_an_argument_names_it_as_it_was_typed():
    class Parameter:
        param_type_name, metavar, name, opts = "argument", "GATES", "gates", ()

    assert as_typed("gates: no gates at 'x'", [Parameter]) == "GATES: no gates at 'x'"
    Parameter.param_type_name, Parameter.opts = "option", ("--gates",)
    assert as_typed("gates: no gates at 'x'", [Parameter]) == "--gates: no gates at 'x'"

"""A bar on a terminal, for what takes longer than a moment; elsewhere nothing."""

import io
import time

import pytest
from rich.console import Console

from jaxbuf import progress
from jaxbuf.progress import progress_bar


def written(monkeypatch, *, terminal, show=None, seconds=0.0, delay=0.0):
    """What the work of so many seconds, 3 of 8 done, shows on such a console."""
    monkeypatch.setattr(progress, "DELAY", delay)
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, force_jupyter=False, width=100)
    with progress_bar(8, show, console=console) as report:
        report("compiling", 0)
        time.sleep(seconds / 2)
        report("generating", 3)
        time.sleep(seconds / 2)
    return text.getvalue()


def test_a_terminal_shows_what_is_done_and_how_much(monkeypatch):
    shown = written(monkeypatch, terminal=True, seconds=0.5)
    assert "compiling" in shown and "generating" in shown and "3/8" in shown
    assert shown.endswith("\x1b[2K"), "the bar's line is cleared at the end"


def test_elsewhere_and_where_it_is_off_nothing_is_shown(monkeypatch):
    assert written(monkeypatch, terminal=False, seconds=0.2) == ""
    assert written(monkeypatch, terminal=True, show=False, seconds=0.2) == ""


@pytest.mark.parametrize("widgets", [True, False])
def test_a_notebook_has_a_bar_where_it_can_show_one_and_else_no_warning(monkeypatch, widgets):
    monkeypatch.setattr(progress, "DELAY", 60.0)
    monkeypatch.setattr(progress, "_has_widgets", lambda: widgets)
    notebook = Console(file=io.StringIO(), force_jupyter=True)
    with progress_bar(8, console=notebook) as report:
        assert (report is progress.say_nothing) == (not widgets)


def test_a_bar_that_is_asked_for_is_shown_wherever_standard_error_goes(monkeypatch, capsys):
    monkeypatch.setattr(progress, "DELAY", 0.0)
    with progress_bar(8, True) as report:
        report("generating", 3)
        time.sleep(0.2)
    shown = capsys.readouterr()
    assert "3/8" in shown.err and shown.out == ""


def test_what_is_done_in_a_moment_shows_nothing(monkeypatch):
    assert written(monkeypatch, terminal=True, delay=5.0) == ""


def test_an_error_in_the_work_ends_the_bar(monkeypatch):
    monkeypatch.setattr(progress, "DELAY", 0.0)
    console = Console(file=io.StringIO(), force_terminal=True)
    with pytest.raises(KeyboardInterrupt), progress_bar(8, console=console) as report:
        report("generating", 1)
        time.sleep(0.1)
        raise KeyboardInterrupt
    with console.status("another"):  # Rich refuses a second one while the first goes on
        pass


@pytest.mark.parametrize("show", [1, "yes", 0])
def test_what_is_no_choice_is_named(show):
    with pytest.raises(ValueError, match="progress must be None, True or False, got "), progress_bar(8, show):
        pass

"""Programs that are started and must not outlive what started them."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence


@contextlib.contextmanager
def started(command: Sequence[str], *, env: Mapping[str, str], stderr: int) -> Iterator[subprocess.Popen[str]]:
    """A program whose output is read as text. Leaving the context ends it, and all that it has started.

    On the main thread that also holds where SIGTERM or SIGHUP would end this process at once: they raise SystemExit.

    Args:
      command: The program and its arguments.
      env: Its environment.
      stderr: Where its errors go: as `subprocess.Popen` has it.
    """
    with (
        _orderly_end(),
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
        ) as ran,
    ):
        try:
            yield ran
        finally:
            end(ran)


def end(ran: subprocess.Popen[str]) -> None:
    """Ends a program that was `started`, and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(ran.pid, signal.SIGKILL)


@contextlib.contextmanager
def _orderly_end() -> Iterator[None]:
    def leave(number, _):
        raise SystemExit(128 + number)

    numbers = [signal.SIGTERM, signal.SIGHUP] if threading.current_thread() is threading.main_thread() else []
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""What scripts/demo runs: a continuation by the embedded model, and the same one by both forms of its memory."""

import sys
import threading
import time
from typing import Literal

import jax
from rich.table import Table

import jaxbuf
from jaxbuf.cli.session import behind_compilation
from jaxbuf.terminal import print_table, text_console

PROMPT = "A transaction is"
NEW_TOKENS = 128
SAMPLING = jaxbuf.SamplingParams(temperature=0.8, top_p=0.9, seed=0)
FORMS: tuple[Literal["recurrent", "buffered"], ...] = ("recurrent", "buffered")

console = text_console()


def main(prompt: str) -> int:
    device = jax.devices()[0]
    started = time.perf_counter()
    # float32, so that the two forms may differ by rounding only where two tokens are equally likely to the last digit.
    lm = jaxbuf.load("demo", dtype="float32")
    console.print(
        f"model {lm.name}, float32, on {device.platform} ({device.device_kind}), "
        f"loaded in {time.perf_counter() - started:.1f} s",
        style="dim",
    )
    stream_continuation(lm, prompt)
    results = measure(lm, prompt)
    console.print("The same request by each form of the recurrent state (bytes from the counts beside them):")
    print_table(table(results), console)
    return verdict(results)


def stream_continuation(lm, prompt: str) -> None:
    events = jaxbuf.generate(lm, [prompt], max_new_tokens=NEW_TOKENS, sampling=SAMPLING, stream=True)
    events = behind_compilation(text_console(stderr=True), events, threading.Event())
    for number, event in enumerate(events):
        if number == 0:
            console.out(prompt, style="bold", end="")
        console.out(event.text, end="")
    console.print("\n")


def measure(lm, prompt: str) -> dict:
    """The result of each form and the seconds of its best of three runs, taken in turns, all compiled before."""
    seconds = dict.fromkeys(FORMS, float("inf"))
    results = {}
    for _ in range(3):
        for form in FORMS:
            started = time.perf_counter()
            (results[form],) = jaxbuf.generate(lm, [prompt], max_new_tokens=NEW_TOKENS, sampling=SAMPLING, form=form)
            seconds[form] = min(seconds[form], time.perf_counter() - started)
    return {form: (results[form], seconds[form]) for form in FORMS}


def table(results: dict) -> Table:
    shown = Table()
    shown.add_column("form", no_wrap=True)
    for heading in ("tokens", "steps", "folds", "entries read", "state moved", "tokens/s"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for form, (result, seconds) in results.items():
        stats = result.stats
        shown.add_row(
            form,
            f"{stats.new_tokens}",
            f"{stats.steps}",
            f"{stats.folds}",
            f"{stats.live_entries}",
            f"{stats.bytes / 1e6:.2f} MB",
            f"{stats.new_tokens / seconds:.0f}",
        )
    return shown


def verdict(results: dict) -> int:
    recurrent, buffered = results["recurrent"][0], results["buffered"][0]
    if list(recurrent.tokens) != list(buffered.tokens):
        console.print("the two forms gave different tokens:", style="bold red")
        for form, (result, _) in results.items():
            console.print(f"{form}: {list(result.tokens)}", markup=False)
        return 1
    saved = recurrent.stats.bytes / buffered.stats.bytes
    console.print(f"Same tokens; the buffered form moved {saved:.2f} times fewer bytes of recurrent state.")
    if jax.default_backend() == "cpu":
        console.print("On a CPU that saves bytes, not time.")
    return 0


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:]) or PROMPT))

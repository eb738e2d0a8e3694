"""Long loops run in slices of a fraction of a second: a Ctrl-C leaves at most one of them on the device."""

import dataclasses
import os
import signal
import threading
import time

import numpy as np
import pytest

from jaxbuf.models.language_model import load
from jaxbuf.serving import SamplingParams, beams, generate, loop, slices
from jaxbuf.serving.slices import SECONDS, run_slices
from tests.tiny import changed


class Device:
    """A loop that takes `seconds` a step, on a clock of its own."""

    def __init__(self, monkeypatch, seconds, compiling=0.0):
        self.now, self.seconds, self.compiling, self.slices = 0.0, seconds, compiling, []
        monkeypatch.setattr(slices.time, "monotonic", lambda: self.now)

    def run(self, done, steps):
        self.now += self.compiling + steps * self.seconds
        self.compiling = 0.0
        self.slices.append(steps)
        return done + steps


@pytest.mark.parametrize("seconds", [1e-4, 0.003, 0.05, 7.0])
def test_slices_take_a_fraction_of_a_second_and_all_steps_run(monkeypatch, seconds):
    device = Device(monkeypatch, seconds, compiling=40.0)
    steps = 3000 if seconds < 1 else 5
    done, number = run_slices(device.run, 0, steps, lambda done: True)
    assert done == sum(device.slices) == steps
    assert all(number * seconds <= max(SECONDS, seconds) * 1.001 for number in device.slices)
    whole = device.slices[8:-1]
    assert all(number * seconds > 0.5 * SECONDS for number in whole if seconds < SECONDS)
    more = Device(monkeypatch, seconds)
    run_slices(more.run, 0, 10 * number, lambda done: True, first=number)
    assert more.slices[0] == number, "a later call goes on with the same slices"


def test_a_loop_that_has_ended_is_not_run_again(monkeypatch):
    device = Device(monkeypatch, 0.001)
    assert run_slices(device.run, 0, 1000, lambda done: done < 5)[0] < 1000
    assert len(device.slices) == 2


def interrupt_after(calls, function):
    """The function, and a Ctrl-C a moment after it was called so many times."""
    left = [calls]

    def counted(*arguments):
        left[0] -= 1
        if left[0] == 0:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        return function(*arguments)

    return counted


@pytest.mark.exhaustive
def test_after_a_ctrl_c_the_device_is_free(monkeypatch):
    """A generation of 100,000 tokens, and a beam search: the next call of a compiled program starts within a second."""
    demo = load("demo")
    config = changed(demo.config, max_position_embeddings=2**18)
    lm = dataclasses.replace(demo, config=config)
    tokens = np.arange(20)[None]
    lm.score(tokens)  # compiled
    long = {"max_new_tokens": 100_000, "sampling": SamplingParams(temperature=0.0, ignore_eos=True)}
    calls = [
        (loop, "generate_tokens", lambda: generate(lm, [[1, 2, 3]] * 4, **long)),
        (beams, "search_beams", lambda: beams.beam_search(lm, [[1, 2, 3]], 20_000, beams=2, ignore_eos=True)),
    ]
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for module, name, call in calls:
            with monkeypatch.context() as patched:
                patched.setattr(module, name, interrupt_after(8, getattr(module, name)))
                with pytest.raises(KeyboardInterrupt):
                    call()
            began = time.monotonic()
            lm.score(tokens)
            seconds = time.monotonic() - began
            print(f"{name}: the next call returned after {seconds:.2f} s")
            assert seconds < 1
    finally:
        signal.signal(signal.SIGINT, previous)

"""Streams: the pieces are the text that generate gives, for any prompts, settings and stop strings."""

import dataclasses

import numpy as np
import pytest

from jaxbuf.serving import SamplingParams, generate, generate_tokens, loop

PROMPTS, NEW = 50, 32


@pytest.fixture
def prompts(rng):
    return [rng.integers(0, 256, n).tolist() for n in rng.integers(1, 64, PROMPTS)]


def draw_settings(rng):
    """Hot enough that most bytes come, so that some are characters of several bytes; every setting on some rows."""
    extras = [
        {},
        {"top_k": 200, "presence_penalty": 0.5},
        {"top_p": 0.99, "frequency_penalty": 0.3},
        {"repetition_penalty": 1.2, "min_p": 1e-4},
        {"logit_bias": {0xC3: 1.0, 65: -np.inf}, "ignore_eos": True},
    ]
    seeds = rng.integers(0, 2**32, PROMPTS)
    return [SamplingParams(temperature=4.0, seed=int(seed), **extras[i % 5]) for i, seed in enumerate(seeds)]


def pieces(events):
    """The events of each prompt, in order."""
    found = [[] for _ in range(PROMPTS)]
    for event in events:
        found[event.index].append(event)
    return found


def characters(text):
    """How many characters of several bytes there are: each is as many tokens."""
    return sum(character > "\x7f" and character != "\N{REPLACEMENT CHARACTER}" for character in text)


@pytest.mark.slow
@pytest.mark.parametrize("round", range(4))
def test_streamed_pieces_are_the_text_of_200_random_prompts(lm, rng, prompts, round):
    """A fourth of the prompts at a time, each without and with stop strings from its own text."""
    settings = draw_settings(rng)
    plain = generate(lm, prompts, NEW, settings)
    for result in plain:
        assert result.text == lm.decode([token for token in result.tokens if token != lm.stop_ids[0]])
    assert sum(characters(result.text) for result in plain) > 5
    stops = []
    for result in plain:
        wide = [i for i in range(1, len(result.text)) if characters(result.text[i])]
        place = int(rng.choice(wide)) - 1 if wide else int(rng.integers(0, max(len(result.text) - 4, 1)))
        stops.append((result.text[place : place + 4].rstrip("\N{REPLACEMENT CHARACTER}") or "empty", "never there"))
    stopping = [dataclasses.replace(setting, stop=stop) for setting, stop in zip(settings, stops, strict=True)]
    stopped = generate(lm, prompts, NEW, stopping)

    segment, across_events, wide_stops = (1, 2, 5, 16)[round], 0, 0
    for sampling, results in ((settings, plain), (stopping, stopped)):
        rows = pieces(generate(lm, prompts, NEW, sampling, stream=True, segment=segment))
        for row, result in zip(rows, results, strict=True):
            assert "".join(event.text for event in row) == result.text == row[-1].result.text
            assert [token for event in row for token in event.tokens] == result.tokens == row[-1].result.tokens
            assert [event.done for event in row] == [False] * (len(row) - 1) + [True]
            assert row[-1].result.finish_reason == result.finish_reason
    for row, result, whole, (stop, _) in zip(rows, stopped, plain, stops, strict=True):
        if stop == "empty":
            continue
        assert result.text == whole.text[: whole.text.find(stop)]
        assert result.tokens == whole.tokens[: len(result.tokens)]
        width, last = len(stop.encode()), len(row[-1].tokens)
        across_events += result.finish_reason == "stop" and last < width
        wide_stops += characters(stop) > 0
    assert across_events and wide_stops


@pytest.mark.slow
def test_events_of_an_unfinished_stream_say_what_came_so_far(lm, prompts):
    said = [""] * PROMPTS
    sampling = SamplingParams(temperature=4.0, ignore_eos=True, stop="\x00\x00\x00")
    for event in generate(lm, prompts, NEW, sampling, stream=True, segment=16):
        said[event.index] += event.text
        assert event.result.text == said[event.index]
        assert event.result.stats.new_tokens == len(event.result.tokens)
        assert event.done == (event.result.finish_reason != "unfinished")


@pytest.mark.slow
def test_a_stream_that_is_closed_early_runs_no_further(lm, prompts, monkeypatch, tmp_path):
    calls = []

    def counted(*arguments):
        calls.append(arguments[-1])
        return generate_tokens(*arguments)

    monkeypatch.setattr(loop, "generate_tokens", counted)
    events = generate(lm, prompts, NEW, stream=True, segment=2, profile=tmp_path)
    assert not calls and not list(tmp_path.iterdir())
    for _ in range(PROMPTS + 3):
        next(events)
    events.close()
    assert calls[0] == 1 and sum(calls) == 3  # one step before the trace, and one segment
    assert list(tmp_path.rglob("*.xplane.pb"))
    with pytest.raises(StopIteration):
        next(events)


def test_no_prompts_are_no_events(lm):
    assert list(generate(lm, [], stream=True)) == generate(lm, []) == []


def test_a_stream_checks_its_arguments_when_it_is_made(lm):
    for segment in (0, 1.5, True):
        with pytest.raises(ValueError, match=f"segment must be a whole number of at least 1, got {segment}"):
            generate(lm, [[1, 2]], stream=True, segment=segment)
    with pytest.raises(ValueError, match=r"prompts\[0\] must hold at least one token"):
        generate(lm, [[]], stream=True)

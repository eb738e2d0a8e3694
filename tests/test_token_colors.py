"""Coloured tokens hold the text as it is, a colour and a note for each token."""

import html
import math
import re

import pytest

from jaxbuf.token_colors import color_drafts, color_probabilities


def shown(colored) -> str:
    """The text that a reader of the HTML sees."""
    return html.unescape(re.sub(r"<[^>]+>", "", colored._repr_html_()))


def opacities(colored) -> list[float]:
    return [float(color.rpartition(",")[2].rstrip(")")) if color else 0.0 for color in colored.colors]


def test_the_less_probable_a_token_was_the_stronger_its_color_up_to_a_bound():
    probabilities = [1.0, 0.9, 0.5, 1e-2, 1e-4, 1e-9]
    colored = color_probabilities(list("abcdef"), [math.log(p) for p in probabilities])
    assert opacities(colored)[:5] == sorted(set(opacities(colored)[:5])) and opacities(colored)[0] == 0
    assert opacities(colored)[4] == opacities(colored)[5] < 1
    assert colored.notes[3] == "probability 0.01"


def test_a_token_of_unknown_or_infinitely_small_probability_is_shown():
    colored = color_probabilities(["x", "y"], [None, -math.inf])
    assert (colored.colors[0], colored.notes[0]) == ("", "")
    assert opacities(colored)[1] > 0.5 and colored.notes[1] == "probability 0"


def test_what_is_shown_is_the_text_with_no_marks_of_its_own():
    pieces = ["if a<b & ", 'c>"d":\n', "  <script>"]
    assert shown(color_probabilities(pieces, [None, -1.0, -2.0])) == "".join(pieces).replace("\n", "↵\n")
    assert "<script>" not in color_drafts(pieces, [1])._repr_html_()
    assert repr(color_drafts(pieces, [1])) == "ColoredTokens(3 tokens)"


def test_kept_drafts_are_colored_and_the_models_own_tokens_are_not():
    colored = color_drafts(list("pabXcYZ"), [2, 1, 0])  # a prompt of one token, and steps of three, two and one
    assert [piece for piece, color in zip(colored.pieces, colored.colors, strict=True) if color] == ["a", "b", "c"]
    assert colored.notes[0] == "" and colored.notes[3] == "step 1: the model's own"
    assert colored.notes[4] == "step 2: a draft that was kept"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: color_probabilities(["a"], []), r"logprobs must be as many as pieces \(1\), got 0"),
        (lambda: color_probabilities(["a"], [0.5]), "logprobs must be at most 0, got 0.5"),
        (lambda: color_probabilities(["a"], [math.nan]), "logprobs must be at most 0, got nan"),
        (lambda: color_drafts(["a"], [1]), r"pieces \(1\), got steps of 2"),
        (lambda: color_drafts(["a"], [-1]), "kept must be numbers of at least 0, got -1"),
    ],
)
def test_what_does_not_fit_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()

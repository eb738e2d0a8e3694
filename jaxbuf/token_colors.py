"""Tokens with colours behind them, as a notebook shows them: how probable each was, or which were kept drafts."""

import dataclasses
import html
import math
from collections.abc import Sequence

RED, GREEN = (214, 39, 40), (44, 160, 44)
DARKEST = 0.65  # the opacity of the strongest colour: text on it can be read, on white and on black
LEAST = math.log(1e-4)  # log-probability from which a token has the strongest colour


@dataclasses.dataclass(frozen=True, repr=False)
class ColoredTokens:
    """Tokens, each with a colour; a notebook shows it as text whose tokens have backgrounds.

    Attributes:
      pieces: The text of each token.
      colors: Of each token's background, in CSS; "" is none.
      notes: What a pointer that rests on a token shows; "" is nothing.
    """

    pieces: tuple[str, ...]
    colors: tuple[str, ...]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return f"ColoredTokens({len(self.pieces)} tokens)"

    def _repr_html_(self) -> str:
        spans = map(_span, self.pieces, self.colors, self.notes)
        return f'<div style="font-family: monospace; white-space: pre-wrap; line-height: 1.7">{"".join(spans)}</div>'


def color_probabilities(pieces: Sequence[str], logprobs: Sequence[float | None]) -> ColoredTokens:
    """Tokens that are the redder the less probable they were.

    A probability of 1 has no colour, and one of 1e-4 or less the strongest; between them the colour follows the
    logarithm.

    Args:
      pieces: The text of each token, for instance `[lm.decode([token]) for token in result.tokens]`.
      logprobs: The natural logarithm of each token's probability, as `LanguageModel.score` and
        `GenerationResult.logprobs` have it. None: nobody knows it, as of a prompt's first token; it has no colour.

    Raises:
      ValueError: There is not one of them for each token, or one is above 0 or no number.
    """
    if len(logprobs) != len(pieces):
        raise ValueError(f"logprobs must be as many as pieces ({len(pieces)}), got {len(logprobs)}")
    colors, notes = [], []
    for logprob in logprobs:
        if logprob is None:
            colors.append("")
            notes.append("")
            continue
        if not logprob <= 1e-5:  # what float32 makes of 0
            raise ValueError(f"logprobs must be at most 0, got {logprob}")
        colors.append(_color(RED, min(1.0, logprob / LEAST) if logprob < 0 else 0.0))
        notes.append(f"probability {math.exp(min(logprob, 0.0)):.2g}")
    return ColoredTokens(tuple(pieces), tuple(colors), tuple(notes))


def color_drafts(pieces: Sequence[str], kept: Sequence[int]) -> ColoredTokens:
    """Tokens of a drafted generation, green where they were drafts that the model kept.

    Each step of the model gives the drafts that it kept and, behind them, one token of its own.

    Args:
      pieces: The text of each token.
      kept: Of each step the number of drafts that were kept. Tokens before the first step, as those of a prompt, come
        first and have no colour.

    Raises:
      ValueError: A number is below 0, or the steps gave more tokens than there are.
    """
    if any(number < 0 for number in kept):
        raise ValueError(f"kept must be numbers of at least 0, got {min(kept)}")
    before = len(pieces) - sum(kept) - len(kept)
    if before < 0:
        raise ValueError(
            f"kept must leave as many tokens as there are pieces ({len(pieces)}), got steps of {len(pieces) - before}"
        )
    colors, notes = [""] * before, [""] * before
    for step, number in enumerate(kept, 1):
        colors += [_color(GREEN, 1.0)] * number + [""]
        notes += [f"step {step}: a draft that was kept"] * number + [f"step {step}: the model's own"]
    return ColoredTokens(tuple(pieces), tuple(colors), tuple(notes))


def _color(rgb: tuple[int, int, int], strength: float) -> str:
    return f"rgba({', '.join(map(str, rgb))}, {DARKEST * strength:.3f})" if strength > 0 else ""


def _span(piece: str, color: str, note: str) -> str:
    text = html.escape(piece).replace("\n", "↵\n")
    style = f' style="background: {color}"' if color else ""
    title = f' title="{html.escape(note)}"' if note else ""
    return f"<span{style}{title}>{text}</span>"

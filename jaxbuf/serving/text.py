"""Where a text that is still growing may be shown, and where it stops."""

import bisect
from collections.abc import Callable, Sequence


def settled(text: str, stops: Sequence[str]) -> int:
    """How many characters of a growing text are certain: not the end of a split character, nor of a possible stop."""
    text = text.rstrip("\N{REPLACEMENT CHARACTER}")
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for start in range(max(len(text) - longest, 0), len(text)):
        if any(stop.startswith(text[start:]) for stop in stops):
            return start
    return len(text)


def cut_at_stop(
    text: str, tokens: list[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> tuple[str, list[int], bool]:
    """Cuts a text before its first stop string, and its tokens after the one that completes it.

    Args:
      text: decode(tokens).
      tokens: What was generated.
      stops: Stop strings; a match may span tokens.
      decode: Of the model's tokenizer.

    Returns:
      The text, the tokens, and whether a stop string was found.
    """
    places = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    if not places:
        return text, tokens, False
    place, _ = min(places)

    def complete(count):
        return any(stop in decode(tokens[:count]) for stop in stops)

    count = bisect.bisect_left(range(len(tokens) + 1), True, key=complete)
    return text[:place], tokens[:count], True

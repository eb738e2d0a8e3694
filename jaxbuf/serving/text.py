"""From tokens that come a few at a time to text, which is certain before it is shown and ends at a stop string.

`tokenizers.decoders.DecodeStream` is not used: it raises where a byte token turns the characters of its run back into
undecoded bytes, and tells neither the undecoded bytes at the end of a text nor which token completed a stop string.
"""

import re
from collections.abc import Sequence

from tokenizers import Tokenizer, models

UNDECODED = "\N{REPLACEMENT CHARACTER}"  # what a decoder makes of bytes that are not, or not yet, a character
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


class TextStream:
    """The text of a growing list of tokens, without special tokens, up to the first stop string.

    Text is held back while a later token could change it: at the end, bytes that may become a character, and what may
    become a stop string. Hence the text does not depend on how the tokens are cut into calls, and without stop strings
    it is the tokenizer's decoding of all of them. Each call decodes its own tokens and those of the call before (the
    first token of a text may be decoded differently), so the work does not grow with the text.

    Of the tokens, those before `_begin` are never decoded again. Those in [_begin, _read) are decoded again as context:
    they give the first `_known` characters of every decoding. Those in [_read, _end) may have text that is not in
    `_decoded` yet.

    Attributes:
      tokens: What came so far; after a stop string, nothing behind the token that completed it.
      text: What is certain of their text.
      stop: The stop string that was found: the one that is complete first, before which the text ends. None: none was.
    """

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str] = ()):
        """Without a tokenizer all text is empty."""
        self.tokens: list[int] = []
        self.text = ""
        self.stop: str | None = None
        self._tokenizer = Tokenizer(models.BPE()) if tokenizer is None else tokenizer
        self._stops = stops
        self._longest_stop = max(map(len, stops), default=0)
        self._decoded = ""  # the text of tokens[:self._read], whole characters
        self._read = 0
        self._end = 0
        self._begin = 0
        self._known = 0
        self._searched = 0  # characters in which no stop string ends

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.stop is not None

    def extend(self, tokens: Sequence[int], *, last: bool) -> str:
        """Adds tokens, and returns the text that is certain now and was not before.

        Args:
          tokens: The next ones.
          last: None will follow, so nothing is held back.
        """
        self.tokens += tokens
        end = self._end = len(self.tokens) if last else self._end_of_whole(len(tokens))
        piece = self._decode(end)
        whole = self._decoded + (piece if last else piece.rstrip(UNDECODED))
        certain = len(whole) if last else settled(whole, self._stops)
        found = self._find_stop(whole)
        if found is not None:
            certain, stop_end = found
            self.stop = whole[certain:stop_end]
            self._cut(whole[:stop_end], end)
        elif piece and not piece.endswith(UNDECODED):
            self._decoded, self._begin, self._read, self._known = whole, self._read, end, 0
            self._known = len(self._decode(end))
        said, self.text = len(self.text), whole[:certain]
        return self.text[said:]

    def _decode(self, end: int) -> str:
        """The text of tokens[self._read : end]."""
        return self._tokenizer.decode(self.tokens[self._begin : end])[self._known :]

    def _end_of_whole(self, new: int) -> int:
        """How many tokens there are before those at the end that name a byte or have no text; `new` ones just came.

        A run of byte tokens becomes text as a whole: one byte more can turn its characters back into undecoded bytes.
        """
        for end in range(len(self.tokens), len(self.tokens) - new, -1):
            token = self.tokens[end - 1]
            if not BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token) or "") and self._tokenizer.decode([token]):
                return end
        return self._end

    def _find_stop(self, text: str) -> tuple[int, int] | None:
        """Where the stop string that is complete first begins and ends."""
        start = max(self._searched - self._longest_stop + 1, 0)
        found = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop, start)) >= 0]
        self._searched = len(text)
        if not found:
            return None
        end, place = min(found)
        return place, end

    def _cut(self, text: str, end: int) -> None:
        """Drops the tokens behind the one that completes `text`."""

        def complete(count: int) -> bool:
            return (self._decoded + self._decode(count)).startswith(text)

        count = next(count for count in range(self._read, end + 1) if complete(count))
        del self.tokens[count:]


def settled(text: str, stops: Sequence[str]) -> int:
    """How many characters of a growing text come before what may be the beginning of a stop string."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for start in range(max(len(text) - longest, 0), len(text)):
        if any(stop.startswith(text[start:]) for stop in stops):
            return start
    return len(text)

"""The sequences of a streamed data set, as a data set of grain whose position can be kept."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import numpy as np


class PackedStream(grain.IterDataset):
    """Sequences of a data set's documents, which lie one behind the other; behind the last comes the first again.

    Args:
      documents: A `datasets.IterableDataset`: each example is a dict.
      tokens_of: From an example to its tokens.
      length: Tokens of a sequence.
    """

    def __init__(self, documents: Any, tokens_of: Callable[[dict[str, Any]], Sequence[int]], length: int):
        super().__init__()
        self._settings = documents, tokens_of, length

    def __iter__(self) -> "_PackedIterator":
        return _PackedIterator(*self._settings)


class _PackedIterator(grain.DatasetIterator):
    """Sequences of packed documents. Its state is that of the data set before the document which the next token is of,
    and how many tokens of that document were used."""

    def __init__(self, documents: Any, tokens_of: Callable[[dict[str, Any]], Sequence[int]], length: int):
        super().__init__()
        self._documents, self._tokens_of, self._length = documents, tokens_of, length
        self._first = documents.state_dict()
        self.set_state({"documents": self._first, "used": 0})

    def __next__(self) -> np.ndarray:
        parts, missing = [], self._length
        while missing:
            if self._used == self._tokens.size:
                self._read()
            parts.append(self._tokens[self._used : self._used + missing])
            self._used, missing = self._used + parts[-1].size, missing - parts[-1].size
        return np.concatenate(parts)

    def _read(self) -> None:
        """Goes to the next document, behind the last one to the first."""
        self._before = self._documents.state_dict()
        example = next(self._examples, None)
        if example is None:
            if not self._some:
                raise ValueError("documents must hold tokens, got none in all of them")
            self.set_state({"documents": self._first, "used": 0})
            return
        self._tokens, self._used = np.asarray(self._tokens_of(example), np.int32), 0
        self._some = self._some or self._tokens.size > 0

    def get_state(self) -> dict[str, Any]:
        return {"documents": self._before, "used": self._used}

    def set_state(self, state: dict[str, Any]) -> None:
        self._documents.load_state_dict(state["documents"])
        self._examples: Iterator[dict[str, Any]] = iter(self._documents)
        self._before, self._tokens, self._used = state["documents"], np.zeros(0, np.int32), 0
        self._some = state["used"] > 0  # whether there was a token since the first document, as far as is known
        if state["used"]:
            self._read()
            self._used = state["used"]

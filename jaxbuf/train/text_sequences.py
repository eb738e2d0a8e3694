"""Sequences of tokens to train on: of files, of tokenised arrays and of Hugging Face data sets, read through grain.

Documents are packed: they lie one behind the other and are cut after every `length` tokens. So nothing is padded, and a
sequence may hold the end of one document and the beginning of others; attention is not masked at the border, only the
end token between texts marks it. Tokens behind the last whole sequence are left out.

What is trained asks for `batch(step)`. Files and arrays give any step's sequences at once, so the number of the step is
all that a resumed run needs. A data set that is streamed gives one step after the other: its position goes into
checkpoints.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxbuf.arguments import check_sizes
from jaxbuf.axes import Int32
from jaxbuf.models.language_model import LanguageModel

DIGEST_TOKENS = 4096  # spread over a text, which tell it from others
HELD_OUT_DOCUMENTS = 256  # of a data set, its first, which models are tried on


class Sequences(Protocol):
    """What a training reads. Whoever has an attribute `identity`, a text, is told from other data at a resumption."""

    def batch(self, step: int) -> Int32[np.ndarray, "batch time"]:
        """The sequences of a step: the same ones whenever the step is asked for.

        Args:
          step: From 0.
        """
        ...


@runtime_checkable
class Stream(Sequences, Protocol):
    """Sequences that come one step after the other, from a position that can be kept and returned to."""

    def get_state(self) -> dict[str, Any]:
        """The position behind the latest batch, in what JSON can hold."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position.

        Args:
          state: From `get_state`.
        """
        ...


class PackedDocuments:
    """Documents one behind the other, cut into sequences, any of which can be read: a source for grain.

    Args:
      documents: integers [n] each, memory-mapped ones among them: only what is asked for is read.
      length: Tokens of a sequence.

    Raises:
      ValueError: A document is something else, or all of them hold less than one sequence.
    """

    def __init__(self, documents: Sequence[np.ndarray], length: int):
        check_sizes(length=length)
        for document in documents:
            if document.ndim != 1 or not np.issubdtype(document.dtype, np.integer):
                raise ValueError(f"documents must be integers [n], got {document.dtype} {document.shape}")
        self._documents, self._length = documents, length
        self._ends = np.cumsum([document.size for document in documents], dtype=np.int64)
        if not len(self):
            raise ValueError(f"documents must hold a sequence of length ({length}) or more, got {self.tokens} tokens")

    @property
    def tokens(self) -> int:
        """Of all documents."""
        return int(self._ends[-1]) if self._ends.size else 0

    def __len__(self) -> int:
        return self.tokens // self._length

    def __getitem__(self, index: int) -> np.ndarray:
        """int32 [length]: sequence number `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"index must be in [0, {len(self)}), got {index}")
        return self.read(index * self._length, self._length)

    def read(self, start: int, count: int) -> np.ndarray:
        """int32 [count]: the tokens from a place on, of as many documents as it takes.

        Args:
          start: From 0, over all documents.
          count: At most what is left.
        """
        number = int(np.searchsorted(self._ends, start, side="right"))
        parts = [np.zeros(0, np.int32)]
        while count > 0:
            document = self._documents[number]
            inside = start - (int(self._ends[number]) - document.size)
            parts.append(document[inside : inside + count].astype(np.int32))
            start, count, number = start + parts[-1].size, count - parts[-1].size, number + 1
        return np.concatenate(parts)


class DocumentSequences:
    """Batches of sequences that are cut from packed documents and shuffled anew each time all of them were read.

    Which sequences a step has depends on the seed and the step alone.

    Args:
      documents, length: As in `PackedDocuments`.
      rows: Sequences of a step.
      seed: Of the order.
    """

    def __init__(self, documents: Sequence[np.ndarray], rows: int, length: int, *, seed: int = 0):
        check_sizes(rows=rows)
        import grain  # here, because only who reads texts needs it

        packed = PackedDocuments(documents, length)
        self._batches = grain.MapDataset.source(packed).shuffle(seed=seed).repeat().batch(rows)
        places = np.unique(np.linspace(0, packed.tokens - 1, DIGEST_TOKENS, dtype=np.int64))
        read = np.concatenate([packed.read(int(place), 1) for place in places])
        self.identity = f"{packed.tokens} tokens, {hashlib.sha256(read.tobytes()).hexdigest()[:16]}"

    def batch(self, step: int) -> np.ndarray:
        """int32 [rows, length], as in `Sequences.batch`."""
        return np.asarray(self._batches[step], np.int32)


class StreamedSequences:
    """Batches of sequences of a Hugging Face data set that is streamed, packed in the order in which it is stored.

    Behind its last document comes the first one again. Nothing is shuffled: what a buffer of documents to draw from
    holds could not be resumed exactly.

    Args:
      documents: A `datasets.IterableDataset`: each example is a dict.
      encode: From the text of an example to its tokens, the end token among them.
      rows, length: Sequences of a step, and their tokens.
      field: The name of the text in an example.
      identity: What the data are, as in `Sequences`.

    Raises:
      ValueError: At an example without such a text; at a step that is not the next; the data set has no tokens.
    """

    def __init__(
        self,
        documents: Any,
        encode: Callable[[str], Sequence[int]],
        rows: int,
        length: int,
        *,
        field: str = "text",
        identity: str = "",
    ):
        from jaxbuf.train.packed_stream import PackedStream  # here, because it needs grain

        check_sizes(rows=rows, length=length)

        def tokens_of(example: dict[str, Any]) -> Sequence[int]:
            return encode(_text_of(example, field))

        self._batches = iter(PackedStream(documents, tokens_of, length).batch(rows))
        self._step, self._latest = 0, None
        self.identity = identity

    def batch(self, step: int) -> np.ndarray:
        """int32 [rows, length]: the next step's, or the latest step's once more.

        Args:
          step: From 0.
        """
        if self._latest is None or step != self._step - 1:
            if step != self._step:
                raise ValueError(f"step must be {self._step}, the next one of a stream, got {step}")
            self._latest = np.asarray(next(self._batches), np.int32)
            self._step += 1
        return self._latest

    def get_state(self) -> dict[str, Any]:
        """As in `Stream.get_state`."""
        return {"step": self._step, "position": self._batches.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """As in `Stream.set_state`.

        Args:
          state: From `get_state`.
        """
        self._batches.set_state(state["position"])
        self._step, self._latest = state["step"], None


def read_documents(lm: LanguageModel, files: Sequence[str | Path], *, name: str = "files") -> list[np.ndarray]:
    """The documents of files: integers [n] each.

    Args:
      lm: Whose tokenizer reads texts; the model's end token, if it has one, is put behind each.
      files: A name that ends in .npy is that of a tokenised array, which is memory-mapped and taken as it is; others
        are texts in UTF-8.
      name: What errors call the files.

    Raises:
      ValueError: A file cannot be read or holds something else; or it is a text, and the model has no tokenizer.
    """
    return [_array(name, Path(file)) if str(file).endswith(".npy") else _text(lm, name, Path(file)) for file in files]


def stream_dataset(
    lm: LanguageModel, name: str, rows: int, length: int, *, split: str = "train", field: str = "text"
) -> tuple[StreamedSequences, list[np.ndarray]]:
    """The sequences of a Hugging Face data set, which is read as training goes on and never as a whole.

    Args:
      lm: Whose tokenizer reads the texts; the model's end token, if it has one, is put behind each.
      name: Its id, or a directory of files that `datasets` can read, with a configuration behind a colon, if any.
      rows, length, field: As in `StreamedSequences`.
      split: Of the data set.

    Returns:
      The sequences, which begin behind the first `HELD_OUT_DOCUMENTS` documents, and those documents.

    Raises:
      ImportError: `datasets` is not installed.
      ValueError: There is no such data set, configuration or split, or the model has no tokenizer.
    """
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise ImportError("datasets must be installed to read a data set: pip install 'jaxbuf[datasets]'") from error
    _need_tokenizer(lm, "dataset")
    source, _, configuration = name.partition(":")

    def encode(text: str) -> list[int]:
        return _encoded(lm, text)

    try:
        documents = datasets.load_dataset(source, configuration or None, split=split, streaming=True)
        first = list(documents.take(HELD_OUT_DOCUMENTS))
    except (DatasetsError, OSError, ValueError) as error:
        raise ValueError(f"dataset {name} ({split}) cannot be read: {error}") from error
    held_out = [np.asarray(encode(_text_of(example, field)), np.int32) for example in first]
    rest, identity = documents.skip(HELD_OUT_DOCUMENTS), f"{name}, {split}, {field}"
    sequences = StreamedSequences(rest, encode, rows, length, field=field, identity=identity)
    return sequences, held_out


def end_of(documents: Sequence[np.ndarray], count: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Packed documents without their last tokens, and those: int32 [count].

    Args:
      documents: integers [n] each; what is left of them is not copied.
      count: At most all tokens.
    """
    packed = PackedDocuments(documents, 1)
    last, left = packed.read(packed.tokens - count, count), []
    kept = packed.tokens - count
    for document in documents:
        if kept > 0:
            left.append(document[:kept])
        kept -= document.size
    return left, last


def _text_of(example: dict[str, Any], field: str) -> str:
    text = example.get(field)
    if not isinstance(text, str):
        names = ", ".join(sorted(example))
        raise ValueError(f"field must name a text of every example, got {field!r} where there are {names}")
    return text


def _encoded(lm: LanguageModel, text: str) -> list[int]:
    return [*lm.encode(text), *lm.config.eos_token_ids[:1]]


def _need_tokenizer(lm: LanguageModel, argument: str) -> None:
    if lm.tokenizer is None:
        raise ValueError(f"{argument} must hold token ids in .npy, got text: the model {lm.name!r} has no tokenizer")


def _array(name: str, path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} must be readable, got {path}: {error}") from error
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} must hold token ids [n], got {array.dtype} {array.shape} in {path}")
    return array


def _text(lm: LanguageModel, name: str, path: Path) -> np.ndarray:
    _need_tokenizer(lm, name)
    try:
        return np.asarray(_encoded(lm, path.read_text(encoding="utf-8")), np.int32)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} must be UTF-8 texts or .npy, got {path}: {error}") from error
    except OSError as error:
        raise ValueError(f"{name} must be readable, got {path}: {error.strerror or error}") from error

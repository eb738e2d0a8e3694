"""The training text: collected, deduplicated, split, tokenised and cut into sequences.

On disk (`data/demo`): `train/PACKAGE.txt`, `heldout/PACKAGE.txt` (documents of training packages that were kept back)
and `package/PACKAGE.txt` (a package kept back whole), documents separated by a form feed; `manifest.json`;
`tokenizer.json`; `train.npy`, `heldout.npy`, `package.npy` (uint16, every document followed by the end-of-text token).
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from demo_text import prose, sources
from jaxbuf.train.evaluation import END_OF_TEXT

DOCUMENT_BREAK = "\f\n"
SPLITS = ("train", "heldout", "package")


def clean(path: str, content: str) -> str:
    """The prose of one file, by its name: .pod, .html (also .html.en), anything else as plain text."""
    if path.endswith(".pod"):
        blocks = prose.pod_blocks(content)
    elif re.search(r"\.x?html?(\.en)?$", path):
        blocks = prose.html_blocks(content)
    else:
        blocks = prose.text_blocks(content)
    return prose.render(prose.prose(blocks))


def is_held_out(name: str, share: float = 0.02) -> bool:
    """Whether the document of this name ("package/path") is kept from training: a hash of the name below `share`."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") < share * 2**64


def deduplicate(text: str, seen: set[bytes], minimum: int = 40) -> str:
    """Drops paragraphs of at least `minimum` characters that are in `seen` (case and punctuation aside); adds the rest.

    A heading or term whose paragraph was dropped goes with it.
    """
    kept: list[str] = []
    leading: list[str] = []
    for line in text.splitlines():
        if not line:
            continue
        if len(line) < minimum and not line.startswith("- "):
            leading.append(line)
            continue
        digest = hashlib.sha256(re.sub(r"[^a-z0-9]+", " ", line.lower()).strip().encode()).digest()[:12]
        if digest not in seen:
            seen.add(digest)
            kept += [*leading, line]
        leading = []
    lines: list[str] = []
    for line in kept:
        if lines and not (line.startswith("- ") and lines[-1].startswith("- ")):
            lines.append("")
        lines.append(line)
    return "\n".join(lines) + "\n" if lines else ""


def collect(
    packages: Path, folder: Path, *, chosen: Sequence[sources.Source] = sources.SOURCES, minimum: int = 600
) -> list[dict[str, Any]]:
    """Writes the text of every package below `folder` and returns the manifest's rows.

    Training documents are deduplicated first, held-out ones against them and among themselves, so that no paragraph of
    40 characters or more of a held-out document is in the training text.

    Args:
      packages: The folder of .deb files.
      folder: Receives train/, heldout/ and package/.
      chosen: The packages to read.
      minimum: Shorter documents (in bytes) are dropped.

    Raises:
      FileNotFoundError: A package is missing; nothing was changed then.
      RuntimeError: A package cannot be read.
    """
    files = [sources.find_package(packages, source.package) for source in chosen]
    for stale in (path for split in SPLITS for path in (folder / split).glob("*.txt")):
        stale.unlink()
    rows: list[dict[str, Any]] = []
    kept_back: list[tuple[sources.Source, str, list[tuple[str, str]]]] = []
    seen: set[bytes] = set()
    for source, file in zip(chosen, files, strict=True):
        documents = sorted(
            (path, text) for path, content in sources.read_package(source, file) if (text := clean(path, content))
        )
        split = "package" if source.held_out else "heldout"
        back = [pair for pair in documents if source.held_out or is_held_out(f"{source.package}/{pair[0]}")]
        kept_back.append((source, split, back))
        training = [] if source.held_out else [pair for pair in documents if pair not in back]
        texts = _keep((text for _, text in training), seen, minimum)
        row: dict[str, Any] = {"package": source.package, "version": sources.version(file), "licence": source.licence}
        rows.append(
            row | {"train_documents": len(texts), "train_bytes": _write(folder, "train", source.package, texts)}
        )
    for row, (source, split, back) in zip(rows, kept_back, strict=True):
        texts = _keep((text for _, text in back), seen, minimum)
        row |= {f"{split}_documents": len(texts), f"{split}_bytes": _write(folder, split, source.package, texts)}
    return rows


def _keep(texts: Iterable[str], seen: set[bytes], minimum: int) -> list[str]:
    unique = (deduplicate(text, seen) for text in texts)
    return [text for text in unique if len(text.encode()) >= minimum]


def _write(folder: Path, split: str, package: str, texts: list[str]) -> int:
    path = folder / split / f"{package}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    if texts:
        path.write_text(DOCUMENT_BREAK.join(texts), encoding="utf-8", newline="")
    return sum(len(text.encode()) for text in texts)


def documents(folder: Path, split: str) -> list[str]:
    """The documents of a split, package by package in the order of their names.

    Raises:
      FileNotFoundError: The split is not there; scripts/prepare_demo_data writes it.
    """
    files = sorted((folder / split).glob("*.txt"))
    if not files:
        raise FileNotFoundError(f"no text in {folder / split}; run scripts/prepare_demo_data first")
    return [text for file in files for text in file.read_bytes().decode().split(DOCUMENT_BREAK)]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer of `vocab_size` entries; id 0 is the end-of-text token. Every string round-trips."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenise(tokenizer: tokenizers.Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """uint16 tokens of all documents, each followed by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    encoded = (np.asarray([*encoding.ids, end], np.uint16) for encoding in tokenizer.encode_batch(list(texts)))
    return np.concatenate(list(encoded))


def write_arrays(folder: Path, tokenizer: tokenizers.Tokenizer) -> dict[str, int]:
    """Writes SPLIT.npy for every split and returns their lengths in tokens."""
    lengths = {}
    for split in SPLITS:
        tokens = tokenise(tokenizer, documents(folder, split))
        np.save(folder / f"{split}.npy", tokens)
        lengths[split] = int(tokens.size)
    return lengths


def shuffle_documents(tokens: np.ndarray, end: int, seed: int) -> np.ndarray:
    """The same documents (each ends with the token `end`) in an order drawn from `seed`."""
    breaks = np.flatnonzero(tokens == end) + 1
    pieces = np.split(tokens, breaks[:-1] if breaks.size and breaks[-1] == tokens.size else breaks)
    order = np.random.default_rng(seed).permutation(len(pieces))
    return np.concatenate([pieces[i] for i in order])


def pack(tokens: np.ndarray, length: int, *, offset: int = 0) -> np.ndarray:
    """Cuts a stream of documents into sequences that overlap by one token.

    Args:
      tokens: [n], documents separated by the end-of-text token.
      length: Tokens to predict in a sequence; a row holds length + 1.
      offset: Where in the stream to start (it wraps around), so that epochs cut at different places.

    Returns:
      [n // length, length + 1], in the stream's order; the stream's tail that fills no row is left out.

    Raises:
      ValueError: The stream is shorter than one row.
    """
    if tokens.size < length + 1:
        raise ValueError(f"the text has {tokens.size} tokens, a row needs {length + 1}")
    stream = np.roll(tokens, -offset)
    rows = (stream.size - 1) // length
    return np.concatenate(
        [stream[: rows * length].reshape(rows, length), stream[length : rows * length + 1 : length, None]], axis=1
    )


def read_manifest(folder: Path) -> dict:
    """The manifest that scripts/prepare_demo_data wrote."""
    return json.loads((folder / "manifest.json").read_text())


def iterate_bytes(texts: Sequence[str]) -> Iterator[bytes]:
    """The UTF-8 bytes of each document."""
    return (text.encode() for text in texts)

"""Sequences to train on: how documents are packed, that a step gives the same whenever it is asked for, and streams."""

import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest

import jaxbuf
from jaxbuf.train.text_sequences import (
    HELD_OUT_DOCUMENTS,
    DocumentSequences,
    PackedDocuments,
    StreamedSequences,
    end_of,
    read_documents,
    stream_dataset,
)


@pytest.fixture(scope="module")
def demo():
    return jaxbuf.load("demo", progress=False)


def drawn(rng, *sizes):
    return [rng.integers(0, 4096, size).astype(np.uint16) for size in sizes]


def test_packed_documents_are_their_tokens_in_a_row_without_the_last_rest(rng):
    documents = drawn(rng, 5, 0, 1, 17, 3, 40)
    whole, packed = np.concatenate(documents), PackedDocuments(documents, 7)
    assert len(packed) == 66 // 7 and packed.tokens == 66
    np.testing.assert_array_equal(np.stack([packed[i] for i in range(len(packed))]).ravel(), whole[:63])
    for start, count in itertools.product((0, 4, 5, 6, 65), (0, 1)):
        np.testing.assert_array_equal(packed.read(start, count), whole[start : start + count])
    with pytest.raises(IndexError):
        packed[9]
    left, last = end_of(documents, 50)
    np.testing.assert_array_equal(np.concatenate([*left, last]), whole)
    assert last.shape == (50,) and sum(document.size for document in left) == 16


def test_a_step_depends_on_the_seed_alone_and_an_epoch_has_every_sequence_once(rng):
    documents = drawn(rng, 33, 70, 25)
    sequences, again = (DocumentSequences(documents, 4, 8, seed=3) for _ in range(2))
    steps = [sequences.batch(step) for step in range(8)]
    for step in (6, 0, 7, 3):
        np.testing.assert_array_equal(again.batch(step), steps[step])
    packed = PackedDocuments(documents, 8)
    expected = sorted(packed[i].tolist() for i in range(16))
    first, second = (np.concatenate(steps[at : at + 4]).tolist() for at in (0, 4))
    assert sorted(first) == expected == sorted(second) and first != second
    assert steps[0].dtype == np.int32 and steps[0].shape == (4, 8)
    assert not np.array_equal(DocumentSequences(documents, 4, 8, seed=4).batch(0), steps[0])
    assert sequences.identity != DocumentSequences(drawn(rng, 128), 4, 8).identity


def test_files_are_texts_with_an_end_token_or_arrays_as_they_are(demo, rng, tmp_path):
    (tmp_path / "a.txt").write_text("The configuration file", encoding="utf-8")
    np.save(tmp_path / "b.npy", drawn(rng, 50)[0])
    text, array = read_documents(demo, [tmp_path / "a.txt", tmp_path / "b.npy"])
    assert text.tolist() == [*demo.encode("The configuration file"), demo.config.eos_token_ids[0]]
    assert isinstance(array, np.memmap) and array.dtype == np.uint16
    np.testing.assert_array_equal(array, np.load(tmp_path / "b.npy"))
    np.save(tmp_path / "c.npy", np.zeros((2, 3)))
    (tmp_path / "d.txt").write_bytes(b"\xff\xfe")
    for name, message in (
        ("c.npy", r"files must hold token ids \[n\], got float64 \(2, 3\)"),
        ("d.txt", "files must be UTF-8 texts or .npy"),
        ("e.npy", "files must be readable, got .*e.npy"),
        ("e.txt", "files must be readable, got .*e.txt: No such file"),
    ):
        with pytest.raises(ValueError, match=message):
            read_documents(demo, [tmp_path / name])
    with pytest.raises(ValueError, match=r"documents must hold a sequence of length \(51\) or more, got 50 tokens"):
        DocumentSequences([array], 1, 51)


@pytest.fixture(scope="module")
def data_set(tmp_path_factory):
    """A directory that `datasets` reads, of two files of documents."""
    directory = tmp_path_factory.mktemp("texts")
    texts = [f"Document {number}: " + "word " * (number % 7) for number in range(HELD_OUT_DOCUMENTS + 30)]
    for name, part in (("a", texts[:200]), ("b", texts[200:])):
        lines = [json.dumps({"text": text, "number": 1}) for text in part]
        (directory / f"train-{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return directory, texts


@pytest.mark.slow
@pytest.mark.foreign
@pytest.mark.filterwarnings("default")  # of libraries that read the data set
def test_a_streamed_data_set_is_packed_in_its_order_and_goes_on_where_it_was(demo, data_set):
    directory, texts = data_set
    end = demo.config.eos_token_ids[0]
    sequences, held_out = stream_dataset(demo, str(directory), 2, 16)
    assert [document.tolist() for document in held_out] == [
        [*demo.encode(text), end] for text in texts[:HELD_OUT_DOCUMENTS]
    ]
    rest = [token for text in texts[HELD_OUT_DOCUMENTS:] for token in [*demo.encode(text), end]]
    steps = 3 * len(rest) // 32  # the data set begins anew twice
    expected = np.asarray((rest * 4)[: 32 * steps]).reshape(steps, 2, 16)
    states = []
    for step in range(steps):
        np.testing.assert_array_equal(sequences.batch(step), expected[step])
        np.testing.assert_array_equal(sequences.batch(step), expected[step])  # once more, for a step that failed
        states.append(json.loads(json.dumps(sequences.get_state())))
    with pytest.raises(ValueError, match=f"step must be {steps}, the next one of a stream, got 0"):
        sequences.batch(0)
    fresh, _ = stream_dataset(demo, str(directory), 2, 16)
    for step in (0, 1, steps // 3, steps // 2, steps - 2):
        fresh.set_state(states[step])
        np.testing.assert_array_equal(fresh.batch(step + 1), expected[step + 1])


@pytest.mark.slow
@pytest.mark.foreign
@pytest.mark.filterwarnings("default")
def test_what_is_no_data_set_of_texts_is_an_error_that_says_so(demo, data_set, tmp_path):
    directory = str(data_set[0])
    with pytest.raises(ValueError, match="field must name a text of every example, got 'number' where there are"):
        stream_dataset(demo, directory, 1, 8, field="number")
    with pytest.raises(ValueError, match=r"dataset .* \(test\) cannot be read"):
        stream_dataset(demo, directory, 1, 8, split="test")
    import datasets

    nothing = datasets.Dataset.from_list([{"text": ""}] * 3).to_iterable_dataset()
    with pytest.raises(ValueError, match="documents must hold tokens, got none in all of them"):
        StreamedSequences(nothing, lambda text: [], 1, 8).batch(0)
    code = "import sys; sys.modules['datasets'] = sys.modules['grain'] = None"
    code += "; import jaxbuf; from jaxbuf.train import text_sequences"
    code += "; text_sequences.stream_dataset(jaxbuf.load('demo', progress=False), 'some', 1, 8)"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "ImportError: datasets must be installed to read a data set: pip install 'jaxbuf[datasets]'" in done.stderr

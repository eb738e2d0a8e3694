import numpy as np
import pytest
from demo_text import data, prose, sources

PAGE = """<html><head><title>x</title><style>p {}</style></head><body>
<div class="related"><p>This is navigation that no reader of the page would ever miss.</p></div>
<h1>Writing a file<a class="headerlink" href="#">¶</a></h1>
<p>The file is written to the disk before
the function <code>close()</code> returns&nbsp;to its caller.
<pre>f.close()  # and this is a listing of the code</pre>
<p>If you need more than that, then call it in the following way. For example:</p>
<div class="highlight"><pre>os.fsync(f)</pre></div>
<table><tr><td>The cells of a table are not part of the prose of a page.</td></tr></table>
<h2>Empty</h2>
<h2>Lists</h2>
<ul><li><p>The first of the items is in the list, and it reads well.</p></li>
<li>The second of the items is in the list as well, after it.</ul>
<dl><dt>name</dt><dd>The name of the file that is to be written, or None.</dd></dl>
<p>x = y + z; a[b] == {c}; !!! ###</p>
</body></html>"""


def test_html_becomes_paragraphs_headings_and_items():
    assert data.clean("a.html", PAGE) == (
        "Writing a file\n\nThe file is written to the disk before the function close() returns to its caller.\n\n"
        "If you need more than that, then call it in the following way.\n\nLists\n\n"
        "- The first of the items is in the list, and it reads well.\n"
        "- The second of the items is in the list as well, after it.\n\n"
        "name\n\nThe name of the file that is to be written, or None.\n"
    )


def test_pod_loses_its_markup_and_its_listings():
    pod = (
        "=head1 NAME\n\nThe operator C<< a->b >> is the one that B<everyone I<uses>> in E<lt>codeE<gt>, "
        "see L<the page|perlop>.\n\n    verbatim listing of the code that is in the page\n\n"
        "=begin html\n\nThis is not for the reader of the text at all.\n\n"
        "=end html\n\nThe text goes on after it has been interrupted.\n"
    )
    assert data.clean("a.pod", pod) == (
        "NAME\n\nThe operator a->b is the one that everyone uses in <code>, see the page.\n\n"
        "The text goes on after it has been interrupted.\n"
    )


def test_wrapped_text_is_joined():
    text = "Title of it\n\n   The lines of this paragraph are\n   wrapped, as they are in a file.\n"
    assert (
        data.clean("a.txt", text) == "Title of it\n\nThe lines of this paragraph are wrapped, as they are in a file.\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "int main(int argc, char **argv) { return 0; } is what it is, and",
        "PyObject PyList_New Py_ssize_t len PyErr_SetString PyExc_TypeError.",
        "Too short.",
        "The sentence that never comes to an end because it has been cut",
    ],
)
def test_what_is_not_prose_is_dropped(text):
    assert not prose.is_prose(prose.Block("text", text))


def test_paragraphs_are_kept_once():
    seen = set()
    long = "The paragraph that is in both of the documents is longer than forty characters."
    first = data.deduplicate(f"Heading\n\n{long}\n\nShort end.\n", seen)
    second = data.deduplicate(f"Heading\n\n{long.upper()}\n\nOther\n\n{long[::-1]}\n", seen)
    assert long in first
    assert second == f"Other\n\n{long[::-1]}\n"


def test_the_split_depends_on_the_name_only_and_has_the_asked_share():
    names = [f"package/{i}.html" for i in range(4000)]
    share = np.mean([data.is_held_out(name, 0.1) for name in names])
    assert 0.07 < share < 0.13
    assert [data.is_held_out(name) for name in names] == [data.is_held_out(name) for name in names]


def test_every_source_names_a_package_and_a_permissive_licence():
    packages = [source.package for source in sources.SOURCES]
    assert len(set(packages)) == len(packages)
    assert any(source.held_out for source in sources.SOURCES)
    for source in sources.SOURCES:
        assert source.licence and "GPL" not in source.licence
        assert not source.selects("usr/share/doc/x/copyright")
        assert not source.selects("usr/share/doc/x/html/genindex.html")


def test_the_tokenizer_returns_every_text(rng):
    texts = ["The quick brown fox jumps over the lazy dog. " * 20]
    tokenizer = data.train_tokenizer(texts, 300)
    wild = "".join(chr(c) for c in rng.integers(1, 0xD7FF, 200)) + " \n\t\x00 naïve — 漢字 🙂"
    for text in [*texts, wild, "", " leading", "trailing \n\n"]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id(data.END_OF_TEXT) == 0
    tokens = data.tokenise(tokenizer, texts)
    assert tokens.dtype == np.uint16 and tokens[-1] == 0 and np.count_nonzero(tokens == 0) == 1


def test_packed_rows_overlap_by_one_and_lose_nothing_but_the_tail(rng):
    tokens = rng.integers(1, 1000, 103)
    rows = data.pack(tokens, 10)
    assert rows.shape == (10, 11)
    np.testing.assert_array_equal(rows[:, :-1].ravel(), tokens[:100])
    np.testing.assert_array_equal(rows[:-1, -1], rows[1:, 0])
    assert rows[-1, -1] == tokens[100]
    with pytest.raises(ValueError, match="the text has 5 tokens, a row needs 11"):
        data.pack(tokens[:5], 10)


def test_shuffling_keeps_documents_whole(rng):
    documents = [np.append(rng.integers(1, 9, rng.integers(1, 6)), 0) for _ in range(30)]
    shuffled = data.shuffle_documents(np.concatenate(documents), 0, seed=1)
    pieces = [tuple(piece) for piece in np.split(shuffled, np.flatnonzero(shuffled == 0) + 1)[:-1]]
    assert sorted(pieces) == sorted(tuple(document) for document in documents)
    assert pieces != [tuple(document) for document in documents]


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Three packages without archives: what `read_package` would have found in them."""
    paragraphs = [f"The paragraph of number {i} is one that no other document of the package has." for i in range(90)]
    found = {
        "first": [(f"{i}.txt", "\n\n".join(paragraphs[i : i + 20])) for i in range(0, 60, 20)],
        "second": [("only.txt", "\n\n".join(paragraphs[40:80]))],
        "kept-back": [("only.txt", "\n\n".join(paragraphs[70:]))],
    }
    for package in found:
        (tmp_path / f"{package}_1.deb").touch()
    monkeypatch.setattr(sources, "read_package", lambda source, file: iter(found[source.package]))
    monkeypatch.setattr(sources, "version", lambda file: file.stem.split("_")[1])
    monkeypatch.setattr(data, "is_held_out", lambda name: name == "first/20.txt")
    return tmp_path, [sources.Source(name, "MIT", ".", held_out=name == "kept-back") for name in found]


def test_held_out_text_is_in_no_training_document(packages, tmp_path):
    folder, chosen = packages
    stale = tmp_path / "text/train/gone.txt"
    stale.parent.mkdir(parents=True)
    stale.touch()
    rows = data.collect(folder, tmp_path / "text", chosen=chosen)
    assert not stale.exists()
    texts = {split: data.documents(tmp_path / "text", split) for split in data.SPLITS}
    assert [len(texts[split]) for split in data.SPLITS] == [3, 1, 1]
    lines = [line for split in data.SPLITS for text in texts[split] for line in text.splitlines() if line]
    assert len(lines) == len(set(lines)) == 90
    for row, name in zip(rows, ("first", "second", "kept-back"), strict=True):
        assert (row["package"], row["version"], row["licence"]) == (name, "1", "MIT")
    for split in data.SPLITS:
        assert sum(row.get(f"{split}_bytes", 0) for row in rows) == sum(len(text.encode()) for text in texts[split])
        assert sum(row.get(f"{split}_documents", 0) for row in rows) == len(texts[split])


def test_a_missing_package_is_named_and_changes_nothing(packages, tmp_path):
    folder, chosen = packages
    data.collect(folder, tmp_path / "text", chosen=chosen)
    before = data.documents(tmp_path / "text", "train")
    (folder / "second_1.deb").unlink()
    with pytest.raises(FileNotFoundError, match=r"second: no second_\*.deb in .*prepare_demo_data --install"):
        data.collect(folder, tmp_path / "text", chosen=chosen)
    assert data.documents(tmp_path / "text", "train") == before

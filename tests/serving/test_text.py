"""Text that comes in pieces is the text of the whole, however its tokens are cut."""

import pytest
from tokenizers import Tokenizer, decoders, models

from jaxbuf.serving.text import TextStream, settled
from tests.serving.conftest import byte_tokenizer

TEXT = "naïve 東京 🙂 ﬁn — done\n"


def byte_fallback_tokenizer() -> Tokenizer:
    """As of SentencePiece models: words that begin with ▁, characters, and a token for each byte."""
    words = ["<unk>", "▁a", "▁the", "b", "é", "東", "▁", ".", *(f"<0x{byte:02X}>" for byte in range(256)), "</s>"]
    tokenizer = Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def draw(tokenizer, rng):
    """Arbitrary tokens, words and special tokens and any bytes, with whole characters among them."""
    ids = [*rng.integers(0, tokenizer.get_vocab_size(), 20), *rng.integers(0, 8, 20)]
    units = [[int(token)] for token in ids] + [tokenizer.encode(character).ids for character in TEXT]
    return [token for i in rng.permutation(len(units)) for token in units[i]]


def cuts(rng, tokens):
    """The tokens in pieces of 1 to 9."""
    while tokens:
        size = int(rng.integers(1, 10))
        piece, tokens = tokens[:size], tokens[size:]
        yield piece, not tokens


def stream(tokenizer, pieces, stops=()):
    text, said = TextStream(tokenizer, stops), []
    for piece, last in pieces:
        said.append(text.extend(piece, last=last))
        if text.stopped:
            break
    return text, said


@pytest.mark.parametrize("make", [byte_tokenizer, byte_fallback_tokenizer])
def test_the_pieces_are_the_decoding_of_all_tokens(rng, make):
    tokenizer, emoji = make(), 0
    for _ in range(200):
        tokens = draw(tokenizer, rng)
        text, said = stream(tokenizer, cuts(rng, tokens))
        assert "".join(said) == text.text == tokenizer.decode(tokens)
        assert (text.tokens, text.stopped) == (tokens, False)
        emoji += "🙂" in text.text
    assert emoji  # four tokens


def test_a_character_is_never_split():
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode(TEXT).ids
    _, said = stream(tokenizer, [([token], token is tokens[-1]) for token in tokens])
    assert [piece for piece in said if piece] == list(TEXT)


def first_stop(text, stops):
    """By definition: the shortest beginning of the text that ends with a stop string, and where that one begins."""
    for end in range(len(text) + 1):
        places = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if places:
            return min(places), end
    return None


@pytest.mark.parametrize("make", [byte_tokenizer, byte_fallback_tokenizer])
def test_a_text_ends_at_the_stop_string_that_is_complete_first(rng, make):
    tokenizer, overlapping = make(), 0
    for _ in range(200):
        tokens = draw(tokenizer, rng)
        whole = tokenizer.decode(tokens)
        places = rng.integers(0, len(whole) - 6, 3)
        stops = [whole[place : place + size] for place, size in zip(places, (1, 4, 6), strict=True)]
        start, end = first_stop(whole, stops)
        overlapping += any(0 < whole.find(stop) < end < whole.find(stop) + len(stop) for stop in stops)
        text, said = stream(tokenizer, cuts(rng, tokens), stops)
        assert text.stopped and "".join(said) == text.text == whole[:start]
        count = next(n for n in range(len(tokens) + 1) if tokenizer.decode(tokens[:n]).startswith(whole[:end]))
        assert text.tokens == tokens[:count]
    assert overlapping


def test_the_work_does_not_grow_with_the_text(rng):
    tokenizer, decoded = byte_tokenizer(), []

    class Counting:
        def decode(self, tokens):
            decoded.append(len(tokens))
            return tokenizer.decode(tokens)

        def id_to_token(self, token):
            return tokenizer.id_to_token(token)

    tokens = tokenizer.encode(TEXT * 100).ids
    pieces = [(tokens[i : i + 16], i + 16 >= len(tokens)) for i in range(0, len(tokens), 16)]
    text, _ = stream(Counting(), pieces, ["never there"])
    assert text.text == TEXT * 100
    assert max(decoded) < 100 and sum(decoded) < 5 * len(tokens)


def test_without_a_tokenizer_there_is_no_text():
    text, said = stream(None, [([1, 2], False), ([3], True)])
    assert (said, text.text, text.tokens) == (["", ""], "", [1, 2, 3])


def test_what_could_become_a_stop_string_is_held_back():
    assert settled("so far so go", ["good"]) == len("so far so ")
    assert settled("so far so gone", ["good"]) == len("so far so gone")
    assert settled("ab", ["abc", "bX"]) == 0
    assert settled("ab", []) == 2

from collections import Counter, defaultdict

import numpy as np
import pytest
from demo_text import ngram


def brute_force(documents, order):
    """Interpolated Kneser-Ney straight from its definition, with dicts: (context, byte) -> probability."""
    counts = [Counter() for _ in range(order + 1)]
    for document in documents:
        padded = b"\0" * (order - 1) + document
        counts[order].update(padded[i - order + 1 : i + 1] for i in range(order - 1, len(padded)))
    for length in range(order - 1, 0, -1):
        counts[length].update(gram[1:] for gram in counts[length + 1])
    discounts = [0.0] * (order + 1)
    followers = [defaultdict(dict) for _ in range(order + 1)]
    for length in range(1, order + 1):
        ones = sum(count == 1 for count in counts[length].values())
        twos = sum(count == 2 for count in counts[length].values())
        discounts[length] = ones / (ones + 2 * twos) if ones and twos else 0.5
        for gram, count in counts[length].items():
            followers[length][gram[:-1]][gram[-1]] = count

    def probability(context, byte, length=order):
        if length == 0:
            return 1 / 256
        shorter = probability(context[1:], byte, length - 1)
        seen = followers[length].get(context)
        if not seen:
            return shorter
        total, discount = sum(seen.values()), discounts[length]
        return max(seen.get(byte, 0) - discount, 0) / total + discount * len(seen) / total * shorter

    return probability


def random_documents(rng, count):
    words = [bytes(rng.integers(97, 103, rng.integers(1, 5)).astype(np.uint8)) for _ in range(12)]
    return [b" ".join(words[i] for i in rng.integers(0, 12, 30)) + "é.".encode() for _ in range(count)]


def pack(context, byte):
    return int.from_bytes(context + bytes([byte]), "big")


@pytest.mark.parametrize("order", [1, 2, 6])
def test_probabilities_follow_the_definition(order):
    rng = np.random.default_rng()
    train, held_out = random_documents(rng, 6), random_documents(rng, 2)
    model, reference = ngram.train(train, order), brute_force(train, order)
    bits = []
    for document in held_out:
        padded = b"\0" * (order - 1) + document
        for i in range(order - 1, len(padded)):
            context, byte = padded[i - order + 1 : i], padded[i]
            expected = reference(context, byte)
            got = ngram.probabilities(model, np.array([pack(context, byte)]))[0]
            np.testing.assert_allclose(got, expected, rtol=1e-12)
            bits.append(-np.log2(expected))
    np.testing.assert_allclose(ngram.bits_per_byte(model, held_out), np.mean(bits), rtol=1e-12)


def test_probabilities_of_any_context_sum_to_one():
    rng = np.random.default_rng()
    model = ngram.train(random_documents(rng, 20), 6)
    text = b" ".join(random_documents(rng, 2))
    contexts = [text[i : i + 5] for i in rng.integers(0, len(text) - 5, 50)]
    contexts += [bytes(rng.integers(1, 256, 5).astype(np.uint8)) for _ in range(20)] + [b"\0" * 5, b"\0\0\0ab"]
    for context in contexts:
        grams = np.array([pack(context, byte) for byte in range(256)])
        np.testing.assert_allclose(ngram.probabilities(model, grams).sum(), 1.0, rtol=1e-12)


def test_documents_do_not_see_each_other():
    model = ngram.train([b"abcabcabc", b"bcabca"], 3)
    apart = ngram.bits_per_byte(model, [b"ab", b"cab"])
    np.testing.assert_allclose(
        apart, (2 * ngram.bits_per_byte(model, [b"ab"]) + 3 * ngram.bits_per_byte(model, [b"cab"])) / 5, rtol=1e-12
    )


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match=r"order must be in \[1, 7\], got 8"):
        ngram.train([b"abc"], 8)
    with pytest.raises(ValueError, match="NUL"):
        ngram.train([b"a\0b"], 3)
    with pytest.raises(ValueError, match="empty"):
        ngram.train([], 3)
    with pytest.raises(ValueError, match="no text"):
        ngram.bits_per_byte(ngram.train([b"abc"], 3), [b""])

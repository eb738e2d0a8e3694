"""Generated tasks: answers follow from the tokens that are worth keeping, and every example can be made again."""

import collections
import itertools

import numpy as np
import pytest

from jaxbuf.train.retrieval_plan import PLANS, Plan
from jaxbuf.train.retrieval_tasks import (
    ASK,
    ASSIGN,
    FIRST_WORD,
    MARK,
    PASSKEY,
    SHARES,
    SHORTEST,
    TASKS,
    Mixture,
    Vocabulary,
    make_example,
)

WORDS = Vocabulary(keys=128, values=128, fillers=64)
LENGTHS = SHORTEST, 77, 256
HIDDEN = -1  # in place of a token that nobody kept


def is_key(token: int) -> bool:
    return FIRST_WORD <= token < WORDS.first_value


def is_value(token: int) -> bool:
    return WORDS.first_value <= token < WORDS.first_filler


def solve(name: str, tokens: list[int], asked: list[int]) -> list[int]:
    """The answers, read off the tokens: -1 at those places that were not kept."""
    end = len(tokens) - 1 - tokens[::-1].index(ASK) if ASK in tokens else len(tokens)
    body = tokens[1:end]
    if name in ("key_value", "needle", "recall"):
        pairs: dict[int, int] = {}
        for first, second in itertools.pairwise(body):
            if is_key(first) and is_value(second):
                pairs.setdefault(first, second)
        return [pairs[tokens[place]] for place in asked]
    if name == "variables":
        values: dict[int, int] = {}
        for place, token in enumerate(body):
            if token == ASSIGN:
                left, right = body[place + 1], body[place + 2]
                values[left] = right if is_value(right) else values[right]
        return [values[tokens[place]] for place in asked]
    if name == "passkey":
        start = body.index(MARK) + 1
        return body[start : start + PASSKEY]
    if name == "common_word":
        counts = collections.Counter(token for token in body if token != HIDDEN)
        word = max(counts, key=counts.__getitem__)
        assert all(number < counts[word] for other, number in counts.items() if other != word)
        return [word]
    data = [token for token in body if (token != HIDDEN if name == "copy" else is_value(token))]
    return [data[data.index(tokens[place]) + 1] for place in asked]


@pytest.mark.parametrize("name", TASKS)
def test_answers_follow_from_the_tokens_that_are_worth_keeping(name, rng):
    for index in range(40):
        length, seed = int(rng.choice(LENGTHS)), int(rng.integers(2**32))
        example = make_example(name, seed, index, length, WORDS)
        assert example.tokens.shape == example.answers.shape == example.useful.shape == (length,)
        assert example.tokens.dtype == np.int32 and 0 <= example.tokens.min() <= example.tokens.max() < WORDS.size
        asked = np.flatnonzero(example.answers).tolist()
        expected = example.tokens[np.asarray(asked) + 1].tolist()
        assert asked and solve(name, example.tokens.tolist(), asked) == expected
        kept = example.useful.copy()
        kept[0] = True
        kept[min(asked) - 1 :] = True
        kept[asked] = True
        without = np.where(kept, example.tokens, HIDDEN).tolist()
        assert solve(name, without, asked) == expected, "without what is not worth keeping"


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.knowable and task.mixed])
def test_no_token_that_is_worth_keeping_can_be_left_out(name):
    """Of some task each one: whoever forgets it can't answer all questions that may be asked."""
    example = make_example(name, 3, 4, 256, WORDS)
    useful = np.flatnonzero(example.useful)
    body = example.tokens[: useful.max() + 1]
    words = {"selective_copy": is_value, "variables": lambda token: is_key(token) or is_value(token) or token == ASSIGN}
    wanted = words.get(name, lambda token: is_key(token) or is_value(token))
    assert useful.tolist() == [place for place, token in enumerate(body) if wanted(int(token))]


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.mixed])
def test_oracle_shares_fill_their_range(name):
    shares = [float(make_example(name, 0, index, 256, WORDS).oracle_share) for index in range(120)]
    assert SHARES[0] - 0.02 <= min(shares) < 0.1 and 0.33 < max(shares) <= SHARES[1] + 0.02
    assert 0.18 < np.mean(shares) < 0.27


def test_an_example_is_a_function_of_task_seed_and_number():
    def tokens(*given):
        return make_example(*given, 64, WORDS).tokens.tolist()

    assert tokens("key_value", 5, 7) == tokens("key_value", 5, 7)
    others = [tokens("key_value", 5, 8), tokens("key_value", 6, 7), tokens("recall", 5, 7)]
    assert tokens("key_value", 5, 7) not in others
    # As it was when evidence was made.
    first = make_example("passkey", 1001, 0, SHORTEST, WORDS)
    assert first.tokens.tolist() == [
        8,
        275,
        324,
        305,
        311,
        280,
        2,
        160,
        225,
        179,
        219,
        215,
        316,
        321,
        278,
        280,
        326,
        316,
        299,
        292,
        316,
        305,
        273,
        291,
        290,
        275,
        1,
        160,
        225,
        179,
        219,
        215,
    ]


def test_rows_of_a_batch_take_turns_and_are_the_examples_of_their_number():
    mixture = Mixture(("key_value", "passkey", "copy"), 64, 4, WORDS, seed=9)
    assert mixture.task(0).tolist() == [0, 1, 2, 0] and mixture.task(2).tolist() == [2, 0, 1, 2]
    batch = mixture.examples(2)
    np.testing.assert_array_equal(batch.tokens[1], make_example("key_value", 9, 9, 64, WORDS).tokens)
    np.testing.assert_array_equal(batch.tokens, mixture.batch(2))
    assert batch.answers.shape == batch.useful.shape == (4, 64) and batch.oracle_share.shape == (4,)
    given = {"length": 64, "rows": 4, "vocabulary": WORDS}
    with pytest.raises(ValueError, match=r"tasks must be among key_value, .*, got 'sorting'"):
        Mixture(("sorting",), **given)
    with pytest.raises(ValueError, match=r"length must be at most 256 with Vocabulary"):
        Mixture(("copy",), **given | {"length": 257})
    with pytest.raises(ValueError, match=r"length must be at least 32, got 31"):
        make_example("copy", 0, 0, 31, WORDS)
    with pytest.raises(ValueError, match="seed must be at most 4294967295"):
        make_example("copy", 2**32, 0, 64, WORDS)


def test_no_plan_scores_what_a_training_reads():
    for plan in PLANS.values():
        assert not {plan.model_seed, *plan.gate_seeds} & set(plan.evaluation_seeds)
        assert all(TASKS[name].knowable and TASKS[name].mixed for name in plan.tasks)
    settings = vars(PLANS["small"]) | {"gate_seeds": (1002,)}
    with pytest.raises(ValueError, match="evaluation_seeds must not be read by a training, got 1002"):
        Plan(**settings)

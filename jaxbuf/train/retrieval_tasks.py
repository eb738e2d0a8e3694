"""Generated tasks over whole numbers that ask for what stands far back in a long sequence.

Which tokens will be asked for is known for every example, and how many of them there are varies from example to
example. So the share of keys that is worth keeping, the oracle share, is a property of the input: no setting that is
the same for all inputs can follow it. Of some tasks, the controls, nobody can know when a token is read whether it will
be asked for; there every choice made at that moment has to lose.

An example is a function of its task, a seed and its number, through a counter-based generator whose raw bits alone are
used: it is the same on every machine and with every version of numpy.

Source: RULER (2024) for needles, variables and common words; MQAR of Zoology (2023); selective copying of Mamba (2023).
"""

import dataclasses
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxbuf.arguments import check_sizes

END, ASK, MARK, ASSIGN = 0, 1, 2, 3  # token ids: of the end, before what is asked, before a passkey, of a statement
FIRST_TASK = 4  # the token that an example starts with is this and the number of its task
FIRST_WORD = 16  # token ids from here on are keys, then values, then fillers
SHORTEST = 32  # tokens of an example
SHARES = (0.05, 0.40)  # between which the oracle share is drawn
PASSKEY = 5  # its tokens
ASKED = 4  # of a short example, if it has so many: the fewer, the longer a training takes
NEAR = 0.01  # the exponent a of MQAR: the distance r of a question from its pair is drawn in proportion to r^(a - 1)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """How many tokens of each kind there are.

    Attributes:
      keys: What is asked by. An example of length n needs n / 2.
      values: What is answered. An example of length n needs n / 2.
      fillers: What stands between; together with keys and values an example of length n needs n.
    """

    keys: int
    values: int
    fillers: int

    def __post_init__(self):
        check_sizes(keys=self.keys, values=self.values, fillers=self.fillers)

    @property
    def size(self) -> int:
        """Token ids are below it."""
        return FIRST_WORD + self.keys + self.values + self.fillers

    @property
    def first_value(self) -> int:
        return FIRST_WORD + self.keys

    @property
    def first_filler(self) -> int:
        return FIRST_WORD + self.keys + self.values

    def check_length(self, length: int) -> None:
        """Raises ValueError unless examples of `length` tokens can be made."""
        check_sizes(least=SHORTEST, length=length)
        most = min(2 * self.keys, 2 * self.values, self.size - FIRST_WORD)
        if length > most:
            raise ValueError(f"length must be at most {most} with {self}, got {length}")


class Example(NamedTuple):
    """One example, or, with an axis of rows in front, several.

    Attributes:
      tokens: int32 [length].
      answers: bool [length], the positions whose next token is scored.
      useful: bool [length], the tokens whose keys are worth keeping: without them an answer can't be known.
    """

    tokens: np.ndarray
    answers: np.ndarray
    useful: np.ndarray

    @property
    def oracle_share(self) -> np.ndarray:
        """The share of an example's tokens that are worth keeping: float64, one number an example."""
        return np.mean(self.useful, axis=-1)


class Draws:
    """Random numbers that depend on the task's name, the seed and the example's number alone."""

    def __init__(self, name: str, seed: int, index: int):
        key = np.asarray([seed << 32 | zlib.crc32(name.encode()), index], np.uint64)
        self._bits = np.random.Philox(key=key)

    def share(self, least: float, most: float) -> float:
        """Uniform in [least, most)."""
        return least + (most - least) * float(self.uniform(1)[0])

    def uniform(self, number: int) -> np.ndarray:
        """float64 [number], in [0, 1)."""
        return (self._bits.random_raw(number) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def integers(self, number: int, below: int) -> np.ndarray:
        """int64 [number], in [0, below), which is below 2^32."""
        high = self._bits.random_raw(number) >> np.uint64(32)
        return (high * np.uint64(below) >> np.uint64(32)).astype(np.int64)

    def distinct(self, number: int, below: int) -> np.ndarray:
        """int64 [number], in [0, below), in random order and none twice."""
        return np.argsort(self._bits.random_raw(below), kind="stable")[:number]


class _Page:
    """An example that is being written: fillers at first, behind the token of its task."""

    def __init__(self, number: int, draws: Draws, length: int, vocabulary: Vocabulary):
        self.tokens = vocabulary.first_filler + draws.integers(length, vocabulary.fillers)
        self.tokens[0] = FIRST_TASK + number
        self.answers, self.useful = np.zeros(length, bool), np.zeros(length, bool)

    def write(self, start: np.ndarray | int, *columns: np.ndarray | int, useful: bool = True) -> None:
        """Puts the columns behind one another, from each start on."""
        for offset, column in enumerate(columns):
            self.tokens[np.asarray(start) + offset] = column
            self.useful[np.asarray(start) + offset] |= useful

    def ask(self, asked: np.ndarray, answers: np.ndarray) -> None:
        """Writes ASK and behind it each question and its answer, up to the end of the example."""
        start = len(self.tokens) - 2 * len(asked)
        self.tokens[start - 1] = ASK
        self.tokens[start::2], self.tokens[start + 1 :: 2] = asked, answers
        self.answers[start::2] = True

    def recite(self, recited: np.ndarray, *, known: int) -> None:
        """Writes ASK and the recited tokens at the end, of which the first `known` are not asked for."""
        start = len(self.tokens) - len(recited)
        self.tokens[start - 1], self.tokens[start:] = ASK, recited
        self.answers[start - 1 + known : -1] = True

    @property
    def example(self) -> Example:
        return Example(self.tokens.astype(np.int32), self.answers, self.useful)


def _spread(draws: Draws, number: int, width: int, room: int) -> np.ndarray:
    """Where `number` pieces of `width` tokens begin among `room` tokens: in order, without overlap, from 0 on."""
    chosen = np.sort(draws.distinct(number, room - number * (width - 1)))
    return chosen + np.arange(number) * (width - 1)


def _key_value(page: _Page, draws: Draws, length: int, vocabulary: Vocabulary) -> None:
    pairs = max(1, round(draws.share(*SHARES) * length / 2))
    asked = min(pairs, max(ASKED, length // 32))
    keys, values = draws.distinct(pairs, vocabulary.keys), draws.integers(pairs, vocabulary.values)
    keys, values = FIRST_WORD + keys, vocabulary.first_value + values
    page.write(1 + _spread(draws, pairs, 2, length - 2 - 2 * asked), keys, values)
    chosen = draws.distinct(asked, pairs)
    page.ask(keys[chosen], values[chosen])


def _needle(page: _Page, draws: Draws, length: int, vocabulary: Vocabulary) -> None:
    asked = max(ASKED, length // 256)
    pairs = (length - 2 - 2 * asked) // 2
    keys, values = draws.distinct(pairs, vocabulary.keys), draws.integers(pairs, vocabulary.values)
    keys, values = FIRST_WORD + keys, vocabulary.first_value + values
    start, chosen = 1 + 2 * np.arange(pairs), draws.distinct(asked, pairs)
    page.write(start, keys, values, useful=False)
    page.write(start[chosen], keys[chosen], values[chosen])
    page.ask(keys[chosen], values[chosen])


def _recall(page: _Page, draws: Draws, length: int, vocabulary: Vocabulary) -> None:
    pairs = max(1, round(draws.share(*SHARES) * length / 2))
    keys, values = draws.distinct(pairs, vocabulary.keys), draws.integers(pairs, vocabulary.values)
    keys, values = FIRST_WORD + keys, vocabulary.first_value + values
    page.write(1 + 2 * np.arange(pairs), keys, values)
    # Each of the places behind the pairs has the weight of its distance. The largest u^(1 / weight) are a draw without
    # replacement.
    places = (length - 1 - 2 * pairs) // 2
    weight = np.arange(1, places + 1, dtype=np.float64) ** (NEAR - 1)
    chosen = np.argsort(np.log(draws.uniform(places) + 2.0**-54) / weight, kind="stable")[-pairs:]
    start = 1 + 2 * pairs + 2 * chosen[draws.distinct(pairs, pairs)]
    page.write(start, keys, values, useful=False)
    page.answers[start] = True


def _passkey(page: _Page, draws: Draws, length: int, vocabulary: Vocabulary) -> None:
    passkey = vocabulary.first_value + draws.integers(PASSKEY, vocabulary.values)
    start = 1 + int(draws.integers(1, length - 3 - 2 * PASSKEY)[0])
    page.write(start, MARK, *passkey)
    page.recite(passkey, known=0)


def _selective_copy(page: _Page, draws: Draws, length: int, vocabulary: Vocabulary) -> None:
    number = max(2, round(draws.share(*SHARES) * length))
    recited = min(number, 1 + max(ASKED, length // 16))
    data = vocabulary.first_value + draws.distinct(number, vocabulary.values)
    page.write(1 + _spread(draws, number, 1, length - 2 - recited), data)
    first = int(draws.integers(1, number - recited + 1)[0])
    page.recite(data[first : first + recited], known=1)


def _copy(page: _Page, draws: Draws, length: int, vocabulary: Vocabulary) -> None:
    recited = 1 + max(ASKED, length // 16)
    number = length - 2 - recited
    data = FIRST_WORD + draws.distinct(number, vocabulary.size - FIRST_WORD)
    first = int(draws.integers(1, number - recited + 1)[0])
    page.write(1 + np.arange(number), data, useful=False)
    page.useful[1 + first : 1 + first + recited] = True
    page.recite(data[first : first + recited], known=1)


def _variables(page: _Page, draws: Draws, length: int, vocabulary: Vocabulary) -> None:
    statements = 2 + int(draws.integers(1, 2)[0])  # of a chain: a name gets a value, each other one that of the last
    chains = max(1, round(draws.share(*SHARES) * length / 3 / statements))
    asked = min(chains, max(ASKED, length // 64))
    names = FIRST_WORD + draws.distinct(chains * statements, vocabulary.keys).reshape(chains, statements)
    values = vocabulary.first_value + draws.integers(chains, vocabulary.values)
    right = np.concatenate([values[:, None], names[:, :-1]], axis=1)
    chain = draws.distinct(chains * statements, chains * statements) % chains
    step = np.zeros_like(chain)
    for number in range(chains):
        step[chain == number] = np.arange(statements)
    start = 1 + _spread(draws, chains * statements, 3, length - 2 - 2 * asked)
    page.write(start, ASSIGN, names[chain, step], right[chain, step])
    chosen = draws.distinct(asked, chains)
    page.ask(names[chosen, -1], values[chosen])


def _common_word(page: _Page, draws: Draws, length: int, vocabulary: Vocabulary) -> None:
    room = length - 3
    often = max(4, round(draws.share(*SHARES) * length))
    others = min(-(-(room - often) // (often // 2)), vocabulary.values - 1)
    words = vocabulary.first_value + draws.distinct(1 + others, vocabulary.values)
    body = np.concatenate([np.full(often, words[0]), words[1 + np.arange(room - often) % others]])
    body = body[draws.distinct(room, room)]
    page.tokens[1 : 1 + room] = body
    page.useful[1 : 1 + room] = body == words[0]
    page.recite(words[:1], known=0)


@dataclasses.dataclass(frozen=True)
class Task:
    """A kind of examples.

    Attributes:
      number: Its token is FIRST_TASK and this.
      asks: What is asked, in a few words.
      write: Writes an example.
      knowable: Whether it is known when a token is read that it may be asked for; else the task is a control.
      mixed: Whether the oracle share is drawn between SHARES.
    """

    number: int
    asks: str
    write: Callable[[_Page, Draws, int, Vocabulary], None]
    knowable: bool = True
    mixed: bool = True


TASKS = {
    "key_value": Task(0, "the values of some keys among fillers", _key_value),
    "recall": Task(1, "every pair that stands at the beginning, most of them soon (MQAR)", _recall),
    "selective_copy": Task(2, "how the data among fillers goes on", _selective_copy),
    "variables": Task(3, "the value that a chain of statements gives a name", _variables),
    "passkey": Task(4, "a short marked key among fillers", _passkey, mixed=False),
    "common_word": Task(5, "the word that stands there most often", _common_word, knowable=False),
    "needle": Task(6, "a few of very many pairs", _needle, knowable=False, mixed=False),
    "copy": Task(7, "how an arbitrary text goes on", _copy, knowable=False, mixed=False),
}


def make_example(name: str, seed: int, index: int, length: int, vocabulary: Vocabulary) -> Example:
    """Example number `index` of a task, always the same one.

    Args:
      name: One of TASKS.
      seed: In [0, 2^32).
      index: In [0, 2^63).
      length: Tokens of the example.
      vocabulary: Of the tokens.

    Raises:
      ValueError: There is no such task, or a number is out of range.
    """
    if name not in TASKS:
        raise ValueError(f"name must be one of {', '.join(TASKS)}, got {name!r}")
    check_sizes(least=0, most=2**32 - 1, seed=seed)
    check_sizes(least=0, most=2**63 - 1, index=index)
    vocabulary.check_length(length)
    draws = Draws(name, seed, index)
    page = _Page(TASKS[name].number, draws, length, vocabulary)
    TASKS[name].write(page, draws, length, vocabulary)
    return page.example


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Batches of several tasks, which take turns: what a training reads, step by step.

    Attributes:
      tasks: Names of TASKS.
      length, rows: Of a batch.
      vocabulary: Of the tokens.
      seed: Of all examples.
    """

    tasks: tuple[str, ...]
    length: int
    rows: int
    vocabulary: Vocabulary
    seed: int = 0

    def __post_init__(self):
        if unknown := [name for name in self.tasks if name not in TASKS]:
            raise ValueError(f"tasks must be among {', '.join(TASKS)}, got {unknown[0]!r}")
        if not self.tasks:
            raise ValueError(f"tasks must name some of {', '.join(TASKS)}, got none")
        check_sizes(rows=self.rows)
        self.vocabulary.check_length(self.length)

    def task(self, step: int) -> np.ndarray:
        """int32 [rows]: which of `tasks` each row of a batch is of."""
        return ((step * self.rows + np.arange(self.rows)) % len(self.tasks)).astype(np.int32)

    def examples(self, step: int) -> Example:
        """The batch of a step, with an axis of rows in front."""
        first = step * self.rows
        made = [
            make_example(self.tasks[task], self.seed, first + row, self.length, self.vocabulary)
            for row, task in enumerate(self.task(step))
        ]
        return Example(*(np.stack(column) for column in zip(*made, strict=True)))

    def batch(self, step: int) -> np.ndarray:
        """int32 [rows, length]: the tokens of a step's batch, as a training of gates reads them."""
        return self.examples(step).tokens


class AskedMixture(Mixture):
    """A mixture of which a training of gates compares hidden states at the answers alone."""

    def asked(self, step: int) -> np.ndarray:
        """bool [rows, length]: the answers of a step's batch.

        Args:
          step: From 0.
        """
        return self.examples(step).answers

"""Acceptance keeps the target's distribution: draws against exact enumeration, beside mutants that do not."""

import collections
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.serving import acceptance
from jaxbuf.serving.acceptance import accept, accept_tree, draft_keys, draw, log_distribution
from jaxbuf.serving.sampling import SamplingParams, keys, pack, sample
from tests.serving.goodness import RARE, tail_bound
from tests.serving.test_sampling import is_clear, probabilities

ROWS, VOCAB, LENGTH = 200_000, 4, 3  # the joint distribution of LENGTH tokens
CONTEXTS = sum(VOCAB**n for n in range(LENGTH))  # of fewer tokens, numbered: none is 0
CHAIN = (-1, 0)
TREE = (-1, -1, 0, 0, 1)
SETTINGS = {"plain": {}, "narrow": {"temperature": 0.8, "top_p": 0.85, "top_k": 3}}

distribution = jax.jit(log_distribution)
make_keys = jax.jit(keys)
keep, keep_tree = jax.jit(accept), jax.jit(accept_tree)


def after(context, token):
    return context * VOCAB + token + 1


STATIC = ("parents", "chosen", "tree", "shared")


class Language:
    """Two random models of short texts over a small vocabulary: a target p and a drafter q, [contexts, vocab]."""

    def __init__(self, rng, settings):
        settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | settings
        drawn = (rng.standard_normal((2, CONTEXTS, VOCAB)).astype(np.float32) for _ in itertools.count())
        logits = next(some for some in drawn if all(is_clear(row, **settings) for x in some for row in x))
        sampling = pack([SamplingParams(**settings)] * CONTEXTS)
        self.log_p, self.log_q = (distribution(jnp.asarray(x), sampling) for x in logits)
        self.p, self.q = ([probabilities(row, **settings) for row in x] for x in logits)
        self.seed = int(rng.integers(2**31))

    def texts(self):
        """The probability of each text of LENGTH tokens."""
        found = {}
        for text in itertools.product(range(VOCAB), repeat=LENGTH):
            context, found[text] = 0, 1.0
            for token in text:
                found[text] *= self.p[context][token]
                context = after(context, token)
        return found

    def runs(self, parents, law):
        """The probability of each (accepted nodes, accepted tokens and the next one), over all drafts: the definition.

        `law` gives the distribution that a draft is drawn from: (context, tokens of the siblings before it).
        """
        found = collections.Counter()

        def visit(node, drafts, contexts, path, left, chance):
            if chance == 0:
                return
            if node == len(parents):
                for token, share in enumerate(left):
                    found[path, (*(drafts[i] for i in path), token)] += chance * share
                return
            siblings = [drafts[i] for i in range(node) if parents[i] == parents[node]]
            context = contexts[parents[node] + 1]
            q = law(context, siblings)
            for token in np.flatnonzero(q):
                now = (node + 1, [*drafts, int(token)], [*contexts, after(context, int(token))])
                if parents[node] != (path[-1] if path else -1):
                    visit(*now, path, left, chance * q[token])
                    continue
                kept = min(1.0, left[token] / q[token])
                visit(*now, (*path, node), self.p[now[2][-1]], chance * q[token] * kept)
                rest = np.maximum(left - q, 0.0)
                if kept < 1:
                    visit(*now, path, rest / rest.sum(), chance * q[token] * (1 - kept))

        visit(0, [], [0], (), self.p[0], 1.0)
        return found

    def drawn(self, context, siblings):
        return self.q[context]

    def distinct(self, context, siblings):
        """Without replacement; what is left when all that can be drawn has been is anything."""
        q = self.q[context] * ~np.isin(np.arange(VOCAB), siblings)
        return q / q.sum() if q.sum() else np.full(VOCAB, 1 / VOCAB)

    def chosen(self, context, siblings):
        """The most probable of the drafter's that is not there yet."""
        order = np.argsort(-self.q[context], kind="stable")
        return np.float64(np.arange(VOCAB) == next(token for token in order if token not in siblings))


def draft_and_accept(log_p, tables, key, count, parents, chosen, tree, shared=False):
    """One step of speculation, with drafts drawn from tables [contexts, tokens of earlier siblings, vocab]."""
    contexts, drafts, log_qs = [jnp.zeros(key.shape, jnp.int32)], [], []
    for node, parent in enumerate(parents):
        siblings = sum(1 << drafts[i] for i in range(node) if parents[i] == parent)
        log_q = tables[contexts[parent + 1], siblings]
        drafts.append(draw(log_q, key if shared else draft_keys(key, node)))
        contexts.append(after(contexts[parent + 1], drafts[-1]))
        log_qs.append(log_q)
    target, draft, drafts = log_p[jnp.stack(contexts, 1)], jnp.stack(log_qs, 1), jnp.stack(drafts, 1)
    # What lies past `count` must not be looked at.
    real = jnp.arange(len(parents), dtype=jnp.int32)[None] < count[:, None]
    given = jnp.where(real, drafts, VOCAB + 7)
    target = target.at[:, 1:].set(jnp.where(real[..., None], target[:, 1:], jnp.nan))
    draft = None if chosen else jnp.where(real[..., None], draft, jnp.nan)
    if tree:
        parents = jnp.broadcast_to(jnp.asarray(parents, jnp.int32)[None], drafts.shape)
        path, accepted, token = accept_tree(target, draft, given, parents, key, count)
    else:
        accepted, token = accept(target, draft, given, count, key)
        path = jnp.broadcast_to(jnp.arange(len(parents), dtype=jnp.int32)[None], drafts.shape)
    return drafts, path, accepted, token


step = jax.jit(draft_and_accept, static_argnames=STATIC)


def simulate(language, law, parents, *, counts=None, step=step, tree=False, shared=False):
    """ROWS draws: each row's tokens (-1 past the one after the accepted), count, accepted nodes and their number."""
    tables = np.zeros((CONTEXTS, 2**VOCAB, VOCAB))
    for context, siblings in itertools.product(range(CONTEXTS), range(2**VOCAB - 1)):
        tables[context, siblings] = law(context, [token for token in range(VOCAB) if siblings >> token & 1])
    with np.errstate(divide="ignore"):
        tables = jnp.asarray(np.log(tables), jnp.float32)
    rng = np.random.default_rng(language.seed)
    count = rng.choice([len(parents)] if counts is None else counts, ROWS).astype(np.int32)
    seeds = jnp.asarray(rng.permutation(2**22)[:ROWS], jnp.uint32)
    key = make_keys(dataclasses.replace(pack([SamplingParams()]), seed=seeds), jnp.full(ROWS, 9, jnp.int32))
    static = {"parents": parents, "chosen": law == language.chosen, "tree": tree, "shared": shared}
    drafts, path, accepted, token = map(np.asarray, step(language.log_p, tables, key, jnp.asarray(count), **static))
    assert (accepted >= 0).all() and (accepted <= count).all()
    place = np.arange(path.shape[1])[None]
    text = np.full((ROWS, LENGTH), -1)
    text[:, : path.shape[1]] = np.where(place < accepted[:, None], np.take_along_axis(drafts, path, 1), -1)[:, :LENGTH]
    text[np.arange(ROWS), accepted] = token
    return text, count, path, accepted


def tail_of_texts(language, text):
    """Of the texts, with what they lack drawn from the target: the drafts must have changed nothing."""
    rng, context, text = np.random.default_rng(language.seed + 1), np.zeros(ROWS, np.int64), text.copy()
    for place in range(LENGTH):
        noisy = np.asarray(language.log_p)[context] + rng.gumbel(size=(ROWS, VOCAB))
        text[:, place] = np.where(text[:, place] < 0, noisy.argmax(1), text[:, place])
        context = after(context, text[:, place])
    expected = {cell: ROWS * chance for cell, chance in language.texts().items()}
    return tail_bound(count_rows(text), expected)


def count_rows(array):
    """How often each row [n] of small numbers of at least -1 occurs."""
    base = array.max() + 2
    code = ((array + 1) * base ** np.arange(array.shape[1])).sum(axis=1)
    _, first, counts = np.unique(code, return_index=True, return_counts=True)
    return dict(zip(map(tuple, array[first].tolist()), counts.tolist(), strict=True))


def tails_of_runs(language, law, parents, text, count, path, accepted):
    """Of each count's accepted nodes with the tokens they lead to: as many must be kept as can be."""
    found, nodes = [], path.shape[1]
    runs = np.concatenate([np.where(np.arange(nodes)[None] < accepted[:, None], path, -1), text], axis=1)
    for number in np.unique(count):
        cells = {  # what lacks at the end is -1
            tuple(tuple(x for x in part if x >= 0) for part in (row[:nodes], row[nodes:])): times
            for row, times in count_rows(runs[count == number]).items()
        }
        rows = int((count == number).sum())
        expected = {cell: rows * chance for cell, chance in language.runs(parents[:number], law).items()}
        found.append(tail_bound(cells, expected))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("law", ["drawn", "chosen"])
def test_texts_are_distributed_as_without_drafts(rng, settings, law):
    language = Language(rng, SETTINGS[settings])
    law = getattr(language, law)
    text, *run = simulate(language, law, CHAIN, counts=[0, 1, 2])
    texts, runs = tail_of_texts(language, text), tails_of_runs(language, law, CHAIN, text, *run)
    print(f"seed {language.seed}: p = {texts:.3g} of the texts, {runs} of the runs of 0, 1 and 2 drafts")
    assert texts > RARE and min(runs) > RARE


def may_refuse_all(language):
    """Whether a coin next to 1 refuses both of TREE's chosen siblings, though the target has no other token.

    So it does in 1e-7 of the draws where the two probabilities, rounded, add up to less than 1. What follows then is
    drawn from the target, which is a run that the definition does not have.
    """
    for context in (0, after(0, int(language.q[0].argmax()))):  # the places that have two children
        one, two, *others = np.argsort(-language.q[context], kind="stable")
        p = np.asarray(jnp.exp(language.log_p[context]))
        if not p[others].any() and np.float32(1) - p[one] > p[two]:
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("law", ["drawn", "distinct", "chosen"])
def test_texts_are_distributed_as_without_trees(rng, settings, law):
    drawn = (Language(rng, SETTINGS[settings]) for _ in itertools.count())
    language = next(some for some in drawn if law != "chosen" or not may_refuse_all(some))
    law = getattr(language, law)
    text, *run = simulate(language, law, TREE, counts=[2, 5], tree=True)
    texts, runs = tail_of_texts(language, text), tails_of_runs(language, law, TREE, text, *run)
    print(f"seed {language.seed}: p = {texts:.3g} of the texts, {runs} of the runs of 2 and 5 nodes")
    assert texts > RARE and min(runs) > RARE


MUTANTS = {
    "always accept": {"passes": lambda log_p, log_q, coin: jnp.ones(coin.shape, bool)},
    "no residual": {"residual": lambda log_p, log_q: log_p},
    "drafts drawn from the token's key": {},
}


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "tree"), [*((mutant, False) for mutant in MUTANTS), ("no residual", True)])
def test_a_mutant_is_found_out(rng, monkeypatch, mutant, tree):
    language = Language(rng, {})
    for name, function in MUTANTS[mutant].items():
        monkeypatch.setattr(acceptance, name, function)
    fresh = jax.jit(lambda *args, **static: draft_and_accept(*args, **static), static_argnames=STATIC)
    parents = TREE if tree else CHAIN
    text, *_ = simulate(language, language.drawn, parents, step=fresh, tree=tree, shared=not MUTANTS[mutant])
    assert tail_of_texts(language, text) < 1e-9, f"seed {language.seed}"


WIDE = {"rows": 256, "nodes": 5, "vocab": 12}  # of the tests below, which share what is compiled
MIXED = [
    {"temperature": 0.0, "top_k": 3},
    {"temperature": 0.7, "top_k": 0, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 4, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.2},
]


@dataclasses.dataclass
class Wide:
    """Random arguments, with settings that change from row to row."""

    rng: np.random.Generator
    settings: list

    def __post_init__(self):
        rows, nodes, vocab = WIDE.values()
        self.logits = (2 * self.rng.standard_normal((2, rows, nodes + 1, vocab))).astype(np.float32)
        seeds = self.rng.integers(0, 2**32, rows).tolist()
        mixed = itertools.cycle(self.settings)
        self.sampling = pack([SamplingParams(**next(mixed), seed=seed) for seed in seeds])
        self.position = jnp.asarray(self.rng.integers(0, 9999, rows), jnp.int32)
        self.key = make_keys(self.sampling, self.position)
        self.target, draft = (distribution(jnp.asarray(x), self.sampling) for x in self.logits)
        self.draft = draft[:, 1:]
        self.count = jnp.asarray(self.rng.integers(0, nodes + 1, rows), jnp.int32)


def test_a_chain_is_a_tree(rng):
    wide, (rows, nodes, _) = Wide(rng, MIXED), WIDE.values()
    # Drafts that are often right; on some greedy rows all of them, so that runs of every length occur.
    often, greedy = rng.random((rows, nodes, 1)) < 0.8, len(MIXED) * np.arange(nodes + 1)
    often[greedy] = True
    count = wide.count.at[greedy].set(np.arange(nodes + 1, dtype=np.int32))
    drafts = jnp.argmax(jnp.where(often, wide.target[:, :-1], wide.draft), axis=-1).astype(jnp.int32)
    parents = jnp.broadcast_to(jnp.arange(-1, nodes - 1, dtype=jnp.int32)[None], drafts.shape)
    for draft in (wide.draft, None):
        accepted, token = map(np.asarray, keep(wide.target, draft, drafts, count, wide.key))
        path, *others = map(np.asarray, keep_tree(wide.target, draft, drafts, parents, wide.key, count))
        # Equal but where rounding decides.
        assert ((accepted != others[0]) | (token != others[1])).sum() <= 2
        place = np.arange(nodes)[None]
        assert (path == np.where(place < others[0][:, None], place, -1)).all()
        assert set(accepted.tolist()) == set(range(nodes + 1))


@pytest.mark.parametrize("chosen", [False, True])
def test_greedy_rows_keep_the_most_probable_path(rng, chosen):
    wide, (rows, nodes, vocab) = Wide(rng, [{"temperature": 0.0}]), WIDE.values()
    best = wide.logits[0].argmax(-1)
    assert (np.asarray(wide.target) == np.where(np.arange(vocab) == best[..., None], 0, -np.inf)).all()
    right = rng.random((rows, nodes)) < 0.4
    parents = np.stack([rng.integers(-1, node, rows) for node in range(nodes)], 1).astype(np.int32)
    drafts = np.where(right, np.take_along_axis(best, parents + 1, 1), rng.integers(0, vocab, (rows, nodes)))
    drafts = drafts.astype(np.int32)
    draft = None if chosen else jnp.full(wide.draft.shape, -np.log(vocab), jnp.float32)
    path, accepted, token = map(
        np.asarray, keep_tree(wide.target, draft, jnp.asarray(drafts), jnp.asarray(parents), wide.key, wide.count)
    )
    kept, follows = map(np.asarray, keep(wide.target, draft, jnp.asarray(drafts), wide.count, wide.key))
    for row, number in enumerate(np.asarray(wide.count)):
        expected, at = [], -1
        for node in range(number):
            if parents[row, node] == at and drafts[row, node] == best[row, at + 1]:
                expected, at = [*expected, node], node
        assert path[row].tolist() == expected + [-1] * (nodes - len(expected))
        assert accepted[row] == len(expected)
        assert token[row] == best[row, at + 1]
        run = int(np.cumprod(drafts[row, :number] == best[row, :number]).sum())
        assert kept[row] == run
        assert follows[row] == best[row, run]


def test_without_drafts_the_token_is_the_sampled_one(rng):
    """Whatever lies where drafts would."""
    wide, (rows, nodes, vocab) = Wide(rng, MIXED), WIDE.values()
    expected = np.asarray(jax.jit(sample)(jnp.asarray(wide.logits[0, :, 0]), wide.sampling, wide.position))
    drafts, none = jnp.asarray(rng.integers(-5, vocab + 5, (rows, nodes)), jnp.int32), jnp.zeros(rows, jnp.int32)
    root = jnp.full((rows, nodes), -1, jnp.int32)
    found = [
        keep(wide.target, None, drafts, none, wide.key),
        keep(wide.target, wide.draft, drafts, none, wide.key),
        keep(wide.target[:, :1], None, drafts[:, :0], none, wide.key),
        keep_tree(wide.target, None, drafts, root, wide.key, none)[1:],
        keep_tree(wide.target, wide.draft, drafts, root, wide.key, none)[1:],
        keep_tree(wide.target[:, :1], None, drafts[:, :0], root[:, :0], wide.key)[1:],
    ]
    for accepted, token in found:
        assert (np.asarray(accepted) == 0).all()
        # Equal but where rounding decides.
        assert (np.asarray(token) != expected).sum() <= 2


def test_the_distribution_is_the_definition(rng):
    sampled = [row for row in range(16) if row % 4]

    def clear(wide):
        return all(is_clear(logits, **MIXED[row % 4]) for row in sampled for logits in wide.logits[0, row])

    wide = next(some for some in (Wide(rng, MIXED) for _ in itertools.count()) if clear(some))
    found = np.exp(np.asarray(wide.target))
    for row in range(16):
        for place, logits in enumerate(wide.logits[0, row]):
            settings = MIXED[row % 4]
            expected = probabilities(logits, **settings) if row in sampled else np.eye(len(logits))[logits.argmax()]
            np.testing.assert_allclose(found[row, place], expected, rtol=2e-5)


def test_what_rounding_leaves_nothing_of_is_drawn_from_the_target():
    """A rejection that rounding alone allowed must not lead to a token that the target does not have."""
    log_p = jnp.log(jnp.asarray([[0.0, 0.25, 0.75]], jnp.float32))
    np.testing.assert_array_equal(acceptance.residual(log_p, log_p + 1e-6), log_p)
    assert not acceptance.passes(log_p[:, 0], jnp.full(1, -jnp.inf), jnp.zeros(1)).any()


def test_wrong_arguments_are_named():
    rows, vocab = 2, 5
    target, draft = jnp.zeros((rows, 4, vocab)), jnp.zeros((rows, 3, vocab))
    drafts, count = jnp.zeros((rows, 3), jnp.int32), jnp.zeros(rows, jnp.int32)
    key = jax.random.split(jax.random.key(0), rows)
    wrong = {
        r"target must be float32 \[2, 4, 5\], got float32 \(2, 3, 5\)": (draft, None, drafts, count, key),
        r"target must be float32 \[2, 4, 5\], got int32": (target.astype(jnp.int32), None, drafts, count, key),
        r"draft must be float32 \[2, 3, 5\], got float32 \(2, 4, 5\)": (target, target, drafts, count, key),
        r"drafts must be int32 \[rows, drafts\], got float32": (target, None, draft[..., 0], count, key),
        r"drafts must be int32 \[rows, drafts\], got int32 \(2,\)": (target, None, count, count, key),
        r"count must be int32 \[2\], got int32 \(2, 3\)": (target, None, drafts, drafts, key),
        r"key must be random keys \[2\], got key<fry> \(\)": (target, None, drafts, count, key[0]),
        r"key must be random keys \[2\], got int32": (target, None, drafts, count, count),
    }
    for match, arguments in wrong.items():
        with pytest.raises(ValueError, match=match):
            accept(*arguments)
        *others, count_, key_ = arguments
        with pytest.raises(ValueError, match=match):
            accept_tree(*others, jnp.full((rows, 3), -1, jnp.int32), key_, count_)
    with pytest.raises(ValueError, match=r"parents\[:, 1\] must be in \[-1, 0\], got 1 at row 0"):
        accept_tree(target, None, drafts, jnp.ones((rows, 3), jnp.int32) - jnp.asarray([[2, 0, 0]], jnp.int32), key)

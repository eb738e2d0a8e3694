"""Trees of drafts in the loop: they change no greedy token and no distribution, and the longest right path is kept."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.serving import acceptance, drafters, generate, generate_tokens, speculation
from jaxbuf.serving.batch import Decoding, make_batch
from jaxbuf.serving.drafters import MTP, NGram
from jaxbuf.serving.sampling import noise
from tests.serving.goodness import RARE
from tests.serving.program import carry_shape, check_reused, written_in_loops
from tests.serving.speculating import (
    GREEDY,
    NEW,
    ROWS,
    VOCAB,
    ScriptedTree,
    check_equal,
    p_value,
    tiny_models,
)
from tests.serving.speculating import architecture as architecture
from tests.serving.speculating import greedy as greedy
from tests.serving.speculating import lm as lm
from tests.serving.speculating import prompts as prompts

NODES = 6
FORK = [-1, -1, -1, 0, 1, 2]  # three branches of two drafts each


def plant(results, rng) -> ScriptedTree:
    """By row: all right on the second branch, on the third, all wrong, right then wrong (beside a branch that begins
    alike and goes on right, which is not gone back to), in turns; the rest random."""
    parents = np.tile(np.array(FORK, np.int32), (ROWS, 2, 1))
    right = np.zeros((ROWS, 2, NODES), bool)
    right[0, :, [1, 4]] = right[1, :, [2, 5]] = right[3, :, [0, 1, 4]] = right[4, 0, [1, 4]] = right[4, 1, 3] = True
    count = np.full((ROWS, 2), NODES, np.int32)
    parents[5:] = np.stack([rng.integers(-1, node, (ROWS - 5, 2)) for node in range(NODES)], 2)
    right[5:] = rng.random((ROWS - 5, 2, NODES)) < 0.6
    count[6:] = rng.integers(0, NODES + 1, (ROWS - 6, 2))
    answers = np.zeros((ROWS, NEW), np.int32)
    for row, result in enumerate(results):
        answers[row, : len(result.tokens)] = result.tokens
    return ScriptedTree(*(jnp.asarray(x) for x in (answers, parents, right, count)))


def walk(parents, right, count) -> int:
    """How many nodes are kept."""
    at, kept = -1, 0
    for node in range(count):
        if parents[node] == at and right[node]:
            at, kept = node, kept + 1
    return kept


def count_by_hand(tree, row, new):
    """The steps, drafts and kept drafts of a row."""
    tokens, steps, drafted, accepted = 1, 0, 0, 0
    while tokens < new:
        now, left = tokens % 2, new - tokens - 1
        drafts = int(tree.count[row, now]) if left else 0
        kept = walk(*(np.asarray(x[row, now]) for x in (tree.parents, tree.right)), drafts)
        number = min(kept, left) + 1  # a path that is deeper than there is room for gives all of them
        tokens, steps, drafted, accepted = tokens + number, steps + 1, drafted + drafts, accepted + min(kept, number)
    return steps, drafted, accepted


@pytest.mark.checks("trees")
@pytest.mark.slow
def test_paths_that_are_right_wrong_or_both_change_no_token(lm, prompts, greedy, rng):
    """In both forms; the steps are counted by hand, and the log-probabilities are those of the kept path."""
    tree = plant(greedy, rng)
    for form in ("buffered", "recurrent"):
        results = generate(lm, prompts, NEW, GREEDY, drafter=tree, form=form)
        assert check_equal(lm, prompts, results, greedy) == 0
        for row, result in enumerate(results):
            stats = result.stats
            assert (stats.steps, stats.drafted, stats.accepted) == count_by_hand(tree, row, NEW), row
            assert form == "buffered" or not lm.config.specs or stats.folds == stats.steps - 1
            np.testing.assert_allclose(result.logprobs, greedy[row].logprobs, rtol=0, atol=1e-4)
    assert [result.stats.steps for result in results[:3]] == [13, 13, NEW - 1]


@pytest.mark.slow
@pytest.mark.checks("trees")
def test_settings_see_the_path_before_a_token_as_generated(lm, prompts, greedy, rng):
    """Penalties and min_tokens, with trees whose right paths are those of the text with them."""
    extras = [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.0},
        {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"stop_token_ids": (greedy[4].tokens[2],), "min_tokens": 7},
        {"min_tokens": 12, "presence_penalty": -1.0, "stop_token_ids": tuple(greedy[5].tokens[:3])},
        {"frequency_penalty": -0.5},
        {"stop_token_ids": (greedy[7].tokens[5],)},
    ]
    sampling = [dataclasses.replace(GREEDY, **extra) for extra in extras]
    plain = generate(lm, prompts, NEW, sampling)
    for known in (plain, greedy):
        tree = plant(known, rng)
        right = tree.right.at[:, :, jnp.asarray([1, 4])].set(True)  # some path is right in every row
        tree = dataclasses.replace(tree, right=right, parents=tree.parents.at[:].set(jnp.asarray(FORK)))
        results = generate(lm, prompts, NEW, sampling, drafter=tree)
        same = [ours.tokens == theirs.tokens for ours, theirs in zip(results, plain, strict=True)]
        assert sum(same) >= ROWS - 1  # one may be a tie
        assert [r.finish_reason for r in results] == [r.finish_reason for r in plain]
        if known is plain:
            assert sum(r.stats.accepted > r.stats.steps for r in results[:3]) >= 2


@pytest.mark.slow
def test_no_step_goes_past_max_new_tokens(lm, prompts, greedy, rng):
    """Nor does a tree that drafts deeper than there is room for."""
    tree = plant(greedy, rng)
    for new in (34, 35, 36, 37):
        results = generate(lm, prompts, new, GREEDY, drafter=tree)
        assert [r.tokens for r in results] == [r.tokens[:new] for r in greedy]
        assert all(r.finish_reason == "length" for r in results)


@pytest.mark.slow
def test_parents_without_a_word_about_trees_are_an_error(lm, prompts, greedy, rng):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Silent(ScriptedTree):
        trees = False

    silent = Silent(**vars(plant(greedy, rng)))
    with pytest.raises(ValueError, match=r"a drafter whose proposals have parents must have trees = True, got Silent"):
        generate(lm, prompts, NEW, GREEDY, drafter=silent)


@pytest.mark.parametrize("drafter", [NGram, MTP])
def test_a_drafter_names_what_is_out_of_range(drafter):
    for branches in (0, 5, 1.5):
        with pytest.raises(ValueError, match=rf"branches must be a whole number in \[1, 4\], .* got {branches}"):
            drafter(4, branches=branches)
    with pytest.raises(ValueError, match=r"draft_tokens must be a whole number in \[1, 15\], got 16"):
        drafter(16)


@pytest.mark.parametrize(
    ("drafter", "parents"),
    [
        (MTP(4, branches=2), [-1, -1, 0, 2]),
        (MTP(8, branches=3), [-1, -1, -1, 0, 0, 0, 3, 6]),
        (MTP(6, branches=2), [-1, -1, 0, 0, 2, 4]),
        (MTP(3, branches=3), [-1, -1, -1]),
        (MTP(3), None),
    ],
)
def test_the_mtp_layer_drafts_a_chain_with_siblings(lm, drafter, parents):
    place = drafter.places
    first = np.searchsorted(place, place - 1)
    assert parents is None or np.where(place > 0, first, -1).tolist() == parents
    assert len(place) == drafter.draft_tokens and drafter.trees == (parents is not None)


def test_siblings_are_drawn_without_replacement_from_what_is_left(rng):
    """Counts of ordered pairs; where nothing is left to draw from the sibling is a point at the next-best token."""
    log_q = np.log(np.array([[0.5, 0.3, 0.2, 0.0], [0.0, 0.0, 1.0, 0.0]]) + 1e-45, dtype=np.float64)
    log_q = jnp.asarray(np.where(log_q < -90, -np.inf, log_q), jnp.float32)
    otherwise = jnp.asarray([[0.0, 1.0, 2.0, 3.0], [5.0, 7.0, 9.0, 6.0]])
    draws = 20_000
    gumbel = jnp.asarray(rng.gumbel(size=(draws, 4)), jnp.float32)
    wide = [jnp.broadcast_to(x[:1], (draws, 4)) for x in (log_q, otherwise)]
    found = np.asarray(drafters._best(wide[0] + gumbel, wide[1], 2))
    share = np.mean((found == [1, 0]).all(1))
    assert abs(share - 0.3 * 0.5 / 0.7) < 5 * np.sqrt(share / draws)
    chosen = drafters._best(log_q[1:], otherwise[1:], 3)
    assert chosen.tolist() == [[2, 1, 3]]
    candidates = jnp.stack([jnp.asarray([[0, 1, 2]] * 3), jnp.broadcast_to(chosen, (3, 3))])
    left = np.exp(drafters.without_siblings(jnp.tile(log_q[:, None], (1, 3, 1)), candidates, np.arange(3)))
    expected = [[0.5, 0.3, 0.2, 0], [0, 0.6, 0.4, 0], [0, 0, 1, 0]], [[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]]
    np.testing.assert_allclose(left, expected, rtol=1e-6)


TREES = {"ngram": NGram(6, branches=3), "mtp": MTP(8, branches=3)}


@pytest.mark.checks("trees")
@pytest.mark.slow
@pytest.mark.parametrize("name", TREES)
def test_greedy_tokens_are_those_without_a_drafter(lm, prompts, greedy, name):
    """Of a random model, whose MTP layer is nearly always wrong; its program is looked at, too."""
    drafter = TREES[name]
    results = generate(lm, prompts, NEW, GREEDY, drafter=drafter)
    check_equal(lm, prompts, results, greedy)
    for result in results:
        assert result.stats.accepted + result.stats.steps == NEW - 1
        assert 0 <= result.stats.accepted <= result.stats.drafted
    if name == "ngram":
        return
    assert sum(r.stats.accepted for r in results) < 0.2 * sum(r.stats.drafted for r in results)
    carry = carry_shape(make_batch(lm, prompts, GREEDY, Decoding(NEW, drafter=drafter)))
    text = generate_tokens.lower(lm.model, carry, np.int32(9), drafter).compile().as_text()
    assert written_in_loops(text, lm.config.spec.state_shape) == []
    check_reused(text, carry)


@pytest.mark.checks("trees")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive) for name in TREES],
)
def test_sampled_tokens_are_distributed_as_by_exact_enumeration(architecture, rng, monkeypatch, name):
    p = p_value(tiny_models(architecture)[0], TREES[name], rng, monkeypatch)
    print(f"{name}: p = {p:.3g}")
    assert p > RARE


def accept_without_residual(target, draft, drafts, parents, key, count):
    path, accepted, _ = acceptance.accept_tree(target, draft, drafts, parents, key, count)
    last = jnp.max(path, axis=1) + 1
    after = jnp.take_along_axis(target, last[:, None, None], axis=1)[:, 0]
    return path, accepted, jnp.argmax(after + noise(key, VOCAB), axis=-1).astype(jnp.int32)


MUTANTS = {
    "no residual": (speculation, "accept_tree", accept_without_residual),
    "siblings as if with replacement": (drafters, "without_siblings", lambda log_q, candidates, rank: log_q),
}


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(name, marks=pytest.mark.exhaustive) for name in MUTANTS],
)
def test_the_same_check_flags_a_mutant(architecture, rng, monkeypatch, mutant):
    monkeypatch.setattr(*MUTANTS[mutant])
    generate_tokens.clear_cache()
    try:
        p = p_value(tiny_models(architecture)[0], TREES["mtp"], rng, monkeypatch, batches=1)
    finally:
        generate_tokens.clear_cache()
    print(f"{mutant}: p = {p:.3g}")
    assert p < 1e-9

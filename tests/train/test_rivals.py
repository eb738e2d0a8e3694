"""What the write gate is compared with: other scores are trained by the same steps, and one of them tunes the model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxbuf.models import decoder
from jaxbuf.models.admission import Admission, BorrowedNeuron, HeadScore, Rule, WriteGate
from jaxbuf.models.gates import (
    gate_parameters,
    kept_shares,
    load_gates,
    save_gates,
    threshold_for_share,
    with_gates,
    with_idle_neurons,
    with_threshold,
)
from jaxbuf.models.layers import named_parameters, replace_parameters
from jaxbuf.train.text_sequences import DocumentSequences
from jaxbuf.train.write_gate import RECIPES, GateTraining, distillation_loss, penalty_of
from tests.tiny import llama_model
from tests.train.test_write_gate import RECIPE


@pytest.fixture(scope="module")
def lm():
    return llama_model(1)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(1).integers(0, 61, 400)


class Asked(DocumentSequences):
    """Sequences of one text, that are compared at the tokens that `which` says."""

    def __init__(self, tokens, recipe, which):
        super().__init__([tokens], recipe.rows, recipe.length, seed=recipe.seed)
        self._which = which

    def asked(self, step):
        return self._which(self.batch(step))


def with_values(lm, values):
    """The model with these values of some parameters."""
    held = named_parameters(lm.model)
    return lm.replace(model=replace_parameters(lm.model, [values.get(name, held[name][...]) for name in held]))


def alphas(lm):
    return {name: np.asarray(param[...]) for name, param in gate_parameters(lm.model).items()}


@pytest.mark.slow
def test_heads_that_give_nothing_close_and_the_others_stay_open(lm, tokens):
    """The second head of keys and values has no part in the output: only the penalty speaks to its number."""
    values = {}
    for layer in range(2):
        name = f"layers.{layer}.mixers.0.v_proj"
        values[name] = named_parameters(lm.model)[name][...].at[8:].set(0)
    recipe = dataclasses.replace(
        RECIPE, score=HeadScore(sinks=2), penalty="mean", sparsity=1e-3, rate=0.1, steps=25, remat=False
    )
    training = GateTraining(with_values(lm, values), Asked(tokens, recipe, lambda found: found > 20), recipe)
    list(training.run())
    found = np.stack(list(alphas(training.lm).values()))
    assert (found >= 0).all() and (found <= 1).all()
    assert (found[:, 1] < 0.1).all() and (found[:, 0] > 0.3).all()

    threshold = threshold_for_share(training.lm, 0.5)
    shares = kept_shares(with_threshold(training.lm, threshold), tokens[None, :40])
    np.testing.assert_allclose(shares, [[1, 2 / 40]] * 2)  # the sinks are kept by all


def test_the_threshold_of_a_share_of_heads_is_a_quantile_over_all_layers(lm, tokens):
    gated = with_gates(lm, Admission(HeadScore(sinks=1), 4, 0.5))
    first, second = alphas(gated)
    gated = with_values(gated, {first: jnp.array([0.2, 1.0]), second: jnp.array([0.7, 0.2])})
    for share, threshold in ((1.0, 0.2), (0.75, 0.2), (0.5, 0.7), (0.25, 1.0), (0.0, 1.0)):
        assert threshold_for_share(gated, share) == pytest.approx(threshold)
    keys = threshold_for_share(gated, 0.5, tokens[None, :30])
    assert np.mean(kept_shares(with_threshold(gated, keys), tokens[None, :30])) >= 0.5
    with pytest.raises(ValueError, match=r"share must be in \[0, 1\], got 1.5"):
        threshold_for_share(gated, 1.5)
    with pytest.raises(ValueError, match="tokens must be sequences where each key has its own score"):
        threshold_for_share(with_gates(lm, Admission(WriteGate(8), 4)), 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, width", [("hidden", 6), *(pytest.param(name, None, marks=pytest.mark.exhaustive) for name in RECIPES)]
)
def test_every_score_learns_to_keep_less_and_its_file_gives_it_back(lm, tokens, tmp_path, name, width):
    score = RECIPES[name].score
    score = score if width is None else dataclasses.replace(score, width=width)
    sizes = {key: getattr(RECIPE, key) for key in ("window", "threshold", "steps", "rows", "length", "rate")}
    recipe = dataclasses.replace(RECIPES[name], score=score, sparsity=1.0, remat=False, **sizes)
    training = GateTraining(lm, tokens, recipe)
    metrics = list(training.run())
    assert metrics[-1]["penalty"] < metrics[0]["penalty"] - 0.01
    assert_saved(training.lm, tmp_path / "gates.safetensors")


def assert_saved(lm, path):
    """What a file of gates gives is what was written to it, also to a model that has others."""
    save_gates(lm, path)
    again = load_gates(with_gates(lm, Admission(WriteGate(3), 2)), path)
    assert again.config == lm.config
    for name, param in named_parameters(lm.model).items():
        np.testing.assert_array_equal(named_parameters(again.model)[name][...], param[...])


@pytest.mark.parametrize("source", ["query", pytest.param("key", marks=pytest.mark.exhaustive)])
def test_a_borrowed_neuron_is_read_before_the_rotation_and_gone_for_attention(lm, tokens, source):
    score = BorrowedNeuron(source, scale=3.0, offset=0.5)
    gated, rows = with_gates(lm, Admission(score, 4, 0.0)), jnp.asarray(tokens[None, :20], jnp.int32)
    found = np.asarray(decoder.forward_with_gates(gated.model, rows)[1])[0, 0]
    layer = gated.model.layers[0]
    x = decoder.rms_norm(decoder.embed(gated.model, rows), layer.before_mixers, layer.config.before)[0]
    projection = layer.mixers[0].q_proj if source == "query" else layer.mixers[0].k_proj
    # Of four query heads the first and third begin a group; of two key heads there is one each.
    channel = np.asarray(x @ projection[...].T)[:, [7, 23] if source == "query" else [7, 15]]
    np.testing.assert_allclose(found, 1 / (1 + np.exp(3.0 * channel - 0.5)), atol=1e-5)

    q, k = (jnp.ones((1, 3, heads, 8)) for heads in (4, 2))
    q, k = gated_mixer(gated).admission.without_borrowed(q, k)
    expected = {"query": ([0, 1, 0, 1], [1, 1]), "key": ([1] * 4, [0, 0])}[source]
    assert np.asarray(q)[0, 0, :, -1].tolist() == expected[0] and np.asarray(k)[0, 0, :, -1].tolist() == expected[1]
    assert (np.asarray(q)[..., :-1] == 1).all() and (np.asarray(k)[..., :-1] == 1).all()

    # Scores behind a window of 4 change nothing at a threshold of 0, so the outputs say what attention saw.
    idle = with_idle_neurons(gated)
    gates = np.asarray(decoder.forward_with_gates(idle.model, rows)[1])
    np.testing.assert_allclose(gates, 1 / (1 + np.exp(-0.5)), rtol=1e-6)
    np.testing.assert_allclose(idle.logits(tokens[:20]), gated.logits(tokens[:20]), atol=1e-5)


def gated_mixer(lm):
    return lm.config.layers[0].mixers[0]


def test_tuning_changes_the_model_and_not_the_one_it_learns_from(lm, tokens, tmp_path):
    before = {name: np.asarray(param[...]) for name, param in named_parameters(lm.model).items()}
    recipe = dataclasses.replace(
        RECIPE, score=BorrowedNeuron(), tunes="model", rate=3e-4, sparsity=0.0, steps=30, remat=False
    )
    training = GateTraining(lm, tokens, recipe)
    metrics = list(training.run())
    assert metrics[-1]["distance"] < 0.7 * metrics[0]["distance"]  # of the lost channel
    after = named_parameters(training.lm.model)
    assert sum(not np.array_equal(after[name][...], value) for name, value in before.items()) > 10
    for name, param in named_parameters(lm.model).items():
        np.testing.assert_array_equal(param[...], before[name])
    assert_saved(training.lm, tmp_path / "gates.safetensors")
    with pytest.raises(ValueError, match="score must learn something where tunes is 'gates'"):
        GateTraining(lm, tokens, dataclasses.replace(recipe, tunes="gates"))


def test_hidden_states_are_compared_where_answers_are(lm, tokens, rng):
    gated = with_gates(lm, Admission(Rule("none"), 4, None))
    rows = jnp.asarray(tokens[:60].reshape(2, 30), jnp.int32)
    asked = rng.uniform(size=(2, 30)) < 0.3
    expected, hidden = (
        np.asarray(x, np.float64) for x in (decoder.forward(lm.model, rows), decoder.forward(gated.model, rows))
    )
    _, metrics = distillation_loss(gated.model, lm.model, rows, RECIPE, jnp.asarray(asked))
    each = zip(hidden, expected, asked, strict=True)
    distance = np.mean([np.sum((ours - own)[where] ** 2) / np.sum(own[where] ** 2) for ours, own, where in each])
    assert float(metrics["distance"]) == pytest.approx(distance, rel=1e-4)

    wrong = Asked(tokens, RECIPE, lambda found: np.zeros(found.shape, int))
    with pytest.raises(ValueError, match=r"data must ask bool \(\d+, \d+\) for a step, got int64"):
        next(GateTraining(lm, wrong, RECIPE).run())


@pytest.mark.exhaustive
def test_training_compares_at_the_tokens_that_were_asked(lm, tokens):
    training = GateTraining(lm, Asked(tokens, RECIPE, lambda found: np.zeros(found.shape, bool)), RECIPE)
    assert next(training.run())["distance"] == 0


def test_the_mean_penalty_is_that_of_the_gates(rng):
    gates = rng.uniform(size=(2, 3, 9, 2)).astype(np.float32)
    assert float(penalty_of(jnp.asarray(gates), 4, "mean")) == pytest.approx(gates.mean(dtype=np.float64), rel=1e-6)


def test_a_heads_number_at_a_bound_has_a_gradient_that_may_bring_it_back(lm, tokens):
    score = HeadScore()
    parameters = score.parameters(24, 2, 8, rngs=nnx.Rngs(0))
    mixer = gated_mixer(with_gates(lm, Admission(score, 4)))
    assert mixer.admission.score.terms.bounds == (0.0, 1.0) and (parameters.alpha[...] == 1).all()
    soft = with_gates(lm, Admission(score, 4, None))
    rows = jnp.asarray(tokens[:48].reshape(2, 24), jnp.int32)
    closed = with_values(soft, {name: jnp.zeros(2) for name in alphas(soft)})
    gradients = jax.jit(jax.grad(lambda model: distillation_loss(model, lm.model, rows, RECIPE)[1]["distance"]))
    for each, sign in ((closed, -1), (soft, 0)):
        found = gradients(each.model)
        gradient = np.stack([np.asarray(param[...]) for param in gate_parameters(found).values()])
        # Of closed heads the distance falls with the number; of open ones it is at its least.
        assert np.sign(np.where(np.abs(gradient) < 1e-6, 0, gradient)).mean() == pytest.approx(sign, abs=0.6)

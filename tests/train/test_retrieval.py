"""The training on retrieval tasks, on a very small model: it learns, it can be stopped anywhere, and what it writes is
a model like others, for which gates are trained on the same tasks."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf.models import decoder
from jaxbuf.models.admission import WriteGate
from jaxbuf.models.loading import checkpoint
from jaxbuf.train import write_gate
from jaxbuf.train.retrieval import PRESETS, Recurrence, RetrievalTraining, answer_loss, run_for
from jaxbuf.train.retrieval_plan import PLANS
from jaxbuf.train.retrieval_tasks import Mixture, Vocabulary
from jaxbuf.train.schedule import Phase, Rate

pytestmark = pytest.mark.foreign
PLAN = dataclasses.replace(
    PLANS["small"], vocabulary=Vocabulary(24, 24, 16), tasks=("key_value",), beside=("passkey",), length=48, window=8
)
RECIPE = dataclasses.replace(
    PRESETS["small"],
    plan=PLAN,
    layers=2,
    hidden=16,
    inner=24,
    heads=2,
    kv_heads=1,
    head_dim=8,
    phases=(Phase(0.5, 32, 4), Phase(1.0, 48, 4)),
    steps=8,
    rate=Rate(1e-2),
)


@pytest.fixture(scope="module")
def trained():
    training = RetrievalTraining(RECIPE)
    return training, list(training.run(every=2))


def test_answers_count_by_row_and_other_tokens_a_little(trained):
    training, _ = trained
    examples = Mixture(PLAN.every_task, 32, 4, PLAN.vocabulary, 5)
    made, task = examples.examples(0), examples.task(0)
    given = jnp.asarray(made.tokens), jnp.asarray(made.answers), jnp.asarray(task)
    loss, found = answer_loss(training.model, *given, tasks=2, other_weight=0.25)
    logits = np.asarray(decoder.logits(training.model, decoder.forward(training.model, given[0])), np.float64)[:, :-1]
    nats = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, made.tokens[:, 1:, None], 2)[..., 0]
    asked = made.answers[:, :-1]
    answers = np.mean([row[where].mean() for row, where in zip(nats, asked, strict=True)])
    assert float(loss) == pytest.approx(answers + 0.25 * nats[~asked].mean(), rel=1e-5)
    right = logits.argmax(-1) == made.tokens[:, 1:]
    for number in range(2):
        own = asked & (task == number)[:, None]
        assert float(found["answers"][number]) == own.sum()
        assert float(found["loss"][number]) == pytest.approx(nats[own].mean(), rel=1e-5)
        assert float(found["accuracy"][number]) == pytest.approx(right[own].mean())


@pytest.mark.slow
def test_a_run_that_was_stopped_ends_with_the_same_bits(trained, tmp_path):
    whole, metrics = trained
    assert [(found["step"], found["length"]) for found in metrics] == [(2, 32), (4, 32), (6, 48), (8, 48)]
    assert metrics[-1]["total"] < metrics[0]["total"]
    assert set(metrics[0]["accuracy"]) == {"key_value", "passkey"}
    stopped = RetrievalTraining(RECIPE)
    assert not stopped.restore(tmp_path / "steps")
    list(stopped.run(until=3))
    stopped.save(tmp_path / "steps")
    list(stopped.run(until=5))  # lost with the process
    resumed = RetrievalTraining(RECIPE)
    assert resumed.restore(tmp_path / "steps") and resumed.step == 3
    list(resumed.run(processes=1))
    for name, value in whole.state.values.items():
        np.testing.assert_array_equal(resumed.state.values[name], value)
    other = RetrievalTraining(dataclasses.replace(RECIPE, weight_decay=0.2))
    with pytest.raises(ValueError, match=r"recipe must be that of the checkpoint .* \{'weight_decay': 0.1\}"):
        other.restore(tmp_path / "steps")


def test_a_run_of_limited_time_saves_where_it_stops(tmp_path):
    class Steps:
        step = 0
        saved = ()

        def run(self):
            while self.step < 9:
                self.step += 1
                yield {"step": self.step}

        def save(self, directory):
            assert directory == tmp_path
            self.saved += (self.step,)

    def steps(seconds, every):
        training, clock = Steps(), itertools.count().__next__  # a second passes whenever it is looked at
        found = list(run_for(training, training.run, tmp_path, seconds=seconds, every=every, clock=clock))
        return [metrics["step"] for metrics in found], training.saved

    assert steps(None, 4) == ([*range(1, 10)], (4, 8, 9))
    taken, saved = steps(6.5, 4)
    assert len(taken) < 9 and saved[-1] == taken[-1]


@pytest.mark.slow
def test_the_model_is_loaded_and_gates_are_trained_on_the_tasks(trained, tmp_path):
    training, _ = trained
    checkpoint.save(training.model, RECIPE.config, tmp_path / "model", dtype="float32")
    lm = jaxbuf.load(tmp_path / "model")
    mixture = Mixture(PLAN.every_task, 32, 4, PLAN.vocabulary, 101)
    tokens = mixture.batch(0)
    np.testing.assert_array_equal(lm.logits(tokens), training.lm.logits(tokens))
    assert lm.tokenizer is None and lm.max_length == 96
    recipe = write_gate.Recipe(score=WriteGate(8), window=8, steps=2, rows=4, length=32)
    gates = write_gate.GateTraining(lm, mixture, recipe)
    np.testing.assert_array_equal(gates.batch(1), mixture.batch(1))
    assert [found["step"] for found in gates.run()] == [1, 2]
    with pytest.raises(ValueError, match=r"data must give int32 \(2, 32\) for a step, got int32 \(4, 32\)"):
        next(write_gate.GateTraining(lm, mixture, dataclasses.replace(recipe, rows=2)).run())


@pytest.mark.slow
def test_a_hybrid_is_trained_and_its_softmax_layers_get_gates(tmp_path):
    recurrence = Recurrence(value_heads=2, key_heads=1, key_dim=16, value_dim=32)
    training = RetrievalTraining(dataclasses.replace(RECIPE, attention_every=2, recurrence=recurrence, steps=2))
    assert [found["step"] for found in training.run(every=1)] == [1, 2]
    checkpoint.save(training.model, training.recipe.config, tmp_path / "model", dtype="float32")
    lm = jaxbuf.load(tmp_path / "model")
    kinds = [type(mixer).__name__ for layer in lm.model.layers for mixer in layer.mixers]
    assert kinds == ["GatedDeltaNetParameters", "AttentionParameters"]
    mixture = Mixture(PLAN.every_task, 32, 4, PLAN.vocabulary, 101)
    recipe = write_gate.Recipe(score=WriteGate(8), window=8, steps=1, rows=4, length=32)
    gates = write_gate.GateTraining(lm, mixture, recipe)
    assert [found["step"] for found in gates.run()] == [1]
    found = jaxbuf.generate(gates.lm, [mixture.batch(0)[0].tolist()], max_new_tokens=4)
    assert len(found[0].tokens) == 4


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        dataclasses.replace(RECIPE, steps=0)
    with pytest.raises(ValueError, match="attention_every must be at least 1, got 0"):
        dataclasses.replace(RECIPE, attention_every=0)
    with pytest.raises(ValueError, match="recurrence must be given if attention_every is above 1"):
        dataclasses.replace(RECIPE, attention_every=2)
    with pytest.raises(ValueError, match="length must be at most 48"):
        dataclasses.replace(RECIPE, phases=(Phase(1.0, 64, 4),))

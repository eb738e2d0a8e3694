"""Training of gates: the loss against its definition, and runs that are stopped and resumed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.models import decoder
from jaxbuf.models.admission import Admission, HiddenScore, Rule, WriteGate
from jaxbuf.models.gates import gate_parameters, kept_shares, load_gates, save_gates, with_gates, without_gates
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.layers import replace_parameters
from jaxbuf.models.loading.fields import CheckpointError
from jaxbuf.train.write_gate import GateTraining, Recipe, append_metrics, distillation_loss, penalty_of, trim_metrics
from tests.tiny import llama_model

RECIPE = Recipe(score=WriteGate(8), window=4, threshold=0.5, sparsity=1.0, steps=12, rows=4, length=24, rate=0.02)


@pytest.fixture(scope="module")
def lm():
    return llama_model(0)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 61, 500)


def test_the_penalty_is_that_written_out(rng):
    gates, window = rng.uniform(size=(2, 3, 9, 2)).astype(np.float32), 4
    expected = 0.0
    for index, gate in np.ndenumerate(gates.astype(np.float64)):
        resident = min(1.0, window / (9 - index[2]))
        expected += (resident + (1 - resident) * (gate + gate * (1 - gate))) / gates.size
    assert float(penalty_of(jnp.asarray(gates), window, "residency")) == pytest.approx(expected, rel=1e-6)
    paper = np.mean(gates + gates * (1.0 - gates))
    assert float(penalty_of(jnp.asarray(gates), window, "gate")) == pytest.approx(paper, rel=1e-6)


@pytest.mark.slow
@pytest.mark.foreign
def test_gates_close_where_keys_cost_much_and_a_resumed_run_ends_with_the_same_bits(lm, tokens, tmp_path):
    whole = GateTraining(lm, tokens, RECIPE)
    first = {name: np.asarray(value) for name, value in whole.state.gates.items()}
    metrics = list(whole.run())
    assert [found["step"] for found in metrics] == list(range(1, 13))
    assert metrics[-1]["penalty"] < metrics[0]["penalty"]
    assert any(not np.array_equal(first[name], value) for name, value in whole.state.gates.items())

    stopped = GateTraining(lm, tokens, RECIPE)
    assert not stopped.restore(tmp_path / "steps")
    list(stopped.run(until=5))
    stopped.save(tmp_path / "steps")
    list(stopped.run(until=7))  # lost with the process
    resumed = GateTraining(lm, tokens, RECIPE)
    assert resumed.restore(tmp_path / "steps") and resumed.step == 5
    list(resumed.run())
    for name, value in whole.state.gates.items():
        np.testing.assert_array_equal(resumed.state.gates[name], value)
    other = GateTraining(lm, tokens, Recipe(**{**vars(RECIPE), "sparsity": 2.0}))
    with pytest.raises(ValueError, match=r"recipe must be that of the checkpoint .* \{'sparsity': 1.0\}"):
        other.restore(tmp_path / "steps")

    save_gates(whole.lm, tmp_path / "gates.safetensors")
    again = load_gates(lm, tmp_path / "gates.safetensors")
    np.testing.assert_array_equal(again.logits(tokens[:30]), whole.lm.logits(tokens[:30]))
    assert again.config == whole.lm.config


@pytest.mark.slow
def test_pieces_of_a_batch_and_remat_give_the_gradient_of_the_whole(lm, tokens):
    soft = with_gates(lm, Admission(WriteGate(8), 4, None))
    rows = jnp.asarray(tokens[:96].reshape(4, 24), jnp.int32)

    def gradient(rows, *, remat):
        recipe = Recipe(**{**vars(RECIPE), "remat": remat})
        found = jax.grad(lambda model: distillation_loss(model, lm.model, rows, recipe)[0])(soft.model)
        return {name: param[...] for name, param in gate_parameters(found).items()}

    whole, again = gradient(rows, remat=False), gradient(rows, remat=True)
    for name, value in whole.items():
        np.testing.assert_allclose(again[name], value, rtol=1e-4, atol=1e-7)
    assert any(np.abs(value).max() > 1e-6 for value in whole.values())


def test_open_gates_change_nothing_and_closed_ones_leave_the_window(lm, tokens):
    base, rows = np.asarray(lm.logits(tokens[:40])), tokens[:40]
    everything = with_gates(lm, Admission(Rule("all"), 4))
    np.testing.assert_allclose(everything.logits(rows), base, atol=1e-5)
    nothing = np.asarray(with_gates(lm, Admission(Rule("none"), 4)).logits(rows))
    np.testing.assert_allclose(nothing[:4], base[:4], atol=1e-5)
    assert np.abs(nothing[20:] - base[20:]).max() > 1e-2
    assert kept_shares(everything, rows[None]).tolist() == [[1.0, 1.0]] * 2
    hidden, gates = decoder.forward_with_gates(everything.model, jnp.asarray(rows[None], jnp.int32))
    assert gates.shape == (2, 1, 40, 2) and (gates == 1).all() and hidden.shape == (1, 40, 24)
    with pytest.raises(ValueError, match="model must have gates"):
        decoder.forward_with_gates(lm.model, jnp.asarray(rows[None], jnp.int32))


def test_what_is_no_file_of_these_gates_is_an_error_that_says_so(lm, tmp_path):
    file = tmp_path / "gates.safetensors"
    with pytest.raises(ValueError, match="lm must have gates, got LanguageModel"):
        save_gates(lm, file)
    with pytest.raises(FileNotFoundError, match="no gates at"):
        load_gates(lm, file)
    save_gates(with_gates(lm, Admission(HiddenScore(), 4), seed=1), file)
    assert without_gates(load_gates(lm, file)).config == lm.config
    other = llama_model(5)
    with pytest.raises(CheckpointError, match="has gates of another model"):
        load_gates(other, file)
    file.write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="cannot be read as a file of gates"):
        load_gates(lm, file)


def test_settings_that_do_not_fit_are_named(lm, tokens):
    for change, message in (
        ({"pieces": 3}, "pieces must divide rows"),
        ({"length": 4}, "length must be above window"),
        ({"sparsity": -1.0}, "sparsity must be at least 0"),
        ({"penalty": "l1"}, "penalty must be 'residency', 'gate' or 'mean'"),
    ):
        with pytest.raises(ValueError, match=message):
            Recipe(**{**vars(RECIPE), **change})
    with pytest.raises(ValueError, match="data must hold a sequence of length"):
        GateTraining(lm, tokens[:10], RECIPE)
    with pytest.raises(ValueError, match=r"devices must divide rows / pieces \(4\), got 3 of them"):
        GateTraining(lm, tokens, RECIPE, devices=jax.devices() * 3)
    with pytest.raises(ValueError, match="score must learn something"):
        GateTraining(lm, tokens, Recipe(**{**vars(RECIPE), "score": Rule("all")}))


class OfSteps:
    """Data of a caller's own: a step's sequences are drawn from its number."""

    def __init__(self, vocab_size=61, rows=4):
        self.vocab_size, self.rows = vocab_size, rows

    def batch(self, step):
        rng = np.random.default_rng([7, step])
        return rng.integers(0, self.vocab_size, (self.rows, 24)).astype(np.int32)


@pytest.mark.foreign
def test_whatever_gives_sequences_of_a_step_can_be_trained_on(lm):
    training = GateTraining(lm, OfSteps(), RECIPE)
    np.testing.assert_array_equal(training.batch(3), OfSteps().batch(3))
    assert [found["step"] for found in training.run(until=2)] == [1, 2]
    with pytest.raises(ValueError, match=r"data must give int32 \(4, 24\) for a step, got int32 \(3, 24\)"):
        GateTraining(lm, OfSteps(rows=3), RECIPE).batch(0)
    with pytest.raises(ValueError, match=r"data must give ids in \[0, 61\), got 0 to 99 for step 0"):
        GateTraining(lm, OfSteps(vocab_size=100), RECIPE).batch(0)


@pytest.mark.foreign
def test_a_model_in_bfloat16_has_gates_in_float32(lm, tokens):
    model = replace_parameters(lm.model, [x.astype(jnp.bfloat16) for x in jax.tree.leaves(lm.model)])
    half = LanguageModel(model, lm.config, None, {}, jnp.dtype("bfloat16"), "tiny")
    training = GateTraining(half, tokens, RECIPE)
    metrics = list(training.run(until=3))
    assert all(np.isfinite(found["loss"]) for found in metrics)
    assert {str(value.dtype) for value in training.state.gates.values()} == {"float32"}
    held = gate_parameters(training.lm.model)
    assert {str(param[...].dtype) for param in held.values()} == {"float32"}


def test_metrics_of_steps_that_are_taken_again_replace_the_old(tmp_path):
    file = tmp_path / "metrics.jsonl"
    trim_metrics(file, 0)  # there is none yet
    for step in (1, 2, 3):
        append_metrics(file, {"step": step, "loss": float(step)})
    with file.open("a") as half:
        half.write('{"step": 4, "lo')
    trim_metrics(file, 2)
    append_metrics(file, {"step": 3, "loss": 0.0})
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3]

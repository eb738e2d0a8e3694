"""Training of gates: the model is frozen, and its gates learn to keep few keys and yet its hidden states.

The loss is the distance of the final hidden states from those of the model without gates, and a penalty on keys that
are kept. While they are trained, gates are soft: a key behind the window counts with the logarithm of its gate.

Source: Write-Gated KV (2025), sections 3.2 and 4.1.
"""

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxbuf.arguments import check_sizes
from jaxbuf.axes import Array, Float32, Int
from jaxbuf.models import decoder
from jaxbuf.models.admission import Admission, Score, WriteGate
from jaxbuf.models.decoder import Decoder
from jaxbuf.models.gates import gate_parameters, with_gates, with_threshold, without_gates
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.layers import named_parameters, replace_parameters


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How gates are trained.

    Attributes:
      score: What is trained.
      window, threshold: Of the admission that is made of it, see `jaxbuf.models.admission.Admission`.
      sparsity: Weight of the penalty: the higher, the fewer keys are kept.
      penalty: "residency" counts a key as kept for the tokens in whose window it lies, and charges its gate for the
        others; "gate" is the paper's g + g (1 - g), whatever the distance.
      steps, rows, length: Optimiser steps, and the sequences of each and their tokens.
      pieces: In how many parts the rows of a step go through the model, one after the other: gradients are added up.
      rate, weight_decay: Of AdamW; the rate rises for a tenth of the steps and falls along a cosine.
      remat: Whether layers are computed again for their gradients, which takes less memory.
      seed: Of the first gates, and of which sequences are read.
    """

    score: Score = dataclasses.field(default_factory=WriteGate)
    window: int = 128
    threshold: float = 0.1
    sparsity: float = 0.1
    penalty: Literal["residency", "gate"] = "residency"
    steps: int = 200
    rows: int = 8
    length: int = 512
    pieces: int = 1
    rate: float = 1e-3
    weight_decay: float = 0.01
    remat: bool = True
    seed: int = 0

    def __post_init__(self):
        sizes = {name: getattr(self, name) for name in ("window", "steps", "rows", "length", "pieces")}
        check_sizes(**sizes)
        if self.rows % self.pieces:
            raise ValueError(f"pieces must divide rows ({self.rows}), got {self.pieces}")
        if self.length <= self.window:
            raise ValueError(f"length must be above window ({self.window}): no key leaves it, got {self.length}")
        if self.penalty not in ("residency", "gate"):
            raise ValueError(f"penalty must be 'residency' or 'gate', got {self.penalty!r}")
        for name in ("sparsity", "rate", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)!r}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GateState:
    """What training changes: the gates' parameters, by their paths, and the optimiser's state."""

    gates: dict[str, Array]
    moments: optax.OptState


def penalty_of(
    gates: Float32[Array, "layers rows time kv_heads"], window: int, kind: Literal["residency", "gate"]
) -> Float32[Array, ""]:
    """The penalty on gates of whole sequences, near the share of keys that are kept.

    g (2 - g) is 0 and 1 where a gate g is, and above g between: gates are pushed to one of both. With the residency, a
    key counts as kept where it lies in the window, whatever its gate is: that is so for a share of
    min(1, window / (T - j)) of the queries that see key j of T.

    Args:
      gates: Of all keys.
      window: Of the layers.
      kind: With the residency, or of the gates alone.

    Source: Write-Gated KV (2025), section 3.2, whose g + g (1 - g) is the same; the residency is that of its authors'
    code.
    """
    kept = gates * (2.0 - gates)
    if kind == "residency":
        time = gates.shape[2]
        left = time - jnp.arange(time, dtype=jnp.float32)
        resident = jnp.minimum(1.0, window / left)[None, None, :, None]
        kept = resident + (1.0 - resident) * kept
    return jnp.mean(kept)


def distillation_loss(
    model: Decoder, teacher: Decoder, tokens: Int[Array, "rows time"], recipe: Recipe
) -> tuple[Float32[Array, ""], dict[str, Array]]:
    """The loss of gates, and what it is made of.

    Args:
      model: With soft gates: a threshold of None.
      teacher: The same model without gates.
      tokens: Of whole rows.
      recipe: Which penalty, and its weight.

    Returns:
      distance + sparsity · penalty. "distance" is the mean square of the difference between the final hidden states,
      over that of the teacher's own, so that a weight means the same for every model; "penalty"; and "kept", the share
      of keys whose gates reach the threshold.
    """
    expected = jax.lax.stop_gradient(decoder.forward(teacher, tokens)).astype(jnp.float32)
    hidden, gates = decoder.forward_with_gates(model, tokens, remat=recipe.remat)
    apart = jnp.mean(jnp.square(hidden.astype(jnp.float32) - expected))
    distance = apart / jnp.mean(jnp.square(expected))
    penalty = penalty_of(gates, recipe.window, recipe.penalty)
    kept = jnp.mean((gates >= recipe.threshold).astype(jnp.float32))
    metrics = {"distance": distance, "penalty": penalty, "kept": kept}
    return distance + recipe.sparsity * penalty, metrics


class GateTraining:
    """A training of a model's gates that can be stopped and resumed at any step, to the bit on one machine.

    Args:
      lm: The model, which stays as it is; gates that it has are dropped.
      tokens: int [n], the text, at least one sequence.
      recipe: What to do.

    Raises:
      ValueError: The model has no softmax layer that can be gated, or the text is too short.
    """

    def __init__(self, lm: LanguageModel, tokens: np.ndarray, recipe: Recipe):
        tokens = np.asarray(tokens)
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"tokens must be integers [n], got {tokens.dtype} {tokens.shape}")
        if tokens.size < recipe.length:
            raise ValueError(f"tokens must be a sequence of length ({recipe.length}) or more, got {tokens.size}")
        if lm.max_length < recipe.length:
            raise ValueError(f"length must be at most the model's ({lm.max_length}), got {recipe.length}")
        self.recipe, self._tokens = recipe, tokens
        base = without_gates(lm)
        soft = with_gates(base, Admission(recipe.score, recipe.window, None), seed=recipe.seed)
        self._lm, self._teacher = soft, base.model
        first = {name: param[...] for name, param in gate_parameters(soft.model).items()}
        if not first:
            raise ValueError(f"score must learn something, got {recipe.score!r}")
        self._optimiser = _optimiser(recipe)
        self.state = GateState(first, self._optimiser.init(first))
        self.step = 0

        def advance(state: GateState, model: Decoder, teacher: Decoder, tokens: Array) -> tuple[GateState, dict]:
            return _advance(self._optimiser, recipe, state, model, teacher, tokens)

        self._advance = jax.jit(advance)

    @property
    def lm(self) -> LanguageModel:
        """The model with the gates as they are now, and the recipe's threshold."""
        model = _with(self._lm.model, self.state.gates)
        return with_threshold(self._lm.replace(model=model), self.recipe.threshold)

    def batch(self, step: int) -> np.ndarray:
        """int32 [rows, length]: the sequences of a step, which depend on the seed and the step alone."""
        rng = np.random.default_rng([self.recipe.seed, step])
        starts = rng.integers(0, self._tokens.size - self.recipe.length + 1, self.recipe.rows)
        return np.stack([self._tokens[start : start + self.recipe.length] for start in starts]).astype(np.int32)

    def run(self, until: int | None = None) -> Iterator[dict[str, float]]:
        """Takes steps up to number `until` (None: all), and yields the metrics of each.

        Raises:
          FloatingPointError: The loss is not finite; the state is that before the step.
        """
        while self.step < (self.recipe.steps if until is None else min(until, self.recipe.steps)):
            state, found = self._advance(self.state, self._lm.model, self._teacher, self.batch(self.step))
            metrics = {"step": self.step + 1} | {name: float(value) for name, value in found.items()}
            if not np.isfinite(metrics["loss"]):
                raise FloatingPointError(f"the loss of step {self.step + 1} is not finite: {metrics}")
            self.state, self.step = state, self.step + 1
            yield metrics

    def save(self, directory: Path) -> None:
        """Writes a checkpoint to a directory, where it counts once it is whole; the two newest are kept."""
        import orbax.checkpoint as ocp

        with ocp.CheckpointManager(directory.resolve(), options=_options(ocp)) as manager:
            arrays = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(self.state))}
            host = ocp.args.JsonSave({"recipe": _described(self.recipe)})
            manager.save(self.step, args=ocp.args.Composite(state=ocp.args.StandardSave(arrays), host=host))
            manager.wait_until_finished()

    def restore(self, directory: Path) -> bool:
        """Goes on from the newest checkpoint of a directory; False where there is none.

        Raises:
          ValueError: It was made with another recipe.
        """
        import orbax.checkpoint as ocp

        if not directory.exists():
            return False
        with ocp.CheckpointManager(directory.resolve(), options=_options(ocp)) as manager:
            step = manager.latest_step()
            if step is None:
                return False
            leaves = jax.tree.leaves(self.state)
            like = {str(i): leaf for i, leaf in enumerate(leaves)}
            found = manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]["recipe"]
            if found != _described(self.recipe):
                theirs = {name: value for name, value in found.items() if value != _described(self.recipe).get(name)}
                raise ValueError(f"recipe must be that of the checkpoint in {directory}, which differs: {theirs}")
            restored = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))["state"]
        arrays = [jnp.asarray(np.asarray(restored[str(i)])) for i in range(len(leaves))]
        self.state, self.step = jax.tree.unflatten(jax.tree.structure(self.state), arrays), step
        return True


def append_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """Writes a line of JSON behind those that are there. Those of later steps, of a run that was resumed before them,
    are dropped."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if lines and json.loads(lines[-1])["step"] >= metrics["step"]:
        lines = [line for line in lines if json.loads(line)["step"] < metrics["step"]]
        new = path.with_name(f".{path.name}.new")
        new.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        os.replace(new, path)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(metrics) + "\n")


def _advance(
    optimiser: optax.GradientTransformation,
    recipe: Recipe,
    state: GateState,
    model: Decoder,
    teacher: Decoder,
    tokens: Array,
) -> tuple[GateState, dict[str, Array]]:
    def loss(gates: dict[str, Array], tokens: Array) -> tuple[Array, dict[str, Array]]:
        return distillation_loss(_with(model, gates), teacher, tokens, recipe)

    def add_piece(total: dict[str, Array], tokens: Array) -> tuple[dict[str, Array], dict[str, Array]]:
        (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(state.gates, tokens)
        return jax.tree.map(jnp.add, total, gradient), metrics | {"loss": value}

    pieces = tokens.reshape(recipe.pieces, -1, tokens.shape[1])
    summed, metrics = jax.lax.scan(add_piece, jax.tree.map(jnp.zeros_like, state.gates), pieces)
    gradient = jax.tree.map(lambda x: x / recipe.pieces, summed)
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        updates, moments = optimiser.update(gradient, state.moments, state.gates)
        gates: Any = optax.apply_updates(state.gates, updates)
    metrics = jax.tree.map(jnp.mean, metrics) | {"gradient_norm": optax.tree.norm(gradient)}
    return GateState(gates, moments), metrics


def _optimiser(recipe: Recipe) -> optax.GradientTransformation:
    warmup = max(1, recipe.steps // 10)
    rate = optax.schedules.warmup_cosine_decay_schedule(0.0, recipe.rate, warmup, max(recipe.steps, warmup + 1))
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=recipe.weight_decay))


def _with(model: Decoder, gates: dict[str, Array]) -> Decoder:
    held = named_parameters(model)
    return replace_parameters(model, [gates[name] if name in gates else param[...] for name, param in held.items()])


def _described(recipe: Recipe) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(recipe) | {"score": repr(recipe.score)}))


def _options(ocp: Any) -> Any:
    return ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)

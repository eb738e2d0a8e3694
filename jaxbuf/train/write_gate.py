"""Training of gates: the model is frozen, and its gates learn to keep few keys and yet its hidden states.

The loss is the distance of the final hidden states from those of the model without gates, and a penalty on keys that
are kept. While they are trained, gates are soft: a key behind the window counts with the logarithm of its gate, or a
head's gate mixes what it gives with all keys and with few. A recipe may tune the model, too: it then learns to give the
hidden states of the model that it was.

Source: Write-Gated KV (2025), sections 3.2 and 4.1.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxbuf.arguments import check_sizes
from jaxbuf.attention.gated_sequence import Soft, check_soft
from jaxbuf.axes import Array, Bool, Float32, Int, Int32
from jaxbuf.models import decoder
from jaxbuf.models.admission import Admission, BorrowedNeuron, HeadScore, HiddenScore, Score, WriteGate
from jaxbuf.models.decoder import Decoder
from jaxbuf.models.gates import (
    gate_parameters,
    identity,
    with_gates,
    with_idle_neurons,
    with_threshold,
    without_gates,
)
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.layers import named_parameters, replace_parameters
from jaxbuf.train.text_sequences import DocumentSequences, Sequences, Stream

ROWS = PartitionSpec(None, "devices")  # of [pieces, rows, time]

type Penalty = Literal["residency", "gate", "mean"]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How gates are trained.

    Attributes:
      score: What is trained.
      window, threshold: Of the admission that is made of it, see `jaxbuf.models.admission.Admission`.
      sparsity: Weight of the penalty: the higher, the fewer keys are kept.
      penalty: "residency" counts a key as kept for the tokens in whose window it lies, and charges its gate for the
        others; "gate" is the paper's g + g (1 - g), whatever the distance; "mean" is the mean gate, DuoAttention's.
      soft: How gates count while they are trained: "bias", the paper's, or "share", see
        `jaxbuf.attention.gated_sequence`. Gates of whole heads have their own way.
      tunes: "gates" alone, or the whole "model" with them, but for a layer that predicts further tokens. Tuning holds a
        float32 copy of all parameters and two moments of each beside the model.
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
    penalty: Penalty = "residency"
    soft: Soft = "bias"
    tunes: Literal["gates", "model"] = "gates"
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
        if self.penalty not in ("residency", "gate", "mean"):
            raise ValueError(f"penalty must be 'residency', 'gate' or 'mean', got {self.penalty!r}")
        check_soft(self.soft)
        if self.tunes not in ("gates", "model"):
            raise ValueError(f"tunes must be 'gates' or 'model', got {self.tunes!r}")
        for name in ("sparsity", "rate", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)!r}")


RECIPES: dict[str, Recipe] = {
    "write-gate": Recipe(),
    "hidden": Recipe(score=HiddenScore()),
    "head": Recipe(score=HeadScore(sinks=16), penalty="mean", sparsity=0.05, rate=0.02),
    "neuron": Recipe(score=BorrowedNeuron(), tunes="model", rate=1e-4, weight_decay=0.0),
}
"""A recipe for each score that learns, to be changed by `dataclasses.replace`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GateState:
    """What training changes: parameters in float32 by their paths, the gates' or all, and the optimiser's state."""

    gates: dict[str, Array]
    moments: optax.OptState


def penalty_of(gates: Float32[Array, "layers rows time kv_heads"], window: int, kind: Penalty) -> Float32[Array, ""]:
    """The penalty on gates of whole sequences, near the share of keys that are kept.

    g (2 - g) is 0 and 1 where a gate g is, and above g between: gates are pushed to one of both. With the residency, a
    key counts as kept where it lies in the window, whatever its gate is: that is so for a share of
    min(1, window / (T - j)) of the queries that see key j of T.

    Args:
      gates: Of all keys.
      window: Of the layers.
      kind: With the "residency", of the "gate" alone, or the "mean" of the gates as they are.

    Source: Write-Gated KV (2025), section 3.2, whose g + g (1 - g) is the same; the residency is that of its authors'
    code. The mean is that of DuoAttention (2024), section 2.3, where first tokens have no gates: here theirs are one,
    which adds a constant.
    """
    if kind == "mean":
        return jnp.mean(gates)
    kept = gates * (2.0 - gates)
    if kind == "residency":
        time = gates.shape[2]
        left = time - jnp.arange(time, dtype=jnp.float32)
        resident = jnp.minimum(1.0, window / left)[None, None, :, None]
        kept = resident + (1.0 - resident) * kept
    return jnp.mean(kept)


def distillation_loss(
    model: Decoder,
    teacher: Decoder,
    tokens: Int[Array, "rows time"],
    recipe: Recipe,
    asked: Bool[Array, "rows time"] | None = None,
) -> tuple[Float32[Array, ""], dict[str, Array]]:
    """The loss of gates, and what it is made of.

    Args:
      model: With soft gates: a threshold of None.
      teacher: The same model without gates.
      tokens: Of whole rows.
      recipe: Which penalty, and its weight.
      asked: At which tokens hidden states are compared: answers, for instance. None: at all.

    Returns:
      distance + sparsity · penalty. "distance" is, of each row, the mean square of the difference between the final
      hidden states, over that of the teacher's own, so that a weight means the same for every model; "penalty"; and
      "kept", the share of keys whose gates reach the threshold. All are means over rows, so that those of parts of a
      batch add up to those of the whole.
    """
    expected = jax.lax.stop_gradient(decoder.forward(teacher, tokens)).astype(jnp.float32)
    hidden, gates = decoder.forward_with_gates(model, tokens, remat=recipe.remat)
    apart, own = jnp.square(hidden.astype(jnp.float32) - expected), jnp.square(expected)
    if asked is not None:
        apart, own = (jnp.where(asked[..., None], x, 0.0) for x in (apart, own))
    least = jnp.finfo(jnp.float32).tiny  # of a row in which nothing is asked
    distance = jnp.mean(jnp.sum(apart, axis=(1, 2)) / jnp.maximum(jnp.sum(own, axis=(1, 2)), least))
    penalty = penalty_of(gates, recipe.window, recipe.penalty)
    kept = jnp.mean((gates >= recipe.threshold).astype(jnp.float32))
    metrics = {"distance": distance, "penalty": penalty, "kept": kept}
    return distance + recipe.sparsity * penalty, metrics


class GateTraining:
    """A training of a model's gates that can be stopped and resumed at any step, to the bit on one machine.

    Args:
      lm: The model, which stays as it is; gates that it has are dropped.
      data: int [n], a text, of which steps read sequences in a random order; or sequences of steps: anything with
        `batch(step)`, which gives int32 [rows, length] for a step from 0, always the same for the same step.
        `jaxbuf.train.text_sequences` has some. If they have `asked(step)`, too, bool [rows, length], hidden states are
        compared at these tokens alone.
      recipe: What to do.
      devices: The rows of a step are split evenly over them, and all of them hold the model and the gates; None: one.
        The numbers are those of one device, up to rounding.

    Raises:
      ValueError: The model has no softmax layer that can be gated, the text is too short, or the devices do not divide
        the rows that are read at once.
    """

    def __init__(
        self,
        lm: LanguageModel,
        data: np.ndarray | Sequences,
        recipe: Recipe,
        *,
        devices: Sequence[Any] | None = None,
    ):
        if lm.max_length < recipe.length:
            raise ValueError(f"length must be at most the model's ({lm.max_length}), got {recipe.length}")
        if devices is not None and (not devices or recipe.rows // recipe.pieces % len(devices)):
            raise ValueError(
                f"devices must divide rows / pieces ({recipe.rows // recipe.pieces}), got {len(devices)} of them"
            )
        self.recipe, self._data = recipe, _sequences(data, recipe)
        base = without_gates(lm)
        soft = with_gates(base, Admission(recipe.score, recipe.window, None, soft=recipe.soft), seed=recipe.seed)
        if recipe.tunes == "model":
            soft = with_idle_neurons(soft)
        self._lm = soft
        first = _tuned(soft.model, recipe)
        if not first:
            raise ValueError(f"score must learn something where tunes is 'gates', got {recipe.score!r}")
        self._optimiser = _optimiser(recipe)
        self._mesh = None if devices is None else Mesh(np.asarray(devices), ("devices",))
        self._models = self._on_all((soft.model, base.model))
        self.state = self._on_all(GateState(first, self._optimiser.init(first)))
        self.step = 0

        def advance(state: GateState, models: tuple[Decoder, Decoder], pieces: "Pieces") -> tuple[GateState, dict]:
            return _advance(self._optimiser, recipe, self._mesh, state, *models, pieces)

        self._advance = jax.jit(advance)

    @property
    def lm(self) -> LanguageModel:
        """The model with the gates as they are now, and the recipe's threshold; tuned, if the recipe says so."""
        gates = {name: jnp.asarray(np.asarray(value)) for name, value in self.state.gates.items()}
        lm = self._lm.replace(model=_with(self._lm.model, gates))
        if self.recipe.tunes == "model":  # so that errors tell it from the one that it was
            lm = dataclasses.replace(lm, name=f"{lm.name}, tuned")
        return with_threshold(lm, self.recipe.threshold)

    def batch(self, step: int) -> Int32[np.ndarray, "batch time"]:
        """The sequences of a step.

        Args:
          step: From 0.

        Raises:
          ValueError: The data give something else, or ids that the model does not have.
        """
        expected = (self.recipe.rows, self.recipe.length)
        found = np.asarray(self._data.batch(step))
        if found.shape != expected or found.dtype != np.int32:
            raise ValueError(f"data must give int32 {expected} for a step, got {found.dtype} {found.shape}")
        if not 0 <= found.min() <= found.max() < self._lm.vocab_size:
            raise ValueError(
                f"data must give ids in [0, {self._lm.vocab_size}), got {found.min()} to {found.max()} for step {step}"
            )
        return found

    def _asked(self, step: int) -> np.ndarray | None:
        asked = getattr(self._data, "asked", None)
        if asked is None:
            return None
        expected, found = (self.recipe.rows, self.recipe.length), np.asarray(asked(step))
        if found.shape != expected or found.dtype != bool:
            raise ValueError(f"data must ask bool {expected} for a step, got {found.dtype} {found.shape}")
        return found

    def run(self, until: int | None = None) -> Iterator[dict[str, float]]:
        """Takes steps up to number `until` (None: all), and yields the metrics of each.

        Raises:
          FloatingPointError: The loss is not finite; the state is that before the step.
        """
        while self.step < (self.recipe.steps if until is None else min(until, self.recipe.steps)):
            given = Pieces(self.batch(self.step), self._asked(self.step))
            pieces = jax.tree.map(lambda x: x.reshape(self.recipe.pieces, -1, self.recipe.length), given)
            if self._mesh is not None:
                pieces = jax.device_put(pieces, NamedSharding(self._mesh, ROWS))
            state, found = self._advance(self.state, self._models, pieces)
            metrics = {"step": self.step + 1} | {name: float(value) for name, value in found.items()}
            if not np.isfinite(metrics["loss"]):
                raise FloatingPointError(f"the loss of step {self.step + 1} is not finite: {metrics}")
            self.state, self.step = state, self.step + 1
            yield metrics

    def save(self, directory: Path) -> None:
        """Writes a checkpoint to a directory, where it counts once it is whole; the two newest are kept.

        It holds the gates, the optimiser's state, the step, from which the order of the data follows, and the position
        of data that are a `jaxbuf.train.text_sequences.Stream`.
        """
        import orbax.checkpoint as ocp

        with ocp.CheckpointManager(directory.resolve(), options=_options(ocp)) as manager:
            arrays = {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(self.state))}
            position = self._data.get_state() if isinstance(self._data, Stream) else None
            host = ocp.args.JsonSave({"made of": self._described(), "position": position})
            manager.save(self.step, args=ocp.args.Composite(state=ocp.args.StandardSave(arrays), host=host))
            manager.wait_until_finished()

    def restore(self, directory: Path) -> bool:
        """Goes on from the newest checkpoint of a directory; False where there is none.

        Raises:
          ValueError: It was made with another recipe, of another model or with other data.
        """
        import orbax.checkpoint as ocp

        if not directory.exists():
            return False
        with ocp.CheckpointManager(directory.resolve(), options=_options(ocp)) as manager:
            step = manager.latest_step()
            if step is None:
                return False
            leaves = jax.tree.leaves(self.state)
            host = manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]
            ours = self._described()
            for name, theirs in host["made of"].items():
                if theirs != ours[name]:
                    differing = _differing(theirs, ours[name])
                    raise ValueError(
                        f"{name} must be that of the checkpoint in {directory}, which differs: {differing}; another "
                        "output begins anew"
                    )
            like = {str(i): np.asarray(leaf) for i, leaf in enumerate(leaves)}
            restored = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))["state"]
        arrays = [jnp.asarray(np.asarray(restored[str(i)])) for i in range(len(leaves))]
        self.state, self.step = self._on_all(jax.tree.unflatten(jax.tree.structure(self.state), arrays)), step
        if isinstance(self._data, Stream):
            self._data.set_state(host["position"])
        return True

    def _described(self) -> dict[str, Any]:
        """What a checkpoint must have been made of for this training to go on from it."""
        recipe = dataclasses.asdict(self.recipe) | {"score": repr(self.recipe.score)}
        data = getattr(self._data, "identity", "")
        return json.loads(json.dumps({"recipe": recipe, "lm": identity(self._lm), "data": data}))

    def _on_all(self, tree: Any) -> Any:
        """Arrays on every device of the mesh."""
        return tree if self._mesh is None else jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec()))


class Pieces(NamedTuple):
    """The sequences of a step: int32 [pieces, rows, time], and bool like them or None, see `distillation_loss`."""

    tokens: Any
    asked: Any


def trim_metrics(path: Path, step: int) -> None:
    """Leaves of a file of metrics the whole lines up to a step, from which a run goes on.

    Later ones are of steps that will be taken again, and the last may be half a line: its process was killed.

    Args:
      path: Of the file, which need not be there.
      step: Its line is the last one that stays.
    """
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    new = path.with_name(f".{path.name}.new")
    new.write_text("".join(kept), encoding="utf-8")
    os.replace(new, path)


def append_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """Writes a line of JSON behind those that are there.

    Args:
      path: Of the file.
      metrics: Of a step.
    """
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(metrics) + "\n")


def _sequences(data: np.ndarray | Sequences, recipe: Recipe) -> Sequences:
    if hasattr(data, "batch"):
        return data  # pyright: ignore[reportReturnType]
    tokens = np.asarray(data)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"data must be integers [n] or have batch(step), got {tokens.dtype} {tokens.shape}")
    if tokens.size < recipe.length:
        raise ValueError(f"data must hold a sequence of length ({recipe.length}) or more, got {tokens.size} tokens")
    return DocumentSequences([tokens], recipe.rows, recipe.length, seed=recipe.seed)


def _advance(
    optimiser: optax.GradientTransformation,
    recipe: Recipe,
    mesh: Mesh | None,
    state: GateState,
    model: Decoder,
    teacher: Decoder,
    pieces: Pieces,
) -> tuple[GateState, dict[str, Array]]:
    gradient_of = partial(_gradient, recipe)
    if mesh is not None:

        def of_own_rows(*arguments: Any) -> Any:
            return jax.lax.pmean(_gradient(recipe, *arguments), mesh.axis_names)

        everywhere = PartitionSpec()
        # What varies over devices is not checked: custom gradients do not say it.
        gradient_of = jax.shard_map(
            of_own_rows,
            mesh=mesh,
            in_specs=(everywhere, everywhere, everywhere, ROWS),
            out_specs=everywhere,
            check_vma=False,
        )
    gradient, metrics = gradient_of(state.gates, model, teacher, pieces)
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        updates, moments = optimiser.update(gradient, state.moments, state.gates)
        gates: Any = optax.apply_updates(state.gates, updates)
    if recipe.score.terms.bounds is not None:
        own = gate_parameters(model).keys()
        gates = {name: jnp.clip(x, *recipe.score.terms.bounds) if name in own else x for name, x in gates.items()}
    return GateState(gates, moments), metrics | {"gradient_norm": optax.tree.norm(gradient)}


def _gradient(
    recipe: Recipe,
    gates: dict[str, Array],
    model: Decoder,
    teacher: Decoder,
    pieces: Pieces,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The mean gradient of the pieces, which are read one after the other, and their mean metrics."""

    def loss(gates: dict[str, Array], piece: Pieces) -> tuple[Array, dict[str, Array]]:
        return distillation_loss(_with(model, gates), teacher, piece.tokens, recipe, piece.asked)

    def add_piece(total: dict[str, Array], piece: Pieces) -> tuple[dict[str, Array], dict[str, Array]]:
        (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(gates, piece)
        return jax.tree.map(jnp.add, total, gradient), metrics | {"loss": value}

    summed, metrics = jax.lax.scan(add_piece, jax.tree.map(jnp.zeros_like, gates), pieces)
    return jax.tree.map(lambda x: x / recipe.pieces, summed), jax.tree.map(jnp.mean, metrics)


def _optimiser(recipe: Recipe) -> optax.GradientTransformation:
    warmup = max(1, recipe.steps // 10)
    rate = optax.schedules.warmup_cosine_decay_schedule(0.0, recipe.rate, warmup, max(recipe.steps, warmup + 1))
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=recipe.weight_decay))


def _tuned(model: Decoder, recipe: Recipe) -> dict[str, Array]:
    """What the recipe changes, in float32, by its paths."""
    named = gate_parameters(model) if recipe.tunes == "gates" else named_parameters(model)
    return {name: param[...].astype(jnp.float32) for name, param in named.items() if not name.startswith("mtp.")}


def _with(model: Decoder, gates: dict[str, Array]) -> Decoder:
    """The model with other values of some parameters, in its own dtypes."""

    def value(name: str, held: Array) -> Array:
        return gates[name].astype(held.dtype) if name in gates else held

    return replace_parameters(model, [value(name, param[...]) for name, param in named_parameters(model).items()])


def _differing(theirs: Any, ours: Any) -> Any:
    """What differs of theirs: of a dict the entries."""
    if not isinstance(theirs, dict):
        return theirs
    return {name: value for name, value in theirs.items() if value != ours.get(name)}


def _options(ocp: Any) -> Any:
    return ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)

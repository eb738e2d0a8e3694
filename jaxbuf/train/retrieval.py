"""Training of a softmax or hybrid model on generated retrieval tasks, from scratch: what write gates are measured on.

Its loss is that of the answers, and with a small weight that of all other tokens, which keeps the hidden states there
close to what little can be said of them: gates are trained to keep the hidden states of every position.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxbuf.arguments import check_sizes
from jaxbuf.axes import Array, Bool, Float32, Int
from jaxbuf.models import decoder
from jaxbuf.models.config import ModelConfig
from jaxbuf.models.decoder import Decoder
from jaxbuf.models.families import config_from_dict
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.layers import cast, named_parameters, replace_parameters
from jaxbuf.train.examples_ahead import made_ahead
from jaxbuf.train.retrieval_plan import PLANS, Plan
from jaxbuf.train.retrieval_tasks import END, Example, Mixture
from jaxbuf.train.schedule import Phase, Rate, phase_at


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """Sizes of a Gated DeltaNet layer: its state is a matrix of key_dim times value_dim numbers for each value head.

    Attributes:
      value_heads, key_heads: Of values, and of keys, which groups of value heads share.
      key_dim, value_dim: Numbers of a head's key and value.
    """

    value_heads: int
    key_heads: int
    key_dim: int
    value_dim: int


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A model, and how it is trained.

    Attributes:
      plan: Its tasks, the longest length and the vocabulary are learned.
      layers, hidden, inner: Layers, numbers of a token between them, and within the feed-forward.
      heads, kv_heads, head_dim: Of softmax attention.
      attention_every: One layer in so many has softmax attention, the others Gated DeltaNet. 1: all, as Llama's.
      recurrence: Of the layers of Gated DeltaNet.
      phases: Lengths and rows over the run: short sequences first, in which a rule is found sooner.
      steps: Of the optimiser.
      rate: Learning rate over the run.
      weight_decay: Of matrices.
      other_weight: Of the loss of tokens that are no answers.
      compute_dtype: Of the forward pass; master weights, the optimiser and losses are float32.
      seed: Of the first parameters.
    """

    plan: Plan
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    phases: tuple[Phase, ...]
    steps: int
    rate: Rate
    weight_decay: float = 0.1
    other_weight: float = 0.1
    compute_dtype: str = "bfloat16"
    seed: int = 0
    attention_every: int = 1
    recurrence: Recurrence | None = None

    def __post_init__(self):
        phase_at(self.phases, 0.0)  # raises an error where they are no phases
        check_sizes(steps=self.steps, attention_every=self.attention_every)
        if (self.attention_every > 1) != (self.recurrence is not None):
            raise ValueError(
                f"recurrence must be given if attention_every is above 1, and only then, "
                f"got attention_every {self.attention_every} and recurrence {self.recurrence}"
            )
        for phase in self.phases:
            self.plan.vocabulary.check_length(phase.length)

    @property
    def config(self) -> ModelConfig:
        """Of the model: Llama's architecture, or with layers of Gated DeltaNet that of Qwen3.5."""
        shared = {
            "vocab_size": self.plan.vocabulary.size,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 2 * self.plan.length,
            "tie_word_embeddings": False,
            "initializer_range": self.hidden**-0.5,
            "eos_token_id": END,
        }
        if self.recurrence is None:
            return config_from_dict({"model_type": "llama"} | shared)
        recurrence = {
            "full_attention_interval": self.attention_every,
            "linear_num_value_heads": self.recurrence.value_heads,
            "linear_num_key_heads": self.recurrence.key_heads,
            "linear_key_head_dim": self.recurrence.key_dim,
            "linear_value_head_dim": self.recurrence.value_dim,
        }
        return config_from_dict({"model_type": "qwen3_5_text"} | shared | recurrence)


_FULL = Recipe(
    plan=PLANS["full"],
    layers=6,
    hidden=512,
    inner=1408,
    heads=8,
    kv_heads=4,
    head_dim=64,
    # How to look a key up is found within 600 steps of 32 tokens, and not within 1,600 steps of 256.
    phases=(
        Phase(0.1, 32, 1024),
        Phase(0.2, 64, 512),
        Phase(0.3, 128, 256),
        Phase(0.42, 256, 256),
        Phase(0.55, 512, 128),
        Phase(0.72, 1024, 64),
        Phase(1.0, 2048, 32),
    ),
    steps=8000,
    rate=Rate(1e-3),
)

PRESETS = {
    "full": _FULL,
    # With states of eight heads of 64 x 64 the model answers from them alone, in half of the cases at 2,048 tokens, and
    # its softmax layers learn nothing that gates could keep. So the states are small.
    "hybrid": dataclasses.replace(
        _FULL,
        attention_every=2,
        recurrence=Recurrence(value_heads=2, key_heads=1, key_dim=16, value_dim=32),
        steps=6000,
        phases=(
            Phase(0.25, 32, 1024),
            Phase(0.32, 64, 512),
            Phase(0.38, 128, 256),
            Phase(0.45, 256, 256),
            Phase(0.55, 512, 128),
            Phase(0.7, 1024, 64),
            Phase(1.0, 2048, 32),
        ),
    ),
    "small": Recipe(
        plan=PLANS["small"],
        layers=2,
        hidden=64,
        inner=128,
        heads=4,
        kv_heads=2,
        head_dim=32,
        phases=(Phase(0.7, 32, 96), Phase(1.0, 64, 48)),
        steps=6000,
        rate=Rate(4e-3, warmup=0.05),
        compute_dtype="float32",
    ),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Float32 parameters, by their paths, and the optimiser's moments."""

    values: dict[str, Array]
    moments: optax.OptState


def answer_loss(
    model: Decoder,
    tokens: Int[Array, "rows time"],
    answers: Bool[Array, "rows time"],
    task: Int[Array, "rows"],
    *,
    tasks: int,
    other_weight: float,
) -> tuple[Float32[Array, ""], dict[str, Array]]:
    """The loss of answers, a row's mean, and of the other tokens with a weight, in nats a token.

    All rows count the same, so that a task with few answers is learned beside one with many.

    Args:
      model: The parameters.
      tokens: Whole rows.
      answers: The positions whose next token is an answer; never the last.
      task: Which task each row is of, below `tasks`.
      tasks: How many there are.
      other_weight: Of tokens that are no answers.

    Returns:
      The loss, and of each task f32 [tasks] "loss", nats an answer; "accuracy", the share of answers that the model
      finds most probable; and "answers", how many there were.
    """
    scores = decoder.logits(model, decoder.forward(model, tokens)[:, :-1])
    wanted, asked = tokens[:, 1:], answers[:, :-1].astype(jnp.float32)
    nats = optax.losses.softmax_cross_entropy_with_integer_labels(scores, wanted)
    right = (jnp.argmax(scores, axis=-1) == wanted).astype(jnp.float32)
    others = jnp.sum(nats * (1.0 - asked)) / jnp.maximum(jnp.sum(1.0 - asked), 1.0)
    row = jnp.sum(nats * asked, axis=1) / jnp.maximum(jnp.sum(asked, axis=1), 1.0)
    loss = jnp.mean(row) + other_weight * others

    def by_task(x: Array) -> Array:
        return jax.ops.segment_sum(jnp.sum(x * asked, axis=1), task, num_segments=tasks)

    number = by_task(jnp.ones_like(nats))
    share = 1.0 / jnp.maximum(number, 1.0)
    return loss, {"loss": by_task(nats) * share, "accuracy": by_task(right) * share, "answers": number}


class RetrievalTraining:
    """A training that can be stopped and resumed at any step, to the bit on one machine.

    Args:
      recipe: What to do.
    """

    def __init__(self, recipe: Recipe):
        self.recipe, self.step = recipe, 0
        config, plan = recipe.config, recipe.plan
        self._abstract = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
        self._mixtures = [
            Mixture(plan.every_task, phase.length, phase.rows, plan.vocabulary, plan.model_seed)
            for phase in recipe.phases
        ]
        self._optimiser = optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.scale_by_adam(b1=0.9, b2=0.95),
            optax.add_decayed_weights(recipe.weight_decay, _is_matrix),
        )

        @jax.jit
        def first() -> State:
            model = Decoder(config, rngs=nnx.Rngs(recipe.seed), dtype=jnp.float32)
            values = {name: param[...] for name, param in named_parameters(model).items()}
            return State(values, self._optimiser.init(values))

        self.state = first()
        self._advance = jax.jit(self._step, donate_argnums=0)

    @property
    def model(self) -> Decoder:
        """The model as it is now, in float32."""
        return self._with(self.state.values)

    @property
    def lm(self) -> LanguageModel:
        """The model as it is now, in float32, without a tokenizer: prompts are token ids."""
        return LanguageModel(self.model, self.recipe.config, None, {}, jnp.dtype("float32"), "retrieval")

    def run(self, until: int | None = None, *, every: int = 20, processes: int = 0) -> Iterator[dict[str, Any]]:
        """Takes steps up to number `until` (None: all), and yields the mean metrics of `every` steps, and of what is
        left at the end: "step", "length", "rate", "gradient_norm", and by task "loss" and "accuracy".

        Args:
          until: Behind which step it ends.
          every: Steps of which one line of metrics is.
          processes: That make examples, as in `made_ahead`. The bits of a run do not depend on it.

        Raises:
          FloatingPointError: The loss or its gradient is not finite.
        """
        recipe = self.recipe
        end = recipe.steps if until is None else min(until, recipe.steps)
        wanted = ((self._mixtures[self._phase(step)], step) for step in range(self.step, end))
        batches = made_ahead(_examples, wanted, processes)
        while self.step < end:
            found = []
            # Nothing waits for the device within a block: the next examples are made while it computes.
            for _ in range(min(every - self.step % every, end - self.step)):
                examples, mixture = next(batches), self._mixtures[self._phase(self.step)]
                progress = np.float32(self.step / recipe.steps)
                given = examples.tokens, examples.answers, mixture.task(self.step), progress
                self.state, metrics = self._advance(self.state, *map(jnp.asarray, given))
                self.step += 1
                found.append(metrics)
            yield self._summary(found, mixture.length)

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
            host = manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]
            ours = _described(self.recipe)
            if host["recipe"] != ours:
                theirs = {name: value for name, value in host["recipe"].items() if value != ours.get(name)}
                raise ValueError(
                    f"recipe must be that of the checkpoint in {directory}, which differs: {theirs}; another output "
                    "begins anew"
                )
            like = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(self.state))}
            restored = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))["state"]
        arrays = [jnp.asarray(np.asarray(restored[str(i)])) for i in range(len(like))]
        self.state, self.step = jax.tree.unflatten(jax.tree.structure(self.state), arrays), step
        return True

    def _phase(self, step: int) -> int:
        return phase_at(self.recipe.phases, step / self.recipe.steps)

    def _with(self, values: dict[str, Array]) -> Decoder:
        return replace_parameters(self._abstract, [values[name] for name in named_parameters(self._abstract)])

    def _step(self, state: State, tokens: Array, answers: Array, task: Array, progress: Array) -> tuple[State, dict]:
        recipe = self.recipe

        def loss(values: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
            model = cast(self._with(values), jnp.dtype(recipe.compute_dtype))
            sizes = {"tasks": len(recipe.plan.every_task), "other_weight": recipe.other_weight}
            return answer_loss(model, tokens, answers, task, **sizes)

        (total, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(state.values)
        updates: Any
        with jax.numpy_dtype_promotion("standard"):  # optax relies on it
            updates, moments = self._optimiser.update(gradient, state.moments, state.values)
        rate = recipe.rate(progress)
        values = {name: value - rate * updates[name] for name, value in state.values.items()}
        metrics |= {"total": total, "gradient_norm": optax.tree.norm(gradient), "rate": rate}
        return State(values, moments), metrics

    def _summary(self, found: list[dict[str, Array]], length: int) -> dict[str, Any]:
        """The means of some steps: of each task's figures those of all its answers."""
        names = self.recipe.plan.every_task
        columns = {name: np.stack([np.asarray(metrics[name], np.float64) for metrics in found]) for name in found[0]}
        answers = columns.pop("answers")
        whole = np.maximum(answers.sum(0), 1.0)
        per_task = {name: (columns.pop(name) * answers).sum(0) / whole for name in ("loss", "accuracy")}
        metrics: dict[str, Any] = {"step": self.step, "length": length}
        metrics |= {name: float(column.mean()) for name, column in columns.items()}
        if not math.isfinite(metrics["total"] + metrics["gradient_norm"]):
            raise FloatingPointError(f"the loss or its gradient before step {self.step} is not finite: {metrics}")
        return metrics | {name: dict(zip(names, map(float, column), strict=True)) for name, column in per_task.items()}


class Resumable(Protocol):
    """What `run_for` saves."""

    step: int

    def save(self, directory: Path) -> None: ...


def run_for(
    training: Resumable,
    advance: Callable[[], Iterator[dict[str, Any]]],
    checkpoints: Path,
    *,
    seconds: float | None,
    every: int,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[dict[str, Any]]:
    """Yields the metrics of a training, and saves it every so many steps, at its end, and when the time is over.

    Args:
      training: What is saved.
      advance: Makes the iterator of its metrics.
      checkpoints: Where they go.
      seconds: After how many it stops; None: it runs to the end. What the last metrics took is counted in, so that it
        stops before rather than after.
      every: Steps between checkpoints.
      clock: Seconds that only grow.
    """
    start = last = clock()
    saved = training.step
    for metrics in advance():
        yield metrics
        now = clock()
        over = seconds is not None and now - start + (now - last) > seconds
        if training.step - saved >= every or over:
            training.save(checkpoints)
            saved = training.step
        if over:
            return
        last = clock()
    if training.step > saved:
        training.save(checkpoints)


def _examples(given: tuple[Mixture, int]) -> Example:
    mixture, step = given
    return mixture.examples(step)


def _is_matrix(values: dict[str, Array]) -> dict[str, bool]:
    return {name: value.ndim >= 2 for name, value in values.items()}


def _described(recipe: Recipe) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(recipe)))


def _options(ocp: Any) -> Any:
    return ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)

"""Training of a small Qwen3.5 model on one device: batches, the optimiser, one jitted block of steps, checkpoints."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxbuf.axes import Array
from jaxbuf.models import decoder
from jaxbuf.models.config import ModelConfig
from jaxbuf.models.families import config_from_dict
from jaxbuf.models.layers import cast, named_parameters, replace_parameters
from jaxbuf.train import losses
from jaxbuf.train.schedule import Phase, Rate, phase_at


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
      phases: Batch shapes over the run.
      rate: Learning rate over the run.
      weight_decay: Of matrices only, decoupled, times the learning rate.
      betas: Adam's.
      clip: The largest global norm of a gradient.
      mtp_weight: Weight of the MTP layer's loss.
      compute_dtype: Of matrices and activations in the forward pass; master weights, gates and losses are float32.
      block: Optimiser steps of one dispatch.
      evaluate_every: Progress between evaluations on held-out text.
      seed: Of the initial weights and the order of the text.
    """

    phases: tuple[Phase, ...]
    rate: Rate = dataclasses.field(default_factory=lambda: Rate(3e-3))
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    mtp_weight: float = 0.3
    compute_dtype: str = "bfloat16"
    block: int = 16
    evaluate_every: float = 0.05
    seed: int = 0


def demo_config(vocab_size: int = 4096) -> ModelConfig:
    """The embedded model: 7,883,056 parameters at 4,096 entries, embedding and MTP layer included."""
    return config_from_dict(
        {
            "model_type": "qwen3_5_text",
            "vocab_size": vocab_size,
            "hidden_size": 256,
            "intermediate_size": 624,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "mtp_num_hidden_layers": 1,
            "eos_token_id": 0,
        }
    )


PRESETS = {
    "demo": Recipe(phases=(Phase(0.86, 1024, 64), Phase(1.0, 4096, 16))),
    "placeholder": Recipe(
        phases=(Phase(1.0, 256, 4),), rate=Rate(4e-3, warmup=0.1), compute_dtype="float32", block=4, evaluate_every=0.5
    ),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Float32 parameters and the optimiser's moments."""

    model: decoder.Decoder
    moments: optax.OptState


@dataclasses.dataclass
class Position:
    """Where a run is: progress, optimiser steps, and rows taken in each phase."""

    progress: float = 0.0
    steps: int = 0
    rows: list[int] = dataclasses.field(default_factory=list)


@partial(jax.jit, static_argnames=("config", "recipe"))
def init_state(config: ModelConfig, recipe: Recipe) -> TrainState:
    """Fresh parameters from the recipe's seed, and empty moments."""
    model = decoder.Decoder(config, rngs=nnx.Rngs(recipe.seed), dtype=jnp.float32)
    return TrainState(model, optimiser(recipe).init(parameters(model)))


def parameters(model: decoder.Decoder) -> dict[str, Array]:
    """The model's arrays under their dotted paths."""
    return {name: param[...] for name, param in named_parameters(model).items()}


def decays(name: str, value: Array) -> bool:
    """Whether weight decay applies: matrices, but not the convolution's taps."""
    return value.ndim >= 2 and not name.endswith("conv1d")


def optimiser(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW without its learning rate, which `train_block` multiplies in, over the dict that `parameters` gives."""

    def mask(values):
        return {name: decays(name, value) for name, value in values.items()}

    first, second = recipe.betas
    return optax.chain(
        optax.clip_by_global_norm(recipe.clip),
        optax.scale_by_adam(b1=first, b2=second, eps=1e-8),
        optax.add_decayed_weights(recipe.weight_decay, mask),
    )


def loss_function(model: decoder.Decoder, tokens: Array, recipe: Recipe) -> tuple[Array, dict[str, Array]]:
    """The training loss of int32 tokens [rows, length], in nats a token, with the forward in the compute dtype."""
    return losses.language_model_loss(
        cast(model, jnp.dtype(recipe.compute_dtype)), tokens, mtp_weight=recipe.mtp_weight
    )


def cut(stream: Array, starts: Array, length: int) -> Array:
    """int32 [rows, length] from the stream (uint16 [n]) at int32 starts [rows]."""
    return stream[starts[:, None] + jnp.arange(length, dtype=starts.dtype)[None]].astype(jnp.int32)


@partial(jax.jit, static_argnames=("recipe", "length"), donate_argnames="state")
def train_block(
    state: TrainState, stream: Array, starts: Array, progress: Array, *, recipe: Recipe, length: int
) -> tuple[TrainState, dict[str, Array]]:
    """Takes as many optimiser steps as `starts` has rows, in one compiled program.

    Args:
      state: Donated.
      stream: uint16 [n], the whole text, on the device.
      starts: int32 [steps, rows], where each sequence begins.
      progress: f32 [steps], which sets the learning rate.
      recipe, length: Static.

    Returns:
      The state and the mean of each metric over the block (f32 scalars), "gradient_norm" among them.
    """
    transform, rate = optimiser(recipe), recipe.rate

    def step(state, inputs):
        starts, progress = inputs
        tokens = cut(stream, starts, length)
        (_, metrics), gradient = jax.value_and_grad(loss_function, has_aux=True)(state.model, tokens, recipe)
        gradient, values = parameters(gradient), parameters(state.model)
        updates: Any
        updates, moments = transform.update(gradient, state.moments, values)
        scale = rate(progress)
        values = {name: value - scale * updates[name] for name, value in values.items()}
        metrics |= {"gradient_norm": optax.tree.norm(gradient), "rate": scale}
        return TrainState(replace_parameters(state.model, values.values()), moments), metrics

    state, metrics = jax.lax.scan(step, state, (starts, progress))
    return state, jax.tree.map(jnp.mean, metrics)


class Batches:
    """Where sequences begin: every epoch reads the whole stream once, cut at another offset, in another order.

    A pure function of (seed, length, row number), so that a resumed run reads what the interrupted one would have.

    Args:
      tokens: Size of the stream.
      length: Tokens of a sequence.
      seed: Of offsets and orders.

    Raises:
      ValueError: The stream is shorter than a sequence.
    """

    def __init__(self, tokens: int, length: int, seed: int):
        if tokens < length:
            raise ValueError(f"the text has {tokens} tokens, a sequence needs {length}")
        self._tokens, self._length, self._seed = tokens, length, seed
        self._per_epoch = tokens // length
        self._epoch, self._order = -1, np.empty(0, np.int32)

    def starts(self, first: int, count: int) -> np.ndarray:
        """int32 [count]: the starts of rows first .. first + count - 1; the stream is read as a ring."""
        found = [self._start(row) for row in range(first, first + count)]
        return np.asarray(found, np.int32)

    def _start(self, row: int) -> int:
        epoch, index = divmod(row, self._per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng([self._seed, self._length, epoch])
            offset = int(rng.integers(self._tokens))
            order = rng.permutation(self._per_epoch).astype(np.int64)
            self._order = (order * self._length + offset) % self._tokens
            self._epoch = epoch
        return int(self._order[index])


def ring(tokens: np.ndarray, phases: tuple[Phase, ...]) -> Array:
    """The stream with its beginning repeated at the end, so that every start has a whole sequence after it."""
    longest = max(phase.length for phase in phases)
    return jnp.asarray(np.concatenate([tokens, tokens[:longest]]).astype(np.uint16))


@partial(jax.jit, static_argnames="recipe")
def _evaluate(model: decoder.Decoder, rows: Array, recipe: Recipe) -> dict[str, Array]:
    def one(_, tokens):
        return None, loss_function(model, tokens, recipe)[1]

    return jax.tree.map(jnp.mean, jax.lax.scan(one, None, rows)[1])


def evaluate(model: decoder.Decoder, rows: np.ndarray, recipe: Recipe, *, batch: int = 16) -> dict[str, float]:
    """Mean metrics over int [n, length + 1] held-out rows (those that fill whole batches)."""
    batch = min(batch, len(rows))
    whole = len(rows) // batch * batch
    stacked = jnp.asarray(rows[:whole].astype(np.int32).reshape(-1, batch, rows.shape[1]))
    return {name: float(value) for name, value in _evaluate(model, stacked, recipe).items()}


def run(
    state: TrainState,
    tokens: np.ndarray,
    recipe: Recipe,
    pace,
    *,
    position: Position | None = None,
    held_out: dict[str, np.ndarray] | None = None,
    programs: Sequence[Callable] | None = None,
) -> Iterator[tuple[TrainState, Position, dict[str, float]]]:
    """Trains until progress 1 and yields after every block.

    Args:
      state: Donated block by block: use only what was yielded last.
      tokens: [n], the training stream.
      recipe: What to do.
      pace: A StepPace or ClockPace.
      position: Where to go on; None: the beginning.
      held_out: name -> rows to evaluate on, every `recipe.evaluate_every` of progress and at the end.
      programs: From `compile_phases`, for a pace whose blocks are all whole; None: compiled as they are met.

    Yields:
      The state, the position and the block's metrics; after an evaluation also "NAME_loss", nats a token.

    Raises:
      FloatingPointError: The loss or its gradient is no longer finite.
    """
    position = position or Position()
    rows = [*position.rows, *[0] * (len(recipe.phases) - len(position.rows))]
    progress, steps = position.progress, position.steps
    stream = ring(tokens, recipe.phases)
    batches = [Batches(tokens.size, phase.length, recipe.seed) for phase in recipe.phases]
    while progress < 1.0:
        index = phase_at(recipe.phases, progress)
        phase = recipe.phases[index]
        count, reached = pace.advance(progress, phase.until, recipe.block)
        starts = batches[index].starts(rows[index], count * phase.rows).reshape(count, phase.rows)
        along = np.linspace(progress, reached, count, endpoint=False, dtype=np.float32) + (reached - progress) / count
        inputs = (state, stream, jnp.asarray(starts), jnp.asarray(along, jnp.float32))
        if programs:
            state, metrics = programs[index](*inputs)
        else:
            state, metrics = train_block(*inputs, recipe=recipe, length=phase.length)
        metrics = {name: float(value) for name, value in metrics.items()}
        if not math.isfinite(metrics["next_token_loss"] + metrics["gradient_norm"]):
            raise FloatingPointError(f"the loss or its gradient is not finite after {steps + count} steps: {metrics}")
        due = math.floor(reached / recipe.evaluate_every) > math.floor(progress / recipe.evaluate_every)
        rows[index] += count * phase.rows
        steps, progress = steps + count, reached
        for name, kept in (held_out or {}).items():
            if due or progress >= 1.0:
                scores = evaluate(state.model, kept, recipe)
                metrics |= {f"{name}_loss": scores["next_token_loss"]}
                if "mtp_loss" in scores:
                    metrics |= {f"{name}_mtp_loss": scores["mtp_loss"]}
        yield state, Position(progress, steps, list(rows)), metrics | {"tokens": count * phase.rows * phase.length}


def compile_phases(state: TrainState, tokens: np.ndarray, recipe: Recipe) -> list[Callable]:
    """Compiles every phase's program, in parallel threads, before a clock starts: for `run`'s `programs`.

    Each runs once on a copy of the state, so that a phase that does not fit the device's memory fails now.
    """
    stream = ring(tokens, recipe.phases)

    def inputs(phase):
        return stream, jnp.zeros((recipe.block, phase.rows), jnp.int32), jnp.zeros((recipe.block,), jnp.float32)

    def build(phase):
        return train_block.lower(state, *inputs(phase), recipe=recipe, length=phase.length).compile()

    with ThreadPoolExecutor() as pool:
        programs = list(pool.map(build, recipe.phases))
    for phase, program in zip(recipe.phases, programs, strict=True):
        jax.block_until_ready(program(jax.tree.map(jnp.copy, state), *inputs(phase)))
    return programs


def save_checkpoint(folder: Path, state: TrainState, position: Position, curve: list[dict]) -> None:
    """Writes everything that `restore_checkpoint` needs to go on as if nothing had happened (orbax)."""
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(folder.resolve(), options=_options(ocp)) as manager:
        arrays = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(state))}
        host = {"position": dataclasses.asdict(position), "curve": curve}
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(arrays), host=ocp.args.JsonSave(host))
        manager.save(position.steps, args=arguments)
        manager.wait_until_finished()


def restore_checkpoint(folder: Path, like: TrainState) -> tuple[TrainState, Position, list[dict]] | None:
    """The newest checkpoint in `folder`, or None.

    Raises:
      ValueError: It was written by a model of other shapes.
    """
    import orbax.checkpoint as ocp

    if not folder.exists():
        return None
    with ocp.CheckpointManager(folder.resolve(), options=_options(ocp)) as manager:
        step = manager.latest_step()
        if step is None:
            return None
        abstract = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(like))}
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), host=ocp.args.JsonRestore())
        restored = manager.restore(step, args=arguments)
    # bound to no device, as fresh ones are: otherwise a process that trained before would compile everything again
    leaves = [jnp.asarray(np.asarray(restored["state"][str(i)])) for i in range(len(abstract))]
    state = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return state, Position(**restored["host"]["position"]), restored["host"]["curve"]


def _options(ocp):
    return ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)


def write_generation_files(directory: Path, config: ModelConfig) -> None:
    """Writes generation_config.json and tokenizer_config.json beside a model with byte-level BPE."""
    end = config.eos_token_ids[0]
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    tokenizer |= {"model_max_length": config.max_length, "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": end}, indent=2) + "\n")

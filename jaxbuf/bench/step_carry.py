"""What a timed step starts from: rows behind prompts that nobody read, and a drafter of which known drafts are kept."""

import argparse
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxbuf.models.cache import memory_partitions
from jaxbuf.models.config import RECURRENCE
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.recurrence.traffic import fold_cycle
from jaxbuf.serving import Carry, SamplingParams, batch, init_carry
from jaxbuf.serving.admit import with_memories
from jaxbuf.serving.carry import EMPTY, RUNNING
from jaxbuf.serving.speculation import Proposal

# What is measured, and how it keeps its checkpoints: the last two are the buffered form as well.
FORMS = {"recurrent": "float32", "buffered": "float32", "split": "split", "split8": "split8"}


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Of a row in a step.

    Attributes:
      drafts: How many are verified beside the newest token; 0: a plain step.
      accepted: How many tokens a row gets: the drafts that are kept, and one more.
    """

    drafts: int = 0
    accepted: int = 1

    @property
    def read(self) -> int:
        """Those that the model reads."""
        return 1 + self.drafts

    def cycle(self, limit: int) -> int:
        """Steps from one fold to the next."""
        return fold_cycle(limit, self.read, self.accepted)

    def steps(self, least: int, limit: int) -> int:
        """A number of steps in whole fold cycles."""
        cycle = self.cycle(limit)
        return cycle * -(-least // cycle)


PLAIN = Tokens()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Repeater:
    """Drafts the newest token again, `right` times, and another token behind that: of a model that repeats its newest
    token (see `repeating_model`) it keeps so many drafts, and no more.

    Attributes:
      draft_tokens: Drafts of every step (static).
      right: How many of them are kept (static).
    """

    draft_tokens: int = dataclasses.field(metadata={"static": True})
    right: int = dataclasses.field(metadata={"static": True})

    def init(self, config, sizes):
        """Keeps nothing; see `Drafter.init`."""
        return ()

    def admit(self, model, carry, reading):
        """Keeps nothing; see `Drafter.admit`."""
        return ()

    def propose(self, model, carry, most):
        """The drafts; see `Drafter.propose`."""
        last = carry.last[:, None]
        right = jnp.arange(self.draft_tokens, dtype=jnp.int32)[None] < self.right
        return Proposal(jnp.where(right, last, (last + 1) % model.config.vocab_size), most), ()

    def settle(self, model, state, hidden, tokens, number):
        """Keeps nothing; see `Drafter.settle`."""
        return ()


def make_batch(
    lm: LanguageModel, rows: int, form: str, options: argparse.Namespace, tokens: Tokens = PLAIN
) -> batch.Batch:
    """What `jaxbuf.generate` would start with, for prompts of the context's length; a token more than the steps give,
    and as many drafts."""
    prompts = [[row % lm.vocab_size] * options.context for row in range(rows)]
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    steps = tokens.steps(options.steps, options.limit)
    decoding = batch.Decoding(
        max_new_tokens=steps * tokens.accepted + tokens.read,
        limit=options.limit,
        form="recurrent" if form == "recurrent" else "buffered",
        state_dtype=FORMS[form],
        drafter=Repeater(tokens.drafts, tokens.accepted - 1) if tokens.drafts else None,
    )
    return batch.make_batch(lm, prompts, sampling, decoding)


def make_carry(lm: LanguageModel, asked: batch.Batch) -> Carry:
    """The carry once its prompts were read, but for random memory in place of theirs; nothing runs on the prompts.

    On a mesh the memory is spread as the layers want it, and every device has the rest. All arrays count as put where
    they are, as those do that come out of a program which some were passed: a jitted function compiles for that.
    """
    shapes = jax.eval_shape(lambda: init_carry(lm.config, asked.sizes, asked.drafter))
    begins, rows, mesh = asked.begins, asked.sizes.rows, lm.config.mesh
    used = np.arange(rows) < len(asked.rows)

    @functools.partial(jax.jit, out_shardings=None if mesh is None else everywhere(mesh))
    def integers():
        carry = init_carry(lm.config, asked.sizes, asked.drafter)
        length = jnp.where(used, len(asked.prompts[0]), 0).astype(jnp.int32)
        history = dataclasses.replace(
            carry.history,
            prompt_length=length,
            length=length + used.astype(np.int32),
            stop_ids=jnp.asarray(begins.stop_ids),
        )
        return dataclasses.replace(
            carry,
            cache=dataclasses.replace(carry.cache, layers=()),
            history=history,
            last=jnp.arange(rows, dtype=jnp.int32) % lm.vocab_size,
            state=jnp.where(used, RUNNING, EMPTY).astype(jnp.int32),
            max_new_tokens=jnp.asarray(begins.max_new_tokens),
            sampling=begins.sampling,
            allowed=jnp.asarray(begins.allowed),
        )

    carry = integers()
    keys = jax.random.split(jax.random.key(1), len(shapes.cache.layers))
    layers = []
    for kind, layer, key in zip(shapes.cache.kinds, shapes.cache.layers, keys, strict=True):
        leaves, tree = jax.tree.flatten(layer)
        plain = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves])
        spread = memory_partitions([kind], [layer])
        where = None if mesh is None else tuple(NamedSharding(mesh, partition) for partition in spread)
        layers.append(_random_memory(plain, where, key))
    carry = with_memories(carry, tuple(layers))
    return jax.device_put(carry, jax.tree.map(lambda x: x.sharding, carry))


def everywhere(mesh: Mesh | None) -> Any:
    """Where the small arrays of a carry lie: on every device of a mesh; without one, on the first device."""
    return jax.devices()[0] if mesh is None else NamedSharding(mesh, PartitionSpec())


@functools.partial(jax.jit, static_argnums=(0, 1))
def _random_memory(shapes, where: Sequence[NamedSharding] | None, key: jax.Array):
    """Numbers of the size that a layer's memory holds: on zeros, a chip may run faster than it does on numbers."""

    leaves, tree = jax.tree.flatten_with_path(shapes)

    def fill(key, path, shape):
        name = path[-1].name
        x = jax.random.normal(key, shape.shape, jnp.float32)
        if name == "gates":
            x = -jnp.abs(x) / 20
        return (x / math.sqrt(shape.shape[-1]) if name == "keys" else x).astype(shape.dtype)

    keys = jax.random.split(key, len(leaves))
    filled = [fill(key, *leaf) for key, leaf in zip(keys, leaves, strict=True)]
    filled = filled if where is None else jax.lax.with_sharding_constraint(filled, list(where))
    return jax.tree.unflatten(tree, filled)


def small_arrays(carry: Carry) -> Carry:
    """A carry without the layers' memory, on the host: a run donates what it starts from."""
    return jax.device_get(with_memories(carry, ()))


def first_carry(small: Carry, form: str, options: argparse.Namespace, tokens: Tokens = PLAIN) -> Carry:
    """The small arrays at the first step of a form, from those of `make_carry`."""
    cache = small.cache
    slots = np.arange(cache.rows + 1)
    used = (slots > 0) & (slots <= np.sum(small.state == RUNNING))
    committed = np.where(used, options.context, 0).astype(np.int32)
    sequences = dataclasses.replace(cache.sequences, committed=committed, pending=np.zeros_like(committed))
    shared = dict(cache.shared)
    if RECURRENCE in shared:
        limit = 1 if form == "recurrent" else options.limit
        # Each row folds once in a cycle, each at a step of its own.
        length = np.where(used, tokens.accepted * (1 + slots % tokens.cycle(limit)), 0)
        held = {
            "length": length,
            "folded": np.where(used, options.context - length, 0),
            "limit": np.where(used, limit, 1),
            "origin": np.zeros_like(slots),
            "pending": np.zeros_like(slots),
        }
        held = {name: value.astype(np.int32) for name, value in held.items()}
        recurrent = shared[RECURRENCE]
        cursor = dataclasses.replace(recurrent.cursor, **held)
        shared[RECURRENCE] = dataclasses.replace(recurrent, cursor=cursor)
    return dataclasses.replace(small, cache=dataclasses.replace(cache, sequences=sequences, shared=shared))


def restart(carry: Carry, first: Carry, mesh: Mesh | None = None) -> Carry:
    """The first carry of a form with the large arrays of this one, where the model lies. It is donated.

    The small arrays are written where this one's lie, as a generation goes on in one place: XLA has the places of all
    arrays in its CUDA graphs, and a call with others takes 3 to 7 ms more.
    """
    small = _overwrite(with_memories(carry, ()), jax.device_put(first, everywhere(mesh)))
    return with_memories(small, carry.cache.layers)


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def _overwrite(old: Carry, new: Carry) -> Carry:
    del old  # its memory is the result's
    return new

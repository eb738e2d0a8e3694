"""What a request's decoding did and moved, counted while it ran."""

import dataclasses

import jax.numpy as jnp

from jaxbuf.recurrence import RecurrenceSpec


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts of one request's decoding.

    Attributes:
      prompt_tokens, new_tokens: Tokens read by prefill, and tokens generated.
      steps: Decoding steps the request took part in (the first token comes from prefill and needs none).
      folds: Steps that folded the ring into the checkpoint, i.e. wrote a state.
      checkpoint_reads: Steps that read a checkpoint.
      live_entries: Entries read from the ring, summed over the steps.
      drafted, accepted: Draft tokens verified and kept.
      bytes: State traffic of all recurrent layers together: layers * (state * (checkpoint_reads + folds) + entry *
        (live_entries + steps)), where state is a layer's state in bytes (heads * value_dim * key_dim in fp32) and entry
        one ring entry's (key_heads * key_dim + heads * value_dim in the entry dtype, and heads fp32 decays).
    """

    prompt_tokens: int
    new_tokens: int
    steps: int
    folds: int
    checkpoint_reads: int
    live_entries: int
    drafted: int
    accepted: int
    bytes: int


def checkpoint_bytes(spec: RecurrenceSpec, state_dtype) -> int:
    """Bytes of one layer's state of one request."""
    return spec.heads * spec.value_dim * spec.key_dim * jnp.dtype(state_dtype).itemsize


def entry_bytes(spec: RecurrenceSpec, entry_dtype) -> int:
    """Bytes of one ring entry of one layer: its key, its update and its fp32 gates."""
    numbers = spec.key_heads * spec.key_dim + spec.heads * spec.value_dim
    gates = spec.heads * (spec.decay_width + (0 if spec.delta else 1))
    return numbers * jnp.dtype(entry_dtype).itemsize + gates * jnp.dtype(jnp.float32).itemsize


def state_traffic(
    spec: RecurrenceSpec,
    layers: int,
    *,
    steps: int,
    folds: int,
    checkpoint_reads: int,
    live_entries: int,
    state_dtype,
    entry_dtype,
) -> int:
    """Bytes of state that decoding must move: checkpoints read and folded, entries read and appended, in all layers.

    It is what the algorithm needs (a fold reads nothing that its step does not read anyway), not what a backend's
    compiled program happens to do. Source: KVBuffer, table 2.
    """
    checkpoints = checkpoint_bytes(spec, state_dtype) * (checkpoint_reads + folds)
    return layers * (checkpoints + entry_bytes(spec, entry_dtype) * (live_entries + steps))

"""What a request's decoding did and moved, counted while it ran."""

import dataclasses

from jaxbuf.recurrence import RecurrenceSpec, traffic
from jaxbuf.recurrence.traffic import checkpoint_bytes, entry_bytes

__all__ = ["Stats", "checkpoint_bytes", "entry_bytes", "state_traffic"]


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts of one request's decoding.

    Attributes:
      prompt_tokens, new_tokens: Tokens read by prefill (once for all samples of a prompt), and tokens generated.
      steps: Decoding steps the request took part in (the first token comes from prefill and needs none).
      folds: Steps that folded the ring into the checkpoint, i.e. wrote a state.
      checkpoint_reads: Steps that read a checkpoint.
      live_entries: Entries read from the ring, summed over the steps.
      drafted, accepted: Draft tokens verified and kept; 0 without a drafter.
      form: "recurrent", "buffered" or "kv": the one that ran, if "auto" was asked for. "kv" is "buffered" for a row
        that has a checkpoint: checkpoint_reads says in how many steps it had one.
      bytes: State traffic of all recurrent layers together: layers * (state * (checkpoint_reads + folds) + entry *
        (live_entries + steps + drafted)), where state is a layer's state in bytes (heads * value_dim * key_dim in the
        state dtype) and entry one ring entry's (key_heads * key_dim + heads * value_dim in the entry dtype, and heads
        fp32 decays). Of a split state, steps read the high half alone, and a fold moves the low half twice and the high
        half once. A drafter's own memory is not counted.
      snapshot_bytes: What the same steps move in the design that keeps a state for each token that is verified, to
        return to: layers * state * (2 * steps + drafted). Without drafts it is the plain recurrence.
      passed_tokens: Of a model with gates: tokens that have left the local pages of its gated layers, where they were
        admitted or are gone.
      kept_keys, dropped_keys: Of each gated layer and each of its heads of keys and values: how many of the keys of
        these tokens are kept, and how many were admitted and had to leave because pages were full (see
        `Admission.when_full`). The gates did not admit the rest.
      threshold: That gates had to reach at the end; None without gates.
    """

    prompt_tokens: int
    new_tokens: int
    steps: int
    folds: int
    checkpoint_reads: int
    live_entries: int
    drafted: int
    accepted: int
    form: str
    bytes: int
    snapshot_bytes: int
    passed_tokens: int = 0
    kept_keys: tuple[tuple[int, ...], ...] = ()
    dropped_keys: tuple[tuple[int, ...], ...] = ()
    threshold: float | None = None

    @property
    def kept_shares(self) -> tuple[tuple[float, ...], ...]:
        """Of each gated layer and head, which share of the keys that left the local pages it still has; 0 of none."""
        passed = max(self.passed_tokens, 1)
        return tuple(tuple(kept / passed for kept in heads) for heads in self.kept_keys)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens that a step gave on average, 1 + accepted / steps; 1 where no step was needed.

        A last step whose last token is a draft (a stop token, say) gave no token beside its drafts and counts one more.
        """
        return (self.steps + self.accepted) / self.steps if self.steps else 1.0


def state_traffic(
    spec: RecurrenceSpec,
    layers: int,
    *,
    steps: int,
    folds: int,
    checkpoint_reads: int,
    live_entries: int,
    drafted: int,
    state_dtype,
    entry_dtype,
) -> int:
    """Bytes of state that decoding must move: checkpoints read and folded, entries read and appended, in all layers.

    It is what the algorithm needs (a fold reads nothing that its step does not read anyway), not what a backend's
    compiled program happens to do. Source: KVBuffer, table 2.
    """
    moved = traffic.state_traffic(
        spec,
        checkpoint_reads=checkpoint_reads,
        folds=folds,
        live_entries=live_entries,
        appended=steps + drafted,
        state_dtype=state_dtype,
        entry_dtype=entry_dtype,
    )
    return layers * int(moved)


def snapshot_traffic(spec: RecurrenceSpec, layers: int, *, steps: int, drafted: int, state_dtype) -> int:
    """Bytes of state that the same steps move where each token's state is kept, see `traffic.snapshot_step_bytes`."""
    plain, with_draft = (traffic.snapshot_step_bytes(spec, tokens, state_dtype=state_dtype) for tokens in (1, 2))
    return layers * (plain * steps + (with_draft - plain) * drafted)

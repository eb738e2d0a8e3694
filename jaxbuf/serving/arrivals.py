"""What enters the compiled loop: chunks of prompts, and the rows that begin to run behind them."""

import dataclasses

import jax

from jaxbuf.axes import Array, Bool, Int32
from jaxbuf.serving.sampling import Sampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Beginning:
    """Rows that begin to run as soon as the prompts are read that they continue.

    Attributes:
      rows: The rows, none twice; a negative number: nothing.
      prompt: The place in `Arrivals` of the prompt that each continues.
      limit: The entries from which each folds, at most the carry's: 1 is the recurrent form.
      max_new_tokens: A row gets no more than the carry's capacity has room for behind its prompt.
      sampling: Of these rows.
      stop_ids: Padded with -1; n is the carry's.
      allowed: As in `Carry`.
      forks: Whether some row continues a prompt that is read into another row (static).
    """

    rows: Int32[Array, "begins"]
    prompt: Int32[Array, "begins"]
    limit: Int32[Array, "begins"]
    max_new_tokens: Int32[Array, "begins"]
    sampling: Sampling
    stop_ids: Int32[Array, "begins n"]
    allowed: Int32[Array, "begins words"]
    forks: bool = dataclasses.field(default=False, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arrivals:
    """A chunk of each of some prompts.

    Attributes:
      rows: The empty row that each prompt is read into, none twice; a negative number: nothing.
      tokens: Right-padded.
      lengths: The real ones.
      start: How many tokens of the prompt earlier chunks had. A row that has not read exactly so many rests.
      last: Whether the prompt ends with this chunk.
      begins: The rows that begin to run where a prompt ends; None: no token is drawn, and the rows stay empty. Who
        reads prompts for another loop finds in `Carry.hidden` what scores the next token.
      prompt_top: How many of the most probable tokens are reported beside each prompt token at most.
      kv_limit: Up to this many entries, at most the carry's, rows that continue a prompt read no checkpoint. Rows with
        a longer prompt fold all of it. None: every row has a checkpoint.
      report_prompt: Whether the log-probabilities of the prompts' tokens are reported (static).
    """

    rows: Int32[Array, "prompts"]
    tokens: Int32[Array, "prompts time"]
    lengths: Int32[Array, "prompts"]
    start: Int32[Array, "prompts"]
    last: Bool[Array, "prompts"]
    begins: Beginning | None = None
    prompt_top: Int32[Array, ""] | int = 0
    kv_limit: Int32[Array, "prompts"] | None = None
    report_prompt: bool = dataclasses.field(default=False, metadata={"static": True})

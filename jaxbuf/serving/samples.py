"""Several rows that continue one prompt: it is read once, into the slot of one of them, and the others are forked."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.models import decoder
from jaxbuf.models.cache import all_slots, forked_sizes
from jaxbuf.models.config import ModelConfig

type Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Samples:
    """Which rows continue which prompt, where some prompt has several.

    Attributes:
      prompt: int32 [rows], the prompt of each row.
      source: int32 [rows], the slot that reads it; 0 for a row that is only there to fill the batch.
      readers: int32 [prompts], the slot that reads each prompt: that of its first row; 0 for one that fills the batch.
    """

    prompt: Array
    source: Array
    readers: Array


def group_rows(numbers: Sequence[int], *, prompts: int, rows: int) -> Samples:
    """The rows of prompts that have `numbers` of them each, in order, in a batch of `prompts` and `rows`."""
    of_row = np.repeat(np.arange(len(numbers), dtype=np.int32), numbers)
    readers = (1 + np.cumsum([0, *numbers[:-1]])).astype(np.int32)
    missing = rows - of_row.size
    return Samples(
        prompt=jnp.asarray(np.pad(of_row, (0, missing))),
        source=jnp.asarray(np.pad(readers[of_row], (0, missing))),
        readers=jnp.asarray(np.pad(readers, (0, prompts - len(numbers)))),
    )


def init_cache(
    config: ModelConfig,
    samples: Samples | None,
    *,
    rows: int,
    bucket: int,
    capacity: int,
    limit: int,
    max_pending: int,
    trees: bool = False,
    dtype: jnp.dtype,
    entry_dtype: jnp.dtype | None = None,
    state_dtype: str = "float32",
    again: bool = False,
) -> decoder.Cache:
    """A memory of `rows` slots for prompts of at most `bucket` tokens, and `capacity` with what follows them.

    With samples it is one that slots share, see `forked_sizes`; without, every slot has its own.
    """
    sizes: dict[str, Any] = {"slots": rows, "limit": limit, "max_pending": max_pending, "trees": trees}
    pools: dict[str, Any] = {}
    if samples is not None:
        tokens: dict[str, Any] = {"prompt_tokens": bucket, "new_tokens": capacity - bucket}
        pools = forked_sizes(**sizes, prompts=samples.readers.shape[0], **tokens, again=again)
    dtypes: dict[str, Any] = {"dtype": dtype, "entry_dtype": entry_dtype, "state_dtype": state_dtype}
    return decoder.init_cache(config, **sizes, capacity=capacity, **pools, **dtypes)


def fork_rows(cache: decoder.Cache, samples: Samples) -> decoder.Cache:
    """Every row's slot holds its prompt, which only the slots in `readers` have read."""
    return decoder.fork(cache, samples.source, all_slots(cache))


def raise_where_memory_ran_out(carry: object) -> None:
    """Calls `decoder.raise_exhausted` on every model memory in a pytree, on the host.

    Raises:
      PoolExhausted: One of them had too few rows, blocks or pages for an earlier launch.
    """

    def is_cache(x):
        return isinstance(x, decoder.Cache)

    for cache in filter(is_cache, jax.tree.leaves(carry, is_leaf=is_cache)):
        decoder.raise_exhausted(cache)

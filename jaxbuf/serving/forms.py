"""Which form of the recurrence's memory `form="auto"` takes: by figures that were measured, not by a rule of thumb.

A step of the buffered form moves fewer bytes, but does more beside them: under some batch size the plain recurrent step
is faster. Where that lies depends on the device and the kernels, so `scripts/make_forms` writes it down, in forms.json
beside this module, from what `jaxbuf bench kernels` measured.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from jaxbuf.recurrence import RecurrenceSpec
from jaxbuf.recurrence.traffic import crossover

type Chosen = Literal["recurrent", "buffered", "kv"]

TABLE = Path(__file__).with_name("forms.json")
SIZES = ("heads", "key_heads", "key_dim", "value_dim")


@dataclasses.dataclass(frozen=True)
class Measured:
    """A layer's step in both forms on one device.

    Attributes:
      device: As JAX names it: `jax.Device.device_kind`.
      heads, key_heads, key_dim, value_dim: Of the recurrence.
      limit: Entries from which the buffered form folds.
      batches: Rows of the launches, ascending.
      recurrent_us, buffered_us: Microseconds of a step at each, averaged over whole fold cycles.
      kv_entries, kv_entries_by_bytes: How many entries of a KV-only slot cost as much as a step of a buffered one, by
        time and by bytes; None: not measured.
    """

    device: str
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    limit: int
    batches: tuple[int, ...]
    recurrent_us: tuple[float, ...]
    buffered_us: tuple[float, ...]
    kv_entries: float | None = None
    kv_entries_by_bytes: float | None = None

    @property
    def buffered_from(self) -> int | None:
        """The least batch from which on the buffered form was never the slower one; None if it is at the largest."""
        least = None
        rows = list(zip(self.batches, self.recurrent_us, self.buffered_us, strict=True))
        for batch, recurrent, buffered in reversed(rows):
            if buffered > recurrent:
                break
            least = batch
        return least


def choose(
    spec: RecurrenceSpec, batch: int, device: str, table: Sequence[Measured] | None = None
) -> Literal["recurrent", "buffered"]:
    """The form that is the faster one for `batch` rows, and the recurrent one between two batches that differ in that.

    Of the figures of a device those of the most similar heads count: each head of each row is work of its own, so a
    batch is compared by how many heads it has in all.

    Args:
      spec: The recurrence of the model's layers.
      batch: Rows that decode at once.
      device: `jax.Device.device_kind`.
      table: What was measured; None: forms.json.

    Returns:
      "buffered" or "recurrent"; "buffered" where nothing was measured on the device.
    """
    row = _nearest(spec, device, table)
    if row is None:
        return "buffered"
    least = row.buffered_from
    return "buffered" if least is not None and batch * spec.heads >= least * row.heads else "recurrent"


def kv_entries(
    spec: RecurrenceSpec,
    device: str,
    *,
    limit: int,
    state_dtype: object,
    entry_dtype: Any,
    table: Sequence[Measured] | None = None,
) -> int:
    """How many entries a row may have without a checkpoint before one with it is faster, see `traffic.crossover`.

    It is counted in bytes, and becomes less by as much as what was measured on the device, for the most similar heads,
    was less than its bytes.

    Args:
      spec, device, table: As in `choose`.
      limit: Of the buffered form.
      state_dtype, entry_dtype: Of the checkpoint and of the entries.
    """
    by_bytes = crossover(spec, state_dtype, entry_dtype, limit)
    row = _nearest(spec, device, table)
    if row is None or row.kv_entries is None or row.kv_entries_by_bytes is None:
        return by_bytes
    return round(by_bytes * row.kv_entries / row.kv_entries_by_bytes)


def _nearest(spec: RecurrenceSpec, device: str, table: Sequence[Measured] | None) -> Measured | None:
    """What was measured on the device for the most similar heads."""
    rows = [row for row in (read_table() if table is None else table) if row.device == device]
    return min(rows, key=lambda row: _distance(row, spec), default=None)


def _distance(row: Measured, spec: RecurrenceSpec) -> float:
    return sum(abs(math.log2(getattr(row, name) / getattr(spec, name))) for name in SIZES)


def device_kind(array: jax.Array | jax.ShapeDtypeStruct) -> str:
    """What an array lies on, as JAX names it; "" for a shape that lies nowhere."""
    return "" if array.sharding is None else next(iter(array.sharding.device_set)).device_kind


@functools.cache
def read_table(path: Path = TABLE) -> tuple[Measured, ...]:
    """What is recorded; nothing if there is no such file."""
    if not path.exists():
        return ()
    return tuple(from_dict(row) for row in json.loads(path.read_text(encoding="utf-8"))["measured"])


def from_dict(data: dict[str, Any]) -> Measured:
    """A row of the table from its JSON; what else is in it says where it comes from."""
    fields: dict[str, Any] = {
        field.name: data[field.name] for field in dataclasses.fields(Measured) if field.name in data
    }
    for name in ("batches", "recurrent_us", "buffered_us"):
        fields[name] = tuple(fields[name])
    return Measured(**fields)

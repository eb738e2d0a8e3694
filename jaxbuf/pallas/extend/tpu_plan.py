"""How the TPU kernel of `extend` arranges a call: how many heads at once, and what lies in VMEM."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from jaxbuf.pallas.extend.call import FIELDS, Call
from jaxbuf.pallas.tpu_memory import padded_bytes, vmem_bytes

MOST_CHUNK = 32  # entries
MOST_TOGETHER = 4  # heads
SCALARS = 2**20 - 2**16  # bytes of scalar memory for the integers of all rows; the compiler needs a few
LANES, SUBLANES = 128, 8


def up(x: int, multiple: int) -> int:
    """The next multiple."""
    return -(-x // multiple) * multiple


def _slabs(rows: int, width: int) -> tuple[int, int, int]:
    """Shape of an array of which rows that lie apart are loaded together: cut into slabs of 128 columns."""
    return -(-width // LANES), rows, min(width, LANES)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the sizes of a call come to.

    Attributes:
      call: The call.
      heads: Of a program; a row takes `blocks` programs.
      vmem_limit: Bytes that the compiler may use.
    """

    call: Call
    heads: int
    vmem_limit: int = 0

    @property
    def blocks(self) -> int:
        """Programs of a row."""
        return self.call.heads // self.heads

    @property
    def chunk(self) -> int:
        """Entries that are multiplied at once. It depends on the ring alone, and so do the bits of a sum."""
        return min(up(self.call.ring, SUBLANES), MOST_CHUNK)

    @property
    def places(self) -> int:
        """For entries of the ring."""
        return up(self.call.ring, self.chunk)

    @property
    def all_places(self) -> int:
        """With those behind the ring's, for new entries of rows that fold."""
        return self.places + up(self.call.time, self.chunk)

    @property
    def ring_rows(self) -> int:
        """Places of live entries, in whole tiles."""
        return up(self.call.max_live, SUBLANES)

    @property
    def all_heads(self) -> int:
        """Rows that an entry takes as float32 numbers."""
        return up(self.call.heads, SUBLANES)

    @property
    def all_key_heads(self) -> int:
        """Likewise of a key."""
        return up(self.call.key_heads, SUBLANES)

    @property
    def together(self) -> int:
        """Heads that are computed side by side, as one alone would leave most of the processor waiting. They read one
        key head, or all that read theirs are among them."""
        group = self.call.heads_per_key
        fitting = (n for n in range(MOST_TOGETHER, 0, -1) if self.heads % n == 0 and (n % group == 0 or group % n == 0))
        return next(fitting)

    @property
    def probes(self) -> int:
        """New keys and queries of a head, in whole tiles."""
        return up(2 * self.call.time, SUBLANES)

    @property
    def word_places(self) -> dict[str, int]:
        """Where the numbers of each array of `Integers` begin among those of a row."""
        call = self.call
        ends = itertools.accumulate((FIELDS, call.max_live, call.time, call.time))
        return dict(zip(("entries", "append", "paths", "end"), ends, strict=True)) | {"fields": 0}

    @property
    def words(self) -> int:
        """Integers of a row."""
        return self.word_places["end"]

    @property
    def entry_names(self) -> tuple[str, ...]:
        """Arrays of the pool of which the kernel copies entries."""
        return ("keys", "updates", "gates") if self.call.decay == "channel" else ("keys", "updates")

    @property
    def low_names(self) -> tuple[str, ...]:
        """Arrays of the low halves."""
        if self.call.low is None:
            return ()
        return ("low", "low_scales") if self.call.low == jnp.int8 else ("low",)

    @property
    def table_names(self) -> tuple[str, ...]:
        """Numbers a head of an entry which come with the inputs."""
        if self.call.decay == "channel":
            return ()
        return (*(("decay",) if self.call.decay == "head" else ()), *(() if self.call.delta else ("beta",)))

    def arrays(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of every array in VMEM."""
        call, f32 = self.call, jnp.dtype(jnp.float32)
        time, block = call.time, (2, self.heads, call.value_dim, call.key_dim)
        widths = {
            "keys": (call.key_heads, call.key_dim),
            "updates": (call.heads, call.value_dim),
            "gates": (call.heads, call.decay_width + (not call.delta)),
        }
        found: dict[str, tuple[tuple[int, ...], np.dtype]] = {"state": (block, call.state)}
        if call.low is not None:
            found["low"] = block, call.low
        if call.low == jnp.int8:
            found["low_scales"] = block[:-1], f32
        for name in self.entry_names:
            dtype = f32 if name == "gates" else call.entry
            found[name] = (2, up(call.max_live, 1), *widths[name]), dtype
            found[f"new_{name}"] = (time, *widths[name]), dtype
            rows = self.all_key_heads if name == "keys" else self.all_heads
            found[f"all_{name}"] = _slabs(self.all_places * rows, widths[name][1]), f32
        for name in self.table_names:
            found[f"all_{name}"] = (self.all_places, call.heads), f32
        if call.decay == "channel":
            found["table"] = _slabs(self.all_places * self.all_heads, call.key_dim), f32
            found["since"] = _slabs(time * self.all_heads, call.key_dim), f32
        else:
            found["table"] = (self.all_places, call.heads), f32
        found["all_q"] = _slabs(time * self.all_key_heads, call.key_dim), f32
        found["all_v"] = (time, call.heads, call.value_dim), f32
        found["out"] = (time, call.heads, call.value_dim), f32
        found["probes"] = (self.together, self.probes, call.key_dim), f32
        found["products"] = (self.heads, self.probes, call.value_dim), f32
        return found

    def scratch_names(self) -> tuple[str, ...]:
        """Of `scratch`."""
        return (*self.arrays(), "read", "write")

    def scratch(self) -> list:
        """What the kernel asks for."""
        arrays = [pltpu.VMEM(shape, dtype) for shape, dtype in self.arrays().values()]
        # One semaphore for each copy of the checkpoint and of the entries, and one for each kind of write.
        return [*arrays, pltpu.SemaphoreType.DMA((4,)), pltpu.SemaphoreType.DMA((2,))]

    def vmem(self) -> int:
        """Bytes of VMEM: the scratch, and the inputs' and outputs' blocks twice."""
        call = self.call
        scratch = sum(padded_bytes(shape, dtype.itemsize) for shape, dtype in self.arrays().values())
        tokens = [((call.time, call.key_heads, call.key_dim), call.probe)] * 2
        tokens += [((call.time, call.heads, call.value_dim), call.out)] * 2
        tokens += [((self.ring_rows + call.time, call.heads), jnp.dtype(jnp.float32))] * 2
        if call.decay == "channel":
            tokens.append(((call.time, call.heads, call.key_dim + 1), jnp.dtype(jnp.float32)))
        return scratch + 2 * sum(padded_bytes(shape, dtype.itemsize) for shape, dtype in tokens)


def make_plan(call: Call, generation: str) -> Plan | str:
    """How a call is arranged on a generation, or the reason why it can't be."""
    total = vmem_bytes(generation)
    integers = 4 * call.rows * Plan(call, call.heads).words
    if integers > SCALARS:
        return f"at most {SCALARS} bytes of integers, got {integers} for {call.rows} rows of {call.max_live} entries"
    # The compiler keeps what does not fit in registers in VMEM, too.
    room = total - max(total // 8, 2 * 2**20)
    group = call.heads_per_key
    plan = None
    for count in range(call.key_heads, 0, -1):
        if call.key_heads % count:
            continue
        heads = count * group
        if call.low == jnp.int8 and heads != call.heads and heads % SUBLANES:
            continue
        plan = Plan(call, heads, total - total // 16)
        if plan.vmem() <= room:
            return plan
    assert plan is not None
    return f"at most {room} bytes of VMEM, got {plan.vmem()} with {plan.heads} of {call.heads} heads at once"

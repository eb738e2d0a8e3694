"""How a call of `attend_gated` is arranged on a TPU, and its integers."""

import dataclasses
from typing import NamedTuple

from jaxbuf.axes import Array
from jaxbuf.pallas.attend import tpu_call
from jaxbuf.pallas.attend.call import Call as PagedCall
from jaxbuf.pallas.attend.tpu_call import LANES, SMEM_BYTES, Arrangement, up
from jaxbuf.pallas.attend_gated.call import Call
from jaxbuf.pallas.tpu_memory import vmem_bytes

LIST_BYTES = 2**16  # of the keys of a list's block, which is one head's
MOST_LISTED = 512  # keys of such a block


class GatedIntegers(NamedTuple):
    """The integers of a launch that a layer's kernel goes by, beside those of `jaxbuf.pallas.attend.tpu_call`.

    Attributes:
      counts: int32 [rows · kv_heads], the keys of each row's lists.
      lists: int32 [rows · kv_heads, chunks, LANES], their pages.
      seen: int32 [rows, blocks, groups, columns · packed]: bit t says whether new token t sees a place of a local
        block, or of the new tokens behind its places, with a key head of a group.
      there: int32 [rows, blocks, 1, columns]: 1 where such a place holds a token.
    """

    counts: Array
    lists: Array
    seen: Array
    there: Array


@dataclasses.dataclass(frozen=True)
class GatedArrangement:
    """How a call is arranged.

    Attributes:
      call: The call.
      local: Of its local pages and new tokens: a call of `append_and_attend` on pages of these alone.
      listed: Of a block of a list: pages of one head.
    """

    call: Call
    local: Arrangement
    listed: Arrangement

    @property
    def blocks(self) -> int:
        """Local blocks of a row at most."""
        return -(-self.call.columns * self.call.page_size // self.local.span)

    @property
    def chunks(self) -> int:
        """Rows of LANES pages that a list has."""
        return -(-self.call.max_pages // LANES)

    @property
    def vmem(self) -> int:
        """Bytes of the buffers, at most."""
        local, listed = self.local, self.listed
        lists = 2 * local.depth * listed.span * up(self.call.head_dim, LANES) * self.call.dtype.itemsize
        masks = 4 * local.depth * (up(local.groups, 8) * up(local.columns * local.packed, LANES) + 8 * local.columns)
        return local.vmem + lists + masks

    @property
    def scalars(self) -> int:
        """Bytes of scalar memory."""
        return self.local.scalars + 4 * (self.call.rows * self.call.kv_heads + (self.local.depth + 1) * LANES)


def arrange(call: Call, generation: str) -> GatedArrangement:
    """How a call is arranged on a generation of chips.

    Args:
      call: The call.
      generation: As in `jaxbuf.target.Target`; "" for the interpreter.
    """
    of_both = {"rows": call.rows, "head_dim": call.head_dim, "page_size": call.page_size, "dtype": call.dtype}
    here = PagedCall(
        time=call.time, heads=call.heads, kv_heads=call.kv_heads, max_pages=call.columns, listed=0, **of_both
    )
    local = tpu_call.arrange(here, generation)
    alone = PagedCall(time=1, heads=1, kv_heads=1, max_pages=call.max_pages, listed=0, **of_both)
    span = min(MOST_LISTED, LIST_BYTES // (up(call.head_dim, LANES) * call.dtype.itemsize), LANES * call.page_size)
    # Of so many keys that none are left over a page.
    span = max(span, call.page_size)
    listed = dataclasses.replace(tpu_call.arrange(alone, generation), span=span, depth=local.depth)
    return GatedArrangement(call, local, listed)


def needs(plan: GatedArrangement) -> tuple[tuple[bool, str], ...]:
    """What the kernel needs of a call that is arranged so, and whether it is met."""
    vmem, call = vmem_bytes(plan.local.generation), plan.call
    return (
        *tpu_call.needs(plan.local.call, plan.local),
        (plan.vmem <= vmem * 3 // 4, f"buffers that fit in {vmem} bytes of VMEM, got {plan.vmem}"),
        (plan.scalars <= SMEM_BYTES, f"at most {SMEM_BYTES} bytes of integers, got {plan.scalars} of {call.rows} rows"),
    )

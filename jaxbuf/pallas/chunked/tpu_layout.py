"""How the TPU kernel of `chunked` arranges a call: its chunks, how many heads at once, and what lies in VMEM."""

import dataclasses

import jax.numpy as jnp

from jaxbuf.pallas.chunked.call import Call
from jaxbuf.pallas.tpu_memory import padded_bytes, vmem_bytes

LANES = 128
LEAST_CHUNK, MOST_CHUNK = 16, 128  # tokens
MOST_TOGETHER = 4  # heads
MOST_UNIT = 24  # heads


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the sizes of a call come to.

    Attributes:
      call: The call.
      unit: Heads whose keys and values begin and end at multiples of 128 numbers of a token's.
      heads: Of a program, in whole units; a row takes `blocks` of them, each for all chunks.
      vmem_limit: Bytes that the compiler may use.
    """

    call: Call
    unit: int
    heads: int
    vmem_limit: int = 0

    @property
    def blocks(self) -> int:
        """Blocks of heads."""
        return self.call.heads // self.heads

    @property
    def chunk(self) -> int:
        """Tokens that are solved together, a power of two."""
        least = max(LEAST_CHUNK, 1 << (self.call.time - 1).bit_length())
        return min(least, MOST_CHUNK)

    @property
    def chunks(self) -> int:
        """Of a row."""
        return -(-self.call.time // self.chunk)

    @property
    def update_chunks(self) -> int:
        """Chunks of a row whose updates are returned."""
        call = self.call
        if call.updates in (0, call.time):
            return self.chunks if call.updates else 0
        return min(self.chunks, (call.updates + self.chunk - 2) // self.chunk + 1)

    @property
    def key_heads(self) -> int:
        """Of a program."""
        return max(1, self.heads // self.call.heads_per_key)

    @property
    def together(self) -> int:
        """Heads that are computed side by side, as one alone would leave most of the processor waiting."""
        return next(n for n in range(MOST_TOGETHER, 0, -1) if self.unit % n == 0)

    @property
    def parts(self) -> int:
        """bfloat16 parts of a float32 operand: three are exact, two are finer than bfloat16 inputs need. The delta rule
        without a decay needs three: nothing dampens there what is recalled, and errors of 2**-18 grow a hundredfold."""
        rounded = self.call.q == self.call.k == self.call.v == jnp.bfloat16
        return 2 if rounded and not (self.call.delta and self.call.decay == "none") else 3

    def vmem(self) -> int:
        """Bytes of VMEM: blocks of inputs and outputs twice, the running state, and what is computed with."""
        call, chunk = self.call, self.chunk
        state = padded_bytes((self.heads, call.value_dim, call.key_dim), 4)
        keys = padded_bytes((chunk, self.key_heads * call.key_dim), 1)
        values = padded_bytes((chunk, self.heads * call.value_dim), 1)
        gates = padded_bytes((chunk, call.heads), 4)
        blocks = (1 + call.has_state) * state + keys * (call.q.itemsize + call.k.itemsize)
        blocks += values * (2 * call.v.itemsize + 4 * (call.updates > 0)) + 2 * gates
        if call.decay == "channel":
            blocks += padded_bytes((chunk, self.heads * call.key_dim), 4)
        squares = padded_bytes((chunk, max(chunk, call.key_dim, call.value_dim)), 4)
        return 2 * blocks + call.cut * state + 4 * gates + (self.levels + 2 + 16 * self.together) * squares

    @property
    def levels(self) -> int:
        """How often a block of one token is doubled to be a chunk."""
        return self.chunk.bit_length() - 1


def heads_of_unit(call: Call) -> int:
    """The least heads whose keys and values begin and end at multiples of 128 numbers of a token's; or all heads."""
    group = call.heads_per_key
    for count in range(1, call.heads):
        whole = group % count == 0 or count % group == 0
        keys = max(1, count // group) * call.key_dim
        if call.heads % count == 0 and whole and keys % LANES == count * call.value_dim % LANES == 0:
            return count
    return call.heads


def make_layout(call: Call, generation: str) -> Layout | str:
    """How a call is arranged on a generation, or the reason why it can't be."""
    unit = heads_of_unit(call)
    if unit > MOST_UNIT:
        return f"at most {MOST_UNIT} heads whose numbers together fill vectors of {LANES}, got {unit}"
    total, group = vmem_bytes(generation), call.heads_per_key
    room = total - total // 8
    found = None
    for heads in range(call.heads, 0, -unit):
        keys = max(1, heads // group)
        wide = keys * call.key_dim, heads * call.value_dim
        # Whole groups, whose keys are read once; or, where one does not fit, parts of one.
        fits = call.heads % heads == 0 and (heads % group == 0 or group % heads == 0)
        if not fits or (heads < call.heads and any(x % LANES for x in wide)):
            continue
        found = Layout(call, _wider(unit, heads, group), heads, total - total // 16)
        if found.vmem() <= room:
            return found
    assert found is not None
    return f"at most {room} bytes of VMEM, got {found.vmem()} with {found.heads} of {call.heads} heads at once"


def _wider(unit: int, heads: int, group: int) -> int:
    """A unit of up to MOST_TOGETHER heads, which are computed side by side."""
    fitting = (
        n for n in range(MOST_TOGETHER, unit, -1) if n % unit == heads % n == 0 and (group % n == 0 or n % group == 0)
    )
    return next(fitting, unit)

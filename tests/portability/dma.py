"""Counts the bytes that kernels move between HBM and VMEM, in Pallas' TPU interpreter."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu


@dataclasses.dataclass
class Moved:
    """Bytes that crossed HBM's boundary.

    Attributes:
      copies: By the copies that kernels start themselves.
      blocks: By the pipeline, which brings the inputs' blocks and takes the outputs'.
    """

    copies: int = 0
    blocks: int = 0

    @property
    def bytes(self) -> int:
        """All of them."""
        return self.copies + self.blocks


def count_dma_bytes(f: Callable[..., Any], *args: Any) -> tuple[Moved, Any]:
    """Calls `f(*args)` with its TPU kernels in the interpreter, and counts what they move.

    The hook is on the interpreter's copy: whatever a kernel reads is counted, even where nobody uses it. What a narrow
    array is padded with is not counted.

    Returns:
      What was moved, and what f returned.
    """
    with _counting() as moved, pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(dma_execution_mode="eager")):
        out = jax.block_until_ready(f(*args))
    return moved, out


@contextmanager
def _counting() -> Iterator[Moved]:
    moved, hbm = Moved(), {i for i, name in interpreter.TPU_MEMORY_SPACE_NAMES.items() if name in ("hbm", "any")}
    plain_read, plain_get, plain_store = interpreter.DMA.execute_read, interpreter.get, interpreter.store

    def execute_read(self):
        first = self.state == interpreter.DmaState.STARTED
        plain_read(self)
        if first:
            ends = (int(self.src_memory_space), int(self.dst_memory_space))
            moved.copies += self.data_size * sum(end in hbm for end in ends)

    def get(*args, input_name=None, **settings):
        token, found = plain_get(*args, input_name=input_name, **settings)
        moved.blocks += 0 if input_name is None else found.nbytes
        return token, found

    def store(*args, output_name=None, **settings):
        moved.blocks += 0 if output_name is None else args[6].nbytes
        return plain_store(*args, output_name=output_name, **settings)

    get.__wrapped__, store.__wrapped__ = plain_get.__wrapped__, plain_store.__wrapped__  # which copies call
    jax.clear_caches()  # programs that were traced before do not have the hooks
    try:
        with (
            mock.patch.object(interpreter.DMA, "execute_read", execute_read),
            mock.patch.object(interpreter, "get", get),
            mock.patch.object(interpreter, "store", store),
        ):
            yield moved
    finally:
        jax.clear_caches()

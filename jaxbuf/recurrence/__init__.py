"""Linear attention's memory: one recurrence, its families as data, in three forms that give the same numbers.

`recurrent` is the definition, `chunked` serves prefill and training, `buffered` serves decoding and verification.
"""

from jaxbuf.memory.ownership import PoolExhausted
from jaxbuf.recurrence import buffered
from jaxbuf.recurrence.buffered import BufferedState, Cursor, Pool
from jaxbuf.recurrence.chunked import chunked
from jaxbuf.recurrence.recurrent import recurrent
from jaxbuf.recurrence.spec import RecurrenceSpec
from jaxbuf.recurrence.traffic import crossover

__all__ = [
    "BufferedState",
    "Cursor",
    "Pool",
    "PoolExhausted",
    "RecurrenceSpec",
    "buffered",
    "chunked",
    "crossover",
    "recurrent",
]

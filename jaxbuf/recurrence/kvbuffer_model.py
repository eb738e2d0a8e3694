"""KVBuffer's own model of storage and memory access: tables 1 and 2, eqs. 6 to 10 and 17 to 19, as functions.

One head whose keys and values have d numbers, a float32 state, everything else in two bytes. `gdn` picks table 2 (Gated
DeltaNet, whose token brings a decay and a write strength and whose entry keeps the decay) over table 1 (linear
attention). The text gives the tables' sums in eqs. 6, 9, 10 and 17 to 19, before they are rounded.

It differs from `traffic.py`, which counts what is stored here, in that a fold is a kernel of its own: it reads the
state and the entries once more, and for that finds one entry less in the buffer on average.

Source: Zou and Zhong, KVBuffer: IO-aware Serving for Linear Attention (2026).
"""

import math


def recurrent_storage(d: int) -> int:
    """Bytes of a request in the recurrent form: the state. Tables 1 and 2."""
    return 4 * d * d


def chunkwise_storage(d: int, m: int, *, gdn: bool = False) -> int:
    """Bytes of a request in the chunkwise form: the state and a buffer of m keys and values. Tables 1 and 2."""
    return recurrent_storage(d) + kv_only_storage(m, d, gdn=gdn)


def kv_only_storage(length: int, d: int, *, gdn: bool = False) -> int:
    """Bytes of a request in the parallel form: a key and a value (and a decay) for each token. Tables 1 and 2."""
    return length * (4 * d + 2 * gdn)


def snapshot_storage(d: int, m: int) -> int:
    """Bytes of a request whose m draft tokens each have a state, beside the request's own. Section 2.2."""
    return (m + 1) * recurrent_storage(d)


def recurrent_access(d: int, *, gdn: bool = False) -> int:
    """Bytes of a token in the recurrent form: the state read and written, q, k, v, o. Tables 1 and 2."""
    return 8 * d * d + 8 * d + 4 * gdn


def chunkwise_access(d: int, m: int, *, gdn: bool = False) -> float:
    """Mean bytes of a token in the chunkwise form with buffer size m, its part of a flush included. Tables 1 and 2."""
    return 4 * d * d + 8 * d * d / m + 2 * m * d + 14 * d + (m + 7) * gdn


def kv_only_access(length: int, d: int, *, gdn: bool = False) -> int:
    """Bytes of a token in the parallel form, the length-th of its request. Tables 1 and 2."""
    return 4 * length * d + 8 * d + (2 * length + 4) * gdn


def recurrent_verify_access(d: int, m: int, *, gdn: bool = False) -> int:
    """Bytes of verifying m draft tokens with a state for each: one read, m written. Numerators of eqs. 9 and 18."""
    return 4 * (m + 1) * d * d + 8 * m * d + 4 * m * gdn


def verify_output_access(d: int, m: int, *, gdn: bool = False) -> int:
    """Bytes of eq. 7, the outputs of m draft tokens at once, which also appends them."""
    return 4 * d * d + 12 * m * d + 6 * m * gdn


def update_access(d: int, m: int, *, gdn: bool = False) -> int:
    """Bytes of eqs. 5 and 8, the state updated with m buffered tokens: read, written, and the buffer read."""
    return 8 * d * d + 4 * m * d + 2 * m * gdn


def parallel_verify_access(d: int, m: int, *, gdn: bool = False) -> int:
    """Bytes of verifying m draft tokens from the buffer, all of them accepted. Denominators of eqs. 9 and 18."""
    return verify_output_access(d, m, gdn=gdn) + update_access(d, m, gdn=gdn)


def chunkwise_speedup(d: int, m: int, *, gdn: bool = False) -> float:
    """Recurrent over chunkwise decoding. Eq. 6, and eq. 17 before it is rounded."""
    return recurrent_access(d, gdn=gdn) / chunkwise_access(d, m, gdn=gdn)


def verify_speedup(d: int, m: int, *, gdn: bool = False) -> float:
    """Recurrent over parallel verification of m draft tokens. Eq. 9, and eq. 18 before it is rounded."""
    return recurrent_verify_access(d, m, gdn=gdn) / parallel_verify_access(d, m, gdn=gdn)


def kv_only_speedup(length: int, d: int, m: int, *, gdn: bool = False) -> float:
    """Chunkwise (buffer size m) over KV-only decoding of a context. Eq. 10, and eq. 19 before it is rounded."""
    return chunkwise_access(d, m, gdn=gdn) / kv_only_access(length, d, gdn=gdn)


def best_chunk(d: int) -> float:
    """The buffer size of the highest `chunkwise_speedup`, 2 · sqrt(d). Section 3.2, at eq. 6."""
    return 2 * math.sqrt(d)


def output_intensity(d: int, m: int) -> float:
    """Operations a byte of eq. 7. Section 3.3."""
    return (2 * m * d * d + 2 * m * (m + 1) * d) / verify_output_access(d, m)


def update_intensity(d: int, m: int) -> float:
    """Operations a byte of eqs. 5 and 8, m / (4 + 2m / d). Sections 3.2 and 3.3."""
    return 2 * m * d * d / update_access(d, m)


def kv_only_intensity(length: int) -> float:
    """Operations a byte of eq. 2. Section 3.4."""
    return length / (length + 2)

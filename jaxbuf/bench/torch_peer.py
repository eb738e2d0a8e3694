"""Times what torch does: run by `jaxbuf.bench.measure.measure_torch`, in a process of its own."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

FOOTPRINT = 160e6  # bytes that take turns: over twice the L2 of an H200
MOST_COPIES = 512  # of a small matrix
LEAST_CALLS = 128  # of one measurement, in whole runs, of which there are 2 to 8
PROMPT_CALLS = 5  # of attention over whole prompts
BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}

type Row = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Prints a line of JSON: the rows of what was asked for, or one that says what is missing.

    Args:
      arguments: "products", "attention" or "prompts", and JSON of a list with the arguments of the function of that
        name for each case, behind torch. `case` in a row is its place there.
    """
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        return say([{"error": f"not installed: {error} (pip install torch)"}])
    if not torch.cuda.is_available():
        return say([{"error": f"torch {torch.__version__} finds no GPU"}])
    what, cases = arguments[0], json.loads(arguments[1])
    measure = {"products": products, "attention": attention, "prompts": prompts}[what]
    rows = []
    for place, case in enumerate(cases):
        try:
            rows += [{"case": place} | row for row in measure(torch, *case)]
        except RuntimeError as error:  # what one case cannot do must not cost the figures of the others
            rows.append({"case": place, "error": first_line(error)})
        torch.cuda.empty_cache()
    return say([row | {"versions": {"torch": torch.__version__}} for row in rows])


def say(rows: Sequence[Row]) -> int:
    sys.stdout.write(json.dumps(rows) + "\n")
    return 0


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no message"])[0]


def products(torch: Any, vectors: int, matrices: Sequence[tuple[int, int, int]], dtype: str) -> list[Row]:
    """torch.nn.functional.linear of [vectors, in] with matrices [out, in], given as (out, in, how many there are).

    Matrices take turns, as many as there are, or more, that the L2 holds none of them until its next turn.
    """
    rows = []
    for out, width, count in matrices:
        x = torch.randn(vectors, width, device="cuda").to(getattr(torch, dtype))
        copies = max(count, min(MOST_COPIES, -(-int(FOOTPRINT) // (out * width * x.element_size()))))
        weights = [(0.02 * torch.randn(out, width, device="cuda")).to(x.dtype) for _ in range(copies)]

        def run(x=x, weights=weights):
            return [torch.nn.functional.linear(x, weight) for weight in weights]

        taken = take_times(torch, run, copies)
        rows.append({"vectors": vectors, "out": out, "in": width, "count": count, "copies": copies} | taken)
        del weights
    return rows


def attention(
    torch: Any, rows: int, context: int, heads: int, kv_heads: int, head_dim: int, time: int, layers: int, dtype: str
) -> list[Row]:
    """scaled_dot_product_attention of `time` queries a row over contiguous keys and values, [rows, kv_heads, context +
    time, head_dim], of so many layers in turn; by each backend that can.

    Without a mask: of several new tokens each sees all, which takes torch no longer than what it should see.
    """
    kinds, found = torch.nn.attention.SDPBackend, []

    def normal(*shape):
        return torch.randn(shape, device="cuda").to(getattr(torch, dtype))

    q = normal(rows, heads, time, head_dim)
    memory = [[normal(rows, kv_heads, context + time, head_dim) for _ in "kv"] for _ in range(layers)]

    def run():
        attend = torch.nn.functional.scaled_dot_product_attention
        return [attend(q, k, v, enable_gqa=heads != kv_heads) for k, v in memory]

    for name, backend in BACKENDS.items():
        row = {"implementation": f"torch {name}"}
        try:
            with torch.nn.attention.sdpa_kernel(getattr(kinds, backend)):
                row |= take_times(torch, run, layers)
        except RuntimeError as error:  # what this backend can't serve
            row["error"] = first_line(error)
        found.append(row)
    return found


def prompts(torch: Any, number: int, tokens: int, heads: int, kv_heads: int, head_dim: int) -> list[Row]:
    """Causal scaled_dot_product_attention of whole prompts in bfloat16, by each backend that can: milliseconds by the
    wall clock, which such calls fill, and FLOP a second."""

    def normal(n):
        return torch.randn(number, n, tokens, head_dim, device="cuda", dtype=torch.bfloat16)

    q, k, v = normal(heads), normal(kv_heads), normal(kv_heads)
    found = []
    for backend in BACKENDS.values():
        row = {"prompts": number, "tokens": tokens, "kernel": backend}
        try:
            with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
                ms = milliseconds(torch, q, k, v)
        except RuntimeError as error:  # which has no such kernel
            found.append({"kernel": backend, "error": f"{backend}: {first_line(error)}"})
            continue
        flop = 2 * number * heads * head_dim * tokens * (tokens + 1)
        found.append(row | {"ms": ms, "flop_per_s": 1e3 * flop / ms})
    return found


def milliseconds(torch: Any, q: Any, k: Any, v: Any) -> float:
    def call():
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    for _ in range(2):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(PROMPT_CALLS):
        call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / PROMPT_CALLS


def take_times(torch: Any, run: Callable[[], list], calls: int) -> Row:
    """Microseconds of one of the `calls` in a run: those of all kernels (device), and those of a CUDA graph (wall)."""
    repeats = max(2, min(8, LEAST_CALLS // calls))
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    taken = [event.time_range.elapsed_us() for event in profile.events() if event.device_type == on_device]
    device = sum(taken) / (repeats * calls) if taken else None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    wall = 1e3 * start.elapsed_time(end) / (repeats * calls)
    del outs
    launches = len(taken) / (repeats * calls)
    return {"device_us": device, "wall_us": wall, "us": device or wall, "launches": launches}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

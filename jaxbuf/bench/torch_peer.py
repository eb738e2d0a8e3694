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
      arguments: "products", "attention", "prompts" or "chunked", and JSON of a list with the arguments of the function
        of that name for each case, behind torch. `case` in a row is its place there.
    """
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        return say([{"error": f"not installed: {error} (pip install torch)"}])
    if not torch.cuda.is_available():
        return say([{"error": f"torch {torch.__version__} finds no GPU"}])
    what, cases = arguments[0], json.loads(arguments[1])
    measure = {"products": products, "attention": attention, "prompts": prompts, "chunked": chunked}[what]
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


def chunked(torch: Any, rows: int, tokens: int, heads: int, key_heads: int, key_dim: int, value_dim: int) -> list[Row]:
    """flash-linear-attention's chunk_gated_delta_rule of whole prompts, in bfloat16 from an empty state; and how far
    what it gives of some tokens is off, against the recurrence token by token in float32."""
    try:
        import fla  # pyright: ignore[reportMissingImports]
        import triton  # pyright: ignore[reportMissingImports]
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        return [{"error": f"not installed: {error} (pip install fla-core torch triton)"}]

    def inputs(rows, tokens):
        def normal(*shape):
            return torch.randn(shape, device="cuda")

        q, k = (torch.nn.functional.normalize(normal(rows, tokens, key_heads, key_dim), dim=-1) for _ in "qk")
        v, beta = normal(rows, tokens, heads, value_dim), normal(rows, tokens, heads).sigmoid()
        return q.bfloat16(), k.bfloat16(), v.bfloat16(), -0.05 * normal(rows, tokens, heads).abs(), beta

    def solve(q, k, v, g, beta):
        return chunk_gated_delta_rule(q, k, v, g=g, beta=beta, scale=1.0, output_final_state=True)

    few = inputs(1, 192)
    wanted = recur(torch, *few)
    names = ("outputs", "states")
    errors = {
        name: float((x.float() - y).abs().max() / y.abs().max())
        for name, x, y in zip(names, solve(*few), wanted, strict=True)
    }
    many = inputs(rows, tokens)

    def run():
        return [solve(*many) for _ in range(PROMPT_CALLS)]

    row = {"rows": rows, "tokens": tokens, "errors": errors} | take_times(torch, run, PROMPT_CALLS)
    return [row | {"versions_of_others": {"fla": fla.__version__, "triton": triton.__version__}}]


def recur(torch: Any, q: Any, k: Any, v: Any, g: Any, beta: Any) -> tuple[Any, Any]:
    """Outputs [rows, tokens, heads, value_dim] and the state [rows, heads, key_dim, value_dim], in float32."""
    group = v.shape[2] // k.shape[2]
    q, k = (x.float().repeat_interleave(group, 2) for x in (q, k))
    state, outs = torch.zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3], device=v.device), []
    for t in range(v.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        update = beta[:, t, :, None] * (v[:, t].float() - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + k[:, t, :, :, None] * update[:, :, None]
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outs, 1), state


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

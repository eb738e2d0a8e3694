"""Times flash-linear-attention's recurrent step: run by jaxbuf.bench.kernels, in a process of its own."""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any


def main(arguments: Sequence[str]) -> int:
    """Prints a line of JSON: a row for every batch and layout of the state, or one that says what is not installed.

    Args:
      arguments: JSON of [heads, key_heads, key_dim, value_dim], and of a list of [batch, layers].
    """
    try:
        import fla  # pyright: ignore[reportMissingImports]
        import torch  # pyright: ignore[reportMissingImports]
        import triton  # pyright: ignore[reportMissingImports]
        from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
            fused_recurrent_gated_delta_rule as extend,
        )
    except ImportError as error:
        words = f"not installed: {error} (pip install fla-core torch triton)"
        sys.stdout.write(json.dumps([{"error": words}]) + "\n")
        return 0
    versions = {module.__name__: module.__version__ for module in (fla, torch, triton)}
    (heads, key_heads, key_dim, value_dim), sizes = map(json.loads, arguments)
    rows = []
    for batch, layers in sizes:

        def normal(*shape):
            return torch.randn(shape, device="cuda")

        q, k = (torch.nn.functional.normalize(normal(batch, 1, key_heads, key_dim), dim=-1).bfloat16() for _ in "qk")
        v, beta = normal(batch, 1, heads, value_dim).bfloat16(), normal(batch, 1, heads).sigmoid()
        g = -0.05 * normal(batch, 1, heads).abs()
        for value_first in (False, True):  # [key_dim, value_dim] is its default
            layout = {"state_v_first": True} if value_first else {}

            def step(states, q=q, k=k, v=v, g=g, beta=beta, layout=layout):
                """A step of every layer; each new state takes the place of the old one, which is then free."""
                outs = []
                for i, state in enumerate(states):
                    out, states[i] = extend(
                        q, k, v, g=g, beta=beta, scale=1.0, initial_state=state, output_final_state=True, **layout
                    )
                    outs.append(out)
                return outs

            shape = (value_dim, key_dim) if value_first else (key_dim, value_dim)
            states = [normal(batch, heads, *shape) for _ in range(layers)]
            wanted = recur(torch, states[0].mT if value_first else states[0], q, k, v, g, beta)
            error = float((step(states)[0][:, 0].float() - wanted).norm() / wanted.norm())
            row = {"batch": batch, "layers": layers, "state_v_first": value_first, "error_of_output": error}
            rows.append(row | take_times(torch, step, states) | {"versions": versions})
    sys.stdout.write(json.dumps(rows) + "\n")
    return 0


def recur(torch, state, q, k, v, g, beta):
    """The output of one step in float32, [batch, heads, value_dim], from a state [batch, heads, key_dim, value_dim]."""
    key, query = (x[:, 0].float().repeat_interleave(v.shape[2] // k.shape[2], 1) for x in (k, q))
    state = state * g[:, 0, :, None, None].exp()
    update = beta[:, 0, :, None] * (v[:, 0].float() - torch.einsum("bhkv,bhk->bhv", state, key))
    return torch.einsum("bhkv,bhk->bhv", state + key[..., None] * update[:, :, None], query)


def take_times(torch, step: Callable, states: list, steps: int = 16) -> dict[str, Any]:
    """Microseconds a layer: the kernel's own (device), and those of a CUDA graph of a step (wall)."""
    calls = steps * len(states)
    for _ in range(3):
        step(states)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step(states)
        torch.cuda.synchronize()
    taken = [event.time_range.elapsed_us() for event in profile.events() if "fused_recurrent" in event.name]
    device = sum(taken) / len(taken) if taken else None
    graph, first = torch.cuda.CUDAGraph(), list(states)  # the graph reads the first states in each replay
    with torch.cuda.graph(graph):
        outs = step(states)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(steps):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    wall = 1e3 * start.elapsed_time(end) / calls
    del outs, first
    return {"device_us": device, "wall_us": wall, "us": device or wall, "launches": len(taken) / calls}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Times torch's attention on whole prompts: run by jaxbuf.bench.prefill, in a process of its own."""

import json
import sys
import time
from collections.abc import Sequence

KERNELS = ("FLASH_ATTENTION", "CUDNN_ATTENTION")
CALLS = 5


def main(arguments: Sequence[str]) -> int:
    """Prints a line of JSON: a row for every size and kernel, or for what is not there.

    Args:
      arguments: JSON of a list of [prompts, tokens, heads, kv_heads, head_dim].
    """
    try:
        import torch  # pyright: ignore[reportMissingImports]
        from torch.nn import attention  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        sys.stdout.write(json.dumps([{"error": f"not installed: {error}"}]) + "\n")
        return 0
    if not torch.cuda.is_available():
        sys.stdout.write(json.dumps([{"error": "torch finds no GPU"}]) + "\n")
        return 0
    rows = []
    for prompts, tokens, heads, kv_heads, head_dim in json.loads(arguments[0]):

        def normal(number, prompts=prompts, tokens=tokens, head_dim=head_dim):
            return torch.randn(prompts, number, tokens, head_dim, device="cuda", dtype=torch.bfloat16)

        q, k, v = normal(heads), normal(kv_heads), normal(kv_heads)

        def call(q=q, k=k, v=v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        for kernel in KERNELS:
            row = {"prompts": prompts, "tokens": tokens, "kernel": kernel, "version": torch.__version__}
            try:
                with attention.sdpa_kernel(getattr(attention.SDPBackend, kernel)):
                    ms = milliseconds(torch, call)
            except RuntimeError as error:  # which has no such kernel
                rows.append({"kernel": kernel, "error": f"{kernel}: {str(error).splitlines()[0]}"})
                continue
            flop = 2 * prompts * heads * head_dim * tokens * (tokens + 1)
            rows.append(row | {"ms": ms, "flop_per_s": 1e3 * flop / ms})
    sys.stdout.write(json.dumps(rows) + "\n")
    return 0


def milliseconds(torch, call) -> float:
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / CALLS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

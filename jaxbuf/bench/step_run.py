"""Compiles and times the steps of one form of the memory at one batch."""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxbuf.bench.kernel_figures import Row
from jaxbuf.bench.measure import program_bytes
from jaxbuf.bench.step_carry import Tokens, restart
from jaxbuf.bench.step_parts import count_bytes, matrices, memory_dtypes, products, split, weight_bytes
from jaxbuf.compilation import without_cache
from jaxbuf.models.cache import fold_limits
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.packed import pack
from jaxbuf.models.tensor_parallel import EXPERT, devices_of
from jaxbuf.serving import Carry, generate_tokens
from jaxbuf.serving.carry import RUNNING
from jaxbuf.serving.profiling import operations, trace
from jaxbuf.serving.speculation import Drafter

CAPTURED = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION"  # XLA's own choice, spelled out
COMMAND_BUFFERS = {  # what of a program XLA may record as CUDA graphs
    "default": {},
    "off": {"xla_gpu_enable_command_buffer": ""},
    "on": {"xla_gpu_enable_command_buffer": CAPTURED},
    "loops": {"xla_gpu_enable_command_buffer": CAPTURED + ",CONDITIONAL,WHILE"},
}
# While a trace is taken XLA launches one by one what it recorded: that is its default, and the parts depend on it.
IN_TRACES = {"xla_enable_command_buffers_during_profiling": False}
UNTIMED, REPEATS = 4, 3  # runs


def compile_steps(
    lm: LanguageModel, carry: Carry, command_buffers: str, drafter: Drafter | None = None
) -> tuple[Any, Any, float]:
    """`generate_tokens` jitted with these options, what it was compiled to, and the seconds that took. It does not come
    from the compilation cache: a profile needs its names.

    The jitted function is what runs: its calls cost the host up to 2 ms less than those of what it was compiled to,
    which they find for a carry of `make_carry`.
    """
    options = IN_TRACES | COMMAND_BUFFERS[command_buffers]
    began = time.perf_counter()
    with without_cache():
        function = generate_tokens.__wrapped__  # pyright: ignore[reportAttributeAccessIssue]
        program = jax.jit(function, donate_argnames="carry", compiler_options=options)
        compiled = program.lower(pack(lm.model), carry, np.int32(0), drafter).compile()
    return program, compiled, time.perf_counter() - began


def measure(
    program,
    lm: LanguageModel,
    form: str,
    carry: Carry,
    first: Carry,
    options: argparse.Namespace,
    tokens: Tokens,
    drafter: Drafter | None,
) -> tuple[Row, Carry]:
    """One form at one batch, from its first carry: the figures, and the carry to go on with.

    Raises:
      ValueError: Not as many drafts were kept as `tokens` says.
    """
    walls, singles, devices, steps = [], [], count_devices(lm), tokens.steps(options.steps, options.limit)
    model = pack(lm.model)  # as `generate` does
    limit, whole = int(fold_limits(first.cache)[0]), tokens.cycle(options.limit)

    def run(carry, steps):
        carry = jax.block_until_ready(restart(carry, first, lm.config.mesh))
        began = time.perf_counter()
        carry = jax.block_until_ready(program(model, carry, np.int32(steps), drafter))
        return carry, time.perf_counter() - began

    # The first runs of a program on a GPU take longer, by a third of a millisecond a step at 32 steps.
    for _ in range(UNTIMED if jax.default_backend() == "gpu" else 1):
        carry, _ = run(carry, whole)
    for number, seconds in [(1, singles), (steps, walls)] * REPEATS:
        carry, wall = run(carry, number)
        seconds.append(wall)
    rows = int(np.sum(first.state == RUNNING))
    counters = jax.device_get(carry.counters)
    check_drafts(carry, rows * steps, tokens)
    assert np.sum(counters.steps) == rows * steps, "every row decodes in every step"
    if lm.config.specs:
        assert np.sum(counters.folds) * tokens.cycle(limit) == rows * steps, "steps are in whole fold cycles"
    with tempfile.TemporaryDirectory(prefix="jaxbuf-step-") as temporary:
        name = "-".join([form, str(rows), *(["drafts", str(tokens.drafts)] if tokens.drafts else [])])
        name = name if devices == 1 else f"{name}-devices-{devices}"
        directory = options.profile / name if options.profile else Path(temporary)
        with trace(directory):
            carry, _ = run(carry, whole)
        traced = [ran for ran in operations(directory) if ran.program == "generate_tokens"]
    ms = 1e3 * statistics.median(walls) / steps
    found = {"form": form, "batch": rows, "devices": devices, "limit": limit, "steps": steps}
    found["expert_devices"] = devices_of(lm.config.mesh, EXPERT)
    found["runs_ms"] = [1e3 * wall / steps for wall in walls]
    found["single_ms"] = 1e3 * statistics.median(singles)
    found |= {"drafts": tokens.drafts, "accepted": tokens.accepted}
    found |= {"context": options.context, "ms": ms, "tokens_per_s": 1e3 * rows * tokens.accepted / ms}
    found |= {"folds": float(np.sum(counters.folds) / np.sum(counters.steps))}
    found |= split(traced, whole * devices, len(lm.config.specs))
    vectors = first.state.size * tokens.read
    found |= {"vectors": vectors} | products(traced, matrices(lm), vectors, whole * devices)
    found["bytes"] = count_bytes(lm, memory_dtypes(carry), counters, options, tokens, steps)
    return found | {"all_experts_bytes": weight_bytes(lm)}, carry


def check_drafts(carry: Carry, row_steps: int, tokens: Tokens) -> None:
    """Raises ValueError unless in each of so many steps of rows as many drafts were verified and kept as wanted."""
    if carry.speculation is None:
        return
    drafted, accepted = (int(np.sum(x)) for x in (carry.speculation.drafted, carry.speculation.accepted))
    if (drafted, accepted) != (row_steps * tokens.drafts, row_steps * (tokens.accepted - 1)):
        raise ValueError(
            f"--drafts must be kept as --accepted says, {tokens.accepted - 1} of {tokens.drafts} in each of "
            f"{row_steps} steps of rows, got {accepted} of {drafted} kept: the model does not repeat its tokens"
        )


def count_devices(lm: LanguageModel) -> int:
    """Over how many devices a model is spread, along all axes of its mesh."""
    return 1 if lm.config.mesh is None else lm.config.mesh.size


def memory(program, devices: int) -> Row:
    """Bytes: what the program needs at once on each device, and the most that this process had in use on the last of
    them until now."""
    peak = (jax.devices()[devices - 1].memory_stats() or {}).get("peak_bytes_in_use")
    return program_bytes(program) | {"peak_bytes": peak}

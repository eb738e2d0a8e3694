"""What must hold of the kernels that read prompts. As in `checks.py`, which has those of decoding."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from jaxbuf.recurrence import RecurrenceSpec, buffered, chunked
from tests.gpu.checks import GLA, KDA, LINEAR, MAMBA, NANO, QWEN, WIDE, Figures
from tests.recurrence import definition

SOLVED = 2e-5  # of states and updates: products of halves of bfloat16
ROUNDED = 2**-8  # of outputs in bfloat16
LENGTHS = np.array([300, 0, 170, 64], np.int32)


def inputs(rng, spec: RecurrenceSpec, rows: int, time: int) -> list:
    """States, q, k, v, gates."""
    q, k, v, log_decay, beta = definition.inputs(rng, spec, rows, time, mean_log_decay=-0.05)
    state = rng.standard_normal((rows, *spec.state_shape)).astype(np.float32)
    return [state, *(np.array(jnp.asarray(x, jnp.bfloat16)) for x in (q, k, v)), log_decay, beta]


def check_chunked(rng, spec: RecurrenceSpec, implementation: str = "gpu") -> Figures:
    """What `chunked` gives of ragged rows, with a token that forgets everything, against float64. What lies past a
    row's length is NaN."""
    arrays, lengths = inputs(rng, spec, len(LENGTHS), max(LENGTHS)), LENGTHS
    if arrays[4] is not None:
        arrays[4][:, 7] = -np.inf
    wide = [None if x is None else np.asarray(x, np.float64) for x in arrays]
    exact = definition.run_batch(spec, *wide, lengths)
    for x in arrays[1:]:
        for row, length in enumerate(lengths if x is not None else ()):
            x[row, length:] = np.nan
    given = [None if x is None else jnp.asarray(x) for x in arrays]
    found = chunked(spec, *given, lengths=lengths, return_updates=True, implementation=implementation)
    figures = {}
    for name, actual, expected, bound in zip(
        ("out", "state", "updates"), found, exact, (ROUNDED, SOLVED, SOLVED), strict=True
    ):
        figures[name] = float(definition.error(actual, expected))
        assert figures[name] <= bound, f"{spec}: {name} is off by {figures[name]}, at most {bound}"
    return figures


def check_long(rng, spec: RecurrenceSpec, time: int, implementation: str = "gpu") -> Figures:
    """A prompt that is longer than what is solved at once, and a shorter one beside it, against XLA's path."""
    lengths = np.array([time, time // 3], np.int32)
    given = [None if x is None else jnp.asarray(x) for x in inputs(rng, spec, 2, time)]
    found, expected = (
        chunked(spec, *given, lengths=lengths, return_updates=True, implementation=each)
        for each in (implementation, "xla")
    )
    figures = {}
    for name, actual, wanted, bound in zip(
        ("out", "state", "updates"), found, expected, (2 * ROUNDED, SOLVED, SOLVED), strict=True
    ):
        figures[name] = float(definition.error(actual, wanted))
        assert figures[name] <= bound, f"{spec}: {name} is off by {figures[name]}, at most {bound}"
    return figures


def check_prefill(rng, spec: RecurrenceSpec, implementation: str = "gpu") -> Figures:
    """The memory that `prefill` leaves, against that of XLA's path: prompts are cut within a chunk and at its end."""
    rows, time = 4, 300
    arrays = [None if x is None else jnp.asarray(x) for x in inputs(rng, spec, rows, time)[1:]]
    cache = buffered.init(spec, slots=rows, limit=16, max_pending=4, entry_dtype=jnp.bfloat16)
    where = {"slots": np.arange(1, rows + 1, dtype=np.int32)}
    before = np.array([4, 0, 2, 0], np.int32)
    _, cache = buffered.prefill(spec, cache, *arrays, **where, lengths=before, keep=3, implementation="xla")
    where |= {"lengths": np.array([300, 71, 0, 16], np.int32), "keep": np.array([5, 7, 0, 16], np.int32)}
    expected, reference = buffered.prefill(spec, cache, *arrays, **where, implementation="xla")
    out, after = buffered.prefill(spec, cache, *arrays, **where, implementation=implementation)
    figures = {}
    for name, actual, wanted, bound in (
        ("out", out, expected, 2 * ROUNDED),  # both are rounded
        ("updates", after.pool.updates, reference.pool.updates, 2 * ROUNDED),
        ("checkpoints", after.pool.checkpoints[1:], reference.pool.checkpoints[1:], SOLVED),
        ("keys", after.pool.keys, reference.pool.keys, 0),
        ("gates", after.pool.gates, reference.pool.gates, 0),
    ):
        actual, wanted = (np.asarray(x, np.float64) for x in (actual, wanted))
        figures[name] = float(np.abs(actual - wanted).max(initial=0) / max(np.abs(wanted).max(initial=0), 1e-30))
        assert figures[name] <= bound, f"{spec}: {name} is off by {figures[name]}, at most {bound}"
    return figures


CHECKS: dict[str, Callable[[np.random.Generator], Figures]] = {
    "a_prompt_is_that_of_float64": lambda rng: check_chunked(rng, QWEN),
    "a_prompt_with_a_head_a_key_head_is_that_of_float64": lambda rng: check_chunked(
        rng, dataclasses.replace(QWEN, heads=6, key_heads=6, key_dim=64)
    ),
    "a_mamba_2_prompt_is_that_of_float64": lambda rng: check_chunked(rng, MAMBA),
    "a_prompt_with_heads_of_80_is_that_of_float64": lambda rng: check_chunked(rng, NANO),
    "a_prompt_with_values_of_256_is_that_of_float64": lambda rng: check_chunked(
        rng, dataclasses.replace(WIDE, heads=24, key_heads=24)
    ),
    "a_kimi_delta_attention_prompt_is_that_of_float64": lambda rng: check_chunked(rng, KDA),
    "a_kimi_linear_prompt_is_that_of_float64": lambda rng: check_chunked(
        rng, dataclasses.replace(KDA, heads=32, key_heads=32)
    ),
    "a_long_kimi_linear_prompt_is_that_of_xla": lambda rng: check_long(
        rng, dataclasses.replace(KDA, heads=32, key_heads=32), 9000
    ),
    "a_gated_linear_attention_prompt_is_that_of_float64": lambda rng: check_chunked(rng, GLA),
    "a_prompt_without_a_decay_is_that_of_float64": lambda rng: check_chunked(rng, LINEAR),
    "a_prompt_leaves_the_memory_that_xla_leaves": lambda rng: check_prefill(rng, QWEN),
    "a_mamba_2_prompt_leaves_the_memory_that_xla_leaves": lambda rng: check_prefill(rng, MAMBA),
    "a_kimi_delta_attention_prompt_leaves_the_memory_that_xla_leaves": lambda rng: check_prefill(rng, KDA),
    "a_gated_linear_attention_prompt_leaves_the_memory_that_xla_leaves": lambda rng: check_prefill(rng, GLA),
}

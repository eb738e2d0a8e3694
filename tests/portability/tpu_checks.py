"""What must hold on a TPU and can be seen there alone: the kernels give what XLA's path gives, and how long they take.

Functions that raise AssertionError if it does not hold, and return the figures that they looked at. They need no
pytest: `scripts/check_tpu` runs them where there is none.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.models.experts import mixture
from jaxbuf.pallas.dispatch import ask
from jaxbuf.planning.tpu_slices import CHIPS_OF_TPUS
from jaxbuf.recurrence import RecurrenceSpec, buffered
from jaxbuf.recurrence.traffic import buffered_step_bytes
from jaxbuf.target import resolve_target
from tests.gpu import model_checks
from tests.gpu.checks import new_inputs
from tests.portability.operations import FAMILIES

type Figures = dict[str, float]

BOUND = 1e-2  # of outputs in bfloat16, relative to XLA's path
LIMIT, MAX_PENDING = 6, 8
TIMED_ROWS, TIMED_STEPS = 64, 64


def step(spec: RecurrenceSpec, cache: Any, inputs: Any, accepted: int, **how: Any) -> tuple[jax.Array, Any]:
    """One launch of all rows, which keep `accepted` of its tokens."""
    slots = jnp.arange(1, inputs[0].shape[0] + 1, dtype=jnp.int32)
    out, cache = buffered.extend(spec, cache, *inputs, slots=slots, **how)
    return out, buffered.commit(cache, jnp.full(slots.shape, accepted, jnp.int32), slots=slots)


def steps_are_xlas(
    rng: np.random.Generator,
    spec: RecurrenceSpec,
    rows: int = 8,
    *,
    implementation: str = "auto",
    interpret: bool = False,
    state_dtype: str = "float32",
) -> Figures:
    """Launches of one token, of five that are kept in part, and folds between them give the outputs of XLA's path."""
    given = {"limit": LIMIT, "max_pending": MAX_PENDING, "state_dtype": state_dtype}
    found = expected = buffered.init(spec, slots=rows, **given)
    run = jax.jit(step, static_argnums=(0, 3), static_argnames=("implementation", "interpret"))
    worst = 0.0
    for tokens, accepted in ((1, 1), (5, 3), (1, 1), (5, 5), (1, 1), (1, 1), (5, 1), (1, 1), (1, 1)):
        inputs = new_inputs(rng, spec, rows, tokens, jnp.bfloat16)
        out, found = run(spec, found, inputs, accepted, implementation=implementation, interpret=interpret)
        wanted, expected = run(spec, expected, inputs, accepted, implementation="xla")
        out, wanted = (np.asarray(x, np.float64) for x in (out, wanted))
        worst = max(worst, float(np.linalg.norm(out - wanted) / np.linalg.norm(wanted)))
    assert worst <= BOUND, f"outputs differ by {worst}, of {BOUND} that they may"
    return {"worst error": worst}


def step_is_timed(rng: np.random.Generator, spec: RecurrenceSpec, rows: int = TIMED_ROWS) -> Figures:
    """The time of a decoding step of one layer, kernel and XLA's path, and the bandwidth that it comes to."""
    inputs = new_inputs(rng, spec, rows, 1, jnp.bfloat16)
    chip = CHIPS_OF_TPUS[resolve_target(None).generation]
    moved = rows * buffered_step_bytes(spec, 16, entry_dtype=jnp.dtype("bfloat16"))
    figures: Figures = {"megabytes": moved / 1e6}
    for name, implementation in (("kernel", "auto"), ("XLA", "xla")):

        @functools.partial(jax.jit, donate_argnums=0)
        def run(cache, inputs, implementation=implementation):
            def again(_, cache):
                return step(spec, cache, inputs, 1, implementation=implementation)[1]

            return jax.lax.fori_loop(0, TIMED_STEPS, again, cache)

        cache = run(buffered.init(spec, slots=rows, limit=16, max_pending=MAX_PENDING), inputs)
        jax.block_until_ready(cache)
        times = []
        for _ in range(5):
            began = time.perf_counter()
            cache = jax.block_until_ready(run(cache, inputs))
            times.append((time.perf_counter() - began) / TIMED_STEPS)
        figures[f"{name} us"] = 1e6 * min(times)
        figures[f"{name} share of the bandwidth"] = moved / min(times) / (chip.bandwidth / chip.devices)
    return figures


def experts_are_xlas(
    rng: np.random.Generator, tokens: tuple[int, ...] = (1, 32, 300), *, implementation: str = "auto", interpret=False
) -> Figures:
    """Mixtures of some of 16 experts, of few tokens and of many, are those of XLA's path."""
    first, second = (
        jnp.asarray(rng.standard_normal((16, *shape)) * shape[-1] ** -0.5, jnp.bfloat16)
        for shape in ((512, 512), (512, 256))
    )
    worst = 0.0
    for number in tokens:
        x = jnp.asarray(rng.standard_normal((number, 512)), jnp.bfloat16)
        chosen = jnp.asarray(np.argsort(rng.random((number, 16)), axis=1)[:, :4], jnp.int32)
        arrays = x, first, second, chosen, jnp.asarray(rng.dirichlet(np.ones(4), number), jnp.float32)
        out = np.asarray(mixture(*arrays, implementation=implementation, interpret=interpret), np.float64)
        wanted = np.asarray(mixture(*arrays, implementation="xla"), np.float64)
        worst = max(worst, float(np.linalg.norm(out - wanted) / np.linalg.norm(wanted)))
    assert worst <= BOUND, f"mixtures differ by {worst}, of {BOUND} that they may"
    return {"worst error": worst}


def has_kernel(operation: str) -> Figures:
    """The dispatcher takes this chip for one that the operation's kernel is written for."""
    assert ask(operation, "auto") is not None, f"{operation} has no kernel for {resolve_target(None)}"
    return {"kernels": 1.0}


def named(family: str) -> str:
    """A family's name as part of a check's."""
    return "".join(letter if letter.isalnum() else "_" for letter in family.lower()).strip("_").replace("__", "_")


CHECKS: dict[str, Callable[[np.random.Generator], Figures]] = {
    "extend_has_a_kernel_for_this_chip": lambda rng: has_kernel("extend"),
    **{
        f"a_step_is_xlas_of_{named(family)}": lambda rng, spec=spec: steps_are_xlas(rng, spec)
        for family, spec in FAMILIES.items()
    },
    "a_step_is_xlas_with_a_split_checkpoint": lambda rng: steps_are_xlas(
        rng, FAMILIES["Gated DeltaNet (Qwen3.5-4B)"], state_dtype="split"
    ),
    "experts_are_xlas": experts_are_xlas,
    **{name: check for name, check in model_checks.CHECKS.items() if "pool_sized" not in name},
    **{
        f"time_of_a_step_of_{named(family)}": lambda rng, spec=spec: step_is_timed(rng, spec)
        for family, spec in FAMILIES.items()
        if "one_of_8" not in named(family)
    },
}

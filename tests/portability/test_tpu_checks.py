"""The checks that strangers run on their TPUs run here in Pallas' interpreter, and see a mistake."""

import jax
import numpy as np
import pytest

from jaxbuf.pallas.dispatch import KERNELS
from jaxbuf.recurrence import RecurrenceSpec, buffered
from tests.portability import tpu_checks

SMALL = RecurrenceSpec(heads=4, key_heads=2, key_dim=128, value_dim=128)


@pytest.mark.parametrize("implementation", ["xla", *(["tpu"] if "tpu" in KERNELS["extend"] else [])])
def test_steps_are_compared_with_xlas(rng, implementation):
    figures = tpu_checks.steps_are_xlas(rng, SMALL, 2, implementation=implementation, interpret=implementation == "tpu")
    assert 0 <= figures["worst error"] <= tpu_checks.BOUND


def test_experts_are_compared_with_xlas(rng, monkeypatch):
    how = {"implementation": "tpu", "interpret": True}
    assert 0 <= tpu_checks.experts_are_xlas(rng, (1, 32), **how)["worst error"] <= tpu_checks.BOUND
    plain = tpu_checks.mixture
    monkeypatch.setattr(
        tpu_checks, "mixture", lambda *arrays, **how: plain(*arrays, **how) * (1 + (how["implementation"] == "tpu") / 9)
    )
    with pytest.raises(AssertionError, match="mixtures differ by"):
        tpu_checks.experts_are_xlas(rng, (1,), **how)


def test_a_step_that_differs_is_seen(rng, monkeypatch):
    extend = buffered.extend

    def off(spec, cache, *inputs, implementation, **how):
        out, cache = extend(spec, cache, *inputs, implementation="xla", **how)
        return out * (1 if implementation == "xla" else 1 + 2 * tpu_checks.BOUND), cache

    monkeypatch.setattr(buffered, "extend", off)
    jax.clear_caches()
    with pytest.raises(AssertionError, match="outputs differ by"):
        tpu_checks.steps_are_xlas(rng, SMALL, 2)


def test_a_kernel_that_is_not_there_is_seen():
    with pytest.raises(AssertionError, match="extend has no kernel for a CPU"):
        tpu_checks.has_kernel("extend")


def test_the_names_of_checks_say_what_they_run():
    names = list(tpu_checks.CHECKS)
    assert "a_step_is_xlas_of_kimi_delta_attention_kimi_linear" in names
    assert "time_of_a_step_of_gated_deltanet_qwen3_5_4b" in names
    assert "a_random_qwen3_5_4b_generates_as_without_kernels" in names and len(names) > 30
    assert np.all([name.isidentifier() for name in names])

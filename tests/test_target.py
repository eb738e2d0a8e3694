"""Programs are traced for a TPU that is not there as they are on one."""

import jax
import jax.numpy as jnp
import pytest

from jaxbuf.target import CHIPS, TPU_DEVICES, Target, lowering_for, resolve_target

TPUS = [target for target in CHIPS.values() if target.platform == "tpu"]


@pytest.mark.parametrize("target", TPUS, ids=str)
def test_within_it_the_target_is_what_is_there(target):
    with lowering_for(target):
        assert resolve_target(None) == target
        found = []
        jax.jit(lambda x: found.append(resolve_target(None, x))).trace(jax.ShapeDtypeStruct((2,), jnp.float32))
    assert found == [target] and resolve_target(None) == Target("cpu")


@pytest.mark.parametrize("target", [Target("cpu"), CHIPS["H100"], Target("tpu", "v9")], ids=str)
def test_elsewhere_it_changes_nothing(target):
    with lowering_for(target):
        assert resolve_target(None) == Target("cpu")


def test_every_generation_has_a_device():
    assert list(TPU_DEVICES) == [target.generation for target in TPUS]

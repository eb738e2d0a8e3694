"""What the compiled decode loop does: asserted from its HLO."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.recurrence.pool import extend_pool, fold_pool
from jaxbuf.serving import SamplingParams, generate_tokens, request, start
from tests.serving.program import loop_bodies, written_in_loops


@pytest.fixture(scope="module")
def carry(lm):
    checked = request.check(lm, [[1] * 30] * 8, 40, SamplingParams(temperature=0.5), 16, "auto", None)
    return jax.eval_shape(lambda model: start(model, **checked.arguments), lm.model)


def hlo(function, lm, carry):
    compiled = jax.jit(function, donate_argnums=1).lower(lm.model, carry, np.int32(9)).compile()
    return compiled.as_text()


@pytest.fixture(scope="module")
def decode_loop(lm, carry):
    return hlo(generate_tokens.__wrapped__, lm, carry)


def test_no_step_writes_a_checkpoint_unless_a_slot_folds(lm, decode_loop):
    assert written_in_loops(decode_loop, lm.config.spec.state_shape) == []


def test_the_same_check_flags_a_fold_that_selects(lm, carry, monkeypatch):
    """A fold by jnp.where computes and writes every checkpoint in every step."""

    def selecting(spec, pool, step, *inputs):
        folded = fold_pool(spec, pool, step.before, step.fold_to)
        pool = dataclasses.replace(pool, checkpoints=jnp.where(step.any_fold, folded, pool.checkpoints))
        return extend_pool(spec, pool, dataclasses.replace(step, any_fold=jnp.array(False)), *inputs)

    monkeypatch.setattr("jaxbuf.recurrence.buffered.extend_pool", selecting)

    def fresh(model, carry, steps):
        return generate_tokens.__wrapped__(model, carry, steps)

    assert written_in_loops(hlo(fresh, lm, carry), lm.config.spec.state_shape)


def test_the_loop_never_talks_to_the_host(decode_loop):
    assert loop_bodies(decode_loop)
    for word in ("infeed", "outfeed", "send(", "recv(", "callback", "host_"):
        assert word not in decode_loop, word


def test_every_byte_of_the_carry_is_reused(lm, carry, decode_loop):
    """All carry arrays are aliased to outputs: the donated memory is the memory of the result."""
    header = decode_loop.splitlines()[0]
    aliased = header.count("may-alias") + header.count("must-alias")
    assert aliased == len(jax.tree.leaves(carry))

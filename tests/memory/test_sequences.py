"""What a launch checks of the slots that it reads into."""

import jax.numpy as jnp
import pytest

from jaxbuf.memory.sequences import make_launch


def test_slots_that_should_be_empty_are_checked():
    positions = jnp.array([0, 3, 0], jnp.int32)

    def launch(slot):
        lengths = jnp.array([2], jnp.int32)
        return make_launch(positions, 4, jnp.array([slot], jnp.int32), lengths, 2, keep=0, empty=True)

    assert launch(2).start.tolist() == [0]
    with pytest.raises(ValueError, match="an empty slot committed must be in"):
        launch(1)

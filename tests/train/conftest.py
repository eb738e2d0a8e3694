import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """A training step on tiny shapes takes far longer to optimise than to run."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)

"""A trace's times are those of its operations, each in the scope that it came from."""

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

import jaxbuf
from jaxbuf.cli import app
from jaxbuf.serving import profiling


@pytest.fixture(scope="module")
def profiled(lm, tmp_path_factory):
    directory = tmp_path_factory.mktemp("profile")
    jaxbuf.generate(lm, [[1, 2, 3]], 8, profile=directory)
    return directory


def test_every_part_of_the_model_is_in_the_profile_of_a_generation(profiled):
    rows = profiling.time_by_scope(profiled)
    parts = {row.scope for row in rows if row.program == "generate_tokens"}
    assert {"projections", "convolution", "recurrence", "attention", "output", "mlp", "head", "sample"} <= parts
    assert {row.program for row in rows} >= {"start", "generate_tokens"}
    assert all(row.seconds > 0 and row.operations > 0 for row in rows)
    assert [row.seconds for row in rows] == sorted((row.seconds for row in rows), reverse=True)


def test_the_command_prints_the_same_times(profiled):
    done = CliRunner().invoke(app, ["profile", str(profiled)])
    assert done.exit_code == 0
    for row in profiling.time_by_scope(profiled):
        line = next(line for line in done.stdout.splitlines() if row.program in line and row.scope in line)
        assert f"{1e3 * row.seconds:.3f}" in line and str(row.operations) in line


def test_the_matrix_product_of_a_scope_is_counted_there_and_nowhere_else(tmp_path):
    """Products of single rows are those whose names XLA drops."""

    @jax.jit
    def two_products(x, small, large):
        with jax.named_scope("head"):
            x = jnp.einsum("...i,oi->...o", x, small)
        with jax.named_scope("mlp"):
            return jnp.tanh(jnp.einsum("...i,oi->...o", x, large))

    x, small, large = jnp.ones((1, 1, 1024)), jnp.ones((1024, 1024)), jnp.ones((8192, 1024))
    two_products(x, small, large).block_until_ready()
    with profiling.trace(tmp_path):
        for _ in range(3):
            two_products(x, small, large).block_until_ready()
    rows = {row.scope: row for row in profiling.time_by_scope(tmp_path) if row.program == "two_products"}
    seconds = {scope: row.seconds for scope, row in rows.items()}
    assert seconds["head"] + seconds["mlp"] > 0.9 * sum(seconds.values())
    assert seconds["mlp"] > 2 * seconds["head"] > 0


def test_no_directory_means_no_trace():
    with profiling.trace(None), pytest.raises(RuntimeError, match="No profile"):
        jax.profiler.stop_trace()


def test_a_directory_that_cannot_be_is_an_error_that_names_the_argument(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="profile must be a directory"), profiling.trace(tmp_path / "file" / "trace"):
        pass


def test_a_directory_without_a_trace_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        profiling.time_by_scope(tmp_path)

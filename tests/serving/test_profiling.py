"""A trace's times are those of its operations, each in the scope that it came from."""

import collections

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

import jaxbuf
from jaxbuf.cli import app
from jaxbuf.recurrence import RecurrenceSpec, buffered
from jaxbuf.serving import profiling

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def profiled(lm, tmp_path_factory):
    directory = tmp_path_factory.mktemp("profile")
    jaxbuf.generate(lm, [[1, 2, 3]], 8, profile=directory)
    return directory


@pytest.mark.slow
def test_every_part_of_the_model_is_in_the_profile_of_a_generation(profiled):
    rows = profiling.time_by_scope(profiled)
    parts = {row.scope for row in rows if row.program == "generate_tokens"}
    assert {"projections", "convolution", "recurrence", "attention", "output", "mlp", "head", "sample"} <= parts
    assert {row.program for row in rows} >= {"begin_prompts", "read_layer", "end_prompts", "generate_tokens"}
    assert all(row.seconds > 0 and row.operations > 0 for row in rows)
    assert [row.seconds for row in rows] == sorted((row.seconds for row in rows), reverse=True)


def test_nothing_is_compiled_while_a_generation_is_traced(profiled):
    (file,) = profiled.rglob("*.xplane.pb")
    found = {
        event.name
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes
        for line in plane.lines
        for event in line.events
    }
    assert any("Execute" in name for name in found) and not any("Compil" in name for name in found)


@pytest.mark.slow
def test_the_command_prints_the_same_times(profiled):
    done = CliRunner().invoke(app, ["profile", str(profiled)])
    assert done.exit_code == 0
    for row in profiling.time_by_scope(profiled):
        line = next(line for line in done.stdout.splitlines() if row.program in line and row.scope in line)
        assert f"{1e3 * row.seconds:.3f}" in line and str(row.operations) in line
        if row.scope == "other":
            longest = f"{row.program}, longest in other: {row.longest[0][0]} {1e3 * row.longest[0][1]:.3f} ms"
            assert any(line.startswith(longest) for line in done.stdout.splitlines())


@pytest.mark.slow
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
        for _ in range(10):
            two_products(x, small, large).block_until_ready()
    runs, read = {}, {}
    for each in profiling.operations(tmp_path):
        if each.program == "two_products":
            runs.setdefault((each.scope, each.name), []).append(each.seconds)
            if each.multiplies:
                read.setdefault(each.scope, set()).update(each.reads)
    # Of each operation the shortest run: whatever else the machine does lengthens some of them, and hardly all.
    seconds, whole = collections.Counter(), collections.Counter()
    for (scope, _), times in runs.items():
        assert len(times) == 10
        seconds[scope] += min(times)
        whole[scope] += sum(times)
    rows = [row for row in profiling.time_by_scope(tmp_path) if row.program == "two_products"]
    assert {row.scope: row.seconds for row in rows} == pytest.approx(dict(whole))
    assert seconds["head"] + seconds["mlp"] > 0.9 * sum(seconds.values())
    assert seconds["mlp"] > 2 * seconds["head"] > 0
    assert small.shape in read["head"] and large.shape in read["mlp"]


@pytest.mark.parametrize(
    ("operation", "name", "scope"),
    [
        ("loop_fusion.1", "loop_fusion.1", "mlp"),  # a CPU's events are called like their operations
        ("while.2", "while.2", None),
        ("while.2", "MemcpyD2H", "other"),  # the copy of a loop's condition
        ("gemm-fusion.3", "nvjet_tst_64x8", "head"),  # a library's kernel
        ("command_buffer_7", "gemm_fusion_3", "head"),
        ("command_buffer_7", "memcpy32_post", "other"),
        ("thunk.9", "thunk.9", "other"),
    ],
)
def test_kernels_of_a_cuda_graph_are_placed_by_their_names(operation, name, scope):
    scopes = {"loop_fusion.1": "mlp", "loop_fusion_1": "mlp", "while.2": None, "gemm-fusion.3": "head"}
    assert profiling._place(scopes | {"gemm_fusion_3": "head"}, operation, name) == scope


def test_a_program_from_a_compilation_cache_is_in_its_scopes(tmp_path):
    """Its events have the id that it had when it was compiled, where the trace describes it under another."""

    def program():
        @jax.jit
        def scoped_sine(x):
            with jax.named_scope("recurrence"):
                return jnp.sin(x) @ x

        return scoped_sine

    x = jnp.ones((64, 64))
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    try:
        program()(x)
        from_cache = program()
        from_cache(x).block_until_ready()
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
    with profiling.trace(tmp_path):
        from_cache(x).block_until_ready()
    assert {row.scope for row in profiling.time_by_scope(tmp_path) if row.program == "scoped_sine"} == {"recurrence"}


def test_of_programs_of_one_name_the_one_whose_operations_ran_is_taken():
    programs = {"jit_f(1)": {"dot.1": "mlp"}, "jit_f(2)": {"dot.1": "head", "add": "head"}, "jit_g(3)": {"add": "mlp"}}
    assert profiling._scopes_of("jit_f(1)", {"dot.1"}, programs) == programs["jit_f(1)"]
    assert profiling._scopes_of("jit_f(2)", {"dot.1"}, programs) == programs["jit_f(2)"]
    assert profiling._scopes_of("jit_f(1)", {"dot.1", "add"}, programs) == programs["jit_f(2)"]
    assert profiling._scopes_of("jit_h(1)", {"add"}, programs) == {}


def test_a_pallas_kernel_is_placed_by_the_name_of_its_function():
    """In a CUDA graph its event has nothing else; the program is lowered for a GPU, and none is needed."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def double(x, out):
        out[...] = x[...] + x[...]

    @jax.jit
    def program(x):
        with jax.named_scope("recurrence"):
            kernel = plgpu.kernel(double, out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
            return kernel(jnp.cos(x))

    lowered = program.trace(jax.ShapeDtypeStruct((128,), jnp.float32)).lower(lowering_platforms=("cuda",))
    module = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    scopes = profiling._scopes(profiling._parsed("HloModuleProto", module))
    assert profiling._place(scopes, "command_buffer_7", "double_mosaic_gpu_kernel") == "recurrence"
    assert profiling._place(scopes, "command_buffer_7", "stable_mosaic_gpu_kernel") == "other"


def test_what_an_operation_reads_has_the_shape_that_it_was_made_with_and_the_one_that_it_is_read_with():
    def program(x, matrix):
        return jnp.sum(matrix.reshape(6, 2, 4) * x.reshape(2, 4)[None], axis=2), matrix @ x

    lowered = jax.jit(program).lower(jnp.ones(8), jnp.ones((6, 8)))
    module = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    works = profiling._works(profiling._parsed("HloModuleProto", module))
    (product,) = {work for work in works.values() if work.multiplies}  # under its name, and its kernel's
    assert product.reads == product.sources == ((6, 8), (8,))
    (elementwise,) = {work for work in works.values() if work.reads == ((6, 2, 4), (6, 2, 4))}
    assert not elementwise.multiplies and elementwise.sources[0] == (6, 8)


@pytest.mark.slow
def test_the_operations_of_a_profile_are_those_of_its_scopes(profiled):
    ran = profiling.operations(profiled)
    for row in profiling.time_by_scope(profiled):
        found = [each.seconds for each in ran if (each.program, each.scope) == (row.program, row.scope)]
        assert len(found) == row.operations and sum(found) == pytest.approx(row.seconds)


@pytest.mark.slow
def test_the_recurrence_called_by_hand_is_in_its_scope(tmp_path):
    spec = RecurrenceSpec(heads=2, key_heads=1, key_dim=4, value_dim=4)
    cache = buffered.init(spec, slots=1, limit=2)
    q, v, g = jnp.ones((1, 1, 1, 4)), jnp.ones((1, 1, 2, 4)), jnp.zeros((1, 1, 2))
    slots = jnp.ones(1, jnp.int32)
    step = jax.jit(lambda cache: buffered.extend(spec, cache, q, q, v, g, g, slots=slots))
    step(cache)
    with profiling.trace(tmp_path):
        jax.block_until_ready(step(cache))
    assert "recurrence" in {row.scope for row in profiling.time_by_scope(tmp_path)}


def test_no_directory_means_no_trace():
    with profiling.trace(None), pytest.raises(RuntimeError, match="No profile"):
        jax.profiler.stop_trace()


def test_a_directory_that_cannot_be_is_an_error_that_names_the_argument(lm, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="profile must be a directory"), profiling.trace(tmp_path / "file" / "trace"):
        pass
    with pytest.raises(ValueError, match="profile must be a directory"):
        jaxbuf.generate(lm, [[1, 2, 3]], 8, stream=True, profile=tmp_path / "file")


def test_a_directory_without_a_trace_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        profiling.time_by_scope(tmp_path)

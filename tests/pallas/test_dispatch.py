"""The table of kernels names what is there, and what a program is compiled for decides which of them it takes."""

import importlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.pallas.dispatch import KERNELS, Asked, ask, told
from jaxbuf.recurrence import RecurrenceSpec, buffered, prepare
from jaxbuf.recurrence.convolution import init_ring
from jaxbuf.recurrence.gated_norm import gated_norm
from jaxbuf.target import CHIPS, Target, as_target, device_target, resolve_target

SPEC = RecurrenceSpec(heads=4, key_heads=4, key_dim=128, value_dim=128)
ROWS = 2


def zeros(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def extend_text(**how):
    cache = jax.eval_shape(lambda: buffered.init(SPEC, slots=ROWS))
    keys, values, gates = zeros(ROWS, 1, 4, 128), zeros(ROWS, 1, 4, 128), zeros(ROWS, 1, 4)
    slots = jnp.arange(1, ROWS + 1)
    run = jax.jit(lambda cache, *inputs: buffered.extend(SPEC, cache, *inputs, slots=slots, **how))
    return run.trace(cache, keys, keys, values, gates, gates)


def prepare_text(**how):
    channels = 3 * 4 * 128
    ring = jax.eval_shape(lambda: init_ring(slots=ROWS, max_pending=8, channels=channels, width=4, dtype=jnp.float32))
    weights = prepare.Weights(zeros(channels, 4), zeros(4), zeros(4))
    where = {"slots": np.arange(1, ROWS + 1), "start": np.zeros(ROWS, int), "lengths": np.ones(ROWS, int)}
    run = jax.jit(lambda ring, weights, *inputs: prepare.prepare(SPEC, weights, ring, *inputs, **where, **how))
    return run.trace(ring, weights, zeros(ROWS, 1, channels), zeros(ROWS, 1, 4), zeros(ROWS, 1, 4))


def norm_text(**how):
    run = jax.jit(lambda *inputs: gated_norm(*inputs, eps=1e-6, **how))
    return run.trace(zeros(ROWS, 1, 2, 128), zeros(ROWS, 1, 256), zeros(128))


TRACED = {"extend": extend_text, "prepare": prepare_text, "gated_norm": norm_text}


def kernels(traced, platform="cuda"):
    return traced.lower(lowering_platforms=(platform,)).as_text().count("@mosaic_gpu")


@pytest.mark.parametrize("operation", KERNELS)
def test_every_kernel_is_where_the_table_says_and_says_what_it_needs(operation):
    for platform, kernel in KERNELS[operation].items():
        package = importlib.import_module(kernel.package)
        assert package.Call and package.supports and importlib.import_module(f"{kernel.package}.{platform}")
        for generation in kernel.generations:
            target = Target(platform, generation)
            assert target in CHIPS.values()
            named, found = ask(operation, platform, target), ask(operation, "auto", target)
            assert named == Asked(operation, platform, named=True, interpret=False, generation=generation)
            assert found == Asked(operation, platform, named=False, interpret=False, generation=generation)
            assert ask(operation, "auto", target.without_kernels()) is None
            assert ask(operation, platform, target.without_kernels()) == named
        if kernel.library is None:
            assert ask(operation, platform, "cpu", interpret=True) == Asked(operation, platform, True, True)
            continue
        with pytest.raises(ValueError, match=f"its kernel is {kernel.library}'s, which Pallas' interpreter can not"):
            ask(operation, platform, "cpu", interpret=True)


@pytest.mark.parametrize("operation", KERNELS)
def test_an_operation_says_what_it_has_no_kernel_for(operation):
    assert ask(operation, "xla", "H100") is None
    served = [generation for kernel in KERNELS[operation].values() for generation in kernel.generations]
    for chip in ("cpu", "A100", "B200", "v6e"):
        if as_target(chip).generation in served:
            continue
        assert ask(operation, "auto", chip) is None
        if "gpu" in KERNELS[operation]:
            words = rf'implementation="gpu" can not serve this {operation}: its kernel is written for NVIDIA '
            with pytest.raises(ValueError, match=words) as caught:
                ask(operation, "gpu", chip)
            assert str(caught.value).endswith(f"and the target is {CHIPS.get(chip, CHIPS['CPU'])}")
    for platform in {"gpu", "tpu"}.difference(KERNELS[operation]):
        words = f'implementation="{platform}" has no kernel for {operation} yet, expected "auto"'
        with pytest.raises(ValueError, match=words):
            ask(operation, platform, "v6e")
    with pytest.raises(ValueError, match=r'implementation must be one of "auto", "xla".*, got \'fast\''):
        ask(operation, "fast")
    with pytest.raises(ValueError, match=r"target must be a Target or one of CPU, A100.*, got 'H900'"):
        ask(operation, "auto", "H900")


def test_a_call_that_a_kernel_does_not_support_is_xlas_unless_it_was_named():
    asked = ask("extend", "auto", "H100")
    assert asked.takes(None) and not asked.takes("it needs more")
    with pytest.raises(ValueError, match='implementation="gpu" can not serve this extend: it needs more'):
        ask("extend", "gpu", "H100").takes("it needs more")


@pytest.mark.slow
@pytest.mark.parametrize("operation", TRACED)
def test_a_cpu_compiles_for_other_chips(operation):
    """And one function for two chips in one process is two programs."""
    traced = TRACED[operation]
    assert jax.default_backend() == "cpu"
    for how in ({"target": "H100"}, {"target": "H200", "implementation": "gpu"}):
        assert kernels(traced(**how)) == 1, how
    for how in ({}, {"target": "cpu"}, {"target": "A100"}, {"target": "H100", "implementation": "xla"}):
        assert kernels(traced(**how)) == 0, how
    for chip in ("A100", "v6e", "cpu"):
        with pytest.raises(ValueError, match=f"its kernel is written for NVIDIA Hopper .* target is {as_target(chip)}"):
            traced(target=chip, implementation="gpu")


def test_the_devices_decide_where_nobody_says():
    """Of the arrays, then of the mesh in use, then JAX's default device."""
    hopper = jax.sharding.AbstractMesh(
        (1,), ("tensor",), abstract_device=jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")
    )
    assert resolve_target(None) == resolve_target(None, np.ones(2), jnp.ones(2)) == Target("cpu")
    assert resolve_target("h200", jnp.ones(2)) == Target("gpu", "Hopper")
    sharded = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=jax.NamedSharding(hopper, jax.P()))
    assert resolve_target(None, sharded) == Target("gpu", "Hopper")
    with jax.sharding.use_abstract_mesh(hopper):
        assert resolve_target(None) == Target("gpu", "Hopper")
        found = []
        jax.jit(lambda x: found.append(resolve_target(None, x))).trace(zeros(2))
        assert found == [Target("gpu", "Hopper")]


@pytest.mark.parametrize(
    "platform, kind, capability, expected",
    [
        ("gpu", "NVIDIA H200", "9.0", CHIPS["H200"]),
        ("gpu", "NVIDIA A100-SXM4-80GB", "8.0", CHIPS["A100"]),
        ("gpu", "NVIDIA L40S", "8.9", CHIPS["L40S"]),
        ("gpu", "NVIDIA B200", "10.0", CHIPS["B200"]),
        ("gpu", "AMD Instinct MI300X", "gfx942", Target("gpu", "gfx942")),
        ("cuda", "NVIDIA GH200 480GB", None, CHIPS["GH200"]),
        ("tpu", "TPU v5 lite", None, CHIPS["v5e"]),
        ("tpu", "TPU v5", None, CHIPS["v5p"]),
        ("tpu", "TPU v6 lite", None, CHIPS["v6e"]),
        ("tpu", "TPU7x", None, CHIPS["tpu7x"]),
        ("tpu", "TPU v4", None, CHIPS["v4"]),
        ("cpu", "cpu", None, CHIPS["CPU"]),
    ],
)
def test_a_device_is_known_by_what_jax_says_of_it(platform, kind, capability, expected):
    known = {} if capability is None else {"compute_capability": capability}
    assert device_target(types.SimpleNamespace(platform=platform, device_kind=kind, **known)) == expected


def test_users_of_other_chips_are_told_what_xla_compiles_there():
    assert told(CHIPS["CPU"]) is None and told(CHIPS["H200"]) is None
    hopper = KERNELS["extend"]["gpu"].chips
    for chip, words in (
        ("A100", "most is compiled by XLA on an NVIDIA Ampere GPU: "),
        ("B200", "most is compiled by XLA on an NVIDIA Blackwell GPU: "),
        ("v6e", "some of it is compiled by XLA on a TPU v6e: there is no kernel for "),
    ):
        found = told(CHIPS[chip])
        assert found.startswith(words)
        for operation, kernels in KERNELS.items():
            is_left_out = bool(kernels) and all(CHIPS[chip].generation not in x.generations for x in kernels.values())
            assert (operation in found.removeprefix(words).replace(";", ",").replace(" have", ",").split(", ")) == (
                is_left_out and ("gpu" in kernels or chip == "v6e")
            )
        assert chip == "v6e" or f"have kernels for {hopper} alone" in found
    assert "left out" in told(CHIPS["H100"].without_kernels())

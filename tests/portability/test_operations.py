"""Every operation on every platform: its kernels lower where they say that they serve, and compile for every
generation of TPUs; what they refuse is listed here."""

import pytest

from jaxbuf.pallas.dispatch import KERNELS
from jaxbuf.pallas.tpu_memory import vmem_bytes
from jaxbuf.tpu_compiler import GENERATIONS
from tests.portability.operations import CASES, WITHIN, check_compiled, each_case, reason_against

TARGETS = {"gpu": "H100", "tpu": "v6e"}
# What the kernel of a platform leaves to XLA, and the beginning of its reason. Nothing else may be refused.
LEFT_TO_XLA: dict[tuple[str, str, str], str] = {
    ("prepare", "Gated DeltaNet, one of 8 devices", "gpu"): "it needs key heads in fours, got 2",
    ("prepare", "Kimi Delta Attention (Kimi-Linear), 5 tokens", "tpu"): "it needs a decay for each head",
    ("convolve", "Mamba-2, one of 8 devices", "tpu"): "it needs channels that are a multiple of 128, got 1216",
    ("put_rows", "scales of 128 by 80", "tpu"): "it needs a last axis that is a multiple of 128, got 80",
    ("chunked", "Mamba-2 (Falcon-H1-7B)", "gpu"): "it needs a key_dim of 64 or 128, got 256",
    ("gated_norm", "16 heads of 64", "tpu"): "it needs a value_dim that is a multiple of 128, got 64",
    ("gated_norm", "8 groups of 960 (Nemotron-3-Nano-4B)", "tpu"): "it needs a norm of each head",
    ("gated_norm", "a group of 8192 (Granite-4.0-H-Small)", "tpu"): "it needs a norm of each head",
}
LOWERED = [
    pytest.param(operation, family, platform, marks=[] if platform == "tpu" else pytest.mark.slow)
    for operation, family in each_case()
    for platform in KERNELS[operation]
]
# CI compiles these for two or three generations: XLA's part of a prompt's program takes long, `fold` has `extend`'s
# kernel, and v5p and v6e have as much VMEM as v5e, so that kernels have the same blocks.
MOST = "v4", "v5e", "tpu7x"
FEW = {"prefill": ("v5e", "tpu7x"), "fold": ("v4", "v5e"), "chunked": MOST, "attend_gated": MOST}
COMPILED = [
    pytest.param(
        operation,
        family,
        generation,
        marks=() if generation in FEW.get(operation, GENERATIONS) else pytest.mark.exhaustive,
    )
    for operation, family in each_case()
    if "tpu" in KERNELS[operation]
    for generation in GENERATIONS
]


def test_every_operation_has_cases_or_stands_within_one_that_has():
    assert CASES.keys() | WITHIN.keys() == KERNELS.keys() and not CASES.keys() & WITHIN.keys()
    assert set(WITHIN.values()) <= CASES.keys()
    assert {case[:2] for case in LEFT_TO_XLA} <= set(each_case())


@pytest.mark.parametrize(("operation", "family", "platform"), LOWERED)
def test_a_kernel_lowers_at_the_real_sizes_or_says_why_not(operation, family, platform):
    reason = reason_against(operation, family, platform, TARGETS[platform])
    expected = LEFT_TO_XLA.get((operation, family, platform))
    assert (reason is None) == (expected is None), reason
    assert reason is None or reason.startswith(str(expected))


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(("operation", "family", "generation"), COMPILED)
def test_a_kernel_compiles_for_every_generation_of_tpus(operation, family, generation):
    if (operation, family, "tpu") in LEFT_TO_XLA:
        assert reason_against(operation, family, "tpu", generation) is not None
        return
    check_compiled(operation, family, generation, "tpu", vmem_bytes(generation))


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("operation", "family"),
    [(operation, next(iter(families))) for operation, families in CASES.items() if "tpu" not in KERNELS[operation]],
)
def test_xlas_path_compiles_for_tpus_where_there_is_no_kernel(operation, family):
    check_compiled(operation, family, "v5e", "xla", vmem_bytes("v5e"))

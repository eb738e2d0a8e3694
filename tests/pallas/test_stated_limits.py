"""What docs/not_served.rst says that kernels need is what `supports` takes and refuses, on both sides of a limit."""

import dataclasses
import functools
import itertools
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.pallas import (
    add_and_norm,
    attend,
    chunked,
    experts,
    extend,
    flash,
    gated_norm,
    norm_and_rotate,
    prepare,
    project,
    put,
)
from jaxbuf.pallas.add_and_norm.call import Call as NormCall
from jaxbuf.pallas.attend.call import Call as AttendCall
from jaxbuf.pallas.chunked.call import Call as ChunkedCall
from jaxbuf.pallas.dispatch import KERNELS
from jaxbuf.pallas.experts.call import Call as ExpertCall
from jaxbuf.pallas.extend import gpu, gpu_channel_lane, gpu_schedule
from jaxbuf.pallas.flash.call import Call as FlashCall
from jaxbuf.pallas.gated_norm.call import Call as GatedNormCall
from jaxbuf.pallas.norm_and_rotate.call import Call as TurnCall
from jaxbuf.pallas.prepare.call import Call as PrepareCall
from jaxbuf.pallas.prepare.call import Convolution
from jaxbuf.pallas.project.call import Call as ProjectCall
from jaxbuf.pallas.put.call import Call as PutCall

PAGE = Path(__file__).parent.parent.parent / "docs" / "not_served.rst"
BF16, F16, F32 = (np.dtype(dtype) for dtype in (jnp.bfloat16, jnp.float16, jnp.float32))
STEP = extend.Call(
    rows=4, time=1, heads=32, key_heads=16, key_dim=128, value_dim=128, ring=24, max_pending=8,
    state=F32, entry=BF16, probe=BF16, out=BF16,
)  # fmt: skip
CHANNELS = dataclasses.replace(STEP, heads=16, decay="channel")
PAGES = AttendCall(rows=4, time=1, heads=16, kv_heads=4, head_dim=128, page_size=16, max_pages=64, listed=0, dtype=BF16)
LATENTS = dataclasses.replace(PAGES, kv_heads=1, head_dim=576)
SOLVED = ChunkedCall(rows=4, time=64, heads=8, key_heads=8, key_dim=128, value_dim=128, q=BF16, k=BF16, v=BF16)
CONVOLVED = Convolution(rows=4, time=1, channels=1280, width=4, ring=24, dtype=BF16, stored=BF16, tree=False)
PREPARED = PrepareCall(
    **dataclasses.asdict(dataclasses.replace(CONVOLVED, channels=64 * 128)),
    **{"heads": 32, "key_heads": 16, "key_dim": 128, "value_dim": 128, "eps": 1e-6},
)
PUT = PutCall(pool=(9, 2, 128), rows=4, stored=BF16, dtype=BF16)
NORMED = GatedNormCall(32, 128, 1e-6, BF16, BF16)
GROUPS = GatedNormCall(32, 960, 1e-6, BF16, BF16, groups=8, form="gated")
EXPERTS = ExpertCall(8, 128, 128, 4, BF16)
CHUNK = FlashCall(rows=4, time=64, keys=64, heads=8, kv_heads=4, head_dim=128, dtype=BF16, generation="Hopper")
AMPERE = dataclasses.replace(CHUNK, generation="Ampere")


def step(call):
    return extend.supports(call)


def step_on_tpu(call):
    return extend.supports(call, platform="tpu", generation="v6e")


def paged(call):
    return attend.supports(call, q=call.dtype, k=call.dtype, v=call.dtype)


def paged_on_tpu(call):
    return attend.supports(call, q=call.dtype, k=call.dtype, v=call.dtype, platform="tpu", generation="v6e")


def latent(call, rank=512):
    return attend.supports(call, q=call.dtype, k=call.dtype, v=call.dtype, rank=rank)


def prepared(call, **changes):
    return prepare.supports(dataclasses.replace(call, **changes))


def prepared_on_tpu(call):
    return prepare.supports(call, platform="tpu", generation="v6e")


def convolved(call):
    return prepare.convolution_reason(call)


def convolved_on_tpu(call):
    return prepare.convolution_reason(call, platform="tpu", generation="v6e")


def prompt_on_gpu(call):
    return chunked.supports(call, platform="gpu")


def chunk(call):
    return flash.supports(call, k=call.dtype, v=call.dtype)


def norm_on_tpu(call):
    return gated_norm.supports(call, platform="tpu")


def experts_on_tpu(call):
    return experts.supports(call, platform="tpu")


# A row of the page's table, words in it; a call, one of its fields, values of it that are served, and that are not.
TURNED = TurnCall(1, 16, 4, 128, 256, 32, BF16)
LIMITS = [
    ("extend", "key_dim 64, 128 or 256", step, STEP, "key_dim", [64, 128, 256], [32, 192, 512]),
    ("extend", "value_dim 64, or more if the values of a key head are a multiple of 64", step, STEP, "value_dim",
     [64, 96, 128, 160, 256], [48, 80]),
    ("extend", "value_dim 64, or more if the values of a key head are a multiple of 64", step,
     dataclasses.replace(STEP, key_dim=256), "value_dim", [64, 96, 128, 160, 256], [48, 80]),
    ("extend", "128 for a decay a key channel", step, CHANNELS, "key_dim", [128], [64, 256]),
    ("extend", "the high half of a split one", step, dataclasses.replace(STEP, state=BF16), "low", [None, BF16], []),
    ("extend", "the high half of a split one", step, dataclasses.replace(CHANNELS, state=BF16), "low",
     [None, BF16, np.dtype(np.int8)], []),
    ("extend", "1 to 16 tokens at once", step, STEP, "time", [1, 16], [0, 17]),
    ("extend", "a ring of at most 1,024 entries", step, STEP, "ring", [1024], [1025]),
    ("extend", "a float32 or bfloat16 checkpoint", step, STEP, "state", [F32, BF16], [F16]),
    ("extend", "1 to 16 tokens at once", step_on_tpu, STEP, "time", [1, 16], [17]),
    ("extend", "float32 or bfloat16 checkpoints, entries and values", step_on_tpu, STEP, "entry", [F32, BF16], [F16]),
    ("prepare", "key heads in fours", prepared, PREPARED, "key_heads", [4, 16], [2]),
    ("prepare", "1 to 16 tokens at once", prepared, PREPARED, "time", [1, 16], [17]),
    ("prepare", "a decay for each head or key channel", prepared, PREPARED, "decay", ["head", "channel"], []),
    ("prepare", "a decay for each head, key_dim", prepared_on_tpu, PREPARED, "decay", ["head"], ["channel"]),
    ("prepare", "key_dim and value_dim 128, 1 to 16 tokens", prepared_on_tpu, PREPARED, "key_dim", [128], [64]),
    ("prepare", "key_dim and value_dim 128, 1 to 16 tokens", prepared_on_tpu, PREPARED, "time", [1, 16], [17]),
    ("prepare", "sequences and trees", prepared_on_tpu, PREPARED, "tree", [False, True], []),
    ("prepare", "sequences and trees", prepared, PREPARED, "tree", [False, True], []),
    ("convolve", "at least 128 channels", convolved, CONVOLVED, "channels", [128, 1216, 202], [127]),
    ("convolve", "of width 2 to 4", convolved, CONVOLVED, "width", [2, 3, 4], [5]),
    ("convolve", "1 to 16 tokens at once", convolved, CONVOLVED, "time", [1, 16], [0, 17]),
    ("convolve", "sequences and trees", convolved, CONVOLVED, "tree", [False, True], []),
    ("convolve", "float32 or bfloat16", convolved, dataclasses.replace(CONVOLVED, stored=F32), "dtype", [F32], [F16]),
    ("convolve", "channels in multiples of 128", convolved_on_tpu, CONVOLVED, "channels", [128, 1280], [64, 1216]),
    ("convolve", "1 to 16 tokens at once", convolved_on_tpu, CONVOLVED, "time", [1, 16], [17]),
    ("convolve", "float32 or bfloat16", convolved_on_tpu, dataclasses.replace(CONVOLVED, stored=F32), "dtype", [F32],
     [F16]),
    ("put_rows", "in multiples of 128 (``key_dim``)", put.supports, PUT, "pool", [(9, 2, 128)], [(9, 2, 64)]),
    ("prefill", "key_dim a multiple of 64", chunked.supports, SOLVED, "key_dim", [64, 128], [96]),
    ("prefill", "value_dim of 16", chunked.supports, SOLVED, "value_dim", [64, 80], [72]),
    ("prefill", "key_dim 64 or 128", prompt_on_gpu, SOLVED, "key_dim", [64, 128], [96, 256]),
    ("prefill", "128 for a decay a key channel", prompt_on_gpu, dataclasses.replace(SOLVED, decay="channel"), "key_dim",
     [128], [64]),
    ("prefill", "value_dim a multiple of 16", prompt_on_gpu, SOLVED, "value_dim", [64, 80], [72]),
    ("prefill", "a decay for each head or key channel or", prompt_on_gpu, SOLVED, "decay", ["head", "channel"],
     ["none"]),
    ("prefill", "without the delta rule, none", prompt_on_gpu, dataclasses.replace(SOLVED, delta=False), "decay",
     ["none"], []),
    ("prefill", "q, k and v in bfloat16", prompt_on_gpu, SOLVED, "q", [BF16], [F32, F16]),
    ("gated_norm", "multiples of 16 up to 256, of 64 up to 1,024 and of 512 up to 8,192", gated_norm.supports, NORMED,
     "dim", [64, 80, 128, 256, 960, 1024, 3072, 8192], [72, 336, 1088, 8704]),
    ("gated_norm", "at least 4 of them, or up to 16 where 64 does not divide", gated_norm.supports, NORMED, "vectors",
     [4, 5], [3]),
    ("gated_norm", "at least 4 of them, or up to 16 where 64 does not divide", gated_norm.supports,
     dataclasses.replace(NORMED, dim=80), "vectors", [16, 17], [15]),
    ("gated_norm", "groups in fours, or one, where 512 does not", gated_norm.supports, GROUPS, "groups", [1, 4, 8],
     [2]),
    ("gated_norm", "groups in fours, or one, where 512 does not", gated_norm.supports,
     dataclasses.replace(GROUPS, dim=1024), "groups", [2], []),
    ("gated_norm", "float32 or bfloat16", gated_norm.supports, NORMED, "out", [F32, BF16], [F16]),
    ("gated_norm", "a multiple of 128", norm_on_tpu, NORMED, "dim", [128, 256], [64]),
    ("gated_norm", "not of groups", norm_on_tpu, NORMED, "form", ["head"], ["gated", "gated after"]),
    ("append_and_attend", "head_dim 64, 128 or 256", paged, PAGES, "head_dim", [64, 128, 256], [96, 512]),
    ("append_and_attend", "pages of 8, 16, 32 or 64 tokens", paged, PAGES, "page_size", [8, 16, 32, 64], [4, 128]),
    ("append_and_attend", "in bfloat16 or float16", paged, PAGES, "dtype", [BF16, F16], [F32]),
    ("append_and_attend", "1 to 16 tokens at once", paged, PAGES, "time", [1, 16], [17]),
    ("append_and_attend", "query heads of a KV head at most 128", paged, dataclasses.replace(PAGES, time=16), "heads",
     [4 * 8], [4 * 9]),
    ("append_and_attend", "pages of 8 to 128 tokens", paged_on_tpu, PAGES, "page_size", [8, 128], [4, 256]),
    ("append_and_attend", "in bfloat16 or float32", paged_on_tpu, PAGES, "dtype", [BF16, F32], [F16]),
    ("append_and_attend_latent", "a rank of 128, 256 or 512", functools.partial(latent, LATENTS), None, "",
     [128, 256, 512], [64, 384, 1024]),
    ("append_and_attend_latent", "latents in multiples of 64, at most 576", latent, LATENTS, "head_dim", [512, 576],
     [544, 640]),
    ("append_and_attend_latent", "the same pages and tokens", latent, LATENTS, "page_size", [8, 64], [4, 128]),
    ("append_and_attend_latent", "the same pages and tokens", latent, LATENTS, "dtype", [BF16, F16], [F32]),
    ("append_and_attend_latent", "the same pages and tokens", latent, LATENTS, "time", [1, 16], [17]),
    ("append_and_attend_latent", "tokens times heads at most 2,048", latent, dataclasses.replace(LATENTS, time=16),
     "heads", [1, 128], [129]),
    ("attend_chunk", "at most 256 on Hopper and 128 elsewhere", chunk, CHUNK, "head_dim", [8, 256], [264, 100]),
    ("attend_chunk", "at most 256 on Hopper and 128 elsewhere", chunk, AMPERE, "head_dim", [128], [136]),
    ("project", "1 to 256 tokens", project.supports, ProjectCall(1, 64, (8,), (), BF16), "tokens", [1, 256], [257]),
    ("project", "inputs in multiples of 64", project.supports, ProjectCall(1, 64, (8,), (), BF16), "inputs", [64, 128],
     [32]),
    ("project", "outputs of 8", project.supports, ProjectCall(1, 64, (8,), (), BF16), "outputs", [(8, 16)], [(4,)]),
    ("add_and_norm", "multiples of 8 from 256 to 16,384", add_and_norm.supports, NormCall(1, 256, 1e-6, 0.0, BF16),
     "hidden", [256, 3136, 16384], [248, 260, 16392]),
    ("norm_and_rotate", "head_dim 64, 128 or 256", norm_and_rotate.supports, TURNED, "head_dim", [64, 128, 256], [96]),
    ("norm_and_rotate", "16, 32, 64 ... channels", norm_and_rotate.supports, TURNED, "half", [8, 16, 64], [4, 24, 128]),
    ("norm_and_rotate", "bfloat16 or float16", norm_and_rotate.supports, TURNED, "dtype", [BF16, F16], [F32]),
    ("experts", "inputs in multiples of 64", experts.supports, ExpertCall(8, 64, 8, 4, BF16), "inputs", [64], [32]),
    ("experts", "outputs of 8", experts.supports, ExpertCall(8, 64, 8, 4, BF16), "outputs", [8], [4]),
    ("experts", "Megablox: bfloat16", experts_on_tpu, EXPERTS, "dtype", [BF16], [F16, F32]),
    ("experts", "outputs in multiples of 128", experts_on_tpu, EXPERTS, "inputs", [128, 384], [64]),
    ("experts", "outputs in multiples of 128", experts_on_tpu, EXPERTS, "outputs", [128, 384], [64]),
]  # fmt: skip


def rows() -> dict[str, str]:
    """The page's table of kernels: each row's text, by the first name in it."""
    table = PAGE.read_text().split("its kernel on Hopper GPUs needs")[1]
    found = re.findall(r"   \* - ``(\w+)``(.*?)(?=\n   \* -|\n\n)", table, re.DOTALL)
    return {name: " ".join(text.split()) for name, text in found}


@pytest.mark.parametrize("operation, words, asked, call, field, served, refused", LIMITS)
def test_a_kernel_takes_what_the_page_says_and_nothing_beyond(operation, words, asked, call, field, served, refused):
    assert words in rows()[operation]

    def reason(value):
        return asked(value if call is None else dataclasses.replace(call, **{field: value}))

    assert [reason(value) for value in served] == [None] * len(served)
    assert all((reason(value) or "").startswith("it needs ") for value in refused)


@pytest.mark.parametrize("ring, time, max_pending", [(1024, 16, 16), (1024, 1, 16), (1024, 1, 1), (48, 16, 16)])
def test_what_the_gpu_kernels_of_extend_serve_fits_into_shared_memory(ring, time, max_pending):
    states = {"state": F32}, {"state": BF16}, *({"state": BF16, "low": low} for low in (BF16, np.dtype(np.int8)))
    sizes = {"ring": ring, "time": time, "max_pending": max_pending, "rows": 128, "tree": time > 1}
    for state, entry, delta in itertools.product(states, (BF16, F32), (True, False)):
        kinds = {"entry": entry, "probe": entry, "delta": delta} | state | sizes
        for key_dim, value_dim in itertools.product((64, 128, 256), (64, 80, 128, 160, 256)):
            dims = {"key_heads": 8, "key_dim": key_dim, "value_dim": value_dim}
            call = dataclasses.replace(STEP, **kinds, **dims)
            assert step(call) is None and gpu_schedule.arrange(gpu.stack(call)).warpgroups > 0
        call = dataclasses.replace(CHANNELS, **kinds)
        one = gpu_schedule.count_bytes(gpu_channel_lane.shared_memory(call, 1))
        assert step(call) is None and one <= gpu_schedule.MEMORY


def test_what_prepare_refuses_beside_its_sizes():
    assert "key_dim and value_dim 128, key heads in fours, a convolution of width 4" in rows()["prepare"]
    assert prepared(PREPARED) is None
    assert all(prepared(PREPARED, **wrong) for wrong in ({"key_dim": 64, "value_dim": 64}, {"width": 3}))


def test_the_page_has_every_operation_of_the_table():
    text = PAGE.read_text()
    within = {"attend", "append", "causal_attention"}  # stand within others
    assert {name for name in KERNELS if f"``{name}``" not in text} == within

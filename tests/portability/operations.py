"""Every operation at the sizes of published models, as what is traced for a platform: one table for all tests.

An operation's case is its public function on shapes. What implements it is asked for by name, so that a kernel either
serves a case or says why not.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.attention import gated
from jaxbuf.attention.latent import LatentPages, append_and_attend_latent
from jaxbuf.attention.paged import PagedKV
from jaxbuf.attention.paged_launch import append_and_attend
from jaxbuf.models.experts import mixture
from jaxbuf.models.layers import Norm
from jaxbuf.models.norm_and_rotate import norm_and_rotate
from jaxbuf.models.projections import gated_project, project
from jaxbuf.models.residual import add_and_norm
from jaxbuf.pallas.dispatch import KERNELS
from jaxbuf.recurrence import RecurrenceSpec, buffered
from jaxbuf.recurrence.chunked import chunked
from jaxbuf.recurrence.convolution import extend_ring, init_ring
from jaxbuf.recurrence.gated_norm import gated_norm, grouped_norm
from jaxbuf.recurrence.prepare import Weights, prepare
from jaxbuf.recurrence.put import put_rows
from jaxbuf.target import Target, as_target, lowering_for
from jaxbuf.tpu_compiler import compile_for, unaliased
from tests.portability.artefact import host_transfers, pool_copies, vmem_bytes_used, written_back

ROWS = 64
SLOTS = np.arange(1, ROWS + 1, dtype=np.int32)
PLATFORMS = {"gpu": "cuda", "tpu": "tpu"}  # as JAX names them where it lowers
MARKS = {"gpu": r"@mosaic_gpu|cudnn\$fmha", "tpu": "tpu_custom_call"}  # of a kernel in what was lowered


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation on arrays of some sizes.

    Attributes:
      function: Takes the arrays, and how it is implemented by keyword.
      arrays: Shapes.
      donated: Which of the arguments are changed in place; their memory comes back in outputs.
      changed_before: Whether XLA changes them before the kernel does, and may do so in VMEM.
    """

    function: Callable[..., Any]
    arrays: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    changed_before: bool = False

    def traced(self, implementation: str, target: Target | str) -> Any:
        """The program for a target; a ValueError says why the implementation can't serve it."""
        run = functools.partial(self.function, implementation=implementation, target=target)
        return jax.jit(run, donate_argnums=self.donated).trace(*self.arrays)


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def integers(*sizes: int) -> jax.ShapeDtypeStruct:
    return shape(*sizes, dtype=jnp.int32)


def _spec(heads, key_heads, key_dim, value_dim, decay="head", delta=True):
    return RecurrenceSpec(
        heads=heads, key_heads=key_heads, key_dim=key_dim, value_dim=value_dim, decay=decay, delta=delta
    )


# Families of the recurrence as models have them; of some what one of eight devices has.
FAMILIES = {
    "Gated DeltaNet (Qwen3.5-4B)": _spec(32, 16, 128, 128),
    "Gated DeltaNet, one of 8 devices": _spec(4, 2, 128, 128),
    "Mamba-2 (Nemotron-3-Nano-4B)": _spec(96, 8, 128, 80, delta=False),
    "Mamba-2 (Codestral-Mamba-7B)": _spec(128, 8, 128, 64, delta=False),
    "Mamba-2 (Falcon-H1-7B)": _spec(24, 1, 256, 128, delta=False),
    "Mamba-2, one of 8 devices": _spec(12, 1, 128, 80, delta=False),
    "Kimi Delta Attention (Kimi-Linear)": _spec(32, 32, 128, 128, "channel"),
    "Gated linear attention": _spec(16, 16, 128, 128, "channel", delta=False),
    "DeltaNet": _spec(16, 16, 128, 128, "none"),
    "Linear attention": _spec(16, 16, 64, 64, "none", delta=False),
}


def _inputs(spec: RecurrenceSpec, rows: int, time: int) -> tuple[Any, ...]:
    q = shape(rows, time, spec.key_heads, spec.key_dim)
    widths = {"none": None, "head": (spec.heads,), "channel": (spec.heads, spec.key_dim)}[spec.decay]
    log_decay = None if widths is None else shape(rows, time, *widths, dtype=jnp.float32)
    return (
        q,
        q,
        shape(rows, time, spec.heads, spec.value_dim),
        log_decay,
        shape(rows, time, spec.heads, dtype=jnp.float32),
    )


def extending(spec: RecurrenceSpec, time: int = 1, *, tree: bool = False, **sizes: Any) -> Case:
    cache = jax.eval_shape(lambda: buffered.init(spec, slots=ROWS, limit=16, max_pending=8, **sizes))

    def run(cache, parents, *inputs, **how):
        return buffered.extend(spec, cache, *inputs, slots=SLOTS, parents=parents, **how)

    parents = integers(ROWS, time) if tree else None
    return Case(run, (cache, parents, *_inputs(spec, ROWS, time)), (0,))


def folding(spec: RecurrenceSpec) -> Case:
    cache = jax.eval_shape(lambda: buffered.init(spec, slots=ROWS, limit=16, max_pending=8))
    return Case(
        lambda cache, **how: buffered.fold(spec, cache, slots=SLOTS, **how),
        (cache,),
        (0,),
    )


def prefilling(spec: RecurrenceSpec, keep: int = 0) -> Case:
    cache = jax.eval_shape(lambda: buffered.init(spec, slots=ROWS, limit=16, max_pending=8))

    def run(cache, *inputs, **how):
        return buffered.prefill(spec, cache, *inputs, slots=np.arange(1, 5, dtype=np.int32), keep=keep, **how)

    return Case(run, (cache, *_inputs(spec, 4, 512)), (0,))


def chunking(spec: RecurrenceSpec, *, updates: bool = False) -> Case:
    state = shape(4, spec.heads, spec.value_dim, spec.key_dim, dtype=jnp.float32)

    def run(state, lengths, *inputs, **how):
        return chunked(spec, state, *inputs, lengths=lengths, return_updates=updates, **how)

    return Case(run, (state, integers(4), *_inputs(spec, 4, 2048)))


def preparing(spec: RecurrenceSpec, time: int = 1) -> Case:
    channels = 2 * spec.key_heads * spec.key_dim + spec.heads * spec.value_dim
    ring = jax.eval_shape(lambda: init_ring(slots=ROWS, max_pending=8, channels=channels, width=4, dtype=jnp.bfloat16))
    heads = shape(spec.heads, dtype=jnp.float32)
    gate, decays = shape(ROWS, time, spec.heads, dtype=jnp.float32), spec.decay_shape(ROWS, time)
    assert decays is not None

    def run(ring, weights, qkv, a, b, start, lengths, **how):
        where = {"slots": SLOTS, "start": start, "lengths": lengths}
        return prepare(spec, weights, ring, qkv, a, b, **where, **how)

    biases = shape(spec.heads * (spec.key_dim if spec.decay == "channel" else 1), dtype=jnp.float32)
    weights, decay = Weights(shape(channels, 4), heads, biases), shape(*decays, dtype=jnp.float32)
    return Case(run, (ring, weights, shape(ROWS, time, channels), decay, gate, integers(ROWS), integers(ROWS)), (0,))


def convolving(channels: int, time: int = 1) -> Case:
    ring = jax.eval_shape(lambda: init_ring(slots=ROWS, max_pending=8, channels=channels, width=4, dtype=jnp.bfloat16))

    def run(ring, weight, x, start, lengths, **how):
        return extend_ring(ring, weight, x, slots=SLOTS, start=start, lengths=lengths, **how)

    return Case(run, (ring, shape(channels, 4), shape(ROWS, time, channels), integers(ROWS), integers(ROWS)), (0,))


def putting(pool: jax.ShapeDtypeStruct, rows: int) -> Case:
    return Case(put_rows, (pool, shape(rows, *pool.shape[1:], dtype=pool.dtype), integers(rows)), (0,))


def norming(heads: int, dim: int) -> Case:
    arrays = shape(ROWS, 1, heads, dim), shape(ROWS, 1, heads * dim), shape(dim)
    return Case(functools.partial(gated_norm, eps=1e-6), arrays)


def norming_groups(heads: int, dim: int, groups: int) -> Case:
    arrays = shape(ROWS, 1, heads, dim), shape(ROWS, 1, heads * dim), shape(heads * dim)
    return Case(functools.partial(grouped_norm, groups=groups, eps=1e-5, form="gated"), arrays)


def attending(heads: int, kv_heads: int, head_dim: int, time: int = 1, *, tree: bool = False, rows: int = ROWS) -> Case:
    pages = shape(1 + rows * 64, 16, kv_heads, head_dim)
    where = {"start": integers(rows), "lengths": integers(rows)}
    if tree:
        where |= {"order": integers(rows + 1, 16), "ancestors": shape(rows, time, time, dtype=jnp.bool_)}

    def run(q, k, v, kv, table, where, **how):
        return append_and_attend(q, k, v, kv, table, slots=np.arange(1, rows + 1, dtype=np.int32), **where, **how)

    inputs = [shape(rows, time, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    return Case(run, (*inputs, PagedKV(pages, pages), integers(rows + 1, 64), where), (3,))


def attending_gated(heads: int, kv_heads: int, head_dim: int) -> Case:
    sizes = {"slots": ROWS, "kv_heads": kv_heads, "head_dim": head_dim, "capacity": 1024}
    pages = {"window": 256, "max_pending": 8, "pages": ROWS * 64, "dtype": jnp.bfloat16}
    cache = jax.eval_shape(lambda: gated.init(**sizes, **pages))

    def run(cache, q, k, v, gates, **how):
        return gated.extend(cache, q, k, v, gates, slots=SLOTS, threshold=0.5, **how)

    keys = shape(ROWS, 1, kv_heads, head_dim)
    gates = shape(ROWS, 1, kv_heads, dtype=jnp.float32)
    # Keys that left the window are admitted to the lists first.
    return Case(run, (cache, shape(ROWS, 1, heads, head_dim), keys, keys, gates), (0,), changed_before=True)


def attending_latent(heads: int, time: int = 1) -> Case:
    rank, shared, own = 512, 64, 128
    pages = LatentPages(shape(1 + ROWS * 64, 16, 1, rank + shared), rank)
    where = {"start": integers(ROWS), "lengths": integers(ROWS)}

    def run(q, latents, pages, up, table, where, **how):
        return append_and_attend_latent(q, latents, pages, up, table, slots=SLOTS, **where, **how)

    q, latents = shape(ROWS, time, heads, own + shared), shape(ROWS, time, rank + shared)
    return Case(run, (q, latents, pages, shape(heads, 2 * own, rank), integers(ROWS + 1, 64), where), (2,))


def routing() -> Case:
    sizes = shape(ROWS, 2048), shape(256, 1024, 2048), shape(256, 2048, 512)
    return Case(mixture, (*sizes, integers(ROWS, 8), shape(ROWS, 8, dtype=jnp.float32)))


def projecting(inputs: int) -> Case:
    weights = [shape(n, inputs) for n in (8192, 4096, 32)]
    return Case(lambda x, weights, **how: project(x, weights, **how), (shape(ROWS, 1, inputs), weights))


def turning(heads: int, kv_heads: int, head_dim: int, width: int, dim: int, *, normed: bool = True) -> Case:
    angle = shape(ROWS, 1, 1, dim // 2, dtype=jnp.float32)
    norm, weights = (Norm(1e-6, offset=1.0), (shape(head_dim),) * 2) if normed else (None, ())

    def run(q, k, angles, weights, **how):
        return norm_and_rotate(q, k, angles, norm, weights, **how)

    return Case(run, (shape(ROWS, 1, heads, width), shape(ROWS, 1, kv_heads, head_dim), (angle, angle), weights))


ONE_OF_8 = "Gated DeltaNet, one of 8 devices"
# Of these, `chunked` differs from the others in parts that others have, too.
ALIKE_IN_CHUNKS = ("Mamba-2 (Codestral-Mamba-7B)", "Gated linear attention", "DeltaNet")
QWEN, KIMI = FAMILIES["Gated DeltaNet (Qwen3.5-4B)"], FAMILIES["Kimi Delta Attention (Kimi-Linear)"]
PAGES = {
    "32 heads on 8 of 128 (Llama-3.1-8B)": (32, 8, 128),
    "16 heads on 4 of 256 (Qwen3.5-4B)": (16, 4, 256),
    "40 heads on 8 of 128 (Nemotron-3-Nano-4B)": (40, 8, 128),
    "4 heads on 1 of 128, one of 8 devices": (4, 1, 128),
    "8 heads on 2 of 64": (8, 2, 64),
}
# operation -> family -> what makes the case
ALL_CASES: dict[str, dict[str, Callable[[], Case]]] = {
    "extend": {
        **{name: functools.partial(extending, spec) for name, spec in FAMILIES.items()},
        "Gated DeltaNet, 5 tokens": functools.partial(extending, QWEN, 5),
        "Gated DeltaNet, a tree of 8": functools.partial(extending, QWEN, 8, tree=True),
        "Gated DeltaNet, split checkpoints": functools.partial(extending, QWEN, state_dtype="split"),
        "Kimi Delta Attention, 5 tokens": functools.partial(extending, KIMI, 5),
    },
    "fold": {name: functools.partial(folding, spec) for name, spec in FAMILIES.items()},
    "prepare": {
        "Gated DeltaNet (Qwen3.5-4B)": functools.partial(preparing, QWEN),
        "Gated DeltaNet, 5 tokens": functools.partial(preparing, QWEN, 5),
        "Gated DeltaNet, one of 8 devices": functools.partial(preparing, FAMILIES["Gated DeltaNet, one of 8 devices"]),
        "Kimi Delta Attention (Kimi-Linear), 5 tokens": functools.partial(preparing, KIMI, 5),
    },
    "convolve": {
        "Mamba-2 (Nemotron-3-Nano-4B)": functools.partial(convolving, 96 * 80 + 2 * 8 * 128),
        "Mamba-2, one of 8 devices": functools.partial(convolving, 12 * 80 + 2 * 128),
        "Kimi Delta Attention (Kimi-Linear), 5 tokens": functools.partial(convolving, 3 * 32 * 128, 5),
    },
    "put_rows": {
        "checkpoints (Qwen3.5-4B)": lambda: putting(shape(ROWS + 1, 32, 128, 128, dtype=jnp.float32), ROWS),
        "split checkpoints of one of 8 devices (Nemotron-3-Nano-4B)": lambda: putting(shape(65, 12, 80, 128), ROWS),
        "low halves in 8 bits": lambda: putting(shape(ROWS + 1, 32, 128, 128, dtype=jnp.int8), ROWS),
        "inputs of a convolution (Qwen3.5-4B)": lambda: putting(shape(65 * 8, 64, 128), ROWS * 8),
        "scales of 128 by 80": lambda: putting(shape(ROWS + 1, 12, 80, dtype=jnp.float32), ROWS),
    },
    "gated_norm": {
        "32 heads of 128 (Qwen3.5-4B)": functools.partial(norming, 32, 128),
        "4 heads of 128, one of 8 devices": functools.partial(norming, 4, 128),
        "16 heads of 64": functools.partial(norming, 16, 64),
        "8 groups of 960 (Nemotron-3-Nano-4B)": functools.partial(norming_groups, 96, 80, 8),
        "a group of 8192 (Granite-4.0-H-Small)": functools.partial(norming_groups, 128, 64, 1),
    },
    "project": {"Qwen3.5-4B": functools.partial(projecting, 2560)},
    "gated_project": {
        "Qwen3.5-4B": lambda: Case(gated_project, (shape(ROWS, 1, 2560), shape(9216, 2560), shape(9216, 2560)))
    },
    "add_and_norm": {
        "Qwen3.5-4B": lambda: Case(
            lambda x, y, weight, **how: add_and_norm(x, y, weight, Norm(1e-6, offset=1.0), **how),
            (shape(ROWS, 1, 2560), shape(ROWS, 1, 2560), shape(2560)),
        )
    },
    "norm_and_rotate": {
        "Qwen3.5-4B": functools.partial(turning, 16, 4, 256, 512, 64),
        "Llama-3.1-8B, without norms": functools.partial(turning, 32, 8, 128, 128, 128, normed=False),
    },
    "experts": {"Qwen3.5-35B-A3B": routing},
    "prefill": {"Gated DeltaNet (Qwen3.5-4B), 16 tokens stay entries": functools.partial(prefilling, QWEN, 16)},
    "chunked": {
        **{name: functools.partial(chunking, spec) for name, spec in FAMILIES.items() if name not in ALIKE_IN_CHUNKS},
        "Gated DeltaNet, with updates": functools.partial(chunking, FAMILIES[ONE_OF_8], updates=True),
    },
    "append_and_attend": {
        **{name: functools.partial(attending, *sizes) for name, sizes in PAGES.items()},
        "32 heads on 8 of 128, a tree of 8": functools.partial(attending, 32, 8, 128, 8, tree=True),
    },
    "attend_gated": {"32 heads on 8 of 128 (Llama-3.1-8B)": functools.partial(attending_gated, 32, 8, 128)},
    "append_and_attend_latent": {"32 heads (Kimi-Linear)": functools.partial(attending_latent, 32)},
    "attend_chunk": {"16 heads on 4 of 256, 512 tokens": functools.partial(attending, 16, 4, 256, 512, rows=4)},
}
CASES = {operation: families for operation, families in ALL_CASES.items() if operation in KERNELS}
# Operations that stand within others of the table, or whose kernel the other one is.
WITHIN = {
    "attend": "append_and_attend",
    "append": "append_and_attend",
    "causal_attention": "attend_chunk",
}


def each_case() -> list[tuple[str, str]]:
    return [(operation, family) for operation, families in CASES.items() for family in families]


def kernel_platforms(operation: str) -> Mapping[str, Any]:
    return KERNELS[operation]


def reason_against(operation: str, family: str, platform: str, target: Target | str) -> str | None:
    """Why the kernel of a platform does not serve a case; None: it does."""
    with lowering_for(as_target(target)):
        try:
            traced = CASES[operation][family]().traced(platform, target)
        except ValueError as error:
            message = str(error)
            assert f'implementation="{platform}"' in message, message
            return message.split(": ", 1)[1]
        lowered = traced.lower(lowering_platforms=(PLATFORMS[platform],)).as_text()
    assert re.search(MARKS[platform], lowered), f"{operation} of {family} was asked for by name and has no kernel"
    return None


def check_compiled(operation: str, family: str, generation: str, implementation: str, vmem: int) -> Any:
    """Compiles a case for a generation of TPUs, and asserts that its pools stay in place."""
    case = CASES[operation][family]()
    run = functools.partial(case.function, implementation=implementation, target=generation)
    compiled = compile_for(generation, run, *case.arrays, donate_argnums=case.donated)
    pools = [case.arrays[place] for place in case.donated]
    used, sent = vmem_bytes_used(compiled), host_transfers(compiled)
    assert used <= vmem, f"{used} bytes of VMEM, of {vmem}"
    assert not sent, f"sent to the host: {sent[0]}"
    if implementation == "tpu":
        assert "tpu_custom_call" in compiled.as_text(), "there is no kernel in it"
        moved = pool_copies(compiled, pools, ends=False)
        moved += [] if case.changed_before else written_back(compiled, pools, ends=False)
        assert not moved, f"{len(moved)} pools are written whole: {moved[0]}"
        outputs = jax.tree.leaves(compiled.out_info)
        held = {(x.shape, x.dtype) for x in jax.tree.leaves(pools) if x.ndim > 1}
        kept = {f"{x.dtype}{list(x.shape)}" for x in outputs if (x.shape, x.dtype) in held}
        lost = kept.intersection(unaliased(compiled))
        assert not lost, f"not in place: {sorted(lost)}"
    return compiled

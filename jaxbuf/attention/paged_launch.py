"""One softmax layer of a launch on pages: its new tokens are appended, and its queries attend to all that is there."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxbuf.arguments import checked_slots
from jaxbuf.attention import paged
from jaxbuf.attention.chunk import attend_chunk
from jaxbuf.attention.kernel_integers import gpu_integers, launch_places, tpu_integers
from jaxbuf.attention.paged import PagedKV
from jaxbuf.axes import Array, Bool, Float, Int32
from jaxbuf.pallas.dispatch import ask
from jaxbuf.target import Target

AT_ONCE = 16  # tokens of a row: so many at most are a decoding step, or drafts that are verified; more are a chunk


def append_and_attend(
    q: Float[Array, "rows time heads head_dim"],
    k: Float[Array, "rows time kv_heads head_dim"],
    v: Float[Array, "rows time kv_heads head_dim"],
    kv: PagedKV,
    table: Int32[Array, "slots max_pages"],
    *,
    slots: Int32[Array, "rows"],
    start: Int32[Array, "rows"],
    lengths: Int32[Array, "rows"] | None = None,
    order: Int32[Array, "slots max_pending"] | None = None,
    ancestors: Bool[Array, "rows time time"] | None = None,
    implementation: str = "auto",
    interpret: bool = False,
    target: Target | str | None = None,
) -> tuple[Float[Array, "rows time heads head_dim"], PagedKV]:
    """`paged.append` of k and v, then `paged.attend` of q.

    Up to AT_ONCE tokens at once are one operation, which decoding and verification are made of. More are a chunk of
    prompts: `paged.append` and `jaxbuf.attention.chunk.attend_chunk`.

    Args:
      q, k, v: As there.
      kv: The layer's pool.
      table, slots, start, lengths, order, ancestors: As there; no slot twice but the null one.
      implementation: "xla", "gpu" (an NVIDIA Hopper GPU; of chunks one from Ampere on), "tpu" (not of chunks), or
        "auto": the target's kernel where it serves the call, else "xla".
      interpret: Run the kernel that was named in Pallas' interpreter, on any platform: slow, for tests.
      target: As in `jaxbuf.recurrence.launch.extend_pool`.

    Returns:
      out like q, and the pool. Of queries past `lengths` the outputs are finite where q is.

    Raises:
      ValueError: A shape or dtype does not fit, or the implementation asked for can't serve the call; it says why.
    """
    chunk = q.shape[1] > AT_ONCE
    asked = ask("attend_chunk" if chunk else "append_and_attend", implementation, target, (q,), interpret=interpret)
    lengths = jnp.full_like(start, q.shape[1]) if lengths is None else lengths
    paged.check_launch(q, k, v, kv, slots=slots, start=start, lengths=lengths, ancestors=ancestors)
    slots = checked_slots(slots, table.shape[0], once=True)
    where = {"slots": slots, "start": start, "lengths": lengths, "order": order}
    if asked is not None and not chunk:
        from jaxbuf.pallas.attend import supports

        call = _call(q, kv, table, order)
        dtypes: dict[str, Any] = {"q": q.dtype, "k": k.dtype, "v": v.dtype}
        if asked.takes(supports(call, **dtypes, platform=asked.platform, generation=asked.generation)):
            if asked.platform == "gpu":
                return _on_gpu(call, asked.interpret, q, k, v, kv, table, where, ancestors)
            from jaxbuf.pallas.attend.tpu_call import arrange

            return _on_tpu(arrange(call, asked.generation), asked.interpret, q, k, v, kv, table, where, ancestors)
    kv = paged.append(kv, table, k, v, **where, implementation="xla")
    if chunk:
        where |= {"lengths": jnp.minimum(lengths, q.shape[1]), "ancestors": ancestors}
        return attend_chunk(q, k, v, kv, table, **where, implementation=implementation, target=target), kv
    return paged.attend(q, kv, table, **where, ancestors=ancestors, implementation="xla"), kv


@partial(jax.jit, static_argnums=(0, 1))
def _on_gpu(
    call,
    interpret: bool,
    q: Array,
    k: Array,
    v: Array,
    kv: PagedKV,
    table: Array,
    where: dict[str, Any],
    ancestors: Array | None,
) -> tuple[Array, PagedKV]:
    from jaxbuf.pallas.attend import gpu

    places = launch_places(call, table, **where, ancestors=ancestors)
    integers = gpu_integers(call, gpu.arrange(call).all_workers, places)
    out, pages = gpu.append_and_attend(call, integers, (kv.keys, kv.values), q, k, v, interpret=interpret)
    return out, PagedKV(*pages)


@partial(jax.jit, static_argnums=(0, 1))
def _on_tpu(
    plan,
    interpret: bool,
    q: Array,
    k: Array,
    v: Array,
    kv: PagedKV,
    table: Array,
    where: dict[str, Any],
    ancestors: Array | None,
) -> tuple[Array, PagedKV]:
    from jaxbuf.pallas.attend import tpu

    integers = tpu_integers(plan, launch_places(plan.call, table, **where, ancestors=ancestors))
    out, pages = tpu.append_and_attend(plan, integers, (kv.keys, kv.values), q, (k, v), interpret=interpret)
    return out, PagedKV(*pages)


def _call(q: Array, kv: PagedKV, table: Array, order: Array | None):
    from jaxbuf.pallas.attend import Call

    (rows, time, heads, head_dim), (_, page_size, kv_heads, _) = q.shape, kv.keys.shape
    return Call(
        rows=rows,
        time=time,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        max_pages=table.shape[1],
        listed=0 if order is None else order.shape[1],
        dtype=kv.keys.dtype,
    )

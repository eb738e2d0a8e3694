"""What a layer of write-gated memory gives a launch by a kernel: which masks and integers it goes by."""

from typing import TYPE_CHECKING

import jax.numpy as jnp

from jaxbuf.attention.gated_pages import GatedKV
from jaxbuf.attention.kernel_integers import divide_rows
from jaxbuf.axes import Array, Bool, Float, Float32, Int32
from jaxbuf.pallas.dispatch import Asked

if TYPE_CHECKING:
    from jaxbuf.attention.gated_launch import LaunchedGated


def attend_gated(
    asked: Asked,
    plan: "LaunchedGated",
    memory: GatedKV,
    q: Float[Array, "rows time heads head_dim"],
    k: Float[Array, "rows time kv_heads head_dim"],
    v: Float[Array, "rows time kv_heads head_dim"],
    gates: Float32[Array, "rows time kv_heads"],
) -> Float[Array, "rows time heads head_dim"] | None:
    """What the queries of a launch see in the memory and in the launch itself; None if the kernel can't serve the call.

    Args:
      asked: The kernel.
      plan: The launch.
      memory: Of the layer, with what the launch moved to its lists.
      q: The queries.
      k, v, gates: Of the new tokens, in the memory's dtype; zeros where a token is not real.
    """
    from jaxbuf.pallas.attend_gated import Call, supports
    from jaxbuf.pallas.attend_gated.tpu_arrange import GatedIntegers, arrange

    call = Call(
        rows=q.shape[0],
        time=q.shape[1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        page_size=memory.page_size,
        columns=plan.local.table.shape[1],
        max_pages=memory.lists.shape[2],
        dtype=memory.keys.dtype,
    )
    if not asked.takes(supports(call, q=q.dtype, generation=asked.generation)):
        return None
    from jaxbuf.pallas.attend.tpu_call import LANES, Integers
    from jaxbuf.pallas.attend_gated import tpu

    how = arrange(call, asked.generation)
    local, launch = how.local, plan.launch
    table, place_sees, live = _local_pages(plan, memory, call.time)
    own_sees, own_live = _new_tokens(plan, gates)
    asked_for = (launch.slots > 0) & (launch.lengths > 0)
    end = memory.page_size * jnp.sum(table > 0, axis=1, dtype=jnp.int32)
    local_blocks = jnp.maximum(-(-end // local.span), 1)
    counts = jnp.where(asked_for[:, None], memory.counts[launch.slots], 0)
    blocks = local_blocks + jnp.sum(-(-counts // how.listed.span), axis=1, dtype=jnp.int32)

    # Behind the places of a row's last block come its new tokens.
    is_last = jnp.arange(how.blocks, dtype=jnp.int32)[None] == local_blocks[:, None] - 1
    sees = _blocked(place_sees, own_sees, is_last, local.span, local.new)
    there = _blocked(live[..., None], own_live[..., None], is_last, local.span, local.new)
    rows, heads = call.rows, call.kv_heads
    sees = sees.reshape(rows, how.blocks, local.columns, local.groups, local.packed)
    sees = jnp.moveaxis(sees, 3, 2).reshape(rows, how.blocks, local.groups, -1)

    zero = jnp.zeros_like(end)
    fields = jnp.stack([blocks, zero, end, zero, zero], axis=1)  # what is clean, real or missing, the masks say
    none = jnp.zeros(1, jnp.int32)
    table = jnp.pad(table, ((0, 0), (0, local.chunks * LANES - table.shape[1])))
    lists = memory.lists[launch.slots]
    lists = jnp.pad(lists, ((0, 0), (0, 0), (0, how.chunks * LANES - lists.shape[2])))
    integers = Integers(
        rows=fields.reshape(-1),
        append=none,
        homes=none,
        visible=none,
        shares=divide_rows(blocks, local.workers),
        order=none,
        table=table.reshape(rows, local.chunks, LANES),
    )
    gated = GatedIntegers(
        counts=counts.reshape(-1),
        lists=lists.reshape(rows * heads, how.chunks, LANES),
        seen=sees,
        there=jnp.swapaxes(there, 2, 3),
    )
    pools = (memory.keys, memory.values), (memory.admitted_keys, memory.admitted_values)
    return tpu.attend_gated(how, integers, gated, *pools, q, (k, v), interpret=asked.interpret)


def _local_pages(
    plan: "LaunchedGated", memory: GatedKV, time: int
) -> tuple[
    Int32[Array, "rows local_columns"], Int32[Array, "rows local_places kv_heads"], Int32[Array, "rows local_places"]
]:
    """The local pages that hold something, those first; at their places bit t of whether new token t sees it with a
    head; and 1 where a place holds a token."""
    launch, local, size = plan.launch, plan.local, memory.page_size
    rows, columns = local.table.shape
    start = jnp.where(launch.lengths > 0, launch.start, 0)
    position = local.position[:, : columns * size]
    live = (position >= local.frontier[:, None]) & (position < start[:, None]) & (launch.slots > 0)[:, None]
    live = live & jnp.repeat(local.table > 0, size, axis=1)
    holds = jnp.any(live.reshape(rows, columns, size), axis=2)
    # Where each page goes, and which page comes to each place. (A TPU's program that sorts takes long to compile.)
    first = jnp.cumsum(holds, axis=1, dtype=jnp.int32)
    goes = jnp.where(holds, first, first[:, -1:] + jnp.cumsum(~holds, axis=1, dtype=jnp.int32)) - 1
    order = jnp.argmax(goes[:, None] == jnp.arange(columns, dtype=jnp.int32)[None, :, None], axis=2).astype(jnp.int32)
    table = jnp.take_along_axis(jnp.where(holds, local.table, 0), order, axis=1)

    def reordered(x: Array) -> Array:
        x = x.reshape(rows, columns, size)
        return jnp.take_along_axis(x, order[..., None], axis=1).reshape(rows, columns * size)

    position, live = reordered(position), reordered(live)
    query = jnp.broadcast_to(plan.positions, (rows, time))
    near = query[:, :, None] - position[:, None] < plan.window
    bit = (1 << jnp.arange(time, dtype=jnp.int32))[None, :, None]
    near = jnp.sum(jnp.where(near, bit, 0), axis=1, dtype=jnp.int32)
    gates = memory.gates[table].reshape(rows, columns * size, -1)
    admitted = gates >= local.threshold[:, None, None]
    sees = jnp.where(admitted, (1 << time) - 1, near[..., None])
    return table, jnp.where(live[..., None], sees, 0), live.astype(jnp.int32)


def _new_tokens(
    plan: "LaunchedGated", gates: Float32[Array, "rows time kv_heads"]
) -> tuple[Int32[Array, "rows time kv_heads"], Int32[Array, "rows time"]]:
    """Of the launch's own tokens what `_local_pages` gives of places."""
    launch, (rows, time, _) = plan.launch, gates.shape
    depth = jnp.broadcast_to(launch.depth, (rows, time))
    near = depth[:, :, None] - depth[:, None] < plan.window
    seen = jnp.tril(jnp.ones((time, time), bool))[None] if launch.ancestors is None else launch.ancestors
    real: Bool[Array, "rows time"] = jnp.arange(time, dtype=jnp.int32)[None] < launch.lengths[:, None]
    real = real & (launch.slots > 0)[:, None]
    admitted = (gates >= plan.local.threshold[:, None, None])[:, None]
    sees = (seen & real[:, None])[..., None] & (near[..., None] | admitted)  # [rows, queries, keys, kv_heads]
    bit = (1 << jnp.arange(time, dtype=jnp.int32))[None, :, None, None]
    return jnp.sum(jnp.where(sees, bit, 0), axis=1, dtype=jnp.int32), real.astype(jnp.int32)


def _blocked(
    places: Int32[Array, "rows local_places n"],
    new: Int32[Array, "rows time n"],
    is_last: Bool[Array, "rows _"],
    span: int,
    room: int,
) -> Int32[Array, "rows _ _ n"]:
    """Numbers of places in blocks, behind each block those of new tokens where it is its row's last one, and zeros
    elsewhere: [rows, blocks, span + room, n].

    Args:
      places, new: Numbers of each place, and of each new token.
      is_last: [rows, blocks], whether a block is its row's last one.
      span: Places of a block.
      room: Places behind these for new tokens.
    """
    rows, blocks = is_last.shape
    places = jnp.pad(places, ((0, 0), (0, blocks * span - places.shape[1]), (0, 0)))
    new = jnp.pad(new, ((0, 0), (0, room - new.shape[1]), (0, 0)))
    behind = jnp.where(is_last[..., None, None], new[:, None], 0)
    return jnp.concatenate([places.reshape(rows, blocks, span, -1), behind], axis=2)

"""The short causal convolution in front of Gated DeltaNet, and the ring of its last inputs.

The input of absolute position p lies at ring row p % ring, so that the number of committed tokens says which rows hold
what. Rejecting drafts only resets that number, and nothing in the ring moves. Where trees of tokens are served, each
slot has a list of ring rows, in which entry p % ring is the row of input p. Accepting a path permutes the list; the
inputs stay where they are.

An input lies in the ring as rows of 128 channels (`channel_rows`). On a TPU such rows fill whole tiles, so that an
input can be copied by itself; of an array that ends with all channels, tiles would hold several inputs each.
"""

import itertools
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.arguments import check_range, check_rows, check_sizes, checked_slots
from jaxbuf.axes import Array, Float, Int, Int32
from jaxbuf.memory.ownership import NOWHERE
from jaxbuf.memory.tree import check_parents
from jaxbuf.pallas.dispatch import Asked, ask
from jaxbuf.recurrence.put import put_within
from jaxbuf.target import Target

LANES = 128  # channels of a row of the ring, as a TPU's tiles have columns
LONG = 64  # Tokens from which a convolution is computed once, in place of in each of those that read it.


def init_ring(
    *, slots: int, channels: int, width: int, max_pending: int, dtype: jnp.dtype
) -> Float[Array, "{slots}+1 {width}-1+{max_pending} channel_rows lanes"]:
    """Returns an empty ring of a convolution of so many channels; row 0 is the null slot.

    Its last two axes are `channel_rows(channels)`. It has room for max_pending inputs and the width - 1 inputs before
    them. So a pending input never overwrites one that the next step may read, however many of the pending ones are
    accepted. The dtype is that of the inputs.

    Raises:
      ValueError: A size below 1 (width below 2), or not a whole number.
    """
    check_sizes(slots=slots, channels=channels, max_pending=max_pending)
    check_sizes(width=width, least=2)
    return jnp.zeros((slots + 1, width - 1 + max_pending, *channel_rows(channels)), dtype)


def channel_rows(channels: int) -> tuple[int, int]:
    """How an input lies in a ring: rows of 128 channels each, or one row if the channels are no multiple of 128."""
    return (channels // LANES, LANES) if channels % LANES == 0 else (1, channels)


def init_ring_order(*, slots: int, width: int, max_pending: int) -> Int32[Array, "{slots}+1 {width}-1+{max_pending}"]:
    """Returns the index list of rings that serve trees: the identity."""
    size = width - 1 + max_pending
    return jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], (slots + 1, size))


def causal_convolution(
    x: Float[Array, "batch time channels"],
    weight: Float[Array, "channels width"],
    previous: Float[Array, "batch width-1 channels"] | None = None,
) -> Float[Array, "batch time channels"]:
    """Convolves each channel with its own taps over the current and the last width - 1 inputs; no activation.

    Args:
      x: The inputs.
      weight: Tap width - 1 meets the current input, tap 0 the oldest.
      previous: The inputs before x, oldest first. None: zeros.

    Returns:
      y in x's dtype, summed in float32.

    Raises:
      ValueError: A shape that does not fit.
    """
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[-1]:
        raise ValueError(
            f"x must be [batch, time, channels] and weight [channels, width], got {x.shape} and {weight.shape}"
        )
    batch, time, channels = x.shape
    width = weight.shape[1]
    if previous is None:
        previous = jnp.zeros((batch, width - 1, channels), x.dtype)
    if previous.shape != (batch, width - 1, channels):
        raise ValueError(f"previous must have shape {(batch, width - 1, channels)}, got {previous.shape}")
    taps, previous = weight.astype(jnp.float32), previous.astype(x.dtype)
    if time >= LONG:
        # XLA would look at every fusion of these taps with what q, k and v become: half the time that it fuses a
        # prompt's program for.
        return jax.lax.optimization_barrier(_convolve_long(x, taps, previous).astype(x.dtype))
    y = _sum_taps(jnp.concatenate([previous, x], axis=1), taps, time)
    return y.astype(x.dtype)


def _sum_taps(inputs: Array, taps: Array, time: int) -> Array:
    """float32 [batch, time, channels]: tap i meets the inputs from the i-th on."""
    inputs = inputs.astype(jnp.float32)
    y = inputs[:, :time] * taps[None, None, :, 0]
    for tap in range(1, taps.shape[1]):
        y = y + inputs[:, tap : tap + time] * taps[None, None, :, tap]
    return y


def _convolve_long(x: Array, taps: Array, previous: Array) -> Array:
    """The convolution of many inputs, without an array of those before and x: XLA would write it on a GPU, which takes
    three times as long as all else. What those before add to the first outputs is computed by itself."""
    time, history = x.shape[1], taps.shape[1] - 1

    def padded(x, before, behind):
        return jnp.pad(x, ((0, 0), (before, behind), (0, 0)))

    y = padded(_sum_taps(padded(previous, 0, history), taps, history), 0, time - history)
    for tap in range(history + 1):
        after = history - tap
        y = y + padded(x[:, : time - after], after, 0).astype(jnp.float32) * taps[None, None, :, tap]
    return y


def activated(
    y: Float[Array, "rows time channels"], bias: Float[Array, "channels"] | None, activation: Literal["silu"] | None
) -> Float[Array, "rows time channels"]:
    """y, to which the bias was added, after the activation; in y's dtype. None: without it."""
    if bias is not None:
        y = y + bias.astype(y.dtype)[None, None]
    return jax.nn.silu(y) if activation == "silu" else y


def extend_ring(
    ring: Float[Array, "slots ring channel_rows lanes"],
    weight: Float[Array, "channels width"],
    x: Float[Array, "rows time channels"],
    *,
    slots: Int[Array, "rows"],
    start: Int[Array, "rows"],
    lengths: Int[Array, "rows"],
    order: Int32[Array, "slots ring"] | None = None,
    parents: Int[Array, "rows time"] | None = None,
    bias: Float[Array, "channels"] | None = None,
    activation: Literal["silu"] | None = None,
    parts: tuple[int, ...] = (),
    implementation: str = "auto",
    interpret: bool = False,
    target: Target | str | None = None,
) -> tuple[Any, Float[Array, "slots ring channel_rows lanes"]]:
    """Convolves the next inputs of each slot with what its ring holds before them, and writes them into the ring.

    Serves prefill (any time) and decoding alike. Pending inputs (at most the ring's max_pending, see `init_ring`) are
    rolled back by calling again with a smaller `start`: they are overwritten or never read.

    Args:
      ring: From `init_ring`.
      weight: As in `causal_convolution`.
      x: The inputs of positions start .. start + time - 1.
      slots: The physical slot of each row. Slot 0 is null: nothing is written, zeros come back. No other slot twice:
        under jit it is not specified which row's inputs the slot's ring then holds.
      start: The committed tokens of each row's slot, at least 0. Before the first token are zeros.
      lengths: How many of the inputs are real, in [0, time]; the others are not written and give zeros.
      order: The ring row of the inputs p % ring, from `init_ring_order`; None: p % ring itself. `tree.permute` with
        first = start brings an accepted path to the front.
      parents: The input before each one, of a lower index, -1 for the committed tail; needs `order` and at most
        max_pending inputs. None: each follows the one before.
      bias: Is added to the convolution's output, both in x's dtype.
      activation: Of the sum. None: the sum itself comes back.
      parts: Channels of each part of y, if it is to come back in parts.
      implementation, interpret, target: As in `jaxbuf.recurrence.launch.extend_pool`; target None: what x lies on.

    Returns:
      y [rows, time, channels] in x's dtype, or a tuple of its parts, [rows, time, part] each; and the ring.

    Raises:
      ValueError: Shapes or integers that do not fit; or, where they are known, out of range (under jit a slot out of
        range is a null one, and start and lengths are clamped), or a slot repeated; or no such activation; or the
        implementation asked for can't serve the call; it says why.
    """
    check_ring(ring, x.shape[2])
    if bias is not None and bias.shape != x.shape[2:]:
        raise ValueError(f"bias must have shape {x.shape[2:]}, got {bias.shape}")
    if activation not in ("silu", None):
        raise ValueError(f"activation must be 'silu' or None, got {activation!r}")
    if parts and (sum(parts) != x.shape[2] or min(parts) < 1):
        raise ValueError(f"parts must be numbers from 1 whose sum is channels ({x.shape[2]}), got {parts}")
    slots, start, lengths = launch_integers(ring, slots, start, lengths, x.shape[1])
    parents = launch_parents(ring, weight, x, order, parents)
    asked = ask("convolve", implementation, target, (x,), interpret=interpret)
    return extend_checked_ring(asked, activation, parts, ring, weight, bias, x, slots, start, lengths, order, parents)


@partial(jax.jit, static_argnums=(0, 1, 2))
def extend_checked_ring(
    asked: Asked | None,
    activation: Literal["silu"] | None,
    parts: tuple[int, ...],
    ring: Array,
    weight: Array,
    bias: Array | None,
    x: Array,
    slots: Array,
    start: Array,
    lengths: Array,
    order: Array | None,
    parents: Array | None,
) -> tuple[Any, Array]:
    """`extend_ring` of arguments that were checked, by a kernel or compiled by XLA."""
    y = None
    if asked is not None:
        # Imported here: Pallas takes a while, and a CPU has no use for it.
        from jaxbuf.pallas import prepare as kernels

        call = kernels.Convolution(**call_sizes(ring, weight, x), tree=parents is not None, parts=parts)
        reason = kernels.convolution_reason(call, platform=asked.platform, generation=asked.generation)
        if asked.takes(reason) and asked.platform == "gpu":
            out, ring = kernels.gpu_convolve.convolve(
                call,
                ring,
                weight,
                x,
                (slots, start, lengths),
                bias=None if bias is None else bias.astype(x.dtype),
                order=order,
                parents=parents,
                silu=activation == "silu",
                interpret=asked.interpret,
            )
            return out if parts else out[0], ring
        if asked.takes(reason):
            found = ring_places(ring, weight.shape[1], x.shape[1], slots, start, lengths, order)
            places = kernels.tpu.Places(*found, parents)
            how = {"generation": asked.generation, "interpret": asked.interpret}
            y, ring = kernels.tpu.convolve(call, ring, weight, x, places, **how)
    if y is None:
        y, ring = convolve_with_xla(ring, weight, x, slots, start, lengths, order, parents, asked)
    y = activated(y, bias, activation)
    if bias is not None:  # of which what is no token would have some
        real = (jnp.arange(x.shape[1])[None] < lengths[:, None]) & (slots > 0)[:, None]
        y = jnp.where(real[..., None], y, jnp.zeros((), y.dtype))
    return split_channels(y, parts) if parts else y, ring


def split_channels(y: Float[Array, "rows time channels"], parts: tuple[int, ...]) -> tuple[Array, ...]:
    """y as arrays of so many channels each."""
    return tuple(jnp.split(y, list(itertools.accumulate(parts))[:-1], axis=-1))


def call_sizes(
    ring: Float[Array, "slots ring channel_rows lanes"],
    weight: Float[Array, "channels width"],
    x: Float[Array, "rows time channels"],
) -> dict[str, Any]:
    """Sizes and dtypes of a call, as the kernels' `Convolution` names them."""
    sizes = dict(zip(("rows", "time", "channels"), x.shape, strict=True))
    return sizes | {"width": weight.shape[1], "ring": ring.shape[1], "dtype": x.dtype, "stored": ring.dtype}


def ring_places(
    ring: Float[Array, "slots ring channel_rows lanes"],
    width: int,
    time: int,
    slots: Int32[Array, "rows"],
    start: Int32[Array, "rows"],
    lengths: Int32[Array, "rows"],
    order: Int32[Array, "slots ring"] | None,
) -> tuple[Int32[Array, "rows {width}-1"], Int32[Array, "rows {time}"]]:
    """Where the inputs of a launch of at most max_pending tokens lie, in a ring whose first two axes are one.

    Returns:
      The places of the width - 1 inputs before the new ones, oldest first, -1 for those before the first token; and the
      places of the new inputs, -1 for those that are not real. All are -1 for slot 0.
    """
    size, history = ring.shape[1], width - 1
    positions = start[:, None] - history + jnp.arange(history + time, dtype=jnp.int32)[None]
    rows = jnp.maximum(positions, 0) % size
    if order is not None:
        rows = jnp.take_along_axis(order[slots], rows, axis=1)
    there = (positions >= 0) & (positions < (start + lengths)[:, None]) & (slots > 0)[:, None]
    places = jnp.where(there, slots[:, None] * size + rows, -1)
    return places[:, :history], places[:, history:]


def convolve_with_xla(
    ring: Float[Array, "slots ring channel_rows lanes"],
    weight: Float[Array, "channels width"],
    x: Float[Array, "rows time channels"],
    slots: Int32[Array, "rows"],
    start: Int32[Array, "rows"],
    lengths: Int32[Array, "rows"],
    order: Int32[Array, "slots ring"] | None,
    parents: Int32[Array, "rows time"] | None,
    asked: Asked | None = None,
) -> tuple[Float[Array, "rows time channels"], Float[Array, "slots ring channel_rows lanes"]]:
    """`extend_ring` without bias and activation, compiled by XLA, on arguments that were checked. `asked` is as in
    `put_within`."""
    (rows, time, channels), size, history = x.shape, ring.shape[1], weight.shape[1] - 1

    def rows_of(positions):
        return positions % size if order is None else jnp.take_along_axis(order[slots], positions % size, axis=1)

    before = start[:, None] - history + jnp.arange(history, dtype=start.dtype)[None]
    known = (before >= 0) & (slots > 0)[:, None]
    previous = ring[slots[:, None], rows_of(before)].reshape(rows, history, channels)
    previous = jnp.where(known[..., None], previous, jnp.zeros((), ring.dtype))
    y = causal_convolution(x, weight, previous) if parents is None else _along_paths(x, weight, previous, parents)
    offsets = jnp.arange(time, dtype=start.dtype)[None]
    real = (offsets < lengths[:, None]) & (slots > 0)[:, None]
    y = jnp.where(real[..., None], y, jnp.zeros((), y.dtype))

    if time > size:  # only the last inputs survive: write those, so that no ring row is written twice
        offsets = lengths[:, None] - size + jnp.arange(size, dtype=start.dtype)[None]
        real = (offsets >= 0) & (slots > 0)[:, None]
        x = jnp.take_along_axis(x, jnp.maximum(offsets, 0)[..., None], axis=1)
    places = jnp.where(real, slots[:, None] * size + rows_of(start[:, None] + offsets), NOWHERE)
    flat = put_within(asked, ring.reshape(-1, *ring.shape[2:]), x.reshape(-1, *ring.shape[2:]), places.reshape(-1))
    return y, flat.reshape(ring.shape)


def launch_parents(
    ring: Float[Array, "slots ring channel_rows lanes"],
    weight: Float[Array, "channels width"],
    x: Float[Array, "rows time channels"],
    order: Int32[Array, "slots ring"] | None,
    parents: Int[Array, "rows time"] | None,
) -> Int32[Array, "rows time"] | None:
    """parents of a launch, checked as `extend_ring` says."""
    if parents is None:
        return None
    most = ring.shape[1] - weight.shape[1] + 1
    if order is None or parents.shape != x.shape[:2] or x.shape[1] > most:
        raise ValueError(
            f"parents must be [rows, time] of x {x.shape}, time at most max_pending ({most}), with an order; "
            f"got {parents.shape} {'without an order' if order is None else 'with one'}"
        )
    return check_parents(parents, *x.shape[:2])


def check_ring(ring: Float[Array, "slots ring channel_rows lanes"], channels: int) -> None:
    """Raises a ValueError for a ring that is not one of `init_ring`, of so many channels."""
    lying = channel_rows(channels)
    if ring.ndim != 4 or ring.shape[2:] != lying:
        raise ValueError(f"ring must be [slots + 1, ring, {lying[0]}, {lying[1]}], got shape {ring.shape}")


def launch_integers(
    ring: Float[Array, "slots ring channel_rows lanes"],
    slots: Int[Array, "rows"],
    start: Int[Array, "rows"],
    lengths: Int[Array, "rows"],
    time: int,
) -> tuple[Int32[Array, "rows"], Int32[Array, "rows"], Int32[Array, "rows"]]:
    """slots, start and lengths of a launch of `time` inputs, checked as `extend_ring` says."""
    rows, most = checked_slots(slots, ring.shape[0], once=True), np.iinfo(np.int32).max - time
    for name, integers, high in (("start", start, most), ("lengths", lengths, time)):
        check_rows(name, jnp.asarray(integers), rows.shape[0])
        check_range(name, integers, 0, high)
    start, lengths = jnp.asarray(start).astype(jnp.int32), jnp.asarray(lengths).astype(jnp.int32)
    return rows, jnp.maximum(start, 0), jnp.clip(lengths, 0, time)


def _along_paths(x: Array, weight: Array, previous: Array, parents: Array) -> Array:
    """`causal_convolution` where each input follows its parent, and a root the last of `previous`."""
    history = previous.shape[1]
    inputs = jnp.concatenate([previous.astype(x.dtype), x], axis=1).astype(jnp.float32)
    taps = weight.astype(jnp.float32)
    node = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None], parents.shape)
    window = [node]  # of each input: itself, the one before, ...; below 0 the previous inputs, the last one at -1
    for _ in range(history):
        node = jnp.where(node >= 0, jnp.take_along_axis(parents, jnp.maximum(node, 0), axis=1), node - 1)
        window.append(node)
    y = jnp.zeros(x.shape, jnp.float32)
    for tap, node in enumerate(reversed(window)):
        y = y + jnp.take_along_axis(inputs, node[..., None] + history, axis=1) * taps[None, None, :, tap]
    return y.astype(x.dtype)

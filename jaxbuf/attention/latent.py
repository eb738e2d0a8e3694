"""Multi-head latent attention: of a token the pages keep one latent, from which all heads make their keys and values.

A head's key is its rows of `up` for keys times the latent, followed by a part that all heads share, and its value is
its rows for values times the latent. Attention is computed in one of two ways, which differ by rounding alone.
Expanded, keys and values are made. Absorbed, none are: queries are multiplied with the rows for keys, the latents
themselves are the keys and values of a single head, and the outputs are multiplied with the rows for values. Expanding
is work for each key that is read, absorbing makes every score longer. So a few tokens are absorbed, and a chunk of a
prompt is expanded.

Source: DeepSeek-V2 (2024), section 2.1.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxbuf.arguments import check_sizes, checked_slots
from jaxbuf.attention import paged
from jaxbuf.attention.causal import causal_attention
from jaxbuf.attention.chunk import attend_parts
from jaxbuf.attention.contraction import contract
from jaxbuf.attention.flash import flash
from jaxbuf.attention.kernel_integers import gpu_integers, launch_places, tpu_integers
from jaxbuf.attention.paged_launch import AT_ONCE
from jaxbuf.axes import Array, Bool, Float, Int32
from jaxbuf.pallas.attend.call import Call
from jaxbuf.pallas.dispatch import Asked, ask
from jaxbuf.target import Target

# Committed tokens, of all rows together, that are expanded at once, if a chunk has fewer: expanded, a token of a model
# with 32 heads takes ten to twenty times what pages of grouped keys and values hold of it.
TOKENS = 2**12


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentPages:
    """What one layer keeps of its tokens.

    To absorbed queries (see the module) the pages are those of a single head: its keys are the latents, and its values
    are the first `rank` numbers of these (`jaxbuf.attention.paged.TokenPages`).

    Attributes:
      latents: Of each token `rank` numbers, normalised, then the key part that all heads share, turned by its position
        if it is at all. There is one copy; on a mesh each device has its own. Page 0 is null, as in `PagedKV`.
      rank: How many of a token's numbers keys and values are made from (static).
    """

    latents: Float[Array, "pages page_size copies latent"]
    rank: int = dataclasses.field(metadata={"static": True})

    @property
    def page_size(self) -> int:
        return self.latents.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.latents.shape[2]

    @property
    def key_dim(self) -> int:
        return self.latents.shape[3]

    @property
    def value_dim(self) -> int:
        return self.rank

    def pages(self, page: Int32[Array, "rows n"]) -> tuple[Array, Array]:
        """As in `jaxbuf.attention.paged.TokenPages`."""
        found = self.latents[page]
        return found, found[..., : self.rank]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Expanded:
    """Pages whose tokens are read as the keys and values of all heads (`jaxbuf.attention.chunk.Tokens`).

    Attributes:
      held: The pages.
      up: As in `append_and_attend_latent`; keys and values have its dtype.
      key_dim: Its rows for keys, of each head (static).
    """

    held: LatentPages
    up: Array
    key_dim: int = dataclasses.field(metadata={"static": True})

    @property
    def page_size(self) -> int:
        return self.held.page_size

    def tokens(self, index: Int32[Array, "rows n"]) -> tuple[Array, Array]:
        """As in `jaxbuf.attention.chunk.Tokens`."""
        return _keys_and_values(paged.as_tokens(self.held.latents)[index][:, :, 0], self.up, self.key_dim)


def init_latent(*, pages: int, rank: int, shared_dim: int, dtype: jnp.dtype, page_size: int = 16) -> LatentPages:
    """Returns an empty pool of `pages` pages, the null page among them, each of `page_size` tokens.

    A token has `rank` numbers for keys and values, and `shared_dim` of the key part that all heads share, in the dtype
    that is given.

    Raises:
      ValueError: A size below 1 or not a whole number, or more tokens than int32 can number.
    """
    check_sizes(pages=pages, rank=rank, shared_dim=shared_dim, page_size=page_size)
    paged.check_places(pages, page_size)
    return LatentPages(jnp.zeros((pages, page_size, 1, rank + shared_dim), dtype), rank)


def append_and_attend_latent(
    q: Float[Array, "rows time heads head_dim"],
    latents: Float[Array, "rows time latent"],
    pages: LatentPages,
    up: Float[Array, "heads n rank"],
    table: Int32[Array, "slots max_pages"],
    *,
    slots: Int32[Array, "rows"],
    start: Int32[Array, "rows"],
    lengths: Int32[Array, "rows"] | None = None,
    order: Int32[Array, "slots max_pending"] | None = None,
    ancestors: Bool[Array, "rows time time"] | None = None,
    scale: float | None = None,
    implementation: str = "auto",
    interpret: bool = False,
    target: Target | str | None = None,
) -> tuple[Float[Array, "rows time heads value_dim"], LatentPages]:
    """Writes new latents to their pages, then attends to all that is there.

    Up to AT_ONCE tokens of a row at once, and trees of any size, are absorbed. More are a chunk of a prompt: it is
    expanded, and what its slots committed before is, in pieces, as it is copied out of the pages.

    Args:
      q: A head's query of key_dim numbers, then what meets the key part that all heads share.
      latents: As `LatentPages` keeps them; rounded to its dtype.
      pages: The layer's pool.
      up: Of each head key_dim rows for keys, then value_dim rows for values; in q's dtype.
      table, slots, start, lengths, order, ancestors: As in `jaxbuf.attention.paged_launch.append_and_attend`.
      scale: The scores q · k are multiplied with it; None: head_dim ** -0.5.
      implementation: "xla", "gpu" (of chunks: cuDNN's flash attention, as in `jaxbuf.attention.chunk.attend_chunk`),
        "tpu" (no chunks), or "auto": the target's kernel where it serves the call, else "xla".
      interpret: Run the kernel that was named in Pallas' interpreter, on any platform: slow, for tests.
      target: As in `jaxbuf.recurrence.launch.extend_pool`.

    Returns:
      The outputs in q's dtype, of scores, softmax and sums in float32, and the pool. Queries past `lengths` give finite
      numbers where q is finite, those of the null slot zeros.

    Raises:
      ValueError: A shape or dtype does not fit, or the implementation asked for can't serve the call; it says why.
    """
    (rows, time, heads, _), chunk = q.shape, q.shape[1] > AT_ONCE
    asked = ask(
        "attend_chunk" if chunk else "append_and_attend_latent", implementation, target, (q,), interpret=interpret
    )
    key_dim, value_dim = _check(q, latents, up, pages.rank)
    if latents.shape[2] != pages.key_dim:
        raise ValueError(f"latents must have the pool's {pages.key_dim} numbers a token, got {latents.shape[2]}")
    lengths = jnp.full_like(start, time) if lengths is None else lengths
    paged.check_integers(rows, slots=slots, start=start, lengths=lengths)
    paged.check_ancestors(ancestors, rows, time)
    slots, scale = checked_slots(slots, table.shape[0], once=True), _scale(q, scale)
    where = {"slots": slots, "start": start, "lengths": jnp.minimum(lengths, time), "order": order}
    if not chunk or ancestors is not None:
        wide = contract("bthc,hcr->bthr", q[..., :key_dim], up[:, :key_dim]).astype(q.dtype)
        wide = jnp.concatenate([wide, q[..., key_dim:]], axis=-1)
        if asked is not None and chunk:
            asked.takes("it needs tokens in a row, got a tree")
        elif asked is not None:
            from jaxbuf.pallas.attend import supports

            call = _absorbed_call(wide, pages, table, order)
            how: dict[str, Any] = {"rank": pages.rank, "platform": asked.platform, "generation": asked.generation}
            if asked.takes(supports(call, q=wide.dtype, k=latents.dtype, v=latents.dtype, **how)):
                out, pages = _by_kernel(call, asked, scale, wide, latents, pages, table, where, ancestors)
                return contract("bthr,hcr->bthc", out, up[:, key_dim:]).astype(q.dtype), pages
    at = paged.token_places(table, pages.page_size, time, **where)
    pages = dataclasses.replace(pages, latents=paged.write_tokens(pages.latents, at, latents[:, :, None]))
    if not chunk or ancestors is not None:
        out = paged.attend(wide, pages, table, **where, ancestors=ancestors, scale=scale, implementation="xla")
        return contract("bthr,hcr->bthc", out, up[:, key_dim:]).astype(q.dtype), pages
    # The chunk's own tokens, too, are what the pages keep of them.
    q, k, v = _expanded(q, latents.astype(pages.latents.dtype), up, key_dim, scale)
    by = flash
    if asked is not None:
        from jaxbuf.pallas import flash as kernels
        from jaxbuf.pallas.flash import gpu

        call = kernels.Call(rows, time, time, heads, heads, q.shape[3], q.dtype, asked.generation)
        if asked.takes(kernels.supports(call, k=k.dtype, v=v.dtype)):
            by = gpu.flash
    held, piece = _Expanded(pages, up, key_dim), max(time, TOKENS // rows)
    return attend_parts(by, q, k, v, held, table, **where, piece=piece)[..., :value_dim], pages


@partial(jax.jit, static_argnums=(0, 1, 2))
def _by_kernel(
    call: Call,
    asked: Asked,
    scale: float,
    wide: Array,
    latents: Array,
    pages: LatentPages,
    table: Array,
    where: dict[str, Any],
    ancestors: Array | None,
) -> tuple[Array, LatentPages]:
    if asked.platform == "gpu":
        from jaxbuf.pallas.attend import gpu_latent

        plan = gpu_latent.arrange(call, rank=pages.rank, scale=scale)
        integers = gpu_integers(call, plan.groups, launch_places(call, table, **where, ancestors=ancestors), units=True)
        run = gpu_latent.append_and_attend
        out, pool = run(plan, integers, pages.latents, wide, latents, interpret=asked.interpret)
    else:
        from jaxbuf.pallas.attend import tpu, tpu_call

        plan = tpu_call.arrange(call, asked.generation, rank=pages.rank, scale=scale)
        integers = tpu_integers(plan, launch_places(call, table, **where, ancestors=ancestors))
        held, new = (pages.latents,), (latents[:, :, None],)
        out, (pool,) = tpu.append_and_attend(plan, integers, held, wide, new, interpret=asked.interpret)
    return out, dataclasses.replace(pages, latents=pool)


def _absorbed_call(wide: Array, pages: LatentPages, table: Array, order: Array | None) -> Call:
    return Call(
        rows=wide.shape[0],
        time=wide.shape[1],
        heads=wide.shape[2],
        kv_heads=pages.kv_heads,
        head_dim=pages.key_dim,
        page_size=pages.page_size,
        max_pages=table.shape[1],
        listed=0 if order is None else order.shape[1],
        dtype=pages.latents.dtype,
    )


def causal_latent_attention(
    q: Float[Array, "batch time heads head_dim"],
    latents: Float[Array, "batch time latent"],
    up: Float[Array, "heads n rank"],
    *,
    lengths: Int32[Array, "batch"] | None = None,
    scale: float | None = None,
    target: Target | str | None = None,
) -> Float[Array, "batch time heads value_dim"]:
    """Latent attention over whole sequences, without pages: expanded, by `causal_attention`. Differentiable.

    Args:
      q, latents, up, scale: As in `append_and_attend_latent`.
      lengths, target: As in `causal_attention`.

    Raises:
      ValueError: A shape or dtype does not fit.
    """
    key_dim, value_dim = _check(q, latents, up, up.shape[2])
    q, k, v = _expanded(q, latents, up, key_dim, _scale(q, scale))
    return causal_attention(q, k, v, lengths=lengths, target=target)[..., :value_dim]


def _scale(q: Array, scale: float | None) -> float:
    return q.shape[3] ** -0.5 if scale is None else scale


def _expanded(q: Array, latents: Array, up: Array, key_dim: int, scale: float) -> tuple[Array, Array, Array]:
    """Queries, keys and values of one width, for attention that scales with that width ** -0.5."""
    k, v = _keys_and_values(latents, up, key_dim)
    width = k.shape[3]
    if scale != width**-0.5:
        q = (q.astype(jnp.float32) * (scale * width**0.5)).astype(q.dtype)
    return _padded(q, width), k, v


def _keys_and_values(latents: Array, up: Array, key_dim: int) -> tuple[Array, Array]:
    """The keys and values [rows, n, heads, width] of latents [rows, n, rank + shared], in up's dtype.

    Flash attention takes one width: behind the narrower of the two there are zeros.
    """
    (heads, numbers, rank), latents = up.shape, latents.astype(up.dtype)
    made = contract("bnr,hcr->bnhc", latents[..., :rank], up).astype(up.dtype)
    shared = jnp.broadcast_to(latents[:, :, None, rank:], (*made.shape[:2], heads, latents.shape[2] - rank))
    k, v = jnp.concatenate([made[..., :key_dim], shared], axis=-1), made[..., key_dim:]
    width = max(k.shape[3], numbers - key_dim)
    return _padded(k, width), _padded(v, width)


def _padded(x: Array, width: int) -> Array:
    return jnp.pad(x, ((0, 0),) * 3 + ((0, width - x.shape[3]),))


def _check(q: Array, latents: Array, up: Array, rank: int) -> tuple[int, int]:
    """How many rows of `up` each head has for keys and for values; raises a ValueError that names what does not fit."""
    rows, time, heads, head_dim = q.shape
    if latents.shape[:2] != (rows, time):
        raise ValueError(f"latents must have q's rows and tokens {(rows, time)}, got {latents.shape[:2]}")
    if (up.shape[0], up.shape[2]) != (heads, rank):
        raise ValueError(f"up must have q's heads ({heads}) and the rank ({rank}), got shape {up.shape}")
    if up.dtype != q.dtype:
        raise ValueError(f"up must have q's dtype {q.dtype.name}, got {up.dtype.name}")
    shared = latents.shape[2] - rank
    if not 0 <= shared <= head_dim:
        raise ValueError(
            f"latents must have the rank ({rank}) and up to q's head_dim ({head_dim}) numbers a token, got "
            f"{latents.shape[2]}"
        )
    key_dim = head_dim - shared
    if up.shape[1] <= key_dim:
        raise ValueError(f"up must have more than {key_dim} rows a head, those for keys, got {up.shape[1]}")
    return key_dim, up.shape[1] - key_dim

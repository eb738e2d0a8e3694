"""Multi-head latent attention: the softmax layer of DeepSeek-V2, which Kimi-Linear and Ling 3.0 have, too."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxbuf.attention.latent import init_latent
from jaxbuf.attention.paged_memory import PageTable
from jaxbuf.attention.rotary import Rotary, rotate
from jaxbuf.axes import Array, Float
from jaxbuf.models.config import ATTENTION
from jaxbuf.models.layers import Initializer, Norm, add_bias, norm_weight, output, parameter, rms_norm, zeros
from jaxbuf.models.projections import Summands, project
from jaxbuf.models.tensor_parallel import Part, share


@dataclasses.dataclass(frozen=True)
class LatentAttention:
    """The mixer.

    Attributes:
      heads: Of queries, keys and values.
      key_dim, shared_dim: Numbers of a head's query and key: its own, and those whose key part all heads share.
      value_dim: Numbers of a head's value.
      rank: Numbers of a token from which all heads make their keys and values.
      rotary: The positions of the shared part, of which it turns all shared_dim channels; None: there are none. Pairs
        are next to each other in the checkpoint's rows, (x0, x1), (x2, x3) and on.
      query_rank: Numbers of a token from which all heads make their queries; None: the queries are made from the input.
      head_gate: Whether each head's output is multiplied with the sigmoid of a number, a projection of the input.
      bias: Whether the first projections, those to the two ranks, and the last one add one.
      latent_eps: Is added to the mean squares in the norms of the two ranks.
      devices: Who share the heads; their number is then one device's.

    Source: DeepSeek-V2 (2024), section 2.1; the gate as in Ling 3.0.
    """

    heads: int
    key_dim: int
    shared_dim: int
    value_dim: int
    rank: int
    rotary: Rotary | None
    query_rank: int | None = None
    head_gate: bool = False
    bias: bool = False
    latent_eps: float = 1e-6
    devices: int = 1

    @property
    def kind(self) -> str:
        return ATTENTION

    @property
    def width(self) -> int:
        return 0

    @property
    def channels(self) -> int:
        return 0

    @property
    def kv_numbers(self) -> int:
        return self.rank + self.shared_dim

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values once they are expanded."""
        return self.heads

    @property
    def head_dim(self) -> int:
        """Of queries, keys and values once they are expanded, as flash attention takes them: of the widest."""
        return max(self.key_dim + self.shared_dim, self.value_dim)

    def spread(self, devices: int) -> "LatentAttention":
        """What each of so many devices has of it, latents among it; errors as in `Mixer.spread`."""
        return dataclasses.replace(self, heads=share("query heads", self.heads, devices), devices=devices)

    def parameters(self, hidden: int, *, initializer: Initializer, rngs: nnx.Rngs, dtype: jnp.dtype):
        return LatentAttentionParameters(self, hidden, initializer=initializer, rngs=rngs, dtype=dtype)

    def memory(self, shared: PageTable, dtypes, number: int):
        sizes = {"pages": shared.pages, "page_size": shared.page_size}
        return init_latent(**sizes, rank=self.rank, shared_dim=self.shared_dim, dtype=dtypes.dtype)

    def __call__(
        self, parameters: "LatentAttentionParameters", x: Float[Array, "rows time hidden"], memory: Any, plan: Any
    ) -> tuple[Float[Array, "rows time hidden"] | Summands, Any]:
        """Applies the layer; `plan` is one of `jaxbuf.attention.attention_plan`."""
        p, (batch, time), norm = parameters, x.shape[:2], Norm(self.latent_eps)
        with jax.named_scope("projections"):
            first = p.q_proj if p.q_down is None else p.q_down
            weights = [w[...] for w in (first, p.kv_down, p.gate) if w is not None]
            kept = (False, False, True)[: len(weights)]  # the gate is never rounded
            q, latents, *gates = project(x, weights, float32=kept, target=plan.target)
            if p.q_norm is not None:
                q = rms_norm(add_bias(q, p.q_down_bias), p.q_norm, norm)
                (q,) = project(q, [p.q_proj[...]], target=plan.target)
            q = q.reshape(batch, time, self.heads, self.key_dim + self.shared_dim)
            latents, shared = jnp.split(add_bias(latents, p.kv_down_bias), [self.rank], axis=-1)
            latents = rms_norm(latents, p.kv_norm, norm)
            if self.rotary is not None:
                angles = plan.angles(self.rotary)
                own, turned = jnp.split(q, [self.key_dim], axis=-1)
                q = jnp.concatenate([own, rotate(_half_split(turned), angles)], axis=-1)
                shared = rotate(_half_split(shared[:, :, None]), angles)[:, :, 0]
            latents = jnp.concatenate([latents, shared], axis=-1)
            up = p.kv_up[...].reshape(self.heads, self.key_dim + self.value_dim, self.rank)
        with jax.named_scope("attention"):
            out, memory = plan.attend_latent(memory, q, latents, up, (self.key_dim + self.shared_dim) ** -0.5)
        with jax.named_scope("output"):
            if self.head_gate:
                out = (out.astype(jnp.float32) * jax.nn.sigmoid(gates[0])[..., None]).astype(x.dtype)
            out = out.reshape(batch, time, self.heads * self.value_dim)
            return output(out, p.o_proj, p.o_bias, self.devices, plan.target), memory


def _half_split(x: Array) -> Array:
    """Channels [..., n] in pairs next to each other, as `rotate` has them: the first of each pair, then the second.

    They stay in this order: scores do not depend on it, as long as queries and keys have the same.
    """
    return jnp.swapaxes(x.reshape(*x.shape[:-1], -1, 2), -2, -1).reshape(x.shape)


class LatentAttentionParameters(nnx.Module):
    """Parameters of the mixer; those that it does not have are None.

    Attributes:
      q_proj: [heads · (key_dim + shared_dim), hidden, or query_rank with one].
      q_down: [query_rank, hidden]. q_down_bias, q_norm: [query_rank].
      kv_down: [rank + shared_dim, hidden], rows latent | shared part of the keys. kv_down_bias: One for each row.
      kv_norm: [rank].
      kv_up: [heads · (key_dim + value_dim), rank], each head's rows are key | value.
      o_proj: [hidden, heads · value_dim]. o_bias: [hidden].
      gate: [heads, hidden].
    """

    def __init__(
        self, mixer: LatentAttention, hidden: int, *, initializer: Initializer, rngs: nnx.Rngs, dtype: jnp.dtype
    ):
        heads, kept, query_rank = mixer.heads, mixer.rank + mixer.shared_dim, mixer.query_rank
        norm = Norm(mixer.latent_eps)

        def matrix(*sides):
            """Of a number of rows and of columns, or the part that devices share of them."""
            shape = tuple(side.length if isinstance(side, Part) else side for side in sides)
            axes = tuple((side,) if isinstance(side, Part) else None for side in sides)
            return parameter(rngs, shape, axes, initializer, dtype=dtype)

        def bias(rows):
            return parameter(rngs, (rows,), (None,), zeros, dtype=dtype) if mixer.bias else None

        ranked = query_rank is not None
        self.q_down = matrix(query_rank, hidden) if ranked else None
        self.q_down_bias = bias(query_rank) if ranked else None
        self.q_norm = norm_weight(rngs, query_rank, norm, dtype=dtype) if ranked else None
        self.q_proj = matrix(Part("heads", heads, mixer.key_dim + mixer.shared_dim), query_rank if ranked else hidden)
        self.kv_down, self.kv_down_bias = matrix(kept, hidden), bias(kept)
        self.kv_norm = norm_weight(rngs, mixer.rank, norm, dtype=dtype)
        self.kv_up = matrix(Part("heads", heads, mixer.key_dim + mixer.value_dim), mixer.rank)
        self.o_proj, self.o_bias = matrix(hidden, Part("heads", heads, mixer.value_dim)), bias(hidden)
        self.gate = matrix(Part("heads", heads), hidden) if mixer.head_gate else None

"""Random launches on pages of latents, and what they give in float64, where every key and value is made."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxbuf.attention.latent import LatentPages
from tests.attention.launches import Sizes, make_launch

COMMITTED = (9, 0, 130, 40, 79)  # tokens of each row; the first row has the null slot


@dataclasses.dataclass(frozen=True)
class Dims:
    """As `LatentAttention` has them."""

    heads: int
    key_dim: int
    shared: int
    value_dim: int
    rank: int

    @property
    def query(self) -> int:
        return self.key_dim + self.shared

    @property
    def latent(self) -> int:
        return self.rank + self.shared

    def up(self, rng, dtype="float32"):
        shape = self.heads, self.key_dim + self.value_dim, self.rank
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(self.rank), dtype)


def definition(q, latents, up):
    """Each query's output [..., value_dim] over all tokens.

    q [..., heads, key_dim + shared], latents [n, rank + shared], up [heads, key_dim + value_dim, rank].
    """
    q, latents, up = (np.asarray(x, np.float64) for x in (q, latents, up))
    rank = up.shape[2]
    key_dim = q.shape[-1] - (latents.shape[1] - rank)
    made = np.einsum("hcr,nr->nhc", up, latents[:, :rank])
    scores = np.einsum("...hc,nhc->...hn", q[..., :key_dim], made[..., :key_dim])
    scores = (scores + np.einsum("...hc,nc->...hn", q[..., key_dim:], latents[:, rank:])) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return np.einsum("...hn,nhc->...hc", weights, made[..., key_dim:])


def random_launch(rng, dims, time, dtype="float32", committed=COMMITTED, **kind):
    """A launch on pages of latents, and the arguments of `append_and_attend_latent` for it.

    `committed`: tokens of each row, of which the first has the null slot; `kind`: of `Sizes`.
    """
    up = dims.up(rng, dtype)

    def attend(q, keys, values):
        return definition(q[:, : dims.query], keys[:, 0], up)

    sizes = Sizes(committed, time, dims.heads, 1, dims.latent, dtype=dtype, **kind)
    launch = make_launch(rng, sizes, attend, dims.value_dim)
    q, k, _, kv, table = launch.arrays
    return launch, (q[..., : dims.query], k[:, :, 0], LatentPages(kv.keys, dims.rank), up, table)


def absorbed_launch(rng, heads, time, committed, dtype="bfloat16", *, rank=512, shared=64, **kind):
    """A launch whose queries and outputs no product rounds: what makes keys and values of a latent changes nothing.

    Arguments and results as of `random_launch`; `rank` and `shared`: numbers of a latent.
    """
    latent = rank + shared

    def attend(q, keys, _):
        scores = q @ keys[:, 0].T / np.sqrt(latent)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True) @ keys[:, 0, :rank]

    launch = make_launch(rng, Sizes(committed, time, heads, 1, latent, dtype=dtype, **kind), attend, rank)
    q, k, _, kv, table = launch.arrays
    up = jnp.broadcast_to(jnp.concatenate([jnp.eye(rank, dtype=dtype)] * 2), (heads, 2 * rank, rank))
    return launch, (q, k[:, :, 0], LatentPages(kv.keys, rank), up, table)

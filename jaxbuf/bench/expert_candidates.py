"""What `jaxbuf bench experts` compares: ways to compute `jaxbuf.models.experts.mixture` with gated experts."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxbuf.axes import Array
from jaxbuf.models.experts import mixture

# Options of XLA's GPU compiler with which a program of xla's is compiled.
OPTIONS = {
    "xla-fusion": "xla_gpu_experimental_use_ragged_dot_fusion",
    "xla-grouped": "xla_gpu_experimental_use_ragged_dot_grouped_gemm",
}
MOST_GATHERED = 2**33  # bytes of gathered matrices
BLOCK = {"block_m": 64, "block_n": 128, "block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 1}  # the library's


def gather(x: Array, first: Array, second: Array, chosen: Array, weights: Array) -> Array:
    """Each token times the matrices of its own experts, as if every token had weights of its own.

    Raises:
      ValueError: The matrices would take more than MOST_GATHERED bytes, if they are written.
    """
    needed = chosen.size * (first[0].nbytes + second[0].nbytes)
    if needed > MOST_GATHERED:
        raise ValueError(f"{needed / 1e9:.0f} GB of matrices would be gathered, at most {MOST_GATHERED / 1e9:.0f}")
    multiply = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None)
    gate, up = jnp.split(multiply("ti,tcoi->tco", x, first[chosen]), 2, axis=-1)
    each = multiply("tco,tcio->tci", jax.nn.silu(gate) * up, second[chosen])
    return jnp.sum(each.astype(jnp.float32) * weights[:, :, None], axis=1).astype(x.dtype)


def library(x: Array, first: Array, second: Array, chosen: Array, weights: Array) -> Array:
    """The mixture with products by JAX's own kernel for groups of rows on Hopper GPUs."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot  # it imports JAX's testing tools

    by_expert = chosen.reshape(-1)
    order = jnp.argsort(by_expert, stable=True)
    groups = jnp.zeros(first.shape[0], jnp.int32).at[by_expert].add(1)
    multiply = functools.partial(ragged_dot, group_sizes=groups, transpose_rhs=True, **BLOCK)
    gate, up = jnp.split(multiply(x[order // chosen.shape[1]], first), 2, axis=-1)
    each = multiply(jax.nn.silu(gate) * up, second)
    each = jnp.zeros_like(each).at[order].set(each).reshape(*chosen.shape, -1)
    return jnp.sum(each.astype(jnp.float32) * weights[:, :, None], axis=1).astype(x.dtype)


CANDIDATES: dict[str, Callable[..., Array]] = {
    "xla": functools.partial(mixture, implementation="xla"),
    "xla-fusion": functools.partial(mixture, implementation="xla"),
    "xla-grouped": functools.partial(mixture, implementation="xla"),
    "gather": gather,
    "gpu": functools.partial(mixture, implementation="gpu"),
    "library": library,
}
ON_GPUS = ("xla-fusion", "xla-grouped", "gpu", "library")


def mixture_by(implementation: str, x: Array, first: Array, second: Array, chosen: Array, weights: Array) -> Array:
    """`mixture` by one of CANDIDATES."""
    return CANDIDATES[implementation](x, first, second, chosen, weights)

"""Products that are summed in float32 whatever the operands are, on every platform."""

import jax
import jax.numpy as jnp

from jaxbuf.axes import Array, Float, Float32


def contract(subscripts: str, a: Float[Array, "..."], b: Float[Array, "..."]) -> Float32[Array, "..."]:
    """An einsum of two arrays of one dtype, accumulated and returned in float32.

    float32 operands are multiplied in full (a GPU's default would be TF32, a TPU's bfloat16). Narrower ones are
    multiplied as they are, except on a CPU, where XLA has no such product: widening them first gives the same number.
    """
    if a.dtype == jnp.float32:
        return jnp.einsum(subscripts, a, b, precision=jax.lax.Precision.HIGHEST)

    def widened(a, b):
        return jnp.einsum(subscripts, a.astype(jnp.float32), b.astype(jnp.float32))

    def narrow(a, b):
        return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)

    return jax.lax.platform_dependent(a, b, cpu=widened, default=narrow)

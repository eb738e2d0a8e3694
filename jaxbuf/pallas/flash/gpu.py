"""cuDNN's flash attention, as XLA calls it.

`jax.nn.dot_product_attention(implementation="cudnn")` makes the same custom calls, but looks at the GPU of the process
that traces it, so that a CPU can't lower a program for an H100, and rounds the log-sum-exp to the dtype of the outputs:
to a bfloat16, off by up to 2 % of a weight, which is too coarse to merge parts of a softmax with. So the calls are made
here, through `jax.ffi`. Their names and the fields of their configuration are XLA's (its `CudnnfMHABackendConfig`).

cuDNN multiplies masked probabilities, which are 0, with keys and values: callers select away what is not finite there.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp

from jaxbuf.axes import Array, Float, Float32, Int32

FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
ELEMENTS = {"bfloat16": "BF16", "float16": "F16"}
# XLA's products, by their names in the configuration: the dimensions that each sums over, and those that both operands
# share, of the left and of the right operand. Queries, keys, values and outputs are [batch, time, heads, head_dim];
# scores, probabilities and their gradients [batch, heads, queries, keys].
SCORES = ("bmm1", (3, 3), (0, 2), (0, 2))
OUT = ("bmm2", (3, 1), (0, 1), (0, 2))
GRADIENTS = (
    ("bmm1_grad_gemm1", (2, 1), (0, 1), (0, 2)),  # of scores and queries: that of keys
    ("bmm1_grad_gemm2", (3, 1), (0, 1), (0, 2)),  # of scores and keys: that of queries
    ("bmm2_grad_gemm1", (2, 1), (0, 1), (0, 2)),  # of probabilities and outputs: that of values
    ("bmm2_grad_gemm2", (3, 3), (0, 2), (0, 2)),  # of outputs and values: that of probabilities
)


def flash(
    q: Float[Array, "rows time heads head_dim"],
    k: Float[Array, "rows n kv_heads head_dim"],
    v: Float[Array, "rows n kv_heads head_dim"],
    *,
    causal: bool = False,
    lengths: Int32[Array, "rows"] | None = None,
) -> tuple[Float[Array, "rows time heads head_dim"], Float32[Array, "rows heads time"]]:
    """`jaxbuf.attention.flash.flash`. Not differentiable, see `causal`.

    Of rows with a length of 0 the results are not specified.
    """
    rows, time, heads, _ = q.shape
    mask, operands = "CAUSAL" if causal else "NO_MASK", (q, k, v)
    if lengths is not None:
        mask = "PADDING_CAUSAL" if causal else "PADDING"
        # cuDNN leaves out the work of queries behind a row's last, too: here, of rows that have no key.
        queries = jnp.where(lengths > 0, time, 0).astype(jnp.int32)
        operands = *operands, queries, lengths
    results = (_head_major(q), jax.ShapeDtypeStruct((rows, heads, time), jnp.float32))
    layouts = ((0, 2, 1, 3), None)
    out, lse = _call(FORWARD, operands, results, layouts, _configuration(q, k.shape[1], mask, (SCORES, OUT)))
    return jnp.swapaxes(out, 1, 2), lse


@jax.custom_vjp
def _causal(q: Array, k: Array, v: Array) -> Array:
    return flash(q, k, v, causal=True)[0]


@jax.jit  # so that layers share a trace
def causal(
    q: Float[Array, "batch time heads head_dim"],
    k: Float[Array, "batch time kv_heads head_dim"],
    v: Float[Array, "batch time kv_heads head_dim"],
) -> Float[Array, "batch time heads head_dim"]:
    """The outputs of causal attention; differentiable, and the memory is linear in time."""
    return _causal(q, k, v)


def _forward(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, ...]]:
    out, lse = flash(q, k, v, causal=True)
    return out, (q, k, v, lse, out)


def _backward(kept: tuple[Array, ...], gradient: Array) -> tuple[Array, Array, Array]:
    q, k, v, lse, out = kept
    results, layouts = tuple(_head_major(x) for x in (q, k, v)), ((0, 2, 1, 3),) * 3
    configuration = _configuration(q, k.shape[1], "CAUSAL", GRADIENTS)
    found = _call(BACKWARD, (q, k, v, lse, gradient.astype(q.dtype), out), results, layouts, configuration)
    dq, dk, dv = (jnp.swapaxes(x, 1, 2) for x in found)
    return dq, dk, dv


_causal.defvjp(_forward, _backward)


def _head_major(x: Array) -> jax.ShapeDtypeStruct:
    """The shape of a result like x [batch, time, heads, head_dim]: XLA wants the heads before time in it, and the
    layout that it has in memory said besides."""
    batch, time, heads, head_dim = x.shape
    return jax.ShapeDtypeStruct((batch, heads, time, head_dim), x.dtype)


def _call(name: str, operands: tuple[Array, ...], results: tuple, layouts: tuple, configuration: dict[str, Any]):
    """The results of a custom call without the last one, its workspace, whose size XLA fills in."""
    call = jax.ffi.ffi_call(
        name,
        (*results, jax.ShapeDtypeStruct((0,), jnp.uint8)),
        output_layouts=(*layouts, None),
        custom_call_api_version=2,
        legacy_backend_config=json.dumps({"cudnn_fmha_backend_config": configuration}),
    )
    return call(*operands)[:-1]


def _configuration(q: Array, keys: int, mask: str, products: tuple) -> dict[str, Any]:
    """XLA's `CudnnfMHABackendConfig` as JSON has it, where numbers of 64 bits are strings."""
    batch, time, heads, head_dim = q.shape
    scores = {
        "element_type": ELEMENTS[q.dtype.name],
        "dimensions": [str(size) for size in (batch, heads, time, keys)],
        "layout": {"minor_to_major": ["3", "2", "1", "0"]},
        "is_dynamic_dimension": [False] * 4,
    }
    return {
        "algorithm": {"algo_id": "0", "math_type": "TENSOR_OP_MATH", "is_cudnn_frontend": True},
        "fmha_scale": head_dim**-0.5,
        "intermediate_tensor_shape": scores,
        "is_flash_attention": True,
        "mask_type": mask,
        "dropout_rate": 0.0,
        "sliding_window_length": 0,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
        **{f"{name}_dot_dimension_numbers": _dimensions(*dimensions) for name, *dimensions in products},
    }


def _dimensions(summed: tuple[int, int], left: tuple[int, ...], right: tuple[int, ...]) -> dict[str, list[str]]:
    return {
        "lhs_contracting_dimensions": [str(summed[0])],
        "rhs_contracting_dimensions": [str(summed[1])],
        "lhs_batch_dimensions": [str(i) for i in left],
        "rhs_batch_dimensions": [str(i) for i in right],
    }

"""Checkpoints in block-scaled float8, and an independent definition of what their weights are."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

FLOAT8 = jnp.dtype("float8_e4m3fn")
KEPT = ("norm", "embed_tokens", "lm_head", "conv1d", "mlp.gate.", "shared_expert_gate", "in_proj_a.", "in_proj_b.")


def decoded(content):
    """The numbers of float8_e4m3fn bytes: a sign, four bits of an exponent with bias 7, three of a mantissa; 127 and
    255 are no numbers."""
    content = np.asarray(content, np.int64)
    exponent, mantissa = content >> 3 & 15, content & 7
    normal, small = 2.0 ** (exponent - 7) * (1 + mantissa / 8), 2.0**-6 * mantissa / 8
    values = np.where(content & 127 == 127, np.nan, np.where(exponent == 0, small, normal))
    return np.where(content & 128, -values, values)


def dequantized(content, scales, block):
    """Element by element: float8 bytes times the scale of the block, rounded to float32."""
    rows, columns = (np.arange(size) // each for size, each in zip(content.shape[-2:], block, strict=True))
    each = scales.astype(np.float64)[..., rows[:, None], columns[None]]
    return (decoded(content) * each).astype(np.float32)


def scales_shape(shape, block):
    return (*shape[:-2], *(-(-size // each) for size, each in zip(shape[-2:], block, strict=True)))


def draw(rng, shape, block):
    """Bytes of any finite weights, and float32 scales: some are large, some small, one is zero."""
    content = rng.integers(0, 256, shape, dtype=np.uint8)
    content[content & 127 == 127] = 0
    scales = np.exp(rng.uniform(-9, -4, scales_shape(shape, block))).astype(np.float32)
    scales.flat[rng.integers(scales.size)] = 0
    return content, scales


def quantization(block, **changes):
    """As Qwen's checkpoints have it."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
    } | changes


def is_quantized(name, tensor):
    return tensor.ndim > 1 and not any(part in name for part in KEPT) and not name.startswith("model.visual.")


def write_pair(source, quantized, plain, rng, block, scale_dtype=np.float32):
    """A checkpoint with float8 weights drawn anew, and the same with what these are in float32.

    Args:
      source: A checkpoint, whose shapes and other tensors both have.
      quantized, plain: Directories to make.
      rng: For the weights.
      block: Rows and columns of a scale.
      scale_dtype: Of the scales.
    """
    tensors, values = load_file(source / "model.safetensors"), {}
    for name in [name for name, tensor in tensors.items() if is_quantized(name, tensor)]:
        content, scales = draw(rng, tensors[name].shape, block)
        scales = scales.astype(scale_dtype)
        values[name] = dequantized(content, scales, block)
        tensors |= {name: content.view(FLOAT8), f"{name}_scale_inv": scales}
    assert values
    config = json.loads((source / "config.json").read_text())
    for directory, change in ((quantized, {"quantization_config": quantization(block)}), (plain, {})):
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config | change))
        given = tensors if change else {name: x for name, x in tensors.items() if not name.endswith("_scale_inv")}
        save_file(given | ({} if change else values), directory / "model.safetensors", metadata={"format": "pt"})
    return list(values)


def read_tensors(file):
    """As safetensors' load_file, which can't read float8: name -> array."""
    content = Path(file).read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + size]), content[8 + size :]
    dtypes = {"F8_E4M3": FLOAT8, "F32": np.float32, "BF16": jnp.bfloat16, "F64": np.float64}
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(body[slice(*entry["data_offsets"])], dtypes[entry["dtype"]]).reshape(entry["shape"]).copy()
        for name, entry in header.items()
    }


def change_tensors(directory, **changes):
    """Gives tensors other values, by names with __ for dots; None takes one away."""
    file = directory / "model.safetensors"
    tensors = read_tensors(file) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: x for name, x in tensors.items() if x is not None}, file, metadata={"format": "pt"})

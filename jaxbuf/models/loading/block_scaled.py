"""Weights in float8 with a scale for each block of rows and columns: the FP8 checkpoints of Qwen and DeepSeek.

A weight X of float8_e4m3fn, whose last two axes are out and in, has X_scale_inv beside it, of a number for each block:

    weight[..., i, j] = X[..., i, j] · X_scale_inv[..., i // rows, j // columns]

The last blocks of an axis may be cut off. `quantization_config` of config.json says how large blocks are; which tensors
are in float8 their dtype says. They are multiplied in float32 and rounded once, to the dtype of the parameters.

Source: transformers, FineGrainedFP8Config; DeepSeek-V3 Technical Report (2024), section 3.3.2.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxbuf.models.loading.fields import SIZE, CheckpointError, Fields
from jaxbuf.models.loading.stored_tensors import FLOAT8, Stored, listed

SCALE = "_scale_inv"
SCALE_DTYPES = ("F32", "BF16")
VALUES = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)  # of each byte

type Block = tuple[int, int]


def read_block(fields: Fields) -> Block | None:
    """Rows and columns of a block, from a config.json's quantization_config; None: it has none.

    Raises:
      CheckpointError: A field is of another type or out of range (a ValueError where no file is known).
      ValueError: A quantization that is not served; the message names it.
    """
    name = "quantization_config"
    nested = [fields.nested("text_config")] if isinstance(fields.values.get("text_config"), Mapping) else []
    places = [place.nested(name) for place in (fields, *nested) if place.has(name)]
    if not places:
        return None
    found = places[0]
    found.serve("quant_method", "fp8", words=" (other quantizations are not served)")
    words = " or two other sizes of blocks (fp8 with a scale for a tensor or a row is not served)"
    if not found.has("weight_block_size"):
        found.serve("weight_block_size", [128, 128], words=words)
    found.serve("fmt", "e4m3", default="e4m3")
    found.serve("activation_scheme", "dynamic", default="dynamic")
    block = found.integers("weight_block_size", (), most=SIZE)
    if len(block) != 2 or not all(block):
        found.fail("weight_block_size", "a list of two whole numbers of at least 1")
    return block[0], block[1]


class BlockScaled:
    """A weight in float8, read as float32 with its scales. A `Stored`."""

    def __init__(self, weight: Stored, scales: np.ndarray, block: Block):
        self.weight = weight
        self.scales = scales
        self.block = block

    def get_shape(self) -> Sequence[int]:
        return self.weight.get_shape()

    def get_dtype(self) -> str:
        return self.weight.get_dtype()

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        *outer, rows, columns = (range(size)[part] for size, part in zip(self.get_shape(), index, strict=True))
        content, height = self.weight[index], self.block[0]
        values = np.empty(content.shape, np.float32)
        scales = self.scales[tuple(slice(axis.start, axis.stop) for axis in outer)]
        scales = np.take(scales, np.arange(columns.start, columns.stop) // self.block[1], axis=-1)
        # Block by block, what is multiplied is still in the processor's cache.
        for number in range(rows.start // height, -(-rows.stop // height)):
            start, stop = max(rows.start, number * height), min(rows.stop, (number + 1) * height)
            part = (..., slice(start - rows.start, stop - rows.start), slice(None))
            values[part] = np.take(VALUES, content[part], mode="clip")
            values[part] *= scales[..., number, None, :]
        return values


def with_scales(
    directory: Path, tensors: Mapping[str, Stored], block: Block | None, ignored: Collection[str]
) -> dict[str, Stored]:
    """The tensors of a checkpoint, each float8 weight with its scales, which are left out.

    Args:
      directory: Of the checkpoint, for errors.
      tensors: Those of its files.
      block: From its config.json.
      ignored: Names of tensors that are not read.

    Raises:
      CheckpointError: Float8 weights in a checkpoint without `block`, or weights and scales that do not fit each other.
    """
    found = {name: stored for name, stored in tensors.items() if name not in ignored}
    weights = [name for name, stored in found.items() if stored.get_dtype() == FLOAT8]
    if block is None:
        if weights:
            names = listed({"tensors in float8_e4m3fn need quantization_config with weight_block_size": weights})
            raise CheckpointError(f"{directory / 'config.json'} does not say how weights are quantized; {names}")
        return dict(tensors)
    scales = {name.removesuffix(SCALE): stored for name, stored in found.items() if name.endswith(SCALE)}
    wrong = {
        "scales without their weight": [name + SCALE for name in scales if name not in found],
        "scales of a weight that is not F8_E4M3": [
            f"{name}{SCALE} (the weight is {found[name].get_dtype()})"
            for name in scales
            if name in found and name not in weights
        ],
        "weights in F8_E4M3 without scales": [
            f"{name} (expected {name}{SCALE})" for name in weights if name not in scales
        ],
        "weights in F8_E4M3 with fewer than two axes": [],
        "misshapen scales": [],
        f"scales of another dtype than {' or '.join(SCALE_DTYPES)}": [],
        "scales that are not finite": [],
    }
    *_, axes, misshapen, dtypes, infinite = wrong.values()
    numbers: dict[str, np.ndarray] = {}
    for name in weights:
        if name not in scales:
            continue
        shape, given = list(found[name].get_shape()), scales[name]
        if len(shape) < 2:
            axes.append(f"{name} (found {shape})")
            continue
        blocks = [math.ceil(size / each) for size, each in zip(shape[-2:], block, strict=True)]
        if list(given.get_shape()) != [*shape[:-2], *blocks]:
            misshapen.append(f"{name}{SCALE} (found {list(given.get_shape())}, expected {[*shape[:-2], *blocks]})")
        elif given.get_dtype() not in SCALE_DTYPES:
            dtypes.append(f"{name}{SCALE} (found {given.get_dtype()})")
        else:
            numbers[name] = np.asarray(given[(slice(None),) * len(shape)], np.float32)
            if not np.isfinite(numbers[name]).all():
                infinite.append(name + SCALE)
    if message := listed(wrong):
        raise CheckpointError(f"the float8 weights in {directory} do not fit their scales; {message}")
    left = {name: stored for name, stored in tensors.items() if name.removesuffix(SCALE) not in numbers}
    return left | {name: BlockScaled(found[name], numbers[name], block) for name in weights}

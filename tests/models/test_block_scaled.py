"""Checkpoints in block-scaled float8 load as those of their dequantized weights; all that does not fit is an error."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import jaxbuf
from jaxbuf.models.decoder import Decoder
from jaxbuf.models.families import config_from_dict, family_of
from jaxbuf.models.language_model import load
from jaxbuf.models.layers import named_parameters
from jaxbuf.models.loading import checkpoint
from jaxbuf.models.loading.block_scaled import BlockScaled, with_scales
from jaxbuf.models.loading.checkpoint import CheckpointError
from jaxbuf.models.loading.source import stored_shapes
from jaxbuf.models.loading.stored_tensors import Float8Bytes, open_tensors
from jaxbuf.planning.model_sizes import find_sizes
from tests.models.float8_files import (
    FLOAT8,
    change_tensors,
    decoded,
    dequantized,
    draw,
    quantization,
    read_tensors,
    scales_shape,
    write_pair,
)

FIXTURES = Path(__file__).parent.parent / "fixtures"
BLOCK = (24, 20)  # divides few of the fixtures' shapes
WEIGHT = "model.layers.1.mlp.up_proj.weight"  # [80, 40]
SCALE = f"{WEIGHT}_scale_inv"


def values(lm):
    return {path: np.asarray(param[...]) for path, param in named_parameters(lm.model).items()}


def assert_same(found, expected):
    assert found.config == expected.config and found.dtype == expected.dtype
    ours, theirs = values(found), values(expected)
    assert ours.keys() == theirs.keys()
    for path, value in theirs.items():
        assert value.dtype == ours[path].dtype and value.tobytes() == ours[path].tobytes(), path


@pytest.fixture
def directory(tmp_path, rng):
    """A small dense model in float8."""
    write_pair(FIXTURES / "qwen3_plain" / "checkpoint", tmp_path / "q", tmp_path / "p", rng, BLOCK)
    return tmp_path / "q"


def test_every_byte_is_its_number():
    content = np.arange(256, dtype=np.uint8).reshape(16, 16)
    scaled = BlockScaled(Float8Bytes(content), np.ones((1, 1), np.float32), (16, 16))
    found = scaled[slice(None), slice(None)]
    np.testing.assert_array_equal(found, decoded(content))
    assert np.nanmax(found) == 448 and np.isnan(found).sum() == 2


@pytest.mark.parametrize("leading", [(), (3,)])
def test_any_part_of_a_weight_is_that_part_of_the_whole(leading, rng):
    for _ in range(60):
        shape = (*leading, *(int(size) for size in rng.integers(1, 40, 2)))
        block = int(rng.integers(1, 45)), int(rng.integers(1, 45))
        content, scales = draw(rng, shape, block)
        whole = dequantized(content, scales, block)
        scaled = BlockScaled(Float8Bytes(content), scales, block)
        np.testing.assert_array_equal(scaled[(slice(None),) * len(shape)], whole)
        ends = [np.sort(rng.integers(0, size + 1, 2)) for size in shape]
        part = tuple(slice(int(start), int(stop)) for start, stop in ends)
        found = scaled[part]
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, whole[part])


def test_float8_tensors_are_found_in_a_file_among_others(tmp_path, rng):
    """In whatever order the file has them, and where they begin at no multiple of anything."""
    tensors = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.integers(0, 256, (7, 3), dtype=np.uint8).view(FLOAT8),
        "c": rng.integers(0, 256, (2, 3, 5), dtype=np.uint8).view(FLOAT8),
        "d": rng.standard_normal(9).astype(jnp.bfloat16),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with open_tensors(tmp_path) as found:
        for name, tensor in tensors.items():
            stored = found[name]
            assert tuple(stored.get_shape()) == tensor.shape
            content = stored[(slice(1, None),) + (slice(None),) * (tensor.ndim - 1)]
            assert content.tobytes() == tensor[1:].tobytes(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", None])
@pytest.mark.parametrize(
    ("name", "scale_dtype"),
    [
        ("qwen3_full", np.float32),
        ("qwen3_moe_full", np.float32),  # a tensor for each expert
        ("qwen3_5_moe_full", jnp.bfloat16),  # experts stacked, an MTP layer, and a vision tower
        ("qwen3_next_full", np.float32),  # fused projections that are taken apart by rows
        ("olmo_hybrid_full", np.float32),
        ("nemotron_h_full", jnp.bfloat16),
    ],
)
def test_float8_weights_are_loaded_as_what_they_stand_for(name, scale_dtype, dtype, tmp_path, rng):
    source = FIXTURES / name / "checkpoint"
    quantized = write_pair(source, tmp_path / "q", tmp_path / "p", rng, BLOCK, scale_dtype)
    assert len(quantized) > 5
    assert_same(load(tmp_path / "q", dtype=dtype), load(tmp_path / "p", dtype=dtype))


def test_the_tensors_of_a_published_checkpoint(rng):
    """Qwen3.5-27B-FP8: 14 tensors a linear layer, 11 a softmax layer and the MTP layer, and 7 beside them. Names and
    shapes, of scales too, are what its files have."""
    sizes = {"hidden_size": 5120, "intermediate_size": 17_408, "num_hidden_layers": 64, "vocab_size": 248_320}
    heads = {"num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "mtp_num_hidden_layers": 1}
    heads |= {"linear_num_key_heads": 16, "linear_num_value_heads": 48}
    heads |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "tie_word_embeddings": False}
    text = {"model_type": "qwen3_5_text"} | sizes | heads
    quantized = quantization((128, 128), modules_to_not_convert=["lm_head", "model.visual.blocks.0.attn.qkv"])
    config = config_from_dict({"model_type": "qwen3_5", "text_config": text, "quantization_config": quantized})
    abstract = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    shapes = {path: param.get_raw_value().shape for path, param in named_parameters(abstract).items()}
    found = stored_shapes(family_of(config).tensors(config, {"model.language_model.embed_tokens.weight"}), shapes)
    assert len(found) == 48 * 14 + 17 * 11 + 7
    layers = "model.language_model.layers."
    expected = {
        f"{layers}0.linear_attn.in_proj_qkv.weight": (10_240, 5120),
        f"{layers}0.linear_attn.conv1d.weight": (10_240, 1, 4),
        f"{layers}0.linear_attn.A_log": (48,),
        f"{layers}0.linear_attn.norm.weight": (128,),
        f"{layers}0.mlp.gate_proj.weight": (17_408, 5120),
        f"{layers}0.input_layernorm.weight": (5120,),
        f"{layers}3.self_attn.q_proj.weight": (12_288, 5120),
        f"{layers}3.self_attn.k_proj.weight": (1024, 5120),
        f"{layers}3.self_attn.o_proj.weight": (5120, 6144),
        f"{layers}3.self_attn.q_norm.weight": (256,),
        "mtp.layers.0.self_attn.q_proj.weight": (12_288, 5120),
        "mtp.layers.0.mlp.down_proj.weight": (5120, 17_408),
        "mtp.fc.weight": (5120, 10_240),
        "model.language_model.norm.weight": (5120,),
        "lm_head.weight": (248_320, 5120),
    }
    assert {name: found.get(name) for name in expected} == expected
    scales = {
        f"{layers}0.linear_attn.in_proj_qkv.weight": (80, 40),
        f"{layers}0.mlp.gate_proj.weight": (136, 40),
        f"{layers}3.self_attn.q_proj.weight": (96, 40),
    }
    for name, shape in scales.items():
        stored = {
            name: Float8Bytes(np.broadcast_to(np.uint8(56), found[name])),  # ones
            f"{name}_scale_inv": Float32(rng.standard_normal(shape)),
        }
        given = with_scales(Path("a"), stored, (128, 128), ())
        part = given[name][slice(130, 140), slice(250, 260)]
        expected = stored[f"{name}_scale_inv"].values[1, [1] * 6 + [2] * 4].astype(np.float32)
        np.testing.assert_array_equal(part, np.broadcast_to(expected, (10, 10)))


class Float32:
    """Scales that lie in no file."""

    def __init__(self, values):
        self.values = values.astype(np.float32)

    def get_shape(self):
        return self.values.shape

    def get_dtype(self):
        return "F32"

    def __getitem__(self, index):
        return self.values[index]


def test_weights_that_are_read_in_pieces(tmp_path, rng, monkeypatch):
    source = FIXTURES / "qwen3_next_full" / "checkpoint"
    write_pair(source, tmp_path / "q", tmp_path / "p", rng, (7, 5))
    expected = load(tmp_path / "p", dtype="bfloat16")
    monkeypatch.setattr(checkpoint, "PIECE", 300)
    assert_same(load(tmp_path / "q", dtype="bfloat16"), expected)


def test_shards_with_an_index(directory, tmp_path):
    """A weight and its scales may lie in different files."""
    expected = load(directory)
    tensors = read_tensors(directory / "model.safetensors")
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith("_scale_inv")}
    (directory / "model.safetensors").unlink()
    files = {"model-00001-of-00002.safetensors": tensors, "model-00002-of-00002.safetensors": scales}
    for file, content in files.items():
        save_file(content, directory / file, metadata={"format": "pt"})
    weight_map = {name: file for file, content in files.items() for name in content}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same(load(directory), expected)


@pytest.mark.slow
def test_a_float8_checkpoint_generates_and_is_saved_as_its_dequantized_weights(tmp_path, rng):
    write_pair(FIXTURES / "qwen3_plain" / "checkpoint", tmp_path / "q", tmp_path / "p", rng, BLOCK)
    lm, plain = load(tmp_path / "q"), load(tmp_path / "p")
    prompts = [rng.integers(0, lm.vocab_size, size).tolist() for size in (3, 9)]
    tokens = [[one.tokens for one in jaxbuf.generate(each, prompts, 8)] for each in (lm, plain)]
    assert tokens[0] == tokens[1] and len(tokens[0][0]) == 8
    lm.save(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    saved, known = (load_file(tmp_path / folder / "model.safetensors") for folder in ("saved", "p"))
    assert saved.keys() == known.keys()
    for name, tensor in known.items():
        np.testing.assert_array_equal(saved[name], tensor.astype(np.float32), err_msg=name)


ON_MESH = """
import sys
import jax
import numpy as np
from jaxbuf.models.language_model import load
from jaxbuf.models.layers import named_parameters
mesh = jax.make_mesh((2,), ("tensor",))
both = [named_parameters(load(folder, dtype="bfloat16", mesh=mesh).model) for folder in sys.argv[1:]]
assert len(jax.devices()) == 2 and both[0].keys() == both[1].keys()
for path, param in both[0].items():
    pairs = zip(param[...].addressable_shards, both[1][path][...].addressable_shards, strict=True)
    assert all(np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes() for a, b in pairs), path
print(sum(not param[...].sharding.is_fully_replicated for param in both[0].values()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_full", "qwen3_5_moe_plain"])
def test_each_device_of_a_mesh_has_its_part_of_what_the_weights_stand_for(name, tmp_path, rng):
    write_pair(FIXTURES / name / "checkpoint", tmp_path / "q", tmp_path / "p", rng, BLOCK)
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", ON_MESH, str(tmp_path / "q"), str(tmp_path / "p")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment | {"PYTHONPATH": "."})
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 10


def test_the_dtype_without_a_word_on_it_is_that_of_what_is_not_quantized(directory, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    change_tensors(directory, model__norm__weight=np.ones(40, np.float32))
    assert load(directory).dtype == jnp.bfloat16  # the embedding's
    shape = read_tensors(directory / "model.safetensors")["model.embed_tokens.weight"].shape
    embedding = {"model__embed_tokens__weight": np.ones(shape, FLOAT8)}
    scales = {"model__embed_tokens__weight_scale_inv": np.ones(scales_shape(shape, BLOCK), np.float32)}
    change_tensors(directory, **embedding, **scales)
    assert load(directory).dtype == jnp.bfloat16


def test_progress_counts_a_byte_for_each_number(directory):
    calls = []
    load(directory, progress=lambda done, of: calls.append((done, of)))
    tensors = read_tensors(directory / "model.safetensors")
    total = sum(tensor.nbytes for name, tensor in tensors.items() if not name.endswith("_scale_inv"))
    assert calls[0] == (0, total) and calls[-1] == (total, total)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({SCALE: None}, rf"weights in F8_E4M3 without scales: {WEIGHT} \(expected {SCALE}\)$"),
        ({WEIGHT: None}, f"scales without their weight: {SCALE}$"),
        ({"lm_head.weight_scale_inv": np.ones((9, 2), np.float32)}, "scales without their weight: lm_head"),
        (
            {WEIGHT: np.ones((80, 40), np.float32)},
            rf"scales of a weight that is not F8_E4M3: {SCALE} \(the weight is F32\)$",
        ),
        ({SCALE: np.ones((4, 3), np.float32)}, rf"misshapen scales: {SCALE} \(found \[4, 3\], expected \[4, 2\]\)$"),
        ({SCALE: np.ones((2, 4), np.float32)}, rf"misshapen scales: {SCALE} \(found \[2, 4\], expected \[4, 2\]\)$"),
        ({SCALE: np.ones((), np.float32)}, rf"misshapen scales: {SCALE} \(found \[\], expected \[4, 2\]\)$"),
        (
            {SCALE: np.ones((4, 2), np.float64)},
            rf"scales of another dtype than F32 or BF16: {SCALE} \(found F64\)$",
        ),
        ({SCALE: np.full((4, 2), np.nan, np.float32)}, f"scales that are not finite: {SCALE}$"),
        ({SCALE: np.full((4, 2), np.inf, jnp.bfloat16)}, f"scales that are not finite: {SCALE}$"),
        (
            {"model.norm.weight": np.ones(40, FLOAT8), "model.norm.weight_scale_inv": np.ones(1, np.float32)},
            r"with fewer than two axes: model\.norm\.weight \(found \[40\]\)$",
        ),
    ],
)
def test_weights_and_scales_that_do_not_fit_are_named(directory, changes, message):
    change_tensors(directory, **{name.replace(".", "__"): tensor for name, tensor in changes.items()})
    with pytest.raises(CheckpointError, match=r"the float8 weights in .*/q do not fit their scales; .*" + message):
        load(directory)


def test_a_float8_weight_of_another_shape_is_misshapen(directory):
    other = {WEIGHT: np.ones((48, 40), FLOAT8), SCALE: np.ones((2, 2), np.float32)}
    change_tensors(directory, **{name.replace(".", "__"): tensor for name, tensor in other.items()})
    with pytest.raises(CheckpointError, match=rf"misshapen: {WEIGHT} \(found \[48, 40\], expected \[80, 40\]\)$"):
        load(directory)


def change_config(directory, **changes):
    file = directory / "config.json"
    data = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in data.items() if value is not None}))


def test_float8_weights_without_a_word_on_them(directory):
    change_config(directory, quantization_config=None)
    with pytest.raises(CheckpointError) as raised:
        load(directory)
    start = f"{directory / 'config.json'} does not say how weights are quantized; tensors in float8_e4m3fn need"
    assert str(raised.value).startswith(start) and "q_proj.weight" in str(raised.value)


def test_scales_without_a_word_on_them_are_not_expected(directory):
    change_config(directory, quantization_config=None)
    tensors = read_tensors(directory / "model.safetensors")
    wide = {name.replace(".", "__"): x.astype(np.float32) for name, x in tensors.items() if x.dtype == FLOAT8}
    change_tensors(directory, **wide)
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.0\.mlp\.down_proj\.weight_scale_inv, "):
        load(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({"quant_method": method}, rf"quant_method must be 'fp8' \(other quantizations .*, got '{method}'")
            for method in ("gptq", "awq", "bitsandbytes", "compressed-tensors", "mxfp4", "modelopt", "fbgemm_fp8")
        ),
        ({"quant_method": None}, "quant_method must be 'fp8' .*, got None"),
        ({"weight_block_size": None}, r"weight_block_size must be \[128, 128\] or two other .*a tensor.*, got None"),
        ({"activation_scheme": "static"}, "activation_scheme must be 'dynamic', got 'static'"),
        ({"fmt": "e5m2"}, "fmt must be 'e4m3', got 'e5m2'"),
        *(
            ({"weight_block_size": size}, "weight_block_size must be a list of .*, got ")
            for size in (128, [128], [128, 0], [128, -1], [128.0, 128], [128, "128"], [1, 2, 3], [2**31, 1], [True, 1])
        ),
    ],
)
def test_quantizations_that_are_not_served(directory, changes, message):
    data = json.loads((directory / "config.json").read_text())
    data["quantization_config"] = quantization(BLOCK, **changes)
    message = r"quantization_config\." + message
    with pytest.raises(ValueError, match=message):
        config_from_dict(data)
    change_config(directory, quantization_config=data["quantization_config"])
    for find in (load, find_sizes):
        with pytest.raises(
            (ValueError, CheckpointError), match=re.escape(str(directory / "config.json")) + ": " + message
        ):
            find(directory)
    with pytest.raises(ValueError, match=r"text_config\." + message):
        nested = {"model_type": "qwen3_5", "text_config": data}
        config_from_dict(nested)


def test_a_configuration_that_is_no_object_or_null(directory):
    change_config(directory, quantization_config=[1])
    with pytest.raises(CheckpointError, match=r"quantization_config must be an object, got \[1\]"):
        load(directory)
    data = json.loads((directory / "config.json").read_text()) | {"quantization_config": None}
    assert config_from_dict(data).family == "qwen3"


def test_a_mistake_in_a_float8_file_is_an_error_that_names_it(directory, tmp_path, rng):
    """Bytes changed in the header, or the file cut off: an error of the checkpoint, or a model."""
    file = directory / "model.safetensors"
    content, known = file.read_bytes(), load(directory)
    size = 8 + int.from_bytes(content[:8], "little")
    for draw_number in range(150):
        changed = bytearray(content)
        for _ in range(int(rng.integers(1, 4))):
            changed[rng.integers(8 if draw_number % 3 else 0, size)] = rng.integers(32, 127)
        file.write_bytes(changed if draw_number % 5 else changed[: rng.integers(len(changed))])
        try:
            assert load(directory).config == known.config
        except CheckpointError as error:
            assert str(directory) in str(error)

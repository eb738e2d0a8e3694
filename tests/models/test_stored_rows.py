"""Parameters that lie in a checkpoint as rows of several tensors, or share one: experts and fused projections."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxbuf.models.families import Rows, Source
from jaxbuf.models.language_model import load
from jaxbuf.models.layers import named_parameters
from jaxbuf.models.loading.checkpoint import CheckpointError
from jaxbuf.models.loading.source import stored_shapes

FIXTURES = Path(__file__).parent.parent / "fixtures"


def stacked(tensors):
    """The tensors with all experts of a layer in one."""
    found = dict(tensors)
    for place in {name.split("0.up_proj")[0] for name in tensors if name.endswith("experts.0.up_proj.weight")}:
        count = sum(name.startswith(place) and name.endswith(".up_proj.weight") for name in tensors)
        *first, down = (
            np.stack([found.pop(f"{place}{number}.{part}_proj.weight") for number in range(count)])
            for part in ("gate", "up", "down")
            if f"{place}0.{part}_proj.weight" in tensors
        )
        joined = "gate_up_proj" if len(first) == 2 else "up_proj"
        found |= {f"{place}{joined}": np.concatenate(first, axis=1), f"{place}down_proj": down}
    return found


def split(tensors, prefix):
    """The tensors with each expert's own, of the layers whose names begin like that."""
    found = dict(tensors)
    for name in [name for name in tensors if name.startswith(prefix) and name.endswith(("gate_up_proj", "s.up_proj"))]:
        place, joined = name.split("experts.")[0] + "experts.", found.pop(name)
        words = ("gate", "up", "down") if name.endswith("gate_up_proj") else ("up", "down")
        for number, (first, down) in enumerate(zip(joined, found.pop(f"{place}down_proj"), strict=True)):
            parts = zip(words, (*np.split(first, len(words) - 1), down), strict=True)
            found |= {f"{place}{number}.{part}_proj.weight": np.ascontiguousarray(value) for part, value in parts}
    return found


def rewritten(name, directory, change):
    """A fixture's checkpoint with other tensors, and these."""
    source = FIXTURES / name / "checkpoint"
    tensors = change(load_file(source / "model.safetensors"))
    shutil.copy(source / "config.json", directory)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return tensors


def values(lm):
    return {name: np.asarray(param[...]) for name, param in named_parameters(lm.model).items()}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen3_moe_full", stacked),
        ("qwen3_next_full", stacked),
        ("qwen3_5_moe_plain", lambda tensors: split(tensors, "model.")),
        ("qwen3_5_moe_full", lambda tensors: split(tensors, "mtp.")),
        ("nemotron_h_moe_plain", stacked),
        ("nemotron_h_moe_full", lambda tensors: split(tensors, "backbone.")),
    ],
)
def test_experts_are_read_and_written_in_the_layout_of_their_checkpoint(name, change, tmp_path):
    (tmp_path / "changed").mkdir()
    given = rewritten(name, tmp_path / "changed", change)
    lm, known = (load(place, dtype="float32") for place in (tmp_path / "changed", FIXTURES / name / "checkpoint"))
    jax.tree.map(np.testing.assert_array_equal, values(lm), values(known))
    lm.save(tmp_path / "saved", dtype="float32", shard_bytes=10_000)  # experts of a layer are in several shards
    files = sorted((tmp_path / "saved").glob("*.safetensors"))
    kept = {tensor: value for file in files for tensor, value in load_file(file).items()}
    given = {tensor: value for tensor, value in given.items() if not tensor.startswith("model.visual.")}
    given = {tensor.replace("model.language_model.", "model."): value for tensor, value in given.items()}
    assert len(files) > 5 and kept.keys() == given.keys()
    for tensor, value in given.items():
        np.testing.assert_array_equal(kept[tensor], value.astype(np.float32))
    again = load(tmp_path / "saved", dtype="float32")
    assert again.config == lm.config
    jax.tree.map(np.testing.assert_array_equal, values(again), values(lm))
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == kept.keys()


def test_experts_of_granite_under_the_names_that_transformers_has_itself(tmp_path):
    """They are read, and saved under those of released files."""
    names = {"router.layer.weight": "router.weight", "input_linear.weight": "experts.gate_up_proj"}
    names |= {"output_linear.weight": "experts.down_proj"}

    def renamed(tensors):
        pairs = {f"block_sparse_moe.{old}": f"block_sparse_moe.{new}" for old, new in names.items()}
        ends = {name: next((old for old in pairs if name.endswith(old)), None) for name in tensors}
        return {name.replace(old, pairs[old]) if (old := ends[name]) else name: x for name, x in tensors.items()}

    given = rewritten("granitemoehybrid_moe_full", tmp_path, renamed)
    source = FIXTURES / "granitemoehybrid_moe_full" / "checkpoint"
    lm, known, released = load(tmp_path), load(source), load_file(source / "model.safetensors")
    assert lm.config == known.config and len(given.keys() - released.keys()) == 9
    jax.tree.map(np.testing.assert_array_equal, values(lm), values(known))
    lm.save(tmp_path / "saved")
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == released.keys()


def test_fused_projections_are_taken_apart_by_key_head():
    """Of each key head q | k | v | z, and b | a: three key heads of 24 numbers, each read by one value head of 16."""
    place = "model.layers.0.linear_attn."
    tensors = load_file(FIXTURES / "qwen3_next_full" / "checkpoint" / "model.safetensors")
    found = values(load(FIXTURES / "qwen3_next_full" / "checkpoint", dtype="float32"))
    fused = tensors[f"{place}in_proj_qkvz.weight"].astype(np.float32).reshape(3, 24 + 24 + 16 + 16, 32)
    q, k, v, z = (part.reshape(-1, 32) for part in np.split(fused, [24, 48, 64], axis=1))
    np.testing.assert_array_equal(found["layers.0.mixers.0.in_proj_qkv"], np.concatenate([q, k, v]))
    np.testing.assert_array_equal(found["layers.0.mixers.0.in_proj_z"], z)
    b, a = tensors[f"{place}in_proj_ba.weight"].astype(np.float32).reshape(3, 2, 32).transpose(1, 0, 2)
    np.testing.assert_array_equal(found["layers.0.mixers.0.in_proj_b"], b)
    np.testing.assert_array_equal(found["layers.0.mixers.0.in_proj_a"], a)


def test_an_expert_that_is_missing_or_misshapen_is_named(tmp_path):
    def spoil(tensors):
        del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
        tensors["model.layers.1.mlp.experts.3.down_proj.weight"] = np.zeros((48, 19), np.float32)
        return tensors

    rewritten("qwen3_moe_full", tmp_path, spoil)
    with pytest.raises(CheckpointError) as raised:
        load(tmp_path)
    assert "missing: model.layers.1.mlp.experts.5.up_proj.weight;" in str(raised.value)
    wrong = "misshapen: model.layers.1.mlp.experts.3.down_proj.weight (found [48, 19], expected [48, 20])"
    assert wrong in str(raised.value)


def test_sources_that_do_not_fit():
    with pytest.raises(ValueError, match="the source of a has 6 rows, expected 7"):
        stored_shapes({"a": Source((Rows("x", 3), Rows("y", 3)))}, {"a": (7, 2)})
    with pytest.raises(ValueError, match="each of the 4 rows of x must be one parameter's, got 6"):
        stored_shapes({"a": Source((Rows("x", 3),)), "b": Source((Rows("x", 3, 1),))}, {"a": (3,), "b": (3,)})
    fused = {"a": Source((Rows("x", 2, 0, 3, 5),)), "b": Source((Rows("x", 3, 2, 3, 5),))}
    assert stored_shapes(fused, {"a": (6, 4), "b": (9, 4)}) == {"x": (15, 4)}
    each = Source((Rows("x", 3), Rows("y", 3)), stacked=True)
    assert stored_shapes({"a": each.behind("layer.")}, {"a": (2, 3, 4)}) == {"layer.x": (3, 4), "layer.y": (3, 4)}

"""The embedded model, its card and the figures on record agree, and the figures are good enough."""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from demo_text import data, sources
from safetensors import safe_open

from jaxbuf.models.families import config_from_dict

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "jaxbuf/models/demo"
TEXTS = ("held-out documents", "held-out package")


def record(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / name).read_text())


@pytest.fixture(scope="module")
def card() -> str:
    return (MODEL / "README.md").read_text()


@pytest.fixture(scope="module")
def manifest() -> dict:
    return json.loads((MODEL / "data.json").read_text())


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    with safe_open(MODEL / "model.safetensors", "flax") as file:
        return {name: np.asarray(file.get_tensor(name)).astype(np.float32) for name in file.keys()}  # noqa: SIM118


def rows(card: str, first: str) -> dict[str, list[str]]:
    """Cells after the first of each row of the table whose heading begins with `first`; commas of numbers removed."""
    table = re.search(rf"^\| {re.escape(first)} \|.*\n\|[-:|]+\n((?:\|.*\n)+)", card, re.MULTILINE)
    assert table, f"no table with the heading {first!r}"
    cells = [[cell.strip().strip("*") for cell in line.strip("|\n").split("|")] for line in table[1].splitlines()]
    return {row[0]: [re.sub(r"(?<=\d),(?=\d{3})", "", cell) for cell in row[1:]] for row in cells}


def test_the_model_is_as_small_as_it_should_be(weights, card):
    count = sum(weight.size for weight in weights.values())
    size = (MODEL / "model.safetensors").stat().st_size
    assert count <= 8_000_000 and size < 16_000_000
    assert f"{count:,}" in card and f"{size:,} bytes" in card
    assert all(path.stat().st_size < 16_000_000 for path in MODEL.iterdir())


def test_the_weights_are_finite_and_the_mtp_layer_is_there(weights):
    for name, weight in weights.items():
        assert np.isfinite(weight).all(), name
    assert any(name.startswith("mtp.") for name in weights)


def test_the_configuration_is_long_enough_and_has_the_mtp_layer():
    config = config_from_dict(json.loads((MODEL / "config.json").read_text()))
    assert config.max_length >= 8192
    assert config.mtp is not None
    assert set(config.source.layer_types) == {"linear_attention", "full_attention"}
    assert max(phase["length"] for phase in record("demo_training.json")["recipe"]["phases"]) >= 4096


def test_the_figures_are_of_these_weights_and_of_the_whole_text(manifest):
    quality = record("demo_quality.json")
    assert quality["weights_sha256"] == hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest()
    assert quality["ngram_order"] == 6 and quality["model"] == "demo"
    for name, split in zip(TEXTS, ("heldout", "package"), strict=True):
        figures = quality["figures"][name]
        for unit in ("documents", "bytes"):
            assert figures[unit] == sum(row.get(f"{split}_{unit}", 0) for row in manifest["packages"])
        assert figures["ngram_bits_per_byte"] == manifest["byte_6_gram"][split]
        # tokens of the arrays include the end of each document, which is not scored
        assert figures["tokens"] == manifest["tokens"][split] - figures["documents"]
        np.testing.assert_allclose(
            figures["ratio"], figures["model_bits_per_byte"] / figures["ngram_bits_per_byte"], atol=1e-4
        )


def test_the_model_is_good_enough():
    documents, package = (record("demo_quality.json")["figures"][name] for name in TEXTS)
    assert documents["ratio"] <= 0.80
    assert package["model_bits_per_byte"] < package["ngram_bits_per_byte"]
    assert documents["mtp_agreement"] >= 0.5 and package["mtp_agreement"] >= 0.5


def test_the_card_quotes_the_record(card):
    quality = record("demo_quality.json")
    table = rows(card, "text")
    assert set(table) == set(TEXTS)
    names = ["documents", "bytes", "model_bits_per_byte", "ngram_bits_per_byte", "ratio"]
    for text, cells in table.items():
        assert [float(cell) for cell in cells] == [
            quality["figures"][text][name] for name in [*names, "mtp_agreement", "top1_accuracy"]
        ]
    plain = re.sub(r"^> ?|\*\*", "", card, flags=re.MULTILINE)
    settings = "at temperature {temperature}, top-k {top_k}, {max_new_tokens} tokens each, seed {seed}"
    assert settings.format(**quality["sampling"]) in card
    assert len(quality["samples"]) == 3
    for sample in quality["samples"]:
        assert sample["prompt"] + sample["continuation"] in plain
    assert f"{quality['dtype']} on one {quality['device']}" in card and quality["date"] in card


def test_the_card_lists_the_data(card, manifest):
    listed = rows(card, "package")
    total = listed.pop("all")
    assert list(listed) == [source.package for source in sources.SOURCES]
    for row, source in zip(manifest["packages"], sources.SOURCES, strict=True):
        held_out = [row.get(f"heldout_{unit}", row.get(f"package_{unit}")) for unit in ("documents", "bytes")]
        cells = [row["version"], source.licence, row["train_documents"], row["train_bytes"], *held_out]
        assert listed[row["package"]] == [str(cell) for cell in cells]
    sums = [sum(int(row[column]) for row in listed.values()) for column in range(2, 6)]
    assert total[2:] == [str(number) for number in sums]
    for split in data.SPLITS:
        assert f"{manifest['tokens'][split]:,}" in card


def test_the_card_tells_how_the_training_went(card):
    training = record("demo_training.json")
    assert f"{training['steps']:,} steps" in card and f"{training['tokens']:,} tokens" in card
    assert f"{training['epochs']:.1f} times" in card and f"in {training['seconds']} s" in card
    np.testing.assert_allclose(training["epochs"], training["tokens"] / training["text_tokens"], atol=0.01)
    for split in ("heldout", "package"):
        factor = training["bits_per_byte_of_nats_per_token"][split]
        losses = [entry[f"{split}_loss"] * factor for entry in training["curve"] if f"{split}_loss" in entry]
        assert f"{min(losses):.4f}" in card and f"{losses[-1]:.4f}" in card


@pytest.mark.parametrize("name", ["demo_quality.json", "demo_training.json", "demo_gates.json"])
def test_records_say_where_they_come_from_and_nothing_of_the_machine(name):
    found = record(name)
    assert found["script"] == found["command"].split()[0] and (ROOT / found["script"]).exists()
    assert {"device", "date", "versions"} <= set(found) and found["versions"]["jax"]
    assert not re.search(r"(?<![\w.])/(root|tmp|home|work|mnt|usr)/", json.dumps(found))

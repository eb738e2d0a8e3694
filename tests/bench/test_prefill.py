"""`jaxbuf bench prefill`: what it runs, counts and says; the figures themselves need a GPU."""

import json
import types

import jax
import numpy as np
import pytest

from jaxbuf.bench import prefill
from jaxbuf.bench.random_model import configuration
from jaxbuf.serving import batch
from jaxbuf.serving.profiling import Operation

SIZES = {"layers": 2, "hidden": 32, "ffn": 40, "vocabulary": 64, "heads": 2, "key_heads": 1, "dim": 8}
SIZES |= {"attention_heads": 4, "kv_heads": 2, "attention_dim": 8}
SHAPE = [word for name, size in SIZES.items() for word in ("--" + name.replace("_", "-"), str(size))]


@pytest.mark.slow
def test_a_run_keeps_its_figures_and_a_plot(tmp_path, monkeypatch, capsys):
    """Of a prompt that is read in several chunks."""
    monkeypatch.setattr(batch, "CHUNK_TOKENS", 64)
    monkeypatch.setattr(batch, "LEAST_CHUNK", 16)
    path = tmp_path / "prefill.json"
    words = ["--prompts", "1x150", "--no-torch", "--dtype", "float32", *SHAPE]
    assert prefill.main([*words, "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["script"] == "scripts/bench_prefill" and path.with_suffix(".png").is_file()
    (row,) = record["figures"]
    assert (row["chunks"], row["chunk_tokens"]) == (3, 64)
    assert row["ms"] > 0 and row["program_bytes"] > 0
    np.testing.assert_allclose(row["tokens_per_s"], 1e3 * 150 / row["ms"])
    np.testing.assert_allclose(sum(row["parts_ms"].values()), row["device_ms"])
    assert {"recurrence", "convolution", "projections", "attention", "mlp", "head"} <= set(row["parts_ms"])
    assert row["attention_flop"] == 4 * 4 * 8 * 150 * 151 / 2  # one softmax layer of two
    np.testing.assert_allclose(row["layer_flop_per_s"], 1e3 * row["attention_flop"] / row["layer_ms"])
    assert record["compile_s"] > 0 and "1 x 150" in capsys.readouterr().out


def test_the_flop_of_attention_are_those_of_the_pairs_that_are_seen():
    config = configuration()
    mixers = prefill.softmax_mixers(types.SimpleNamespace(config=config))
    assert len(mixers) == 8
    flop = prefill.attention_flop(types.SimpleNamespace(config=config), 2, 3)
    assert flop == 8 * 2 * 6 * 4 * 16 * 256


def test_the_parts_are_sums_of_operations_and_attentions_longest_are_named():
    traced = [
        Operation("read_layer", scope, name, 1e-3 * ms)
        for scope, name, ms in (
            *(("attention", "a", 3), ("attention", "b", 1), ("attention", "a", 2), ("mlp", "nvjet_tst_128", 4)),
            *(("other", "cudnn_generated_fort_native_sdpa_sm90", 7), ("other", "nvjet_tst_64", 8), ("other", "add", 9)),
        )
    ]
    found = prefill.split(traced)
    wanted = {"attention": 13, "mlp": 4, "matrix products": 8, "other": 9}
    assert found["parts_ms"] == pytest.approx(wanted) and found["device_ms"] == pytest.approx(34)
    assert found["attention_ms"] == pytest.approx({"cudnn_generated_fort_native_sdpa_sm90": 7, "a": 5, "b": 1})


def test_torchs_fastest_kernel_is_the_one_that_counts():
    row = {"prompts": 2, "tokens": 8}
    theirs = [row | {"flop_per_s": 1.0}, row | {"flop_per_s": 3.0}, {"error": "none"}, {"prompts": 1, "tokens": 8}]
    assert prefill.fastest(theirs[:3], row) == 3.0 and prefill.fastest([], row) is None


@pytest.mark.parametrize("words", ["8", "8x", "x8", "0x8", "8x2048,", "8x2048x2"])
def test_prompts_that_are_none_are_an_error_that_names_the_option(words, capsys):
    with pytest.raises(SystemExit):
        prefill.parse(["--model", "demo", "--prompts", words])
    assert "--prompts must be NUMBERxTOKENS" in capsys.readouterr().err


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a CPU says so")
def test_a_full_model_on_a_cpu_ends_before_it_begins(capsys):
    with pytest.raises(SystemExit):
        prefill.parse([])
    assert "a random model of full size needs a GPU" in capsys.readouterr().err

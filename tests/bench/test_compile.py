"""`jaxbuf bench compile`: what its processes run and say; the figures themselves need a GPU."""

import json

import pytest

from jaxbuf.bench import compile as bench
from tests.bench.test_prefill import SHAPE

SMALL = ["--prompts", "2", "--tokens", "5", "--new-tokens", "3", "--drafter", "none", "--dtype", "float32", *SHAPE]


@pytest.mark.exhaustive
def test_a_second_process_finds_what_the_first_compiled(tmp_path, capsys):
    path = tmp_path / "compile.json"
    assert bench.main([*SMALL, "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert (
        record["script"] == "scripts/bench_compile" and record["dtype"] == "float32" and record["sizes"]["layers"] == 2
    )
    cold, cached = record["figures"]
    assert [(row["process"], row["drafter"]) for row in (cold, cached)] == [("cold", None), ("cached", None)]
    assert cold["found_in_cache"] == 0 and cached["found_in_cache"] >= 2
    for row in (cold, cached):
        assert row["first_s"] > row["again_s"] > 0
        assert set(row["programs"]) == set(bench.PROGRAMS)
        assert all(seconds > 0 for parts in row["programs"].values() for seconds in parts.values())
    assert "2 prompts of 5 tokens" in capsys.readouterr().out


def test_seconds_are_those_of_the_programs_and_of_no_others():
    trace, lower, compiled = bench.PARTS
    told = [
        *(
            (trace, 0.5, "read_layer"),
            (trace, 0.5, "read_layer"),
            (trace, 2.0, "generate_tokens"),
            (trace, 4.0, "random_model"),
        ),
        *((lower, 8.0, "jit(read_layer)"), (compiled, 16.0, "jit(generate_tokens)"), (compiled, 32.0, "jit(add)")),
        *((bench.FOUND, 0.0, ""), ("/jax/other", 64.0, "read_layer")),
    ]
    nothing = dict.fromkeys(bench.PARTS.values(), 0.0)
    assert bench.split(told) == {
        "begin_prompts": nothing,
        "read_layer": {"trace_s": 1.0, "lower_s": 8.0, "compile_s": 0.0},
        "end_prompts": nothing,
        "generate_tokens": {"trace_s": 2.0, "lower_s": 0.0, "compile_s": 16.0},
    }


@pytest.mark.slow
def test_a_process_that_fails_is_one_line(capsys):
    assert bench.main(["--model", "demo", "--tokens", "100000", "--drafter", "none"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxbuf bench compile: error: the cold process failed: ") and error.count("\n") == 1


def test_a_model_of_full_size_is_refused_on_a_cpu(capsys):
    with pytest.raises(ValueError, match="needs a GPU, this is a cpu"):
        bench.make_model({"model": "random", "sizes": {}, "dtype": None, "shape": "qwen3.5-4b"})

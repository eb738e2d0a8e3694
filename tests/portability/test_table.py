"""The table that is kept says of every case on every chip how it was checked, and the page shows it."""

import json

import pytest

from jaxbuf.pallas.dispatch import KERNELS
from tests.portability.table import (
    CHIPS,
    PAGE,
    RECORD,
    XLA_ON,
    check,
    incomplete,
    interpreted_by,
    page,
    replaced,
    replaced_models,
    run_on,
    words,
)


@pytest.fixture(scope="module")
def record():
    return json.loads(RECORD.read_text(encoding="utf-8"))


def test_the_record_has_every_case_on_every_chip(record):
    assert list(incomplete(record)) == []


def test_a_kernel_that_the_dispatcher_has_is_in_the_record_or_says_why_not(record):
    for line in record["lines"]:
        known = line["platform"] in KERNELS[line["operation"]]
        assert line["kernel"] == (known and line["reason"] is None), line
        assert line["reason"] is not None or line["lowered"], line
        if line["platform"] == "tpu" and (line["kernel"] or line["generation"] == XLA_ON):
            assert line["compiled"] is not None, line
        assert line["failed"] is None, line


def test_whole_models_of_the_record_hold_but_for_prompts_with_gates(record):
    failed = [line for line in record["full_depth"] if line["failed"]]
    assert {(line["name"], line["program"]) for line in failed} <= {("Llama-3.1-8B with gates", "admit")}
    assert all("moved through another memory" in line["failed"] for line in failed)


def test_lines_of_whole_models_replace_those_of_the_same_case_alone(record):
    first, second, *others = record["full_depth"]
    new = dict(second, date="2030-01-01")
    assert replaced_models([first, second, *others], [new]) == [first, new, *others]


def test_the_programs_of_the_record_hold(record):
    assert [line for line in record["programs"] if line["failed"] or not line["held"]] == []
    assert {line["generation"] for line in record["programs"]} == {name for kind, name in CHIPS if kind == "tpu"}


def test_a_program_that_is_compiled_otherwise_is_not_in_the_record(record):
    first, *others = record["programs"]
    changed = dict(first, served=first["served"] + ", write gates")
    assert list(incomplete(record | {"programs": [changed, *others]})) == [f"{first['program']} of {first['served']}"]


def test_the_page_is_what_the_record_says(record):
    assert PAGE.read_text(encoding="utf-8") == page(record)


def test_lines_of_some_operations_replace_what_is_kept_of_them_alone(record):
    kept = [line for line in record["lines"] if line["operation"] in ("gated_norm", "experts")]
    gone = dict(kept[0], family="a case that there was", operation="gated_norm")
    new = [dict(line, date="2030-01-01") for line in kept if line["operation"] == "gated_norm"]
    found = replaced([gone, *kept], new)
    assert [line for line in found if line["operation"] == "gated_norm"] == new
    assert [line for line in found if line["operation"] == "experts"] == [
        x for x in kept if x["operation"] == "experts"
    ]


def test_a_line_is_found_without_the_compiler():
    line = check("prepare", "Gated DeltaNet, one of 8 devices", "gpu", "Hopper")
    assert not line["kernel"] and words(line) == "XLA: it needs key heads in fours, got 2"
    line = check("gated_norm", "32 heads of 128 (Qwen3.5-4B)", "gpu", "Hopper")
    assert line["lowered"] and line["interpreted"] == "tests/pallas/test_gated_norm.py"
    assert words(line).startswith("kernel: interpreted, lowered")
    line = check("prepare", "Gated DeltaNet (Qwen3.5-4B)", "gpu", "Hopper")
    assert words(line).startswith("kernel: interpreted, lowered, run 20")


def test_what_ran_on_a_chip_is_read_from_the_records():
    found = run_on("extend", "Gated DeltaNet", "gpu", "Hopper")
    assert found is not None and found["device"] == "NVIDIA H200"
    assert interpreted_by("attend_chunk", "gpu") is None  # a library's
    assert {generation for _, generation in CHIPS} == {"Hopper", "v4", "v5e", "v5p", "v6e", "tpu7x"}

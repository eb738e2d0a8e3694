"""`jaxbuf bench counters` reads Nsight Compute's pages; no machine of the tests has it, so a program stands for it."""

import json
import os
import re
import signal
import sys
import time

import jax
import pytest

from jaxbuf.bench import counters

DETAILS = """[7] python3@127.0.0.1
  extend_heads_mosaic_gpu_kernel (132, 1, 1)x(256, 1, 1), Context 1, Stream 14, Device 0, CC 9.0
    Section: GPU Speed Of Light Throughput
    ----------------------- ----------- ------------
    Metric Name             Metric Unit Metric Value
    ----------------------- ----------- ------------
    Elapsed Cycles                cycle      100,000
    DRAM Throughput                   %        80.25
    Duration                         us        55.50
    SM Active Cycles              cycle    90,000.50
    ----------------------- ----------- ------------

    OPT   Some advice of 3 lines, which is no number: 12
    Section: Launch Statistics
    Registers Per Thread             register/thread             168
    Section: Other
    Duration                         us        99.00
"""
CODE = """"Kernel Name","extend_heads_mosaic_gpu_kernel",
"Address","Source","# Samples","Instructions Executed","stall_long_sb","stall_wait","stall_wait (Not Issued)"
"0"," LDG.E R1, [R2] ","1,000","4,096","0","1,000","900"
"1"," FADD R3, R1, R1 ","3,000","4,096","2,900","100","0"
"2"," EXIT ","","8","","",""
"""


def test_the_pages_become_figures():
    found = counters.summarize(counters.read_details(DETAILS), counters.read_code(CODE), 1)
    assert found["counters"] == {
        "time": {"value": 55.5, "unit": "us"},
        "of the memory's peak bandwidth": {"value": 80.25, "unit": "%"},
        "registers of a thread": {"value": 168.0, "unit": "register/thread"},
        "of the time, multiprocessors work": {"value": pytest.approx(90.0005), "unit": "%"},
    }
    assert found["lines"] == 3 and found["executed"] == 8200
    assert found["waits"] == {"long_sb": 0.725, "wait": 0.275}
    (seen,) = found["instructions"]
    assert seen == {
        "line": 1,
        "samples": 0.75,
        "reason": "long_sb",
        "instruction": "FADD R3, R1, R1",
        "before": "LDG.E R1, [R2]",
    }


def test_a_page_without_code_is_an_error():
    with pytest.raises(ValueError, match="no column Source"):
        counters.read_code("==ERROR== nothing\n")


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A program that stands for ncu: it writes a report, prints its pages, or fails as it is told."""
    program = tmp_path / counters.TOOL
    program.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, sys\n"
        "words = sys.argv[1:]\n"
        "if '--import' in words:\n"
        f"    print({DETAILS!r} if 'details' in words else {CODE!r})\n"
        f"elif pathlib.Path({str(tmp_path / 'fails')!r}).exists():\n"
        "    print('==ERROR== ERR_NVGPUCTRPERM: no permission')\n"
        "    print('==PROF== done')\n"
        "    sys.exit(1)\n"
        f"elif not pathlib.Path({str(tmp_path / 'nothing')!r}).exists():\n"
        "    pathlib.Path(words[words.index('-o') + 1] + '.ncu-rep').write_text(' '.join(words))\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    return tmp_path


def test_a_launch_in_the_midst_is_measured_and_the_pages_are_kept(tool, capsys):
    kept, record = tool / "pages", tool / "counters.json"
    words = ["--family", "kda", "--batch", "8", "--tokens", "5", "--accepted", "3", "--keep", str(kept)]
    assert counters.main([*words, "--json", str(record)]) == 0
    report = (kept / "launch.ncu-rep").read_text().split()
    sizes = {"heads": 12, "key_heads": 4, "dim": 64, "value_dim": 80}
    asked = {"family": "mamba2", "batch": 8, "tokens": 5, "accepted": 3, "limit": 32, "state_dtype": "float32"}
    spec, case = counters.make_case(asked | sizes)
    assert (spec.heads, spec.key_heads, spec.key_dim, spec.value_dim, spec.delta) == (12, 4, 64, 80, False)
    assert int(report[report.index("--launch-skip") + 1]) == case.steps(1) * counters.LAYERS // 2
    assert (kept / "launch.txt").read_text().strip() == DETAILS.strip()
    written = json.loads(record.read_text())
    assert written["family"] == "kda" and written["figures"]["counters"]["time"]["value"] == 55.5
    out = capsys.readouterr().out
    assert "a load from global memory" in out and "55.5 us" in out and "FADD R3, R1, R1" in out


def test_what_the_tool_cannot_do_is_one_line(tool, capsys):
    (tool / "fails").touch()
    assert counters.main(["--batch", "8"]) == 2
    assert capsys.readouterr().err.strip().endswith("ncu failed: ==ERROR== ERR_NVGPUCTRPERM: no permission")
    (tool / "fails").unlink()
    (tool / "nothing").touch()
    assert counters.main(["--batch", "8"]) == 2
    assert "measured no launch" in capsys.readouterr().err


@pytest.mark.parametrize("ended_by", [pytest.param("time", marks=pytest.mark.slow), "signal"])
def test_what_a_tool_that_is_ended_has_started_ends_with_it(tool, monkeypatch, capsys, ended_by):
    child = "import pathlib, sys, time; time.sleep(3); pathlib.Path(sys.argv[1]).touch()"
    (tool / counters.TOOL).write_text(
        f"#!{sys.executable}\n"
        "import os, signal, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}, {str(tool / 'went_on')!r}])\n"
        f"os.kill(os.getppid(), {signal.SIGTERM if ended_by == 'signal' else 0})\n"
        "child.wait()\n"
    )
    if ended_by == "time":
        monkeypatch.setattr(counters, "PATIENCE", 1)
        assert counters.main(["--batch", "8"]) == 2
        assert "ncu took longer than 1 s" in capsys.readouterr().err
    else:
        handler = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit, match="143"):
            counters.main(["--batch", "8"])
        assert signal.getsignal(signal.SIGTERM) is handler
    time.sleep(3)
    assert not (tool / "went_on").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tokens", "2", "--accepted", "3"], r"--accepted must be at most --tokens \(2\), got 3"),
        (["--family", "rwkv"], "--family"),
        ([], "the kernels need a GPU, this is a cpu"),
    ],
)
def test_bad_options_are_one_line(words, told, capsys):
    with pytest.raises(SystemExit):
        counters.main(words)
    err = capsys.readouterr().err.strip()
    assert len(err.splitlines()) == 1
    assert re.search(told, err)


def test_without_the_tool_a_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit):
        counters.main([])
    assert "needs Nsight Compute" in capsys.readouterr().err

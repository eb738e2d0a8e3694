"""Measures how much memory loading a checkpoint takes beside its parameters."""

import argparse
import json
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxbuf.bench import report
from jaxbuf.bench.parser import Parser, errors_are_lines, output, whole
from jaxbuf.models.config import ModelConfig
from jaxbuf.models.decoder import Decoder
from jaxbuf.models.families import config_from_dict
from jaxbuf.models.layers import replace_parameters
from jaxbuf.models.loading.checkpoint import save
from jaxbuf.terminal import print_table

DTYPES = ("bfloat16", "float32")
FACTOR = 1.3
INTERVAL = 0.002  # seconds between two looks at the process's memory
MB = 1e6

# The baseline is taken while it waits for a line; what the library itself takes counts as memory of the load.
LOADER = """
import json, sys, time
import jax
jax.numpy.zeros(8).block_until_ready()
print(json.dumps({}), flush=True)
sys.stdin.readline()
import jaxbuf
start = time.perf_counter()
lm = jaxbuf.load(sys.argv[1], dtype=sys.argv[2])
seconds = time.perf_counter() - start
print(json.dumps({"parameters": sum(x.nbytes for x in jax.tree.leaves(lm.model)), "seconds": seconds}), flush=True)
sys.stdin.readline()
"""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="jaxbuf bench load",
        description=__doc__,
        epilog="A random Qwen3.5 checkpoint in bfloat16 is written to a temporary folder and loaded by a fresh process "
        "for each dtype. Memory is that process's anonymous memory (RssAnon: what no file backs, so that the mapped "
        "checkpoint does not count), read every 2 ms; the baseline is that after importing jax and making an array. "
        "On a CPU the parameters are part of it. The bound is the parameters' bytes plus 1.3 times the largest shard; "
        "the exit status is 1 if it does not hold.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--layers", type=whole(1), default=14, help="every fourth is an attention layer")
    parser.add_argument("--hidden", type=whole(1), default=2048, help="a multiple of 64")
    parser.add_argument("--vocab", type=whole(1), default=65_536)
    parser.add_argument("--shard-mb", type=whole(1), default=500, help="largest size of a shard, in 10^6 bytes")
    parser.add_argument("--json", type=output, default=None, help="write the figures to this file")
    options = parser.parse_args(arguments)
    if options.hidden % 64:
        parser.error(f"--hidden must be a multiple of 64, got {options.hidden}")
    return options


def configuration(options: argparse.Namespace) -> ModelConfig:
    """The proportions of Qwen3.5's small models."""
    return config_from_dict(
        {
            "model_type": "qwen3_5_text",
            "vocab_size": options.vocab,
            "hidden_size": options.hidden,
            "intermediate_size": 3 * options.hidden,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": options.hidden // 8,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(options.layers)],
            "tie_word_embeddings": True,
            "mtp_num_hidden_layers": 1,
        }
    )


def write(console: Console, config: ModelConfig, directory: Path, shard_bytes: int) -> None:
    rng = np.random.default_rng(0)
    abstract = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    values = [
        jnp.asarray(rng.random(leaf.shape, np.float32), jnp.bfloat16)
        for leaf in track(jax.tree.leaves(abstract), "making the checkpoint", console=console)
    ]
    with console.status("writing it"):
        save(replace_parameters(abstract, values), config, directory, shard_bytes=shard_bytes)


def anonymous(process: int) -> int:
    """Bytes of a process's memory that no file backs."""
    found = re.search(r"^RssAnon:\s+(\d+) kB$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit("this kernel's /proc/PID/status does not tell anonymous memory (RssAnon)")
    return 1024 * int(found[1])


def measure(directory: Path, dtype: str) -> dict[str, Any]:
    """Loads in a fresh process and watches its memory."""
    command = [sys.executable, "-c", LOADER, str(directory), dtype]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        if not process.stdout.readline():
            raise SystemExit("the process that loads did not start")
        baseline = peak = anonymous(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        while not select.select([process.stdout], [], [], INTERVAL)[0]:
            peak = max(peak, anonymous(process.pid))
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"loading as {dtype} failed")
        after = anonymous(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
    return {"dtype": dtype, "baseline": baseline, "peak": max(peak, after), "after": after} | json.loads(line)


@errors_are_lines
def main(arguments: Sequence[str]) -> int:
    """Runs with the words of a command line; returns the exit status, 1 if what must hold does not."""
    options, console = parse(arguments), Console()
    config, rows = configuration(options), []
    with tempfile.TemporaryDirectory(prefix="jaxbuf-load-") as folder:
        directory, notes = Path(folder) / "model", Console(stderr=True)
        write(notes, config, directory, int(options.shard_mb * MB))
        shards = [file.stat().st_size for file in directory.glob("*.safetensors")]
        for dtype in track(DTYPES, "loading it", console=notes):
            row = measure(directory, dtype)
            row["over_baseline"] = row["peak"] - row["baseline"]
            row["bound"] = row["parameters"] + int(FACTOR * max(shards))
            row["holds"] = row["over_baseline"] <= row["bound"]
            rows.append(row)
    console.print(
        f"{len(shards)} shards, {sum(shards) / MB:.0f} MB, the largest {max(shards) / MB:.0f} MB", highlight=False
    )
    table = Table("dtype", "parameters", "peak over baseline", "bound", "baseline", "seconds", "", caption="in MB")
    for row in rows:
        numbers = (f"{row[name] / MB:.0f}" for name in ("parameters", "over_baseline", "bound", "baseline"))
        table.add_row(row["dtype"], *numbers, f"{row['seconds']:.1f}", "holds" if row["holds"] else "DOES NOT HOLD")
    print_table(table, console)
    if options.json:
        settings = {name: getattr(options, name) for name in ("layers", "hidden", "vocab", "shard_mb")}
        checkpoint = {"shards": len(shards), "bytes": sum(shards), "largest_shard": max(shards)}
        source = report.provenance("scripts/bench_load", arguments, report.ROOT)
        report.write(options.json, source | settings | checkpoint | {"figures": rows})
        report.tell_written(console, options.json)
    return 0 if all(row["holds"] for row in rows) else 1

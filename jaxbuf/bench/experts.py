"""Measures a layer's routed experts against the time that their bytes, or their products, take."""

import argparse
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress

from jaxbuf.axes import Array
from jaxbuf.bench import report
from jaxbuf.bench.expert_candidates import CANDIDATES, ON_GPUS, OPTIONS, mixture_by
from jaxbuf.bench.expert_figures import WANTED, add_floor, describe, judge, plot, show
from jaxbuf.bench.kernel_figures import Row
from jaxbuf.bench.measure import bandwidths, device_time, timed, worst_errors
from jaxbuf.bench.parser import Parser, errors_are_lines, folder, number, output, whole
from jaxbuf.models.experts import Router
from jaxbuf.models.layers import scaled
from jaxbuf.models.projections import product_float32

# hidden, experts, chosen, size
SHAPES = {"qwen3.5-35b-a3b": (2048, 256, 8, 512), "qwen3-next-80b-a3b": (2048, 512, 10, 512)}
SIZES = ("hidden", "experts", "chosen", "size")
DTYPES = ("bfloat16", "float16", "float32")
FOOTPRINT = 160e6  # what the layers in turn read together exceeds twice the H200's L2, 60 MB
MOST_LAYERS = 4  # of 3.2 GB each
STEPS = 4  # of one run
SLOW = 1.0  # seconds of one step, with which it is run once and no more
PATIENCE = 5.0  # seconds of a call: one that would take longer, by those of fewer tokens, is left out
CHECKED = 32  # tokens, and experts, at most of what is compared before
BOUNDS = {"bfloat16": 3e-2, "float16": 4e-3, "float32": 1e-5}  # three roundings, one behind the other


@dataclasses.dataclass(frozen=True)
class Case:
    """One compiled program.

    Attributes:
      hidden: Numbers of a token.
      experts, chosen: How many there are, and how many a token has.
      size: Numbers between the projections of an expert, which has a gate.
      tokens: Of a call.
      dtype: Of tokens and weights.
      implementation: Of `jaxbuf.bench.expert_candidates.CANDIDATES`.
    """

    hidden: int
    experts: int
    chosen: int
    size: int
    tokens: int
    dtype: str
    implementation: str

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert's weights."""
        return 3 * self.hidden * self.size * self.itemsize

    @property
    def rest_bytes(self) -> int:
        """Bytes of what is read and written besides: the router's weight, tokens in and out."""
        return (self.experts + 2 * self.tokens) * self.hidden * self.itemsize

    @property
    def operations(self) -> int:
        """Multiplications and additions of a call."""
        each = self.chosen * 3 * self.size + self.experts
        return 2 * self.tokens * self.hidden * each

    @property
    def layers(self) -> int:
        """How many take turns, if nobody says otherwise."""
        touched = min(self.experts, self.tokens * self.chosen) * self.expert_bytes
        return int(min(MOST_LAYERS, max(2, -(-FOOTPRINT // touched))))


class Layer(NamedTuple):
    """The weights of a layer, as `jaxbuf.models.experts.ExpertsParameters` has them, and its tokens."""

    router: Array
    first: Array
    second: Array
    x: Array


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="jaxbuf bench experts",
        description=__doc__,
        epilog="What is timed is the router and the mixture of its experts, without shared ones, by each of the "
        "implementations in the same run: xla is jax.lax.ragged_dot_general as jaxbuf.models.experts.mixture calls it; "
        "xla-fusion and xla-grouped are the same with an option of XLA's GPU compiler, "
        f"{OPTIONS['xla-fusion']} and {OPTIONS['xla-grouped']}; gather multiplies each token with its own experts' "
        "matrices, gathered; gpu is jaxbuf's kernel; library is jax.experimental.pallas.ops.gpu.ragged_dot_mgpu. The "
        "floor is the larger of two times: that of the bytes (of the distinct experts that the routing of this run "
        "drew, of the router, tokens in and out) at the bandwidth of a sum, and that of the operations at the rate of "
        "a large matrix product, both measured in the same run. Time is that of all kernels, from jax.profiler, and "
        "wall time that of a loop of steps on the device, in which layers with weights and tokens of their own take "
        "turns, so many that the L2 holds nothing of them. Each implementation is compared with XLA's in float32 "
        f"first, on at most {CHECKED} tokens and experts; the exit status is 1, and nothing is timed, if one differs. "
        f"At most {WANTED} times the floor is wanted.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of which models' layers, separated by commas")
    for name, words in zip(SIZES, ("of a token", "routed ones", "of a token", "between projections"), strict=True):
        parser.add_argument(f"--{name}", type=whole(1), default=None, help=f"{words}, instead of each shape's")
    parser.add_argument("--tokens", default="1,32,128,4096", help="of a call, separated by commas")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--implementations", default=None, help="separated by commas; default: all that run here")
    parser.add_argument("--layers", type=whole(1), default=None, help="in turn; default: for over twice the L2")
    parser.add_argument("--steps", type=whole(1), default=STEPS, help="of a run, in each of which every layer has one")
    parser.add_argument("--budget", type=number(0), default=330, help="seconds after which nothing new is started")
    parser.add_argument("--seed", type=whole(0), default=None, help="of weights and tokens; default: a new one")
    parser.add_argument(
        "--json", type=output, default=None, help="keep the figures here as they come; a plot beside it"
    )
    parser.add_argument("--profile", type=folder, default=None, help="a folder for the traces, one folder for each")
    options = parser.parse_args(arguments)
    options.tokens = report.whole_numbers(parser, "--tokens", options.tokens)
    options.shapes = _names(parser, "--shapes", options.shapes, SHAPES)
    there = [name for name in CANDIDATES if name not in ON_GPUS or jax.default_backend() == "gpu"]
    wanted = ",".join(there) if options.implementations is None else options.implementations
    options.implementations = _names(parser, "--implementations", wanted, CANDIDATES)
    elsewhere = [name for name in options.implementations if name not in there]
    if elsewhere:
        what = f"{', '.join(elsewhere)} on a {jax.default_backend()}"
        parser.error(f"--implementations must be of those that run here, {', '.join(there)}, got {what}")
    given = {name: value for name in SIZES if (value := getattr(options, name)) is not None}
    shapes = [dict(zip(SIZES, SHAPES[name], strict=True)) | given for name in options.shapes]
    options.sizes = [dict(each) for each in dict.fromkeys(tuple(shape.items()) for shape in shapes)]
    for sizes in options.sizes:
        if sizes["chosen"] > sizes["experts"]:
            parser.error(f"--chosen must be at most {sizes['experts']}, the number of experts, got {sizes['chosen']}")
    report.check_plots(parser, options.json)
    return options


def _names(parser: argparse.ArgumentParser, option: str, words: str, known: Any) -> list[str]:
    names = words.split(",")
    if any(name not in known for name in names):
        parser.error(f"{option} must be of {', '.join(known)}, separated by commas, got {words!r}")
    return names


def plan(options: argparse.Namespace) -> list[Case]:
    """What is measured: of each shape, from few tokens to many, every implementation."""
    return [
        Case(**sizes, tokens=tokens, dtype=options.dtype, implementation=name)
        for sizes in options.sizes
        for tokens in options.tokens
        for name in options.implementations
    ]


@functools.partial(jax.jit, static_argnums=0)
def make_layer(case: Case, key: jax.Array) -> Layer:
    """Random weights and tokens of a layer, with which outputs are of size 1 or so."""
    shapes = (
        (case.experts, case.hidden),
        (case.experts, 2 * case.size, case.hidden),
        (case.experts, case.hidden, case.size),
        (case.tokens, case.hidden),
    )
    keys = jax.random.split(key, 4)
    router, first, second, x = (
        jax.random.normal(each, shape, case.dtype) for each, shape in zip(keys, shapes, strict=True)
    )
    router, first, second = (scaled(weight, weight.shape[-1] ** -0.5) for weight in (router, first, second))
    return Layer(router, first, second, x)


def route(case: Case, layer: Layer) -> tuple[Array, Array]:
    """The experts of each token, and their weights."""
    implementation = "gpu" if case.implementation == "gpu" else "xla"
    return Router(case.experts, case.chosen)(product_float32(layer.x, layer.router), implementation=implementation)


def apply(case: Case, layer: Layer) -> Array:
    """One layer's call."""
    chosen, weights = route(case, layer)
    return mixture_by(case.implementation, layer.x, layer.first, layer.second, chosen, weights)


@functools.partial(jax.jit, static_argnums=0)
def distinct(case: Case, layer: Layer) -> Array:
    """How many experts the tokens of a layer have together."""
    chosen, _ = route(case, layer)
    return jnp.sum(jnp.zeros(case.experts, jnp.int32).at[chosen.reshape(-1)].set(1))


@functools.partial(jax.jit, static_argnums=0)
def run(case: Case, layers: Sequence[Layer], outs: Sequence[Array], steps: Array) -> Sequence[Array]:
    """All steps on the device, every layer in each; the outputs are kept, or XLA would leave them out."""

    def body(_, outs):
        # Each step depends on the one before: nothing of it can be computed ahead of the loop.
        now, _ = jax.lax.optimization_barrier((layers, outs))
        return tuple(apply(case, layer) for layer in now)

    return jax.lax.fori_loop(0, steps, body, outs)


def compile_case(case: Case, layers: int) -> Any:
    """The compiled program of a case."""
    layer = jax.eval_shape(functools.partial(make_layer, case), jax.random.key(0))
    lowered = run.lower(case, (layer,) * layers, (layer.x,) * layers, jax.ShapeDtypeStruct((), jnp.int32))
    return lowered.compile(compiler_options=compiler_options(case))


def compiler_options(case: Case) -> dict[str, bool] | None:
    """What XLA is told when it compiles a case's implementation."""
    option = OPTIONS.get(case.implementation)
    return None if option is None else {option: True}


def measure(case: Case, layers: Sequence[Layer], options: argparse.Namespace) -> Row:
    """The row of a case, without what bandwidth and rate say of it."""
    program = compile_case(case, len(layers))
    outs = tuple(jnp.zeros_like(layer.x) for layer in layers)

    def call(outs, steps=options.steps):
        return jax.block_until_ready(program(tuple(layers), outs, jnp.int32(steps)))

    start = time.perf_counter()
    outs = call(outs, 1)
    once = time.perf_counter() - start
    row: Row = dataclasses.asdict(case) | {"layers": len(layers), "device_us": None}
    if once > SLOW:
        taken = 1e6 * once / len(layers)
        return row | {"steps": 1, "wall_us": taken, "us": taken}
    name = "-".join(str(getattr(case, name)) for name in ("implementation", *SIZES, "tokens"))
    _, wall, kernels = timed(call, outs, options.profile and options.profile / name)
    calls = options.steps * len(layers)
    row |= {"steps": options.steps, "wall_us": 1e6 * wall / calls} | device_time(kernels, calls, "xla")
    return row | {"us": row["device_us"] or row["wall_us"]}


def check(case: Case, key: jax.Array) -> float:
    """The largest relative error of a token against XLA's path in float32, of a case of few tokens and experts."""
    experts = max(case.chosen, min(CHECKED, case.experts))
    case = dataclasses.replace(case, experts=experts, tokens=min(CHECKED, case.tokens))
    layer = make_layer(case, key)
    chosen, weights = route(case, layer)
    x, first, second = (part.astype(jnp.float32) for part in (layer.x, layer.first, layer.second))
    exact = mixture_by("xla", x, first, second, chosen, weights)
    given = layer.x, layer.first, layer.second, chosen, weights
    lowered = jax.jit(functools.partial(mixture_by, case.implementation)).lower(*given)
    found = lowered.compile(compiler_options=compiler_options(case))(*given)
    return float(worst_errors(found, exact))


def too_slow(case: Case, before: Row | None) -> str | None:
    """Why a case is left out, if a call would take too long when it takes as long a token as the one `before`."""
    seconds = 0.0 if before is None else 1e-6 * before["us"] * case.tokens / before["tokens"]
    if before is None or seconds <= PATIENCE:
        return None
    return f"left out: a call would take about {seconds:.0f} s, as {before['tokens']} tokens take {before['us']:.0f} us"


def product_rate(dtype: str) -> float:
    """Multiplications and additions a second of the product of two large matrices."""
    size = 8192 if jax.default_backend() == "gpu" else 256
    x, times = jnp.full((size, size), 0.5, dtype), 4
    precision = jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None  # as the products of experts
    compiled = jax.jit(lambda x: jnp.matmul(x, x.T, precision=precision))

    def call(_):
        for _ in range(times):
            out = jax.block_until_ready(compiled(x))
        return out

    _, wall, kernels = timed(call, None, None)
    taken = device_time(kernels, times, "xla").get("device_us", 1e6 * wall / times)
    return 1e6 * 2 * size**3 / taken


@errors_are_lines
def main(arguments: Sequence[str]) -> int:
    """Runs with the words of a command line; returns the exit status.

    It is 1 if the results of an implementation are wrong.
    """
    options, console, notes = parse(arguments), Console(highlight=False), Console(stderr=True, highlight=False)
    began, cases = time.perf_counter(), plan(options)
    seed = options.seed if options.seed is not None else int(np.random.SeedSequence().generate_state(1)[0] >> 1)
    figures, left_out, key = [], [], jax.random.key(seed)
    record = report.provenance("scripts/bench_experts", arguments, report.ROOT) | {"seed": seed}
    failed: dict[tuple[Any, ...], str] = {}
    before: dict[tuple[Any, ...], Row] = {}

    def keep(row: Row) -> None:
        figures.append(row)
        notes.print(describe(row), soft_wrap=True)
        if options.json:
            report.write(options.json, record | {"targets": judge(figures), "left_out": left_out, "figures": figures})

    def sizes_of(case: Case) -> tuple[Any, ...]:
        return tuple(getattr(case, name) for name in SIZES)

    with Progress(console=notes, redirect_stdout=False, transient=True) as progress:
        task = progress.add_task("comparing", total=len(cases))
        errors: dict[str, float] = {}
        for case in {(case.implementation, sizes_of(case)): case for case in cases}.values():
            try:
                error = check(case, key)
            except Exception as found:  # an implementation that does not run must not cost the figures of the others
                failed[case.implementation, sizes_of(case)] = told(found)
                continue
            errors[case.implementation] = max(errors.get(case.implementation, 0.0), error)
        record["errors"], bound = errors, BOUNDS[options.dtype]
        if any(not error <= bound for error in errors.values()):
            console.print(f"WRONG: at most {bound} is expected, got {errors}; nothing is timed", soft_wrap=True)
            return 1
        rate = product_rate(options.dtype)
        record |= bandwidths() | {"operations_per_s": rate}
        read = record["read_bytes_per_s"]
        notes.print(f"read {read / 1e12:.2f} TB/s, products {rate / 1e12:.1f} TFLOP/s")
        layers, of = [], None
        for case in cases:
            progress.update(task, description=f"{case.implementation}, {case.experts} experts, {case.tokens} tokens")
            if time.perf_counter() - began > options.budget:
                left_out.append(dataclasses.asdict(case))
                continue
            row, of_sizes = dataclasses.asdict(case), (case.implementation, sizes_of(case))
            reason = failed.get(of_sizes) or too_slow(case, before.get(of_sizes))
            try:
                if reason is None:
                    drawn = dataclasses.replace(case, implementation="")
                    if of != drawn:
                        layers, of = [], None  # the last ones are freed before new ones are made
                        keys = jax.random.split(key, options.layers or case.layers)
                        layers, of = [make_layer(drawn, each) for each in keys], drawn
                    there = float(np.mean([distinct(drawn, layer) for layer in layers]))
                    row = before[of_sizes] = measure(case, layers, options) | {"distinct": there}
            except Exception as found:  # as above
                reason = told(found)
            keep(add_floor(row, case, read, rate) if reason is None else row | {"error": reason})
            progress.advance(task)
    show(console, figures, judge(figures))
    if left_out:
        words = f"--budget {options.budget:.0f} was spent: {len(left_out)} of {len(cases)} programs left out"
        console.print(words, soft_wrap=True)
    if options.json:
        plot(figures, options.json.with_suffix(".png"))
        report.tell_written(console, options.json, plot=True)
    return 0


def told(error: Exception) -> str:
    """An error as a line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"

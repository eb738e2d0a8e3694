"""What a step's time goes to, from a trace of its operations, and how many bytes each part of it has to move."""

import argparse
import collections
import dataclasses
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.bench.kernel_figures import Row
from jaxbuf.bench.step_carry import Tokens
from jaxbuf.models.config import ATTENTION, RECURRENCE, ModelConfig
from jaxbuf.models.experts import Experts, Router
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.layers import named_parameters
from jaxbuf.recurrence.state_format import StateFormat, state_format
from jaxbuf.recurrence.traffic import entry_bytes
from jaxbuf.serving import Carry
from jaxbuf.serving.carry import Counters
from jaxbuf.serving.profiling import Operation

PALLAS_KERNEL = "mosaic_gpu"  # in the names of Pallas' kernels
# In the names of operations, and of the kernels of NCCL and XLA, that move numbers between devices.
EXCHANGE = re.compile(r"nccl|all[-_]?(reduce|gather|to[-_]?all)|reduce[-_]?scatter|collective[-_]?permute|psum", re.I)
PRODUCTS = "matrix products"
# Which of the bytes of `count_bytes` each part moves. The others have no bytes that are counted.
MOVES = {PRODUCTS: ("weights",), "recurrence": ("checkpoints", "entries"), "attention": ("keys and values",)}
STACKED = re.compile(r"layers\.(\d+)\.mlp\.(up_proj|down_proj)")  # the matrices of a layer's routed experts
UNKNOWN = (0, 0)  # the shape of a matrix that is none of the model's parameters, but cut or put together from them

type Matrix = tuple[int, ...]  # [out, in], or of all experts of a layer [experts, out, in]


def split(traced: Sequence[Operation], steps: int, layers: int) -> Row:
    """The time of each part of a step in ms, what of it moves numbers between devices, and the time of the recurrence's
    kernel in us a layer. With `steps` the steps of all devices together, all are means over the devices.

    The kernel's mean counts, so that an event which the profiler lost does not. Without one, the recurrence is all
    operations in its scope.
    """
    parts: dict[str, float] = {}
    for ran in traced:
        parts[ran.scope] = parts.get(ran.scope, 0.0) + 1e3 * ran.seconds / steps
    recurrence = [ran for ran in traced if ran.scope == "recurrence"]
    kernels = [ran.seconds for ran in recurrence if PALLAS_KERNEL in ran.name]
    calls = max(1, steps * layers)
    if kernels:
        us = max(1, round(len(kernels) / calls)) * 1e6 * statistics.mean(kernels)
    else:
        us = 1e6 * sum(ran.seconds for ran in recurrence) / calls
    device = sum(parts.values())
    named = sorted({ran.name for ran in recurrence if PALLAS_KERNEL in ran.name})
    return {
        "device_ms": device,
        "parts_ms": dict(sorted(parts.items(), key=lambda part: -part[1])),
        "exchange_ms": 1e3 * sum(ran.seconds for ran in traced if EXCHANGE.search(ran.name)) / steps,
        "operations": len(traced) / steps,
        "recurrence": {
            "kernel": ", ".join(named) or None,
            "launches": len(kernels) / calls,
            "us": us,
            "share": 1e-3 * us * layers / device if device else 0.0,
        },
    }


def matrices(lm: LanguageModel) -> collections.Counter[Matrix]:
    """The matrices that a step multiplies with, as each device has them: how many there are of each shape.

    Those of the routed experts of a layer are one of three dimensions, however many of them a step's tokens have.
    """
    found: collections.Counter[Matrix] = collections.Counter()
    for name, weight in _read_weights(lm):
        if (weight.ndim == 2 and not name.endswith("conv1d")) or router_of(lm.config, name) is not None:
            found[_held(weight).shape] += 1
    return found


def router_of(config: ModelConfig, name: str) -> Router | None:
    """Who chooses among the experts whose matrices are the parameter of this name; None: it has none of experts."""
    found = STACKED.fullmatch(name)
    feed_forward = config.layers[int(found[1])].feed_forward if found else None
    return feed_forward.router if isinstance(feed_forward, Experts) else None


def share_touched(router: Router, tokens: int) -> float:
    """The share of the experts that so many tokens have between them, on average, if each token's are drawn uniformly.

    A token leaves an expert out with the probability 1 - chosen / experts. Real routers prefer some experts, so that
    fewer are touched.
    """
    return 1 - (1 - router.chosen / router.experts) ** tokens


def _read_weights(lm: LanguageModel) -> Iterator[tuple[str, jax.Array]]:
    """The parameters that a step reads: not those of an MTP layer, nor an embedding that is not the head."""
    unread = ("mtp.",) if lm.model.lm_head is None else ("mtp.", "embed_tokens")
    return ((name, p[...]) for name, p in named_parameters(lm.model).items() if not name.startswith(unread))


def matrices_of(ran: Operation, known: Mapping[Matrix, int], rows: int) -> list[Matrix]:
    """The shapes of the matrices that an operation multiplies `rows` vectors with; none if it is no such product.

    XLA drops the names of some matrix products, and of others it makes a sum over products of numbers; so they are
    known by what they read. The products of the recurrence and of attention are of each row by itself: they read no
    matrix.
    """
    if ran.scope == "embedding":
        return []
    found, like_vectors = [], []
    for places in zip(ran.reads, ran.sources, strict=True):
        shape = next((way for place in places for way in _ways(place) if way in known), None)
        if shape is not None:
            (like_vectors if rows in shape else found).append(shape)
    if found or not ran.multiplies:
        return found
    # The vectors themselves may have the shape of a small matrix.
    return like_vectors[-1:] or [UNKNOWN] * all(len(shape) <= 2 for shape in ran.reads)


def _ways(shape: Sequence[int]) -> Iterator[Matrix]:
    """The shapes of a matrix, or of those of all experts, that lies as [in, out] or as [out, in]."""
    yield tuple(shape)
    if len(shape) > 1:
        *stacked, out, width = shape
        yield (*stacked, width, out)


def products(traced: Sequence[Operation], known: Mapping[Matrix, int], rows: int, steps: int) -> Row:
    """The matrix products of a step.

    Args:
      traced: Operations of so many `steps`, those of all devices together.
      known: From `matrices`.
      rows: Vectors that a matrix is multiplied with: tokens of all rows of the carry.

    Returns:
      products_ms: of each scope how much of its time they are; products: for each shape of a matrix its size, how many
      there are in a step, and the us of one; of those whose matrix is none of the parameters, all together. The
      matrices of a layer's experts are one, with `experts` saying how many. An operation that multiplies with several
      matrices counts for each by its size.
    """
    scopes: dict[str, float] = {}
    shapes: dict[Matrix, float] = {}
    for ran in traced:
        found = matrices_of(ran, known, rows)
        if found:
            scopes[ran.scope] = scopes.get(ran.scope, 0.0) + 1e3 * ran.seconds / steps
        total = sum(map(math.prod, found)) or 1
        for shape in found:
            share = math.prod(shape) / total or 1.0
            shapes[shape] = shapes.get(shape, 0.0) + 1e6 * ran.seconds * share / steps
    listed = []
    for shape, us in shapes.items():
        (*stacked, out, width), count = shape, known.get(shape, 1)
        experts = {"experts": stacked[0]} if stacked else {}
        listed.append({"out": out, "in": width, "count": count, "us": us / count} | experts)
    return {"products_ms": scopes, "products": listed}


def parts(row: Row) -> dict[str, float]:
    """Milliseconds of each part of a step: the matrix products of all scopes, and what they leave of each."""
    left = {scope: ms - row["products_ms"].get(scope, 0.0) for scope, ms in row["parts_ms"].items()}
    return {PRODUCTS: float(sum(row["products_ms"].values()))} | {scope: ms for scope, ms in left.items() if ms > 0}


def floors(moved: Mapping[str, float], bandwidth: float) -> dict[str, float]:
    """Milliseconds that the bytes of `count_bytes` take, at so many a second, for each part that has some."""
    found = {part: 1e3 * sum(moved[name] for name in names) / bandwidth for part, names in MOVES.items()}
    return {part: ms for part, ms in found.items() if ms}


def count_bytes(
    lm: LanguageModel, dtypes, counters: Counters, options: argparse.Namespace, tokens: Tokens, steps: int
) -> dict[str, float]:
    """What each device must move in a step, on average over a run of all rows: read once, or written once where it is
    appended. What several devices have counts for each.

    Weights: all that a step multiplies with; of experts those that its tokens touch, see `share_touched`. Of an
    embedding that is not the head, a step reads a row for each token, which is left out, as activations are.
    """
    config, (state, entry, pages) = lm.config.on_device, dtypes
    total = {name.name: float(np.sum(getattr(counters, name.name))) for name in dataclasses.fields(counters)}
    # A step reads the tokens of the context and of the steps before, and its own, which it also appends.
    held = total["steps"] * (options.context + tokens.accepted * (steps - 1) / 2 + 2 * tokens.read)
    entries = total["live_entries"] + tokens.read * total["steps"]
    work = total["checkpoint_reads"], total["folds"]
    rows = round(total["steps"] / steps)
    moved = {
        "weights": steps * weight_bytes(lm, rows * tokens.read),
        "checkpoints": sum(state.read_bytes(s) * work[0] + state.fold_bytes(s) * work[1] for s in config.specs),
        "entries": sum(entry_bytes(spec, entry) * entries for spec in config.specs),
        "keys and values": config.kv_numbers * pages.itemsize * held,
    }
    return {name: float(value / steps) for name, value in moved.items()}


def weight_bytes(lm: LanguageModel, tokens: int | None = None) -> float:
    """Bytes of weights that a step of so many tokens reads on each device; None: of so many that every expert is
    touched, which is the most."""
    found = 0.0
    for name, weight in _read_weights(lm):
        router = None if tokens is None else router_of(lm.config, name)
        found += held_bytes(weight) * (1.0 if router is None or tokens is None else share_touched(router, tokens))
    return found


def held_bytes(array: jax.Array) -> int:
    """The bytes of an array on each of its devices, which have as much."""
    return _held(array).nbytes


def _held(array: jax.Array) -> jax.Array:
    return array.addressable_shards[0].data


def memory_dtypes(carry: Carry) -> tuple[StateFormat, jnp.dtype, jnp.dtype]:
    """How checkpoints are kept, and the dtypes of entries, and of keys and values."""
    layers = list(zip(carry.cache.kinds, carry.cache.layers, strict=True))
    pools = [layer.pool for kind, layer in layers if kind == RECURRENCE]
    pages = [layer for kind, layer in layers if kind == ATTENTION]
    state, entry = (pools[0].state_format, pools[0].keys.dtype) if pools else (state_format("float32"), jnp.float32)
    return state, jnp.dtype(entry), jax.tree.leaves(pages[0])[0].dtype if pages else jnp.dtype(jnp.float32)

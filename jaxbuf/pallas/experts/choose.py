"""The choice of `jaxbuf.models.experts.Router` on NVIDIA GPUs (Hopper): Pallas Mosaic GPU.

A warp has a token, and each of its threads every 32nd expert. The best ones are found one after the other: the largest
number of the warp, and of the experts that have it the first.

Floor: logits / read bandwidth. Of few tokens, the 2 us that any launch takes are more.

Precision: float32. Softmax scores are ordered as their logits are.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.threads import COMPILER, NUMBERS, THREADS, WARP, load_lanes, reduce_lanes, store_lanes

WARPS = THREADS // WARP
MOST_EXPERTS = 1024  # what a thread's registers hold of a warp's
NONE = np.int32(-(2**31))  # in the order of keys, in front of all numbers
LEAST_SUM = 1e-20  # is added to what weights are divided by
BEST = 2  # of its experts, by whose scores a group is chosen


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a router does, as in `jaxbuf.models.experts.Router`, for so many tokens."""

    tokens: int
    experts: int
    chosen: int
    softmax: bool
    renormalised: bool
    scale: float
    bias: bool
    groups: int
    chosen_groups: int


def supports(choice: Choice) -> str | None:
    """Whether the kernel serves a choice.

    Returns:
      None if it does; else what it needs, and what came instead.
    """
    each = choice.experts // choice.groups
    needs = (
        (choice.tokens >= 1, f"tokens, got {choice.tokens}"),
        (choice.experts <= MOST_EXPERTS, f"at most {MOST_EXPERTS} experts, got {choice.experts}"),
        (choice.chosen <= WARP, f"chosen at most {WARP}, got {choice.chosen}"),
        (choice.groups == 1 or each % WARP == 0, f"groups of experts in {WARP}s, got {each} in each"),
    )
    return next((f"it needs {need}" for met, need in needs if not met), None)


def choose(choice: Choice, logits: Array, bias: Array | None, *, interpret: bool = False) -> tuple[Array, Array]:
    """The experts of each token, the best first, and their weights.

    Args:
      choice: What the router does.
      logits: float32 [tokens, experts].
      bias: float32 [experts], if the router has one.
      interpret: Run in Pallas' GPU interpreter.

    Returns:
      int32 and float32 [tokens, chosen].
    """
    given = [logits] if bias is None else [logits, bias.reshape(1, -1)]
    chosen, weights = _kernel(choice, interpret)(*given)
    return chosen, weights


def _kernel(choice: Choice, interpret: bool):
    def choose_experts(logits, *refs):
        bias, (chosen, weights) = refs[0] if choice.bias else None, refs[-2:]
        token = lax.axis_index("block") * np.int32(WARPS)
        found = choose_lanes(choice, logits, bias, token, interpret)
        for x, ref in zip(found, (chosen, weights), strict=True):
            store_lanes(x, ref, token, interpret)

    dims = choice.tokens, choice.chosen
    return plgpu.kernel(
        choose_experts,
        out_type=[jax.ShapeDtypeStruct(dims, jnp.int32), jax.ShapeDtypeStruct(dims, jnp.float32)],
        grid=(-(-choice.tokens // WARPS),),
        grid_names=("block",),
        compiler_params=COMPILER,
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )


def choose_lanes(choice: Choice, logits, bias, token, interpret: bool) -> tuple[Array, Array]:
    """The choice of four tokens, one in each warp, from references to logits and bias [1, experts].

    Returns:
      int32 and float32 [4, WARP] in layout `NUMBERS`: of each warp the first threads have an expert, and its weight.
    """
    columns = range(0, choice.experts, WARP)
    lane = plgpu.broadcasted_iota(jnp.int32, (WARPS, WARP), 1, layout=NUMBERS)
    x = [load_lanes(logits, token, column, -np.inf, interpret) for column in columns]
    plain = choice.softmax and not choice.bias and choice.groups == 1  # Logits suffice to choose and to weigh.
    if choice.softmax:
        top = _number(reduce_lanes(_largest([_key(number) for number in x]), "max", interpret))
        if not (plain and choice.renormalised):
            powers = [jnp.exp(number - top) for number in x]
            total = reduce_lanes(_added(powers), "sum", interpret)
        scores = x if plain else [number / total for number in powers]
    else:
        scores = [np.float32(1) / (np.float32(1) + jnp.exp(-number)) for number in x]
    preferred = scores
    if bias is not None:
        biases = [load_lanes(bias, np.int32(0), column, -np.inf, interpret) for column in columns]
        preferred = [score + more for score, more in zip(scores, biases, strict=True)]
    keys = [_key(number) for number in preferred]
    if choice.experts % WARP:
        keys[-1] = jnp.where(lane < choice.experts % WARP, keys[-1], NONE)
    if choice.groups > 1:
        keys = _in_best_groups(choice, keys, lane, interpret)
    experts = [lane + np.int32(column) for column in columns]

    def add(place, carry):
        keys, chosen, weights = carry
        key, expert = _best(keys, experts, interpret)
        if bias is None:
            score = _number(key)
        else:  # No score is negative: the order of their bits is theirs.
            mine = [jnp.where(e == expert, s, np.float32(0)) for e, s in zip(experts, scores, strict=True)]
            score = _float(reduce_lanes(_bits(_added(mine)), "max", interpret))
        keys = [jnp.where(e != expert, key, NONE) for e, key in zip(experts, keys, strict=True)]
        here = lane == place
        return keys, jnp.where(here, expert, chosen), jnp.where(here, score, weights)

    zeros = (plgpu.layout_cast(jnp.zeros(lane.shape, dtype), NUMBERS) for dtype in (jnp.int32, jnp.float32))
    start = keys, *zeros
    _, chosen, weights = lax.fori_loop(0, choice.chosen, add, start)
    if plain:
        weights = jnp.where(lane < choice.chosen, jnp.exp(weights - top), np.float32(0))
        weights = weights / (reduce_lanes(weights, "sum", interpret) if choice.renormalised else total)
    elif choice.renormalised:
        weights = weights / (reduce_lanes(weights, "sum", interpret) + np.float32(LEAST_SUM))
    return chosen, weights if choice.scale == 1 else weights * np.float32(choice.scale)


def _in_best_groups(choice: Choice, keys: list[Array], lane: Array, interpret: bool) -> list[Array]:
    """The keys, but NONE outside the best groups: those whose two best numbers have the largest sums."""
    each, sums = choice.experts // choice.groups // WARP, []
    experts = [lane + np.int32(WARP * i) for i in range(each)]
    groups = [keys[i : i + each] for i in range(0, len(keys), each)]
    for group in groups:
        total = None
        for _ in range(BEST):
            key, expert = _best(group, experts, interpret)
            group = [jnp.where(e != expert, key, NONE) for e, key in zip(experts, group, strict=True)]
            total = _number(key) if total is None else total + _number(key)
        sums.append(total)
    found, one = [], plgpu.layout_cast(jnp.ones(lane.shape, jnp.int32), NUMBERS)
    for i, group in enumerate(groups):
        # Of equal sums the first one is ahead.
        ahead = [other >= sums[i] for other in sums[:i]] + [other > sums[i] for other in sums[i + 1 :]]
        rank = functools.reduce(jnp.add, [jnp.where(better, one, np.int32(0)) for better in ahead])
        found += [jnp.where(rank < choice.chosen_groups, key, NONE) for key in group]
    return found


def _best(keys: list[Array], experts: list[Array], interpret: bool) -> tuple[Array, Array]:
    """The largest key of a warp, and the first expert that has it."""
    key, first = reduce_lanes(_largest(keys), "max", interpret), np.int32(MOST_EXPERTS)
    for mine, expert in zip(reversed(keys), reversed(experts), strict=True):
        first = jnp.where(mine == key, expert, first)
    return key, reduce_lanes(jnp.asarray(first), "min", interpret)


def _largest(keys: list[Array]) -> Array:
    return functools.reduce(jnp.maximum, keys)


def _added(numbers: list[Array]) -> Array:
    return functools.reduce(jnp.add, numbers)


def _key(x: Array) -> Array:
    """An int32 for each float32, in their order; -0 counts as 0."""
    bits = _bits(x + np.float32(0))
    return bits ^ ((bits >> 31) & np.int32(2**31 - 1))


def _number(key: Array) -> Array:
    """The float32 of a key."""
    return _float(key ^ ((key >> 31) & np.int32(2**31 - 1)))


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)

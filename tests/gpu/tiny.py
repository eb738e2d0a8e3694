"""The tiny program: every kernel on inputs so small that compute-sanitizer can look at all that it does."""

import dataclasses
import functools
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.attention.latent import append_and_attend_latent
from jaxbuf.attention.paged_launch import append_and_attend
from jaxbuf.bench import companions
from jaxbuf.models.experts import Router, mixture
from jaxbuf.models.layers import Norm
from jaxbuf.models.norm_and_rotate import norm_and_rotate
from jaxbuf.models.projections import gated_project, project, project_rows, squared_relu_project
from jaxbuf.models.residual import add_and_norm
from jaxbuf.pallas.extend import gpu_schedule
from jaxbuf.recurrence import RecurrenceSpec, buffered, chunked
from jaxbuf.recurrence.convolution import extend_ring, init_ring
from tests.attention import latent_launches, launches
from tests.gpu.checks import SMALL, Figures, extend, new_inputs, poisoned

CHANNELS = dataclasses.replace(SMALL, key_heads=4, decay="channel")


SIZES = (1, 1, ()), (3, 3, ()), (60, 3, (57, 40, 3)), (32, 9, (30, 17, 1)), (150, 1, (149, 90, 5))  # of `tiny_steps`


@mock.patch.object(gpu_schedule, "PROCESSORS", 1)  # a warpgroup serves several heads
def tiny(implementation: str = "gpu", part: str | None = None) -> Figures:
    """A few steps of three small rows: folds, several tokens at once, short rings and long ones of either kind; and
    the kernels around them: what compute-sanitizer is run on. `part` is one of `PARTS`; None: all."""
    for name in PARTS if part is None else (part,):
        PARTS[name](np.random.default_rng(0), implementation)
    return {}


def tiny_delta(rng, implementation: str) -> None:
    for size in SIZES:
        tiny_steps(rng, SMALL, *size, "float32", implementation)


def tiny_split(rng, implementation: str) -> None:
    for size in (*SIZES[:3], SIZES[4]):
        for state in ("split", "split8"):
            tiny_steps(rng, SMALL, *size, state, implementation)


def tiny_mamba2(rng, implementation: str) -> None:
    spec = dataclasses.replace(SMALL, value_dim=64, delta=False)
    windows = dataclasses.replace(spec, heads=8, value_dim=80)  # the last of each group begins within the one before
    for size in SIZES[1:3]:
        for state in ("float32", "split"):
            tiny_steps(rng, spec, *size, state, implementation)
    for state in ("float32", "split", "split8"):
        tiny_steps(rng, windows, *SIZES[1], state, implementation)


def tiny_channels(rng, implementation: str) -> None:
    """Of a decay a channel, with and without the delta rule; a prompt may leave more entries than the limit."""
    more = 6, 4, (12, 6, 1)
    for size in (*SIZES[:4], more):
        tiny_steps(rng, CHANNELS, *size, "float32", implementation)
    for size in (SIZES[1], SIZES[2], more):
        tiny_steps(rng, CHANNELS, *size, "split", implementation)
    for size in (SIZES[1], more):
        tiny_steps(rng, dataclasses.replace(CHANNELS, delta=False), *size, "float32", implementation)


def tiny_companions(rng, implementation: str) -> None:
    spec = dataclasses.replace(SMALL, key_heads=4)
    for operation in companions.OPERATIONS:
        print(operation, flush=True)
        case = companions.Case(operation, batch=3, time=3, implementation=implementation)
        with jax.default_device(jax.devices("cpu")[0]):
            layer = companions.make_layer(spec, case, "bfloat16", jax.random.key(0))
        layer = jax.device_put(layer, jax.devices()[0])
        where = companions.odd_integers(case, rng)
        jax.block_until_ready(companions.call(spec, operation, implementation, layer, where))
    for tree in (False, True):
        print("the convolution alone" + (" of a tree" if tree else ""), flush=True)
        tiny_convolution(rng, tree, implementation)


def tiny_prompts(rng, implementation: str):
    """Prompts of a few chunks, of rows that end in one, in another, and at once."""
    mamba2 = dataclasses.replace(SMALL, value_dim=80, delta=False)
    for name, spec in (("Gated DeltaNet", SMALL), ("Mamba-2", mamba2), ("KDA", CHANNELS)):
        print(f"prompts, {name}", flush=True)
        lengths = jnp.array([150, 0, 64])
        prompts = new_inputs(rng, spec, 3, 150, jnp.bfloat16)
        jax.block_until_ready(chunked(spec, None, *prompts, lengths=lengths, implementation=implementation))


def tiny_steps(rng, spec: RecurrenceSpec, limit: int, max_pending: int, held: tuple, state: str, implementation: str):
    """Steps of three rows, of which `held` says how many entries each has, with folds among them."""
    names = {"head": ("Mamba-2", "Gated DeltaNet"), "channel": ("gated linear attention", "KDA")}
    family, slots = names[spec.decay][spec.delta], np.arange(1, 4, dtype=np.int32)
    print(f"{family}, limit {limit}, at most {max_pending} tokens at once, {state} checkpoints", flush=True)
    # The tools would look at every program of the GPU, and the compiler tries many.
    with jax.default_device(jax.devices("cpu")[0]):
        cache = poisoned(spec, slots=3, limit=limit, max_pending=max_pending, state_dtype=state)
        if held:  # all in the ring
            prompts, lengths = new_inputs(rng, spec, 3, max(held), jnp.bfloat16), jnp.array(held)
            rows = {"slots": slots, "lengths": lengths, "keep": lengths, "implementation": "xla"}
            _, cache = buffered.prefill(spec, cache, *prompts, **rows)
    cache = jax.device_put(cache, jax.devices()[0])
    for time, accepted in ((1, 1), (max_pending, 2), (1, 1), (max_pending, 3), (1, 1)):
        inputs = new_inputs(rng, spec, 3, time, jnp.bfloat16)
        lengths = jnp.array([time, max(1, time - 1), time])
        out, cache = extend(spec, cache, inputs, slots, lengths, implementation=implementation)
        cache = buffered.commit(cache, jnp.minimum(lengths, accepted), slots=slots)
        jax.block_until_ready((out, cache))
    assert int(cache.cursor.folded.max()) > 0, f"no row folded at limit {limit}"


def tiny_convolution(rng, tree: bool, implementation: str) -> None:
    """Three rows of so many channels that the second block of each begins within the first."""
    channels, time = 1280, 3
    with jax.default_device(jax.devices("cpu")[0]):
        ring = init_ring(slots=3, channels=channels, width=4, max_pending=time, dtype=jnp.bfloat16)
    arrays = [rng.standard_normal(shape) for shape in ((channels, 4), (3, time, channels), (channels,))]
    ring, weight, x, bias = jax.device_put((ring, *(np.asarray(a, jnp.bfloat16) for a in arrays)), jax.devices()[0])
    where = {"slots": np.array([3, 0, 1]), "start": np.array([7, 0, 1]), "lengths": np.array([3, 3, 2])}
    if tree:
        where["order"] = np.tile(np.arange(ring.shape[1], dtype=np.int32)[::-1], (4, 1))
        where["parents"] = np.array([[-1, 0, 0], [-1, -1, -1], [-1, -1, 1]])
    where = {name: jnp.asarray(integers, jnp.int32) for name, integers in where.items()}
    out = extend_ring(ring, weight, x, **where, bias=bias, activation="silu", implementation=implementation)
    jax.block_until_ready(out)


def tiny_attention(rng, implementation: str) -> None:
    """Attention on pages, of heads of each size."""
    for head_dim, time, trees in ((64, 1, False), (128, 5, True), (256, 16, True)):
        print(f"attention of heads of {head_dim}, {time} tokens at once", flush=True)
        with jax.default_device(jax.devices("cpu")[0]):
            sizes = launches.Sizes((9, 70, 33), time, 4, 2, head_dim, trees=trees)
            launch = launches.make_launch(rng, sizes)
        arrays, integers = jax.device_put((launch.arrays, launch.integers), jax.devices()[0])
        jax.block_until_ready(append_and_attend(*arrays, **integers, implementation=implementation))


def tiny_latent(rng, implementation: str) -> None:
    """Attention on a latent, of few heads and of many."""
    for heads, time, trees in ((4, 1, False), (32, 3, True)):
        print(f"latent attention of {heads} heads, {time} tokens at once", flush=True)
        with jax.default_device(jax.devices("cpu")[0]):
            dims = latent_launches.Dims(heads, 64, 64, 64, 128)
            launch, given = latent_launches.random_launch(rng, dims, time, "bfloat16", (9, 70, 33), trees=trees)
        given, integers = jax.device_put((given, launch.integers), jax.devices()[0])
        jax.block_until_ready(append_and_attend_latent(*given, **integers, implementation=implementation))


def tiny_products(rng, implementation: str) -> None:
    """Projections, the residual sum with its norm, and experts, of few tokens."""
    hidden = 256

    def draw(*shape):
        return jax.device_put(np.asarray(hidden**-0.5 * rng.standard_normal(shape), jnp.bfloat16))

    experts = functools.partial(mixture, implementation=implementation)
    for groups in (1, 2):
        router = Router(64, 5, scores="sigmoid", groups=groups)
        jax.block_until_ready(router(draw(7, 64).astype(jnp.float32), implementation=implementation))
    several = [draw(n, hidden) for n in (256, 64, 40)]
    for tokens in (1, 5, 70):
        print(f"projections, residual and experts of {tokens} tokens", flush=True)
        x = draw(tokens, 1, hidden)
        picked = np.stack([rng.permutation(8)[:2] for _ in range(tokens)]).astype(np.int32)
        share, angles = np.full(picked.shape, 0.5, np.float32), (jnp.ones((tokens, 1, 1, 16)),) * 2
        outs = (
            project(x, several, float32=(False, False, True), implementation=implementation),
            gated_project(x, draw(256, hidden), draw(256, hidden), implementation=implementation),
            project_rows(
                x, draw(360, hidden), (256, 64, 40), float32=(False, False, True), implementation=implementation
            ),
            squared_relu_project(x, draw(256, hidden), implementation=implementation),
            add_and_norm(x, x, draw(hidden), Norm(1e-6, 1.0), implementation=implementation),
            add_and_norm(*(draw(tokens, 1, 328),) * 2, draw(328), Norm(1e-6, 1.0), implementation=implementation),
            norm_and_rotate(*(draw(tokens, 1, n, 64) for n in (4, 1)), angles, implementation=implementation),
            experts(x[:, 0], draw(8, 128, hidden), draw(8, hidden, 64), picked, share, gated=True),
            experts(x[:, 0], draw(8, 64, hidden), draw(8, hidden, 64), picked, share, gated=False),
        )
        jax.block_until_ready(outs)


PARTS: dict[str, Callable[[np.random.Generator, str], None]] = {
    "delta": tiny_delta,
    "split": tiny_split,
    "mamba2": tiny_mamba2,
    "channels": tiny_channels,
    "companions": tiny_companions,
    "prompts": tiny_prompts,
    "attention": tiny_attention,
    "latent": tiny_latent,
    "products": tiny_products,
}
CHECKS: dict[str, Callable[[np.random.Generator], Figures]] = {
    "the_tiny_program_runs": lambda rng: tiny(),
}

"""Routing and experts against a definition in float64, token by token and expert by expert."""

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxbuf.models.experts as experts_module
from jaxbuf.models.config import MLP, LayerConfig, ModelConfig, SquaredReluMLP
from jaxbuf.models.experts import Experts, Router, mixture
from jaxbuf.models.layers import Norm, named_parameters, normal, replace_parameters
from jaxbuf.models.loading.sharding import held_ranges

HIDDEN, ROWS, TIME, TOLERANCE = 20, 3, 7, 1e-5
ROUTERS = {
    "softmax": Router(6, 2),
    "as they are": Router(6, 3, renormalised=False),
    "sigmoid": Router(6, 2, scores="sigmoid", scale=2.5),
    "biased": Router(6, 2, scores="sigmoid", bias=True),
    "softmax, biased": Router(6, 2, bias=True, renormalised=False, scale=0.7),
    "groups": Router(12, 4, scores="sigmoid", bias=True, groups=4, chosen_groups=2, scale=1.5),
    "softmax, groups": Router(12, 3, groups=3, chosen_groups=1),
    "all": Router(5, 5, scores="sigmoid", renormalised=False),
    "one": Router(4, 1),
    "one of one": Router(1, 1),
}
FORMS = {
    "plain": {},
    "shared": {"shared": MLP(12)},
    "shared, gated": {"shared": MLP(8, fused=True), "shared_gate": True},
    "without a gate": {"gated": False, "shared": SquaredReluMLP(12, bias=True)},
    "latent": {"gated": False, "latent": 10},
    "latent, biased": {"gated": False, "latent": 10, "latent_bias": True, "shared": SquaredReluMLP(12)},
}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def route(router, logits, bias):
    """[(expert, weight)] of one token, whose logits are float64 [experts]."""
    shifted = np.exp(logits - logits.max())
    scores = shifted / shifted.sum() if router.scores == "softmax" else sigmoid(logits)
    preferred = scores if bias is None else scores + bias
    allowed, each = set(range(router.experts)), router.experts // router.groups
    if router.groups > 1:
        best = [sum(sorted(preferred[group * each : (group + 1) * each])[-2:]) for group in range(router.groups)]
        groups = sorted(range(router.groups), key=lambda group: (-best[group], group))[: router.chosen_groups]
        allowed = {expert for group in groups for expert in range(group * each, (group + 1) * each)}
    chosen = sorted(allowed, key=lambda expert: (-preferred[expert], expert))[: router.chosen]
    total = sum(scores[expert] for expert in chosen) if router.renormalised else 1.0
    return [(expert, router.scale * scores[expert] / total) for expert in chosen]


def expected(experts, parameters, x):
    """The feed-forward of float64 [rows, time, hidden], by a loop over tokens and one over their experts."""
    p = {name: np.asarray(value[...], np.float64) for name, value in named_parameters(parameters).items()}
    out = np.zeros_like(x)
    for place in np.ndindex(x.shape[:2]):
        token = x[place]
        read = p["latent_in"] @ token + p.get("latent_in_bias", 0) if experts.latent else token
        total = np.zeros_like(read)
        for expert, weight in route(experts.router, p["router"] @ token, p.get("router_bias")):
            if experts.gated:
                gate, up = np.split(p["up_proj"][expert] @ read, 2)
                inner = gate * sigmoid(gate) * up
            else:
                inner = np.maximum(p["up_proj"][expert] @ read, 0) ** 2
            total += weight * (p["down_proj"][expert] @ inner)
        out[place] = p["latent_out"] @ total + p.get("latent_out_bias", 0) if experts.latent else total
        out[place] += shared_part(experts, p, token)
    return out


def shared_part(experts, p, token):
    if experts.shared is None:
        return 0.0
    if isinstance(experts.shared, SquaredReluMLP):
        inner = np.maximum(p["shared.up_proj"] @ token + p.get("shared.up_bias", 0), 0) ** 2
        out = p["shared.down_proj"] @ inner + p.get("shared.down_bias", 0)
    else:
        both = p.get("shared.gate_up_proj")
        both = np.concatenate([p["shared.gate_proj"], p["shared.up_proj"]]) if both is None else both
        gate, up = np.split(both @ token, 2)
        out = p["shared.down_proj"] @ (gate * sigmoid(gate) * up)
    return out * sigmoid(p["shared_gate"] @ token) if experts.shared_gate else out


def made(experts, rng):
    """Random parameters, biases among them."""
    given = {"initializer": normal(0.3), "dtype": jnp.float32}
    shapes = jax.eval_shape(lambda: experts.parameters(HIDDEN, rngs=nnx.Rngs(0), **given))
    values = [0.4 * rng.standard_normal(leaf.shape) for leaf in jax.tree.leaves(shapes)]
    return replace_parameters(shapes, [jnp.asarray(value, jnp.float32) for value in values])


def error(found, reference):
    return np.linalg.norm(np.asarray(found, np.float64) - reference) / np.linalg.norm(reference)


@pytest.mark.parametrize("name", ROUTERS)
def test_routing(name, rng):
    router = ROUTERS[name]
    logits = rng.standard_normal((200, router.experts)).astype(np.float32)
    bias = rng.standard_normal(router.experts).astype(np.float32) if router.bias else None
    chosen, weights = router(jnp.asarray(logits), None if bias is None else jnp.asarray(bias))
    for token, (experts, found) in enumerate(zip(np.asarray(chosen), np.asarray(weights), strict=True)):
        known = route(router, logits[token].astype(np.float64), bias)
        assert [expert for expert, _ in known] == experts.tolist()
        np.testing.assert_allclose(found, [weight for _, weight in known], rtol=1e-5)


def test_experts_of_equal_scores_are_taken_in_their_order():
    router = Router(6, 3, scores="sigmoid", groups=2, chosen_groups=1)
    chosen, weights = router(jnp.zeros((2, 6)).at[1, 4].set(1.0))
    assert chosen.tolist() == [[0, 1, 2], [4, 3, 5]]
    np.testing.assert_allclose(weights[0], np.full(3, 1 / 3), rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_experts_are_the_weighted_sum_of_those_chosen(form, rng):
    experts = Experts(ROUTERS["groups"], 6, **FORMS[form])
    parameters, x = made(experts, rng), rng.standard_normal((ROWS, TIME, HIDDEN)).astype(np.float32)
    found = jax.jit(experts)(parameters, jnp.asarray(x))
    assert error(found, expected(experts, parameters, x.astype(np.float64))) < TOLERANCE


@pytest.mark.parametrize("kind", ["all to one", "one without tokens", "one token"])
def test_groups_of_any_size(kind, rng):
    experts = Experts(Router(4, 2, bias=True, scores="sigmoid"), 6)
    parameters = made(experts, rng)
    bias = {"all to one": [9, 0, 5, 0], "one without tokens": [0, -9, 0, 0]}.get(kind, [0, 0, 0, 0])
    parameters.router_bias[...] = jnp.asarray(bias, jnp.float32)
    x = rng.standard_normal((1, 1 if kind == "one token" else TIME, HIDDEN)).astype(np.float32)
    chosen, _ = experts.router(jnp.asarray(x[0] @ np.asarray(parameters.router[...]).T), parameters.router_bias[...])
    numbers = np.bincount(np.asarray(chosen).ravel(), minlength=4)
    assert {"all to one": numbers[0] == TIME and numbers[1] == 0, "one without tokens": numbers[1] == 0}.get(kind, True)
    assert error(experts(parameters, jnp.asarray(x)), expected(experts, parameters, x.astype(np.float64))) < TOLERANCE


def test_no_token_depends_on_another(rng):
    """Not even on one that is not finite, as padded and dead ones may be."""
    experts = Experts(Router(6, 2), 6, shared=MLP(8), shared_gate=True)
    parameters, x = made(experts, rng), rng.standard_normal((ROWS, TIME, HIDDEN)).astype(np.float32)
    run = jax.jit(experts)
    clean, dead = np.asarray(run(parameters, x)), x.copy()
    dead[1, 3:], dead[2, 0] = np.nan, np.inf
    found = np.asarray(run(parameters, dead))
    alive = np.isfinite(dead).all(axis=-1)
    np.testing.assert_array_equal(found[alive], clean[alive])
    assert np.isnan(found[~alive]).all()


def test_every_parameter_has_the_gradient_of_the_definition(rng):
    """The definition in jnp has every expert compute every token."""
    experts = Experts(Router(4, 2, scores="sigmoid", bias=True, scale=1.5), 6, shared=MLP(8), shared_gate=True)
    parameters, x = made(experts, rng), jnp.asarray(rng.standard_normal((2, TIME, HIDDEN)), jnp.float32)

    def dense(p, x):
        chosen, weights = experts.router(jnp.einsum("rth,eh->rte", x, p.router[...]).reshape(-1, 4), p.router_bias[...])
        share = jnp.zeros((2 * TIME, 4)).at[jnp.arange(2 * TIME)[:, None], chosen].set(weights).reshape(2, TIME, 4)
        gate, up = jnp.split(jnp.einsum("rth,eih->rtei", x, p.up_proj[...]), 2, axis=-1)
        routed = jnp.einsum("rtei,ehi,rte->rth", jax.nn.silu(gate) * up, p.down_proj[...], share)
        gate = jax.nn.sigmoid(jnp.einsum("rth,oh->rto", x, p.shared_gate[...]))
        return routed + gate * MLP(8)(p.shared, x)

    def loss(function, p, x):
        return jnp.sum(jnp.sin(function(p, x)))

    found, known = (jax.jit(jax.grad(partial(loss, each), (0, 1)))(parameters, x) for each in (experts, dense))
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(known), strict=True):
        assert np.linalg.norm(mine - theirs) <= 1e-4 * np.linalg.norm(theirs)
    zero = [name for name, leaf in named_parameters(found[0]).items() if not np.abs(leaf[...]).max()]
    assert zero == ["router_bias"]  # it decides who is chosen, and is in no weight


def test_half_precision_sums_in_float32(rng):
    x, first, second = (rng.standard_normal(shape) for shape in ((9, 16), (3, 24, 16), (3, 16, 12)))
    chosen = jnp.asarray(rng.integers(0, 3, (9, 2)), jnp.int32)
    weights = jnp.asarray(rng.random((9, 2)), jnp.float32)
    half = [jnp.asarray(each, jnp.bfloat16) for each in (x, first, second)]
    found = mixture(*half, chosen, weights)
    assert found.dtype == jnp.bfloat16
    known = mixture(*(each.astype(jnp.float32) for each in half), chosen, weights)
    assert error(found, np.asarray(known, np.float64)) < 1e-2


def on_device(parameters, places):
    """What a device has; `places` gives its number along each axis of a mesh and how many there are."""
    values = []
    for param in named_parameters(parameters).values():
        value = param[...]
        for axis, parts in enumerate(param.axes):
            if parts:
                device, devices = places["expert" if parts[0].kind == "experts" else "tensor"]
                ranges = [np.arange(start, stop) for start, stop in held_ranges(parts, device, devices)]
                value = jnp.take(value, np.concatenate(ranges), axis=axis, mode="clip")
        values.append(value)
    return replace_parameters(parameters, values)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "axis", "devices"),
    [(form, "tensor", 2) for form in ("shared, gated", "without a gate", "latent", "latent, biased")]
    + [("plain", "expert", 6), ("shared, gated", "expert", 2), ("without a gate", "expert", 3)],
)
def test_devices_add_up_to_the_whole(form, axis, devices, rng):
    """What each device has of it, computed one after the other: the sum is what one device gives."""
    experts = Experts(Router(6, 2), 6, **FORMS[form])
    parameters, x = made(experts, rng), jnp.asarray(rng.standard_normal((1, TIME, HIDDEN)), jnp.float32)
    alone = {"tensor": 1, "expert": 1}
    spread = experts.spread(*(alone | {axis: devices}).values())
    if axis == "tensor":
        assert (spread.size, spread.devices, spread.expert_devices) == (3, 2, 1)
    else:
        assert (spread.size, spread.devices, spread.expert_devices) == (6, 1, devices)
    parts = [on_device(parameters, dict.fromkeys(alone, (0, 1)) | {axis: (i, devices)}) for i in range(devices)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    found = jax.vmap(spread, in_axes=(0, None), axis_name=axis)(stacked, x)
    known = experts(parameters, x)
    for each in found:
        np.testing.assert_allclose(each, known, atol=2e-5)


@pytest.mark.parametrize("kind", ["some", "none", "all"])
def test_what_products_give_outside_the_groups_reaches_no_token_and_no_gradient(kind, rng, monkeypatch):
    """Of experts elsewhere the rows are in no group, where a product may leave anything: here, and in the gradient of
    its input, not-a-numbers. The sum over three devices is what one gives."""

    @jax.custom_vjp
    def product(x, weights, groups):
        return spoil(ragged_dot(x, weights, groups), groups)

    def spoil(rows, groups):
        return jnp.where((jnp.arange(len(rows)) < jnp.sum(groups))[:, None], rows, jnp.nan)

    def forward(x, weights, groups):
        return product(x, weights, groups), (x, weights, groups)

    def backward(kept, gradient):
        x, weights, groups = kept
        _, pull = jax.vjp(lambda x, weights: ragged_dot(x, weights, groups), x, weights)
        dx, dweights = pull(gradient)
        return spoil(dx, groups), dweights, None

    ragged_dot = experts_module._ragged
    product.defvjp(forward, backward)
    x, first, second = (0.3 * rng.standard_normal(shape) for shape in ((9, 8), (6, 10, 8), (6, 8, 5)))
    x, first, second = (jnp.asarray(each, jnp.float32) for each in (x, first, second))
    drawn = {"some": (0, 6), "none": (0, 2), "all": (2, 4)}[kind]  # the second device has experts 2 and 3
    chosen = jnp.asarray(rng.integers(*drawn, (9, 2)), jnp.int32)
    weights = jnp.asarray(rng.random((9, 2)), jnp.float32)
    parts = [(begin, slice(begin, begin + 2)) for begin in (0, 2, 4)]

    def whole(x, first, second, weights):
        return mixture(x, first, second, chosen, weights)

    def added(x, first, second, weights):
        each = [mixture(x, first[here], second[here], chosen, weights, begin=begin) for begin, here in parts]
        return functools.reduce(jnp.add, each)

    def results(function):
        value, pull = jax.vjp(function, x, first, second, weights)
        return [value, *pull(jnp.cos(value))]

    known = results(whole)
    monkeypatch.setattr(experts_module, "_ragged", product)
    for mine, theirs in zip(results(added), known, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


def test_what_devices_do_not_divide_is_on_all_of_them():
    experts = Experts(Router(6, 2), 5, shared=MLP(8)).spread(2)
    assert (experts.size, experts.devices, experts.shared) == (5, 1, MLP(4, devices=2))


def test_experts_that_devices_do_not_divide():
    words = r'the experts \(6\) must be a multiple of the mesh axis "expert" \(4\)'
    with pytest.raises(ValueError, match=words):
        Experts(Router(6, 2), 5).spread(1, 4)
    layers = [LayerConfig((), each, None) for each in (MLP(8), Experts(Router(6, 2), 5))]
    dense, mixed = (ModelConfig("none", None, 8, 8, (layer,), Norm(1e-6), True) for layer in layers)
    mesh = jax.sharding.AbstractMesh((4,), ("expert",))
    with pytest.raises(ValueError, match=words):
        _ = dataclasses.replace(mixed, mesh=mesh).on_device
    assert dataclasses.replace(dense, mesh=mesh).on_device == dense, "without experts devices do the same"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chosen": 7}, r"chosen must be in \[1, 6\], the number of experts, got 7"),
        ({"scores": "tanh"}, "scores must be 'softmax' or 'sigmoid', got 'tanh'"),
        ({"groups": 4}, r"experts \(6\) must be a multiple of groups \(4\)"),
        ({"groups": 2, "chosen_groups": 3}, r"chosen_groups must be in \[1, 2\], the number of groups, got 3"),
        ({"groups": 2, "chosen": 4}, r"chosen \(4\) must be at most chosen_groups \(1\) times 3"),
        ({"groups": 6}, "groups must have at least 2 experts each, got 1"),
    ],
)
def test_routers_that_can_not_be(changes, message):
    with pytest.raises(ValueError, match=message):
        Router(**{"experts": 6, "chosen": 2} | ({"chosen": 1} if "groups" in changes else {}) | changes)

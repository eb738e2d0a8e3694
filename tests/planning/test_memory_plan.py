"""A plan's bytes are those of the arrays that a server would make, and it makes none of them."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxbuf
from jaxbuf.models import decoder
from jaxbuf.models.admission import Admission, WriteGate
from jaxbuf.models.gates import gated_config
from jaxbuf.models.layers import named_parameters
from jaxbuf.models.loading.sharding import spread_shape
from jaxbuf.models.tensor_parallel import partition
from jaxbuf.planning import model_sizes
from jaxbuf.planning.memory_plan import plan
from jaxbuf.planning.model_sizes import find_sizes
from jaxbuf.recurrence import traffic
from jaxbuf.recurrence.state_format import SPLIT
from tests.models.known import each_known_model

FIXTURES = Path(__file__).parent.parent / "fixtures"
MODELS = ["demo", *(str(FIXTURES / name / "checkpoint") for name in ("tied", "untied_mtp", "vision_language"))]
QWEN_NEXT = "Qwen3-Next-80B-A3B"


def tree_bytes(tree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def cache_bytes(found, config=None, *, slots: int, **sizes) -> int:
    """Of a real cache with the settings of a plan."""
    settings = {"capacity": found.context, "limit": found.limit, "max_pending": 1 + found.draft_tokens}
    settings |= {"block_size": found.block_size, "page_size": found.page_size, "dtype": jnp.dtype(found.dtype)}
    settings |= {"entry_dtype": jnp.dtype(found.entry_dtype), "state_dtype": found.state_dtype} | sizes
    config = find_sizes(found.model).config if config is None else config
    return tree_bytes(jax.eval_shape(lambda: decoder.init_cache(config, slots=slots, **settings)))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: Path(model).parts[-2] if "/" in model else model)
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.exhaustive), "bfloat16"])
def test_counted_bytes_are_those_of_the_cache(model, dtype, rng):
    limit, drafts, context = (int(n) for n in rng.integers((1, 0, 1), (40, 9, 500)))
    block_size, page_size = (int(n) for n in rng.choice([4, 8, 16], 2))
    sizes = {"limit": limit, "block_size": block_size, "page_size": page_size, "dtype": dtype}
    state = str(rng.choice(["float32", "bfloat16", "split", "split8"]))
    dtypes = {"state_dtype": state, "entry_dtype": rng.choice([None, "float32"])}
    each_step = {"limit": 1, "state_dtype": "float32" if state in SPLIT else state}
    found = plan(model, 10**9, drafts, context, **sizes, **dtypes)
    for slots in (1, 7):
        buffered, recurrent, kv_only = (found[form] for form in ("buffered", "recurrent", "kv-only"))
        assert buffered.fixed_bytes + slots * buffered.request_bytes == cache_bytes(found, slots=slots)
        assert recurrent.fixed_bytes + slots * recurrent.request_bytes == cache_bytes(found, slots=slots, **each_step)
        # A cache has a row for each slot's checkpoint, which a KV-only slot never touches and need not have.
        rows = slots * buffered.checkpoint_bytes
        total = cache_bytes(found, slots=slots, limit=kv_only.limit, capacity=kv_only.context)
        assert kv_only.fixed_bytes + slots * kv_only.request_bytes + rows == total


@pytest.mark.parametrize("model", ["demo", str(FIXTURES / "llama_plain" / "checkpoint")])
def test_counted_bytes_with_write_gates_are_those_of_the_cache(model, rng):
    drafts, context, window = (int(n) for n in rng.integers((0, 1, 1), (9, 500, 300)))
    keep = float(rng.uniform(0.01, 1))
    found = plan(model, 10**9, drafts, context, keep=keep, window=window, page_size=int(rng.choice([4, 16])))
    (cost,) = [each for each in found.forms if each.form == "buffered"]
    config = gated_config(find_sizes(model).config, Admission(WriteGate(), window, keep=keep, when_full="evict"))
    for slots in (1, 7):
        assert cost.fixed_bytes + slots * cost.request_bytes == cache_bytes(found, config, slots=slots)
    plain = plan(model, 10**9, drafts, 100_000)
    gated = plan(model, 10**9, drafts, 100_000, keep=0.25, window=64)
    assert 0.2 < gated["buffered"].kv_bytes / plain["buffered"].kv_bytes < 0.35
    assert gated["buffered"].step_bytes < plain["buffered"].step_bytes
    assert gated.parameter_bytes > plain.parameter_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_counted_parameters_are_those_that_load_reads(dtype):
    for model in (MODELS[0], MODELS[1]):
        assert plan(model, 10**9, dtype=dtype).parameter_bytes == tree_bytes(jaxbuf.load(model, dtype=dtype).model)


def test_a_loaded_model_and_its_configuration_have_the_plan_of_its_name():
    lm = jaxbuf.load("demo", dtype="float32")
    by_name = plan("demo", 10**9, dtype="float32")
    assert plan(lm, 10**9) == by_name
    assert plan(lm.config, 10**9, dtype="float32") == dataclasses.replace(by_name, model="config")
    assert plan("demo", 10**9).dtype == "bfloat16"  # what its config.json says
    assert jaxbuf.plan is plan


def test_as_many_requests_fit_as_the_memory_has_room_for():
    found = plan("demo", 50_000_000, 2, 300, workspace_bytes=7_000_000)
    cost = found["buffered"]
    assert found.request_memory_bytes == 50_000_000 - 7_000_000 - found.parameter_bytes
    assert cost.requests > 10
    room = found.request_memory_bytes
    assert cache_bytes(found, slots=cost.requests) <= room < cache_bytes(found, slots=cost.requests + 1)
    assert plan("demo", found.parameter_bytes)["buffered"].requests == 0
    assert plan("demo", 10**9).workspace_bytes == 10**8
    assert plan("demo", 10**9, parameter_bytes=5).parameter_bytes == 5


@pytest.mark.slow
@pytest.mark.parametrize("workspace", [None, 2 * 10**9])
def test_the_memory_for_some_requests_is_the_least_in_which_they_fit(workspace):
    found = jaxbuf.plan("Qwen3.5-4B", 80 * 10**9, 2, 4096, workspace_bytes=workspace)
    sizes = {"workspace_bytes": workspace, "parameter_bytes": found.parameter_bytes}
    for form in ("recurrent", "buffered", "kv-only", "snapshots"):
        for requests in (1, 7, 333):
            memory = found.memory_for(form, requests)
            enough, less = (
                jaxbuf.plan("Qwen3.5-4B", bytes, 2, 4096, **sizes)[form].requests for bytes in (memory, memory - 1)
            )
            assert (enough, less) == (requests, requests - 1)
    with pytest.raises(ValueError, match="requests must be at least 1, got 0"):
        found.memory_for("buffered", 0)


@pytest.mark.parametrize("block_size", [pytest.param(8, marks=pytest.mark.slow), 16])
def test_qwen3_next_with_4_drafts_takes_4_2_times_less_than_a_state_a_draft(block_size):
    found = [plan(QWEN_NEXT, 10**12, 4, context, block_size=block_size) for context in (1024, 8192)]
    assert found[0]["buffered"].ring == {8: 24, 16: 32}[block_size]  # 16 and 5 pending, and 5 more, in whole blocks
    assert found[0]["snapshots"].checkpoint_bytes == 5 * 72 * 2**20
    for one in found:
        assert one.recurrent_ratio >= 4.2
        assert one.recurrent_ratio > one.request_ratio > 1
    assert found[0].request_ratio > found[1].request_ratio  # keys and values are the same in both
    assert 2 * 81_324_862_720 < found[0].parameter_bytes < 2.001 * 81_324_862_720  # the gates' are in float32


def test_a_ring_is_no_longer_than_the_context_needs():
    long, short = (plan("demo", 10**9, 2, 100, limit=limit) for limit in (10_000, 103))
    assert long["buffered"].ring == short["buffered"].ring


def test_steps_are_those_of_the_recurrence_in_every_layer():
    shape = find_sizes(QWEN_NEXT)
    found = plan(QWEN_NEXT, 10**12, 4, 1000, accepted=3, limit=32)
    sizes = {"tokens": 5, "accepted": 3}
    states = {
        "recurrent": traffic.buffered_step_bytes(shape.spec, 1, **sizes),
        "buffered": traffic.buffered_step_bytes(shape.spec, 32, **sizes),
        "kv-only": traffic.kv_only_step_bytes(shape.spec, found.crossover, tokens=5),
        "snapshots": traffic.snapshot_step_bytes(shape.spec, 5),
    }
    for cost in found.forms:
        assert cost.state_step_bytes == 36 * states[cost.form]
        inputs = 36 * (3 + 5) * 8192 * 2  # the convolutions': 3 read, 5 written
        kv = 12 * 2 * 2 * 256 * 2 * (cost.context + 5)
        assert cost.step_bytes == cost.state_step_bytes + inputs + kv
        assert cost.token_bytes == cost.step_bytes / 3
    assert found.best_limit == traffic.best_limit(shape.spec, **sizes)
    assert plan(QWEN_NEXT, 10**12, context=50)["kv-only"].context == 50


@pytest.mark.parametrize("name", each_known_model())
def test_every_known_model_has_a_plan_with_its_states(name):
    found, sizes = plan(name, 10**12), find_sizes(name)
    assert found["buffered"].checkpoint_bytes == sizes.state_bytes
    assert found["buffered"].kv_bytes == found.context * sizes.kv_bytes("bfloat16")
    assert json.dumps(found.to_dict())


def test_a_plan_is_json():
    found = plan("demo", 10**9, 3)
    told = json.loads(json.dumps(found.to_dict()))
    assert told["parameter_bytes"] == found.parameter_bytes
    assert told["recurrent_ratio"] == found.recurrent_ratio
    assert [form["request_bytes"] for form in told["forms"]] == [cost.request_bytes for cost in found.forms]


def test_of_an_id_only_the_configuration_is_fetched(monkeypatch):
    asked = []

    def download(*arguments, **options):
        asked.append((arguments, options))
        return Path(MODELS[1])

    monkeypatch.setattr(model_sizes, "download", download)
    found = plan("org/name@v1", 10**9)
    assert asked == [(("org/name", "v1"), {"files": ("config.json",)})]
    assert dataclasses.replace(found, model=MODELS[1]) == plan(MODELS[1], 10**9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory_bytes": 0}, "memory_bytes must be a whole number from 1 to 9223372036854775807, got 0"),
        ({"draft_tokens": -1}, "draft_tokens must be a whole number from 0 to 1048576, got -1"),
        ({"context": 0}, "context must be a whole number from 1 to 2147483647, got 0"),
        ({"limit": 0}, "limit must be a whole number from 1 to 1048576, got 0"),
        ({"page_size": 0}, "page_size must be a whole number from 1 to 2147483647, got 0"),
        ({"memory_bytes": float("nan")}, "memory_bytes must be a whole number from 1 to 9223372036854775807, got nan"),
        ({"memory_bytes": "80GB"}, "memory_bytes must be a whole number from 1 to 9223372036854775807, got '80GB'"),
        ({"memory_bytes": float("inf")}, "memory_bytes must be a whole number from 1 to 9223372036854775807, got inf"),
        ({"limit": 2**31}, "limit must be a whole number from 1 to 1048576, got 2147483648"),
        ({"limit": 1.5}, "limit must be a whole number from 1 to 1048576, got 1.5"),
        ({"draft_tokens": True}, "draft_tokens must be a whole number from 0 to 1048576, got True"),
        ({"context": None}, "context must be a whole number from 1 to 2147483647, got None"),
        ({"parameter_bytes": -1}, "parameter_bytes must be a whole number from 0 to 9223372036854775807, got -1"),
        ({"accepted": float("nan")}, r"accepted must be a number in \[1, 1 \+ draft_tokens \(1\)\], got nan"),
        ({"workspace_bytes": -1}, "workspace_bytes must be a whole number from 0 to 9223372036854775807, got -1"),
        ({"draft_tokens": 2, "accepted": 3.5}, r"accepted must be a number in \[1, 1 \+ draft_tokens \(3\)\], got 3.5"),
        ({"state_dtype": "int8"}, "state_dtype must be one of float32, bfloat16, float16, split, split8, got 'int8'"),
        ({"dtype": "float64"}, "dtype must be one of float32, bfloat16, float16, got 'float64'"),
    ],
)
def test_an_argument_out_of_range_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan("demo", **({"memory_bytes": 10**9} | arguments))


def test_a_model_that_is_not_known_is_an_error_that_says_what_is(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no model 'Qwen3\.5-4': expected .* known shape: Qwen3\.5-4B"):
        plan("Qwen3.5-4", 10**9)
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        plan(tmp_path, 10**9)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(
        ValueError, match=r"config\.json: model_type must be .*'gpt2'; the shapes known by name are Qwen3"
    ):
        plan(tmp_path, 10**9)


@pytest.mark.parametrize("model", ["llama_full", "qwen3_moe_full"])
def test_a_model_without_recurrent_layers_has_one_form_with_the_bytes_of_its_cache(model):
    found = plan(FIXTURES / model / "checkpoint", 10**9, 3, 100)
    (cost,) = found.forms
    assert (cost.form, cost.limit, cost.checkpoint_bytes, cost.state_step_bytes) == ("buffered", None, 0, 0)
    for slots in (1, 7):
        assert cost.fixed_bytes + slots * cost.request_bytes == cache_bytes(found, slots=slots)
    assert cost.requests > 10 and cost.step_bytes == (100 + 4) * find_sizes(found.model).kv_bytes("bfloat16")
    assert (found.best_limit, found.crossover, found.recurrent_ratio, found.request_ratio) == (None,) * 4
    assert plan("Llama-3.1-8B", 80e9).parameter_bytes == 2 * 8_030_261_248


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "device", "devices"), [("Qwen3.5-4B", "v6e-8", 8), ("Kimi-Linear-48B-A3B", "tpu7x-2", 4)]
)
def test_on_a_slice_a_plan_counts_what_one_device_holds(name, device, devices):
    """The parameters as they lie on a mesh, and the caches that its layers make there."""
    found, config = plan(name, device=device, context=300), find_sizes(name).config
    mesh = jax.sharding.AbstractMesh((devices,), ("tensor",))
    model = jax.eval_shape(lambda: decoder.Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    held = 0
    for param in named_parameters(model).values():
        spread = any(partition(param.axes, mesh))
        held += (
            math.prod(spread_shape(param, mesh)) * param.get_raw_value().dtype.itemsize // (devices if spread else 1)
        )
    assert found.parameter_bytes == held
    cost = found["buffered"]
    for slots in (1, 3):
        assert cost.fixed_bytes + slots * cost.request_bytes == cache_bytes(found, config.spread(devices), slots=slots)
    assert found.memory_bytes == found.device.memory_bytes and found.device.devices == devices


@pytest.mark.slow
def test_a_step_on_a_slice_is_estimated_from_its_bandwidth():
    found = plan("Qwen3.5-4B", device="v5e-4", context=1024)
    for cost in found.forms:
        moved = found.parameter_bytes + cost.requests * cost.step_bytes
        assert cost.step_seconds == pytest.approx(moved / 819e9)
    cost = found["buffered"]
    assert found.step_seconds_for("buffered", cost.requests) == cost.step_seconds
    less = (found.parameter_bytes + 3 * cost.step_bytes) / 819e9
    assert found.step_seconds_for("buffered", 3) == pytest.approx(less)
    without = plan("Qwen3.5-4B", 16 * 10**9)
    assert all(cost.step_seconds is None for cost in without.forms)
    with pytest.raises(ValueError, match="device must be given to a plan that estimates a step"):
        without.step_seconds_for("buffered", 3)
    one, two = (plan("Llama-3.1-8B", device=name) for name in ("tpu7x", "v6e"))
    assert one.device.devices == 2 and one.memory_bytes == 96 * 2**30 and two.memory_bytes == 32 * 2**30


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": "v3-8"}, r"device must be one of v4, v5e, v5p, v6e, tpu7x, with the number of its chips .*'v3-8'"),
        ({"device": "v6e-0"}, "device must be one of"),
        ({"device": 4}, "device must be one of .* got 4"),
        (
            {"device": "v6e-3"},
            r"linear layers \(32\) must be a multiple of the mesh axis \"tensor\" \(3\)",
        ),
        ({}, "memory_bytes or device must be given, and not both, got None and None"),
        ({"device": "v6e", "memory_bytes": 10**9}, "memory_bytes or device must be given, and not both"),
    ],
)
def test_a_slice_that_is_not_there_or_does_not_fit_is_an_error(given, message):
    with pytest.raises(ValueError, match=message):
        plan("Qwen3.5-4B", **given)

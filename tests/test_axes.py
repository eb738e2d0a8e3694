"""Annotations of arrays: that they are checked while tests run, that dataclasses hold what they say, one glossary."""

import ast
import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import jaxbuf.axes
from jaxbuf.attention import pages
from jaxbuf.memory.sequences import make_launch
from jaxbuf.memory.tree import path_first
from jaxbuf.recurrence import RecurrenceSpec, buffered
from jaxbuf.serving import SamplingParams, generate_tokens
from jaxbuf.serving.acceptance import passes
from jaxbuf.serving.adaptive import Adaptive
from jaxbuf.serving.batch import Decoding, make_batch
from jaxbuf.serving.beams import Settings, search_beams, start_beams
from jaxbuf.serving.drafters import MTP, DraftModel, NGram
from jaxbuf.serving.prompts import start
from tests.array_checks import wrong_fields
from tests.serving.five_tokens import five_token_model

PACKAGE = Path(jaxbuf.axes.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


def test_a_wrong_shape_or_dtype_is_an_error_where_a_function_would_go_on():
    right, wrong_shape, wrong_dtype = jnp.zeros(3), jnp.zeros(1), jnp.zeros(3, jnp.bfloat16)
    assert passes(right, right, right).shape == (3,)
    with pytest.raises(jaxtyping.TypeCheckError, match=r"acceptance\.passes"):
        passes(right, wrong_shape, right)
    with jax.numpy_dtype_promotion("standard"), pytest.raises(jaxtyping.TypeCheckError, match=r"acceptance\.passes"):
        passes(right, wrong_dtype, right)


def test_functions_are_checked_inside_compiled_ones():
    wrong = jnp.zeros((2, 3), jnp.int32), jnp.zeros(1, jnp.int32)  # accepted: of one row, where path has two
    with pytest.raises(jaxtyping.TypeCheckError, match="rows"):
        jax.jit(lambda path, accepted: path_first(path, accepted, 4))(*wrong)


def test_what_a_function_returns_is_checked_by_its_arguments(monkeypatch):
    def broken(array, shape):
        return np.zeros((shape[0] - 1, shape[1]), np.int32)

    monkeypatch.setattr(pages.jnp, "broadcast_to", broken)
    with pytest.raises(jaxtyping.TypeCheckError, match="init_order"):
        pages.init_order(slots=2, max_pending=3)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["n-grams", "mtp", "a model"])
def test_what_a_generation_carries_is_what_its_fields_say(drafter):
    lm = five_token_model()
    found = {"n-grams": NGram(3), "mtp": Adaptive(MTP(4, branches=2)), "a model": DraftModel(lm.model, 3)}.get(drafter)
    setting = SamplingParams(n=2, logprobs=2, prompt_logprobs=1, temperature=0.5)
    batch = make_batch(lm, [[1, 2, 3], [0]], setting, Decoding(8, drafter=found))

    def run(model, arrivals):
        carry = start(model, batch.sizes, arrivals, batch.drafter)
        return carry, generate_tokens(model, carry, 3, batch.drafter)

    (arrivals,) = batch.arrivals
    before, after = jax.eval_shape(run, lm.model, arrivals)
    assert [*wrong_fields(arrivals), *wrong_fields(before), *wrong_fields(after)] == []
    wrong = dataclasses.replace(after.history, length=jax.ShapeDtypeStruct((1,), jnp.int32))
    assert list(wrong_fields(dataclasses.replace(after, history=wrong))) == [".history.length of History is int32 (1,)"]


def test_what_a_launch_holds_is_what_its_fields_say():
    spec = RecurrenceSpec(heads=4, key_heads=2, key_dim=8, value_dim=16)
    slots, lengths = np.array([2, 1], np.int32), np.array([3, 1], np.int32)
    parents = np.tile(np.array([-1, 0, 0], np.int32), (2, 1))

    def run(**shared):
        cache = buffered.init(spec, slots=3, limit=4, max_pending=3, kv_limit=6, state_dtype="split8", **shared)
        launch = make_launch(cache.cursor.position, 3, slots, lengths, 3, parents=parents)
        prompt = buffered.begin_prefill(cache.cursor, slots, lengths, 1, time=3)
        copies = buffered.fork_cursor(cache.cursor, slots[:1], slots[1:])
        return cache, launch, prompt, copies, buffered.begin(cache.cursor, slots, lengths, 3, parents)

    for shared in ({}, {"states": 4, "blocks": 9}):
        assert list(wrong_fields(jax.eval_shape(lambda shared=shared: run(**shared)))) == []


def test_what_a_beam_search_carries_is_what_its_fields_say():
    lm = five_token_model()
    batch = make_batch(lm, [[1, 2, 3], [0]], SamplingParams(n=2), Decoding(8))
    (arrivals,) = batch.arrivals
    one = np.int32(1)
    settings = Settings(one, np.array([4, -1], np.int32), np.ones((2, 1), np.int32), one, np.float32(1), np.bool_(True))

    def run(model, arrivals):
        carry = start(model, batch.sizes, dataclasses.replace(arrivals, begins=None))
        search = start_beams(model, carry.cache, carry.hidden, settings, beams=2, room=8)
        return search, search_beams(model, search, 3)

    assert list(wrong_fields((settings, *jax.eval_shape(run, lm.model, arrivals)))) == []


def test_the_glossary_explains_every_axis_and_no_others():
    explained = re.findall(r"^    (\w+)  ", jaxbuf.axes.__doc__ or "", re.MULTILINE)
    assert len(explained) == len(set(explained))
    used = {axis for path in MODULES for axes in annotated(path) for axis in re.findall(r"[a-z]\w*", axes)}
    assert used == set(explained)


def annotated(path: Path) -> list[str]:
    """The axes of every annotation of an array in a module, without arguments in braces."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else []
            if node.value.id in jaxbuf.axes.__all__ and len(parts) == 2 and isinstance(parts[1], ast.Constant):
                found.append(re.sub(r"\{.*?\}", "", str(parts[1].value)))
    return found


def test_no_module_has_a_name_of_its_own_for_arrays():
    own = re.compile(r"^\s*(type )?Array\s*=", re.MULTILINE)
    assert [path for path in MODULES if own.search(path.read_text())] == []
    assert [path for path in MODULES if "from jaxtyping import" in path.read_text()] == [PACKAGE / "axes.py"]


def test_the_package_does_not_need_what_checks_it():
    assert [path for path in MODULES if "beartype" in path.read_text()] == []

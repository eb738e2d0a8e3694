"""form="kv": short texts read no checkpoint, and get the tokens that they get with one."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.recurrence import RecurrenceSpec
from jaxbuf.recurrence.traffic import crossover
from jaxbuf.serving import SamplingParams, batch, forms, generate
from jaxbuf.serving.batch import Decoding, choose_kv_limit, make_batch
from jaxbuf.target import Target

GREEDY, CPU = SamplingParams(temperature=0.0, ignore_eos=True), Target("cpu")
NEW, LIMIT = 12, 4


@pytest.fixture
def prompts(rng, lm):
    """One that stays below the threshold, one that comes to it on the way, and one that begins above it."""
    kv = threshold(lm)
    return [rng.integers(0, lm.vocab_size, n).tolist() for n in (3, kv - 5, kv + 9, 2)]


def threshold(lm):
    return crossover(lm.config.spec, "float32", "float32", LIMIT)


def expected_reads(prompt, kv):
    """Steps that read a checkpoint: each reads one token, and folds if that is too many."""
    length, folded, reads = (prompt, 0, 0) if prompt <= kv else (0, prompt, 0)
    for _ in range(NEW - 1):
        reads += folded > 0
        if length and length + 1 > (LIMIT if folded else kv):
            length, folded = 0, folded + length
        length += 1
    return reads


@pytest.mark.slow
@pytest.mark.checks("forms", family="qwen3_5")
@pytest.mark.parametrize("drafter", [None, pytest.param("ngram", marks=pytest.mark.exhaustive)])
def test_short_texts_read_no_checkpoint_and_the_tokens_are_those_with_one(lm, prompts, drafter):
    runs = {
        form: generate(lm, prompts, NEW, GREEDY, form=form, limit=LIMIT, drafter=drafter) for form in ("buffered", "kv")
    }
    for with_one, without in zip(runs["buffered"], runs["kv"], strict=True):
        assert with_one.tokens == without.tokens
        assert (with_one.stats.form, without.stats.form) == ("buffered", "kv")
        assert with_one.stats.checkpoint_reads == with_one.stats.steps
    reads = [result.stats.checkpoint_reads for result in runs["kv"]]
    assert reads[0] == reads[3] == 0 < reads[1] < reads[2] == runs["kv"][2].stats.steps
    if drafter is None:
        assert reads == [expected_reads(len(prompt), threshold(lm)) for prompt in prompts]
        assert runs["kv"][0].stats.bytes < runs["buffered"][0].stats.bytes
        assert runs["kv"][2].stats.bytes == runs["buffered"][2].stats.bytes


@pytest.mark.checks("forms", family="qwen3_5")
@pytest.mark.exhaustive
def test_prompts_in_chunks_stay_without_a_checkpoint(lm, prompts, monkeypatch):
    whole = generate(lm, prompts, NEW, GREEDY, form="kv", limit=LIMIT)
    monkeypatch.setattr(batch, "LEAST_CHUNK", 4)
    monkeypatch.setattr(batch, "CHUNK_TOKENS", 16)
    decoding = Decoding(NEW, form="kv", limit=LIMIT)
    assert len(make_batch(lm, prompts, GREEDY, decoding).arrivals) > 2
    found = generate(lm, prompts, NEW, GREEDY, form="kv", limit=LIMIT)
    assert [result.tokens for result in found] == [result.tokens for result in whole]
    assert [result.stats for result in found] == [result.stats for result in whole]


@pytest.mark.checks("forms", family="qwen3_5")
@pytest.mark.exhaustive
def test_samples_share_a_prompt_without_a_checkpoint(lm, prompts):
    settings = SamplingParams(n=3, temperature=0.0, ignore_eos=True)
    for result, alone in zip(
        generate(lm, prompts, NEW, settings, form="kv", limit=LIMIT),
        generate(lm, prompts, NEW, GREEDY, form="kv", limit=LIMIT),
        strict=True,
    ):
        for sample in result.samples:
            assert sample.tokens == alone.tokens
            assert sample.stats.checkpoint_reads == alone.stats.checkpoint_reads


@pytest.mark.exhaustive
def test_rows_take_the_blocks_of_their_rings_from_one_pool_where_few_need_long_ones(lm, rng, monkeypatch):
    kv, decoding = 64, Decoding(NEW, form="kv", limit=LIMIT)
    monkeypatch.setattr(forms, "kv_entries", lambda *_, **__: kv)
    long = [rng.integers(0, lm.vocab_size, kv + 9 + i).tolist() for i in range(7)]
    short = [rng.integers(0, lm.vocab_size, kv - 3).tolist()]
    assert make_batch(lm, short * 8, GREEDY, decoding).sizes.blocks is None
    sizes = make_batch(lm, long + short, GREEDY, decoding).sizes
    assert sizes.blocks is not None and sizes.kv_limit == kv
    own = make_batch(lm, long + short, GREEDY, Decoding(NEW, form="buffered", limit=LIMIT))
    assert own.sizes.kv_limit is None and own.sizes.blocks is None
    results = generate(lm, long + short, NEW, GREEDY, form="kv", limit=LIMIT)
    assert {result.finish_reason for result in results} == {"length"}
    expected = generate(lm, long + short, NEW, GREEDY, form="buffered", limit=LIMIT)
    assert [result.tokens for result in results] == [result.tokens for result in expected]


def test_auto_is_kv_only_where_a_kernel_reads_what_is_there_and_nowhere_else(lm):
    def chosen(lm, form, chosen="buffered", prompts=(3,), capacity=1000):
        given = {"limit": 16, "state_dtype": "float32", "entry_dtype": np.dtype("float32")}
        return choose_kv_limit(lm, form, chosen, prompts, **given, capacity=capacity)

    spec = RecurrenceSpec(heads=32, key_heads=16, key_dim=128, value_dim=128)
    wide = WithSpec(lm, spec)
    kv = crossover(spec, "float32", "float32", 16)
    assert chosen(wide, "kv") == kv and chosen(wide, "kv", capacity=40) == 40
    assert chosen(wide, "auto") is None
    hopper = dataclasses.replace(wide, target=Target("gpu", "Hopper"))
    assert chosen(hopper, "auto") == kv
    assert chosen(hopper, "auto", "recurrent") is None and chosen(hopper, "buffered") is None
    assert chosen(hopper, "kv", capacity=12) is None
    few, half, none = (kv, kv + 1, kv + 1), (kv, kv + 1), (kv + 1,)
    assert [chosen(hopper, "auto", prompts=prompts) for prompts in (few, half, none)] == [None, kv, None]
    assert [chosen(hopper, "kv", prompts=prompts) for prompts in (few, half, none)] == [kv, kv, None]
    assert chosen(WithSpec(lm, None), "kv") is None
    channels = WithSpec(lm, dataclasses.replace(spec, decay="channel"), hopper.target)
    assert chosen(channels, "auto", prompts=(1,)) is None and chosen(channels, "kv", prompts=(1,)) > 16


@dataclasses.dataclass
class WithSpec:
    """What `choose_kv_limit` looks at of a model."""

    lm: object
    spec: RecurrenceSpec | None
    target: Target = CPU

    @property
    def model(self):
        return self.lm.model

    @property
    def config(self):
        return self

    @property
    def on_device(self):
        return self


def test_the_threshold_is_what_was_measured_on_the_device_in_proportion_to_the_bytes():
    spec = RecurrenceSpec(heads=32, key_heads=16, key_dim=128, value_dim=128)
    given = {"limit": 16, "state_dtype": "float32", "entry_dtype": jnp.bfloat16}
    row = forms.Measured(
        "a chip", 32, 16, 128, 128, 16, (1,), (1.0,), (1.0,), kv_entries=141.0, kv_entries_by_bytes=188.0
    )
    assert forms.kv_entries(spec, "a chip", **given, table=[row]) == 141
    assert forms.kv_entries(spec, "another", **given, table=[row]) == crossover(spec) == 188
    half = forms.kv_entries(spec, "a chip", **given | {"state_dtype": "split"}, table=[row])
    assert half == round(crossover(spec, "split") * 141 / 188)
    assert forms.kv_entries(spec, "NVIDIA H200", **given) == 141

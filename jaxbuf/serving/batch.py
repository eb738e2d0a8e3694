"""A batch of prompts on its way in: checked, and packed into arrays."""

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Literal, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.models.cache import forked_sizes
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.shapes import power_of_two_from
from jaxbuf.recurrence.launch import kernel_serves
from jaxbuf.recurrence.traffic import BLOCK_SIZE, ring_entries
from jaxbuf.serving import forms
from jaxbuf.serving.arrivals import Arrivals, Beginning
from jaxbuf.serving.carry import CarrySizes
from jaxbuf.serving.drafters import DRAFT_TOKENS, check_draft_tokens, make_drafter
from jaxbuf.serving.sampling import SamplingParams, most_biases, pack, whole
from jaxbuf.serving.speculation import Drafter, drafts_trees
from jaxbuf.serving.token_masks import pack_mask
from jaxbuf.shown import shown

log = logging.getLogger("jaxbuf")

type Prompt = str | Sequence[int] | np.ndarray | jax.Array
type Form = Literal["auto", "recurrent", "buffered", "kv"]

GREEDY = SamplingParams(temperature=0.0)
STATE_DTYPES = ("float32", "bfloat16", "split", "split8")
# The smallest sizes that programs are compiled for: of prompts, of generated tokens, of stop tokens. Larger sizes are
# powers of two.
PROMPT_BUCKET = 64
ROOM = 16
STOP_IDS = 4
# Prompts are read in chunks: of so many tokens in all rows together at most, but of each row at least so many.
CHUNK_TOKENS = 2**16
LEAST_CHUNK = 512


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How prompts are decoded; the arguments of `generate` of these names."""

    max_new_tokens: int = 64
    limit: int = 16
    form: Form = "auto"
    entry_dtype: str | None = None
    state_dtype: str | None = None
    drafter: object = None
    draft_tokens: int = DRAFT_TOKENS
    adaptive_drafts: bool = False


@dataclasses.dataclass(frozen=True)
class Batch:
    """Prompts that are generated together: what the compiled programs take, and what results are read with.

    Attributes:
      lm: The model.
      prompts, settings: One each a prompt.
      form: The one that runs: never "auto".
      sizes: What the carry is made for.
      drafter: Who drafts tokens; None: nobody.
      begins: Every row's settings; rows that fill the batch up are negative.
    """

    lm: LanguageModel
    prompts: list[list[int]]
    settings: list[SamplingParams]
    form: forms.Chosen
    sizes: CarrySizes
    drafter: Drafter | None
    begins: Beginning

    @property
    def rows(self) -> list[tuple[int, int]]:
        """The prompt and the sample of each row."""
        return [(index, sample) for index, setting in enumerate(self.settings) for sample in range(setting.n)]

    @property
    def has_stop_texts(self) -> bool:
        """Whether some prompt's text has to be looked at while it is generated."""
        return any(setting.stop_texts for setting in self.settings)

    @property
    def arrivals(self) -> list[Arrivals]:
        """The prompts, chunk after chunk."""
        tops = [s.prompt_logprobs for s in self.settings if s.prompt_logprobs is not None]
        report = {"report_prompt": bool(tops), "prompt_top": np.int32(max(tops, default=0))}
        rows = reading_rows([setting.n for setting in self.settings])
        chunks = split_prompts(self.prompts, rows, self.sizes.kv_limit)
        chunks = (dataclasses.replace(chunk, **report) for chunk in chunks)
        return [dataclasses.replace(chunk, begins=_ending(self.begins, chunk)) for chunk in chunks]


def reading_rows(numbers: Sequence[int]) -> list[int]:
    """The row that reads each prompt, where prompts have `numbers` of rows each, in order."""
    return np.cumsum([0, *numbers[:-1]]).tolist()


def split_prompts(
    prompts: Sequence[Sequence[int]], rows: Sequence[int], kv_limit: int | None = None
) -> Iterator[Arrivals]:
    """Prompts in chunks of one size, each read into a row; none of them begins to run. Those of at most kv_limit tokens
    get no checkpoint."""
    tokens, lengths = pack_prompts(prompts)
    batch, bucket = tokens.shape
    limits = None if kv_limit is None else np.where(lengths <= kv_limit, kv_limit, 0).astype(np.int32)
    row = np.full(batch, -1, np.int32)
    row[: len(rows)] = rows
    time = min(bucket, max(LEAST_CHUNK, power_of_two_from(CHUNK_TOKENS // batch)))
    for start in range(0, int(lengths.max()), time):
        left = lengths - start
        yield Arrivals(
            rows=data(np.where(left > 0, row, -1)),
            tokens=data(tokens[:, start : start + time]),
            lengths=data(np.clip(left, 0, time)),
            start=data(np.full(batch, start, np.int32)),
            last=data(left <= time),
            kv_limit=None if limits is None else data(limits),
            prompt_top=data(np.int32(0)),
        )


def _ending(begins: Beginning, chunk: Arrivals) -> Beginning:
    """Of the rows those whose prompts end with a chunk."""
    ends = np.asarray(chunk.last & (chunk.lengths > 0))[begins.prompt]
    return dataclasses.replace(begins, rows=data(np.where(ends, begins.rows, -1)))


def data(array: np.ndarray | np.generic) -> jax.Array:
    """numpy's array, typed as what it is in the compiled program that takes it."""
    return cast(jax.Array, array)


def check_settings(decoding: Decoding) -> None:
    """Checks what of `generate`'s arguments does not depend on the model or the prompts; errors as there."""
    for name in ("max_new_tokens", "limit"):
        value = getattr(decoding, name)
        if not whole(value) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    form, entry_dtype, state_dtype = decoding.form, decoding.entry_dtype, decoding.state_dtype
    if form not in ("auto", "recurrent", "buffered", "kv"):
        raise ValueError(f'form must be "auto", "recurrent", "buffered" or "kv", got {form!r}')
    if entry_dtype not in (None, "bfloat16", "float16", "float32"):
        raise ValueError(f'entry_dtype must be None, "bfloat16", "float16" or "float32", got {entry_dtype!r}')
    if state_dtype is not None and state_dtype not in STATE_DTYPES:
        raise ValueError(
            f'state_dtype must be None, "float32", "bfloat16", "split" or "split8", got {shown(state_dtype)}'
        )
    check_draft_tokens(decoding.draft_tokens)


def check_model(lm: object) -> None:
    """Raises ValueError unless it is a LanguageModel."""
    if not isinstance(lm, LanguageModel):
        told = repr(lm) if isinstance(lm, str) else f"a {type(lm).__name__}"
        raise ValueError(f"lm must be a LanguageModel, as jaxbuf.load returns it, got {told}")


def make_batch(
    lm: LanguageModel,
    prompts: Iterable[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    decoding: Decoding = Decoding(),
) -> Batch:
    """Checks and packs the arguments of `generate`; errors as there."""
    check_model(lm)
    check_settings(decoding)
    max_new_tokens, limit = int(decoding.max_new_tokens), decoding.limit
    drafter = make_drafter(lm, decoding.drafter, decoding.draft_tokens, decoding.adaptive_drafts)
    encoded = encode_prompts(lm, prompts, max_new_tokens)
    settings = _check_sampling(lm, sampling, len(encoded))
    each = [sample for setting in settings for sample in setting.samples]
    batch, bucket = padded_sizes(encoded)
    rows, room = power_of_two_from(len(each)), power_of_two_from(max_new_tokens, ROOM)
    capacity, form = bucket + room, choose_form(lm, decoding.form, len(each))
    stop_ids = _pack_stops(lm, each, rows)
    row, prompt = np.arange(rows, dtype=np.int32), np.repeat(np.arange(len(settings)), [s.n for s in settings])
    forks = len(each) > len(encoded)
    state_dtype = choose_state_dtype(decoding.state_dtype)
    entry_dtype = jnp.dtype(lm.dtype if decoding.entry_dtype is None else decoding.entry_dtype)
    lengths = [len(prompts) for prompts in encoded]
    dtypes = {"state_dtype": state_dtype, "entry_dtype": entry_dtype}
    kv_limit = choose_kv_limit(
        lm, decoding.form, form, lengths, limit=min(limit, capacity), capacity=capacity, **dtypes
    )
    form = "kv" if kv_limit else form
    sizes = CarrySizes(
        rows=rows,
        capacity=capacity,
        limit=choose_ring(form, limit, capacity, drafts=drafter is not None),
        kv_limit=kv_limit,
        stop_ids=stop_ids.shape[1],
        biases=most_biases(each),
        logprobs=any(s.logprobs is not None or s.prompt_logprobs is not None for s in settings),
        dtype=lm.model.embed_tokens.get_raw_value().dtype,
        entry_dtype=entry_dtype,
        state_dtype=state_dtype,
        target=lm.target,
    )
    if forks:
        sizes = shared_sizes(sizes, prompts=batch, prompt_tokens=bucket, drafter=drafter)
    else:
        sizes = kv_sizes(sizes, lengths, max_new_tokens, drafter=drafter)
    begins = Beginning(
        rows=data(np.where(row < len(each), row, -1)),
        prompt=data(np.pad(prompt, (0, rows - len(each))).astype(np.int32)),
        limit=data(np.full(rows, 1 if form == "recurrent" else min(limit, capacity), np.int32)),
        max_new_tokens=data(np.full(rows, max_new_tokens, np.int32)),
        sampling=pack(each + [GREEDY] * (rows - len(each))),
        stop_ids=data(stop_ids),
        allowed=data(np.tile(pack_mask(lm.known_ids), (rows, 1))),
        forks=forks,
    )
    log.debug("generating: prompts %d, prompt bucket %d, %s form, limit %d, %s", batch, bucket, form, limit, sizes)
    return Batch(lm, encoded, settings, form, sizes, drafter, begins)


def shared_sizes(
    sizes: CarrySizes, *, prompts: int, prompt_tokens: int, drafter: Drafter | None = None, again: bool = False
) -> CarrySizes:
    """The sizes of a carry whose rows share the memory of the prompts that they continue, see `forked_sizes`."""
    pools = forked_sizes(
        slots=sizes.rows,
        limit=max(sizes.limit, sizes.kv_limit or 0),
        max_pending=1 if drafter is None else 1 + drafter.draft_tokens,
        trees=drafts_trees(drafter),
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        new_tokens=sizes.capacity - prompt_tokens,
        again=again,
    )
    return dataclasses.replace(sizes, **pools)


def kv_sizes(
    sizes: CarrySizes, prompts: Sequence[int], new_tokens: int, *, drafter: Drafter | None = None
) -> CarrySizes:
    """The sizes of a carry whose rows take the blocks of their rings from one pool, if that is much smaller.

    A ring has room for all that a row keeps without a checkpoint. Rows that have one use little of it.

    Args:
      sizes: Of the carry; with kv_limit None nothing changes.
      prompts: The tokens of each row's prompt.
      new_tokens: The most that each row adds.
      drafter: Who drafts tokens; None: nobody.
    """
    if sizes.kv_limit is None:
        return sizes
    pending, longest = 1 if drafter is None else 1 + drafter.draft_tokens, sizes.capacity
    limit, kv_limit = (min(entries, longest) for entries in (sizes.limit, sizes.kv_limit))
    width = ring_entries(max(limit, kv_limit), pending, BLOCK_SIZE) // BLOCK_SIZE

    def most(tokens: int) -> int:
        """Blocks of a row: its entries, in blocks of which the first and the last are partly theirs, and what a launch
        writes before it gives back what it folds."""
        entries = min(tokens + new_tokens, kv_limit) if tokens <= kv_limit else limit
        return min(width, -(-max(entries, limit, pending) // BLOCK_SIZE) + -(-pending // BLOCK_SIZE) + 2)

    blocks = _rounded(sum(map(most, prompts)))
    if 4 * blocks > 3 * sizes.rows * width:
        return sizes
    return dataclasses.replace(sizes, states=sizes.rows, blocks=blocks)


def _rounded(number: int) -> int:
    """The next number of which all but three binary digits are zeros: so that few programs are compiled."""
    step = 1 << max(number.bit_length() - 3, 0)
    return -(-number // step) * step


def _check_sampling(
    lm: LanguageModel, sampling: SamplingParams | Sequence[SamplingParams], prompts: int
) -> list[SamplingParams]:
    """The settings of each prompt."""
    settings = [sampling] * prompts if isinstance(sampling, SamplingParams) else sampling
    if not isinstance(settings, Sequence) or not all(isinstance(setting, SamplingParams) for setting in settings):
        raise ValueError(f"sampling must be one SamplingParams or a list of them, got {sampling!r}")
    if len(settings) != prompts:
        raise ValueError(f"sampling must be one SamplingParams or one a prompt ({prompts}), got {len(settings)}")
    for i, setting in enumerate(settings):
        for name in ("logit_bias", "stop_token_ids"):
            check_token_ids(lm, name, getattr(setting, name), f" (prompt {i})")
        if setting.stop_texts and lm.tokenizer is None:
            raise ValueError(f"stop must be empty for a model without a tokenizer, got {setting.stop!r} (prompt {i})")
    return list(settings)


def _pack_stops(lm: LanguageModel, settings: Sequence[SamplingParams], rows: int) -> np.ndarray:
    """int32 [rows, n], padded with -1: the stop tokens of each row."""
    stops = [tuple(s.stop_token_ids) + (() if s.ignore_eos else tuple(lm.stop_ids)) for s in settings]
    packed = np.full((rows, power_of_two_from(max(map(len, stops)), STOP_IDS)), -1, np.int32)
    for row, ids in enumerate(stops):
        packed[row, : len(ids)] = ids
    return packed


def list_prompts(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Prompts as a list: from any iterable in order, or the rows of an integer array [prompts, time].

    Raises:
      ValueError: They are nothing that can be listed in order, or a single text.
    """
    if isinstance(prompts, str):
        raise ValueError(f"prompts must be a list of texts or token lists, got one text: [{prompts[:20]!r}...]")
    if isinstance(prompts, np.ndarray | jax.Array) and prompts.ndim == 1 and prompts.dtype != object:
        found = f"one row, {shown(prompts)}: put it in a list"
        raise ValueError(f"prompts must be a list of texts, token lists or integer arrays, got {found}")
    if isinstance(prompts, np.ndarray | jax.Array) and prompts.ndim:
        return list(np.asarray(prompts))
    if isinstance(prompts, bytes | Mapping | Set | np.generic | jax.Array) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a list of texts or token lists, got {shown(prompts)}")
    return list(prompts)


def encode_prompts(lm: LanguageModel, prompts: Iterable[Prompt], max_new_tokens: int) -> list[list[int]]:
    """The tokens of every prompt; errors as in `generate`."""
    return [_encode(lm, prompt, f"prompts[{i}]", max_new_tokens) for i, prompt in enumerate(list_prompts(prompts))]


def padded_sizes(encoded: Sequence[Sequence[int]]) -> tuple[int, int]:
    """How many prompts, and of how many tokens, programs are compiled for: powers of two."""
    return power_of_two_from(len(encoded)), power_of_two_from(max(map(len, encoded)), PROMPT_BUCKET)


def pack_prompts(encoded: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """int32 [prompts, bucket], right-padded, and their lengths int32 [prompts]."""
    batch, bucket = padded_sizes(encoded)
    tokens, lengths = np.zeros((batch, bucket), np.int32), np.zeros(batch, np.int32)
    for row, prompt in enumerate(encoded):
        tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
    return tokens, lengths


def choose_ring(form: forms.Chosen, limit: int, capacity: int, *, drafts: bool = False) -> int:
    """The largest limit that the rings have room for.

    Rows of the recurrent form have one entry at most, and kernels read a ring of one faster. With drafts the ring has
    their entries, too, and both forms share one compiled program. A ring need hold no more entries than a row has
    tokens (`capacity`), however large the limit is.
    """
    return 1 if form == "recurrent" and not drafts else min(limit, capacity)


def choose_form(lm: LanguageModel, form: Form, rows: int) -> Literal["recurrent", "buffered"]:
    """What rows are that have a checkpoint, for so many rows."""
    if form != "auto":
        return "recurrent" if form == "recurrent" else "buffered"
    spec = lm.config.on_device.spec  # without one every form is the same
    return "buffered" if spec is None else forms.choose(spec, rows, forms.device_kind(lm.model.norm.get_raw_value()))


def choose_kv_limit(
    lm: LanguageModel,
    form: Form,
    chosen: forms.Chosen,
    prompts: Sequence[int],
    *,
    limit: int,
    capacity: int,
    state_dtype: str,
    entry_dtype: jnp.dtype,
) -> int | None:
    """The entries up to which a row that never folded reads no checkpoint; None: no row does without one.

    "auto" does without where a kernel reads the entries that are there and no others: XLA's path reads the checkpoints
    of all rows and all places of their rings, whatever is in them, so that nothing is won. And it does without only
    where most prompts are short: long rings cost those a little that have a checkpoint. Where the decay is one a key
    channel they cost much: the kernel is fast on short rings alone.

    Args:
      lm: The model.
      form, chosen: As asked for, and as `choose_form` says.
      prompts: The tokens of each.
      limit, state_dtype, entry_dtype: Of rows that have a checkpoint.
      capacity: The most tokens of a row.
    """
    spec, dtypes = lm.config.on_device.spec, {"state_dtype": state_dtype, "entry_dtype": entry_dtype}
    if spec is None or chosen == "recurrent" or form == "buffered":
        return None
    device = forms.device_kind(lm.model.norm.get_raw_value())
    entries = min(forms.kv_entries(spec, device, limit=limit, **dtypes), capacity)
    short = sum(tokens <= entries for tokens in prompts)
    if entries <= limit or not short:
        return None
    if form == "auto":
        served = spec.decay != "channel" and kernel_serves(spec, target=lm.target, ring=entries, **dtypes)
        return entries if served and 2 * short >= len(prompts) else None
    return entries


def choose_state_dtype(state_dtype: str | None) -> str:
    """The `state_dtype` that runs."""
    return "float32" if state_dtype is None else state_dtype


def check_token_ids(lm: LanguageModel, name: str, ids: Iterable[int], where: str = "") -> None:
    """Raises ValueError for an id that the vocabulary does not have."""
    outside = [token for token in ids if token >= lm.vocab_size]
    if outside:
        raise ValueError(f"{name} must name token ids in [0, {lm.vocab_size}), got {outside[0]}{where}")


def _encode(lm: LanguageModel, prompt: Prompt, name: str, max_new_tokens: int) -> list[int]:
    tokens = lm.encode(prompt) if isinstance(prompt, str) else _token_list(prompt)
    if tokens is None:
        raise ValueError(f"{name} must be a text or a list of token ids, got {shown(prompt)}")
    if not tokens:
        raise ValueError(f"{name} must hold at least one token, got {shown(prompt)}")
    outside = [token for token in tokens if not 0 <= token < lm.vocab_size]
    if outside:
        raise ValueError(f"{name} must hold token ids in [0, {lm.vocab_size}), got {outside[0]}")
    if len(tokens) + max_new_tokens > lm.max_length:
        raise ValueError(
            f"{name} ({len(tokens)} tokens) and max_new_tokens ({max_new_tokens}) together must be at most "
            f"max_position_embeddings ({lm.max_length})"
        )
    return tokens


def _token_list(prompt: object) -> list[int] | None:
    """The integers of a list, or of a numpy or jax array of one dimension; None if it is no such thing."""
    if hasattr(prompt, "dtype"):
        array = np.asarray(prompt)
        return array.tolist() if array.ndim == 1 and np.issubdtype(array.dtype, np.integer) else None
    if isinstance(prompt, bytes | Mapping | Set) or not isinstance(prompt, Iterable):
        return None
    tokens = list(prompt)
    return [int(token) for token in tokens] if all(map(whole, tokens)) else None

"""A batch of prompts on its way in: checked, and packed into arrays."""

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.shapes import power_of_two_from
from jaxbuf.pallas.platform import has_hopper
from jaxbuf.serving import forms
from jaxbuf.serving.drafters import DRAFT_TOKENS, check_draft_tokens, make_drafter
from jaxbuf.serving.samples import group_rows
from jaxbuf.serving.sampling import SamplingParams, pack, whole
from jaxbuf.serving.speculation import Drafter
from jaxbuf.serving.token_masks import pack_mask
from jaxbuf.shown import shown

log = logging.getLogger("jaxbuf")

type Prompt = str | Sequence[int] | np.ndarray | jax.Array
type Form = Literal["auto", "recurrent", "buffered"]

GREEDY = SamplingParams(temperature=0.0)
STATE_DTYPES = ("float32", "bfloat16", "split", "split8")
# The smallest sizes that programs are compiled for: of prompts, of generated tokens, of stop tokens. Larger sizes are
# powers of two.
PROMPT_BUCKET = 64
ROOM = 16
STOP_IDS = 4


@dataclasses.dataclass(frozen=True)
class Request:
    """Checked arguments of a batch: what `loop.start` takes, and what its results are read with.

    Attributes:
      prompts, settings: One each a prompt.
      form: The one that runs: never "auto".
    """

    lm: LanguageModel
    prompts: list[list[int]]
    settings: list[SamplingParams]
    form: forms.Chosen
    entry_dtype: jnp.dtype
    state_dtype: str
    arguments: dict[str, Any]

    @property
    def drafter(self) -> Drafter | None:
        """Who drafts tokens."""
        return self.arguments["drafter"]

    @property
    def rows(self) -> list[tuple[int, int]]:
        """The prompt and the sample of each row."""
        return [(index, sample) for index, setting in enumerate(self.settings) for sample in range(setting.n)]

    @property
    def has_stop_texts(self) -> bool:
        """Whether some prompt's text has to be looked at while it is generated."""
        return any(setting.stop_texts for setting in self.settings)


def check_settings(
    max_new_tokens: int,
    limit: int,
    form: Form,
    entry_dtype: str | None = None,
    draft_tokens: int = DRAFT_TOKENS,
    *,
    state_dtype: str | None = None,
) -> None:
    """Checks what of `generate`'s arguments does not depend on the model or the prompts; errors as there."""
    for name, value in (("max_new_tokens", max_new_tokens), ("limit", limit)):
        if not whole(value) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    if form not in ("auto", "recurrent", "buffered"):
        raise ValueError(f'form must be "auto", "recurrent" or "buffered", got {form!r}')
    if entry_dtype not in (None, "bfloat16", "float16", "float32"):
        raise ValueError(f'entry_dtype must be None, "bfloat16", "float16" or "float32", got {entry_dtype!r}')
    if state_dtype is not None and state_dtype not in STATE_DTYPES:
        raise ValueError(
            f'state_dtype must be None, "float32", "bfloat16", "split" or "split8", got {shown(state_dtype)}'
        )
    check_draft_tokens(draft_tokens)


def check_model(lm: object) -> None:
    """Raises ValueError unless it is a LanguageModel."""
    if not isinstance(lm, LanguageModel):
        told = repr(lm) if isinstance(lm, str) else f"a {type(lm).__name__}"
        raise ValueError(f"lm must be a LanguageModel, as jaxbuf.load returns it, got {told}")


def check(
    lm,
    prompts,
    max_new_tokens,
    sampling,
    limit,
    form,
    entry_dtype,
    drafter=None,
    draft_tokens=DRAFT_TOKENS,
    adaptive_drafts=False,
    *,
    state_dtype=None,
) -> Request:
    """Checks and packs the arguments of `generate`; errors as there."""
    check_model(lm)
    check_settings(max_new_tokens, limit, form, entry_dtype, draft_tokens, state_dtype=state_dtype)
    drafter = make_drafter(lm, drafter, draft_tokens, adaptive_drafts)
    encoded = encode_prompts(lm, prompts, max_new_tokens)
    settings = [sampling] * len(encoded) if isinstance(sampling, SamplingParams) else sampling
    if not isinstance(settings, Sequence) or not all(isinstance(setting, SamplingParams) for setting in settings):
        raise ValueError(f"sampling must be one SamplingParams or a list of them, got {sampling!r}")
    if len(settings) != len(encoded):
        raise ValueError(f"sampling must be one SamplingParams or one a prompt ({len(encoded)}), got {len(settings)}")
    settings = list(settings)

    for i, setting in enumerate(settings):
        for name in ("logit_bias", "stop_token_ids"):
            check_token_ids(lm, name, getattr(setting, name), f" (prompt {i})")
        if setting.stop_texts and lm.tokenizer is None:
            raise ValueError(f"stop must be empty for a model without a tokenizer, got {setting.stop!r} (prompt {i})")

    each = [sample for setting in settings for sample in setting.samples]
    tokens, lengths = pack_prompts(encoded)
    (batch, bucket), rows = tokens.shape, power_of_two_from(len(each))
    room = power_of_two_from(max_new_tokens, ROOM)
    stops = [tuple(s.stop_token_ids) + (() if s.ignore_eos else tuple(lm.stop_ids)) for s in each]
    stop_ids = np.full((rows, power_of_two_from(max(map(len, stops)), STOP_IDS)), -1, np.int32)
    for row, ids in enumerate(stops):
        stop_ids[row, : len(ids)] = ids
    dtype = jnp.dtype(lm.dtype if entry_dtype is None else entry_dtype)
    form = choose_form(lm, form, len(each))
    state_dtype = choose_state_dtype(state_dtype)
    capacity = bucket + room
    ring = choose_ring(form, limit, capacity, drafts=drafter is not None)
    prompt_tops = [s.prompt_logprobs for s in settings if s.prompt_logprobs is not None]
    shape = (batch, rows, bucket, room, form, limit, dtype.name)
    log.debug("generating: prompts %d, rows %d, prompt bucket %d, room %d, %s form, limit %d, entries %s", *shape)
    arguments = {
        "prompts": tokens,
        "lengths": lengths,
        "limit": np.full(rows, 1 if form == "recurrent" else min(limit, capacity), np.int32),
        "max_new_tokens": np.full(rows, max_new_tokens, np.int32),
        "sampling": pack(each + [GREEDY] * (rows - len(each))),
        "stop_ids": stop_ids,
        "allowed": np.tile(pack_mask(lm.known_ids), (rows, 1)),
        "capacity": capacity,
        "room": room,
        "ring_limit": ring,
        "entry_dtype": dtype,
        "state_dtype": state_dtype,
        "report": any(s.logprobs is not None for s in settings),
        "report_prompt": bool(prompt_tops),
        "prompt_top": np.int32(max(prompt_tops, default=0)),
        "drafter": drafter,
        "samples": None if len(each) == len(encoded) else group_rows([s.n for s in settings], prompts=batch, rows=rows),
    }
    return Request(lm, encoded, settings, form, dtype, state_dtype, arguments)


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


def pack_prompts(encoded: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """int32 [prompts, bucket], right-padded, and their lengths int32 [prompts]; both sizes are powers of two."""
    batch, bucket = power_of_two_from(len(encoded)), power_of_two_from(max(map(len, encoded)), PROMPT_BUCKET)
    tokens, lengths = np.zeros((batch, bucket), np.int32), np.zeros(batch, np.int32)
    for row, prompt in enumerate(encoded):
        tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
    return tokens, lengths


def choose_ring(form: forms.Chosen, limit: int, capacity: int, *, drafts: bool = False) -> int:
    """The largest limit that the rings have room for.

    It is `limit` for both forms, so that they share one compiled program, but 1 for the recurrent form without drafts
    on a Hopper GPU, where a kernel serves rings of one entry. A ring need hold no more entries than a row has tokens
    (`capacity`), however large the limit is.
    """
    return 1 if form == "recurrent" and not drafts and has_hopper() else min(limit, capacity)


def choose_form(lm: LanguageModel, form: Form, rows: int) -> forms.Chosen:
    """The form that runs for so many rows."""
    if form != "auto":
        return form
    spec = lm.config.spec  # without one every form is the same
    return "buffered" if spec is None else forms.choose(spec, rows, forms.device_kind(lm.model.norm[...]))


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

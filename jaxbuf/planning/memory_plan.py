"""What a request costs in each form of the memory, and how many fit: `plan`, from a configuration alone."""

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.arguments import check_sizes
from jaxbuf.attention.gated_memory import GatedMemory
from jaxbuf.memory.kind import Sizes
from jaxbuf.memory.sequences import init_sequences
from jaxbuf.models.admission import Admission, WriteGate
from jaxbuf.models.cache import Dtypes
from jaxbuf.models.config import ModelConfig
from jaxbuf.models.gates import gated_config, gated_layers
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.loading.checkpoint import compute_dtype
from jaxbuf.models.mixers.recurrent_mixer import RecurrentMixer
from jaxbuf.planning.model_sizes import ModelSizes, find_sizes, from_config
from jaxbuf.planning.tpu_slices import Slice, find_slice
from jaxbuf.recurrence import traffic
from jaxbuf.recurrence.recurrent_memory import RecurrentMemory
from jaxbuf.recurrence.spec import RecurrenceSpec
from jaxbuf.recurrence.state_format import SPLIT, StateFormat, state_format
from jaxbuf.recurrence.traffic import BLOCK_SIZE

type FormName = Literal["recurrent", "buffered", "kv-only", "snapshots"]

INDEX = 4  # bytes of an int32
RECURRENT = ("checkpoints", "entries", "convolution", "integers")  # what recurrent layers hold
MOST_BYTES, MOST_TOKENS = 2**63 - 1, 2**31 - 1
MOST_ENTRIES = 2**20  # of a ring, which is made to be counted
WINDOW = 256  # the paper's
WORKSPACE = 10  # a tenth of the memory, unless told


@dataclasses.dataclass(frozen=True)
class FormCost:
    """What one request costs in one form, in bytes over all layers.

    Attributes:
      form: "recurrent" (limit 1), "buffered", "kv-only" (no checkpoint), or, to compare with, "snapshots": the design
        that keeps the state of a request and one more for every draft position, and no ring (without drafts the plain
        recurrence, in place). A model without recurrent layers has one form, called "buffered".
      context: Tokens of the request: what was asked, or for "kv-only" at most the crossover.
      limit: Entries from which it folds; None without a ring.
      ring: Entries of its ring, whole blocks.
      checkpoints: States held, in all layers.
      checkpoint_bytes, entry_bytes: Of the states, and of the rings' entries.
      convolution_bytes: Of the rings of the convolutions' last inputs.
      kv_bytes: Of the softmax layers' keys and values, whole pages; with write gates those of the window and those
        behind it, and their gates.
      index_bytes: Of the counts of tokens, the cursor and the table of pages; with write gates the lists, too.
      fixed_bytes: Null rows, blocks and pages: there once, however many the requests. Not in `request_bytes`.
      requests: How many fit.
      state_step_bytes: Checkpoints and entries that a step reads and writes, the mean over a fold cycle: what
        `Stats.bytes` counts.
      step_bytes: The same with the convolutions' inputs and the keys and values, at this context. Parameters are not
        in it (a step reads them at most once, for all requests), nor is what goes in and out of a layer.
      token_bytes: step_bytes for each token that a step keeps.
      step_seconds: An estimate of a step of as many requests as fit: the parameters and what the requests move, over
        the bandwidth of the device. It leaves out what devices exchange, and that no program reaches the bandwidth;
        of a model with experts it counts all of them. None without a device.
    """

    form: FormName
    context: int
    limit: int | None
    ring: int
    checkpoints: int
    checkpoint_bytes: int
    entry_bytes: int
    convolution_bytes: int
    kv_bytes: int
    index_bytes: int
    fixed_bytes: int
    requests: int
    state_step_bytes: float
    step_bytes: float
    token_bytes: float
    step_seconds: float | None = None

    @property
    def recurrent_bytes(self) -> int:
        """The states and the rings' entries."""
        return self.checkpoint_bytes + self.entry_bytes

    @property
    def request_bytes(self) -> int:
        """All that one more request takes."""
        return self.recurrent_bytes + self.convolution_bytes + self.kv_bytes + self.index_bytes


@dataclasses.dataclass(frozen=True)
class Plan:
    """What serving a model takes of a memory: `forms` has a `FormCost` for each form.

    Without recurrent layers there is one form, keys and values, called "buffered", and what compares forms is None.

    Attributes:
      model: Its name.
      recurrent_layers, attention_layers: How many there are of each.
      memory_bytes: What there is.
      parameter_bytes: Of the parameters, in dtype.
      workspace_bytes: Left for activations, compiled programs and the allocator.
      context, draft_tokens, accepted, limit, block_size, page_size: As they were asked for.
      dtype, state_dtype, entry_dtype: Names of the dtypes of the parameters, keys, values and convolution inputs; of
        the checkpoints; of the rings' entries.
      keep, window: Of write gates, as they were asked for; None without.
      best_limit: The limit of the fewest bytes a step, with these drafts.
      crossover: Entries up to which a request is cheaper without a checkpoint.
      forms: The costs, "kv-only" third and "snapshots" last, or the one.
      device: The slice that it is for; all bytes are then those of one of its devices. None: of all devices together.
    """

    model: str
    recurrent_layers: int
    attention_layers: int
    memory_bytes: int
    parameter_bytes: int
    workspace_bytes: int
    context: int
    draft_tokens: int
    accepted: float
    limit: int
    block_size: int
    page_size: int
    dtype: str
    state_dtype: str
    entry_dtype: str
    keep: float | None
    window: int | None
    best_limit: int | None
    crossover: int | None
    forms: tuple[FormCost, ...]
    device: Slice | None = None

    def __getitem__(self, form: FormName) -> FormCost:
        return next(cost for cost in self.forms if cost.form == form)

    @property
    def request_memory_bytes(self) -> int:
        """What is left for requests; negative if the parameters alone do not fit."""
        return self.memory_bytes - self.parameter_bytes - self.workspace_bytes

    def memory_for(self, form: FormName, requests: int) -> int:
        """Bytes of memory, of which so many requests of this form leave the workspace: a tenth of them, if that is what
        this plan has, or else as many bytes as it has."""
        check_sizes(requests=requests)
        cost = self[form]
        needed = self.parameter_bytes + cost.fixed_bytes + requests * cost.request_bytes
        if self.workspace_bytes != self.memory_bytes // WORKSPACE:
            return needed + self.workspace_bytes
        least = needed * WORKSPACE // (WORKSPACE - 1) - 1  # the tenth is rounded down
        return next(total for total in range(least, least + 4) if total - total // WORKSPACE >= needed)

    def step_seconds_for(self, form: FormName, requests: int) -> float:
        """`FormCost.step_seconds` of so many requests of this form, whether they fit or not.

        Raises:
          ValueError: The plan is for no device, whose bandwidth would be known.
        """
        check_sizes(requests=requests)
        if self.device is None:
            raise ValueError("device must be given to a plan that estimates a step, got None")
        return _step_seconds(self.parameter_bytes, requests * self[form].step_bytes, self.device)

    @property
    def recurrent_ratio(self) -> float | None:
        """Recurrent memory (states and rings) of the design with snapshots over that of the buffered form."""
        if not self.recurrent_layers:
            return None
        return self["snapshots"].recurrent_bytes / self["buffered"].recurrent_bytes

    @property
    def request_ratio(self) -> float | None:
        """The same of all that a request takes, its keys and values and convolution rings included."""
        if not self.recurrent_layers:
            return None
        return self["snapshots"].request_bytes / self["buffered"].request_bytes

    def to_dict(self) -> dict[str, Any]:
        """Everything, the properties too, for JSON."""
        forms = [
            dataclasses.asdict(cost) | {"recurrent_bytes": cost.recurrent_bytes, "request_bytes": cost.request_bytes}
            for cost in self.forms
        ]
        properties = ("request_memory_bytes", "recurrent_ratio", "request_ratio")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in properties} | {"forms": forms}


def plan(
    model: str | Path | LanguageModel | ModelConfig | ModelSizes,
    memory_bytes: int | None = None,
    draft_tokens: int = 0,
    context: int = 8192,
    *,
    device: str | None = None,
    accepted: float | None = None,
    limit: int = 16,
    block_size: int = BLOCK_SIZE,
    page_size: int = 16,
    dtype: str | jnp.dtype | None = None,
    state_dtype: str | jnp.dtype = "float32",
    entry_dtype: str | jnp.dtype | None = None,
    workspace_bytes: int | None = None,
    parameter_bytes: int | None = None,
    keep: float | None = None,
    window: int = WINDOW,
) -> Plan:
    """Plans the memory of serving: what a request costs in each form, and how many fit. No weights are loaded.

    The bytes are those of the arrays that a cache is made of, to the byte: of the parameters, checkpoints, rings, keys
    and values, convolution rings and integers. Steps are counted as the algorithm needs, see
    `jaxbuf.recurrence.traffic`. A drafter's own memory is not counted.

    Args:
      model: "demo", a directory with a config.json, a Hugging Face id (its config.json alone is fetched), the name of a
        known model ("Qwen3-Next-80B-A3B", see `jaxbuf models`), or a loaded model or a configuration.
      memory_bytes: What there is, of all devices together; a whole number, which may be written as 80e9. None: that of
        the device.
      device: A slice of TPUs such as "v6e-4", a generation and a number of chips, over whose devices the model's heads
        are spread (Cloud's own names of v4, v5p and TPU7x count two cores a chip). Everything is then counted for one
        of the devices, heads that several of them need included. None: memory_bytes says what there is.
      draft_tokens: Verified in a step beside the token that the model itself gives.
      context: Tokens of a request that the softmax layers hold, the drafts among them; rounded up to pages.
      accepted: Tokens that a step keeps on average, in [1, 1 + draft_tokens]; None: all.
      limit: Entries of the buffered form, at most 2**20.
      block_size: Entries of a block of the ring.
      page_size: Tokens of a page of keys and values.
      dtype: Of the parameters, keys and values: "float32", "bfloat16" or "float16". None: the loaded model's, or what
        its configuration says, or bfloat16.
      state_dtype: Of the checkpoints: a dtype, "split" or "split8", see `jaxbuf.recurrence.buffered.init_pool`. The
        forms that write a state in every step, "recurrent" and "snapshots", have float32 in place of a split one.
      entry_dtype: Of the rings' entries; None: dtype.
      workspace_bytes: Left for activations, compiled programs and the allocator; None: a tenth of the memory. It is an
        allowance, not a measurement.
      parameter_bytes: Instead of the count, as for quantised weights; None: the configuration's parameters in dtype.
      keep: The model's softmax layers have write gates, and pages for this share of the keys behind their window, in
        (0, 1]; None: no gates. The gates' parameters are counted, those of `jaxbuf.models.admission.WriteGate`.
      window: With keep: the latest tokens that are kept whatever their gates are.

    Raises:
      FileNotFoundError: No such model; as `jaxbuf.load`.
      ValueError: A number out of range, an unknown dtype or device, or heads that so many devices can't share.

    Source: KVBuffer, sections 2.2, 3.2 to 3.4.
    """
    where = None if device is None else find_slice(device)
    if (memory_bytes is None) == (where is None):
        raise ValueError(f"memory_bytes or device must be given, and not both, got {memory_bytes!r} and {device!r}")
    memory_bytes = _whole("memory_bytes", memory_bytes if where is None else where.memory_bytes, 1, MOST_BYTES)
    draft_tokens = _whole("draft_tokens", draft_tokens, 0, MOST_ENTRIES)
    context = _whole("context", context, 1, MOST_TOKENS)
    limit = _whole("limit", limit, 1, MOST_ENTRIES)
    block_size = _whole("block_size", block_size, 1, MOST_ENTRIES)
    page_size = _whole("page_size", page_size, 1, MOST_TOKENS)
    if parameter_bytes is not None:
        parameter_bytes = _whole("parameter_bytes", parameter_bytes, 0, MOST_BYTES)
    if workspace_bytes is None:
        workspace_bytes = memory_bytes // WORKSPACE
    workspace_bytes = _whole("workspace_bytes", workspace_bytes, 0, MOST_BYTES)
    tokens = 1 + draft_tokens
    accepted = tokens if accepted is None else accepted
    if not _is_number(accepted) or not 1 <= accepted <= tokens:
        raise ValueError(f"accepted must be a number in [1, 1 + draft_tokens ({tokens})], got {accepted!r}")
    shape = _shape(model)
    if keep is not None:
        shape = _gated(shape, keep, _whole("window", window, 1, MOST_TOKENS))
    chosen = _dtype("dtype", shape.dtype if dtype is None else dtype)
    if where is not None:
        shape = shape.spread(where.devices)
    state = _state_format(state_dtype)
    entry = _dtype("entry_dtype", chosen if entry_dtype is None else entry_dtype)

    parameters = shape.parameter_bytes(chosen) if parameter_bytes is None else parameter_bytes
    counter = _Counter(shape, tokens, accepted, block_size, page_size, chosen, state, entry)
    room = memory_bytes - workspace_bytes - parameters
    best_limit = crossover = None
    if shape.spec is None:
        costs = (counter.pages_alone(context),)
    else:
        dtypes = {"state_dtype": state, "entry_dtype": entry}
        best_limit = traffic.best_limit(shape.spec, tokens=tokens, accepted=accepted, **dtypes)
        crossover = traffic.crossover(shape.spec, **dtypes, limit=limit)
        costs = (
            dataclasses.replace(counter, state=state.written_each_step).ring_form("recurrent", context, 1),
            counter.ring_form("buffered", context, limit),
            counter.ring_form("kv-only", min(context, crossover), min(context, crossover)),
            dataclasses.replace(counter, state=state.written_each_step).snapshots(context),
        )
    return Plan(
        model=shape.name,
        recurrent_layers=shape.recurrent_layers,
        attention_layers=shape.attention_layers,
        memory_bytes=memory_bytes,
        parameter_bytes=parameters,
        workspace_bytes=workspace_bytes,
        context=context,
        draft_tokens=draft_tokens,
        accepted=accepted,
        limit=limit,
        block_size=block_size,
        page_size=page_size,
        dtype=chosen.name,
        state_dtype=state.name,
        entry_dtype=entry.name,
        keep=keep,
        window=None if keep is None else window,
        best_limit=best_limit,
        crossover=crossover,
        forms=tuple(_fit(cost, room, parameters, where) for cost in costs),
        device=where,
    )


@dataclasses.dataclass(frozen=True)
class _Counter:
    """Counts the bytes of a request, with the settings that all forms share."""

    shape: ModelSizes
    tokens: int
    accepted: float
    block_size: int
    page_size: int
    dtype: jnp.dtype
    state: StateFormat
    entry_dtype: jnp.dtype

    @property
    def spec(self) -> RecurrenceSpec:
        """The recurrence of a model that has one."""
        assert self.shape.spec is not None
        return self.shape.spec

    def ring_form(self, form: FormName, context: int, limit: int) -> FormCost:
        """A form of our own; "kv-only" without a checkpoint, and with all of its context in the ring."""
        if form == "kv-only":
            step = traffic.kv_only_step_bytes(self.spec, context, tokens=self.tokens, entry_dtype=self.entry_dtype)
        else:
            dtypes = {"state_dtype": self.state, "entry_dtype": self.entry_dtype}
            step = traffic.buffered_step_bytes(self.spec, limit, tokens=self.tokens, accepted=self.accepted, **dtypes)
        held = self._held(context, limit)
        return self._cost(
            form,
            context,
            step,
            held,
            limit=limit,
            ring=held.ring,
            checkpoints=0 if form == "kv-only" else self.shape.recurrent_layers,
            entry_bytes=held.each["entries"],
            index_bytes=held.each["integers"] + held.each["table"],
            fixed_bytes=held.fixed,
        )

    def snapshots(self, context: int) -> FormCost:
        """A state for the request and one for every draft position; of a ring, only the convolution's."""
        held = self._held(context, 1)
        return self._cost(
            "snapshots",
            context,
            traffic.snapshot_step_bytes(self.spec, self.tokens, state_dtype=self.state),
            held,
            limit=None,
            ring=0,
            checkpoints=self.tokens * self.shape.recurrent_layers,
            entry_bytes=0,
            index_bytes=held.each["table"] + INDEX * self.tokens,
            fixed_bytes=0,
        )

    def pages_alone(self, context: int) -> FormCost:
        """The one form of a model without recurrent layers."""
        held = self._held(context, None)
        return self._cost(
            "buffered",
            context,
            0.0,
            held,
            limit=None,
            ring=0,
            checkpoints=0,
            entry_bytes=0,
            index_bytes=held.each["integers"] + held.each["table"],
            fixed_bytes=held.fixed,
        )

    def _cost(
        self, form: FormName, context: int, layer_step: float, held: "_Held", *, checkpoints: int, **given: Any
    ) -> FormCost:
        """Adds what is the same in every form: the keys and values, and the convolutions' inputs."""
        shape, size = self.shape, self.dtype.itemsize
        read = context
        if (admission := shape.admission) is not None:
            near = min(context, admission.window)
            read = near + admission.keep * (context - near)
        keys_and_values = shape.attention_layers * shape.kv_numbers * size * (read + self.tokens)
        state_step = shape.recurrent_layers * layer_step
        step = state_step + held.each["convolution"] + keys_and_values
        return FormCost(
            form=form,
            context=context,
            checkpoints=checkpoints,
            checkpoint_bytes=checkpoints * held.each["checkpoints"] // max(1, shape.recurrent_layers),
            convolution_bytes=held.each["convolution"],
            kv_bytes=held.each["kv"],
            requests=0,
            state_step_bytes=state_step,
            step_bytes=step,
            token_bytes=step / self.accepted,
            **given,
        )

    def _held(self, context: int, limit: int | None) -> "_Held":
        """What a slot takes of a cache: of the memories' own arrays, for one slot and for two, which are never made.

        Args:
          context: Tokens of a slot.
          limit: Entries of its ring; None: the model has no recurrent layers.
        """
        shape, pages = self.shape, -(-context // self.page_size)

        def count(slots: int) -> tuple[dict[str, int], int]:
            recurrent, ring = (dict.fromkeys(RECURRENT, 0), 0) if limit is None else self._rings(context, limit, slots)
            sequences = jax.eval_shape(lambda: init_sequences(slots=slots, max_pending=self.tokens))
            places = 1 + slots * pages
            recurrent["integers"] += _bytes(sequences)
            if shape.gated:
                return recurrent | self._lists(context, slots), ring
            return recurrent | {
                # The table of long contexts is an array of numpy's even there, and too long to be made.
                "table": INDEX * (slots + 1) * pages if shape.attention_layers else 0,
                "kv": shape.attention_layers * places * self.page_size * shape.kv_numbers * self.dtype.itemsize,
            }, ring

        (one, ring), (two, _) = count(1), count(2)
        each = {name: two[name] - one[name] for name in one}
        return _Held(each, sum(one.values()) - sum(each.values()), ring)

    def _lists(self, context: int, slots: int) -> dict[str, int]:
        """The bytes of gated layers: "kv", the pages of keys and values, and "table", their integers."""
        sizes, gated = self._sizes(context, slots, None), self.shape.gated
        dtypes = Dtypes(self.dtype, self.entry_dtype, self.state)

        def make():
            shared = GatedMemory().init(gated, sizes)
            return shared, gated[0].memory(shared, dtypes, 0)

        shared, layer = jax.eval_shape(make)
        pools = layer.keys, layer.values, layer.gates, layer.admitted_keys, layer.admitted_values, layer.admitted_gates
        integers = layer.lists, layer.counts, layer.number, layer.budget
        return {"kv": len(gated) * _bytes(pools), "table": len(gated) * _bytes(integers) + _bytes(shared)}

    def _sizes(self, context: int, slots: int, limit: int | None) -> Sizes:
        given: dict[str, Any] = {"capacity": context, "max_pending": self.tokens, "block_size": self.block_size}
        given |= {"page_size": self.page_size, "limit": limit, "kv_limit": None, "trees": False, "slots": slots}
        return Sizes(**given, states=None, blocks=None, pages=None)

    def _rings(self, context: int, limit: int, slots: int) -> tuple[dict[str, int], int]:
        """The bytes of RECURRENT, of all recurrent layers and so many slots, and the entries of a ring."""
        mixer, layers = RecurrentMixer(self.spec, self.shape.convolution_width, 0.0), self.shape.recurrent_layers
        dtypes = Dtypes(self.dtype, self.entry_dtype, self.state)
        sizes = self._sizes(context, slots, limit)

        def make():
            shared = RecurrentMemory().init([mixer], sizes)
            return shared, mixer.memory(shared, dtypes, 0)

        shared, layer = jax.eval_shape(make)
        pool = layer.pool
        arrays = {
            "checkpoints": (pool.checkpoints, pool.low, pool.low_scales),
            "entries": (pool.keys, pool.updates, pool.gates),
            "convolution": layer.ring,
        }
        return {name: layers * _bytes(of) for name, of in arrays.items()} | {
            "integers": _bytes(shared)
        }, shared.cursor.ring


@dataclasses.dataclass(frozen=True)
class _Held:
    """What a cache is made of, over all layers.

    Attributes:
      each: Bytes that one more slot takes, by what they are for.
      fixed: Bytes that are there without a slot.
      ring: Entries of a slot's ring.
    """

    each: dict[str, int]
    fixed: int
    ring: int


def _bytes(arrays: object) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))


def _gated(shape: ModelSizes, keep: float, window: int) -> ModelSizes:
    """The sizes of the same model with write gates."""
    admission = Admission(WriteGate(), window, keep=keep, when_full="evict")
    config = gated_config(shape.config, admission)
    if len(gated_layers(config)) != shape.attention_layers or not shape.attention_layers:
        raise ValueError(
            f"keep must be left out for {shape.name}, which has no softmax layers with keys and values of each head, "
            f"got {keep!r}"
        )
    return from_config(config, shape.name, shape.dtype)


def _fit(cost: FormCost, room: int, parameters: int, where: Slice | None) -> FormCost:
    requests = max(0, (room - cost.fixed_bytes) // cost.request_bytes)
    seconds = None if where is None else _step_seconds(parameters, requests * cost.step_bytes, where)
    return dataclasses.replace(cost, requests=requests, step_seconds=seconds)


def _step_seconds(parameters: int, moved: float, where: Slice) -> float:
    return (parameters + moved) / where.bandwidth


def _whole(name: str, value: object, least: int, most: int) -> int:
    """The value, which may be a float such as 80e9, as an int; ValueError unless it is whole and in [least, most]."""
    if not _is_number(value) or value != value or not least <= value <= most or int(value) != value:
        raise ValueError(f"{name} must be a whole number from {least} to {most}, got {value!r}")
    return int(value)


def _is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is a number, of Python or numpy, and no boolean."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _shape(model: str | Path | LanguageModel | ModelConfig | ModelSizes) -> ModelSizes:
    if isinstance(model, ModelSizes):
        return model
    if isinstance(model, ModelConfig):
        return from_config(model, "config")
    if isinstance(model, LanguageModel):
        return from_config(model.config, model.name, jnp.dtype(model.dtype).name)
    return find_sizes(model)


def _state_format(dtype: str | jnp.dtype) -> StateFormat:
    if isinstance(dtype, str) and dtype in SPLIT:
        return state_format(dtype)
    try:
        return state_format(_dtype("state_dtype", dtype))
    except ValueError as error:
        raise ValueError(str(error).replace(", got ", ", split, split8, got ", 1)) from error


def _dtype(name: str, dtype: str | jnp.dtype) -> jnp.dtype:
    try:
        found = compute_dtype(dtype)
    except ValueError as error:
        raise ValueError(str(error).replace("dtype must", f"{name} must", 1).replace(" or None", "")) from error
    assert found is not None
    return found

"""The whole programs that are compiled for TPUs: which model, for which chips, and how it is served."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from jaxbuf.models.abstract import abstract_model
from jaxbuf.pallas.tpu_memory import vmem_bytes
from jaxbuf.planning.tpu_slices import find_slice
from jaxbuf.serving.batch import Batch
from jaxbuf.serving.tpu_programs import abstract_batch, compile_program, held_bytes
from jaxbuf.serving.truncation import FEW
from jaxbuf.tpu_compiler import device_memory, tpu_mesh, unaliased
from tests.portability.artefact import (
    collectives,
    host_transfers,
    pool_copies,
    vmem_bytes_used,
    written_back,
)
from tests.portability.models import model_config, pools_of

ROWS, PROMPT, NEW_TOKENS = 64, 100, 400


@dataclasses.dataclass(frozen=True)
class Served:
    """A model as it is served on some chips.

    Attributes:
      model: In known.json, at full width.
      layers: One period of them; None: all.
      generation, devices: The chips.
      drafter: None, "ngram", "mtp", or "lm": the same architecture with one period of layers.
      form, state_dtype: As `jaxbuf.generate` takes them.
      gates: Whether softmax layers have write gates.
    """

    model: str
    layers: int | None
    generation: str
    devices: int = 1
    drafter: str | None = None
    form: str = "buffered"
    state_dtype: str | None = None
    gates: bool = False

    def __str__(self) -> str:
        shown = [f"drafts by {DRAFTERS[self.drafter]}"] if self.drafter else []
        shown += [f"{self.form} form"] if self.form != "buffered" else []
        shown += [f"{self.state_dtype} states"] if self.state_dtype else []
        shown += ["write gates"] if self.gates else []
        layers = "all layers" if self.layers is None else f"{self.layers} layer{'s' * (self.layers > 1)}"
        return ", ".join([f"{self.model}, {layers}", *shown])

    @property
    def mesh(self) -> Mesh:
        """Abstract devices."""
        return tpu_mesh(self.generation, self.devices)

    def batch(self, rows: int = ROWS) -> Batch:
        """So many prompts for it; nothing is allocated."""
        over = self.mesh if self.devices > 1 else None
        shape = {"gates": self.gates, "mesh": over}
        lm = abstract_model(
            model_config(self.model, self.layers, mtp=self.drafter == "mtp", **shape), self.model, self.generation
        )
        drafter: Any = self.drafter
        if drafter == "lm":
            config = model_config(self.model, DRAFTING[self.model], **shape)
            drafter = abstract_model(config, f"a small {self.model}", self.generation)
        how = {"form": self.form, "state_dtype": self.state_dtype, "drafter": drafter}
        return abstract_batch(lm, rows, PROMPT, NEW_TOKENS, **how)

    def compiled(self, program: str, batch: Batch | None = None) -> tuple[jax.stages.Compiled, Any]:
        """One of PROGRAMS as the TPU compiler makes it, and the shapes of the carry that it is given."""
        return compile_program(program, self.batch() if batch is None else batch)


DRAFTERS = {"ngram": "n-grams", "mtp": "the MTP layer", "lm": "a small model"}
DRAFTING = {"Nemotron-3-Nano-4B": 3, "Llama-3.1-8B": 1}  # layers of a draft model
# One generation a model. Drafters, four and eight devices, forms, ways to keep states, and gates all occur.
ONE_PERIOD = {
    "Qwen3.5-4B": Served("Qwen3.5-4B", 4, "v5e", drafter="mtp"),
    "Nemotron-3-Nano-4B": Served("Nemotron-3-Nano-4B", 4, "v6e", 8, state_dtype="split"),
    "Kimi-Linear": Served("Kimi-Linear-48B-A3B", 4, "tpu7x", 4, drafter="ngram", form="kv"),
    "Llama-3.1-8B": Served("Llama-3.1-8B", 1, "v4", 8, drafter="lm"),
    "Llama-3.1-8B with gates": Served("Llama-3.1-8B", 1, "v5p", form="recurrent", gates=True),
}


LEFT_FREE = 0.1  # of a device's memory, for the time of a call


def at_full_depth(name: str, generation: str) -> list[Served]:
    """All layers of one of ONE_PERIOD on a generation: on as many devices as there, and on four and eight, the fewest
    that may hold it first; write gates lie on one."""
    devices = {ONE_PERIOD[name].devices} | (set() if ONE_PERIOD[name].gates else {4, 8})
    whole = dataclasses.replace(ONE_PERIOD[name], layers=None, generation=generation)
    return [dataclasses.replace(whole, devices=count) for count in sorted(devices)]


def check_on_fewest(name: str, program: str, generation: str) -> tuple[Served, jax.stages.Compiled | None, int]:
    """Compiles one of PROGRAMS, of all layers, for the fewest devices that hold it.

    Returns:
      What was compiled; the program, None where not even the last number of devices holds it; and the bytes that one
      of them holds all the time.
    """
    room = device_memory(find_slice(generation))
    for served in at_full_depth(name, generation):
        held = held_bytes(served.batch())
        if held > (1 - LEFT_FREE) * room:
            continue
        try:
            compiled = check(served, program)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            continue  # what it takes for the time of a call does not fit
        memory: Any = compiled.memory_analysis()
        assert memory.argument_size_in_bytes + memory.temp_size_in_bytes <= room
        return served, compiled, held
    return served, None, held


def check(served: Served, program: str) -> jax.stages.Compiled:
    """Compiles one of PROGRAMS, and asserts that its memory stays in place, that nothing goes to the host, and that
    devices exchange what their layers add up and no more."""
    batch = served.batch()
    compiled, carry = served.compiled(program, batch)
    pools = pools_of(carry)
    for what, found in (
        ("not in place", unaliased(compiled)),
        ("to or from the host", host_transfers(compiled)),
        ("copied", pool_copies(compiled, pools, ends=False)),
        ("moved through another memory", written_back(compiled, pools, ends=False)),
    ):
        assert found == [], f"{what}: {found}"  # told by scripts, too
    assert vmem_bytes_used(compiled) <= vmem_bytes(served.generation)
    exchanged = collectives(compiled)
    if served.devices == 1:
        assert exchanged == []
        return compiled
    tokens = batch.arrivals[0].tokens.size if program == "admit" else carry.last.size * most_tokens(batch)
    activation = tokens * batch.lm.config.hidden_size * 2
    within = [each for each in exchanged if each.of_layers]
    assert within and all(each.kind == "all-reduce" and each.bytes <= activation for each in within)
    vocabulary = -(-batch.lm.vocab_size // FEW) * FEW  # as the groups of tokens in `truncation` are filled up
    logits = 4 * vocabulary * carry.last.size * most_tokens(batch)
    assert all(each.bytes <= max(activation, logits) for each in exchanged)
    return compiled


def most_tokens(batch: Batch) -> int:
    """New tokens of a row that a step reads."""
    return 1 if batch.drafter is None else 1 + batch.drafter.draft_tokens

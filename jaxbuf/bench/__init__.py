"""The benchmark programs: each is a module with `main`, and a line in PROGRAMS that the command line lists it by."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Program:
    """A benchmark.

    Attributes:
      name: `jaxbuf bench NAME` and scripts/bench_NAME run `main` of jaxbuf.bench.NAME.
      measures: One line.
      figures: The file of recorded figures, in the repository's benchmarks/; None: there are none yet.
    """

    name: str
    measures: str
    figures: str | None = None


PROGRAMS = (
    Program(
        "drift", "how far the buffered recurrence drifts from the fp32 recurrence over a long decode", "drift.json"
    ),
    Program(
        "likelihood", "what bf16 entries cost in likelihood, a text's against the fp32 recurrence", "likelihood.json"
    ),
    Program("load", "how much memory loading a checkpoint takes beside its parameters", "load_memory.json"),
    Program(
        "kernels", "how near the decoding kernels come to the memory's bandwidth, and what others take", "kernels.json"
    ),
    Program("counters", "where a decoding kernel's warps wait, and for what, by the counters of Nsight Compute"),
    Program(
        "attention",
        "how near a softmax layer's step comes to the memory's bandwidth, and what others take",
        "attention.json",
    ),
    Program(
        "experts",
        "how near a layer's routed experts come to the time of their bytes, by each implementation",
        "experts.json",
    ),
    Program("drafts", "how many drafts a model keeps, and how many forward passes that saves", "drafts.json"),
    Program(
        "step", "whole decoding steps of a model: their time, its parts, and that of their bytes", "step_wide.json"
    ),
    Program("chunked", "how fast a layer's recurrence reads prompts, and what others take", "chunked.json"),
    Program("prefill", "how fast prompts are read: tokens a second, its parts, attention's FLOP/s", "prefill.json"),
    Program("short", "steps behind short texts, in each form of the memory", "short.json"),
    Program(
        "compile",
        "the first generation of a shape: traced, lowered, compiled, or from the compilation cache",
        "compile.json",
    ),
    Program(
        "write_gate",
        "what keeping fewer keys costs in answers and likelihood, against the bytes that are held",
        "write_gate_retrieval.json",
    ),
    Program("sample", "how a step chooses its tokens: greedy, sampled, with top_k and top_p", "sample.json"),
)

"""What must hold of whole models on a GPU: their programs copy no pool, and their tokens are those without kernels.

As in `checks.py`, which has the checks of the recurrence's kernels.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxbuf
from jaxbuf.bench.random_model import configuration, random_model
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.serving import SamplingParams, generate_tokens, init_carry, loop
from jaxbuf.serving.batch import Decoding, make_batch
from jaxbuf.serving.kept_programs import FOLDER
from tests.gpu.checks import ROWS, Figures, large_arrays
from tests.gpu.program import pool_sized_writes


def two_layers(dtype: str = "float32") -> LanguageModel:
    """A recurrent layer of 128 by 128 heads and a softmax layer, with all parameters random."""
    sizes = {"layers": 2, "hidden": 64, "ffn": 96, "vocabulary": 259, "heads": 4, "key_heads": 2, "dim": 128}
    config = configuration(**sizes, attention_heads=4, kv_heads=2, attention_dim=16)
    lm = random_model(config, jnp.dtype(dtype))
    leaves, tree = jax.tree.flatten(lm.model)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    noisy = [x + (0.15 * jax.random.normal(key, x.shape)).astype(x.dtype) for key, x in zip(keys, leaves, strict=True)]
    return dataclasses.replace(lm, model=jax.tree.unflatten(tree, noisy))


def demo() -> LanguageModel:
    return jaxbuf.load("demo", dtype="float32")


def check_program(lm: LanguageModel) -> Figures:
    """The whole decoding program writes nothing as large as a recurrent layer's pools or a softmax layer's pages."""
    batch = make_batch(lm, [[1] * 30] * ROWS, SamplingParams(temperature=0.5), Decoding(200, form="buffered"))
    carry = jax.eval_shape(lambda: init_carry(lm.config, batch.sizes))
    program = jax.jit(generate_tokens.__wrapped__, donate_argnums=1)
    hlo = program.lower(lm.model, carry, np.int32(9)).compile().as_text()
    pools = [large_arrays(layer.pool) if hasattr(layer, "pool") else layer for layer in carry.cache.layers]
    found = pool_sized_writes(hlo, pools)
    assert not found, "\n".join(found)
    return {"instructions": 0.0}


def without_kernels(lm: LanguageModel) -> LanguageModel:
    """The same model, compiled by XLA alone."""
    return dataclasses.replace(lm, compiled_for=lm.target.without_kernels())


def check_tokens(lm: LanguageModel, tokens: int = 64) -> Figures:
    """Greedy tokens of jaxbuf.generate are those without kernels, in float32 and both forms."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, lm.vocab_size, length).tolist() for length in (3, 17, 40, 5)]
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)

    def generated(lm):
        forms = ("recurrent", "buffered")
        runs = [jaxbuf.generate(lm, prompts, tokens, sampling, form=form) for form in forms]
        return {form: [result.tokens for result in run] for form, run in zip(forms, runs, strict=True)}

    found, expected = generated(lm), generated(without_kernels(lm))
    assert found == expected, "the tokens differ"
    return {"tokens": 2.0 * tokens * len(prompts)}


def check_export(lm: LanguageModel, tokens: int = 32) -> Figures:
    """Programs that were exported for this GPU and loaded again give the greedy tokens of jaxbuf.generate."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, lm.vocab_size, length).tolist() for length in (3, 17, 40, 5)]
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    expected = [result.tokens for result in jaxbuf.generate(lm, prompts, tokens, sampling, form="buffered")]
    with tempfile.TemporaryDirectory() as folder:
        path = jaxbuf.export(
            lm, lm.target, Path(folder) / "model", rows=len(prompts), prompt_tokens=40, max_new_tokens=tokens
        )
        found = jaxbuf.load_exported(path).generate(prompts, tokens, stop_ids=[])
    assert found == expected, "the tokens differ"
    return {"tokens": float(tokens * len(prompts))}


def check_kept() -> Figures:
    """A second process gives the same greedy tokens with programs that the first one lowered, and traces no step."""
    command = [
        sys.executable,
        "-c",
        "import sys; from tests.gpu.model_checks import generate_kept as g; g(*sys.argv[1:])",
    ]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # this process has most of the memory
    root, found = Path(__file__).parents[2], []
    with tempfile.TemporaryDirectory() as folder:
        for traces in ("may trace", "may not trace"):
            given = {"env": environment, "cwd": root, "capture_output": True, "text": True}
            done = subprocess.run([*command, folder, traces], **given)
            assert done.returncode == 0, done.stderr
            found.append(done.stdout)
            assert (Path(folder) / FOLDER).exists(), "no program was kept"
    assert found[0] == found[1], "the tokens differ"
    return {"tokens": float(len(json.loads(found[0])))}


def generate_kept(folder: str, traces: str) -> None:
    """Prints greedy tokens of two layers, as a process that `check_kept` starts."""
    jaxbuf.cache_compilations(folder)
    if traces == "may not trace":
        loop._step = None  # pyright: ignore[reportAttributeAccessIssue]
    print(json.dumps([token for tokens, _ in greedy(two_layers(), 32) for token in tokens.tolist()]))


def greedy(lm: LanguageModel, tokens: int, form: str = "auto") -> list[tuple[np.ndarray, np.ndarray]]:
    """Of some random prompts the greedy tokens and their log-probabilities."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, lm.vocab_size, length).tolist() for length in (3, 17, 40, 5) * 4]
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=0)
    results = jaxbuf.generate(lm, prompts, tokens, sampling, form=form)
    return [(np.array(result.tokens), np.array(result.logprobs)) for result in results]


def compared(found, expected) -> tuple[float, float]:
    """The largest difference of log-probabilities as long as all tokens before are the same, and how many those are."""
    worst, same = 0.0, 0
    for (taken, logprobs), (others, wanted) in zip(found, expected, strict=True):
        until = int(np.argmin(np.append(taken == others, False)))
        same += until
        worst = max(worst, float(np.abs(logprobs - wanted)[: until + 1].max()))
    return worst, float(same)


def check_rounding(lm: LanguageModel, tokens: int = 32, form: str = "auto") -> Figures:
    """jaxbuf.generate with kernels is as close to float32 as without: the largest difference may be twice that of XLA's
    path in the model's dtype."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == lm.dtype else x, lm.model)
    exact = without_kernels(dataclasses.replace(lm, model=wide, dtype=jnp.dtype("float32")))
    expected = greedy(exact, tokens, form)
    figures: Figures = {"tokens": float(tokens * len(expected))}
    for name, model in (("with kernels", lm), ("without", without_kernels(lm))):
        worst, same = compared(greedy(model, tokens, form), expected)
        figures |= {f"log-probabilities {name}": worst, f"tokens until they differ {name}": same}
    worst, allowed = (figures[f"log-probabilities {name}"] for name in ("with kernels", "without"))
    assert worst <= 2 * allowed, f"log-probabilities differ from float32's by {worst}, without kernels by {allowed}"
    return figures


def check_family(name: str, **sizes: int) -> Figures:
    """A random model in bfloat16, of a known one's first layers."""
    return check_rounding(random_model(configuration(name, vocabulary=4096, **sizes), jnp.dtype("bfloat16")))


CHECKS: dict[str, Callable[[np.random.Generator], Figures]] = {
    "no_pool_sized_write_in_the_program_of_two_layers": lambda rng: check_program(two_layers()),
    "no_pool_sized_write_in_the_program_of_the_demo_model": lambda rng: check_program(demo()),
    "greedy_tokens_of_two_layers_are_those_without_kernels": lambda rng: check_tokens(two_layers()),
    "greedy_tokens_of_the_demo_model_are_those_without_kernels": lambda rng: check_tokens(demo()),
    "exported_programs_of_two_layers_give_the_tokens_of_generate": lambda rng: check_export(two_layers()),
    "exported_programs_of_the_demo_model_give_the_tokens_of_generate": lambda rng: check_export(demo()),
    "programs_that_one_process_lowered_give_another_the_same_tokens": lambda rng: check_kept(),
    "a_random_qwen3_5_4b_generates_as_without_kernels": lambda rng: check_rounding(
        random_model(configuration(), jnp.dtype("bfloat16"))
    ),
    # Left to itself, generate reads no checkpoint of rows so short.
    "a_random_qwen3_5_4b_with_checkpoints_generates_as_without_kernels": lambda rng: check_rounding(
        random_model(configuration(), jnp.dtype("bfloat16")), form="buffered"
    ),
}
# A model of each family, and how many of its layers, so that each kind of them is there; of experts some.
FEW_LAYERS: dict[str, tuple[str, dict[str, int]]] = {
    "bailing_hybrid": ("Ling-3.0-Flash", {"layers": 5, "experts": 64}),
    "falcon_h1": ("Falcon-H1-0.5B", {"layers": 3}),
    "granitemoehybrid": ("Granite-4.0-H-Tiny", {"layers": 4}),
    "kimi_linear": ("Kimi-Linear-48B-A3B", {"layers": 4, "experts": 64}),
    "llama": ("Llama-3.1-8B", {"layers": 3}),
    "mamba2": ("Mamba-2-2.7B", {"layers": 4}),
    "nemotron_h": ("Nemotron-3-Nano-30B-A3B", {"layers": 4}),
    "olmo_hybrid": ("Olmo-Hybrid-7B", {"layers": 4}),
    "qwen2": ("Qwen2.5-7B", {"layers": 3}),
    "qwen3": ("Qwen3-8B", {"layers": 3}),
    "qwen3_5_moe": ("Qwen3.5-35B-A3B", {"layers": 4, "experts": 64}),
    "qwen3_moe": ("Qwen3-30B-A3B", {"layers": 3, "experts": 64}),
    "qwen3_next": ("Qwen3-Next-80B-A3B", {"layers": 4, "experts": 64}),
}
OF_FEW_LAYERS = {
    f"a_random_{family}_of_few_layers_generates_as_without_kernels": (family, *given)
    for family, given in FEW_LAYERS.items()
}
CHECKS |= {
    check: lambda rng, name=name, sizes=sizes: check_family(name, **sizes)
    for check, (_, name, sizes) in OF_FEW_LAYERS.items()
}
# Those of whole models, by the family: jaxbuf/models/checked.json notes them.
OF_FAMILY: dict[str, str] = dict.fromkeys(
    (
        "no_pool_sized_write_in_the_program_of_two_layers",
        "no_pool_sized_write_in_the_program_of_the_demo_model",
        "greedy_tokens_of_two_layers_are_those_without_kernels",
        "greedy_tokens_of_the_demo_model_are_those_without_kernels",
        "a_random_qwen3_5_4b_generates_as_without_kernels",
        "a_random_qwen3_5_4b_with_checkpoints_generates_as_without_kernels",
    ),
    "qwen3_5",
) | {check: family for check, (family, _, _) in OF_FEW_LAYERS.items()}

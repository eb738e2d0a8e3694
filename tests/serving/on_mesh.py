"""Generates on one device and on a mesh of simulated ones, and prints as JSON which results differ.

A program of its own, because XLA makes the devices when it starts."""

import json
import sys
import tempfile
import warnings

import jax
import numpy as np

import jaxbuf
from jaxbuf.serving import batch
from tests.serving.speculating import MODELS, near_tie

NEW = 12
GREEDY = jaxbuf.SamplingParams(temperature=0.0, ignore_eos=True, logprobs=5)
CASES = {
    "plain": {},
    "n-grams": {"drafter": "ngram"},
    "mtp": {"drafter": "mtp"},
    "chunks": {},
    "samples": {"sampling": jaxbuf.SamplingParams(temperature=0.0, ignore_eos=True, n=2)},
}


def run(lm, name, prompts):
    if name == "beams":
        return [[beam.tokens for beam in found] for found in jaxbuf.beam_search(lm, prompts, 8, beams=2)]
    if name == "score":
        return np.asarray(lm.score(prompts)).tolist()
    batch.CHUNK_TOKENS = batch.LEAST_CHUNK = 16 if name == "chunks" else 2**16
    given = {"sampling": GREEDY} | CASES[name]
    return [[x.tokens for x in one.samples] for one in jaxbuf.generate(lm, prompts, NEW, **given)]


def main(architecture: str, devices: int, names: list[str]) -> None:
    warnings.simplefilter("error")
    rng, lm = np.random.default_rng(), MODELS[architecture](3)
    while True:
        prompts = [rng.integers(0, 256, n).tolist() for n in (3, 20, 60, 40)]
        if not any(near_tie(lm, result) for result in jaxbuf.generate(lm, prompts, NEW, GREEDY)):
            break
    alone = {name: run(lm, name, prompts) for name in names}
    differ = []
    with tempfile.TemporaryDirectory() as directory:
        lm.save(directory)
        for mesh in (
            jax.make_mesh((devices,), ("tensor",)),  # explicit axes
            jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("tensor",)),  # automatic ones
        ):
            spread = jaxbuf.load(directory, mesh=mesh)
            assert len(spread.model.embed_tokens[...].sharding.device_set) == devices
            for name in names:
                found = run(spread, name, prompts)
                equal = np.allclose(found, alone[name], atol=1e-3) if name == "score" else found == alone[name]
                differ += [] if equal else [name]
            names = names[:1]  # the second mesh is the first one to the programs
    print(json.dumps(differ))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3].split(","))

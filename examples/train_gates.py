"""Write gates for the embedded model, trained on Python's own manual: few keys are kept, and the text is as probable.

A gate looks at each key of a softmax layer when it is written. Of the keys that are older than a window, the layer
keeps those whose gate reaches a threshold. The model itself stays as it is.
"""

from pydoc_data.topics import topics  # what help() prints: 700 kB of technical English, which every Python has

import jax
import jax.numpy as jnp
import numpy as np

import jaxbuf
from jaxbuf.models.admission import Admission, Rule
from jaxbuf.models.gates import kept_shares, with_gates
from jaxbuf.train.write_gate import GateTraining, Recipe

WINDOW, LENGTH = 16, 128  # tokens that are always seen, and tokens of a sequence

lm = jaxbuf.load("demo", dtype="float32")
text = "\n".join(topics.values())
held_out, text = text[:6_000], text[6_000:200_000]  # gates are judged by a text that they were not trained on
recipe = Recipe(window=WINDOW, length=LENGTH, rows=1, steps=30, rate=5e-3, sparsity=0.08, soft="share", remat=False)
training = GateTraining(lm, np.asarray(lm.encode(text)), recipe)
for metrics in training.run():
    if metrics["step"] in (1, 10, 20, 30):
        print(f"step {metrics['step']}: hidden states differ by {metrics['distance']:.4f}, {metrics['kept']:.0%} kept")
gated = training.lm  # jaxbuf.models.gates.save_gates(gated, "gates.safetensors") writes them, for jaxbuf.load(gates=)

tokens = np.asarray(lm.encode(held_out), np.int32)
rows = tokens[: tokens.size // LENGTH * LENGTH].reshape(-1, LENGTH)
shares = kept_shares(gated, rows)  # [layers, heads of keys]
for layer, share in enumerate(shares):
    print(f"softmax layer {layer} keeps of each head's keys: {', '.join(f'{x:.0%}' for x in share)}")
print(f"kept: {shares.mean():.1%}")

# As many keys, drawn at random, are what gates have to be better than.
as_many = with_gates(lm, Admission(Rule("random", rate=float(shares.mean())), WINDOW))
size = sum(len(lm.decode(row[1:].tolist()).encode()) for row in rows)  # bytes of the tokens that have one before them
for name, model in {"all keys": lm, "gates": gated, "random keys": as_many}.items():
    logprobs = jax.nn.log_softmax(model.logits(rows)[:, :-1], axis=-1)
    nats = -float(jnp.take_along_axis(logprobs, rows[:, 1:, None], axis=2).sum())
    print(f"{name}: {nats / np.log(2) / size:.3f} bits a byte")

"""The buffered recurrence by hand: prefill, drafts, a rejection, a fold, and the plain form."""

import jax.numpy as jnp
import numpy as np

from jaxbuf.recurrence import RecurrenceSpec, buffered, recurrent

PROMPT, DRAFTS, ACCEPTED = 12, 4, 2

spec = RecurrenceSpec(heads=4, key_heads=2, key_dim=16, value_dim=16)  # a Gated DeltaNet
rng = np.random.default_rng(0)
time = PROMPT + DRAFTS
q, k = rng.standard_normal((2, 1, time, spec.key_heads, spec.key_dim))
q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
v = rng.standard_normal((1, time, spec.heads, spec.value_dim))
log_decay, beta = -rng.random((1, time, spec.heads)), rng.random((1, time, spec.heads))
inputs = [jnp.asarray(x, jnp.float32) for x in (q, k, v, log_decay, beta)]

# A memory for one request: slot 1. (Slot 0 is the null slot.)
slots = jnp.asarray([1], jnp.int32)
memory = buffered.init(spec, slots=1, limit=16, max_pending=DRAFTS, entry_dtype=jnp.float32)
_, memory = buffered.prefill(spec, memory, *(x[:, :PROMPT] for x in inputs), slots=slots)

# All drafts go in at once and give their outputs; accepting the first two moves an integer.
out, memory = buffered.extend(spec, memory, *(x[:, PROMPT:] for x in inputs), slots=slots)
memory = buffered.commit(memory, jnp.asarray([ACCEPTED], jnp.int32), slots=slots)
cursor = memory.cursor
print(f"ring: {int(cursor.length[1])} entries, checkpoint: {int(cursor.folded[1])} tokens")
memory = buffered.fold(spec, memory, slots=slots)
cursor = memory.cursor
print(f"ring: {int(cursor.length[1])} entries, checkpoint: {int(cursor.folded[1])} tokens")

# The definition reads every token, and for the state those that were kept.
expected, _ = recurrent(spec, None, *inputs)
_, state = recurrent(spec, None, *(x[:, : PROMPT + ACCEPTED] for x in inputs))
print(f"outputs differ by {float(jnp.abs(out - expected[:, PROMPT:]).max()):.1e}")
print(f"states differ by {float(jnp.abs(buffered.read(spec, memory, slots) - state).max()):.1e}")

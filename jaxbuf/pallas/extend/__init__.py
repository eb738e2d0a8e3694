"""The kernels of `extend`, and what they can serve.

`Call` describes a call of `extend`, `Integers` says where each row's memory lies, and `supports` says whether a
platform's kernel serves a call. `tpu.extend` is the kernel for TPUs. There are three GPU kernels. `gpu.extend` takes
all that `supports` allows, and hands launches of one token on short rings to the recurrent step in `gpu_step`, and
other launches of families whose decay is one number a key channel to `gpu_channel`.

The words that the GPU kernels use, beside those of `jaxbuf.recurrence`:

  item      A head of a row of the launch: the unit of work. Without the delta rule, two heads of 64 values, which lie
            one behind the other in memory, are a stack: they count as one head of 128, with two decays.
  line      A row's line in `Integers`. Rows that fold have the early lines.
  lane      A warpgroup (128 threads), counted over all blocks of the launch. It serves one item after the other.
  turn      The number of items that a lane served before. All lanes together serve a round of items per turn.
  window    64 or 128 values in a row of all heads of a key head, which count as one head where a head has another
            number of values; 64 where a key has 256 numbers. It may have rows of two or three heads, and the last one
            of 128 of a key head may have 64 values in common with the one before, whose they are.
  probe     A new key or a new query. A row has 2 T of them, the keys first: both the state and the entries' keys are
            multiplied with all of them.
  chunk     Entries that are multiplied at once. An item's first chunk has 16, its later chunks have up to 32.
  stage     Shared memory of a later chunk's own. With several, chunks are on their way to some while others are used.
  band      64 rows of the state, which are loaded, multiplied and stored together.
  strip     Columns of the state, or of a key, that one product takes.
  half      A float32 operand of the tensor cores is the sum of two bfloat16 numbers, its high and its low half.
  plane     A bfloat16 array of keys, queries and updates in shared memory. There is one; or, where these are float32,
            there are two, one of the high halves and one of the low halves.
  gate      An entry's log_decay.
  decay     An entry's decay is the sum of the gates behind it, in one part, or in two parts whose sums are exact.
  weight    What an entry's update is multiplied with: a product of a probe and the entry's key, times its decay's
            exponential; in a fold, that exponential alone.
  word      A number that a lane passes from one item to the next in shared memory.
"""

import jax.numpy as jnp

from jaxbuf.pallas.extend.call import Call, Integers

__all__ = ["Call", "Integers", "supports"]


def supports(call: Call, *, platform: str = "gpu", generation: str = "") -> str | None:
    """Whether a platform's kernel serves a call.

    Args:
      call: The call.
      platform: "gpu" or "tpu".
      generation: Of a TPU, whose VMEM decides; as in `jaxbuf.target.Target`.

    Returns:
      None if it does; else what it needs, and what came instead.
    """
    needs = _needs_of_tpu(call, generation) if platform == "tpu" else _needs_of_gpu(call)
    return next((f"it needs {need}" for met, need in needs if not met), None)


def _needs_of_gpu(call: Call) -> list[tuple[bool, str]]:
    # Imported here, as a TPU has no use for Mosaic GPU.
    from jaxbuf.pallas.extend import gpu
    from jaxbuf.pallas.extend.gpu_channel_lane import DIM

    channel = call.decay == "channel"
    sizes = f"got {call.key_dim} and {call.value_dim}"
    if not channel:
        sizes += f" with {call.heads_per_key} heads to a key head"
    return [
        (
            not channel or call.key_dim == call.value_dim == DIM,
            f"key_dim and value_dim {DIM} for a decay a channel, {sizes}",
        ),
        (
            channel or (call.key_dim in gpu.VECTORS and gpu.has_windows(call)),
            "key_dim 64, 128 or 256, and value_dim 64, or more if the values of a key head are a multiple of 64, "
            + sizes,
        ),
        (1 <= call.time <= 16, f"1 to 16 tokens at once, got {call.time}"),
        (call.ring <= 1024, f"a ring of at most 1024 entries, got {call.ring}"),
        (call.state in (jnp.float32, jnp.bfloat16), f"a float32 or bfloat16 checkpoint, got {call.state.name}"),
    ]


def _needs_of_tpu(call: Call, generation: str) -> list[tuple[bool, str]]:
    from jaxbuf.pallas.extend.tpu_plan import Plan, make_plan

    floats = jnp.float32, jnp.bfloat16
    plan = make_plan(call, generation)
    return [
        (1 <= call.time <= 16, f"1 to 16 tokens at once, got {call.time}"),
        (call.state in floats, f"a float32 or bfloat16 checkpoint, got {call.state.name}"),
        (call.entry in floats, f"float32 or bfloat16 entries, got {call.entry.name}"),
        (call.out in floats, f"float32 or bfloat16 values, got {call.out.name}"),
        (isinstance(plan, Plan), str(plan)),
    ]

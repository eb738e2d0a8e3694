"""Requests that come and go: two rows serve five prompts, by the compiled programs below `jaxbuf.generate`."""

import dataclasses

import numpy as np

import jaxbuf
from jaxbuf.serving import SamplingParams, admit, generate_tokens, init_carry, release
from jaxbuf.serving.batch import Decoding, make_batch
from jaxbuf.serving.carry import EMPTY, RUNNING

PROMPTS = ["The number of", "If the file", "This function returns", "A list of", "To install it"]
ROWS, NEW, STEPS = 2, [6, 20, 9, 12, 15], 4

lm = jaxbuf.load("demo")
greedy = SamplingParams(temperature=0.0, ignore_eos=True)


def arrive(carry, prompt, new, row):
    """The carry once a prompt was read into an empty row, chunk by chunk; its first token is drawn, too."""
    for chunk in make_batch(lm, [prompt], greedy, Decoding(new)).arrivals:
        begins = dataclasses.replace(chunk.begins, rows=np.where(chunk.begins.rows < 0, -1, row))
        carry = admit(
            lm.model, carry, dataclasses.replace(chunk, rows=np.where(chunk.rows < 0, -1, row), begins=begins)
        )
    return carry


sizes = make_batch(lm, PROMPTS, greedy, Decoding(max(NEW))).sizes  # rows for all of them, and we want two
carry = init_carry(lm.config, dataclasses.replace(sizes, rows=ROWS))
waiting, serving, found = list(range(len(PROMPTS))), {}, {}
while len(found) < len(PROMPTS):
    state, history = np.asarray(carry.state), carry.history
    for row in range(ROWS):
        if row in serving and state[row] != RUNNING:  # it has ended: tell its text, and make room
            text = np.asarray(history.tokens[row, history.prompt_length[row] : history.length[row]])
            found[serving.pop(row)] = lm.decode(text.tolist())
            carry = release(carry, np.int32([row]))
            state, history = np.asarray(carry.state), carry.history
        if waiting and state[row] == EMPTY:
            serving[row] = waiting.pop(0)
            carry = arrive(carry, PROMPTS[serving[row]], NEW[serving[row]], row)
            state, history = np.asarray(carry.state), carry.history
    carry = generate_tokens(lm.model, carry, np.int32(STEPS))

for index, prompt in enumerate(PROMPTS):  # alone, all of them are given as many tokens: one program serves them
    alone = lm.decode(jaxbuf.generate(lm, [prompt], max(NEW), greedy)[0].tokens[: NEW[index]])
    print(f"{prompt}|{found[index]}\n  as alone: {found[index] == alone}")

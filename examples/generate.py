"""Generates: a batch, a stream, stop strings, and what decoding did."""

import jaxbuf

lm = jaxbuf.load("demo")  # or a checkpoint's directory, or a Hugging Face id

# Two prompts in one batch; the seed and the position of a token decide what is drawn, not its neighbours.
sampling = jaxbuf.SamplingParams(temperature=0.7, top_p=0.95, seed=0)
prompts = ["The configuration file", "To install the package,"]
for prompt, result in zip(prompts, jaxbuf.generate(lm, prompts, 32, sampling), strict=True):
    print(f"{prompt}|{result.text} [{result.finish_reason}]")
    stats = result.stats
    print(f"  {stats.steps} steps, {stats.folds} folds, {stats.bytes / 1e6:.1f} MB of recurrent state")

# As a stream: each event holds the text that is new of one of the prompts.
print("stream: ", end="")
for event in jaxbuf.generate(lm, prompts, 32, sampling, stream=True):
    if event.index == 0:
        print(event.text, end="", flush=True)
print()

# The text ends before the first stop string, which may lie across tokens.
stopping = jaxbuf.SamplingParams(temperature=0.7, top_p=0.95, seed=0, stop=" the")
first, _ = jaxbuf.generate(lm, prompts, 32, stopping)
print(f"stopped: {first.text} [{first.finish_reason}]")

"""What `jaxbuf bench write_gate` reads: generated examples, or stretches of a text."""

import dataclasses
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxbuf.bench.texts import documents_of
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.train.retrieval_plan import Plan
from jaxbuf.train.retrieval_tasks import Mixture

HELD_OUT = 20  # jaxbuf train-gate leaves this part of the text out: its last twentieth


@dataclasses.dataclass(frozen=True)
class Group:
    """Sequences whose figures are one row of the record: of a seed and a task, or stretches of a text.

    Attributes:
      seed: Of the examples; 0 of a text.
      task: Its name; None for a text.
      tokens: int32 [rows, time].
      asked: bool [rows, time], the positions whose next token counts.
      oracle: float64 [rows], the share of tokens that are worth keeping; None for a text.
    """

    seed: int
    task: str | None
    tokens: np.ndarray
    asked: np.ndarray
    oracle: np.ndarray | None = None


def task_groups(plan: Plan, examples: int) -> list[Group]:
    """The examples of a plan's tasks and evaluation seeds."""
    found = []
    for seed in plan.evaluation_seeds:
        for task in plan.every_task:
            made = Mixture((task,), plan.length, examples, plan.vocabulary, seed).examples(0)
            found.append(Group(seed, task, made.tokens, made.answers, made.oracle_share))
    return found


def text_group(
    lm: LanguageModel, files: Sequence[Path] | None, length: int, stretches: int
) -> tuple[Group, float, Any]:
    """Stretches of a text, evenly spread over it; how many of its bytes a token has; and what a record tells of it.

    Args:
      lm: With a tokenizer.
      files: None: the modules of this Python's standard library, of which the last twentieth is read.
      length, stretches: Tokens of a stretch, and how many.

    Raises:
      ValueError: The stretches would overlap.
    """
    if files:
        documents, told = documents_of(lm, "text", files, seed=0)
        size = sum(each["bytes"] for each in told)
        tokens = np.concatenate([np.asarray(each, np.int32) for each in documents])
        bytes_a_token = size / tokens.size
    else:
        modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in modules]
        tokens = np.concatenate([np.asarray(lm.encode(text), np.int32) for text in texts])
        bytes_a_token = sum(len(text.encode()) for text in texts) / tokens.size
        tokens = tokens[-(tokens.size // HELD_OUT) :]
        told = "the end of the Python standard library"
    if tokens.size < stretches * length:
        raise ValueError(
            f"--text must have {stretches * length} tokens for --stretches {stretches} and --length {length}, "
            f"got {tokens.size}"
        )
    starts = np.arange(stretches) * (tokens.size // stretches)
    rows = np.stack([tokens[start : start + length] for start in starts])
    asked = np.ones(rows.shape, bool)
    asked[:, -1] = False
    return Group(0, None, rows, asked), bytes_a_token, told

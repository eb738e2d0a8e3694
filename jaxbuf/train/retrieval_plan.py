"""What the evidence for write gates is measured by, settled before any gate is trained: tasks, lengths, seeds,
thresholds, windows, budgets of bytes, and what has to hold."""

import dataclasses

from jaxbuf.arguments import check_sizes
from jaxbuf.train.retrieval_tasks import TASKS, Vocabulary


@dataclasses.dataclass(frozen=True)
class Plan:
    """The settings of a comparison.

    Attributes:
      vocabulary: Of all examples.
      tasks: Those by which ways to keep keys are judged: their oracle shares vary from example to example.
      beside: Tasks that the model learns, too, and that are reported with the others. The controls are among them.
      length: Tokens of an example.
      model_seed: Of the examples that the model is trained on.
      gate_seeds: Of the gates' first parameters and of the examples that they are trained on.
      evaluation_seeds: Of the examples that are scored; no training reads them.
      examples: That are scored, of each task and seed.
      window: Of gates, random rules and head scores.
      local_windows: Of local attention, which has no other way to hold more.
      sinks: First tokens that local attention and head scores keep.
      sparsities: Weights of the penalty on keys that are kept, a training of gates for each.
      threshold: Gates are trained with it.
      thresholds: Gates are measured with these, too.
      head_shares: Of head scores: which shares of the heads keep everything.
      random_rates: Of random rules.
      budgets: Shares of the full cache's bytes at which ways to keep keys are compared.
      judged_at: The budget for which the bounds below hold.
      least_share: At this budget gates have to reach this share of full attention's accuracy.
      least_gap: And local attention and head scores to stay this far below, as a share of all answers.
    """

    vocabulary: Vocabulary
    tasks: tuple[str, ...]
    beside: tuple[str, ...]
    length: int
    model_seed: int
    gate_seeds: tuple[int, ...]
    evaluation_seeds: tuple[int, ...]
    examples: int
    window: int
    local_windows: tuple[int, ...]
    sinks: int
    sparsities: tuple[float, ...]
    threshold: float
    thresholds: tuple[float, ...]
    head_shares: tuple[float, ...]
    random_rates: tuple[float, ...]
    budgets: tuple[float, ...]
    judged_at: float = 0.25
    least_share: float = 0.97
    least_gap: float = 0.10

    def __post_init__(self):
        self.vocabulary.check_length(self.length)
        check_sizes(examples=self.examples, window=self.window)
        trained = {self.model_seed, *self.gate_seeds}
        if both := trained & set(self.evaluation_seeds):
            raise ValueError(f"evaluation_seeds must not be read by a training, got {sorted(both)[0]}, which is")
        if unknown := [name for name in self.every_task if name not in TASKS]:
            raise ValueError(f"tasks must be among {', '.join(TASKS)}, got {unknown[0]!r}")

    @property
    def every_task(self) -> tuple[str, ...]:
        """Tasks, and those beside."""
        return self.tasks + self.beside


JUDGED = ("key_value", "recall", "selective_copy", "variables")
BESIDE = ("passkey", "common_word", "needle", "copy")

PLANS = {
    "full": Plan(
        vocabulary=Vocabulary(keys=1024, values=1024, fillers=512),
        tasks=JUDGED,
        beside=BESIDE,
        length=2048,
        model_seed=0,
        gate_seeds=(101, 102, 103),
        evaluation_seeds=(1001, 1002, 1003),
        examples=32,
        window=64,
        local_windows=(64, 128, 256, 512, 1024, 1536),
        sinks=4,
        sparsities=(0.02, 0.04, 0.08, 0.16, 0.32),
        threshold=0.1,
        thresholds=(0.03, 0.1, 0.3, 0.5),
        head_shares=(0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8),
        random_rates=(0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9),
        budgets=(0.125, 0.25, 0.5),
    ),
    "small": Plan(
        vocabulary=Vocabulary(keys=32, values=32, fillers=16),
        tasks=("key_value", "recall"),
        beside=("passkey", "needle"),
        length=64,
        model_seed=0,
        gate_seeds=(101,),
        evaluation_seeds=(1001, 1002, 1003),
        examples=16,
        window=8,
        local_windows=(8, 16, 32, 48),
        sinks=4,
        sparsities=(0.1,),
        threshold=0.1,
        thresholds=(0.1, 0.5),
        head_shares=(0.25, 0.5),
        random_rates=(0.1, 0.25, 0.5),
        budgets=(0.25, 0.5),
    ),
}

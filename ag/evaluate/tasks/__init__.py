"""The tasks that compare policies: multiple choice, perplexity, worked problems, needles in haystacks, LongBench."""

from ag.evaluate.tasks.base import Loaded, Outcome, Sample, Task
from ag.evaluate.tasks.registry import GROUPS, TASKS, expand, make, unit

__all__ = ["GROUPS", "TASKS", "Loaded", "Outcome", "Sample", "Task", "expand", "make", "unit"]

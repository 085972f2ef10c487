"""The tasks that compare policies: multiple choice, perplexity, worked problems, needles in haystacks, LongBench."""

from ag.evaluate.tasks.base import Loaded as Loaded
from ag.evaluate.tasks.base import Outcome as Outcome
from ag.evaluate.tasks.base import Sample as Sample
from ag.evaluate.tasks.base import Task as Task
from ag.evaluate.tasks.registry import GROUPS as GROUPS
from ag.evaluate.tasks.registry import TASKS as TASKS
from ag.evaluate.tasks.registry import expand as expand
from ag.evaluate.tasks.registry import make as make
from ag.evaluate.tasks.registry import unit as unit

"""The plan of a comparison: which policy, at which budget, on which task."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ag.config.keys import nearest
from ag.engine import Policy, policy
from ag.engine.spec import PolicySpec, parse_budget
from ag.errors import UserError
from ag.evaluate import tasks
from ag.evaluate.comparison.config import CompareConfig
from ag.evaluate.comparison.results import Row, tag_mean
from ag.evaluate.comparison.statistics import mean_and_error
from ag.evaluate.tasks import Loaded, Outcome, Task
from ag.evaluate.tasks.questions import QuestionTask
from ag.gates import export
from ag.versions import versions

VERSIONS = versions("ag", "torch", "transformers")


@dataclass(frozen=True)
class Cell:
    """One policy at one budget on one task.

    Attributes:
        key: a hash of all that the result depends on; the same in every process and run.
        label: what tables call the policy; see :func:`ag.engine.spec.named`.
        policy: what is evicted.
        task: what it is tried on.
        model: hub id or folder.
    """

    key: str
    label: str
    policy: Policy
    task: Task
    model: str

    @property
    def name(self) -> str:
        """What messages call it."""
        budget = "" if self.policy.budget is None else f" {self.policy.budget}"
        return f"{self.task.name}: {self.label}{budget}"

    def row(self, outcomes: Sequence[Outcome], loaded: Loaded, prefill: str) -> Row:
        """Make the row of what became of its samples."""
        mean, error = mean_and_error([outcome.score for outcome in outcomes])
        tokens = sum(outcome.tokens for outcome in outcomes)
        return Row(
            **self._start(prefill),
            kept=sum(outcome.kept * outcome.tokens for outcome in outcomes) / tokens if tokens else 1.0,
            mean=mean,
            error=error,
            n=len(outcomes),
            too_long=loaded.too_long,
            too_short=loaded.too_short,
            cut=sum(bool(outcome.tags.get("cut")) for outcome in outcomes),
            seconds=sum(outcome.seconds for outcome in outcomes),
            kv_bytes=sum(outcome.kv_bytes for outcome in outcomes) / len(outcomes),
            nats=tag_mean(outcomes, "nats"),
            hits=tag_mean(outcomes, "hits"),
            floor=self.task.floor(loaded.samples),
        )

    def failed(self, problem: str, loaded: Loaded, prefill: str) -> Row:
        """Make the row of a cell that has no result."""
        nothing: dict[str, Any] = {"kept": None, "mean": None, "error": None, "n": 0, "seconds": 0.0, "kv_bytes": 0.0}
        nothing |= {"cut": 0, "too_long": loaded.too_long, "too_short": loaded.too_short, "problem": problem}
        return Row(**self._start(prefill), **nothing)

    def _start(self, prefill: str) -> dict[str, Any]:
        return {
            "key": self.key,
            "policy": repr(self.policy),
            "label": self.label,
            "budget": self.policy.budget,
            "task": self.task.name,
            "metric": self.task.metric,
            "higher_is_better": self.task.higher_is_better,
            "prefill": prefill,
            "model": self.model,
            "question": getattr(self.task, "question", None),
            "versions": VERSIONS,
        }


def list_cells(config: CompareConfig) -> list[Cell]:
    """Return the cells, task by task; unknown names and wrong values are found before a model is loaded.

    Raises:
        UserError: naming a policy, budget or task, what was expected and the nearest name.
    """
    budgets = [parse_budget(budget) for budget in config.budgets]
    specs = config.specs
    named_options = {config.called.get(name, name): options for name, options in config.policy_options.items()}
    for name in named_options:
        if name not in specs:
            listed = nearest(name, [*specs, *config.policies])
            raise UserError(f"policy_options.{name}: policies= does not list {name!r}{listed}.")
    policies = [
        (name, one)
        for name, spec in specs.items()
        for one in _policies(name, spec, named_options.get(name, {}), budgets, config)
    ]
    adapter = None if config.adapter is None else export.adapter_checksum(config.adapter)
    samples = None if config.samples is None else f"the first {config.samples} that can be run"
    same = (asdict(config.base), adapter, samples, config.max_tokens)
    policies.sort(key=lambda pair: pair[1].spec.evicts)  # the full cache first: it shows what the model can do
    full = [] if any(not one.spec.evicts for _, one in policies) else [("full", policy("full"))]
    cells = []
    for task in _tasks(config):
        for label, one in (full if isinstance(task, QuestionTask) else []) + policies:
            gates = None if one.spec.path is None else export.read_info(one.spec.path)["checksum"]
            question = [*same, repr(one), gates, type(task).__name__, task.identity()]
            text = json.dumps(question, sort_keys=True, default=str)
            key = hashlib.sha256(text.encode()).hexdigest()[:20]
            cells.append(Cell(key, label, one, task, config.model))
    seen: dict[str, Cell] = {}
    for cell in cells:
        if (other := seen.setdefault(cell.key, cell)) is not cell:
            raise UserError(
                f"{other.name!r} and {cell.name!r} are the same twice: policies=, budgets=, tasks=; leave one out."
            )
    return cells


def _policies(
    label: str, spec: PolicySpec, options: dict[str, Any], budgets: Sequence[int | float], config: CompareConfig
) -> list[Policy]:
    """Return a listed policy at each budget; full and gates that no allocator ranks need none."""
    if spec.reads_gates:
        _check_gates(label, spec.path, config)
    places = {} if config.positions == "original" else {"positions": config.positions}
    if spec.bare:
        return [policy(spec, **places | options)]
    if not budgets:
        raise UserError(f"policy {label!r} needs budgets=[...]: shares of the prompt such as 0.25, or tokens.")
    shared: dict[str, Any] = {"strict": False}
    shared |= {} if config.budget_of == "prompt" else {"budget_of": config.budget_of}
    return [policy(spec, budget, config.schedule, **shared | places | options) for budget in budgets]


def _check_gates(label: str, path: str | None, config: CompareConfig) -> None:
    if path is None:
        raise UserError(f"policy {label!r}: name exported gates, as gates:FOLDER.")
    adapter = export.adapter_path(path)
    given = None if config.adapter is None else export.adapter_path(config.adapter)
    if adapter is None or (given is None and export.is_merged(path, config.model, config.revision)):
        return
    if given is None or adapter.resolve() != given.resolve():
        raise UserError(
            f"policy {label!r}: its gates were trained with the adapter in {adapter}; give adapter={path}, which puts "
            "it on the model of all policies, so that they are compared on the same one."
        )


def _tasks(config: CompareConfig) -> list[Task]:
    """Return the listed tasks, groups spelt out; what is said of a group holds for each of its tasks."""
    names = tasks.expand(config.tasks)
    for what, given, listed in (
        ("task_options", config.task_options, [*config.tasks, *names]),
        ("roots", config.roots, [*config.tasks, *names]),
    ):
        for name in given:
            if name not in listed:
                raise UserError(f"{what}.{name}: tasks= does not list {name!r}{nearest(name, listed)}.")
    return [_task(name, config) for name in names]


def _task(name: str, config: CompareConfig) -> Task:
    said = [listed for listed in config.tasks if listed != name and name in tasks.expand([listed])] + [name]
    root = next((config.roots[one] for one in reversed(said) if one in config.roots), config.root)
    root = None if root is None else str(Path(root).expanduser().resolve())
    options = {option: value for one in said for option, value in config.task_options.get(one, {}).items()}
    task = tasks.make(name, root, **options)
    if "seed" in {field.name for field in fields(task)} and "seed" not in options:
        task = tasks.make(name, root, **options, seed=config.seed)
    return task

"""The cells of a comparison. A cell is one policy at one budget on one task."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from ag.commands.compare import CompareConfig, Plan, name_with_kv_dtype
from ag.commands.shared import KVDtype
from ag.engine import Policy, policy
from ag.errors import UserError, nearest
from ag.evaluate import tasks
from ag.evaluate.comparison.folder import FinishedCell, Summary, tag_values
from ag.evaluate.comparison.statistics import mean_and_error
from ag.evaluate.inside import KeptTokens
from ag.evaluate.tasks import Loaded, Outcome, Sample, Task
from ag.evaluate.tasks.questions import QuestionTask
from ag.gates import export
from ag.hardware import cpu_name
from ag.model.base import checksums
from ag.versions import versions

VERSIONS = versions("ag", "torch", "transformers")
NO_SAMPLES = Loaded([])


@dataclass(frozen=True)
class Cell:
    """One policy at one budget on one task."""

    key: str  # hash of everything that determines the result; equal in every run
    label: str  # name of the policy in tables; see ag.config.spec.specs_by_name
    policy: Policy
    task: Task
    model_checksum: str | None  # of the files of a model in a folder; None: the model is from the hub
    gates_checksum: str | None  # None: the policy reads no gates

    @property
    def name(self) -> str:
        """The name in messages."""
        return f"{self.task.name}: {self.label}" + ("" if self.policy.budget is None else f" {self.policy.budget}")

    def untouched(self, samples: Sequence[Sample], prefill: str) -> int:
        """Return the number of samples that the policy cannot change, because no token is read after the eviction."""
        if not self.policy.spec.evicts or prefill == "sparse":
            return 0
        first = self.policy.block or math.inf  # tokens of a prompt that are read before the first eviction
        return sum(not self.task.reads_on(sample) and len(sample.prompt) <= first for sample in samples)

    def refusal(self) -> str:
        """Return why the cell is refused if the policy cannot change any sample, and the fix."""
        can_ask_after = getattr(tasks.make(self.task.name), "question", None) == "after"
        option = f"task_options.{self.task.name}.question=after or " if can_ask_after else ""
        return (
            f"task {self.name} evicts after the prompt, and answers of one token are predicted from its last token: as "
            f"with a full cache, whatever was evicted. Give {option}schedule=blocks:m."
        )

    def finished(
        self,
        config: CompareConfig,
        command: str,
        loaded: Loaded = NO_SAMPLES,
        prefill: str = "",
        problem: str | None = None,
        outcomes: Sequence[Outcome] = (),
        views: Sequence[KeptTokens] = (),
    ) -> FinishedCell:
        """Return the finished cell; a ``problem`` says why it failed. See :class:`Summary`."""
        mean, error = mean_and_error([outcome.score for outcome in outcomes]) if outcomes else (None, None)
        tokens = sum(outcome.tokens for outcome in outcomes)
        kept = sum(outcome.kept * outcome.tokens for outcome in outcomes) / tokens if tokens else 1.0
        lengths = [self.task.length(sample) for sample in loaded.samples]
        options = {k: v for k, v in asdict(self.task).items() if k not in ("name", "root") and v is not None}
        tags = {name: [*tag_values(outcomes, name).values()] for name in ("nats", "hits", "kl", "same_top1")}
        means: dict[str, Any] = {name: mean_and_error(values)[0] if values else None for name, values in tags.items()}
        device, failed = torch.device(config.device), problem is not None
        summary = Summary(
            key=self.key,
            policy=repr(self.policy),
            label=self.label,
            budget=self.policy.budget,
            kept=None if failed else kept,
            task=self.task.name,
            metric=self.task.metric,
            higher_is_better=self.task.higher_is_better,
            mean=mean,
            error=error,
            n=len(outcomes),
            too_long=loaded.too_long,
            too_short=loaded.too_short,
            cut=sum(bool(outcome.tags.get("cut")) for outcome in outcomes),
            seconds=sum((outcome.seconds for outcome in outcomes), 0.0),
            kv_bytes=sum(outcome.kv_bytes for outcome in outcomes) / max(1, len(outcomes)),
            prefill=prefill,
            model=config.model,
            versions=VERSIONS,
            problem=problem,
            question=getattr(self.task, "question", None),
            **means,
            floor=None if failed else self.task.floor(loaded.samples),
            over_budget=None if failed else sum(outcome.over_budget for outcome in outcomes),
            untouched=self.untouched(loaded.samples, prefill),
            dtype=config.dtype,
            quantization=config.quantization,
            prompt_mean=fmean(lengths) if lengths else None,
            prompt_min=min(lengths, default=None),
            prompt_max=max(lengths, default=None),
            task_options=json.loads(json.dumps(options, default=str)),
            hardware=torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
            threads=torch.get_num_threads(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            command=command,
            data=self.task.source,
            revision=config.revision,
            adapter=config.adapter and f"{config.adapter} ({export.adapter_checksum(config.adapter)[:8]})",
            model_checksum=self.model_checksum,
            gates_checksum=self.gates_checksum,
        )
        return FinishedCell(summary, [*outcomes], [*views])


def list_cells(config: CompareConfig) -> list[Cell]:
    """Return the cells, task by task. Names and values are checked here, before a model is loaded."""
    policies = [
        _labelled_policy(plan, kv_dtype, config) for kv_dtype in config.ordered_kv_dtypes for plan in config.plans
    ]
    adapter = None if config.adapter is None else export.adapter_checksum(config.adapter)
    samples = None if config.samples is None else f"the first {config.samples} that can be run"
    local = checksums(config.model)  # another model or chat template may be written into its folder
    model_checksum = _hash([local])[:12] if local else None
    common = (asdict(config.base), adapter, samples, config.max_tokens, *([local] if local else []))
    policies.sort(key=lambda pair: pair[1].spec.evicts)  # the full cache shows first whether the model can do a task
    full = [] if any(not cell_policy.spec.evicts for _, cell_policy in policies) else [("full", policy("full"))]
    if not config.tasks:
        raise UserError("tasks=[]: expected one task or more, for example ppl.")
    names = tasks.expand(config.tasks)
    listed = [*config.tasks, *names]
    for option, named in (("task_options", config.task_options), ("roots", config.roots)):
        for name in named:
            if name not in listed:
                raise UserError(f"{option}.{name}: tasks= does not list {name!r}{nearest(name, listed) or '.'}")
    cells: dict[str, Cell] = {}
    for task in (_task(name, config) for name in names):
        for label, cell_policy in (full if isinstance(task, QuestionTask) else []) + policies:
            gates = None if cell_policy.spec.path is None else export.read_info(cell_policy.spec.path)["checksum"]
            # keys call flags `gates`, as versions before `flags` did: their results are found again
            policy_text = repr(replace(cell_policy, spec=cell_policy.spec.ranked))
            settings = [*common, policy_text, gates, type(task).__name__, task.identity()]
            key = _hash(settings)[:20]
            cell = Cell(key, label, cell_policy, task, model_checksum, gates and gates[:12])
            if (other := cells.setdefault(key, cell)) is not cell:
                raise UserError(
                    f"{other.name!r} and {cell.name!r} are one cell: leave one out of policies=, budgets=, tasks=."
                )
    return list(cells.values())


def _hash(settings: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def _labelled_policy(plan: Plan, kv_dtype: KVDtype, config: CompareConfig) -> tuple[str, Policy]:
    """Return the policy of a plan with a type of keys and values, after its name in tables.

    Raises:
        UserError: the model lacks the adapter that the gates of the policy were trained with.
    """
    if (path := plan.spec.path) is not None and (gates_adapter := export.adapter_path(path)) is not None:
        model_adapter = None if config.adapter is None else export.adapter_path(config.adapter)
        merged = model_adapter is None and export.is_merged(path, config.model, config.revision)
        if not merged and (model_adapter is None or gates_adapter.resolve() != model_adapter.resolve()):
            raise UserError(
                f"policy {plan.name!r}: its gates were trained with the adapter in {gates_adapter}; give "
                f"adapter={path}, which puts it on the model of all policies, so that all policies are compared on one "
                "model."
            )
    options: dict[str, Any] = {} if config.positions == "original" else {"positions": config.positions}
    options |= {} if kv_dtype == "float" else {"kv_dtype": kv_dtype}
    options |= plan.options
    return name_with_kv_dtype(plan.name, kv_dtype), policy(plan.spec, plan.budget, plan.schedule, **options)


def _task(name: str, config: CompareConfig) -> Task:
    """Return a task with its options and folder; its own come before those of its groups."""
    root, options = config.root, dict[str, Any]()
    for listed in [*(group for group in config.tasks if group != name and name in tasks.expand([group])), name]:
        root = config.roots.get(listed, root)
        options |= config.task_options.get(listed, {})
    task = tasks.make(name, None if root is None else str(Path(root).resolve()), **options)
    seeded = hasattr(task, "seed") and "seed" not in options
    return replace(task, seed=config.seed) if seeded else task  # type: ignore[call-arg]

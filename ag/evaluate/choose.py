"""The smallest share whose cost on your own rows stays below a bound: ``python -m ag.choose``."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ag.commands.choose import CLIP, SCORE_CLIP, ChooseConfig
from ag.config.choice import Choice
from ag.config.command_line import Invocation
from ag.engine import Policy
from ag.errors import UserError
from ag.evaluate import tasks
from ag.evaluate.choice import SharesTest, Trial, least_loss, policies_allowed, promising, rows_needed
from ag.evaluate.comparison.cells import VERSIONS, Cell, list_cells
from ag.evaluate.comparison.work import Worker
from ag.evaluate.tasks import Outcome, Sample, Task
from ag.files import replacing
from ag.gates import export
from ag.training.memory_plan import GIB, USABLE

NOTHING_HOLDS = 1  # exit code
REQUEST = 4096  # tokens of a request that is counted on a card
MIB = 1 << 20
FIXED = "with answers of one token, which is predicted before the eviction (schedule=blocks:m evicts earlier)"


@dataclass
class Candidate:
    """A policy at a share, with what was measured."""

    label: str
    policy: Policy
    trial: Trial
    bound: float | None = None  # the mean cost is below it. None: it was not tested, or a larger share does not hold
    holds: bool = False
    tokens: int = 0  # of the measured prompts
    kept: float = 0.0  # sum over rows of the kept share times tokens
    over_budget: int = 0  # rows in which protected tokens exceed the share
    kv_bytes: int = 0  # sum over rows

    def add(self, outcome: Outcome) -> None:
        """Count the memory of a row."""
        self.tokens += outcome.tokens
        self.kept += outcome.kept * outcome.tokens
        self.over_budget += outcome.over_budget
        self.kv_bytes += outcome.kv_bytes

    @property
    def costs(self) -> list[float]:
        """The costs of its test rows; of its search rows if it was not tested."""
        return self.trial.costs or self.trial.search

    @property
    def cost(self) -> float:
        """The mean cost."""
        return fmean(self.costs)

    def requests(self, room: float) -> int:
        """Return the number of requests of 4,096 tokens whose keys and values fit into bytes."""
        return max(0, int(room // (self.kv_bytes / self.tokens * REQUEST)))


def run(invocation: Invocation[ChooseConfig]) -> int:
    """Run ``python -m ag.choose``, print its table and write the file; returns the exit code (1: nothing holds)."""
    config = invocation.config
    if invocation.dry_run:
        print(*(cell.name for cell in _list_cells(config)), sep="\n")
        return 0
    output, console = Path(config.output), Console()
    try:  # before hours of measuring
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output={output}: {error}; expected a file whose folder can be made.") from error
    if output.is_dir() or not os.access(output.parent, os.W_OK):
        raise UserError(f"output={output}: expected a file, in a folder that can be written to.")
    decision = choose(config, lambda line: console.print(line, soft_wrap=True, highlight=False))
    console.print(table(decision, config))
    with replacing(output) as new:
        new.write_text(json.dumps(content(decision, config, invocation.line), indent=2), encoding="utf-8")
    chosen = decision.chosen
    if chosen is None:
        console.print(f"nothing holds: no share of {', '.join(config.policies)} costs less than {config.loss:g}.")
        return NOTHING_HOLDS
    console.print(f"{chosen.label} at {chosen.trial.share:g}; {config.output}: take it by choice={config.output}")
    return 0


@dataclass(frozen=True)
class Decision:
    """What was measured and tested."""

    full: Candidate  # the full cache
    candidates: list[Candidate]  # by policy, each from the largest share to the smallest
    test: SharesTest
    num_search: int
    num_read: int  # test rows that were read
    room: float  # bytes of the card beside the weights

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that holds with the smallest size and, of several, the smallest cost. None: nothing holds."""
        holding = [candidate for candidate in self.candidates if candidate.holds]
        return min(holding, key=lambda candidate: (candidate.trial.size, candidate.cost), default=None)


def choose(config: ChooseConfig, tell: Callable[[str], None]) -> Decision:
    """Measure and test the policies at their shares.

    Args:
        config: what to choose from, and the bound.
        tell: prints a line.

    Raises:
        UserError: a policy, the model or the data is wrong, or there are too few rows for any share to hold.
    """
    cells = _list_cells(config)
    _check_adapters(config, cells)
    worker = Worker(config.comparison(), "")
    task, tokenizer = cells[0].task, worker.tokenizer
    loaded = task.load(tokenizer, config.samples, worker.max_tokens)
    prefills = [(cell, worker.prefill(cell)) for cell in cells[1:]]  # the first is the full cache
    rows = [row for row in loaded.samples if not all(cell.untouched([row], prefill) for cell, prefill in prefills)]
    num_fixed = len(loaded.samples) - len(rows)
    counts = ((loaded.too_long, "too long"), (loaded.too_short, "too short"), (num_fixed, FIXED))
    reasons = [f"{number} {reason}" for number, reason in counts if number]
    if not rows:
        raise UserError(
            f"no row can be measured: {', '.join(reasons) or 'there is none'}; expected prompts that policies evict "
            "from, with answers that they can change."
        )
    if reasons:
        tell(f"rows that are left out: {', '.join(reasons)}")
    random.Random(config.seed).shuffle(rows)  # a file may be sorted
    num_search = max(1, round(config.search * len(rows)))
    clip = config.clip or (SCORE_CLIP if task.higher_is_better else CLIP)
    _check_rows(config, clip, len(rows) - num_search)
    full, *candidates = [
        Candidate(cell.label, cell.policy.with_tokenizer(tokenizer), Trial(float(cell.policy.budget or 1)))
        for cell in cells
    ]
    by_trial = {id(candidate.trial): candidate for candidate in candidates}
    measure = Measure(task, worker, full, clip, config.batch_policies)
    for number, row in enumerate(rows[:num_search]):
        start = time.perf_counter()
        for candidate, cost in zip(candidates, measure.costs(row, candidates), strict=True):
            candidate.trial.add_search(cost)
        if number == 0:
            tell(_duration(time.perf_counter() - start, task, rows, num_search))
    for candidate in candidates:
        if candidate.over_budget:
            candidate.trial.kept = candidate.kept / candidate.tokens
            tell(
                f"{candidate.label} at {candidate.trial.share:g} keeps {candidate.trial.kept:.0%} of the search rows, "
                "whose protected tokens exceed the share: it is ranked by what it keeps, and longer texts than these "
                "are not tested"
            )
    by_policy = [[*group] for _, group in itertools.groupby(candidates, lambda candidate: candidate.label)]
    max_policies = policies_allowed(config.loss, clip, config.confidence, len(rows) - num_search)
    promising_groups = promising(
        [[candidate.trial for candidate in group] for group in by_policy], config.loss, max_policies
    )
    tested = [policy_trials for policy_trials in promising_groups if policy_trials]
    tell(f"the search leaves {sum(map(len, tested))} of {len(candidates)} to test")
    test = SharesTest(tested, config.loss, clip, config.confidence, len(rows) - num_search)
    num_read = 0
    for row in rows[num_search:]:
        if not (running := [by_trial[id(trial)] for trial in test.running]):
            break
        test.add(measure.costs(row, running))
        num_read += 1
    for policy_trials in tested:
        for trial, bound in zip(policy_trials, test.bounds(policy_trials), strict=True):
            by_trial[id(trial)].bound = bound
        for trial in test.holding(policy_trials):
            by_trial[id(trial)].holds = True
    weights = sum(weight.nbytes for weight in worker.model.parameters())
    return Decision(full, candidates, test, num_search, num_read, USABLE * config.card * GIB - weights)


def _list_cells(config: ChooseConfig) -> list[Cell]:
    """Return the full cache, and each policy at its shares, on the one task; a group of tasks is refused."""
    if config.task is not None:
        tasks.make(config.task)  # refuses a group
    return list_cells(config.comparison())


def _duration(seconds: float, task: Task, rows: Sequence[Sample], num_search: int) -> str:
    """Return how long all rows take if they take as long per token as the first one."""
    lengths = [task.length(row) for row in rows]
    duration = timedelta(seconds=round(seconds * sum(lengths) / max(1, lengths[0])))
    parts = f"{num_search} to search, {len(rows) - num_search} to test"
    return f"about {duration} for {len(rows)} rows ({parts}), less if the order is clear"


def _check_adapters(config: ChooseConfig, cells: Sequence[Cell]) -> None:
    """Refuse gates that were trained without the adapter of the model: a choice names one export."""
    for cell in cells:
        path = cell.policy.spec.path
        if config.adapter is not None and path is not None and export.adapter_path(path) is None:
            raise UserError(
                f"adapter={config.adapter}: a choice names one export, and {cell.policy.spec} is another one, without "
                "an adapter; give a model= that the adapter is merged into, or leave these gates out of policies."
            )


def _check_rows(config: ChooseConfig, clip: float, num_test: int) -> None:
    """Refuse a bound that no row can break, and rows too few to show any share."""
    if config.loss >= clip:
        raise UserError(f"loss={config.loss:g}: expected less than clip={clip:g}, the largest cost of a row.")
    needed = rows_needed(config.loss, clip, 1 - config.confidence)
    if num_test < needed:
        smallest_loss = math.ceil(100 * least_loss(num_test, clip, 1 - config.confidence)) / 100 if num_test else clip
        larger_loss = f"loss={smallest_loss:g} or more, " if smallest_loss < clip else ""
        raise UserError(
            f"{num_test} rows are left for the test, and confidence={config.confidence:g} that the mean cost is below "
            f"loss={config.loss:g} needs at least {needed}, even if no row costs anything (a cost counts up to "
            f"clip={clip:g}): give {math.ceil(needed / (1 - config.search))} rows or more, "
            f"{larger_loss}or a lower clip or confidence."
        )


@dataclass(frozen=True)
class Measure:
    """Runs policies on rows of a task, and takes their costs against the full cache."""

    task: Task
    worker: Worker
    full: Candidate
    clip: float
    together: int | None  # policies that share the reading of a prompt; None means all

    def costs(self, row: Sample, candidates: Sequence[Candidate]) -> list[float]:
        """Return the clipped cost of a row for each candidate.

        Raises:
            UserError: a score is not finite.
        """
        run = [self.full, *candidates]
        scores = [0.0] * len(run)
        size = self.together or len(run)
        for first in range(0, len(run), size):
            policies = [candidate.policy for candidate in run[first : first + size]]
            for index, outcome in self.task.run(self.worker.model, self.worker.tokenizer, policies, [row]):
                run[first + index].add(outcome)
                scores[first + index] = outcome.score
        if not all(map(math.isfinite, scores)):
            raise UserError(f"row {row.id} has a score that is not finite; try dtype=float32.")
        sign = -1 if self.task.higher_is_better else 1
        return [min(max(sign * (score - scores[0]), -self.clip), self.clip) for score in scores[1:]]


def table(decision: Decision, config: ChooseConfig) -> Table:
    """Return the printed table."""
    test = decision.test
    title = (
        f"mean cost below {config.loss:g} with confidence {config.confidence:g}; {decision.num_search} rows searched, "
        f"{decision.num_read} of {test.num_rows} tested"
    )
    caption = (
        f"cost: mean over rows against the full cache, each clipped to {test.clip:g}; below: bounds that all hold with "
        "this confidence; *: on the search rows, not tested"
    )
    out = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    out.add_column("policy", overflow="fold")
    fits = f"{REQUEST // 1024}k requests\non {config.card:g} GiB"
    for column in ("share", "cost", "below", "holds", "rows", "MiB per\n1,000 tokens", fits):
        out.add_column(column, justify="right", no_wrap=True)
    for candidate in [decision.full, *decision.candidates]:
        row = entry(candidate, decision)
        searched = "" if candidate.trial.costs else "*"
        measured = candidate is not decision.full
        out.add_row(
            candidate.label,
            f"{row['share']:g}",
            f"{row['cost']:.4f}{searched}" if measured else "",
            "" if row["below"] is None else f"{row['below']:.4f}",
            "yes" if row["holds"] else "no" if measured and row["below"] is not None else "",
            f"{row['rows']}" if measured else "",
            f"{row['mib_per_1000_tokens']:.2f}",
            f"{row['requests']:,}",
        )
    return out


def entry(candidate: Candidate, decision: Decision) -> dict[str, Any]:
    """Return the figures of a candidate, as the table and the file have them."""
    return {
        "policy": candidate.label,
        "share": candidate.trial.share,
        "kept": candidate.kept / candidate.tokens,
        "cost": candidate.cost if candidate.costs else 0.0,
        "below": candidate.bound,
        "holds": candidate.holds,
        "rows": len(candidate.costs),
        "mib_per_1000_tokens": candidate.kv_bytes / candidate.tokens * 1000 / MIB,
        "requests": candidate.requests(decision.room),
    }


def content(decision: Decision, config: ChooseConfig, command: str) -> dict[str, Any]:
    """Return the content of ``choice.json``."""
    return {
        "choice": None if decision.chosen is None else asdict(_choice(decision.chosen, config)),
        "loss": config.loss,
        "confidence": config.confidence,
        "clip": decision.test.clip,
        "searched_rows": decision.num_search,
        "tested_rows": decision.num_read,
        "table": [entry(candidate, decision) for candidate in [decision.full, *decision.candidates]],
        "versions": VERSIONS,
        "command": command,
    }


def _choice(candidate: Candidate, config: ChooseConfig) -> Choice:
    """Return what other commands take. Folders are absolute, so that a command may start elsewhere."""
    spec = candidate.policy.spec
    gates = config.adapter if spec.path is None else None
    return Choice(
        model=_absolute(config.model),
        policy=str(spec if spec.path is None else replace(spec, path=_absolute(spec.path))),
        budget=candidate.trial.share,
        schedule=config.schedule,
        options=dict(candidate.policy.options),
        gates=None if gates is None else _absolute(gates),
        revision=config.revision,
        quantization=config.quantization,
    )


def _absolute(name: str) -> str:
    """Return the absolute path of a folder; other names stay as they are."""
    return str(Path(name).resolve()) if Path(name).exists() else name

"""The folder of a comparison. The next command continues from it.

- ``results.jsonl``: the summary of a cell on each line, appended and synced as the cell ends. The last line of a key
  counts;
- ``samples/KEY.jsonl``: the outcome of every sample of the cell, written after its line, which does not count without;
- ``unfinished/KEY.jsonl``: the outcomes of a cell that runs, that ran when the process was killed, or that failed;
- ``views/KEY.json``: the kept tokens of a few prompts;
- ``lock``: locked by the process that writes; the kernel unlocks it when that process ends, even by a kill.

A line is skipped with a warning if it or its samples cannot be read. Its cell runs again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from ag.commands.report import ROWS as ROWS
from ag.errors import UserError
from ag.evaluate.inside import KeptTokens
from ag.evaluate.tasks import Outcome
from ag.files import fsync, locked, replacing

log = logging.getLogger(__name__)


class FolderError(UserError):
    """The folder of a comparison cannot be written to."""


SKIPPED = "%s: line %d is skipped, and its cell runs again unless a later line has it: %s"
T = TypeVar("T")


@dataclass(frozen=True)
class Summary:
    """The result of one cell. Fields that are None by default are unknown in rows of earlier versions."""

    key: str  # of the cell; equal cells of all commands have an equal key
    policy: str  # its repr
    label: str  # its name in tables
    budget: int | float | None  # as given: a share of the prompt, or tokens per KV head
    kept: float | None  # kept share of the prompts' (token, layer, KV head) entries; of all tokens if decoding evicts
    task: str
    metric: str
    higher_is_better: bool
    mean: float | None  # of the scores; None means that the cell failed
    error: float | None  # standard error of the mean; None for a single sample
    n: int  # samples scored
    too_long: int  # samples left out because they do not fit the model
    too_short: int  # samples left out because they have too few tokens for the task
    cut: int  # samples that lost tokens from their middle, by the rules of LongBench
    seconds: float  # for all samples, without reading the prompts, which cells share
    kv_bytes: float  # allocated after the prompt, or at the end if decoding evicts; mean over samples
    prefill: str  # tokens that later prompt tokens see: dense (all), sparse (kept by gates), blocks:m
    model: str  # hub id or folder
    versions: dict[str, str]  # of the libraries
    problem: str | None = None  # why there is no result
    question: str | None = None  # after: read after the eviction; before: part of the prompt
    nats: float | None = None  # NLL per token of the right answers, the mean over samples
    hits: float | None = None  # share of the samples with a right answer whose every token is the likeliest
    kl: float | None = None  # KL divergence from a full cache on the right answer's tokens, nats per token
    same_top1: float | None = None  # share of these tokens where policy and full cache agree on the likeliest token
    floor: float | None = None  # mean of a model that cannot do the task
    over_budget: int | None = None  # samples with more protected tokens than the budget allows
    untouched: int | None = None  # samples that the policy cannot change; see Cell.untouched
    dtype: str | None = None  # of the model's weights
    quantization: str | None = None  # of the model's weights: none or nf4
    prompt_mean: float | None = None  # tokens of a sample that a policy may evict
    prompt_min: int | None = None
    prompt_max: int | None = None
    task_options: dict[str, Any] | None = None  # options with their values, defaults included
    hardware: str | None = None  # name of the GPU or CPU
    threads: int | None = None  # number of CPU threads
    date: str | None = None  # when the line was written, UTC in ISO 8601
    command: str | None = None  # the command line, or the Python call
    data: str | None = None  # where the samples come from: a folder or the hub
    revision: str | None = None  # git revision of the model on the hub; None: the newest, or a folder
    adapter: str | None = None  # export whose LoRA weights are on the model, and their checksum
    model_checksum: str | None = None  # of the files of a model in a folder; None: the model is from the hub
    gates_checksum: str | None = None  # None: the policy reads no gates

    @property
    def name(self) -> str:
        """The policy and its budget."""
        return self.label if self.budget is None else f"{self.label} {self.budget}"


class FinishedCell(NamedTuple):
    """A finished cell."""

    summary: Summary
    outcomes: list[Outcome]  # of its samples; empty if it failed
    views: list[KeptTokens]  # of a few of its prompts

    def renamed(self, **names: str) -> FinishedCell:
        """Return the cell with other names in its summary: of the task, the policy, or its label."""
        return self._replace(summary=replace(self.summary, **names))  # type: ignore[arg-type]


class Folder:
    """The folder of a comparison, which is made when it is first written to."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def read(self) -> dict[str, FinishedCell]:
        """Return the finished cells by key. Damaged cells are left out, with a warning."""
        path, summaries = self.path / ROWS, dict[str, tuple[int, Summary]]()
        for number, line in enumerate(path.read_bytes().split(b"\n") if path.exists() else [], 1):
            if line:
                try:
                    summary = parse(SUMMARY, line)
                    summaries[summary.key] = number, summary
                except ValueError as error:
                    log.warning(SKIPPED, path, number, error)
        finished = {}
        for key, (number, summary) in summaries.items():
            try:
                finished[key] = FinishedCell(summary, self._outcomes(summary), self._views(key))
            except (OSError, ValueError) as error:
                log.warning(SKIPPED, path, number, error)
        return finished

    def append(self, cell: FinishedCell) -> None:
        """Write a finished cell. After a crash the folder has it completely or not at all.

        The samples come last, and those of an earlier measurement go first: they never stand beside another summary.

        Raises:
            FolderError: it cannot be written, as in :meth:`begin` and :meth:`add`.
        """
        key = cell.summary.key
        samples = self.path / "samples" / f"{key}.jsonl"
        with _writable(self.path):
            if samples.exists():
                samples.unlink()
                fsync(samples.parent)
            _write(self.path / "views" / f"{key}.json", json.dumps([view.to_json() for view in cell.views]))
            line = json.dumps(asdict(cell.summary), allow_nan=False).encode() + b"\n"
            with (self.path / ROWS).open("a+b") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
                if file.read(1) not in (b"", b"\n"):  # a process died while it wrote
                    line = b"\n" + line
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            _write(samples, _lines(cell.outcomes))
            if cell.summary.problem is None:  # a failed cell goes on from its outcomes when it is retried
                self._unfinished(key).unlink(missing_ok=True)

    def begin(self, key: str, outcomes: Sequence[Outcome]) -> None:
        """Write the outcomes that a cell begins with, so that :meth:`add` appends to these."""
        with _writable(self.path):
            _write(self._unfinished(key), _lines(outcomes))

    def add(self, key: str, outcome: Outcome) -> None:
        """Append an outcome of a cell that runs."""
        with _writable(self.path), self._unfinished(key).open("a", encoding="utf-8") as file:
            file.write(_lines([outcome]))

    def unfinished(self, key: str) -> list[Outcome]:
        """Return the outcomes of a cell without a result, up to the first line that cannot be read."""
        outcomes, path = [], self._unfinished(key)
        for line in path.read_bytes().splitlines() if path.exists() else []:
            try:
                outcomes.append(parse(OUTCOME, line))
            except ValueError:  # a process died while it wrote
                break
        return outcomes

    def writing(self) -> AbstractContextManager[None]:
        """Make the folder and lock it for this process.

        Raises:
            UserError: the folder cannot be made, or another process writes into it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"output={self.path}: {error.strerror}; expected a folder that can be written to."
            ) from error
        refusal = (
            f"output={self.path}: another process writes there: wait for it, or give another folder; "
            "cluster=local runs several cells at once."
        )
        return locked(self.path, refusal)

    def _unfinished(self, key: str) -> Path:
        return self.path / "unfinished" / f"{key}.jsonl"

    def _outcomes(self, summary: Summary) -> list[Outcome]:
        """Return the outcomes of a cell's samples.

        Raises:
            ValueError: a line cannot be read, or there are more or fewer lines than samples.
            OSError: the file cannot be read.
        """
        if not summary.key.isalnum():  # it comes from a file, and must not lead out of the folder
            raise ValueError(f"key={summary.key!r:.80}")
        if summary.problem is not None:
            return []
        path = self.path / "samples" / f"{summary.key}.jsonl"
        outcomes = [parse(OUTCOME, line) for line in path.read_bytes().splitlines()]
        if summary.mean is None or summary.kept is None or not len(outcomes) == summary.n > 0:
            raise ValueError(
                f"mean={summary.mean}, kept={summary.kept}, n={summary.n}; {path} has {len(outcomes)} samples"
            )
        return outcomes

    def _views(self, key: str) -> list[KeptTokens]:
        """Return the recorded prompts of a cell; empty if they were not recorded or cannot be read."""
        try:
            text = (self.path / "views" / f"{key}.json").read_text(encoding="utf-8")
            return [KeptTokens.from_json(view) for view in json.loads(text)]
        except (OSError, ValueError, TypeError, KeyError):
            return []


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    """Turn an error of the disk into one that names the folder and what follows."""
    try:
        yield
    except OSError as error:
        raise FolderError(
            f"output={path}: {error.strerror}; the same command goes on from there when it can be written to."
        ) from error


def _write(path: Path, text: str) -> None:
    """Write a file, completely or not at all; its folder is made if it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8")


def _lines(outcomes: Sequence[Outcome]) -> str:
    return "".join(json.dumps(asdict(outcome), allow_nan=False) + "\n" for outcome in outcomes)


STRICT = with_config(ConfigDict(strict=True, allow_inf_nan=False))
SUMMARY, OUTCOME = TypeAdapter(STRICT(Summary)), TypeAdapter(STRICT(Outcome))


def parse(adapter: TypeAdapter[T], line: str | bytes) -> T:
    """Read a :class:`Summary` or an Outcome from a line of JSON; unknown fields are ignored.

    Raises:
        ValueError: naming the fields that are missing or have another type.
    """
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        problems = [(".".join(map(str, problem["loc"])), problem["msg"]) for problem in error.errors()]
        raise ValueError("; ".join(": ".join(filter(None, texts)) for texts in problems)[:300]) from None


def tag_values(outcomes: Sequence[Outcome], tag: str = "") -> dict[str, float]:
    """Return a tag by sample, for the samples that have it; an empty tag means the score."""
    if not tag:
        return {outcome.sample: outcome.score for outcome in outcomes}
    return {outcome.sample: float(outcome.tags[tag]) for outcome in outcomes if tag in outcome.tags}


def common_samples(outcomes: Sequence[Outcome], other_outcomes: Sequence[Outcome]) -> list[str]:
    """Return the ids of the samples that are in both lists, with equal contents as far as these are known."""
    others = {outcome.sample: outcome.content_hash for outcome in other_outcomes}
    in_both = (outcome for outcome in outcomes if outcome.sample in others)
    return [each.sample for each in in_both if len({each.content_hash, others[each.sample]} - {""}) < 2]


def comparable_samples(outcomes: Sequence[Outcome], other_outcomes: Sequence[Outcome]) -> list[str]:
    """Return the common samples without those whose solutions the full cache wrote anew, with other tokens."""
    solutions = {outcome.sample: outcome.tags.get("solution") for outcome in other_outcomes}
    one_solution = {
        outcome.sample
        for outcome in outcomes
        if len({outcome.tags.get("solution"), solutions.get(outcome.sample)} - {None}) < 2
    }
    return [sample for sample in common_samples(outcomes, other_outcomes) if sample in one_solution]

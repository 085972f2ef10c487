"""The folder of a comparison: what came out of its cells, kept so that the next command goes on from there.

- ``results.jsonl``: a summary on each line, appended and synced as its cell ends; of a key the last line counts;
- ``samples/KEY.jsonl``: the outcome of every sample of the cell, whole before its line is written;
- ``views/KEY.json``: which tokens of a few prompts stayed;
- ``lock``: held by the process that writes; the kernel frees it when that dies, however that happens.

A line that cannot be used, or whose samples cannot be, is named in a warning and skipped; its cell runs again.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from filelock import FileLock, Timeout

from ag.config.keys import fits
from ag.errors import UserError
from ag.evaluate.comparison.statistics import mean_and_error
from ag.evaluate.inside import View
from ag.evaluate.tasks import Outcome
from ag.files import replacing

ROWS = "results.jsonl"


class DamagedRowWarning(UserWarning):
    """A line of the results, or the samples of its cell, cannot be used."""


@dataclass(frozen=True)
class Summary:
    """What came out of one cell; what is None by default is not known in rows of earlier versions."""

    key: str  # of the cell: the same for the same question asked again
    policy: str  # its repr
    label: str  # what tables call it
    budget: int | float | None  # what was asked for: a share of the prompt, or tokens per KV head
    kept: float | None  # share of the prompts' (token, layer, KV head) entries; of all tokens where eviction goes on
    task: str
    metric: str
    higher_is_better: bool
    mean: float | None  # of the scores; None when there is a problem
    error: float | None  # standard error of the mean; None for a single sample
    n: int  # samples scored
    too_long: int  # samples left out because they do not fit the model
    too_short: int  # samples left out because they have too few tokens for the task
    cut: int  # samples that lost tokens from their middle, as the rules of LongBench have it
    seconds: float  # for all samples
    kv_bytes: float  # allocated after the prompt, or at the end where eviction goes on, the mean over samples
    prefill: str  # what later prompt tokens see: dense (everything), sparse (what gates keep), blocks:m
    model: str  # hub id or folder
    versions: dict[str, str]  # of the libraries
    problem: str | None = None  # why there is no result
    question: str | None = None  # after: read when the context had been evicted; before: part of the prompt
    nats: float | None = None  # of the right answers per token, the mean over samples
    hits: float | None = None  # share of the samples in which each token of the right answer is the likeliest
    kl: float | None = None  # divergence of what follows from a full cache's, nats a token
    same_top1: float | None = None  # share of the tokens whose likeliest one is a full cache's
    floor: float | None = None  # the mean up to which a full cache shows that the model cannot do the task
    over_budget: int | None = None  # samples in which more is protected than the budget allows, and stays
    untouched: int | None = None  # samples that the policy cannot change; see Cell.untouched
    dtype: str | None = None  # of the model's weights
    quantization: str | None = None  # of the model's weights: none or nf4
    prompt_mean: float | None = None  # tokens of a sample that a policy may evict
    prompt_min: int | None = None
    prompt_max: int | None = None
    task_options: dict[str, Any] | None = None  # with their values, defaults included
    hardware: str | None = None  # the GPU, or the CPU that it ran on
    threads: int | None = None  # that computed on the CPU
    date: str | None = None  # when the line was written, UTC in ISO 8601
    command: str | None = None  # the command line, or the Python call

    @property
    def name(self) -> str:
        """The policy and its budget."""
        return self.label if self.budget is None else f"{self.label} {self.budget}"

    @property
    def left_out(self) -> str:
        """How many samples were left out, and why."""
        counts = ((self.too_long, "too long"), (self.too_short, "too short"))
        return ", ".join(f"{number} {why}" for number, why in counts if number) or "0"


class Ended(NamedTuple):
    """All that came out of a cell."""

    summary: Summary
    outcomes: list[Outcome]  # of its samples; none where there is a problem
    views: list[View]  # of a few of its prompts


class Folder:
    """The folder of a comparison, made when it is not there."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            for part in ("samples", "views"):
                (self.path / part).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"output={path}: {error.strerror}; expected a folder that can be written to.") from error

    def read(self) -> dict[str, Ended]:
        """Return what the folder has of each cell, by key; what is damaged is left out, with a warning."""
        path = self.path / ROWS
        summaries: dict[str, tuple[int, Summary]] = {}
        for number, line in enumerate(path.read_bytes().split(b"\n") if path.exists() else [], 1):
            if line:
                try:
                    summary: Summary = read_line(line.decode(), Summary)
                    summaries[summary.key] = number, summary
                except ValueError as error:
                    self._skip(number, error)
        found = {}
        for key, (number, summary) in summaries.items():
            try:
                found[key] = Ended(summary, self._outcomes(summary), self._views(key))
            except (OSError, ValueError) as error:
                self._skip(number, error)
        return found

    def append(self, ended: Ended) -> None:
        """Write what came out of a cell; after a crash it is there as a whole, or not at all."""
        summary, outcomes, views = ended
        samples = "".join(json.dumps(asdict(outcome), allow_nan=False) + "\n" for outcome in outcomes)
        shown = json.dumps([view.to_json() for view in views])
        for part, ending, text in (("samples", "jsonl", samples), ("views", "json", shown)):
            with replacing(self._beside(part, summary.key, ending)) as new:
                new.write_text(text, encoding="utf-8")
        line = json.dumps(asdict(summary), allow_nan=False).encode() + b"\n"
        with (self.path / ROWS).open("a+b") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            if file.read(1) not in (b"", b"\n"):  # a process died while it wrote
                line = b"\n" + line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the one process that writes here.

        Raises:
            UserError: when another one does.
        """
        try:
            with FileLock(self.path / "lock", timeout=0):
                yield
        except Timeout:
            raise UserError(
                f"output={self.path}: another process writes there: wait for it, or give another folder; "
                "cluster=local runs several cells at once."
            ) from None

    def _skip(self, number: int, why: Exception) -> None:
        what = f"line {number} is skipped, and its cell runs again unless a later line has it"
        warnings.warn(f"{self.path / ROWS}: {what}: {why}", DamagedRowWarning, stacklevel=3)

    def _outcomes(self, summary: Summary) -> list[Outcome]:
        """Return what became of each sample of a cell.

        Raises:
            ValueError: a line cannot be used, or there are fewer or more than the cell had.
            OSError: they are not there.
        """
        if summary.problem is not None:
            return []
        path = self._beside("samples", summary.key, "jsonl")
        outcomes = [read_line(line, Outcome) for line in path.read_text(encoding="utf-8").splitlines()]
        if summary.mean is None or summary.kept is None or not len(outcomes) == summary.n > 0:
            raise ValueError(
                f"mean={summary.mean}, kept={summary.kept}, n={summary.n}; {path} has {len(outcomes)} samples"
            )
        return outcomes

    def _views(self, key: str) -> list[View]:
        """Return what a cell kept of a few prompts, nothing where that was not recorded or cannot be read."""
        try:
            text = self._beside("views", key, "json").read_text(encoding="utf-8")
            return [View.from_json(view) for view in json.loads(text)]
        except (OSError, ValueError, TypeError, KeyError):
            return []

    def _beside(self, part: str, key: str, ending: str) -> Path:
        if not key.isalnum():  # it came out of a file: it must not lead elsewhere
            raise ValueError(f"key={key!r:.80}")
        return self.path / part / f"{key}.{ending}"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
HINTS: dict[type[Any], dict[str, Any]] = {kind: get_type_hints(kind) for kind in (Summary, Outcome)}
HINTS[Outcome]["tags"] = dict[str, str | int | float]
# lines of earlier versions lack them; ``problem`` is in all
LATER = frozenset(one.name for one in fields(Summary) if one.default is None) - {"problem"}
NEEDED = {kind: hints.keys() - LATER for kind, hints in HINTS.items()}


def read_line(line: str, kind: type[Any]) -> Any:
    """Read a :class:`Summary` or an Outcome from a line of JSON.

    Raises:
        ValueError: saying what is wrong with it.
    """
    try:
        values = DECODER.decode(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    hints = HINTS[kind]
    if isinstance(values, dict):
        values.pop("checksum", None)  # of the line and its samples, in lines of earlier versions
    if not isinstance(values, dict) or not NEEDED[kind] <= values.keys() <= hints.keys():
        raise ValueError(f"expected an object with {', '.join(hints)}")
    for name, value in values.items():
        if not fits(hints[name], value):
            raise ValueError(f"{name}={value!r:.80}")
    return kind(**values)


def tag_mean(outcomes: Sequence[Outcome], name: str) -> float | None:
    """Return the mean of a tag over the samples that have it, None where none has."""
    found = tag_values(outcomes, name).values()
    return mean_and_error(list(found))[0] if found else None


def tag_values(outcomes: Sequence[Outcome], name: str) -> dict[str, float]:
    """Return the number that each sample has in a tag."""
    return {outcome.sample: float(outcome.tags[name]) for outcome in outcomes if name in outcome.tags}

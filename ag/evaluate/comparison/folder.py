"""The folder of a comparison: one line a cell, and the scores of its samples beside it.

- ``results.jsonl``: a summary on each line, appended and synced as its cell ends; of a key the last line counts. Its
  checksum, which lines of earlier versions lack, is the SHA-256 of the line without it and of the cell's samples;
- ``samples/KEY.jsonl``: the outcome of every sample of the cell, whole before its line is written;
- ``views/KEY.json``: which tokens of a few prompts stayed;
- ``lock``: held by the process that writes; the kernel frees it when that dies, however that happens;
- ``results.corrupt.jsonl``: lines that could not be understood; their cells are computed anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from filelock import FileLock, Timeout

from ag.config.keys import fits
from ag.errors import UserError
from ag.evaluate.comparison.statistics import mean_and_error
from ag.evaluate.comparison.views import View
from ag.evaluate.tasks import Outcome
from ag.files import replacing

ROWS, CORRUPT = "results.jsonl", "results.corrupt.jsonl"


class CorruptRowWarning(UserWarning):
    """A line of the results cannot be used."""


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
    checksum: str | None = field(default=None, compare=False)  # of the rest of the line and of its samples

    @property
    def name(self) -> str:
        """The policy and its budget."""
        return self.label if self.budget is None else f"{self.label} {self.budget}"

    @property
    def left_out(self) -> str:
        """How many samples were left out, and why."""
        counts = ((self.too_long, "too long"), (self.too_short, "too short"))
        return ", ".join(f"{number} {why}" for number, why in counts if number) or "0"


HINTS: dict[type[Any], dict[str, Any]] = {kind: get_type_hints(kind) for kind in (Summary, Outcome)}
# lines of earlier versions lack them; ``problem`` is in all
LATER = frozenset(one.name for one in fields(Summary) if one.default is None) - {"problem"}
HINTS[Outcome]["tags"] = dict[str, str | int | float]


def read_line(line: str, kind: type[Any]) -> Any:
    """Read a :class:`Summary` or an Outcome from a line of JSON.

    Raises:
        ValueError: saying what is wrong with it.
    """
    try:
        values = json.loads(line, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    hints = HINTS[kind]
    if not isinstance(values, dict) or not hints.keys() - LATER <= values.keys() <= hints.keys():
        raise ValueError(f"expected an object with {', '.join(hints)}")
    for name, value in values.items():
        if not fits(hints[name], value):
            raise ValueError(f"{name}={value!r:.80}")
    return kind(**values)


def _checksum(summary: Summary, samples: bytes) -> str:
    """Return the SHA-256 of what a summary knows, its checksum aside, and of the file of its samples."""
    known = {name: value for name, value in vars(summary).items() if value is not None and name != "checksum"}
    row = json.dumps(known)  # later versions may know more, and find the same
    return hashlib.sha256(row.encode() + b"\n" + samples).hexdigest()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def tag_mean(outcomes: Sequence[Outcome], name: str) -> float | None:
    """Return the mean of a tag over the samples that have it, None where none has."""
    found = tag_values(outcomes, name).values()
    return mean_and_error(list(found))[0] if found else None


def tag_values(outcomes: Sequence[Outcome], name: str) -> dict[str, float]:
    """Return the number that each sample has in a tag."""
    return {outcome.sample: float(outcome.tags[name]) for outcome in outcomes if name in outcome.tags}


class Folder:
    """The folder of a comparison, made when it is not there."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            for part in ("samples", "views"):
                (self.path / part).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"output={path}: {error.strerror}; expected a folder that can be written to.") from error
        self._checked: set[bytes] = set()

    def summaries(self) -> dict[str, Summary]:
        """Return the summaries by key; what cannot be used goes to ``results.corrupt.jsonl``, with a warning."""
        path = self.path / ROWS
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        found: dict[str, Summary] = {}
        good, bad = [], []
        for line in filter(None, lines):
            try:
                summary: Summary = read_line(line.decode(), Summary)
                if line not in self._checked:
                    self._check(summary)
                self._checked.add(line)
            except (ValueError, OSError) as error:
                bad.append(line)
                reason = f"{path}: a row cannot be used and its cell is computed anew ({error}); see {CORRUPT}"
                warnings.warn(reason, CorruptRowWarning, stacklevel=2)
            else:
                good.append(line)
                found[summary.key] = summary
        if bad:
            with (self.path / CORRUPT).open("ab") as file:
                file.write(b"".join(line + b"\n" for line in bad))
            self._replace(path, b"".join(line + b"\n" for line in good))
        return found

    def _check(self, summary: Summary) -> None:
        """Raise ``ValueError`` unless a summary with a result fits its samples."""
        if summary.problem is not None:
            return
        if summary.checksum is not None:
            if _checksum(summary, self._samples(summary).read_bytes()) != summary.checksum:
                raise ValueError("it or its samples have changed since they were written")
            return
        outcomes = self.outcomes(summary)
        scores = [outcome.score for outcome in outcomes]
        fits_them = len(scores) == summary.n > 0 and mean_and_error(scores) == (summary.mean, summary.error)
        fits_them &= all(getattr(summary, name) in (None, tag_mean(outcomes, name)) for name in ("nats", "hits"))
        if not fits_them or summary.kept is None or not 0 <= summary.kept <= 1:
            raise ValueError("it does not fit its samples")

    def outcomes(self, summary: Summary) -> list[Outcome]:
        """Return what became of each sample of a cell.

        Raises:
            ValueError: a line cannot be used.
            OSError: they are not there.
        """
        data = self._samples(summary).read_bytes()
        if _checksum(summary, data) == summary.checksum:  # a look at each value takes five times as long
            return [Outcome(**json.loads(line)) for line in data.splitlines()]
        return [read_line(line, Outcome) for line in data.decode().splitlines()]

    def views(self, key: str) -> list[View]:
        """Return what a cell kept of a few prompts, nothing where that was not recorded or cannot be read."""
        try:
            text = self._beside("views", key, "json").read_text(encoding="utf-8")
            return [View.from_json(view) for view in json.loads(text)]
        except (OSError, ValueError, TypeError, KeyError):
            return []

    def append(self, summary: Summary, outcomes: Iterable[Outcome], views: Iterable[View]) -> None:
        """Write what came out of a cell; after a crash it is there as a whole, or not at all."""
        text = "".join(json.dumps(asdict(outcome), allow_nan=False) + "\n" for outcome in outcomes).encode()
        self._replace(self._samples(summary), text)
        summary = replace(summary, checksum=_checksum(summary, text))
        shown = json.dumps([view.to_json() for view in views])
        self._replace(self._beside("views", summary.key, "json"), shown.encode())
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

    def _samples(self, summary: Summary) -> Path:
        return self._beside("samples", summary.key, "jsonl")

    def _beside(self, part: str, key: str, ending: str) -> Path:
        if not key.isalnum():  # it came out of a file: it must not lead elsewhere
            raise ValueError(f"key={key!r:.80}")
        return self.path / part / f"{key}.{ending}"

    def _replace(self, path: Path, data: bytes) -> None:
        with replacing(path) as new:
            new.write_bytes(data)

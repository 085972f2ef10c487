"""A training recipe on one card, resumed in the middle: ``python -m scripts.gpu.fit OUT.json key=value ...``.

Keys are those of ``ag.fit``, and of :class:`Job` with ``job.`` before them.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ag.config import Config
from ag.config.command_line import parse
from ag.errors import UserError
from ag.gates.gate import AttentionGates
from ag.training.loggers import read_metrics
from ag.training.memory_plan import plan
from scripts.gpu.options import read_options

Row = dict[str, Any]
GPUS = 4  # of the machine whose hours are estimated
SETTLED = 1  # steps of a process, the first ones, whose time does not count


@dataclass(frozen=True)
class Job:
    """What is done with a recipe.

    Attributes:
        gib: cap on the card's memory; 0: none.
        steps: optimiser steps; 0: those of the recipe, in one process.
        lora: steps of LoRA alone, for the share of a step that gates cost; 0: not measured.
        samples: rows whose time on four cards is estimated.
        text: documents of random words to write into ``data.root``; 0: it is there.
        plan: compute the step's memory in advance.
        link: symbolic link to make to the run; empty: none.
    """

    gib: float = 0
    steps: int = 0
    lora: int = 0
    samples: int = 4997
    text: int = 0
    plan: bool = False
    link: str = ""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (2: one line on stderr says what is wrong)."""
    file, *words = sys.argv[1:] if argv is None else argv
    mine = [word.removeprefix("job.") for word in words if word.startswith("job.")]
    words = [word for word in words if not word.startswith("job.")]
    try:
        row = run(words, read_options(mine, Job), Path(file))
    except UserError as error:
        print(f"scripts.gpu.fit: error: {error}", file=sys.stderr)
        return 2
    Path(file).write_text(json.dumps(row, indent=2))
    return 0


def run(words: list[str], job: Job, file: Path) -> Row:
    """Train half of the steps, resume in a fresh process for the others, train LoRA alone, and plan the same.

    Raises:
        UserError: with the last line of a process that failed.
    """
    if job.text:
        write_text(Path(next(word for word in words if word.startswith("data.root=")).partition("=")[2]), job.text)
    planned = _start("plan", file, words, job) if job.plan else None  # on the CPU, while the card works
    if job.steps:
        half = max(1, job.steps // 2)
        parts = [_done(_start("first", file, [*words, f"trainer.max_steps={half}"], job))]
        again = [*words, f"trainer.max_steps={job.steps}", f"resume={parts[0]['run']}"]
        parts.append(_done(_start("second", file, again, job)))
    else:
        parts = [_done(_start("whole", file, words, job))]
    row = summary(parts, job)
    if job.link:
        Path(job.link).unlink(missing_ok=True)
        Path(job.link).symlink_to(Path(parts[-1]["run"]).absolute(), target_is_directory=True)
    if job.lora:
        alone = [*words, "train=lora", f"trainer.max_steps={job.lora}"]
        with _noting(row, "no lora"):
            step = _done(_start("lora", file, alone, job))["seconds a step"]
            row |= {"lora seconds a step": step, "share of gates": 1 - step / row["seconds a step"]}
    if planned is not None:
        with _noting(row, "no plan"):
            row["planned bytes"] = _done(planned)["bytes"]
            row["peak over plan"] = row["peak bytes"] / row["planned bytes"]
    return row


@contextmanager
def _noting(row: Row, name: str) -> Iterator[None]:
    """Write down why a number is missing, in place of losing the others."""
    try:
        yield
    except UserError as error:
        row[name] = str(error)


def summary(parts: list[Row], job: Job) -> Row:
    """Put the halves of a run together."""
    rows = [row for part in parts for row in part["metrics"]]
    numbers = [v for row in rows for name, v in row.items() if "loss" in name or "norm" in name]
    speed = statistics.median(row["tokens/s"] for row in parts)
    return {
        "steps": [row["step"] for row in rows],
        "losses": [row.get("train/loss") for row in rows],
        "finite": float(bool(numbers) and all(math.isfinite(x) for x in numbers)),
        "resumed": float([row["step"] for row in rows] == list(range(1, len(rows) + 1))),
        "exported": float(all(part["exported"] for part in parts)),
        "tokens/s": speed,
        "seconds a step": statistics.median(part["seconds a step"] for part in parts),
        "peak bytes": max(part["peak bytes"] for part in parts),
        "reserved bytes": max(part["reserved bytes"] for part in parts),
        "samples": job.samples,
        "hours on four cards": job.samples * parts[-1]["row tokens"] / speed / GPUS / 3600,
        "validation": parts[-1]["validation"],
        "seconds to load": parts[0]["seconds to load"],
    }


def _start(name: str, file: Path, words: list[str], job: Job) -> tuple[subprocess.Popen[str], Path]:
    """Begin a part of the work in a process of its own."""
    out = file.with_name(f"{file.stem}.{name}.part")
    command = [sys.executable, "-c", f"from scripts.gpu.fit import part; part({name!r}, {str(out)!r})"]
    work = json.dumps({"words": words, "job": asdict(job)})
    process = subprocess.Popen(
        [*command, work],
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    return process, out


def _done(started: tuple[subprocess.Popen[str], Path]) -> Row:
    """Wait for a part and return what it found."""
    process, out = started
    _, errors = process.communicate()
    print(errors[-4000:], file=sys.stderr)
    if process.returncode:
        last = (errors.strip().splitlines() or ["no output"])[-1]
        raise UserError(f"{out.stem}: exit code {process.returncode}: {last}")
    found: Row = json.loads(out.read_text())
    return found


def part(name: str, out: str) -> None:
    """Do one part in this process; what to do stands in the first argument of the command line."""
    work = json.loads(sys.argv[1])
    config = parse(work["words"], Config, "ag.fit").config
    Path(out).write_text(json.dumps({"bytes": plan(config).total} if name == "plan" else trained(config, work["job"])))


def trained(config: Config, job: Row) -> Row:
    """Train in this process and return its metrics, speed and peak."""
    from ag.run import fit

    cuda = torch.cuda.is_available() and config.trainer.accelerator != "cpu"
    if cuda and job["gib"]:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job["gib"] * (1 << 30) / total))
    before = 0 if config.resume is None else len(read_metrics(Path(config.resume) / "metrics.csv"))
    begin = time.perf_counter()
    folder = fit(config)
    assert folder is not None
    rows = read_metrics(folder / "metrics.csv")[before:]
    speeds = [row["train/tokens_per_second"] for row in rows if "train/tokens_per_second" in row]
    speed = statistics.median(speeds[SETTLED:] or speeds)
    tokens = config.data.prompt_max if config.data.packing == "split" else config.data.max_length
    step = tokens * config.data.batch_size * config.trainer.accumulate
    if config.train != "lora":
        AttentionGates.from_pretrained(folder / "export")
    return {
        "run": str(folder),
        "metrics": [{"step": row["step"]} | {n: v for n, v in row.items() if n.startswith("train/")} for row in rows],
        "validation": {n: v for n, v in rows[-1].items() if n.startswith("val/")},
        "tokens/s": speed,
        "row tokens": tokens,
        "seconds a step": step / speed,
        "peak bytes": torch.cuda.max_memory_allocated() if cuda else 0,
        "reserved bytes": torch.cuda.max_memory_reserved() if cuda else 0,
        "exported": (folder / "export").is_dir(),
        "seconds to load": time.perf_counter() - begin - sum(step / x for x in speeds),
    }


def write_text(root: Path, documents: int) -> None:
    """Write documents of random words, as JSON lines, where there are none yet."""
    draw = random.Random(0)
    root.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", documents), ("validation", max(2, documents // 8))):
        file = root / f"{split}.jsonl"
        if not file.exists():
            letters = "abcdefghijklmnopqrstuvwxyz     "
            texts = ("".join(draw.choices(letters, k=4000)) for _ in range(count))
            file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


if __name__ == "__main__":
    sys.exit(main())

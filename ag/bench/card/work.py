"""The parts of ``scripts/gpu.sh``, one after the other."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ag.bench.card import PARTS, pack, summary, table
from ag.bench.card.fit import write_text
from ag.bench.card.machine import Machine, machine
from ag.bench.card.run import NO_TIME, Workspace, run
from ag.bench.card.small_model import restore
from ag.errors import UserError

TINY_MODEL = "random:docs/models/tiny.json"


def run_parts(options: argparse.Namespace) -> int:
    """Run the parts that the command line asks for.

    Returns:
        0 when every line ended well, 1 when one did not.

    Raises:
        UserError: without a GPU that can be used, or for a folder of data that is not there.
    """
    here = machine(options.cpu_rehearsal)
    parts = PARTS if options.part == "all" else (options.part,)
    return max([part(name, options, here) for name in parts])


def part(name: str, options: argparse.Namespace, here: Machine) -> int:
    """Run a part's lines and write its summary; returns 1 when a line failed."""
    out = Path(options.out or "runs/gpu").absolute() / name
    work = Path(options.work).absolute()
    device = "cpu" if here.gib is None else "cuda"
    values = {
        "device": device if name == "speed" else {"cpu": "cpu", "cuda": "gpu"}[device],
        "torch_device": device,
        "data": _data(options),
        "model": TINY_MODEL if here.gib is None else _model(work),
    }
    if here.gib is None:
        os.environ["TRITON_INTERPRET"] = "1"
        if not values["data"]:
            values["data"] = str(work / "text")
            write_text(work / "text", 8)

    def write() -> None:
        summary.write(out)

    rows = run(table.lines(name), Workspace(out, work, values), here, 60 * options.minutes, write)
    print(f"written: {out / summary.FILE}")
    if left := [line for line, row in rows.items() if row["status"] == NO_TIME]:
        print(f"no time was left for {', '.join(left)}: give the same command again")
    return int(any(row["status"] in ("failed", "timed out") for row in rows.values()))


def _data(options: argparse.Namespace) -> str:
    """Return the folder of a corpus: the one that is given, that of the pack, or none."""
    given = options.data or os.environ.get("AG_GPU_DATA")
    if given:
        if not Path(given).is_dir():
            raise UserError(f"--data {given}: expected a folder with train.jsonl and validation.jsonl.")
        return str(Path(given).absolute())
    return str(pack.carried(pack.CORPUS) or "")


def _model(work: Path) -> str:
    """Return the small model: that of the pack, unpacked, or the alias."""
    carried = pack.carried(pack.MODEL)
    return "smollm2" if carried is None else str(restore(carried, work / "smollm2-small"))

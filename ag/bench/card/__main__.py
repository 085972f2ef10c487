"""Prove and measure on a GPU what no CPU can show: ``scripts/gpu.sh check|speed|train|all|pack``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from ag.bench.card import pack, summary, table
from ag.bench.card.fit import write_text
from ag.bench.card.machine import ROOT, Machine, machine
from ag.bench.card.run import Workspace, run
from ag.bench.card.small_model import restore
from ag.errors import UserError

MINUTES = 9.0  # of a part
TINY_MODEL = "random:docs/models/tiny.json"


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 when every line ended well, 1 when one did not, 2 when nothing could be run (one line on stderr says why).
    """
    options = _parser().parse_args(argv)
    try:
        if options.part == "pack":
            print(pack.gather(options, Path(options.out or ROOT / ".pack")))
            return 0
        here = machine(options.cpu_rehearsal)
        parts = table.PARTS if options.part == "all" else (options.part,)
        return max([part(name, options, here) for name in parts])
    except UserError as error:
        print(f"gpu.sh: error: {error}", file=sys.stderr)
        return 2


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/gpu.sh", description=__doc__)
    parser.add_argument("part", choices=[*table.PARTS, "all", "pack"])
    parser.add_argument("out", nargs="?", help="folder of the results (runs/gpu), or of the pack (.pack)")
    parser.add_argument("--cpu-rehearsal", action="store_true", help="tiny shapes on the CPU, in Triton's interpreter")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for each part (%(default)s)")
    parser.add_argument("--data", help="folder with train.jsonl and validation.jsonl: documents to train on")
    parser.add_argument("--work", default=os.environ.get("AG_GPU_WORK") or _scratch(), help="scratch folder")
    pack.options(parser.add_argument_group("pack"))
    return parser


def _scratch() -> str:
    return str(Path(tempfile.gettempdir()) / f"ag-gpu-{os.getuid()}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the line at work is stopped too
    sys.exit(main())

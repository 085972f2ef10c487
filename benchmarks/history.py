"""Keep what was measured for a release, and draw the history: python benchmarks/history.py [FOLDER].

Reads the MODE.json that ``python -m ag.bench`` left in FOLDER (runs/bench). Writes benchmarks/VERSION.json, where
VERSION is that of pyproject.toml, and benchmarks/history.png. Measure releases on one machine, with the same commands.
"""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from packaging.version import Version

from ag.bench.write import SHOWN

ROOT = Path(__file__).resolve().parents[1]
#: What of the machine a time depends on; lines join only releases that were measured on the same one.
HARDWARE = ("gpu", "cpu", "cores", "threads")


def record(folder: Path, version: str, out: Path) -> Path:
    """Write the results of a folder's modes as those of a version; returns the file.

    Raises:
        SystemExit: when nothing was measured there.
    """
    files = {mode: folder / f"{mode}.json" for mode in SHOWN}
    found = {mode: file for mode, file in files.items() if file.is_file()}
    if not found:
        expected = ", ".join(file.name for file in files.values())
        raise SystemExit(f"{folder}: expected one of {expected} there; run python -m ag.bench first")
    out.mkdir(exist_ok=True)
    target = out / f"{version}.json"
    results = {mode: json.loads(file.read_text()) for mode, file in found.items()}
    target.write_text(json.dumps({"version": version, "modes": results}, indent=1) + "\n")
    return target


def lines(releases: list[dict[str, Any]], mode: str) -> dict[tuple[str, ...], dict[str, float]]:
    """Return a mode's value by version, for each case (contestant, context, batch) and machine."""
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for release in releases:
        result = release["modes"].get(mode, {"rows": [], "machine": {}})
        machine = ", ".join(str(result["machine"][name]) for name in HARDWARE if name in result["machine"])
        for row in result["rows"]:
            case = f"{row['contestant']}, {row['context']:,} x {row['batch']}"
            found.setdefault((case, machine), {})[release["version"]] = row[SHOWN[mode]]
    return found


def draw(out: Path) -> Path:
    """Draw every mode over the versions of a folder; returns the picture's file."""
    releases = [json.loads(file.read_text()) for file in out.glob("*.json")]
    releases.sort(key=lambda release: Version(release["version"]))
    versions = [release["version"] for release in releases]
    modes = [mode for mode in SHOWN if any(mode in release["modes"] for release in releases)]
    figure = Figure(figsize=(9, 3.2 * len(modes)), dpi=120, layout="constrained")
    for axes, mode in zip(figure.subplots(len(modes), squeeze=False)[:, 0], modes, strict=True):
        for (case, machine), values in lines(releases, mode).items():
            places = [versions.index(version) for version in values]
            axes.plot(places, list(values.values()), "o-", label=f"{case} ({machine})", markersize=4)
        axes.set_xticks(range(len(versions)), versions)
        axes.set_ylabel(f"{mode}: {SHOWN[mode]}")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    target = out / "history.png"
    figure.savefig(target)
    return target


if __name__ == "__main__":
    current = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    measured = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/bench")
    print("written:", record(measured, current, ROOT / "benchmarks"), draw(ROOT / "benchmarks"))

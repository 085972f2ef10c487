"""Test and measure on a GPU: ``python scripts/gpu.py [FOLDER] [--only NAME ...] [--minutes N]``.

It runs rows one after another, each a command in its own process: the tests of tests/gpu, the times of the kernels
(benchmarks/kernels.py), and ``ag.bench`` with random weights. Each row appends its result to ``FOLDER/rows.jsonl`` when
it ends. Rows that ended well in the folder are not run again; those that failed are, after the new ones.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINES, SUMMARY, LOG = "rows.jsonl", "summary.md", "log.txt"
TAIL = 30  # lines of a failed row's output that the summary shows
#: Describes the machine in another process, so that this one holds no memory of the GPU.
PROBE = """
import json, platform, torch, transformers
from importlib.metadata import version
from importlib.util import find_spec
if not torch.cuda.is_available():
    raise SystemExit(f"torch {torch.__version__} (built for CUDA {torch.version.cuda}) finds no CUDA device")
card = torch.cuda.get_device_properties(0)
names = [name for name in ("torch", "triton", "transformers", "lightning", "peft") if find_spec(name)]
versions = {"python": platform.python_version(), **{name: version(name) for name in names}}
print(json.dumps({"card": card.name, "gib": card.total_memory / 2**30, "versions": versions}))
"""
Line = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A command that is run.

    Attributes:
        name: unique.
        words: what follows ``python``; ``{out}`` stands for the row's folder, whose JSON files are the result.
        seconds: that it takes on an H100, about; it is stopped after three times as long and half a minute.
        gib: memory of the card that it needs, in 2^30 bytes.
        needs: Python packages without which it is skipped.
        prefix: a program that runs Python, with its options.
        environment: variables that are set for it.
    """

    name: str
    words: tuple[str, ...]
    seconds: float
    gib: float = 1
    needs: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, python: str, out: object) -> list[str]:
        """Return the words of the command."""
        return [*self.prefix, python, *(word.replace("{out}", str(out)) for word in self.words)]

    def lacks(self, gib: float) -> str | None:
        """Return why the row cannot run on a card of ``gib`` GiB; ``None`` means that it can."""
        if self.prefix and shutil.which(self.prefix[0]) is None:
            return f"needs the program {self.prefix[0]}"
        if missing := [name for name in self.needs if find_spec(name) is None]:
            return f"needs {', '.join(missing)}: {sys.executable} -m pip install {' '.join(missing)}"
        return f"needs {self.gib:g} GiB, the card has {gib:.0f}" if self.gib > gib else None


# ---- the rows


def rows(gib: float) -> list[Row]:
    """Return the rows for a card of ``gib`` GiB, in the order of their worth."""
    return [*tests(), Row("kernels", ("-m", "benchmarks.kernels", "{out}"), 80, 14), *benches(gib)]


def tests() -> list[Row]:
    """Return rows of the smallest case of each kernel, the same under compute-sanitizer, and the files of tests/gpu."""
    workers = ("-n", str(min(8, os.cpu_count() or 1))) if find_spec("xdist") else ()
    pytest = ("-m", "pytest", "-m", "gpu", "-q", "-rsfE", "-p", "no:cacheprovider")
    guarded: dict[str, Any] = {"prefix": ("compute-sanitizer", "--tool=memcheck", "--error-exitcode=9")}
    guarded["environment"] = {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"
    }  # torch's own large blocks hide what is out of bounds
    smallest = "tests/gpu/test_smallest.py"
    kernels = sorted(file.parent.name for file in ROOT.glob("kernels/*/triton.py"))
    first = ["gated_attention", "paged_attention", "engine", "gated_prefill"]
    others = {file.stem.removeprefix("test_") for file in ROOT.glob("tests/gpu/test_*.py")} - {"smallest", *first}
    return [
        Row("test_smallest", (*pytest, smallest, *workers), 40),
        *(Row(f"sanitizer_{name}", (*pytest, smallest, "-k", name), 22, **guarded) for name in kernels),
        *(Row(f"test_{x}", (*pytest, f"tests/gpu/test_{x}.py", *workers), 60) for x in [*first, *sorted(others)]),
    ]


def benches(gib: float) -> Iterator[Row]:
    """Yield rows of ``ag.bench``: an 8B geometry in bfloat16, or 1B on a card of less than 72 GiB."""
    large = gib >= 72
    trained, filled = ("4096,8192", 400_000) if gib >= 130 else ("2048,4096" if large else "1024,2048", 300_000)
    common = (f"model=random:llama-{'8b' if large else '1b'}", "dtype=bfloat16", "device=cuda", "output={out}")

    def bench(name: str, seconds: float, words: str) -> Row:
        return Row(f"bench_{name}", ("-m", "ag.bench", *words.split(), *common), seconds, 20, ("omegaconf",))

    decode, prefill, long = "decode keep=[0.2] rounds=3 steps=32", "prefill rounds=3", "context=[32768,131072]"
    served = "decode keep=[0.2] rounds=2 steps=16 uneven=true"
    written = "decode policy=[rkv,h2o] keep=[0.25] schedule=steps:128 rounds=1 warmup=0 steps=512"
    yield bench("decode_uneven", 40, f"{decode} {long} uneven=true")
    yield bench("prefill_gates", 130, f"{prefill} policy=[flags] keep=[0.25] sdpa=[flash,cudnn] context=[32768,100000]")
    yield bench("decode_static", 200, f"{decode} context=[131072] uneven=true static=[cudnn,math]")
    yield bench("memory", 40, f"memory rounds=3 steps=32 policy=[random] keep=[0.25] fill=true context=[{filled}]")
    yield bench("train_step", 80, f"train rounds=3 context=[{trained}]")
    yield bench("decode_even", 40, f"{decode} {long}")
    yield bench("decode_uneven_batch_8", 45, f"{decode} context=[32768] batch=[8] uneven=true")
    yield bench("prefill_policies", 60, f"{prefill} policy=[snapkv,h2o,cake] keep=[0.25] context=[32768]")
    yield bench("prefill_kvzip", 60, f"{prefill} policy=[kvzip] keep=[0.2] context=[32768]")
    yield bench("decode_reasoning", 80, f"{written} context=[4096] batch=[8]")
    yield bench("decode_even_batch_8", 45, f"{decode} context=[32768] batch=[8]")
    yield bench("decode_batches_8k", 50, f"{served} context=[8192] batch=[1,8,32,128]")
    yield bench("decode_batches_32k", 80, f"{served} context=[32768] batch=[1,8,32]")
    hybrid = "model=random:Qwen/Qwen3.5-9B dtype=bfloat16 device=cuda output={out} policy=[h2o] keep=[0.2]"
    words = ("-m", "ag.bench", "decode", *hybrid.split(), "rounds=3", "steps=32", long)
    yield Row("bench_decode_hybrid", words, 90, 22, ("omegaconf",))


# ---- running them


def run(todo: Sequence[Row], folder: Path, here: Line, minutes: float | None = None) -> int:
    """Run rows, and record how each ends.

    Args:
        todo: the rows, in their order.
        folder: of the results.
        here: the machine: ``card``, ``gib``, ``versions``.
        minutes: time for all of them; ``None`` means that there is no limit.

    Returns:
        0 when every row with a result ended well or was skipped, 1 when one did not, 130 after Ctrl-C or SIGTERM.
    """
    end = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    folder.mkdir(parents=True, exist_ok=True)
    there = read(folder, here["card"])
    left = [row for row in todo if row.name not in there or there[row.name]["status"] != "ok"]
    left.sort(key=lambda row: row.name in there)
    print(f"{here['card']}, {here['gib']:.0f} GiB: {len(left)} of {len(todo)} rows to run; results in {folder}")
    stopped = False
    try:
        for number, row in enumerate(left, 1):
            found = attempt(row, folder / row.name, here["gib"], end - time.monotonic(), f"[{number}/{len(left)}]")
            if found["status"] != "no time":
                append(folder / LINES, here | {"row": row.name, "commit": commit(), "date": time.ctime()} | found)
                (folder / SUMMARY).write_text(summary(read(folder, here["card"]), folder))
            print(f"    {row.name}: {found['status']} after {found['seconds']:.0f} s. {found['said']}", flush=True)
    except KeyboardInterrupt:
        stopped = True
        print("stopped: the same command goes on with the row that was at work")
    results = read(folder, here["card"])
    print(f"\n{outline(results)}\n\nwith the tables that the rows wrote: {folder / SUMMARY}")
    return 130 if stopped else int(any(line["status"] not in ("ok", "skipped") for line in results.values()))


def attempt(row: Row, out: Path, gib: float, left: float, number: str) -> Line:
    """Run a row in at most ``left`` seconds; returns its status, its seconds, its result and a remark."""
    if reason := row.lacks(gib):
        return {"status": "skipped", "seconds": 0.0, "said": reason}
    if left < row.seconds:
        return {"status": "no time", "seconds": 0.0, "said": f"It takes about {row.seconds:g} s, {left:.0f} are left."}
    shown = shlex.join([*(f"{name}={x}" for name, x in row.environment.items()), *row.command("python", out)])
    print(f"{number} {row.name}, about {row.seconds:g} s: {shown}", flush=True)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    begin, limit = time.monotonic(), min(left, 3 * row.seconds + 30)
    code = process(row.command(sys.executable, out), limit, row.environment, out / LOG)
    found: Line = {"command": shown, "seconds": time.monotonic() - begin, "result": {}}
    for file in out.glob("*.json"):
        with suppress(ValueError):  # cut short, as its process was
            found["result"][file.stem] = json.loads(file.read_text())
    text = (out / LOG).read_text(errors="replace")
    said = "" if code == 0 else (text.strip().splitlines() or ["it printed nothing"])[-1]
    if code is None:
        return found | {"status": "no time" if limit == left else "timed out", "said": f"stopped after {limit:.0f} s"}
    if code < 0:
        return found | {"status": "failed", "said": f"killed by {signal.Signals(-code).name}: {said}"}
    counts = re.findall(r"^.*\d+ (?:passed|skipped|failed|error).* in .*s.*$", text, re.MULTILINE)
    if "pytest" in row.words and counts:
        reasons = dict.fromkeys(re.findall(r"^SKIPPED \[\d+\] \S+: (.*)$", text, re.MULTILINE))
        said = "; ".join([counts[-1].strip("= "), *reasons])
        if code in (0, 5) and "passed" not in counts[-1]:  # pytest ends with 5 where whole files skip
            return found | {"status": "skipped", "said": said}
    return found | {"status": "failed" if code else "ok", "said": said}


def process(words: list[str], limit: float, environment: Mapping[str, str], log: Path) -> int | None:
    """Run a process with its children and return its exit code; ``None`` means that it took more than ``limit`` s."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    given = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path, **environment}
    with open(log, "w") as to:
        into: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": to, "stderr": to, "start_new_session": True}
        child = subprocess.Popen(words, cwd=ROOT, env=given, **into)
        try:
            return child.wait(None if limit == float("inf") else limit)
        except subprocess.TimeoutExpired:
            return None
        finally:  # after Ctrl-C too
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def append(file: Path, line: Line) -> None:
    """Append a line to a file; it begins on a new line even if the last line was cut short."""
    begun = file.is_file() and not file.read_text().endswith("\n")
    with open(file, "a") as out:
        out.write("\n" * begun + json.dumps(line) + "\n")


def read(folder: Path, card: str) -> dict[str, Line]:
    """Return the newest line of each row of a card, by name; a line that was cut short does not count."""
    file, found = folder / LINES, dict[str, Line]()
    for text in file.read_text().splitlines() if file.is_file() else []:
        with suppress(ValueError):
            line = json.loads(text)
            if line["card"] == card:
                found[line["row"]] = line
    return found


def commit() -> str:
    """Return the commit of the checkout, with a ``+`` where files were changed."""
    if shutil.which("git") is None:
        return "unknown"
    command = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--dirty=+"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


# ---- the summary


def table(heads: Sequence[str], cells: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; numbers have three digits, a bar within a cell becomes a slash."""
    texts = [[f"{x:.3g}" if isinstance(x, float) else str(x).replace("|", "/") for x in row] for row in cells]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *texts])


def outline(results: Mapping[str, Line]) -> str:
    """Return a table of the rows: how each ended, after how long, and what it said."""
    cells = [(name, x["status"], f"{x['seconds']:.0f}", x["commit"], x["said"]) for name, x in results.items()]
    return table(("row", "status", "s", "commit", ""), cells)


def summary(results: Mapping[str, Line], folder: Path) -> str:
    """Return a page: the machine, the rows, the tables that they wrote, and the ends of what failed."""
    last = list(results.values())[-1]
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    parts = [f"# {last['card']}, {last['gib']:.0f} GiB", versions, outline(results)]
    for name, line in results.items():
        if line["status"] == "ok":
            parts += [f"## {name}\n\n{file.read_text().strip()}" for file in sorted((folder / name).glob("*.md"))]
        elif (log := folder / name / LOG).is_file():
            end = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL:])
            parts.append(f"## {name}: {line['said']}\n\n`{line['command']}`\n\n```\n{end}\n```")
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns what :func:`run` does, or exits with 2 where nothing can be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/gpu"), help="of the results (%(default)s)")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="rows whose names begin so")
    parser.add_argument("--minutes", type=float, help="begin no row that takes longer than what is left of them")
    given = parser.parse_args(argv)
    probed = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    if probed.returncode:
        parser.error(f"nothing can be run with {sys.executable}: {probed.stderr.strip().splitlines()[-1]}")
    here = json.loads(probed.stdout)
    every = rows(here["gib"])
    chosen = [row for row in every if row.name.startswith(tuple(given.only))]
    if not chosen:
        names = ", ".join(row.name for row in every)
        parser.error(f"--only {' '.join(given.only)}: expected the beginning of a row's name: {names}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the row at work is stopped too
    return run(chosen, given.folder.absolute(), here, given.minutes)


if __name__ == "__main__":
    sys.exit(main())

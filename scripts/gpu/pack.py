"""What a machine without network lacks, in one folder: wheels, that of SmolLM2 among them, a slice of documents."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ag.errors import UserError
from ag.model.wheels import SMOLLM2
from scripts.gpu.machine import commit

NOTE, WHEELS, MODEL, CORPUS = "pack.json", "wheels", "model", "corpus"
# what the commands and their tests import
NEEDED = (
    *("omegaconf", "peft", "lightning", "torchmetrics", "accelerate", "safetensors", "matplotlib", "rich", "jinja2"),
    *("filelock", "psutil", "pytest", "pytest-timeout", "hypothesis", "bitsandbytes", "gguf"),
)
PRESENT = ("torch", "transformers", "matplotlib", "pytest", "pip")  # and what they need, where no list is given
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 26, 24, 17)) + ("manylinux2014_x86_64", "any")
TEXT = {"train": 5_000_000, "validation": 400_000}  # bytes of JSON lines that are carried


def gather(options: argparse.Namespace, out: Path) -> str:
    """Make the folder anew and return what lies in it, in one line.

    Args:
        options: ``data``, ``present``, ``python`` and ``cuda`` of the command line.
        out: the folder.

    Raises:
        UserError: without documents, for a folder that is something else, or when a wheel cannot be had.
    """
    if options.data is None or not Path(options.data).is_dir():
        raise UserError(f"--data {options.data}: expected a folder with train.jsonl and validation.jsonl (or .gz).")
    if out.exists() and any(out.iterdir()) and not (out / NOTE).is_file():
        raise UserError(f"{out} is there and holds something else: give a folder that is new, or an older pack.")
    shutil.rmtree(out, ignore_errors=True)
    (out / WHEELS).mkdir(parents=True)
    present = _names(Path(options.present)) if options.present else closure(PRESENT, options.python)
    wanted = {name: found for name, found in closure(NEEDED, options.python).items() if name not in present}
    download([f"{name}=={version}" for name, version in sorted(wanted.items())], out / WHEELS, options.python)
    for wheel in (out / WHEELS).glob("bitsandbytes-*.whl"):
        trim(wheel, options.cuda)
    download([SMOLLM2.requirement], out / MODEL, options.python)
    for split, size in TEXT.items():
        _slice(Path(options.data), split, size, out / CORPUS)
    note = {"commit": commit(), "python": options.python, "cuda": options.cuda, "packages": wanted}
    (out / NOTE).write_text(json.dumps(note, indent=2) + "\n")
    whole, model = (_size(folder) / 1e6 for folder in (out, out / MODEL))
    return f"{out}: {whole:.0f} MB; {len(wanted)} wheels, and {SMOLLM2.requirement} ({model:.0f} MB)"


def carried(name: str) -> Path | None:
    """Return a folder or file of the pack that this machine works from (AG_PACK), or None."""
    path = Path(os.environ.get("AG_PACK") or "/nowhere") / name
    return path.absolute() if path.exists() else None


def closure(roots: Iterable[str], python: str) -> dict[str, str]:
    """Return the packages that some need, themselves included, with the versions installed here.

    Args:
        roots: names.
        python: version of the Python that they are meant for.

    Raises:
        UserError: when one of the roots is not installed here.
    """
    target = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux", "extra": ""}
    target |= {"platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
    found: dict[str, str] = {}
    todo = [canonicalize_name(name) for name in roots]
    wanted = set(todo)
    while todo:
        name = todo.pop()
        if name in found:
            continue
        try:
            package = distribution(name)
        except PackageNotFoundError:
            if name in wanted:
                raise UserError(f"{name} is not installed here: run scripts/setup.sh first.") from None
            continue  # of a platform that is not this one
        found[name] = package.version
        for line in package.requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate(target):
                todo.append(canonicalize_name(requirement.name))
    return found


def download(requirements: list[str], folder: Path, python: str) -> None:
    """Fetch wheels of exact versions for Linux on x86-64, with the user's settings of pip.

    Raises:
        UserError: with pip's reason.
    """
    if not requirements:
        return
    fixed = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    fixed += [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *fixed, "--dest", str(folder), *requirements]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if "ERROR" in line] or ["no output"]
        raise UserError(f"pip download failed ({reasons[-1]}): a connection to a package index is needed.")


def trim(wheel: Path, cuda: str) -> None:
    """Leave out of bitsandbytes' wheel the libraries of other CUDA versions and other makers.

    Raises:
        UserError: when it has none for this version.
    """
    kept = f"cuda{cuda.replace('.', '')}.so"
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if re.search(r"libbitsandbytes_\w+\.(so|dll)$", name)]
        if not any(name.endswith(kept) for name in libraries):
            have = ", ".join(sorted(re.findall(r"cuda(\d+)\.so", " ".join(libraries))))
            raise UserError(f"--cuda {cuda}: {wheel.name} has libraries for {have}.")
        gone = {name for name in libraries if not name.endswith((kept, "_cpu.so"))}
        with zipfile.ZipFile(wheel.with_suffix(".part"), "w", zipfile.ZIP_DEFLATED, compresslevel=9) as smaller:
            for name in archive.namelist():
                if name in gone:
                    continue
                content = archive.read(name)
                if name.endswith(".dist-info/RECORD"):
                    lines = content.decode().splitlines(keepends=True)
                    content = "".join(line for line in lines if line.partition(",")[0] not in gone).encode()
                smaller.writestr(name, content)
    wheel.with_suffix(".part").replace(wheel)


def _names(file: Path) -> set[str]:
    """Read a list of packages: the first word of each line, up to its version."""
    if not file.is_file():
        raise UserError(f"--present {file}: expected a file with a package a line, such as pip list writes.")
    words = (re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line.strip()) for line in file.read_text().splitlines())
    return {canonicalize_name(word[0]) for word in words if word}


def _slice(data: Path, split: str, size: int, folder: Path) -> None:
    """Copy the first documents of a split, so many bytes of them."""
    files = sorted(file for pattern in (f"{split}.jsonl*", f"{split}-*.jsonl*") for file in data.glob(pattern))
    if not files:
        raise UserError(f"--data {data}: expected {split}.jsonl, {split}.jsonl.gz or shards {split}-*.jsonl.")
    folder.mkdir(exist_ok=True)
    with gzip.open(folder / f"{split}.jsonl.gz", "wt", encoding="utf-8") as out:
        for line in _lines(files):
            size -= len(line.encode())
            if size < 0:
                return
            out.write(line)


def _lines(files: list[Path]) -> Iterator[str]:
    for file in files:
        with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else open(file, encoding="utf-8") as text:
            yield from text


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())

"""Kernels in C++, compiled once per machine."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from filelock import FileLock

from ag.files import home

HEADER = Path(__file__).with_name("native.h")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-std=c++17", "-shared", "-fPIC")
SECONDS = 300  # after which a compiler is given up

log = logging.getLogger(__name__)


@functools.cache
def function(source: Path, *arguments: type) -> ctypes._NamedFuncPointer | str:
    """Return the C function named like the folder of its source, or why there is none.

    Compiles where this machine has not done so before.

    Args:
        source: a C++ file, which may include ``native.h``.
        arguments: their ctypes types; nothing is returned.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return "there is no C++ compiler (install g++)"
    try:
        found = load(source, compiler, home() / "kernels")
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines() or [repr(error)]
        return f"{compiler} could not compile it: {said[0]}"
    found.restype = None
    found.argtypes = arguments
    return found


def load(source: Path, compiler: str, folder: Path) -> ctypes._NamedFuncPointer:
    """Compile a source into a folder, unless that was done, and load its function.

    The file's name follows the source, the header, the flags, the compiler and the processor, as the code is for this
    one.

    Raises:
        OSError: the folder cannot be written, or the library not loaded.
        subprocess.SubprocessError: the compiler failed, or took too long.
    """
    name = source.parent.name
    identity = (source.read_text(), HEADER.read_text(), *FLAGS, compiler, _processor())
    target = folder / f"{name}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}.so"
    if not target.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock")):
            if not target.is_file():
                # a warning, so that a user who waits sees it without setting up logging
                log.warning("Compiling the CPU kernel %s, once for this machine (some seconds): %s", name, target)
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    built = Path(scratch) / target.name
                    command = [compiler, *FLAGS, f"-I{HEADER.parent}", str(source), "-o", str(built)]
                    subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
                    built.replace(target)
    found: ctypes._NamedFuncPointer = getattr(ctypes.CDLL(str(target)), name)
    return found


def _processor() -> str:
    """Return what tells processors apart: the kernel's list of features where there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()} {features}"

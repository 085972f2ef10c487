"""Decoding over ragged rows in C++, compiled once per machine: as fast as memory can be read."""

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

import torch
from filelock import FileLock
from torch import Tensor

from ag.smollm2 import home

SOURCE = Path(__file__).with_name("cpu.cpp")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-std=c++17", "-shared", "-fPIC")
SECONDS = 300  # after which a compiler is given up
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

log = logging.getLogger(__name__)


def ragged_decode(q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, lengths: Tensor, scaling: float) -> Tensor:
    """Compute :func:`ag.kernels.ragged_decode.ragged_decode` on the CPU in one pass over what is held."""
    function = library()
    assert not isinstance(function, str)
    batch, heads, dim = q.shape
    rows, width = len(starts), values.shape[1]
    query = q.float().contiguous() * scaling
    out = torch.empty(batch, heads, width)
    function(
        TYPES[keys.dtype],
        query.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        starts.data_ptr(),
        lengths.data_ptr(),
        rows,
        batch * heads // rows,
        dim,
        width,
        torch.get_num_threads(),
        out.data_ptr(),
    )
    return out.to(q.dtype)


def unavailable(keys: Tensor, values: Tensor) -> str | None:
    """Return why the C++ version cannot run on such keys and values, or None."""
    if keys.device.type != "cpu":
        return f"the tensors are on {keys.device.type}"
    if keys.dtype not in TYPES or values.dtype != keys.dtype:
        return f"keys of {keys.dtype} and values of {values.dtype} are not both float32, bfloat16 or float16"
    loaded = library()
    return loaded if isinstance(loaded, str) else None


@functools.cache
def library() -> ctypes._NamedFuncPointer | str:
    """Return the compiled function, or why there is none; compiles where this machine has not done so before."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return "there is no C++ compiler (install g++)"
    try:
        return load(compiler, home() / "kernels")
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines() or [repr(error)]
        return f"{compiler} could not compile it: {said[0]}"


def load(compiler: str, folder: Path) -> ctypes._NamedFuncPointer:
    """Compile the source into a folder, unless that was done, and load it.

    The file's name follows the source, the flags, the compiler and the processor, as the code is for this one.

    Raises:
        OSError: the folder cannot be written, or the library not loaded.
        subprocess.SubprocessError: the compiler failed, or took too long.
    """
    identity = (SOURCE.read_text(), *FLAGS, compiler, _processor())
    target = folder / f"ragged_decode-{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}.so"
    if not target.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock")):
            if not target.is_file():
                log.info("Compiling %s into %s, once for this machine", SOURCE.name, target)
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    built = Path(scratch) / target.name
                    command = [compiler, *FLAGS, str(SOURCE), "-o", str(built)]
                    subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
                    built.replace(target)
    function = ctypes.CDLL(str(target)).ragged_decode
    function.restype = None
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [ctypes.c_int, *[pointer] * 5, *[size] * 4, ctypes.c_int, pointer]
    return function


def _processor() -> str:
    """Return what tells processors apart: the kernel's list of features where there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()} {features}"

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from ag.files import home
from ag.kernels.dispatch import VARIABLE

HEADER = Path(__file__).with_name("native.h")
# Without -fno-trapping-math a loop that compares floats, as every exponential does, is not vectorised.
FLAGS = ("-O3", "-march=native", "-fno-trapping-math", "-fopenmp", "-std=c++17", "-shared", "-fPIC")
SECONDS = 300  # limit of a compilation
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # their numbers in C++

log = logging.getLogger(__name__)
#: By compiler, why it did not compile a kernel. This process does not try it again.
failures: dict[str, str] = {}


@dataclass(frozen=True, eq=False)  # hashed by identity, which takes no time
class Kernel:
    """A C function, named like the folder of its source and compiled at first use.

    Attributes:
        source: a C++ file, which may include ``native.h``. The function returns nothing; its arguments are ``int64_t``
            and pointers.
    """

    source: Path

    def __call__(self, *arguments: Tensor | ctypes.Array[Any] | int | None) -> None:
        """Call the function with the addresses of tensors and arrays; None becomes a null pointer.

        Raises:
            RuntimeError: the function could not be compiled (see :meth:`unavailable`).
        """
        function = _function(self)
        if isinstance(function, str):
            raise RuntimeError(function)
        if function.argtypes is None:  # every call has arguments of these types
            function.argtypes = [ctypes.c_int64 if isinstance(x, int) else ctypes.c_void_p for x in arguments]
        function(*[x.data_ptr() if isinstance(x, Tensor) else x for x in arguments])

    def unavailable(self, device: str) -> str | None:
        """Compile the function if needed; return why it cannot run on a device. None: it can."""
        if device != "cpu":
            return f"the tensors are on {device}"
        function = _function(self)
        return function if isinstance(function, str) else None


@functools.cache
def _function(kernel: Kernel) -> ctypes._NamedFuncPointer | str:
    """Return the compiled function, or the reason why it cannot be compiled."""
    compiler = find_compiler()
    if compiler in failures:
        return failures[compiler]
    if not compiler:
        return _failed(compiler, "there is no C++ compiler", "install g++")
    if shutil.which(compiler) is None:
        return _failed(compiler, f"CXX={compiler} is no program", "install g++ and unset CXX")
    folder = home() / "kernels"
    try:
        compiled = load(kernel.source, compiler, folder)
    except subprocess.SubprocessError as error:
        status = f"it ended with {getattr(error, 'returncode', error)}"
        output = (getattr(error, "stderr", None) or "").strip() or status
        reason = f"{compiler} could not compile {kernel.source.parent.name}: {output.splitlines()[0]}"
        return _failed(compiler, reason, "install g++, or set CXX to a C++ compiler with OpenMP")
    except OSError as error:
        reason = f"a compiled kernel cannot be kept in {folder} or loaded from it: {error}"
        return _failed(compiler, reason, "set AG_HOME to a folder that can be written")
    compiled.restype = None
    return compiled


def _failed(compiler: str, reason: str, fix: str) -> str:
    """Record why a compiler makes no kernels, warn once unless ``AG_KERNELS`` is set, and return the reason."""
    failures[compiler] = reason
    if not os.environ.get(VARIABLE):
        log.warning("CPU kernels run in PyTorch (version reference), which is slower: %s; %s.", reason, fix)
    return reason


def find_compiler() -> str:
    """Return the C++ compiler in ``CXX``, or else the first one here. Empty: there is none."""
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++") or ""


def target(source: Path, compiler: str, folder: Path) -> Path:
    """Return the path of a source's library, which may not be there yet.

    Its name contains a hash of the source, the headers, the flags, the compiler and the processor.
    """
    identity = (
        source.read_text(),
        *(x.read_text() for x in sorted(HEADER.parent.glob("*.h"))),
        *FLAGS,
        compiler,
        _processor(),
    )
    return folder / f"{source.parent.name}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}.so"


def load(source: Path, compiler: str, folder: Path) -> ctypes._NamedFuncPointer:
    """Load the function of a source. The source is compiled into ``folder``, unless the library is there already.

    Raises:
        OSError: the folder cannot be written, or the library cannot be loaded.
        subprocess.SubprocessError: the compiler failed, or took too long.
    """
    name, library = source.parent.name, target(source, compiler, folder)
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(library.with_suffix(".lock")):
            if not library.is_file():
                # a warning is shown even if logging is not set up: the user must see why the command waits
                log.warning("Compiling the CPU kernel %s, once for this machine (some seconds): %s", name, library)
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    built = Path(scratch) / library.name
                    command = [compiler, *FLAGS, f"-I{HEADER.parent}", str(source), "-o", str(built)]
                    subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
                    built.replace(library)
    compiled: ctypes._NamedFuncPointer = getattr(ctypes.CDLL(str(library)), name)
    return compiled


def _processor() -> str:
    """Return an identity of the processor, with its list of features if Linux gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()} {features}"

"""Compilation of kernels in C++: once for each machine, and the message if it fails."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ag.kernels import native
from ag.kernels.kv_append import cpu as kv_append_cpu
from ag.kernels.kv_append import kv_append
from ag.kernels.paged_attention import cpu
from tests.support.paged import pages_of

REAL = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(REAL is None, reason="there is no C++ compiler")


@needs_compiler
def test_loading_leaves_subnormal_numbers_alone():
    """Libraries linked with -ffast-math flush them to zero in the whole process."""
    assert cpu.KERNEL.unavailable("cpu") is None
    assert float(torch.tensor(1e-40) * 0.5) > 0


def test_a_compiler_that_fails_is_named_with_its_message(fresh, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'unknown option -fopenmp' >&2\nexit 1\n")
    compiler.chmod(0o755)
    fresh.setenv("CXX", str(compiler))
    fresh.setenv("AG_HOME", str(tmp_path / "home"))
    assert cpu.KERNEL.unavailable("cpu") == f"{compiler} could not compile paged_attention: unknown option -fopenmp"
    assert not list((tmp_path / "home").rglob("*.so"))


@pytest.mark.parametrize("forced", [None, "reference"])
@pytest.mark.parametrize("broken", ["fails", "is missing", "none", "folder"])
def test_one_line_says_which_version_runs_why_and_what_to_install(fresh, tmp_path, caplog, broken, forced):
    """Whichever kernel comes first; a compiler that failed is not run again.

    A version that is asked for needs no line, and no compiler.
    """
    compiler, home = tmp_path / "c++", tmp_path / "home"
    fresh.setenv("AG_HOME", str(home))
    fresh.setenv("CXX", str(compiler))
    if broken == "none":
        fresh.delenv("CXX")
        fresh.setattr(native.shutil, "which", lambda name: None)
    elif broken != "is missing":
        compiler.write_text(f"#!/bin/sh\necho run >> {tmp_path / 'log'}\nexit 3\n")
        compiler.chmod(0o755)
    if broken == "folder":
        home.write_text("a file")
    if forced:
        fresh.setenv("AG_KERNELS", forced)
    why, fix = {
        "fails": (f"{compiler} could not compile kv_append: it ended with 3", "install g++, or set CXX"),
        "is missing": (f"CXX={compiler} is no program", "install g++ and unset CXX"),
        "none": ("there is no C++ compiler", "install g++"),
        "folder": (f"a compiled kernel cannot be kept in {home / 'kernels'}", "set AG_HOME"),
    }[broken]
    pages, k = pages_of([0, 0]), torch.zeros(1, 2, 1, 4)
    kv_append(pages, k, k, torch.zeros(1, 1, dtype=torch.long))
    assert (tmp_path / "log").exists() == (broken == "fails" and forced is None)
    reasons = {kernel.unavailable("cpu") for kernel in (kv_append_cpu.KERNEL, cpu.KERNEL)}
    assert len(reasons) == 1 and reasons.pop().startswith(why)
    lines = [x.getMessage() for x in caplog.records if x.levelname == "WARNING" and "Compiling" not in x.getMessage()]
    if forced:
        assert lines == []
    else:
        [line] = lines
        assert line.startswith(f"CPU kernels run in PyTorch (version reference), which is slower: {why}")
        assert f"; {fix}" in line
    if broken == "fails":
        assert (tmp_path / "log").read_text() == "run\n" and caplog.text.count("Compiling") == 1


@needs_compiler
def test_it_is_compiled_once_for_each_state_of_its_sources(tmp_path, monkeypatch):
    """Two at once compile once, and a third finds what they made; a change of the source or the header counts."""
    log, compiler, made = tmp_path / "log", tmp_path / "c++", tmp_path / "made"
    compiler.write_text(f'#!/bin/sh\necho run >> {log}\nexec {REAL} "$@"\n')
    compiler.chmod(0o755)
    source, header = tmp_path / "answer" / "cpu.cpp", tmp_path / "native.h"
    source.parent.mkdir()
    header.write_text("#define ANSWER 41\n")
    source.write_text('#include "native.h"\nextern "C" int answer() { return ANSWER; }\n')
    monkeypatch.setattr(native, "HEADER", header)
    with ThreadPoolExecutor() as pool:
        list(pool.map(native.load, [source] * 2, [str(compiler)] * 2, [made] * 2))
    assert native.load(source, str(compiler), made)() == 41
    assert log.read_text() == "run\n"
    header.write_text("#define ANSWER 42\n")
    assert native.load(source, str(compiler), made)() == 42
    source.write_text('extern "C" int answer() { return 43; }\n')
    assert native.load(source, str(compiler), made)() == 43
    assert log.read_text() == "run\n" * 3
    assert len(list(made.glob("answer-*.so"))) == 3

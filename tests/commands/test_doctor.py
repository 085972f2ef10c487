"""What ``ag.doctor`` says of machines on which each part in turn is not well."""

import os
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from ag import doctor
from ag.commands.doctor import DoctorConfig
from ag.kernels import native
from tests.support import ROOT
from tests.support.refused import names

QUIET = DoctorConfig(hub=False, compile=False)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder of this library."""
    monkeypatch.setenv("AG_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("AG_KERNELS", raising=False)
    return tmp_path / "home"


def test_every_compiled_kernel_is_looked_at():
    sources = {path.parent.name for path in (ROOT / "kernels").glob("*/cpu.cpp")}
    assert set(doctor.COMPILED) == sources
    assert all(isinstance(import_module(f"ag.kernels.{name}.cpu").KERNEL, native.Kernel) for name in sources)


def test_a_line_for_each_part_and_a_code_for_the_sum(monkeypatch, capsys):
    findings = [doctor.Finding("a", "here"), doctor.Finding("b", "not here", "bring it")]
    for kept, code, last in ((1, 0, "all is well"), (2, 1, "1 of 2 parts to look at")):
        monkeypatch.setattr(doctor, "PARTS", [lambda config, found=found: found for found in findings[:kept]])
        assert doctor.main([]) == code
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["ok", "a", "here"] and lines[-1] == last
    assert lines[1].split() == ["LOOK", "b", "not", "here"] and lines[2].split() == ["->", "bring", "it"]


def test_a_package_of_a_wrong_version_or_missing_is_named_with_the_command(monkeypatch):
    needed = ["torch>=99,<100", "no-such-package>=1", "rich>=13", 'fastapi>=999; extra == "serve"']
    monkeypatch.setattr(doctor, "requires", lambda name: needed)
    found = doctor.packages(QUIET)
    assert found.text.endswith(f"not as needed: torch {version('torch')}, no-such-package missing")
    assert found.fix == "pip install 'torch<100,>=99' 'no-such-package>=1'"
    monkeypatch.setattr(doctor, "requires", lambda name: ["rich>=13"])
    assert doctor.packages(QUIET).fix is None


def test_a_checkout_that_is_not_installed(monkeypatch):
    def requires(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "requires", requires)
    found = doctor.packages(QUIET)
    names(found.text, "ag", "not installed")
    names(found.fix, "pip install -e")


@pytest.mark.parametrize(
    ("features", "threads", "named"),
    [({"avx2", "avx512f"}, 1, None), (set(), 1, None), ({"sse2"}, 1, "AVX2"), ({"asimd"}, 10_000, "OMP_NUM_THREADS=")],
)
def test_the_processor(features, threads, named, monkeypatch):
    monkeypatch.setattr(doctor, "cpu_features", lambda: features)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = doctor.processor(QUIET)
    assert (found.fix is None) if named is None else named in found.fix
    assert all((name in found.text) == (name in features) for name in doctor.FEATURES if name != "bf16")


def test_memory_below_what_a_model_needs(monkeypatch):
    monkeypatch.setattr(doctor, "main_memory", lambda: 4 << 30)
    assert doctor.memory(QUIET).text.startswith("4.0 GiB") and "bfloat16" in doctor.memory(QUIET).fix
    monkeypatch.setattr(doctor, "main_memory", lambda: 8 << 30)
    assert doctor.memory(QUIET).fix is None


def test_a_driver_without_a_device_is_not_well_and_no_driver_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for driver in (False, True):
        monkeypatch.setattr(doctor, "has_driver", lambda driver=driver: driver)
        assert (doctor.gpus(QUIET).fix is None) != driver


def test_kernels_without_a_compiler_and_with_a_forced_version(cache, monkeypatch):
    monkeypatch.setenv("CXX", str(cache / "no-compiler"))
    monkeypatch.setattr(native, "failures", {})
    native._function.cache_clear()
    try:
        found = doctor.kernels(DoctorConfig())
    finally:
        native._function.cache_clear()
    assert f"CXX={cache / 'no-compiler'}" in found.text and "g++" in found.fix
    monkeypatch.setenv("AG_KERNELS", "reference")
    assert "AG_KERNELS=reference" in doctor.kernels(DoctorConfig()).text


def test_kernels_that_are_looked_for_and_not_compiled(cache):
    """Those of former sources, or of another compiler or processor, do not count."""
    folder, compiler = cache / "kernels", native.find_compiler()
    folder.mkdir(parents=True)
    for name in doctor.COMPILED:
        (folder / f"{name}-0.so").touch()
    assert doctor.kernels(QUIET).text.startswith(f"0 of {len(doctor.COMPILED)} in ")
    kernels = [import_module(f"ag.kernels.{name}.cpu").KERNEL for name in doctor.COMPILED]
    first, *others = (native.target(kernel.source, compiler, folder) for kernel in kernels)
    for library in others:
        library.touch()
    assert doctor.kernels(QUIET).fix.startswith(f"{doctor.COMPILED[0]} will be compiled")
    first.touch()
    assert doctor.kernels(QUIET).fix is None


def test_the_cache_folder_its_room_and_its_models(cache, monkeypatch):
    (cache / "smollm2").mkdir(parents=True)
    usage = type(doctor.shutil.disk_usage(cache))
    for free, fix in ((100, None), (1, "AG_HOME")):
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path, free=free: usage(0, 0, free << 30))
        found = doctor.folder(QUIET)
        assert f"{free} GiB free; models: smollm2" in found.text
        assert (found.fix is None) if fix is None else fix in found.fix
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != cache)
    assert "cannot be written" in doctor.folder(QUIET).text


def test_a_cache_folder_within_a_file(cache, monkeypatch):
    cache.touch()
    monkeypatch.setenv("AG_HOME", str(cache / "inner"))
    found = doctor.folder(QUIET)
    assert "cannot be written" in found.text and "AG_HOME" in found.fix


def test_the_hub(monkeypatch):
    from huggingface_hub import constants

    class Session:
        def __init__(self, answer):
            self.answer = answer

        def head(self, url, timeout):
            if isinstance(self.answer, Exception):
                raise self.answer
            return type("Answer", (), {"status_code": self.answer})

    assert doctor.hub(DoctorConfig()).text.startswith("off by HF_HUB_OFFLINE")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert doctor.hub(QUIET).text.startswith("not asked")
    for answer, well in ((200, True), (404, True), (503, False), (OSError("no\nroute"), False)):
        monkeypatch.setattr("huggingface_hub.get_session", lambda answer=answer: Session(answer))
        found = doctor.hub(DoctorConfig())
        assert (found.fix is None) == well
        assert well or str(getattr(answer, "args", [answer])[0]).split()[-1] in found.text

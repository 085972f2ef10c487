"""Build a source distribution, a wheel from it, and try each where no checkout is: python scripts/package.py [OUT].

Packages are installed without their dependencies, which the running Python has already. OUT keeps what was built.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
TRIED = """\
import sys
from pathlib import Path

import ag
import ag.data
import ag.kernels.dispatch

for module in (ag, ag.data, ag.kernels.dispatch):
    assert Path(module.__file__).is_relative_to(sys.argv[1]), f"not the installed one: {module.__file__}"
assert ag.__version__ == sys.argv[2], ag.__version__
gates, cache = ag.GateConfig(), ag.EvictionCache
assert gates.boundary == -2.0 and ag.policy("h2o+vatp@pyramid", budget=0.25).budget == 0.25
"""
COMMANDS = (
    *("--version", "fit --recipes", "fit recipe=quickstart --print", "compare --recipes", "generate --help"),
    "plan recipe=piqa_sft tflops=70",
)


def build(out: Path) -> list[Path]:
    """Return the two packages, built into a folder; the wheel is made from the source distribution."""
    code = f"import setuptools.build_meta as build; build.build_sdist({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (source,) = out.glob("ag-*.tar.gz")
    wheel = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(source)]
    subprocess.run(wheel, cwd=out, check=True)
    return [source, *out.glob("ag-*.whl")]


def check(package: Path, version: str) -> None:
    """Install a package into a new folder, import it from there, and run commands.

    Raises:
        CalledProcessError: when something of that fails; it has said why.
    """
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary).resolve() / "installed"
        install = ["install", "--no-deps", "--no-build-isolation", "--target", str(place), str(package)]
        subprocess.run([*PIP, *install], cwd=temporary, check=True)
        environment = os.environ | {"PYTHONPATH": str(place)}
        python = [sys.executable, "-c", TRIED, str(place), version]
        subprocess.run(python, cwd=temporary, env=environment, check=True)
        for words in COMMANDS:
            command = [str(place / "bin" / "ag"), *words.split()]
            subprocess.run(command, cwd=temporary, env=environment, check=True, stdout=subprocess.DEVNULL)
    print(f"{package.name}: {package.stat().st_size / 1e6:.1f} MB, imports and {len(COMMANDS)} commands")


def main(out: Path) -> None:
    """Build and try both."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for package in build(out):
        check(package, version)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        main(Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))

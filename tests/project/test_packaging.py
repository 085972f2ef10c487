"""What is installed: our folders inside `ag`, nothing else, and pins that fit the declared bounds."""

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import ag
from ag.__main__ import COMMANDS
from ag.__main__ import main as command
from tests.support import ROOT
from tests.support.warm import started

FOLDERS = ("data", "callbacks", "kernels", "recipes")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DEPENDENCIES = [Requirement(line) for line in PROJECT["project"]["dependencies"]]
EXTRAS = PROJECT["project"]["optional-dependencies"]
DEVELOPMENT = [Requirement(line) for name in ("dev", "docs", "serve") for line in EXTRAS[name]]
PINS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]


def python_from_root(code: str, python: str = sys.executable) -> str:
    done = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def packages_on_disk() -> set[str]:
    """Every folder below `ag`, its links followed, that holds a module, a recipe or shipped gates."""
    found = set()
    for folder, below, files in os.walk(ROOT / "ag", followlinks=True):
        below[:] = [name for name in below if name != "__pycache__"]
        if any(name.endswith((".py", ".yaml", ".safetensors")) for name in files):
            found.add(".".join(Path(folder).relative_to(ROOT).parts))
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the tracked and new files, not from what an old build left behind."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for entry in ("pyproject.toml", "README.md", "ag", *FOLDERS):
        if (ROOT / entry).exists():
            subprocess.run(["cp", "-a", str(ROOT / entry), str(source)], check=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(out), str(source)], check=True)
    (built,) = out.glob("ag-*.whl")
    return built


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> list[str]:
    """The files of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.mark.parametrize("folder", ["kernels", "recipes"])
def test_folder_stays_a_namespace(folder: str) -> None:
    """A regular package `kernels` in the working directory shadows Hugging Face's: transformers breaks."""
    assert not (ROOT / folder / "__init__.py").exists()


def test_transformers_imports_from_the_repository_root() -> None:
    code = "import transformers, importlib.util as u; s = u.find_spec('kernels'); print(s and s.origin)"
    origin = python_from_root(code)
    assert origin == "None" or not Path(origin).is_relative_to(ROOT / "kernels")


@pytest.mark.parametrize("folder", FOLDERS)
def test_link_is_relative_and_resolves(folder: str) -> None:
    link = ROOT / "ag" / folder
    assert link.is_symlink() and str(link.readlink()) == f"../{folder}"
    assert link.resolve() == ROOT / folder


def test_modules_exist_once() -> None:
    """The same object under `ag.data`, whatever the working directory; ruff bans the top-level names."""
    code = "import ag.data, ag.callbacks, ag.kernels.gated_attention as k; print(ag.data.__name__, k.__name__)"
    assert python_from_root(code, started()) == "ag.data ag.kernels.gated_attention"
    banned = PROJECT["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert set(banned) == {"kernels", "data", "callbacks"}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution, unpacked."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("sdist")
    ignore = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "runs", "wandb", "build", "dist")
    shutil.copytree(ROOT, source / "ag", symlinks=True, ignore=ignore)
    for name in (".ci", ".github", ".gitignore", ".pre-commit-config.yaml"):
        (source / "ag" / name).symlink_to(ROOT / name)
    code = f"import setuptools.build_meta as build; build.build_sdist({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source / "ag", check=True, capture_output=True)
    (archive,) = out.glob("ag-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(out, filter="data")
    return out / archive.name.removesuffix(".tar.gz")


@pytest.mark.slow
def test_sdist_holds_what_tests_read_and_the_links(sdist: Path) -> None:
    for folder in FOLDERS:
        assert (sdist / "ag" / folder).readlink() == Path("..", folder)
    for folder in ("ag", "data", "kernels", "recipes", "tests", "scripts", "benchmarks", "docs", ".ci", ".github"):
        ours = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*") if path.is_file()}
        ours = {name for name in ours if "__pycache__" not in name and not name.endswith(".pyc")}
        theirs = {str(path.relative_to(sdist)) for path in (sdist / folder).rglob("*")}
        assert ours - theirs == set()
    for name in (
        "CHANGELOG.md",
        "CODE_OF_CONDUCT.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "constraints.txt",
        "LICENSE",
        "MANIFEST.in",
        "mkdocs.yml",
        "noxfile.py",
        ".pre-commit-config.yaml",
    ):
        assert (sdist / name).read_bytes() == (ROOT / name).read_bytes()


def test_the_command_lists_its_commands_without_torch() -> None:
    code = "import sys, ag.__main__ as a; a.main([]); print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    *lines, loaded = python_from_root(code).splitlines()
    assert loaded == "[]" and {line.split()[0] for line in lines[2:]} == set(COMMANDS)
    for name in COMMANDS:
        assert any((ROOT / "ag" / end).is_file() for end in (f"{name}.py", f"{name}/__main__.py"))
    module, function = PROJECT["project"]["scripts"]["ag"].split(":")
    assert getattr(importlib.import_module(module), function) is command


def test_the_command_is_the_module(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ag"])
    for name, words in (("models", ["--help"]), ("compare", ["recipe=nowhere"])):
        with pytest.raises(SystemExit) as ours:
            command([name, *words])
        mine = capsys.readouterr()
        done = subprocess.run([sys.executable, "-m", f"ag.{name}", *words], capture_output=True, text=True, cwd=ROOT)
        assert (ours.value.code or 0, mine.out, mine.err) == (done.returncode, done.stdout, done.stderr)
    assert command(["fti"]) == 2 and "fit?" in capsys.readouterr().err
    assert command(["--version"]) == 0 and capsys.readouterr().out == f"ag {PROJECT['project']['version']}\n"
    assert ag.__version__ == PROJECT["project"]["version"]


def test_every_folder_is_in_the_package_list() -> None:
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages_on_disk() | {"ag.kernels"}


def test_no_packaged_file_mentions_tests() -> None:
    """What only a checkout has is no part of the library."""
    files = [path for folder in ("ag", *FOLDERS) for path in (ROOT / folder).rglob("*") if path.suffix != ".md"]
    code = [path for path in files if path.is_file() and path.suffix in (".py", ".yaml", ".h", ".cpp", ".html", ".js")]
    assert len(code) > 150
    assert [path for path in code if re.search(r"\btests[/.]|pytest|scripts\.gpu\.\w+ import", path.read_text())] == []


@pytest.mark.slow
def test_wheel_holds_our_folders_below_ag_only(wheel_names: list[str]) -> None:
    assert {name.split("/")[0] for name in wheel_names} == {"ag", f"ag-{PROJECT['project']['version']}.dist-info"}
    expected = {f"{package.replace('.', '/')}/" for package in packages_on_disk()}
    assert expected <= {f"{name.rpartition('/')[0]}/" for name in wheel_names}
    for name in (
        "ag/py.typed",
        "ag/data/__init__.py",
        "ag/kernels/gated_attention/reference.py",
        "ag/evaluate/comparison/page_files/page.html",
    ):
        assert name in wheel_names
    shipped = [path for path in (ROOT / "recipes").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.suffix for path in shipped} >= {".yaml", ".safetensors"}
    assert {f"ag/recipes/{path.relative_to(ROOT / 'recipes')}" for path in shipped} <= set(wheel_names)
    assert not [name for name in wheel_names if "__pycache__" in name]


@pytest.mark.slow
def test_an_installed_wheel_works_elsewhere(wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("package", ROOT / "scripts" / "package.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.check(wheel, PROJECT["project"]["version"])
    assert "5 commands" in capsys.readouterr().out
    with pytest.raises(subprocess.CalledProcessError):
        script.check(wheel, "0.0.0")


def test_malicious_lightning_releases_are_excluded() -> None:
    (lightning,) = (d for d in DEPENDENCIES if d.name == "lightning")
    assert not lightning.specifier.contains("2.6.2") and not lightning.specifier.contains("2.6.3")
    assert lightning.specifier.contains("2.6.4")


def test_pins_satisfy_the_bounds() -> None:
    pins = {}
    for pin in PINS:
        assert re.fullmatch(r"==[^,*+]+", str(pin.specifier)), f"{pin}: one exact public version"
        assert pin.url is None
        pins[canonicalize_name(pin.name)] = Version(str(pin.specifier)[2:])
    assert len(pins) == len(PINS)
    assert "triton" not in pins  # CUDA builds of torch ask for a version of their own
    for dependency in (d for d in (*DEPENDENCIES, *DEVELOPMENT) if d.name not in ("triton", "ag")):
        assert dependency.specifier.contains(pins[canonicalize_name(dependency.name)]), dependency


def test_flash_attention_and_triton_are_never_required() -> None:
    assert [Requirement(d).name for d in (*EXTRAS["flash"], *EXTRAS["triton"])] == ["flash-attn", "triton"]
    assert not {"flash-attn", "triton"} & {d.name for d in DEPENDENCIES}
    assert "flash-attn" not in {d.name for d in (*DEVELOPMENT, *PINS)}


def test_setup_refuses_an_old_python(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "setup.sh").write_text((ROOT / "scripts" / "setup.sh").read_text())
    old = tmp_path / "python-old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = subprocess.run(
        ["bash", "scripts/setup.sh"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(old)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == f"Python 3.11 or newer was not found ({old}): install it, or set PYTHON to its path\n"
    assert not (tmp_path / ".venv").exists()

"""What is installed: our folders inside `ag`, nothing else, and pins that fit the declared bounds."""

import importlib
import os
import re
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
from scripts import package
from tests.support import ROOT

FOLDERS = ("data", "callbacks", "kernels", "recipes")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DEPENDENCIES = [Requirement(line) for line in PROJECT["project"]["dependencies"]]
EXTRAS = PROJECT["project"]["optional-dependencies"]
DEVELOPMENT = [Requirement(line) for name in ("dev", "docs", "serve") for line in EXTRAS[name]]
PINS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]


def packages_on_disk():
    """Every folder below `ag`, its links followed, that holds a module, a recipe, configurations or shipped gates."""
    found = set()
    for folder, below, files in os.walk(ROOT / "ag", followlinks=True):
        below[:] = [name for name in below if name != "__pycache__"]
        parts = Path(folder).relative_to(ROOT).parts
        if any(name.endswith(".safetensors") for name in files):  # names of gates have points
            found.add(".".join(parts[:-1]))
        elif any(name.endswith((".py", ".yaml", ".json")) for name in files):
            found.add(".".join(parts))
    return found


def test_links_folders_and_the_package_list():
    """A regular package `kernels` in the working directory shadows Hugging Face's: transformers breaks."""
    for folder in FOLDERS:
        link = ROOT / "ag" / folder
        assert link.is_symlink() and str(link.readlink()) == f"../{folder}" and link.resolve() == ROOT / folder
    assert not any((ROOT / folder / "__init__.py").exists() for folder in ("kernels", "recipes"))
    assert set(PROJECT["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]) == set(FOLDERS) - {"recipes"}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages_on_disk() | {"ag.kernels"}


def test_no_packaged_file_mentions_tests():
    """What only a checkout has is no part of the library."""
    files = [path for folder in ("ag", *FOLDERS) for path in (ROOT / folder).rglob("*") if path.is_file()]
    code = [path for path in files if path.suffix in (".py", ".yaml", ".h", ".cpp", ".html", ".js")]
    assert len(code) > 150
    assert [path for path in code if re.search(r"\btests[/.]|pytest|scripts\.gpu\.\w+ import", path.read_text())] == []


def test_the_command_is_the_module(capsys, monkeypatch):
    assert command([]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]} == set(COMMANDS)
    assert all(any((ROOT / "ag" / end).is_file() for end in (f"{x}.py", f"{x}/__main__.py")) for x in COMMANDS)
    module, function = PROJECT["project"]["scripts"]["ag"].split(":")
    assert getattr(importlib.import_module(module), function) is command
    monkeypatch.setattr(sys, "argv", ["ag"])
    for name, words, code, said in (
        ("models", ["--help"], None, "python -m ag.models "),
        ("compare", ["recipe=nowhere"], 2, "ag.compare: error: "),
    ):
        with pytest.raises(SystemExit) as ours:
            command([name, *words])
        out, err = capsys.readouterr()
        assert (ours.value.code or None) == code and (out + err).startswith(said)
    assert command(["fti"]) == 2 and "fit?" in capsys.readouterr().err
    assert command(["--version"]) == 0 and capsys.readouterr().out == f"ag {PROJECT['project']['version']}\n"
    assert ag.__version__ == PROJECT["project"]["version"]


@pytest.mark.slow
@pytest.mark.nightly
def test_both_packages_hold_what_they_should_and_work_elsewhere(tmp_path, capsys):
    """A source distribution with what tests read, and from it a wheel with our folders below `ag` only."""
    version = PROJECT["project"]["version"]
    source, wheel = package.build(tmp_path)
    with tarfile.open(source) as packed:
        theirs = {name.partition("/")[2] for name in packed.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert set(tracked) <= theirs
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {"ag", f"ag-{version}.dist-info"}
    folders = {f"{x.replace('.', '/')}/" for x in packages_on_disk() - {"ag.recipes.gates"}}
    assert folders <= {f"{x.rpartition('/')[0]}/" for x in names}
    shipped = [path for path in (ROOT / "recipes").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {"ag/py.typed", *(f"ag/recipes/{path.relative_to(ROOT / 'recipes')}" for path in shipped)} <= set(names)
    package.check(wheel, version)
    assert "6 commands" in capsys.readouterr().out


def test_malicious_lightning_releases_are_excluded():
    (lightning,) = (d for d in DEPENDENCIES if d.name == "lightning")
    assert not lightning.specifier.contains("2.6.2") and not lightning.specifier.contains("2.6.3")
    assert lightning.specifier.contains("2.6.4")


def test_pins_satisfy_the_bounds():
    pins = {}
    for pin in PINS:
        assert re.fullmatch(r"==[^,*+]+", str(pin.specifier)), f"{pin}: one exact public version"
        pins[canonicalize_name(pin.name)] = Version(str(pin.specifier)[2:])
    assert len(pins) == len(PINS)
    assert not {"triton", "flash-attn"} & {*pins}  # CUDA builds of torch ask for a Triton of their own
    for dependency in (d for d in (*DEPENDENCIES, *DEVELOPMENT) if d.name not in ("triton", "ag")):
        assert dependency.specifier.contains(pins[canonicalize_name(dependency.name)]), dependency

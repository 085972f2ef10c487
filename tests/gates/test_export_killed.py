"""Neither a failure nor a kill while an export is written leaves half a folder."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from safetensors.torch import load_file

from ag.gates import export
from ag.gates.export import ExportError
from ag.gates.gate import AttentionGates
from tests.support import ROOT
from tests.support.exports import MODEL, assert_same, hidden, make_adapter, make_export, make_gates, snapshot
from tests.support.refused import refuses
from tests.support.warm import started


class Trap:
    """Counts the operations that touch the disk and strikes at the n-th."""

    def __init__(self, at: int, strike: Callable[[], None]) -> None:
        self.at, self.strike, self.seen, self.names = at, strike, 0, list[str]()

    def wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def trapped(*args: Any, **kwargs: Any) -> Any:
            self.seen += 1
            self.names.append(name)
            if self.seen == self.at:
                if name == "write":
                    original(args[0], args[1][: len(args[1]) // 2])
                self.strike()
            return original(*args, **kwargs)

        return trapped

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for owner, attribute, name in (
            (os, "fsync", "fsync"),
            (os, "rename", "rename"),
            (Path, "write_bytes", "write"),
            (Path, "mkdir", "mkdir"),
            (sys.modules["peft.peft_model"], "safe_save_file", "adapter"),
        ):
            monkeypatch.setattr(owner, attribute, self.wrap(name, getattr(owner, attribute)))


def no_space() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
@pytest.mark.parametrize("replaces", [True, False])
def test_every_failing_operation_leaves_the_earlier_export(tmp_path: Path, replaces: bool) -> None:
    folder = tmp_path / "e"
    struck, operation = list[str](), 0
    while True:
        operation += 1
        shutil.rmtree(folder, ignore_errors=True)
        if replaces:
            make_export(folder, seed=1)
        before = snapshot(folder)
        trap = Trap(operation, no_space)
        with pytest.MonkeyPatch.context() as patch:
            trap.install(patch)
            try:
                make_export(folder, seed=2)
                break
            except ExportError as error:
                assert re.search(r"could not be written \(.*No space left.*expected a disk with room", str(error))
        struck.append(trap.names[operation - 1])
        renamed = trap.names[: operation - 1].count("rename") == (2 if replaces else 1)
        if renamed:  # only the flush of the new name failed: the new export is whole
            assert_same(AttentionGates.from_pretrained(folder), make_gates(2))
        else:
            assert snapshot(folder) == before and folder.exists() == replaces
            assert hidden(folder) == []
        make_export(folder, seed=3)
        assert_same(AttentionGates.from_pretrained(folder), make_gates(3))
        assert hidden(folder) == []
    counts = {name: struck.count(name) for name in set(struck)}
    assert counts["write"] == 4 and counts["adapter"] == 1 and counts["mkdir"] >= 2
    assert counts["rename"] == (2 if replaces else 1) and counts["fsync"] == 8  # 5 files, 2 folders, the parent


def test_an_interrupt_between_the_renames_restores_the_earlier_export(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    folder = make_export(tmp_path / "e", seed=1)
    before = snapshot(folder)
    with pytest.MonkeyPatch.context() as patch:
        Trap(1, lambda: None).install(patch)
        trap = Trap(2, interrupt)
        patch.setattr(os, "rename", trap.wrap("rename", os.rename))
        with pytest.raises(KeyboardInterrupt):
            make_export(folder, seed=2)
    assert snapshot(folder) == before and hidden(folder) == []


def test_an_export_set_aside_by_a_kill_survives_a_failing_one(tmp_path: Path) -> None:
    folder = make_export(tmp_path / "e", seed=1)
    before = snapshot(folder)
    folder.rename(tmp_path / ".e.ag-old")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_bytes", lambda *_: no_space())
        with pytest.raises(ExportError, match="No space left"):
            make_export(folder, seed=2)
    assert snapshot(folder) == before and hidden(folder) == []


def run_here(call: str, *prefix: str) -> str:
    """Run a function of this file in a process of its own and return what it prints.

    A prefix starts a new Python: a fork of a warm one is no child of it.
    """
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.gates import test_export_killed; {call}"
    done = subprocess.run(
        [*prefix, sys.executable if prefix else started(), "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def write_version(folder: Path, number: int, gates: AttentionGates, adapter: PeftModel) -> None:
    """Export a version whose every part tells its number, so that a mixture would show."""
    for parameter in (*gates.parameters(), *(p for n, p in adapter.named_parameters() if "lora_" in n)):
        parameter.data.fill_(number)
    export.save(folder, gates, base_model=f"org/{number}", adapter=adapter, metrics={"number": number})


def version_of(folder: Path) -> int:
    """Return the number of a version after checking that all of the folder is of that version."""
    info = export.read_info(folder)
    number = int(info["metrics"]["number"])
    assert info["base_model"]["name"] == f"org/{number}"
    values = [*AttentionGates.from_pretrained(folder, MODEL).parameters()]
    assert export.adapter_path(folder) == folder / "adapter"
    values += load_file(folder / "adapter" / "adapter_model.safetensors").values()
    assert all((value == number).all() for value in values)
    assert f"`org/{number}`" in (folder / "README.md").read_text()
    return number


def child(action: Callable[[], None], kill_after: float | None = None) -> bool:
    """Fork, run, and return whether the child ended by itself."""
    pid = os.fork()
    if pid == 0:
        action()
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    return os.WIFEXITED(os.waitpid(pid, 0)[1])


def look_after_a_kill(folder: Path) -> tuple[bool, bool]:
    """Return (a write was under way, the export's name was free); raise when what is there is not whole."""
    new, old = (folder.with_name(f".{folder.name}.ag-{role}") for role in ("new", "old"))
    under_way = new.exists() or old.exists()
    if folder.exists():
        version_of(folder)
        return under_way, False
    with refuses(ExportError, ".e.ag-old"):
        AttentionGates.from_pretrained(folder)
    version_of(old)
    return under_way, True


def kill_at_every_operation(path: str) -> None:
    folder, gates, adapter = Path(path), make_gates(), make_adapter()
    looks, operation, finished = [], 0, False
    while not finished:
        operation += 1
        write_version(folder, 1, gates, adapter)
        assert hidden(folder) == []

        def write_and_die(at: int = operation) -> None:
            Trap(at, lambda: os.kill(os.getpid(), signal.SIGKILL)).install(pytest.MonkeyPatch())
            write_version(folder, 2, gates, adapter)

        finished = child(write_and_die)
        looks.append((*look_after_a_kill(folder), version_of(folder) if folder.exists() else None))
    print(json.dumps(looks))


@pytest.mark.slow
def test_a_kill_at_every_operation_never_leaves_half_an_export(tmp_path: Path) -> None:
    looks = json.loads(run_here(f"test_export_killed.kill_at_every_operation({str(tmp_path / 'e')!r})"))
    versions = [version for _, _, version in looks]
    assert versions.count(None) == 1  # between the two renames
    gap = versions.index(None)
    assert versions == [1] * gap + [None] + [2] * (len(versions) - gap - 1)
    assert len(looks) > 15 and looks[-1] == [False, False, 2]

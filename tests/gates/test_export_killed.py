"""Neither a failure nor a kill while an export is written leaves half a folder."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ag.gates.export import ExportError
from ag.gates.gate import AttentionGates
from tests.support import ROOT
from tests.support.exports import assert_same, hidden, make_export, make_gates, snapshot
from tests.support.refused import refuses


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
def test_every_failing_operation_leaves_the_earlier_export(tmp_path: Path) -> None:
    """The first and the last operation of each kind."""
    folder = make_export(tmp_path / "e", seed=1)
    before = snapshot(folder)

    def struck(at: int) -> list[str]:
        trap = Trap(at, no_space)
        with pytest.MonkeyPatch.context() as patch:
            trap.install(patch)
            make_export(folder, seed=2)
        return trap.names

    names = struck(0)
    counts = {name: names.count(name) for name in names}
    assert counts["write"] == 4 and counts["adapter"] == 1 and counts["mkdir"] >= 2
    assert counts["rename"] == 2 and counts["fsync"] == 8  # 5 files, 2 folders, the parent
    firsts = {names.index(name) for name in counts} | {len(names) - 1 - names[::-1].index(name) for name in counts}
    for place in sorted(firsts):
        make_export(folder, seed=1)
        with refuses(ExportError, "could not be written", "No space left", "expected a disk with room"):
            struck(place + 1)
        if names[:place].count("rename") == 2:  # only the flush of the new name failed: the new export is whole
            assert_same(AttentionGates.from_pretrained(folder), make_gates(2))
        else:
            assert snapshot(folder) == before and hidden(folder) == []
    assert hidden(make_export(folder, seed=3)) == []


def test_an_export_set_aside_by_a_kill_survives_a_failing_one(tmp_path: Path) -> None:
    folder = make_export(tmp_path / "e", seed=1)
    before = snapshot(folder)
    folder.rename(tmp_path / ".e.ag-old")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_bytes", lambda *_: no_space())
        with pytest.raises(ExportError, match="No space left"):
            make_export(folder, seed=2)
    assert snapshot(folder) == before and hidden(folder) == []


def kill_at_every_operation(path: str) -> None:
    folder = Path(path)
    one, two = (snapshot(make_export(folder.with_name(f"{seed}"), seed)) for seed in (1, 2))
    versions, operation, finished = list[int | None](), 0, False
    while not finished:
        operation += 1
        assert snapshot(make_export(folder, 1)) == one and hidden(folder) == []

        if not (pid := os.fork()):
            Trap(operation, lambda: os.kill(os.getpid(), signal.SIGKILL)).install(pytest.MonkeyPatch())
            make_export(folder, 2)
            os._exit(0)
        finished = os.WIFEXITED(os.waitpid(pid, 0)[1])
        if folder.exists():
            versions.append([one, two].index(snapshot(folder)) + 1)
            continue
        versions.append(None)
        with refuses(ExportError, ".e.ag-old"):
            AttentionGates.from_pretrained(folder)
        assert snapshot(folder.with_name(".e.ag-old")) == one
    assert hidden(folder) == []
    print(json.dumps(versions))


@pytest.mark.slow
@pytest.mark.nightly
def test_a_kill_at_every_operation_never_leaves_half_an_export(tmp_path: Path) -> None:
    code = f"from tests.gates import test_export_killed as it; it.kill_at_every_operation({str(tmp_path / 'e')!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    versions = json.loads(done.stdout.splitlines()[-1])
    assert versions.count(None) == 1  # between the two renames
    gap = versions.index(None)
    assert versions == [1] * gap + [None] + [2] * (len(versions) - gap - 1)
    assert len(versions) > 15

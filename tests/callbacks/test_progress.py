"""Progress: what a log file and what a terminal show."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ag.callbacks.progress import RichBar, TextBar, progress_bar
from tests.support.tiny_run import command, fit


@pytest.mark.slow
def test_lines_for_a_log_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, trainer={"progress": True, "val_every": 3, "accumulate": 2}, batches=12)
    lines = [line for line in capsys.readouterr().out.splitlines() if "step" in line]
    assert [line.split("  ")[0] for line in lines] == [
        "step 1/6",
        "step 2/6",
        "step 3/6",
        "validation at step 3/6",
        "step 4/6",
        "step 5/6",
        "step 6/6",
        "validation at step 6/6",
    ]
    assert re.fullmatch(r"step 1/6  LM loss \d\.\d{3}  evicted 25\.0%  tokens/s \d+", lines[0])
    assert lines[3] == "validation at step 3/6  LM loss 1.500"


def test_without_a_bar_a_terminal_has_lines_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert [type(progress_bar(1, bar)) for bar in (True, False)] == [RichBar, TextBar]


@pytest.mark.slow
def test_rich_bar_on_a_terminal(tmp_path: Path) -> None:
    """One line of 80 characters that shows everything; without a number of epochs none is shown."""
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        command(tmp_path, trainer={"progress": True, "max_steps": 6, "max_epochs": -1}),
        stdout=terminal,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": "80", "TERM": "xterm"},
    )
    os.close(terminal)
    screen = b""
    while True:
        try:
            screen += os.read(main, 4096)
        except OSError:  # Linux: the other side is closed
            break
    os.close(main)
    assert process.wait(60) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.decode())
    assert re.search(r"Epoch 0 .*6/6 .*LM loss: \d\.\d{3}  evicted: 25\.0%  tokens/s: \d+", text)

"""What commands say, and how fast: help without torch, readers that leave early, Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
import warnings

import pytest

import ag
from ag.__main__ import COMMANDS
from ag.config.command_line import command
from tests.support.warm import started

HEAVY = {"torch", "transformers", "lightning", "peft", "matplotlib", "pandas"}


def test_help_and_lists_import_nothing_heavy():
    """Every command in one process, in which no library of another one may be left."""
    code = """
import sys
from ag.__main__ import COMMANDS, main
for words in [*([name, "--help"] for name in COMMANDS), ["fit", "--recipes"]]:
    try:
        assert not main(words), words
    except SystemExit as done:
        assert not done.code, words
print(*sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1000:]
    modules = set(done.stderr.split())
    assert not HEAVY & modules and "ag.config" in modules
    assert all(f"python -m ag.{name} " in done.stdout for name in COMMANDS)


def test_a_reader_that_leaves_early_is_no_error():
    words = [sys.executable, "-m", "ag.models", "--help"]  # short: it is written when the command ends
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=buffered)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(30) == 128 + signal.SIGPIPE


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (ag.UserError("a=1: expected 2."), 2, "ag.x: error: a=1: expected 2."),
        (KeyboardInterrupt(), 130, "ag.x: stopped by Ctrl-C"),
        (KeyboardInterrupt("2 of 3 are in F"), 130, "ag.x: stopped by Ctrl-C; 2 of 3 are in F"),
    ],
)
def test_what_a_user_causes_is_one_line(raised, code, line, capsys):
    @command("ag.x")
    def main(argv):
        assert argv == ["word"]
        raise raised

    assert main(["word"]) == code
    assert capsys.readouterr().err == f"{line}\n"


def test_a_warning_of_a_budget_is_one_line_and_others_are_pythons_own(capsys):
    @command("ag.x")
    def main(argv):
        warnings.warn("budget=1 is less than 4", ag.BudgetWarning, stacklevel=2)
        warnings.warn("something else", stacklevel=2)
        return 0

    with pytest.warns(UserWarning) as others:
        assert main([]) == 0
    assert [str(one.message) for one in others] == ["something else"]
    assert capsys.readouterr().err == "ag.x: warning: budget=1 is less than 4\n"


@pytest.mark.slow
def test_ctrl_c_while_a_command_starts_is_one_line(tmp_path):
    """A pipe in place of the prompt's file: the command waits in it, with torch imported."""
    os.mkfifo(tmp_path / "prompt")
    words = ["policy=full", "model=none", f"file={tmp_path / 'prompt'}"]
    process = subprocess.Popen(
        [started(), "-m", "ag.generate", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with open(tmp_path / "prompt", "w"):  # returns when the command has opened it to read
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, out, errors) == (130, "", "ag.generate: stopped by Ctrl-C\n")

"""The script that completes ``ag``, in a real bash, and in zsh where there is one."""

import os
import pty
import shutil
import signal
import subprocess
from select import select

import pytest

from ag.__main__ import COMMANDS
from ag.commands.plan import PlanConfig
from ag.completion import main, script
from ag.config.keys import keys
from ag.config.recipes import recipes

TYPED = {
    "ag com": ["compare ", "completion "],
    "ag fit rec": ["recipe="],
    "ag plan --dry": ["--dry-run "],
    "ag bench st": ["stream ", "static=", "steps="],
    "ag completion z": ["zsh "],
    "ag data ": ["sample "],
    "ag plan model.quantization=n": ["none ", "nf4 "],
    "ag fit recipe=piqa_sft trainer.accel": ["trainer.accelerator="],
    "ag fit recipe=qui": ["quickstart "],
    "ag compare recipe=compare_small budgets=[0.2] nothing": [],
    "ag compare file=": [],  # the shell's own: files
}


@pytest.fixture(scope="module")
def bash(tmp_path_factory):
    """Return what bash completes of a line; it ends words at = as bash does."""
    path = tmp_path_factory.mktemp("bash") / "ag.bash"
    path.write_text(script())

    def complete(line):
        code = f"source {path}; COMP_LINE='{line}' COMP_POINT={len(line)}; _ag; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        done = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return [word for word in done.stdout.split("\n") if word]

    return complete


@pytest.mark.parametrize("line", TYPED)
def test_bash_completes(line, bash):
    assert sorted(bash(line)) == sorted(TYPED[line])


def test_every_command_key_and_recipe_is_a_word(bash):
    assert [word.strip() for word in bash("ag ")] == [*COMMANDS]
    assert {*keys(PlanConfig)} == {word.removesuffix("=") for word in bash("ag plan ") if word.endswith("=")}
    assert [word.strip() for word in bash("ag compare recipe=")] == [*recipes("ag.compare")]
    assert [word.strip() for word in bash("ag plan recipe=")] == [*recipes("ag.fit")]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh: apt-get install zsh")
def test_zsh_completes(tmp_path, capsys):
    """Tab in a terminal of zsh, after the script that it gets."""
    assert main(["zsh"]) == 0
    (tmp_path / ".zshrc").write_text(capsys.readouterr().out + "ag() { print -r -- \"said:$*:\" }\nPS1='ready '\n")
    process, terminal = pty.fork()
    if process == 0:
        os.execvpe("zsh", ["zsh", "-i"], os.environ | {"ZDOTDIR": str(tmp_path), "TERM": "dumb"})
    try:
        for typed, shown in (
            ("", "ready "),
            ("ag fit rec\t", "fit recipe="),
            ("piqa\t", "piqa_sft "),
            ("seed=2\r", "said:fit recipe=piqa_sft seed=2:"),
        ):
            os.write(terminal, typed.encode())
            seen = b""
            while shown.encode() not in seen:
                assert select([terminal], [], [], 30)[0], f"{typed!r}: {seen!r}"
                seen += os.read(terminal, 4096)
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)


def test_another_shell_is_refused(capsys):
    assert main(["fish"]) == 2
    assert "fish: expected python -m ag.completion bash|zsh" in capsys.readouterr().err

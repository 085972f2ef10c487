"""The launchers of long and large runs, with stand-ins for python, srun and scontrol that keep a record."""

import os
import shlex
import subprocess

import pytest

from ag.config import Config
from ag.config.command_line import parse
from tests.support import ROOT
from tests.support.warm import started

FIT = ["-m", "ag.fit"]
# leaves with the next of the given codes, after writing a checkpoint where a run starts with code 1 or 138
PYTHON = """\
#!/bin/bash
echo "python $*" >>calls
code=$(head -n 1 codes); sed -i 1d codes
case "$*" in *resume=*) ;; *) case $code in 1 | 138) mkdir -p RUN/checkpoints; touch RUN/checkpoints/step=000025.ckpt ;;
esac ;; esac
exit "$code"
"""
SRUN = '#!/bin/bash\necho "srun $1" >>calls\nshift\nexec "$@"\n'
SCONTROL = '#!/bin/bash\necho "scontrol $*" >>calls\n'


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def launch(folder, script, *arguments, run, codes, **environment):
    """Run a script in a copy of the repository's layout; returns its exit code and the calls it made."""
    for name in (script, "scripts/setup.sh", "scripts/run_folder.sh"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    (folder / "scripts/setup.sh").write_text('set -euo pipefail\ncd "$(dirname "${BASH_SOURCE[0]}")/.."\n')
    executable(folder / ".venv/bin/python", PYTHON.replace("RUN", run))
    executable(folder / "bin/srun", SRUN)
    executable(folder / "bin/scontrol", SCONTROL)
    (folder / "codes").write_text("".join(f"{code}\n" for code in codes))
    (folder / "calls").unlink(missing_ok=True)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", script, *arguments], cwd=folder, env=os.environ | environment | {"PATH": path, "AG_PAUSE": "0"}
    )
    return done.returncode, [shlex.split(line) for line in (folder / "calls").read_text().splitlines()]


def fits(words, capsys):
    """Check that a call's words are a valid command line of ag.fit; returns its printed configuration."""
    words = words[words.index("ag.fit") + 1 :]
    words = [word for word in words if not word.startswith("resume=")] or ["recipe=redpajama_cpt"]
    with pytest.raises(SystemExit) as done:
        parse([*words, "--print"], Config, "ag.fit")
    captured = capsys.readouterr()
    assert done.value.code == 0, captured.err
    return captured.out


def test_four_cards_go_on_after_a_crash(tmp_path, capsys):
    run = "runs/redpajama_cpt/night"
    code, calls = launch(
        tmp_path, "scripts/launch_4x4090.sh", "night", "optim.gate_lr=1e-4", run=run, codes=[1, 137, 0]
    )
    assert code == 0
    starts = [call[call.index("ag.fit") + 1] for call in calls]
    assert starts == ["recipe=redpajama_cpt", f"resume={run}", f"resume={run}"]
    printed = fits(calls[0][1:], capsys)
    assert all(line in printed for line in ("quantization: nf4", "strategy: ddp", "devices: 4", "every_steps: 25"))


@pytest.mark.parametrize(("codes", "attempts"), [([2], 1), ([143], 1), ([1] * 9, 5)])
def test_four_cards_stop_where_another_attempt_is_no_use(tmp_path, codes, attempts):
    run = "runs/redpajama_cpt/night"
    found, calls = launch(tmp_path, "scripts/launch_4x4090.sh", "night", run=run, codes=codes)
    assert (found, len(calls)) == (codes[0], attempts)


@pytest.mark.parametrize(
    ("script", "words", "recipe"),
    [
        ("scripts/launch_4x4090.sh", ["night"], "redpajama_cpt"),
        ("scripts/slurm/train.sbatch", ["redpajama_cpt"], "redpajama_cpt"),
        ("scripts/slurm/train.sbatch", ["my recipes/long.yaml"], "long"),
        ("scripts/slurm/train.sbatch", ["my recipes/long.yml"], "long"),
    ],
)
def test_a_run_in_another_folder_goes_on_too(tmp_path, script, words, recipe):
    job = {"SLURM_JOB_ID": "night", "SLURM_NNODES": "2", "SLURM_SUBMIT_DIR": str(tmp_path)}
    run = f"elsewhere/{recipe}/night"
    for code, start in ((138, "checkpoint.every_steps="), (0, f"resume={run}")):
        found, calls = launch(tmp_path, script, *words, "output=a", "output=elsewhere", run=run, codes=[code], **job)
        assert found == code and any(word.startswith(start) for call in calls for word in call)


def test_slurm_job_is_queued_again_and_continues(tmp_path, capsys):
    script, run = "scripts/slurm/train.sbatch", "runs/redpajama_cpt/77"
    job = {"SLURM_JOB_ID": "77", "SLURM_NNODES": "2", "SLURM_SUBMIT_DIR": str(tmp_path)}
    code, calls = launch(tmp_path, script, "redpajama_cpt", run=run, codes=[138], **job)
    assert (code, calls[-1]) == (138, ["scontrol", "requeue", "77"])
    assert calls[0] == ["srun", "--kill-on-bad-exit=1"]
    printed = fits(calls[1], capsys)
    assert "num_nodes: 2" in printed and "devices: 4" in printed
    code, calls = launch(tmp_path, script, "redpajama_cpt", run=run, codes=[0], **job)
    assert code == 0 and calls[-1][1:4] == [*FIT, f"resume={run}"]
    fits(calls[-1], capsys)
    told = {
        line.removeprefix("#SBATCH ") for line in (ROOT / script).read_text().splitlines() if line[0:7] == "#SBATCH"
    }
    assert {"--signal=SIGUSR1@120", "--requeue", "--ntasks-per-node=4", "--gpus-per-node=4"} <= told


@pytest.mark.slow
@pytest.mark.nightly
def test_torchrun_with_two_ranks(tmp_path, tiny_llama, tiny_tokenizer):
    """The script as it is, with two ranks of the CPU on generated data."""
    tiny_llama(num_hidden_layers=1, vocab_size=256).save_pretrained(tmp_path / "base")
    tiny_tokenizer.save_pretrained(tmp_path / "base")
    for name in ("scripts/torchrun.sh", "scripts/setup.sh"):
        executable(tmp_path / name, (ROOT / name).read_text())
    (tmp_path / "scripts/setup.sh").write_text('set -euo pipefail\ncd "$(dirname "${BASH_SOURCE[0]}")/.."\n')
    executable(tmp_path / ".venv/bin/python", f'#!/bin/sh\nexec {shlex.quote(started())} "$@"\n')
    words = (
        "model.name=base train=gates trainer.accelerator=cpu trainer.strategy=ddp trainer.max_steps=2 data.kind=facts"
    )
    words += " data.prompt_min=60 data.prompt_max=80 data.batch_size=1 data.train_samples=4 data.val_samples=2"
    words += " data.kind=facts gate.num_heads=1 gate.head_dim=4"
    environment = os.environ | {"GPUS": "2", "HEAD": "localhost:0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "scripts/torchrun.sh", "job7", *words.split()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/fit/job7/export/gate_config.json").is_file()
    assert "validation at step 2/2" in done.stdout

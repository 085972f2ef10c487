"""An error is one line with the right exit code, and nothing is lost."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from ag import fit
from ag.callbacks.checkpoint_files import AtomicCheckpointIO, checkpoints
from ag.gates import folder
from ag.training.module import GatedLM
from tests.support.command import runs, train
from tests.support.full_disk import full_disk
from tests.support.refused import names

Fails = Callable[..., str]


@pytest.fixture
def fails(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Fails:
    """Run the command, expect an exit code, return its line on stderr."""

    def run(*overrides: str, code: int = 2) -> str:
        try:
            found = fit.main([f"recipe={recipe}", f"output={tmp_path / 'runs'}", *overrides])
        except SystemExit as exit:
            found = exit.code
        [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ag.fit: ")]
        assert found == code
        return line

    return run


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.name=./nowhere"], "model.name='./nowhere' is not a folder"),
        (["data.root=./docs"], "data.root=./docs holds neither a folder boolq nor files such as train.jsonl"),
        (["gate.first_layer=2"], "gate.first_layer=2: no layer from there on can have a gate: expected at most 1"),
        (["data.batch_size=25"], "24 training rows do not fill one batch of 25"),
        (["output=/dev/null"], "/dev/null"),
        (["trainer.strategy=ddpp"], "did you mean ddp?"),
        (["trainer.strategy=ddp_notebook"], "trainer.strategy=ddp."),
        (["trainer.strategy=fsdp"], "GPU"),
        (["trainer.precision=16-mixed", "trainer.accelerator=auto"], "bf16-mixed"),
        (["trainer.strategy=deepspeed_stage_2"], "trainer.strategy=fsdp2"),
        (["lora.targets=[up]", "train=lora", "--dry-run"], "no linear layer ['up']"),
    ],
)
def test_what_cannot_be_used(overrides: list[str], message: str, fails: Fails, tmp_path: Path) -> None:
    assert message in fails(*overrides)
    made_before = overrides in (["data.batch_size=25"], ["trainer.strategy=fsdp"])  # which Lightning refuses
    assert made_before or not list(runs(tmp_path / "runs"))


def test_empty_dataset(tiny_data: Path, fails: Fails, tmp_path: Path) -> None:
    data = shutil.copytree(tiny_data, tmp_path / "data")
    (data / "boolq" / "validation.jsonl").write_text("")
    assert f"the validation split of boolq in {data} has no rows" in fails(f"data.root={data}")
    assert not (tmp_path / "runs").exists()


def test_long_rows(tiny_base: Path, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = shutil.copytree(tiny_base, tmp_path / "base")
    config = base / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 64}))
    assert train(recipe, tmp_path, f"model.name={base}", "trainer.max_steps=2", "data.train_samples=8").is_dir()
    told = r"ag.fit: warning: [1-9]\d* of 8 training rows lost [1-9]\d* % of their tokens.* a longer context"
    assert re.search(told, capsys.readouterr().err)


def test_diverging_run_keeps_its_last_checkpoint(fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules: list[GatedLM] = []
    monkeypatch.setattr("ag.run.GatedLM", lambda *arguments: modules.append(GatedLM(*arguments)) or modules[-1])
    message = fails("train=gates+lora", "optim.lora_lr=1e30", "checkpoint.every_steps=1", code=3)
    [run] = runs(tmp_path / "runs")
    [last] = checkpoints(run)
    step = int(last.stem.removeprefix("step="))
    assert f"step {step + 1}: " in message and f"the last checkpoint is {last}" in message
    assert "Start a new run with a lower optim.gate_lr or optim.lora_lr" in message
    state = torch.load(last, weights_only=True)
    assert state["global_step"] == step >= 1
    assert all(tensor.isfinite().all() for tensor in state["state_dict"].values())
    trained = {name: value.detach() for name, value in modules[0].named_parameters() if value.requires_grad}
    torch.testing.assert_close(trained, dict(state["state_dict"]), rtol=0, atol=0)
    assert not (run / "export").exists()


def test_disk_full_while_exporting(fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(folder, "fsync", no_space)
        message = fails("train=gates+lora", "trainer.max_steps=2")
    assert "export: the export could not be written ([Errno 28] No space left on device)" in message
    [run] = runs(tmp_path / "runs")
    left = {path.name for path in run.iterdir()}
    assert left - {"figures", "lock"} == {"config.yaml", "metrics.csv", "checkpoints"}
    assert fit.main([f"resume={run}"]) == 0  # when there is room again
    assert (run / "export" / "adapter" / "adapter_model.safetensors").is_file()


def test_disk_full_while_saving_a_checkpoint(fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, saved = AtomicCheckpointIO.save_checkpoint, []

    def save_without_room(self, checkpoint, path, storage_options=None):
        with full_disk(room=1000) if saved else nullcontext():
            save(self, checkpoint, path)
        saved.append(path)

    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", save_without_room)
    with pytest.warns(UserWarning, match="step 2 .*saved"):
        message = fails("trainer.max_steps=4", "checkpoint.every_steps=1")
    names(message, "File too large", "step=000002.ckpt")
    [run] = runs(tmp_path / "runs")
    assert [path.name for path in checkpoints(run)] == ["step=000001.ckpt"]

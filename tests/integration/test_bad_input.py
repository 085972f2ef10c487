"""What is wrong is told in one line, with the right exit code, and nothing is lost."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ag import fit
from ag.callbacks.checkpoint_files import AtomicCheckpointIO, checkpoints
from ag.gates import folder
from ag.model import base as models
from ag.training.module import GatedLM
from tests.support.command import runs, train

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


@pytest.fixture
def data(tiny_data: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_data, tmp_path / "data"))


@pytest.fixture
def base(tiny_base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_base, tmp_path / "base"))


def nothing_written(tmp_path: Path) -> bool:
    return not (tmp_path / "runs").exists()


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_wrong_value_before_a_model_is_loaded(fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "load_base", lambda *_: pytest.fail("a model was loaded"))
    assert "loss.alpha=-1: expected number, at least 0" in fails("loss.alpha=-1")
    assert nothing_written(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.name=./nowhere"], "model.name='./nowhere' is not a folder"),
        (["data.root=./nowhere"], "data.root=./nowhere: no such folder"),
        (["data.root=./docs"], "data.root=./docs holds neither a folder boolq nor files such as train.jsonl"),
        (["gate.first_layer=2"], "gate.first_layer=2: the model has 2 layers, so that no layer gets a gate"),
        (["data.batch_size=25"], "24 training rows do not fill one batch of 25"),
        (["output=/dev/null"], "/dev/null"),
    ],
)
def test_what_cannot_be_used(overrides: list[str], message: str, fails: Fails, tmp_path: Path) -> None:
    assert message in fails(*overrides)
    assert not list(runs(tmp_path / "runs")) or overrides == ["data.batch_size=25"]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_empty_dataset(split: str, data: Path, fails: Fails, tmp_path: Path) -> None:
    (data / "boolq" / f"{split}.jsonl").write_text("")
    name = {"train": "training"}.get(split, split)
    assert f"the {name} split of boolq in {data} has no rows" in fails(f"data.root={data}")
    assert nothing_written(tmp_path)


def test_long_rows(base: Path, recipe: Path, fails: Fails, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(base / "config.json", max_position_embeddings=64)
    run = train(recipe, tmp_path, f"model.name={base}", "trainer.max_steps=2", "data.train_samples=8")
    assert re.search(r"[1-9]\d* prompts lost [1-9]\d* tokens on their left", capsys.readouterr().out)
    assert run.is_dir()

    edit(base / "config.json", max_position_embeddings=3)
    assert "has 3 tokens, too many for a row of 3" in fails(f"model.name={base}")


def test_diverging_run_keeps_its_last_checkpoint(fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules: list[GatedLM] = []
    monkeypatch.setattr("ag.run.GatedLM", lambda *arguments: modules.append(GatedLM(*arguments)) or modules[-1])
    message = fails("train=gates+lora", "optim.lora_lr=1e30", "checkpoint.every_steps=1", code=3)
    [run] = runs(tmp_path / "runs")
    [last] = checkpoints(run)
    step = int(last.stem.removeprefix("step="))
    assert f"step {step + 1}: " in message and f"the last checkpoint is {last}" in message
    assert f"resume={run}" in message
    state = torch.load(last, weights_only=True)
    assert state["global_step"] == step >= 1
    assert all(tensor.isfinite().all() for tensor in state["state_dict"].values())
    trained = {name: value.detach() for name, value in modules[0].named_parameters() if value.requires_grad}
    torch.testing.assert_close(trained, dict(state["state_dict"]), rtol=0, atol=0)
    assert not (run / "export").exists()


@pytest.mark.parametrize("train_what", ["gates+lora", "lora"])
def test_disk_full_while_exporting(
    train_what: str, fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(folder, "fsync", no_space)
        message = fails(f"train={train_what}", "trainer.max_steps=2")
    assert "export: the export could not be written ([Errno 28] No space left on device)" in message
    [run] = runs(tmp_path / "runs")
    left = {path.name for path in run.iterdir()}
    assert left - {"figures"} == {"config.yaml", "metrics.csv", "checkpoints"}
    assert fit.main([f"resume={run}"]) == 0  # when there is room again
    assert (run / "export" / "adapter" / "adapter_model.safetensors").is_file()


def test_disk_full_while_saving_a_checkpoint(fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, saved = AtomicCheckpointIO.save_checkpoint, []

    def no_space(self, checkpoint, path, storage_options=None):
        if saved:
            raise OSError(28, "No space left on device", str(path))
        saved.append(path)
        save(self, checkpoint, path)

    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", no_space)
    with pytest.warns(UserWarning, match="step 2 .*saved"):
        message = fails("trainer.max_steps=4", "checkpoint.every_steps=1")
    assert "[Errno 28] No space left on device" in message and "step=000002.ckpt" in message
    [run] = runs(tmp_path / "runs")
    assert [path.name for path in checkpoints(run)] == ["step=000001.ckpt"]

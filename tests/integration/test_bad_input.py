"""What is wrong is told in one line, with the right exit code, and nothing is lost."""

from __future__ import annotations

import json
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
from tests.support.command import column, runs, train

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
        (["data.root=./nowhere"], "data.root=./nowhere holds neither a folder boolq nor files such as train.jsonl"),
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
    assert f"the {name} split of boolq has no rows" in fails(f"data.root={data}")
    assert nothing_written(tmp_path)


def test_tokenizer_without_pad_token(base: Path, recipe: Path, tmp_path: Path) -> None:
    path = base / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "pad_token"}))
    with_pad = train(recipe, tmp_path / "with", "trainer.max_steps=2")
    without = train(recipe, tmp_path / "without", "trainer.max_steps=2", f"model.name={base}")
    assert column(without, "train/loss") == column(with_pad, "train/loss")  # what pads is never seen


def test_tokenizer_with_nothing_to_pad_with(base: Path, fails: Fails, tmp_path: Path) -> None:
    path = base / "tokenizer_config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("pad_token", "eos_token")}
    path.write_text(json.dumps(config))
    assert "has neither a pad token nor an eos token" in fails(f"model.name={base}")
    assert nothing_written(tmp_path)


def test_long_rows(base: Path, recipe: Path, fails: Fails, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(base / "config.json", max_position_embeddings=64)
    run = train(recipe, tmp_path, f"model.name={base}", "trainer.max_steps=2", "data.train_samples=8")
    # each prompt and response of at most 64 characters of "PASSAGE\nQuestion: ...?\nAnswer: yes"
    rows = [json.loads(line) for line in boolq(recipe, "train")[:8]]
    lost = [n for row in rows if (n := length(row, row["answer"]) - 64) > 0]
    rows = [json.loads(line) for line in boolq(recipe, "validation")[:4]]
    lost += [n for row in rows for answer in (False, True) if (n := length(row, answer) - 64) > 0]
    assert f"{len(lost)} prompts lost {sum(lost)} tokens on their left." in capsys.readouterr().out
    assert run.is_dir()

    edit(base / "config.json", max_position_embeddings=3)
    assert "has 3 tokens, too many for a row of 3" in fails(f"model.name={base}")


def boolq(recipe: Path, split: str) -> list[str]:
    [root] = [line.split()[1] for line in recipe.read_text().splitlines() if "root:" in line]
    return (Path(root) / "boolq" / f"{split}.jsonl").read_text().splitlines()


def length(row: dict[str, str], answer: bool) -> int:
    return len(f"{row['passage']}\nQuestion: {row['question']}?\nAnswer: {'yes' if answer else 'no'}")


class Watched(GatedLM):
    """Remembers what it was initialised with."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.at_first = trained(self)


def trained(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters() if value.requires_grad}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    """The modules that the command makes."""
    made: list[Watched] = []
    monkeypatch.setattr("ag.run.GatedLM", lambda *arguments: made.append(Watched(*arguments)) or made[-1])
    return made


def test_nan_in_the_model_stops_before_the_first_step(
    tiny_llama, base: Path, fails: Fails, modules: list[Watched], tmp_path: Path
) -> None:
    model = tiny_llama(num_hidden_layers=2, hidden_size=32, intermediate_size=64, head_dim=8)
    with torch.no_grad():
        model.lm_head.weight[5, 0] = float("nan")
    model.save_pretrained(base)
    message = fails(f"model.name={base}", code=3)
    assert "step 1: LM loss is nan" in message and "the last checkpoint is none yet" in message
    [run] = runs(tmp_path / "runs")
    assert checkpoints(run) == [] and not (run / "export").exists()
    [module] = modules
    torch.testing.assert_close(trained(module), module.at_first, rtol=0, atol=0)


def test_diverging_run_keeps_its_last_checkpoint(fails: Fails, modules: list[Watched], tmp_path: Path) -> None:
    message = fails("train=gates+lora", "optim.lora_lr=1e30", "checkpoint.every_steps=1", code=3)
    [run] = runs(tmp_path / "runs")
    [last] = checkpoints(run)
    step = int(last.stem.removeprefix("step="))
    assert f"step {step + 1}: " in message and f"the last checkpoint is {last}" in message
    assert f"resume={run}" in message
    state = torch.load(last, weights_only=True)
    assert state["global_step"] == step >= 1
    assert all(tensor.isfinite().all() for tensor in state["state_dict"].values())
    torch.testing.assert_close(trained(modules[0]), dict(state["state_dict"]), rtol=0, atol=0)
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

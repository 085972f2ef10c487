"""FSDP2 on two gloo ranks is one process with twice the rows, checkpoints and export included."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ag.callbacks.checkpoint_files import checkpoints
from ag.config import Config
from ag.config.recipes import resolve
from ag.gates.gate import AttentionGates
from ag.run import build_trainer
from tests.support.command import column, logged, runs, same_rows, same_weights, start, train, weights


def finish(*arguments: str) -> None:
    process = start(*arguments)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors


@pytest.mark.slow
@pytest.mark.nightly
def test_sharded_run_trains_resumes_and_exports(recipe: Path, moved_base: Path, tmp_path: Path) -> None:
    """Checkpointed activations, a regression warm start, gates and LoRA, a validation with a filler row."""
    overrides = ["train=gates+lora", "warmup.regress_steps=1", "trainer.max_steps=4", "data.val_samples=3"]
    overrides += ["checkpoint.every_steps=2", "model.gradient_checkpointing=true", "optim.schedule=constant"]
    shards = ["trainer.devices=2", "trainer.strategy=fsdp2", "data.val_batch_size=1"]
    finish(f"recipe={recipe}", f"output={tmp_path / 'two'}", *overrides, *shards)
    one = train(recipe, tmp_path / "one", *overrides, "data.batch_size=4")
    moved = train(recipe, tmp_path / "moved", *overrides, "data.batch_size=4", f"model.name={moved_base}")
    [two] = runs(tmp_path / "two")
    same_rows(*map(logged, (two, one, moved)))
    same_weights(two, one, moved)
    for run in (two, one):
        gates = AttentionGates.from_pretrained(run / "export").state_dict()
        assert gates and all(torch.equal(x, weights(run)[f"gates.{name}"]) for name, x in gates.items())
        adapter = load_file(run / "export" / "adapter" / "adapter_model.safetensors")
        trained = {name.replace(".weight", ".default.weight"): x for name, x in adapter.items()}
        assert adapter and all(torch.equal(x, weights(run)[f"model.{name}"]) for name, x in trained.items())

    again = Path(shutil.copytree(two, tmp_path / "again" / "tiny" / "run"))
    checkpoints(again)[0].unlink()
    assert checkpoints(again)[0].name == "step=000002.ckpt"
    finish(f"resume={again}")
    assert logged(again) == logged(two) and len(column(again, "train/loss")) == 4
    torch.testing.assert_close(weights(again), weights(two), rtol=0, atol=0)


def test_strategy_covers_all_machines(recipe: Path) -> None:
    overrides = {"trainer.strategy": "fsdp2", "trainer.devices": "4", "trainer.num_nodes": "2"}
    config = resolve(Config, {"recipe": str(recipe)} | overrides)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy = build_trainer(config, None).strategy
    assert (strategy._data_parallel_size, strategy._tensor_parallel_size) == (8, 1)

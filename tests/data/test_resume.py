"""Real lightning.Trainer runs: a resumed run sees exactly the rows that an uninterrupted one would see."""

import json
import subprocess
import textwrap
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from ag.callbacks.checkpoint import RunCheckpoint
from ag.config import Config
from ag.data.collate import Collator, Row
from ag.data.module import Counts, DataModule
from ag.data.sources import DataError
from tests.support import ROOT
from tests.support.refused import refuses
from tests.support.warm import started

ROWS, BATCH = 26, 4  # 6 batches an epoch, two rows left over


class Rows:
    """Streams the same rows."""

    def __iter__(self):
        return iter(rows())


def rows() -> list[Row]:
    return [Row(np.array([i, i], dtype=np.int32), 1) for i in range(ROWS)]


def data_module(workers=0, seed=0, streaming=False, batch_size=BATCH) -> DataModule:
    data = Config().data
    data.batch_size, data.val_batch_size, data.num_workers = batch_size, 4, workers
    validation = [[row] for row in rows()[:6]]
    return DataModule(Rows() if streaming else rows(), validation, Collator(0), data, seed, Counts())


class Recorder(pl.LightningModule):
    """Trains one weight and writes down the ids of every training batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["input_ids"][:, 0].tolist())
        return (self.weight - batch["input_ids"].float().mean()) ** 2

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", batch["input_ids"].float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_start(self):
        # Lightning 2.6 forgets to count the epoch after a checkpoint of an epoch's last training batch.
        loop = self.trainer.fit_loop
        progress = loop.epoch_progress
        if loop.restarted_mid_epoch and progress.total.processed == progress.total.started:
            progress.increment_ready()
            progress.increment_started()


def run(folder: Path, data: DataModule, checkpoint=None, resume=None, **options) -> Recorder:
    model = Recorder()
    settings = {"max_epochs": 3, "num_sanity_val_steps": 0, "callbacks": [checkpoint] if checkpoint else []}
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=checkpoint is not None,
        use_distributed_sampler=False,
        **settings | options,
    )
    trainer.fit(model, datamodule=data, ckpt_path=resume)
    return model


def checkpoints(folder: Path) -> dict[int, Path]:
    return {int(path.stem.split("=")[1]): path for path in folder.glob("step=*.ckpt")}


@pytest.mark.parametrize(
    ("accumulate", "workers"),
    [(1, 0), pytest.param(1, 2, marks=pytest.mark.slow), (2, 0), pytest.param(2, 2, marks=pytest.mark.slow)],
)
def test_every_checkpoint_continues_with_the_next_batch(tmp_path, workers, accumulate):
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    full = run(tmp_path, data_module(workers), saver, accumulate_grad_batches=accumulate).seen
    assert len(full) == 18
    saved = checkpoints(tmp_path)
    assert len(saved) == 18 // accumulate
    chosen = {1, 2, 6 // accumulate, 6 // accumulate + 1, 12 // accumulate + 1} if workers else set(saved)
    for step in chosen & set(saved):
        resumed = run(tmp_path, data_module(workers), resume=saved[step], accumulate_grad_batches=accumulate).seen
        assert resumed == full[step * accumulate :], step


@pytest.mark.parametrize("options", [{}, {"max_steps": 18}], ids=["epochs", "steps"])
@pytest.mark.parametrize("val_every", [None, 2], ids=["val-epoch", "val-2"])
def test_checkpoints_at_validation_continue(tmp_path, val_every, options):
    options = options | {"val_check_interval": val_every}
    saver = ModelCheckpoint(tmp_path, "{step}", monitor="val/loss", save_top_k=-1, save_on_train_epoch_end=False)
    full = run(tmp_path, data_module(), saver, **options).seen
    saved = checkpoints(tmp_path)
    assert sorted(saved) == (list(range(2, 19, 2)) if val_every else [6, 12, 18])
    for step, path in saved.items():
        assert run(tmp_path, data_module(), resume=path, **options).seen == full[step:], step


def test_checkpoints_at_the_end_of_an_epoch_continue(tmp_path):
    saver = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, save_on_train_epoch_end=True)
    full = run(tmp_path, data_module(), saver).seen
    for step, path in checkpoints(tmp_path).items():
        assert run(tmp_path, data_module(), resume=path).seen == full[step:], step


@pytest.mark.parametrize("step", [4, 6])
def test_a_resumed_run_can_be_resumed(tmp_path, step):
    def saver(folder):
        return ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)

    full = run(tmp_path, data_module(), saver(tmp_path)).seen
    again = tmp_path / "again"
    run(tmp_path, data_module(), saver(again), resume=checkpoints(tmp_path)[step])
    assert len(checkpoints(again)) == 18 - step
    for later, path in checkpoints(again).items():
        assert run(tmp_path, data_module(), resume=path).seen == full[later:], later


@pytest.mark.parametrize("workers", [0, 2])
def test_stream_resumes(tmp_path, workers):
    options = {"max_steps": 20, "max_epochs": -1, "limit_val_batches": 0}
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    full = run(tmp_path, data_module(workers, streaming=True), saver, **options).seen
    assert len(full) == 20
    for step in (1, 6, 7, 13):
        data = data_module(workers, streaming=True)
        assert run(tmp_path, data, resume=checkpoints(tmp_path)[step], **options).seen == full[step:], step


@pytest.mark.parametrize(
    ("change", "parts"),
    [({"seed": 1}, ("seed 0", "1")), ({"batch_size": 2}, (f"rows per step {BATCH}", "2"))],
)
def test_resuming_with_another_order_is_an_error(tmp_path, change, parts):
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2)
    run(tmp_path, data_module(), saver, max_steps=2)
    with refuses(DataError, *parts):
        run(tmp_path, data_module(**change), resume=saver.best_model_path)


@pytest.mark.slow
def test_two_processes_see_the_batches_of_one_and_resume(tmp_path):
    """Two gloo processes with batch 4 see what one sees with batch 8, and continue from a checkpoint."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        from pathlib import Path
        from tests.data.test_resume import ModelCheckpoint, checkpoints, data_module, run
        import json

        if __name__ == "__main__":
            folder = Path({str(tmp_path)!r})
            saver = ModelCheckpoint(folder, "{{step}}", every_n_train_steps=1, save_top_k=-1)
            options = {{"strategy": "ddp", "devices": 2}}
            full = run(folder, data_module(), saver, **options)
            rank = full.trainer.global_rank
            resumed = [
                run(folder, data_module(workers), resume=checkpoints(folder)[step], **options).seen
                for step, workers in ((2, 0), (3, 0), (4, 2))
            ]
            (folder / f"{{rank}}.json").write_text(json.dumps([full.seen, *resumed]))
        """)
    )
    subprocess.run([started(), str(script)], check=True, timeout=300, cwd=tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    full, *resumed = [[a + b for a, b in zip(*ranks, strict=True)] for ranks in zip(first, second, strict=True)]
    assert full == run(tmp_path, data_module(batch_size=8)).seen
    assert resumed == [full[2:], full[3:], full[4:]]


def test_loading_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    list(data_module().train_dataloader())
    assert torch.equal(torch.rand(3), expected)


def test_a_checkpoint_may_be_validated_with_another_batch_size(tmp_path):
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2)
    run(tmp_path, data_module(), saver, max_steps=2)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    [metrics] = trainer.validate(
        Recorder(), datamodule=data_module(batch_size=2), ckpt_path=saver.best_model_path, verbose=False
    )
    assert metrics["val/loss"] == 2.5


@pytest.mark.parametrize("crash, kept", [(5, 4), (8, 6), (11, 10)])
def test_a_crash_between_optimiser_steps_repeats_the_unfinished_one(tmp_path, crash, kept):
    """Steps end after batches 4 and 6 of each epoch; the checkpoint holds the counters of then."""
    options = {"accumulate_grad_batches": 4, "limit_val_batches": 0}
    full = run(tmp_path, data_module(), **options).seen

    class Crashing(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if len(module.seen) == crash:
                raise KeyError("crash")

    saver = RunCheckpoint(tmp_path, every_steps=0, keep_last=1, monitor="val/loss")
    with pytest.raises(KeyError):
        run(tmp_path, data_module(), saver, callbacks=[saver, Crashing()], **options)
    [path] = (tmp_path / "checkpoints").glob("step=*.ckpt")
    assert run(tmp_path, data_module(), resume=path, **options).seen == full[kept:]

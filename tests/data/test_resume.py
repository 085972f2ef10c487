"""Real lightning.Trainer runs: a resumed run sees exactly the rows that an uninterrupted one would see."""

import multiprocessing
import subprocess
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from ag.callbacks.checkpoint import RunCheckpoint
from ag.callbacks.checkpoint_files import checkpoints, step_of
from ag.config import CheckpointConfig, Config
from ag.data.module import DataModule
from ag.data.rows import Row
from ag.data.sources import DataError
from ag.data.splits import Splits
from tests.support.refused import refuses

ROWS, BATCH = 26, 4  # 6 batches an epoch, two rows left over


def rows() -> list[Row]:
    return [Row(np.array([i, i], dtype=np.int32), 1) for i in range(ROWS)]


def data_module(workers=0, seed=0, batch_size=BATCH) -> DataModule:
    data = Config().data
    data.batch_size, data.val_batch_size, data.num_workers = batch_size, 4, workers
    validation = [[row] for row in rows()[:6]]
    return DataModule(Splits(rows(), validation), 0, data, seed)


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


def trainer(folder: Path, **options) -> pl.Trainer:
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saver = RunCheckpoint(folder, CheckpointConfig(every_steps=1, keep_last=99))
    once = {"num_sanity_val_steps": 0, "use_distributed_sampler": False, "callbacks": [saver]}
    return pl.Trainer(default_root_dir=folder, **quiet | once | options)


def run(folder: Path, data: DataModule, resume: Path | None = None, **options) -> list[list[int]]:
    """The training batches of three epochs, or of what is left of them; each step has its checkpoint."""
    model = Recorder()
    trainer(folder, **{"max_epochs": 3} | options).fit(model, datamodule=data, ckpt_path=resume)
    return model.seen


NIGHTLY = [pytest.mark.slow, pytest.mark.nightly]


@pytest.mark.parametrize(("accumulate", "workers"), [(2, 0), pytest.param(2, 2, marks=NIGHTLY)])
def test_every_checkpoint_continues_with_the_next_batch(tmp_path, workers, accumulate):
    options = {"accumulate_grad_batches": accumulate}
    full = run(tmp_path, data_module(workers), **options)
    saved = {step_of(path): path for path in checkpoints(tmp_path)}
    assert (len(full), len(saved)) == (18, 18 // accumulate)
    chosen = {1, 2, 6 // accumulate, 6 // accumulate + 1, 12 // accumulate + 1} if workers else set(saved)
    for step in chosen & set(saved):
        resumed = run(tmp_path / f"{step}", data_module(workers), saved[step], **options)
        assert resumed == full[step * accumulate :], step


@pytest.mark.parametrize(
    ("change", "parts"), [({"seed": 1}, ("seed 0", "1")), ({"batch_size": 2}, (f"rows per step {BATCH}", "2"))]
)
def test_resuming_with_another_order_is_an_error(tmp_path, change, parts):
    run(tmp_path, data_module(), max_steps=1)
    with refuses(DataError, *parts):
        run(tmp_path, data_module(**change), checkpoints(tmp_path)[0])


def test_resuming_with_other_rows_of_the_same_number_is_an_error(tmp_path):
    """In their tokens, in their order, or in what carries loss."""
    run(tmp_path, data_module(), max_steps=1)
    [checkpoint] = checkpoints(tmp_path)
    last = rows()[-1]
    longer = last._replace(tokens=np.array([25, 26, 25], dtype=np.int32))
    for other in (longer, last._replace(prompt_length=0), last._replace(loss=np.array([False, True])), rows()[0]):
        data = data_module()
        data.train_rows = [*rows()[:-1], other]
        with refuses(DataError, "training rows of hash", data._hash, "resume with the same seed, data"):
            run(tmp_path, data, checkpoint)
    assert len({data_module()._hash, data_module(seed=1)._hash}) == 1


def test_loading_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    list(data_module().train_dataloader())
    assert torch.equal(torch.rand(3), expected)


def test_a_checkpoint_may_be_validated_with_another_batch_size(tmp_path):
    run(tmp_path, data_module(), max_steps=1)
    data, [path] = data_module(batch_size=2), checkpoints(tmp_path)
    [metrics] = trainer(tmp_path).validate(Recorder(), datamodule=data, ckpt_path=path, verbose=False)
    assert metrics["val/loss"] == 2.5


def test_only_the_process_that_trains_ends_its_workers() -> None:
    """By SIGTERM, as multiprocessing does at exit; signals of other processes, which tell a run to stop, do not."""
    batches = iter(data_module(workers=1, batch_size=1).train_dataloader())
    next(batches)
    [worker] = multiprocessing.active_children()
    for name in ("TERM", "INT", "USR1", "TERM"):
        subprocess.run(["kill", f"-{name}", str(worker.pid)], check=True)
        for _ in range(4):  # more than lie ready
            assert next(batches)["input_ids"].shape == (1, 2)
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0

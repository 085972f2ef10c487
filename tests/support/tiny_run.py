"""A training run of a few linear layers with the real callbacks, imported by tests and run as a script.

The content of a batch depends on (epoch, batch index, rank) only, so equal weights after a resume mean that
the loop counters, the optimiser and the callbacks were restored.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ag.callbacks import NonFiniteError
from ag.config import CheckpointConfig, Config, TrainerConfig
from ag.config.sections import WandbConfig
from ag.run import build_trainer

LAYERS, HEADS, TOKENS, WIDTH = 3, 2, 10, 4


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): nn.Linear(WIDTH, HEADS) for layer in range(LAYERS)})


class Tiny(LightningModule):
    """One frozen and one trained ("LoRA") layer, and gates on three layers."""

    def __init__(
        self,
        nan_batch: int = -1,
        nan_rank: int = 0,
        nan_part: str = "eviction",
        fail_batch: int = -1,
        pause: float = 0.0,
        has_gates: bool = True,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gates = Gates() if has_gates else None
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH))
        self.nan_batch, self.nan_rank, self.nan_part = nan_batch, nan_rank, nan_part
        self.fail_batch, self.pause = fail_batch, pause
        self.evicted_in_batch: Tensor | None = None
        self.val_loss = [1.0]

    def trainable(self) -> dict[str, list[nn.Parameter]]:
        gates = [] if self.gates is None else list(self.gates.parameters())
        return {"gates": gates, "lora": [p for p in self.model.parameters() if p.requires_grad]}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.pause:
            print(f"batch {batch_idx}", flush=True)
            time.sleep(self.pause)
        if batch_idx == self.fail_batch:
            raise RuntimeError("a bug")
        seed = 1000 * self.trainer.current_epoch + batch_idx + 500 * self.global_rank
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))
        lm_loss: Tensor = self.model(x).square().mean()
        eviction = x.new_zeros(())
        if self.gates is not None:
            gates = torch.stack([layer(x) for layer in self.gates.layers.values()]).sigmoid()
            eviction = (gates.mean() - 0.3).abs()
        if batch_idx == self.nan_batch and self.global_rank == self.nan_rank:
            if self.nan_part == "eviction":
                eviction = eviction * float("nan")
            elif self.nan_part == "detached":  # the loss is NaN, its gradient is not
                lm_loss = lm_loss + torch.tensor(float("nan"))
            else:  # the gradient is infinite, the loss is not
                parameter: Any = self.model[1].bias
                lm_loss = lm_loss + (parameter - parameter.detach()).sum().sqrt()
        self.log_dict(
            {
                "train/lm_loss": lm_loss,
                "train/eviction_loss": eviction,
                "train/evicted": 0.25,
                "train/gate_mean_soft": 0.5,
            }
        )
        return lm_loss + eviction

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        index = min(self.global_step, len(self.val_loss)) - 1
        self.log_dict({"val/loss": self.val_loss[index], "val/lm_loss": 1.5}, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        flags = torch.arange(TOKENS).expand(LAYERS, HEADS, TOKENS) % 2 == 0
        evicted = torch.linspace(0, 1, LAYERS * HEADS).view(LAYERS, HEADS)
        self.validation = SimpleNamespace(evicted=evicted, sample_flags=[flags])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def loader(batches: int) -> DataLoader[dict[str, Tensor]]:
    """Batches of 2 rows with 7 real tokens of 10 each."""
    mask = torch.arange(TOKENS) < 7
    rows: Any = [{"attention_mask": mask}] * (2 * batches)
    return DataLoader(rows, batch_size=2)


def fit(
    run_dir: Path,
    *,
    module: dict[str, Any] | None = None,
    batches: int = 6,
    checkpoint: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    logger: list[Any] | None = None,
    ckpt_path: Path | None = None,
    val_loss: list[float] | None = None,
) -> tuple[Trainer, Tiny]:
    """Train as ag.fit does."""
    config = Config(
        checkpoint=CheckpointConfig(**(checkpoint or {})),
        trainer=TrainerConfig(**{"progress": False, "accelerator": "cpu", **(trainer or {})}),
        logger=logger or ["csv"],
        wandb=WandbConfig(offline=True),
    )
    tiny = Tiny(**(module or {}))
    tiny.val_loss = val_loss or tiny.val_loss
    runner = build_trainer(config, run_dir)
    runner.fit(tiny, loader(batches), loader(2), ckpt_path=ckpt_path, weights_only=True)
    return runner, tiny


def command(run_dir: Path, **options: Any) -> list[str]:
    """The words of a process that calls :func:`fit`, a fork of one that has imported the libraries."""
    from tests.support.warm import started  # the script itself finds the library alone

    return [started(), __file__, str(run_dir), json.dumps(options)]


def weights(tiny: Tiny) -> Tensor:
    """All trained weights in one vector."""
    return torch.cat([p.detach().flatten() for p in tiny.parameters() if p.requires_grad])


if __name__ == "__main__":
    try:
        runner, _ = fit(Path(sys.argv[1]), **json.loads(sys.argv[2]))
    except NonFiniteError as error:
        print(error, file=sys.stderr, flush=True)
        # Lightning's launcher kills the first process when it sees another one fail
        sys.exit(3 if os.environ.get("LOCAL_RANK", "0") == "0" else 0)

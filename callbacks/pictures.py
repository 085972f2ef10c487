"""What a run shows of its gates: a table of what is trained as it starts, pictures while it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console
from rich.table import Table
from torch.nn import Parameter

from ag.gates.figures import curves, evicted_heatmap, keep_pattern
from ag.training.loggers import read_metrics


class ParameterSummary(Callback):
    """Prints the number of parameters of gates, LoRA and base model, and their share of the base."""

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Print the table on rank 0."""
        if not trainer.is_global_zero:
            return
        trained = pl_module.trainable()
        gates, lora = (sum(map(logical_count, trained[name])) for name in ("gates", "lora"))
        base = sum(logical_count(weight) for weight in pl_module.model.parameters() if not weight.requires_grad)
        table = Table("part", title="Parameters")
        table.add_column("count", justify="right")
        table.add_column("share of base", justify="right")
        for name, count in {"gates": gates, "LoRA": lora, "trained": gates + lora, "base": base}.items():
            table.add_row(name, f"{count:,}", f"{count / base:.2%}")
        Console().print(table)


def logical_count(parameter: Parameter) -> int:
    """Count the weights that a parameter stands for.

    bitsandbytes stores 4-bit weights two to a byte (`Params4bit`, in whatever storage type).
    """
    packed = type(parameter).__name__ == "Params4bit"
    return parameter.numel() * (2 * parameter.element_size() if packed else 1)


class Figures(Callback):
    """Saves pictures to `run_dir/figures` and sends them to W&B and TensorBoard, on rank 0.

    After each validation the evicted share of every layer and head (`evicted-STEP.png`) and the keep pattern
    of sample prompts (`keep-0-STEP.png`, ...); after training the curves (`curves-STEP.png`).
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = Path(run_dir)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Draw what the gates did in this validation."""
        if not trainer.is_global_zero or pl_module.gates is None:
            return
        layers = [int(name) for name in pl_module.gates.layers]
        self._save(trainer, "evicted", evicted_heatmap(pl_module.evicted.cpu().numpy(), layers))
        for index, (flags, _) in enumerate(pl_module.sample_flags):
            self._save(trainer, f"keep-{index}", keep_pattern(flags.cpu().numpy(), layers=layers))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the curves."""
        rows = read_metrics(self._run_dir / "metrics.csv")
        if trainer.is_global_zero and rows:
            self._save(trainer, "curves", curves(rows))

    def _save(self, trainer: Trainer, name: str, figure: Figure) -> None:
        path = self._run_dir / "figures" / f"{name}-{trainer.global_step:06d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image(f"figures/{name}", [str(path)], step=trainer.global_step)
            elif isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image(f"figures/{name}", imread(path), trainer.global_step, dataformats="HWC")

"""Parameter counts and pictures of the gates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure
from matplotlib.image import imread
from torch.nn import Parameter

from ag.files import read_metrics
from ag.gates.figures import curves, evicted_heatmap, keep_pattern


class ParameterSummary(Callback):
    """Prints how many parameters are trained, and how many the base model has."""

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Print one line on rank 0."""
        if not trainer.is_global_zero:
            return
        base = sum(logical_count(weight) for weight in pl_module.model.parameters() if not weight.requires_grad)
        counts = {name: sum(map(logical_count, weights)) for name, weights in pl_module.trainable().items()}
        parts = [f"{name} {count:,} ({count / base:.2%})" for name, count in counts.items() if count]
        print(f"parameters: {', '.join(parts)}, of the base model {base:,}")


def logical_count(parameter: Parameter) -> int:
    """Return the number of weights in a parameter; bitsandbytes' `Params4bit` packs two into each byte."""
    packed = type(parameter).__name__ == "Params4bit"
    return parameter.numel() * (2 * parameter.element_size() if packed else 1)


class Figures(Callback):
    """Saves pictures to `run_dir/figures` and sends them to W&B and TensorBoard, on rank 0.

    Each validation saves the evicted share of every layer and head (`evicted-STEP.png`) and the kept tokens of sample
    prompts (`keep-0-STEP.png`, ...). The end of training saves the curves (`curves-STEP.png`).
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = Path(run_dir)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Draw the evicted shares and the kept tokens of this validation."""
        if not trainer.is_global_zero or pl_module.gates is None:
            return
        layers = [int(name) for name in pl_module.gates.layers]
        self._save(trainer, "evicted", evicted_heatmap(pl_module.validation.evicted.cpu().numpy(), layers))
        for index, flags in enumerate(pl_module.validation.sample_flags):
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
        step = max(0, trainer.global_step - 1)  # as Lightning counts in metrics, from 0
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image(f"figures/{name}", [str(path)], step=step)
            elif isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image(f"figures/{name}", imread(path), step, dataformats="HWC")

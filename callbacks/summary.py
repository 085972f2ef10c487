"""A table of what is trained, printed when the run starts."""

from __future__ import annotations

from typing import Any

from lightning import Trainer
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.table import Table
from torch.nn import Parameter


def logical_count(parameter: Parameter) -> int:
    """Count the weights that a parameter stands for.

    bitsandbytes stores 4-bit weights two to a byte (`Params4bit`, in whatever storage type).
    """
    if type(parameter).__name__ == "Params4bit":
        return parameter.numel() * parameter.element_size() * 2
    return parameter.numel()


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

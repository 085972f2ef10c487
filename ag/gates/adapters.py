"""LoRA adapters that were trained with gates: on disk, in PEFT's layers, and merged into a model.

A model needs the adapter of its gates exactly once, in PEFT's layers or merged into the weights. A merged model has the
hash of the adapter's weights in its configuration (MERGED).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ag.errors import UserError
from ag.gates.folder import parse, read
from ag.gates.manifest import ADAPTER_FILES, minor

MERGED = "merged_adapter"  # in the config.json of a merged model


@dataclass(frozen=True)
class Adapter:
    """The adapter of an export."""

    source: str  # folder of the export, for messages
    sha256: str  # of its weights
    name: str  # PEFT's name of a tensor that is not zero
    tensor: Tensor  # its values, which tell the adapter from others

    def times_in(self, model: nn.Module) -> int:
        """Return how often a model has the adapter: merged, by its configuration, and in PEFT's active layers."""
        config: Any = getattr(model, "config", None)
        found = [state[self.name] for state in _active(model) if self.name in state]
        same = [torch.equal(tensor.detach().cpu(), self.tensor.to(tensor.dtype)) for tensor in found]
        return int(getattr(config, MERGED, None) == self.sha256) + sum(same)

    def check(self, model: nn.Module, times: int) -> None:
        """Raise ``UserError`` unless a model has the adapter this number of times: 1 to run the gates, 0 to load it."""
        found = self.times_in(model)
        if found < times:
            raise UserError(
                f"The gates of {self.source} were trained together with a LoRA adapter, which this model lacks: load "
                f"it by ag.gates.export.load_adapter(model, {self.source!r}), or the model that it is merged into "
                f"(commands: gates= or adapter={self.source}). If you merged it, set "
                f"model.config.{MERGED} = {self.sha256!r}."
            )
        if found > times:
            raise UserError(
                f"This model has the LoRA adapter of {self.source} already: use the gates without it (commands: "
                "adapter=false, for ag.compare no adapter=; Python: no load_adapter), or the base model."
            )


def _active(model: Any) -> list[dict[str, Tensor]]:
    """Return the weights of each active adapter of a model, by PEFT's names."""
    if not hasattr(model, "peft_config"):
        return []
    from peft import get_model_status, get_peft_model_state_dict  # loads bitsandbytes, which only some models need

    status = get_model_status(model)
    names = set(status.active_adapters) if status.enabled else set()
    return [get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False) for name in names]


def adapter_of(folder: Path, info: Mapping[str, Any]) -> Adapter | None:
    """Read the adapter of an export; None if there is none, if it changes nothing, or under schema 1.0.

    Raises:
        ExportError: when its weights are missing or damaged.
    """
    name = ADAPTER_FILES[1]
    if name not in info["sha256"]:
        return None
    tensors = parse(folder / name, read(folder, name, info["sha256"][name]))
    known = {key: tensor for key, tensor in tensors.items() if "lora_B" in key and bool(tensor.any())}
    if not known or minor(info["schema_version"]) < 1:
        return None
    key = min(known)
    return Adapter(str(folder), info["sha256"][name], key, known[key])

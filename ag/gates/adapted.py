"""Count how often a model contains the LoRA adapter of an export: gates need it exactly once.

An adapter adds ``D = scale B A`` to a weight ``W``. An export records ``p(W) = <W, D> / <D, D>`` of the first and the
last linear layer that its adapter changes, as they were before. Of a model with the same weights the number is ``p``
again, with the adapter beside the weight or merged into it ``p + 1``, with both ``p + 2``. Rounding and quantising are
independent of D: relative noise ``r`` changes the number by about ``r |W| / |D| / sqrt(elements)``, far below 1 for
16-bit weights and an adapter that is not tiny. The configuration of a merged copy also names its adapter (MERGED).
That name is trusted more than the number, because rounding to 16 bits may hide a weak adapter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ag.errors import UserError

MERGED = "merged_adapter"  # in the config.json of a merged model: the hash of the adapter's weights
ROUNDED, QUANTISED = 2.0**-8, 0.1  # upper bounds on the relative noise of 16-bit and 4-bit weights
MOST_NOISE = 0.1  # uncertainty of the number above which it is not used


@dataclass(frozen=True)
class Trace:
    """What an adapter adds to one weight.

    Attributes:
        module: name of the layer in the base model.
        scale: factor of ``B A``.
        projection: ``<W, D> / <D, D>`` of the weight W without the adapter.
        noise: relative noise of that weight.
        down: A, ``[r, in]``.
        up: B, ``[out, r]``.
    """

    module: str
    scale: float
    projection: float
    noise: float
    down: Tensor
    up: Tensor

    @property
    def square(self) -> float:
        """``<D, D>``."""
        return self.scale**2 * float(((self.up.T @ self.up) * (self.down @ self.down.T)).sum())

    def along(self, weight: Tensor) -> float:
        """Return ``<weight, D> / <D, D>`` for ``[out, in]``."""
        down, up = (x.to(weight.device) for x in (self.down, self.up))
        return self.scale * float(((up.T @ weight.float()) * down).sum()) / self.square

    def times_in(self, layer: nn.Module | None) -> float | None:
        """Return how often a layer contains the adapter; None when its weight cannot be read or noise hides it."""
        weight, noise = _weight(layer)
        if weight is None or weight.shape != (len(self.up), self.down.shape[1]):
            return None
        weight = weight.float()
        spread = max(noise, self.noise) * float(torch.linalg.vector_norm(weight))
        if spread > MOST_NOISE * math.sqrt(self.square * weight.numel()):
            return None
        return self.along(weight) - self.projection + sum(map(self.along, _added(layer, False)))


@dataclass(frozen=True)
class Adapter:
    """The adapter of an export.

    Attributes:
        source: folder of the export, for messages.
        sha256: of its weights.
        traces: empty for an export of schema 1.0, which recorded none.
    """

    source: str
    sha256: str
    traces: tuple[Trace, ...]

    def times_in(self, model: nn.Module) -> float | None:
        """Return how often a model contains the adapter, close to a whole number; None when that is unknown."""
        base = _base(model)
        layers = [(trace, _submodule(base, trace.module)) for trace in self.traces]
        if getattr(base.config, MERGED, None) == self.sha256:
            numbers = [1 + sum(map(trace.along, _added(layer, True))) for trace, layer in layers] or [1.0]
        else:
            numbers = [times for trace, layer in layers if (times := trace.times_in(layer)) is not None]
        return sum(numbers) / len(numbers) if numbers else None

    def check(self, model: nn.Module, times: int) -> None:
        """Raise ``UserError`` when a model is known to contain the adapter another number of times.

        Args:
            model: plain or PEFT-wrapped.
            times: 1 to run with the gates of the export, 0 to put the adapter on.
        """
        found = self.times_in(model)
        if found is not None and found < times - 0.5 and times:
            raise UserError(
                f"The gates of {self.source} were trained together with a LoRA adapter, which this model lacks: put it "
                f"on with ag.gates.export.load_adapter(model, {self.source!r}), or load the model that it is merged "
                f"into (commands: gates= or adapter={self.source})."
            )
        if found is not None and found > times + 0.5:
            raise UserError(
                f"This model has the LoRA adapter of {self.source} merged into its weights, and would have it twice: "
                "use the gates without it (commands: adapter=false, for ag.compare no adapter=; Python: no "
                "load_adapter), or name the base model that it was trained on."
            )


def record(model: nn.Module) -> list[dict[str, Any]]:
    """Return what an export records of its adapter ``default``, JSON: module, scale, projection and noise."""
    rows = []
    for name, layer in recorded_layers(model):
        weight, noise = _weight(layer)
        down, up = (getattr(layer, part)["default"].weight.detach().float() for part in ("lora_A", "lora_B"))
        trace = Trace(name, float(layer.scaling["default"]), 0.0, noise, down, up)
        if weight is not None and trace.square > 0:
            row = {"module": name, "scale": trace.scale, "projection": trace.along(weight), "noise": noise}
            rows.append(row)
    return rows


def recorded_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the first and the last linear layer of a model with a plain LoRA adapter ``default``, with their names.

    PEFT also adapts single parameters, such as the stacked experts of a mixture, which have no ``weight``.
    """
    found = []
    for name, layer in _base(model).named_modules():
        down = getattr(layer, "lora_A", None)
        if not isinstance(down, nn.ModuleDict) or "default" not in down:
            continue
        plain = not getattr(layer, "fan_in_fan_out", False) and not getattr(layer, "lora_variant", None)
        if plain and isinstance(layer.get_base_layer(), nn.Linear):
            found.append((name, layer))
    return found if len(found) < 2 else [found[0], found[-1]]


def read(source: str, sha256: str, rows: Sequence[dict[str, Any]], tensors: dict[str, Tensor]) -> Adapter:
    """Return the adapter of an export.

    Args:
        source: its folder.
        sha256: hash of the adapter's weights.
        rows: what :func:`record` gave.
        tensors: the adapter's weights in PEFT's names.

    Raises:
        KeyError: a recorded module has no weights.
    """
    traces = []
    for row in rows:
        down, up = (tensors[f"base_model.model.{row['module']}.{part}.weight"].float() for part in ("lora_A", "lora_B"))
        trace = Trace(**row, down=down, up=up)
        if up.shape[1] == len(down) and trace.square > 0:  # zeros or other shapes identify no adapter
            traces.append(trace)
    return Adapter(source, sha256, tuple(traces))


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _submodule(model: Any, name: str) -> nn.Module | None:
    try:
        found: nn.Module = model.get_submodule(name)
        return found
    except AttributeError:
        return None


def _weight(layer: Any) -> tuple[Tensor | None, float]:
    """Return the weight of a layer beside its adapters, in floating point, and its relative noise."""
    layer = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
    weight: Tensor | None = getattr(layer, "weight", None)
    if weight is None or weight.device.type == "meta":
        return None, 0.0
    if weight.is_floating_point():
        return weight.detach(), ROUNDED
    from peft.utils.integrations import dequantize_module_weight  # loads bitsandbytes, which only some models need

    return dequantize_module_weight(layer).detach(), QUANTISED


def _added(layer: Any, merged: bool) -> list[Tensor]:
    """Return what active adapters add to a layer's weight, with or without those that PEFT has merged into it."""
    if not hasattr(layer, "lora_A"):
        return []
    active = [] if layer.disable_adapters else [name for name in layer.active_adapters if name in layer.lora_A]
    inside = layer.merged_adapters
    names = {*active, *inside} if merged else {*active} - {*inside}
    return [layer.get_delta_weight(name).detach() for name in sorted(names)]

"""Products of one token's states with weights, on all threads, while the token passes an interceptor on a CPU.

PyTorch (MKL) multiplies one token's states with a weight on one core, and most of a decoding step on a CPU is that. For
such a pass the linear layers compute by :func:`ag.kernels.gemv.gemv`; before and after it they are untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from ag.kernels.gemv import best_version, cpu


class Products:
    """The linear layers of a model, which share each product of one token among the threads.

    Args:
        model: whose forward pass begins and ends it.
        wanted: whether a pass with these keyword arguments is one to do so in.
    """

    def __init__(self, model: nn.Module, wanted: Callable[[dict[str, Any]], bool]) -> None:
        self.wanted = wanted
        self.linear = [layer for layer in model.modules() if type(layer) is nn.Linear and plain(layer)]
        self.forwards = [(vars(layer), partial(_forward, layer)) for layer in self.linear]
        self.handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return
        given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1])
        tokens = next((x for x in given if isinstance(x, Tensor)), None)
        if tokens is None or tokens.device.type != "cpu" or tokens.shape[:2] != (1, 1) or not self.wanted(kwargs):
            return
        if self.linear and best_version(self.linear[0].weight) == "cpp":
            for own, forward in self.forwards:
                own.setdefault("forward", forward)  # not where something else (accelerate) has its own

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if torch.compiler.is_compiling():
            return
        for own, forward in self.forwards:
            if own.get("forward") is forward:
                del own["forward"]


def plain(layer: nn.Linear) -> bool:
    """Whether a layer's weight is an ordinary parameter, and not one that a library keeps in shards or few bits."""
    return type(layer.weight) is nn.Parameter


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    weight = layer.weight
    if x.numel() == weight.shape[1] and x.dtype == weight.dtype and cpu.unavailable(weight) is None:
        return cpu.gemv(x, weight, layer.bias)
    return F.linear(x, weight, layer.bias)

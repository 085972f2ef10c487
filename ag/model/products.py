"""Products of one token's states with weights, on all threads, while the token passes an interceptor on a CPU.

PyTorch (MKL) multiplies one token's states with a weight on one core, and most of a decoding step on a CPU is that. For
such a pass the linear layers compute by :func:`ag.kernels.gemv.gemv`; before and after it they are untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from ag.kernels.gemv import best_version, cpu

Forwards = list[tuple[dict[str, Any], Callable[[Tensor], Tensor]]]  # attributes of linear layers, and what they compute


class Products:
    """The linear layers of a model, which share each product of one token among the threads.

    Args:
        model: whose forward pass begins and ends it.
        modules: gives the modules that run in a pass with these keyword arguments; none where it shall not begin.
    """

    def __init__(self, model: nn.Module, modules: Callable[[dict[str, Any]], Iterable[nn.Module]]) -> None:
        self.modules = modules
        self.known: WeakKeyDictionary[nn.Module, Forwards] = WeakKeyDictionary()
        self.active: Forwards = []
        self.handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy of the model, or a file, takes along: not the layers, which are found again."""
        return {"modules": self.modules, "handles": self.handles}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, known=WeakKeyDictionary(), active=[])

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return
        given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1])
        tokens = next((x for x in given if isinstance(x, Tensor)), None)
        if tokens is None or tokens.device.type != "cpu" or tokens.shape[:2] != (1, 1) or best_version() != "cpp":
            return
        for module in self.modules(kwargs):
            if module not in self.known:
                self.known[module] = _forwards(module)
            for own, forward in self.known[module]:
                if "forward" not in own:  # something else (accelerate) may have its own
                    own["forward"] = forward
                    self.active.append((own, forward))

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: object) -> None:
        while self.active:
            own, forward = self.active.pop()
            if own.get("forward") is forward:
                del own["forward"]


def _forwards(module: nn.Module) -> Forwards:
    """Return the linear layers of a module, but those whose weights a library keeps in shards or few bits."""
    linear = [layer for layer in module.modules() if type(layer) is nn.Linear and type(layer.weight) is nn.Parameter]
    return [(vars(layer), partial(_forward, layer)) for layer in linear]


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    weight = layer.weight
    if x.numel() == weight.shape[1] and cpu.unavailable(x, weight) is None:
        return cpu.gemv(x, weight, layer.bias)
    return F.linear(x, weight, layer.bias)

"""Layers that compute one token's states in another way while it passes an interceptor.

PyTorch (MKL) multiplies one token's states with a weight on one core, slower than memory allows, and most of a
decoding step on a CPU is that: there the linear layers compute by :func:`ag.kernels.gemv.gemv`, on all threads.
Transformers' RMS norms are six operations of PyTorch's, and one where it has the formula itself; of a few numbers each
costs its launch alone. Before and after such a pass the layers are untouched.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from ag.kernels.gemv import best_version, cpu

Forwards = list[tuple[dict[str, Any], Callable[[Tensor], Tensor]]]  # attributes of layers, and what they compute


class ThreadedLayers:
    """The linear layers of a model, which share each product of one token among the threads, and its norms.

    ``modules`` gives those that run in a pass of the model with these keyword arguments; none where it shall not begin.
    """

    def __init__(self, model: nn.Module, modules: Callable[[dict[str, Any]], Iterable[nn.Module]]) -> None:
        self.modules = modules
        self.known: WeakKeyDictionary[nn.Module, tuple[Forwards, Forwards]] = WeakKeyDictionary()
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
        if tokens is None or tokens.shape[1:2] != (1,):
            return
        on_cpu, alone = tokens.device.type == "cpu", len(tokens) == 1 and best_version() == "cpp"
        for module in self.modules(kwargs):
            if module not in self.known:
                self.known[module] = _products(module), _norms(module)
            products, norms = self.known[module]
            for own, forward in (*(products if on_cpu and alone else ()), *norms):
                if "forward" not in own:  # something else (accelerate) may have its own
                    own["forward"] = forward
                    self.active.append((own, forward))

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: object) -> None:
        while self.active:
            own, forward = self.active.pop()
            if own.get("forward") is forward:
                del own["forward"]


def _products(module: nn.Module) -> Forwards:
    """Return the linear layers of a module, but those whose weights a library keeps in shards or few bits."""
    linear = [layer for layer in module.modules() if type(layer) is nn.Linear and type(layer.weight) is nn.Parameter]
    return [(vars(layer), partial(_product, layer)) for layer in linear]


def _product(layer: nn.Linear, x: Tensor) -> Tensor:
    weight = layer.weight
    if x.numel() == weight.shape[1] and cpu.unavailable(x, weight) is None:
        return cpu.gemv(x, weight, layer.bias)
    return F.linear(x, weight, layer.bias)


def _norms(module: nn.Module) -> Forwards:
    """Return the norms of a module that compute what Llama's does."""
    return [(vars(norm), partial(_norm, norm)) for norm in module.modules() if _is_rms_norm(cast(Any, type(norm)))]


@functools.cache
def _is_rms_norm(kind: Any) -> bool:
    """Tell whether modules of a class compute what Llama's norm does, line by line; Gemma's adds 1 to its weight."""
    if not kind.__name__.endswith("RMSNorm"):
        return False
    from transformers.models.llama.modeling_llama import LlamaRMSNorm  # takes half a second

    mine, own = (inspect.getsource(x.forward).split() for x in (LlamaRMSNorm, kind))
    return mine == own


def _norm(norm: Any, x: Tensor) -> Tensor:
    """Compute a norm in one operation; on a CPU in float32 alone, where it is the same bit by bit."""
    if x.is_cuda or x.dtype == norm.weight.dtype == torch.float32:
        return F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
    result: Tensor = type(norm).forward(norm, x)
    return result

"""Faster linear layers and norms for passes under an interceptor.

PyTorch multiplies the states of a few tokens with a weight slower than memory allows, and those of one token on one
core: most of a decoding step on a CPU. There linear layers compute by :func:`ag.kernels.linear.linear`, on all threads.
RMS norms of transformers are six operations with a launch each, and become one: in decoding steps, and in bfloat16 on a
CPU also in prompts. From the first pass on these layers have another ``forward``, which checks whether the current
thread is in a pass.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from ag.kernels import rms_norm
from ag.kernels.dispatch import VARIABLE
from ag.kernels.linear import MOST_TOKENS, version


class _ThreadState(threading.local):
    """The layers that compute in another way in the current pass of a thread."""

    products = False
    norms = False
    is_step = False
    forced: str | None = None  # value of AG_KERNELS


thread_state = _ThreadState()


class ThreadedLayers:
    """The linear layers and norms of a model that compute in another way under an interceptor."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.known_modules: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        self.handle: RemovableHandle = model.register_forward_hook(self._end, always_call=True)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and files of the model, without the known modules."""
        return {"model": self.model, "handle": self.handle}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, known_modules=WeakKeyDictionary())

    def remove(self) -> None:
        """Restore the ``forward`` of the layers of all known modules."""
        self.handle.remove()
        for layer in (layer for module in (self.model, *self.known_modules) for layer in module.modules()):
            own = vars(layer)
            if getattr(own.get("forward"), "func", None) in (_product, _norm):
                del own["forward"]
            elif getattr(own.get("_old_forward"), "func", None) in (_product, _norm):  # accelerate came since
                own["_old_forward"] = type(layer).forward.__get__(layer)
        self.known_modules.clear()

    def begin(self, modules: list[nn.Module], tokens: Tensor) -> None:
        """Let the layers compute in their fast way until the forward pass ends.

        Args:
            modules: the modules of the pass, the model among them.
            tokens: ids ``[B, T]`` or embeddings ``[B, T, d]``.
        """
        thread_state.products = thread_state.norms = False
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return
        for module in modules:
            if module not in self.known_modules:
                _install(module)
                self.known_modules[module] = None
        thread_state.norms, thread_state.is_step = True, tokens.shape[1:2] == (1,)
        thread_state.products = thread_state.is_step and tokens.device.type == "cpu" and len(tokens) <= MOST_TOKENS
        thread_state.forced = os.environ.get(VARIABLE)

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if not torch.compiler.is_compiling():
            thread_state.products = thread_state.norms = False


def _install(module: nn.Module) -> None:
    """Replace the ``forward`` of the layers of a module, unless another library (accelerate) has replaced it."""
    for layer in module.modules():
        if "forward" in vars(layer):
            continue
        # other libraries have weights in shards or few bits
        if type(layer) is nn.Linear and type(layer.weight) is nn.Parameter:
            layer.forward = partial(_product, layer)  # type: ignore[method-assign]
        elif _is_rms_norm(cast(Any, type(layer))):
            layer.forward = partial(_norm, layer)


def _product(layer: nn.Linear, x: Tensor) -> Tensor:
    weight = layer.weight
    few = not torch.compiler.is_compiling() and thread_state.products and x.numel() <= MOST_TOKENS * weight.shape[1]
    if not few or torch.is_grad_enabled():
        return F.linear(x, weight, layer.bias)
    compute = version(weight.device.type, x.dtype, weight.dtype, weight.is_contiguous(), thread_state.forced)
    return compute(x, weight, layer.bias)


@functools.cache
def _is_rms_norm(kind: Any) -> bool:
    """Whether a class has the source of Llama's norm; Gemma's adds 1 to its weight."""
    if not kind.__name__.endswith("RMSNorm"):
        return False
    from transformers.models.llama.modeling_llama import LlamaRMSNorm  # takes half a second

    try:
        llama_source, own = (inspect.getsource(x.forward).split() for x in (LlamaRMSNorm, kind))
    except OSError:  # a class that was made without a file
        return False
    return llama_source == own


def _norm(norm: Any, x: Tensor) -> Tensor:
    """Compute a norm in one operation where it is faster."""
    weight = norm.weight
    if thread_state.norms and not torch.compiler.is_compiling():
        if x.dtype == weight.dtype == torch.bfloat16 and x.device.type == "cpu":
            return rms_norm.version("cpu", x.dtype, weight.dtype, thread_state.forced)(x, weight, norm.variance_epsilon)
        if thread_state.is_step and (x.is_cuda or x.dtype == weight.dtype == torch.float32):
            return F.rms_norm(x, x.shape[-1:], weight, norm.variance_epsilon)
    result: Tensor = type(norm).forward(norm, x)
    return result

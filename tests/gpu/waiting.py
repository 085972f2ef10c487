"""Code in which the host must not wait for the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from tests.support.tape import WAITS


class Waits(TorchDispatchMode):
    """Raises where a CUDA device would make the host wait: a stand-in for torch's own mode where there is no card.

    Some tensors play those on the card, and so does what is computed from them; the others are the host's own.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.there = WeakTensorKeyDictionary()
        for x in tensors:
            self.there[x] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        there = any(isinstance(x, Tensor) and x in self.there for x in tree_leaves((args, kwargs)))
        if there and self._waits(func, args, kwargs):
            raise RuntimeError(f"called a synchronizing operation: {func}")
        out = func(*args, **kwargs)
        for x in tree_leaves(out) if there else []:
            if isinstance(x, Tensor):
                self.there[x] = True
        return out

    def _waits(self, func: Any, args: Any, kwargs: Any) -> bool:
        name = func.overloadpacket.__name__
        if name == "copy_":
            here = [x for x in args[:2] if x not in self.there]
            return any(x.ndim for x in here) and not (args[2:] + (kwargs.get("non_blocking", False),))[0]
        if name == "repeat_interleave":
            return func._overloadname == "Tensor" and kwargs.get("output_size") is None
        if name.startswith("index") and func._overloadname in ("Tensor", "default") and isinstance(args[1], list):
            return any(x is not None and x.dtype == torch.bool for x in args[1])  # how many are chosen is not known
        return name in WAITS


class Lists(TorchFunctionMode):
    """Raises on tensors that play those on a card for what a CPU's tensor serves without an operation."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, there = kwargs or {}, self.waits.there
        if func in (Tensor.tolist, Tensor.cpu) and args[0] in there:
            raise RuntimeError(f"called a synchronizing operation: {func.__name__}")
        out = func(*args, **kwargs)
        moves = func is Tensor.to and any(isinstance(x, torch.device) for x in (*args, *kwargs.values()))
        if moves and args[0] not in there:
            if not kwargs.get("non_blocking"):
                raise RuntimeError("called a synchronizing operation: to")
            out = out.clone()
            there[out] = True
        return out


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise ``RuntimeError`` where the host waits for the card."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)

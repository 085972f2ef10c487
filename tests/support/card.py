"""A device of its own without a GPU: tensors that compute on the CPU, and refuse to meet those of the CPU as on CUDA.

:func:`register` changes what PyTorch says of accelerators for the whole process, so that a test runs in a process of
its own. :class:`Mode` makes tensors on the device.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "card"
MOVES = ("copy_", "_to_copy")
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")  # the indices may be on the CPU


class OnCard(Tensor):
    """A tensor of the device; ``host`` has its numbers."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> "OnCard":
        made = Tensor._make_wrapper_subclass(
            cls, host.size(), host.stride(), host.storage_offset(), dtype=host.dtype, device=torch.device(NAME, 0)
        )
        made.host = host
        return made

    def tolist(self) -> Any:
        return self.host.tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return compute(operator, args, kwargs or {})


class Mode(TorchDispatchMode):
    """Makes tensors of the device where one is asked for."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(operator, args, kwargs or {})


def compute(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the CPU; its result is on the device if an operand is, or if ``device`` says so."""
    name = operator.__name__.partition(".")[0]
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    on_card = any(isinstance(x, OnCard) for x in tensors)
    if on_card and name not in MOVES:
        same = tree_leaves((args[0], *args[2:3])) if name in INDEXING and isinstance(args[0], OnCard) else tensors
        if strangers := [
            list(x.shape) for x in same if isinstance(x, Tensor) and x.dim() and not isinstance(x, OnCard)
        ]:
            raise RuntimeError(f"{operator}: expected all tensors on the card, and those of shapes {strangers} are not")
    if kwargs.get("device") is not None:
        on_card = torch.device(kwargs["device"]).type == NAME
        kwargs = kwargs | {"device": torch.device("cpu")}
    host_args, host_kwargs = tree_map(lambda x: x.host if isinstance(x, OnCard) else x, (args, kwargs))
    result = operator(*host_args, **host_kwargs)
    if any(x.alias_info is not None and x.alias_info.is_write for x in operator._schema.returns):
        return kwargs.get("out", args[0])
    if name == "_to_copy":
        result = result.clone()
    return tree_map(lambda x: OnCard(x) if isinstance(x, Tensor) else x, result) if on_card else result


def on_card(x: Any) -> Any:
    """Move a tensor, the tensors of a dict, or a module (in place) to the device."""
    if isinstance(x, dict):
        return {name: on_card(value) for name, value in x.items()}
    return x._apply(on_card) if isinstance(x, nn.Module) else OnCard(x.detach()) if isinstance(x, Tensor) else x


class Backend(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def register() -> None:
    """Make the device known to PyTorch, once in a process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, Backend())
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(x, device=...)` else does not ask a mode

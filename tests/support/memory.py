"""The memory of the tensors that Python can reach, and of the largest that an operation makes."""

import gc
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode


def storages() -> dict[int, int]:
    """Bytes of every tensor storage, by address; fake tensors, which tests that compile leave behind, have none."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and not isinstance(x, FakeTensor)]
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}


class Largest(TorchDispatchMode):
    """Record the number of elements of the largest tensor that an operation makes."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, torch.Tensor):
                self.size = max(self.size, x.untyped_storage().nbytes() // x.element_size())
        return made

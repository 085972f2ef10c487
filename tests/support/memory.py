"""The memory of tensors that Python can reach."""

import gc

import torch
from torch._subclasses.fake_tensor import FakeTensor


def storages() -> dict[int, int]:
    """Bytes of every tensor storage, by address; fake tensors, which tests that compile leave behind, have none."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and not isinstance(x, FakeTensor)]
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}

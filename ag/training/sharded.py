"""FSDP2: shard the layers of the base model and all trained weights over the GPUs.

Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", arXiv 2304.11277.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ag.gates.gate import AttentionGates
from ag.model.structure import decoder_of


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's FSDP2 strategy, but a checkpoint is one file with the trained weights, as without FSDP2.

    Args:
        world_size: GPUs of all machines.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__(data_parallel_size=world_size, tensor_parallel_size=1, save_distributed_checkpoint=False)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the trained weights, gathered on every rank; Lightning would gather the frozen base as well."""
        assert self.model is not None
        return {name: gather_tensor(p.detach()).cpu() for name, p in self.model.named_parameters() if p.requires_grad}

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint into the shards, and also return the weights, because the module checks their names."""
        state = torch.load(checkpoint_path, mmap=True, map_location="cpu", weights_only=True)["state_dict"]
        checkpoint: Mapping[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return {**checkpoint, "state_dict": state}


def shard(model: nn.Module, gates: AttentionGates | None, mesh: DeviceMesh) -> None:
    """Divide each decoder layer and each gate over the ranks of a mesh; a second call does nothing.

    Embeddings, final norm and head are not divided: they are frozen, may be tied, and are small beside the layers.
    """
    decoder = decoder_of(model)
    if any(isinstance(parameter, DTensor) for parameter in decoder.parameters()):
        return
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh)
    outside = {p for p in decoder.parameters() if not isinstance(p, DTensor)}
    fully_shard(decoder, mesh=mesh, ignored_params=outside)  # with a common root, layers are fetched ahead
    for gate in [] if gates is None else gates.layers.values():
        fully_shard(gate, mesh=mesh, reshard_after_forward=True)


def gather(module: nn.Module) -> None:
    """Gather on every rank the weights that the export writes; the module cannot be trained afterwards."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if isinstance(parameter, DTensor) and parameter.requires_grad:
                part._parameters[name] = nn.Parameter(gather_tensor(parameter.detach()).cpu(), parameter.requires_grad)


def gather_tensor(tensor: Tensor) -> Tensor:
    """Return a whole tensor: a sharded one is gathered from all ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

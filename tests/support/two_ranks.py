"""The losses of one process or two, in a module that every process imports."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig

from ag.config.gate import GateConfig
from ag.gates.gate import AttentionGates
from ag.gates.gating import TargetPass
from ag.training import losses

LENGTHS = torch.tensor([[9, 3], [20, 14]])  # valid tokens of the rows of both ranks


class Losses(torch.nn.Module):
    """The losses as functions of the gates alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(hidden_size=8, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2)
        self.gates = AttentionGates(config, GateConfig(num_heads=1, head_dim=4, bias=0.0))

    def forward(self, hidden: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
        observed = TargetPass(self.gates, torch.arange(hidden.shape[1]) < lengths[:, None])
        for layer in self.gates.layer_indices:
            observed.enter_layer(layer, hidden)
            observed.targets[layer] = hidden[:, : lengths.max(), :2].transpose(1, 2)
        logits, targets = (torch.stack([*by_layer.values()]) for by_layer in (observed.logits, observed.targets))
        means = losses.gate_means(self.gates, observed)
        rows, _ = observed.counted().nonzero(as_tuple=True)
        labels = torch.nn.functional.pad(observed.counted().long() - 1, (1, 0)) * 100  # 0, and -100 of padding
        values = observed.logits[0].square().mean(1)[observed.counted()]
        return {
            "soft": losses.eviction_loss(means["soft"], 0.1),
            "hard": losses.eviction_loss(means["hard"], 0.1),
            "regression": losses.regression_loss(self.gates, logits, targets, observed.has_target(), 0.5, "head"),
            "samples": losses.sample_mean(values, rows, labels),
        }


def hidden_states() -> torch.Tensor:
    return torch.randn(2, 2, 20, 8, generator=torch.Generator().manual_seed(1))


def values_and_gradients(
    model: torch.nn.Module, hidden: torch.Tensor, lengths: torch.Tensor
) -> dict[str, torch.Tensor]:
    found = {}
    for name in ("soft", "hard", "regression", "samples"):
        model.zero_grad()
        loss = model(hidden, lengths)[name]
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found[name] = torch.cat([loss.detach()[None], *(gradient.flatten() for gradient in gradients)])
    return found


def work(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model = DistributedDataParallel(Losses(), find_unused_parameters=True)
    torch.save(values_and_gradients(model, hidden_states()[rank], LENGTHS[rank]), f"{folder}/{rank}.pt")
    del model  # else it takes the group's last reference with it, and its destructor can wait for itself (torch 2.13)
    dist.destroy_process_group()

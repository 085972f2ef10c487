"""Gates for tiny models whose flags are mixed: about half open, different by head and layer."""

from typing import Any

import torch

import ag


def gates_for(model: Any, seed: int = 0, **changes: Any) -> ag.AttentionGates:
    torch.manual_seed(seed)
    values: dict[str, Any] = {"num_heads": 2, "head_dim": 8, "bias": 0.0, "threshold": 0.5} | changes
    gates = ag.AttentionGates(model.config, ag.GateConfig(**values))
    with torch.no_grad():
        for parameter in gates.parameters():
            parameter.mul_(3.0)
    return gates

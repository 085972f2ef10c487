"""Which parameters belong to the gates, to the adapters and to the base model."""

from __future__ import annotations

from typing import Any

from torch.nn import Parameter


def parameter_groups(pl_module: Any) -> dict[str, list[Parameter]]:
    """Sort the parameters of a training module by what they are.

    Args:
        pl_module: has `gates` (an `AttentionGates` or None) and `model` (a Hugging Face or PEFT model).

    Returns:
        `gates`, `lora` (what is trainable in the model beside the gates) and `base` (what is frozen).
    """
    gates = [] if pl_module.gates is None else list(pl_module.gates.parameters())
    of_gates = {id(parameter) for parameter in gates}
    rest = [parameter for parameter in pl_module.model.parameters() if id(parameter) not in of_gates]
    return {
        "gates": gates,
        "lora": [parameter for parameter in rest if parameter.requires_grad],
        "base": [parameter for parameter in rest if not parameter.requires_grad],
    }

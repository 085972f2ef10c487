"""Runs the gates: the hidden states that enter the projection of queries, keys and values are what a gate reads.

It is an operator of its own, so that a compiled graph runs it where it stands, and CUDA graphs are split there. It
claims to change its input, which keeps its place before attention.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ag.vllm.settings import settings_of

NAME = "ag_run_gate"


def run_gate(hidden: Tensor, layer: int) -> None:
    """Store the gate logits of the tokens of prompts that are being read.

    Args:
        hidden: ``[T, d]`` hidden states of a step, padding at the end.
        layer: index of the layer.
    """
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if not is_forward_context_available():
        return
    metadata: Any = get_forward_context().attn_metadata
    if not isinstance(metadata, dict):
        return  # vLLM measures memory
    step = next(iter(metadata.values()))
    reading = getattr(step, "reading", None)
    if reading is not None:
        reading.run_gate(hidden, layer)


def install() -> None:
    """Define the operator, and let vLLM's projections of layers with gates call it."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers.linear import QKVParallelLinear
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.utils.torch_utils import direct_register_custom_op

    if hasattr(QKVParallelLinear, "ag_layer"):
        return
    direct_register_custom_op(NAME, run_gate, mutates_args=["hidden"], fake_impl=lambda hidden, layer: None)
    init, forward = QKVParallelLinear.__init__, QKVParallelLinear.forward

    @functools.wraps(init)
    def new_init(self: Any, *args: Any, prefix: str = "", **kwargs: Any) -> None:
        init(self, *args, prefix=prefix, **kwargs)
        config = get_current_vllm_config_or_none()
        settings = None if config is None else settings_of(config)
        gates = None if settings is None else settings.made_policy.gates
        if gates is not None and (layer := extract_layer_index(prefix)) in gates.layer_indices:
            self.ag_layer = layer

    @functools.wraps(forward)
    def new_forward(self: Any, input_: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.ag_layer is not None:
            getattr(torch.ops.vllm, NAME)(input_, self.ag_layer)
        return forward(self, input_, *args, **kwargs)

    QKVParallelLinear.ag_layer = None
    QKVParallelLinear.__init__, QKVParallelLinear.forward = new_init, new_forward

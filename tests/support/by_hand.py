"""The oracle of gates: a Llama or Mistral forward pass of one unpadded row under dense masks."""

from typing import Any

import torch
from torch import Tensor

from ag.gates.gate import AttentionGates
from tests.support.dense import masked


@torch.no_grad()
def forward(
    model: Any, gates: AttentionGates, ids: Tensor, prompt: int, probabilities: list[Tensor] | None = None
) -> tuple[Tensor, dict[int, Tensor]]:
    """Return the logits ``[T, V]`` and, by layer, the flags ``[Hkv, prompt]`` of the row ``ids [T]``.

    With ``covers="all"`` the flags are those of the whole row. The gates' probabilities are added to the list
    ``probabilities``.
    """
    config, length = gates.config, len(ids)
    gated = length if config.covers == "all" else prompt
    causal = torch.ones(model.config.num_key_value_heads, length, length, dtype=torch.bool).tril()
    inputs: list[Tensor] = []
    flags: dict[int, Tensor] = {}

    def visible(index: int, hidden: Tensor) -> Tensor:
        """The visible pairs of a layer, whose gate reads its input or that of an earlier layer."""
        inputs.append(hidden[:gated])
        seen = causal.clone()
        if str(index) not in gates.layers:
            return seen
        logits = gates.layers[str(index)](inputs[index - config.layer_offset][None])[0]
        probability = torch.sigmoid(logits + config.bias)
        flags[index] = probability > config.threshold
        if probabilities is not None:
            probabilities.append(probability.flatten())
        for head, opened in enumerate(flags[index]):
            for t in range(config.sink_tokens, gated):
                if not opened[t]:
                    first = max(prompt, t + 1) if config.prefill == "dense" else t + 1
                    seen[head, max(first, t + config.recent_tokens) :, t] = False
        return seen

    return masked(model, ids, visible), flags


def greedy(model: Any, gates: AttentionGates, ids: Tensor, prompt: int, steps: int) -> list[int]:
    """Continue the row ``ids [T]``, whose first ``prompt`` tokens were the prompt, without an end; the new tokens."""
    for _ in range(steps):
        logits = forward(model, gates, ids, prompt)[0][-1]
        logits[model.config.eos_token_id] = float("-inf")
        ids = torch.cat([ids, logits.argmax()[None]])
    return ids[-steps:].tolist()


def kept(
    gates: AttentionGates, flags: Tensor, prompt: int, total: int, first: int = 0, window: int | None = None
) -> list[list[int]]:
    """Columns that a layer, which may have a window, holds after ``total`` tokens, a list for each KV head.

    ``first`` is the column of the first query of the last forward pass after the prompt; tokens that it saw are held.
    """
    config, first = gates.config, max(first, prompt)
    judged = total if config.covers == "all" else prompt
    return [
        [
            t
            for t in range(total)
            if (window is None or first - t < window)
            and (t >= judged or head[t] or t < config.sink_tokens or first - t < config.recent_tokens)
        ]
        for head in flags
    ]

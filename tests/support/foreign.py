"""Checkpoints of KVzap, Fast KVzip and TRIM-KV for the tiny models, of random weights."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ag.gates import folder

WIDTH, HEADS, GROUP, LAYERS, HIDDEN = 64, 2, 2, 3, 24
CLOSE = 1e-5  # as far as float32 may be from float64 here: sums of 64 products of normal numbers
EXACT = torch.float64


def draw(seed: int = 0) -> Callable[..., Tensor]:
    make = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=make)


def kvzap(
    path: Path, hidden: int | None = None, dtype: torch.dtype = torch.float32, **changes: Any
) -> dict[str, Tensor]:
    """Write what ``KVzapModel.save_pretrained`` writes: one module a layer, a linear map or two with a GELU."""
    path.mkdir(parents=True)
    random, state = draw(), dict[str, Tensor]()
    for layer in range(LAYERS):
        if hidden is None:
            state |= {f"layers.{layer}.weight": random(HEADS, WIDTH) / 8, f"layers.{layer}.bias": random(HEADS)}
        else:
            state |= {f"layers.{layer}.0.weight": random(hidden, WIDTH) / 8, f"layers.{layer}.0.bias": random(hidden)}
            state |= {f"layers.{layer}.2.weight": random(HEADS, hidden) / 4, f"layers.{layer}.2.bias": random(HEADS)}
    config: dict[str, Any] = {
        "architectures": ["KVzapModel"],
        "model_type": "kvzap",
        "input_dim": WIDTH,
        "output_dim": HEADS,
    }
    config |= {"input_dim": WIDTH, "hidden_dim": hidden, "n_modules": LAYERS} | changes
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: x.to(dtype) for name, x in state.items()}, path / "model.safetensors", {"format": "pt"})
    return {name: x.to(dtype).to(EXACT) for name, x in state.items()}


def fast_kvzip(path: Path, dim: int = 16, sinks: int = 16) -> list[dict[str, Tensor]]:
    """Write a file of Fast KVzip: queries of each query head with a bias, keys of each KV head, learned keys."""
    path.mkdir(parents=True)
    random = draw(1)
    states = [
        {
            "q_proj.weight": random(HEADS * GROUP * dim, WIDTH) / 8,
            "q_proj.bias": random(HEADS * GROUP * dim),
            "k_proj.weight": random(HEADS * dim, WIDTH) / 8,
            "q_norm.weight": 1 + random(dim) / 4,
            "k_norm.weight": 1 + random(dim) / 4,
            "k_base": random(HEADS, 1, sinks, dim),
            "b": random(HEADS, 1, GROUP),
        }
        for _ in range(LAYERS)
    ]
    torch.save({"module": states}, path / f"q{GROUP}_dim{dim}_sink{sinks}.pt")
    return [{name: x.to(EXACT) for name, x in state.items()} for state in states]


def trimkv(
    path: Path, dtype: torch.dtype = torch.float32, extra: dict[str, Tensor] | None = None, **changes: Any
) -> dict[str, Tensor]:
    """Write what its authors publish: the configuration of their model, and a state dict of the gates alone."""
    path.mkdir(parents=True)
    make, state = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for layer in range(LAYERS):
        gate = f"model.layers.{layer}.self_attn.retention_gate."
        for name, shape in (("linear1.weight", (HIDDEN, WIDTH)), ("linear1.bias", (HIDDEN,))):
            state[gate + name] = torch.randn(*shape, generator=make) / 4
        state[gate + "linear2.weight"] = torch.randn(HEADS, HIDDEN, generator=make)
        state[gate + "bias"] = torch.randn(HEADS, generator=make) + 3
    config: dict[str, Any] = {"architectures": ["TrimKVLlamaForCausalLM"], "model_type": "llama"}
    config |= {"retention_gate": "rg", "retention_gate_intermediate_size": HIDDEN, "hidden_size": WIDTH}
    config |= {"num_key_value_heads": HEADS, "num_hidden_layers": LAYERS, "hidden_act": "silu"}
    config |= {"base_model": "org/base", "memory_size": 512}
    (path / "config.json").write_text(json.dumps(config | {"trainable_params": "retention_gate"} | changes))
    torch.save({name: x.to(dtype) for name, x in (state | (extra or {})).items()}, path / "trimkv_weights.pth")
    return {name: x.to(dtype).to(EXACT) for name, x in state.items()}


def tokens(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(seed))


def inputs(model: Any, ids: Tensor) -> list[Tensor]:
    """What enters the attention of each layer of the plain model: ``[T, d]`` in float64."""
    found: list[Tensor] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: found.append(kwargs["hidden_states"][0].to(EXACT)), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return found


def on_hub(patch: pytest.MonkeyPatch, weights: str, repositories: dict[str, Path]) -> list[bool]:
    """Let folders be repositories of the hub; returns a list that will say of each download whether it has weights."""
    asked: list[bool] = []

    def download(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(weights in allow_patterns)
        return str(repositories[repository])

    patch.setattr(folder, "download", functools.cache(folder.download.__wrapped__))  # which remembers nothing yet
    patch.setattr(folder, "snapshot_download", download)
    return asked

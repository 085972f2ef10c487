"""Small exports for the tests, and ways to change one so that only its meaning is wrong."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from ag.config.gate import GateConfig
from ag.gates import export
from ag.gates.gate import AttentionGates

MODEL = LlamaConfig(
    num_hidden_layers=3,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=32,
    vocab_size=50,
)
SMALL = GateConfig(num_heads=2, head_dim=4)


def make_gates(seed: int = 0, config: GateConfig = SMALL, model: Any = MODEL) -> AttentionGates:
    torch.manual_seed(seed)
    return AttentionGates(model, config)


def make_adapter(seed: int = 0) -> PeftModel:
    torch.manual_seed(seed)
    base = LlamaForCausalLM(copy.deepcopy(MODEL)).eval()  # tests change the configuration of theirs
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(base, lora)


_exported_adapter = functools.cache(make_adapter)  # nothing changes this one


def make_export(path: Path, seed: int = 0) -> Path:
    adapter = _exported_adapter()
    export.save(path, make_gates(seed), base_model="org/base", adapter=adapter, metrics={"kept": 0.4})
    return path


def assert_same(found: AttentionGates, expected: AttentionGates) -> None:
    assert found.config == expected.config
    assert found.fingerprint == expected.fingerprint
    assert found.layer_indices == expected.layer_indices
    theirs = expected.state_dict()
    assert list(found.state_dict()) == list(theirs)
    for name, tensor in found.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, theirs[name].float()), name


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def hidden(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.parent.iterdir() if entry.name.startswith("."))


def reseal(folder: Path, info: Any) -> None:
    """Write a changed configuration with a right checksum, as a forger or another program would."""
    if isinstance(info, dict):
        rest = {name: value for name, value in info.items() if name != "checksum"}
        if "checksum" in info:
            digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
            info = rest | {"checksum": digest}
    (folder / "gate_config.json").write_text(json.dumps(info))


def read_json(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "gate_config.json").read_text()))


def change(*keys: str, value: Any = None, delete: bool = False) -> Callable[[Path], None]:
    """Return a damage: one value of ``gate_config.json`` replaced or deleted, with a right checksum."""

    def damage(folder: Path) -> None:
        info = read_json(folder)
        inner = info
        for key in keys[:-1]:
            inner = inner[key]
        if delete:
            del inner[keys[-1]]
        else:
            inner[keys[-1]] = value
        reseal(folder, info)

    return damage


def reweigh(mutate: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    """Return a damage: other weights, with their hash and the checksum made right again."""

    def damage(folder: Path) -> None:
        file = folder / "gates.safetensors"
        tensors = load_file(file)
        mutate(tensors)
        save_file(tensors, file)
        rehash(folder)

    return damage


def rehash(folder: Path) -> None:
    info = read_json(folder)
    info["sha256"]["gates.safetensors"] = hashlib.sha256((folder / "gates.safetensors").read_bytes()).hexdigest()
    reseal(folder, info)

"""Adapters beside the gates and alone, and models that they are merged into."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from ag.config import LoraConfig as LoraKeys
from ag.gates import adapters, export
from ag.gates.export import ExportError
from ag.gates.gate import AttentionGates
from ag.model.base import add_lora
from tests.support.bounds import bounded, hold
from tests.support.exports import MODEL, hidden, make_adapter, make_export, make_gates
from tests.support.refused import refuses
from tests.support.shapes import shaped


def test_an_adapter_without_gates(tmp_path: Path) -> None:
    adapted = make_adapter(1).eval()
    base, tokens = copy.deepcopy(adapted).unload(), torch.arange(8)[None]
    export.save_adapter(tmp_path / "e", adapted)
    assert adapters.is_adapter(tmp_path / "e") and not adapters.is_adapter(make_export(tmp_path / "whole"))
    assert export.adapter_path(tmp_path / "e") == tmp_path / "e" / "adapter"
    with torch.no_grad():
        assert torch.equal(export.load_adapter(base, tmp_path / "e")(tokens).logits, adapted(tokens).logits)
    before = export.adapter_checksum(tmp_path / "e")
    export.save_adapter(tmp_path / "same", adapted)
    export.save_adapter(tmp_path / "other", make_adapter(2))
    assert export.adapter_checksum(tmp_path / "same") == before != export.adapter_checksum(tmp_path / "other")
    assert export.adapter_checksum(tmp_path / "whole") == export.read_info(tmp_path / "whole")["checksum"]
    wide = LlamaConfig(**{**MODEL.to_dict(), "hidden_size": 128, "head_dim": 32})
    with refuses(ExportError, str(tmp_path / "e" / "adapter")):
        export.load_adapter(LlamaForCausalLM(wide), tmp_path / "e")


def test_adapter_errors(tmp_path: Path) -> None:
    export.save(tmp_path / "none", make_gates())
    with refuses(ExportError, str(tmp_path / "none"), "train=gates+lora"):
        export.load_adapter(LlamaForCausalLM(MODEL), tmp_path / "none")

    folder = make_export(tmp_path / "e")
    wide = LlamaConfig(**{**MODEL.to_dict(), "hidden_size": 128, "head_dim": 32})
    with refuses(ExportError, "'hidden_size': 64", "'hidden_size': 128"):
        export.load_adapter(LlamaForCausalLM(wide), folder)

    weights = folder / "adapter" / "adapter_model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-3] ^= 1
    weights.write_bytes(raw)
    with refuses(ExportError, "adapter_model.safetensors", "sha256"):
        export.load_adapter(LlamaForCausalLM(MODEL), folder)
    weights.unlink()
    with refuses(ExportError, "adapter_model.safetensors"):
        export.adapter_path(folder)

    broken = make_adapter()
    next(p for name, p in broken.named_parameters() if "lora_A" in name).data[0, 0] = float("nan")
    with refuses(ExportError, "lora_A.weight"):
        export.save(tmp_path / "nan", make_gates(), adapter=broken)
    assert not (tmp_path / "nan").exists() and hidden(folder) == []


def test_an_adapter_of_experts(tmp_path: Path) -> None:
    """Loaded it gives the same logits; merged, each expert's matrices are W + scale B A of its own A and B."""
    rank, scale, base = 2, 3.0, shaped("mixtral")
    adapted = add_lora(shaped("mixtral"), LoraKeys(rank=rank, alpha=rank * scale, targets=["all-linear"]))
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.eval()
    export.save(tmp_path / "e", make_gates(model=base.config), adapter=adapted)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        expected = adapted(tokens).logits
        assert (base(tokens).logits - expected).abs().max() > 0.1
        loaded = export.load_adapter(copy.deepcopy(base), tmp_path / "e")
        assert torch.equal(loaded(tokens).logits, expected)
    gates = AttentionGates.from_pretrained(tmp_path / "e")
    assert gates.adapter is not None
    assert (gates.adapter.times_in(loaded), gates.adapter.times_in(base)) == (1, 0)

    parts = load_file(tmp_path / "e" / "adapter" / "adapter_model.safetensors")
    merged = export.load_adapter(copy.deepcopy(base), tmp_path / "e", merge=True)
    for layer in range(3):
        name = f"base_model.model.model.layers.{layer}.mlp.experts"
        was, now = (model.get_submodule(f"model.layers.{layer}.mlp.experts") for model in (base, merged))
        # PEFT nests the two: `gate_up_proj` inside, of which one half is the gate's and one the other's
        for weight, prefix, r in (("gate_up_proj", f"{name}.base_layer", 2 * rank), ("down_proj", name, rank)):
            a, b = (bounded(parts[f"{prefix}.lora_{x}.weight"]) for x in "AB")
            for expert in range(4):
                mine = scale * b[:, expert::4] @ a[expert * r : (expert + 1) * r]
                hold(getattr(now, weight)[expert], bounded(getattr(was, weight)[expert]) + mine)


def test_what_cannot_be_exported_is_told_before(tmp_path: Path) -> None:
    gates, adapter = make_gates(), make_adapter()
    export.check(gates, adapter, merge=True)
    export.check(None, adapter, path=tmp_path / "new")
    export.check(gates, None, path=make_export(tmp_path / "e"))
    (tmp_path / "e" / "notes.txt").write_text("mine")
    with refuses(ExportError, str(tmp_path / "e"), "notes.txt"):
        export.check(gates, None, path=tmp_path / "e")

    trained = make_adapter()
    trained.get_base_model().lm_head.weight.requires_grad_(True)
    for refused in (lambda: export.check(gates, trained), lambda: export.save(tmp_path / "t", gates, adapter=trained)):
        with refuses(ExportError, "base_model.model.lm_head.weight", "1", "lora.targets=[q_proj,k_proj,v_proj,o_proj]"):
            refused()
    with refuses(ExportError, "['mine']", "'default'"):
        export.check(None, get_peft_model(LlamaForCausalLM(MODEL), LoraConfig(target_modules=["q_proj"]), "mine"))

    odd = make_gates()
    odd.fingerprint["num_heads"] = 5
    with refuses(ExportError, "fingerprint.num_kv_heads=2", "num_heads=5"):
        export.check(odd, None)
    adapter.get_base_model().config.quantization_config = {"bits": 4}
    export.check(gates, adapter)
    with refuses(ExportError, "export.merge=false", "model.quantization=none"):
        export.check(gates, adapter, merge=True)

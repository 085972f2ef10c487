"""Adapters beside the gates and alone, and models that they are merged into."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import torch
from exports import MODEL, hidden, make_adapter, make_export, make_gates
from peft import LoraConfig, PeftModel, get_peft_model
from refused import refuses
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ag.gates import export
from ag.gates.export import ExportError


def test_adapter_gives_the_same_logits(tmp_path: Path) -> None:
    adapted = make_adapter(1).eval()
    base = copy.deepcopy(adapted).unload()
    export.save(tmp_path / "e", make_gates(), adapter=adapted)
    assert export.adapter_path(tmp_path / "e") == tmp_path / "e" / "adapter"
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        expected = adapted(tokens).logits
        assert (base(tokens).logits - expected).abs().max() > 1e-3
        loaded = export.load_adapter(copy.deepcopy(base), tmp_path / "e")
        assert isinstance(loaded, PeftModel)
        assert not any(parameter.requires_grad for parameter in loaded.parameters())
        assert torch.equal(loaded(tokens).logits, expected)
        merged = export.load_adapter(copy.deepcopy(base), tmp_path / "e", merge=True)
        assert isinstance(merged, LlamaForCausalLM)
        torch.testing.assert_close(merged(tokens).logits, expected, atol=1e-5, rtol=0)


def test_an_adapter_without_gates(tmp_path: Path) -> None:
    adapted = make_adapter(1).eval()
    base, tokens = copy.deepcopy(adapted).unload(), torch.arange(8)[None]
    export.save_adapter(tmp_path / "e", adapted)
    assert export.is_adapter(tmp_path / "e") and not export.is_adapter(make_export(tmp_path / "whole"))
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

    named = get_peft_model(LlamaForCausalLM(MODEL), LoraConfig(target_modules=["q_proj"]), adapter_name="mine")
    with refuses(ExportError, "['mine']", "'default'"):
        export.save(tmp_path / "named", make_gates(), adapter=named)
    broken = make_adapter()
    next(p for name, p in broken.named_parameters() if "lora_A" in name).data[0, 0] = float("nan")
    with refuses(ExportError, "lora_A.weight"):
        export.save(tmp_path / "nan", make_gates(), adapter=broken)
    assert not (tmp_path / "named").exists() and not (tmp_path / "nan").exists() and hidden(folder) == []


def test_merged_model_stands_alone(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")))
    adapted = make_adapter(2).eval()
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        expected = adapted(tokens).logits
    export.save_adapter(tmp_path / "adapter", adapted)
    export.save_merged(adapted, tmp_path / "merged", tokenizer, tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, expected, atol=1e-5, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").get_vocab() == {"a": 0, "b": 1}
    assert not any("lora" in name or "base_layer" in name for name in model.state_dict())
    with refuses(ExportError, str(tmp_path / "merged")):
        export.save_merged(make_adapter(), tmp_path / "merged", tokenizer, tmp_path / "adapter")

    quantised = make_adapter()
    quantised.get_base_model().config.quantization_config = {"load_in_4bit": True}
    with refuses(ExportError, "export.merge=false"):
        export.save_merged(quantised, tmp_path / "nf4", tokenizer, tmp_path / "adapter")
    assert not (tmp_path / "nf4").exists() and hidden(tmp_path / "merged") == []


def link_folder_outside(folder: Path) -> None:
    shutil.move(folder / "adapter", folder.parent / "adapter")
    (folder / "adapter").symlink_to(folder.parent / "adapter")


def test_adapter_folder_must_be_inside(tmp_path: Path) -> None:
    folder = make_export(tmp_path / "e")
    link_folder_outside(folder)
    with refuses(ExportError, "adapter_config.json", str(tmp_path / "adapter")):
        export.adapter_path(folder)

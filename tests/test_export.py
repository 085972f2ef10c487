"""Exports: they load as written or not at all, and neither a failure nor a kill leaves half a folder."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from ag.config.gate import GateConfig
from ag.gates import export, hub
from ag.gates.export import ExportError
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
PNG = b"\x89PNG\r\n\x1a\n picture"


def make_gates(seed: int = 0, config: GateConfig = SMALL, model: Any = MODEL) -> AttentionGates:
    torch.manual_seed(seed)
    return AttentionGates(model, config)


def make_adapter(seed: int = 0) -> PeftModel:
    torch.manual_seed(seed)
    base = LlamaForCausalLM(MODEL).eval()
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(base, lora)


def make_export(path: Path, seed: int = 0) -> Path:
    export.save(path, make_gates(seed), base_model="org/base", adapter=make_adapter(), metrics={"kept": 0.4})
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


# What is written is what is read


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        GateConfig(kind="linear", bias=0.0, threshold=0.3),
        GateConfig(num_heads=3, head_dim=5, shortcut=True, granularity="query_head", recent_tokens=7, sink_tokens=2),
        GateConfig(num_heads=1, head_dim=8, layer_offset=1, first_layer=2, scope="prompt", prefill="dense"),
        GateConfig(kind="mlp", hidden=9, covers="all", granularity="query_head"),
        GateConfig(num_heads=2, head_dim=4, window=3, covers="all", shortcut=True),
    ],
    ids=["attention", "linear", "query_head-shortcut", "offset-first_layer", "mlp-all", "window-all"],
)
def test_round_trip_is_bit_exact(tmp_path: Path, config: GateConfig) -> None:
    gates = make_gates(config=config)
    export.save(tmp_path / "e", gates)
    loaded = AttentionGates.from_pretrained(tmp_path / "e", MODEL)
    assert_same(loaded, gates)
    assert not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    hidden_states = torch.randn(2, 5, 64)
    for ours, theirs in zip(loaded.layers.values(), gates.layers.values(), strict=True):
        assert torch.equal(ours(hidden_states), theirs(hidden_states))


def test_bfloat16_gates_are_written_as_the_same_values_in_float32(tmp_path: Path) -> None:
    gates = make_gates().bfloat16()
    export.save(tmp_path / "e", gates)
    assert_same(AttentionGates.from_pretrained(tmp_path / "e"), gates)


def test_methods_of_the_gates(tmp_path: Path) -> None:
    gates = make_gates()
    gates.save_pretrained(tmp_path / "a" / "b")
    assert_same(AttentionGates.from_pretrained(tmp_path / "a" / "b"), gates)
    assert export.adapter_path(tmp_path / "a" / "b") is None


def test_alternating_windows_survive_without_the_model(tmp_path: Path) -> None:
    model = Gemma2Config(num_hidden_layers=5, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    windowed = [index for index, kind in enumerate(model.layer_types) if kind == "sliding_attention"]
    assert 0 < len(windowed) < 5
    export.save(tmp_path / "e", make_gates(model=model))
    loaded = AttentionGates.from_pretrained(tmp_path / "e", model)
    assert loaded.layer_indices == [index for index in range(5) if index not in windowed]


def test_content_of_the_folder(tmp_path: Path) -> None:
    figure = tmp_path / "heat.png"
    figure.write_bytes(PNG)
    folder = tmp_path / "e"
    metrics = {"kept": 0.4375, "val/loss": torch.tensor(2.5), "val/perplexity": float("inf")}
    gates = make_gates()
    export.save(
        folder,
        gates,
        base_model="org/base",
        base_revision="abc",
        adapter=make_adapter(),
        metrics=metrics,
        figure=figure,
    )
    assert sorted(snapshot(folder)) == [
        "README.md",
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "figure.png",
        "gate_config.json",
        "gates.safetensors",
    ]
    assert hidden(folder) == []
    info = export.read_info(folder)
    assert info["schema_version"] == "1.2"
    assert info["versions"]["torch"] == torch.__version__
    assert info["base_model"]["name"] == "org/base"
    assert info["base_model"]["revision"] == "abc"
    assert info["base_model"]["fingerprint"] == {
        "model_type": "llama",
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "hidden_size": 64,
        "windowed_layers": [],
    }
    assert info["gate"]["head_dim"] == 4
    assert (info["gate"]["covers"], info["gate"]["window"], info["gate"]["hidden"]) == ("prompt", 0, 64)
    assert info["keep_rate"] == 0.4375
    assert info["metrics"] == {"val/loss": 2.5, "val/perplexity": None}
    for name, digest in info["sha256"].items():
        assert digest == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    weights = load_file(folder / "gates.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {
        f"layers.{layer}.{name}.weight": shape
        for layer in range(3)
        for name, shape in {"q_proj": (8, 64), "k_proj": (8, 64), "v_proj": (8, 64), "o_proj": (2, 8)}.items()
    }
    assert (folder / "figure.png").read_bytes() == PNG
    assert json.loads((folder / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == "org/base"

    card = (folder / "README.md").read_text()
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front)["base_model"] == "org/base"
    for part in (
        'ag.EvictionCache(model, "gates:PATH")',
        "python -m ag.generate gates=PATH prompt=",
        'ag.gates.export.load_adapter(model, "PATH")',
        "| kept share of the prompt's entries | 0.4375 |",
        "| val/loss | 2.5 |",
        "| head_dim | 4 |",
        "(figure.png)",
        "revision `abc`",
    ):
        assert part in body


def test_a_local_base_model_is_no_hub_id_in_the_card(tmp_path: Path) -> None:
    export.save(tmp_path / "e", make_gates(), base_model=str(tmp_path))
    front = (tmp_path / "e" / "README.md").read_text().split("---\n")[1]
    assert "base_model" not in yaml.safe_load(front)


@pytest.mark.parametrize("adapter", [True, False], ids=["adapter", "plain"])
def test_the_python_lines_of_the_card_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], adapter: bool) -> None:
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(["?", "Once", "upon", "a", "time"])}, "?"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "base")
    LlamaForCausalLM(MODEL).save_pretrained(tmp_path / "base")
    export.save(tmp_path / "e", make_gates(), adapter=make_adapter() if adapter else None)
    card = (tmp_path / "e" / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0]
    assert ("load_adapter" in code) == adapter
    code = code.replace("PATH", str(tmp_path / "e")).replace("BASE", str(tmp_path / "base"))
    exec(code, {})
    assert capsys.readouterr().out.startswith("Once upon a time")


# Adapters


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
    with pytest.raises(ExportError, match="it does not fit this model"):
        export.load_adapter(LlamaForCausalLM(wide), tmp_path / "e")


def test_adapter_errors(tmp_path: Path) -> None:
    export.save(tmp_path / "none", make_gates())
    with pytest.raises(ExportError, match=r"no adapter folder: expected one trained with train=gates\+lora"):
        export.load_adapter(LlamaForCausalLM(MODEL), tmp_path / "none")

    folder = make_export(tmp_path / "e")
    wide = LlamaConfig(**{**MODEL.to_dict(), "hidden_size": 128, "head_dim": 32})
    with pytest.raises(ExportError, match="'hidden_size': 64.*this model has.*'hidden_size': 128"):
        export.load_adapter(LlamaForCausalLM(wide), folder)

    weights = folder / "adapter" / "adapter_model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-3] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(ExportError, match="adapter_model.safetensors: sha256 .* was damaged"):
        export.load_adapter(LlamaForCausalLM(MODEL), folder)
    weights.unlink()
    with pytest.raises(ExportError, match="adapter_model.safetensors: no such file"):
        export.adapter_path(folder)

    named = get_peft_model(LlamaForCausalLM(MODEL), LoraConfig(target_modules=["q_proj"]), adapter_name="mine")
    with pytest.raises(ExportError, match=r"adapters \['mine'\]: expected one named 'default'"):
        export.save(tmp_path / "named", make_gates(), adapter=named)
    broken = make_adapter()
    next(p for name, p in broken.named_parameters() if "lora_A" in name).data[0, 0] = float("nan")
    with pytest.raises(ExportError, match="lora_A.weight has NaN"):
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
    with pytest.raises(ExportError, match=f"{tmp_path / 'merged'}: "):
        export.save_merged(make_adapter(), tmp_path / "merged", tokenizer, tmp_path / "adapter")

    quantised = make_adapter()
    quantised.get_base_model().config.quantization_config = {"load_in_4bit": True}
    with pytest.raises(ExportError, match="is quantised.*set export.merge=false"):
        export.save_merged(quantised, tmp_path / "nf4", tokenizer, tmp_path / "adapter")
    assert not (tmp_path / "nf4").exists() and hidden(tmp_path / "merged") == []


# What is in the way


def test_replacing_an_export_leaves_nothing_of_it(tmp_path: Path) -> None:
    folder = make_export(tmp_path / "e")
    export.save(folder, make_gates(7))
    assert sorted(snapshot(folder)) == ["README.md", "gate_config.json", "gates.safetensors"]
    assert_same(AttentionGates.from_pretrained(folder), make_gates(7))
    assert hidden(folder) == []


def test_an_empty_folder_and_a_link_to_an_export_are_filled(tmp_path: Path) -> None:
    (tmp_path / "e").mkdir()
    export.save(tmp_path / "e", make_gates(1))
    (tmp_path / "link").symlink_to("e")
    export.save(tmp_path / "link", make_gates(2))
    assert (tmp_path / "link").is_symlink()
    assert_same(AttentionGates.from_pretrained(tmp_path / "e"), make_gates(2))


@pytest.mark.parametrize("extra", ["thesis.txt", "export/thesis.txt"], ids=["folder", "export"])
def test_foreign_content_is_left_alone(tmp_path: Path, extra: str) -> None:
    if extra.startswith("export"):
        make_export(tmp_path / "work" / "export")
    file = tmp_path / "work" / extra
    file.parent.mkdir(exist_ok=True, parents=True)
    file.write_text("years of work")
    before = snapshot(tmp_path)
    with pytest.raises(ExportError, match=f"{file.parent}: .*not of an export"):
        export.save(file.parent, make_gates(3))
    with pytest.raises(ExportError, match=f"{file}: "):
        export.save(file, make_gates(3))
    assert snapshot(tmp_path) == before


def test_a_figure_that_is_missing_costs_nothing(tmp_path: Path) -> None:
    folder = make_export(tmp_path / "e")
    before = snapshot(folder)
    with pytest.raises(FileNotFoundError, match="none.png"):
        export.save(folder, make_gates(3), figure=tmp_path / "none.png")
    assert snapshot(folder) == before


def test_gates_with_nan_are_not_written(tmp_path: Path) -> None:
    gates = make_gates()
    gates.layers["1"].o_proj.weight.data[0, 0] = float("inf")
    with pytest.raises(ExportError, match="layers.1.o_proj.weight has NaN or infinite values"):
        export.save(tmp_path / "e", gates)
    assert list(tmp_path.iterdir()) == []


# Damage


def truncate(folder: Path) -> None:
    file = folder / "gates.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def flip(folder: Path) -> None:
    file = folder / "gates.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


def corrupt_header(folder: Path) -> None:
    file = folder / "gates.safetensors"
    file.write_bytes(file.read_bytes().replace(b"{", b"[", 1))
    rehash(folder)


def link_outside(folder: Path) -> None:
    outside = folder.parent / "outside"
    shutil.move(folder / "gates.safetensors", outside)
    (folder / "gates.safetensors").symlink_to(outside)


def link_folder_outside(folder: Path) -> None:
    shutil.move(folder / "adapter", folder.parent / "adapter")
    (folder / "adapter").symlink_to(folder.parent / "adapter")


def put(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def grow(folder: Path) -> None:
    with (folder / "gates.safetensors").open("ab") as file:
        file.truncate(10 << 20)


def edit_threshold(folder: Path) -> None:
    file = folder / "gate_config.json"
    file.write_text(file.read_text().replace('"threshold": 0.5', '"threshold": 0.6'))


def geometry(key: str, value: Any) -> Callable[[Path], None]:
    return change("base_model", "fingerprint", key, value=value)


def o_proj(value: torch.Tensor) -> Callable[[Path], None]:
    return reweigh(lambda tensors: tensors.update({"layers.0.o_proj.weight": value}))


def rename_weight(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.3.q_proj.weight"] = tensors.pop("layers.2.q_proj.weight")


NAN, INF = float("nan"), float("inf")
JSON_FILE, WEIGHTS_FILE = "gate_config.json", "gates.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "no such folder: expected an export"),
    "no weights": (lambda folder: (folder / WEIGHTS_FILE).unlink(), "gates.safetensors: no such file"),
    "no config": (lambda folder: (folder / JSON_FILE).unlink(), "gate_config.json: no such file"),
    "empty config": (put(JSON_FILE, b""), "gate_config.json: not JSON"),
    "not JSON": (put(JSON_FILE, b"{'a': 1}"), "gate_config.json: not JSON"),
    "not UTF-8": (put(JSON_FILE, b'{"a": "\xff\xfe"}'), "gate_config.json: not JSON"),
    "nested": (put(JSON_FILE, b"[" * 100_000), "gate_config.json: not JSON"),
    "a list": (put(JSON_FILE, b"[1]"), r"content=\[1\]: expected a JSON object"),
    "huge config": (put(JSON_FILE, b" " * (1 << 20) + b"{}"), "1048578 bytes: expected at most 1048576"),
    "schema 2": (change("schema_version", value="2.0"), "schema_version='2.0': expected 1.x; update ag"),
    "no schema": (change("schema_version", delete=True), "schema_version=None: expected 1.x"),
    "schema number": (change("schema_version", value=1.0), "schema_version=1.0: expected 1.x"),
    "missing key": (change("metrics", delete=True), r"missing keys \['metrics'\]"),
    "extra key": (change("colour", value="red"), r"unknown keys \['colour'\]"),
    "missing gate key": (change("gate", "bias", delete=True), r"gate: missing keys \['bias'\]"),
    "extra gate key": (change("gate", "beta", value=1), r"gate: missing keys \[\], unknown keys \['beta'\]"),
    "gate list": (change("gate", value=[]), r"gate=\[\]: expected a JSON object"),
    "gate range": (change("gate", "threshold", value=1.5), "gate.threshold=1.5: expected a probability"),
    "gate infinite": (change("gate", "bias", value=INF), "gate.bias=inf: expected a finite number"),
    "gate huge": (change("gate", "bias", value=10**400), "gate.bias=1000+: expected a finite number"),
    "gate choice": (change("gate", "scope", value="all"), "gate.scope='all': expected causal or prompt"),
    "gate type": (change("gate", "shortcut", value=1), "gate.shortcut=1: expected a bool"),
    "gate bool": (change("gate", "num_heads", value=True), "gate.num_heads=True: expected an integer"),
    "gate forged": (
        change("gate", "head_dim", value=1 << 40),
        "gate.head_dim=1099511627776: expected an int",
    ),
    "gate covers": (change("gate", "covers", value="some"), "gate.covers='some': expected prompt or all"),
    "gate without covers": (change("gate", "covers", delete=True), r"gate: missing keys \['covers'\]"),
    "gate zero": (change("gate", "num_heads", value=0), "gate.num_heads=0: expected at least 1"),
    "first layer": (change("gate", "first_layer", value=3), "gate.first_layer=3: the model has 3 layers"),
    "layers": (geometry("num_layers", 10**6), "num_layers=1000000: expected an integer from 1 to 4096"),
    "kv heads": (geometry("num_kv_heads", 3), "num_kv_heads=3: expected a divisor of num_heads=4"),
    "windows": (geometry("windowed_layers", ["a"]), "windowed_layers='a': expected an integer"),
    "all windowed": (geometry("windowed_layers", [0, 1, 2]), "no layer gets a gate"),
    "base name": (change("base_model", "name", value=None), "base_model.name=None: expected text"),
    "keep rate": (change("keep_rate", value=1.5), "keep_rate=1.5: expected a number from 0 to 1"),
    "metric": (change("metrics", "loss", value=NAN), "metrics.loss=nan: expected a finite number or null"),
    "versions": (change("versions", "torch", value=2), "versions.torch=2: expected text"),
    "no hash": (change("sha256", value={}), r"sha256: missing keys \['gates.safetensors'\]"),
    "path in hash": (
        change("sha256", "../x", value=""),
        r"sha256: missing keys \[\], unknown keys \['../x'\]",
    ),
    "hash": (change("sha256", WEIGHTS_FILE, value="0" * 64), "gates.safetensors: sha256 .*expected 0000"),
    "edited": (edit_threshold, "checksum=.*a value was changed or damaged"),
    "bit flip": (flip, "gates.safetensors: sha256 .*the file was damaged"),
    "truncated": (truncate, "bytes: expected .*it was truncated"),
    "too long": (grow, "10485760 bytes: expected at most"),
    "corrupt": (corrupt_header, "gates.safetensors: not safetensors"),
    "renamed weight": (
        reweigh(rename_weight),
        r"missing keys \['layers.2.q_proj.weight'\], unknown keys \['layers.3.q_proj.weight'\]",
    ),
    "extra weight": (reweigh(lambda t: t.update(extra=torch.ones(1))), r"unknown keys \['extra'\]"),
    "shape": (o_proj(torch.ones(2, 9)), r"o_proj.weight is .*\(2, 9\)\): expected .*\(2, 8\)\)"),
    "transposed": (o_proj(torch.ones(8, 2)), r"\(8, 2\)\): expected .*\(2, 8\)\)"),
    "dtype": (o_proj(torch.ones(2, 8).double()), "o_proj.weight is .*float64.*expected .*float32"),
    "NaN": (o_proj(torch.full((2, 8), NAN)), "o_proj.weight has NaN or infinite"),
    "infinite": (o_proj(torch.full((2, 8), INF)), "o_proj.weight has NaN or infinite"),
    "link": (link_outside, "a link to .*outside: expected a file inside the export"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_has_its_own_message(tmp_path: Path, damage: str) -> None:
    folder = make_export(tmp_path / "e")
    apply, message = DAMAGES[damage]
    apply(folder)
    with pytest.raises(ExportError, match=message) as caught:
        AttentionGates.from_pretrained(folder)
    text = str(caught.value)
    assert text.startswith(str(folder)) and text.endswith(".") and "\n" not in text
    assert re.search("expected|choose", text)


def test_adapter_folder_must_be_inside(tmp_path: Path) -> None:
    folder = make_export(tmp_path / "e")
    link_folder_outside(folder)
    with pytest.raises(ExportError, match="adapter_config.json: a link to .*expected a file inside"):
        export.adapter_path(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 4}, "'num_layers': 3}, this model has {'num_layers': 4}"),
        ({"hidden_size": 32, "head_dim": 16}, "'hidden_size': 64}, this model has {'hidden_size': 32}"),
        ({"num_key_value_heads": 4}, "'num_kv_heads': 2}, this model has {'num_kv_heads': 4}"),
        ({"head_dim": 32}, "'head_dim': 16}, this model has {'head_dim': 32}"),
        (
            {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
            "'windowed_layers': \\[0\\]",
        ),
    ],
)
def test_another_base_model_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = make_export(tmp_path / "e")
    other = copy.deepcopy(MODEL)
    for name, value in changes.items():
        setattr(other, name, value)
    with pytest.raises(ExportError, match=f"made for org/base with .*{message}"):
        AttentionGates.from_pretrained(folder, other)


def test_minor_schema_with_known_keys_loads(tmp_path: Path) -> None:
    folder = make_export(tmp_path / "e")
    change("schema_version", value="1.7")(folder)
    assert_same(AttentionGates.from_pretrained(folder), make_gates())


@pytest.mark.parametrize("place", [("gate",), ()], ids=["gate", "content"])
def test_keys_of_a_newer_schema_are_named(tmp_path: Path, place: tuple[str, ...]) -> None:
    folder = make_export(tmp_path / "e")
    change(*place, "warp", value=3)(folder)
    change("schema_version", value="1.7")(folder)
    message = "schema_version='1.7': expected at most 1.2, which knows no warp; a newer ag wrote it: update ag"
    with pytest.raises(ExportError, match=message):
        AttentionGates.from_pretrained(folder)


@pytest.mark.parametrize("schema", ["1.0", "1.1"])
def test_gates_from_before_cover_the_prompt_and_look_at_all_of_it(tmp_path: Path, schema: str) -> None:
    """Schemas before 1.2 lacked three keys; a file of theirs that has one of them is no such file."""
    folder = make_export(tmp_path / "e")
    info = read_json(folder)
    for name in ("hidden", "window", "covers"):
        del info["gate"][name]
    if schema == "1.0":
        del info["adapter"]
    reseal(folder, info | {"schema_version": schema})
    loaded = AttentionGates.from_pretrained(folder)
    assert_same(loaded, make_gates())
    assert (loaded.config.covers, loaded.config.window) == ("prompt", 0)
    assert export.read_info(folder)["gate"]["covers"] == "prompt"
    change("gate", "covers", value="all")(folder)
    with pytest.raises(ExportError, match=r"gate: missing keys \[\], unknown keys \['covers'\]"):
        AttentionGates.from_pretrained(folder)


def test_flipped_bits_never_load_as_something_else(tmp_path: Path) -> None:
    folder = make_export(tmp_path / "e")
    rng = random.Random(0)
    for name, spare in {"gates.safetensors": 0, "gate_config.json": 5}.items():
        file = folder / name
        raw = file.read_bytes()
        loaded = 0
        for _ in range(50):
            damaged = bytearray(raw)
            damaged[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            file.write_bytes(damaged)
            try:
                gates = AttentionGates.from_pretrained(folder)
            except ExportError:
                continue
            loaded += 1
            assert_same(gates, make_gates())
        assert loaded <= spare
        file.write_bytes(raw)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = make_export(tmp_path_factory.mktemp("fuzz") / "e")
    return folder, (folder / "gate_config.json").read_bytes()


def load_or_refuse(folder: Path) -> None:
    try:
        gates = AttentionGates.from_pretrained(folder)
    except ExportError:
        return
    for parameter, expected in zip(gates.parameters(), make_gates().parameters(), strict=True):
        assert torch.equal(parameter, expected)


FUZZ = settings(max_examples=150)


@FUZZ
@given(start=st.integers(0, 2000), length=st.integers(0, 50), insert=st.binary(max_size=30))
def test_fuzzed_bytes_of_the_configuration(fuzzed: tuple[Path, bytes], start: int, length: int, insert: bytes) -> None:
    folder, raw = fuzzed
    (folder / "gate_config.json").write_bytes(raw[:start] + insert + raw[start + length :])
    load_or_refuse(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@FUZZ
@given(data=st.data(), value=JSON | st.integers(0, 5000))
def test_fuzzed_values_of_the_configuration(fuzzed: tuple[Path, bytes], data: st.DataObject, value: Any) -> None:
    folder, raw = fuzzed
    info = json.loads(raw)
    inner = info
    while True:
        key = data.draw(st.sampled_from(sorted(inner)))
        if not isinstance(inner[key], dict) or not inner[key] or data.draw(st.integers(0, 4)) == 0:
            break
        inner = inner[key]
    inner[key] = value
    reseal(folder, info)
    load_or_refuse(folder)


# Failures while writing


class Trap:
    """Counts the operations that touch the disk and strikes at the n-th."""

    def __init__(self, at: int, strike: Callable[[], None]) -> None:
        self.at, self.strike, self.seen, self.names = at, strike, 0, list[str]()

    def wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def trapped(*args: Any, **kwargs: Any) -> Any:
            self.seen += 1
            self.names.append(name)
            if self.seen == self.at:
                if name == "write":
                    original(args[0], args[1][: len(args[1]) // 2])
                self.strike()
            return original(*args, **kwargs)

        return trapped

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for owner, attribute, name in (
            (os, "fsync", "fsync"),
            (os, "rename", "rename"),
            (Path, "write_bytes", "write"),
            (Path, "mkdir", "mkdir"),
            (sys.modules["peft.peft_model"], "safe_save_file", "adapter"),
        ):
            monkeypatch.setattr(owner, attribute, self.wrap(name, getattr(owner, attribute)))


def no_space() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("replaces", [True, False])
def test_every_failing_operation_leaves_the_earlier_export(tmp_path: Path, replaces: bool) -> None:
    folder = tmp_path / "e"
    struck, operation = list[str](), 0
    while True:
        operation += 1
        shutil.rmtree(folder, ignore_errors=True)
        if replaces:
            make_export(folder, seed=1)
        before = snapshot(folder)
        trap = Trap(operation, no_space)
        with pytest.MonkeyPatch.context() as patch:
            trap.install(patch)
            try:
                make_export(folder, seed=2)
                break
            except ExportError as error:
                assert re.search(r"could not be written \(.*No space left.*expected a disk with room", str(error))
        struck.append(trap.names[operation - 1])
        renamed = trap.names[: operation - 1].count("rename") == (2 if replaces else 1)
        if renamed:  # only the flush of the new name failed: the new export is whole
            assert_same(AttentionGates.from_pretrained(folder), make_gates(2))
        else:
            assert snapshot(folder) == before and folder.exists() == replaces
            assert hidden(folder) == []
        make_export(folder, seed=3)
        assert_same(AttentionGates.from_pretrained(folder), make_gates(3))
        assert hidden(folder) == []
    counts = {name: struck.count(name) for name in set(struck)}
    assert counts["write"] == 4 and counts["adapter"] == 1 and counts["mkdir"] >= 2
    assert counts["rename"] == (2 if replaces else 1) and counts["fsync"] == 8  # 5 files, 2 folders, the parent


def test_an_interrupt_between_the_renames_restores_the_earlier_export(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    folder = make_export(tmp_path / "e", seed=1)
    before = snapshot(folder)
    with pytest.MonkeyPatch.context() as patch:
        Trap(1, lambda: None).install(patch)
        trap = Trap(2, interrupt)
        patch.setattr(os, "rename", trap.wrap("rename", os.rename))
        with pytest.raises(KeyboardInterrupt):
            make_export(folder, seed=2)
    assert snapshot(folder) == before and hidden(folder) == []


def test_an_export_set_aside_by_a_kill_survives_a_failing_one(tmp_path: Path) -> None:
    folder = make_export(tmp_path / "e", seed=1)
    before = snapshot(folder)
    folder.rename(tmp_path / ".e.ag-old")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_bytes", lambda *_: no_space())
        with pytest.raises(ExportError, match="No space left"):
            make_export(folder, seed=2)
    assert snapshot(folder) == before and hidden(folder) == []


def run_here(call: str, *prefix: str) -> str:
    """Run a function of this file in a fresh process and return what it prints."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_export; {call}"
    done = subprocess.run(
        [*prefix, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def write_version(folder: Path, number: int, gates: AttentionGates, adapter: PeftModel) -> None:
    """Export a version whose every part tells its number, so that a mixture would show."""
    for parameter in (*gates.parameters(), *(p for n, p in adapter.named_parameters() if "lora_" in n)):
        parameter.data.fill_(number)
    export.save(folder, gates, base_model=f"org/{number}", adapter=adapter, metrics={"number": number})


def version_of(folder: Path) -> int:
    """Return the number of a version after checking that all of the folder is of that version."""
    info = export.read_info(folder)
    number = int(info["metrics"]["number"])
    assert info["base_model"]["name"] == f"org/{number}"
    values = [*AttentionGates.from_pretrained(folder, MODEL).parameters()]
    assert export.adapter_path(folder) == folder / "adapter"
    values += load_file(folder / "adapter" / "adapter_model.safetensors").values()
    assert all((value == number).all() for value in values)
    assert f"`org/{number}`" in (folder / "README.md").read_text()
    return number


def child(action: Callable[[], None], kill_after: float | None = None) -> bool:
    """Fork, run, and return whether the child ended by itself."""
    pid = os.fork()
    if pid == 0:
        action()
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    return os.WIFEXITED(os.waitpid(pid, 0)[1])


def look_after_a_kill(folder: Path) -> tuple[bool, bool]:
    """Return (a write was under way, the export's name was free); raise when what is there is not whole."""
    new, old = (folder.with_name(f".{folder.name}.ag-{role}") for role in ("new", "old"))
    under_way = new.exists() or old.exists()
    if folder.exists():
        version_of(folder)
        return under_way, False
    with pytest.raises(ExportError, match="a killed export left the earlier one in .*ag-old: rename it back"):
        AttentionGates.from_pretrained(folder)
    version_of(old)
    return under_way, True


def kill_at_random(path: str) -> None:
    folder, gates, adapter, rng = Path(path), make_gates(), make_adapter(), random.Random(0)
    write_version(folder, 0, gates, adapter)

    def write_forever() -> None:
        for number in range(1, 10**6):
            write_version(folder, number, gates, adapter)

    looks = []
    for _ in range(20):
        assert not child(write_forever, kill_after=rng.uniform(0.01, 0.15))
        looks.append(look_after_a_kill(folder))
    write_version(folder, 99, gates, adapter)
    assert version_of(folder) == 99 and hidden(folder) == []
    print(json.dumps({"under_way": sum(look[0] for look in looks), "absent": sum(look[1] for look in looks)}))


def kill_at_every_operation(path: str) -> None:
    folder, gates, adapter = Path(path), make_gates(), make_adapter()
    looks, operation, finished = [], 0, False
    while not finished:
        operation += 1
        write_version(folder, 1, gates, adapter)
        assert hidden(folder) == []

        def write_and_die(at: int = operation) -> None:
            Trap(at, lambda: os.kill(os.getpid(), signal.SIGKILL)).install(pytest.MonkeyPatch())
            write_version(folder, 2, gates, adapter)

        finished = child(write_and_die)
        looks.append((*look_after_a_kill(folder), version_of(folder) if folder.exists() else None))
    print(json.dumps(looks))


@pytest.mark.slow
def test_random_kills_never_leave_half_an_export(tmp_path: Path) -> None:
    seen = json.loads(run_here(f"test_export.kill_at_random({str(tmp_path / 'e')!r})"))
    assert seen["under_way"] >= 5
    assert seen["absent"] <= seen["under_way"]


@pytest.mark.slow
def test_a_kill_at_every_operation_never_leaves_half_an_export(tmp_path: Path) -> None:
    looks = json.loads(run_here(f"test_export.kill_at_every_operation({str(tmp_path / 'e')!r})"))
    versions = [version for _, _, version in looks]
    assert versions.count(None) == 1  # between the two renames
    gap = versions.index(None)
    assert versions == [1] * gap + [None] + [2] * (len(versions) - gap - 1)
    assert len(looks) > 15 and looks[-1] == [False, False, 2]


def fill_a_disk(path: str) -> None:
    """Export on a disk of 512 KiB with ever more room, until it fits; the earlier export stays whole."""
    folder, gates, adapter = Path(path) / "e", make_gates(), make_adapter()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", path], check=True)
    write_version(folder, 1, gates, adapter)
    refused = 0
    ballast = Path(path) / "ballast"
    for room in range(0, 512 << 10, 8 << 10):
        free = shutil.disk_usage(path).free
        ballast.write_bytes(b"\0" * (free - room))
        try:
            write_version(folder, 2, gates, adapter)
        except ExportError as error:
            assert re.search("No space left|os error 28", str(error)), error
            assert version_of(folder) == 1 and hidden(folder) == []
            refused += 1
        else:
            assert version_of(folder) == 2
            break
        ballast.unlink()
    print(refused)


@pytest.mark.slow
def test_a_full_disk_leaves_the_earlier_export(tmp_path: Path) -> None:
    private = ["unshare", "-rm"]
    try:
        probe = subprocess.run([*private, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], capture_output=True)
    except FileNotFoundError:
        pytest.skip("no unshare on this machine: a small disk cannot be made")
    if probe.returncode:
        pytest.skip(f"mounting a small disk is not permitted: {probe.stderr.decode().strip()}")
    assert int(run_here(f"test_export.fill_a_disk({str(tmp_path)!r})", *private)) >= 3


class Hub:
    """Stands for the hub: takes repositories and folders, or refuses."""

    calls: list[tuple[str, dict[str, Any]]] = []
    refusal: Exception | None = None

    def create_repo(self, repository: str, **options: Any) -> None:
        if self.refusal:
            raise self.refusal
        self.calls.append((repository, options))

    def upload_folder(self, **options: Any) -> str:
        self.calls.append((options["repo_id"], options))
        return f"https://hub/{options['repo_id']}"


def test_push_uploads_the_export_alone_and_keeps_it_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", [])
    path = tmp_path / "export"
    export.save(path, make_gates())
    (path / "secret.txt").write_text("not part of the export")
    assert hub.push(path, "me/gates") == "https://hub/me/gates"
    [(_, made), (name, upload)] = Hub.calls
    assert made == {"private": True, "exist_ok": True} and name == "me/gates"
    assert upload["allow_patterns"] == ["gates.safetensors", "gate_config.json", "README.md", "figure.png"]
    monkeypatch.setattr(Hub, "refusal", OSError("no login"))
    with pytest.raises(ExportError, match=r"push_to_hub=me/gates: the hub refuses \(no login\): .*`hf auth login`"):
        hub.push(path, "me/gates")


def test_push_of_a_damaged_export_uploads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HfApi", lambda: pytest.fail("the hub was asked"))
    export.save(tmp_path / "export", make_gates())
    (tmp_path / "export" / "gates.safetensors").write_bytes(b"")
    with pytest.raises(ExportError):
        hub.push(tmp_path / "export", "me/gates")

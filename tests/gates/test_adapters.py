"""Adapters beside the gates and alone, merged into models, missing, or there twice."""

import copy
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import ag
from ag import run
from ag.config import Config, GateConfig, LoraConfig
from ag.errors import UserError
from ag.gates import export
from ag.gates.export import ExportError
from ag.gates.gate import AttentionGates
from ag.gates.manifest import ADAPTER_FILES
from ag.model import base as models
from tests.support import TESTS
from tests.support.exports import MODEL, hidden, make_adapter, make_export, make_gates
from tests.support.gates_for import gates_for
from tests.support.refused import refuses

OLD = TESTS / "fixtures" / "export_1_0"
WIDE = LlamaConfig(**{**MODEL.to_dict(), "hidden_size": 128, "head_dim": 32})
LACKS, TWICE = "ag.gates.export.load_adapter(model", "adapter=false"  # what each error tells to do
PROMPT = "Rosa the potter has a ticket to Rome."


def lora_on(model, size=0.05, seed=3, **lora):
    wrapped = models.add_lora(model, LoraConfig(**lora))
    torch.manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=size)
    return wrapped.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_llama, tiny_tokenizer):
    """What a run with export.merge=true leaves: ``base``, ``export``, ``merged``."""
    folder = tmp_path_factory.mktemp("adapted")
    tiny_llama().save_pretrained(folder / "base")
    tiny_tokenizer.save_pretrained(folder / "base")
    wrapped = lora_on(tiny_llama())
    export.save(
        folder / "export", gates_for(tiny_llama(), scope="prompt"), base_model=str(folder / "base"), adapter=wrapped
    )
    export.save_merged(wrapped, folder / "merged", tiny_tokenizer, folder / "export")
    return folder


def load(path, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def test_how_often_a_model_has_the_adapter(folder):
    path, dtype = folder / "export", torch.bfloat16
    adapter = AttentionGates.from_pretrained(path).adapter
    for base, times in (("base", 0), ("merged", 1)):
        assert adapter.count_in(load(folder / base, dtype)) == times
        wrapped = PeftModel.from_pretrained(load(folder / base, dtype), str(path / "adapter"))
        assert adapter.count_in(wrapped) == times + 1
        assert adapter.count_in(wrapped.to(dtype)) == times + 1  # its matrices too
        with wrapped.disable_adapter():
            assert adapter.count_in(wrapped) == times
        wrapped.merge_adapter()
        assert adapter.count_in(wrapped) == times + 1


def test_what_was_merged_by_hand_is_told_how_to_say_so(folder):
    spec = f"gates:{folder / 'export'}"
    for merge in (True, False):
        model = export.load_adapter(load(folder / "base"), folder / "export", merge=merge)
        ag.EvictionCache(model, spec)
    model = model.merge_and_unload()
    with refuses(UserError, LACKS, "model.config.merged_adapter = ") as told:
        ag.EvictionCache(model, spec)
    model.config.merged_adapter = re.search("merged_adapter = '(.*)'", str(told.value))[1]
    ag.EvictionCache(model, spec)


def test_an_adapter_in_a_model_without_the_wrapper_of_peft_counts(folder):
    """As transformers loads it, and in the base that a wrapped model holds."""
    by_transformers = load(folder / "base")
    by_transformers.load_adapter(str(folder / "export" / "adapter"))
    wrapped = export.load_adapter(load(folder / "base"), folder / "export")
    for model in (by_transformers, wrapped.get_base_model()):
        ag.EvictionCache(model, f"gates:{folder / 'export'}")
        with refuses(UserError, TWICE):
            export.load_adapter(model, folder / "export")


def test_both_mistakes_are_one_sentence(folder, tiny_llama):
    spec = f"gates:{folder / 'export'}"
    with refuses(UserError, LACKS):
        ag.EvictionCache(load(folder / "base"), spec)
    gates = AttentionGates.from_pretrained(folder / "export")
    plain = load(folder / "base")
    ag.attach(plain, gates)
    with refuses(UserError, LACKS):
        ag.EvictionCache(plain, "gates")
    with refuses(UserError, TWICE):
        export.load_adapter(load(folder / "merged"), folder / "export")
    twice = PeftModel.from_pretrained(load(folder / "merged"), str(folder / "export" / "adapter"))
    with refuses(UserError, TWICE):
        ag.EvictionCache(twice, spec)
    with refuses(UserError, LACKS):  # another adapter is not this one
        ag.EvictionCache(lora_on(tiny_llama(), seed=4), spec)
    ag.EvictionCache(load(folder / "base"), "h2o", budget=4)  # no business of other policies


def test_a_merged_model_says_so_after_it_was_saved_again(folder, tmp_path, tiny_llama, tiny_tokenizer):
    load(folder / "merged").save_pretrained(tmp_path / "again")
    config = AutoConfig.from_pretrained(tmp_path / "again")
    assert config.merged_adapter == export.read_info(folder / "export")["sha256"][ADAPTER_FILES[1]]
    with refuses(ExportError, str(folder / "merged")):
        export.save_merged(lora_on(tiny_llama()), folder / "merged", tiny_tokenizer, folder / "export")


def test_an_adapter_that_changes_nothing_is_not_missed(tmp_path, tiny_llama):
    export.save(tmp_path, gates_for(tiny_llama()), adapter=models.add_lora(tiny_llama(), LoraConfig()))
    assert AttentionGates.from_pretrained(tmp_path).adapter is None
    ag.EvictionCache(tiny_llama(), f"gates:{tmp_path}")


def test_an_export_from_before_still_loads():
    """tests/fixtures/export_1_0 was written by ag 0.1.0, which recorded nothing of the adapter."""
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    model = LlamaForCausalLM(config).eval()
    gates = AttentionGates.from_pretrained(OLD, config)
    assert export.read_info(OLD)["schema_version"] == "1.0"
    assert (gates.config.covers, gates.config.window, gates.config.kind) == ("prompt", 0, "linear")
    assert gates.adapter is None
    ag.EvictionCache(model, f"gates:{OLD}")
    ag.EvictionCache(export.load_adapter(model, OLD, merge=True), f"gates:{OLD}")


def test_an_adapter_without_gates(tmp_path: Path) -> None:
    adapted = make_adapter(1).eval()
    base, tokens = copy.deepcopy(adapted).unload(), torch.arange(8)[None]
    export.save_adapter(tmp_path / "e", adapted)
    assert export.is_adapter(tmp_path / "e") and not export.is_adapter(make_export(tmp_path / "whole"))
    assert export.adapter_path(tmp_path / "e") == tmp_path / "e" / "adapter"
    with torch.no_grad():
        assert torch.equal(export.load_adapter(base, tmp_path / "e")(tokens).logits, adapted(tokens).logits)
    export.save_adapter(tmp_path / "other", make_adapter(2))
    assert export.adapter_checksum(tmp_path / "e") != export.adapter_checksum(tmp_path / "other")
    assert export.adapter_checksum(tmp_path / "whole") == export.read_info(tmp_path / "whole")["checksum"]
    with refuses(ExportError, str(tmp_path / "e" / "adapter")):
        export.load_adapter(LlamaForCausalLM(WIDE), tmp_path / "e")


def test_adapter_errors(tmp_path: Path) -> None:
    export.save(tmp_path / "none", make_gates())
    with refuses(ExportError, str(tmp_path / "none"), "train=gates+lora"):
        export.load_adapter(LlamaForCausalLM(MODEL), tmp_path / "none")

    folder = make_export(tmp_path / "e")
    with refuses(ExportError, "'hidden_size': 64", "'hidden_size': 128"):
        export.load_adapter(LlamaForCausalLM(WIDE), folder)

    weights = folder / "adapter" / "adapter_model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-3] ^= 1
    weights.write_bytes(raw)
    with refuses(ExportError, "adapter_model.safetensors", "sha256"):
        export.load_adapter(LlamaForCausalLM(MODEL), folder)
    broken = make_adapter()
    next(p for name, p in broken.named_parameters() if "lora_A" in name).data[0, 0] = float("nan")
    with refuses(ExportError, "lora_A.weight"):
        export.save(tmp_path / "nan", make_gates(), adapter=broken)
    assert not (tmp_path / "nan").exists() and hidden(folder) == []


@pytest.fixture
def alone(tmp_path):
    """``alone(settings, weigh)``: an adapter without gates whose files were changed, and its base model."""

    def make(settings=None, weigh=None):
        adapted = make_adapter(1).eval()
        export.save_adapter(tmp_path / "alone", adapted)
        config, weights = (tmp_path / "alone" / name for name in ADAPTER_FILES)
        config.write_text(json.dumps(json.loads(config.read_text()) | (settings or {})))
        if weigh is not None:
            tensors = load_file(weights)
            weigh(tensors)
            save_file(tensors, weights)
        return copy.deepcopy(adapted).unload(), tmp_path / "alone"

    return make


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("settings", "weigh", "parts"),
    [
        ({}, lambda tensors: tensors.pop(FIRST), f"adapter_model.safetensors 1 missing {FIRST}"),
        ({}, lambda tensors: tensors.clear(), f"adapter_model.safetensors 12 missing {FIRST}"),
        ({"target_modules": ["q_proj"]}, None, "adapter_model.safetensors 6 unknown v_proj"),
        ({"use_dora": True}, None, "adapter_model.safetensors 6 missing lora_magnitude_vector"),
        ({}, lambda tensors: tensors[FIRST].fill_(math.nan), f"{FIRST} NaN"),
    ],
    ids=["one", "all", "unknown", "dora", "nan"],
)
def test_an_adapter_has_the_tensors_that_its_settings_ask_for(alone, settings, weigh, parts):
    with refuses(ExportError, *parts.split()):
        export.load_adapter(*alone(settings, weigh))


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"r": "8"}, "r='8'"),
        ({"lora_alpha": math.nan}, "lora_alpha=nan finite"),
        ({"alpha_pattern": {"q_proj": math.inf}}, "alpha_pattern.q_proj=inf finite"),
        ({"rank_pattern": {"q_proj": "2"}}, "rank_pattern.q_proj='2'"),
        ({"init_lora_weights": "loftq"}, "loftq_config loftq_bits loftq_iter"),
        ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, "loftq_config loftq_iter"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights=lora_ga init_lora_weights=True"),
    ],
)
def test_settings_that_peft_would_calculate_with(alone, settings, parts):
    with refuses(ExportError, "adapter_config.json", *parts.split()):
        export.load_adapter(*alone(settings))


@pytest.mark.parametrize("settings", [{"target_modules": 5}, {"peft_type": "NONE"}, {"layers_to_transform": "x"}])
def test_settings_that_peft_cannot_follow(alone, settings):
    base, folder = alone(settings)
    with refuses(ExportError, str(folder / "adapter"), "base model"):
        export.load_adapter(base, folder)


@pytest.mark.parametrize(
    "weigh",
    [lambda tensors: tensors.pop(FIRST), lambda tensors: tensors.update({FIRST: torch.zeros(3, 64)})],
    ids=["missing", "shape"],
)
def test_a_refused_adapter_leaves_the_model_as_it_was(alone, weigh):
    """PEFT puts its layers in before it reads the weights."""
    base, folder = alone(weigh=weigh)
    names, tokens = base.state_dict().keys(), torch.arange(8)[None]
    with torch.no_grad():
        wanted = base(tokens).logits
        with refuses(ExportError, str(folder / "adapter")):
            export.load_adapter(base, folder)
        assert torch.equal(base(tokens).logits, wanted)
    assert base.state_dict().keys() == names and not hasattr(base, "peft_config")


@pytest.mark.parametrize(
    "config",
    [
        peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
        peft.LoHaConfig(r=2, target_modules=["q_proj"]),
    ],
    ids=["IA3", "LOHA"],
)
def test_an_adapter_of_another_type_is_refused(tmp_path, monkeypatch, config):
    """It has no tensor by which a model would be checked for it."""
    kind = f"of the type {config.peft_type.value}"
    adapted, folder = peft.get_peft_model(LlamaForCausalLM(copy.deepcopy(MODEL)), config), tmp_path / "e"
    for write in (lambda: export.check(None, adapted), lambda: export.save(folder, make_gates(), adapter=adapted)):
        with refuses(ExportError, kind, "LORA", "merge_and_unload"):
            write()
    monkeypatch.setattr(export, "check_adapter", lambda *_: None)  # as earlier versions wrote it
    export.save(folder, make_gates(), adapter=adapted)
    read = (
        lambda: AttentionGates.from_pretrained(folder),
        lambda: export.load_adapter(LlamaForCausalLM(MODEL), folder),
    )
    for use in read:
        with refuses(ExportError, "adapter_config.json", kind, "LORA"):
            use()


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
        export.check(
            None, peft.get_peft_model(LlamaForCausalLM(MODEL), peft.LoraConfig(target_modules=["q_proj"]), "mine")
        )

    odd = make_gates()
    odd.fingerprint["num_heads"] = 5
    with refuses(ExportError, "fingerprint.num_kv_heads=2", "num_heads=5"):
        export.check(odd, None)
    adapter.get_base_model().config.quantization_config = {"bits": 4}
    export.check(gates, adapter)
    with refuses(ExportError, "export.merge=false", "model.quantization=none"):
        export.check(gates, adapter, merge=True)


def test_gates_do_not_start_from_those_of_an_adapter_that_the_model_lacks(folder):
    gate = AttentionGates.from_pretrained(folder / "export").config
    config = Config(train="gates", gate=gate, init=str(folder / "export"))
    for train in ("gates", "gates+lora"):  # whose new adapter is another one
        with refuses(UserError, f"init={folder / 'export'}", "LoRA", "export.merge=true"):
            run.make_gates(load(folder / "base"), replace(config, train=train))
    run.make_gates(load(folder / "base"), replace(config, init="GONE", resume="."))  # the checkpoint has the weights
    made = run.make_gates(load(folder / "merged"), config)
    assert all(map(torch.equal, made.parameters(), AttentionGates.from_pretrained(folder / "export").parameters()))


@pytest.mark.parametrize(
    ("exported", "asked", "parts"),
    [
        ({"num_heads": 4, "head_dim": 8}, {"num_heads": 2, "head_dim": 16}, "gate.num_heads=4 gate.num_heads=2"),
        ({"kind": "retention"}, {"kind": "mlp"}, "gate.kind=retention gate.kind=mlp"),
        ({"layer_offset": 1, "first_layer": 1}, {"first_layer": 1}, "gate.layer_offset=1 gate.layer_offset=0"),
    ],
)
def test_gates_do_not_start_from_weights_of_equal_shapes_with_another_meaning(
    tiny_llama, tmp_path, exported, asked, parts
):
    start = gates_for(tiny_llama(), **exported)
    start.save_pretrained(tmp_path / "export")
    config = Config(train="gates", gate=GateConfig(**asked).sized(32), init=str(tmp_path / "export"))
    with refuses(UserError, f"init={tmp_path / 'export'}", *parts.split()):
        run.make_gates(tiny_llama(), config)
    made = run.make_gates(tiny_llama(), replace(config, gate=start.config))
    assert all(map(torch.equal, made.parameters(), start.parameters()))

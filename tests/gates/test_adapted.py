"""An adapter that is missing, merged or there twice is told from the weights, whatever their type."""

import copy
import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import ag
from ag.compare import CompareConfig
from ag.config import LoraConfig
from ag.continuation import generate
from ag.errors import UserError
from ag.evaluate.comparison import cells
from ag.gates import adapted, export
from ag.gates.adapted import QUANTISED
from ag.gates.gate import AttentionGates
from ag.gates.manifest import ADAPTER_FILES
from ag.generate import GenerateConfig
from ag.model import base as models
from tests.support import TESTS
from tests.support.bounds import hold, of_logits
from tests.support.exports import doubt
from tests.support.gates_for import gates_for
from tests.support.refused import refuses

OLD = TESTS / "fixtures" / "export_1_0"
LACKS, TWICE = "ag.gates.export.load_adapter(model", "adapter=false"  # what each error tells to do
PROMPT = "Rosa the potter has a ticket to Rome."


def lora_on(model, size=0.05, seed=3):
    wrapped = models.add_lora(model, LoraConfig())
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


def load(path, dtype=torch.float32, marked=True):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    if not marked and hasattr(model.config, adapted.MERGED):
        delattr(model.config, adapted.MERGED)
    return model


def recorded(path):
    return AttentionGates.from_pretrained(path).adapter


def times(model, path):
    return recorded(path).times_in(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("marked", [True, False])
def test_the_weights_tell_how_often(folder, dtype, marked):
    path = folder / "export"
    bound = doubt(load(folder / "base"), recorded(path), torch.finfo(dtype).eps)
    hold(times(load(folder / "base", dtype), path), 0.0, bound)
    hold(times(load(folder / "merged", dtype, marked), path), 1.0, bound)
    for base, expected in (("base", 1.0), ("merged", 2.0)):
        wrapped = PeftModel.from_pretrained(load(folder / base, dtype, marked), str(path / "adapter"))
        hold(times(wrapped, path), expected, bound)
        with wrapped.disable_adapter():
            hold(times(wrapped, path), expected - 1, bound)
        wrapped.merge_adapter()
        hold(times(wrapped, path), expected, bound)


def test_what_is_recorded_is_a_projection_onto_what_the_adapter_adds(folder):
    rows = export.read_info(folder / "export")["adapter"]
    names = [f"model.layers.{layer}.self_attn.{part}" for layer, part in ((0, "q_proj"), (2, "o_proj"))]
    assert [row["module"] for row in rows] == names
    base, merged = load(folder / "base").double(), load(folder / "merged").double()
    for row in rows:
        weight, after = (model.get_submodule(row["module"]).weight.detach() for model in (base, merged))
        added = after - weight
        bound = doubt(load(folder / "base"), recorded(folder / "export"), torch.finfo(torch.float32).eps)
        bound *= 1 + float(weight.norm() / added.norm())  # D is a difference of rounded weights here
        hold(row["projection"], (weight * added).sum() / added.square().sum(), bound)


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


def test_the_right_model_and_the_merged_one_say_the_same(folder):
    ids = torch.randint(3, 128, (1, 40), generator=torch.Generator().manual_seed(1))
    logits = []
    for model in (export.load_adapter(load(folder / "base"), folder / "export"), load(folder / "merged")):
        cache = ag.EvictionCache(model, f"gates:{folder / 'export'}")
        with torch.no_grad():
            model(ids, past_key_values=cache)
            logits.append(model(ids[:, :1], past_key_values=cache).logits)
    hold(*logits, of_logits(model))
    assert 0 < cache.kept_share() < 1


def test_generate(folder):
    def run(**values):
        return generate(GenerateConfig(prompt=PROMPT, max_new_tokens=8, **values))

    path, merged, base = (str(folder / name) for name in ("export", "merged", "base"))
    right = run(gates=path)["gates"].text
    with refuses(UserError, path, TWICE):
        run(gates=path, model=merged)
    assert run(gates=path, model=merged, adapter=False)["gates"].text == right
    assert run(gates=f"{path}/")["gates"].text == right
    [alone] = run(policy=f"gates:{path}").values()
    assert alone.text == right  # the adapter comes along
    with refuses(UserError, LACKS):
        run(gates=path, adapter=False)
    with refuses(UserError, path, base):
        run(gates=path, policy=f"gates:{base}")


def test_compare_runs_gates_on_the_merged_model(folder):
    def plan(model):
        return cells.list_cells(
            CompareConfig(model=str(folder / model), policies=["full", f"gates:{folder / 'export'}"])
        )

    assert len(plan("merged")) == 2
    with refuses(UserError, "adapter="):
        plan("base")


def test_a_merged_model_says_so_after_it_was_saved_again(folder, tmp_path):
    load(folder / "merged").save_pretrained(tmp_path / "again")
    config = AutoConfig.from_pretrained(tmp_path / "again")
    assert config.merged_adapter == export.read_info(folder / "export")["sha256"][ADAPTER_FILES[1]]
    readme = (folder / "merged" / "README.md").read_text()
    assert "merged into it" in readme and "gates=../export model=. adapter=false" in readme
    assert config.merged_adapter in readme


def test_a_merged_model_in_bf16_that_lost_a_weak_adapter_to_rounding(tmp_path, tiny_llama, tiny_tokenizer):
    """The weights say nothing there; the mark does."""
    wrapped = lora_on(tiny_llama().to(torch.bfloat16), size=1e-5)
    export.save(tmp_path / "export", gates_for(tiny_llama()), adapter=wrapped)
    export.save_merged(wrapped, tmp_path / "merged", tiny_tokenizer, tmp_path / "export")
    model = load(tmp_path / "merged", torch.bfloat16)
    assert times(model, tmp_path / "export") == 1
    ag.EvictionCache(model, f"gates:{tmp_path / 'export'}")
    assert times(load(tmp_path / "merged", torch.bfloat16, marked=False), tmp_path / "export") is None


def test_an_adapter_that_changes_nothing_is_not_missed(tmp_path, tiny_llama):
    export.save(tmp_path, gates_for(tiny_llama()), adapter=models.add_lora(tiny_llama(), LoraConfig()))
    assert export.read_info(tmp_path)["adapter"] == []
    ag.EvictionCache(tiny_llama(), f"gates:{tmp_path}")


def test_a_quantised_base(folder, tmp_path, tiny_llama):
    """Recorded of 4-bit weights and used on whole ones, and the other way round."""
    pytest.importorskip("bitsandbytes")
    wide = tiny_llama(hidden_size=256, head_dim=64)
    wide.save_pretrained(tmp_path / "base")
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")

    def base(coarse):
        more = {"quantization_config": settings, "device_map": {"": "cpu"}} if coarse else {}
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base", **more).eval()

    for trained_coarse in (True, False):
        wrapped = lora_on(base(trained_coarse), size=0.2)
        path = tmp_path / f"export{trained_coarse}"
        export.save(path, gates_for(wide), adapter=wrapped)
        assert export.read_info(path)["adapter"][0]["noise"] == (0.1 if trained_coarse else 2**-8)
        bound = (
            doubt(wide, recorded(path), QUANTISED) / wide.config.hidden_size * 5
        )  # noise that is drawn: 5 deviations
        hold(times(base(not trained_coarse), path), 0.0, bound)
        right = export.load_adapter(base(not trained_coarse), path)
        hold(times(right, path), 1.0, bound)
        ag.EvictionCache(right, f"gates:{path}")
    with refuses(UserError, LACKS):
        ag.EvictionCache(base(False), f"gates:{path}")


def test_an_export_from_before_still_loads():
    """tests/fixtures/export_1_0 was written by ag 0.1.0, which recorded nothing of the adapter."""
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    model = LlamaForCausalLM(config).eval()
    gates = AttentionGates.from_pretrained(OLD, config)
    assert export.read_info(OLD)["schema_version"] == "1.0"
    assert (gates.config.covers, gates.config.window, gates.config.kind) == ("prompt", 0, "linear")
    assert gates.adapter.traces == () and gates.adapter.times_in(model) is None
    weight = copy.deepcopy(model.model.layers[0].self_attn.q_proj.weight)
    ag.EvictionCache(model, f"gates:{OLD}")
    loaded = export.load_adapter(model, OLD, merge=True)
    assert not torch.equal(loaded.model.layers[0].self_attn.q_proj.weight, weight)
    ag.EvictionCache(loaded, f"gates:{OLD}")


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        (None, ("adapter=None", "list")),
        ([1], ("adapter=1", "JSON object")),
        ([{"module": "x"}], ("adapter", "scale", "projection", "noise")),
        ([{"module": 1, "scale": 1.0, "projection": 0.0, "noise": 0.0}], ("adapter.module=1", "text")),
        (
            [{"module": "x", "scale": "1", "projection": 0.0, "noise": 0.0}],
            ("adapter.scale='1'", "number"),
        ),
        (
            [{"module": "x", "scale": 1.0, "projection": 0.0, "noise": 0.0}],
            ("adapter/adapter_model.safetensors", "x"),
        ),
    ],
)
def test_a_forged_record(tmp_path, tiny_llama, rows, parts):
    export.save(tmp_path, gates_for(tiny_llama()), adapter=lora_on(tiny_llama()))
    info = json.loads((tmp_path / "gate_config.json").read_text()) | {"adapter": rows}
    info["checksum"] = export.checksum(info)
    (tmp_path / "gate_config.json").write_text(json.dumps(info))
    with refuses(export.ExportError, *parts):
        AttentionGates.from_pretrained(tmp_path)

"""The sizes that follow from the numbers of a configuration, against those of the model that transformers makes."""

import json
import subprocess
import sys

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, T5Config

from ag.config import Config, DataConfig, LoraConfig, ModelConfig, TrainerConfig
from ag.config.gate import GateConfig
from ag.model import configurations
from ag.model.base import ModelError
from ag.training import memory_plan
from ag.training.made_outline import make_outline
from ag.training.memory_plan import plan
from ag.training.outline import read_outline
from tests.project.test_quiet import HEAVY
from tests.support.refused import refuses

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
FAMILIES = {
    "llama": LlamaConfig(**SHAPE | {"tie_word_embeddings": False}),
    "llama of wide heads": LlamaConfig(**SHAPE, head_dim=24),
    "mistral with a window": MistralConfig(**SHAPE, sliding_window=32),
    "qwen2, with biases": Qwen2Config(**SHAPE),
    "qwen3, with norms of heads": Qwen3Config(**SHAPE, head_dim=16),
}
GATES = [
    {"shortcut": True, "first_layer": 1},
    {"kind": "linear", "granularity": "query_head"},
    {"kind": "affine"},
    {"kind": "mlp", "hidden": 16},
    {"scope": "prompt"},
]
LORA = [["q_proj", "down_proj"], ["all-linear"]]


def config_of(name, train="gates+lora", gate=None, targets=("q_proj", "v_proj"), precision="bf16-mixed", **model):
    return Config(
        train=train,
        model=ModelConfig(name=str(name), **model),
        lora=LoraConfig(rank=4, targets=list(targets)),
        gate=GateConfig(num_heads=2, head_dim=8, **gate or {}),
        data=DataConfig(kind="sft", name="piqa", max_length=128, batch_size=2),
        trainer=TrainerConfig(precision=precision),
    )


def stored(tmp_path, geometry, **other):
    """The file of a configuration with every key, as those of the hub have."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(geometry.to_dict() | other))
    return path


def check(config, monkeypatch):
    """Sizes and plan are those of the made model."""
    read, made = read_outline(config), make_outline(config)
    assert read is not None
    assert {name: dict(gate) for name, gate in read.gates.items()} == made.gates
    assert (list(read.attending), list(read.layers)) == (made.attending, list(made.layers))
    assert {k: v for k, v in vars(read).items() if k not in ("gates", "attending", "layers")} == {
        k: v for k, v in vars(made).items() if k not in ("gates", "attending", "layers")
    }
    found = plan(config)
    with monkeypatch.context() as patch:
        patch.setattr(memory_plan, "read_outline", lambda config: made)
        assert plan(config) == found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_as_transformers_makes_it(family, tmp_path, monkeypatch):
    path = stored(tmp_path, FAMILIES[family])
    check(config_of(path, dtype="bfloat16", quantization="nf4"), monkeypatch)
    check(config_of(path, train="lora", targets=["all-linear"], precision="32-true"), monkeypatch)


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_every_kind_of_gate_is_as_it_is_made(gate, tmp_path, monkeypatch):
    check(config_of(stored(tmp_path, FAMILIES["llama"]), "gates", gate, precision="32-true"), monkeypatch)


@pytest.mark.parametrize("targets", LORA, ids=str)
def test_adapters_are_as_peft_makes_them(targets, tmp_path, monkeypatch):
    path = stored(tmp_path, FAMILIES["qwen2, with biases"])
    check(config_of(path, "gates+lora", targets=targets, dtype="bfloat16", gradient_checkpointing=True), monkeypatch)


@pytest.mark.parametrize("name", [name for name in configurations.names() if "Qwen3.5" not in name])
def test_the_packages_models_need_not_be_made(name):
    assert read_outline(config_of(name)) is not None


@pytest.mark.parametrize(
    "other",
    [
        {"model_type": "gemma3_text"},
        {"attention_bias": True},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"quantization_config": {"quant_method": "gptq"}},
    ],
    ids=str,
)
def test_a_model_of_other_layers_is_made(other, tmp_path):
    assert read_outline(config_of(stored(tmp_path, FAMILIES["llama"], **other))) is None


def test_gates_and_adapters_of_other_kinds_are_made(tmp_path):
    path = stored(tmp_path, FAMILIES["llama"])
    assert read_outline(config_of(path, gate={"kind": "fast_kvzip"})) is None
    assert read_outline(config_of(path, gate={"first_layer": 3})) is None  # refused by the gates
    assert read_outline(config_of(path, targets=["q_prj"])) is None  # refused by the adapters
    assert read_outline(config_of("random:tiny")) is None


def test_a_model_of_another_task_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(T5Config(num_layers=1, d_model=8).to_json_string())
    with refuses(ModelError, str(tmp_path), "T5Config", "causal language model"):
        make_outline(config_of(str(tmp_path)))


def test_a_plan_loads_nothing_heavy():
    """In a new Python: the plan of a recipe for a model of the package takes half a second."""
    code = """
import sys
from ag.plan import main
assert main(["recipe=piqa_sft", "tflops=70"]) == 0
print(*sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1000:]
    assert "peak of a step" in done.stdout and "all rows are full, because piqa is not on this machine" in done.stdout
    assert not HEAVY & set(done.stderr.split())

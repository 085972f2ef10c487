"""What is wrong with a checkpoint of others is said: its file, the value, what was expected."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ag
from ag.gates.export import ExportError
from tests.support.foreign import fast_kvzip, kvzap, trimkv
from tests.support.refused import refuses

ZAP, FAST, TRIM = "model.safetensors", "q2_dim16_sink16.pt", "trimkv_weights.pth"


@pytest.mark.parametrize(
    ("write", "changes", "parts"),
    [
        (kvzap, {"n_modules": "3"}, "config.json n_modules='3'"),
        (kvzap, {"input_dim": 0}, "config.json input_dim=0"),
        (kvzap, {"output_dim": 1 << 40}, "config.json output_dim"),
        (kvzap, {"input_dim": 32}, f"{ZAP} linear.weight (2, 64) (2, 32)"),
        (kvzap, {"n_modules": 2}, f"{ZAP} layers.2.linear.bias"),
        (kvzap, {"hidden_dim": 7}, f"{ZAP} layers.0"),
        (trimkv, {"retention_gate": "rg2"}, "config.json retention_gate='rg2' rg"),
        (trimkv, {"hidden_act": "gelu"}, "config.json hidden_act='gelu' silu"),
        (trimkv, {"compress_strategy": "alpha_threshold"}, "config.json compress_strategy='alpha_threshold' alpha"),
        (trimkv, {"hidden_size": "64"}, "config.json hidden_size='64'"),
        (trimkv, {"num_hidden_layers": 1 << 40}, "config.json num_hidden_layers"),
        (trimkv, {"hidden_size": 32}, f"{TRIM} inner.weight (24, 64) (24, 32)"),
        (trimkv, {"num_hidden_layers": 2}, f"{TRIM} layers.2"),
        (trimkv, {"extra": {"model.layers.0.self_attn.q_proj.weight": torch.ones(2)}}, f"{TRIM} q_proj.weight"),
    ],
)
def test_configurations_and_shapes(tmp_path, write, changes, parts):
    write(tmp_path / "export", **changes)
    with refuses(ExportError, *parts.split()):
        ag.AttentionGates.from_pretrained(tmp_path / "export")


@pytest.mark.parametrize(
    ("write", "file", "content", "parts"),
    [
        (kvzap, ZAP, {"layers.0.weight": torch.full((2, 64), float("nan"))}, []),
        (kvzap, ZAP, b"none", ["safetensors"]),
        (fast_kvzip, FAST, {"module": []}, ["Fast KVzip"]),
        (fast_kvzip, FAST, {"module": [{"k_proj.weight": "text"}]}, ["Fast KVzip"]),
        (fast_kvzip, FAST, {"other": 1}, ["Fast KVzip"]),
        (fast_kvzip, FAST, {"module": [{}]}, ["Fast KVzip"]),
        (fast_kvzip, FAST, {"module": [Path("a")]}, []),  # a pickle that would run code
        (trimkv, TRIM, [torch.ones(2)], ["TRIM-KV"]),
        (trimkv, TRIM, {"a": 1}, ["TRIM-KV"]),
        (trimkv, TRIM, b"none", ["tensors"]),
        (trimkv, TRIM, None, []),
    ],
)
def test_files(tmp_path, write, file, content, parts):
    write(tmp_path / "export")
    path = tmp_path / "export" / file
    path.unlink()
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        (save_file if path.suffix == ".safetensors" else torch.save)(content, path)
    with refuses(ExportError, file, *parts):
        ag.AttentionGates.from_pretrained(tmp_path / "export")


@pytest.mark.parametrize("write", [kvzap, trimkv])
def test_a_model_of_more_layers(tiny_llama, tmp_path, write):
    write(tmp_path / "export")
    with refuses(ExportError, "num_layers", "3", "5"):
        ag.AttentionGates.from_pretrained(tmp_path / "export", tiny_llama(num_hidden_layers=5).config)

"""What the model's own attention finds when this library calls it."""

import sys
import types

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import modeling_flash_attention_utils as flash

from ag import EvictionCache
from tests.support.bounds import hold, of_logits

IDS = torch.randint(3, 128, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def flash_attn(monkeypatch):
    """A flash-attn package for transformers to find, which computes in PyTorch; returns how often it was called."""
    calls = []

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, **_):
        calls.append(causal)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True)
        return out.transpose(1, 2)

    package, padding = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.bert_padding")
    names = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
    vars(package).update(dict.fromkeys(names, flash_attn_func))
    vars(padding).update(pad_input=None, unpad_input=None)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", padding)
    monkeypatch.setattr(flash, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    return calls


def test_flash_attention_finds_its_own_name(tiny_llama, flash_attn):
    """Transformers chooses the kernel to load by the name in the module's configuration."""
    model = tiny_llama()

    def logits():
        return model(IDS, past_key_values=EvictionCache(model, "full")).logits

    with torch.no_grad():
        want = logits()
        model.config._attn_implementation = "flash_attention_2"
        got = logits()
    assert flash_attn == [True] * 3
    hold(got, want, of_logits(tiny_llama()))
    assert {layer.self_attn.config._attn_implementation for layer in model.model.layers} == {"ag"}

"""Base models with random weights, of a geometry in a JSON file."""

import pytest
import torch

from ag.config import ModelConfig
from ag.errors import UserError
from ag.model import base as models
from ag.model import random_base
from tests.model.test_architectures import tiny
from tests.support.refused import refuses


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_a_random_base_is_the_geometry_and_the_same_each_time(quantization, tmp_path):
    if quantization == "nf4":
        pytest.importorskip("bitsandbytes")
    random_base.geometry("random:tiny").save_pretrained(tmp_path)
    config = ModelConfig(name=f"random:{tmp_path}", quantization=quantization)
    (one, tokenizer), (two, _) = (models.load_base(config, "cpu") for _ in range(2))
    ids = tokenizer("Random, but the same.\n\u00e9", return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == "Random, but the same.\n\u00e9"
    with torch.no_grad():
        logits = one(input_ids=ids).logits
        assert torch.equal(logits, two(input_ids=ids).logits) and logits.isfinite().all()
    assert logits.shape[-1] == 512
    kinds = {type(m).__name__ for n, m in one.named_modules() if n.endswith("_proj")}
    assert kinds == ({"Linear4bit"} if quantization == "nf4" else {"Linear"})
    if quantization == "none":
        weight = one.lm_head.weight  # a deviation of n drawn numbers is off by 1 / sqrt(2 n) of itself; five of those
        assert weight.std().item() == pytest.approx(random_base.SPREAD, rel=5 / (2 * weight.numel()) ** 0.5)
        want = type(one)(one.config).model.rotary_emb.inv_freq
        assert torch.equal(one.model.rotary_emb.inv_freq, want)


@pytest.mark.parametrize("name", ["gemma3_text", "glm4_moe", "apertus"])  # scales, several RoPEs, biases of experts
def test_what_is_computed_and_not_drawn_is_as_in_the_class_of_the_model(name, tmp_path):
    tiny(name, vocab_size=300).config.save_pretrained(tmp_path)
    model, _ = models.load_base(f"random:{tmp_path}", "cpu")
    buffers, want = dict(model.named_buffers()), dict(type(model)(model.config).named_buffers())
    assert buffers.keys() == want.keys() and all(torch.equal(buffer, want[at]) for at, buffer in buffers.items())
    with torch.no_grad():
        assert model(torch.arange(3, 20)[None]).logits.isfinite().all()


def test_a_random_base_of_no_file_or_on_no_device_is_one_sentence(tmp_path):
    for name in ("random:nothing.json", "random:~no_such_user/config.json"):
        with refuses(UserError, f"model.name={name}", "random:llama-8b", "random:meta-llama/Llama-2-7b-hf"):
            models.load_base(name)
    with refuses(UserError, "device=cuda:99", "give cpu"):
        models.load_base("random:tiny", "cuda:99")
    with refuses(UserError, "device=gpu", "give cpu"):  # before the model is looked for
        models.load_base("./nowhere", "gpu")
    small = random_base.geometry("random:tiny")
    small.vocab_size = 100
    small.save_pretrained(tmp_path)
    with refuses(UserError, "vocab_size=100", "259"):
        models.load_base(f"random:{tmp_path}")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    with refuses(UserError, f"model.name=random:{tmp_path}", "hidden_size"):
        models.load_base(f"random:{tmp_path}")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 0}')
    with refuses(UserError, f"model.name=random:{tmp_path}"):
        models.load_base(f"random:{tmp_path}")
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with refuses(UserError, f"model.name=random:{tmp_path}", "causal language model"):
        models.load_base(f"random:{tmp_path}")

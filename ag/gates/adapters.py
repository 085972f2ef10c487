"""LoRA adapters that were trained with gates: on disk, in PEFT's layers, and merged into a model.

A model needs the adapter of its gates exactly once, in PEFT's layers or merged into the weights. A merged model has the
hash of the adapter's weights in its configuration (MERGED).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError
from torch import Tensor, nn

from ag.errors import UserError
from ag.gates.folder import parse, read
from ag.gates.manifest import ADAPTER_FILES, ExportError, minor_version

if TYPE_CHECKING:
    from peft.peft_model import TunerLayerStatus

MERGED = "merged_adapter"  # in the config.json of a merged model
WRAPPER = "base_model.model."  # before the names in a model that PEFT wraps
ADAPTER_NAME = "default"  # PEFT's name of the adapter in an export
LORA = "LORA"  # PEFT's name of the type of adapters that an export holds
#: Values of PEFT's ``init_lora_weights`` that leave the weights of the base model unchanged.
BASE_STAYS = frozenset({"none", "true", "false", "gaussian", "eva", "orthogonal", "mica"})
#: Values that change the base by its own weights alone; PEFT repeats the change when it loads the adapter.
BASE_IS_REPEATED = frozenset({"pissa", "olora", "loftq"})


@dataclass(frozen=True)
class Adapter:
    """The adapter of an export."""

    source: str  # folder of the export, for messages
    sha256: str  # hash of its weights
    name: str  # PEFT's name of a tensor that is not zero
    tensor: Tensor  # its values; one tensor tells the adapter, because no other training ends at these values

    def count_in(self, model: nn.Module) -> int:
        """Count the adapter in a model: merged into it, by the configuration, and in PEFT's active layers."""
        config: Any = getattr(model, "config", None)
        name = self.name.removeprefix(WRAPPER)
        tensors = [state[name] for state in _active(model) if name in state]
        same = [torch.equal(tensor.detach().cpu(), self.tensor.to(tensor.dtype)) for tensor in tensors]
        return int(getattr(config, MERGED, None) == self.sha256) + sum(same)

    def check(self, model: nn.Module, times: int) -> None:
        """Raise ``UserError`` unless a model has the adapter ``times`` times: 1 to run the gates, 0 to load it."""
        count = self.count_in(model)
        if count < times:
            raise UserError(
                f"The gates of {self.source} were trained together with a LoRA adapter, which this model lacks: load "
                f"it by ag.gates.export.load_adapter(model, {self.source!r}), or the model that it is merged into "
                f"(commands: gates= or adapter={self.source}). If you merged it, set "
                f"model.config.{MERGED} = {self.sha256!r}."
            )
        if count > times:
            raise UserError(
                f"This model has the LoRA adapter of {self.source} already: use the gates without it (commands: "
                "adapter=false, for ag.compare no adapter=; Python: no load_adapter), or the base model."
            )


def _active(model: Any) -> list[dict[str, Tensor]]:
    """Return the weights of each active adapter of a model, wrapped by PEFT or not, by their names in the model."""
    if not hasattr(model, "peft_config"):
        return []
    from peft import get_peft_model_state_dict  # loads bitsandbytes, which only some models need

    names = {name for layer in _layers(model) for name in layer.available_adapters if _acts(layer, name)}
    states = [get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False) for name in names]
    return [{name.removeprefix(WRAPPER): tensor for name, tensor in state.items()} for state in states]


def _layers(model: Any) -> list[TunerLayerStatus]:
    """Return the state of each layer of PEFT in a model, whether or not the model is wrapped by PEFT."""
    from peft import get_layer_status

    try:
        return get_layer_status(model.get_base_model() if hasattr(model, "get_base_model") else model)
    except ValueError:  # there are none
        return []


def _acts(layer: TunerLayerStatus, name: str) -> bool:
    return layer.enabled is True and name in {*layer.active_adapters, *layer.merged_adapters}


def check_written(target: Path, model: Any, written: str | None = ADAPTER_NAME) -> None:
    """Refuse a model with adapters that its export would not contain.

    Args:
        target: folder of the export, for messages.
        model: the model, wrapped by PEFT or not.
        written: PEFT's name of the adapter in the export. None: the export has no adapter.

    Raises:
        ExportError: an adapter acts and is not written, is written and does not act, or has changed the base model
            for good. The message names it.
    """
    states = {(name, _acts(layer, name)) for layer in _layers(model) for name in layer.available_adapters}
    unwritten = sorted(name for name, acts in states if acts and name != written)
    if unwritten:
        raise ExportError(
            f"{target.name}: the model runs with the adapters {unwritten}, which the export would not hold: expected "
            f"one adapter at most, of a peft.PeftModel and named {ADAPTER_NAME!r}; deactivate all others "
            f"(model.set_adapter({ADAPTER_NAME!r})), or merge them into the base first (merge_and_unload, "
            "save_pretrained)."
        )
    if (written, False) in states:
        raise ExportError(
            f"{target.name}: the adapter {written!r}, which the export would hold, is not active: expected a model "
            f"that runs with it; call model.set_adapter({written!r}) and model.base_model.enable_adapter_layers()."
        )
    for name, config in getattr(model, "peft_config", {}).items():
        if name != written and (change := base_change(vars(config))):
            raise ExportError(
                f"{target.name}: the adapter {name!r} with {change} has changed the base model, and the export would "
                f"not hold it: expected adapters beside the base; load the base model again, without {name!r}."
            )
        check_repeatable(f"{target.name}: the adapter {name!r}", vars(config))


def base_change(settings: Mapping[str, Any]) -> str:
    """Return the setting of an adapter that changes weights of the base model; empty if there is none."""
    if settings.get("kasa_config") is not None:
        return "kasa_config"
    start = str(settings.get("init_lora_weights", True))
    return "" if start.lower() in BASE_STAYS else f"init_lora_weights={start}"


def check_repeatable(adapter_label: object, settings: Mapping[str, Any]) -> None:
    """Refuse an adapter whose change of the base model PEFT does not repeat when it loads the adapter.

    Raises:
        ExportError: names the setting of the adapter.
    """
    change = base_change(settings)
    if change and change.partition("=")[2] not in {"", *BASE_IS_REPEATED}:
        raise ExportError(
            f"{adapter_label} with {change} changes the base model in a way that loading it does not repeat: expected "
            "init_lora_weights=True, or a start that follows from the weights alone, such as pissa; train it again so."
        )


def check_type(adapter_label: object, peft_type: object) -> None:
    """Refuse an adapter of another type than LoRA: :class:`Adapter` would not find it in a model.

    Raises:
        ExportError: names the type.
    """
    if peft_type != LORA:
        raise ExportError(
            f"{adapter_label} is of the type {peft_type}: expected {LORA} (DoRA too), which models are checked for; "
            "train LoRA, or merge this adapter into the base model first (merge_and_unload, save_pretrained)."
        )


@contextmanager
def layers_kept(model: nn.Module) -> Iterator[None]:
    """Give a base model its own layers back after an error: PEFT replaces them before it reads an adapter."""
    children = [(module, dict(module._modules)) for module in model.modules()]
    attributes = {name: dict(value) for name, value in vars(model).items() if name == "peft_config"}
    try:
        yield
    except Exception:
        for module, own in children:
            module._modules.clear()
            module._modules.update(own)
        vars(model).pop("peft_config", None)
        vars(model).update(attributes)
        raise


def check_files(folder: Path) -> set[str]:
    """Check the files of an adapter; returns PEFT's names of its tensors.

    Args:
        folder: folder with ``adapter/``.

    Raises:
        ExportError: names the file and the wrong value.
    """
    settings, weights = (folder / name for name in ADAPTER_FILES)
    content = _read_settings(folder)
    _check_lora(settings, content)
    check_repeatable(f"{settings}: an adapter", content)
    return set(parse(weights, read(folder, ADAPTER_FILES[1])))


def _read_settings(folder: Path, sha256: str | None = None) -> dict[str, Any]:
    """Return the settings of an adapter, which is LoRA."""
    file = folder / ADAPTER_FILES[0]
    raw = read(folder, ADAPTER_FILES[0], sha256)
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{file}: not JSON ({error}): expected the file as exported; copy it again.") from error
    if not isinstance(content, dict):
        raise ExportError(f"{file}: {content!r:.80}: expected a JSON object; copy the file again.")
    check_type(f"{file}: the adapter", content.get("peft_type"))
    return content


def _check_lora(settings: Path, content: dict[str, Any]) -> None:
    fix = "correct it, or copy the file again."
    try:
        lora = _Lora.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        name, value = ".".join(map(str, first["loc"])), f"{first['input']!r:.80}"
        raise ExportError(f"{settings}: {name}={value}: {first['msg'].lower()}; {fix}") from None
    lacking = sorted({"loftq_bits", "loftq_iter"} - set(lora.loftq_config or {}))
    if content.get("init_lora_weights") == "loftq" and lacking:
        raise ExportError(
            f"{settings}: init_lora_weights=loftq needs {lacking} in loftq_config, which lacks them; {fix}"
        )


class _Lora(BaseModel):
    """The numeric settings of a LoRA adapter. PEFT does not check them."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    r: PositiveInt = 8
    lora_alpha: float = 8
    lora_dropout: Annotated[float, Field(ge=0, le=1)] = 0
    rank_pattern: dict[str, PositiveInt] | None = None
    alpha_pattern: dict[str, float] | None = None
    loftq_config: dict[str, PositiveInt] | None = None


def adapter_of(folder: Path, info: Mapping[str, Any]) -> Adapter | None:
    """Read the adapter of an export. None: it has none, the adapter changes nothing, or the schema is 1.0.

    Raises:
        ExportError: when its files are missing or damaged, or it is not LoRA.
    """
    settings, name = ADAPTER_FILES
    if name not in info["sha256"]:
        return None
    _read_settings(folder, info["sha256"].get(settings))
    tensors = parse(folder / name, read(folder, name, info["sha256"][name]))
    nonzero = {key: tensor for key, tensor in tensors.items() if "lora_B" in key and bool(tensor.any())}
    if not nonzero or minor_version(info["schema_version"]) < 1:
        return None
    key = min(nonzero)
    return Adapter(str(folder), info["sha256"][name], key, nonzero[key])

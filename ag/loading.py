"""An export with all that it needs to run: the base model, its adapter, the tokenizer and caches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ag.config import ModelConfig
from ag.config.sections import WeightType
from ag.config.spec import PolicySpec
from ag.engine import EvictionCache, policy
from ag.engine.policy import Option
from ag.errors import UserError
from ag.gates import export
from ag.model import base as models

if TYPE_CHECKING:
    from peft import PeftModel

    Model = PreTrainedModel | PeftModel


@dataclass(frozen=True)
class Loaded:
    """A model, its tokenizer and the gates of an export.

    Attributes:
        model: the base model, with the adapter of the export if it has one.
        tokenizer: of the model.
        gates: the export, as a policy names it.
    """

    model: Model
    tokenizer: PreTrainedTokenizerBase
    gates: str

    def cache(self, budget: int | float | None = None, schedule: str = "prefill", **options: Option) -> EvictionCache:
        """Return an empty cache that evicts by the gates.

        Args:
            budget: tokens per KV head, or a share of the prompt; None means that the gates' flags decide.
            schedule: when tokens are evicted; see :func:`ag.policy`.
            options: hyper-parameters; see :func:`ag.policy`.
        """
        return EvictionCache(self.model, policy(PolicySpec("gates", path=self.gates), budget, schedule, **options))


def load(gates: str, model: str | None = None, *, dtype: WeightType = "float32", device: str = "cpu") -> Loaded:
    """Load an export: its base model, its adapter, the tokenizer and the gates.

    Args:
        gates: folder or hub id of an export, or the name of gates in the package (``smollm2``).
        model: name or folder of the base model; None means the model that the export names.
        dtype: type of the weights.
        device: where the weights go.

    Raises:
        UserError: when the export or its base model cannot be read, or they do not fit each other.
    """
    return Loaded(*load_model(gates, model, dtype, device), gates)


def named_base(gates: str | None, name: str | None) -> tuple[str, str | None]:
    """Return the name of a base model, the given one or the one that an export names, and its revision on the hub."""
    base = export.read_info(gates)["base_model"] if gates else {"name": "", "revision": None}
    wanted = name or base["name"]
    if not wanted:
        raise UserError("No base model is named: give model=NAME, or gates=EXPORT of an export that names one.")
    return wanted, None if name else models.hub_revision(base["revision"])


def load_model(
    gates: str | None, name: str | None, dtype: WeightType, device: str, *, adapter: bool = True
) -> tuple[Model, PreTrainedTokenizerBase]:
    """Load a base model, with the adapter of exported gates if they have one, and the tokenizer.

    Args:
        gates: the export; None means that there is none.
        name: of the base model; None means the model that the export names.
        dtype: type of the weights.
        device: where the weights go.
        adapter: whether an adapter of the export is loaded.
    """
    wanted, revision = named_base(gates, name)
    try:
        model, tokenizer = models.load_base(ModelConfig(name=wanted, revision=revision, dtype=dtype), device)
    except models.ModelError as error:
        if name or Path(wanted).is_absolute():
            raise
        raise models.ModelError(
            f"gates={gates}: trained on the base model {wanted}, a hub id or a folder relative to where that run was "
            f"started, and there is none here ({error}); give model=FOLDER or model=ORG/NAME."
        ) from error
    if gates and adapter and export.adapter_path(gates):
        return export.load_adapter(model, gates), tokenizer
    return model, tokenizer

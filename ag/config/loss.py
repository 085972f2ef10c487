"""The loss: a dataclass for each way to train, with the keys that it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from ag.config.keys import classes_by_tag, refuse
from ag.config.sections import key

REGRESS = "regress"


@dataclass
class LossConfig:
    """The keys of all losses. ``LossConfig(objective=..., share_high=..., replay=..., ...)`` makes the class to use."""

    objective: str = key(
        "lm",
        "lm: cross-entropy; kl: divergence from the model with open gates and no adapter; regress: regression without "
        "a backward pass through the model; or a loss of a plugin",
        words="lm | kl | regress | a loss of your own",
    )
    share_high: float = key(
        0.0,
        "above 0: gates for any share. A share from share_low to this value is sampled for each batch, and the gates "
        "keep it (alpha and beta do not exist then)",
        ge=0,
        le=1,
    )
    replay: bool = key(
        False,
        "read each prompt once, evict it to a sampled share as the engine does, and train on the response alone; two "
        "shares for each response (with objective=kl and share_high)",
    )
    sampled_tokens: int = key(
        0,
        "tokens of a batch on which the loss is measured, sampled for each step; 0 means all (for a large vocabulary, "
        "whose logits take longer than the model)",
        ge=0,
    )
    chunk_tokens: int = key(1024, "tokens whose logits are in memory at once in the loss", ge=1)

    def __new__(cls, *args: Any, **values: Any) -> Any:
        """Make the class that ``objective``, ``share_high`` and ``replay`` choose."""
        return object.__new__(LOSSES[choose_loss(values)] if cls is LossConfig else cls)

    @property
    def draws_share(self) -> bool:
        """Whether the share that the gates keep is sampled for each batch."""
        return self.share_high > 0


@dataclass
class TargetConfig(LossConfig):
    """A target of the mean gate."""

    alpha: float = key(1.0, "weight of the eviction loss", ge=0)
    beta: float = key(0.28, "target of the mean gate", ge=0, le=1)
    mean: Literal["soft", "hard"] = key("soft", "mean over sigmoids, or over flags")


@dataclass
class MeanGateConfig(TargetConfig):
    """The loss ``objective + alpha * |mean gate - beta|``."""

    anneal_steps: int = key(0, "steps after the warm start while beta falls linearly from 1 to its value", ge=0)


@dataclass
class RegressConfig(TargetConfig):
    """Regression of the gates in every step; validation alone compares the mean gate with its target."""

    objective: str = REGRESS

    def __post_init__(self) -> None:
        if self.draws_share:
            refuse(self, "share_high objective", "nothing is evicted; set loss.share_high=0", "loss.")
        if self.sampled_tokens:
            reason = "regression measures the gates on all tokens; set loss.sampled_tokens=0"
            refuse(self, "sampled_tokens objective", reason, "loss.")


@dataclass
class DrawnShareConfig(LossConfig):
    """The objective under a share that is sampled for each batch."""

    share_low: float = key(0.1, "with share_high: the smallest share that is sampled", ge=0.01, le=1)

    def __post_init__(self) -> None:
        if self.share_high < self.share_low:
            refuse(self, "share_high share_low", "no share lies between; swap them", "loss.")


@dataclass
class ReplayConfig(DrawnShareConfig):
    """The divergence of a response after its evicted prompt."""

    contexts: str | None = key(
        None,
        "folder of cached prompts, shared by later runs and all processes; null: kept until the run ends",
        holds="output",
    )

    def __post_init__(self) -> None:
        if self.objective != "kl":
            reason = "it is the divergence from the response after the whole prompt; use loss.objective=kl"
            refuse(self, "replay objective", reason, "loss.")
        if not self.draws_share:
            refuse(self, "replay share_high", "a share is drawn for each response; set loss.share_high too", "loss.")
        super().__post_init__()


def choose_loss(values: Mapping[str, Any]) -> str:
    """Return the tag in :data:`Loss` of the values of a section."""
    if values.get("replay"):
        return "loss.replay=true"
    if values.get("objective") == REGRESS:
        return "loss.objective=regress"
    drawn = values.get("share_high")
    return "loss.share_high above 0" if drawn else "loss.objective=lm or kl without loss.share_high"


Loss = Annotated[
    Annotated[MeanGateConfig, Tag("loss.objective=lm or kl without loss.share_high")]
    | Annotated[DrawnShareConfig, Tag("loss.share_high above 0")]
    | Annotated[ReplayConfig, Tag("loss.replay=true")]
    | Annotated[RegressConfig, Tag("loss.objective=regress")],
    Discriminator(choose_loss),
]
LOSSES = classes_by_tag(Loss)

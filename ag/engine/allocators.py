"""How a budget is shared among layers: tokens per KV head, exact in total."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ag.engine.observe import Observation
from ag.errors import UserError, require

#: CAKE's published temperatures (tau1, tau2), by model and tokens per layer (code antgroup/cakekv, model2tau.json).
PUBLISHED_TAU = {
    ("llama3.1-8b-128k", 128): (1.6, 0.6),
    ("llama3.1-8b-128k", 1024): (1.6, 0.4),
    ("llama2-7b-chat-4k", 128): (0.9, 2.3),
    ("llama2-7b-chat-4k", 1024): (1.9, 1.8),
    ("llama2-13b-chat-4k", 128): (1.8, 2.0),
    ("llama2-13b-chat-4k", 1024): (0.5, 0.4),
    ("mistral-0.3-7b-32k", 128): (1.0, 0.8),
    ("mistral-0.3-7b-32k", 1024): (0.8, 0.5),
    ("qwen2.5-7b-instruct", 128): (0.4, 0.6),
    ("qwen2.5-7b-instruct", 1024): (1.5, 0.6),
}


@dataclass(frozen=True, kw_only=True)
class Allocator:
    """Shares the budget among layers and heads.

    Attributes:
        kind: ``uniform``; ``pyramid``: lower layers get more; ``preference``: layers whose attention is spread out and
            moving get more (CAKE); ``heads``: uniform over layers, one top-k over the heads of each.
        beta: pyramid: steepness.
        tau1: preference: temperature of the entropy.
        tau2: preference: temperature of the variance.
        observers: preference: last queries whose attention is measured.
        floor: heads: share of the budget that every head keeps at least.
        official_int: pyramid and preference: round as the papers' codes do. Totals are then not exact: a pyramid's is
            up to 5 % too large, and cascading may lose tokens that a later layer cannot use.
    """

    kind: Literal["uniform", "pyramid", "preference", "heads"] = "uniform"
    beta: int = 20
    tau1: float = 1.0
    tau2: float = 1.0
    observers: int = 32
    floor: float = 0.2
    official_int: bool = False

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        require(self, "beta", self.beta >= 1, "1 or more")
        require(self, "tau1", self.tau1 > 0, "more than 0")
        require(self, "tau2", self.tau2 > 0, "more than 0")
        require(self, "observers", self.observers >= 1, "1 or more")
        require(self, "floor", 0 <= self.floor <= 1, "a share from 0 to 1")


#: The options that each kind of allocator reads.
OPTIONS = {
    "uniform": (),
    "pyramid": ("beta", "official_int"),
    "preference": ("tau1", "tau2", "observers", "official_int"),
    "heads": ("floor",),
}


def published_tau(model: str, tokens: int | float | None) -> tuple[float, float]:
    """Return CAKE's published (tau1, tau2) for a model and a budget in tokens per layer.

    Raises:
        UserError: when none was published for them.
    """
    try:
        return PUBLISHED_TAU[model, tokens]  # type: ignore[index]
    except KeyError:
        known = ", ".join(f"{name} at {size}" for name, size in PUBLISHED_TAU)
        raise UserError(
            f"no tau was published for {model} at {tokens}; there are {known}; give tau1 and tau2."
        ) from None


def layer_preference(seen: Observation, allocator: Allocator) -> Tensor:
    """Return CAKE's preference of a layer ``H^(1/tau1) V^(1/tau2)``, ``[B]`` float64 (section 4.1 of the paper)."""
    entropy, variance = entropy_and_variance(seen, allocator.observers)
    spread = entropy.double().clamp_min(1e-12) ** (1 / allocator.tau1)
    return spread * variance.double().clamp_min(1e-12) ** (1 / allocator.tau2)


def entropy_and_variance(seen: Observation, observers: int) -> tuple[Tensor, Tensor]:
    """Return H and V of a layer, ``[B]`` each.

    H is the entropy of the attention that the last queries pay the tokens before them, summed over heads and queries, V
    its variance over those queries, summed over heads and tokens. Attention to the observing tokens themselves does not
    count, and the rest is not normalised anew.
    """
    rows = seen.rows(observers)
    before = (seen.key_valid & (seen.age >= observers)).repeat_interleave(seen.group, 1)
    a = rows.a * (rows.counted[:, None, :, None] & before[:, :, None])
    entropy = -(a + 1e-10).log_().mul_(a).sum((1, 2, 3))
    return entropy, (rows.moments()[1] * before).sum((1, 2))


def largest_remainder(shares: Tensor, total: Tensor, caps: Tensor) -> Tensor:
    """Round shares to integers with an exact total; of equal remainders the lower layer is rounded up first.

    Args:
        shares: ``[B, L]`` float64, not above ``caps``, summing to ``total`` (or to all caps, when those are less).
        total: ``[B]`` long.
        caps: ``[B, L]`` long.

    Returns:
        ``[B, L]`` long.
    """
    whole = shares.floor().long().minimum(caps)
    missing = torch.minimum(total, caps.sum(1)) - whole.sum(1)
    remainder = (shares - whole).round(decimals=9)  # equal ones stay equal, whatever their last bits
    order = remainder.masked_fill(whole >= caps, -1.0).argsort(dim=1, descending=True, stable=True)
    place = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    return whole + (place < missing[:, None])


def pyramid(mean: int, held: int, layers: int, beta: int = 20, official_int: bool = False) -> list[int]:
    """Share ``mean * layers`` tokens along a line, lower layers getting more (PyramidKV, Cai et al. 2024).

    Args:
        mean: tokens per layer on average, protected ones not counted (T).
        held: tokens that compete in each layer.
        layers: number of layers L.
        beta: steepness; the last layer gets ``mean // beta``. 1 is uniform.
        official_int: descend by a whole step, as the code does; the total is then too large.

    Returns:
        Tokens of each layer, ``mean * layers`` in all (or all held).
    """
    if held < mean or layers == 1:
        return [min(mean, held)] * layers
    low = mean // beta
    high = 2 * mean - low
    if high > held:
        high, low = held, 2 * mean - held
    if official_int:
        return [high - index * ((high - low) // (layers - 1)) for index in range(layers)]
    step = (high - low) / (layers - 1)
    shares = torch.tensor([[high - index * step for index in range(layers)]], dtype=torch.float64)
    caps = torch.full((1, layers), held)
    result: list[int] = largest_remainder(shares, torch.tensor([mean * layers]), caps)[0].tolist()
    return result


def official_shares(preference: Tensor, total: Tensor, caps: Tensor) -> Tensor:
    """Share a total in proportion to preferences as CAKE's code rounds it.

    Shares are cut to integers and to the caps; what the caps cut off goes evenly to the layers below theirs, and so
    does what is then missing, single tokens from layer 0 on. The last cut may lose some again.

    Args:
        preference: ``[B, L]`` float64, above 0.
        total: ``[B]`` long.
        caps: ``[B, L]`` long.

    Returns:
        ``[B, L]`` long.
    """
    wanted = (preference / preference.sum(1, keepdim=True) * total[:, None]).long()
    shares = wanted.minimum(caps)
    for goal in (wanted.sum(1), total):
        room, missing = shares < caps, (goal - shares.sum(1)).clamp_min(0)[:, None]
        layers = room.sum(1, keepdim=True).clamp_min(1)
        shares = shares + torch.where(room, missing // layers + (room.cumsum(1) <= missing % layers), 0)
    return shares.minimum(caps)


def water_fill(preference: Tensor, total: Tensor, caps: Tensor) -> Tensor:
    """Share a total in proportion to preferences, capped: ``B_l = min(cap_l, lambda P_l)``.

    Args:
        preference: ``[B, L]`` float64, above 0.
        total: ``[B]`` long.
        caps: ``[B, L]`` long.

    Returns:
        ``[B, L]`` float64, summing to ``total`` or to all caps when those are less.
    """
    limit = torch.minimum(total, caps.sum(1)).double()
    ratio = caps / preference
    order = ratio.argsort(1)
    caps_sorted, preference_sorted = caps.double().gather(1, order), preference.gather(1, order)
    full = caps_sorted.cumsum(1) - caps_sorted  # tokens of the layers that are full before this one
    rest = preference_sorted.flip(1).cumsum(1).flip(1)
    level = (limit[:, None] - full) / rest  # lambda, if exactly the layers before this one are full
    fits = level * preference_sorted <= caps_sorted
    index = torch.where(fits.any(1), fits.long().argmax(1), order.shape[1] - 1)
    level = level.gather(1, index[:, None])
    return torch.minimum(caps.double(), level * preference)

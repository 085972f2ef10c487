"""From a policy and what the layers show to the tokens that stay."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ag.engine.allocators import largest_remainder, layer_preference, official_shares, pyramid, water_fill
from ag.engine.observe import Observation
from ag.engine.policy import Policy
from ag.engine.select import best, places, select_over_heads
from ag.errors import UserError


@dataclass
class Ballot:
    """What one layer brings to the decision, laid out as its store is: ``[B, Hkv, N]`` each.

    Attributes:
        score: float32, higher is kept.
        protected: bool, stays whatever the score.
        valid: bool, the slots that hold a token.
        capacity: ``[B]`` long, tokens per KV head on average over layers.
        prompt: ``[B]`` long, own tokens of each prompt, of which less may be held.
        preference: ``[B]`` float64, how much the layer wants (allocator ``preference`` only).
    """

    score: Tensor
    protected: Tensor
    valid: Tensor
    capacity: Tensor
    prompt: Tensor
    preference: Tensor | None = None

    @property
    def fixed(self) -> Tensor:
        """Protected tokens of a KV head, ``[B]`` long."""
        return (self.protected & self.valid).sum(-1).amax(1)

    @property
    def rivals(self) -> Tensor:
        """Tokens of a KV head that compete, ``[B]`` long, the most over heads."""
        return (self.valid & ~self.protected).sum(-1).amax(1)

    @cached_property
    def place(self) -> Tensor:
        """Where each rival stands in its head, 0 for the best."""
        return places(self.score, self.valid & ~self.protected)

    def after(self, keep: Tensor) -> Ballot:
        """Return what is left when only the tokens in ``keep`` are, closed up as the store closes up."""
        order = closing_order(keep)
        score, protected, valid, place = (x.gather(-1, order) for x in (self.score, self.protected, keep, self.place))
        left = Ballot(score, protected, valid, self.capacity, self.prompt, self.preference)
        left.place = place  # the worst went, so that nobody moves up
        return left


class Decision:
    """Decides, prompt by prompt, what each layer keeps.

    Args:
        policy: with a scorer and a budget.
        layers: indices of the layers that share the budget, ascending.
    """

    def __init__(self, policy: Policy, layers: list[int]) -> None:
        self.policy, self.layers = policy, layers
        self.ballots: dict[int, Ballot] = {}
        #: Tokens per KV head ``[B]`` that each layer kept at the end of the prompt, and keeps while decoding.
        self.settled: dict[int, Tensor] = {}

    def decide(self, seen: Observation, due: Tensor | None = None) -> dict[int, Tensor]:
        """Take in a layer and return masks ``[B, Hkv, N]`` of what stays, of it and of the layers where something goes.

        With the allocator ``preference`` the layers before give way too (cascading), so that never more than the budget
        and one whole layer is held; the result is that of one decision at the end.

        Args:
            seen: the layer.
            due: ``[B]`` bool, sequences of which something may go; the others keep all. None: every one.

        Raises:
            UserError: when the budget is smaller than what the policy protects, and something has to go.
            FloatingPointError: when a score is not finite, naming layer and scorer.
        """
        due = torch.ones(len(seen.q), dtype=torch.bool, device=seen.q.device) if due is None else due
        ballot = self._ballot(seen, due)
        kind = self.policy.allocator.kind
        if seen.decoding and kind != "heads":
            keep = _uniform(ballot, self.settled[seen.layer])
        elif kind == "preference":
            self.ballots[seen.layer] = ballot
            return self._cascade(due)
        elif kind == "heads":
            floor = self.policy.allocator.floor
            keep = select_over_heads(ballot.score, ballot.protected, ballot.valid, ballot.capacity, floor)
        else:
            capacity = ballot.capacity if kind == "uniform" else self._pyramid(ballot, self.layers.index(seen.layer))
            self._settle(seen.layer, ballot, capacity, due)
            keep = _uniform(ballot, capacity)
        return {seen.layer: keep | (ballot.valid & ~due[:, None, None])}

    def _settle(self, layer: int, ballot: Ballot, capacity: Tensor, due: Tensor) -> None:
        """Fix a layer's budget for decoding; a prompt that fitted leaves every layer the mean.

        In blocks, a prompt that ended before the others of its batch is due no more, and settled.
        """
        fitted = ballot.prompt <= ballot.capacity
        capacity = torch.where(fitted, ballot.capacity, capacity)
        self.settled[layer] = torch.where(due, capacity, self.settled.get(layer, capacity))

    def select_sequences(self, indices: Tensor) -> None:
        """Make the sequences those at ``indices``."""
        self.settled = {layer: x[indices.to(x.device)] for layer, x in self.settled.items()}

    def _ballot(self, seen: Observation, due: Tensor) -> Ballot:
        scorer, allocator = self.policy.scorer, self.policy.allocator
        assert scorer is not None
        seen.due, seen.capacity = due, self.policy.capacity(seen.prompt_lengths)
        capacity = seen.capacity
        shared = allocator.kind == "preference" and not seen.decoding
        preference = layer_preference(seen, allocator) if shared else None
        score, protected, valid = scorer.score(seen), scorer.protected(seen, capacity), seen.key_valid
        if not bool(torch.isfinite(score).logical_or(~valid | protected | ~due[:, None, None]).all()):
            raise FloatingPointError(f"layer {seen.layer}: {self.policy!r} gave a score that is not finite.")
        ballot = Ballot(score, protected, valid, capacity, seen.prompt_lengths, preference)
        tight = due & (ballot.fixed > capacity) & (valid.sum(-1).amax(1) > capacity)
        if not self.policy.strict:
            ballot.capacity = ballot.fixed.where(tight, capacity)
        elif bool(tight.any()):
            row = int(tight.long().argmax())
            raise UserError(
                f"{self.policy!r}: {int(capacity[row])} tokens per KV head are fewer than the {int(ballot.fixed[row])} "
                "that it protects (sinks, recent, window); give a larger budget or protect less."
            )
        return ballot

    def _pyramid(self, ballot: Ballot, place: int) -> Tensor:
        """Return the tokens ``[B]`` that the layer at a place keeps."""
        beta, official, count = self.policy.allocator.beta, self.policy.allocator.official_int, len(self.layers)
        kept = []
        for mean, fixed, prompt in zip(
            *(x.tolist() for x in (ballot.capacity, ballot.fixed, ballot.prompt)), strict=True
        ):
            share = mean - fixed
            # a prompt that fits stays; one that is not twice as long as the budget is shared evenly, as officially
            even = prompt < 2 * share
            kept.append(fixed + (share if even else pyramid(share, prompt - fixed, count, beta, official)[place]))
        return torch.tensor(kept, device=ballot.capacity.device)

    def _cascade(self, due: Tensor) -> dict[int, Tensor]:
        ballots = list(self.ballots.values())
        preference, fixed, caps = (  # layers may lie on several devices
            torch.stack([x.to(due.device) for x in column], 1)
            for column in zip(
                *((b.preference, b.fixed, b.rivals) for b in ballots if b.preference is not None), strict=True
            )
        )
        total = (ballots[0].capacity.to(due.device) - fixed[:, 0]).clamp_min(0) * len(self.layers)
        last = len(ballots) == len(self.layers)
        if self.policy.allocator.official_int:
            counts = official_shares(preference, total, caps)
        else:
            shares = water_fill(preference, total, caps)
            counts = largest_remainder(shares, total, caps) if last else (shares - 1e-9).ceil().long().minimum(caps)
        whole = (counts >= caps).all(0).tolist()
        masks = {list(self.ballots)[-1]: ballots[-1].valid}
        for index, (layer, ballot) in enumerate(zip(list(self.ballots), ballots, strict=True)):
            capacity, mine = ((fixed + counts)[:, index].to(ballot.score.device), due.to(ballot.score.device))
            if last:
                self._settle(layer, ballot, capacity, mine)
            if not whole[index]:
                masks[layer] = _uniform(ballot, capacity) | (ballot.valid & ~mine[:, None, None])
                self.ballots[layer] = ballot.after(masks[layer])
        if last:
            self.ballots = {}
        return masks


def _uniform(ballot: Ballot, capacity: Tensor) -> Tensor:
    """Keep ``capacity`` ``[B]`` tokens in each head."""
    return best(ballot.place, ballot.protected, ballot.valid, capacity[:, None].expand(ballot.place.shape[:2]))


def closing_order(keep: Tensor) -> Tensor:
    """Return the slots ``[B, Hkv, N']`` of the kept tokens in order, N' being the most over heads, then others."""
    kept = keep.cumsum(-1)
    place = torch.where(keep, kept, kept[..., -1:] + (~keep).cumsum(-1)) - 1  # cheaper than a stable sort
    slots = torch.arange(keep.shape[-1], device=keep.device).expand_as(place)
    return torch.empty_like(place).scatter_(-1, place, slots)[..., : int(kept[..., -1].max())]

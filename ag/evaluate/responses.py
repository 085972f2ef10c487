"""Likelihood of responses after their prompt was prefilled and evicted, as it happens at inference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ag.engine import EvictionCache, Policy, prefill
from ag.model.hooks import decoder_of
from ag.training.losses import token_nll
from ag.training.metrics import MultipleChoiceAccuracy


@dataclass
class Scores:
    """What :func:`score_responses` found.

    Attributes:
        losses: mean negative log-likelihood of each scored response, in nats a token, in the order of the batches.
        tokens: number of tokens of each of those responses.
        kept: share of (token, layer, KV head) entries of the prompts that were still held when the response began.
        kv_bytes: bytes allocated for keys and values at that moment, summed over the batches.
        accuracy: share of multiple-choice questions answered right, None without any.
    """

    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    kept: float = 1.0
    kv_bytes: int = 0
    accuracy: float | None = None

    @property
    def loss(self) -> float:
        """Mean over responses of the mean over their tokens."""
        return sum(self.losses) / len(self.losses)

    @property
    def perplexity(self) -> float:
        """Exponential of the mean over all tokens."""
        total = sum(loss * count for loss, count in zip(self.losses, self.tokens, strict=True))
        return float(torch.tensor(total / sum(self.tokens)).exp())


@torch.inference_mode()
def score_responses(
    model: nn.Module, batches: Iterable[dict[str, Tensor]], policies: Sequence[str | Policy]
) -> list[Scores]:
    """Prefill each prompt, evict, and score the response over what is left; policies share a dense forward pass.

    Args:
        model: causal language model in evaluation mode.
        batches: as :class:`ag.data.collate.Collator` makes them, with ``prompt_length``; of a multiple-choice question
            the right answer is scored, and all of them compete for the accuracy.
        policies: what the caches evict; see :func:`ag.policy`.

    Returns:
        What was found under each policy.
    """
    tallies = [_Tally() for _ in policies]
    device = next(model.parameters()).device
    for batch in batches:
        aligned = _aligned({name: value.to(device) for name, value in batch.items()})
        longest = aligned.longest
        caches = prefill(
            model,
            policies,
            aligned.tokens[:, :longest],
            aligned.mask[:, :longest],
            aligned.positions[:, :longest],
        )
        for tally, (cache, last) in zip(tallies, caches, strict=True):
            tally.add(model, aligned, cache, last)
    return [tally.scores() for tally in tallies]


@dataclass
class _Aligned:
    """A batch whose prompts end in the same column, ``longest - 1``; responses begin in the next one."""

    batch: dict[str, Tensor]
    longest: int
    tokens: Tensor
    labels: Tensor
    mask: Tensor
    positions: Tensor


def _aligned(batch: dict[str, Tensor]) -> _Aligned:
    ids, lengths, prompt = batch["input_ids"], batch["attention_mask"].sum(1), batch["prompt_length"]
    longest = int(prompt.max())
    columns = torch.arange(longest + int((lengths - prompt).max()), device=ids.device) - longest + prompt[:, None]
    mask = (columns >= 0) & (columns < lengths[:, None])
    source = columns.clamp(0, ids.shape[1] - 1)
    labels = batch["labels"].gather(1, source).masked_fill(~mask, -100)
    return _Aligned(batch, longest, ids.gather(1, source), labels, mask, columns.clamp_min(0))


class _Tally:
    """What one policy has made of the batches so far."""

    def __init__(self) -> None:
        self.found, self.accuracy = Scores(), MultipleChoiceAccuracy()
        self.kept = self.entries = 0.0

    def add(self, model: nn.Module, aligned: _Aligned, cache: EvictionCache, last: Tensor) -> None:
        """Score the responses after the final hidden states ``last`` ``[B, d]`` of their prompts."""
        batch, longest = aligned.batch, aligned.longest
        prompt_tokens = float(batch["prompt_length"].sum())
        self.kept += cache.kept_share() * prompt_tokens
        self.entries += prompt_tokens
        self.found.kv_bytes += cache.nbytes
        after = decoder_of(model)(
            input_ids=aligned.tokens[:, longest:],
            attention_mask=aligned.mask,
            position_ids=aligned.positions[:, longest:],
            past_key_values=cache,
        ).last_hidden_state
        nll, rows = token_nll(model, torch.cat([last[:, None], after], 1), aligned.labels[:, longest - 1 :])
        right = torch.ones(len(aligned.tokens), dtype=torch.bool, device=nll.device)
        if "question" in batch:
            self.accuracy.to(nll.device).update(nll, rows, batch["question"], batch["choice"], batch["target"])
            right = (batch["choice"] == batch["target"]) & (batch["question"] >= 0)
        for row in right.nonzero().flatten().tolist():
            mine = nll[rows == row]
            self.found.losses.append(float(mine.mean()))
            self.found.tokens.append(len(mine))

    def scores(self) -> Scores:
        """Return the result."""
        self.found.kept = self.kept / self.entries
        self.found.accuracy = float(self.accuracy.compute()) if self.accuracy.questions else None
        return self.found

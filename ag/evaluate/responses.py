"""Likelihood of responses after their prompt was prefilled and evicted, as it happens at inference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ag.attach import decoder_of
from ag.engine import EvictionCache, Policy
from ag.losses import token_nll
from ag.metrics import MultipleChoiceAccuracy


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
def score_responses(model: nn.Module, batches: Iterable[dict[str, Tensor]], policy: str | Policy) -> Scores:
    """Prefill each prompt, evict, and score the response over what is left.

    Args:
        model: causal language model in evaluation mode.
        batches: as :class:`ag.data.collate.Collator` makes them, with ``prompt_length``; of a multiple-choice question
            the right answer is scored, and all of them compete for the accuracy.
        policy: what the cache evicts; see :func:`ag.policy`.
    """
    scores, accuracy = Scores(), MultipleChoiceAccuracy()
    device = next(model.parameters()).device
    kept = entries = 0.0
    for batch in batches:
        batch = {name: value.to(device) for name, value in batch.items()}
        cache = EvictionCache(model, policy)
        nll, rows, kept_share, kv_bytes = _score(model, batch, cache)
        right = torch.ones(len(batch["input_ids"]), dtype=torch.bool, device=device)
        if "question" in batch:
            accuracy.to(device).update(nll, rows, batch["question"], batch["choice"], batch["target"])
            right = (batch["choice"] == batch["target"]) & (batch["question"] >= 0)
        for row in right.nonzero().flatten().tolist():
            mine = nll[rows == row]
            scores.losses.append(float(mine.mean()))
            scores.tokens.append(len(mine))
        prompt_tokens = float(batch["prompt_length"].sum())
        kept += kept_share * prompt_tokens
        entries += prompt_tokens
        scores.kv_bytes += kv_bytes
    scores.kept = kept / entries
    scores.accuracy = float(accuracy.compute()) if accuracy.questions else None
    return scores


def _score(model: nn.Module, batch: dict[str, Tensor], cache: EvictionCache) -> tuple[Tensor, Tensor, float, int]:
    """Return the losses ``[N]`` of the response tokens, the row ``[N]`` of each, kept share and bytes."""
    decoder = decoder_of(model)
    ids, lengths, prompt = batch["input_ids"], batch["attention_mask"].sum(1), batch["prompt_length"]
    longest, device = int(prompt.max()), ids.device
    # prompts end in the same column, responses begin in the next one
    columns = torch.arange(longest + int((lengths - prompt).max()), device=device) - longest + prompt[:, None]
    mask = (columns >= 0) & (columns < lengths[:, None])
    source = columns.clamp(0, ids.shape[1] - 1)
    tokens, labels = ids.gather(1, source), batch["labels"].gather(1, source).masked_fill(~mask, -100)
    positions = columns.clamp_min(0)
    before = decoder(
        input_ids=tokens[:, :longest],
        attention_mask=mask[:, :longest],
        position_ids=positions[:, :longest],
        past_key_values=cache,
    ).last_hidden_state
    held = cache.kept_share(), cache.nbytes
    after = decoder(
        input_ids=tokens[:, longest:],
        attention_mask=mask,
        position_ids=positions[:, longest:],
        past_key_values=cache,
    ).last_hidden_state
    hidden = torch.cat([before[:, -1:], after], 1)
    return *token_nll(model, hidden, labels[:, longest - 1 :]), *held

"""What is evicted of a prompt leaves a trace: values of what stays are fitted, so that attention gives what all gave.

Attention Matching (Zweiger et al. 2026, arXiv 2602.16284) replaces a context by fewer keys and values: reference
queries say what attention to all of it gives, and the new values are those that come nearest to it, by least squares.
Here the policy says which keys stay, and these stay as they are. The reference queries are the prompt's own, turned to
the place behind its end, where the queries are that will come; the paper lets the model repeat the text. It also fits a
bias of each key, which would have to be stored and read by every kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ag.engine.lookback import Lookback
from ag.engine.observe import Queries
from ag.engine.passes import Pass
from ag.engine.store import Rows
from ag.kernels.softmax import PLAIN, Softmax, weigh
from ag.model.hooks import AttentionCall

REFERENCES = 256  # queries of a prompt
RIDGE = 0.03  # pull of each value towards what it was, in multiples of the mean square of a key's weights
AT_ONCE = 2**26  # weights that are made at once


class Whole(NamedTuple):
    """What attention to all of a prompt gave.

    Attributes:
        outputs: of the references, ``[R, M, Dv]``.
        lowest: rank of the first token that they see, ``[R, 1]``.
        scaling: of the logits.
        softmax: the model's, with a sink logit of each reference, ``[R, M]``.
    """

    outputs: Tensor
    lowest: Tensor
    scaling: float
    softmax: Softmax


@dataclass
class References(Lookback):
    """Queries of a prompt in a layer, which values are fitted to; once it is over, turned to its end.

    Attributes:
        whole: what they see of all of the prompt; None: nothing is to be fitted.
    """

    whole: Whole | None = None

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.whole = None

    def note(self, call: AttentionCall, now: Pass) -> None:
        """Take note of those among the queries of a pass over the prompt, before rotations by slot."""
        chosen = now.real & references(now.ranks, now.prompt_lengths.to(now.ranks.device))
        self.remember(self.before(Queries(q=call.q, ranks=now.ranks, valid=chosen)), REFERENCES)

    def look(self, call: AttentionCall, rows: Rows, now: Pass, turn: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Look from behind the prompt at all of it, which ``rows`` hold.

        ``turn`` rotates queries ``[B, H, M, D]`` on by so many ranks ``[B, 1, M]``.
        """
        assert self.queries is not None
        q, ranks, valid = self.queries
        lengths, kv_heads = now.prompt_lengths.to(ranks.device), call.k.shape[1]
        self.queries = turn(q, (lengths[:, None] - ranks).clamp_min(0)[:, None]), ranks, valid
        first = lengths - (call.window - 1) if call.window else torch.zeros_like(lengths)
        lowest, mine = first.repeat_interleave(kv_heads)[:, None], self._by_row(len(rows.ranks))
        sinks = call.softmax.by_row(len(mine), call.q.shape[1] // kv_heads)
        each = None if sinks is None else sinks.repeat_interleave(mine.shape[1] // sinks.shape[1], 1)
        softmax = call.softmax._replace(sinks=each)
        outputs = attended(mine, rows.keys, rows.values, _seen(rows, lowest), call.scaling, softmax)
        self.whole = Whole(outputs, lowest, call.scaling, softmax)

    def fit(self, rows: Rows) -> Tensor:
        """Return values ``[R, N, Dv]`` of what stayed, with which the references see what they saw of all."""
        assert self.queries is not None and self.whole is not None
        outputs, lowest, scaling, softmax = self.whole
        valid = self.queries[2].repeat_interleave(len(outputs) // len(self.queries[2]), 0)
        valid = valid.repeat(1, outputs.shape[1] // valid.shape[1])
        q, seen = self._by_row(len(outputs)), _seen(rows, lowest)
        return fitted(q, outputs, valid, rows.keys, rows.values, seen, scaling, softmax)

    def _by_row(self, rows: int) -> Tensor:
        """Return the queries of the heads that share a KV head together, ``[R, M, D]``."""
        assert self.queries is not None
        q = self.queries[0]
        return q.reshape(rows, -1, q.shape[-1])


def _seen(rows: Rows, lowest: Tensor) -> Tensor:
    """Return which slots ``[R, N]`` queries behind a prompt see."""
    seen = rows.ranks >= lowest
    return seen if rows.valid is None else seen & rows.valid


def references(ranks: Tensor, lengths: Tensor) -> Tensor:
    """Tell which tokens of prompts have reference queries: evenly spaced, the last one among them.

    Args:
        ranks: ``[B, T]``, the place of each token among its sequence's own.
        lengths: ``[B]``, own tokens of each prompt.

    Returns:
        ``[B, T]`` bool, at most :data:`REFERENCES` of a sequence.
    """
    spacing = ((lengths + REFERENCES - 1) // REFERENCES).clamp_min(1)
    return (lengths[:, None] - 1 - ranks) % spacing[:, None] == 0


def attended(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scaling: float, softmax: Softmax = PLAIN) -> Tensor:
    """Return what queries ``[R, M, D]`` see of keys ``[R, N, D]`` and values ``[R, N, Dv]``: ``[R, M, Dv]``.

    ``seen`` ``[R, N]``: which slots they see; ``softmax``: the model's, with a sink logit of each query, ``[R, M]``.
    Outputs are of float32, or of a type with more bits.
    """
    parts = [_weights(q[x], keys[x], seen[x], scaling, softmax.of_heads(x)) @ _wide(values[x]) for x in _parts(q, keys)]
    return torch.cat(parts)


def fitted(
    q: Tensor,
    wanted: Tensor,
    valid: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    scaling: float,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Return values ``[R, N, Dv]`` with which attention to keys that stayed gives what attention to all of them gave.

    They solve ``min_W |A W - O|^2 + ridge |W - V|^2``: weights A of the queries, outputs O that are wanted.

    Args:
        q: reference queries ``[R, M, D]``.
        wanted: their outputs ``[R, M, Dv]``.
        valid: ``[R, M]`` bool, which of them count.
        keys: of what stayed, ``[R, N, D]``.
        values: ``[R, N, Dv]``.
        seen: ``[R, N]`` bool, which slots hold something that the queries see; others keep their values.
        scaling: of the logits.
        softmax: the model's, with a sink logit of each query, ``[R, M]``.
    """
    out = values.clone()
    for rows in _parts(q, keys):
        weights = _weights(q[rows], keys[rows], seen[rows], scaling, softmax.of_heads(rows)) * valid[rows, :, None]
        missing = (wanted[rows] - weights @ _wide(values[rows])) * valid[rows, :, None]
        ridge = RIDGE * weights.square().sum((1, 2)) / seen[rows].sum(1).clamp_min(1)
        few = weights.shape[1] < weights.shape[2]  # the smaller of two systems with the same solution
        gram = weights @ weights.mT if few else weights.mT @ weights
        gram.diagonal(dim1=1, dim2=2).add_(ridge[:, None].clamp_min(torch.finfo(ridge.dtype).tiny))
        factor = torch.linalg.cholesky(gram)
        right = missing if few else weights.mT @ missing
        step = torch.cholesky_solve(right, factor)
        out[rows] += (weights.mT @ step if few else step).masked_fill(~seen[rows, :, None], 0.0).to(out.dtype)
    return out


def _weights(q: Tensor, keys: Tensor, seen: Tensor, scaling: float, softmax: Softmax) -> Tensor:
    """Return the attention weights ``[R, M, N]``, 0 where a row sees nothing."""
    logits = softmax.capped(_wide(q) @ _wide(keys).mT * scaling).masked_fill(~seen[:, None], -torch.inf)
    return weigh(logits, None if softmax.sinks is None else softmax.sinks[:, :, None]).nan_to_num(0.0)


def _wide(x: Tensor) -> Tensor:
    """Return numbers in float32, or as they are where they have more bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _parts(q: Tensor, keys: Tensor) -> list[slice]:
    """Return rows that are worked on at once."""
    some = max(1, AT_ONCE // max(q.shape[1] * keys.shape[1], 1))
    return [slice(first, first + some) for first in range(0, len(q), some)]

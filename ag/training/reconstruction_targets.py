"""Targets of the warm start by reconstruction: the model repeats each row in chunks, as for the policy ``kvzip``."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional as F

from ag.engine.cache import EvictionCache
from ag.engine.policy import policy
from ag.engine.prompt import Attended
from ag.engine.reconstruction import measure_repetition
from ag.errors import UserError
from ag.gates.gate import AttentionGates
from ag.gates.gating import Observing
from ag.model.hybrid import States
from ag.model.interceptor import AttentionCall
from ag.model.structure import decoder_of


class ReconstructionTargets(Observing):
    """A dense forward pass that runs the gates, and records KVzip's scores as the targets of their regression.

    Every chunk is repeated after the whole row. ``targets`` holds, by gated layer, the log of the largest weight that
    a token of the repetition gives each key, in any query head of the group, ``[B, Hkv, T']`` float32; sinks have none.
    ``scores`` holds the scores of :class:`ag.engine.scorers.kvzip.KVzip`, ``[B, Hkv, N]`` by token index.

    Meant to run under ``torch.no_grad()``, like :class:`ag.gates.gating.Observing`.

    Args:
        model: the model that reads the rows.
        gates: gates of the model.
        valid: ``[B, T]``, nonzero on real tokens.
    """

    def __init__(self, model: nn.Module, gates: AttentionGates, valid: Tensor) -> None:
        super().__init__(gates, valid, target="reread")
        decoder = decoder_of(model)
        if States.of(decoder.config) is not None:
            raise UserError(
                f"warmup.target=reread: {type(decoder).__name__} has layers that keep states, and training keeps none "
                "from which the model could repeat a row: use another warmup.target."
            )
        #: Holds the rows while they are repeated, and evicts nothing.
        self._cache = EvictionCache(model, policy("kvzip", 1.0, sinks=gates.config.sink_tokens))
        self.scores: dict[int, Tensor] = {}
        self._token_indices = (valid.long().cumsum(1) - 1).clamp_min(0)
        self._columns: Tensor | None = None  # [B, w] of the tokens that the cache reads; None means all in order

    def begin(self, decoder: nn.Module, attention_mask: Tensor | None, tokens: Tensor) -> None:
        """Begin the pass of the cache too."""
        super().begin(decoder, attention_mask, tokens)
        self._cache.interceptor.begin(decoder, None if self.valid is None else self.valid.long(), tokens)

    def passes(self, position_ids: Tensor | None) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Yield one pass, and let the model repeat the rows after it."""
        self._columns, _ = next(self._cache.interceptor.passes(position_ids))
        yield None, position_ids
        self._collect_scores()

    def record(self, call: AttentionCall, out: Tensor) -> None:
        """Store keys and values for the repetition."""
        q, k, v, output = (self._left_aligned(x) for x in (call.q, call.k, call.v, out))
        self._cache.interceptor.attend(Attended(**vars(call) | {"q": q, "k": k, "v": v}, output=output))

    def _left_aligned(self, x: Tensor) -> Tensor:
        """Return ``[B, H, T, D]`` with the columns that the cache reads."""
        if self._columns is None:
            return x
        columns = self._columns.clamp_min(0).to(x.device)
        return x.gather(2, columns[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))

    def _collect_scores(self) -> None:
        """Let the model repeat the rows, and take the scores."""
        state, batch = self._cache.state, self._cache.interceptor.batch
        assert batch is not None
        self.scores = measure_repetition(state, batch).scores
        self._cache.reset()
        for layer, scores in self.scores.items():
            if str(layer) in self.gates.layers:
                at = self._token_indices.to(scores.device)[:, None].expand(-1, scores.shape[1], -1)
                log = F.pad(scores, (0, at.shape[-1] - scores.shape[-1])).gather(2, at).clamp_min(1e-12).log()
                self.targets[layer] = log[..., : self._end]

    def has_target(self) -> Tensor:
        """Return ``[B, T']`` bool: the tokens that were repeated."""
        return self.counted() & (self._token_indices[:, : self._end] >= self.gates.config.sink_tokens)

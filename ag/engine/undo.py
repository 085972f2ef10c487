"""Whether the newest tokens of a cache can be taken back, as drafts are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from ag.engine.history import History
from ag.engine.layer import EvictionLayer
from ag.engine.passes import Pass
from ag.engine.policy import Policy
from ag.errors import UserError
from ag.gates.gate import AttentionGates


class Undo:
    """Knows what was evicted last, and refuses to go back behind it.

    Args:
        policy: of the cache.
        gates: of the model; None without gates.
        layers: of the cache.
    """

    #: Columns seen when something could last be evicted by flags: before the last forward pass, or after the prompt.
    _settled: int
    #: The most own tokens ``[B]`` of each sequence in such columns when some were taken back; None: none were.
    _taken: Tensor | None

    def __init__(self, policy: Policy, gates: AttentionGates | None, layers: Sequence[EvictionLayer]) -> None:
        self.policy, self.gates, self.layers = policy, gates, layers
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._settled, self._taken = 0, None

    def note(self, now: Pass) -> None:
        """Take note of a pass, before it goes through the layers."""
        self._settled = min(now.seen, now.prompt_columns) if now.reading else now.seen - now.ranks.shape[1]

    def check_drafts(self) -> None:
        """Refuse drafts where they could make something go that is then wanted back."""
        if self.policy.scorer is None:
            return
        if self.policy.rereads:
            raise UserError(
                f"{self.policy!r} repeats a prompt before anything follows it; generate without an assistant model and "
                "prompt lookup."
            )
        if self.policy.steps is not None:
            raise UserError(
                f"{self.policy!r} evicts while drafts come, and cannot take that back; generate without an assistant "
                "model and prompt lookup, or use the schedule prefill."
            )

    def take_back(self, remove: int, history: History) -> None:
        """Take note that the newest columns of ``history`` are about to go.

        Raises:
            UserError: when what was evicted since, or what the scorer recorded, cannot be restored.
        """
        scorer, left = self.policy.scorer, history.seen - remove
        if scorer is not None and left < history.prompt_columns:
            raise UserError(f"crop({-remove}): only tokens after the prompt can go; prefill a shorter prompt.")
        self._check_recent(remove, history)
        if self.policy.budget is not None:
            self._check_evicted(remove, left)
        self._taken, self._settled = self._settled_tokens(history), min(self._settled, left)

    def _check_evicted(self, remove: int, left: int) -> None:
        """Refuse to go back to a state of which something was evicted under a budget since."""
        scorer = self.policy.scorer
        assert scorer is not None
        if self.policy.steps is not None and (scorer.needs.every_query or scorer.needs.lookback):
            raise UserError(
                f"crop({-remove}): {self.policy!r} has recorded the queries of the tokens that would go; use the "
                "schedule prefill, or make a new cache."
            )
        if left < max(layer.evicted_at for layer in self.layers):
            raise UserError(
                f"crop({-remove}): {self.policy!r} has evicted something since, which cannot come back; use the "
                "schedule prefill, or make a new cache."
            )

    def _check_recent(self, remove: int, history: History) -> None:
        """Refuse where tokens that are evicted would be recent again.

        The next query of a text of n tokens sees all ranks from n + 1 - r on. Below that what had settled for n tokens
        has only those that stay for another reason.
        """
        left, settled = history.valid[:, :-remove].sum(1), self._settled_tokens(history)
        for name, recent, last in self._recents(history):
            first = settled + 1 - recent if last is None else (settled + 1 - recent).minimum(last)
            if bool(((first > 0) & (left + 1 - recent < first)).any()):
                raise UserError(
                    f"crop({-remove}): some of the {recent} recent tokens ({name}) are evicted; crop no more than the "
                    "last forward pass, or make a new cache."
                )

    def _recents(self, history: History) -> Iterator[tuple[str, int, Tensor | None]]:
        """Yield the numbers of newest tokens that are held for later queries, and below which rank others went."""
        for window in {layer.window for layer in self.layers} - {None}:
            yield "the model's sliding window", int(window or 0), None
        if self.gates is None:
            return
        config, later = self.gates.config, self.policy.asks_later(self.gates)
        if self.policy.budget is None:
            prompt = None if later else history.prompt_lengths
            yield "gate.recent_tokens", config.recent_tokens, prompt
        if config.window and later:
            yield "gate.window", config.window, None

    def _settled_tokens(self, history: History) -> Tensor:
        """Return ``[B]``, the most own tokens of each sequence that something was evicted for."""
        settled = history.valid[:, : self._settled].sum(1)
        return settled if self._taken is None else settled.maximum(self._taken.to(settled.device))

    def join(self, history: History) -> None:
        """Take note that sequences were appended: nothing that came before is taken back."""
        self._settled, self._taken = history.seen, None

    def select_sequences(self, indices: Tensor) -> None:
        """Make the sequences those at ``indices``."""
        self._taken = None if self._taken is None else self._taken[indices.to(self._taken.device)]

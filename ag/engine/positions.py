"""What keys and queries are rotated by: their place in the text, as it is or squeezed, or their slot in a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ag.engine.passes import Pass, Tokens
from ag.engine.store import PagedStore, Rows
from ag.model.hooks import AttentionCall, rotate
from ag.model.support import check_turns


@dataclass(frozen=True)
class Original:
    """Keys and queries stay as the model rotated them."""

    decoder: Any
    #: Whether stored keys can be attended to where they lie.
    in_place: ClassVar[bool] = True

    def positions(self, tokens: Tokens, seen: int, stores: Sequence[PagedStore]) -> Tensor | None:
        """Return the positions ``[B, w]`` that the model is to rotate new tokens by; None: the usual ones.

        ``seen`` are the columns of the input, these included, and ``stores`` what the layers hold before them.
        """
        return None

    def turn(self, x: Tensor, places: Tensor, span: int, layer: int) -> Tensor:
        """Rotate ``[B, H, n, D]`` of a layer by places ``[B, 1, n or 1]``, averaged over so many from there on."""
        return rotate(self.decoder, x, places, span, layer)

    def unrotated(self, call: AttentionCall, now: Pass) -> AttentionCall:
        """Return a call with keys as they are stored, and queries that :meth:`queries` takes."""
        return call

    def keys(self, rows: Rows) -> Rows:
        """Return stored rows with keys as queries meet them."""
        return rows

    def queries(self, q: Tensor, held: Rows, ranks: Tensor) -> Tensor:
        """Return queries ``[B, H, T, D]`` of ranks ``[B, T]`` as they meet what is held."""
        return q


@dataclass(frozen=True)
class Slots(Original):
    """Keys are stored without rotation; they and the queries are turned to slots when they meet.

    Raises:
        UserError: when the model's keys cannot be rotated anew.
    """

    in_place: ClassVar[bool] = False
    #: Its name as an option of a policy.
    name: ClassVar[str] = "slot"

    def __post_init__(self) -> None:
        """Refuse models whose keys cannot be rotated anew."""
        check_turns(self.decoder, self.name)

    def positions(self, tokens: Tokens, seen: int, stores: Sequence[PagedStore]) -> Tensor | None:
        """Return positions near the number of tokens held: any would do, as layers turn back and rotate again."""
        first = torch.where(tokens.real, tokens.ranks, seen).amin(1, keepdim=True)
        places = tokens.ranks - first
        if stores:
            held = torch.stack([store.lengths.view(store.batch, -1).amax(1) for store in stores]).amax(0)
            places = places + held.to(places.device, non_blocking=places.is_cuda)[:, None]
        return places.clamp_min(0)

    def unrotated(self, call: AttentionCall, now: Pass) -> AttentionCall:
        """Undo the model's rotation."""
        assert now.positions is not None
        back = -now.positions[:, None]
        return replace(call, q=rotate(self.decoder, call.q, back), k=rotate(self.decoder, call.k, back))

    def keys(self, rows: Rows) -> Rows:
        """Rotate each key by its slot."""
        slots = torch.arange(rows.keys.shape[1], device=rows.keys.device)
        return rows._replace(keys=rotate(self.decoder, rows.keys[:, None], slots[None, None])[:, 0])

    def queries(self, q: Tensor, held: Rows, ranks: Tensor) -> Tensor:
        """Rotate queries to the slots of their tokens, counted from the last one held."""
        batch, heads = q.shape[:2]
        count = held.ranks.shape[1] if held.valid is None else held.valid.sum(1, keepdim=True)
        shift = (count - 1 - _newest(held)).view(batch, -1)
        shift = shift.repeat_interleave(heads // shift.shape[1], 1)
        return rotate(self.decoder, q, (shift[:, :, None] + ranks[:, None]).clamp_min(0))


@dataclass(frozen=True)
class Interpolated(Slots):
    """Keys and queries are turned to their places in the text, those of old tokens squeezed into the model's context.

    A token at a distance of more than half of the context is squeezed in proportion, so that the first token of the
    text comes to lie where the context begins. While the text is no longer than the context nothing is squeezed, and
    places are those of :class:`Original`.

    Source: position interpolation (Chen et al. 2023, arXiv 2306.15595), applied to far tokens alone; these are the
    tokens whose positions Self-Extend (Jin et al. 2024, arXiv 2401.01325) groups.
    """

    name: ClassVar[str] = "interpolated"

    def keys(self, rows: Rows) -> Rows:
        """Rotate each key by its place."""
        places = self._places(rows.ranks, _newest(rows))
        return rows._replace(keys=rotate(self.decoder, rows.keys[:, None], places[:, None])[:, 0])

    def queries(self, q: Tensor, held: Rows, ranks: Tensor) -> Tensor:
        """Rotate queries by the places of their tokens."""
        batch, heads = q.shape[:2]
        newest = _newest(held).view(batch, -1)
        places = self._places(ranks[:, None], newest[:, :, None])
        return rotate(self.decoder, q, places.repeat_interleave(heads // newest.shape[1], 1))

    def _places(self, ranks: Tensor, newest: Tensor) -> Tensor:
        """Return where tokens of these ranks lie in the context, whose last position is the newest token's.

        ``ranks`` and ``newest``, the rank of the newest token, broadcast.
        """
        context: int = self.decoder.config.max_position_embeddings
        near = context // 2
        distance = (newest - ranks).float()
        share = (context - 1 - near) / (newest - near).clamp_min(context - 1 - near)
        return context - 1 - torch.where(distance > near, near + (distance - near) * share, distance)


def _newest(rows: Rows) -> Tensor:
    """Return the rank of the newest token that each row holds, ``[R, 1]``."""
    ranks = rows.ranks if rows.valid is None else rows.ranks.masked_fill(~rows.valid, -1)
    return ranks.amax(1, keepdim=True)


#: How keys and queries are rotated, by the option ``positions`` of a policy.
POSITIONS: dict[str, type[Original]] = {"original": Original, "slot": Slots, "interpolated": Interpolated}

"""What keys and queries are rotated by: their place in the text, as it is or squeezed, or their slot in a head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ag.engine.passes import Pass, Tokens
from ag.engine.store import PagedStore, Rows
from ag.model.hooks import AttentionCall, rotate
from ag.model.support import check_turns

#: Takes keys ``[B, Hkv', n, D]`` of some heads and slots, and the ranks ``[B]`` of queries, to where these meet them.
Bend = Callable[[Tensor, slice, slice, Tensor], Tensor]


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

    def bends(self, seen: int) -> bool:
        """Tell whether queries meet a key at other distances than in one rotation, in a text of so many columns."""
        return False

    def parts(self, ranks: Tensor) -> list[slice]:
        """Return columns of queries of ranks ``[B, T]`` that meet the same keys, where :meth:`bends` says so."""
        return [slice(None)]

    def bending(self, held: Rows, batch: int) -> Bend | None:
        """Return what moves the keys that :meth:`keys` gave for the newest token; None: all queries meet these."""
        return None

    def turn(self, x: Tensor, places: Tensor, span: int, layer: int) -> Tensor:
        """Rotate ``[B, H, n, D]`` of a layer by places ``[B, 1, n or 1]``, averaged over so many from there on."""
        return rotate(self.decoder, x, places, span, layer)

    def unrotated(self, call: AttentionCall, now: Pass) -> AttentionCall:
        """Return a call with keys as they are stored, and queries that :meth:`queries` takes."""
        return call

    def keys(self, rows: Rows, ranks: Tensor | None = None) -> Rows:
        """Return stored rows, or what queries up to ranks ``[B]`` see of them, with keys as these meet them.

        ``ranks`` None: those of the newest tokens.
        """
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

    def keys(self, rows: Rows, ranks: Tensor | None = None) -> Rows:
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
    """Keys and queries are turned to their places in the text, those of far keys squeezed into the model's context.

    To a query a token at a distance of more than half of the context is nearer, in proportion, so that the first token
    of the text comes to lie as far away as the context is long. While the text is no longer than the context nothing is
    squeezed, and places are those of :class:`Original`. In a longer one each query meets keys that are turned for it.

    Source: position interpolation (Chen et al. 2023, arXiv 2306.15595), applied to far tokens alone; these are the
    tokens whose positions Self-Extend (Jin et al. 2024, arXiv 2401.01325) groups.
    """

    name: ClassVar[str] = "interpolated"

    def bends(self, seen: int) -> bool:
        """Tell whether the text is longer than the context."""
        return seen > self._context

    def parts(self, ranks: Tensor) -> list[slice]:
        """Return the columns within the context, and each behind it alone."""
        inside = int((ranks < self._context).all(0).sum())  # ranks ascend
        alone = [slice(at, at + 1) for at in range(inside, ranks.shape[1])]
        return [slice(inside), *alone] if inside else alone

    def bending(self, held: Rows, batch: int) -> Bend:
        """Return what turns keys on from where the newest token meets them."""
        all_ranks, newest = (x.unflatten(0, (batch, -1)) for x in (held.ranks, _newest(held)))

        def bend(keys: Tensor, heads: slice, slots: slice, at: Tensor) -> Tensor:
            ranks = all_ranks[:, heads, slots]
            further = self._places(ranks, at[:, None, None]) - self._places(ranks, newest[:, heads])
            return rotate(self.decoder, keys, further)

        return bend

    def keys(self, rows: Rows, ranks: Tensor | None = None) -> Rows:
        """Rotate each key by its place."""
        newest = _newest(rows)
        if ranks is not None:
            newest = ranks.repeat_interleave(len(newest) // len(ranks))[:, None]
            seen = rows.ranks <= newest
            rows = rows._replace(valid=seen if rows.valid is None else seen & rows.valid)
        places = self._places(rows.ranks, newest)
        return rows._replace(keys=rotate(self.decoder, rows.keys[:, None], places[:, None])[:, 0])

    def queries(self, q: Tensor, held: Rows, ranks: Tensor) -> Tensor:
        """Rotate queries by their places in the text."""
        return rotate(self.decoder, q, ranks[:, None].clamp_min(0))

    @property
    def _context(self) -> int:
        context: int = self.decoder.config.max_position_embeddings
        return context

    def _places(self, ranks: Tensor, at: Tensor) -> Tensor:
        """Return where tokens of these ranks lie to a query of rank ``at``; the two broadcast."""
        near = self._context // 2
        distance, far = (at - ranks).float(), self._context - 1 - near
        share = far / (at - near).clamp_min(far)
        return at - torch.where(distance > near, near + (distance - near) * share, distance)


def _newest(rows: Rows) -> Tensor:
    """Return the rank of the newest token that each row holds, ``[R, 1]``."""
    ranks = rows.ranks if rows.valid is None else rows.ranks.masked_fill(~rows.valid, -1)
    return ranks.amax(1, keepdim=True)


#: How keys and queries are rotated, by the option ``positions`` of a policy.
POSITIONS: dict[str, type[Original]] = {"original": Original, "slot": Slots, "interpolated": Interpolated}

"""What went by in a cache: the columns of its input, the passes that they came in, and what can be taken back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ag.engine.layer import EvictionLayer
from ag.engine.passes import Pass, Tokens, marked
from ag.engine.policy import Policy
from ag.engine.positions import Original
from ag.errors import UserError
from ag.gates.gate import AttentionGates
from ag.gates.memory import has_gaps
from ag.model.support import check_ranks
from ag.stateful import Attributes

AHEAD = 1024  # columns that steps have memory for at once
AGAIN = "to continue, give the whole text so far and what follows; for another text call cache.reset() first"


class Text(Attributes):
    """The text of one cache. It makes the passes, and says in which of them something is due.

    Layers are asked what they hold, when they evicted last, and how far their queries see.
    """

    #: The pass at hand; None before the first one.
    now: Pass | None
    #: ``[B, seen]`` bool, False on padding.
    valid: Tensor
    #: Columns seen before the last forward pass.
    before: int
    #: Columns of the prompt.
    prompt_columns: int
    #: ``[B]`` long, own tokens of each prompt, as far as they are known.
    prompt_lengths: Tensor
    #: ``[B, L]`` bool, which of the first L own tokens never go, whatever the policy; None: none is protected so.
    protected: Tensor | None
    _unpadded: int  # columns that came without padding: each sequence has at least so many own tokens
    _by_rank: bool  # whether columns are not the places of tokens: a join or a crop by sequence has moved them
    _by_column: bool  # whether the newest tokens had their columns for positions, padding counted
    _prompt: Tensor | None  # [B, T] bool, False on padding: the prompt of which parts are still to come; else None
    _expected: tuple[Tensor, Tensor | None] | None  # mask and ids of the announced text, until a pass begins with it
    _ids: Tensor | None  # the text so far [B, T], as far as model.generate said it
    _number: int  # of the last pass
    _decided: Tensor  # [B] own tokens when each sequence was last decided about
    _settled: int  # columns when flags could last evict: before the last forward pass, or after the prompt
    _counters: tuple[Tensor, Tensor] | None  # ranks [B, 1] and lengths [B] of the last step, which count on in place
    _ahead: Tensor | None  # [B, n] bool, whose first columns ``valid`` is, and of which the others are True

    STATE: ClassVar[Mapping[str, Any]] = {
        **dict.fromkeys(("valid", "prompt_lengths", "_decided"), Tensor),
        **dict.fromkeys(("before", "prompt_columns", "_unpadded", "_number", "_settled"), int),
        **dict.fromkeys(("protected", "_ids"), Tensor | None),
        **dict.fromkeys(("_by_rank", "_by_column"), bool),
    }

    def __init__(
        self, policy: Policy, gates: AttentionGates | None, rotation: Original, layers: Sequence[EvictionLayer]
    ) -> None:
        self.policy, self.gates, self.rotation, self.layers = policy, gates, rotation, layers
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.now = self.protected = self._prompt = self._expected = self._ids = None
        self.valid, self.prompt_lengths = torch.empty(0, 0, dtype=torch.bool), torch.empty(0, dtype=torch.long)
        self.before = self.prompt_columns = self._unpadded = self._number = self._settled = 0
        self._by_rank = self._by_column = False
        self._decided = torch.empty(0, dtype=torch.long)
        self._counters = self._ahead = None

    @property
    def seen(self) -> int:
        """Columns of the input that went by."""
        return self.valid.shape[1]

    # ---- as model.generate tells it

    def expect(self, valid: Tensor, tokens: Tensor | None) -> None:
        """Take note of the text that is to come; see :meth:`ag.engine.forward.Forward.expect`."""
        seen, columns = self.seen, valid.shape[1]
        given = columns if tokens is None else tokens.shape[1]
        if given not in (columns, columns - seen):
            raise UserError(
                f"model.generate was given {given} tokens and an attention_mask of {columns} columns, and this cache "
                f"has seen {seen}: expected a mask of {given} columns for the whole text, or of {seen + given} where "
                "these are the new tokens alone."
            )
        if seen and columns <= seen:
            raise UserError(f"model.generate was given {columns} tokens, and this cache has seen {seen}: {AGAIN}.")
        self._check_past(valid)
        if given < columns:
            tokens = None  # they do not say what went before
        elif tokens is not None:
            self._check_goes_on(tokens)
        self._expected = valid, tokens

    def saw(self, tokens: Tensor | None) -> None:
        """Take note of the text ``[B, T]`` that went by, None where it is not known; what was announced is over."""
        self._expected = None
        if tokens is None or self._ids is None:
            return
        if len(self._ids) == len(tokens) == len(self.valid):  # no beams
            self._ids = tokens

    def _check_goes_on(self, tokens: Tensor) -> None:
        """Refuse a text ``[B, T]`` that begins otherwise than the one that went by, as far as that is known."""
        if not self.seen or self._ids is None or len(self._ids) != len(tokens):
            return
        before = self._ids[:, : self.seen].to(tokens.device)
        differs = (before != tokens[:, : before.shape[1]]).any(0)
        if bool(differs.any()):
            raise UserError(
                f"The tokens that model.generate was given differ from those that this cache has seen, from column "
                f"{int(differs.long().argmax())} on: {AGAIN}."
            )

    def common(self, tokens: Tensor) -> int:
        """Return how many columns, less than all, a text ``[B, T]`` begins with as the one that went by did."""
        if self._ids is None or len(self._ids) != len(tokens):
            return 0
        most = min(self.seen, self._ids.shape[1], tokens.shape[1] - 1)
        if most < 1:
            return 0
        differs = (self._ids[:, :most].to(tokens.device) != tokens[:, :most]).any(0)
        return int(differs.long().argmax()) if bool(differs.any()) else most

    def protect(self, spans: Sequence[Any]) -> None:
        """Let tokens stay; see :meth:`ag.engine.forward.Forward.protect`."""
        each = spans if any(isinstance(x, list) for x in spans) else [spans]
        marks = pad_sequence([marked(x) for x in each], batch_first=True)
        self.protected = _of_each(marks, self.valid) if self.seen else marks

    # ---- a forward pass

    def extend(self, mask: Tensor | None, batch: int, length: int, device: torch.device) -> None:
        """Add the columns of a forward pass of ``[batch, length]`` tokens, and make the pass of all of them.

        ``mask`` ``[B, seen + length]`` is nonzero on real tokens; None: there is no padding among these.

        Raises:
            UserError: for tokens that do not go on from those seen, or not as announced; nothing has changed then.
        """
        seen = self.seen
        new, padded = self._real(mask, batch, length, device)
        if length == 1 and not padded and self.ends and self.rotation.in_place:
            self._announced()
            self._step(new)
            return
        prompt = self._read(new) if seen < self.prompt_columns or not seen else None
        coming = length if seen or prompt is None else prompt.shape[1]
        if self.gates is not None and self.gates.config.scope == "prompt" and length < coming:
            raise UserError(
                f"{self.policy!r}: gates of gate.scope=prompt read the prompt in one forward pass, and {length} of "
                f"{coming} tokens came; leave prefill_chunk_size out, or use gates of gate.scope=causal."
            )
        if not seen and self.protected is not None:
            self.protected = _of_each(self.protected, new)
        self._announced()
        self.before = seen
        self._counters = self._ahead = None
        if prompt is not None:
            self.prompt_columns, self.prompt_lengths = prompt.shape[1], prompt.sum(1)
        self.valid = torch.cat([self.valid.to(new.device), new], 1) if seen else new
        self._prompt = prompt if self.seen < self.prompt_columns else None
        self.prompt_lengths = self.prompt_lengths.to(new.device)
        self._unpadded += 0 if padded else length
        tokens = Tokens(ranks=(self.valid.cumsum(1) - 1)[:, seen:], real=new)
        self._made(tokens, padded=padded, reading=seen < self.prompt_columns)

    def _announced(self) -> None:
        """Go over to the text that was announced."""
        if self._expected is not None and self._expected[1] is not None:
            self._ids = self._expected[1]
        self._expected = None

    def _read(self, new: Tensor) -> Tensor:
        """Return the prompt ``[B, T]`` bool, False on padding, of which these tokens ``[B, w]`` are the next ones.

        It is the one that was announced, or these tokens alone.
        """
        seen, announced = self.seen, None if self._expected is None else self._expected[0]
        if announced is None or announced.shape[1] <= seen:
            announced = self._prompt if seen else new
        assert announced is not None
        prompt = announced.to(new.device)
        if len(prompt) != len(new) and len(new) % len(prompt) == 0:  # beams: each prompt comes several times
            prompt = prompt.repeat_interleave(len(new) // len(prompt), 0)
        told = prompt[:, seen : seen + new.shape[1]]
        if not torch.equal(told, new[:, : told.shape[1]]):
            raise UserError(
                f"attention_mask: columns {seen} to {seen + told.shape[1] - 1} of the prompt have other padding than "
                "was announced; give model.generate the attention_mask, or cache.expect the one that comes."
            )
        return prompt

    def _step(self, new: Tensor) -> None:
        """Make the pass of one token of each sequence, behind the prompt: the same operations on the same memory."""
        self.valid = self.valid.to(new.device)
        for x in self._counted():
            x += 1
        self.stepped()

    def stepped(self) -> None:
        """Make the pass of a step that the counters have counted, in :meth:`extend` or in a graph that was replayed."""
        seen = self.seen
        self.reserve(1)
        assert self._ahead is not None
        self.valid, self._settled = self._ahead[:, : seen + 1], seen
        self.before = seen
        self._unpadded += 1
        ranks, lengths = self._counted()
        self.prompt_lengths = self.prompt_lengths.to(ranks.device)
        self._made(Tokens(ranks=ranks, real=self._ahead[:, -1:]), padded=False, reading=False, lengths=lengths)

    def _counted(self) -> tuple[Tensor, Tensor]:
        """Return the ranks ``[B, 1]`` of the newest tokens and the lengths ``[B]``, which steps count on in place."""
        if self._counters is None:
            own = self.valid.sum(1)
            self._counters = own[:, None] - 1, own
        return self._counters

    def next_ranks(self) -> Tensor:
        """Return the memory in which a step's ranks stand while it runs, ``[B, 1]``: its tokens' own positions."""
        return self._counted()[0]

    def step_key(self) -> tuple[int, ...]:
        """Return what the next step depends on: addresses, and the columns that tables of all tokens have room for."""
        self.reserve(1)
        assert self._ahead is not None
        marks = 0 if self.protected is None else self.protected.data_ptr()
        return self.next_ranks().data_ptr(), self._ahead.data_ptr(), marks, self.seen // AHEAD

    @property
    def ends(self) -> bool:
        """Whether a prompt was read, whole."""
        return self.seen >= self.prompt_columns > 0

    def reserve(self, tokens: int) -> None:
        """Make room for so many columns without padding."""
        if self._ahead is None or self._ahead.shape[1] < self.seen + tokens:
            self._ahead = torch.ones(
                len(self.valid), self.seen + max(tokens, AHEAD), dtype=torch.bool, device=self.valid.device
            )
            self._ahead[:, : self.seen] = self.valid

    def _real(self, mask: Tensor | None, batch: int, length: int, device: torch.device) -> tuple[Tensor, bool]:
        """Return which new tokens are not padding, ``[B, length]`` bool, and whether some are."""
        if self.seen and batch != len(self.valid):
            raise UserError(
                f"This cache holds {len(self.valid)} sequences, not {batch}; for another text call cache.reset() first."
            )
        if mask is None:
            return torch.ones(batch, length, dtype=torch.bool, device=device), False
        if mask.ndim != 2 or mask.shape[1] != self.seen + length:
            raise UserError(
                f"attention_mask {tuple(mask.shape)}: expected {(batch, self.seen + length)}, one entry for each "
                "token seen and coming; for another text call cache.reset() first."
            )
        said, new = mask.bool().split([self.seen, length], 1)
        found = [new.all(), *([(said == self.valid.to(mask.device)).all()] if self.seen else [])]
        whole, *same = torch.stack(found).tolist()  # the host waits once
        if not all(same):
            self._check_past(mask)
        return new, not whole

    def _check_past(self, mask: Tensor) -> None:
        """Refuse a mask that says something else of columns seen than the one that came with them."""
        if not self.seen:
            return
        if len(mask) != len(self.valid):
            raise UserError(
                f"attention_mask {tuple(mask.shape)}: this cache holds {len(self.valid)} sequences; for another text "
                "call cache.reset() first."
            )
        differs = mask[:, : self.seen].bool() != self.valid.to(mask.device)
        if not bool(differs.any()):
            return
        row, column = differs.nonzero()[0].tolist()
        read, now = ("a token", "padding") if self.valid[row, column] else ("padding", "a token")
        raise UserError(
            f"attention_mask: column {column} of sequence {row} came as {read}, and is {now} now: expected the mask to "
            "go on from cache.valid. cache.crop([n, ...]) takes the newest n tokens of each sequence back, such as the "
            "padding behind a shorter answer; for another text call cache.reset() first."
        )

    def blocks(self) -> Iterator[Tensor] | None:
        """Cut a prompt into the blocks of the schedule, and what comes with it (a draft) off; None: it stays whole.

        Yields the columns ``[B, w]`` of each part among the new tokens, -1 for none, when its pass is at hand.
        """
        assert self.now is not None
        if not self.now.reading:
            return None
        prompt, rest = self.now.split(self.prompt_columns - self.before)
        blocks = prompt.blocks(self.policy.block)
        return self._one_by_one(blocks, rest) if len(blocks) > 1 or rest.ranks.shape[1] else None

    def _one_by_one(self, blocks: list[Tokens], rest: Tokens) -> Iterator[Tensor]:
        for part in (*blocks, rest) if rest.ranks.shape[1] else blocks:
            assert part.columns is not None
            last = part is blocks[-1] or part is rest
            self._made(part, padded=not bool(part.real.all()), reading=part is not rest, last=last)
            yield part.columns.where(part.real, -1)

    def _made(
        self, tokens: Tokens, *, padded: bool, reading: bool, last: bool = True, lengths: Tensor | None = None
    ) -> None:
        """Make the pass of the next tokens, which is the one at hand then.

        Args:
            tokens: which these are.
            padded: whether some of them are not real.
            reading: whether they are of the prompt.
            last: whether they are the last ones of the forward pass, or of its part of the prompt.
            lengths: of a step: own tokens ``[B]`` in the memory in which they are counted; else None.
        """
        step, width = lengths is not None, tokens.ranks.shape[1]
        ends, later = last and self.seen >= self.prompt_columns, self.policy.asks_later(self.gates)
        due, every = self._due(tokens, padded=padded, reading=reading)
        self._number += 1
        self._settled = min(self.seen, self.prompt_columns) if reading else self.seen - width
        stores = [layer.store for layer in self.layers if layer.store is not None]
        self.now = Pass(
            **vars(tokens),
            number=self._number,
            step=step,
            reading=reading,
            ends_prompt=ends,
            padded=padded,
            left_padded=padded and not bool(tokens.real[:, 0].all()),
            gaps=padded and has_gaps(tokens.real),
            seen=self.seen,
            prompt_columns=self.prompt_columns,
            prompt_lengths=self.prompt_lengths,
            protected=self.protected,
            lengths=tokens.counts if lengths is None else lengths,
            due=due,
            every_due=every,
            positions=None if step else self.rotation.positions(tokens, self.seen, stores),
            lowest_rank=0 if reading else max(0, self._unpadded - width),
            judged=self.gates is not None and (reading or later),
            remember=self.gates is not None and (later or (reading and not ends)),
        )

    def near(self, device: torch.device) -> Pass:
        """Return the pass at hand on a device: that of the layers to come, where a model lies on several."""
        assert self.now is not None
        if device != self.now.ranks.device:
            self.now = self.now.to(device)
        return self.now

    def positions(self, given: Tensor | None, columns: Tensor | None) -> Tensor | None:
        """Return the positions ``[B, w]`` that the model rotates the tokens at hand by; None: the usual ones.

        ``given`` are those of the forward pass, ``columns`` ``[B, w]`` say which of its tokens the pass has; None: all.
        """
        assert self.now is not None
        if self.now.positions is not None:
            return self.now.positions
        self._by_column = given is None and not self._by_rank
        if self._by_rank:
            return self.now.ranks if self.now.step else self.now.ranks.clamp_min(0)
        if columns is None:
            plain = given is None and self.now.step and self._unpadded == self.seen
            return self.now.ranks if plain else given  # the same memory at each step
        if given is None:
            given = torch.arange(self.before, self.seen, device=columns.device)[None]
        several = given.shape[:-2]  # of models with several positions for each token, such as Qwen2-VL
        index = columns.clamp_min(0).expand(*several, -1, -1)
        return given.expand(*several, len(columns), -1).gather(-1, index)

    def check_by_rank(self, what: str) -> None:
        """Refuse what goes on at each sequence's length where positions are others: several, or columns of padding."""
        check_ranks(self.rotation.decoder, what)
        if self._by_column and self._unpadded < self.seen and not bool(self.valid.all()):
            raise UserError(
                f"{what}: the text was read under padding and without position_ids, so that its positions count the "
                "padding: give position_ids=(attention_mask.cumsum(1) - 1).clamp_min(0) from the prompt on, as "
                "model.generate does."
            )

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Be as before once more was read and forgotten again; its passes were counted."""
        before, now = dict(vars(self)), self.now
        yield
        vars(self).update(before, _number=self._number)
        self.now = None if now is None else replace(now, number=self._number)

    # ---- when something may go

    def _due(self, tokens: Tokens, *, padded: bool, reading: bool) -> tuple[Tensor | None, bool]:
        """Return ``[B]`` bool, the sequences of which something may go after these tokens, and whether it is every one.

        In a prompt those which it, or a block of it, ends; later those that have grown by the steps of the schedule.
        None: of none. Where all sequences are alike the host knows it.
        """
        policy = self.policy
        if policy.budget is None or policy.rereads or not (reading or policy.steps is not None):
            return None, False
        if reading:
            count, lengths = tokens.counts, self.valid.sum(1)
            ends = count == self.prompt_lengths
            due = (count > 0) & (ends if policy.block is None else ends | (count % policy.block == 0))
            self._decided = lengths.minimum(self.prompt_lengths)
            every = bool(due.all())
            return (due, every) if every or bool(due.any()) else (None, False)
        if policy.steps == 1:  # the host knows it
            due = tokens.real.any(1) if padded else tokens.real[:, 0]
            return due, not padded or bool(due.all())
        lengths, before = self._counted()[1], self._decided.to(tokens.real.device)
        due = lengths - before >= (policy.steps or 0)
        if not bool(due.any()):
            return None, False
        self._decided = lengths.where(due, before)
        return due, bool(due.all())

    # ---- going back

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

    def take_back(self, remove: int | Sequence[int]) -> Tensor:
        """Forget the newest tokens, and return ``[B]`` the own tokens that stay of each sequence, for :meth:`crop`.

        Args:
            remove: columns; or own tokens of each sequence, whose columns become padding where others keep theirs.

        Raises:
            UserError: when what was evicted since, or what the scorer recorded, cannot be restored.
        """
        if isinstance(remove, int):
            what, most, left = str(-remove), remove, self.seen - remove
            valid = self.valid[:, :-remove]
        else:
            what, most, valid = str([*remove]), max(remove), self._without(remove)
            left = _first_column(self.valid & ~valid)
            valid = valid[:, : valid.shape[1] - _first_column(valid.flip(1))]
        counts = valid.sum(1)
        if self.policy.scorer is not None and left < self.prompt_columns:
            raise UserError(f"crop({what}): only tokens after the prompt can go; prefill a shorter prompt.")
        self._check_recent(what, counts)
        if self.policy.budget is not None:
            self._check_evicted(what, left)
        if not isinstance(remove, int):
            self.check_by_rank(f"crop({what})")
            self._by_rank, self._by_column, self._ids = True, False, None
        if left < self.prompt_columns:
            self.prompt_lengths = self.prompt_lengths.minimum(counts.to(self.prompt_lengths.device))
        self.valid, self._unpadded = valid, max(0, self._unpadded - most)
        self._counters = self._ahead = None
        self._settled, self.prompt_columns = min(self._settled, self.seen), min(self.prompt_columns, self.seen)
        return counts

    def _without(self, remove: Sequence[int]) -> Tensor:
        """Return :attr:`valid` without so many of the newest tokens of each sequence."""
        own, most = self.valid.cumsum(1), self.valid.sum(1)
        if len(remove) != len(own) or not all(0 <= n <= had for n, had in zip(remove, most.tolist(), strict=True)):
            raise UserError(
                f"crop({[*remove]}): expected for each of {len(own)} sequences a number of its own tokens, which has "
                f"{most.tolist()}."
            )
        return self.valid & (own <= (most - torch.tensor([*remove], device=own.device))[:, None])

    def crop(self, counts: Tensor) -> None:
        """Count the schedule's steps from here, where the last decision, in which nothing went, was behind."""
        if len(self._decided):
            self._decided = self._decided.minimum(counts.to(self._decided.device))

    def _check_evicted(self, what: str, left: int) -> None:
        """Refuse to go back to a state of which something was evicted under a budget since."""
        scorer = self.policy.scorer
        assert scorer is not None
        if self.policy.steps is not None and (scorer.needs.every_query or scorer.needs.lookback):
            raise UserError(
                f"crop({what}): {self.policy!r} has recorded the queries of the tokens that would go; use the "
                "schedule prefill, or make a new cache."
            )
        if left < max(layer.evicted_at for layer in self.layers):
            raise UserError(
                f"crop({what}): {self.policy!r} has evicted something since, which cannot come back; use the "
                "schedule prefill, or make a new cache."
            )

    def _check_recent(self, what: str, left: Tensor) -> None:
        """Refuse to go back to so many own tokens ``[B]`` where tokens that are evicted would be recent again.

        The next query of a text of n tokens sees all ranks from n + 1 - r on. Below that what had settled for n tokens
        has only those that stay for another reason.
        """
        settled = self.valid[:, : self._settled].sum(1)
        for name, recent, last in self._recents():
            first = settled + 1 - recent if last is None else (settled + 1 - recent).minimum(last)
            if bool(((first > 0) & (left + 1 - recent < first)).any()):
                raise UserError(
                    f"crop({what}): some of the {recent} recent tokens ({name}) are evicted; crop no more than the "
                    "last forward pass, or make a new cache."
                )

    def _recents(self) -> Iterator[tuple[str, int, Tensor | None]]:
        """Yield the numbers of newest tokens that are held for later queries, and below which rank others went."""
        for window in {layer.window for layer in self.layers} - {None}:
            yield "the model's sliding window", int(window or 0), None
        if self.gates is None:
            return
        config, later = self.gates.config, self.policy.asks_later(self.gates)
        if self.policy.budget is None:
            yield "gate.recent_tokens", config.recent_tokens, None if later else self.prompt_lengths
        if config.window and later:
            yield "gate.window", config.window, None

    # ---- other sequences, other texts

    def join(self, other: Text) -> None:
        """Append the sequences of another one; those with fewer columns get padding on their left.

        What was read so far counts as the prompt: none of it is taken back, and positions go on with each text.
        """
        self._counters = self._ahead = None
        seen, device = max(self.seen, other.seen), self.valid.device
        self._decided = torch.cat([x._decided.to(device) for x in (self, other)])
        if self.protected is not None or other.protected is not None:
            none = torch.zeros(0, dtype=torch.bool, device=device)
            rows = [[none] * len(x.valid) if x.protected is None else [*x.protected.to(device)] for x in (self, other)]
            self.protected = pad_sequence([*rows[0], *rows[1]], batch_first=True)
        valid = torch.cat([F.pad(x.valid.to(device), (seen - x.seen, 0)) for x in (self, other)])
        self.valid = valid[:, _first_column(valid) :]  # without columns of texts that left
        self.before = self.prompt_columns = self._settled = self.seen
        self.prompt_lengths = torch.cat([x.prompt_lengths.to(device) for x in (self, other)])
        self._unpadded, self._by_rank, self._by_column = min(self._unpadded, other._unpadded), True, False
        self.now = self._expected = self._ids = None

    def select(self, indices: Tensor) -> None:
        """Make the sequences those at ``indices``."""
        self._counters = self._ahead = None
        if self._ids is not None and len(self._ids) != len(self.valid):  # beams are more than the text has rows
            self._ids = None
        for name in ("valid", "prompt_lengths", "protected", "_ids", "_prompt"):
            x = getattr(self, name)
            setattr(self, name, None if x is None else x[indices.to(x.device)])
        if len(self._decided):
            self._decided = self._decided[indices.to(self._decided.device)]
        self.now = None if self.now is None else self.now.select(indices)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state over; see :class:`ag.stateful.Stateful`."""
        super().load_state_dict(state)
        if self.valid.dtype != torch.bool or self.valid.ndim != 2:
            raise ValueError("valid")
        if self.protected is not None and (self.protected.dtype, len(self.protected)) != (torch.bool, len(self.valid)):
            raise ValueError("protected")


def _first_column(marks: Tensor) -> int:
    """Return the first column of ``[B, T]`` bool with a mark."""
    return int(marks.any(0).long().argmax())


def _of_each(marks: Tensor, sequences: Tensor) -> Tensor:
    """Return the marks ``[B, L]`` of all sequences ``[B, T]``: each prompt's for its beams, or one prompt's for all."""
    count = len(sequences)
    if count % len(marks):
        raise UserError(f"protect: spans for {len(marks)} sequences: expected one list of spans, or {count} lists.")
    return marks.repeat_interleave(count // len(marks), 0).to(sequences.device)

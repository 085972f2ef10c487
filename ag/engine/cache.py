"""The cache that evicts: hand it to ``model.generate(past_key_values=...)``.

An :class:`EvictionCache` has a setup (its model, policy and pool; ``cache_setup.py``), a state (the tokens it holds;
``cache_state.py``) and an interceptor, the forward pass that a model's hooks call (``forward_pass.py``).
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from ag.config.spec import PolicySpec
from ag.engine import cache_file
from ag.engine.block_pool import Pool
from ag.engine.cache_setup import CacheSetup
from ag.engine.cache_state import CacheState
from ag.engine.forward_pass import ForwardPass
from ag.engine.policy import Option, Policy, policy
from ag.engine.report import Report, layer_nbytes, over_budget, report, share_held, visible_token_indices
from ag.errors import UserError
from ag.gates.gate import AttentionGates
from ag.model.hybrid import States
from ag.model.support import check_one_position_per_token


class EvictionCache(Cache):
    """A key-value cache that evicts: evicted keys and values leave memory, per sequence and KV head.

    The first forward pass is the prompt. By the policy's schedule tokens are evicted after the prompt, within it block
    by block, or also while decoding.

    A token counts as held if some later query may see it; the tokens of the last pass may be taken back. The memory of
    tokens that left a sliding window, or are neither flagged by a gate nor recent, is freed a few tokens later.

    Args:
        model: causal language model, plain or PEFT-wrapped; the cache works with this one only.
        spec: a policy or its text; see :func:`ag.policy`.
        budget: for a text: tokens per KV head, or a share of the prompt.
        schedule: for a text: when tokens are evicted.
        pool: the blocks of any number of caches of a model; None means a pool for this cache alone. When it is full, a
            pass raises :class:`ag.PoolFullError`. The cache is then as before, or empty if its prompt did not fit.
        options: for a text: hyper-parameters of its parts.

    Raises:
        UnsupportedModelError: when the model class cannot take a custom attention function.
        UserError: when the gates or the pool were made for another model, or a policy ``gates`` finds none attached.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: str | PolicySpec | Policy,
        budget: int | float | None = None,
        schedule: str = "prefill",
        *,
        pool: Pool | None = None,
        **options: Option,
    ) -> None:
        chosen = policy(spec, budget, schedule, **options)
        #: The model, the policy and the pool; forks share it.
        self.setup = CacheSetup.of(model, chosen, pool)
        # transformers counts layers; keys lie in the pool, so these stay empty
        super().__init__(layers=[DynamicLayer() for _ in self.setup.heads])
        self._take(CacheState(self.setup))

    def _take(self, state: CacheState) -> None:
        """Hold a state."""
        self.state = state
        #: The forward pass. The hooks of the model find it under this name, and call it.
        self.interceptor = ForwardPass(state)

    def reset(self) -> None:
        """Forget everything: the next tokens are a new prompt, of any batch size."""
        self.interceptor.reset()

    def __repr__(self) -> str:
        """Return one line: the policy, and the share and bytes that are held."""
        content = f"{self.seen_tokens} tokens seen, {self.kept_share():.1%} held in {self.nbytes:,} bytes"
        return f"<{type(self).__name__} {self.policy!r}: {content if self.seen_tokens else 'empty'}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Fork the cache: the copy shares the blocks, and goes on with its own continuation of the text."""
        new = object.__new__(type(self))  # copy.copy would ask __reduce__
        vars(new).update(vars(self))
        new._take(self.state.fork())
        return new

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled, as by ``torch.save``: the model would go with it."""
        raise UserError(
            f"{type(self).__name__}: a cache refers to its model and cannot be pickled: use cache.save(path) and "
            f"{type(self).__name__}.load(path, model), or copy.deepcopy(cache) in the same process."
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache after a prompt to one safetensors file, which takes its name when it is whole.

        Args:
            path: of the file; an earlier saved cache there is replaced.

        Raises:
            UserError: before the end of a prompt, where something else is in the way, or for a policy that
                :func:`ag.policy` cannot make again.
        """
        self.state.check_pass_finished()
        self.state.check_scores()
        cache_file.save(self.state, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module) -> Self:
        """Read a saved cache. The text goes on as it would have with the saved cache itself.

        Args:
            path: of the file.
            model: of equal geometry, data type and weights (weights are not compared). A policy ``gates`` takes the
                gates attached to it, which are compared.

        Raises:
            UserError: when the file is no whole saved cache of this schema, or of another model or other gates.
        """
        return cache_file.load(cls, path, model)

    # ---- contents

    @property
    def policy(self) -> Policy:
        """The policy, as its gates were trained."""
        return self.setup.policy

    @property
    def gates(self) -> AttentionGates | None:
        """The gates of the policy; None means that it has none."""
        return self.setup.gates

    @property
    def valid(self) -> Tensor:
        """``[B, seen]`` bool, False on padding."""
        return self.state.sequences.mask

    @property
    def seen_tokens(self) -> int:
        """Columns of the input that went by, padding and evicted tokens included."""
        return self.state.sequences.columns

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that are taken, and of the memory of gates; states of other layers do not count."""
        state = self.state
        blocks = sum(store.num_blocks() for store in state.stores)
        block_nbytes = self.setup.pool.block_nbytes(state.stores[0].gate_type)
        return blocks * block_nbytes + sum(layer.gate_memory.nbytes for layer in state.layers)

    @property
    def over_budget(self) -> Tensor:
        """``[B]`` bool on the CPU: sequences that hold more than the budget because they protect more."""
        return over_budget(self.state)

    @property
    def scoring_seconds(self) -> float:
        """Seconds spent on scores and decisions; on a card the host waits for the last, and replayed steps count 0."""
        return sum(layer.watch.seconds for layer in self.state.layers)

    def kept_positions(self, layer: int) -> list[list[Tensor]]:
        """Return which of its tokens each sequence holds in each KV head of a layer, counted from 0, ascending.

        Padding is not counted: the first generated token of a prompt of 10 tokens is token 10.
        """
        token_indices = visible_token_indices(self.state, layer)
        return [[row[row >= 0].sort().values for row in sequence] for sequence in token_indices]

    def held_tokens(self) -> Tensor:
        """Return the tokens per KV head that each layer holds of each sequence, ``[B, L]`` float32 on the CPU."""
        layers = range(len(self.state.layers))
        held_by_layer = [visible_token_indices(self.state, layer) >= 0 for layer in layers]
        return torch.stack([x.sum(-1).float().mean(1).cpu() for x in held_by_layer], 1)

    def kept_share(self, *, prompt: bool = False) -> float:
        """Return the share of the (token, KV head) pairs seen so far that is still held, over all layers and sequences.

        Args:
            prompt: count the tokens of the prompt alone.
        """
        return share_held(self.state, prompt)

    def layer_nbytes(self) -> list[int]:
        """Return the bytes of each layer's blocks and of its gate's memory; shared blocks count for each."""
        return layer_nbytes(self.state)

    def report(self, kinds: Mapping[str, Tensor] = MappingProxyType({})) -> Report:
        """Return the tokens that each layer and head holds, their bytes, and the time that scoring took.

        Args:
            kinds: columns ``[B, T]`` bool of the text by a name, for example ``{"image": ids == image_token_id}``. The
                report says how much of each kind is held.

        Raises:
            UserError: for columns of another shape than the batch and the text.
        """
        return report(self.state, kinds)

    # ---- before a pass

    def expect(self, valid: Tensor, tokens: Tensor | None = None) -> None:
        """Announce the coming text, whole or in parts: the prompt, or the text so far with more after it.

        ``model.generate`` calls it. Without it the first forward pass is the prompt. While a prompt is being read, its
        unread part may be replaced. The tokens that come must have the padding that is announced here.

        Args:
            valid: ``[B, T]`` bool, False on padding.
            tokens: ids ``[B, T]``, or the ids of the new tokens alone; None means that they are not known.

        Raises:
            UserError: when the text does not begin with the text that was read.
        """
        self.interceptor.expect(valid, tokens)

    def protect(self, spans: Sequence[Any]) -> None:
        """Keep tokens whatever the policy decides, until :meth:`reset`: a system prompt, say.

        They count in the budget, like sinks. A model's sliding window still hides them in its layers. Another call
        replaces this one.

        Args:
            spans: pairs (index of the first token, index after the last) of each sequence's own tokens, counted from 0;
                or a list of pairs for each sequence.

        Raises:
            UserError: for other values, for lists of another number of sequences, or for tokens that some heads may
                have evicted already, because they were not protected then.
        """
        self.state.sequences.protect(spans)

    # ---- going back

    def crop(self, tokens_to_remove: int | Sequence[int] | Tensor) -> None:
        """Forget the newest tokens, back to the last eviction at most.

        Args:
            tokens_to_remove: -n for the last n columns; or a number of tokens for each sequence, when a batch accepts
                unequal numbers of drafts.

        Raises:
            UserError: when tokens were evicted since, or the scorer's records cannot be restored; for a positive
                number, as in transformers.
            PoolFullError: a pool of fixed size has no room for copies of blocks that a copy of this cache shares; can
                only happen where tokens left a sliding window in the last pass, or with ``positions="interpolated"``.
        """
        if isinstance(tokens_to_remove, Tensor):
            tokens_to_remove = tokens_to_remove.tolist()
        if isinstance(tokens_to_remove, Sequence):
            if any(tokens_to_remove):
                check_one_position_per_token(self.setup.decoder, f"crop({[*tokens_to_remove]})")
            self.state.crop(tokens_to_remove)
            return
        columns = -operator.index(tokens_to_remove)
        if columns < 0:
            raise UserError(f"crop({-columns}): expected a negative number: crop(-n) forgets the last n columns.")
        self.state.crop(columns)

    def rewind(self, input_ids: Tensor) -> int:
        """Go back to the last token that a text shares with the text read so far.

        ``model.generate`` goes on from there. A chat template may write a turn differently once more turns follow, for
        example without its thoughts.

        Args:
            input_ids: ``[B, T]``, the whole text that ``model.generate`` gets next.

        Returns:
            How many of its columns need not be read again. 0 means that the texts share none, that the ids of the text
            read are unknown because ``model.generate`` did not read it, that RoPE has other frequencies for a text of
            that length, or that :meth:`crop` cannot go back so far. Then the cache is empty, and the text is read
            anew. What :meth:`protect` marked stays protected.
        """
        common = 0
        if not self.state.pass_open:
            common = self.state.sequences.ids.common(input_ids, self.seen_tokens)
        if common and self.state.has_frequencies_of(input_ids.shape[1], common):
            try:
                self.crop(common - self.seen_tokens)
                return common
            except UserError:
                pass
        self.interceptor.forget_text()
        return 0

    def activate_past_recording(self) -> None:
        """Prepare for drafts that :meth:`crop` takes back; refuse a policy that may evict tokens which drafts need."""
        self.state.check_going_back("drafts", 0)
        if not self.is_croppable:
            reason = "repeats a prompt before anything follows it"
            if self.policy.steps is not None:
                reason = "evicts while drafts come, and cannot take that back"
            raise UserError(
                f"{self.policy!r} {reason}; generate without an assistant model and prompt lookup, or use another "
                "policy with the schedule prefill."
            )
        if self.state.states is not None:
            self.state.states.record(True)

    @property
    def is_croppable(self) -> bool:
        """Whether drafts can be taken back; ``model.generate`` reads it after the prompt."""
        states, policy = self.state.states, self.policy
        evicts_later = policy.reconstruction_scorer is not None or policy.steps is not None
        return (states is None or states.can_crop) and not evicts_later

    # ---- other sequences

    def batch_select_indices(self, indices: Tensor | Sequence[int] | Sequence[bool]) -> None:
        """Make the sequences those at ``indices``, or where a mask is True; repeated ones share their blocks."""
        if not self.seen_tokens:
            return
        device = indices.device if isinstance(indices, Tensor) else None
        selected = torch.arange(len(self.state.sequences), device=device)[indices, ...].cpu()
        if len(selected):
            self.state.select(selected)
        else:
            self.reset()

    def batch_repeat_interleave(self, repeats: int | Tensor) -> None:
        """Repeat each sequence, all equally often, or each by its number in a tensor ``[B]``."""
        if self.seen_tokens:
            self.batch_select_indices(
                torch.arange(len(self.state.sequences)).repeat_interleave(torch.as_tensor(repeats).cpu())
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make the sequences those at ``beam_idx``, between two steps of a beam search."""
        self.batch_select_indices(beam_idx)
        self.state.sequences.ids.reordered = True

    def remove(self, sequences: Sequence[int]) -> None:
        """Forget the sequences at some places in the batch, whose blocks are free then; later sequences move up.

        Raises:
            UserError: when one is not there.
        """
        count = len(self.state.sequences)
        strange = [index for index in sequences if not 0 <= index < count]
        if strange:
            raise UserError(
                f"remove({list(sequences)}): sequence {strange[0]} is not there: expected 0 to {count - 1}, as this "
                f"cache holds {count}."
            )
        self.batch_select_indices([index not in sequences for index in range(count)])

    def add(self, other: EvictionCache) -> None:
        """Append the sequences of another cache in this pool; no key is copied, and that cache is empty then.

        Sequences with fewer columns get padding on their left. Each goes on at its own next position, whatever
        ``position_ids`` say; an ``attention_mask`` begins with :attr:`valid`.

        Raises:
            UserError: when ``other`` has another model, policy or gates, or no prompt; nothing changes then.
        """
        self.state.check_add(other.state)
        if len(self.state.sequences):
            self.state.add(other.state)
        else:
            self._take(other.state.fork())
        other.reset()

    # ---- for transformers

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values as they are: they are stored when the attention function has them."""
        if not self.state.pass_open:
            raise UserError(
                "This cache was made for another model, or ag.detach(model) was called since; make one with "
                "EvictionCache(model, ...), or attach the gates again."
            )
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns seen, which drive positions: within a forward pass of the model those before it."""
        return self.seen_tokens - (self.interceptor.call_length if self.state.pass_open else 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the sizes of a mask over everything seen."""
        return self.seen_tokens + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: there is no limit."""
        return -1

    @property
    def is_initialized(self) -> bool:
        """Whether tokens were read."""
        return self.seen_tokens > 0

    is_compileable = property(lambda self: False)
    get_max_cache_shape = get_max_length  # the name before transformers 5.20

    # Layers that do not attend read and write their states here; transformers' own cache layers hold them.

    @property
    def _states(self) -> States:
        assert self.state.states is not None
        return self.state.states

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return a layer's inputs of its convolution; None before its first token."""
        return self._states.get_conv_state(*args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Take a layer's next inputs of its convolution."""
        return self._states.update_conv_state(*args, **kwargs)

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return a layer's recurrent state; None before its first token."""
        return self._states.get_recurrent_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Take a layer's next recurrent state."""
        return self._states.update_recurrent_state(*args, **kwargs)

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether a layer has a state."""
        return self._states.has_previous_state(*args, **kwargs)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return whether the inputs of a convolution are kept, so that tokens can be taken back."""
        states = self.state.states
        return states is not None and bool(states.is_recording_past(layer_idx))

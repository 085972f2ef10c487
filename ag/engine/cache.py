"""The cache that evicts: hand it to ``model.generate(past_key_values=...)``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, CacheLayerMixin

from ag.attach import AttentionCall, Plan, attached_gates, check_geometry, decoder_of, instrument, place
from ag.engine.policy import Policy, policy
from ag.engine.storage import RaggedStore, Rows
from ag.errors import UserError
from ag.gating import Gating

QUERY_BLOCK = 256  # queries that meet the stored keys at once


class EvictionCache(Cache, Plan):
    """A key-value cache that forgets: a prompt is prefilled, evicted once, and decoded over what is left.

    The first forward pass is the prompt. Its evicted keys and values are dropped from memory, per sequence and KV head;
    tokens that come later are kept.

    Args:
        model: causal language model, plain or PEFT-wrapped; the cache works with this one only.
        spec: a policy or its text; see :func:`ag.policy`.

    Raises:
        UnsupportedModelError: when the model class cannot take a custom attention function.
        UserError: when the gates were made for another model, or ``gates`` is asked for and none are attached.
    """

    def __init__(self, model: nn.Module, spec: str | Policy) -> None:
        self.policy = policy(spec) if isinstance(spec, str) else spec
        self.gates = self.policy.gates
        if self.policy.scorer == "gates" and self.gates is None:
            self.gates = attached_gates(model)
            if self.gates is None:
                raise UserError(
                    "Policy 'gates': no gates are attached; call ag.attach(model, gates) or name gates:PATH."
                )
        self._decoder = decoder_of(model)
        if self.gates is not None:
            check_geometry(model, self.gates)
            place(model, self.gates)
        instrument(model)
        super().__init__(layers=[EvictionLayer(self) for _ in self._decoder.layers])
        #: ``[B, seen]`` bool, False on padding.
        self.valid = torch.empty(0, 0, dtype=torch.bool)
        self.gating: Gating | None = None
        self.padded_step = False

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return sum(layer.store.nbytes for layer in self.evicting_layers if layer.store is not None)

    @property
    def seen_tokens(self) -> int:
        """Columns of the input that went by, padding and evicted tokens included."""
        return self.get_seq_length()

    @property
    def evicting_layers(self) -> list[EvictionLayer]:
        """The layers, with their own type."""
        return [layer for layer in self.layers if isinstance(layer, EvictionLayer)]

    def kept_positions(self, layer: int) -> list[list[Tensor]]:
        """Return, for each sequence and KV head, the sorted columns of the input row that a layer still holds."""
        store = self.evicting_layers[layer].store
        if store is None:
            return []
        ranks = store.padded().ranks
        columns = [row.nonzero().flatten() for row in self.valid]
        return [
            [columns[b][ranks[row, : int(store.lengths[row])].long()] for row in range(first, first + store.kv_heads)]
            for b, first in enumerate(range(0, len(ranks), store.kv_heads))
        ]

    def kept_share(self) -> float:
        """Return the share of the (token, KV head) pairs seen so far that is still held, over all layers."""
        stores = [layer.store for layer in self.evicting_layers if layer.store is not None]
        seen = sum(int(self.valid.sum()) * store.kv_heads for store in stores)
        return sum(int(store.lengths.sum()) for store in stores) / seen if seen else 1.0

    def begin(self, decoder: nn.Module, attention_mask: Tensor | None, batch: int, length: int) -> None:
        """Take the padding of the coming tokens; see :class:`ag.attach.Plan`."""
        if decoder is not self._decoder:
            raise UserError("This cache was made for another model; make one with EvictionCache(model, ...).")
        seen = self.get_seq_length()
        device = next(decoder.parameters()).device
        if seen and batch != len(self.valid):
            raise UserError(f"This cache holds {len(self.valid)} sequences, not {batch}; make a new cache.")
        if attention_mask is None:
            new = torch.ones(batch, length, dtype=torch.bool, device=device)
        elif attention_mask.ndim == 2 and attention_mask.shape[1] == seen + length:
            new = attention_mask[:, seen:].bool()
        else:
            raise UserError(
                f"attention_mask {tuple(attention_mask.shape)}: expected {(batch, seen + length)}, one entry for each "
                "token seen and coming."
            )
        self.valid = torch.cat([self.valid, new], 1) if seen else new
        self.new_ranks = self.valid.cumsum(1)[:, seen:] - 1
        self.padded_step = not bool(new.all())
        self.left_padded = self.padded_step and not bool(new[:, 0].all())
        self.gating = None
        if not seen and self.gates is not None:
            self.gating = Gating(self.gates, self.valid, self.valid.sum(1), hard=True)

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Let the layer's gate look at the prompt."""
        if self.gating is not None:
            with torch.no_grad():
                self.gating.enter_layer(layer, hidden)

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend, evict and store."""
        layer = self.evicting_layers[call.layer]
        return layer.prefill(call) if layer.store is None else layer.extend(call)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens; a negative number is the same as a positive one.

        Raises:
            UserError: when part of the prompt would go, or recent prompt tokens that are evicted would be recent again.
        """
        remove = abs(tokens_to_remove)
        if remove == 0:
            return
        if self.gates is not None:
            self._check_crop(remove)
        self.valid = self.valid[:, :-remove]
        for layer in self.evicting_layers:
            layer.crop_to(self.valid)

    def activate_past_recording(self) -> None:
        """Prepare for drafts that :meth:`crop` takes back.

        Raises:
            UserError: when gates have not seen the prompt yet: the first draft comes with it, as if it were a part.
        """
        if self.gates is not None and not self.seen_tokens:
            raise UserError(
                f"Policy {self.policy.spec!r} cannot tell a prompt from a draft; generate without an assistant model "
                "and prompt lookup, or use the policy full."
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make the sequences those at ``beam_idx``."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Make the sequences those at ``indices``."""
        self.valid = self.valid[indices.to(self.valid.device)]
        for layer in self.evicting_layers:
            if layer.store is not None:
                layer.store.select_sequences(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self.batch_select_indices(torch.arange(len(self.valid)).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget everything."""
        self.valid = self.valid[:0, :0]
        for layer in self.evicting_layers:
            layer.reset()

    def _check_crop(self, remove: int) -> None:
        """Refuse to go back to a state of which something was evicted since."""
        assert self.gates is not None
        columns = min(layer.prompt_length for layer in self.evicting_layers)
        prompt, left = self.valid[:, :columns].sum(1), self.valid[:, :-remove].sum(1)
        if self.get_seq_length() - remove < columns:
            raise UserError(f"crop({-remove}): only tokens after the prompt can go; prefill a shorter prompt.")
        recent = self.gates.config.recent_tokens
        if bool(((left < prompt + recent - 1) & (left < self.new_ranks[:, 0])).any()):
            raise UserError(
                f"crop({-remove}): some of the prompt's {recent} recent tokens are evicted; crop no more than the last "
                "forward pass, or make a new cache."
            )


class EvictionLayer(CacheLayerMixin):
    """One layer of the cache."""

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, cache: EvictionCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.store: RaggedStore | None = None
        self.seen = 0
        self.prompt_length = 0
        self._fleeting = 0  # distance from which on the store's fleeting tokens are invisible; 0: it has none

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the storage is made when it is known what stays."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count the new tokens and hand them on; they are stored after the attention has seen them."""
        if self.seen + key_states.shape[2] != self._cache.valid.shape[1]:  # the model's hooks did not run
            raise UserError(
                "This cache was made for another model, or ag.detach(model) was called since; make one with "
                "EvictionCache(model, ...)."
            )
        self.seen += key_states.shape[2]
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return the columns seen, which drive positions."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the sizes of a mask over everything seen."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length  # the name before transformers 5.20

    def prefill(self, call: AttentionCall) -> Tensor:
        """Attend within the prompt and store what stays."""
        cache = self._cache
        self.prompt_length = self.seen
        valid = cache.valid if cache.padded_step else None
        keep = fleeting = None if valid is None else valid[:, None]
        gating = cache.gating
        if gating is None or call.layer not in gating.logits:
            out, fleeting = call.dense(valid, cache.left_padded), None
        else:
            config = gating.gates.config
            out = gating.attend(call) if config.prefill == "sparse" else call.dense(valid, cache.left_padded)
            flagged = gating.gates.flags(gating.logits[call.layer])
            flagged = F.pad(flagged, (0, call.k.shape[2] - flagged.shape[2])) & cache.valid[:, None]
            flagged = flagged | (cache.valid & (cache.new_ranks < config.sink_tokens))[:, None]
            # the next query stands one further on, so that it sees recent - 1 tokens of the prompt
            recent = cache.valid & (cache.valid.sum(1, keepdim=True) - cache.new_ranks < config.recent_tokens)
            keep = flagged | recent[:, None]
            fleeting = keep & ~flagged
            self._fleeting = config.recent_tokens if config.recent_tokens > 1 else 0
            gating.forget(call.layer)
        self.store = RaggedStore(call.k.shape[0], call.k.shape[1], call.k, call.v)
        self.store.append(call.k, call.v, cache.new_ranks, keep, fleeting)
        return out

    def extend(self, call: AttentionCall) -> Tensor:
        """Store tokens that follow the prompt and attend to everything stored."""
        cache, store = self._cache, self.store
        assert store is not None
        length = call.k.shape[2]
        store.append(call.k, call.v, cache.new_ranks, cache.valid[:, None, -length:] if cache.padded_step else None)
        stored = store.padded()
        blocks = (slice(start, start + QUERY_BLOCK) for start in range(0, length, QUERY_BLOCK))
        out = torch.cat([self._attend(call, stored, block) for block in blocks], 2)
        if self._fleeting:
            self._drop_expired(store, stored)
        return out

    def _attend(self, call: AttentionCall, stored: Rows, block: slice) -> Tensor:
        """Attend from the queries of a block, ``[B, H, block, D]``."""
        q = call.q[:, :, block]
        batch, heads, length, dim = q.shape
        rows, tokens = stored.ranks.shape
        group = batch * heads // rows
        visible = None if stored.valid is None else stored.valid[:, None]
        if call.q.shape[2] > 1 or call.window is not None or self._fleeting:
            query_ranks = self._cache.new_ranks[:, block].repeat_interleave(rows // batch, 0)
            distance = query_ranks[:, :, None] - stored.ranks[:, None]
            near = distance >= 0
            if call.window is not None:
                near = near & (distance < call.window)
            if self._fleeting:
                near = near & (~stored.fleeting[:, None] | (distance < self._fleeting))
            visible = near if visible is None else visible & near
        if visible is not None:
            visible = visible[:, None].expand(rows, group, length, tokens).reshape(rows, 1, group * length, tokens)
        out = F.scaled_dot_product_attention(
            q.reshape(rows, 1, group * length, dim),
            stored.keys[:, None],
            stored.values[:, None],
            visible,
            scale=call.scaling,
        )
        return out.view(batch, heads, length, -1)

    def _drop_expired(self, store: RaggedStore, stored: Rows) -> None:
        """Free the prompt tokens that were kept only because they were recent and no longer are.

        Those that the first query of this pass saw stay, so that :meth:`EvictionCache.crop` can take the pass back.
        """
        first = self._cache.new_ranks[:, 0].repeat_interleave(store.kv_heads)
        gone = first[:, None] - stored.ranks >= self._fleeting
        if bool((stored.fleeting & gone).any()):
            store.retain(~(stored.fleeting & gone))
        if not bool((stored.fleeting & ~gone).any()):
            self._fleeting = 0

    def crop_to(self, valid: Tensor) -> None:
        """Forget the tokens after those in ``valid`` ``[B, seen]``."""
        self.seen = valid.shape[1]
        if self.store is not None:
            self.store.crop(valid.sum(1))

"""vLLM's attention backend: prompts and whole requests by vLLM's own call, packed requests as one sequence per head."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder, AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from ag.errors import UserError
from ag.vllm.pages import Pages
from ag.vllm.placement import Geometry, Placement, kept_tokens, place_request
from ag.vllm.ranking import Candidates, keep_mask
from ag.vllm.scheduler import EvictionSpec
from ag.vllm.settings import CACHE_TYPES, protected_tokens, settings_of

LOGITS_LAYER = "gate_logits"  # name of the layer whose pages hold gate logits, before its index


class Kernels(Protocol):
    """vLLM's operations on one device, over a cache ``[B, H, N, 2 D]`` of any number of heads."""

    def offsets(self, block_size: int) -> Tensor:
        """Return where the numbers of a token lie within a mini, ``[N, 2 D]`` long: its key, then its value."""

    def plan(self, heads: int, kv_heads: int, lengths: Tensor, starts: Tensor) -> Any:
        """Return what vLLM's kernel prepares for sequences of these lengths; None: nothing."""

    def write(self, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Store keys and values ``[T, H, D]`` by their slots ``[T]``."""

    def attend(self, q: Tensor, cache: Tensor, output: Tensor, sequences: Sequences, layer: int, scale: float) -> None:
        """Write the attention outputs ``[T, heads, D]`` of queries of that shape."""


@dataclass
class Sequences:
    """Sequences of one call of vLLM's kernel, for each layer or the same in all.

    Attributes:
        tables: ``[S, W]`` int32, or one of each layer ``[L, S, W]``.
        lengths: ``[S]`` int32, or ``[L, S]``.
        slots: ``[T]`` long where new tokens go, or ``[L, T]``.
        starts: ``[S + 1]`` int32, first query of each sequence.
        plans: of :meth:`Kernels.plan`, one, or one of each layer.
        order: ``[T]`` long, which tokens of the step these are, in this order. None: all, as they lie.
        longest_query: queries of the longest sequence.
        longest: tokens of the longest sequence.
    """

    tables: Tensor
    lengths: Tensor
    slots: Tensor
    starts: Tensor
    plans: list[Any]
    order: Tensor | None
    longest_query: int
    longest: int

    def of(self, layer: int) -> tuple[Tensor, Tensor, Any]:
        """Return table, lengths and plan of a layer."""
        if self.tables.dim() == 2:
            return self.tables, self.lengths, self.plans[0]
        return self.tables[layer], self.lengths[layer], self.plans[layer]


@dataclass
class Reading:
    """Tokens of a step on which gates run.

    Attributes:
        pages: where the logits go.
        gates: of the policy, which also turn logits into what a cache stores.
        tokens: which tokens of the step these are.
        of_whole: which of these belong to whole requests, and their slots ``[n]`` long. None: none.
        packed: all packed requests, to which the rest belongs. None: none.
        ran: layers whose gates ran.
    """

    pages: Pages
    gates: Any
    tokens: Tensor | slice
    of_whole: tuple[Tensor | slice, Tensor] | None = None
    packed: Sequences | None = None
    ran: set[int] = field(default_factory=set)

    def run_gate(self, hidden: Tensor, layer: int) -> None:
        """Store the logits of a layer; ``hidden`` ``[T, d]`` are those of all tokens of the step."""
        logits = self.gates.stored(self.gates.layers[str(layer)](hidden[self.tokens][None]))[0].mT
        if self.of_whole is not None:
            tokens, slots = self.of_whole
            self.pages.write_logits(self.pages.slots_of(layer, slots), logits[tokens])
        if self.packed is not None:
            by_head = logits.flatten()
            order = self.packed.order
            self.pages.write_logits(self.packed.slots[layer], by_head if order is None else by_head[order])
        self.ran.add(layer)

    def check(self, layer: int) -> None:
        """Raise ``UserError`` if the layer has a gate and it did not run."""
        if str(layer) in self.gates.layers and layer not in self.ran:
            raise UserError(
                f"vLLM: the gate of layer {layer} did not run, because the layer's projection of queries, keys and "
                "values is no QKVParallelLinear: expected a model such as Llama, Mistral or Qwen; use another policy."
            )


@dataclass
class Step:
    """What all layers need in a step. A part is None if it has no tokens."""

    num_tokens: int
    pages: Pages
    whole_requests: Sequences | None = None
    packed: Sequences | None = None
    reading: Reading | None = None


@dataclass
class PackedRequest:
    """A request that was evicted from.

    Attributes:
        placement: where its blocks lie in its block table.
        evicted_at: tokens of the text at the last eviction.
        row_lengths: ``[L, H]`` long, tokens that each row kept then.
        longest: the most of these, on the host, and in ``most_minis`` the most minis.
        taken: ``[L, H]`` long, minis that these take.
        minis: ``[L, H, W]`` int32, minis of each row, the first ``taken`` and those of new tokens.
        token_indices: ``[L, H, S]`` int32 of the tokens that stayed. None: the rows are not evicted from again.
        layer_totals: ``[L]`` long, tokens that each layer kept at the end of the prompt; while the prompt is read, at
            the last eviction.
        tail_blocks: blocks of new tokens that ``minis`` has.
    """

    placement: Placement
    evicted_at: int
    row_lengths: Tensor
    longest: int
    taken: Tensor
    most_minis: int
    minis: Tensor
    token_indices: Tensor | None
    layer_totals: Tensor
    tail_blocks: int = 0

    def indices_until(self, tokens: int) -> Tensor:
        """Return the token indices ``[L, H, S]`` long after ``tokens`` of the text, -1 past the end of a row."""
        assert self.token_indices is not None
        new = tokens - self.evicted_at
        slot = torch.arange(self.longest + new, device=self.minis.device) - self.row_lengths[..., None]
        stayed = nn.functional.pad(self.token_indices.long(), (0, new))
        return stayed.where(slot < 0, slot + self.evicted_at).masked_fill(slot >= new, -1)

    def extend(self, pages: Pages, table: Tensor, tokens: int) -> bool:
        """Add the minis of blocks for new tokens, up to ``tokens`` of the text; returns whether there were any."""
        needed = -(-(tokens - self.evicted_at) // pages.block_size)
        if needed <= self.tail_blocks:
            return False
        width = self.most_minis + needed
        if width > self.minis.shape[-1]:
            self.minis = nn.functional.pad(self.minis, (0, width + 8 - self.minis.shape[-1]))
        for block in range(self.tail_blocks, needed):
            new = (pages.first_mini + table[self.placement.tail + block] * pages.heads).int()
            self.minis.scatter_(-1, (self.taken + block)[..., None], new[..., None])
        self.tail_blocks = needed
        return True


class LogitsLayer(nn.Module, AttentionLayerBase):
    """Lets vLLM plan memory for gate logits: pages of one more layer, which has no attention."""

    def __init__(self, like: EvictionImpl, backend: type[Any]) -> None:
        super().__init__()
        self.num_heads, self.backend, self.impl = like.num_heads, backend, like
        self.layer_name = LOGITS_LAYER

    def get_attn_backend(self) -> type[Any]:
        """Return the backend of the model's layers, to be in one group with them."""
        return self.backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        """Return the specification of the model's layers."""
        layers = vllm_config.compilation_config.static_forward_context
        other = next(layer for layer in layers.values() if layer is not self)
        return other.get_kv_cache_spec(vllm_config)


class EvictionBackend:
    """What our backend changes in the one of vLLM that it is mixed into."""

    kernels: ClassVar[type[Any]]
    forward_includes_kv_cache_update = True

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return the specification with the geometry of the engine whose layers were made last."""
        geometry = EvictionImpl.geometry
        return spec if geometry is None or isinstance(spec, EvictionSpec) else EvictionSpec.of(spec, geometry)

    @classmethod
    def get_impl_cls(cls) -> type[EvictionImpl]:
        """Return the attention of a layer."""
        return EvictionImpl

    @classmethod
    def get_builder_cls(cls) -> type[EvictionBuilder]:
        """Return what prepares a step."""
        return EvictionBuilder


class EvictionBuilder(AttentionMetadataBuilder[Step]):
    """Packs prompts that were read, and prepares each step; it is one for all layers of a worker."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        settings = settings_of(vllm_config)
        assert settings is not None
        # vLLM may have shortened the longest text (max_model_len=-1) since
        self.geometry = replace(kv_cache_spec.geometry, longest=vllm_config.model_config.max_model_len)
        self.policy = settings.made_policy
        if self.policy.gates is not None:
            self.policy.gates.to(device)
        self.layers = vllm_config.compilation_config.static_forward_context
        self.names = sorted((x for x in layer_names if not x.startswith(LOGITS_LAYER)), key=extract_layer_index)
        self.logits_name = next((x for x in layer_names if x.startswith(LOGITS_LAYER)), None)
        if len(self.names) != self.geometry.layers:
            raise UserError(
                f"vLLM groups {len(self.names)} layers, the model has {self.geometry.layers}: expected layers of one "
                "kind, with full attention; use a model without windows or states."
            )
        first = self.layers[self.names[0]].impl
        self.num_heads, self.group = first.num_heads, first.num_heads // kv_cache_spec.num_kv_heads
        self.kernels = first.kernels
        self.runner: Any = lambda: None
        self.pages: Pages | None = None
        #: Of requests that are not finished, by id: prompt tokens, protected tokens, where it lies after evictions.
        self.prompts: dict[str, tuple[int, int, Placement | None]] = {}
        self.packed: dict[str, PackedRequest] = {}
        self._stacked: tuple[tuple[str, ...], Tensor, Tensor] | None = None

    def set_runner(self, runner: Any) -> None:
        """Remember the model runner whose list of requests :meth:`build` reads."""
        self.runner = weakref.ref(runner)

    def forget(self, finished: set[str]) -> None:
        """Free what is known of finished requests."""
        for request in finished:
            self.prompts.pop(request, None)
            if self.packed.pop(request, None) is not None:
                self._stacked = None

    def bound_pages(self) -> Pages:
        """Return the pages, once vLLM made them."""
        caches = [self.layers[name].kv_cache for name in self.names]
        if self.pages is None or self.pages.minis.data_ptr() != caches[0].untyped_storage().data_ptr():
            logits = None if self.logits_name is None else self.layers[self.logits_name].kv_cache
            take = not self.geometry.evicts_again
            self.pages = Pages(caches, logits, self.kernels.offsets(self.geometry.block_size), rows_take_logits=take)
        return self.pages

    def prompt_of(self, request: str) -> tuple[int, int, Placement | None]:
        """Return a request's prompt tokens, its protected tokens, and where it lies after evictions."""
        if request not in self.prompts:
            state = self.runner().requests[request]
            prompt = state.num_prompt_tokens
            protected = protected_tokens(state.sampling_params, prompt)
            self.prompts[request] = prompt, protected, place_request(self.geometry, state.sampling_params, prompt)
        return self.prompts[request]

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        """Return what the layers need of a step, after packing the prompts that the last pass completed."""
        common, pages = common_attn_metadata, self.bound_pages()
        starts, lengths = common.query_start_loc_cpu.tolist(), common.seq_lens_cpu_upper_bound.tolist()
        runner = self.runner()
        requests = [] if runner is None else runner.input_batch.req_ids[: common.num_reqs]
        packed: list[int] = []
        whole_rows: list[int] = []
        reading: list[int] = []  # those of the whole rows whose tokens gates read
        changed = packed_read = False
        for row in range(common.num_reqs):
            if row >= len(requests):
                whole_rows.append(row)  # a row that vLLM made up for a measurement or to fill a batch
                continue
            request, num_read = requests[row], lengths[row] - (starts[row + 1] - starts[row])
            prompt, _, placement = self.prompt_of(request)
            reads = self.policy.gates is not None and (num_read < prompt or self.policy.steps is not None)
            if placement is None or num_read < placement.first:
                self.packed.pop(request, None)  # it was preempted, and its blocks are gone
                whole_rows.append(row)
                reading += [row] * reads
                continue
            packed.append(row)
            packed_read |= reads
            table = common.block_table_tensor[row].long()
            if placement.evicts_at(num_read):
                self.packed[request], changed = self.evict(pages, request, num_read, table), True
            changed |= self.packed[request].extend(pages, table, lengths[row])
        step = Step(common.num_actual_tokens, pages)
        if whole_rows:
            step.whole_requests = self.whole_sequences(common, whole_rows, starts)
        if packed:
            names = tuple(requests[row] for row in packed)
            if changed or self._stacked is None or self._stacked[0] != names:
                self._stacked = names, *self.stack(names)
            step.packed = self.packed_sequences(packed, starts, lengths)
        if reading or packed_read:
            step.reading = self.reading(pages, common, reading, step.packed if packed_read else None, starts)
        return step

    def reading(
        self, pages: Pages, common: Any, whole_rows: list[int], packed: Sequences | None, starts: list[int]
    ) -> Reading:
        """Return where the logits of some whole requests go, and of all packed ones if gates run on any of these."""
        gates, everything = self.policy.gates, slice(0, starts[common.num_reqs])
        if not whole_rows:
            return Reading(pages, gates, everything, packed=packed)
        tokens = everything if len(whole_rows) == common.num_reqs else _tokens(whole_rows, starts, self.device)
        slots = common.slot_mapping[tokens]
        if packed is None:
            return Reading(pages, gates, tokens, (slice(None), slots))
        return Reading(pages, gates, everything, (tokens, slots), packed)

    def evict(self, pages: Pages, request: str, tokens: int, table: Tensor) -> PackedRequest:
        """Evict from a request after ``tokens`` of its text, whose blocks are ``table`` ``[W]`` long, and pack it."""
        prompt, protected, placement = self.prompt_of(request)
        assert placement is not None
        layers, heads, gates = len(self.names), self.geometry.kv_heads, self.policy.gates
        scored = [*range(layers)] if gates is None else gates.layer_indices
        kept = kept_tokens(self.geometry, prompt, protected, tokens)
        if tokens == placement.first:  # it is whole, and began anew if it was packed before
            minis = pages.minis_of(table[: placement.whole_blocks])
            token_indices = torch.arange(tokens, device=table.device).expand(layers, heads, -1)
            total = kept_tokens(self.geometry, prompt, protected, prompt) * heads
            totals = torch.full((len(scored),), total, device=table.device)
        else:
            old = self.packed[request]
            minis, token_indices, totals = old.minis.long(), old.indices_until(tokens), old.layer_totals
        slots = torch.arange(token_indices.shape[-1], device=table.device)
        at = minis[..., slots // pages.block_size], (slots % pages.block_size).expand(heads, -1)
        logits = pages.read_logits(*at)
        candidates = Candidates(
            scored,
            token_indices[scored],
            tokens,
            prompt,
            protected,
            keys=lambda layer: pages.read(at[0][layer], at[1], slice(pages.size)),
            logits=None if logits is None else logits[scored],
        )
        keep = keep_mask(self.policy, candidates, kept, totals if tokens > prompt else None)
        totals = keep.sum((1, 2)) if tokens <= prompt else totals
        if len(scored) < layers:
            all_stay = keep.new_ones(layers, *keep.shape[1:])
            all_stay[scored] = keep
            keep = all_stay
        goes_apart = tokens == placement.first and self.geometry.apart
        blocks = table[placement.packed.start : placement.packed.stop]
        row_lengths, new_minis, taken = pages.pack(keep, minis, blocks, in_place=not goes_apart)
        longest, indices = int(row_lengths.max()), None
        if self.geometry.evicts_again:
            order = (~keep).byte().argsort(dim=-1, stable=True)[..., :longest]
            indices = token_indices.gather(-1, order).int()
        max_taken = int(taken.max())
        return PackedRequest(placement, tokens, row_lengths, longest, taken, max_taken, new_minis, indices, totals)

    def stack(self, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Return the minis ``[L, R, H, W]`` of packed requests, and the tokens ``[L, R, H]`` that their rows kept."""
        requests = [self.packed[name] for name in names]
        longest = max(request.minis.shape[-1] for request in requests)
        padded = [nn.functional.pad(x.minis, (0, longest - x.minis.shape[-1])) for x in requests]
        return torch.stack(padded, 1), torch.stack([request.row_lengths for request in requests], 1)

    def whole_sequences(self, common: Any, rows: list[int], starts: list[int]) -> Sequences:
        """Return the rows whose tokens vLLM's own block table holds."""
        table, lengths, begins = common.block_table_tensor, common.seq_lens, common.query_start_loc
        slots, order, longest_query = common.slot_mapping, None, common.max_query_len
        if len(rows) < common.num_reqs:
            order = _tokens(rows, starts, self.device)
            counts = torch.tensor([0, *(starts[row + 1] - starts[row] for row in rows)], device=self.device)
            table, lengths, begins = table[rows], lengths[rows], counts.cumsum(0).int()
            slots, longest_query = slots[order], max(starts[row + 1] - starts[row] for row in rows)
        plan = self.kernels.plan(self.num_heads, self.geometry.kv_heads, lengths, begins)
        return Sequences(table, lengths, slots, begins, [plan], order, longest_query, common.max_seq_len)

    def packed_sequences(self, rows: list[int], starts: list[int], lengths: list[int]) -> Sequences:
        """Return packed requests as sequences (request, head) of one KV head each."""
        assert self._stacked is not None
        names, minis, row_lengths = self._stacked
        size, heads, device = self.geometry.block_size, self.geometry.kv_heads, self.device
        counts = [starts[row + 1] - starts[row] for row in rows]
        new_tokens = [lengths[row] - self.packed[name].evicted_at for row, name in zip(rows, names, strict=True)]
        row_lengths = row_lengths + torch.tensor(new_tokens, device=device)[:, None]  # new tokens included
        new = torch.tensor(counts, device=device)
        longest_query = max(counts)
        if longest_query == 1:  # a query of each head, as they lie
            last = row_lengths - 1
            slots = minis.gather(-1, (last // size)[..., None])[..., 0].long() * size + last % size
            slots = slots.flatten(1)
            at = None if len(rows) == len(starts) - 1 else torch.tensor([starts[row] for row in rows], device=device)
            order = None if at is None else (at[:, None] * heads + torch.arange(heads, device=device)).flatten()
        else:
            order_parts, slot_parts = [], []
            for index, row in enumerate(rows):
                tokens = torch.arange(starts[row], starts[row + 1], device=device)
                order_parts.append((tokens * heads + torch.arange(heads, device=device)[:, None]).flatten())
                at = (
                    row_lengths[:, index, :, None] - counts[index] + torch.arange(counts[index], device=device)
                )  # [L, H, T]
                slot_parts.append((minis[:, index].gather(-1, at // size).long() * size + at % size).flatten(1))
            order, slots = torch.cat(order_parts), torch.cat(slot_parts, 1)
        begins = torch.zeros(len(rows) * heads + 1, dtype=torch.int32, device=device)
        begins[1:] = new.repeat_interleave(heads).cumsum(0)
        tokens_held = row_lengths.flatten(1).int()
        longest = max(self.packed[name].longest + added for name, added in zip(names, new_tokens, strict=True))
        tables = minis[..., : -(-longest // size)].flatten(1, 2).contiguous()
        plans = [self.kernels.plan(self.group, 1, x, begins) for x in tokens_held]
        return Sequences(tables, tokens_held, slots, begins, plans, order, longest_query, longest)


def _tokens(rows: list[int], starts: list[int], device: Any) -> Tensor:
    """Return the tokens of some rows of a step, ``[T]`` long."""
    return torch.cat([torch.arange(starts[row], starts[row + 1], device=device) for row in rows])


class EvictionImpl(AttentionImpl[Step]):
    """The attention of one layer."""

    #: Of the engine whose layers were made last, for vLLM's hook without a configuration.
    geometry: ClassVar[Geometry | None] = None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **other_options: Any,
    ) -> None:
        refused = {
            "ALiBi": alibi_slopes is not None,
            f"sliding_window={sliding_window}": sliding_window is not None,
            f"kv_cache_dtype={kv_cache_dtype}": kv_cache_dtype not in CACHE_TYPES,
            f"logits_soft_cap={logits_soft_cap}": bool(logits_soft_cap),
            f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
            "layers that share keys": kv_sharing_target_layer_name is not None,
            **{name: value is not None for name, value in other_options.items()},
        }
        for name, is_refused in refused.items():
            if is_refused:
                raise UserError(f"ag in vLLM: {name}: expected plain causal attention; serve this model by ag.serve.")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        config = get_current_vllm_config()
        dtype, block_size = config.model_config.dtype, config.cache_config.block_size
        self.kernels: Kernels = _backend().kernels(dtype, block_size, head_size)
        settings = settings_of(config)
        assert settings is not None
        layers = config.model_config.get_num_layers(config.parallel_config)
        gates = settings.made_policy.gates
        EvictionImpl.geometry = Geometry(
            settings,
            block_size,
            self.num_kv_heads,
            layers,
            layers if gates is None else len(gates.layer_indices),
            config.model_config.max_model_len,
            bool(config.cache_config.enable_prefix_caching),
        )
        name = f"{LOGITS_LAYER}.{layers}"
        context = config.compilation_config.static_forward_context
        if gates is not None and name not in context:
            context[name] = LogitsLayer(self, _backend())
        self.index: int | None = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Step | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Store keys and values ``[T, H, D]``, and attend with queries ``[T, heads, D]``."""
        step = attn_metadata
        if step is None:  # vLLM measures memory
            return output.fill_(0)
        if self.index is None:
            self.index = extract_layer_index(layer.layer_name)
        if step.reading is not None:
            step.reading.check(self.index)
        count, heads = step.num_tokens, self.num_kv_heads
        query, key, value, result = query[:count], key[:count], value[:count], output[:count]
        if step.whole_requests is not None:
            self.attend(query, key, value, result, kv_cache, step.whole_requests)
        if step.packed is not None:
            group = self.num_heads // heads
            by_head = (count * heads, group, -1), (count * heads, 1, -1)
            self.attend(
                query.reshape(by_head[0]),
                key.reshape(by_head[1]),
                value.reshape(by_head[1]),
                result.view(by_head[0]),
                step.pages.minis,
                step.packed,
            )
        return output

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, cache: Tensor, sequences: Sequences
    ) -> None:
        """Store and attend for some tokens, or all."""
        assert self.index is not None
        order, slots = sequences.order, sequences.slots
        if order is not None:
            query, key, value = query[order], key[order], value[order]
        self.kernels.write(key, value, cache, slots if slots.dim() == 1 else slots[self.index])
        result = output if order is None else torch.empty_like(query)
        self.kernels.attend(query, cache, result, sequences, self.index, self.scale)
        if order is not None:
            output[order] = result


def _backend() -> type[Any]:
    """Return our backend of this platform, under the name by which vLLM finds it."""
    name = "CPU_ATTN" if current_platform.is_cpu() else "CUSTOM"
    backend: type[Any] = AttentionBackendEnum[name].get_class()
    return backend

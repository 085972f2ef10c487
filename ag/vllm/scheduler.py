"""The scheduler's side: how many blocks a request holds, and where the chunks of a prompt end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec

from ag.errors import UserError
from ag.vllm.placement import Geometry, Placement, most_blocks, place_request


@dataclass(frozen=True, kw_only=True)
class EvictionSpec(FullAttentionSpec):
    """Pages of full attention, of which a prompt keeps a share."""

    geometry: Geometry

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        """Return the length of a block table: the text, and its rows in blocks of their own."""
        return 2 * int(super().max_num_blocks_per_req(vllm_config, max_len)) + 2

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Return the bytes of a layer that the longest request needs, while its prompt is packed."""
        geometry = replace(self.geometry, longest=vllm_config.model_config.max_model_len)
        return most_blocks(geometry) * int(self.page_size_bytes)

    @classmethod
    def merge(cls, specs: list[Any]) -> EvictionSpec:
        """Return the specification of a group of layers, which vLLM asks to be the same."""
        base = FullAttentionSpec.merge(specs)
        (geometry,) = {spec.geometry for spec in specs}
        return cls.of(base, geometry)

    @classmethod
    def of(cls, spec: Any, geometry: Geometry) -> EvictionSpec:
        """Return a specification of vLLM with a geometry, whose blocks are vLLM's, which may choose them late."""
        own = {field.name: getattr(spec, field.name) for field in fields(FullAttentionSpec) if field.init}
        return cls(**own, geometry=replace(geometry, block_size=spec.block_size))


class EvictionManager(FullAttentionManager):
    """Frees the blocks that the worker emptied: it evicts before the pass of the token after an eviction is due."""

    #: The scheduler's requests by id.
    requests: Mapping[str, Any] = {}
    supports_fine_grained_hash_lookup = False  # a copy of part of a block would leave its gate logits behind

    def placement(self, request: Any) -> Placement | None:
        """Return where a request lies once it is evicted from. None: it stays whole."""
        geometry: Geometry = self.kv_cache_spec.geometry
        return place_request(geometry, request.sampling_params, request.num_prompt_tokens)

    def table_length_in_tokens(self, request_id: str, tokens: int) -> int:
        """Return the number of tokens that gives this request's real block table for ``tokens`` tokens of its text.

        vLLM sizes a block table from a number of tokens, which after an eviction is not that of the text.
        """
        placement = self.placement(self.requests[request_id])
        return tokens if placement is None else placement.places(tokens, self.block_size) * self.block_size

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free blocks once the pass is over before which they were evicted from."""
        placement = self.placement(self.requests[request_id]) if request_id in self.requests else None
        for tokens, freed in () if placement is None else placement.freed.items():
            if processed_computed_tokens > tokens:
                self._remove_blocks_in_range(request_id, freed.start, freed.stop)

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *args: Any, apply_admission_cap: bool = False, **kwargs: Any
    ) -> int:
        """Return the blocks that a request still needs; to be admitted it needs those of the pass after its prompt."""
        if apply_admission_cap:
            num_tokens = max(num_tokens, self.requests[request_id].num_prompt_tokens + 1)
        tokens = self.table_length_in_tokens(request_id, num_tokens)
        return int(super().get_num_blocks_to_allocate(request_id, tokens, *args, **kwargs))

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[Any]:
        """Allocate blocks up to a number of tokens."""
        tokens = self.table_length_in_tokens(request_id, num_tokens)
        new_blocks: list[Any] = super().allocate_new_blocks(request_id, tokens, num_tokens_main_model)
        return new_blocks

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Let other requests find the prompt's blocks; those of packed rows and of the answer are this request's."""
        super().cache_blocks(request, min(num_tokens, request.num_prompt_tokens), *args, **kwargs)


class EndsChunks:
    """Ends a chunk where an eviction is due, also for a request that was preempted and computes its answer anew."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM calls `_mamba_block_aligned_split` for each chunk if this is true; no other place of a scheduler can end
        # one.
        self.need_mamba_block_aligned_split = True
        (self.manager,) = self.kv_cache_manager.coordinator.single_type_managers  # type: ignore[attr-defined]
        self.manager.requests = self.requests  # type: ignore[attr-defined]
        # vLLM may shorten the longest text (max_model_len=-1) after the layers gave their geometry
        spec = self.manager.kv_cache_spec
        self.manager.kv_cache_spec = EvictionSpec.of(spec, replace(spec.geometry, longest=self.max_model_len))  # type: ignore[attr-defined]

    def check(self, request: Any) -> None:
        """Refuse a request before it is added, where an error ends this request alone.

        Raises:
            UserError: its prompt may grow after it was evicted from, or it may need more blocks than there are.
        """
        if request.resumable:
            raise UserError("ag in vLLM: a prompt that comes in parts (streaming input): expected a whole prompt.")
        self.manager.placement(request)

    def _get_local_prefix_cache_hit(self, request: Any, *args: Any) -> tuple[Any, ...]:
        """Return the cached blocks before the first eviction.

        A preempted request also looks for the blocks of its answer, which another prompt may have. Its packed rows are
        gone, so that it must read up to its first eviction again.
        """
        blocks, hit, *rest = super()._get_local_prefix_cache_hit(request, *args)  # type: ignore[misc]
        placement = self.manager.placement(request)
        if placement is not None and hit > placement.first:
            hit = placement.first // self.manager.block_size * self.manager.block_size
            blocks = self.kv_cache_manager.truncate_computed_blocks(blocks, hit)  # type: ignore[attr-defined]
        return blocks, hit, *rest

    def _mamba_block_aligned_split(
        self, request: Any, num_new_tokens: int, num_new_local_computed_tokens: int = 0, num_external: int = 0
    ) -> int:
        num_read = request.num_computed_tokens + num_new_local_computed_tokens + num_external
        placement = self.manager.placement(request)
        end = None if placement is None else placement.chunk_end(num_read)
        return num_new_tokens if end is None else min(num_new_tokens, end - num_read)


class EvictionScheduler(EndsChunks, Scheduler):
    """vLLM's scheduler."""


class AsyncEvictionScheduler(EndsChunks, AsyncScheduler):
    """vLLM's scheduler that plans a step while the one before runs."""

"""The scheduler's side: how many blocks a request holds, and where the chunks of a prompt end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec

from ag.errors import UserError
from ag.vllm.placement import Geometry, Placement, place
from ag.vllm.settings import protected_tokens


@dataclass(frozen=True, kw_only=True)
class EvictionSpec(FullAttentionSpec):
    """Pages of full attention, of which a prompt keeps a share."""

    geometry: Geometry

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        """Return the length of a block table: the prompt, its rows in blocks of their own, and the answer."""
        placement = place(self.geometry, max_len) if self.geometry.apart else None
        return int(super().max_num_blocks_per_req(vllm_config, max_len)) + (len(placement.packed) if placement else 0)

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Return the bytes of a layer that the longest request needs, while its prompt is packed."""
        blocks = self.max_num_blocks_per_req(vllm_config, vllm_config.model_config.max_model_len)
        return blocks * int(self.page_size_bytes)

    @classmethod
    def merge(cls, specs: list[Any]) -> EvictionSpec:
        """Return the specification of a group of layers, which vLLM asks to be the same."""
        base = FullAttentionSpec.merge(specs)
        (geometry,) = {spec.geometry for spec in specs}
        return cls.of(base, geometry)

    @classmethod
    def of(cls, spec: Any, geometry: Geometry) -> EvictionSpec:
        """Return a specification of vLLM with a geometry."""
        own = {field.name: getattr(spec, field.name) for field in fields(FullAttentionSpec) if field.init}
        return cls(**own, geometry=geometry)


class EvictionManager(FullAttentionManager):
    """Frees the blocks that the worker emptied: it evicts before the pass of the token after the prompt."""

    #: The scheduler's requests by id.
    requests: Mapping[str, Any] = {}
    supports_fine_grained_hash_lookup = False  # a copy of part of a block would leave its gate logits behind

    def placement(self, request_id: str) -> Placement | None:
        """Return where the prompt of a request lies once it is evicted from. None: it stays whole."""
        request = self.requests[request_id]
        prompt = request.num_prompt_tokens
        protected = protected_tokens(request.sampling_params, prompt)
        found: Placement | None = place(self.kv_cache_spec.geometry, prompt, protected)
        return found

    def places(self, request_id: str, tokens: int) -> int:
        """Return the tokens for which vLLM's own arithmetic gives the length of this request's block table."""
        new_tokens = tokens - self.requests[request_id].num_prompt_tokens
        placement = self.placement(request_id) if new_tokens > 0 and self.enable_caching else None
        return tokens if placement is None else placement.places(new_tokens, self.block_size) * self.block_size

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the prompt's blocks once the pass that evicted from them is over."""
        if request_id in self.requests and processed_computed_tokens > self.requests[request_id].num_prompt_tokens:
            placement = self.placement(request_id)
            if placement is not None:
                self._remove_blocks_in_range(request_id, placement.freed.start, placement.freed.stop)

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *args: Any, apply_admission_cap: bool = False, **kwargs: Any
    ) -> int:
        """Return the blocks that a request still needs; to be admitted it needs those of its first packed pass."""
        if apply_admission_cap:
            num_tokens = max(num_tokens, self.requests[request_id].num_prompt_tokens + 1)
        tokens = self.places(request_id, num_tokens)
        return int(super().get_num_blocks_to_allocate(request_id, tokens, *args, **kwargs))

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[Any]:
        """Allocate blocks up to a number of tokens."""
        tokens = self.places(request_id, num_tokens)
        new_blocks: list[Any] = super().allocate_new_blocks(request_id, tokens, num_tokens_main_model)
        return new_blocks

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Let other requests find the prompt's blocks; those of packed rows and of the answer are this request's."""
        super().cache_blocks(request, min(num_tokens, request.num_prompt_tokens), *args, **kwargs)


class _EndsChunks:
    """Ends a chunk where a prompt ends, also for a request that was preempted and computes its answer anew."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.need_mamba_block_aligned_split = True  # the only hook that cuts chunks
        for manager in self.kv_cache_manager.coordinator.single_type_managers:  # type: ignore[attr-defined]
            manager.requests = self.requests  # type: ignore[attr-defined]

    def add_request(self, request: Any) -> None:
        """Take a request, unless its prompt may grow after it was evicted from."""
        if request.resumable:
            raise UserError("ag in vLLM: a prompt that comes in parts (streaming input): expected whole prompts.")
        super().add_request(request)  # type: ignore[misc]

    def _mamba_block_aligned_split(
        self, request: Any, num_new_tokens: int, num_new_local_computed_tokens: int = 0, num_external: int = 0
    ) -> int:
        num_read = request.num_computed_tokens + num_new_local_computed_tokens + num_external
        left: int = request.num_prompt_tokens - num_read
        return min(num_new_tokens, left) if left > 0 else num_new_tokens


class EvictionScheduler(_EndsChunks, Scheduler):
    """vLLM's scheduler."""


class AsyncEvictionScheduler(_EndsChunks, AsyncScheduler):
    """vLLM's scheduler that plans a step while the one before runs."""

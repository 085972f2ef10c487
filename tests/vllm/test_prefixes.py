"""Which cached blocks a request takes from other requests; with vLLM's managers of blocks, without an engine."""

import pytest
import torch

from ag.vllm.placement import Geometry
from ag.vllm.settings import Settings

pytest.importorskip("vllm", reason="needs vLLM: bash scripts/vllm_env.sh test")

BLOCK = 16
PROMPT, ANSWER, NEXT = list(range(1000, 1200)), list(range(5000, 5064)), list(range(7000, 7040))


@pytest.fixture
def scheduler():
    """The part of a scheduler that looks prefixes up."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from ag.vllm import hooks
    from ag.vllm.scheduler import EndsChunks, EvictionSpec

    class Lookups:
        max_model_len = 2048

        def __init__(self, spec):
            config = KVCacheConfig(200, [], [KVCacheGroupSpec(["layer.0"], spec)])
            self.requests = {}
            self.kv_cache_manager = KVCacheManager(
                config, max_model_len=2048, scheduler_block_size=BLOCK, hash_block_size=BLOCK
            )

        def _get_local_prefix_cache_hit(self, request):
            return *self.kv_cache_manager.get_computed_blocks(request), False

    class Scheduler(EndsChunks, Lookups):
        pass

    hooks.install()
    init_none_hash(sha256)
    geometry = Geometry(Settings("knorm@global", 0.3), BLOCK, 3, 30, 30, longest=99, apart=True)
    pages = FullAttentionSpec(block_size=BLOCK, num_kv_heads=3, head_size=64, dtype=torch.float32)
    return Scheduler(EvictionSpec.of(pages, geometry))


def make_request(name, tokens):
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request(name, tokens, SamplingParams(max_tokens=200), None, block_hasher=hasher)


def test_a_preempted_request_takes_no_blocks_of_its_answer(scheduler):
    """Another request's prompt begins with prompt and answer of this one."""
    blocks, requests = scheduler.kv_cache_manager, scheduler.requests
    later = requests["later"] = make_request("later", PROMPT + ANSWER + NEXT)
    blocks.allocate_slots(later, later.num_tokens)
    preempted = requests["preempted"] = make_request("preempted", PROMPT)
    preempted.append_output_token_ids(ANSWER)
    first = scheduler.manager.placement(preempted).first
    assert blocks.get_computed_blocks(preempted)[1] == 256 > first == 200
    found, hit, *_ = scheduler._get_local_prefix_cache_hit(preempted)
    assert hit == 192 and len(found.blocks[0]) == 192 // BLOCK
    fresh = requests["fresh"] = make_request("fresh", PROMPT)
    assert scheduler._get_local_prefix_cache_hit(fresh)[1] == 192


def test_the_longest_text_is_the_one_that_vllm_settled_on(scheduler):
    assert scheduler.manager.kv_cache_spec.geometry.longest == 2048

"""What eviction is for: more requests in the same blocks, and nothing that stays behind."""

import gc

import pytest
import torch

from ag.hardware import lacks_bfloat16
from tests.vllm.conftest import prompts_of

pytest.importorskip("vllm", reason="needs vLLM: bash scripts/vllm_env.sh test")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

FAST_DTYPE = "float32" if lacks_bfloat16() else "bfloat16"


def test_twice_as_many_requests_at_once(engine):
    """24 prompts of 600 tokens in 100 blocks of 32 tokens, of which vLLM on a CPU takes no smaller ones."""
    chosen, at_once = prompts_of([600] * 24), {}
    options = {"dtype": FAST_DTYPE, "block_size": 32, "num_gpu_blocks_override": 100}
    for name, settings in (("whole", None), ("gates", (("gates", "smollm2"), ("budget", 0.3)))):
        with engine(ag=settings, max_num_seqs=64, max_num_batched_tokens=1024, max_model_len=1024, **options) as llm:
            llm.tokens(chosen, 48)
            at_once[name] = llm.most_running
            assert llm.blocks[0] == llm.blocks[1]
    assert at_once["gates"] >= 2 * at_once["whole"], at_once


def tensor_nbytes():
    """Bytes of all tensors of this process. Resident memory also has what the allocator and libraries keep."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x.layout == torch.strided]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("shares", [False, True])
def test_nothing_stays_of_200_requests(engine, shares):
    """All blocks are free, the worker knows no request, and tensors take no more memory from 100 on."""
    chosen = prompts_of([160 + index % 100 for index in range(200)])
    with engine(
        num_gpu_blocks_override=140,
        max_num_batched_tokens=1024,
        max_model_len=512,
        enable_prefix_caching=shares,
        dtype=FAST_DTYPE,
    ) as llm:
        sizes = []
        for start in range(0, 200, 50):  # the first calls fill what libraries keep for themselves
            llm.tokens(chosen[start : start + 50], 8)
            llm.core.step()
            sizes.append(tensor_nbytes())
        assert llm.blocks[0] == llm.blocks[1]
        assert llm.builder.packed == llm.builder.prompts == {}
        assert sizes[-1] <= sizes[1], sizes


def test_logits_lie_in_memory_that_vllm_planned(engine):
    """A block has one layer more, which is in vLLM's page size; scorers without gates need none."""
    sizes = {}
    for name, settings in (("gates:smollm2", 0.3), ("knorm", 0.3), (None, None)):
        with engine(ag=None if name is None else {"policy": name, "budget": settings}, block_size=32) as llm:
            tensors = llm.scheduler.kv_cache_config.kv_cache_tensors
            blocks = llm.scheduler.kv_cache_config.num_blocks
            sizes[name] = sum(len(x.layers) for x in tensors), blocks
            if name == "gates:smollm2":
                pages = llm.builder.bound_pages()
                assert pages.logits.untyped_storage().data_ptr() == pages.minis.untyped_storage().data_ptr()
    layers = {name: x[0] for name, x in sizes.items()}
    assert layers == {"gates:smollm2": 31, "knorm": 30, None: 30}
    assert sizes["gates:smollm2"][1] == pytest.approx(sizes[None][1] * 30 / 31, rel=0.01)

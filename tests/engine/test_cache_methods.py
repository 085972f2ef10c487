"""The methods of transformers' ``Cache`` do what those of its ``DynamicCache`` do, for each type of argument."""

import numpy as np
import pytest
import torch
from transformers import Cache, DynamicCache

import ag
from tests.support.batches import row
from tests.support.bounds import hold, of_logits

IDS = torch.stack([row(12, seed) for seed in range(3)])
ASKED = {
    "get_seq_length": [(), (1,), (-1,)],
    "get_max_length": [(), (0,)],
    "get_max_cache_shape": [(), (0,)],
    "get_mask_sizes": [(1, 0), (4, 2)],
    "get_query_offset": [(), (2,)],
    "is_recording_past": [(0,)],
    "__len__": [()],
}
SAID = ["batch_size", "is_compileable", "is_croppable", "is_dummy", "is_initialized", "is_linear", "is_sliding"] + [
    "max_batch_size",
    "max_cache_len",
]
CHANGES = [
    *(("batch_select_indices", x) for x in (torch.tensor([2, 0]), torch.tensor([1, 1, -1, 0], dtype=torch.int32))),
    *(("batch_select_indices", x) for x in ([True, False, True], np.array([2, 0]), slice(1, None), [-1])),
    ("reorder_cache", torch.tensor([2, 2, 1])),
    ("batch_repeat_interleave", 2),
    ("batch_repeat_interleave", torch.tensor([1, 0, 3])),
    *(("crop", x) for x in (0, -7, -99, torch.tensor(-2))),
]
#: Of attention with states, of layers that are made before the first pass, and of memory that is moved.
OTHERS = [
    "early_initialization",
    "get_conv_state",
    "get_recurrent_state",
    "has_previous_state",
    "offload",
    "prefetch",
] + ["update", "update_conv_state", "update_indexer", "update_recurrent_state"]


@pytest.fixture(scope="module")
def llama(tiny_llama):
    return tiny_llama()


@pytest.fixture(params=["empty", "read"])
def caches(llama, request):
    both = ag.EvictionCache(llama, "full"), DynamicCache(config=llama.config)
    for cache in both if request.param == "read" else ():
        with torch.no_grad():
            llama(IDS, past_key_values=cache)
    return both


def test_every_method_is_compared():
    named = {*ASKED, *SAID, *(name for name, _ in CHANGES), *OTHERS, "activate_past_recording", "reset"}
    assert {name for name in dir(Cache) if not name.startswith("_")} <= named


def test_what_is_asked(caches):
    ours, theirs = caches
    for name in SAID:
        if hasattr(type(theirs), name):
            assert getattr(ours, name) == getattr(theirs, name), name
    for name, arguments in ASKED.items():
        for given in arguments if hasattr(theirs, name) else ():
            assert getattr(ours, name)(*given) == getattr(theirs, name)(*given), (name, given)


@pytest.mark.parametrize(("name", "given"), CHANGES, ids=repr)
@torch.no_grad()
def test_what_changes(llama, caches, name, given):
    """A text goes on alike after it, in one pass or step by step."""
    ours, theirs = caches
    for cache in caches if theirs.get_seq_length() or name != "crop" else (ours,):  # older releases crop what they read
        cache.activate_past_recording()
        getattr(cache, name)(given)
    assert ours.get_seq_length() == theirs.get_seq_length()
    count = len(theirs.layers[0].keys) if theirs.get_seq_length() else 3
    for size in (3, 1, 1):
        new = row(count * size, size).view(count, size)
        got, want = (llama(new, past_key_values=cache).logits for cache in caches)
        hold(got, want, of_logits(llama))
    ours.reset()
    assert ours.get_seq_length() == 0

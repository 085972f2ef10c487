"""What transformers renames: an eviction cache under either name, and no warning of what this library calls."""

import logging
import warnings
from contextlib import contextmanager

import pytest
import torch
from transformers.utils import logging as transformers_logging

import ag
from ag.engine.decode import decode
from ag.engine.prompt import read_prompt
from ag.engine.step_runner import StepRunner
from ag.evaluate.tasks.follow import feed
from ag.model.hooks import cache_argument, decoder_of
from tests.support.bounds import hold, of_logits
from tests.support.gates_for import gates_for

IDS = torch.randint(3, 128, (2, 20), generator=torch.Generator().manual_seed(0))
GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
NAMES = ["past_key_values", "cache"]


class _Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


@contextmanager
def nothing_deprecated():
    """Expect no warning and no line of transformers' log that calls something deprecated."""
    records, logger = _Records(), logging.getLogger("transformers")
    transformers_logging.warning_once.cache_clear()
    logger.addHandler(records)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        logger.removeHandler(records)
    said = [*records.said, *(str(one.message) for one in caught)]
    assert [line for line in said if "deprecated" in line] == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("inner", [False, True], ids=["model", "decoder"])
def test_a_pass_takes_a_cache_under_either_name(tiny_llama, name, inner):
    model = tiny_llama()
    called, cache = decoder_of(model) if inner else model, ag.EvictionCache(model, "full")
    with torch.no_grad():
        want = called(IDS)[0]
        with nothing_deprecated():
            got = torch.cat([called(part, **{name: cache})[0] for part in IDS.split([15, 5], 1)], 1)
    hold(got, want, of_logits(model))
    assert cache.seen_tokens == 20


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "how",
    [{}, {"num_beams": 2}, {"custom_generate": decode}, {"prefill_chunk_size": 8}],
    ids=["greedy", "beams", "decode", "chunks"],
)
def test_generate_takes_a_cache_under_either_name(tiny_llama, name, how):
    model = tiny_llama()
    cache = ag.EvictionCache(model, "full")
    with nothing_deprecated():
        text = model.generate(IDS, **{name: cache}, **how, **GREEDY)
    assert cache.seen_tokens == 24
    beams = {"num_beams": 2} if "num_beams" in how else {}
    assert torch.equal(text, model.generate(IDS, **beams, **GREEDY))


@pytest.mark.parametrize("name", NAMES)
def test_an_adapted_model_takes_a_cache_under_either_name(tiny_llama, name):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    cache = ag.EvictionCache(model, "full")
    with torch.no_grad():
        want = model(input_ids=IDS, use_cache=False).logits
        with nothing_deprecated():
            got = model(input_ids=IDS, **{name: cache}).logits
    hold(got, want, of_logits(tiny_llama()))
    assert cache.seen_tokens == 20


def test_what_this_library_calls_is_not_deprecated(tiny_llama):
    """The passes of a prompt read for several policies, of a repetition, of steps and of answers."""
    model = tiny_llama()
    ag.attach(model, gates_for(model))
    with nothing_deprecated(), torch.no_grad():
        for cache, _ in read_prompt(model, ["full", ag.policy("kvzip", 0.5), ag.policy("gates")], IDS):
            StepRunner(model, cache)(IDS[:, :1])
            feed(model, cache, IDS[:, 1:4])
            assert cache.seen_tokens == 24


def test_a_class_is_asked_for_the_name(tiny_llama):
    model = tiny_llama()
    name = cache_argument(type(model))
    with nothing_deprecated(), torch.no_grad():
        out = model(IDS, **{name: ag.EvictionCache(model, "full")})
        assert name in out and isinstance(out[name], ag.EvictionCache)

"""A decoding step of several caches in one forward pass, against a step of each cache alone."""

import copy

import pytest
import torch
from transformers.cache_utils import Cache

import ag
from ag.engine import read_prompt
from ag.engine.shared_step import step_together
from ag.model.structure import lm_logits
from tests.model.test_architectures import text, tiny
from tests.model.test_rope_by_text import MODELS
from tests.support.bounds import hold, of_logits
from tests.support.gates_for import gates_for

POLICIES = [
    ag.policy("full"),
    ag.policy("h2o", 12, "every"),
    ag.policy("tova", 9, "blocks:8+steps:3"),
    ag.policy("expected_attention", 12, "every"),
    ag.policy("expected_attention", 16, "every"),
    ag.policy("knorm", 10, positions="slot"),
    ag.policy("gates", 0.5, "every"),
]
STEPS = torch.randint(3, 100, (4, len(POLICIES)), generator=torch.Generator().manual_seed(1))
MADE = {
    "llama": lambda: tiny("llama"),
    "llama, RoPE by the length of the text": lambda: tiny("llama", **MODELS["llama"]),
    "gemma3_text": lambda: tiny("gemma3_text"),
    "llama4_text, chunks": lambda: tiny("llama4_text"),
    "gemma3n_text, shared keys": lambda: tiny("gemma3n_text"),
    "lfm2, layers with states": lambda: tiny("lfm2"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MADE)
@torch.no_grad()
def test_each_cache_steps_as_if_alone(name):
    if name.startswith("lfm2") and not hasattr(Cache, "get_conv_state"):
        pytest.skip("hybrid models need transformers 5.23")
    model, policies = MADE[name](), POLICIES
    if name != "llama":  # the others refuse positions by slot or expected_attention
        policies = [ag.policy("full"), ag.policy("h2o", 12, "every"), ag.policy("tova", 9, "steps:3")]
    ag.attach(model, gates_for(model))
    together = [cache for cache, _ in read_prompt(model, policies, text(40, seed=0)[None])]
    alone = copy.deepcopy(together)
    for tokens in STEPS[:, : len(policies)]:
        states = step_together(model, together, tokens.tolist())
        for row, cache in enumerate(alone):
            expected = model(tokens[row].view(1, 1), past_key_values=cache).logits[0, -1]
            hold(lm_logits(model, states[row]), expected, of_logits(model), policies[row])
            for layer in range(len(cache.state.layers)):
                kept, kept_alone = together[row].kept_positions(layer), cache.kept_positions(layer)
                assert [head.tolist() for head in kept[0]] == [head.tolist() for head in kept_alone[0]]
    assert [cache.seen_tokens for cache in together] == [44] * len(policies)

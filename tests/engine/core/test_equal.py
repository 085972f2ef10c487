"""The core over sequences keeps what the other engine keeps, and gives the same logits."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import ag
from ag.engine.core.cache import EvictionCache
from tests.support.gates_for import gates_for

GEOMETRY = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.15, "head_dim": 16,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
POLICIES = {
    "streaming_llm": {"sinks": 2},
    "h2o": {},
    "tova": {},
    "snapkv": {"window": 4, "kernel": 3},
    "h2o@heads": {},
    "snapkv@heads": {"window": 4, "kernel": 3},
    "snapkv@global": {"window": 4, "kernel": 3},
    "cake": {"window": 4},
    "snapkv+caote@pyramid": {"window": 4},
    "h2o+vatp": {"sinks": 2},
}
SCHEDULES = ["prefill", "every", "steps:5", "blocks:8", "blocks:8+every"]
SHAPES = {"one": [37], "batch": [37, 30, 24], "equal": [37, 37]}


def pair(kind="llama"):
    torch.manual_seed(0)
    made = {
        "llama": (LlamaForCausalLM, LlamaConfig, {}),
        "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 16}),
    }
    model, config, more = made[kind]
    first = model(config(**GEOMETRY | more)).eval()
    return first, copy.deepcopy(first)


def padded(lengths, width):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 128, (len(lengths), width), generator=generator)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, width - length :] = 1
    return ids * mask, mask


@torch.no_grad()
def run(models, policy, options, schedule, lengths, budget, steps=12, turn=3, window=None, exact=True):
    ids, mask = padded(lengths, max(lengths))
    theirs = ag.EvictionCache(models[0], policy, budget, schedule, **options)
    mine = EvictionCache(models[1], policy, budget, schedule, **options)
    generator, shift = torch.Generator().manual_seed(1), (mask == 0).sum(1).tolist()
    now, parts = mask, [ids, torch.randint(3, 128, (len(ids), turn), generator=generator)]
    parts += [torch.randint(3, 128, (len(ids), 1), generator=generator) for _ in range(steps)]
    for number, part in enumerate(parts):
        now = now if number == 0 else torch.cat([now, torch.ones_like(part)], 1)
        positions = (now.cumsum(1) - 1).clamp_min(0)[:, -part.shape[1] :]
        padding = now if mask.min() == 0 else None
        a, b = (
            model(part, attention_mask=padding, position_ids=positions, past_key_values=cache).logits
            for model, cache in zip(models, (theirs, mine), strict=True)
        )
        there = now[:, -part.shape[1] :].bool()
        torch.testing.assert_close(a[there], b[there], atol=2e-4, rtol=0)
        for layer in range(3 if exact else 0):
            for b, (a, c) in enumerate(zip(theirs.kept_positions(layer), mine.kept_positions(layer), strict=True)):
                for x, y in zip(a, c, strict=True):
                    x = x - shift[b]
                    if window:
                        first = int(mine.sequences.num_tokens[b]) - window
                        x, y = x[x > first], y[y > first]
                    assert x.tolist() == y.tolist(), (number, layer, b)


@pytest.fixture(scope="module")
def llama():
    return pair()


@pytest.fixture(scope="module")
def mistral():
    return pair("mistral")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("shape", "budget"), [("batch", 12), pytest.param("one", 0.4, marks=pytest.mark.slow)])
def test_llama(llama, policy, schedule, shape, budget):
    run(llama, policy, POLICIES[policy], schedule, SHAPES[shape], budget)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("policy", POLICIES)
def test_sliding_window(mistral, policy, schedule):
    run(mistral, policy, POLICIES[policy], schedule, SHAPES["batch"], 9, window=16)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_full(llama, mistral, kind, shape):
    run(
        llama if kind == "llama" else mistral,
        "full",
        {},
        "prefill",
        SHAPES[shape],
        None,
        steps=90,
        window=None if kind == "llama" else 16,
    )


RANKED = {"gates@uniform": {}, "gates@heads": {}, "gates@global": {}, "gates@uniform ": {"recent_share": 0.5}}
FLAGS = {
    "sparse": {"recent_tokens": 4, "sink_tokens": 2},
    "dense": {"recent_tokens": 4, "sink_tokens": 2, "prefill": "dense"},
    "all": {"recent_tokens": 5, "covers": "all"},
    "all_dense": {"recent_tokens": 5, "sink_tokens": 1, "covers": "all", "prefill": "dense"},
    "mlp": {"kind": "mlp", "recent_tokens": 3, "covers": "all"},
    "window": {"window": 8, "recent_tokens": 3, "covers": "all"},
}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["prefill", "every", "blocks:8+every"])
@pytest.mark.parametrize("policy", RANKED)
def test_ranked_gates(llama, policy, schedule):
    for model in llama:
        ag.attach(model, gates_for(model, scope="causal", covers="all", sink_tokens=1, recent_tokens=6))
    try:
        run(llama, policy.strip(), RANKED[policy], schedule, SHAPES["batch"], 14)
    finally:
        for model in llama:
            ag.detach(model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("config", FLAGS)
def test_flags(llama, mistral, kind, config):
    models = llama if kind == "llama" else mistral
    for model in models:
        ag.attach(model, gates_for(model, scope="causal", **FLAGS[config]))
    try:
        run(
            models,
            "flags",
            {},
            "prefill",
            SHAPES["batch"],
            None,
            steps=90,
            window=16 if kind == "mistral" else None,
            exact=False,
        )
    finally:
        for model in models:
            ag.detach(model)

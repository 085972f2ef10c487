"""A share of all tokens seen so far: what is held, counted at every step, and what that share cannot be."""

import pytest
import torch

import ag

IDS = torch.randint(3, 128, (2, 90), generator=torch.Generator().manual_seed(0))


def lengths_of(cache, layer):
    return [[len(head) for head in heads] for heads in cache.kept_positions(layer)]


@torch.no_grad()
def fed(model, policy, first, step):
    """Feed the rows in passes, and yield the cache after each."""
    cache = ag.EvictionCache(model, policy)
    model(IDS[:, :first], past_key_values=cache)
    yield first, cache
    for start in range(first, IDS.shape[1], step):
        model(IDS[:, start : start + step], past_key_values=cache)
        yield min(start + step, IDS.shape[1]), cache


@pytest.mark.parametrize(("schedule", "step"), [("every", 1), ("steps:8", 8), ("steps:8", 4), ("blocks:10+steps:8", 8)])
def test_the_share_is_held_at_every_decision(tiny_llama, schedule, step):
    model, sinks = tiny_llama(), 2
    policy = ag.policy("streaming_llm", 0.3, schedule, sinks=sinks, budget_of="seen")
    due = 20
    for seen, cache in fed(model, policy, 20, step):
        due = seen if seen - due >= policy.steps else due
        size = int(0.3 * due + 1e-9) + seen - due
        window = [*range(sinks), *range(seen - size + sinks, seen)]
        for layer in range(len(cache.layers)):
            assert [[head.tolist() for head in row] for row in cache.kept_positions(layer)] == [[window] * 2] * 2, seen


@pytest.mark.parametrize(
    "spec", ["h2o", "snapkv", "tova", "random", "h2o@heads", "knorm@global", "snapkv@pyramid", "snapkv@preference"]
)
def test_layers_grow_in_proportion(tiny_llama, spec):
    options = {"window": 4} if "snapkv" in spec else {}
    runs = fed(tiny_llama(), ag.policy(spec, 0.5, "steps:10", budget_of="seen", **options), 30, 10)
    first = None
    for seen, cache in runs:
        held = torch.tensor([lengths_of(cache, layer) for layer in range(len(cache.layers))])  # [L, B, Hkv]
        layers = held.double().mean(-1)
        first = layers if first is None else first
        assert layers.mean(0).sub(seen // 2).abs().max() < 1  # rounded down in each layer
        if "global" in spec:  # a layer's total grows, however its heads share it
            assert torch.equal((2 * layers).long(), (2 * first).long() * (seen // 2) // 15)
        elif "heads" not in spec:
            assert torch.equal(layers.long(), first.long() * (seen // 2) // 15)


def test_without_it_the_share_is_that_of_the_prompt(tiny_llama):
    sizes = [lengths_of(cache, 0)[0][0] for _, cache in fed(tiny_llama(), ag.policy("h2o", 0.5, "every"), 30, 10)]
    assert sizes == [15] * 7

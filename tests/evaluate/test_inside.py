"""Attention maps, statistics and output errors against the model's own attention weights."""

import pytest
import torch
from gates_for import gates_for

import ag
from ag.evaluate.comparison.views import kept_flags
from ag.evaluate.inside import Reading, attention_map, gate_map, layer_statistics, output_errors

IDS = (torch.arange(60) * 7 % 90 + 4).tolist()


@pytest.fixture(scope="module", params=["llama", "mistral"])
def model(request, tiny_llama, tiny_mistral):
    return tiny_llama() if request.param == "llama" else tiny_mistral()


@pytest.fixture(scope="module")
def weights(model, tiny_llama, tiny_mistral):
    """The attention weights `[H, T, T]` of each layer, by transformers."""
    model = (tiny_llama if "Llama" in type(model).__name__ else tiny_mistral)()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return [one[0] for one in model(torch.tensor([IDS]), output_attentions=True).attentions]


def test_maps_are_the_models_weights(model, weights):
    reading = Reading(model, IDS)
    assert len(reading.calls) == len(reading.hidden) == 3
    for layer, expected in enumerate(weights):
        assert torch.allclose(attention_map(reading, layer), expected, atol=1e-5)


def test_statistics_by_hand(model, weights):
    """H and V of the last 8 queries over the tokens before them; weights past the window are 0."""
    found = layer_statistics(Reading(model, IDS), observers=8)
    for layer, expected in enumerate(weights):
        before = expected[:, -8:, :-8]
        entropy = -(before * (before + 1e-10).log()).sum()
        assert found[layer].tolist() == pytest.approx([float(entropy), float(before.var(1).sum())], rel=1e-4)


@pytest.mark.parametrize(("scope", "window"), [("causal", 0), ("prompt", 0), ("causal", 4)])
def test_gate_map_is_the_attention_inside_the_gate(tiny_llama, scope, window):
    model = tiny_llama()
    gates = gates_for(model, scope=scope, window=window)
    reading = Reading(model, IDS)
    gate, hidden = gates.layers["1"], reading.hidden[1]
    weights = gate_map(gate, hidden)
    assert weights.shape == (2, 60, 60)
    values = gate.v_proj(hidden).view(60, 2, 8).transpose(0, 1)
    logits = gate.o_proj((weights @ values).transpose(0, 1).flatten(1)).T
    assert torch.allclose(logits, gate(hidden)[0], atol=1e-5)


def test_output_errors_of_one_token_are_caotes_formula(tiny_llama):
    """One query after the prompt: losing token j changes a head's output by a / (1 - a) ||o - v_j||."""
    model = tiny_llama()
    reading = Reading(model, IDS)
    kept = torch.ones(3, 2, 59, dtype=torch.bool)
    assert output_errors(reading, kept).tolist() == [0, 0, 0]
    kept[1, 0, 20] = False
    errors = output_errors(reading, kept)
    a = attention_map(reading, 1)[:, -1]
    values = reading.calls[1].v[0].repeat_interleave(2, 0)
    out = (a[:, None] @ values)[:, 0]
    lost = [float(a[h, 20] / (1 - a[h, 20]) * (out[h] - values[h, 20]).norm()) for h in (0, 1)]
    assert errors[1] == pytest.approx((lost[0] ** 2 + lost[1] ** 2) / float(out.square().sum()), rel=1e-3)
    assert errors[0] == errors[2] == 0


def test_the_error_of_the_first_layer_is_that_of_the_real_cache(tiny_llama):
    """Nothing before it differs, so that its output after a real eviction must be off by just that."""
    model, outputs = tiny_llama(), []
    first = model.model.layers[0].self_attn.o_proj
    with torch.no_grad():
        handle = first.register_forward_pre_hook(lambda module, args: outputs.append(args[0]))
        model(torch.tensor([IDS]))
        cache = ag.EvictionCache(model, "h2o", 10)
        model(torch.tensor([IDS[:50]]), past_key_values=cache)
        flags = kept_flags(cache)
        model(torch.tensor([IDS[50:]]), past_key_values=cache)
        handle.remove()
    full, evicted = outputs[0][:, 50:], outputs[2]
    expected = float((full - evicted).square().sum() / full.square().sum())
    assert expected > 1e-4
    assert output_errors(Reading(model, IDS), torch.from_numpy(flags))[0] == pytest.approx(expected, rel=1e-3)

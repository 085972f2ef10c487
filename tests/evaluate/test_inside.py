"""Attention maps and output errors against the model's own attention weights."""

import pytest
import torch

import ag
from ag.evaluate.inside import RecordedPass, attention_map, gate_map, kept_mask, output_errors
from tests.support.bounds import conditioned, hold, of_pass, of_weights
from tests.support.gates_for import gates_for
from tests.support.shapes import shaped

IDS = (torch.arange(60) * 7 % 90 + 4).tolist()


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_maps_are_the_models_weights(name, tiny_llama, tiny_mistral):
    """By transformers, whose weights are off as their logarithms are."""
    model = {"llama": tiny_llama, "mistral": tiny_mistral}[name]()
    recorded = RecordedPass(model, IDS)
    model.set_attn_implementation("eager")

    @torch.no_grad()
    def made():
        weights = model(torch.tensor([IDS]), output_attentions=True).attentions
        return torch.stack([one[0] for one in weights]).double()

    def logarithms():
        found = made()
        return found[found > 0].log()

    weights = made()
    bound = (of_pass(model, logarithms) + torch.finfo(torch.float32).eps) * weights
    assert len(recorded.calls) == len(recorded.hidden) == 3
    for layer in range(3):
        hold(attention_map(recorded.calls[layer]), weights[layer], bound[layer])


@pytest.mark.parametrize(("scope", "window"), [("causal", 0), ("prompt", 0), ("causal", 4)])
def test_gate_map_is_the_attention_inside_the_gate(tiny_llama, scope, window):
    model = tiny_llama()
    gates = gates_for(model, scope=scope, window=window)
    gate, hidden = gates.layers["1"], RecordedPass(model, IDS).hidden[1]
    weights = gate_map(gate, hidden)
    assert weights.shape == (2, 60, 60)
    values = gate.v_proj(hidden).view(60, 2, 8).transpose(0, 1)
    logits = gate.o_proj((weights @ values).transpose(0, 1).flatten(1)).T
    hold(logits, gate(hidden)[0], 2 * conditioned(lambda x: gate(x)[0], hidden))  # of two that round apart


def of_error(call, expected):
    """Bound ``||d||^2 / ||o||^2`` where both outputs, of which d is the difference, are off as weights are.

    With r what weights are off by, relative to themselves, d is off by 2 r ||o||, and o by r ||o||.
    """
    loose = of_weights(call.q[0], call.k[0].repeat_interleave(2, 0), call.scaling)
    return 2 * loose * (2 * expected**0.5 + expected)


def test_output_errors_of_one_token_are_caotes_formula(tiny_llama):
    """One query after the prompt: losing token j changes a head's output by a / (1 - a) ||o - v_j||."""
    recorded = RecordedPass(tiny_llama(), IDS)
    kept = torch.ones(3, 2, 59, dtype=torch.bool)
    assert output_errors(recorded, kept).tolist() == [0, 0, 0]
    kept[1, 0, 20] = False
    errors = output_errors(recorded, kept)
    a = attention_map(recorded.calls[1])[:, -1]
    values = recorded.calls[1].v[0].repeat_interleave(2, 0)
    out = (a[:, None] @ values)[:, 0]
    lost = [float(a[h, 20] / (1 - a[h, 20]) * (out[h] - values[h, 20]).norm()) for h in (0, 1)]
    expected = (lost[0] ** 2 + lost[1] ** 2) / float(out.square().sum())
    hold(errors[1], expected, of_error(recorded.calls[1], expected))
    assert errors[0] == errors[2] == 0


@pytest.mark.parametrize("sinks", [False, True])
def test_the_error_of_the_first_layer_is_that_of_the_real_cache(tiny_llama, sinks):
    """Nothing before it differs, so that its output after a real eviction must be off by just that."""
    model, outputs = shaped("gpt_oss") if sinks else tiny_llama(), []
    with torch.no_grad():
        first = model.model.layers[0].self_attn.o_proj
        handle = first.register_forward_pre_hook(lambda module, args: outputs.append(args[0]))
        model(torch.tensor([IDS]))
        cache = ag.EvictionCache(model, "h2o", 10)
        model(torch.tensor([IDS[:50]]), past_key_values=cache)
        flags = kept_mask(cache)
        model(torch.tensor([IDS[50:]]), past_key_values=cache)
        handle.remove()
    full, evicted = outputs[0][:, 50:], outputs[2]
    expected = float((full - evicted).square().sum() / full.square().sum())
    recorded = RecordedPass(model, IDS)
    bound = of_error(recorded.calls[0], expected)
    assert expected > 10 * bound
    hold(output_errors(recorded, torch.from_numpy(flags))[0], expected, bound)

"""Costs of heads' thresholds, and the offsets that they give."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from ag.model.interceptor import AttentionCall
from ag.training import costs
from ag.training.costs import THRESHOLD_OFFSETS, CostRecorder
from ag.training.replay import CachedPrompt
from ag.training.replay_attention import replay_attention
from tests.support.bounds import hold
from tests.training.test_replay import CONTEXT, EPS, EPS32, RESPONSE, batch, replay


def test_a_cost_recorder_measures_the_change_by_each_threshold():
    torch.manual_seed(0)
    kv_heads, group, size = 2, 3, 8
    q = torch.randn(1, kv_heads * group, RESPONSE, size, dtype=torch.float64)
    k, v = (torch.randn(1, kv_heads, RESPONSE, size, dtype=torch.float64) for _ in "kv")
    far = [torch.randn(kv_heads, CONTEXT, size, dtype=torch.float64) for _ in "kv"]
    logits, thresholds = torch.randn(kv_heads, CONTEXT), torch.tensor([-0.5, 0.0, 0.7])
    logits[:, :2] = float("inf")
    keep = (logits > 0.3).double()[None]
    prompt = CachedPrompt({4: far[0]}, {4: far[1]}, {})
    recorder = CostRecorder(prompt, {4: keep.clone()}, {4: logits}, thresholds)
    out = recorder.attend(AttentionCall(torch.nn.Module(), 4, q, k, v, 0.4, None))
    gradient = torch.randn_like(out)
    (out * gradient).sum().backward()
    for index, threshold in enumerate(thresholds):
        flags = (logits > threshold).double()[None]
        moved = replay_attention(q, k, v, *far, flags, 0.4)
        change = ((moved - out.detach()) * gradient).sum(-1).view(kv_heads, -1)
        length = CONTEXT + RESPONSE + size  # of the sums: over keys, and over the dimensions of each product
        largest = max(float(x.abs().amax()) for x in (v, far[1]))
        terms = EPS * length * float(gradient.abs().sum()) * largest
        hold(recorder.linear[4][:, index], change.sum(1), terms)
        hold(recorder.square[4][:, index], 0.5 * change.square().sum(1), terms * (1 + change.abs().max()))


@pytest.mark.parametrize("layer", [0, 2])
def test_a_head_whose_tokens_do_not_matter_costs_nothing_and_keeps_fewer(tiny_llama, monkeypatch, layer):
    model = tiny_llama().double()
    with torch.no_grad():  # nothing that head 0 of this layer reads reaches the output
        attention = model.model.layers[layer].self_attn
        head = attention.head_dim * (attention.config.num_attention_heads // attention.config.num_key_value_heads)
        attention.o_proj.weight[:, :head] = 0
    module, measured, cheapest = replay(model), [], costs._cheapest
    monkeypatch.setattr(costs, "_cheapest", lambda *given: (measured.append(given[0]), cheapest(*given))[1])
    torch.manual_seed(0)
    before = module.gates.layers[str(layer)].outer.bias.clone()
    [first, second] = costs.fit_bias_offsets(module.gated_loss, [batch(4), batch(4, seed=1)], 2)
    size = float((before.abs() + first[layer].abs() + second[layer].abs()).max())
    hold(module.gates.layers[str(layer)].outer.bias - before, first[layer] + second[layer], 2 * EPS32 * size)
    for cost in measured:
        nothing = (cost == 0).all(-1).all(0)
        assert nothing.nonzero().tolist() == [[layer, 0]]
    assert first[layer, 0] < 0


def test_a_budget_of_protected_tokens_costs_nothing(tiny_llama):
    module, data = replay(tiny_llama().double()), batch(4)
    short = data | {name: data[name][:, CONTEXT - 4 :] for name in ("input_ids", "attention_mask", "labels")}
    short["prompt_length"] = torch.full((4,), 4)
    before = [x.clone() for x in module.gates.parameters()]
    assert not bool(costs.fit_bias_offsets(module.gated_loss, [short], 1)[0].any())
    module.gated_loss.replay_row(short, 0, [0.5]).divergence.sum().backward()
    assert all(torch.equal(*pair) for pair in zip(before, module.gates.parameters(), strict=True))
    assert not any(bool(x.grad.any()) for x in module.gates.parameters())


def test_protected_tokens_are_kept_under_every_threshold(tiny_llama):
    loss = replay(tiny_llama().double()).gated_loss
    row, offsets = loss.split_row(batch(), 0), torch.tensor([-1e-6, 0, 1e3])
    _, kept, _ = costs._measure_row(loss, *row, 0.5, offsets, torch.Generator(), True)
    flags = loss.keep_flags(loss.gate_logits(row[0]), 0.5).detach()
    protected = flags.bool().flatten(0, 1).all(0).float().mean()
    assert 0 < protected < 0.5
    hold(kept[..., 0], flags.mean(-1), EPS32)
    hold(kept[..., -1], protected.expand_as(kept[..., -1]), EPS32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_costs_are_measured_on_the_prompts_that_training_reads(tiny_llama, tmp_path, dtype):
    module, data = replay(tiny_llama(), str(tmp_path)), batch(4)
    module.gates.float()
    module.config.warmup.rounds = 1
    context = MixedPrecision("bf16-mixed", "cpu").forward_context if dtype == torch.bfloat16 else nullcontext
    rows = [{name: x[row, None] for name, x in data.items()} for row in range(4)]
    module._trainer = SimpleNamespace(
        datamodule=SimpleNamespace(first_rows=lambda count: rows[:count]),
        precision_plugin=SimpleNamespace(forward_context=context),
        fast_dev_run=False,
    )
    module._set_biases()
    files = len(list(tmp_path.iterdir()))
    with context():
        module.gated_loss.loss(data, 0)
    assert files == len(list(tmp_path.iterdir())) == 4


def test_the_cheapest_moves_keep_as_many_tokens():
    torch.manual_seed(0)
    share = torch.linspace(0.7, 0.1, len(THRESHOLD_OFFSETS)).expand(4, 2, 3, -1).contiguous()
    cost = torch.rand(1, 2, 3, 1) * (1 - share).square()
    moves = costs._cheapest(cost, share, torch.ones(4), 1.5)
    index = ((moves[..., None] - THRESHOLD_OFFSETS).abs()).argmin(-1)
    kept = share[0].gather(-1, index[..., None]).mean()
    unmoved, step = share[0, 0, 0, len(THRESHOLD_OFFSETS) // 2], share[0, 0, 0, 0] - share[0, 0, 0, 1]
    hold(float(kept), float(unmoved), 0.6 * float(step) * 2)
    order = cost[0, ..., 0].flatten().argsort()
    assert bool((moves.flatten()[order].diff() <= 0).all())  # a head that costs more keeps more


def test_a_response_of_one_token_costs_nothing(tiny_llama):
    """It precedes eviction."""
    model, data, short = tiny_llama().double(), batch(4), batch(1, seed=1)
    short["labels"][:, CONTEXT + 1 :] = -100
    offsets = [costs.fit_bias_offsets(replay(model).gated_loss, batches, 1)[0] for batches in ([data], [data, short])]
    assert torch.equal(*offsets) and bool(offsets[0].any())

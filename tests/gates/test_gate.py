import pytest
import torch
from transformers import LlamaConfig

import ag
from ag.gates.gate import KINDS, AttentionGate
from ag.model.random_base import geometry
from tests.support.bounds import conditioned, hold
from tests.support.memory import Largest
from tests.support.refused import refuses

TINY = LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=4)


def small(**changes):
    return ag.GateConfig(**{"num_heads": 2, "head_dim": 8} | changes)


def test_all_tokens_of_fast_kvzip_share_its_learned_keys():
    """No tensor is larger than the logits of all tokens with all learned keys."""
    gate = KINDS["fast_kvzip"](32, 8, 4, ag.GateConfig(kind="fast_kvzip", head_dim=16, hidden=24))
    with Largest() as largest:
        assert gate.mix(torch.randn(2, 30, 32), None, False, None).shape == (2, 30, 4)
    assert largest.size == 2 * 30 * 8 * 24


@pytest.mark.parametrize(("name", "heads", "size"), [("llama-8b", 1, 512), ("smollm2-135m", 4, 16), ("tiny", 4, 8)])
def test_gates_without_a_size_are_sized_by_the_base(name, heads, size):
    """An eighth of the width, in multiples of 8; an explicit size stays."""
    shape = geometry(name)
    with torch.device("meta"):
        gates = ag.AttentionGates(shape, ag.GateConfig(num_heads=heads))
        wide = ag.AttentionGates(shape, ag.GateConfig(num_heads=heads, head_dim=128))
    assert gates.config.head_dim == size and gates.layers["0"].config == gates.config
    by_hand = shape.num_hidden_layers * heads * size * (3 * shape.hidden_size + shape.num_key_value_heads)
    assert sum(p.numel() for p in gates.parameters()) == by_hand
    assert wide.config.head_dim == 128


def plain_gate(gate, hidden, valid, first=None):
    """The paper's formula, one token and head at a time, over the last ``window`` tokens of its document."""
    config, rows = gate.config, []
    first = torch.zeros_like(valid, dtype=torch.long) if first is None else first
    for x, mask, start in zip(hidden, valid, first, strict=True):
        out, mask, start = x.new_zeros(len(x), gate.o_proj.weight.shape[0]), mask.tolist(), start.tolist()
        for i in (i for i, real in enumerate(mask) if real):
            heads = []
            for h in range(config.num_heads):
                part = slice(h * config.head_dim, (h + 1) * config.head_dim)
                q = gate.q_proj.weight[part] @ x[i]
                seen = [t for t in range(len(x)) if mask[t] and (config.scope == "prompt" or start[i] <= t <= i)]
                seen = seen[-config.window :]
                scores = (x[seen] @ gate.k_proj.weight[part].T) @ q / config.head_dim**0.5
                heads.append(scores.softmax(0) @ (x[seen] @ gate.v_proj.weight[part].T))
            out[i] = gate.o_proj.weight @ torch.cat(heads)
            if config.shortcut:
                out[i] = out[i] + gate.linear.weight @ x[i]
        rows.append(out.view(len(x), gate.kv_heads, -1).amax(-1).T)
    return torch.stack(rows)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize(("granularity", "shortcut"), [("kv_head", True), ("query_head", False)])
@pytest.mark.parametrize("scope", ["causal", "prompt"])
def test_gate_equals_the_formula(scope, shortcut, granularity, padding):
    torch.manual_seed(0)
    config = small(scope=scope, shortcut=shortcut, granularity=granularity)
    gate = AttentionGate(12, 2 if granularity == "kv_head" else 6, 2, config)
    hidden = torch.randn(2, 7, 12)
    valid = torch.ones(2, 7, dtype=torch.bool)
    if padding != "none":
        valid[1, :3] = False
        valid = valid if padding == "left" else valid.flip(1)
    with torch.no_grad():
        got = gate(hidden, None if padding == "none" else valid, left_padded=padding == "left")
        bound = conditioned(lambda x: plain_gate(gate, x, valid), hidden)
        want = plain_gate(gate.double(), hidden.double(), valid)
    hold(*(x.where(valid[:, None], 0.0) for x in (got, want, bound)))


@pytest.mark.parametrize(("window", "padding"), [(1, "left"), (3, "documents"), (30, "none"), (99, "right")])
def test_a_windowed_gate_looks_at_its_last_tokens(window, padding):
    """80 tokens: more than a tile of the fast version, and windows that end within and beyond one."""
    torch.manual_seed(0)
    gate = AttentionGate(12, 2, 2, small(num_heads=1, window=window, shortcut=True)).double()
    hidden, valid, first = torch.randn(2, 80, 12).double(), torch.ones(2, 80, dtype=torch.bool), None
    if padding == "documents":
        first = torch.zeros(2, 80, dtype=torch.long)
        first[0, 20:], first[0, 23:], first[1, 69:] = 20, 23, 69
    elif padding != "none":
        valid[1, :30] = False
        valid = valid if padding == "left" else valid.flip(1)
    given = valid if padding in ("left", "right") else None
    with torch.no_grad():
        got = gate(hidden, given, left_padded=padding == "left", first=first)
        want = plain_gate(gate, hidden, valid, first)
        bound = conditioned(lambda x: plain_gate(gate, x, valid, first), hidden, dtype=torch.float64)
    bound += torch.finfo(torch.float32).eps * want.abs()  # the result is rounded to float32
    hold(*(x.where(valid[:, None], 0.0) for x in (got, want, bound)))


def test_gate_of_two_layers_sees_one_token_only():
    gate = KINDS["mlp"](12, 6, 2, small(kind="mlp", hidden=5))
    biases = [gate.inner.bias, gate.outer.bias]
    for bias in biases:
        assert not bias.any()
        torch.nn.init.normal_(bias)
    for parameter in gate.inner.weight, gate.outer.weight:  # Xavier's rule: each weight has its own bound
        bound = (6 / sum(parameter.shape)) ** 0.5
        assert bound / 2 < parameter.abs().max() <= bound
    hidden = torch.randn(2, 7, 12)

    def formula(hidden, inside, inside_bias, outside, outside_bias):
        inner = hidden @ inside.T + inside_bias
        inner = inner * 0.5 * (1 + torch.erf(inner / 2**0.5))
        return (inner @ outside.T + outside_bias).view(2, 7, 2, 3).amax(-1).mT

    operands = hidden, gate.inner.weight, biases[0], gate.outer.weight, biases[1]
    hold(gate(hidden), formula(*(x.double() for x in operands)), conditioned(formula, *operands))
    assert torch.equal(gate(hidden, torch.zeros(2, 7, dtype=torch.bool), True), gate(hidden))


def test_flag_is_a_strict_inequality_and_ste_has_the_sigmoid_slope():
    gates = ag.AttentionGates(TINY, small(bias=0.0))
    logits = torch.tensor([-1.0, 0.0, 1.0], requires_grad=True)
    assert gates.flags(logits).tolist() == [False, False, True]
    keep = gates.keep(logits)
    assert keep.tolist() == [0.0, 0.0, 1.0]
    keep.sum().backward()
    slope = lambda x: x.sigmoid() * (1 - x.sigmoid())  # noqa: E731
    hold(logits.grad, slope(logits.double()), conditioned(slope, logits))


def test_flags_in_training_are_those_of_inference():
    """Also where the sigmoid of a logit above the boundary rounds to the threshold."""
    gates = ag.AttentionGates(TINY, small(threshold=0.999999, bias=0.0))
    logits = torch.linspace(gates.config.boundary - 0.2, gates.config.boundary + 0.2, 10_001)
    assert torch.equal(gates.keep(logits).detach() > 0.5, gates.flags(logits))


def test_soft_estimator_is_noisy_in_training_and_hard_outside():
    torch.manual_seed(0)
    config = small(bias=0.7, estimator="soft")
    gates = ag.AttentionGates(TINY, config)
    logits = torch.full((20_000,), -0.3)
    samples = gates.train().keep(logits)
    # sigmoid(logit + logistic noise) > 1/2 has the probability sigmoid(logit)
    assert abs((samples > 0.5).float().mean() - torch.sigmoid(torch.tensor(0.4))) < 0.01
    assert 0 < samples.min() < samples.max() < 1
    assert gates.eval().keep(logits).unique().tolist() == [1.0]


def test_previous_layer_variants_leave_the_first_layers_open():
    assert ag.AttentionGates(TINY, small(layer_offset=1, first_layer=2)).layer_indices == [2, 3]
    with refuses(ValueError, "first_layer=4", "at most 3"):
        ag.AttentionGates(TINY, small(first_layer=4))

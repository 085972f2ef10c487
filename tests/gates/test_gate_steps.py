"""Gates that read a text piece by piece against the same gates reading it whole."""

import pytest
import torch
from torch import nn

import ag
from ag.errors import UserError
from ag.gates.gate import KINDS, AttentionGate
from ag.gates.memory import GateMemory
from tests.support.bounds import conditioned, hold

WIDTH, HEADS = 12, 4
GATES = {
    "attention": {},
    "window": {"window": 5, "shortcut": True},
    "window-1": {"window": 1},
    "query-heads": {"window": 70, "granularity": "query_head"},
    "mlp": {"kind": "mlp", "hidden": 6},
    "fast_kvzip": {"kind": "fast_kvzip", "granularity": "query_head", "hidden": 3},
}
PIECES = {"ones": [1] * 40, "turns": [7, 1, 1, 6, 2, 1, 12, 1, 9]}


def gate_for(name):
    torch.manual_seed(0)
    config = ag.GateConfig(**{"num_heads": 2, "head_dim": 8} | GATES[name])
    return KINDS[config.kind](WIDTH, HEADS if config.granularity == "query_head" else 2, 2, config)


def text(padded, gaps_from=11):
    """Hidden states of 3 rows, their ranks, and where they exist: padded on the left, and with gaps later on."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(3, 40, WIDTH, generator=generator)
    real = torch.ones(3, 40, dtype=torch.bool)
    if padded:
        real = torch.arange(40) >= torch.tensor([[0], [3], [6]])
        real[:, gaps_from:] = torch.rand(3, 40 - gaps_from, generator=generator) > 0.3
    return hidden, real.cumsum(1) - 1, real


def alone(gate, hidden, real):
    """Logits ``[B, Hkv, T]`` of each row's own tokens read whole and alone, 0 elsewhere."""
    out = torch.zeros(len(hidden), 2, hidden.shape[1])
    for b, mask in enumerate(real):
        out[b, :, mask] = gate(hidden[b : b + 1, mask])[0]
    return out


def read(gate, memory, hidden, ranks, real, padded):
    return gate.step(hidden, ranks, real if padded else None, memory)


def agree(got, want, gate, hidden, real, order=slice(None)):
    """Hold the logits of the last tokens to those of the text read at once, by what its roundings do to them."""
    last = slice(hidden.shape[1] - got.shape[2], None)
    bound = 2 * conditioned(lambda x: alone(gate, x, real), hidden)[order, :, last]  # of two that round apart
    hold(*(x.masked_fill(~real[order, None, last], 0.0) for x in (got, want, bound)))


def largest(gate, memory):
    """The most tokens that the memory has room for."""
    return 0 if memory.stored is None else memory.stored[1].shape[1]


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("name", GATES)
def test_pieces_equal_the_whole(name, pieces, padded):
    gate, (hidden, ranks, real) = gate_for(name), text(padded)
    want = alone(gate, hidden, real)
    memory, got, at = GateMemory(gate.config.window), [], 0
    for size in PIECES[pieces]:
        part = slice(at, at + size)
        got.append(read(gate, memory, hidden[:, part], ranks[:, part], real[:, part], padded))
        at += size
        if gate.config.window and size == 1:
            assert largest(gate, memory) <= gate.config.window
            assert memory.new is None
    agree(torch.cat(got, 2), want, gate, hidden, real)
    memory.settle()
    held = largest(gate, memory)
    assert memory.nbytes == 3 * held * 2 * 2 * 8 * 4
    assert held == (0 if gate.config.kind != "attention" else min(held, gate.config.window or held))


@torch.no_grad()
@pytest.mark.parametrize(("name", "wrong", "taken"), [("attention", 9, 4), ("window", 9, 9), ("window-1", 1, 1)])
def test_a_pass_can_be_taken_back(name, wrong, taken):
    """A wrong draft of ``wrong`` tokens, of which the last ``taken`` go, among rows of different lengths."""
    gate, (hidden, ranks, real) = gate_for(name), text(True)
    want = alone(gate, hidden, real)
    memory, stays = GateMemory(gate.config.window), 20 + wrong - taken
    for start, stop in [(0, 11), (11, 15), *((t, t + 1) for t in range(15, 20))]:
        read(gate, memory, hidden[:, start:stop], ranks[:, start:stop], real[:, start:stop], True)
    draft = hidden.clone()
    draft[:, stays:] = 7.0
    part = slice(20, 20 + wrong)
    read(gate, memory, draft[:, part], ranks[:, part], real[:, part], True)
    memory.crop(real[:, :stays].sum(1))
    got = [
        read(gate, memory, hidden[:, part], ranks[:, part], real[:, part], True)
        for part in (slice(stays, stays + 1), slice(stays + 1, None))
    ]
    agree(torch.cat(got, 2), want[:, :, stays:], gate, hidden, real)


@torch.no_grad()
@pytest.mark.parametrize("name", ["attention", "window"])
def test_sequences_of_one_length_lose_different_numbers_of_tokens(name):
    gate, (hidden, ranks, real) = gate_for(name), text(False)
    memory, counts = GateMemory(gate.config.window), torch.tensor([10, 12, 11])
    stayed = (ranks[:, :13] < counts[:, None]) | (ranks[:, :13] == 12)
    for part in (slice(0, 9), slice(9, 12)):
        read(gate, memory, hidden[:, part], ranks[:, part], real[:, part], False)
    memory.crop(counts)
    got = read(gate, memory, hidden[:, 12:13], counts[:, None], real[:, 12:13], False)
    agree(got, alone(gate, hidden[:, :13], stayed)[:, :, -1:], gate, hidden[:, :13], stayed)


@torch.no_grad()
def test_sequences_change_places():
    gate, (hidden, ranks, real) = gate_for("window"), text(True)
    memory, order = GateMemory(5), torch.tensor([2, 0, 0, 1])
    read(gate, memory, hidden[:, :9], ranks[:, :9], real[:, :9], True)
    read(gate, memory, hidden[:, 9:10], ranks[:, 9:10], real[:, 9:10], True)
    memory.select(order)
    got = read(gate, memory, hidden[order, 10:], ranks[order, 10:], real[order, 10:], True)
    want = alone(gate, hidden, real)[order, :, 10:]
    agree(got, want, gate, hidden, real, order)


def test_a_kind_without_a_step():
    class Own(AttentionGate):
        def build(self, hidden_size, heads):
            self.linear = nn.Linear(hidden_size, heads, bias=False)

        def mix(self, hidden, valid, left_padded, first):
            return self.linear(hidden)

    gate = Own(WIDTH, 2, 2, ag.GateConfig())
    hidden, ranks, _ = text(False)
    with pytest.raises(UserError, match="Own defines mix.*TokenGate.*gate.covers=prompt"):
        gate.step(hidden, ranks, None, GateMemory(0))

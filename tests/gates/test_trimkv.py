"""Checkpoints of TRIM-KV, of random weights: scores and kept entries are those of its formula, written out here.

The formula is written from the paper and from what the authors' code computes, in float64.
"""

import pytest
import torch

import ag
from ag.config.schema import Config
from ag.errors import UserError
from ag.run import fit
from tests.support import by_hand
from tests.support.bounds import hold, of_logits
from tests.support.foreign import CLOSE, EXACT, HEADS, LAYERS, inputs, tokens, trimkv
from tests.support.refused import refuses

MEMORY, BUFFER, NEW = 16, 6, 15


@pytest.fixture
def model(tiny_llama):
    return tiny_llama()


def log_retention(state, layer, x):
    """Return ``[Hkv, T]``, the log of what is left after each token, of inputs of attention ``[T, d]``."""
    gate = {name.split("retention_gate.")[1]: y for name, y in state.items() if f"layers.{layer}." in name}
    inner = x @ gate["linear1.weight"].T + gate["linear1.bias"]
    logits = (inner / (1 + (-inner).exp())) @ gate["linear2.weight"].T + gate["bias"]
    return -(1 + (-logits).exp()).log().T


def test_scores(model, tmp_path):
    state, ids = trimkv(tmp_path / "trim", torch.bfloat16), tokens(60)
    gates = ag.AttentionGates.from_pretrained(tmp_path / "trim", model.config)
    seen = inputs(model, ids)
    ag.attach(model, gates)
    gating = ag.Gating(gates, torch.ones_like(ids), torch.tensor([60]), open=True)
    with torch.no_grad():
        model(ids, gating=gating, use_cache=False)
    for layer in range(LAYERS):
        found, expected = gates.stored(gating.logits[layer][0]), log_retention(state, layer, seen[layer])
        assert expected.std() > 0.1
        torch.testing.assert_close(found.to(EXACT), expected, rtol=CLOSE, atol=CLOSE)


def simulated(model, state, ids, prompt):
    """Return the logits ``[T, V]``, and by layer what each head holds after the prompt and after each token.

    As the authors' cache does: at the end of a pass, ``MEMORY + BUFFER`` held tokens shrink to the ``MEMORY`` with the
    highest ``(seen + 1 - position) log b``.
    """
    length, history = ids.shape[1], {}

    def visible(layer, hidden):
        scores = log_retention(state, layer, hidden.to(EXACT))
        mask = torch.zeros(HEADS, length, length, dtype=torch.bool)
        history[layer] = []
        held = [[] for _ in range(HEADS)]
        for seen in range(prompt, length + 1):
            new = range(prompt) if seen == prompt else range(seen - 1, seen)
            for head, row in enumerate(held):
                for query in new:
                    mask[head, query, [*row, *(t for t in new if t <= query)]] = True
                row += new
                if len(row) >= MEMORY + BUFFER:
                    score = torch.tensor([(seen + 1 - t) * scores[head, t] for t in row])
                    best = score.sort(descending=True).values
                    assert best[MEMORY - 1] - best[MEMORY] > 1e-6  # rounding decides nothing
                    row[:] = [row[i] for i in sorted(score.topk(MEMORY).indices.tolist())]
            history[layer].append([[*row] for row in held])
        return mask

    return by_hand.masked(model, ids[0], visible), history


def test_what_stays(model, tmp_path):
    prompt = MEMORY + BUFFER + 4
    state, ids = trimkv(tmp_path / "trim"), tokens(prompt + NEW)
    expected, history = simulated(model, state, ids, prompt)
    cache = ag.EvictionCache(model, f"gates:{tmp_path / 'trim'}@uniform", MEMORY, f"steps:{BUFFER}")
    for step, seen in enumerate(range(prompt, prompt + NEW + 1)):
        with torch.no_grad():
            out = model(ids[:, :prompt] if seen == prompt else ids[:, seen - 1 : seen], past_key_values=cache)
        hold(out.logits[0, -1], expected[seen - 1], of_logits(model, ids[0]))
        for layer, steps in history.items():
            found = [sorted(kept.tolist()) for kept in cache.kept_positions(layer)[0]]
            assert found == steps[step], (seen, layer)
    assert len(steps[-1][0]) < prompt + NEW  # something went


def test_nearly_all_is_left_of_a_token(model):
    """A share that float32 rounds to 1 has the log that it has: 1 - 1e-9 after each token."""
    config = ag.GateConfig(kind="retention", hidden=4, bias=0.0)
    gates = ag.AttentionGates(model.config, config)
    logits = torch.tensor([20.0, 12.0, 0.0])
    expected = -(1 + (-logits.double()).exp()).log()
    torch.testing.assert_close(gates.stored(logits).double(), expected, rtol=1e-6, atol=0.0)


def test_there_are_no_flags(model, tmp_path):
    """Without a budget nothing says when a token goes, and there is nothing to train under."""
    trimkv(tmp_path / "trim")
    for spec in ("gates", "flags"):
        with refuses(UserError, "gate.kind=retention", "budget"):
            ag.policy(f"{spec}:{tmp_path / 'trim'}")
    gates = ag.AttentionGates.from_pretrained(tmp_path / "trim", model.config)
    gates.save_pretrained(tmp_path / "export")
    card = (tmp_path / "export" / "README.md").read_text()
    assert 'cache = ag.EvictionCache(model, "gates:PATH", budget=0.3)\n' in card and "gates=PATH budget=0.3 " in card
    for use in (gates.flags, gates.keep):
        with refuses(UserError, "gate.kind=retention", "budget"):
            use(torch.zeros(1))
    config = Config()
    config.gate.kind = "retention"
    with refuses(UserError, "gate.kind=retention", "gate.kind=mlp"):
        fit(config)

"""The flags of replay are the tokens that the engine keeps of a prompt under a budget."""

import pytest
import torch

import ag
from ag.config import Config, LossConfig
from ag.training.module import GatedLM
from tests.support.gates_for import gates_for

CONTEXT = 40
PROTECTED = {"sink_tokens": 2, "recent_tokens": 6}


def in_steps(logits):
    """Logits in steps of 1/4, so that many are equal."""
    return (logits * 4).round() / 4


def large(logits):
    """Different logits whose sigmoids are 1 in float32, more than the largest budget."""
    return 25 + logits


CASES = {
    "plain": ("tiny_llama", {}, None),
    "unprotected": ("tiny_llama", {"sink_tokens": 0, "recent_tokens": 1}, None),
    "ties": ("tiny_llama", {}, in_steps),
    "one_value": ("tiny_llama", {}, torch.zeros_like),
    "large": ("tiny_llama", {}, large),
    "biased": ("tiny_llama", {"bias": -3.0}, large),
    "first_layer": ("tiny_llama", {"first_layer": 1}, None),
    "previous_layer": ("tiny_llama", {"first_layer": 2, "layer_offset": 1}, in_steps),
    "windows": ("tiny_mistral", {}, None),
    "windows_and_ties": ("tiny_mistral", {"first_layer": 1}, in_steps),
    "wide_windows": ("tiny_mistral", {"recent_tokens": 12, "sink_tokens": 8}, None),
    "some_windows": ("tiny_gemma3", {}, in_steps),
    "some_windows_and_ungated": ("tiny_gemma3", {"first_layer": 2}, None),
}


@pytest.mark.filterwarnings("ignore::ag.BudgetWarning")
@pytest.mark.parametrize("share", [1.0, 0.7, 0.3, 0.1])
@pytest.mark.parametrize("case", CASES)
def test_flags_are_what_the_engine_keeps(request, case, share):
    family, options, changed = CASES[case]
    model = request.getfixturevalue(family)(num_hidden_layers=4).requires_grad_(False)
    gates = gates_for(model, seed=len(case), kind="mlp", hidden=8, **PROTECTED | options)
    if changed is not None:
        for gate in gates.layers.values():
            gate.register_forward_hook(lambda gate, given, logits: changed(logits))
    loss = GatedLM(Config(train="gates", loss=LossConfig(objective="kl", replay=True, share_high=1.0)), model, gates)
    replay = loss.gated_loss
    ids = torch.randint(3, 128, (1, CONTEXT), generator=torch.Generator().manual_seed(len(case)))
    ag.attach(model, gates)
    cache = ag.EvictionCache(model, ag.policy("gates", share))
    with torch.no_grad():
        model(ids, past_key_values=cache)
        flags = replay.keep_flags(replay.gate_logits(replay.prompt_store.read(ids[0])), share)
    assert len(flags) == len(gates.layer_indices)
    window = getattr(model.config, "sliding_window", None) if family == "tiny_mistral" else None
    total = 0
    for layer, found in zip(gates.layer_indices, flags, strict=True):
        for row, kept in zip(found, cache.kept_positions(layer)[0], strict=True):
            seen = row.clone()
            if window is not None:
                seen[: max(CONTEXT - window + 1, 0)] = 0  # a later query sees none of these
                kept = kept[kept > CONTEXT - window]
            assert seen.nonzero()[:, 0].tolist() == kept.tolist(), (layer, share)
            total += int(row.sum())
    heads = gates.fingerprint["num_kv_heads"]
    if window is None:
        assert total == max(int(share * CONTEXT), 1) * heads * len(flags)
    if family == "tiny_llama":
        for layer in {*range(4)} - {*gates.layer_indices}:
            assert [len(kept) for kept in cache.kept_positions(layer)[0]] == [CONTEXT] * heads

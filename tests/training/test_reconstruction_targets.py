"""Targets from a reread: KVzip's scores of the engine, against the scorer itself and a reread written out."""

import pytest
import torch

import ag
from ag.training.reconstruction_targets import ReconstructionTargets
from tests.engine.test_kvzip import in_float64
from tests.support.batches import padded
from tests.support.bounds import hold

SINKS = 2
LENGTHS = (16, 9)


def rows():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(12, 128, (length,), generator=generator) for length in LENGTHS]


def reconstruction_targets(model, gates, batch):
    """Run the gates on a batch, and let the model repeat it."""
    targets = ReconstructionTargets(model, gates, batch["attention_mask"])
    with torch.no_grad():
        model(input_ids=batch["input_ids"], gating=targets, use_cache=False)
    return targets


def model_and_gates(tiny_llama, **options):
    torch.manual_seed(4)
    model = tiny_llama()
    gates = ag.AttentionGates(
        model.config, ag.GateConfig(kind="mlp", hidden=8, scope="causal", sink_tokens=SINKS, recent_tokens=3, **options)
    )
    ag.attach(model, gates)
    return model, gates


@pytest.mark.slow
def test_targets_are_the_scores_of_a_reconstruction(tiny_llama):
    model, gates = model_and_gates(tiny_llama, first_layer=1)
    observed = reconstruction_targets(model, gates, padded(rows(), "left"))
    assert sorted(observed.targets) == [1, 2]
    for b, row in enumerate(rows()):
        first = max(LENGTHS) - len(row)
        wanted, bound = in_float64(model, row.tolist(), sinks=SINKS, chunk=2000)
        for layer, target in observed.targets.items():
            scores = target[b, :, first : first + len(row)].exp()[:, SINKS:]
            hold(scores, wanted[layer][:, SINKS:], bound)
        mask = observed.has_target()[b]
        assert mask.nonzero().flatten().tolist() == list(range(first + SINKS, first + len(row)))


def test_the_row_is_read_densely_and_gates_alone_learn(tiny_llama):
    """Logits and hidden states are those of a plain pass; a loss reaches every gate and nothing of the model."""
    model, gates = model_and_gates(tiny_llama)
    batch = padded(rows(), "right")
    observed = ReconstructionTargets(model, gates, batch["attention_mask"])
    with torch.no_grad():
        states = model.model(input_ids=batch["input_ids"], gating=observed, use_cache=False).last_hidden_state
        plain = model.model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state
    assert torch.equal(states[0], plain[0])
    sum(x.square().sum() for x in observed.logits.values()).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in gates.layers["2"].parameters())
    assert all(p.grad is None for p in model.parameters())

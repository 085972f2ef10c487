import warnings
from types import SimpleNamespace

import pytest
import torch

from ag.callbacks.guards import GateCollapse
from ag.config.loss import DrawnShareConfig, MeanGateConfig


def run(shares, batches=3, log_every=1, loss=None):
    """Feed the callback one tensor of evicted shares a batch; returns the step and text of each warning."""
    callback, found = GateCollapse(batches, log_every), []
    for step, share in enumerate(shares, start=1):
        module = SimpleNamespace(
            evicted_in_batch=None if share is None else torch.tensor(share),
            gates=SimpleNamespace(layer_indices=[2, 3]),
            config=SimpleNamespace(loss=loss or MeanGateConfig()),
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            callback.on_train_batch_end(SimpleNamespace(global_step=step), module, None, None, step)
        found += [(step, str(warning.message)) for warning in caught]
    return found


def test_layer_that_keeps_everything_and_one_that_evicts_everything():
    found = run([[0.0, 1.0]] * 5)
    assert [step for step, _ in found] == [3, 3]
    assert found[0][1].startswith("layer 2: its gates kept every token of the last 3 batches: lower loss.beta")
    assert found[1][1].startswith("layer 3: its gates evicted every token of the last 3 batches: raise loss.beta")


def test_gates_without_a_target_of_their_mean_are_not_told_to_change_it():
    for _, text in run([[0.0, 1.0]] * 3, loss=DrawnShareConfig(share_high=0.5)):
        assert "loss." not in text and "optim.gate_lr" in text


@pytest.mark.parametrize(
    ("shares", "options", "steps"),
    [
        ([[0.0, 0.5], [0.0, 0.5], [0.1, 0.5], [0.0, 0.5], [0.0, 0.5]], {}, []),  # not in a row
        ([[0.1, 0.5], *[[0.0, 0.5]] * 4], {}, [4]),
        ([[0.0, 1.0]] * 8, {"batches": 0}, []),  # never
        ([[0.0, 0.5]] * 8, {"log_every": 5}, [5]),  # counts are read at log steps only
        ([None] * 5, {}, []),  # without gates
    ],
)
def test_when_it_warns(shares, options, steps):
    assert [step for step, _ in run(shares, **options)] == steps

"""How much of the package a step that evicts runs through: what a reader has to follow."""

import sys
from pathlib import Path

import torch

import ag

ROOTS = [Path(ag.__file__).resolve().parent, Path(ag.__file__).resolve().parents[1] / "kernels"]


def test_a_step_with_h2o_runs_through_few_functions(tiny_llama):
    model, ids = tiny_llama(num_hidden_layers=2), torch.arange(3, 51)[None]
    cache = ag.EvictionCache(model, ag.policy("h2o", 0.5, schedule="every"))
    calls = []

    def trace(frame, event, _):
        path = Path(frame.f_code.co_filename)
        ours = event == "call" and any(root in path.parents for root in ROOTS)
        if ours and not frame.f_code.co_name.startswith("<"):  # comprehensions and lambdas are lines of a function
            calls.append((path.name if path.name != "__init__.py" else path.parent.name, frame.f_code.co_qualname))

    with torch.no_grad():
        model(ids, past_key_values=cache)
        for _ in range(3):  # what is made once is made
            model(ids[:, :1], past_key_values=cache)
        sys.setprofile(trace)
        try:
            model(ids[:, :1], past_key_values=cache)
        finally:
            sys.setprofile(None)
    assert len(cache.state.layers) == 2 and int(cache.state.stores[0].lengths_cpu.max()) == 24
    assert 20 < len({*calls}) <= 65
    assert len({file for file, _ in calls}) <= 20
    assert len(calls) <= 250

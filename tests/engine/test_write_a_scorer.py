"""The page docs/write_a_scorer.md, run."""

import re
from pathlib import Path

import torch

import ag
from ag.engine.scorers import SCORERS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "write_a_scorer.md"


def test_the_page_adds_a_scorer_in_a_few_lines(tiny_llama, monkeypatch):
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(block.splitlines()) < 30
    monkeypatch.setattr("ag.engine.scorers.SCORERS", SCORERS)
    known = dict(SCORERS)
    try:
        exec(compile(block, str(PAGE), "exec"), {"__name__": "page"})
        model = tiny_llama()
        ids = torch.randint(3, 128, (1, 40), generator=torch.Generator().manual_seed(0))
        full = ag.EvictionCache(model, "full")
        policy = ag.policy("value_norm", budget=10, power=2.0)
        assert repr(policy) == "ag.policy('value_norm', budget=10, power=2.0)"
        cache = ag.EvictionCache(model, policy)
        with torch.no_grad():
            model(ids, past_key_values=full)
            model(ids, past_key_values=cache)
        values = full.evicting_layers[0].store.padded().values
        for head in range(2):
            best = values[head].norm(dim=-1).topk(10).indices.sort().values
            assert cache.kept_positions(0)[0][head].tolist() == best.tolist()
        ag.EvictionCache(model, "value_norm+caote@heads", budget=10)
    finally:
        SCORERS.clear()
        SCORERS.update(known)

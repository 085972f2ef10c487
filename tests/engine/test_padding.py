"""Batches padded on their left: each row is continued, and keeps what it keeps, as alone."""

import pytest
import torch

import ag
from tests.support.batches import padded, row
from tests.support.bounds import hold, of_logits
from tests.support.gates_for import gates_for

LENGTHS = (30, 19, 24)
NEW = 4
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
POLICIES = [
    ("full", None, {}),
    ("gates", None, {}),
    ("gates", 8, {}),
    ("h2o", 8, {}),
    ("snapkv@preference", 8, {"window": 4}),
    ("tova", 0.3, {"schedule": "every"}),
    ("h2o+caote@heads", 8, {"schedule": "blocks:7+steps:2"}),
    ("streaming_llm", 8, {"schedule": "every", "positions": "slot"}),
]
IDS = [f"{spec}-{budget}" for spec, budget, _ in POLICIES]


def rows(lengths=LENGTHS, seed=0):
    return [row(n, n + seed) for n in lengths]


@pytest.fixture
def make(tiny_llama):
    model = tiny_llama()
    ag.attach(model, gates_for(model, scope="prompt", recent_tokens=2))
    return model, lambda spec, budget, options: ag.EvictionCache(model, spec, budget, **options)


def alone(model, cache, part, **options):
    ids = part[None]
    return model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **GREEDY, **options)[0]


def held(cache, layer, row):
    return [head.tolist() for head in cache.kept_positions(layer)[row]]


@pytest.mark.parametrize(("spec", "budget", "options"), POLICIES, ids=IDS)
def test_a_batch_generates_what_its_rows_do_alone(make, spec, budget, options):
    model, cache_of = make
    batch, together = padded(rows()), cache_of(spec, budget, options)
    text = model.generate(**batch, past_key_values=together, **GREEDY)
    mask = torch.cat([batch["attention_mask"], torch.ones(len(LENGTHS), NEW, dtype=torch.long)], 1)
    for b, part in enumerate(rows()):
        single = cache_of(spec, budget, options)
        expected = alone(model, single, part)
        assert text[b][mask[b].bool()].tolist() == expected.tolist()
        for layer in range(3):
            assert held(together, layer, b) == held(single, layer, 0)


def test_beams_and_a_second_turn(make):
    model, cache_of = make
    batch = padded(rows())
    text = model.generate(**batch, past_key_values=cache_of("h2o", 8, {}), num_beams=3, **GREEDY)
    for b, part in enumerate(rows()):
        assert text[b, -NEW:].tolist() == alone(model, cache_of("h2o", 8, {}), part, num_beams=3)[-NEW:].tolist()
    together = cache_of("h2o", 8, {})
    text = model.generate(**batch, past_key_values=together, **GREEDY)
    turns = padded(rows((9, 5, 7), seed=1))
    ids = torch.cat([text, turns["input_ids"]], 1)
    mask = torch.cat([batch["attention_mask"], torch.ones_like(text[:, :NEW]), turns["attention_mask"]], 1)
    second = model.generate(ids, attention_mask=mask, past_key_values=together, **GREEDY)
    for b, (part, turn) in enumerate(zip(rows(), rows((9, 5, 7), seed=1), strict=True)):
        single = cache_of("h2o", 8, {})
        first = alone(model, single, part)
        assert second[b, -NEW:].tolist() == alone(model, single, torch.cat([first, turn]))[-NEW:].tolist()


def test_by_hand_and_without_positions(make):
    """Later tokens stand behind the last token of each row."""
    model, cache_of = make
    batch, together = padded(rows()), cache_of("h2o", 8, {})
    new, mask = torch.stack(rows((3, 3, 3), seed=2)), torch.cat([batch["attention_mask"], torch.ones(3, 1)], 1)
    with torch.no_grad():
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
        last = model(**batch, position_ids=positions, past_key_values=together).logits[:, -1]
        given = batch["attention_mask"].sum(1, keepdim=True)
        then = model(new[:, :1], attention_mask=mask, position_ids=given, past_key_values=together).logits[:, -1]
        for b, part in enumerate(rows()):
            single = cache_of("h2o", 8, {})
            hold(model(part[None], past_key_values=single).logits[0, -1], last[b], of_logits(model))
            hold(model(new[b : b + 1, :1], past_key_values=single).logits[0, -1], then[b], of_logits(model))

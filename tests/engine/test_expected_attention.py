"""Expected attention against its definition in plain loops, and the identities of its closed form."""

import math
from types import SimpleNamespace

import pytest
import torch

import ag
from ag.engine.scorers import expected_attention
from ag.engine.scorers.expected_attention import ExpectedAttention
from ag.evaluate.inside import RecordedPass
from tests.support.attention_by_hand import Scene, agree, rotation
from tests.support.batches import padded, read, row
from tests.support.shapes import shaped

EPS = torch.finfo(torch.float32).eps
SCENES = {
    "one": {"lengths": (12,)},
    "right": {"lengths": (7, 14), "padding": "right"},
    "ragged": {"lengths": (16, 9), "ragged": True, "heads": 6},
    "window": {"lengths": (16,), "queries": 7},
}
OPTIONS = {
    "plain": {},
    "sinks": {"sinks": 2},
    "eps": {"eps": 0.02, "sinks": 1},
    "one place": {"future": 1, "sinks": 0},
    "short window": {"window": 3},  # the first decision reads all queries of the prompt
}


def by_hand(scene, b, g, sinks, future, eps=0.0, base=50.0):
    """The score of what a KV head holds, and the weights of its query heads, one token at a time in float64."""
    length, dim = scene.lengths[b], scene.q.shape[-1]
    turns = [rotation(length + t, dim, base) for t in range(future)]
    mean_turn = sum(turns) / future
    weights = []
    for h in scene.query_heads(g):
        plain = [
            rotation(token_index, dim, base).T @ scene.q[b, h, column]
            for column, token_index in scene.columns[b]
            if token_index >= sinks
        ]  # before RoPE
        mu = sum(plain) / len(plain)
        sigma = sum(torch.outer(x - mu, x - mu) for x in plain) / len(plain)
        ahead = mean_turn @ mu
        spread = mean_turn @ sigma @ mean_turn.T
        logits = {}
        for slot, p in enumerate(scene.held[b][g]):
            if p >= sinks:
                k = scene.k[b, g, slot]
                logits[slot] = scene.scaling * float(k @ ahead) + scene.scaling**2 / 2 * float(k @ spread @ k)
        total = sum(math.exp(x) for x in logits.values())
        weights.append({slot: math.exp(x) / total for slot, x in logits.items()})
    result = []
    for slot in range(len(scene.held[b][g])):
        score = sum(w.get(slot, 0.0) for w in weights) / len(weights) + eps
        result.append(score * float(scene.values(b, g)[slot].norm()))
    return result


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", SCENES.values(), ids=SCENES)
def test_equals_loops(shape, options):
    scene, options = Scene(seed=6, **shape), {"sinks": 0, "future": 5} | options
    shown = {name: value for name, value in options.items() if name != "window"}
    expected = {(b, g): by_hand(scene, b, g, **shown) for b, g in scene.places()}
    agree(scene, ExpectedAttention(**options), expected)


def test_what_stays_of_the_global_layers_of_gemma_3():
    """Scores turn back by the frequencies of the layer; local layers keep all."""
    model, row = shaped("gemma3"), torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(1))
    options = {"sinks": 2, "future": 6}
    reading = RecordedPass(model, row.tolist())
    cache = read(model, row, "expected_attention@uniform", 20, **options)
    assert [len(kept) for kept in cache.kept_positions(0)[0]] == [40, 40]
    base = model.config.rope_parameters["full_attention"]["rope_theta"]
    for layer in (1, 2):
        call = reading.calls[layer]
        scene = SimpleNamespace(
            lengths=(40,),
            q=call.q.double(),
            k=call.k.double(),
            scaling=call.scaling,
            held=[[range(40)] * 2],
            columns=[[(token, token) for token in range(40)]],
            query_heads=lambda g: range(2 * g, 2 * g + 2),
            values=lambda b, g, v=call.v: v[b, g].double(),
        )
        for g in range(2):
            score = torch.tensor(by_hand(scene, 0, g, base=base, **options), dtype=torch.float64)
            score[:2] = float("inf")
            order = score.sort(descending=True)
            assert order.values[19] - order.values[20] > 1e-5 * order.values[19]  # rounding decides nothing
            assert cache.kept_positions(layer)[0][g].tolist() == sorted(order.indices[:20].tolist())


def test_blocks_keep_the_same_in_chunks_and_in_a_batch(tiny_llama):
    """Statistics behind a first decision do not depend on how a prompt is cut."""
    model = tiny_llama()

    def kept(rows, chunk=None):
        """What stays of the last row."""
        cache = ag.EvictionCache(model, "expected_attention", 12, "blocks:8", window=4, future=4)
        model.generate(**padded(rows), past_key_values=cache, max_new_tokens=1, prefill_chunk_size=chunk)
        return [[heads.tolist() for heads in cache.kept_positions(layer)[-1]] for layer in range(3)]

    alone = kept([row(33, 2)])
    for chunk in (5, 8, None):
        for rows in ([row(33, 2)], [row(40, 1), row(33, 2)]):
            assert kept(rows, chunk) == alone


def test_the_constant_of_every_token_counts_under_caote(tiny_llama):
    """A value weighs even where no attention is expected."""
    model = tiny_llama()
    kept = [read(model, row(80), "expected_attention+caote", 12, eps=eps).kept_positions(1)[0] for eps in (0, 1)]
    assert any(not torch.equal(*heads) for heads in zip(*kept, strict=True))


def test_the_moments_of_a_prompt_in_one_pass_are_computed_once(tiny_llama, monkeypatch):
    calls, own = [], expected_attention.moments_of
    monkeypatch.setattr(expected_attention, "moments_of", lambda *given: calls.append(1) or own(*given))
    model = tiny_llama()
    read(model, row(40), "expected_attention", 12)
    assert len(calls) == len(model.model.layers)

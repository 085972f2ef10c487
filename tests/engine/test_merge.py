"""What goes leaves a trace: fitted values against least squares by hand, the same however the prompt came."""

import pytest
import torch

import ag
from ag.engine import merge
from ag.engine.attend import attend_rows
from ag.engine.merge import RIDGE, attended, fitted, references
from ag.engine.store import Rows
from ag.errors import UserError
from ag.evaluate.inside import Reading
from ag.kernels.softmax import Softmax
from ag.model.hooks import AttentionCall, rotate
from tests.support.refused import refuses
from tests.support.shapes import shaped

IDS = torch.randint(3, 128, (2, 40), generator=torch.Generator().manual_seed(1))
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}  # float64 beside a ridge of RIDGE, which bounds the condition


def drawn(rows, queries, tokens, kept):
    make = torch.Generator().manual_seed(queries)
    q, keys, values = (torch.randn(rows, n, 8, generator=make, dtype=torch.float64) for n in (queries, tokens, tokens))
    stays = torch.zeros(rows, tokens, dtype=torch.bool)
    for row, count in enumerate(kept):
        stays[row, torch.randperm(tokens, generator=make)[:count]] = True
    return q, keys, values, stays


def weights_by_hand(q, keys, scaling, cap=None, sinks=None):
    logits = torch.einsum("md,nd->mn", q, keys) * scaling
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    return logits.exp() / (logits.exp().sum(1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None]))


@pytest.mark.parametrize("cap", [None, 0.7], ids=["plain", "sinks-and-cap"])
@pytest.mark.parametrize(("queries", "kept"), [(30, [7, 12]), (6, [15, 20])], ids=["many queries", "few queries"])
def test_values_are_the_least_squares_of_what_is_wanted(queries, kept, cap, monkeypatch):
    monkeypatch.setattr(merge, "AT_ONCE", 1)  # row by row
    q, keys, values, stays = drawn(2, queries, 24, kept)
    valid = torch.ones(2, queries, dtype=torch.bool)
    valid[1, :2] = False
    sinks = None if cap is None else torch.linspace(-1, 3, 2 * queries, dtype=torch.float64).view(2, -1)
    softmax = Softmax(cap, sinks)
    wanted = attended(q, keys, values, torch.ones_like(stays), 0.4, softmax)
    new = fitted(q, wanted, valid, keys, values, stays, 0.4, softmax)
    for row in range(2):
        how = 0.4, cap, None if sinks is None else sinks[row]
        mine, known = stays[row], valid[row]
        outputs = weights_by_hand(q[row], keys[row], *how) @ values[row]
        torch.testing.assert_close(wanted[row], outputs, **TOLERANCE)
        weights = weights_by_hand(q[row], keys[row][mine], *how)[known]
        pull = (RIDGE * weights.square().sum() / mine.sum()).sqrt() * torch.eye(int(mine.sum()), dtype=torch.float64)
        right = torch.cat([outputs[known], pull @ values[row][mine]])
        by_hand = torch.linalg.lstsq(torch.cat([weights, pull]), right).solution
        torch.testing.assert_close(new[row][mine], by_hand, **TOLERANCE)
        assert torch.equal(new[row][~mine], values[row][~mine])


def test_references_are_spaced_evenly_and_end_with_the_prompt(monkeypatch):
    monkeypatch.setattr(merge, "REFERENCES", 4)
    ranks = torch.arange(10).expand(3, 10)
    chosen = references(ranks, torch.tensor([10, 4, 9]))
    assert [row.nonzero().flatten().tolist()[:4] for row in chosen] == [[0, 3, 6, 9], [0, 1, 2, 3], [2, 5, 8]]


@torch.no_grad()
def read(model, policy, ids=IDS, mask=None, parts=(40,)):
    cache, start = ag.EvictionCache(model, policy), 0
    if len(parts) > 1:
        cache.expect(torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool(), 0)
    for size in parts:
        seen = None if mask is None else mask[:, : start + size]
        model(ids[:, start : start + size], attention_mask=seen, past_key_values=cache)
        start += size
    return cache


def held(cache, layer):
    """Ranks, keys and values of each row."""
    rows = cache.layers[layer].store.padded()
    valid = torch.ones_like(rows.ranks, dtype=torch.bool) if rows.valid is None else rows.valid
    return [(r[m], k[m], v[m]) for r, k, v, m in zip(rows.ranks, rows.keys, rows.values, valid, strict=True)]


SPECS = ["snapkv", "h2o+caote@global", "kvzip", "tova@heads"]


@pytest.mark.parametrize("spec", SPECS)
def test_only_values_change_and_outputs_come_nearer(tiny_llama, spec, monkeypatch):
    """The same tokens stay; behind the prompt, references see what they would see of all of it, but for a part."""
    model, wanted = tiny_llama().double(), []
    options = {"window": 4} if spec == "snapkv" else {}
    monkeypatch.setattr("ag.engine.merge.fitted", lambda *given: wanted.append(given) or fitted(*given))
    plain, merged = (read(model, ag.policy(spec, 0.3, **options, **more)) for more in ({}, {"merge": "fit"}))
    assert len(wanted) == 3
    for layer, (q, outputs, valid, _, _, _, scaling, _) in enumerate(wanted):
        assert q.shape == (4, 2 * 40, 16) and bool(valid.all())
        whole = held(read(model, ag.policy("full")), layer)
        rows = zip(held(plain, layer), held(merged, layer), whole, q, outputs, strict=True)
        for (ranks, keys, before), (same, stored, after), (_, all_keys, all_values), queries, output in rows:
            assert torch.equal(ranks, same) and torch.equal(keys, stored)
            torch.testing.assert_close(weights_by_hand(queries, all_keys, scaling) @ all_values, output, **TOLERANCE)
            weights = weights_by_hand(queries, keys, scaling)
            errors = [(weights @ values - output).square().sum() for values in (before, after)]
            assert errors[1] < errors[0]


def test_references_are_the_prompts_queries_behind_its_end(tiny_llama, monkeypatch):
    """The query of token n turned to place T: that of a model which is told that it stands there."""
    model, seen = tiny_llama().double(), []
    monkeypatch.setattr("ag.engine.merge.fitted", lambda *given: seen.append(given[0]) or fitted(*given))
    read(model, ag.policy("knorm", 0.5, merge="fit"))
    attention = model.model.layers[0].self_attn
    states = model.model.layers[0].input_layernorm(model.model.embed_tokens(IDS))
    q = attention.q_proj(states).unflatten(-1, (4, 16)).transpose(1, 2)
    cos, sin = model.model.rotary_emb(q, torch.full((2, 40), 40))
    half = torch.cat([-q[..., 8:], q[..., :8]], -1)
    turned = q * cos[:, None] + half * sin[:, None]
    torch.testing.assert_close(seen[0].detach(), turned.reshape(4, 80, 16).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS)
def test_a_prompt_in_parts_and_with_padding(tiny_llama, spec):
    options = {"merge": "fit"} | ({"window": 4} if spec == "snapkv" else {})
    model, policy = tiny_llama().double(), ag.policy(spec, 0.3, **options)
    whole = read(model, policy)
    if spec != "kvzip":
        split = read(model, policy, parts=(17, 8, 15))
        same(whole, split)
    mask = torch.ones(2, 46, dtype=torch.long)
    mask[0, :6] = 0
    padded = torch.cat([torch.zeros(1, 6, dtype=torch.long), IDS[:1]], 1), torch.cat([IDS[1:], IDS[1:, :6]], 1)
    batch = read(model, policy, torch.cat(padded), mask, (46,))
    alone = read(model, policy, IDS[:1])
    for layer in range(3):
        for mine, other in zip(held(alone, layer), held(batch, layer)[:2], strict=True):
            assert torch.equal(mine[0], other[0])
            torch.testing.assert_close(mine[2], other[2], rtol=1e-5, atol=1e-5)


def same(one, other):
    for layer in range(3):
        for mine, theirs in zip(held(one, layer), held(other, layer), strict=True):
            for x, y in zip(mine, theirs, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_fitted_values_are_written_in_codes(tiny_llama, kv_dtype):
    model = tiny_llama()
    options = {"merge": "fit", "kv_dtype": kv_dtype}
    fits, codes = [], read(model, ag.policy("knorm", 0.5, **options))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ag.engine.merge.fitted", lambda *given: fits.append(fitted(*given)) or fits[-1])
        read(model, ag.policy("knorm", 0.5, **options))
    for layer, values in enumerate(fits):
        of = codes.layers[layer].store.pool.format.values
        for (_, _, mine), given in zip(held(codes, layer), values, strict=True):
            exact = (mine == given).all(-1)  # int4: the newest and first tokens, as they were fitted
            assert torch.equal(mine[~exact], of.decode(of.encode(given))[~exact])
            assert bool(exact.any()) == (kv_dtype == "int4")


def test_copies_keep_what_they_hold(tiny_llama):
    """Of two sequences that share pages one is read on and merged; the other's values do not change."""
    model, policy = tiny_llama(), ag.policy("knorm", 0.5, merge="fit")
    one, two = ag.engine.prompt.read_prompt(model, [policy, ag.policy("knorm", 0.5)], IDS)
    same(one[0], read(model, policy))
    same(two[0], read(model, ag.policy("knorm", 0.5)))


def test_nothing_is_fitted_where_nothing_goes(tiny_llama, monkeypatch):
    monkeypatch.setattr("ag.engine.merge.fitted", lambda *given: pytest.fail("fitted"))
    same(read(tiny_llama(), ag.policy("knorm", 1.0, merge="fit")), read(tiny_llama(), ag.policy("full")))


@pytest.mark.parametrize(
    ("spec", "given", "words"),
    [
        ("knorm", {"budget": 0.5, "schedule": "blocks:8"}, ["blocks:8", "prefill, every or steps"]),
        ("knorm", {"budget": 0.5, "positions": "slot"}, ["positions='original'"]),
        ("knorm", {"budget": 0.5, "merge": "mean"}, ["merge='mean'", "none or fit"]),
        ("full", {}, ["merge", "nothing is evicted"]),
    ],
)
def test_what_is_refused(spec, given, words):
    with refuses(UserError, *words):
        ag.policy(spec, **{"merge": "fit"} | given)


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2", "gemma3"])
def test_a_model_with_another_softmax_or_several_ropes(name, monkeypatch):
    """Behind a prompt of which nothing goes, references see what the next query would: its own outputs."""
    model, seen = shaped(name), []
    fit = merge.attended
    monkeypatch.setattr("ag.engine.merge.attended", lambda *given: seen.append((given, fit(*given))) or seen[-1][1])
    read(model, ag.policy("h2o", 40, merge="fit"), IDS[:1])
    reading = Reading(model, IDS[0].tolist())
    layers = [layer for layer in range(3) if name != "gemma3" or layer > 0]
    assert len(seen) == len(layers)
    for layer, ((q, *_), out) in zip(layers, seen, strict=True):
        call = reading.calls[layer]
        at = q.view(2, 2, -1, q.shape[-1])[:, :, -1:].reshape(1, 4, 1, -1)  # of the last token, where it stands
        torch.testing.assert_close(
            at, rotate(model.get_decoder(), call.q[:, :, -1:], torch.tensor([[[1]]]), layer=layer)
        )
        alone = AttentionCall(call.module, layer, at, call.k, call.v, call.scaling, None, call.softmax)
        kept = Rows(call.k[0], call.v[0], torch.arange(40).expand(2, -1), None, None)
        wanted = attend_rows(alone, kept, torch.tensor([[40]]))
        torch.testing.assert_close(out.view(2, 2, -1, out.shape[-1])[:, :, -1].reshape(wanted.shape), wanted)

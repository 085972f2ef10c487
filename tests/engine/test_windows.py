"""Sliding windows: what no later query sees leaves memory under every policy, and counts for nothing before."""

import copy
from contextlib import suppress

import pytest
import torch
from transformers import DynamicCache

import ag
from ag.errors import UserError
from tests.support.batches import columns, padded, read, row, step
from tests.support.bounds import hold, of_logits
from tests.support.gates_for import gates_for
from tests.support.refused import refuses

WINDOW, PROMPT, NEW = 24, 70, 20
POLICIES = [
    ("full",),
    ("h2o@heads", 16, "blocks:16+steps:3"),
    ("snapkv", 12, "prefill"),
]


def text(length=PROMPT + NEW, seed=0):
    return row(length, seed)[None]


def with_window(request, family):
    """A model all of whose layers have a window, or the first and the last of three."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    more = {"num_hidden_layers": 3, "layer_types": kinds} if family == "tiny_gemma3" else {}
    return request.getfixturevalue(family)(sliding_window=WINDOW, **more)


@torch.no_grad()
def decode(model, cache, ids, prompt=PROMPT):
    """Logits of a prompt and of tokens one by one."""
    parts = ids.split([prompt, *[1] * (ids.shape[1] - prompt)], 1)
    return torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)


@pytest.mark.parametrize("family", ["tiny_mistral", "tiny_gemma3"])
@pytest.mark.filterwarnings("ignore::ag.errors.BudgetWarning")
@pytest.mark.parametrize("policy", POLICIES, ids=lambda x: "-".join(map(str, x)))
def test_windowed_layers_hold_what_the_newest_query_saw(request, family, policy):
    model = with_window(request, family)
    ids, cache, plain = text(), ag.EvictionCache(model, *policy), DynamicCache(config=model.config)
    decode(model, cache, ids)
    decode(model, plain, ids)
    newest, windowed = PROMPT + NEW - 1, [0, 1, 2] if family == "tiny_mistral" else [0, 2]
    for layer in windowed:
        for head in cache.kept_positions(layer)[0]:
            seen = set(range(newest - WINDOW + 1, newest + 1))
            assert set(head.tolist()) <= seen
            if policy == ("full",) or family == "tiny_gemma3":
                assert set(head.tolist()) == seen
    plain_bytes = sum(x.nbytes for layer in plain.layers for x in (layer.keys, layer.values))
    assert cache.report().plain_nbytes == plain_bytes
    assert f"\n{cache.nbytes / plain_bytes:.1%} of the {plain_bytes:,} bytes of transformers" in str(cache.report())
    pages = sum(2 * (-(-layer.keys.shape[2] // 16) + 1) for layer in plain.layers)  # one a head aside
    assert cache.nbytes <= pages * 16 * (2 * 16 * 4 + 4)


@torch.no_grad()
@pytest.mark.parametrize(("spec", "options"), [("cake", {"window": 4}), ("knorm@global", {})])
def test_layers_that_compete_within_a_prompt_in_parts(tiny_mistral, spec, options):
    """A layer frees nothing before later layers have decided on it: sequences that end in earlier parts."""
    model, rows = tiny_mistral(sliding_window=WINDOW), [row(90), row(300)]
    batch = padded(rows, "right")
    together = ag.EvictionCache(model, spec, 8, **options)
    together.expect(batch["attention_mask"])
    for ids, end in zip(batch["input_ids"].split(100, 1), (100, 200, 300), strict=True):
        model(ids, attention_mask=batch["attention_mask"][:, :end], past_key_values=together)
    held = columns(together)
    for sequence, tokens in enumerate(rows):
        alone = columns(read(model, tokens, spec, 8, **options))
        assert [layer[sequence] for layer in held] == [layer[0] for layer in alone]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::ag.errors.BudgetWarning")
@pytest.mark.parametrize("spec", ["snapkv", "gates"])
def test_crop_within_a_pass_and_beyond(tiny_mistral, spec):
    model = tiny_mistral(sliding_window=WINDOW)
    ag.attach(model, gates_for(model, recent_tokens=4))
    ids, wrong = text(), text(seed=1)
    given = (spec, 20) if spec == "snapkv" else (spec,)
    cache, straight = ag.EvictionCache(model, *given), ag.EvictionCache(model, *given)
    for each in (cache, straight):
        model(ids[:, :PROMPT], past_key_values=each)
        model(ids[:, PROMPT : PROMPT + 1], past_key_values=each)
    model(torch.cat([ids[:, PROMPT + 1 : PROMPT + 3], wrong[:, :6]], 1), past_key_values=cache)  # a draft
    model(ids[:, PROMPT + 1 : PROMPT + 3], past_key_values=straight)
    cache.crop(-6)
    states = [columns(each) for each in (cache, straight)]
    assert states[0] == states[1]
    with refuses(UserError, "crop", f"first {PROMPT}"):
        copy.deepcopy(cache).crop(-4)  # a token that left the window with the prompt is wanted back
    for t in range(PROMPT + 3, PROMPT + NEW):
        one, other = (model(ids[:, t : t + 1], past_key_values=each).logits for each in (cache, straight))
        hold(one, other.double(), of_logits(model))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::ag.errors.BudgetWarning")
def test_a_draft_goes_from_a_row_that_an_eviction_of_another_one_changed(tiny_mistral):
    """What left the window goes from rows that are not due too, so that newest tokens need not lie last in them."""
    model, cropped = tiny_mistral(sliding_window=24), 0
    batch = padded([row(60), row(7)])
    cache = ag.EvictionCache(model, "knorm@heads", 12, "steps:30")
    step(model, cache, batch["input_ids"], batch["attention_mask"])

    def go_on(cache, ids):
        return step(model, cache, ids, torch.cat([cache.valid.long(), torch.ones_like(ids)], 1))[:, -1]

    for number in range(40):
        with_draft, without = copy.deepcopy(cache), copy.deepcopy(cache)
        go_on(with_draft, row(2, 300 + number)[:, None])
        try:
            with_draft.crop([0, 1])
        except UserError:  # the row was evicted from
            continue
        token = row(2, 200 + number)[:, None]
        hold(go_on(with_draft, token)[1], go_on(without, token)[1].double(), of_logits(model))
        cropped += 1
        go_on(cache, row(2, number)[:, None])
    assert cropped > 30


def test_newest_tokens_go_from_a_loaded_cache(tiny_mistral, tmp_path):
    """Where removed tokens have left their slots to newer ones, the last slots do not hold the newest ones."""
    model, moved = tiny_mistral(sliding_window=40), 0
    cache, ids = ag.EvictionCache(model, "full"), text(400)
    for end in range(30, 400, 30):
        with torch.no_grad():
            model(ids[:, end - 30 : end], past_key_values=cache)
        cache.save(tmp_path / "c")
        loaded, whole = ag.EvictionCache.load(tmp_path / "c", model), copy.deepcopy(cache)
        held = [token_index for token_index in cache.kept_positions(0)[0][0].tolist() if token_index < end - 20]
        with suppress(UserError):  # what the window of the token before has lost cannot come back
            whole.crop(-20)
            loaded.crop(-20)
            assert columns(loaded) == columns(whole) and columns(loaded)[0][0][0] == held
            moved += len(held) < end - 20
    assert moved > 3

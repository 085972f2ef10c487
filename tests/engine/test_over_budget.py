"""Where more is protected than the budget allows: it stays, and the cache, its report and a warning say so."""

import warnings

import pytest
import torch

import ag
from ag.errors import BudgetWarning
from tests.support.batches import columns, padded, read, row


@pytest.fixture
def model(tiny_llama):
    return tiny_llama()


def test_a_window_beyond_a_share_of_a_short_prompt(model):
    """0.4 of 61 tokens are 24, and the window has 32."""
    with pytest.warns(BudgetWarning, match="protects 32 tokens per KV head"):
        cache = read(model, row(61), "snapkv@heads", 0.4)
    for layer in range(3):
        assert [x.tolist() for x in cache.kept_positions(layer)[0]] == [list(range(29, 61))] * 2
    assert cache.kept_share() == 32 / 61
    assert cache.over_budget.tolist() == [True]
    assert str(cache.report()).splitlines()[-1].startswith("over budget in 1 sequence: ")
    cache.reset()
    assert cache.over_budget.tolist() == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = read(model, row(80), "snapkv@heads", 0.4)  # 32 tokens
    assert (cache.kept_share(), cache.over_budget.tolist()) == (32 / 80, [False])
    assert "over budget" not in str(cache.report())


def test_a_prompt_within_the_budget_may_grow_over_it(model):
    """12 tokens fit in 14; the seventeenth would go, were it not for the 16 of the window."""
    cache = ag.EvictionCache(model, "snapkv", 14, "every", window=16)
    told = []
    with torch.no_grad():
        for start, stop in ((0, 12), *((n, n + 1) for n in range(12, 18))):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model(row(20)[None, start:stop], past_key_values=cache)
                over = cache.over_budget.tolist()  # looks, which steps do rarely
            told.append((len(caught), over, cache.report().kept[0][0]))
    assert [held for *_, held in told] == [12, 13, 14, 15, 16, 16, 16]
    assert [over for _, over, _ in told] == [[False]] * 3 + [[True]] * 4
    assert [count for count, *_ in told] == [0, 0, 0, 1, 0, 0, 0]


def test_shares_of_all_tokens_and_of_the_prompt(model):
    """Prompts of 20 and 13 tokens, then 12 more: both shares from the tokens that are held."""
    batch = padded([row(20), row(13)])
    cache = ag.EvictionCache(model, "random@heads", 9, "steps:3")
    model.generate(**batch, past_key_values=cache, max_new_tokens=13, min_new_tokens=13, do_sample=False)
    assert cache.seen_tokens == 32  # the last one was not read
    held = [(place, x) for layer in columns(cache) for place, row in enumerate(layer) for head in row for x in head]
    newest = max(index for _, index in held)
    assert newest == 31 and any(20 <= index < 31 for _, index in held)  # token indices go on behind the prompt
    assert cache.kept_share() == pytest.approx(len(held) / (6 * (20 + 13 + 2 * 12)))
    of_prompts = sum(index < (20, 13)[place] for place, index in held)
    assert cache.kept_share(prompt=True) == pytest.approx(of_prompts / (6 * (20 + 13)))
    assert cache.report().tokens == 20 + 13 + 2 * 12


@torch.no_grad()
@pytest.mark.parametrize("first", [False, True])
def test_sequences_of_which_one_is_over_budget_are_joined(tiny_llama, first):
    model = tiny_llama()
    pool = ag.Pool(model, 2**22)
    caches = []
    for seed, over in enumerate([first, not first]):
        cache = ag.EvictionCache(model, ag.policy("tova", 8, "every"), pool=pool)
        if over:
            cache.protect([(0, 16)])
        model(torch.randint(3, 128, (1, 30), generator=torch.Generator().manual_seed(seed)), past_key_values=cache)
        caches.append(cache)
    both, other = caches
    both.add(other)
    assert both.over_budget.tolist() == [first, not first]
    model(torch.tensor([[5], [6]]), past_key_values=both)
    both.remove([0])
    assert both.over_budget.tolist() == [not first]

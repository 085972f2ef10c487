"""Drafts that are taken back: a cache that never saw them is its twin, in what it holds and when it evicts."""

import copy
import random

import pytest
import torch

import ag
from ag.errors import UserError
from tests.support import batches
from tests.support.batches import padded, row
from tests.support.bounds import hold, of_logits
from tests.support.gates_for import gates_for
from tests.support.refused import refuses

PROMPTS, PASSES = (21, 17), 34


@pytest.fixture(scope="module")
def llama(tiny_llama):
    return tiny_llama()


class Fed:
    """A cache, and the padding of what it was fed."""

    def __init__(self, model, policy, prompt, mask):
        self.model, self.cache, self.mask = model, ag.EvictionCache(model, policy), mask[:, :0]
        self.feed(prompt, mask)

    @torch.no_grad()
    def feed(self, ids, mask):
        self.mask = torch.cat([self.mask, mask], 1)
        positions = (self.mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        self.model(ids, attention_mask=self.mask, position_ids=positions, past_key_values=self.cache)

    def crop(self, columns):
        self.cache.crop(-columns)
        self.mask = self.mask[:, :-columns]

    def copied(self):
        new = copy.copy(self)
        new.cache = copy.deepcopy(self.cache)
        return new

    def held(self):
        return [[[x.tolist() for x in row] for row in self.cache.kept_positions(i)] for i in range(3)]


def drafted(fed, ids, mask, at_once):
    """A copy that was fed drafts, in one pass or one by one; None when something went."""
    before, trial = fed.held(), fed.copied()
    for columns in [slice(None)] if at_once else [slice(i, i + 1) for i in range(ids.shape[1])]:
        trial.feed(ids[:, columns], mask[:, columns])
    kept = zip(_flat(before), _flat(trial.held()), strict=True)
    return trial if all(set(old) <= set(new) for old, new in kept) else None


def _flat(held):
    return [head for layer in held for row in layer for head in row]


@pytest.mark.parametrize(
    ("name", "schedule", "side"),
    [
        pytest.param("random", "every", "left", marks=pytest.mark.slow),
        pytest.param("tova", "steps:4", "right", marks=pytest.mark.slow),
        pytest.param("random@heads", "steps:3", "left", marks=pytest.mark.slow),
        ("tova@pyramid", "blocks:7+steps:5", "right"),
        pytest.param("random@global", "steps:7", "left", marks=pytest.mark.slow),
    ],
)
def test_a_cache_whose_drafts_were_taken_back_equals_one_that_never_saw_them(llama, name, schedule, side):
    draw, n = random.Random(name + side), int(schedule.partition("steps:")[2] or 1)
    longest = max(PROMPTS)
    ids = torch.randint(3, 128, (2, longest), generator=torch.Generator().manual_seed(1))
    mask = torch.stack([torch.arange(longest) < p for p in PROMPTS]).long()
    mask = mask.flip(1) if side == "left" else mask
    policy = ag.policy(name, budget=52, schedule=schedule)
    cache, twin = (Fed(llama, policy, ids, mask) for _ in range(2))
    long, cut, moments = 0, 0, []
    for _ in range(PASSES):
        k, kept = draw.randrange(1, 2 * n + 3), draw.choice([0, 1, 1, 2, n])
        new = torch.tensor([[draw.randrange(3, 128) for _ in range(k)] for _ in range(2)])
        real = torch.ones_like(new)
        if draw.random() < 0.4:  # a sequence has fewer
            real[draw.randrange(2), draw.randrange(k) :] = 0
        at_once = draw.random() < 0.6
        trial = drafted(cache, new, real, at_once) if kept < k else None
        if trial is not None:
            cache = trial
            cache.crop(k - kept)
            long, cut = long + (k >= n), cut + (kept > 0)
            for columns in [slice(kept)] if at_once else [slice(i, i + 1) for i in range(kept)]:
                twin.feed(new[:, columns], real[:, columns]) if kept else None
            assert cache.held() == twin.held()
        before = twin.held()
        for fed in (cache, twin):
            fed.feed(new[:, -1:], torch.ones(2, 1, dtype=torch.long))
        assert cache.held() == twin.held()
        gone = [set(old) - set(now) for old, now in zip(_flat(before), _flat(twin.held()), strict=True)]
        moments.append(any(gone))
    assert long >= 3 and cut >= 3 and sum(moments) >= 2, (long, cut, moments)


@pytest.mark.parametrize(
    ("spec", "family"),
    [("full", "tiny_llama"), ("snapkv", "tiny_llama"), ("flags", "tiny_llama"), ("full", "tiny_mistral")],
)
@torch.no_grad()
def test_a_batch_accepts_unequal_numbers_of_drafts(request, spec, family):
    """Of each sequence some drafts are right, and the others are taken back: it goes on as it does alone."""
    model = request.getfixturevalue(family)()
    if spec == "flags":
        ag.attach(model, gates_for(model, recent_tokens=4, covers="all", scope="causal"))
    policy, pool = ag.policy(spec, 14 if spec == "snapkv" else None), ag.Pool(model, 2**22)
    prompts, answers = [row(n) for n in (20, 13, 17)], [row(40, seed) for seed in range(3)]
    batch, single = (ag.EvictionCache(model, policy, pool=pool) for _ in range(2))
    for prompt in prompts:
        model(prompt[None], past_key_values=single)
        batch.join(single)
    at, logits = [0, 0, 0], [[], [], []]
    for rounds in (
        [(2, 1), (0, 3), (1, 0)],
        [(0, 0), (3, 0), (0, 0)],
        [(0, 2), (1, 1), (0, 5)],
        [(4, 0), (0, 0), (2, 1)],
    ):
        coming = [
            torch.cat([answers[i][at[i] : at[i] + 1 + right], torch.full((wrong,), 99)])
            for i, (right, wrong) in enumerate(rounds)
        ]
        new = padded(coming)
        mask = torch.cat([batch.valid, new["attention_mask"].bool()], 1)
        out = model(new["input_ids"], attention_mask=mask, past_key_values=batch).logits
        batch.crop([wrong for _, wrong in rounds])
        for i, (right, wrong) in enumerate(rounds):
            at[i] += 1 + right
            logits[i].append(out[i, out.shape[1] - 1 - right - wrong : out.shape[1] - wrong])
        out = model(torch.stack([answers[i][at[i]] for i in range(3)])[:, None], past_key_values=batch).logits
        for i in range(3):
            at[i] += 1
            logits[i].append(out[i])
    for i in range(3):
        model(prompts[i][None], past_key_values=single)
        want = [model(token.view(1, 1), past_key_values=single).logits[0] for token in answers[i][: at[i]]]
        hold(torch.cat(logits[i]), torch.cat(want), of_logits(model))
        own = batch.valid[i].nonzero().flatten()
        places = {int(column): place for place, column in enumerate(own)}
        for layer, kept in enumerate(batches.columns(single)):
            assert [[places[c] for c in head] for head in batches.columns(batch)[layer][i]] == kept[0]
        single.reset()
    with refuses(UserError, "crop([1, 2])", "3 sequences"):
        batch.crop([1, 2])
    with refuses(UserError, "crop([0, 999, 0])"):
        batch.crop([0, 999, 0])

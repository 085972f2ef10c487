"""Drafts that are taken back, other numbers of each sequence."""

import pytest
import torch

import ag
from ag.errors import UserError
from tests.support import batches
from tests.support.batches import padded, row
from tests.support.bounds import hold, of_logits
from tests.support.gates_for import gates_for
from tests.support.refused import refuses


@pytest.mark.parametrize(
    ("spec", "family"),
    [("flags", "tiny_llama"), ("full", "tiny_mistral")],
)
@torch.no_grad()
def test_a_batch_accepts_unequal_numbers_of_drafts(request, spec, family):
    """Of each sequence some drafts are right, and the others are taken back: it goes on as it does alone."""
    model = request.getfixturevalue(family)()
    if spec == "flags":
        ag.attach(model, gates_for(model, recent_tokens=4, covers="all", scope="causal"))
    policy, pool = ag.policy(spec), ag.Pool(model, 2**22)
    prompts, answers = [row(n) for n in (20, 13, 17)], [row(40, seed) for seed in range(3)]
    batch, single = (ag.EvictionCache(model, policy, pool=pool) for _ in range(2))
    for prompt in prompts:
        model(prompt[None], past_key_values=single)
        batch.add(single)
    at, logits = [0, 0, 0], [[], [], []]
    for rounds in ([(2, 1), (0, 3), (1, 0)], [(0, 0), (3, 0), (0, 0)], [(0, 2), (1, 1), (0, 5)]):
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
        for layer, kept in enumerate(batches.columns(single)):
            assert batches.columns(batch)[layer][i] == kept[0]
        single.reset()
    with refuses(UserError, "crop([1, 2])", "3 sequences"):
        batch.crop([1, 2])


@torch.no_grad()
def test_drafts_go_where_tokens_beyond_the_window_went_before(tiny_mistral):
    """A window that is larger than what is freed at once: then the newest tokens no longer lie last."""
    model = tiny_mistral(sliding_window=100)
    prompt = row(30).repeat(4)[None]
    wanted = model(torch.cat([prompt, row(70, 1)[None]], 1)).logits[:, 120:]
    cache = ag.EvictionCache(model, "full")
    model(prompt, past_key_values=cache)
    found = []
    for at in range(0, 70, 2):
        right = row(70, 1)[at : at + 2]
        out = model(torch.cat([right, torch.tensor([99, 98, 97])])[None], past_key_values=cache).logits
        cache.crop(-3)
        found.append(out[:, :2])
    hold(torch.cat(found, 1), wanted, of_logits(model))

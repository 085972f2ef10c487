"""How far what follows is from a full cache's: divergence and equal likeliest tokens, by hand in float64."""

import pytest
import torch

import ag
from ag.evaluate.tasks import make
from ag.evaluate.tasks.perplexity import COMPARED
from tests.support.bounds import hold, of_logits, premise

TEXT = " ".join(f"the {a} {b} sleeps" for a in ("old", "grey", "small", "loud") for b in ("cat", "dog", "bird")) * 3


@torch.no_grad()
def by_hand(model, policy, prompt, following, step):
    """The logits before each token that follows, fed so many at once; the first is the prompt's last."""
    cache = ag.EvictionCache(model, policy)
    logits = [model(torch.tensor([prompt]), past_key_values=cache).logits[0, -1:]]
    for start in range(0, len(following), step):
        part = torch.tensor([following[start : start + step]])
        logits.append(model(part, past_key_values=cache).logits[0])
    return torch.cat(logits)[: len(following)].double()


def check(outcome, wanted, found, model):
    full, mine = (x.log_softmax(-1) for x in (wanted, found))
    kl = (full.exp() * (full - mine)).sum(-1).mean()
    # logits that are off by d move a log-probability by 2 d, and the divergence by that of its own terms and weights
    moved = 2 * of_logits(model) * (2 + float((full - mine).abs().max()))
    premise(float(kl) > 10 * moved, "the policy changes nothing")
    hold(outcome.tags["kl"], kl, moved)
    assert outcome.tags["same_top1"] == pytest.approx(float((full.argmax(-1) == mine.argmax(-1)).float().mean()))


@torch.no_grad()
def test_a_continuation(tiny_llama, tiny_tokenizer, write):
    model, policy = tiny_llama(), ag.policy("knorm", 8)
    task = make("ppl", write("corpus/test", [{"text": TEXT}]), prompt=40, continuation=20)
    [sample] = task.load(tiny_tokenizer, 1, 512).samples
    (_, full), (_, outcome) = task.run(model, tiny_tokenizer, [ag.policy("full"), policy], [sample])
    assert (full.tags["kl"], full.tags["same_top1"]) == (0.0, 1.0)
    logits = [by_hand(model, one, sample.prompt, sample.following, 20) for one in ("full", policy)]
    check(outcome, *logits, model)


@pytest.mark.slow
@torch.no_grad()
def test_a_stream(tiny_llama, tiny_tokenizer, write):
    """One token of 64, in passes of other sizes than the full cache's; none beyond the model's context."""
    model, policy = tiny_llama(), ag.policy("knorm", 8, "steps:5")
    task = make("ppl_stream", write("pg19_style/test", [{"text": TEXT}]), block=20, tokens=170, step=16)
    [book] = task.load(tiny_tokenizer, 1, 512).samples
    [(_, outcome)] = task.run(model, tiny_tokenizer, [policy], [book])
    full = by_hand(model, "full", book.prompt, book.following, 16)[::COMPARED]
    check(outcome, full, by_hand(model, policy, book.prompt, book.following, 5)[::COMPARED], model)
    short = tiny_llama(max_position_embeddings=100)
    [(_, outcome)] = task.run(short, tiny_tokenizer, [ag.policy("streaming_llm", 8, "every", positions="slot")], [book])
    assert "kl" not in outcome.tags

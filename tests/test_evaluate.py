"""Scores of responses after eviction, against ``by_hand`` forward passes."""

import io
import math
import statistics

import by_hand
import pytest
import torch
from gates_for import gates_for
from rich.console import Console

import ag
from ag.evaluate import Scores, score_responses
from ag.evaluate.__main__ import paired_difference, table

TOKEN = 2 * 16 * 4  # bytes of a key and a value of one head, float32
VARIANTS = {
    "causal": {},
    "prompt-recent": {"scope": "prompt", "recent_tokens": 4, "sink_tokens": 1},
    "dense": {"prefill": "dense", "recent_tokens": 2},
}


def batch(rows, seed, **more):
    """Right padded rows of (prompt, length), as the collator makes them."""
    longest = max(length for _, length in rows)
    ids = torch.randint(3, 128, (len(rows), longest), generator=torch.Generator().manual_seed(seed))
    columns, lengths = torch.arange(longest), torch.tensor([length for _, length in rows])[:, None]
    prompts = torch.tensor([prompt for prompt, _ in rows])
    valid = columns < lengths
    labels = ids.masked_fill(~(valid & (columns >= prompts[:, None])), -100)
    out = {"input_ids": ids.masked_fill(~valid, 0), "attention_mask": valid, "labels": labels, "prompt_length": prompts}
    return out | {name: torch.tensor(value) for name, value in more.items()}


def questions():
    rows = [(14, 17), (14, 21), (6, 9), (6, 7), (6, 11), (1, 1)]
    keys = {"question": [0, 0, 1, 1, 1, -1], "choice": [0, 1, 0, 1, 2, 0], "target": [1, 1, 0, 0, 0, -1]}
    return batch(rows, 4, **keys)


def by_hand_scores(model, gates, data):
    """Losses of each response's tokens, and the (token, head) pairs held and seen of each layer and row."""
    losses, held, seen = [], 0, 0
    for i, (length, prompt) in enumerate(zip(data["attention_mask"].sum(1), data["prompt_length"], strict=True)):
        tokens, prompt = data["input_ids"][i, :length], int(prompt)
        logits, flags = by_hand.forward(model, gates, tokens, prompt)
        losses.append(-logits[prompt - 1 : -1].log_softmax(-1).gather(1, tokens[prompt:, None])[:, 0])
        held += sum(len(head) for layer in flags.values() for head in by_hand.kept(gates, layer, prompt, prompt))
        seen += 3 * 2 * prompt
    return losses, held, seen


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_responses_are_scored_after_eviction(tiny_llama, variant):
    model = tiny_llama()
    gates = gates_for(model, **VARIANTS[variant])
    ag.attach(model, gates)
    batches = [batch([(24, 30), (9, 20), (17, 18)], 1), batch([(12, 13), (5, 9)], 2)]
    (scores,) = score_responses(model, batches, ["gates"])
    wanted = [by_hand_scores(model, gates, data) for data in batches]
    losses = [loss for part, _, _ in wanted for loss in part]
    assert scores.losses == pytest.approx([float(loss.mean()) for loss in losses], abs=1e-4)
    assert scores.tokens == [len(loss) for loss in losses] == [6, 11, 1, 1, 4]
    assert scores.kept == pytest.approx(sum(w[1] for w in wanted) / sum(w[2] for w in wanted))
    assert 0.2 < scores.kept < 0.95
    slots = sum(w[1] for w in wanted)
    rows = 3 * 2 * 5  # layers, heads, sequences: each has 16 free slots
    assert scores.kv_bytes == TOKEN * (slots + 16 * rows)
    assert scores.accuracy is None
    assert scores.loss == pytest.approx(statistics.fmean(float(loss.mean()) for loss in losses), abs=1e-4)
    assert scores.perplexity == pytest.approx(math.exp(float(torch.cat(losses).mean())), rel=1e-4)


def test_a_full_cache_is_the_plain_model(tiny_llama):
    model, data = tiny_llama(), batch([(24, 30), (9, 20), (17, 18)], 1)
    (scores,) = score_responses(model, [data], ["full"])
    with torch.no_grad():
        logits = model(data["input_ids"], attention_mask=data["attention_mask"].long()).logits
    for i, (prompt, length) in enumerate([(24, 30), (9, 20), (17, 18)]):
        nll = torch.nn.functional.cross_entropy(logits[i, prompt - 1 : length - 1], data["input_ids"][i, prompt:length])
        assert scores.losses[i] == pytest.approx(float(nll), abs=1e-5)
    assert scores.kept == 1.0
    assert scores.kv_bytes == TOKEN * 3 * 2 * (24 + 9 + 17 + 3 * 16)


@pytest.mark.parametrize("policy", ["full", "gates"])
def test_multiple_choice(tiny_llama, policy):
    """The right answer's loss counts; all answers compete; the padding row does neither."""
    model = tiny_llama()
    gates = gates_for(model, bias=1000.0 if policy == "full" else 0.0)
    ag.attach(model, gates)
    (scores,) = score_responses(
        model, [questions(), batch([(4, 6), (4, 6)], 9, question=[7, 7], choice=[0, 1], target=[0, 0])], [policy]
    )
    first, _, _ = by_hand_scores(model, gates, questions())
    second, _, _ = by_hand_scores(model, gates, batch([(4, 6), (4, 6)], 9))
    assert scores.losses == pytest.approx([float(x.mean()) for x in (first[1], first[2], second[0])], abs=1e-4)
    assert scores.tokens == [7, 3, 2]
    best = [
        min(range(n), key=lambda i: float(part[i].sum())) for part, n in ((first[:2], 2), (first[2:5], 3), (second, 2))
    ]
    assert scores.accuracy == pytest.approx(sum(b == t for b, t in zip(best, [1, 0, 0], strict=True)) / 3)


def test_windowed_model(tiny_mistral):
    model = tiny_mistral(sliding_window=6)
    gates = gates_for(model)
    ag.attach(model, gates)
    data = batch([(24, 30), (9, 20)], 1)
    losses, _, _ = by_hand_scores(model, gates, data)
    got = score_responses(model, [data], ["gates"])[0].losses
    assert got == pytest.approx([float(loss.mean()) for loss in losses], abs=1e-4)


def test_paired_difference():
    """Differences 0.1, 0.3, -0.1: mean 0.1, standard deviation 0.2, standard error 0.2 / sqrt(3)."""
    mine, theirs = Scores(losses=[1.1, 2.3, 2.9]), Scores(losses=[1.0, 2.0, 3.0])
    mean, error = paired_difference(mine, theirs)
    assert mean == pytest.approx(0.1)
    assert error == pytest.approx(0.2 / math.sqrt(3))
    mean, error = paired_difference(Scores(losses=[2.0]), Scores(losses=[1.5]))
    assert mean == 0.5
    assert math.isnan(error)
    with pytest.raises(ValueError, match="zip"):
        paired_difference(mine, Scores(losses=[1.0]))


def test_the_printed_table():
    full = Scores(losses=[1.0, 2.0, 3.0], tokens=[1, 1, 1], kv_bytes=12345, accuracy=0.5)
    gated = Scores(losses=[1.1, 2.3, 2.9], tokens=[1, 1, 1], kept=0.62, kv_bytes=2345)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table({"full cache": full, "gates": gated}))
    lines = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in console.export_text().splitlines() if "│" in line
    ]
    assert lines == [
        ["full cache", "2.0000", "", "50.0%", "0.0%", "12,345"],
        ["gates", "2.1000", "+0.1000 +- 0.1155", "", "38.0%", "2,345"],
    ]

"""Continuation losses computed without tasks and shared passes: one cache, one document at a time."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ag
from ag.engine.policy import Policy


def continuations(
    folder: Path, policy: str | Policy, budget: int | float | None, prompt: int, continuation: int
) -> tuple[list[float], float]:
    """Return the mean loss of each document that is long enough, and the share that was kept of the prompts."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line)["text"] for line in (folder / "corpus" / "test.jsonl").read_text().splitlines()]
    losses, shares = [], []
    for text in rows:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        if ids.shape[1] < prompt + continuation:
            continue
        cache = ag.EvictionCache(model, policy, budget)
        with torch.no_grad():
            first = model(ids[:, :prompt], past_key_values=cache).logits[:, -1:]
            shares.append(cache.kept_share())
            rest = model(ids[:, prompt : prompt + continuation - 1], past_key_values=cache).logits
        logits = torch.cat([first, rest], 1)[0].log_softmax(-1)
        wanted = ids[0, prompt : prompt + continuation]
        losses.append(-float(logits.gather(1, wanted[:, None]).mean()))
    return losses, sum(shares) / len(shares)

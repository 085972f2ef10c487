"""Read a context once, evict, and ask many questions: python scripts/examples/questions.py MODEL FILE QUESTION..."""

import copy
import sys
from pathlib import Path

import torch

import ag

name, file, *questions = sys.argv[1:]
model, tokenizer = ag.load_base(name)
context = tokenizer(Path(file).read_text(), return_tensors="pt").input_ids
cache = ag.EvictionCache(model, "snapkv@heads", budget=0.25)
with torch.no_grad():
    model(context, past_key_values=cache, logits_to_keep=1)  # read and evicted once
for question in questions:
    asked = tokenizer(f"\n{question}\n", add_special_tokens=False, return_tensors="pt").input_ids
    ids, mine = torch.cat([context, asked], 1), copy.deepcopy(cache)  # each question has a copy of what was kept
    answer = model.generate(ids, past_key_values=mine, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    print(f"{cache.kept_share():.0%} kept: {tokenizer.decode(answer, skip_special_tokens=True)!r}")

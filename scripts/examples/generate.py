"""Load exported gates and generate with them: python scripts/examples/generate.py EXPORT PROMPT."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ag
from ag.gates import export
from ag.model import base as models

folder, prompt = sys.argv[1:]
base = models.resolve(export.read_info(folder)["base_model"]["name"])
tokenizer = AutoTokenizer.from_pretrained(base)
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
ag.attach(model, ag.AttentionGates.from_pretrained(folder))

inputs = tokenizer(prompt, return_tensors="pt")
for policy in ("full", "gates"):
    cache = ag.EvictionCache(model, policy)
    output = model.generate(**inputs, past_key_values=cache, max_new_tokens=20, do_sample=False)
    text = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    print(f"{policy}: {cache.kept_share(prompt=True):.0%} of the prompt kept, {cache.nbytes:,} bytes: {text!r}")

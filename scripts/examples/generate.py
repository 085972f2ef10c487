"""Load exported gates and generate with them: python scripts/examples/generate.py EXPORT PROMPT."""

import sys

import ag

folder, prompt = sys.argv[1:]
loaded = ag.load(folder)

inputs = loaded.tokenizer(prompt, return_tensors="pt")
for policy, cache in (("full", ag.EvictionCache(loaded.model, "full")), ("gates", loaded.cache())):
    output = loaded.model.generate(**inputs, past_key_values=cache, max_new_tokens=20, do_sample=False)
    text = loaded.tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    print(f"{policy}: {cache.kept_share(prompt=True):.0%} of the prompt kept, {cache.nbytes:,} bytes: {text!r}")

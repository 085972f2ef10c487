"""The model card (README.md) of an export."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ag.gates.manifest import ADAPTER_FILES, CALIBRATION

_CARD = """\
---
library_name: ag
{base_model}pipeline_tag: text-generation
tags: [kv-cache, attention-gate, token-eviction]
---

# Attention-Gates for {base}

Attention-Gates are small trained networks. For each layer and KV head they decide which entries of the KV cache are
kept. All other entries are evicted, and their memory is freed.{adapter}

## Use

`PATH` is this folder, `BASE` the base model: {base}{revision}.

```python
import {module}
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("BASE")
model = AutoModelForCausalLM.from_pretrained("BASE")
{load_adapter}inputs = tokenizer("Once upon a time", return_tensors="pt")
cache = ag.EvictionCache(model, "gates:PATH"{budget})
output = model.generate(**inputs, past_key_values=cache)
print(tokenizer.decode(output[0]))
```

```sh
python -m ag.generate gates=PATH{budget_key} prompt="Once upon a time"
```

## Measured

{metrics}
{figure}{shares}
## Gate configuration

{gate}
"""
_SHARES = """
## Other shares

`ag.policy("gates:PATH", share=0.3)` keeps about 30 % of the tokens, over all layers and KV heads. The boundaries were
measured on the validation data: a token is kept if its logit is above the boundary.

{table}
"""


def model_card(info: Mapping[str, Any], figure: str | None, needs_budget: bool) -> str:
    """Return the model card for the content of ``gate_config.json``. A ``figure`` of None means no picture.

    ``needs_budget`` tells whether the gates have no flags.
    """
    base, table = info["base_model"], info[CALIBRATION] or {"shares": [], "boundaries": []}
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", base["name"]) is not None and not Path(base["name"]).exists()
    adapter = ADAPTER_FILES[0] in info["sha256"]
    shares = {f"{share:.2f}": limit for share, limit in zip(table["shares"], table["boundaries"], strict=True)}
    return _CARD.format(
        base_model=f"base_model: {base['name']}\n" if on_hub else "",
        base=f"`{base['name']}`" if base["name"] else "a causal language model",
        revision=f", revision `{base['revision']}`" if base["revision"] else "",
        adapter=" The LoRA adapter in `adapter/` was trained with them." if adapter else "",
        module="ag.gates.export" if adapter else "ag",
        load_adapter='model = ag.gates.export.load_adapter(model, "PATH")\n' if adapter else "",
        budget=", budget=0.3" if needs_budget else "",
        budget_key=" budget=0.3" if needs_budget else "",
        metrics=_table("metric", "value", {"kept share of the prompt's entries": info["keep_rate"], **info["metrics"]}),
        figure=f"\n![Measurements of the gates]({figure})\n" if figure else "",
        shares=_SHARES.format(table=_table("share", "boundary", shares)) if shares else "",
        gate=_table("key", "value", info["gate"]),
    )


def _table(name: str, value: str, rows: Mapping[str, Any]) -> str:
    lines = [f"| {name} | {value} |", "| --- | --- |"]
    for key, cell in rows.items():
        shown = "not measured, or not finite" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else cell
        lines.append(f"| {key} | {shown} |")
    return "\n".join(lines)

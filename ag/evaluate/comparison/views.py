"""Which tokens of a prompt each layer and head kept, small enough to put many into one page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedTokenizerBase

from ag.engine import EvictionCache, Policy, read_prompt
from ag.evaluate.tasks import Sample

CONTEXT = 4  # tokens before one that its text may depend on


@dataclass(frozen=True)
class View:
    """What a cache kept of one prompt."""

    sample: str  # its id
    pieces: list[str]  # its T tokens as text
    kept: NDArray[np.bool_]  # `[L, Hkv, T]`, True where a token is held

    def to_json(self) -> dict[str, Any]:
        """Return it as texts and numbers; flags are bits in base64, the first token in the lowest bit."""
        packed = np.packbits(self.kept, axis=-1, bitorder="little")
        kept = [[base64.b64encode(head.tobytes()).decode() for head in layer] for layer in packed]
        return {"sample": self.sample, "pieces": self.pieces, "kept": kept}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> View:
        """Read what :meth:`to_json` gave."""
        rows = [[np.frombuffer(base64.b64decode(head), np.uint8) for head in layer] for layer in values["kept"]]
        kept = np.unpackbits(np.array(rows), axis=-1, count=len(values["pieces"]), bitorder="little")
        return cls(values["sample"], values["pieces"], kept.astype(bool))


def record(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    policies: Sequence[Policy],
    samples: Sequence[Sample],
    most_tokens: int,
) -> list[list[View]]:
    """Show the first tokens of some prompts to each policy; returns by policy, for each sample, what was kept."""
    views: list[list[View]] = [[] for _ in policies]
    device = next(model.parameters()).device
    for sample in samples:
        ids = sample.prompt[:most_tokens]
        texts = pieces(tokenizer, ids)
        caches = read_prompt(model, policies, torch.tensor([ids], device=device), protect=sample.protect)
        for mine, (cache, _) in zip(views, caches, strict=True):
            mine.append(View(sample.id, texts, kept_flags(cache)))
    return views


def kept_flags(cache: EvictionCache) -> NDArray[np.bool_]:
    """Return `[L, Hkv, T]`, what a cache holds of the only sequence that it has seen."""
    layers = [cache.kept_positions(layer)[0] for layer in range(len(cache.layers))]
    flags = np.zeros((len(layers), len(layers[0]), cache.seen_tokens), dtype=bool)
    for layer, heads in enumerate(layers):
        for head, positions in enumerate(heads):
            flags[layer, head, positions.cpu().numpy()] = True
    return flags


def pieces(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """Return the text of each token such that together they are the text, up to characters cut in the middle."""
    texts = []
    for index, one in enumerate(ids):
        before = str(tokenizer.decode(ids[max(0, index - CONTEXT) : index]))
        both = str(tokenizer.decode(ids[max(0, index - CONTEXT) : index + 1]))
        texts.append(both[len(before) :] if both.startswith(before) else str(tokenizer.decode([one])))
    return texts

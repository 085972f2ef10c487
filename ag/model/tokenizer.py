"""The tokenizer of a base model, which mostly loads without torch."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.hub import cached_file


def load_tokenizer(path: str, source: dict[str, Any]) -> PreTrainedTokenizerBase:
    """Load tokenizer.json as it is where there is one.

    AutoTokenizer of transformers 5 rebuilds some classes and drops the file's pre-tokenizer; SmolLM2's
    repository would lose the splitting of digits (https://github.com/huggingface/transformers/issues/45920).
    """
    has_file = cached_file(path, "tokenizer.json", _raise_exceptions_for_missing_entries=False, **source)
    loader: Any = PreTrainedTokenizerFast
    if not has_file or source["trust_remote_code"]:
        from transformers import AutoTokenizer as loader  # loads torch, which takes seconds
    tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(path, **source)
    return tokenizer

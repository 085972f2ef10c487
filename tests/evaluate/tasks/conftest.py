"""Local folders of data, and the plain model as an oracle."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

BOOK = f"Chapter one. {' '.join(f'This is line {i}, and it is long.' for i in range(400))} The end."


@pytest.fixture
def root(write: Callable[..., str]) -> str:
    """The folder of a book."""
    return write("pg19_style/test", [{"text": BOOK}])


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """`write("piqa/validation", rows)` makes a file under a root, which it returns."""

    def write(name: str, rows: list[dict[str, Any]], zipped: bool = False) -> str:
        file = tmp_path / f"{name}.jsonl{'.gz' if zipped else ''}"
        file.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        file.write_bytes(gzip.compress(text) if zipped else text)
        return str(tmp_path)

    return write


@pytest.fixture
def plain() -> Callable[..., torch.Tensor]:
    """`plain(model, prompt, answer)`: log-likelihoods of an answer's tokens, in one pass without any cache."""

    def plain(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> torch.Tensor:
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            logits: torch.Tensor = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]

    return plain


@pytest.fixture
def step_by_step() -> Callable[..., torch.Tensor]:
    """The same with a cache, and one token a forward pass after the prompt."""

    def step_by_step(model: torch.nn.Module, cache: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
        logits = [model(torch.tensor([prompt]), past_key_values=cache).logits[0, -1]]
        logits += [model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1] for token in answer[:-1]]
        return torch.stack(logits).log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]

    return torch.no_grad()(step_by_step)

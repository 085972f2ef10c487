"""A small model in a few bits a weight, for a machine that cannot download it.

Weights are rounded to whole steps, and the steps written in a Huffman code. A step is the finer the more its input
carries over a calibration text: by the square root of the input's root mean square, which lost less at the same size
(0.19 nats at 59 MB) than equal steps (0.36) and steps by the whole of it.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from ag.errors import UserError

WEIGHTS, PACKED, FILES = "model.safetensors", "model.zlib", "files.zip"
ROW, COLUMN = ".row", ".column"
LEAST_BITS = 2.0  # a weight: below, too little of the model is left
COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def squeeze(source: Path, target: Path, room: int, texts: Iterable[str]) -> dict[str, Any]:
    """Write a model folder in at most ``room`` bytes, with the finest steps that fit.

    Args:
        source: a folder with config.json, model.safetensors and the tokenizer's files.
        target: folder to write to.
        room: bytes.
        texts: documents to calibrate on; the last one is only measured on.

    Returns:
        Bits a weight, and the loss (nats a token) on the last text before and after.

    Raises:
        UserError: when too few bits a weight are left.
    """
    target.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target / FILES, "w", zipfile.ZIP_LZMA) as archive:
        for name in COPIED:
            if (source / name).is_file():
                archive.write(source / name, name)
    room -= (target / FILES).stat().st_size
    *texts, held_out = texts
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    ids = [tokenizer(text, return_tensors="pt").input_ids[:, :512] for text in (*texts, held_out)]
    weights = {name: x.float() for name, x in load_file(source / WEIGHTS).items()}
    columns = importance(model, ids[:-1])
    count = sum(x.numel() for x in weights.values())
    low, high, step, packed = 0.05, 4.0, 1.0, b""
    while high / low > 1.01 and len(packed) < 0.995 * room:
        tried = compress(rounded(weights, columns, step))
        low, high, packed = (step, high, packed) if len(tried) > room else (low, step, tried)
        step *= 2 ** (8 * (len(tried) - 0.998 * room) / count)  # twice the step: about a bit a weight less
        step = step if low < step < high else math.sqrt(low * high)
    bits = 8 * len(packed) / count
    if bits < LEAST_BITS:
        raise UserError(f"{room:,} bytes are left for {count:,} weights: expected at least {LEAST_BITS:g} bits each.")
    (target / PACKED).write_bytes(packed)
    before = _loss(model, ids[-1])
    model.load_state_dict(expanded(load(zlib.decompress(packed))), strict=False)
    return {"bits a weight": bits, "loss": before, "loss as packed": _loss(model, ids[-1]), "source": source.name}


def restore(source: Path, target: Path) -> Path:
    """Write the model of :func:`squeeze` as a folder that transformers loads; returns it."""
    if not (target / WEIGHTS).is_file():
        target.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(source / FILES) as archive:
            archive.extractall(target, [name for name in COPIED if name in archive.namelist()])
        weights = expanded(load(zlib.decompress((source / PACKED).read_bytes())))
        save_file(weights, target / "partial", metadata={"format": "pt"})
        (target / "partial").rename(target / WEIGHTS)
    return target


@torch.no_grad()
def importance(model: nn.Module, ids: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return the root mean square of each linear layer's inputs ``[in]``, by the name of its weight."""
    sums: dict[str, Tensor] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def seen(_: nn.Module, inputs: tuple[Tensor], name: str = f"{name}.weight") -> None:
                sums[name] = sums.get(name, torch.tensor(0.0)) + inputs[0].square().mean((0, 1))

            hooks.append(module.register_forward_pre_hook(seen))
    for row in ids:
        model(input_ids=row)
    for hook in hooks:
        hook.remove()
    head = sums.pop("lm_head.weight", None)
    if head is not None:  # tied to the embedding
        sums["model.embed_tokens.weight"] = head
    return {name: x.sqrt() for name, x in sums.items()}


def rounded(weights: dict[str, Tensor], columns: dict[str, Tensor], step: float) -> dict[str, Tensor]:
    """Round matrices to whole steps of so much of their output's spread; vectors stay, in float16."""
    found = {}
    for name, x in weights.items():
        if x.ndim < 2:
            found[name] = x.half()
            continue
        carried = columns.get(name, torch.ones(x.shape[1]))
        column = (carried.mean() / carried.clamp(min=0.001 * carried.mean())).sqrt().half()
        row = (step * x / column.float()).square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6).half()
        found[name] = (x / (row.float() * column.float())).round().clamp(-127, 127).to(torch.int8)
        found |= {name + ROW: row, name + COLUMN: column}
    return found


def expanded(steps: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of :func:`rounded`, in float16."""
    names = [name for name in steps if not name.endswith((ROW, COLUMN))]
    return {
        name: (steps[name].float() * steps[name + ROW].float() * steps[name + COLUMN].float()).half()
        if name + ROW in steps
        else steps[name]
        for name in names
    }


def compress(tensors: dict[str, Tensor]) -> bytes:
    """Write tensors as safetensors, in a Huffman code alone: weights do not repeat."""
    coder = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(save(tensors)) + coder.flush()


@torch.no_grad()
def _loss(model: Any, ids: Tensor) -> float:
    return float(model(input_ids=ids, labels=ids).loss)

"""One side of the comparison: ``python benchmarks/kvpress/side.py ag|kvpress``, each in its own environment.

The clock, the count of bytes and the loss are this file's on both sides. A line of JSON on standard input is a request,
a line on standard output its answer: first the model to load (``{"model": FOLDER, "threads": 2}``, threads null for
torch's default), then one :class:`Job` after the other.
"""

from __future__ import annotations

import json
import os
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Options of this engine's policies: the defaults of kvpress' presses. kvpress advises this ``eps`` for expected
#: attention under Ada-KV; its press gets it too.
OPTIONS: dict[str, dict[str, Any]] = {
    "snapkv": {"window": 64, "kernel": 5, "pooling": "avg"},
    "snapkv@heads": {"window": 64, "kernel": 5, "pooling": "avg", "floor": 0.2},
    "expected_attention": {"sinks": 4, "future": 512},
    "expected_attention@heads": {"sinks": 4, "future": 512, "eps": 0.01, "floor": 0.2},
    "knorm": {},
}


@dataclass(frozen=True)
class Job:
    """One measurement.

    Attributes:
        method: one of OPTIONS, or ``full``.
        tokens: that a KV head keeps, the mean over the heads of a layer; None for ``full``.
        prompt: token ids; the cache is evicted at their end.
        following: token ids that are fed one by one and scored.
    """

    method: str
    tokens: int | None
    prompt: list[int]
    following: list[int]


class Ours:
    """A model in float32 on the CPU with sdpa, and an :class:`ag.engine.EvictionCache` for one job at a time."""

    packages: tuple[str, ...] = ("torch", "transformers")

    def __init__(self, model: str) -> None:
        from ag.model.base import load_base

        self.model, _ = load_base(model, "cpu")

    def begin(self, job: Job) -> None:
        """Make the empty cache of a job."""
        from ag.engine import EvictionCache, policy

        self.cache = EvictionCache(self.model, policy(job.method, job.tokens, **OPTIONS.get(job.method, {})))

    def run(self, ids: Tensor, place: int) -> Tensor:
        """Read tokens ``[1, T]`` from a place of the text on; returns the logits ``[1, 1, V]`` after the last one.

        At place 0 they are the prompt, behind which the cache is evicted.
        """
        logits: Tensor = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        return logits

    def held(self) -> dict[str, float]:
        """Return what the cache holds.

        ``kept`` is the share of the (token, layer, KV head) entries that attention still sees, ``kv_bytes`` are those
        allocated for keys and values, ``all_bytes`` those of all that stays in memory for the text. The pool's columns
        do not count, as they are address space for many more blocks.
        """
        size = self.cache.nbytes
        beside = storage_bytes(self.cache, self.cache.setup.pool.columns())
        return {"kept": self.cache.kept_share(), "kv_bytes": size, "all_bytes": size + beside}


class Theirs:
    """A press of kvpress around transformers' own cache; the methods are those of :class:`Ours`."""

    packages: tuple[str, ...] = ("torch", "transformers", "kvpress")

    def __init__(self, model: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
        self.model.requires_grad_(False).eval()
        self.layers = [layer.self_attn for layer in self.model.model.layers]

    def begin(self, job: Job) -> None:
        """Make transformers' cache, and forget the indices that the last press left on the model."""
        from transformers import DynamicCache

        self.cache: Any = DynamicCache(config=self.model.config)
        self.length = len(job.prompt)
        self.press = nullcontext() if job.tokens is None else press(job.method, job.tokens, self.length)(self.model)
        for layer in self.layers:
            layer.masked_key_indices = None

    def run(self, ids: Tensor, place: int) -> Tensor:
        """Read tokens, the prompt under the press; later places are given, as the cache counts kept tokens alone."""
        given = {"position_ids": torch.tensor([[place]])} if place else {}
        with nullcontext() if place else self.press:
            logits: Tensor = self.model(
                input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1, **given
            ).logits
        return logits

    def held(self) -> dict[str, float]:
        """Count storages; the entries that Ada-KV masks, `(sequences, heads, tokens)` of a layer, stay in memory."""
        masked = [layer.masked_key_indices for layer in self.layers if layer.masked_key_indices is not None]
        pairs = [(layer.keys, layer.values) for layer in self.cache.layers]
        entries = sum(keys.shape[1] * keys.shape[2] for keys, _ in pairs) - sum(len(heads) for _, heads, _ in masked)
        return {
            "kept": entries / sum(keys.shape[1] * self.length for keys, _ in pairs),
            "kv_bytes": sum(x.untyped_storage().nbytes() for pair in pairs for x in pair),
            "all_bytes": storage_bytes((self.cache, masked)),
        }


def press(method: str, tokens: int, length: int) -> Any:
    """Return the press that keeps ``tokens`` of a prompt of ``length``."""
    import kvpress

    ratio = 1 - (tokens + 0.5) / length  # a press keeps int(length * (1 - ratio)); the half is against rounding
    presses: dict[str, Callable[[], Any]] = {
        "snapkv": lambda: kvpress.SnapKVPress(ratio),
        "snapkv@heads": lambda: kvpress.AdaKVPress(kvpress.SnapKVPress(ratio)),
        "expected_attention": lambda: kvpress.ExpectedAttentionPress(ratio),
        "expected_attention@heads": lambda: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(ratio, epsilon=0.01)),
        "knorm": lambda: kvpress.KnormPress(ratio),
    }
    return presses[method]()


SIDES: dict[str, Callable[[str], Ours | Theirs]] = {"ag": Ours, "kvpress": Theirs}


@torch.no_grad()
def measure(side: Ours | Theirs, job: Job) -> dict[str, Any]:
    """Read a job's prompt, evict, and feed the tokens that follow.

    Returns:
        ``prefill``: seconds; ``decode``: seconds of each token fed; after the prompt ``kept``, ``kv_bytes`` and
        ``all_bytes`` (keys, values, and what is remembered beside them); ``nats``: of each token that follows.
    """
    side.begin(job)
    nats, seconds, ids, place = [], [], torch.tensor([job.prompt]), 0
    held: dict[str, float] = {}
    for following in job.following:
        start = time.perf_counter()
        logits = side.run(ids, place)
        seconds.append(time.perf_counter() - start)
        held = held or side.held()
        nats.append(float(F.cross_entropy(logits[:, -1].float(), torch.tensor([following]))))
        place += ids.shape[1]
        ids = torch.tensor([[following]])
    return {"prefill": seconds[0], "decode": seconds[1:], **held, "nats": nats}


def storage_bytes(found: object, but: Sequence[Tensor] = ()) -> int:
    """Return the bytes of all tensors' storages that can be reached from an object, modules and code left out.

    Args:
        found: the object.
        but: tensors whose storages do not count.
    """
    storages: dict[int, int] = {}
    met: dict[int, object] = {}  # held, so that no address is used twice
    todo = [found]
    while todo:
        one = todo.pop()
        if id(one) in met or isinstance(one, nn.Module | type | types.ModuleType | types.FunctionType):
            continue
        met[id(one)] = one
        if isinstance(one, Tensor):
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(one, dict):
            todo += one.values()
        elif isinstance(one, list | tuple | set | frozenset):
            todo += one
        else:
            todo += getattr(one, "__dict__", {}).values()
    left_out = {x.untyped_storage().data_ptr() for x in but}
    return sum(size for place, size in storages.items() if place not in left_out)


@contextmanager
def answers() -> Iterator[Callable[[dict[str, Any]], None]]:
    """Give what writes an answer; all else that is printed goes to standard error."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        yield lambda answer: print(json.dumps(answer), file=out, flush=True)


def main(name: str) -> None:
    """Answer requests until there are no more."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    with answers() as answer:
        asked = json.loads(sys.stdin.readline())
        if asked["threads"] is not None:
            torch.set_num_threads(asked["threads"])
        side = SIDES[name](asked["model"])
        answer({package: version(package) for package in side.packages} | {"threads": torch.get_num_threads()})
        for line in sys.stdin:
            answer(measure(side, Job(**json.loads(line))))


if __name__ == "__main__":
    main(sys.argv[1])

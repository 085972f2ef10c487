"""Whole policies in the plainest way: one token at a time, known by its place in the text, in float64.

Written from the specification, for one unpadded sequence and a layer's own q, k, v; nothing is shared with the library.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

Row = dict[int, float]  # a number for each token


def attention_row(q: Tensor, k: Tensor, i: int, held: Iterable[int], scaling: float, window: int | None = None) -> Row:
    """Weights that query ``i`` of one head pays the tokens ``held``, a dict; ``q [T, D]``, ``k [T, D]`` float64."""
    seen = [t for t in held if t <= i and (window is None or i - t < window)]
    logits = k[seen] @ q[i] * scaling
    return dict(zip(seen, logits.softmax(0).tolist(), strict=True))


def pooled(values: Sequence[float], kernel: int, kind: str) -> list[float]:
    """Pool a list with zeros around it."""
    half, out = kernel // 2, []
    for p in range(len(values)):
        near = [values[j] if 0 <= j < len(values) else 0.0 for j in range(p - half, p + half + 1)]
        out.append(max(near) if kind == "max" else sum(near) / kernel)
    return out


class Layer:
    """One layer under a policy: feed it events, ask what each KV head holds.

    In a sliding window a token leaves when the next query does not see it, before a decision, and competes no more; it
    stays in the softmax of those that did.
    """

    prompt: int
    newest: int

    def __init__(
        self,
        name: str,
        q: Tensor,
        k: Tensor,
        scaling: float,
        capacity: int,
        options: dict[str, Any],
        window: int | None = None,
    ) -> None:
        self.name, self.q, self.k, self.scaling = name, q.double(), k.double(), scaling
        self.capacity, self.options, self.window = capacity, options, window
        self.heads, self.kv_heads = len(q), len(k)
        self.group = self.heads // self.kv_heads
        self.held: list[list[int]] = [[] for _ in range(self.kv_heads)]
        self.before = self.held
        # every query's weights as they were when it attended
        self.rows: list[list[Row]] = [[] for _ in range(self.heads)]
        self.decoding = False

    def arrive(self, tokens: list[int]) -> None:
        """New tokens come, attend, and are remembered."""
        self.forget(tokens[0])
        for head in range(self.kv_heads):
            self.held[head] = self.held[head] + tokens
        for head in range(self.heads):
            mine = self.held[head // self.group]
            for i in tokens:
                row = attention_row(self.q[head], self.k[head // self.group], i, mine, self.scaling, self.window)
                self.rows[head].append(row)
        self.newest = tokens[-1]

    def evict(self) -> None:
        """Keep what is protected and the best of the rest, the earlier of equals."""
        self.before = self.held  # of which the last queries saw some
        self.forget(self.newest + 1)
        scores = self.scores()
        for head, mine in enumerate(self.held):
            safe = [t for t in mine if self.protected(t)]
            rest = sorted((t for t in mine if t not in safe), key=lambda t, h=head: (-scores[h][t], t))  # type: ignore[misc]
            self.held[head] = sorted(safe + rest[: max(0, self.capacity - len(safe))])

    def forget(self, query: int) -> None:
        """Let go what a query does not see."""
        if self.window is not None:
            self.held = [[t for t in mine if query - t < self.window] for mine in self.held]

    def protected(self, t: int) -> bool:
        age, options = self.newest - t, self.options
        recent: int = {
            "h2o": options.get("recent", self.capacity // 2),
            "tova": options.get("recent", 1),
            "scissorhands": options.get("recent", 10),
            "streaming_llm": 0,
        }.get(self.name, options.get("window", 32))
        sinks: int = options.get("sinks", 4 if self.name == "streaming_llm" else 0)
        return t < sinks or age < recent

    def sums(self, head: int, first: int = 0) -> Row:
        """Remembered attention by token, of the queries from the ``first`` on."""
        total: Row = defaultdict(float)
        for row in self.rows[head][first:]:
            for t, weight in row.items():
                total[t] += weight
        return total

    def members(self, kv_head: int) -> range:
        return range(kv_head * self.group, (kv_head + 1) * self.group)

    def mean(self, kv_head: int, by_head: dict[int, Row]) -> Row:
        """Combine dicts over the query heads of a KV head, for the tokens held."""
        return {t: fmean([by_head[h].get(t, 0.0) for h in self.members(kv_head)]) for t in self.held[kv_head]}

    def scores(self) -> list[Row]:
        """One dict by token a KV head."""
        return [getattr(self, self.name)(head) for head in range(self.kv_heads)]

    def streaming_llm(self, head: int) -> Row:
        return {t: float(t) for t in self.held[head]}

    def h2o(self, head: int) -> Row:
        window, first = self.options.get("window"), 0
        if window is not None:
            first = max(0, (self.prompt if self.decoding else len(self.rows[0])) - window)
        return self.mean(head, {h: self.sums(h, first) for h in self.members(head)})

    def scissorhands(self, head: int) -> Row:
        last = self.options.get("window", 400)
        return self.mean(head, {h: self.sums(h, max(0, len(self.rows[h]) - last)) for h in self.members(head)})

    def tova(self, head: int) -> Row:
        newest = {h: self.rows[h][-1] for h in range(self.heads)}
        if self.options.get("scope") == "kv_head":
            return self.mean(head, newest)
        return {
            t: sum(newest[h].get(t, 0.0) for h in range(self.heads) if t in self.held[h // self.group]) / self.heads
            for t in self.held[head]
        }

    def observed(self, head: int, last: int) -> dict[int, list[Row]]:
        """Rows of the last queries on the keys that were held until the decision, by query head."""
        mine, first = self.before[head], max(0, self.newest + 1 - last)
        return {
            h: [
                attention_row(self.q[h], self.k[head], i, mine, self.scaling, self.window)
                for i in range(first, self.newest + 1)
            ]
            for h in self.members(head)
        }

    def pool(self, head: int, score: Row, kernel: int, kind: str) -> Row:
        """Pool over the held tokens before the window; the window's own score does not matter."""
        window = self.options.get("window", 32)
        before = [t for t in self.held[head] if self.newest - t >= window]
        return dict.fromkeys(self.held[head], 0.0) | dict(
            zip(before, pooled([score[t] for t in before], kernel, kind), strict=True)
        )

    def snapkv(self, head: int) -> Row:
        rows = self.observed(head, self.options.get("window", 32))
        sums = {h: {t: sum(row.get(t, 0.0) for row in rows[h]) for t in self.held[head]} for h in rows}
        how = self.options.get("kernel", 7), self.options.get("pooling", "max")
        return self.pool(head, self.mean(head, sums), *how)

    def cake(self, head: int) -> Row:
        score = {}
        for h, rows in self.observed(head, 1 if self.decoding else self.options.get("window", 32)).items():
            for t in self.held[head]:
                weights = torch.tensor([row.get(t, 0.0) for row in rows], dtype=torch.float64)
                spread = 0.0 if len(rows) == 1 else float(weights.var())
                score[h, t] = (
                    float(weights.mean()) + (0.0 if self.decoding else self.options.get("gamma", 200.0)) * spread
                )
        by_head = {h: {t: score[h, t] for t in self.held[head]} for h in self.members(head)}
        return self.pool(head, self.mean(head, by_head), self.options.get("kernel", 5), "avg")


def follow(
    layer: Layer, prompt: int, lengths: Sequence[int], block: int | None = None, steps: int | None = None
) -> list[list[list[int]]]:
    """Feed a layer a prompt and passes of ``lengths`` tokens under a schedule; what it held after each pass."""
    layer.prompt = prompt
    block, held = block or prompt, []
    for start in range(0, prompt, block):
        layer.arrive(list(range(start, min(start + block, prompt))))
        layer.evict()
    held.append([list(head) for head in layer.held])
    layer.decoding, seen, since = True, prompt, 0
    for length in lengths:
        layer.arrive(list(range(seen, seen + length)))
        seen, since = seen + length, since + length
        if steps is not None and since >= steps:
            layer.evict()
            since = 0
        held.append([list(head) for head in layer.held])
    return held

"""The oracle of the engine's parts: tiny layers with ragged keys, and their attention computed pair by pair."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ag.engine.layer_reader import LayerReader
from ag.engine.scorer_inputs import ScorerInputs
from ag.engine.scorers import Scorer
from ag.kernels.softmax import PLAIN, Softmax
from tests.support.bounds import ROUNDINGS, conditioned, hold

#: Of scenes with 4 heads: logits up to about 3 are capped, and sinks take a part of the attention.
SINKS_AND_CAP = Softmax(cap=2.0, sinks=torch.tensor([0.5, -1.0, 1.5, 0.0]))


def rotation(place: float, dim: int, base: float = 50.0) -> Tensor:
    """RoPE's matrix ``[D, D]`` float64 of a place, dimensions d and d + D/2 being a pair."""
    matrix, half = torch.zeros(dim, dim, dtype=torch.float64), dim // 2
    for d in range(half):
        angle = place * base ** (-d / half)
        matrix[d, d] = matrix[d + half, d + half] = math.cos(angle)
        matrix[d, d + half], matrix[d + half, d] = -math.sin(angle), math.sin(angle)
    return matrix


@functools.cache
def mean_rotation(first: int, span: int, dim: int) -> Tensor:
    """The mean of the matrices of ``span`` places."""
    return torch.stack([rotation(first + j, dim) for j in range(span)]).mean(0)


def turned(x: Tensor, places: Tensor, span: int = 1) -> Tensor:
    """Multiply each vector of ``[B, H, n, D]`` by the mean rotation of its ``span`` places."""
    places, out = places.expand(x.shape[:3]), torch.empty_like(x)
    for index, first in zip(itertools.product(*map(range, x.shape[:3])), places.flatten().tolist(), strict=True):
        out[index] = (mean_rotation(first, span, x.shape[3]) @ x[index].double()).to(x.dtype)
    return out


class Scene:
    """One layer, as its reader shows it and as plain lists in float64.

    ``lengths`` are the sequences' tokens. ``ragged``: each KV head holds a random part of them (the newest always);
    ``queries``: number of the last tokens that are queries; ``sharp``: factor of the logits.
    """

    def __init__(
        self,
        seed: int = 0,
        lengths: Sequence[int] = (9,),
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 8,
        padding: str = "left",
        ragged: bool = False,
        window: int | None = None,
        queries: int | None = None,
        sharp: float = 1.0,
        dtype: torch.dtype = torch.float32,
        layer: int = 0,
        gate: bool = False,
        softmax: Softmax = PLAIN,
    ) -> None:
        make = torch.Generator().manual_seed(seed)
        self.lengths, self.heads, self.kv_heads, self.window = lengths, heads, kv_heads, window
        self.group, self.scaling, self.softmax = heads // kv_heads, 0.3, softmax
        batch, longest = len(lengths), max(lengths)
        columns = min(queries or longest, longest)
        query_indices = torch.full((batch, columns), -1)
        query_valid = torch.zeros(batch, columns, dtype=torch.bool)
        q = torch.randn(batch, heads, columns, dim, generator=make) * sharp
        self.columns: list[list[tuple[int, int]]] = []  # of each sequence: (column, index) of the queries that exist
        for b, n in enumerate(lengths):
            here = min(columns, n)
            first = columns - here if padding == "left" else 0
            self.columns.append([(first + i, n - here + i) for i in range(here)])
            for column, token_index in self.columns[-1]:
                query_indices[b, column], query_valid[b, column] = token_index, True
            query_indices[b, first + here :] = n - 1  # what a running count gives on right padding
        self._ragged = ragged
        self.held = [[list(range(n)) for _ in range(kv_heads)] for n in lengths]
        if ragged:
            for b, n in enumerate(lengths):
                for g in range(kv_heads):
                    keep = torch.rand(n, generator=make) < 0.6
                    self.held[b][g] = [p for p in range(n) if bool(keep[p]) or p == n - 1]
        slots = max(len(x) for row in self.held for x in row)
        k = torch.randn(batch, kv_heads, slots, dim, generator=make) * 5  # free slots hold anything finite
        v = torch.randn(batch, kv_heads, slots, dim, generator=make) * 5
        token_indices = torch.full((batch, kv_heads, slots), -1)
        tokens_k = torch.randn(batch, kv_heads, longest, dim, generator=make)
        tokens_v = torch.randn(batch, kv_heads, longest, dim, generator=make)
        for b in range(batch):
            for g in range(kv_heads):
                for slot, p in enumerate(self.held[b][g]):
                    k[b, g, slot], v[b, g, slot] = tokens_k[b, g, p], tokens_v[b, g, p]
                    token_indices[b, g, slot] = p
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        self.q, self.k, self.v = q.double(), k.double(), v.double()
        self.gate = torch.rand(batch, kv_heads, slots, generator=make).logit() if gate else None
        self.output = torch.randn(heads, dim, 11, generator=make)  # of the output projection, by query head
        self._parts = (q, k, v, query_indices, token_indices, query_valid)
        self._layer = layer
        self._dense: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def reader(self) -> LayerReader:
        """The reader of the layer, a new one each time: it remembers what it computed."""
        return self.reader_of(*self.operands)

    def inputs(self, scorer: Scorer) -> ScorerInputs:
        """The inputs of a scorer that has noted the pass."""
        return inputs_of(scorer, self.reader)

    @property
    def operands(self) -> list[Tensor]:
        """What scores are made of: q, k, v, the output projection, and the gate's logits where there are any."""
        return [*self._parts[:3], self.output, *([] if self.gate is None else [self.gate])]

    def reader_of(self, q: Tensor, k: Tensor, v: Tensor, output: Tensor, gate: Tensor | None = None) -> LayerReader:
        """The reader of a layer with other operands."""
        query_indices, token_indices, query_valid = self._parts[3:]
        cached: Any = SimpleNamespace(
            keys=k,
            values=v,
            token_indices=token_indices,
            gate_outputs=gate,
            shape=token_indices.shape,
            in_order=not self._ragged,
            same_for_all_heads=False,
        )
        return LayerReader(
            cached=cached,
            rotated_queries=q,
            query_indices=query_indices,
            query_valid=query_valid,
            num_new=q.shape[2],
            lengths=torch.tensor(self.lengths),
            max_length=max(self.lengths),
            prompt_lengths=torch.tensor(self.lengths),
            scaling=self.scaling,
            step_weights=None,
            softmax=self.softmax,
            layer=self._layer,
            sliding_window=self.window,
            log_retention=False,
            caller_protected=None,
            prompt_sums={},
            decoding=False,
            rotate=turned,
            load_output_projection=lambda: output,
            memo={},
        )

    def bound(self, compute: Callable[[LayerReader], Tensor]) -> Tensor:
        """How far a tensor that float32 computes from the layer may be from the right one."""
        return conditioned(lambda *operands: compute(self.reader_of(*operands)), *self.operands)

    def places(self) -> list[tuple[int, int]]:
        """Every (sequence, KV head)."""
        return [(b, g) for b in range(len(self.lengths)) for g in range(self.kv_heads)]

    def query_heads(self, g: int) -> range:
        """The query heads of a KV head."""
        return range(g * self.group, (g + 1) * self.group)

    def dense(self, b: int, h: int) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, logits, visibility ``[queries, held tokens]`` of one query head, oldest query first, float64."""
        if (b, h) not in self._dense:
            held, g = self.held[b][h // self.group], h // self.group
            a = torch.zeros(len(self.columns[b]), len(held), dtype=torch.float64)
            s, visible = torch.zeros_like(a), torch.zeros_like(a, dtype=torch.bool)
            for i, (column, token_index) in enumerate(self.columns[b]):
                for slot, p in enumerate(held):
                    if p <= token_index and (self.window is None or token_index - p < self.window):
                        visible[i, slot] = True
                        s[i, slot] = self.capped(self.scaling * float(self.q[b, h, column] @ self.k[b, g, slot]))
                if visible[i].any():
                    rivals = [float(s[i, j]) for j in range(len(held)) if visible[i, j]]
                    rivals += [] if self.softmax.sinks is None else [float(self.softmax.sinks[h])]
                    top = max(rivals)
                    size = sum(math.exp(x - top) for x in rivals)
                    for slot in range(len(held)):
                        if visible[i, slot]:
                            a[i, slot] = math.exp(float(s[i, slot]) - top) / size
            self._dense[b, h] = a, s, visible
        return self._dense[b, h]

    def capped(self, logit: float) -> float:
        """A logit as the model caps it."""
        cap = self.softmax.cap
        return logit if cap is None else cap * math.tanh(logit / cap)

    def values(self, b: int, g: int) -> Tensor:
        """Values of what a KV head holds, ``[held tokens, D]`` float64."""
        return self.v[b, g, : len(self.held[b][g])]

    def column_sums(self, b: int, h: int, last: int | None = None) -> list[float]:
        """The sum of each held token's attention weights over the queries, or over the ``last`` of them, as a list."""
        a = self.dense(b, h)[0]
        first = 0 if last is None else max(0, len(a) - last)
        return [sum(float(a[i, j]) for i in range(first, len(a))) for j in range(a.shape[1])]


def group_mean(lists: Iterable[Sequence[float]]) -> list[float]:
    """Mean of equally long lists, element by element."""
    return [sum(x) / len(x) for x in zip(*lists, strict=True)]


def pool(values: Sequence[float], kernel: int, kind: str) -> list[float]:
    """Pool a list: stride 1, what lies beyond the ends counts as 0 (avg) or not at all (max)."""
    half, result = kernel // 2, []
    for i in range(len(values)):
        near = values[max(0, i - half) : i + half + 1]
        result.append(max(near) if kind == "max" else sum(near) / kernel)
    return result


def inputs_of(scorer: Scorer, reader: LayerReader) -> ScorerInputs:
    """The inputs that the engine gives a scorer: what it declares, and the records that it notes first."""
    records: dict[str, Tensor] = {}
    inputs = reader.inputs(scorer.needs, records)
    scorer.note(inputs, records)
    return inputs


def agree(
    scene: Scene,
    scorer: Scorer,
    expected: dict[tuple[int, int], Sequence[float]],
    skip: Callable[[int, int, int], bool] = lambda b, g, p: False,
    score: Callable[[ScorerInputs], Tensor] | None = None,
) -> int:
    """Assert that a scorer's score ``[B, Hkv, N]`` is ``expected[b, g]`` on every held slot that is not skipped.

    ``score`` computes another of its numbers from its inputs.
    """
    compute = scorer.score if score is None else score
    bound = scene.bound(lambda reader: compute(inputs_of(scorer, reader)))
    got, compared = compute(scene.inputs(scorer)), 0
    for b, g in scene.places():
        slots = [slot for slot, p in enumerate(scene.held[b][g]) if not skip(b, g, p)]
        want = torch.tensor([expected[b, g][slot] for slot in slots], dtype=torch.float64)
        own = ROUNDINGS * torch.finfo(torch.float64).eps * want.abs().amax() if slots else 0.0  # of the lists
        hold(got[b, g, slots], want, bound[b, g, slots] + own, name=(b, g))
        compared += len(slots)
    assert compared
    return compared


def by_group(
    scene: Scene, of_head: Callable[[int, int], Sequence[float]], how: str = "mean"
) -> dict[tuple[int, int], list[float]]:
    """Combine the lists ``of_head(b, h)`` over each group."""
    combine: Callable[[Sequence[float]], float] = sum if how == "sum" else fmean
    return {
        (b, g): [combine(x) for x in zip(*(of_head(b, h) for h in scene.query_heads(g)), strict=True)]
        for b, g in scene.places()
    }


def pooled_before(
    scene: Scene, scores: dict[tuple[int, int], list[float]], window: int, kernel: int, kind: str
) -> dict[tuple[int, int], list[float]]:
    """Pool lists by KV head on the tokens before a window; 0 on the window."""
    result = {}
    for (b, g), values in scores.items():
        before = sum(p < scene.lengths[b] - window for p in scene.held[b][g])
        result[b, g] = pool(values[:before], kernel, kind) + [0.0] * (len(values) - before)
    return result


def within(scene: Scene, window: int) -> Callable[[int, int, int], bool]:
    """Return a predicate of the tokens of a window, which are protected: their score does not count."""
    return lambda b, g, p: p >= scene.lengths[b] - window

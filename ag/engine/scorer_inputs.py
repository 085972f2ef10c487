"""The inputs of a scorer: their declaration, and the object of plain tensors that holds them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor

from ag.errors import UserError

if TYPE_CHECKING:
    from ag.engine.attention_rows import Statistic

COLUMNS = 1024  # a table of all tokens grows by this many columns


class UndeclaredInputError(UserError, AttributeError):
    """A scorer reads an input that its :class:`Needs` do not declare."""


class QueryRows(NamedTuple):
    """One number for each pair of a query and a key."""

    rows: Tensor  # [B, H, w, N] float32, the oldest query first
    valid: Tensor  # [B, w] bool, False on padding, which comes first


class UnrotatedQueries(NamedTuple):
    """The new queries, and before them the earlier ones that the policy remembers."""

    vectors: Tensor  # [B, H, T, D] float32, without the rotation by RoPE
    token_indices: Tensor  # [B, T] long
    valid: Tensor  # [B, T] bool, False on padding
    num_new: int  # new queries, which come last


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The inputs that a scorer, a wrapper or an allocator reads, and how they are measured.

    The engine computes the declared inputs, once for all parts of a policy, before it calls ``note`` and ``score``.
    Each field down to ``attention_moments`` declares the field of :class:`ScorerInputs` that has its name.

    Attributes:
        keys: the cached keys.
        values: the cached values.
        key_indices: the token index of each slot, and with it ``age``.
        occupied: the slots that hold a token.
        key_valid: the occupied slots whose token a later query can see.
        slot_order: the slots in the order of their tokens.
        gate_logits: the logits of the layer's gate.
        queries: the queries without their rotation, and ``rotate``; the model then needs a known RoPE.
        output_projection: the attention's output projection, which not every model shows.
        attention_sums: attention weights, summed over all new queries ("new") or over the last ``n`` queries of each
            sequence. None: not needed, as in the next three.
        attention_rows: the attention weights of this many last queries.
        attention_logits: the logits of this many last queries.
        attention_moments: mean and variance of the weights over this many last queries.
        only_new: ``attention_rows`` leaves out queries that were new in an earlier pass.
        statistic: replaces the weight in ``attention_sums`` and ``attention_rows``. None: the weight.
        every_query: names of the inputs that ``note`` reads of every query. A pass without eviction computes only
            these. Empty: ``note`` is called only before a score.
        lookback: earlier queries that a decision needs beside the new ones.
        observers: width of the observation window; an allocator may measure in it too. None: the scorer has none.
        steady: each step scores by equal operations on equal memory, without a wait for the device: a CUDA graph can
            record it.

    Raises:
        UserError: ``every_query`` is not a tuple of declared inputs.
    """

    keys: bool = False
    values: bool = False
    key_indices: bool = False
    occupied: bool = False
    key_valid: bool = False
    slot_order: bool = False
    gate_logits: bool = False
    queries: bool = False
    output_projection: bool = False
    attention_sums: int | Literal["new"] | None = None
    attention_rows: int | None = None
    attention_logits: int | None = None
    attention_moments: int | None = None
    only_new: bool = False
    statistic: Statistic | None = None
    every_query: tuple[str, ...] = ()
    lookback: int = 0
    observers: int | None = None
    steady: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.every_query, tuple) and {*self.every_query} <= {*self.declared}):
            raise UserError(
                f"Needs(every_query={self.every_query!r}): expected a tuple with some of the inputs that these Needs "
                f"declare, {self.declared!r}."
            )

    @cached_property
    def declared(self) -> tuple[str, ...]:
        """Names of the declared inputs."""
        return tuple(name for name in DECLARABLE if getattr(self, name))

    @cached_property
    def step_weights(self) -> bool:
        """Whether the inputs of a step are the attention weights of its one query, which attention itself can keep."""
        return self.attention_sums in ("new", 1) and self.statistic is None


@dataclass(kw_only=True, eq=False)
class ScorerInputs:
    """One layer in one pass, as a scorer sees it. B sequences, H query heads, Hkv KV heads, N slots of each row.

    In a decoding step B may count only the sequences of the batch that are evicted from. The fields without a default
    are always there. The others exist only if the scorer's :class:`Needs` declare them.

    Attributes:
        layer: index of the layer.
        group: query heads of each KV head, ``H / Hkv``.
        lengths: ``[B]`` long, tokens of each sequence so far, evicted tokens included.
        decoding: whether the prompt is over.
        records: tensors ``[..., N]`` by name that the scorer noted; tokens without a record have 0. Read-only.
        evicting: ``[B]`` bool, the sequences to evict from after this pass. None: no sequence.
        log_retention: whether ``gate_logits`` are logs of the share of a token's worth that each new token leaves.
        scaling: factor of the attention logits.
        sink_logits: ``[H]``, the model's sink logits. None: the model has none.
        prompt_sums: tensors ``[B, ...]`` by name, which ``note`` may sum up over the queries of a prompt.
        memo: results by key, each computed once for all caches that share the pass.
        mean_over_layer: ``mean_over_layer(x)`` averages ``[B, H, N]`` over all query heads of the layer by token, and
            returns ``[B, Hkv, N]``. A head that no longer holds a token contributes 0 for it.
        rotate: ``rotate(x, offsets, span=1)`` rotates queries or keys ``[B, H, n, D]`` further by ``offsets`` tokens
            ``[B, 1, n or 1]`` as the model's RoPE does, averaged over ``span`` offsets from each. Negative offsets
            rotate back.
        keys: ``[B, Hkv, N, D]`` in the type of the cache, undefined on free slots.
        values: ``[B, Hkv, N, D]`` float32, 0 on free slots.
        key_indices: ``[B, Hkv, N]`` long, the token index of each slot, undefined on free slots.
        occupied: ``[B, Hkv, N]`` bool, the slots that hold a token.
        key_valid: ``[B, Hkv, N]`` bool, the occupied slots whose token has not left the model's sliding window.
        slot_order: ``[B, Hkv, N]`` long, slots by ascending token index, free slots last. None: they are in this order.
        gate_logits: ``[B, Hkv, N]`` float32, with the gate's bias; the largest number if no gate ran on the token.
        queries: the queries without their rotation.
        output_projection: ``[H, D, M]`` float32, the output projection by query head, without its bias.
        attention_sums: ``[B, H, N]`` float32.
        attention_rows: ``[B, H, w, N]`` float32, and the queries that exist.
        attention_logits: ``[B, H, w, N]`` float32, -inf where the query does not see the key, and the queries that
            exist.
        attention_moments: mean and unbiased variance, ``[B, H, N]`` float32 each.
    """

    layer: int
    group: int
    lengths: Tensor
    decoding: bool
    records: Mapping[str, Tensor]
    evicting: Tensor | None
    log_retention: bool
    scaling: float
    sink_logits: Tensor | None
    prompt_sums: dict[str, Tensor]
    memo: dict[Hashable, Any]
    mean_over_layer: Callable[[Tensor], Tensor]
    rotate: Callable[..., Tensor]
    keys: Tensor = field(init=False, repr=False)
    values: Tensor = field(init=False, repr=False)
    key_indices: Tensor = field(init=False, repr=False)
    occupied: Tensor = field(init=False, repr=False)
    key_valid: Tensor = field(init=False, repr=False)
    slot_order: Tensor | None = field(init=False, repr=False)
    gate_logits: Tensor = field(init=False, repr=False)
    queries: UnrotatedQueries = field(init=False, repr=False)
    output_projection: Tensor = field(init=False, repr=False)
    attention_sums: Tensor = field(init=False, repr=False)
    attention_rows: QueryRows = field(init=False, repr=False)
    attention_logits: QueryRows = field(init=False, repr=False)
    attention_moments: tuple[Tensor, Tensor] = field(init=False, repr=False)

    @property
    def age(self) -> Tensor:
        """``[B, Hkv, N]`` long, 0 for the newest token of a sequence, 1 for the token before; from ``key_indices``."""
        return self.lengths[:, None, None] - 1 - self.key_indices

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            name = "key_indices" if name == "age" else name  # from which the property is computed
            if name not in DECLARABLE:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            raise UndeclaredInputError(
                f"inputs.{name} is not declared: add {name} to the Needs of the part that reads it, and to every_query "
                "if note reads it in passes that evict nothing."
            )


#: Names of the inputs that :class:`Needs` declares.
DECLARABLE = tuple(field.name for field in fields(ScorerInputs) if not field.init)

"""Policies, and how a short text makes one: ``snapkv+caote@pyramid``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from ag import retention
from ag.config.policies import FLAGS, option_names
from ag.config.spec import BOUNDARY, ENGINE, PolicySpec, check_policy, parse_budget
from ag.engine.allocators import ALLOCATORS, Allocator
from ag.engine.allocators.uniform import Uniform
from ag.engine.scorers import SCORERS, Scorer
from ag.engine.scorers.kvzip import KVzip
from ag.engine.wrappers import WRAPPERS, Wrapper
from ag.errors import UserError
from ag.gates.gate import AttentionGates
from ag.kernels.codes import KVDtype

Option = str | int | float | bool | None
Part = TypeVar("Part", bound=Scorer | Allocator)


@dataclass(frozen=True)
class Policy:
    """A policy; its repr is the call that makes it again.

    Attributes:
        spec: its parts; the str of it is the text.
        budget: tokens per KV head (int) or share (float) of each prompt; None means full, or flags.
        schedule: when something is evicted; see :func:`policy`.
        options: what else was given: ``positions`` and hyper-parameters of the parts.
        positions: what keys are rotated by: their place in the text, as it is or squeezed into the model's context, or
            their slot among the tokens of a head; see :mod:`ag.engine.positions`.
        kv_dtype: how keys and values are stored: in the model's type, or in codes of 8 bits.
        scorer: scores each token; None means that nothing is evicted.
        allocator: shares the budget among layers and heads.
        gates: gates read from a folder; None means that the policy reads none, or those attached to the model.
    """

    spec: PolicySpec
    budget: int | float | None = None
    schedule: str = "prefill"
    options: Mapping[str, Option] = field(default_factory=dict, hash=False)
    positions: Literal["original", "slot", "interpolated"] = field(default="original", compare=False)
    kv_dtype: KVDtype = field(default="float", compare=False)
    scorer: Scorer | None = field(default=None, compare=False)
    allocator: Allocator = field(default_factory=Uniform, compare=False)
    gates: AttentionGates | None = field(default=None, compare=False)

    @property
    def by_gates(self) -> bool:
        """Whether gates take part."""
        return self.spec.reads_gates

    @cached_property
    def block(self) -> int | None:
        """Tokens of a prompt between evictions; None means the whole prompt."""
        return next((int(part[7:]) for part in self.schedule.split("+") if part.startswith("blocks:")), None)

    @cached_property
    def steps(self) -> int | None:
        """Tokens after the prompt between evictions; None means that nothing is evicted there."""
        parts = self.schedule.split("+")
        counted = (int(part[6:]) for part in parts if part.startswith("steps:"))
        return 1 if "every" in parts else next(counted, None)

    @cached_property
    def reconstruction_scorer(self) -> KVzip | None:
        """The scorer that lets the model repeat a prompt, which is evicted from once after that. None: no scorer."""
        scorer = self.scorer.inner if isinstance(self.scorer, Wrapper) else self.scorer
        return scorer if isinstance(scorer, KVzip) else None

    @cached_property
    def same_for_all_heads(self) -> bool:
        """Whether all KV heads of a layer hold equal tokens in equal slots, because all evictions agree."""
        return self.scorer is not None and self.scorer.same_for_all_heads and not self.allocator.compares_heads

    def runs_gates_in_decode(self, gates: AttentionGates | None) -> bool:
        """Whether gates also run on the tokens that follow the prompt."""
        wanted = self.budget is None or self.steps is not None
        return gates is not None and gates.config.covers == "all" and wanted

    def with_tokenizer(self, tokenizer: Any) -> Policy:
        """Return the policy with the instructions of ``kvzip`` in the tokens of a tokenizer."""
        return self if self.scorer is None else replace(self, scorer=self.scorer.with_tokenizer(tokenizer))

    def with_kv_dtype(self, kv_dtype: KVDtype) -> Policy:
        """Return the policy with keys and values held as a pool holds them."""
        if kv_dtype == self.kv_dtype:
            return self
        if "kv_dtype" in self.options:
            raise UserError(
                f"{self!r}: the pool holds keys and values as {kv_dtype}; make it with ag.Pool(model, nbytes, "
                f"{self.kv_dtype!r}), or leave kv_dtype out."
            )
        return replace(self, kv_dtype=kv_dtype, options={**self.options, "kv_dtype": kv_dtype})

    def with_trained_protection(self, gates: AttentionGates) -> Policy:
        """Return the policy that ranks by these gates, and protects the tokens that training protected."""
        if self.scorer is None or not self.by_gates:
            return self
        if self.budget is None:
            gates.check_flags()
        config = gates.config
        # In training `recent_tokens` counts the query's own token. At eviction the next query is not in the cache yet.
        return replace(
            self, scorer=self.scorer.with_trained_protection(config.sink_tokens, max(config.recent_tokens - 1, 0))
        )

    @property
    def lookback(self) -> int:
        """Earlier queries of the prompt that a decision needs beside the new ones."""
        needed = max(self.allocator.needs.lookback, 0 if self.scorer is None else self.scorer.needs.lookback)
        return needed + (self.reconstruction_scorer is not None)  # after a repetition nothing is new

    def capacity(self, lengths: Tensor) -> Tensor:
        """Return the tokens per KV head ``[B]`` that the budget allows prompts of ``lengths`` ``[B]`` tokens."""
        assert self.budget is not None
        if isinstance(self.budget, int):
            return torch.full_like(lengths, self.budget)
        return retention.share_of(lengths, self.budget).clamp_min(1)

    def __eq__(self, other: object) -> bool:
        """Whether both were made by equal arguments; a budget of 1 token and one of 1.0, a share, are not equal."""
        return isinstance(other, Policy) and self._typed_arguments == other._typed_arguments

    @property
    def _typed_arguments(self) -> dict[str, tuple[type, Any]]:
        arguments = {"spec": self.spec, "budget": self.budget, "schedule": self.schedule, **self.options}
        return {name: (type(value), value) for name, value in arguments.items()}

    def __repr__(self) -> str:
        options_given: dict[str, Option] = {} if self.budget is None else {"budget": self.budget}
        options_given |= {} if self.schedule == "prefill" else {"schedule": self.schedule}
        words = [
            repr(str(self.spec)),
            *(f"{name}={value!r}" for name, value in (options_given | dict(self.options)).items()),
        ]
        return f"ag.policy({', '.join(words)})"


def policy(
    spec: str | PolicySpec | Policy, budget: int | float | None = None, schedule: str = "prefill", **options: Option
) -> Policy:
    """Make a policy.

    Args:
        spec: ``SCORER[:PATH][+WRAPPER][@ALLOCATOR]``, see :class:`ag.config.spec.PolicySpec`. Scorers: full,
            streaming_llm, h2o, scissorhands, tova, snapkv, rkv, cake, expected_attention, keydiff, kvzip, knorm,
            random, ``gates`` (those attached to the model) or ``gates:PATH`` (exported ones, of a folder or the hub),
            and ``flags`` or ``flags:PATH``: those gates, whose flags decide. Wrappers: vatp, caote, fastcaote,
            criticalkv, obcache_value, obcache_key, obcache_joint. Allocators: uniform, pyramid, preference, heads,
            global. The name pyramidkv stands for ``snapkv@pyramid`` (also before a wrapper), cake without one for
            ``cake@preference``, kvzip for ``kvzip@global``, gates with a budget for ``gates@global``, and gates
            without one for ``flags``. A policy is returned as it is.
        budget: tokens per KV head, or as a float in (0, 1] a share of each prompt's own tokens. Under gates with a
            budget the most probable tokens stay. Flags take none: they decide themselves how much stays, and of
            ``flags:PATH`` the options ``share=0.3`` and ``threshold=0.2`` move their boundary; see
            :meth:`ag.gates.gate.AttentionGates.at`.
        schedule: ``prefill``: once, after the prompt; ``blocks:m``: also within the prompt, after every m tokens, so
            that heads never hold more than the budget and a block on average; ``every``: after every forward pass that
            follows the prompt; ``steps:n``: there, after every n tokens. Parts are joined by +, for example
            ``blocks:128+every``.
        options: hyper-parameters of the parts, for example ``window=32``; see their classes.
            ``tau="llama2-7b-chat-4k"`` looks up the published temperatures of ``preference`` for a model and a budget
            in tokens. Of every policy: ``positions="slot"`` rotates keys and queries by their slots in the cache
            instead of their places in the text (StreamingLLM), so that a stream may run past the model's context;
            ``positions="interpolated"`` by their places, of which the far ones are squeezed once the text is longer
            than the context; ``kv_dtype="int8"`` holds keys and values in codes of 8 bits
            (:class:`ag.kernels.codes.Codes`). Scorers see the decoded keys and values. A prompt that is read in one
            pass is scored before encoding.

    Raises:
        UserError: for unknown names (the nearest is suggested), parts that cannot combine, values out of range, or
            settings beside a policy, which has its own.
        ag.gates.export.ExportError: when the gates cannot be read.
    """
    if isinstance(spec, Policy):
        if budget is not None or schedule != "prefill" or options:
            raise UserError(f"{spec!r} has its budget, schedule and options already; give them to ag.policy.")
        return spec
    if not isinstance(spec, str | PolicySpec):
        raise UserError(f"ag.policy: spec={spec!r:.80}: expected the text of a policy, such as 'h2o' or 'gates:PATH'.")
    spec = PolicySpec.parse(spec) if isinstance(spec, str) else spec
    budget = None if budget is None else parse_budget(budget)
    parts, options_left = spec.resolved(), dict(options)
    check_policy(spec, budget, schedule, options)
    if spec.evicts and schedule != "prefill" and issubclass(SCORERS[parts.scorer], KVzip):
        raise UserError(f"Policy '{spec}' scores a prompt once, after it: schedule={schedule!r}: expected prefill.")
    engine: dict[str, Any] = {name: options_left.pop(name) for name in ENGINE if name in options_left}
    for name, value in engine.items():
        _check_type(f"Policy '{spec}': {name}={value!r}", value, get_type_hints(Policy)[name])
    boundary = {name: options_left.pop(name) for name in BOUNDARY if name in options_left and spec.reads_gates}
    gates = AttentionGates.from_pretrained(spec.path) if spec.path else None
    scorer = _scorer(parts, options_left) if spec.evicts else None
    kind = ALLOCATORS[str(parts.allocator)]
    window = None if scorer is None else scorer.needs.observers
    allocator = _make(kind, kind.completed(options_left, budget, window))
    gates = _with_boundary(gates, boundary, spec, budget)
    made = Policy(spec, budget, schedule, options, scorer=scorer, allocator=allocator, gates=gates, **engine)
    return made if gates is None else made.with_trained_protection(gates)


def _scorer(spec: PolicySpec, options: dict[str, Option]) -> Scorer:
    """Make the scorer and its wrapper; an option goes to the wrapper when that defines it, else to the base."""
    base = SCORERS[spec.scorer]
    if spec.wrapper is None:
        return _make(base, options)
    wrapper = WRAPPERS[spec.wrapper]
    wrapper.accepts(base, options, spec)
    bases = [part for part in wrapper.__mro__ if issubclass(part, Wrapper) and part is not Wrapper]
    own = {name for part in bases for name in vars(part).get("__annotations__", {})} & {*option_names(wrapper)}
    inner_options = {name: options.pop(name) for name in [*options] if name in own - {"inner"}}
    return _make(wrapper, inner_options, inner=_make(base, options))


def _with_boundary(
    gates: AttentionGates | None, boundary: Mapping[str, Option], spec: PolicySpec, budget: int | float | None
) -> AttentionGates | None:
    """Return the gates with the boundary of their flags moved by the options."""
    for name, value in boundary.items():
        if budget is not None:
            raise UserError(
                f"Policy '{spec}': {name}={value} moves the boundary of the flags, and with budget={budget} the most "
                "probable tokens stay whatever their flags; leave one of the two out, or use "
                f"{replace(spec, scorer=FLAGS, wrapper=None, allocator=None)}."
            )
        _check_type(f"Policy '{spec}': {name}={value!r}", value, float)
        if gates is None:
            raise UserError(
                f"Policy '{spec}': {name}={value} needs {spec.scorer}:PATH; for gates in memory use ag.attach(model, "
                f"gates.at({name}={value}))."
            )
    if gates is None or not boundary:
        return gates
    try:
        return gates.at(**cast("Any", boundary))
    except UserError as error:
        raise UserError(f"Policy '{spec}': {error}") from None


def _make(part: type[Part], options: dict[str, Option], **fixed: Any) -> Part:
    names = [name for name in option_names(part) if name not in fixed]
    options_given: dict[str, Any] = {name: options.pop(name) for name in names if name in options}
    hints = get_type_hints(part)
    for name, value in options_given.items():
        _check_type(f"{part.__name__}: {name}={value!r}", value, hints[name])
    return part(**options_given, **fixed)


def _check_type(what: str, value: Option, hint: Any) -> None:
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if get_origin(hint) is Literal:
        fits, expected = value in get_args(hint), " or ".join(map(str, get_args(hint)))
    else:
        fits = type(value) in kinds or (float in kinds and type(value) is int)
        expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
    if not fits:
        raise UserError(f"{what}: expected {expected}.")

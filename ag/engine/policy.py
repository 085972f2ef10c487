"""What to evict: a policy is parts, named by a short text such as ``snapkv+caote@pyramid``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from ag.engine.allocators import OPTIONS, Allocator, published_tau
from ag.engine.scorers import SCORERS, RowScorer, Scorer
from ag.engine.scorers.snapkv import SnapKV
from ag.engine.wrappers import NEED_ROWS, WRAPPERS, Wrapper
from ag.errors import UserError
from ag.gate import AttentionGates

ALLOCATORS = tuple(OPTIONS)
ALIASES = {"pyramidkv": "snapkv@pyramid"}
ENGINE = ("positions", "evict_before_attend", "strict")  # options of every policy; the latter two where a budget is

Option = str | int | float | bool | None
Part = TypeVar("Part", bound=Scorer | Allocator)


@dataclass(frozen=True)
class Policy:
    """A policy; its repr is the call that makes it again.

    Attributes:
        spec: the text it was made from.
        budget: tokens per KV head (int) or share of the prompt (float); None: nothing is evicted, or what flags say.
        schedule: when something is evicted; see :func:`policy`.
        options: what else was given: ``positions``, ``evict_before_attend`` and hyper-parameters of the parts.
        positions: what keys are rotated by: their place in the text, or their slot among what a head holds.
        evict_before_attend: whether queries attend to what is kept (and to themselves) instead of to all that is held
            when they come.
        strict: whether a budget below what is protected is an error; else what is protected stays.
        scorer: says what a token is worth; None for ``full``.
        allocator: shares the budget among layers and heads.
        gates: gates read from a folder; None for ``gates`` alone (those attached to the model) and other scorers.
    """

    spec: str
    budget: int | float | None = None
    schedule: str = "prefill"
    options: Mapping[str, Option] = field(default_factory=dict, hash=False)
    positions: Literal["original", "slot"] = field(default="original", compare=False)
    evict_before_attend: bool = field(default=False, compare=False)
    strict: bool = field(default=True, compare=False)
    scorer: Scorer | None = field(default=None, compare=False)
    allocator: Allocator = field(default_factory=Allocator, compare=False)
    gates: AttentionGates | None = field(default=None, compare=False)

    @property
    def by_gates(self) -> bool:
        """Whether gates take part."""
        return self.spec.startswith("gates")

    @cached_property
    def block(self) -> int | None:
        """Tokens of a prompt between evictions; None: the whole prompt."""
        return next((int(part[7:]) for part in self.schedule.split("+") if part.startswith("blocks:")), None)

    @cached_property
    def steps(self) -> int | None:
        """Tokens after the prompt between evictions; None: nothing more is evicted."""
        parts = self.schedule.split("+")
        return 1 if "every" in parts else next((int(part[6:]) for part in parts if part.startswith("steps:")), None)

    @property
    def lookback(self) -> int:
        """Earlier queries of the prompt that a decision has to be shown beside the new ones."""
        observers = self.allocator.observers - 1 if self.allocator.kind == "preference" else 0
        return max(observers, 0 if self.scorer is None else self.scorer.lookback)

    def capacity(self, lengths: Tensor) -> Tensor:
        """Return the tokens per KV head ``[B]`` that prompts of these lengths may keep, the mean over layers."""
        assert self.budget is not None
        if isinstance(self.budget, int):
            return torch.full_like(lengths, self.budget)
        tokens = lengths.double() * self.budget + 1e-9  # 0.29 of 100 are 29, though 0.29 * 100 is a little less
        return tokens.floor().long().clamp_min(1)

    def __repr__(self) -> str:
        given: dict[str, Option] = {} if self.budget is None else {"budget": self.budget}
        given |= {} if self.schedule == "prefill" else {"schedule": self.schedule}
        words = [repr(self.spec), *(f"{name}={value!r}" for name, value in (given | dict(self.options)).items())]
        return f"ag.policy({', '.join(words)})"


def policy(spec: str, budget: int | float | None = None, schedule: str = "prefill", **options: Option) -> Policy:
    """Make a policy.

    Args:
        spec: ``SCORER[+WRAPPER][@ALLOCATOR]``. Scorers: full, streaming_llm, h2o, scissorhands, tova, snapkv, cake,
            knorm, random, ``gates`` (those attached to the model) or ``gates:PATH`` (exported ones). Wrappers: vatp,
            caote, fastcaote, obcache_value, obcache_key, obcache_joint. Allocators: uniform, pyramid, preference,
            heads. The name pyramidkv stands for ``snapkv@pyramid`` (also before a wrapper), and cake without one for
            ``cake@preference``.
        budget: tokens per KV head, or as a float in (0, 1] a share of each prompt's own tokens. Gates without a
            budget keep what their flags say; with one the most probable tokens stay.
        schedule: ``prefill``: once, after the prompt; ``blocks:m``: also within the prompt, after every m tokens, so
            that never more than the budget and a block are held; ``every``: after every forward pass behind the prompt;
            ``steps:n``: there, after every n tokens. Parts are joined by +, for example ``blocks:128+every``.
        options: hyper-parameters of the parts, such as ``window=32``; see their classes. ``tau="llama2-7b-chat-4k"``
            looks up the published temperatures of ``preference`` for a model and a budget in tokens. Of every policy:
            ``positions="slot"`` rotates keys and queries by their slots in the cache instead of their places in the
            text (StreamingLLM), so that a stream may run past the model's context; ``evict_before_attend=True`` lets
            queries attend to what is kept, and to themselves, instead of to all that is held when they come (CAOTE,
            Eq. 7); ``strict=False`` keeps what is protected where the budget is smaller, instead of raising.

    Raises:
        UserError: for unknown names (the nearest is suggested), parts that cannot combine, or values out of range.
        ag.export.ExportError: when the gates cannot be read.
    """
    match = re.fullmatch(r"(.*?)(?:@([^/@]*))?", spec, re.DOTALL)  # a path may hold an @
    assert match is not None
    body, allocator = match.groups()
    head, _, path = body.partition(":")
    if path:
        path, plus, wrapper = path.rpartition("+") if body.rpartition("+")[2] in WRAPPERS else (path, "", "")
    else:
        head, plus, wrapper = head.partition("+")
    if head in ALIASES and allocator is None:
        head, _, allocator = ALIASES[head].partition("@")
    _known(head, ("full", *SCORERS, *ALIASES), "policy", spec)
    if head in ALIASES:
        raise UserError(
            f"Policy {spec!r}: {head} stands for {ALIASES[head]}, allocator included; name the parts instead."
        )
    if path and head != "gates" or ":" in body and not path:
        raise UserError(f"Policy {spec!r}: expected {'gates:PATH' if head == 'gates' else head}.")
    if plus:
        _known(wrapper, WRAPPERS, "wrapper", spec)
    if head == "full" and (plus or allocator is not None or schedule != "prefill"):
        acting = wrapper if plus else f"allocator {allocator}" if allocator is not None else f"schedule {schedule}"
        raise UserError(f"Policy {spec!r}: {acting} cannot act on full, because nothing is evicted.")
    shared = allocator is not None
    allocator = ("preference" if head == "cake" else "uniform") if allocator is None else allocator
    _known(allocator, ALLOCATORS, "allocator", spec)
    _check_budget(spec, head, budget, bool(wrapper) or shared or schedule != "prefill")
    rest = dict(options)
    engine = {name: rest.pop(name) for name in ENGINE if name in rest}
    idle = [*(rest if head == "gates" else ()), *(name for name in ENGINE[1:] if name in engine)]
    if idle and budget is None:
        why = "nothing is evicted" if head == "full" else "without a budget the gates' flags decide"
        raise UserError(f"Policy {spec!r}: {idle[0]} has no meaning, because {why}; leave it out.")
    _check_schedule(spec, schedule, allocator, head)
    for name, value in engine.items():
        _check_type(f"Policy {spec!r}: {name}={value!r}", value, get_type_hints(Policy)[name])
    gates = AttentionGates.from_pretrained(Path(path)) if path else None
    if allocator == "preference" and (model := rest.pop("tau", None)) is not None:
        rest["tau1"], rest["tau2"] = published_tau(str(model), budget)
    mine = {name: rest.pop(name) for name in OPTIONS[allocator] if name in rest}
    scorer = None if head == "full" else _scorer(spec, head, wrapper, rest)
    parts = [part for part in (scorer, getattr(scorer, "inner", None)) if part is not None]
    if allocator == "preference" and isinstance(parts[-1], SnapKV):  # one window observes for both
        mine.setdefault("observers", parts[-1].window)
    sharing = _make(Allocator, mine, kind=allocator)
    if rest:
        own = {f.name for part in parts for f in fields(part)} - {"inner"} | set(OPTIONS[allocator])
        known = {"tau"} if allocator == "preference" else set()
        _known(next(iter(rest)), sorted(own | known | set(ENGINE[: 3 if parts else 1])), "option", spec)
    return Policy(spec, budget, schedule, options, scorer=scorer, allocator=sharing, gates=gates, **engine)  # type: ignore[arg-type]


def _scorer(spec: str, head: str, wrapper: str, options: dict[str, Option]) -> Scorer:
    """Make the scorer and its wrapper; an option goes to the wrapper when that defines it, else to the base."""
    base = SCORERS[head]
    reason = base.alone or (wrapper in NEED_ROWS and not issubclass(base, RowScorer) and base.rowless)
    if wrapper and reason:
        raise UserError(f"Policy {spec!r}: {wrapper} cannot act on {head}, because {reason}.")
    if wrapper and head == "tova" and wrapper != "vatp" and options.setdefault("scope", "kv_head") == "layer":
        raise UserError(
            f"Policy {spec!r}: scope=layer has no meaning, because {wrapper} scores each head; leave it out."
        )
    if wrapper and options.get("official_order"):
        raise UserError(f"Policy {spec!r}: official_order is the order of cake's own scores; leave {wrapper} out.")
    if not wrapper:
        return _make(base, options)
    bases = [part for part in WRAPPERS[wrapper].__mro__ if issubclass(part, Wrapper) and part is not Wrapper]
    own = {name for part in bases for name in vars(part).get("__annotations__", {})} - {"inner"}
    mine = {name: options.pop(name) for name in list(options) if name in own}
    return _make(WRAPPERS[wrapper], mine, inner=_make(base, options))


def _make(part: type[Part], options: dict[str, Option], **fixed: Any) -> Part:
    names = [f.name for f in fields(part) if f.name not in fixed]
    given: dict[str, Any] = {name: options.pop(name) for name in names if name in options}
    hints = get_type_hints(part)
    for name, value in given.items():
        _check_type(f"{part.__name__}: {name}={value!r}", value, hints[name])
    return part(**given, **fixed)


def _check_type(what: str, value: Option, hint: Any) -> None:
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if get_origin(hint) is Literal:
        fits, expected = value in get_args(hint), " or ".join(map(str, get_args(hint)))
    else:
        fits = type(value) in kinds or (float in kinds and type(value) is int)
        expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
    if not fits:
        raise UserError(f"{what}: expected {expected}.")


def _check_budget(spec: str, head: str, budget: int | float | None, needed: bool) -> None:
    if head == "full":
        if budget is not None:
            raise UserError(
                f"Policy {spec!r}: budget={budget} has no meaning, because nothing is evicted; leave it out."
            )
    elif budget is None:
        if head != "gates" or needed:
            raise UserError(
                f"Policy {spec!r} needs a budget: tokens per KV head (256), or a share of the prompt (0.25)."
            )
    elif type(budget) not in (int, float) or not budget > 0 or (isinstance(budget, float) and budget > 1):
        raise UserError(f"budget={budget}: expected tokens (an int of at least 1) or a share (a float in (0, 1]).")


def _check_schedule(spec: str, schedule: str, allocator: str, head: str) -> None:
    kinds = [part.partition(":")[0] for part in schedule.split("+")]
    if not re.fullmatch(r"(prefill|every|(blocks|steps):[1-9]\d*)(\+(every|(blocks|steps):[1-9]\d*))*", schedule):
        raise UserError(f"schedule={schedule!r}: expected prefill, blocks:m, every, steps:n, or some joined by +.")
    if len(set(kinds)) < len(kinds) or {"every", "steps"} <= set(kinds) or {"prefill", "blocks"} <= set(kinds):
        raise UserError(f"schedule={schedule!r}: expected at most one part for the prompt and one for what follows.")
    if allocator == "preference" and head == "gates" and "blocks" in kinds:
        raise UserError(
            f"Policy {spec!r} with schedule={schedule!r}: gates see a prompt whole, layer by layer, and preference "
            "compares all layers after each block; use the schedule prefill, or another allocator."
        )


def _known(name: str, names: Collection[str], what: str, spec: str) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        expected = f"expected one of {', '.join(names)}" if names else "it takes none"
        raise UserError(f"Unknown {what} {name!r} in {spec!r}: {expected}{hint}")

"""The text of a policy, its options and the rule of budgets; they are read here alone, without torch."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from ag.config.policies import ALIASES, FLAGS, FULL, GATES, check_class, check_name, option_names, parts, split_label
from ag.config.sections import BUDGET
from ag.errors import UserError, check_known

ENGINE = ("positions", "kv_dtype")  # options of every policy
BOUNDARY = ("threshold", "share")  # options that move the boundary of flags
EVICTED_SHARE = "compression_ratio"  # the name that KVPress has for the share that goes
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


def parse_budget(value: Any) -> int | float:
    """Return a budget: an int is tokens per KV head, a float a share of each prompt's own tokens; refuse others."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and (value >= 1 if isinstance(value, int) else 0 < value <= 1):
        return int(value) if isinstance(value, int) else float(value)
    whole = number and math.isfinite(value) and value >= 1 and value == int(value)
    hint = f"; {int(value)} tokens are written without a point" if whole else ""
    if isinstance(value, str) and (percent := re.fullmatch(r"(\d+(?:\.\d+)?) *%", value)):
        share = float(percent[1]) / 100
        hint = f"; {value} are written {share}" if 0 < share <= 1 else ""
    raise UserError(f"budget={value!r:.80}: expected {BUDGET}{hint}.")


@dataclass(frozen=True)
class PolicySpec:
    """What a policy is made of: ``[LABEL=]SCORER[:PATH][+WRAPPER][@ALLOCATOR]``; its str is that without the label.

    A path may hold any sign. After its last slash ``+NAME`` and ``@NAME`` belong to the grammar where NAME is that of a
    wrapper or an allocator, or close to one; a folder whose own name ends so is written with a slash behind it
    (``gates:runs@heads/``).

    Attributes:
        scorer: name of a scorer, of an alias for a scorer with its allocator, ``flags`` or ``full``.
        wrapper: name of the wrapper; None means that there is none.
        allocator: name of the allocator; None means the scorer's own.
        path: folder or hub id of exported gates, for a scorer that reads gates; None means those attached to the model.
        label: its name in tables; two specs that differ in it alone are equal.
    """

    scorer: str
    wrapper: str | None = None
    allocator: str | None = None
    path: str | None = None
    label: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Write a path without slashes at its end, and an empty one as None."""
        object.__setattr__(self, "path", (self.path.rstrip("/") or "/") if self.path else None)

    @classmethod
    def parse(cls, text: str) -> PolicySpec:
        """Read the text of a policy; refuse unknown names (the nearest is suggested) and parts out of order."""
        label, bare = split_label(text)
        scorer = re.split("[:+@]", bare, maxsplit=1)[0]
        if label is not None:
            _check_label(label, scorer, text)
        check_known(scorer, (FULL, *parts("ag.scorers"), FLAGS, *ALIASES), "policy", text)
        rest, path = bare[len(scorer) :], None
        if rest.startswith(":"):
            end = _end_of_path(rest, 1)
            path, rest = rest[1:end], rest[end:]
        signs = re.fullmatch(r"(?:\+([^+@]+))?(?:@([^+@]+))?", rest)
        if signs is None or path == "" or not (path is None or _reads_gates(scorer)):
            shape = f"{scorer}{':PATH' * _reads_gates(scorer)}[+WRAPPER][@ALLOCATOR]"
            raise UserError(f"Policy {text!r}: {bare[len(scorer) :]!r} behind {scorer}: expected {shape}.")
        wrapper, allocator = signs.groups()
        if scorer in parts("ag.scorers"):
            check_class("ag.scorers", scorer)
        for what, name in (("wrapper", wrapper), ("allocator", allocator)):
            if name is not None:
                check_name(what, name, text)
        if scorer in ALIASES and allocator is not None:
            same = "@".join(ALIASES[scorer])
            raise UserError(f"Policy {text!r}: {scorer} stands for {same}, allocator included; name the parts instead.")
        return cls(scorer, wrapper, allocator, path, label)

    def __str__(self) -> str:
        path = self.path or ""
        slash = "/" if path and _end_of_path(path, 0) < len(path) else ""
        marked = ((":", path + slash), ("+", self.wrapper), ("@", self.allocator))
        return self.scorer + "".join(f"{sign}{part}" for sign, part in marked if part)

    @property
    def evicts(self) -> bool:
        """Whether tokens may be evicted."""
        return self.scorer != FULL

    @property
    def reads_gates(self) -> bool:
        """Whether gates take part."""
        return _reads_gates(self.scorer)

    @property
    def takes_budget(self) -> bool:
        """Whether it takes a budget."""
        return self.scorer not in (FULL, FLAGS)

    @property
    def ranked(self) -> PolicySpec:
        """The same gates under their other name, which takes a budget, for ``flags``; else itself."""
        return replace(self, scorer=GATES) if self.scorer == FLAGS else self

    @property
    def bare(self) -> bool:
        """Whether it needs no budget: nothing is evicted, or the flags of gates decide."""
        return not self.evicts or (self.reads_gates and self.wrapper is None and self.allocator is None)

    def with_gates(self, folder: str | None, fix: str = "") -> PolicySpec:
        """Return the same with the exported gates of a folder, where it reads some and names none.

        Without a folder such a policy is refused; ``fix`` says how to give one, beside naming it in the policy.
        """
        if not self.reads_gates or self.path is not None:
            return self
        if folder is None:
            named = " or ".join(filter(None, [f"{self.scorer}:EXPORT", fix]))
            raise UserError(f"Policy {str(self)!r} names no gates: give {named}.")
        return replace(self, path=folder)

    def resolved(self) -> PolicySpec:
        """Return the same with an alias spelt out and the allocator named."""
        if self.scorer == FLAGS:
            return self.ranked.resolved()
        if self.scorer in ALIASES:
            scorer, allocator = ALIASES[self.scorer]
            return replace(self, scorer=scorer, allocator=allocator)
        own = parts("ag.scorers")[self.scorer].default_allocator if self.evicts else next(iter(parts("ag.allocators")))
        return replace(self, allocator=self.allocator or own)


def _check_label(label: str, scorer: str, text: str) -> None:
    """Refuse a label that cannot be a name in tables and in keys."""
    expected = None
    if not re.fullmatch(r"\w[\w.-]*", label) or "=" in scorer:
        expected = "expected one label of letters, digits, _, - and . before the policy"
    elif scorer == FULL:
        expected = f"{FULL} goes without"
    elif label in (FULL, FLAGS, *parts("ag.scorers"), *ALIASES) and label != scorer:
        expected = f"{label} is another policy; choose another label"
    if expected is not None:
        raise UserError(f"Policy {text!r}: label {label!r}: {expected}.")


def named(texts: Sequence[str]) -> dict[str, PolicySpec]:
    """Read policies and return them, in their order, by their names in tables: the label, or else the text.

    In a text a path is shortened to its last two parts, or as many more as tell it from the other paths.

    Raises:
        UserError: when a text is no policy, or two policies have the same name.
    """
    found: dict[str, PolicySpec] = {}
    specs = [PolicySpec.parse(text) for text in texts]
    paths = {PurePath(spec.path).parts for spec in specs if spec.path}
    for spec in specs:
        name = spec.label or str(spec if spec.path is None else replace(spec, path=_short(spec.path, paths)))
        if name in found:
            hint = f"write LABEL={spec} for one of them" if spec.label is None else "choose another label"
            raise UserError(f"Two policies are called {name!r} ({found[name]} and {spec}): {hint}.")
        found[name] = spec
    return found


def _short(path: str, paths: Collection[tuple[str, ...]]) -> str:
    """Return the last parts of a path behind a ``…``, or the whole where little is gained."""
    parts = PurePath(path).parts
    for count in range(2, len(parts) - 1):
        if sum(other[-count:] == parts[-count:] for other in paths) == 1:
            return "/".join(("…", *parts[-count:]))
    return path


def _reads_gates(scorer: str) -> bool:
    scorers = parts("ag.scorers")
    return scorer == FLAGS or (scorer in scorers and scorers[scorer].reads_gates)


def _end_of_path(text: str, start: int) -> int:
    """Return where a path that begins at ``start`` ends and other parts begin."""
    start, end = max(start, text.rfind("/", start) + 1), len(text)
    while True:
        place = max(text.rfind("+", start, end), text.rfind("@", start, end))
        if place < 0:
            return end
        name, names = text[place + 1 : end], parts("ag.wrappers" if text[place] == "+" else "ag.allocators")
        if name and not difflib.get_close_matches(name, names, 1, cutoff=0.75):
            return end
        end = place


def check_policy(
    spec: PolicySpec, budget: int | float | None, schedule: str = "prefill", options: Mapping[str, Any] = NO_OPTIONS
) -> None:
    """Refuse a budget, a schedule and options that a policy cannot take, by their names, and the lack of a budget.

    Raises:
        UserError: names the policy, the value and the fix.
    """
    _check_known(spec, budget, options)
    _check_schedule(spec, budget, schedule)
    for name in options:
        if spec.evicts and budget is None and name not in (*ENGINE, *BOUNDARY):
            raise UserError(
                f"Policy '{spec}': {name} has no meaning, because without a budget the gates' flags decide; leave it "
                "out."
            )


def _check_schedule(spec: PolicySpec, budget: int | float | None, schedule: str) -> None:
    """Refuse an unknown schedule, and parts that cannot act where nothing is evicted, once, or where flags decide."""
    kinds = [part.partition(":")[0] for part in schedule.split("+")]
    if not re.fullmatch(r"(prefill|every|(blocks|steps):[1-9]\d*)(\+(every|(blocks|steps):[1-9]\d*))*", schedule):
        raise UserError(f"schedule={schedule!r}: expected prefill, blocks:m, every, steps:n, or some joined by +.")
    if len(set(kinds)) < len(kinds) or {"every", "steps"} <= {*kinds} or {"prefill", "blocks"} <= {*kinds}:
        raise UserError(f"schedule={schedule!r}: expected at most one part for the prompt and one for what follows.")
    later = bool({"every", "steps"} & {*kinds})
    acts = later or (schedule != "prefill" and not spec.evicts)
    given = {"budget=": budget, "+": spec.wrapper, "@": spec.allocator, "schedule=": schedule if acts else None}
    for sign, value in given.items():
        if value is not None and not spec.takes_budget:
            why = "nothing is evicted; leave it out"
            if spec.evicts:
                ranked = replace(spec.ranked, wrapper=None, allocator=None)
                why = f"flags decide themselves how much stays; leave it out, or use {ranked} with a budget"
            raise UserError(f"Policy '{spec}': {sign}{value} cannot act on {spec.scorer}: {why}.")
    if budget is None and (not spec.bare or later):
        raise UserError(f"Policy '{spec}' needs a budget: tokens per KV head (256), or a share of the prompt (0.25).")


def _check_known(spec: PolicySpec, budget: int | float | None, options: Mapping[str, Any]) -> None:
    """Refuse options that no part has."""
    named = spec.resolved()
    used = [parts("ag.scorers")[named.scorer]] if spec.evicts else []
    used += [parts("ag.wrappers")[named.wrapper]] if named.wrapper else []
    known = {name for part in used for name in option_names(part)} - {"inner"} | {*ENGINE}
    known |= {*BOUNDARY} if spec.reads_gates else set()
    if not spec.reads_gates or budget is not None:
        kind = parts("ag.allocators")[str(named.allocator)]
        known |= {*option_names(kind), *kind.shorthands}
    for name, value in options.items():
        if name == EVICTED_SHARE and name not in known and isinstance(value, float) and 0 < value < 1:
            kept = f"expected the share that stays, as budget={1 - value:.6g}" if spec.takes_budget else "leave it out"
            raise UserError(f"Policy '{spec}': {name}={value}: {kept}.")
        check_known(name, sorted(known), "option", str(spec))

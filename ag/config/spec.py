"""Readers of the text of a policy, its options and its budget, without torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from ag.config.policies import ALIASES, FLAGS, FULL, GATES, check_class, option_names, parts, split_label
from ag.config.sections import BUDGET
from ag.errors import PLUGINS_ADD, UserError, check_known

ENGINE = ("positions", "kv_dtype")  # options of every policy
BOUNDARY = ("threshold", "share")  # options that move the boundary of flags
EVICTED_SHARE = "compression_ratio"  # KVPress's name of the evicted share
MOST_TOKENS = 2**40  # more than any text has
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


def parse_budget(value: Any) -> int | float:
    """Return a budget, or refuse it. An int is tokens per KV head, a float a share of each prompt's own tokens."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and (1 <= value <= MOST_TOKENS if isinstance(value, int) else 0 < value <= 1):
        return int(value) if isinstance(value, int) else float(value)
    hint = f"; at most {MOST_TOKENS} tokens" if number and value > MOST_TOKENS else ""
    if isinstance(value, float) and 1 <= value <= MOST_TOKENS and value == int(value):
        hint = f"; {int(value)} tokens are written without a point"
    if isinstance(value, str) and (percent := re.fullmatch(r"(\d+(?:\.\d+)?) *%", value)):
        share = float(percent[1]) / 100
        hint = f"; {value} are written {share}" if 0 < share <= 1 else ""
    raise UserError(f"budget={value!r:.80}: expected {BUDGET}{hint}.")


@dataclass(frozen=True)
class PolicySpec:
    """The parts of a policy: ``[LABEL=]SCORER[:PATH][+WRAPPER][@ALLOCATOR]``; its str is the text without the label.

    A path may have any sign. After its last slash ``+NAME`` is a wrapper and ``@NAME`` an allocator, if NAME is, or
    resembles, the name of a wrapper or an allocator. To use a folder whose name ends like this, write a slash after it
    (``gates:runs@heads/``). Two specs that differ only in the label are equal.
    """

    scorer: str  # name of a scorer, ``flags``, ``full``, or an alias for a scorer with an allocator
    wrapper: str | None = None  # None: no wrapper
    allocator: str | None = None  # None: the scorer's default
    path: str | None = None  # folder or hub id of the gates that the scorer reads. None: those attached to the model
    label: str | None = field(default=None, compare=False)  # name in tables

    def __post_init__(self) -> None:
        """Remove slashes at the end of the path; an empty path becomes None."""
        object.__setattr__(self, "path", (self.path.rstrip("/") or "/") if self.path else None)

    @classmethod
    def parse(cls, text: str) -> PolicySpec:
        """Read the text of a policy; refuse unknown names, with the nearest name as a hint, and parts out of order."""
        label, bare = split_label(text)
        scorer = re.split("[:+@]", bare, maxsplit=1)[0]
        if label is not None:
            _check_label(label, scorer, text)
        check_known(scorer, (FULL, *parts("ag.scorers"), FLAGS, *ALIASES), "policy", text, PLUGINS_ADD)
        tail, path = bare[len(scorer) :], None
        if tail.startswith(":"):
            end = _end_of_path(tail, 1)
            path, tail = tail[1:end], tail[end:]
        signs = re.fullmatch(r"(?:\+([^+@]+))?(?:@([^+@]+))?", tail)
        if signs is None or path == "" or not (path is None or _reads_gates(scorer)):
            shape = f"{scorer}{':PATH' * _reads_gates(scorer)}[+WRAPPER][@ALLOCATOR]"
            raise UserError(f"Policy {text!r}: {bare[len(scorer) :]!r} after {scorer}: expected {shape}.")
        wrapper, allocator = signs.groups()
        if scorer in parts("ag.scorers"):
            check_class("ag.scorers", scorer)
        for noun, name in (("wrapper", wrapper), ("allocator", allocator)):
            if name is not None:
                check_known(name, parts(f"ag.{noun}s"), noun, text, PLUGINS_ADD)
                check_class(f"ag.{noun}s", name)
        if scorer in ALIASES and allocator is not None:
            spelt_out = "@".join(ALIASES[scorer])
            raise UserError(
                f"Policy {text!r}: {scorer} stands for {spelt_out}, allocator included; name the parts instead."
            )
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
        """Whether the scorer reads gates."""
        return _reads_gates(self.scorer)

    @property
    def takes_budget(self) -> bool:
        """Whether the policy takes a budget."""
        return self.scorer not in (FULL, FLAGS)

    @property
    def ranked(self) -> PolicySpec:
        """The policy; for ``flags``, the policy ``gates``, which ranks by these gates under a budget."""
        return replace(self, scorer=GATES) if self.scorer == FLAGS else self

    @property
    def bare(self) -> bool:
        """Whether the policy needs no budget: nothing is evicted, or the flags of gates decide."""
        return not self.evicts or (self.reads_gates and self.wrapper is None and self.allocator is None)

    def with_gates(self, folder: str | None, fix: str = "") -> PolicySpec:
        """Return the policy with the exported gates of a folder, if it reads gates and names none.

        If ``folder`` is None, a policy that reads gates and names none is refused; ``fix`` says how to give a folder,
        besides naming it in the policy.
        """
        if not self.reads_gates or self.path is not None:
            return self
        if folder is None:
            choices = " or ".join(filter(None, [f"{self.scorer}:EXPORT", fix]))
            raise UserError(f"Policy {str(self)!r} names no gates: give {choices}.")
        return replace(self, path=folder)

    def resolved(self) -> PolicySpec:
        """Return the policy without an alias, and with the name of its allocator."""
        if self.scorer == FLAGS:
            return self.ranked.resolved()
        if self.scorer in ALIASES:
            scorer, allocator = ALIASES[self.scorer]
            return replace(self, scorer=scorer, allocator=allocator)
        own = parts("ag.scorers")[self.scorer].default_allocator if self.evicts else next(iter(parts("ag.allocators")))
        return replace(self, allocator=self.allocator or own)


def _check_label(label: str, scorer: str, text: str) -> None:
    """Refuse a label that cannot be a name in tables and keys."""
    expected = None
    if not re.fullmatch(r"\w[\w.-]*", label) or "=" in scorer:
        expected = "expected one label of letters, digits, _, - and . before the policy"
    elif scorer == FULL:
        expected = f"{FULL} goes without"
    elif label in (FULL, FLAGS, *parts("ag.scorers"), *ALIASES) and label != scorer:
        expected = f"{label} is another policy; choose another label"
    if expected is not None:
        raise UserError(f"Policy {text!r}: label {label!r}: {expected}.")


def specs_by_name(texts: Sequence[str]) -> dict[str, PolicySpec]:
    """Read policies and return them, in their order, by name in tables: the label, or the text if there is no label.

    In a text a path is shortened to its last two parts, or to more parts if another path ends in these.

    Raises:
        UserError: a text is not a policy, or two policies have one name.
    """
    by_name: dict[str, PolicySpec] = {}
    specs = [PolicySpec.parse(text) for text in texts]
    paths = {PurePath(spec.path).parts for spec in specs if spec.path}
    for spec in specs:
        name = spec.label or str(spec if spec.path is None else replace(spec, path=_short(spec.path, paths)))
        if name in by_name:
            hint = f"write LABEL={spec} for one of them" if spec.label is None else "choose another label"
            raise UserError(f"Two policies are called {name!r} ({by_name[name]} and {spec}): {hint}.")
        by_name[name] = spec
    return by_name


def _short(path: str, paths: Collection[tuple[str, ...]]) -> str:
    """Return ``…`` and the last parts of a path, or the whole path if little is gained."""
    parts = PurePath(path).parts
    for count in range(2, len(parts) - 1):
        if sum(other[-count:] == parts[-count:] for other in paths) == 1:
            return "/".join(("…", *parts[-count:]))
    return path


def _reads_gates(scorer: str) -> bool:
    scorers = parts("ag.scorers")
    return scorer == FLAGS or (scorer in scorers and scorers[scorer].reads_gates)


def _end_of_path(text: str, start: int) -> int:
    """Return the end of a path that begins at ``start``; a wrapper or an allocator may follow."""
    start, end = max(start, text.rfind("/", start) + 1), len(text)
    while True:
        sign_index = max(text.rfind("+", start, end), text.rfind("@", start, end))
        if sign_index < 0:
            return end
        name, names = text[sign_index + 1 : end], parts("ag.wrappers" if text[sign_index] == "+" else "ag.allocators")
        if name and not difflib.get_close_matches(name, names, 1, cutoff=0.75):
            return end
        end = sign_index


def check_policy(
    spec: PolicySpec, budget: int | float | None, schedule: str = "prefill", options: Mapping[str, Any] = NO_OPTIONS
) -> None:
    """Refuse a missing budget, and a budget, a schedule or options (by name) that a policy does not take.

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
    """Refuse an unknown schedule, a missing budget, and settings without effect under ``full`` or ``flags``."""
    modes = [part.partition(":")[0] for part in schedule.split("+")]
    interval = r"(blocks|steps):[1-9]\d{0,11}"
    if not re.fullmatch(rf"(prefill|every|{interval})(\+(every|{interval}))*", schedule):
        raise UserError(f"schedule={schedule!r}: expected prefill, blocks:m, every, steps:n, or some joined by +.")
    if len(set(modes)) < len(modes) or {"every", "steps"} <= {*modes} or {"prefill", "blocks"} <= {*modes}:
        raise UserError(f"schedule={schedule!r}: expected at most one part for the prompt and one for what follows.")
    acts_later = bool({"every", "steps"} & {*modes})
    schedule_acts = acts_later or (schedule != "prefill" and not spec.evicts)
    arguments = {
        "budget=": budget,
        "+": spec.wrapper,
        "@": spec.allocator,
        "schedule=": schedule if schedule_acts else None,
    }
    for sign, value in arguments.items():
        if value is not None and not spec.takes_budget:
            reason = "nothing is evicted; leave it out"
            if spec.evicts:
                ranked = replace(spec.ranked, wrapper=None, allocator=None)
                reason = f"flags decide themselves how much stays; leave it out, or use {ranked} with a budget"
            raise UserError(f"Policy '{spec}': {sign}{value} cannot act on {spec.scorer}: {reason}.")
    if budget is None and (not spec.bare or acts_later):
        raise UserError(f"Policy '{spec}' needs a budget: tokens per KV head (256), or a share of the prompt (0.25).")


def _check_known(spec: PolicySpec, budget: int | float | None, options: Mapping[str, Any]) -> None:
    """Refuse options that no part of the policy has."""
    resolved = spec.resolved()
    used = [parts("ag.scorers")[resolved.scorer]] if spec.evicts else []
    used += [parts("ag.wrappers")[resolved.wrapper]] if resolved.wrapper else []
    names = {name for part in used for name in option_names(part)} - {"inner"} | {*ENGINE}
    names |= {*BOUNDARY} if spec.reads_gates else set()
    if not spec.reads_gates or budget is not None:
        allocator = parts("ag.allocators")[str(resolved.allocator)]
        names |= {*option_names(allocator), *allocator.shorthands}
    for name, value in options.items():
        if name == EVICTED_SHARE and name not in names and isinstance(value, float) and 0 < value < 1:
            kept = f"expected the share that stays, as budget={1 - value:.6g}" if spec.takes_budget else "leave it out"
            raise UserError(f"Policy '{spec}': {name}={value}: {kept}.")
        check_known(name, sorted(names), "option", str(spec))
        if isinstance(value, int) and value > MOST_TOKENS:
            raise UserError(f"Policy '{spec}': {name}={value}: expected at most {MOST_TOKENS}.")

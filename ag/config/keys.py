"""The keys of a schema, and the check of their values by pydantic.

A value from a file or a command line must fit the type and bounds of its key. ``${...}`` is refused: a recipe cannot
read the environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import operator
import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, cast, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ag.errors import UserError, first_line, nearest

MAX_YAML_EVENTS = 20_000
MAX_YAML_DEPTH = 20
YamlLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


#: Keys of earlier versions of ``ag.serve``.
REMOVED_FROM_SERVE = ("cluster", "replicas", "cores")


class ConfigError(UserError):
    """A wrong key, value, file or combination."""


@dataclass(frozen=True)
class Key:
    """One key that can be set."""

    name: str  # with dots, as ``loss.alpha``
    type: Any  # bool, int, float, str, a Literal of texts, a list or dict of those, or a union of those
    default: Any = None  # MISSING means that a value is required
    doc: str = ""  # one line for ``--help``
    ge: float | None = None  # smallest value
    le: float | None = None  # largest value
    words: str = ""  # description of the values, if the type allows more; the code that reads them checks them
    of: str = ""  # for a mapping: the key that lists its entries
    #: Meaning of the values. policy, budget, device: ag.config.early checks them; export, file, folder, rows (of
    #: a file or a folder): a path that must exist; output: any other path.
    holds: str = ""

    def expected(self) -> str:
        """Return a description of valid values."""
        low = "" if self.ge is None else f", at least {self.ge}"
        high = "" if self.le is None else f", at most {self.le}"
        return (self.words or describe(self.type)) + low + high

    def accepts(self, value: Any) -> bool:
        """Whether a value has the key's type and lies within its bounds.

        An int is also a float, a bool is not an int, and a float must be finite.
        """
        try:
            _adapter(self.type, self.ge, self.le).validate_python(value)
        except ValidationError:
            return False
        return True


def keys(schema: type[Any]) -> Mapping[str, Key]:
    """Return the keys of a dataclass and its nested dataclasses by dotted name; inherited keys come last.

    If a section may have several dataclasses, a key that several of them share is listed once, and shared keys come
    first.
    """
    return _cached_keys(cast(Hashable, schema))


@cache
def _cached_keys(schema: Any) -> Mapping[str, Key]:
    by_name: dict[str, Key] = {}
    for key in _walk(schema, ""):
        by_name.setdefault(key.name, key)
    return by_name


def _walk(schema: Any, prefix: str, own_first: bool = True) -> Iterator[Key]:
    hints, own = _hints(schema), inspect.get_annotations(schema)
    for field in sorted(dataclasses.fields(schema), key=lambda field: own_first and field.name not in own):
        name, hint = prefix + field.name, hints[field.name]
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        sections = [option for option in options if dataclasses.is_dataclass(option)]  # several: one of them is chosen
        for section in sections:
            yield from _walk(section, f"{name}.", own_first=len(sections) == 1)
        if not sections:
            owner, declared = _declaration(schema, field.name)
            default = declared.default_factory() if callable(declared.default_factory) else declared.default
            yield Key(name, _hints(owner)[field.name], default, **declared.metadata)


@cache
def _hints(schema: Any) -> dict[str, Any]:
    return get_type_hints(schema)


def _declaration(schema: Any, name: str) -> tuple[Any, dataclasses.Field[Any]]:
    """Return the class and the field that describe a key; a class that only fixes the value has no description."""
    owners = [owner for owner in schema.__mro__ if name in inspect.get_annotations(owner)]
    declared = [(owner, field) for owner in owners for field in dataclasses.fields(owner) if field.name == name]
    return next((pair for pair in declared if pair[1].metadata), declared[0])


def classes_by_tag(section: Any) -> dict[str, type[Any]]:
    """Return the dataclasses of a section by pydantic's tag, which is the text of the values that choose the class."""
    return {option.__metadata__[0].tag: option.__origin__ for option in get_args(get_args(section)[0])}


def values_of(config: Any) -> dict[str, Any]:
    """Return the values of a configuration by dotted name, of the keys that its sections have."""
    schema_keys, values = keys(type(config)), {}
    for name in schema_keys:
        with contextlib.suppress(AttributeError):
            values[name] = operator.attrgetter(name)(config)
    return values


def refuse(section: Any, names: str, reason: str, prefix: str = "") -> NoReturn:
    """Raise the error of values that do not go together: ``KEY=VALUE with KEY=VALUE: REASON``.

    The keys are the ``names``, separated by blanks, each with ``prefix`` before it; the section has them as attributes.
    """
    given_keys = (f"{prefix}{name}={as_argument(operator.attrgetter(name)(section))}" for name in names.split())
    first, *other_keys = given_keys
    raise ConfigError(f"{first}{' with ' * bool(other_keys)}{', '.join(other_keys)}: {reason}")


def as_argument(value: Any) -> str:
    """Return a value in the form of the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(as_argument, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def describe(hint: Any) -> str:
    """Return a description of a type, for example ``lm | kl | regress`` or ``whole number | null``."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin in (Union, UnionType):
        return " | ".join(describe(arg) for arg in args)
    if origin is list:
        return f"list of {describe(args[0])}"
    words = {bool: "true | false", int: "whole number", float: "number", str: "text", NoneType: "null"}
    return words.get(hint, "mapping")


@cache
def _adapter(hint: Any, ge: float | None, le: float | None) -> TypeAdapter[Any]:
    bounded: Any = hint if ge is None and le is None else Annotated[hint, Field(ge=ge, le=le)]
    return TypeAdapter(bounded, config=ConfigDict(strict=True, allow_inf_nan=False))


def unknown_key_error(name: str, schema_keys: Mapping[str, Key]) -> ConfigError:
    """Return the error for an unknown key. It suggests a similar key, or a key with an equal last part."""
    leaf = name.rpartition(".")[2]
    same_leaf = [key for key in schema_keys if key.rpartition(".")[2] == leaf]
    sections = {key.rpartition(".")[0] for key in schema_keys if "." in key}
    if name == "recipe":
        return ConfigError("unknown key 'recipe': this command takes no recipe; give its own keys, which --help lists")
    if name in REMOVED_FROM_SERVE and "served_name" in schema_keys:
        return ConfigError(
            f"unknown key {name!r}: a server is one process; start one for each GPU, with a port= of its own, behind a "
            "load balancer (docs/serving.md)"
        )
    if name in sections:
        inside = ", ".join(key for key in schema_keys if key.startswith(name + "."))
        return ConfigError(f"{name!r} is a section, not a key: set one of {inside}")
    names = [*schema_keys, *sections]
    hint = nearest(name, names, cutoff=0.8) or nearest(name, same_leaf, cutoff=0) or nearest(name, names)
    return ConfigError(f"unknown key {one_line(name)}{hint or '; --help lists the keys'}")


def one_line(value: Any) -> str:
    """Return a value as one line of at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:76] + " ..."


def check(key: Key, value: Any) -> Any:
    """Return the value if it fits the key."""
    if any(mark in repr(value) for mark in ("${", "???")):
        raise ConfigError(
            f"{key.name}={one_line(value)}: ${{...}} and ??? are not supported; write the value itself, or put a text "
            "with these signs into a file (ag.generate: file=PATH)"
        )
    if key.accepts(value):
        return value
    unquoted = not isinstance(value, str) and key.accepts(str(value))
    choices = _choices(key.type)
    unfitting = [item for item in (value if isinstance(value, list) else [value]) if str(item) not in choices]
    hint = "; put it in quotes" if unquoted else nearest(str(unfitting[0]), choices) if unfitting else ""
    raise ConfigError(f"{key.name}={one_line(value)}: expected {key.expected()}{hint}")


def _choices(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return [str(arg) for arg in get_args(hint)]
    return [choice for arg in get_args(hint) for choice in _choices(arg)]


def parse_yaml(text: str) -> Any:
    """Read YAML as plain values; ``5e-5`` is a number.

    Raises:
        ConfigError: the text is invalid, has a key twice, or is too long or too deeply nested.
    """
    from omegaconf import OmegaConf  # imported here: the engine and the gates do not need omegaconf

    try:
        # at deep nesting the C parser overflows its stack while it builds values, but not while it yields events
        depth = 0
        for count, event in enumerate(yaml.parse(text, Loader=YamlLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if count > MAX_YAML_EVENTS or depth > MAX_YAML_DEPTH:
                raise ConfigError("too long or too deeply nested for a configuration")
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)["value"]  # type: ignore[call-overload,index]
    except ConfigError:
        raise
    except Exception as error:  # the parser raises RecursionError, KeyError and others
        mark = getattr(error, "problem_mark", None)
        location = f" in line {mark.line + 1}" if mark else ""
        reason = first_line(error) if mark is None else str(getattr(error, "problem", error))
        raise ConfigError(f"not valid YAML{location}: {reason[:200]}") from None


def from_text(key: Key, text: str) -> Any:
    """Read the right-hand side of ``key=text`` as YAML or plain text. A single item is also accepted as a list."""
    if not text:
        raise ConfigError(f"{key.name}= has no value: expected {key.expected()}")
    value: Any = text
    with contextlib.suppress(ConfigError):
        value = parse_yaml(text)
    if isinstance(value, str) and not (text[0] == text[-1] and text[0] in "'\""):
        value = text  # unchanged: YAML cuts at " #" and joins lines
    unquoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", text)
    if get_origin(key.type) is list and value == text and "," in unquoted:
        raise ConfigError(f"{key.name}={one_line(text)}: expected {key.expected()}; write {key.name}=[{text}]")
    readings = [value] if value is None else [value, text, [value]]
    fitting = [reading for reading in readings if key.accepts(reading)]
    if not fitting and "," in text and not isinstance(value, list):
        raise ConfigError(f"{key.name}={one_line(text)}: expected {key.expected()}; several values to try need -m")
    return check(key, fitting[0] if fitting else value)

"""The command line of every program: ``python -m PROGRAM [options] key.sub=value ...``."""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass
from importlib import import_module
from typing import Any, Generic, NoReturn, TypeVar

import yaml  # type: ignore[import-untyped]

from ag.config import early
from ag.config.keys import ConfigError, Key, as_argument, keys, one_line
from ag.config.recipes import dump, recipes, resolve
from ag.config.sweep import sweep
from ag.errors import BudgetWarning, UserError, first_line, nearest

T = TypeVar("T")
#: Runs a program on its arguments, by default the arguments of the process; returns the exit code.
Main = Callable[..., int]

OPTIONS = {
    "--help": "show this text (-h)",
    "--recipes": "list the shipped recipes of this command",
    "--print": "print the resolved configuration and stop",
    "--dry-run": "check the values, print what would be done, write nothing (fit: run one batch of each kind)",
    "--multirun": "one run for each combination of comma lists, such as seed=0,1 (-m)",
}
MAX_RUNS = 1000
#: The schema of each program that was imported, and the key whose value may stand alone as its first word, or "".
PROGRAMS: dict[str, tuple[type[Any], str]] = {}


@dataclass(frozen=True)
class Invocation(Generic[T]):
    """A parsed command line."""

    config: T  # the values of the keys
    dry_run: bool  # only print what would be done
    line: str  # the command as a shell reads it


def command(program: str) -> Callable[[Callable[[list[str]], int]], Main]:
    """Make the ``main`` of a program from a function that maps arguments to an exit code.

    A :class:`UserError` and an ``OSError`` (of a disk, a path or the network) become one line on stderr and exit code
    2. Ctrl-C becomes one line, with the text of the KeyboardInterrupt, and code 130. A closed pipe on stdout becomes
    code 141 without a line. A :class:`BudgetWarning` becomes one line on stderr.
    """

    def decorate(work: Callable[[list[str]], int]) -> Main:
        @functools.wraps(work)
        def main(argv: list[str] | None = None) -> int:
            try:
                try:
                    with _short_warnings(program):
                        return work(sys.argv[1:] if argv is None else argv)
                finally:
                    sys.stdout.flush()  # a closed pipe may raise only here
            except UserError as error:
                print(f"{program}: error: {error}", file=sys.stderr)
                return 2
            except KeyboardInterrupt as stop:
                print(f"{program}: stopped by Ctrl-C{stop.args and f'; {stop}' or ''}", file=sys.stderr)
                return 128 + signal.SIGINT
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
                return 128 + signal.SIGPIPE
            except OSError as error:
                print(f"{program}: error: {first_line(error)}", file=sys.stderr)
                return 2

        return main

    return decorate


def main_from_schema(
    program: str,
    schema: type[Any],
    runs: str,
    first: str = "",
    check: Callable[[Any], None] | None = None,
    elsewhere: bool = False,
    bare: bool = False,
) -> Main:
    """Make the ``main`` of a program from the schema of its keys.

    Args:
        program: name for ``python -m``.
        schema: dataclass with the keys.
        runs: ``module:function``, a function from an :class:`Invocation` to an exit code. It is imported after parsing,
            so that help and listings need no torch.
        first: a key whose value may stand alone as the first word.
        check: raises the command's own errors before torch is loaded, after :func:`ag.config.early.check`. None: no
            further checks.
        elsewhere: whether the described work runs on another machine, with other devices.
        bare: whether the program runs without any argument.
    """
    PROGRAMS[program] = schema, first

    @command(program)
    def main(argv: list[str]) -> int:
        invocation = parse(argv, schema, program, first, bare)
        early.check(invocation.config, elsewhere)
        if check is not None:
            check(invocation.config)
        module, _, function = runs.partition(":")
        code: int = getattr(import_module(module), function)(invocation)
        return code

    return main


@contextmanager
def _short_warnings(program: str) -> Iterator[None]:
    """Print this library's warnings as lines of the program, without a location in the code."""
    with warnings.catch_warnings():
        show_other = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *location: Any, **options: Any) -> None:
            if issubclass(category, BudgetWarning):
                print(f"{program}: warning: {message}", file=sys.stderr)
            else:
                show_other(message, category, *location, **options)

        warnings.showwarning = show
        yield


def parse(argv: Sequence[str], schema: type[T], program: str, first: str = "", bare: bool = False) -> Invocation[T]:
    """Read a command line (arguments as in :func:`main_from_schema`); run help, listings and sweeps.

    Raises:
        SystemExit: 0 after help, a listing, or a sweep without failures; 1 if a run of a sweep failed; 2, with one line
            on stderr, for an error in the command line or the recipe.
    """
    try:
        words = [f"{first}={argv[0]}", *argv[1:]] if first and argv and not re.match("-|.*=", argv[0]) else argv
        if not words and not bare:
            hint = "recipe=NAME, " if "recipe" in keys(schema) else ""
            raise ConfigError(f"nothing to do: give {hint}key=value or --help")
        options, overrides = _split_arguments(words, keys(schema))
        if "--help" in options:
            _exit_with(_help(schema, program))
        if "--recipes" in options:
            _exit_with(_recipes(program))
        runs = _expand(overrides) if "--multirun" in options else [overrides]
        configs = _resolve(schema, runs, program)
        if "--print" in options:
            _exit_with("---\n".join(map(dump, configs)).rstrip())
        if "--multirun" in options:
            raise SystemExit(sweep(runs, configs, program, ["--dry-run"] if "--dry-run" in options else []))
    except ValueError as error:
        print(f"{program}: error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    line = shlex.join(["python", "-m", program, *argv])
    return Invocation(configs[0], dry_run="--dry-run" in options, line=line)


def _exit_with(text: str) -> NoReturn:
    print(text)
    raise SystemExit(0)


def _split_arguments(argv: Sequence[str], schema_keys: Mapping[str, Key]) -> tuple[set[str], dict[str, str]]:
    """Separate options from ``key=text``. If a key is repeated, its last value counts."""
    options, overrides = set(), {}
    for argument in argv:
        name, equals, text = argument.partition("=")
        option = {"-h": "--help", "-m": "--multirun"}.get(argument, argument)
        if option in OPTIONS:
            options.add(option)
        elif argument.startswith("-"):
            bare = name.lstrip("-")
            hint = f"; write {bare}=..." if bare in schema_keys else nearest(argument, list(OPTIONS))
            raise ConfigError(f"unknown option {one_line(argument)}{hint or '; --help lists the options'}")
        elif not equals:
            raise ConfigError(f"{one_line(argument)}: expected key=value{_missing_key(argument, schema_keys)}")
        else:
            overrides[name] = text
    return options, overrides


def _missing_key(argument: str, schema_keys: Mapping[str, Key]) -> str:
    """Return a hint for an argument without a key."""
    if argument in schema_keys:
        return f"; write {argument}=..."
    is_file = argument.endswith((".yaml", ".yml"))
    if is_file and "config" in schema_keys:
        return f"; write config={argument}"
    if is_file or argument in recipes():
        return f"; write recipe={argument}" if "recipe" in schema_keys else "; this command takes no recipe"
    return nearest(argument, list(schema_keys)) or "; --help lists the keys"


def _resolve(schema: type[T], runs: list[dict[str, str]], program: str) -> list[T]:
    for name in (run.get("recipe", "") for run in runs if recipes(program)):
        if name in recipes() and name not in recipes(program):
            owner = f"ag.{recipes()[name].parent.name}"
            raise ConfigError(f"recipe={name} is one of {owner}, not of {program}; {program} --recipes lists its own")
    return [resolve(schema, run) for run in runs]


def _help(schema: type[Any], program: str) -> str:
    schema_keys = keys(schema)
    assignments = {
        name: f"{name}={'' if key.default is MISSING else as_argument(key.default)}"
        for name, key in schema_keys.items()
    }
    width = max(map(len, assignments.values()))
    lines = [f"python -m {program} [options] key=value ...", "", "options"]
    lines += [f"  {option:<{width}}  {doc}" for option, doc in OPTIONS.items()]
    for section, names in itertools.groupby(schema_keys, lambda name: name.rpartition(".")[0]):
        lines += ["", section or "keys and their defaults"]
        lines += [
            f"  {assignments[name]:<{width}}  {schema_keys[name].doc} ({schema_keys[name].expected()})"
            for name in names
        ]
    return "\n".join(lines)


def _recipes(program: str) -> str:
    shipped = recipes(program)
    width = max(map(len, shipped), default=0)
    titles = {name: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for name, path in shipped.items()}
    return "\n".join(f"{name:<{width}}  {title}" for name, title in titles.items()) or f"{program} has no recipes"


def _expand(overrides: dict[str, str]) -> list[dict[str, str]]:
    """Return all combinations of the comma lists; the last key varies fastest."""
    choices = [_split_at_commas(text) for text in overrides.values()]
    if math.prod(map(len, choices)) > MAX_RUNS:
        raise ConfigError(f"-m: {math.prod(map(len, choices))} combinations; expected at most {MAX_RUNS}")
    return [dict(zip(overrides, chosen, strict=True)) for chosen in itertools.product(*choices)]


def _split_at_commas(text: str) -> list[str]:
    """Split at commas outside of brackets and quotes, as YAML does."""
    try:
        nodes = yaml.compose(f"[{text}]", Loader=yaml.SafeLoader).value
    except (yaml.YAMLError, RecursionError):  # the key refuses it
        return [text]
    return [text[node.start_mark.index - 1 : node.end_mark.index - 1] for node in nodes] or [text]

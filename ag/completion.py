"""``ag completion bash`` prints a script with which a shell completes commands, keys, recipes and choices."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Literal, get_args, get_origin

from ag.__main__ import COMMANDS
from ag.config.command_line import OPTIONS, PROGRAMS, command
from ag.config.keys import Key, keys
from ag.config.recipes import recipes
from ag.errors import UserError

USAGE = """python -m ag.completion bash|zsh

Prints a script that completes the words of ag: source <(ag completion bash)"""
WITHOUT_KEYS = {"completion": "bash zsh", "data": "sample"}  # the first words of commands that have no keys
START = {"bash": "", "zsh": "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"}
# A shell that ends words at = wants the part after it alone.
SCRIPT = """\
_ag() {{
    local line="${{COMP_LINE:0:$COMP_POINT}}" prefix="" words="" candidate
    local current="${{line##* }}" command="${{line#* }}"
    command="${{command%% *}}"
    [[ $line == *" "*" "* ]] || command=""
    [[ $current == *=* ]] && prefix="${{current%%=*}}=" && current="${{current#*=}}"
    case "$command $prefix" in
{cases}
    esac
    [[ $COMP_WORDBREAKS == *=* ]] && prefix=""
    COMPREPLY=()
    while IFS= read -r candidate; do
        [[ -z $candidate ]] && continue
        [[ $candidate == *= ]] || candidate="$candidate "
        COMPREPLY+=("$prefix$candidate")
    done < <(compgen -W "$words" -- "$current")
}}
complete -o nospace -o default -F _ag ag"""


@command("ag.completion")
def main(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    if words in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if len(words) != 1 or words[0] not in START:
        raise UserError(f"{' '.join(words) or 'no words'}: expected {USAGE.splitlines()[0]}")
    print(START[words[0]] + script())
    return 0


def script() -> str:
    """Return the script, which reads nothing when it completes."""
    cases = [f"        {shlex.quote(before)}) words={shlex.quote(' '.join(after))} ;;" for before, after in _words()]
    return SCRIPT.format(cases="\n".join(cases))


def _words() -> Iterator[tuple[str, list[str]]]:
    """Yield what may follow: a command; after ``COMMAND `` its keys and options, after ``COMMAND KEY=`` the values."""
    yield " ", [*COMMANDS]
    for name in COMMANDS:
        if name in WITHOUT_KEYS:
            yield f"{name} ", WITHOUT_KEYS[name].split()
            continue
        import_module(f"ag.commands.{name}")  # which adds to PROGRAMS
        schema, first = PROGRAMS[f"ag.{name}"]
        schema_keys = keys(schema)
        first_words = _values(schema_keys[first], name) if first else []
        yield f"{name} ", [*first_words, *(f"{key}=" for key in schema_keys), *OPTIONS]
        for key in schema_keys.values():
            if values := _values(key, name):
                yield f"{name} {key.name}=", values


def _values(key: Key, name: str) -> list[str]:
    """Return the values that a key may have, if they can be listed."""
    if key.name == "recipe":
        return [*recipes(f"ag.{name}")]
    if key.type is bool:
        return ["true", "false"]
    return [str(value) for value in get_args(key.type)] if get_origin(key.type) is Literal else []


if __name__ == "__main__":
    sys.exit(main())

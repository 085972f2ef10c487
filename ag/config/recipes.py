"""Recipes with bases and overrides, resolved to one checked dataclass instance."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from ag.config.data import DATA, OWN, choose_data
from ag.config.keys import (
    ConfigError,
    Key,
    as_argument,
    check,
    from_text,
    keys,
    one_line,
    parse_yaml,
    unknown_key_error,
    values_of,
)
from ag.config.loss import LOSSES, choose_loss
from ag.errors import nearest

T = TypeVar("T")

RECIPES = Path(__file__).parents[1] / "recipes"
PATHS = ("export", "file", "folder", "output")  # values of Key.holds that mean paths
#: Sections with several dataclasses: the function that chooses the tag of one, and all of them by tag.
CHOSEN: Mapping[str, tuple[Callable[[Mapping[str, Any]], str], Mapping[str, type[Any]]]] = {
    "data": (choose_data, DATA),
    "loss": (choose_loss, LOSSES),
}
OWNERS = {"ag.plan": "ag.fit"}  # commands that take the recipes of another command
#: Keys that a resumed run may change, and sections of such keys.
MAY_CHANGE_ON_RESUME = frozenset({
    "resume", "init", "cluster", "failures", "tflops", "gpu", "share", "output", "logger",
    "data.root", "data.cache", "data.num_workers", "loss.contexts",
    "trainer.accelerator", "trainer.max_epochs", "trainer.max_steps", "trainer.val_every", "trainer.val_batches",
    "trainer.log_every", "trainer.collapse_batches", "trainer.progress",
})  # fmt: skip
SECTIONS_MAY_CHANGE = ("wandb.", "checkpoint.", "export.")


def recipes(program: str | None = None) -> dict[str, Path]:
    """Return the shipped recipes of a program by name, for example of ``ag.fit``. None: of all programs."""
    folder = "*" if program is None else OWNERS.get(program, program).removeprefix("ag.")
    return {path.stem: path for path in sorted(RECIPES.glob(f"{folder}/*.yaml"), key=lambda path: path.stem)}


def find_recipe(name: str, folder: Path) -> Path:
    """Return the file of a recipe; ``name`` is a shipped recipe or a path relative to ``folder``."""
    if name.endswith((".yaml", ".yml")) or "/" in name:
        return folder / os.path.expanduser(name)
    shipped = recipes()
    if name not in shipped:
        hint = nearest(name, list(shipped)) or "; --recipes lists them, and a file needs its .yaml"
        raise ConfigError(f"no recipe {one_line(name)}{hint}")
    return shipped[name]


def read_layers(path: Path, schema_keys: Mapping[str, Key], derived: tuple[Path, ...] = ()) -> list[dict[str, Any]]:
    """Read a recipe file and its bases; ``base:`` in a file is a recipe or another file.

    Returns the values by dotted key of each file, the outermost base first; ``recipe`` is the file's name. ``derived``
    are the files that have this file as a base, outermost first.
    """
    path = Path(os.path.abspath(path))
    if path in derived:
        cycle = " -> ".join(heir.name for heir in (*derived, path))
        raise ConfigError(f"{path.name}: base: goes in a circle ({cycle}); remove one of them")
    try:
        tree = _read_mapping(path)
        base = tree.pop("base", None)
        values = {key.name: check(key, value) for key, value in _flatten(tree, schema_keys, "")}
        if not isinstance(base, str | None):
            raise ConfigError(f"base={one_line(base)}: expected the name of a recipe or the path of a YAML file")
        parent = find_recipe(base, path.parent) if base else None
    except ConfigError as error:
        raise ConfigError(f"{path.name}: {error}") from None
    if "recipe" in schema_keys:
        values.setdefault("recipe", path.stem)
    return [*(read_layers(parent, schema_keys, (*derived, path)) if parent else []), values]


def _read_mapping(path: Path) -> dict[Any, Any]:
    try:
        if not os.path.isfile(path):
            raise ConfigError(f"there is no such file ({path})")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError("is not UTF-8 text") from None
    tree = parse_yaml(text)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"expected keys with values, got {one_line(tree)}")
    return tree


def _flatten(tree: Mapping[Any, Any], schema_keys: Mapping[str, Key], prefix: str) -> Iterator[tuple[Key, Any]]:
    for part, value in tree.items():
        name = f"{prefix}{part}"
        is_section = any(key.startswith(name + ".") for key in schema_keys)
        if name in schema_keys:
            yield schema_keys[name], value
        elif isinstance(value, dict) and value:
            yield from _flatten(value, schema_keys, name + ".")
        elif not (value in (None, {}) and is_section):
            raise unknown_key_error(name, schema_keys)


def build(schema: type[T], layers: Sequence[Mapping[str, Any]], drop: bool = False) -> T:
    """Return the configuration of values; ``__post_init__`` of its sections checks combinations.

    The last value of a key counts; the entries of mappings are merged (:func:`_merge`). A section may have several
    dataclasses, of which values such as ``data.kind`` choose one. If a layer chooses another dataclass, values from
    earlier layers that it lacks are dropped; ``drop`` drops them from all layers.

    Raises:
        ConfigError: a required key has no value, a key does not belong to the chosen dataclass, or a combination is
            invalid.
    """
    schema_keys = keys(schema)
    tree = _tree(_merge(layers, schema_keys), schema_keys)
    for section in tree.keys() & (CHOSEN.keys() - schema_keys.keys()):  # in some schemas the name is a single key
        _remove_unread(section, tree[section], layers, schema_keys, drop)
    try:
        return cast(T, _adapter(cast(Hashable, schema)).validate_python(tree))
    except ValidationError as error:
        detail = error.errors()[0]
        if detail["type"] == "missing":
            name = ".".join(map(str, detail["loc"]))
            raise ConfigError(f"{name} has no value: give {name}=...") from None
        raise ConfigError(str(detail["ctx"]["error"])) from None  # of __post_init__; the values have the keys' types


def _tree(values: Mapping[str, Any], schema_keys: Mapping[str, Key]) -> dict[str, Any]:
    """Return values by dotted key as nested sections, with ``~`` replaced in paths."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *sections, leaf = name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = _expand_home(value) if schema_keys[name].holds in PATHS else value
    return tree


def _remove_unread(
    section: str,
    values: dict[str, Any],
    layers: Sequence[Mapping[str, Any]],
    schema_keys: Mapping[str, Key],
    drop: bool,
) -> None:
    """Remove the values that the chosen dataclass of a section does not have.

    A value that is the default, or from a layer before the choice, goes in silence; any other is refused unless
    ``drop``.
    """
    choose, classes = CHOSEN[section]
    tag, chosen_in = choose(values), _chosen_in(section, layers)
    for leaf in [leaf for leaf in values if leaf not in classes[tag].__dataclass_fields__]:
        name, value = f"{section}.{leaf}", values.pop(leaf)
        set_in = max(number for number, layer in enumerate(layers) if name in layer)
        if drop or value == schema_keys[name].default or set_in < chosen_in:
            continue
        owners = [x for x, kind in classes.items() if leaf in kind.__dataclass_fields__ and not x.endswith(OWN)]
        expected = f"expected {' or '.join(owners)}; set that, or leave {name} out"
        raise ConfigError(f"{name}={as_argument(value)} with {tag}: {expected}")


def _merge(layers: Sequence[Mapping[str, Any]], schema_keys: Mapping[str, Key]) -> dict[str, Any]:
    """Return the values of layers by dotted key; the last value of a key counts.

    A layer changes single entries of a mapping, and single options within an entry. Where it shortens the list that
    names the entries (``Key.of``), entries of earlier layers go with their names.
    """
    values: dict[str, Any] = {}
    for layer in layers:
        earlier, values = values, {**values, **layer}
        for name in [name for name in values if get_origin(schema_keys[name].type) is dict]:
            list_key, has_options = schema_keys[name].of, get_origin(get_args(schema_keys[name].type)[1]) is dict
            dropped = {*(earlier.get(list_key) or [])} - {*(values.get(list_key) or [])}
            entries = {entry: value for entry, value in earlier.get(name, {}).items() if entry not in dropped}
            for entry, value in layer.get(name, {}).items():
                entries[entry] = {**entries.get(entry, {}), **value} if has_options else value
            values[name] = entries
    return values


def _chosen_in(section: str, layers: Sequence[Mapping[str, Any]]) -> int:
    """Return the index of the last layer that changes which dataclass of a section is chosen; 0 if none does."""
    choose, _ = CHOSEN[section]
    values, tags, prefix = dict[str, Any](), list[str](), f"{section}."
    for layer in layers:
        values |= {name.removeprefix(prefix): value for name, value in layer.items() if name.startswith(prefix)}
        tags.append(choose(values))
    return max((number for number in range(1, len(tags)) if tags[number] != tags[number - 1]), default=0)


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def _expand_home(value: Any) -> Any:
    """Replace a leading ``~`` of a path, or of the paths of a mapping, by the user's folder."""
    if isinstance(value, dict):
        return {name: _expand_home(path) for name, path in value.items()}
    return os.path.expanduser(value) if value else value


def resolve(schema: type[T], overrides: Mapping[str, str]) -> T:
    """Build the configuration: the values of ``recipe=``, ``config=`` or the run of ``resume=``, then the overrides."""
    schema_keys = keys(schema)
    mappings = [key for key in schema_keys.values() if get_origin(key.type) is dict]
    entries: dict[str, Key] = {}  # the mapping of each override that sets an entry of one
    for name in [name for name in overrides if name not in schema_keys]:
        mapping = next((key for key in mappings if name.startswith(f"{key.name}.")), None)
        if mapping is None:
            raise unknown_key_error(name, schema_keys)
        entries[name] = mapping
    override_values = {
        name: from_text(schema_keys[name], text) for name, text in overrides.items() if name not in entries
    }
    layers: list[dict[str, Any]] = []
    if "recipe" in override_values:
        layers = read_layers(find_recipe(override_values.pop("recipe"), Path()), schema_keys)
    elif override_values.get("config"):
        layers = read_layers(Path(os.path.expanduser(override_values.pop("config"))), schema_keys)
        for layer in layers:
            if layer.get("config"):
                raise ConfigError(f"config={layer['config']} in a file of config=: write base: {layer['config']}")
    elif override_values.get("resume"):
        layers = [values_of(load_config(_run_config(override_values["resume"]), schema))]
    for name, mapping in entries.items():
        values = override_values.get(mapping.name, {})
        override_values[mapping.name] = _set_entry(mapping, values, name, overrides[name])
    config = build(schema, [*layers, override_values])
    if getattr(config, "resume", None):
        check_resume(config, config.resume)  # type: ignore[attr-defined]
    return config


def _set_entry(mapping: Key, values: Mapping[str, Any], name: str, text: str) -> dict[str, Any]:
    """Return values of a mapping after ``MAPPING.ENTRY=text`` or ``MAPPING.ENTRY.KEY=text``; ENTRY may have dots."""
    entry, hint = name.removeprefix(f"{mapping.name}."), get_args(mapping.type)[1]
    if get_origin(hint) is not dict:
        return {**values, entry: from_text(Key(name, hint), text)}
    entry, _, leaf = entry.rpartition(".")
    if not entry:
        raise ConfigError(f"{name}={one_line(text)}: expected {mapping.name}.NAME.OPTION=...")
    return {**values, entry: {**values.get(entry, {}), leaf: from_text(Key(name, get_args(hint)[1]), text)}}


def load_config(path: str | Path, schema: type[T]) -> T:
    """Read a YAML file, for example the ``config.yaml`` of a run folder.

    Earlier versions wrote the keys of all sections there, also those that the run did not read; they are dropped.
    """
    return build(schema, read_layers(Path(path), keys(schema)), drop=True)


def dump(config: Any) -> str:
    """Return a configuration as YAML, for :func:`load_config`."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))


def check_resume(config: Any, run: str | Path) -> None:
    """Refuse to continue a run with another model, data or objective."""
    old_values, values = (values_of(x) for x in (load_config(_run_config(run), type(config)), config))
    for name, old in old_values.items():
        new = values.get(name)
        may_change = name in MAY_CHANGE_ON_RESUME or name.startswith(SECTIONS_MAY_CHANGE)
        if old != new and not may_change:
            raise ConfigError(
                f"resume={run}: that run has {name}={one_line(old)}, not {one_line(new)}; "
                f"leave {name} as it was, or start a new run without resume"
            )


def _run_config(run: str | Path) -> Path:
    path = Path(os.path.expanduser(run)) / "config.yaml"
    if not os.path.isfile(path):
        raise ConfigError(f"resume={run}: expected a run folder, such as runs/RECIPE/TIME, with a config.yaml")
    return path

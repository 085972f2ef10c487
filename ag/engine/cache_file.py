"""Caches in files: one safetensors file with a header that describes its tensors. Nothing is pickled.

It holds the tokens of each row, without block tables, and the state that later passes depend on; the policy is made
anew. A loaded cache goes on bit by bit as the saved one would.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ag.engine.cache_setup import CacheSetup
from ag.engine.cache_state import CacheState
from ag.engine.policy import Policy, policy
from ag.engine.state_dict import check_ready, restore, state_of
from ag.errors import UserError
from ag.files import replacing
from ag.gates.gate import AttentionGates
from ag.model.geometry import fingerprint
from ag.versions import versions

SCHEMA = 13
FORMAT = "ag.EvictionCache"


class Stateful(Protocol):
    """A cache with a state."""

    state: CacheState


C = TypeVar("C", bound=Stateful)


def save(cache: CacheState, path: str | os.PathLike[str]) -> None:
    """Write a cache; see :meth:`ag.engine.cache.EvictionCache.save`."""
    target, tensors = Path(path), dict[str, Tensor]()
    _check_replaceable(target)
    check_ready(cache)
    state = _packed("", state_of(cache), tensors)
    head = {
        "versions": versions("ag", "torch", "transformers"),
        "base_model": _base(cache.setup),
        "policy": _words(cache.setup),
        "gates": None if cache.setup.gates is None else _digest(cache.setup.gates),
        "state": state,
    }
    metadata = {"format": FORMAT, "schema": str(SCHEMA), "cache": json.dumps(head)}
    try:
        with replacing(target) as staged:
            safetensors.torch.save_file(tensors, staged, metadata)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{target}: cannot be written: {error}; give a path in a folder with room for it.") from error


def load(kind: Callable[[nn.Module, Policy], C], path: str | os.PathLike[str], model: nn.Module) -> C:
    """Read a cache; see :meth:`ag.engine.cache.EvictionCache.load`."""
    file = Path(path)
    with _opened(file) as (metadata, read):
        with _readable(file):
            head = json.loads(metadata["cache"])
            policy_words = head["policy"]
            loaded_policy = policy(
                policy_words["spec"], policy_words["budget"], policy_words["schedule"], **policy_words["options"]
            )
        with torch.inference_mode(False):  # the cache may be used outside of it
            cache = kind(model, loaded_policy)
        setup = cache.state.setup
        model_base, digest = _base(setup), None if setup.gates is None else _digest(setup.gates)
        with _readable(file):
            _check_base(file, head["base_model"], model_base)
            if digest != head["gates"]:
                raise UserError(
                    f"{file}: the cache was made with other gates than those that {loaded_policy!r} gives here."
                )
            with torch.inference_mode(False):
                restore(cache.state, _unpacked(head["state"], read))
    return cache


def _packed(name: str, value: object, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON has it, and put its tensors into ``tensors``."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(value, tuple | list):
        return [_packed(f"{name}.{index}", x, tensors) for index, x in enumerate(value)]
    if isinstance(value, dict):
        items = [[key, _packed(f"{name}.{key}".lstrip("."), x, tensors)] for key, x in value.items()]
        plain = all(isinstance(key, str) and key not in ("tensor", "items") for key in value)
        return dict(items) if plain else {"items": items}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise UserError(
        f"EvictionCache.save: {name} is a {type(value).__name__}: expected tensors, numbers, and tuples and dicts of "
        "these; let the scorer record such, or copy the cache by copy.deepcopy."
    )


def _unpacked(packed: Any, read: Callable[[str], Tensor]) -> Any:
    """Undo :func:`_packed`; ``read`` gives a tensor by its name in the file."""
    if isinstance(packed, list):
        return tuple(_unpacked(x, read) for x in packed)
    if not isinstance(packed, dict):
        return packed
    if "tensor" in packed:
        return read(packed["tensor"])
    return {key: _unpacked(x, read) for key, x in packed.get("items", packed.items())}


# ---- policy, model, gates


def _words(setup: CacheSetup) -> dict[str, Any]:
    """Return the arguments of :func:`ag.policy` that make the policy again."""
    cache_policy, options = setup.policy, dict(setup.policy.options)
    inner = getattr(cache_policy.scorer, "inner", cache_policy.scorer)
    for name in () if inner is None else inner.from_tokenizer:
        options |= {} if (text := getattr(inner, name)) is None else {name: text}
    remade = policy(str(cache_policy.spec), cache_policy.budget, cache_policy.schedule, **options)
    remade = remade if setup.gates is None else remade.with_trained_protection(setup.gates)
    if any(
        getattr(remade, f.name) != getattr(cache_policy, f.name)
        for f in fields(Policy)
        if f.name not in ("gates", "options")
    ):
        raise UserError(
            f"EvictionCache.save: {cache_policy!r} was changed since ag.policy made it; make it by ag.policy alone."
        )
    return {
        "spec": str(cache_policy.spec),
        "budget": cache_policy.budget,
        "schedule": cache_policy.schedule,
        "options": options,
    }


def _base(setup: CacheSetup) -> dict[str, Any]:
    """Return the geometry and type of the model, and its name for the reader."""
    config = setup.decoder.config
    return {"name": config.name_or_path or "", "dtype": str(setup.decoder.dtype), "fingerprint": fingerprint(config)}


def _digest(gates: AttentionGates) -> str:
    """Return a hash of the gates: their configuration and weights."""
    digest = hashlib.sha256(json.dumps(asdict(gates.config), sort_keys=True).encode())
    for name, x in sorted(gates.state_dict().items()):
        digest.update(name.encode())
        digest.update(x.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _check_base(file: Path, saved_base: Mapping[str, Any], model_base: Mapping[str, Any]) -> None:
    """Refuse a model of another geometry or data type."""
    pairs = {"dtype": (saved_base["dtype"], model_base["dtype"])}
    pairs |= {name: (saved_base["fingerprint"].get(name), x) for name, x in model_base["fingerprint"].items()}
    for name, (saved_value, model_value) in pairs.items():
        if saved_value != model_value:
            raise UserError(
                f"{file}: the cache was made for a model with {name}={saved_value!r} "
                f"({saved_base['name'] or 'no name'}), and this one has {model_value!r}; load that model, in that data "
                "type."
            )


# ---- files


@contextmanager
def _opened(file: Path) -> Iterator[tuple[dict[str, str], Callable[[str], Tensor]]]:
    """Open a saved cache; gives its metadata and what reads a tensor by name."""
    expected = "expected a file of EvictionCache.save"
    try:
        opened = safe_open(file, "pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cannot be read: {error}: {expected}.") from error
    with opened as tensors:
        metadata = tensors.metadata() or {}
        if metadata.get("format") != FORMAT or "cache" not in metadata:
            raise UserError(f"{file}: no saved cache: {expected}.")
        if metadata.get("schema") != str(SCHEMA):
            raise UserError(
                f"{file}: schema={metadata.get('schema')!r:.20}: expected {SCHEMA}; another version of ag wrote it: "
                "use that one, or read the prompt again."
            )
        yield metadata, tensors.get_tensor


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Turn the exceptions of a damaged file into one error."""
    try:
        yield
    except UserError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        raise UserError(f"{file}: damaged ({error!r:.80}): read the prompt again, and save the cache anew.") from error


def _check_replaceable(target: Path) -> None:
    """Refuse to write over another file than a saved cache."""
    if not target.exists():
        return
    try:
        with safe_open(target, "pt") as saved_file:
            is_saved_cache = (saved_file.metadata() or {}).get("format") == FORMAT
    except (OSError, SafetensorError):
        is_saved_cache = False
    if not is_saved_cache:
        raise UserError(f"{target}: exists and is no saved cache; give another path.")

"""What later passes of a cache depend on: all of it as tensors, numbers, and tuples and dicts of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ag.engine.block_pool import BLOCK
from ag.engine.forward import Forward
from ag.engine.kv_store import KVStore
from ag.engine.layer import EXPIRED, Layer
from ag.engine.records import Records
from ag.engine.sequences import SequenceState
from ag.engine.stopwatch import Stopwatch
from ag.errors import UserError


def check_ready(cache: Forward) -> None:
    """Refuse a cache that is not behind a prompt."""
    state, name = cache.sequences, type(cache).__name__
    if not state.columns:
        raise UserError(f"{name}.save: nothing was read yet: expected a prompt; save the cache after it.")
    if not state.ready:
        raise UserError(
            f"{name}.save: {state.num_tokens.tolist()} of {state.prompt_len.tolist()} tokens of prompts were read so "
            "far: expected all; save the cache after them."
        )


def state_of(cache: Forward) -> dict[str, Any]:
    """Return all that later passes depend on: tensors, numbers, and tuples and dicts of these."""
    return {
        "types": tuple(str(x.dtype) for x in cache.pool.token),
        "sequences": _state_of_sequences(cache.sequences),
        "held": cache.store.held,
        "owned": cache.store.owned,
        "layers": {str(part.index): _state_of_layer(cache, part) for part in cache.layers},
        "budgets": None if cache.evictor is None else cache.evictor.decision.budgets.state_dict(),
        "states": None if cache.states is None else cache.states.tensors,
    }


def _state_of_layer(cache: Forward, part: Layer) -> dict[str, Any]:
    return {
        "tokens": _tokens(cache.store, part.index),
        "records": _noted(cache.store, part.index),
        "lookback": part.observation_window.state_dict(),
        "gate_memory": part.gate_memory.state_dict(),
        "window": part.window,
        "seconds": part.watch.seconds,
    }


def restore(cache: Forward, state: Mapping[str, Any]) -> None:
    """Give a fresh cache its state, and check that the parts fit each other."""
    held, owned, layers = state["held"], state["owned"], state["layers"]
    _restore_types(cache, state["types"])
    _restore_sequences(cache.sequences, state["sequences"])
    _require("layers", [*layers] == [str(part.index) for part in cache.layers])
    _require(
        "held", held.dtype == torch.long and held.shape == (len(layers), len(cache.sequences), cache.store.kv_heads)
    )
    _require("held", bool((held >= 0).all()) and bool((held <= cache.sequences.num_tokens[:, None]).all()))
    needed = -(-held // BLOCK)
    _require("owned", owned.dtype == torch.long and owned.shape == held.shape)
    _require("owned", bool((owned >= needed).all()) and bool((owned <= needed + EXPIRED // BLOCK + 2).all()))
    cache.store.start(len(cache.sequences))
    cache.store.allocate(slice(None), owned)
    cache.store.held.copy_(held)
    cache.store.lengths.copy_(held)
    for part, said in zip(cache.layers, layers.values(), strict=True):
        _put_tokens(cache.store, part.index, said["tokens"])
        _check_ranks(cache, part.index)
        _put_noted(cache.store, part.index, said["records"])
        part.observation_window.load_state_dict(_moved(said["lookback"], cache))
        part.gate_memory.load_state_dict(_moved(said["gate_memory"], cache))
        _require("window", said["window"] is None or type(said["window"]) is int)
        part.window, part.watch = said["window"], Stopwatch(float(said["seconds"]))
        part.open_to = int(held[part.index].max())
    _require("states", (state["states"] is None) == (cache.states is None))
    if cache.states is not None:
        _require("states", all(len(x) == len(cache.sequences) for x in state["states"].values()))
        cache.states.load(_moved(state["states"], cache))
    _require("budgets", (state["budgets"] is None) == (cache.evictor is None))
    if cache.evictor is not None:
        cache.evictor.decision.budgets.load_state_dict(_moved(state["budgets"], cache))
        over = cache.evictor.decision.budgets.over_budget
        _require("over_budget", over is None or over.shape == (len(cache.sequences),))


def _state_of_sequences(sequences: SequenceState) -> dict[str, Any]:
    names = (*sequences.VECTORS, "mask", "next_ranks", "own_positions", "by_column", "protected")
    return {name: getattr(sequences, name) for name in names} | {"ids": sequences.ids.ids}


def _restore_sequences(sequences: SequenceState, state: Mapping[str, Any]) -> None:
    names = _state_of_sequences(sequences).keys()
    if state.keys() != names:
        raise KeyError(*(state.keys() ^ names))
    mask, tokens, marks, ids = (state[name] for name in ("mask", "num_tokens", "protected", "ids"))
    _require("mask", mask.dtype == torch.bool and mask.ndim == 2)
    _require("num_tokens", bool((mask.sum(1) == tokens).all()))
    for name in sequences.VECTORS:
        x = state[name]
        _require(name, x.dtype == torch.long and x.shape == tokens.shape and bool(((x >= 0) & (x <= tokens)).all()))
    _require("next_ranks", bool((state["next_ranks"] == tokens[:, None] - 1).all()))
    _require("protected", marks is None or (marks.dtype == torch.bool and len(marks) == len(tokens)))
    _require("ids", ids is None or (ids.dtype == torch.long and ids.ndim == 2 and len(ids) == len(tokens)))
    for name in ("own_positions", "by_column"):
        _require(name, isinstance(state[name], bool))
    for name in names - {"ids"}:
        setattr(sequences, name, state[name])
    sequences.ids.ids = ids


def _restore_types(cache: Forward, said: tuple[str, ...]) -> None:
    """Let the cache hold the types that the saved one held, which the model has or autocast makes."""
    device, own = cache.pool.device.type, cache.pool.token[0].dtype
    known = {str(own): own, str(cache.decoder.dtype): cache.decoder.dtype}
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
        known[str(kind)] = kind
    key, value = said
    _require("keys", key in known)
    _require("values", value in known)
    cache.hold_as(known[key], known[value])


def _require(name: str, fits: bool) -> None:
    if not fits:
        raise ValueError(name)


def _check_ranks(cache: Forward, layer: int) -> None:
    """Refuse ranks of tokens that a sequence does not have, and tokens that a row holds twice."""
    _, ranks = cache.store.ledger(layer)
    length = cache.sequences.num_tokens.to(ranks.device)[:, None, None]
    held = torch.arange(ranks.shape[-1], device=ranks.device) < cache.store.lengths[layer][..., None]
    _require("ranks", bool(((ranks >= 0) & (ranks < length))[held].all()))
    ordered = ranks.sort(dim=-1).values
    _require("ranks", not bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()))


def _moved(value: Any, cache: Forward) -> Any:
    """Return a value with its tensors on the device of the model."""
    if isinstance(value, Tensor):
        return value.to(cache.pool.device)
    if isinstance(value, tuple):
        return tuple(_moved(x, cache) for x in value)
    return {key: _moved(x, cache) for key, x in value.items()} if isinstance(value, dict) else value


# ---- what rows hold


def _tokens(store: KVStore, layer: int) -> dict[str, Tensor]:
    """Return what a layer's rows hold by column, ``[n, ...]``: row after row, slot after slot."""
    places = _held_places(store, layer)
    return {name: column.flatten(0, 1)[places] for name, column in _columns(store).items()}


def _put_tokens(store: KVStore, layer: int, tokens: Mapping[str, Tensor]) -> None:
    """Take over what :func:`_tokens` gave."""
    places = _held_places(store, layer)
    for name, column in _columns(store).items():
        x, flat = tokens[name], column.flatten(0, 1)
        _require(name, (x.dtype, *x.shape) == (flat.dtype, len(places), *flat.shape[1:]))
        flat[places] = x.to(flat.device)


def _noted(store: KVStore, layer: int) -> Records:
    """Return what a scorer noted of a layer's tokens, ``[B, C.., N]`` by name."""
    slots = int(store.held[layer].max())
    return {name: x[..., :slots] for name, x in store.records[layer].items()}


def _put_noted(store: KVStore, layer: int, records: Records) -> None:
    """Take over what :func:`_noted` gave."""
    for name, x in records.items():
        _require(name, len(x) == store.held.shape[1] and x.shape[-1] == int(store.held[layer].max()))
    store.put_records(layer, {name: x.to(store.pool.device) for name, x in records.items()})


def _held_places(store: KVStore, layer: int) -> Tensor:
    index, _ = store.ledger(layer)
    return index[torch.arange(index.shape[-1], device=index.device) < store.lengths[layer][..., None]]


def _columns(store: KVStore) -> dict[str, Tensor]:
    gate = {} if store.gate_type is None else {"gate": store.pool.gate(store.gate_type)}
    return {"keys": store.pool.keys, "values": store.pool.values, "ranks": store.pool.ranks, **gate}

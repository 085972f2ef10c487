"""The state of a cache that later passes depend on, as tensors, numbers, and tuples and dicts of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ag.engine.cache_state import CacheState, ComputeMode
from ag.engine.evictor import Stopwatch
from ag.engine.kv_store import KVStore
from ag.engine.layer import MAX_EXPIRED, Layer
from ag.engine.sequences import SequenceState
from ag.errors import UserError


def check_ready(cache: CacheState) -> None:
    """Refuse a cache that has not read its prompt."""
    state = cache.sequences
    if not state.columns:
        raise UserError("EvictionCache.save: nothing was read yet: expected a prompt; save the cache after it.")
    if not state.ready:
        raise UserError(
            f"EvictionCache.save: {state.num_tokens.tolist()} of {state.prompt_len.tolist()} tokens of prompts were "
            "read so far: expected all; save the cache after them."
        )


def state_of(cache: CacheState) -> dict[str, Any]:
    """Return all that later passes depend on: tensors, numbers, and tuples and dicts of these."""
    autocast = None if cache.compute_mode is None else cache.compute_mode.autocast
    return {
        "autocast": None if autocast is None else str(autocast).removeprefix("torch."),
        "sequences": _state_of_sequences(cache.sequences),
        "held": [store.lengths_cpu for store in cache.stores],
        "owned": [store.block_counts for store in cache.stores],
        "layers": {str(part.index): _state_of_layer(cache.layer_stores[part.index], part) for part in cache.layers},
        "budgets": None if cache.evictor is None else cache.evictor.budgets.state_dict(),
        "states": None if cache.states is None else cache.states.tensors,
    }


def _state_of_layer(store: KVStore, part: Layer) -> dict[str, Any]:
    columns, pool_index = _rows(store, part.index)
    slots = int(store.lengths_cpu[part.index].max())
    return {
        "tokens": {name: x[pool_index] for name, x in columns.items()},
        "records": {name: x[..., :slots] for name, x in store.records[part.index].items()},
        "lookback": part.observation_window.state_dict(),
        "gate_memory": part.gate_memory.state_dict(),
        "window": part.window,
        "chunk": part.chunk,
        "seconds": part.watch.seconds,
    }


def restore(cache: CacheState, state: Mapping[str, Any]) -> None:
    """Give a fresh cache its state; raises where parts do not fit each other, before a kernel works in them."""
    layers, batch = state["layers"], len(state["sequences"]["num_tokens"])
    _restore_sequences(cache.sequences, state["sequences"])
    cache.sequences.step_token_indices = cache.sequences.step_token_indices.to(cache.setup.pool.device)
    _require("layers", [*layers] == [str(part.index) for part in cache.layers])
    for store, lengths, owned in zip(cache.stores, state["held"], state["owned"], strict=True):
        for name, counts in (("held", lengths), ("owned", owned)):
            _require(name, counts.dtype == torch.long and counts.shape == (len(layers), batch, store.kv_heads))
        _require(
            "held", bool(((lengths >= 0) & (lengths <= cache.sequences.num_tokens[:, None] * store.layer_mask)).all())
        )
        needed = -(-lengths // store.block_size)
        _require("owned", bool(((owned >= needed) & (owned <= needed + MAX_EXPIRED // store.block_size + 2)).all()))
        store.start_batch(batch)
        store.allocate(slice(None), owned)
        store.lengths_cpu.copy_(lengths)
        store.lengths.copy_(lengths)
    for part, saved in zip(cache.layers, layers.values(), strict=True):
        _restore_layer(cache, part, _to_device(saved, cache.setup.pool.device))
    name = state["autocast"]
    _require("autocast", name is None or isinstance(getattr(torch, name), torch.dtype))
    weights = next(cache.setup.decoder.parameters()).dtype
    cache.compute_mode = ComputeMode(weights, None if name is None else getattr(torch, name), inference=False)
    _require("states", (state["states"] is None) == (cache.states is None))
    if cache.states is not None:
        _require("states", all(len(x) == batch for x in state["states"].values()))
        cache.states.load(_to_device(state["states"], cache.setup.pool.device))
    _require("budgets", (state["budgets"] is None) == (cache.evictor is None))
    if cache.evictor is not None:
        cache.evictor.budgets.load_state_dict(_to_device(state["budgets"], torch.device("cpu")))
        over = cache.evictor.budgets.over_budget
        _require("over_budget", over is None or over.shape == (batch,))


def _restore_layer(cache: CacheState, part: Layer, saved: Mapping[str, Any]) -> None:
    store = cache.layer_stores[part.index]
    slots = int(store.lengths_cpu[part.index].max())
    columns, pool_index = _rows(store, part.index)
    for name, column in columns.items():
        x = saved["tokens"][name]
        _require(name, (x.dtype, *x.shape) == (column.dtype, len(pool_index), *column.shape[1:]))
        column[pool_index] = x
    token_indices = store.token_indices(part.index)
    filled = ~store.free_slots(part.index, slots)
    length = cache.sequences.num_tokens.to(token_indices.device)[:, None, None]
    _require("token_indices", bool(((token_indices >= 0) & (token_indices < length))[filled].all()))
    ordered = token_indices.sort(dim=-1).values
    _require("token_indices", not bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()))
    for name, x in saved["records"].items():
        _require(name, len(x) == len(cache.sequences) and x.shape[-1] == slots)
    store.put_records(part.index, saved["records"])
    part.observation_window.load_state_dict(saved["lookback"])
    part.gate_memory.load_state_dict(saved["gate_memory"])
    for name in ("window", "chunk"):
        _require(name, saved[name] is None or type(saved[name]) is int)
    part.window, part.chunk = saved["window"], saved["chunk"]
    part.can_expire = part.window is not None or part.visible_unflagged is not None
    part.watch, part.max_length_after_freeing = Stopwatch(float(saved["seconds"])), slots


def _state_of_sequences(sequences: SequenceState) -> dict[str, Any]:
    names = (*sequences.VECTORS, "mask", "step_token_indices", "own_positions", "by_column", "protected")
    return {name: getattr(sequences, name) for name in names} | {
        "ids": sequences.ids.ids,
        "reordered": sequences.ids.reordered,
        "broken_off": sequences.ids.broken_off,
    }


def _restore_sequences(sequences: SequenceState, state: Mapping[str, Any]) -> None:
    names = _state_of_sequences(sequences).keys()
    if state.keys() != names:
        raise KeyError(*(state.keys() ^ names))
    mask, tokens, marks, ids = (state[name] for name in ("mask", "num_tokens", "protected", "ids"))
    _require("mask", mask.dtype == torch.bool and mask.ndim == 2)
    _require("num_tokens", bool((mask.sum(1) == tokens).all()))
    for name in sequences.VECTORS:
        x = state[name]
        _require(name, x.dtype == torch.long and x.shape == tokens.shape and bool((x >= 0).all()))
        _require(name, name == "text_len" or bool((x <= tokens).all()))
    _require("step_token_indices", bool((state["step_token_indices"] == tokens[:, None] - 1).all()))
    _require("protected", marks is None or (marks.dtype == torch.bool and len(marks) == len(tokens)))
    _require("ids", ids is None or (ids.dtype == torch.long and ids.ndim == 2 and len(ids) == len(tokens)))
    for name in ("own_positions", "by_column", "reordered", "broken_off"):
        _require(name, isinstance(state[name], bool))
    of_ids = {"ids", "reordered", "broken_off"}
    for name in names:
        setattr(sequences.ids if name in of_ids else sequences, name, state[name])


def _require(name: str, fits: bool) -> None:
    if not fits:
        raise ValueError(name)


def _to_device(value: Any, device: torch.device) -> Any:
    """Return a value with its tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_to_device(x, device) for x in value)
    return {key: _to_device(x, device) for key, x in value.items()} if isinstance(value, dict) else value


def _rows(store: KVStore, layer: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return a layer's columns by name, flat over slots, and the places of a layer's tokens in them, row after row."""
    pages, pool_indices = store.pages(layer), store.pool_indices(layer)
    filled = ~store.free_slots(layer, pool_indices.shape[-1])
    columns = {"keys": pages.keys, "values": pages.values, "token_indices": pages.token_indices}
    columns |= {} if pages.gate is None else {"gate": pages.gate}
    return {name: x.flatten(0, 1) for name, x in columns.items()}, pool_indices[filled]

"""The state of a cache, as a file can have it: plain values, and tensors by name.

Taken is what later passes depend on, part by part: a part's attributes are numbers, tensors, and tuples and dicts of
these. Of the stores it is the held tokens alone; free slots are made anew where they were, so that a restored cache
computes what the original would, bit by bit. Policy and layers are made anew by :class:`ag.engine.cache.EvictionCache`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ag.engine.decide import Decision
from ag.engine.history import History
from ag.engine.layer import EvictionLayer
from ag.engine.layout import Layout
from ag.engine.policy import Policy
from ag.engine.repeat import Repetition
from ag.engine.ring import RingStore
from ag.engine.schedule import Schedule
from ag.engine.storage import RaggedStore
from ag.engine.undo import Undo
from ag.errors import UserError
from ag.gates.gate import AttentionGates
from ag.model.geometry import fingerprint
from ag.model.hooks import device_of

#: What is written of each part of a cache, and of which types.
HISTORY: dict[str, Any] = {
    **dict.fromkeys(("valid", "prompt_lengths"), Tensor),
    **dict.fromkeys(("before", "prompt_columns", "unpadded"), int),
    **dict.fromkeys(("right_padded", "gaps"), bool),
    **dict.fromkeys(("_expected", "_text", "_ends"), Tensor | None),
}
SCHEDULE = {"_number": int, "_decided": Tensor, "_decisions": tuple}
UNDO = {"_settled": int, "_taken": Tensor | None}
SHARES = {"settled": dict}
LAYER = {"seen": int, "_number": int, "evicted_at": int, "scoring_seconds": float, "memory": dict,
         "_lookback": tuple | None}  # fmt: skip
GATE_MEMORY = {"stored": tuple | None, "new": tuple | None, "_seen": int, "_even": bool}
STORE = {"batch": int, "kv_heads": int}
RING = {"recent": int, "window": int | None, "before": Tensor | None, "settled": bool, "_flagged": int, "open": bool}
LAYOUT = {"starts": Tensor, "lengths": Tensor, "limits": Tensor}
COLUMNS = {"keys": Tensor, "values": Tensor, "ranks": Tensor, "gate": Tensor | None}


class Stateful(Protocol):
    """What of :class:`ag.engine.cache.EvictionCache` a file is about."""

    decoder: Any
    policy: Policy
    gates: AttentionGates | None
    history: History
    decision: Decision | None
    repetition: Repetition | None
    evicting_layers: list[EvictionLayer]
    _schedule: Schedule
    _undo: Undo
    _sharing: list[int]


def state_of(cache: Stateful, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the state of a cache, with the names of tensors in their places; the tensors go into ``tensors``."""
    history, shares = cache.history, None if cache.decision is None else cache.decision.shares
    if not history.seen or history.seen < history.prompt_columns:
        raise UserError(
            f"{type(cache).__name__}.save: {history.seen} of {history.prompt_columns or 'the'} tokens of the prompt "
            "were read so far: expected a whole prompt; save the cache after it."
        )
    if shares is not None and (shares.open or shares.votes):
        raise UserError(f"{type(cache).__name__}.save: {cache.policy.allocator!r} has not decided yet; save it later.")
    if cache.repetition is not None and type(cache.repetition) is not Repetition:
        raise UserError(
            f"{type(cache).__name__}.save: what {type(cache.repetition).__name__} keeps is not known; a scorer that "
            "rereads in its own way cannot be saved."
        )

    def taken(name: str, part: object, attributes: Mapping[str, Any]) -> dict[str, Any]:
        return {key: _packed(f"{name}.{key}", getattr(part, key), tensors) for key in attributes}

    layers = []
    for index, layer in enumerate(cache.evicting_layers):
        name, store = f"layers.{index}", layer.store
        state = taken(name, layer, LAYER) | {"gate": taken(f"{name}.gate", layer.gate_memory, GATE_MEMORY)}
        state["store"] = None
        if store is not None:
            slots = store.layout.tokens()
            held = {key: None if x is None else x.detach()[slots] for key in COLUMNS for x in [getattr(store, key)]}
            state["store"] = {key: _packed(f"{name}.{key}", x, tensors) for key, x in held.items()}
            state["store"] |= taken(name, store, STORE | (RING if isinstance(store, RingStore) else {}))
            state["store"] |= taken(name, store.layout, LAYOUT) | {"even": store.layout.step is not None}
        layers.append(state)
    return {
        "history": taken("history", history, HISTORY),
        "schedule": taken("schedule", cache._schedule, SCHEDULE),
        "undo": taken("undo", cache._undo, UNDO),
        "shares": None if shares is None else taken("shares", shares, SHARES) | {"layers": shares.layers},
        "layers": layers,
    }


def restore(cache: Stateful, state: Mapping[str, Any], read: Callable[[str], Tensor]) -> None:
    """Give a fresh cache a state; tensors are read by name."""
    device = device_of(cache.decoder)
    cache.history = History(**_unpacked(state["history"], HISTORY, read, device))
    vars(cache._schedule).update(_unpacked(state["schedule"], SCHEDULE, read, device))
    vars(cache._undo).update(_unpacked(state["undo"], UNDO, read, device))
    if cache.repetition is not None:
        cache.repetition.done = True
    if (cache.policy.budget is None) is not (state["shares"] is None):
        raise KeyError("shares")
    if state["shares"] is not None:
        cache.decision = Decision(cache.policy, cache._sharing)
        shares = cache.decision.shares
        if state["shares"].pop("layers") != shares.layers:
            raise ValueError("shares.layers")
        shares.settled = _unpacked(state["shares"], SHARES, read, device)["settled"]
        for index, settled in shares.settled.items():
            shares.settled[index] = settled.to(device_of(cache.decoder.layers[index]))
    rows = len(cache.history.valid), fingerprint(cache.decoder.config)
    for layer, module, part in zip(cache.evicting_layers, cache.decoder.layers, state["layers"], strict=True):
        near, store = device_of(module), part.pop("store")
        vars(layer.gate_memory).update(_unpacked(part.pop("gate"), GATE_MEMORY, read, near))
        vars(layer).update(_unpacked(part, LAYER, read, near))
        layer.store = None if store is None else _store(layer, store, read, near)
        if layer.store is not None:
            _check_store(layer.store, cache.history.valid, *rows)


def _store(
    layer: EvictionLayer, state: dict[str, Any], read: Callable[[str], Tensor], device: torch.device
) -> RaggedStore:
    """Make a store as it was, free slots included."""
    ring, cpu, even = layer.makes is RingStore, torch.device("cpu"), state.pop("even")
    parts = {key: {name: state.pop(name) for name in kinds} for key, kinds in (("columns", COLUMNS), ("at", LAYOUT))}
    at = _unpacked(parts["at"], LAYOUT, read, cpu)
    starts, lengths, limits = (at[name] for name in ("starts", "lengths", "limits"))
    ends = torch.cat([starts.new_zeros(1), limits])
    held = int(lengths.sum())
    if not (lengths >= 0).all() or not (starts >= ends[:-1]).all() or not (starts + lengths <= limits).all():
        raise ValueError("rows overlap")
    if limits[-1] > 2 * held + 64 * len(limits):  # more than any layout has
        raise ValueError("rows are too far apart")
    store: RaggedStore = object.__new__(layer.makes)
    vars(store).update(_unpacked(state, STORE | (RING if ring else {}), read, cpu))
    store.layout = Layout(len(limits), device)
    store.layout.settle(starts, lengths, limits)
    if not even:
        store.layout.step = None
    slots = store.layout.tokens()
    for name, x in _unpacked(parts["columns"], COLUMNS, read, device).items():
        buffer = None if x is None else x.new_zeros(int(limits[-1]), *x.shape[1:])
        if buffer is not None:
            if len(x) != held:
                raise ValueError(name)
            buffer.index_copy_(0, slots, x)
        setattr(store, name, buffer)
    return store


def _check_store(store: RaggedStore, valid: Tensor, batch: int, geometry: Mapping[str, Any]) -> None:
    """Refuse a store that kernels could not work in."""
    rows = batch * geometry["num_kv_heads"]
    heads = (store.batch, store.kv_heads, len(store.lengths))
    if heads != (batch, geometry["num_kv_heads"], rows) or store.ranks.dtype != torch.int32 or store.ranks.ndim != 1:
        raise ValueError("rows")
    wide = geometry["head_dim"]
    if any(x.ndim != 2 or not x.is_floating_point() or x.shape[1] != wide for x in (store.keys, store.values)):
        raise ValueError("keys")
    own = valid.sum(1).cpu().repeat_interleave(store.kv_heads)
    if isinstance(store, RingStore):
        if store.recent < 1 or not (store.lengths >= own.clamp_max(store.recent)).all() or store.gate is None:
            raise ValueError("ring")
        if store.gate.dtype != torch.bool:
            raise ValueError("gate")


# ---- values


def _packed(name: str, value: object, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON has it, and put its tensors into ``tensors``."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(value, tuple | list):
        return [_packed(f"{name}.{index}", x, tensors) for index, x in enumerate(value)]
    if isinstance(value, dict):
        return {"items": [[key, _packed(f"{name}.{key}", x, tensors)] for key, x in value.items()]}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise UserError(
        f"EvictionCache.save: {name} is a {type(value).__name__}: expected tensors, numbers, and tuples and dicts of "
        "these; let the scorer record such, or copy the cache by copy.deepcopy."
    )


def _unpacked(
    state: Mapping[str, Any], kinds: Mapping[str, Any], read: Callable[[str], Tensor], device: torch.device
) -> dict[str, Any]:
    """Return the attributes of a part: exactly these, of their types, tensors on a device."""

    def value(found: Any) -> Any:
        if isinstance(found, list):
            return tuple(map(value, found))
        if isinstance(found, dict) and "tensor" in found:
            return read(found["tensor"]).to(device)
        return {key: value(x) for key, x in found["items"]} if isinstance(found, dict) else found

    if state.keys() != kinds.keys():
        raise KeyError(*(state.keys() ^ kinds.keys()))
    made = {name: value(x) for name, x in state.items()}
    for name, kind in kinds.items():
        if not isinstance(made[name], kind):
            raise TypeError(name)
    return made

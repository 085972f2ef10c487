"""The state of a cache, as a file can have it: plain values, and tensors by name.

Taken is what later passes depend on, part by part: a part's attributes are numbers, tensors, and tuples and dicts of
these. Of the stores it is the held tokens alone; free slots are made anew where they were, so that a restored cache
computes what the original would, bit by bit. Policy and layers are made anew by :class:`ag.engine.cache.EvictionCache`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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
SHARES = {"settled": dict, "over_budget": Tensor | None}
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
    if not history.seen:
        raise UserError(
            f"{type(cache).__name__}.save: nothing was read yet: expected a prompt; save the cache after it."
        )
    if history.seen < history.prompt_columns:
        raise UserError(
            f"{type(cache).__name__}.save: {history.seen} of {history.prompt_columns} columns of the prompt were read "
            "so far: expected all; save the cache after them."
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
            store.trim(spare=True)  # a ring whose tokens leave a sliding window shortens rows in a buffer that stays
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
        vars(shares).update(_unpacked(state["shares"], SHARES, read, device))
        if shares.over_budget is not None:
            shares.over_budget = shares.over_budget.cpu()
            if shares.over_budget.dtype != torch.bool or shares.over_budget.shape != cache.history.valid.shape[:1]:
                raise ValueError("shares.over_budget")
        for index, settled in shares.settled.items():
            shares.settled[index] = settled.to(device_of(cache.decoder.layers[index]))
    valid = cache.history.valid
    if valid.dtype != torch.bool or valid.ndim != 2:
        raise ValueError("history.valid")
    for index, (layer, part) in enumerate(zip(cache.evicting_layers, state["layers"], strict=True)):
        near, store = device_of(cache.decoder.layers[index]), part.pop("store")
        vars(layer.gate_memory).update(_unpacked(part.pop("gate"), GATE_MEMORY, read, near))
        for name, value in _unpacked(part, LAYER, read, near).items():
            setattr(layer, name, value)  # one of them is a property
        layer.store = None if store is None else _store(cache, index, store, read)


def _store(cache: Stateful, index: int, state: dict[str, Any], read: Callable[[str], Tensor]) -> RaggedStore:
    """Make the store of a layer as it was, free slots included.

    Kernels read and write where it says, so that all they rely on is checked first.
    """
    layer, device, cpu = cache.evicting_layers[index], device_of(cache.decoder.layers[index]), torch.device("cpu")
    ring, even = layer.store_type is RingStore, state.pop("even")
    parts = {key: {name: state.pop(name) for name in kinds} for key, kinds in (("columns", COLUMNS), ("at", LAYOUT))}
    columns, at = _unpacked(parts["columns"], COLUMNS, read, device), _unpacked(parts["at"], LAYOUT, read, cpu)
    store: RaggedStore = object.__new__(layer.store_type)
    vars(store).update(_unpacked(state, STORE | (RING if ring else {}), read, cpu))
    geometry, valid = fingerprint(cache.decoder.config), cache.history.valid
    if (store.batch, store.kv_heads) != (len(valid), geometry["num_kv_heads"]):
        raise ValueError("rows")
    said = torch.bool if ring else torch.float32 if layer.gates is not None else None
    _check_columns(columns, said, cache.decoder.dtype, geometry["head_dim"])
    rows, held = store.batch * store.kv_heads, len(columns["ranks"])
    _check_places(**at, rows=rows, held=held)
    if isinstance(store, RingStore):
        assert layer.gates is not None
        own = valid.sum(1).cpu().repeat_interleave(store.kv_heads)
        if not 1 <= store.recent <= layer.gates.config.recent_tokens or (store.window or store.recent) < store.recent:
            raise ValueError("ring")
        if not (at["lengths"] >= own.clamp_max(store.recent)).all():
            raise ValueError("rows are shorter than the ring")
        if store.before is not None and (store.before.dtype != torch.long or store.before.shape != (rows,)):
            raise ValueError("before")
    store.layout = Layout(rows, device)
    store.layout.settle(at["starts"], at["lengths"], at["limits"])
    if not even:
        store.layout.step = None
    slots = store.layout.tokens()
    for name, x in columns.items():
        buffer = None if x is None else x.new_zeros(int(at["limits"][-1]), *x.shape[1:])
        setattr(store, name, buffer if buffer is None else buffer.index_copy_(0, slots, x))
    return store


def _check_columns(
    columns: Mapping[str, Tensor | None], gate: torch.dtype | None, model: torch.dtype, head_dim: int
) -> None:
    """Refuse columns of other types or shapes than those of a store.

    Args:
        columns: what is held of each token, by name.
        gate: type of what a gate says of each token; None: nothing.
        model: type that the model computes keys and values in; autocast may have changed either.
        head_dim: numbers of a key, and of a value.
    """
    ranks, wide = columns["ranks"], (head_dim,)
    assert ranks is not None
    kind = ranks.device.type
    types = {model, torch.get_autocast_dtype(kind)} if torch.is_autocast_enabled(kind) else {model}
    wanted: dict[str, tuple[Collection[torch.dtype | None], tuple[int, ...]]]
    wanted = {"keys": (types, wide), "values": (types, wide), "ranks": ({torch.int32}, ()), "gate": ({gate}, ())}
    for name, (kinds, shape) in wanted.items():
        x = columns[name]
        if (None if x is None else x.dtype) not in kinds or (x is not None and x.shape != (len(ranks), *shape)):
            raise ValueError(name)


def _check_places(*, starts: Tensor, lengths: Tensor, limits: Tensor, rows: int, held: int) -> None:
    """Refuse rows that overlap, hold other than ``held`` tokens, or lie further apart than any layout has them."""
    for name, x in (("starts", starts), ("lengths", lengths), ("limits", limits)):
        if x.dtype != torch.long or x.shape != (rows,):
            raise ValueError(name)
    ends = torch.cat([starts.new_zeros(1), limits[:-1]])
    if not ((starts >= ends) & (limits >= starts) & (lengths >= 0)).all():
        raise ValueError("rows overlap")
    if not (lengths <= limits - starts).all():  # a sum of the two could wrap
        raise ValueError("rows overlap")
    if int(lengths.sum()) != held:
        raise ValueError("lengths")
    if int(limits[-1]) > 2 * held + 64 * rows:
        raise ValueError("rows are too far apart")


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

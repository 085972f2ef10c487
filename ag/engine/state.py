"""The state of a cache, as a file can have it: plain values, and tensors by name.

Taken is what later passes depend on, part by part: a part's attributes are numbers, tensors, and tuples and dicts of
these. Of the stores it is the held tokens, slot by slot, so that a restored cache computes what the original would, bit
by bit. Policy and layers are made anew by :class:`ag.engine.cache.EvictionCache`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ag.engine.decide import Decision
from ag.engine.history import History
from ag.engine.layer import EvictionLayer
from ag.engine.policy import Policy
from ag.engine.pool import Pool
from ag.engine.repeat import Repetition
from ag.engine.schedule import Schedule
from ag.engine.store import PagedStore
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
         "_lookback": tuple | None, "window": int | None, "_settled": bool, "_open": int, "_alike": bool}  # fmt: skip
GATE_MEMORY = {"stored": tuple | None, "new": tuple | None, "_seen": int, "_even": bool}
STORE = {"lengths": Tensor, "ordered": bool}
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
    if cache.decision is not None:
        cache.decision.settle()
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
            store.trim()  # the one that is loaded has no page to spare either
            columns = [x.detach() for x in store.tokens()]
            held = dict(zip(COLUMNS, [*columns, None], strict=False))
            state["store"] = {key: _packed(f"{name}.{key}", x, tensors) for key, x in held.items()}
            state["store"] |= taken(name, store, STORE)
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
        if layer.window is not None and layer.window < 1:
            raise ValueError("window")
        layer.store = None if store is None else _store(cache, index, store, read)


def _store(cache: Stateful, index: int, state: dict[str, Any], read: Callable[[str], Tensor]) -> PagedStore:
    """Make the store of a layer as it was; all that it relies on is checked first."""
    layer, device, cpu = cache.evicting_layers[index], device_of(cache.decoder.layers[index]), torch.device("cpu")
    found = _unpacked({name: state.pop(name) for name in COLUMNS}, COLUMNS, read, device)
    geometry, own = fingerprint(cache.decoder.config), cache.history.valid.sum(1).cpu()
    _check_columns(found, layer.gate_type, cache.decoder.dtype, geometry["head_dim"])
    kept = _unpacked(state, STORE, read, cpu)
    kv_heads, lengths = geometry["num_kv_heads"], kept["lengths"]
    _check_rows(found["ranks"].cpu(), lengths, own.repeat_interleave(kv_heads), ordered=kept["ordered"])
    columns = [x for x in found.values() if x is not None]
    pool = Pool.growing(*columns[:2])
    store = PagedStore(len(own), kv_heads, pool, layer.gate_type, in_order=not layer.rotation.in_place)
    store.fill(columns, lengths, ordered=kept["ordered"])
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


def _check_rows(ranks: Tensor, lengths: Tensor, own: Tensor, *, ordered: bool) -> None:
    """Refuse rows that do not hold tokens of their sequences, each once.

    Args:
        ranks: ``[n]`` int32, of the tokens held, row after row.
        lengths: tokens of each row.
        own: ``[R]`` long, tokens that the sequence of each row has.
        ordered: whether the ranks of each row are said to ascend.
    """
    if lengths.dtype != torch.long or lengths.shape != own.shape:
        raise ValueError("lengths")
    if not ((lengths >= 0) & (lengths <= len(ranks))).all() or int(lengths.sum()) != len(ranks):
        raise ValueError("lengths")
    rows = torch.repeat_interleave(lengths)
    if not ((ranks >= 0) & (ranks < own[rows])).all():
        raise ValueError("ranks")
    places = rows * (int(own.max()) + 1) + ranks
    if len(places.unique()) != len(places) or (ordered and not bool((places.diff() > 0).all())):
        raise ValueError("ranks")


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

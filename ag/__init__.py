"""Learned KV-cache eviction: train Attention-Gates and run them in one inference engine.

Public names are imported on first use: each part of the library loads only the modules that it needs.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ag.asking import ask as ask
    from ag.config.gate import GateConfig as GateConfig
    from ag.engine import EvictionCache as EvictionCache
    from ag.engine import Policy as Policy
    from ag.engine.block_pool import Pool as Pool
    from ag.engine.block_pool import PoolFullError as PoolFullError
    from ag.engine.policy import policy as policy
    from ag.engine.step_runner import StepRunner as StepRunner
    from ag.errors import BudgetWarning as BudgetWarning
    from ag.errors import UserError as UserError
    from ag.gates.attach import attach as attach
    from ag.gates.attach import detach as detach
    from ag.gates.gate import AttentionGates as AttentionGates
    from ag.gates.gating import Gating as Gating
    from ag.loading import load as load
    from ag.model.base import load_base as load_base

    __version__: str

_PUBLIC = {
    "AttentionGates": "ag.gates.gate",
    "BudgetWarning": "ag.errors",
    "EvictionCache": "ag.engine",
    "GateConfig": "ag.config.gate",
    "Gating": "ag.gates.gating",
    "StepRunner": "ag.engine.step_runner",
    "Policy": "ag.engine",
    "Pool": "ag.engine.block_pool",
    "PoolFullError": "ag.engine.block_pool",
    "UserError": "ag.errors",
    "ask": "ag.asking",
    "attach": "ag.gates.attach",
    "detach": "ag.gates.attach",
    "load": "ag.loading",
    "load_base": "ag.model.base",
    "policy": "ag.engine.policy",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from ag.versions import versions

        return versions("ag")["ag"]
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ag' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC, "__version__"])


# without a GPU bitsandbytes warns at import about an optional package
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

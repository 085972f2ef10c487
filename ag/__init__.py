"""Learned KV-cache eviction: train Attention-Gates and run them in one inference engine."""

import logging

from ag.attach import attach as attach
from ag.attach import detach as detach
from ag.engine import EvictionCache as EvictionCache
from ag.engine import Policy as Policy
from ag.engine import policy as policy
from ag.gate import AttentionGates as AttentionGates
from ag.gate import GateConfig as GateConfig
from ag.gating import Gating as Gating

# on CPU bitsandbytes warns at import that an optional package for speed is not there
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

"""The wrappers by name: to add one, write its file, a line here and a row of SHIPPED in ag/config/policies.py."""

from ag.engine.wrappers.base import Wrapper as Wrapper
from ag.engine.wrappers.caote import Caote, FastCaote
from ag.engine.wrappers.criticalkv import CriticalKV
from ag.engine.wrappers.obcache import OBCacheJoint, OBCacheKey, OBCacheValue
from ag.engine.wrappers.vatp import Vatp

WRAPPERS: dict[str, type[Wrapper]] = {
    "vatp": Vatp,
    "caote": Caote,
    "fastcaote": FastCaote,
    "criticalkv": CriticalKV,
    "obcache_value": OBCacheValue,
    "obcache_key": OBCacheKey,
    "obcache_joint": OBCacheJoint,
}

"""The allocators by name: to add one, write its file, a line here and a row of SHIPPED in ag/config/policies.py."""

from ag.engine.allocators.base import Allocator as Allocator
from ag.engine.allocators.global_ import Global
from ag.engine.allocators.heads import Heads
from ag.engine.allocators.preference import Preference
from ag.engine.allocators.pyramid import Pyramid
from ag.engine.allocators.uniform import Uniform

ALLOCATORS: dict[str, type[Allocator]] = {
    "uniform": Uniform,
    "pyramid": Pyramid,
    "preference": Preference,
    "heads": Heads,
    "global": Global,
}

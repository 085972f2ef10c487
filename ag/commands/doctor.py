"""Say whether this machine is ready, and what to do where it is not: ``python -m ag.doctor``."""

from __future__ import annotations

from dataclasses import dataclass

from ag.config.command_line import main_from_schema
from ag.config.sections import key


@dataclass
class DoctorConfig:
    """The keys of ``python -m ag.doctor``."""

    hub: bool = key(True, "ask the Hugging Face hub for an answer; false means no use of the network")
    compile: bool = key(True, "compile the CPU kernels that are not yet compiled; false means only look for them")


main = main_from_schema("ag.doctor", DoctorConfig, "ag.doctor:show", bare=True)

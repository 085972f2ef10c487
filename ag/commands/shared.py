"""Keys that several commands share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ag.cluster import CLUSTER
from ag.config.choice import Choice
from ag.config.policies import FULL, GATES
from ag.config.sections import BUDGET, MODEL, DtypeConfig, key, mapping
from ag.config.spec import PolicySpec, check_policy, parse_budget
from ag.errors import UserError
from ag.plugins import load

KVDtype = Literal["float", "int8"]  # as in ag.kernels.codes, which loads torch


@dataclass
class Shared:
    """The keys of every command that runs a policy."""

    plugins: list[str] = key([], "modules to import first, which add your own scorers, wrappers, allocators or tasks")
    device: str = key("cpu", "cpu, cuda, cuda:1, ...", holds="device")

    def __post_init__(self) -> None:
        load(self.plugins)


@dataclass
class SharedModel(Shared, DtypeConfig):
    """The keys of a command with a model by name."""

    model: str = key("smollm2", MODEL)


@dataclass
class SharedBudgets(Shared):
    """The keys of a command that compares policies at budgets."""

    budgets: list[Any] = key(
        [],
        "what policies keep, gates included; full and flags take no budget",
        words=f"list of {BUDGET}",
        holds="budget",
    )
    schedule: str = key("prefill", "when tokens are evicted, for policies with a budget")
    kv_dtypes: list[KVDtype] = key(["float"], "how every policy stores keys and values: float (the model's type), int8")
    cluster: str | None = key(None, CLUSTER)


@dataclass
class SharedPolicy(Shared, DtypeConfig):
    """The keys of a command that runs one policy."""

    choice: str | None = key(
        None, "file that ag.choose wrote, with a policy, its budget and options, and the model", holds="file"
    )
    gates: str | None = key(None, "folder of exported gates for a policy named gates or flags", holds="export")
    policy: str | None = key(
        None,
        "policy to evict with, such as h2o or gates; null means gates if there are some, else full",
        holds="policy",
    )
    budget: Any = key(None, "budget of the policy", words=f"{BUDGET} | null", holds="budget")
    schedule: str = key("prefill", "when tokens are evicted: prefill, blocks:m, every, steps:n, or several joined by +")
    kv_dtype: KVDtype = key(
        "float", "how keys and values are stored: float means the model's type, int8 codes of 8 bits"
    )
    options: dict[str, Any] = mapping("options of the policy, as options.window=16")
    adapter: bool = key(
        True, "apply the export's LoRA adapter to the model; false if it is merged into the model already"
    )
    model: str | None = key(None, "hub id, local folder or alias, instead of the base model that the export names")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.choice is None:
            return
        schedule = None if self.schedule == "prefill" else self.schedule
        given = {"policy": self.policy, "gates": self.gates, "budget": self.budget, "schedule": schedule}
        for name, value in given.items():
            if value is not None:
                raise UserError(f"choice={self.choice} and {name}={value} both say how to evict: leave one out.")
        chosen = Choice.read(self.choice)
        if chosen.revision is not None or chosen.quantization != "none":
            raise UserError(
                f"choice={self.choice} was measured with revision={chosen.revision} and quantization="
                f"{chosen.quantization}, and this command loads the newest weights as they are: use ag.EvictionCache "
                "in Python, or choose again without these keys."
            )
        self.choice = None  # a dumped configuration can be read again
        self.policy, self.gates, self.budget, self.schedule = (
            chosen.policy,
            chosen.gates,
            chosen.budget,
            chosen.schedule,
        )
        self.options, self.model = {**chosen.options, **self.options}, self.model or chosen.model

    @property
    def policy_text(self) -> str:
        """The text of the policy; null means ``gates`` if gates are given, else ``full``."""
        return self.policy or (GATES if self.gates else FULL)

    def spec(self) -> PolicySpec:
        """Return the policy with its gates; budget, schedule and options are checked against it.

        Raises:
            UserError: names the value, the expected values and the fix.
        """
        spec = PolicySpec.parse(self.policy_text)
        if self.gates and spec.path and Path(self.gates) != Path(spec.path):
            raise UserError(f"gates={self.gates} and policy={spec} name two exports; leave gates= out.")
        spec = spec.with_gates(self.gates, "gates=EXPORT")
        check_policy(spec, None if self.budget is None else parse_budget(self.budget), self.schedule, self.options)
        return spec

"""Draw what policies keep and why: ``python -m ag.explain gates=EXPORT root=DATA``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ag.commands.shared import SharedModel
from ag.config.command_line import main_from_schema
from ag.config.policies import GATES
from ag.config.sections import BUDGET, RevisionConfig, key, mapping
from ag.config.spec import PolicySpec, check_policy, parse_budget, specs_by_name


@dataclass
class ExplainConfig(SharedModel, RevisionConfig):
    """The keys of ``python -m ag.explain``."""

    gates: str | None = key(
        None,
        "export whose gates join the policies under the name gates, ranked under the budget; as flags if that is null",
        holds="export",
    )
    adapter: bool = key(
        True, "apply the export's LoRA adapter to the model; false if it is merged into the model already"
    )
    policies: list[str] = key(
        ["h2o", "h2o+caote", "tova", "tova+caote", "snapkv", "snapkv+caote"], "policies to picture", holds="policy"
    )
    budget: Any = key(0.25, "budget of the policies; flags take no budget", words=f"{BUDGET} | null", holds="budget")
    task: str = key("ppl", "task whose texts are shown")
    task_options: dict[str, Any] = mapping("options of the task, as task_options.OPTION=VALUE")
    root: str | None = key(None, "local folder of the task's data; null means the hub", holds="folder")
    samples: int = key(3, "number of texts", ge=1)
    tokens: int = key(256, "tokens of each text; attention maps grow with their square", ge=2)
    continuation: int = key(32, "last tokens of each text, whose attention outputs are compared", ge=1)
    layers: list[int] = key([], "layers of the attention maps; empty means four, spread over the model")
    pictures: list[Literal["keep", "attention", "errors"]] = key(
        ["keep", "attention", "errors"],
        "keep: kept tokens; attention: maps of model and gates; errors: errors of attention outputs",
    )
    output: str = key("runs/explain", "folder of the pictures", holds="output")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.continuation >= self.tokens:
            raise ValueError(f"continuation={self.continuation}: expected fewer than tokens={self.tokens}")

    @property
    def specs(self) -> dict[str, tuple[PolicySpec, int | float | None]]:
        """The policies with their budgets by name; a policy that names no gates uses ``gates=``.

        Raises:
            UserError: names a policy or a budget that cannot be used, and the fix.
        """
        budget = None if self.budget is None else parse_budget(self.budget)
        specs = {}
        texts = dict.fromkeys([*self.policies, *([GATES] if self.gates else [])])
        for name, spec in specs_by_name(list(texts)).items():
            spec_budget = budget if spec.takes_budget else None
            specs[name] = spec.with_gates(self.gates, "gates=EXPORT"), spec_budget
            check_policy(specs[name][0], spec_budget)
        return specs

    def check(self) -> None:
        """Refuse policies and budgets that cannot be used."""
        _ = self.specs


main = main_from_schema("ag.explain", ExplainConfig, "ag.evaluate.explain:run", check=ExplainConfig.check)

"""Compare policies on tasks at budgets: ``python -m ag.compare policies=[full,h2o] budgets=[0.25]``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ag.commands.shared import KVDtype, SharedBudgets, SharedModel
from ag.config.command_line import main_from_schema
from ag.config.policies import FULL, split_label
from ag.config.sections import LoadingConfig, ModelConfig, WandbConfig, base_model, key, mapping
from ag.config.spec import PolicySpec, check_policy, parse_budget, specs_by_name
from ag.errors import UserError, nearest


class Plan(NamedTuple):
    """A policy of a comparison at one budget; the fields are arguments of :func:`ag.policy`."""

    name: str  # name in tables
    spec: PolicySpec
    budget: int | float | None
    schedule: str
    options: dict[str, Any]


@dataclass
class CompareConfig(SharedModel, SharedBudgets, LoadingConfig):
    """The keys of ``python -m ag.compare``."""

    recipe: str = key("compare", "name of a shipped recipe, or path of a YAML file, with the values to start from")
    adapter: str | None = key(
        None, "export whose LoRA adapter every policy uses, with or without gates", holds="export"
    )
    policies: list[str] = key(
        ["full", "h2o", "snapkv"],
        "policies to compare, such as snapkv+caote or mine=gates:EXPORT",
        holds="policy",
    )
    also: list[str] = key(
        [], "policies in addition to policies, for example your own gates beside a recipe's gates", holds="policy"
    )
    positions: Literal["original", "slot", "interpolated"] = key(
        "original",
        "positions by which every policy rotates keys: original (in the text), slot (in the cache), or interpolated "
        "(in the text, far ones compressed into the model's context)",
    )
    tasks: list[str] = key(["ppl"], "tasks to compare on")
    root: str | None = key(
        None, "local folder of the data, with a folder for each task; null means the hub", holds="folder"
    )
    roots: dict[str, str] = mapping("folders of single tasks, as roots.TASK=FOLDER", of="tasks", holds="folder")
    samples: int | None = key(None, "the first N samples of each task that can be run", ge=1)
    max_tokens: int | None = key(None, "longest sample in tokens, instead of the model's context", ge=1)
    task_options: dict[str, dict[str, Any]] = mapping("options of tasks, as task_options.TASK.OPTION=VALUE", of="tasks")
    policy_options: dict[str, dict[str, Any]] = mapping(
        "options of policies, as policy_options.POLICY.OPTION=VALUE", of="policies"
    )
    baseline: str = key(
        "full",
        "the policy that other policies are tested against, at its own budget or theirs; full is added if policies "
        "does not list it",
    )
    mine: str | None = key(
        None, "the policy that every verdict names, with its place; null means the last of policies, or of also"
    )
    batch_policies: int = key(8, "policies of a task that share the reading of a prompt, if they allow it", ge=1)
    seed: int = key(0, "seed of generated samples", ge=0, le=2**32 - 1)
    output: str | None = key(
        None, "folder of the results, continued if it has some; null means runs/RECIPE", holds="output"
    )
    logger: list[Literal["wandb"]] = key([], "where the report goes in addition to output")
    wandb: WandbConfig = field(default_factory=WandbConfig)
    retry: bool = key(False, "run cells without a result again")
    view_samples: int = key(2, "samples of each task whose kept tokens the report shows", ge=0)
    view_tokens: int = key(1024, "tokens of each of them", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.policies, self.also = [*self.policies, *self.also], []  # a dumped configuration can be read again
        if self.baseline == FULL and FULL not in self.policies:
            self.policies = [FULL, *self.policies]
        labels = [None, *self.policies, *(split_label(text)[0] for text in self.policies)]
        for name, text in (("baseline", self.baseline), ("mine", self.mine)):
            if text not in labels:
                raise UserError(f"{name}={text}: expected one of policies={self.policies}")

    @property
    def specs(self) -> dict[str, PolicySpec]:
        """The policies by their names in tables; see :func:`ag.config.spec.specs_by_name`."""
        return specs_by_name(self.policies)

    @property
    def plans(self) -> list[Plan]:
        """The policies with their budgets and options.

        Raises:
            UserError: names a policy, a budget or an option that cannot be used, and the fix.
        """
        budgets, specs = [parse_budget(budget) for budget in self.budgets], self.specs
        options = {self.table_names.get(name, name): values for name, values in self.policy_options.items()}
        for name in options:
            if name not in specs:
                suggestion = nearest(name, [*specs, *self.policies])
                raise UserError(f"policy_options.{name}: policies= does not list {name!r}{suggestion or '.'}")
        plans = []
        for name, spec in specs.items():
            spec.with_gates(None)
            unbudgeted = not spec.takes_budget or (spec.bare and not budgets)
            if not (unbudgeted or budgets):
                raise UserError(f"policy {name!r} needs budgets=[...]: shares of the prompt such as 0.25, or tokens.")
            for budget in [None] if unbudgeted else budgets:
                plan = Plan(name, spec, budget, "prefill" if unbudgeted else self.schedule, options.get(name, {}))
                check_policy(spec, plan.budget, plan.schedule, plan.options)
                plans.append(plan)
        return plans

    def check(self) -> None:
        """Refuse policies, budgets and options that cannot be used."""
        _ = self.plans

    @property
    def table_names(self) -> dict[str, str]:
        """Names of the policies in tables, by the text that the user wrote."""
        return dict(zip(self.policies, self.specs, strict=True))

    @property
    def ordered_kv_dtypes(self) -> list[KVDtype]:
        """The types of keys and values, float first: other caches are compared with the first full cache."""
        return sorted(self.kv_dtypes, key=lambda form: form != "float")

    @property
    def base(self) -> ModelConfig:
        """The model of every policy, without the adapter."""
        return base_model(self, self.model)


def name_with_kv_dtype(name: str, kv_dtype: str) -> str:
    """Return a policy's name in tables, which ends with the type if keys and values are not floats."""
    return name if kv_dtype == "float" else f"{name} {kv_dtype}"


main = main_from_schema("ag.compare", CompareConfig, "ag.evaluate.comparison.compare:run", check=CompareConfig.check)

"""Find the smallest share that costs little on your own data: ``python -m ag.choose data=FILE loss=0.02``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ag.commands.compare import CompareConfig
from ag.commands.shared import SharedModel
from ag.config.command_line import main_from_schema
from ag.config.exports import shipped
from ag.config.policies import FULL
from ag.config.sections import LoadingConfig, key, mapping
from ag.config.spec import PolicySpec
from ag.errors import UserError

OWN = "own"  # the task of your own rows
CLIP, SCORE_CLIP = 0.5, 1.0  # largest cost of a row: nats a token, and difference of scores between 0 and 1


@dataclass
class ChooseConfig(SharedModel, LoadingConfig):
    """The keys of ``python -m ag.choose``."""

    data: str | None = key(
        None,
        "file or folder of your rows: texts, chats, prompts with responses, or contexts with questions",
        holds="rows",
    )
    task: str | None = key(None, "task of ag.compare whose samples are the rows, instead of data")
    root: str | None = key(None, "local folder of the task's data; null means the hub", holds="folder")
    task_options: dict[str, Any] = mapping("options of the task (without task: of own), as task_options.OPTION=VALUE")
    loss: float = key(
        0.02, "bound of the mean cost: nats a token of the answers, or the part of a task's score that is lost", ge=1e-6
    )
    confidence: float = key(0.9, "probability that all printed bounds hold", ge=0.5, le=0.9999)
    clip: float | None = key(
        None,
        f"largest cost that a row counts with, and largest gain; null means {CLIP} nats, or {SCORE_CLIP:g} of a score",
        ge=1e-6,
    )
    policies: list[str] = key(
        [],
        "policies to choose from; empty means snapkv, keydiff and, without adapter, the package's gates of the model",
        holds="policy",
    )
    shares: list[float] = key([0.8, 0.65, 0.5, 0.4, 0.3, 0.2, 0.1], "shares of each prompt to choose from")
    schedule: str = key("prefill", "when tokens are evicted")
    policy_options: dict[str, dict[str, Any]] = mapping(
        "options of policies, as policy_options.POLICY.OPTION=VALUE", of="policies"
    )
    adapter: str | None = key(
        None, "export whose LoRA adapter every policy uses, with or without gates", holds="export"
    )
    samples: int | None = key(None, "the first N rows that can be run", ge=2)
    max_tokens: int | None = key(None, "longest row in tokens, instead of the model's context", ge=1)
    search: float = key(
        0.3, "part of the rows that chooses what is tested; the test itself is on the other rows", ge=0.05, le=0.9
    )
    batch_policies: int | None = key(
        None, "policies at shares that share the reading of a prompt, where memory is short; null means all", ge=1
    )
    card: float = key(24.0, "memory in GiB of the card for which requests are counted", ge=1)
    seed: int = key(0, "seed of the order of the rows", ge=0, le=2**32 - 1)
    output: str = key("choice.json", "file of the choice", holds="output")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.policies:
            has_gates = self.model in shipped() and self.adapter is None  # they are for the model without an adapter
            gates = [f"gates:{self.model}"] if has_gates else []
            self.policies = [*gates, "snapkv", "keydiff"]
        self.shares = sorted(set(self.shares), reverse=True)

    def check(self) -> None:
        """Refuse data, policies and shares that cannot be used.

        Raises:
            UserError: names the key, the value and the fix.
        """
        if (self.data is None) == (self.task is None):
            raise UserError("Expected your rows or a task: give either data=FILE or task=NAME.")
        if not self.shares or not all(0 < share < 1 for share in self.shares):
            raise UserError(f"shares={self.shares}: expected shares between 0 and 1.")
        for text in self.policies:
            if not PolicySpec.parse(text).takes_budget:
                raise UserError(f"policies={self.policies}: {text} takes no share; expected policies with a budget.")
        if Path(self.output).suffix != ".json":
            raise UserError(f"output={self.output}: expected a name that ends in .json.")
        if self.data is not None and Path(self.data).resolve() == Path(self.output).resolve().parent:
            raise UserError(
                f"output={self.output} with data={self.data}: the next command would read it as rows: expected a file "
                "outside of that folder."
            )
        self.comparison().check()

    def comparison(self) -> CompareConfig:
        """Return the comparison whose cells are the policies at their shares, and a full cache."""
        task = self.task or OWN
        inherited = {part.name: getattr(self, part.name) for part in (*fields(SharedModel), *fields(LoadingConfig))}
        return CompareConfig(
            **inherited,
            adapter=self.adapter,
            policies=[FULL, *self.policies],
            budgets=self.shares,
            schedule=self.schedule,
            policy_options=self.policy_options,
            tasks=[task],
            task_options={task: self.task_options} if self.task_options else {},
            root=self.root if self.data is None else self.data,
            samples=self.samples,
            max_tokens=self.max_tokens,
            seed=self.seed,
        )


main = main_from_schema("ag.choose", ChooseConfig, "ag.evaluate.choose:run", check=ChooseConfig.check)

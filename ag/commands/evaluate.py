"""A run's gates on its own validation rows: ``python -m ag.evaluate run=RUN policies=[full,gates,h2o] budgets=[0.5]``.

``ag.compare`` with the task ``responses``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from ag.commands.compare import CompareConfig, name_with_kv_dtype
from ag.commands.shared import SharedBudgets
from ag.config import Config, ModelConfig
from ag.config.command_line import main_from_schema
from ag.config.policies import FLAGS, FULL, GATES
from ag.config.recipes import load_config
from ag.config.sections import MODEL, LoadingConfig, key
from ag.config.spec import PolicySpec, specs_by_name
from ag.errors import UserError

TASK = "responses"


@dataclass
class EvaluateConfig(SharedBudgets):
    """The keys of ``python -m ag.evaluate``."""

    run: str | None = key(None, "run folder of ag.fit, for its model, export and data", holds="folder")
    model: str | None = key(None, f"without a run: {MODEL}; null means smollm2")
    root: str | None = key(
        None, "local folder of the data: a run names its own; without a run: plain documents", holds="folder"
    )
    policies: list[str] | None = key(
        None,
        "policies to compare; flags and gates use the run's gates; null means full, flags, and with budgets gates",
        holds="policy",
    )
    samples: int | None = key(None, "validate on the first N rows or documents, instead of the run's number", ge=1)
    prompt: int | None = key(None, "tokens of each prompt, instead of the run's (plain documents)", ge=1)
    continuation: int | None = key(None, "tokens scored after it, instead of the run's (plain documents)", ge=1)
    output: str | None = key(
        None,
        "FILE.json for the figures; the folder FILE has all else; null means RUN/evaluation.json",
        holds="output",
    )

    @property
    def file(self) -> Path:
        """The file of the figures."""
        return Path(self.output) if self.output else Path(self.run or "runs") / "evaluation.json"


@dataclass(frozen=True)
class Preset:
    """A comparison with the settings of a run."""

    config: CompareConfig
    names: dict[str, str]  # names of the policies in this command's output, by label
    run_config: Config | None  # None: plain documents without a run


def translate(config: EvaluateConfig) -> Preset:
    """Return the comparison of a command."""
    if config.run is None and config.root is None:
        raise UserError("nothing to evaluate on: give run=RUN, or root=FOLDER of plain documents.")
    if config.file.suffix != ".json":
        raise UserError(f"output={config.output}: expected a name that ends in .json, such as {config.output}.json.")
    run_config = None if config.run is None else load_config(Path(config.run) / "config.yaml", Config)
    if run_config is not None and config.model is not None:
        raise UserError(
            f"model={config.model}: run={config.run} is evaluated on its own model, {run_config.model.name}; leave "
            "model out, or leave run out and give root=FOLDER of plain documents and policies=[full,flags:EXPORT]."
        )
    base = ModelConfig(name=config.model or "smollm2") if run_config is None else run_config.model
    trained = "" if run_config is None else run_config.train
    listed = _policies(config, trained)
    if not listed:
        raise UserError("policies=[]: expected at least one, such as full.")
    loading, budget_fields = fields(LoadingConfig), fields(SharedBudgets)
    copied = {x.name: getattr(base, x.name) for x in loading} | {x.name: getattr(config, x.name) for x in budget_fields}
    options = {"run_folder": config.run, "prompt": config.prompt, "continuation": config.continuation}
    return Preset(
        CompareConfig(
            recipe="evaluate",
            model=base.name,
            **copied,
            adapter=f"{config.run}/export" if "lora" in trained else None,
            policies=list(listed),
            tasks=[TASK],
            root=config.root,
            samples=config.samples,
            task_options={TASK: {name: value for name, value in options.items() if value is not None}},
            baseline=next(iter(listed)),
            output=str(config.file.with_suffix("")),
            retry=True,
        ),
        {
            name_with_kv_dtype(label, kv_dtype): name_with_kv_dtype(name, kv_dtype)
            for kv_dtype in config.kv_dtypes
            for label, name in zip(specs_by_name(list(listed)), listed.values(), strict=True)
        },
        run_config,
    )


def _policies(config: EvaluateConfig, trained: str) -> dict[str, str]:
    """Return the names of the policies by their text; ``flags`` and ``gates`` are the run's."""
    listed: dict[str, str] = {}
    default = [FULL, *([FLAGS, *([GATES] if config.budgets else [])] if "gates" in trained else [])]
    for text in default if config.policies is None else config.policies:
        export = f"{config.run}/export" if "gates" in trained else None
        spec = PolicySpec.parse(text).with_gates(export, "run=RUN of a run that trained some")
        name = spec.label or text
        listed[f"{name}={spec}" if spec.label else str(spec)] = name if spec.evicts else "full cache"
    return listed


def check(config: EvaluateConfig) -> None:
    """Refuse policies and budgets that cannot be compared, and a command without data."""
    translate(config).config.check()


main = main_from_schema("ag.evaluate", EvaluateConfig, "ag.evaluate.evaluate:run", check=check)

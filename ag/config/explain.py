"""What ``python -m ag.explain`` can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ag.config.sections import BUDGET, key, mapping
from ag.plugins import load


@dataclass
class ExplainConfig:
    """The keys of ``python -m ag.explain``."""

    model: str = key("smollm2", "hub id, local folder, or the alias smollm2 or gemma3-270m")
    revision: str | None = key(None, "git revision of a hub model")
    dtype: Literal["float32", "bfloat16", "float16"] = key("float32", "data type of the model's weights")
    device: str = key("cpu", "cpu, cuda, cuda:1, ...")
    gates: str | None = key(None, "exported gates, which join the policies as gates, and are those of flags")
    adapter: bool = key(True, "put the export's LoRA adapter on the model; false: it is merged into the model already")
    policies: list[str] = key(["h2o", "h2o+caote", "tova", "tova+caote", "snapkv", "snapkv+caote"], "what to picture")
    budget: Any = key(0.25, "what the policies may keep; flags take none", words=f"{BUDGET} | null")
    task: str = key("ppl", "where the texts come from")
    task_options: dict[str, Any] = mapping("options of the task, as task_options.OPTION=VALUE")
    root: str | None = key(None, "local folder of the task's data; null: the hub")
    plugins: list[str] = key(
        [], "modules to import first, which add scorers, wrappers, allocators or tasks of your own"
    )
    samples: int = key(3, "how many texts", low=1)
    tokens: int = key(256, "of each text; attention maps grow with its square", low=2)
    continuation: int = key(32, "last of these tokens, whose attention outputs are compared", low=1)
    layers: list[int] = key([], "layers of the attention maps; empty: four, spread out")
    pictures: list[Literal["keep", "attention", "cake", "errors"]] = key(
        ["keep", "attention", "cake", "errors"],
        "kept tokens; attention of model and gates; entropy and variance; errors of outputs",
    )
    output: str = key("runs/explain", "folder of the pictures")

    def __post_init__(self) -> None:
        load(self.plugins)
        if self.continuation >= self.tokens:
            raise ValueError(f"continuation={self.continuation}: expected fewer than tokens={self.tokens}")

"""Pictures of what policies keep and why: ``python -m ag.explain gates=EXPORT root=DATA``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.figure import Figure
from torch import nn
from transformers import PreTrainedTokenizerBase

from ag.config import ModelConfig, key, mapping
from ag.config.command_line import parse
from ag.engine import EvictionCache, Policy, policy
from ag.engine.spec import BUDGET, PolicySpec, named, parse_budget
from ag.errors import UserError
from ag.evaluate import inside, inside_plots, tasks
from ag.evaluate.comparison.views import View, record
from ag.evaluate.tasks import Sample
from ag.gates import export
from ag.gates.figures import keep_pattern
from ag.gates.gate import AttentionGate, AttentionGates
from ag.model import base as models
from ag.plugins import load

SEARCHED = 10  # samples read for each one wanted, because some are too short


@dataclass
class ExplainConfig:
    """The keys of ``python -m ag.explain``."""

    model: str = key("smollm2", "hub id, local folder, or the alias smollm2")
    revision: str | None = key(None, "git revision of a hub model")
    dtype: Literal["float32", "bfloat16", "float16"] = key("float32", "data type of the model's weights")
    device: str = key("cpu", "cpu, cuda, cuda:1, ...")
    gates: str | None = key(None, "folder of exported gates, which join the policies")
    adapter: bool = key(True, "put the export's LoRA adapter on the model; false: it is merged into the model already")
    policies: list[str] = key(["h2o", "h2o+caote", "tova", "tova+caote", "snapkv", "snapkv+caote"], "what to picture")
    budget: Any = key(0.25, "what the policies may keep", words=BUDGET)
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


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (2: one line on stderr says what is wrong)."""
    config = parse(sys.argv[1:] if argv is None else argv, ExplainConfig, "ag.explain").config
    try:
        for path in explain(config):
            print(path)
    except UserError as error:
        print(f"ag.explain: error: {error}", file=sys.stderr)
        return 2
    return 0


def explain(config: ExplainConfig) -> list[Path]:
    """Draw the pictures; returns their files.

    Raises:
        UserError: naming what is wrong with a policy, the gates, the model or the data, and the fix.
    """
    plan = _policies(config)
    task = tasks.make(config.task, config.root, **config.task_options)
    model, tokenizer = models.load_base(ModelConfig(config.model, config.revision, config.dtype), config.device)
    found = task.load(
        tokenizer, SEARCHED * config.samples, model.config.get_text_config().max_position_embeddings
    ).samples
    samples = [Sample(one.id, one.prompt[: config.tokens]) for one in found if len(one.prompt) >= config.tokens]
    if not samples:
        raise UserError(f"task={config.task}: no prompt has tokens={config.tokens}; ask for fewer.")
    if config.gates and config.adapter and export.adapter_path(config.gates):
        model = export.load_adapter(model, config.gates)  # type: ignore[assignment]
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in draw(config, model, tokenizer, plan, samples[: config.samples]):
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1])
    return paths


def draw(
    config: ExplainConfig,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    plan: dict[str, Policy],
    samples: list[Sample],
) -> Iterator[tuple[str, Figure]]:
    """Make the pictures; yields the name of each and its figure."""
    prompts = [Sample(one.id, one.prompt[: -config.continuation]) for one in samples]
    policies = [one.with_tokenizer(tokenizer) for one in plan.values()]
    views = dict(zip(plan, record(model, tokenizer, policies, prompts, config.tokens), strict=True))
    if "keep" in config.pictures:
        for name, mine in views.items():
            for number, view in enumerate(mine):
                yield f"keep-{_file(name)}-{number}", keep_pattern(view.kept, view.pieces)
    readings = [inside.Reading(model, one.prompt) for one in samples]
    if "attention" in config.pictures and "gates" in plan:
        gates = EvictionCache(model, plan["gates"]).gates
        assert gates is not None
        for number, (reading, view) in enumerate(zip(readings, views["gates"], strict=True)):
            yield f"attention-{number}", _attention(config, gates, reading, view)
    if "cake" in config.pictures:
        yield "cake", inside_plots.entropy_and_variance([inside.layer_statistics(one).numpy() for one in readings])
    if "errors" in config.pictures:
        errors = {
            name: torch.stack(
                [
                    inside.output_errors(one, torch.from_numpy(view.kept))
                    for one, view in zip(readings, mine, strict=True)
                ]
            )
            for name, mine in views.items()
        }
        yield "errors", inside_plots.errors_by_layer({name: one.mean(0).numpy() for name, one in errors.items()})


def _attention(config: ExplainConfig, gates: AttentionGates, reading: inside.Reading, view: View) -> Figure:
    """Draw the attention of the model and of its gates, which must be of kind attention, in some layers."""
    if gates.config.kind != "attention":
        raise UserError(f"gates of kind {gates.config.kind} have no attention; leave attention out of pictures=.")
    having = gates.layer_indices
    layers = config.layers or sorted({having[i * (len(having) - 1) // 3] for i in range(4)})
    for layer in layers:
        if layer not in having:
            raise UserError(f"layers={config.layers}: layer {layer} has no gate; expected some of {having}.")
    length, theirs = view.kept.shape[2], []
    for layer in layers:
        gate = gates.layers[str(layer)]
        assert isinstance(gate, AttentionGate)
        hidden = reading.hidden[layer - gates.config.layer_offset][:, :length]
        theirs.append(inside.gate_map(gate, hidden).mean(0).cpu().numpy())
    ours = [inside.attention_map(reading, layer).mean(0)[:length, :length].cpu().numpy() for layer in layers]
    return inside_plots.attention_maps(layers, ours, theirs, [view.kept[layer] for layer in layers])


def _policies(config: ExplainConfig) -> dict[str, Policy]:
    specs = named([*config.policies, *([f"gates={PolicySpec('gates', path=config.gates)}"] if config.gates else [])])
    budget = parse_budget(config.budget)
    return {name: policy(spec, None if spec.bare else budget) for name, spec in specs.items()}


def _file(name: str) -> str:
    return re.sub(r"[^\w+@-]+", "_", name)


if __name__ == "__main__":
    sys.exit(main())

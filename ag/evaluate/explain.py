"""Pictures of what policies keep and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn
from transformers import PreTrainedTokenizerBase

from ag.commands.explain import ExplainConfig
from ag.config import ModelConfig
from ag.config.command_line import Invocation
from ag.config.policies import GATES
from ag.engine import EvictionCache, Policy, policy
from ag.engine.spec import named, parse_budget
from ag.errors import UserError
from ag.evaluate import inside, inside_plots, tasks
from ag.evaluate.inside import View, record
from ag.evaluate.tasks import Sample
from ag.gates import export
from ag.gates.figures import keep_pattern
from ag.gates.gate import AttentionGate, AttentionGates
from ag.model import base as models

SEARCHED = 10  # samples read for each one wanted, because some are too short


def run(asked: Invocation[ExplainConfig]) -> int:
    """Draw what ``python -m ag.explain`` is asked for and print the files; returns the exit code."""
    if asked.dry_run:
        print(*_policies(asked.config), sep="\n")
        return 0
    for path in explain(asked.config, print):
        print(path)
    return 0


def explain(config: ExplainConfig, tell: Callable[[str], None]) -> list[Path]:
    """Draw the pictures; returns their files.

    Args:
        config: what to draw.
        tell: is given a line about each picture that there cannot be.
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
    for name, figure in draw(config, model, tokenizer, plan, samples[: config.samples], tell):
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1])
    if not paths:
        raise UserError(
            f"pictures={config.pictures}: nothing to draw; expected keep, cake, errors, or attention with gates=EXPORT "
            "of gate.kind=attention."
        )
    return paths


def draw(
    config: ExplainConfig,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    plan: dict[str, Policy],
    samples: list[Sample],
    tell: Callable[[str], None],
) -> Iterator[tuple[str, Figure]]:
    """Make the pictures; yields the name of each and its figure, and tells why one is left out."""
    prompts = [Sample(one.id, one.prompt[: -config.continuation]) for one in samples]
    policies = [one.with_tokenizer(tokenizer) for one in plan.values()]
    views = dict(zip(plan, record(model, tokenizer, policies, prompts, config.tokens), strict=True))
    if "keep" in config.pictures:
        for name, mine in views.items():
            file = re.sub(r"[^\w+@-]+", "_", name)
            for number, view in enumerate(mine):
                yield f"keep-{file}-{number}", keep_pattern(view.kept, view.pieces)
    readings = [inside.Reading(model, one.prompt) for one in samples]
    if "attention" in config.pictures and config.gates:
        gates = EvictionCache(model, plan[GATES]).gates
        assert gates is not None
        if gates.config.kind != "attention":
            tell(f"attention: no picture, because gates of kind {gates.config.kind} have no attention of their own")
        else:
            for number, (reading, view) in enumerate(zip(readings, views[GATES], strict=True)):
                yield f"attention-{number}", _attention(config, gates, reading, view)
    if "cake" in config.pictures:
        yield "cake", inside_plots.entropy_and_variance([inside.layer_statistics(one).numpy() for one in readings])
    if "errors" in config.pictures:
        errors, kept = {}, {}
        for name, mine in views.items():
            pairs = zip(readings, mine, strict=True)
            found = [inside.output_errors(reading, torch.from_numpy(view.kept)) for reading, view in pairs]
            errors[name] = torch.stack(found).mean(0).numpy()
            kept[name] = sum(float(view.kept.mean()) for view in mine) / len(mine)
        yield "errors", inside_plots.errors_by_layer(errors, kept, {name: one.spec for name, one in plan.items()})


def _attention(config: ExplainConfig, gates: AttentionGates, reading: inside.Reading, view: View) -> Figure:
    """Draw the attention of the model and of its gates, which are of kind attention, in some layers."""
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
    """Return the policies by name, with the gates of ``gates=`` where one names none."""
    specs = named(list(dict.fromkeys([*config.policies, *([GATES] if config.gates else [])])))
    budget = None if config.budget is None else parse_budget(config.budget)
    found = {}
    for name, spec in specs.items():
        spec = spec.with_gates(config.gates, "gates=EXPORT")
        found[name] = policy(spec, budget if spec.takes_budget else None)
    return found

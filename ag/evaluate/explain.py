"""Pictures of what policies keep and why: ``python -m ag.explain``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ag.commands.explain import ExplainConfig
from ag.config.command_line import Invocation
from ag.config.policies import GATES
from ag.config.sections import base_model
from ag.engine import EvictionCache, Policy, policy
from ag.errors import UserError
from ag.evaluate import tasks
from ag.evaluate.inside import KeptTokens, RecordedPass, attention_map, gate_map, output_errors, record_kept_tokens
from ag.files import file_names
from ag.gates import export
from ag.gates.figures import DPI, keep_pattern
from ag.gates.gate import AttentionGate, AttentionGates
from ag.model import base as models

Array = NDArray[np.floating]

SEARCHED = 10  # samples that are read for each sample drawn, because some are too short
DASHES = ("-", "--", ":", "-.")


def run(invocation: Invocation[ExplainConfig]) -> int:
    """Run ``python -m ag.explain`` and print the files; returns the exit code."""
    if invocation.dry_run:
        print(*_policies(invocation.config), sep="\n")
        return 0
    folder = Path(invocation.config.output)
    for name, figure in explain(invocation.config):
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / f"{name}.png")
        print(folder / f"{name}.png")
    return 0


def explain(config: ExplainConfig) -> Iterator[tuple[str, Figure]]:
    """Yield the name and the figure of each picture, and print a line about each that cannot be drawn."""
    plan = _policies(config)
    task = tasks.make(config.task, config.root, **config.task_options)
    model, tokenizer = models.load_base(base_model(config, config.model), config.device)
    context = model.config.get_text_config().max_position_embeddings
    loaded = task.load(tokenizer, SEARCHED * config.samples, context).samples
    texts = [sample for sample in loaded if len(sample.prompt) >= config.tokens][: config.samples]
    if not texts:
        raise UserError(f"task={config.task}: no prompt has tokens={config.tokens}; ask for fewer.")
    if config.gates and config.adapter and export.adapter_path(config.gates):
        model = export.load_adapter(model, config.gates)  # type: ignore[assignment]
    prompts = [replace(text, prompt=text.prompt[: config.tokens - config.continuation]) for text in texts]
    policies = [planned.with_tokenizer(tokenizer) for planned in plan.values()]
    views = dict(zip(plan, record_kept_tokens(model, tokenizer, policies, prompts, config.tokens), strict=True))
    if "keep" in config.pictures:
        for file, policy_views in zip(file_names(views), views.values(), strict=True):
            for number, view in enumerate(policy_views):
                yield f"keep-{file}-{number}", keep_pattern(view.kept, view.token_texts)
    gates = EvictionCache(model, plan[GATES]).gates if "attention" in config.pictures and config.gates else None
    draws_attention = gates is not None and gates.config.kind == "attention"
    needs_passes = draws_attention or "errors" in config.pictures  # each holds queries and keys of all layers
    passes = [RecordedPass(model, text.prompt[: config.tokens]) for text in texts] if needs_passes else []
    if gates is not None and draws_attention:
        for number, (recorded, view) in enumerate(zip(passes, views[GATES], strict=True)):
            yield f"attention-{number}", attention_maps(config.layers, gates, recorded, view)
    elif gates is not None:
        print(f"attention: no picture, because gates of kind {gates.config.kind} have no attention")
    if "errors" in config.pictures:
        errors, kept = {}, {}
        for name, policy_views in views.items():
            pairs = zip(passes, policy_views, strict=True)
            sample_errors = [output_errors(recorded, torch.from_numpy(view.kept)) for recorded, view in pairs]
            errors[name] = torch.stack(sample_errors).mean(0).cpu().numpy()
            kept[name] = sum(float(view.kept.mean()) for view in policy_views) / len(policy_views)
        yield "errors", errors_by_layer(errors, kept, plan)
    elif "keep" not in config.pictures and not draws_attention:
        raise UserError(
            f"pictures={config.pictures}: nothing to draw; expected keep, errors, or attention with gates=EXPORT "
            "of gate.kind=attention."
        )


def attention_maps(layers: Sequence[int], gates: AttentionGates, recorded: RecordedPass, view: KeptTokens) -> Figure:
    """Draw the model's attention, the gate's attention and the kept tokens, as in Figure 4 of Attention-Gate.

    Each layer is a row of the picture. No ``layers``: four layers, evenly spaced. The pass is over the complete text,
    and the attention of the first tokens, which the view has, is drawn.
    """
    gated_layers, length = gates.layer_indices, view.kept.shape[2]
    layers = layers or sorted({gated_layers[i * (len(gated_layers) - 1) // 3] for i in range(4)})
    figure = Figure(figsize=(9, 0.8 + 2.9 * len(layers)), dpi=DPI, layout="constrained")
    for row, layer in zip(figure.subplots(len(layers), 3, squeeze=False), layers, strict=True):
        if layer not in gated_layers:
            raise UserError(f"layers={list(layers)}: layer {layer} has no gate; expected some of {gated_layers}.")
        gate, kept = gates.layers[str(layer)], view.kept[layer]
        assert isinstance(gate, AttentionGate)
        gate_weights = gate_map(gate, recorded.hidden[layer - gates.config.layer_offset][:, :length])
        model_weights = attention_map(recorded.calls[layer])[:, :length, :length]
        for axes, head_weights, name in zip(row, (model_weights, gate_weights), ("model", "gate"), strict=False):
            weights = head_weights.mean(0).cpu().numpy()
            positive = weights[weights > 0]
            scale = LogNorm(max(float(positive.max()) * 1e-4, float(positive.min())), float(positive.max()))
            axes.imshow(np.where(weights > 0, weights, np.nan), cmap="magma", norm=scale, interpolation="nearest")
            axes.set_title(f"layer {layer}: attention of the {name}", fontsize=9)
            axes.set_ylabel("query", fontsize=8)
        row[2].imshow(kept, cmap="gray", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        row[2].set_title(f"kept: {kept.mean():.0%}", fontsize=9)
        row[2].set_ylabel("KV head", fontsize=8)
        row[2].set_yticks(range(len(kept)))
        for axes in row:
            axes.set_xlabel("key", fontsize=8)
            axes.tick_params(labelsize=7)
    return figure


def errors_by_layer(errors: Mapping[str, Array], kept: Mapping[str, float], plan: Mapping[str, Policy]) -> Figure:
    """Draw `[L]` errors by policy, with kept shares. Policies with one scorer have one colour and different dashes."""
    figure = Figure(figsize=(8, 4.2), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    drawn: dict[tuple[str, str | None], int] = {}  # number of lines by scorer
    for name, values in errors.items():
        scorer = plan[name].spec.scorer, plan[name].spec.path
        drawn[scorer] = drawn.get(scorer, 0) + 1
        axes.plot(
            np.where(values > 0, values, np.nan),
            DASHES[(drawn[scorer] - 1) % len(DASHES)],
            color=f"C{list(drawn).index(scorer) % 10}",
            linewidth=1.5,
            label=f"{name} ({kept[name]:.0%}): {np.mean(values):.3f}",
        )
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set(yscale="log", xlabel="layer", ylabel="relative squared error of the output", axisbelow=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8, title="policy (kept): mean")
    return figure


def _policies(config: ExplainConfig) -> dict[str, Policy]:
    """Return the policies by name."""
    return {name: policy(spec, budget) for name, (spec, budget) in config.specs.items()}

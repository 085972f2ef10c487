"""The gates that come with the package: whole, small, found by name, and as good as their card says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Qwen2Config

import ag
from ag.compare import main
from ag.config import exports
from ag.config.recipes import RECIPES, load_config
from ag.config.schema import Config
from ag.gates import export
from ag.gates.export import ExportError
from ag.model.geometry import fingerprint
from ag.wheels import hub_name
from tests.support.refused import refuses

#: By name: the base model, the recipe, the most MiB, and the share of tokens that the flags alone keep, at least.
SHIPPED = {
    "qwen2.5-coder-0.5b": ("qwen2.5-coder-0.5b", "remember", 5, 0.55),
    "qwen2.5-coder-0.5b-reasoning": ("qwen2.5-coder-0.5b", "reason", 5, 0.3),
    "smollm2": ("smollm2", "smollm2_remember", 3, 0.3),
}


def test_each_is_small_and_what_its_recipe_trains() -> None:
    assert list(SHIPPED) == exports.shipped()
    for name, (base, recipe_name, most, kept) in SHIPPED.items():
        assert sum(file.stat().st_size for file in export.local(name).iterdir()) <= most * 2**20
        assert export.read_info(name)["base_model"]["name"] == hub_name(base)
        recipe = load_config(RECIPES / "fit" / f"{recipe_name}.yaml", Config)
        gates = ag.AttentionGates.from_pretrained(name)
        assert gates.calibration.boundary(kept + 0.05) < 0 < gates.calibration.boundary(kept)
        assert gates.config.kind == "mlp"  # has no heads
        assert replace(gates.config, head_dim=recipe.gate.head_dim) == recipe.gate
        assert recipe.export.weights == "int8" == export.read_info(name)["weights"]
    with refuses(ExportError, "smolm2", "did you mean smollm2?"):
        ag.policy("gates:smolm2")


def test_those_of_qwen_serve_the_model_of_the_hub() -> None:
    """Its configuration there ties the embeddings, and names a window that it does not use."""
    sizes = {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
    window = {"sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 24}
    hub = Qwen2Config(**sizes, **window, intermediate_size=4864, vocab_size=151936, tie_word_embeddings=True)
    assert fingerprint(hub) == export.read_info("qwen2.5-coder-0.5b")["base_model"]["fingerprint"]


@pytest.mark.slow
@pytest.mark.nightly
def test_they_remember_what_is_asked_later(smollm2: Path, tmp_path: Path) -> None:
    """Of 12 numbers hidden in 256 tokens, at 30 % of the cache: the full cache's hits, which snapkv does not have."""
    words = [
        f"model={smollm2}", "policies=[full,gates:smollm2@global,snapkv]", "budgets=[0.3]", "tasks=[needle_books_1]",
        "task_options.needle_books_1.haystack=noise", "task_options.needle_books_1.lengths=[256]",
        "samples=12", "view_samples=0", f"output={tmp_path}",
    ]  # fmt: skip
    assert main(words) == 0
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    full, gates, snapkv = (
        {row["label"]: row for row in rows}[name] for name in ("full", "gates:smollm2@global", "snapkv")
    )
    assert 0.29 < gates["kept"] < 0.31
    assert full["hits"] >= 0.75
    assert gates["hits"] >= full["hits"] - 0.1
    assert gates["nats"] <= full["nats"] + 0.1 < snapkv["nats"] - 0.5

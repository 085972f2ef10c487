"""Every shipped recipe: it loads, has a title, and has the published values of its paper."""

from dataclasses import replace
from functools import cache

import pytest

from ag.compare import CompareConfig
from ag.config import Config
from ag.config.command_line import parse
from ag.config.keys import parse_yaml, values_of
from ag.config.recipes import RECIPES, dump, load_config, recipes, resolve
from ag.evaluate.comparison.cells import list_cells
from ag.evaluate.tasks.longbench import SUBSETS
from tests.support.refused import names

TASKS = {
    "piqa_sft": "piqa",
    "arc_c_sft": "arc_challenge",
    "rte_sft": "rte",
    "copa_sft": "copa",
    "boolq_sft": "boolq",
    "obqa_sft": "openbookqa",
}
CPT = ["redpajama_cpt", "mistral_cpt", "redpajama_cpt_gates_only"]
COMPARISONS = {  # cells, and the published score of the full cache that the comment must name
    "compare_instructions": ((1 + 5 * 3) * 2, "exempt"),
    "compare_turns": ((1 + 5 * 3) * 2, "evicted once"),
    "compare_parts": (1 + 31 * 3, "docs/results.md"),
    "compare_retrieval": ((1 + 3 * 4) * 4, "after eviction"),
    "compare_reasoning": (1 + 8 * 3, "docs/results/reasoning.md"),
    "compare_bits": (2 * (1 + 4) * 4, "codes of 8 bits"),
    "compare_leaderboard": ((1 + 9 * 4) * 13, "0.25, 0.5, 0.75, 0.875"),
    "compare_small": ((1 + 10 * 2) * 2, "docs/results.md"),
    "compare_stream": (1 + 5 * 2, "docs/results.md"),
    "compare_ag_table1": ((1 + 2) * (8 + len(SUBSETS)), "full 49.67"),
    "compare_vatp_table1": ((1 + 5) * len(SUBSETS), "full 32.66"),
    "compare_caote_table2": ((1 + 9 * 2) * len(SUBSETS), "full 49.20"),
    "compare_obcache_table1": (1 + 12 * 4, "H2O 52.28"),
    "compare_cake_table1": ((1 + 6 * 2) * len(SUBSETS), "full 33.07"),
}


@cache
def load(name, **overrides):
    return resolve(CompareConfig if name in COMPARISONS else Config, {"recipe": name, **overrides})


def test_lists_of_recipes(error, capsys):
    """With a title each; a recipe is in the folder of one command only."""
    assert sorted(path.stem for path in RECIPES.rglob("*.y*ml")) == sorted(recipes())
    assert recipes("ag.fit") == recipes("ag.plan") and recipes("ag.generate") == {}
    assert recipes("ag.compare").keys() == COMPARISONS.keys() == recipes().keys() - recipes("ag.fit").keys()
    for program, schema in (("ag.fit", Config), ("ag.compare", CompareConfig)):
        with pytest.raises(SystemExit, match="0"):
            parse(["--recipes"], schema, program)
        lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
        assert [line[0] for line in lines] == [*recipes(program)] and all(len(line[1]) > 20 for line in lines)
    names(error("recipe=compare_small"), "recipe=compare_small is one of ag.compare, not of ag.fit")


def test_what_a_recipe_says_of_something_goes_with_it():
    """Options of policies and tasks that the command line removes; options on the command line stay."""
    given = {"recipe": "compare_small", "policies": "[full,snapkv,tova]", "policy_options.h2o.recent": "3"}
    assert resolve(CompareConfig, given).policy_options == {"snapkv": {"window": 8}, "h2o": {"recent": 3}}
    config = resolve(CompareConfig, {"recipe": "compare_small", "tasks": "[boolq]"})
    assert config.task_options == {} and len(config.policy_options) == 5


def test_a_file_changes_entries_of_a_mapping_as_the_command_line_does(tmp_path):
    """The entries and options that it does not name stay; those of a policy that it no longer lists go."""
    leaf = tmp_path / "leaf.yaml"
    for text, overrides in (
        ("policy_options: {h2o: {window: 8}}", {"policy_options.h2o.window": "8"}),
        ("policies: [full, h2o]", {"policies": "[full,h2o]"}),
        ("policies: [full, h2o]\npolicy_options: {h2o: {sinks: 2}}", {"policy_options": "{h2o: {sinks: 2}}"}),
    ):
        leaf.write_text(f"base: compare_obcache_table1\n{text}\n")
        if "policies" in text:
            overrides["policies"] = "[full,h2o]"
        derived = resolve(CompareConfig, {"recipe": str(leaf)})
        given = resolve(CompareConfig, {"recipe": "compare_obcache_table1", **overrides})
        assert derived == replace(given, recipe="leaf") and derived.policy_options["h2o"]["recent"] == 16
        assert (derived.policy_options.keys() == {"h2o"}) == ("policies" in text)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", recipes())
def test_a_recipe_loads_survives_a_round_trip_and_repeats_nothing_of_its_base(name, tmp_path):
    config = load(name)
    assert config.recipe == name
    (tmp_path / "config.yaml").write_text(dump(config))
    assert load_config(tmp_path / "config.yaml", type(config)) == config
    tree = parse_yaml(recipes()[name].read_text())
    if base := tree.pop("base", None) if name not in COMPARISONS else None:
        before, after = (values_of(load(x)) for x in (base, name))
        written = {f"{section}.{key}" for section, inner in tree.items() if isinstance(inner, dict) for key in inner}
        written |= {key for key, value in tree.items() if not isinstance(value, dict)}
        assert {key for key in before if before[key] != after[key]} - {"recipe"} == written


def published(name):
    """The values of the paper, as a command line gives them."""
    gates = "gate.num_heads=4 gate.head_dim=128"
    if name in TASKS:
        return (
            f"model.name=meta-llama/Llama-2-7b-hf data.kind=sft data.name={TASKS[name]} train=gates+lora {gates} "
            "gate.threshold=0.3 gate.bias=0.0 gate.scope=prompt loss.alpha=1.0 loss.beta=0.28 trainer.max_epochs=2 "
            "optim.gate_lr=5e-5 optim.lora_lr=5e-5 lora.targets=[q_proj,k_proj,v_proj,o_proj]"
        )
    model, train, samples = {
        "redpajama_cpt": ("meta-llama/Llama-2-7b-hf", "gates+lora", 4997),
        "redpajama_cpt_gates_only": ("meta-llama/Llama-2-7b-hf", "gates", 4997),
        "mistral_cpt": ("mistralai/Mistral-7B-v0.1", "gates+lora", 5000),
    }[name]
    return (
        f"model.name={model} train={train} data.train_samples={samples} {gates} gate.threshold=0.5 gate.bias=2.0 "
        "gate.scope=causal gate.covers=all gate.prefill=sparse loss.alpha=5.0 loss.beta=0.4 trainer.max_epochs=1 "
        "model.quantization=nf4 model.gradient_checkpointing=true trainer.devices=4 trainer.strategy=ddp "
        "trainer.precision=bf16-mixed data.kind=text data.packing=packed data.max_length=4096"
    )


@pytest.mark.parametrize("name", [*TASKS, *CPT])
def test_recipes_have_the_papers_values(name):
    words = dict(word.split("=") for word in published(name).split())
    assert load(name, **words) == load(name)


@pytest.mark.parametrize(("name", "cells", "published"), [(name, *row) for name, row in COMPARISONS.items()])
def test_a_comparison_can_be_planned_and_names_what_it_is_held_against(name, cells, published):
    assert len(list_cells(load(name))) == cells
    comment = [line for line in recipes()[name].read_text().splitlines() if line.startswith("#")]
    assert published in " ".join(comment)


def test_comparisons_have_the_papers_settings():
    caote, obcache = load("compare_caote_table2"), load("compare_obcache_table1")
    assert (caote.schedule, caote.budgets) == ("blocks:128+every", [2048, 4096])
    assert (load("compare_vatp_table1").budgets, load("compare_ag_table1").budgets) == ([0.5], [0.5])
    cake = [cell.policy for cell in list_cells(load("compare_cake_table1")) if cell.label == "cake"]
    assert {x.budget: (x.allocator.tau1, x.allocator.tau2) for x in cake} == {128: (0.9, 2.3), 1024: (1.9, 1.8)}
    cells = [cell for name in COMPARISONS if "_table" in name for cell in list_cells(load(name))]
    asked = {cell.task.question for cell in cells if cell.task.metric != "accuracy"}
    assert asked == {"before"}  # papers evict with the question in the prompt
    assert obcache.budgets == [80, 160, 320, 400]
    assert obcache.task_options["needle_text"]["lengths"] == [4096, 8192, 16384, 32768]

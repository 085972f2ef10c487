"""Every shipped recipe: it loads, validates, says what it is, and has the published numbers of the paper."""

from functools import cache
from pathlib import Path

import pytest

from ag.compare import CompareConfig
from ag.config import Config
from ag.config.command_line import parse
from ag.config.keys import keys, parse_yaml
from ag.config.recipes import RECIPES, dump, load_config, recipes, resolve
from ag.evaluate.comparison.cells import list_cells
from ag.evaluate.tasks.longbench import SUBSETS

ABLATIONS = {  # the single difference from piqa_sft (Tables 3 and 6 of the paper)
    "ablation_heads_2": {"num_heads": 2},
    "ablation_heads_1": {"num_heads": 1},
    "ablation_dim_64": {"head_dim": 64},
    "ablation_dim_32": {"head_dim": 32},
    "ablation_previous_layer_4_1": {"layer_offset": 1, "first_layer": 1},
    "ablation_previous_layer_4_2": {"layer_offset": 1, "first_layer": 2},
    "ablation_linear": {"kind": "linear"},
    "ablation_recent_5": {"recent_tokens": 5},
    "ablation_recent_10": {"recent_tokens": 10},
}
TASKS = {
    "piqa_sft": "piqa",
    "arc_c_sft": "arc_challenge",
    "rte_sft": "rte",
    "copa_sft": "copa",
    "boolq_sft": "boolq",
    "obqa_sft": "openbookqa",
}
CPT = ["redpajama_cpt", "mistral_cpt", "redpajama_cpt_gates_only"]
OTHERS = [
    "quickstart",
    *(f"smollm2_{name}" for name in ("boolq", "corpus", "own", "quarter", "remember", "stream", "worked")),
]
COMPARISONS = {  # cells, and the published score of the full cache that the comment must name
    "compare_instructions": ((1 + 5 * 3) * 2, "exempt"),
    "compare_turns": ((1 + 5 * 3) * 2, "evicted once"),
    "compare_parts": (1 + 31 * 3, "docs/results.md"),
    "compare_retrieval": ((1 + 3 * 4) * 4, "after eviction"),
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
def load(name: str, **overrides: str) -> Config:
    return resolve(Config, {"recipe": name, **overrides})


@cache
def flat(name: str) -> dict[str, object]:
    tree = parse_yaml(dump(load(name)))
    return {
        name: tree[name] if "." not in name else tree[name.split(".")[0]][name.split(".")[1]] for name in keys(Config)
    }


def test_the_list_of_recipes_is_complete() -> None:
    assert list(recipes("ag.fit")) == list(recipes("ag.plan")) == sorted([*ABLATIONS, *TASKS, *CPT, *OTHERS])
    assert list(recipes("ag.compare")) == sorted(COMPARISONS)
    assert recipes("ag.generate") == {}


def test_a_name_is_in_one_folder_only() -> None:
    """Of two recipes with one name ``recipe=NAME`` would find either."""
    names = [path.stem for path in RECIPES.rglob("*.y*ml")]
    assert sorted(names) == sorted(recipes()) == sorted(set(names))


def test_the_folder_says_which_program_a_recipe_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, name, text in (("fit", "compare_me", "seed: 3"), ("compare", "plain", "base: compare_me\nsamples: 2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.yaml").write_text(text)
    monkeypatch.setattr("ag.config.recipes.RECIPES", tmp_path)
    assert [list(recipes(program)) for program in ("ag.fit", "ag.compare", None)] == [
        ["compare_me"],
        ["plain"],
        ["compare_me", "plain"],
    ]
    assert load("compare_me").seed == 3
    config = resolve(CompareConfig, {"recipe": "plain"})
    assert (config.seed, config.samples) == (3, 2)  # a base is found by name in either folder


def test_what_a_recipe_says_of_something_goes_with_it() -> None:
    """Options of policies and tasks that the command line leaves out; those that it gives stay, to be refused."""
    given = {"recipe": "compare_small", "policies": "[full,snapkv,tova]", "policy_options.h2o.recent": "3"}
    assert resolve(CompareConfig, given).policy_options == {"snapkv": {"window": 8}, "h2o": {"recent": 3}}
    config = resolve(CompareConfig, {"recipe": "compare_small", "tasks": "[boolq]"})
    assert config.task_options == {} and len(config.policy_options) == 5


@pytest.mark.parametrize(
    ("program", "schema", "name", "owner"),
    [("ag.fit", Config, "compare_small", "ag.compare"), ("ag.compare", CompareConfig, "piqa_sft", "ag.fit")],
)
def test_a_recipe_of_another_program_is_refused(
    program: str, schema: type, name: str, owner: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse([f"recipe={name}"], schema, program)
    assert stopped.value.code == 2
    assert f"recipe={name} is one of {owner}, not of {program}" in capsys.readouterr().err


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", recipes())
def test_loads_without_a_warning_and_survives_a_round_trip(name: str, tmp_path: Path) -> None:
    schema: type[Config] | type[CompareConfig] = CompareConfig if name in COMPARISONS else Config
    config = resolve(schema, {"recipe": name})
    assert config.recipe == name
    (tmp_path / "config.yaml").write_text(dump(config))
    assert load_config(tmp_path / "config.yaml", schema) == config


@pytest.mark.parametrize("name", sorted({*ABLATIONS, *TASKS, *CPT, "smollm2_quarter"} - {"piqa_sft", "redpajama_cpt"}))
def test_a_recipe_repeats_nothing_of_its_base(name: str) -> None:
    tree = parse_yaml(recipes()[name].read_text())
    base, config = flat(tree.pop("base")), flat(name)
    changed = {key for key in base if base[key] != config[key]} - {"recipe"}
    written = {f"{section}.{key}" for section, inner in tree.items() if isinstance(inner, dict) for key in inner}
    assert changed == written | {key for key, value in tree.items() if not isinstance(value, dict)}


@pytest.mark.parametrize(("program", "schema"), [("ag.fit", Config), ("ag.compare", CompareConfig)])
def test_listing_describes_each_recipe(program: str, schema: type, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(["--recipes"], schema, program)
    assert stopped.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(recipes(program))
    for line in lines:
        assert len(line.split(maxsplit=1)[1]) > 20, line


def published(name: str) -> str:
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
def test_recipes_have_the_papers_values(name: str) -> None:
    words = dict(word.split("=") for word in published(name).split())
    assert load(name, **words) == load(name)


@pytest.mark.parametrize(("name", "difference"), ABLATIONS.items())
def test_an_ablation_differs_in_its_own_keys_only(name: str, difference: dict[str, object]) -> None:
    expected = {**flat("piqa_sft"), "recipe": name, **{f"gate.{key}": value for key, value in difference.items()}}
    assert flat(name) == expected


@pytest.mark.parametrize("name", OTHERS)
def test_small_recipes_use_the_small_model_in_full_precision(name: str) -> None:
    config = load(name)
    assert (config.model.name, config.model.dtype, config.model.quantization) == ("smollm2", "float32", "none")
    assert config.trainer.max_steps > 0


@pytest.mark.parametrize("name", ["smollm2_stream", "smollm2_worked"])
def test_gates_that_follow_a_text_remember_a_bounded_part_of_it(name: str) -> None:
    gate = load(name).gate
    assert (gate.covers, gate.scope, gate.prefill) == ("all", "causal", "sparse")
    assert gate.kind != "attention" or 0 < gate.window <= 128
    assert 0 < gate.recent_tokens <= 128


@pytest.mark.parametrize(("name", "cells", "published"), [(name, *told) for name, told in COMPARISONS.items()])
def test_a_comparison_can_be_planned_and_names_what_it_is_held_against(name: str, cells: int, published: str) -> None:
    assert len(list_cells(resolve(CompareConfig, {"recipe": name}))) == cells
    comment = [line for line in recipes()[name].read_text().splitlines() if line.startswith("#")]
    assert published in " ".join(comment)


def test_comparisons_have_the_papers_settings() -> None:
    def of(name: str) -> CompareConfig:
        return resolve(CompareConfig, {"recipe": name})

    caote, cake, obcache = of("compare_caote_table2"), of("compare_cake_table1"), of("compare_obcache_table1")
    assert (caote.schedule, caote.budgets) == ("blocks:128+every", [2048, 4096])
    assert (of("compare_vatp_table1").budgets, of("compare_ag_table1").budgets) == ([0.5], [0.5])
    temperatures = {cell.policy.budget: cell.policy.allocator for cell in list_cells(cake) if cell.label == "cake"}
    assert {size: (a.tau1, a.tau2) for size, a in temperatures.items()} == {128: (0.9, 2.3), 1024: (1.9, 1.8)}
    published = [name for name in COMPARISONS if "_table" in name]
    asked = [
        cell.task.question for name in published for cell in list_cells(of(name)) if cell.task.metric != "accuracy"
    ]
    assert set(asked) == {"before"}  # papers evict with the question in the prompt
    assert obcache.budgets == [80, 160, 320, 400]
    assert obcache.task_options["needle_text"]["lengths"] == [4096, 8192, 16384, 32768]

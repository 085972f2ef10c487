"""Recipes in files: inheritance, wrong files, and configurations written and read back."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ag.config import Config
from ag.config.recipes import dump, load_config
from tests.support.refused import names
from tests.support.schemas import fit


def test_inheritance_then_overrides(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "below").mkdir()
    write("root.yaml", "base: piqa_sft\nloss: {alpha: 2, beta: 0.2}\nlora:\n  targets: [q_proj]\nseed: 1\n")
    write("below/middle.yaml", "base: ../root.yaml\nloss:\n  beta: 0.1\nlora:\n")
    leaf = write("leaf.yaml", "# a leaf\nbase: below/middle.yaml\nseed: 3\n")
    config = fit(f"recipe={leaf}", "gate.num_heads=1", "seed=4")
    assert (config.loss.alpha, config.loss.beta, config.lora.targets, config.seed) == (2.0, 0.1, ["q_proj"], 4)
    assert (config.data.name, config.gate.num_heads, config.gate.scope) == ("piqa", 1, "prompt")
    assert config.recipe == "leaf"
    monkeypatch.chdir(tmp_path)
    assert fit("recipe=leaf.yaml").seed == 3
    assert fit("recipe=" + write("empty.yaml", "# nothing\n")) == Config(recipe="empty")


def test_a_wrong_key_is_refused_though_the_command_line_repeats_the_choice(error: Any, write: Any) -> None:
    """It goes only with another choice, for which the base's keys go too."""
    leaf = write("leaf.yaml", "base: smollm2_repeat\nloss: {alpha: 7.0}\n")
    for override in ("seed=1", "loss.objective=kl", "loss.share_high=0.6"):
        names(error(f"recipe={leaf}", override), "loss.alpha=7.0", "loss.share_high above 0")
    assert fit(f"recipe={leaf}", "loss.share_high=0").loss.alpha == 7
    write("root.yaml", "loss: {alpha: 7.0}\n")
    assert fit("recipe=" + write("drawn.yaml", "base: root.yaml\nloss: {share_high: 0.6}\n")).loss.share_high == 0.6


def test_a_circle_of_bases(error: Any, write: Any) -> None:
    write("a.yaml", "base: b.yaml\n")
    b = write("b.yaml", "base: ./a.yaml\n")
    names(error(f"recipe={b}"), "b.yaml -> a.yaml -> b.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("loss:\n  alhpa: 1\n", "'loss.alhpa' loss.alpha?"),
        ("seed: 1\nseed: 2\n", "YAML line 2 seed"),
        ("- seed\n", "['seed']"),
        ("data:\n  revision: 12345\n", "data.revision=12345 null quotes"),
        ('output: "\\x24{oc.env:HOME}"\n', "output='${oc.env:HOME}'"),
        ("output: !!python/object/apply:os.system [echo]\n", "YAML line 1 python/object/apply:os.system"),
        ("base: piqa_sf\n", "'piqa_sf' piqa_sft?"),
        (b"\xff\xfe\x00", "UTF-8"),
        ("seed: " + "[" * 500 + "]" * 500, "nested"),
        ("seed: " + "[" * 100_000 + "]" * 100_000, ""),  # PyYAML 6.0.4 refuses it, earlier ones overflow a stack in C
        ("seed: [" + "1," * 400_000 + "]", "nested"),
    ],
)
def test_wrong_files(error: Any, write: Any, text: str | bytes, expected: str) -> None:
    names(error("recipe=" + write("mine.yaml", text)), "mine.yaml:", *expected.split())


def test_an_alias_bomb_is_refused_at_once(error: Any, write: Any) -> None:
    lines = ["l0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"l{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    names(error("recipe=" + write("bomb.yaml", "\n".join(lines))), "bomb.yaml", "YAML")


def test_dump_round_trip_of_unusual_text(tmp_path: Path) -> None:
    odd = ["yes", "1e5", "0x10", "null", "~", "a: b", "# x", " x ", "tab\t", "line\nbreak", "ü€😀", "'", '"', "[a", "-"]
    path = tmp_path / "config.yaml"
    config = Config(output=odd[0], lora=dataclasses.replace(Config().lora, targets=odd))
    path.write_text(dump(config))
    assert load_config(path, Config) == config

"""Keys and values on a command line: which are wrong, and what the error says."""

from typing import Any

import pytest

from ag.commands.compare import CompareConfig
from ag.commands.generate import GenerateConfig
from ag.config.keys import from_text
from ag.config.recipes import resolve
from tests.support.refused import names
from tests.support.schemas import KEYS, Inner, Other, fit, other


def test_every_key_is_documented() -> None:
    assert [key.name for key in KEYS.values() if len(key.doc) < 5] == []
    assert len(KEYS) > 70


def test_every_default_fits_its_own_key() -> None:
    assert [key.name for key in KEYS.values() if not key.accepts(key.default)] == []


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("alpha=1", "'alpha' loss.alpha?"),
        ("train.loss.beta=1", "'train.loss.beta' loss.beta?"),
        ("loss=1", "'loss' loss.objective loss.alpha"),
        ("qqqqqq=1", "'qqqqqq' --help"),
        ("base=piqa_sft", "'base'"),
        ("loss.alpha", "'loss.alpha' key=value loss.alpha=..."),
        ("--loss.alpha=1", "'--loss.alpha=1' loss.alpha=..."),
        ("--dryrun", "'--dryrun' --dry-run?"),
        ("-x", "'-x' --help"),
        # values
        ("loss.alpha=abc", "loss.alpha='abc' 0"),
        ("loss.alpha=-1", "loss.alpha=-1 0"),
        ("loss.alpha=.nan", "loss.alpha=nan"),
        ("loss.alpha=true", "loss.alpha=True"),
        ("loss.alpha=0.5,1", "loss.alpha='0.5,1' -m"),
        ("loss.alpha=", "loss.alpha= number"),
        ("loss.mean=sof", "loss.mean='sof' hard soft?"),
        ("model.dtype=bf16", "model.dtype='bf16' float32 float16 bfloat16?"),
        ("trainer.devices=0", "trainer.devices=0 1"),
        ("trainer.devices=2.0", "trainer.devices=2.0"),
        ("trainer.progress=1", "trainer.progress=1 true false"),
        ("seed=4294967296", "seed=4294967296 4294967295"),
        ("logger=[csv,wand]", "'wand' csv tensorboard wandb"),
        ("logger=csv,wandb", "logger='csv,wandb' tensorboard [csv,wandb]"),
        ("logger=wandbb", "logger='wandbb' csv tensorboard wandb?"),
        ("output=${oc.env:HOME}", "output='${oc.env:HOME}'"),
        ("output=???", "output='???'"),
        ("lora.targets=['${oc.env:HOME}']", "lora.targets=['${oc.env:HOME}']"),
        ("gate.threshold=1.5", "gate.threshold=1.5"),
        ("gate.layer_offset=1", "gate.first_layer=0 gate.layer_offset=1 1"),
        ("recipe=piqa_sf", "'piqa_sf' piqa_sft?"),
        ("recipe=zzzzzzzz", "'zzzzzzzz' --recipes"),
        ("recipe=./none.yaml", "none.yaml"),
        ("recipe=a\0b.yaml", "b.yaml"),
        ("data.val_samples=" + "9" * 5000, "data.val_samples= null"),
        ("loss.alpha=" + "[" * 100_000, "loss.alpha= number"),
        ("loss.alpha=1" + "0" * 400, "loss.alpha= number"),
        ("data.val_samples=0x" + "f" * 16, "data.val_samples=18446744073709551615 null"),
        ("data.val_samples=0x" + "f" * 5000, "4300"),
        ("data.name=two\x85lines", "data.name=two lines data.kind=facts"),
    ],
)
def test_wrong_keys_options_and_values(error: Any, argument: str, expected: str) -> None:
    line = error(argument)
    names(line, *expected.split())
    assert len(line) < 400


def test_nothing_at_all(error: Any) -> None:
    names(error(), "recipe=NAME", "key=value", "--help")
    assert "recipe" not in error(schema=Other)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("optim.gate_lr", "5e-5", 5e-5),
        ("optim.gate_lr", "1", 1),
        ("trainer.max_steps", "-1", -1),
        ("trainer.progress", "no", False),
        ("data.root", "null", None),
        ("data.root", "yes", "yes"),
        ("data.root", "a: b #c", "a: b #c"),
        ("data.root", "'null'", "null"),
        ("data.root", '"two  words"', "two  words"),
        ("data.root", "it's", "it's"),
        ("data.revision", "0123", "0123"),
        ("data.revision", "1e5", "1e5"),
        ("data.val_samples", "7", 7),
        ("lora.targets", "q_proj", ["q_proj"]),
        ("lora.targets", "[q_proj, k_proj]", ["q_proj", "k_proj"]),
        ("lora.targets", "[]", []),
        ("logger", "wandb", ["wandb"]),
    ],
)
def test_text_becomes_a_value_of_the_keys_type(name: str, text: str, value: object) -> None:
    read = from_text(KEYS[name], text)
    assert read == value
    assert type(read) is type(value)


def test_another_schema() -> None:
    config = other("prompt=Why, then? {really}: yes", "inner.budget=64", "inner.names=b", "options={window: [1, 2]}")
    assert config == Other("Why, then? {really}: yes", {"window": [1, 2]}, Inner(64, ["b"]))
    assert other("prompt=p", "inner.budget=0.25").inner.budget == 0.25
    assert other("prompt=p", "inner.budget=null").inner.budget is None


def test_of_a_key_given_twice_the_last_one_counts() -> None:
    assert fit("seed=1", "seed=2").seed == 2


@pytest.mark.parametrize(
    ("schema", "word", "parts"),
    [
        (CompareConfig, "policies=full,h2o", ("policies=[full,h2o]",)),
        (CompareConfig, "budgets=0.5,0.25", ("budgets=[0.5,0.25]",)),
        (GenerateConfig, "prompt=go to ${HOME}", ("prompt=", "file=PATH")),
        (Other, "inner.budget=1", ("prompt=...",)),
        (Other, "prompt=forbidden", ("prompt=forbidden",)),
        (Other, "recipe=quickstart", ("'recipe'",)),
        (Other, "inner.budget=half", ("inner.budget='half'", "null")),
    ],
)
def test_errors_of_other_schemas(schema: Any, word: str, parts: Any, error: Any) -> None:
    """Also what a shell suggests and is meant otherwise."""
    names(error(word, schema=schema), *parts)


def test_a_list_of_one_text_with_a_comma_is_quoted() -> None:
    assert resolve(CompareConfig, {"policies": "[full]", "tasks": "'a,b'"}).tasks == ["a,b"]
    assert resolve(CompareConfig, {"policies": "[full]", "tasks": "ppl"}).tasks == ["ppl"]

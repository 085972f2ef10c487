"""Keys and values on a command line, and the errors of wrong ones."""

from typing import Any

import pytest

from ag.commands.compare import CompareConfig
from ag.config.keys import from_text
from ag.config.recipes import resolve
from ag.errors import nearest
from tests.support.refused import names
from tests.support.schemas import KEYS, Inner, Other, fit, other


def test_every_key_is_documented_and_has_a_default_that_fits() -> None:
    assert [key.name for key in KEYS.values() if len(key.doc) < 5 or not key.accepts(key.default)] == []
    assert len(KEYS) > 70


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("alpha=1", "'alpha' loss.alpha?"),
        ("qqqqqq=1", "'qqqqqq' --help"),
        ("loss.alpha", "'loss.alpha' key=value loss.alpha=..."),
        ("--dryrun", "'--dryrun' --dry-run?"),
        ("", "recipe=NAME key=value --help"),
        ("loss.alpha=-1", "loss.alpha=-1 0"),
        ("loss.alpha=0.5,1", "loss.alpha='0.5,1' -m"),
        ("loss.alpha=", "loss.alpha= number"),
        ("loss.mean=sof", "loss.mean='sof' hard soft?"),
        ("seed='1'", "seed='1' whole"),
        ("logger=csv,wandb", "logger='csv,wandb' tensorboard [csv,wandb]"),
        ("output=${oc.env:HOME}", "output='${oc.env:HOME}'"),
        ("recipe=piqa_sf", "'piqa_sf' piqa_sft?"),
        ("data.val_samples=" + "9" * 5000, "data.val_samples= null"),
    ],
)
def test_wrong_keys_options_and_values(error: Any, argument: str, expected: str) -> None:
    line = error(*([argument] if argument else []))
    names(line, *expected.split())
    assert len(line) < 400


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("optim.gate_lr", "5e-5", 5e-5),
        ("data.root", "null", None),
        ("data.root", "yes", "yes"),
        ("data.root", "a: b #c", "a: b #c"),
        ("data.root", "runs #1", "runs #1"),
        ("data.root", "'null'", "null"),
        ("data.val_samples", "7", 7),
        ("lora.targets", "q_proj", ["q_proj"]),
        ("lora.targets", "[q_proj, k_proj]", ["q_proj", "k_proj"]),
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
    assert fit("seed=1", "seed=2").seed == 2  # the last one counts
    assert resolve(CompareConfig, {"policies": "[full]", "tasks": "'a,b'"}).tasks == ["a,b"]


@pytest.mark.parametrize(
    ("schema", "word", "parts"),
    [
        (CompareConfig, "policies=full,h2o", ("policies=[full,h2o]",)),
        (Other, "inner.budget=1", ("prompt=...",)),
        (Other, "inner.budget=half", ("inner.budget='half'", "null")),
    ],
)
def test_errors_of_other_schemas(schema: Any, word: str, parts: Any, error: Any) -> None:
    names(error(word, schema=schema), *parts)


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("h2p", ["tova", "h2o"], "h2o"),
        ("ppll", ["ppl", "ppl_stream"], "ppl"),
        ("loss.alhpa", ["loss.beta", "loss.alpha"], "loss.alpha"),
        ("max_tokens", ["tokens", "max_new_tokens"], "max_new_tokens"),
        ("support.yaml", ["export.merge", "output"], None),
        ("recipe", ["device", "replicas"], None),
        ("own", ["copa", "openbookqa"], None),
    ],
)
def test_a_name_is_suggested_if_it_is_near(word: str, known: list[str], meant: str | None) -> None:
    assert nearest(word, known) == (f"; did you mean {meant}?" if meant else "")

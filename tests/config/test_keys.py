"""Keys and values on a command line: which are wrong, and what the error says."""

from typing import Any

import pytest
from schemas import KEYS, Inner, Other, fit, other

from ag.config.keys import from_text


def misspellings() -> list[tuple[str, str]]:
    """Each key with one letter left out, and with one letter doubled, at every place."""
    places = [(name, at) for name in KEYS for at in range(len(name))]
    shorter = [(name, name[:at] + name[at + 1 :]) for name, at in places]
    longer = [(name, name[: at + 1] + name[at:]) for name, at in places]
    return [(name, wrong) for name, wrong in shorter + longer if wrong not in KEYS]


@pytest.mark.slow
def test_every_misspelt_key_gets_the_right_suggestion(error: Any) -> None:
    pairs = misspellings()
    missed = {(name, wrong) for name, wrong in pairs if f"did you mean {name}?" not in error(f"{wrong}=1")}
    assert len(pairs) > 20 * len(KEYS)
    # Without its digit one of beta1 and beta2 has to be the other.
    assert missed <= {("optim.beta1", "optim.beta"), ("optim.beta2", "optim.beta")}


def test_every_key_is_documented() -> None:
    assert [key.name for key in KEYS.values() if len(key.doc) < 5] == []
    assert len(KEYS) > 70


def test_every_default_fits_its_own_key() -> None:
    assert [key.name for key in KEYS.values() if not key.accepts(key.default)] == []


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("alpha=1", "unknown key 'alpha'; did you mean loss.alpha?"),
        ("train.loss.beta=1", "unknown key 'train.loss.beta'; did you mean loss.beta?"),
        ("loss=1", "'loss' is a section, not a key: set one of loss.objective, loss.alpha"),
        ("qqqqqq=1", "unknown key 'qqqqqq'; --help lists the keys"),
        ("=1", "unknown key ''"),
        ("base=piqa_sft", "unknown key 'base'"),
        ("loss.alpha", "'loss.alpha': expected key=value; write loss.alpha=..."),
        ("quickstart", "'quickstart': expected key=value"),
        ("--loss.alpha=1", "unknown option '--loss.alpha=1'; write loss.alpha=..."),
        ("--dryrun", "unknown option '--dryrun'; did you mean --dry-run?"),
        ("-x", "unknown option '-x'"),
    ],
)
def test_wrong_keys_and_options(error: Any, argument: str, expected: str) -> None:
    assert expected in error(argument)


def test_nothing_at_all(error: Any) -> None:
    assert "nothing to do: give recipe=NAME, key=value or --help" in error()
    assert "recipe" not in error(schema=Other)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("loss.alpha=abc", "loss.alpha='abc': expected number, at least 0"),
        ("loss.alpha=-1", "loss.alpha=-1: expected number, at least 0"),
        ("loss.alpha=nan", "loss.alpha='nan': expected number"),
        ("loss.alpha=.nan", "loss.alpha=nan: expected number"),
        ("loss.alpha=.inf", "loss.alpha=inf: expected number"),
        ("loss.alpha=true", "loss.alpha=True: expected number"),
        (
            "loss.alpha=0.5,1",
            "loss.alpha='0.5,1': expected number, at least 0; several values to try need -m",
        ),
        ("loss.alpha=", "loss.alpha= has no value: expected number"),
        ("loss.mean=sof", "loss.mean='sof': expected soft | hard; did you mean soft?"),
        ("train=gates+lor", "expected gates | gates+lora | lora; did you mean gates+lora?"),
        ("model.dtype=bf16", "expected float32 | bfloat16 | float16; did you mean bfloat16?"),
        ("trainer.devices=0", "trainer.devices=0: expected whole number, at least 1"),
        ("trainer.devices=2.0", "trainer.devices=2.0: expected whole number"),
        ("trainer.devices=null", "trainer.devices=None: expected whole number"),
        ("trainer.devices=[1]", "trainer.devices=[1]: expected whole number"),
        ("trainer.progress=1", "trainer.progress=1: expected true | false"),
        ("trainer.progress=maybe", "trainer.progress='maybe': expected true | false"),
        ("seed=-1", "seed=-1: expected whole number, at least 0, at most 4294967295"),
        ("seed=4294967296", "seed=4294967296: expected whole number"),
        ("model.name=null", "model.name=None: expected text"),
        ("logger=[csv,wand]", "expected list of csv | tensorboard | wandb"),
        ("logger=csv,wandb", "expected list of csv | tensorboard | wandb; write [csv,wandb]"),
        ("logger=wandbb", "logger='wandbb': expected list of csv | tensorboard | wandb; did you mean wandb?"),
        ("output=${oc.env:HOME}", "${...} and ??? are not supported"),
        ("output=???", "${...} and ??? are not supported"),
        ("lora.targets=['${oc.env:HOME}']", "${...} and ??? are not supported"),
        ("gate.threshold=1.5", "gate.threshold=1.5: expected"),
        ("gate.layer_offset=1", "gate.first_layer=0: expected at least 1"),
        ("gate.num_heads=0", "gate.num_heads=0: expected at least 1"),
        ("recipe=piqa_sf", "no recipe 'piqa_sf'; did you mean piqa_sft?"),
        ("recipe=zzzzzzzz", "no recipe 'zzzzzzzz'; --recipes lists them"),
        ("recipe=./none.yaml", "none.yaml: there is no such file"),
        ("recipe=../recipes", "recipes: there is no such file"),
        ("recipe=a\0b.yaml", "there is no such file"),
        ("data.val_samples=" + "9" * 5000, "expected whole number | null"),
        ("loss.alpha=" + "[" * 100_000, "expected number"),
        ("loss.alpha=1" + "0" * 400, "expected number"),
        ("data.val_samples=0x" + "f" * 16, "expected whole number | null"),
        ("data.val_samples=0x" + "f" * 5000, "integer"),
        ("data.name=two\x85lines", "data.name=two lines with data.kind=facts"),
    ],
)
def test_wrong_values(error: Any, argument: str, expected: str) -> None:
    line = error(argument)
    assert expected in line
    assert len(line) < 400


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


def test_another_schema_and_its_errors(error: Any) -> None:
    assert "prompt has no value: give prompt=..." in error("inner.budget=1", schema=Other)
    assert "prompt=forbidden: expected another one" in error("prompt=forbidden", schema=Other)
    assert "unknown key 'recipe'" in error("recipe=quickstart", "prompt=a", schema=Other)
    assert "inner.budget='half': expected whole number | number | null" in error("inner.budget=half", schema=Other)


def test_of_a_key_given_twice_the_last_one_counts() -> None:
    assert fit("seed=1", "seed=2").seed == 2

"""The command line: keys, values, files and combinations that are wrong, help, sweeps, resuming."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ag.config import Config
from ag.config.command_line import Invocation, parse
from ag.config.keys import ConfigError, from_text, keys, parse_yaml
from ag.config.recipes import check_resume, dump, load_config

KEYS = keys(Config)


@dataclass
class Inner:
    budget: int | float | None = field(default=0.5, metadata={"doc": "tokens or share"})
    names: list[Literal["a", "b"]] = field(default_factory=lambda: ["a"], metadata={"doc": "names"})


@dataclass
class Other:
    """A schema as another program might have it: a required key, no recipes."""

    prompt: str = field(metadata={"doc": "what to continue"})
    options: dict[str, Any] = field(default_factory=dict, metadata={"doc": "anything"})
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.prompt == "forbidden":
            raise ValueError("prompt=forbidden: expected another one")


def fit(*argv: str) -> Config:
    return parse(argv, Config, "ag.fit").config


def other(*argv: str) -> Other:
    return parse(argv, Other, "ag.other").config


@pytest.fixture
def error(capsys: pytest.CaptureFixture[str]) -> Any:
    """Call a program that must fail; returns the one line that it prints."""

    def call(*argv: str, schema: type[Any] = Config) -> str:
        with pytest.raises(SystemExit) as stopped:
            parse(argv, schema, "ag.fit")
        out, err = capsys.readouterr()
        assert stopped.value.code == 2
        assert out == ""
        assert err.startswith("ag.fit: error: ")
        assert err.count("\n") == 1
        return err.strip()

    return call


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(name: str, text: str | bytes) -> str:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


# Keys


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


# Values


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


# Combinations

DOCUMENTS = "data.kind=text data.name=c data.packing=packed data.cross_documents=false"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("train=lora loss.objective=regress", "there are no gates to train; use loss.objective=lm"),
        ("train=lora loss.objective=kl", "there are no gates to train; use loss.objective=lm"),
        ("train=lora warmup.regress_steps=5", "there are no gates to warm up"),
        ("loss.objective=regress", "use train=gates"),
        ("train=gates loss.objective=regress warmup.regress_steps=1", "every step is one"),
        ("trainer.max_steps=0", "nothing is trained"),
        ("warmup.regress_steps=11 trainer.max_steps=10", "raise trainer.max_steps"),
        ("optim.warmup_steps=11 trainer.max_steps=10", "lower optim.warmup_steps"),
        (
            "loss.anneal_steps=11 trainer.max_steps=10",
            "the 10 steps of trainer.max_steps=10 after warmup.regress_steps=0",
        ),
        ("loss.anneal_steps=8 warmup.regress_steps=3 trainer.max_steps=10", "lower loss.anneal_steps"),
        ("train=gates loss.objective=regress loss.anneal_steps=5", "regression has no target of the mean gate"),
        ("lora.targets=[]", "name linear layers, or use train=gates"),
        ("export.merge=true train=gates", "there is no adapter to merge"),
        ("export.merge=true model.quantization=nf4", "too coarse"),
        ("trainer.strategy=fsdp2 model.quantization=nf4", "silently corrupted"),
        ("export.push_to_hub=me/gates train=lora", "only gates are uploaded"),
        ("data.cache=kept", "only plain text that is read before training is kept"),
        ("data.name=piqa", "use data.kind=sft"),
        ("data.kind=sft", "name a dataset with data.name"),
        ("data.kind=sft data.name=bolq", "did you mean boolq?"),
        ("data.root=x", "that data is generated"),
        ("data.kind=worked", "data.name=facts with data.kind=worked: expected worked or one of addition"),
        ("data.kind=worked data.name=worked data.root=x", "that data is generated"),
        ("data.kind=worked data.name=worked data.solution_min=500", "swap them"),
        ("data.kind=worked data.name=sorting data.solution_max=1024", "lower data.solution_max"),
        ("data.packing=packed", "only plain text is packed"),
        ("data.kind=text data.name=c data.packing=packed gate.scope=prompt", "use gate.scope=causal"),
        ("data.kind=text data.name=c data.packing=packed gate.prefill=dense", "use gate.prefill=sparse"),
        ("data.cross_documents=false", "only packed rows hold several documents"),
        ("data.kind=text data.name=c data.cross_documents=false", "use data.packing=packed"),
        (f"{DOCUMENTS} train=gates loss.objective=regress", "use data.cross_documents=true"),
        (f"{DOCUMENTS} warmup.regress_steps=5", "regression does not know where documents end"),
        ("data.streaming=true", "only plain text streams"),
        ("data.kind=text data.name=c data.streaming=true", "give trainer.max_steps"),
        ("data.prompt_min=600", "swap them"),
        ("data.max_length=511", "less than the longest row of 512 tokens"),
        ("data.kind=text data.name=c data.max_length=575", "less than the longest row of 576 tokens"),
        ("model.dtype=bfloat16 trainer.precision=16-mixed", "use trainer.precision=bf16-mixed"),
        ("model.dtype=float16 trainer.precision=bf16-mixed", "use trainer.precision=16-mixed"),
        ("model.quantization=nf4 trainer.precision=bf16-mixed", "use model.dtype=bfloat16"),
        ("trainer.accelerator=cpu trainer.precision=16-mixed", "float16 needs a GPU"),
        (
            "trainer.accelerator=cpu model.attn_implementation=flash_attention_2 model.dtype=bfloat16",
            "use sdpa",
        ),
        ("model.attn_implementation=flash_attention_2", "use model.dtype=bfloat16"),
    ],
)
def test_combinations_that_make_no_sense(error: Any, argv: str, expected: str) -> None:
    assert expected in error(*argv.split())


@pytest.mark.parametrize(
    "argv",
    [
        "data.kind=text data.name=c data.packing=packed gate.scope=prompt train=lora",
        f"{DOCUMENTS} loss.objective=kl",
        f"{DOCUMENTS} train=lora",
        "data.kind=text data.name=c data.max_length=576",
        "data.kind=text data.name=c data.streaming=true trainer.max_steps=1",
        "warmup.regress_steps=10 optim.warmup_steps=10 trainer.max_steps=10",
        "model.quantization=nf4 trainer.precision=bf16-mixed model.dtype=bfloat16",
        "train=gates lora.targets=[]",
        "loss.anneal_steps=7 warmup.regress_steps=3 trainer.max_steps=10",
        "loss.anneal_steps=7",
        "data.kind=worked data.name=sorting data.solution_min=400 data.solution_max=400",
        "gate.layer_offset=1 gate.first_layer=1",
    ],
)
def test_their_neighbours_do(argv: str) -> None:
    assert isinstance(fit(*argv.split()), Config)


@pytest.mark.parametrize(
    ("argv", "warned"),
    [
        ("loss.beta=0.51", True),
        ("loss.beta=0.5", False),
        ("loss.beta=0.51 loss.mean=hard", False),
        ("loss.beta=0.51 train=lora", False),
        ("loss.beta=0.51 loss.alpha=0", False),
    ],
)
def test_a_target_above_the_threshold_is_a_warning(capsys: Any, argv: str, warned: bool) -> None:
    fit(*argv.split())
    err = capsys.readouterr().err
    assert err.startswith("ag.fit: warning: loss.beta=0.51 is above gate.threshold=0.5") == warned
    assert err.count("\n") == warned


# Files


def test_inheritance_then_overrides(write: Any, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    write("root.yaml", "base: piqa_sft\nloss: {alpha: 2, beta: 0.2}\nlora:\n  targets: [q_proj]\nseed: 1\n")
    write("below/middle.yaml", "base: ../root.yaml\nloss:\n  beta: 0.1\nlora:\n")
    leaf = write("leaf.yaml", "# a leaf\nbase: below/middle.yaml\nseed: 3\n")
    config = fit(f"recipe={leaf}", "gate.num_heads=1", "seed=4")
    assert (config.loss.alpha, config.loss.beta, config.lora.targets, config.seed) == (
        2.0,
        0.1,
        ["q_proj"],
        4,
    )
    assert (config.data.name, config.gate.num_heads, config.gate.scope) == ("piqa", 1, "prompt")
    assert config.recipe == "leaf"


def test_a_recipe_path_is_relative_to_the_working_directory(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("mine.yml", "seed: 5\n")
    monkeypatch.chdir(tmp_path)
    assert fit("recipe=mine.yml").seed == 5
    assert fit("recipe=./mine.yml").seed == 5


def test_cycles(error: Any, write: Any) -> None:
    write("a.yaml", "base: b.yaml\n")
    b = write("b.yaml", "base: ./a.yaml\n")
    assert "circle (b.yaml -> a.yaml -> b.yaml)" in error(f"recipe={b}")
    own = write("own.yaml", "base: own.yaml\n")
    assert "circle (own.yaml -> own.yaml)" in error(f"recipe={own}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("loss:\n  alhpa: 1\n", "mine.yaml: unknown key 'loss.alhpa'; did you mean loss.alpha?"),
        ("los:\n  alpha: 1\n", "unknown key 'los.alpha'; did you mean loss.alpha?"),
        ("los: {}\n", "unknown key 'los'; did you mean loss?"),
        ("loss: 3\n", "'loss' is a section"),
        ("loss: [alpha]\n", "'loss' is a section"),
        ("1: 2\n", "unknown key '1'"),
        ("seed: [1\n", "not valid YAML"),
        ("seed: 1\n\tx: 1\n", "not valid YAML in line 2"),
        ("seed: 1\nseed: 2\n", "duplicate key seed"),
        ("seed: 1\n---\nseed: 2\n", "not valid YAML"),
        ("- seed\n", "expected keys with values, got ['seed']"),
        ("seed\n", "expected keys with values, got 'seed'"),
        ("7\n", "expected keys with values, got 7"),
        ("seed: '1'\n", "seed='1': expected whole number"),
        ("seed: 1.5\n", "seed=1.5: expected whole number"),
        ("loss:\n  mean: sof\n", "did you mean soft?"),
        ("data:\n  revision: 12345\n", "data.revision=12345: expected text | null; put it in quotes"),
        ("model:\n  name: no\n", "model.name=False: expected text; put it in quotes"),
        ("output: ${oc.env:HOME}\n", "${...} and ??? are not supported"),
        ('output: "\\x24{oc.env:HOME}"\n', "${...} and ??? are not supported"),
        ("output: ${seed}\n", "${...} and ??? are not supported"),
        ("output: ???\n", "${...} and ??? are not supported"),
        ("output: !!python/object/apply:os.system [echo]\n", "not valid YAML"),
        ("output: !!python/name:os.system\n", "not valid YAML"),
        ("base: 3\n", "base=3: expected the name of a recipe"),
        ("base: piqa_sf\n", "mine.yaml: no recipe 'piqa_sf'; did you mean piqa_sft?"),
        ("base: nowhere.yaml\n", "nowhere.yaml: there is no such file"),
        ("trainer:\n  devices: 0\n", "mine.yaml: trainer.devices=0: expected whole number, at least 1"),
        (b"\xff\xfe\x00", "mine.yaml: is not UTF-8 text"),
        ("x" * 1_000_001, "1000001 bytes are too many; expected at most 1000000"),
        ("[" * 999_999, "too long or too deeply nested"),
        ("- " * 400_000, "too long or too deeply nested"),
        ("a: {" * 200_000, "too long or too deeply nested"),
        ("seed: [" + "1," * 400_000 + "]", "too long or too deeply nested"),
    ],
)
def test_wrong_files(error: Any, write: Any, text: str | bytes, expected: str) -> None:
    path = write("mine.yaml", text)
    start = time.monotonic()
    line = error(f"recipe={path}")
    assert time.monotonic() - start < 5
    assert expected in line
    assert "nowhere" in expected or "mine.yaml: " in line


def test_an_alias_bomb_is_refused_at_once(error: Any, write: Any) -> None:
    lines = ["l0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"l{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    path = write("bomb.yaml", "\n".join(lines))
    start = time.monotonic()
    assert "bomb.yaml: not valid YAML" in error(f"recipe={path}")
    assert time.monotonic() - start < 5


def test_an_empty_file_gives_the_defaults(write: Any) -> None:
    assert fit("recipe=" + write("empty.yaml", "# nothing\n")) == Config(recipe="empty")


def test_dump_round_trip_of_unusual_text(tmp_path: Path) -> None:
    odd = [
        "yes",
        "1e5",
        "0x10",
        "null",
        "~",
        "a: b",
        "# x",
        " x ",
        "tab\t",
        "line\nbreak",
        "ü€😀",
        "'",
        '"',
        "[a",
        "-",
    ]
    path = tmp_path / "config.yaml"
    for text in odd:
        config = Config(output=text, lora=dataclasses.replace(Config().lora, targets=odd))
        path.write_text(dump(config))
        assert load_config(path, Config) == dataclasses.replace(config, recipe="none")


# Printing


def test_help_lists_every_key_with_type_default_and_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        fit("--help")
    assert stopped.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for key in KEYS.values():
        [line] = [line for line in lines if line.startswith(f"  {key.name}=")]
        assert f"{key.doc} ({key.expected()})" in line
    assert any(line.startswith("  loss.objective=lm ") and "(lm | kl | regress)" in line for line in lines)
    assert any(line.startswith("  trainer.progress=true ") for line in lines)
    assert any(line.startswith("  data.root=null ") for line in lines)
    assert any(line.startswith("  loss.alpha=1.0 ") and "(number, at least 0)" in line for line in lines)
    assert any(line.startswith("  logger=[csv] ") for line in lines)
    for option in ("--help", "--recipes", "--print", "--dry-run", "--multirun"):
        assert any(line.startswith(f"  {option} ") for line in lines)


def test_help_of_a_required_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        other("-h")
    assert "\n  prompt= " in capsys.readouterr().out


def test_print_shows_a_configuration_that_loads_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ("recipe=mistral_cpt", "loss.alpha=2")
    with pytest.raises(SystemExit) as stopped:
        fit("--print", *argv)
    assert stopped.value.code == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert load_config(tmp_path / "printed.yaml", Config) == fit(*argv)


def test_dry_run_is_passed_on() -> None:
    assert parse(["recipe=quickstart", "--dry-run"], Config, "ag.fit").dry_run is True
    assert parse(["recipe=quickstart"], Config, "ag.fit") == Invocation(fit("recipe=quickstart"), dry_run=False)


# Resuming


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "quickstart" / "now"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(fit("recipe=quickstart", "loss.alpha=3")))
    return folder


def test_resume_takes_everything_from_the_run(run: Path) -> None:
    config = fit(f"resume={run}", "trainer.max_steps=100")
    assert (config.recipe, config.loss.alpha, config.resume) == ("quickstart", 3.0, str(run))
    assert config.trainer.max_steps == 100


@pytest.mark.parametrize(
    "override",
    [
        "output=x",
        "logger=[]",
        "wandb.offline=true",
        "checkpoint.keep_last=1",
        "trainer.max_epochs=9",
        "export.merge=false",
    ],
)
def test_resume_may_change_what_does_not_touch_the_result(run: Path, override: str) -> None:
    name, _, value = override.partition("=")
    assert attrgetter(name)(fit(f"resume={run}", override)) == parse_yaml(value)


@pytest.mark.parametrize(
    ("override", "name", "old", "new"),
    [
        ("gate.num_heads=2", "gate.num_heads", "4", "2"),
        ("model.dtype=bfloat16", "model.dtype", "'float32'", "'bfloat16'"),
        ("loss.alpha=1", "loss.alpha", "3.0", "1"),
        ("seed=1", "seed", "0", "1"),
        ("data.batch_size=1", "data.batch_size", "2", "1"),
        ("trainer.devices=2", "trainer.devices", "1", "2"),
        ("train=lora warmup.regress_steps=0", "train", "'gates'", "'lora'"),
    ],
)
def test_resume_refuses_another_run(error: Any, run: Path, override: str, name: str, old: str, new: str) -> None:
    assert f"that run has {name}={old}, not {new}" in error(f"resume={run}", *override.split())


def test_resume_from_another_recipe(error: Any, run: Path) -> None:
    line = error(f"resume={run}", "recipe=boolq_sft")
    assert "that run has recipe='quickstart', not 'boolq_sft'" in line
    with pytest.raises(ConfigError, match="that run has recipe='quickstart', not 'boolq_sft'"):
        check_resume(fit("recipe=boolq_sft"), run)
    check_resume(fit("recipe=quickstart", "loss.alpha=3"), run)


def test_resume_from_no_run(error: Any, tmp_path: Path) -> None:
    assert "expected a run folder, such as runs/RECIPE/TIME, with a config.yaml" in error(f"resume={tmp_path}")


@pytest.mark.parametrize("place", ["https://example.org/run", "s3://bucket/run", "hf://me/run"])
def test_resume_from_an_address(error: Any, place: str) -> None:
    assert "expected a run folder, such as runs/RECIPE/TIME, with a config.yaml" in error(f"resume={place}")


@pytest.mark.parametrize("name", ["../../elsewhere", "/etc", "a/b", "..", ".hidden", ""])
def test_name_of_a_recipe_cannot_leave_the_output_folder(error: Any, tmp_path: Path, name: str) -> None:
    path = tmp_path / "sly.yaml"
    path.write_text(f"recipe: '{name}'\n")
    assert f"recipe={name!r}: the name is also that of a folder" in error(f"recipe={path}")


# Sweeps

PROGRAM = """
import json, os, sys, time
from dataclasses import dataclass, field
from ag.config.command_line import parse

@dataclass
class Schema:
    a: int = field(default=0, metadata={"doc": "first", "low": 0})
    b: str = field(default="x", metadata={"doc": "second"})
    c: list[int] = field(default_factory=list, metadata={"doc": "third"})

call = parse(sys.argv[1:], Schema, "sweeper")
config = call.config
with open(os.environ["SWEEP_LOG"], "a") as log:
    log.write(json.dumps([config.a, config.b, config.c, call.dry_run, os.getpid()]) + "\\n")
if config.b == "wait":
    time.sleep(60)
sys.exit(3 if config.a == 1 else 0)
"""


@pytest.fixture
def sweeper(tmp_path: Path) -> Any:
    """Run a small program with its own schema in a sweep; returns how to start it, and its records."""
    (tmp_path / "sweeper.py").write_text(PROGRAM)
    log = tmp_path / "log"
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parent.parent)])
    env = {**os.environ, "SWEEP_LOG": str(log), "PYTHONPATH": path}

    def start(*argv: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "sweeper", *argv],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def runs() -> list[Any]:
        return [parse_yaml(line) for line in log.read_text().splitlines()] if log.exists() else []

    return start, runs


@pytest.mark.slow
def test_sweep_runs_the_product_in_fresh_processes_and_goes_on_after_a_failure(sweeper: Any) -> None:
    start, runs = sweeper
    process = start("-m", "a=1,2", """b="p,q",it's""", "c=[1,2]", "--dry-run")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    expected = [[a, b, [1, 2], True] for a in (1, 2) for b in ("p,q", "it's")]
    assert [run[:4] for run in runs()] == expected
    assert len({process.pid, *(run[4] for run in runs())}) == 5
    table = out[out.index(" run  result") :].splitlines()[1:]
    assert [line.split()[:3] for line in table] == [
        ["1", "exit", "3"],
        ["2", "exit", "3"],
        ["3", "ok", table[2].split()[2]],
        ["4", "ok", table[3].split()[2]],
    ]
    assert "a=2" in table[2]


@pytest.mark.slow
def test_sweep_starts_nothing_when_one_combination_is_bad(sweeper: Any) -> None:
    start, runs = sweeper
    process = start("-m", "a=0,2,-1")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert err == "sweeper: error: a=-1: expected whole number, at least 0\n"
    assert runs() == []


@pytest.mark.slow
def test_sigterm_ends_the_run_at_work_and_the_sweep(sweeper: Any) -> None:
    start, runs = sweeper
    process = start("-m", "a=0,2", "b=wait")
    deadline = time.monotonic() + 240
    while not runs() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert len(runs()) == 1
    assert f"exit {-signal.SIGTERM}" in out


def test_sweep_validates_every_recipe_first(error: Any) -> None:
    assert "no recipe 'nope'" in error("-m", "recipe=quickstart,nope")
    assert "loss.alpha= has no value" in error("-m", "loss.alpha=1,")
    assert "several values to try need -m" in error("loss.alpha=1,2")
    many = ",".join(map(str, range(40)))
    assert "1600 combinations; expected at most 1000" in error("-m", f"seed={many}", f"loss.alpha={many}")


def test_print_of_a_sweep_shows_each_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        fit("-m", "--print", "loss.alpha=0.5,1", "seed=0,1,2")
    assert stopped.value.code == 0
    documents = [parse_yaml(text) for text in capsys.readouterr().out.split("---\n")]
    order = [(tree["loss"]["alpha"], tree["seed"]) for tree in documents]
    assert order == [(0.5, 0), (0.5, 1), (0.5, 2), (1.0, 0), (1.0, 1), (1.0, 2)]


# Anything at all: success, or exit code 2 with one line

anything = settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
texts = st.text(max_size=40) | st.sampled_from(
    ["${seed}", "[", "!!timestamp x", "!!bool x", "&a *a", "<<: 1", "0b", "1:30"]
)
arguments = st.one_of(
    texts,
    st.builds("{}={}".format, st.sampled_from(list(KEYS)), texts),
    st.builds("{}={}".format, texts, texts),
    st.sampled_from(["-m", "--dry-run", "--print"]),
)


def outcome(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    start = time.monotonic()
    try:
        assert isinstance(parse(argv, Config, "ag.fit"), Invocation)
    except SystemExit as stopped:
        assert stopped.code in (0, 2)
        if stopped.code == 2:
            err = capsys.readouterr().err
            assert err.splitlines()[-1].startswith("ag.fit: error: ")
            assert err.count("\n") == len(err.splitlines())
    assert time.monotonic() - start < 10


@pytest.fixture
def no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ag.config.command_line.sweep", lambda *_: 0)


@anything
@given(argv=st.lists(arguments, max_size=4))
def test_any_arguments(argv: list[str], capsys: pytest.CaptureFixture[str], no_sweep: None) -> None:
    outcome(argv, capsys)


leaves = st.none() | st.booleans() | st.integers() | st.floats() | texts
trees = st.dictionaries(
    st.sampled_from([*KEYS, *{name.split(".")[0] for name in KEYS}, *{name.split(".")[-1] for name in KEYS}, "base"])
    | texts,
    st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)


@anything
@given(
    content=texts
    | st.binary(max_size=60)
    | trees.map(repr)
    | st.builds("{}: {}".format, st.sampled_from(list(KEYS)), texts)
)
def test_any_file(
    content: str | bytes,
    capsys: pytest.CaptureFixture[str],
    tmp_path_factory: pytest.TempPathFactory,
    no_sweep: None,
) -> None:
    path = tmp_path_factory.mktemp("any") / "any.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    outcome([f"recipe={path}"], capsys)

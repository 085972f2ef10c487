"""What a run says that it needs where it cannot run, without network."""

import pytest
from huggingface_hub.errors import GatedRepoError

from ag import fit, hardware
from ag import plan as command
from ag.config import Config, ModelConfig
from ag.config.recipes import recipes, resolve
from ag.errors import UserError
from ag.model import base as models
from ag.model import configurations
from ag.training import memory_plan, preflight
from ag.training.made_outline import read_geometry
from ag.wheels import hub_name
from tests.support.refused import names, refuses

LLAMA = "meta-llama/Llama-2-7b-hf"
NEEDS = ("17.9 GiB", "5.2 hours", "python -m ag.plan")
LICENCE = (f"https://huggingface.co/{LLAMA}", "hf auth login")


@pytest.fixture
def offline(monkeypatch):
    """The hub does not answer."""

    def unreachable(*args, **options):
        raise OSError("no route")

    monkeypatch.setattr(models, "snapshot_download", unreachable)


def test_a_gated_model_that_cannot_be_fetched(offline, monkeypatch, capsys):
    """Licence, login, memory and hours, whether the hub answers or not; before transformers asks for a minute."""
    monkeypatch.setattr(preflight, "_memory", lambda config: 64 << 30)
    assert fit.main(["recipe=piqa_sft"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    names(error, f"model.name='{LLAMA}'", "no route", *LICENCE, *NEEDS)


@pytest.mark.parametrize(
    ("gib", "dtype", "quantization", "fix"),
    [(12, "bfloat16", "none", "model.quantization=nf4"), (3, "bfloat16", "nf4", "fsdp2")],
)
def test_a_model_that_exceeds_the_memory_is_refused_before_it_is_fetched(gib, dtype, quantization, fix, monkeypatch):
    config = resolve(Config, {"recipe": "piqa_sft", "model.dtype": dtype, "model.quantization": quantization})
    monkeypatch.setattr(preflight, "_memory", lambda config: gib << 30)
    with refuses(UserError, f"model.name={LLAMA}", f"this device has {gib}.0", fix, *LICENCE, "hours") as caught:
        preflight.check_memory(config)
    assert ("nf4" in str(caught.value)) == (quantization == "none")


def test_the_memory_is_that_of_the_container(monkeypatch):
    monkeypatch.setattr(preflight, "main_memory", lambda: 3 << 30)
    config = resolve(Config, {"recipe": "piqa_sft", "trainer.accelerator": "cpu", "model.quantization": "none"})
    with refuses(UserError, f"model.name={LLAMA}", "this device has 3.0"):
        preflight.check_memory(config)


def test_a_step_that_exceeds_the_memory_is_a_warning(monkeypatch, capsys):
    config = resolve(Config, {"recipe": "piqa_sft"})
    for gib, warned in ((16, True), (24, False)):
        monkeypatch.setattr(preflight, "_memory", lambda config, gib=gib: gib << 30)
        names(preflight.check_memory(config), *NEEDS)
        error = capsys.readouterr().err
        assert bool(error) == warned
    monkeypatch.setattr(preflight, "_memory", lambda config: 16 << 30)
    preflight.check_memory(config)
    names(capsys.readouterr().err, "ag.fit: warning", "16.0 GiB", *NEEDS)


def test_random_weights_and_models_of_the_hub_alone_have_no_plan():
    config = Config()
    for name in ("nobody/nothing", "random:tiny"):
        config.model.name = name
        assert preflight.check_memory(config) == ""


def test_a_model_of_this_machine_has_a_plan(tmp_path, tiny_llama, monkeypatch, capsys):
    """A folder, and an alias, which is a folder once it was made: its steps may exceed what its weights do not."""
    monkeypatch.setenv("AG_HOME", str(tmp_path))
    tiny_llama().save_pretrained(tmp_path / "qwen2.5-coder-0.5b")
    config = Config()
    for name in ("qwen2.5-coder-0.5b", str(tmp_path / "qwen2.5-coder-0.5b")):
        config.model.name = name
        weights = memory_plan.plan(config).memory["base weights"]
        monkeypatch.setattr(preflight, "_memory", lambda config, weights=weights: 2 * weights)
        preflight.check_memory(config)
        names(capsys.readouterr().err, "ag.fit: warning", "may exceed")
    monkeypatch.setattr(preflight, "_memory", lambda config: 1000)
    with refuses(UserError, f"model.name={tmp_path}", "weights"):
        preflight.check_memory(config)


def test_only_models_of_gated_repositories_ask_for_a_licence(monkeypatch):
    class Response:
        headers, request = {}, None

    def gated(name, **options):
        raise GatedRepoError("Access is restricted.", response=Response())

    with refuses(models.ModelError, "'nobody/nothing'", "check the spelling") as caught:
        models.load_base("nobody/nothing")
    assert "licence" not in str(caught.value)
    monkeypatch.setattr(models, "snapshot_download", gated)
    with refuses(models.ModelError, "'me/locked'", "https://huggingface.co/me/locked", "hf auth login"):
        models.load_base("me/locked")


def test_every_recipe_is_planned_without_network(monkeypatch):
    monkeypatch.setattr(models, "resolve", lambda *_: pytest.fail("a model was looked for"))
    planned = set()
    for name in recipes("ag.fit"):
        given = {"recipe": name, "init": "EXPORT"} if name == "smollm2_remember" else {"recipe": name}
        config = resolve(Config, given)
        assert len(memory_plan.outline_of(config).layers) in (30, 32)
        planned.add(hub_name(config.model.name))
    for name in configurations.names():  # a model that must be made has its configuration too
        assert read_geometry(ModelConfig(name=name)).num_hidden_layers > 0
    assert planned < set(configurations.names())


@pytest.mark.slow
def test_a_plan_ends_with_the_time_of_the_run(offline, capsys):
    assert command.main(["recipe=piqa_sft", "tflops=70"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "the run: 2,014 steps, at most 5.2 hours"


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({"recipe": "piqa_sft"}, 2 * -(-(16113 // 4) // 4)),
        ({"recipe": "redpajama_cpt"}, -(-(4997 // 4) // 4)),
        ({"recipe": "piqa_sft", "data.train_samples": "10", "trainer.accumulate": "3"}, 2),
        ({"recipe": "quickstart"}, 48),
        ({"recipe": "quickstart", "trainer.max_steps": "-1", "optim.warmup_steps": "0"}, 1000),
        ({"recipe": "piqa_sft", "data.name": "me/rows"}, None),
        ({"recipe": "piqa_sft", "data.root": "."}, None),
    ],
)
def test_steps_of_a_run(given, count):
    assert memory_plan.steps(resolve(Config, given)) == count


def test_bfloat16_on_a_processor_without_its_instructions_is_a_warning(monkeypatch, capsys):
    for features, precision, warned in (
        ({"avx2", "avx512f"}, "bf16-mixed", True),
        ({"avx2", "avx512f"}, "32-true", False),
        ({"avx512f", "avx512_bf16"}, "bf16-mixed", False),
        (set(), "bf16-mixed", False),  # a system that does not name them
    ):
        monkeypatch.setattr(hardware, "cpu_features", lambda features=features: features)
        config = {"recipe": "piqa_sft", "trainer.accelerator": "cpu", "trainer.precision": precision}
        preflight.warn_of_slow_bfloat16(resolve(Config, config))
        assert ("trainer.precision=32-true" in capsys.readouterr().err) == warned

"""What vLLM cannot do with eviction is refused by name when an engine is made."""

import os
from types import SimpleNamespace

import pytest

from ag.errors import UserError
from ag.gates import export
from ag.gates.adapters import MERGED
from ag.gates.export import ExportError
from ag.gates.manifest import ADAPTER_FILES
from ag.vllm import hooks
from ag.vllm.settings import Settings
from tests.support.refused import refuses

pytest.importorskip("vllm", reason="needs vLLM: bash scripts/vllm_env.sh test")

GATES = {"gates": "smollm2", "budget": 0.3}


def config(model, ag=GATES, **options):
    """The configuration of an engine, without the engine."""
    from vllm.engine.arg_utils import EngineArgs

    options = {"dtype": "float32", "max_model_len": 1024, "enforce_eager": True} | options
    return EngineArgs(str(model), additional_config={"ag": ag} if ag else {}, **options).create_engine_config()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enable_lora": True}, ["LoRA"]),
        ({"tensor_parallel_size": 2}, ["tensor_parallel_size=2"]),
        ({"pipeline_parallel_size": 2}, ["pipeline_parallel_size=2"]),
        ({"kv_cache_dtype": "fp8"}, ["kv_cache_dtype=fp8"]),
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, ["scheduler_cls"]),
        (
            {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}},
            ["kv_transfer_config"],
        ),
        ({"kv_offloading_size": 1.0}, ["kv_offloading_size"]),
    ],
)
def test_argument(smollm2, options, words):
    with refuses(UserError, *words):
        config(smollm2, **options)


def test_schedules_beside_prefixes_and_drafts(smollm2):
    blocks, steps = GATES | {"schedule": "blocks:64"}, GATES | {"schedule": "steps:16"}
    with refuses(UserError, "prefix caching", "schedule=blocks:64"):
        config(smollm2, blocks, enable_prefix_caching=True)
    assert not config(smollm2, blocks).cache_config.enable_prefix_caching
    assert config(smollm2, steps).cache_config.enable_prefix_caching
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    with refuses(UserError, "drafts", "schedule=steps:16"):
        config(smollm2, steps, speculative_config=drafts)


def test_gates_of_another_model(smollm2):
    with refuses(ExportError, "load the base of the gates"):
        config(smollm2, {"gates": "qwen2.5-coder-0.5b", "budget": 0.3})


def test_gates_whose_adapter_the_model_lacks(smollm2, monkeypatch):
    """A model that it is merged into has its hash in the configuration."""
    engine, settings, info = config(smollm2), Settings.parse({"ag": GATES}, {}), export.read_info("smollm2")
    trained = info | {"sha256": info["sha256"] | {ADAPTER_FILES[1]: "0123"}}
    monkeypatch.setattr(export, "read_info", lambda _: trained)
    with refuses(UserError, "LoRA adapter", "export.merge=true"):
        hooks.check_gates(engine, settings)
    setattr(engine.model_config.hf_config, MERGED, "0123")
    hooks.check_gates(engine, settings)


def test_release_and_runner(smollm2, monkeypatch):
    import vllm

    with monkeypatch.context() as patch:
        patch.setattr(vllm, "__version__", "0.34.1")
        with refuses(UserError, "0.34.1", "0.32 or 0.33"):
            config(smollm2)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with refuses(UserError, "VLLM_USE_V2_MODEL_RUNNER"):
        config(smollm2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sliding_window": 128}, ["sliding_window=128"]),
        ({"logits_soft_cap": 30.0}, ["logits_soft_cap=30.0"]),
        ({"alibi_slopes": [0.5]}, ["ALiBi"]),
        ({"sinks": [0.0]}, ["sinks"]),
        ({"kv_cache_dtype": "fp8_e5m2"}, ["kv_cache_dtype=fp8_e5m2"]),
        ({"kv_sharing_target_layer_name": "x.0"}, ["share keys"]),
        ({"attn_type": "encoder"}, ["encoder"]),
    ],
)
def test_attention_of_a_layer(changes, words):
    from ag.vllm.backend import EvictionImpl

    with refuses(UserError, *words):
        EvictionImpl(4, 16, 0.25, 2, **changes)


@pytest.mark.parametrize("resumable", [True, False])
def test_request_that_is_refused_before_it_reaches_the_scheduler(smollm2, monkeypatch, resumable):
    """There an error ends this request alone; in the scheduler it would end the engine."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

    from ag.vllm.scheduler import EvictionScheduler

    config(smollm2)  # installs the hook
    request = SimpleNamespace(resumable=resumable, use_structured_output=False)
    monkeypatch.setattr(Request, "from_engine_core_request", lambda *given: request)
    scheduler = object.__new__(EvictionScheduler)
    placed = []
    scheduler.manager = SimpleNamespace(placement=placed.append)
    core = SimpleNamespace(scheduler=scheduler, mm_receiver_cache=None, request_block_hasher=None)
    asked = SimpleNamespace(mm_features=None, current_wave=0)
    if resumable:
        with refuses(UserError, "streaming input"):
            EngineCore.preprocess_add_request(core, asked)
    else:
        assert EngineCore.preprocess_add_request(core, asked) == (request, 0) and placed == [request]


def test_gate_that_did_not_run(smollm2):
    from ag.vllm.backend import Reading
    from ag.vllm.settings import Settings

    gates = Settings("gates:smollm2", 0.3).made_policy.gates
    reading = Reading(None, gates, slice(None), ran={0})
    reading.check(0)
    with refuses(UserError, "layer 1"):
        reading.check(1)


def test_backend_that_another_package_registered(smollm2):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    register_backend(custom, "other.Backend")
    try:
        config(smollm2, ag=None)
        assert custom.get_path() == "other.Backend"
        config(smollm2)
        assert custom.get_path() == "ag.vllm.cuda.FlashEvictionBackend"
        config(smollm2, ag=None)
        assert not custom.is_overridden()
    finally:
        custom.clear_override()


def test_settings_from_the_environment(smollm2, monkeypatch):
    monkeypatch.setenv("AG_GATES", "smollm2")
    monkeypatch.setenv("AG_BUDGET", "200")
    made = config(smollm2, ag=None)
    assert made.additional_config["ag"] == {"policy": "gates:smollm2", "budget": 200}
    assert made.scheduler_config.scheduler_cls == "ag.vllm.scheduler.EvictionScheduler"
    monkeypatch.delenv("AG_GATES")
    assert "AG_VLLM_ACTIVE" in os.environ
    assert config(smollm2, ag=None).scheduler_config.scheduler_cls is None
    assert "AG_VLLM_ACTIVE" not in os.environ

"""What is changed in vLLM when a user asks for eviction, and what is refused by name."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from typing import Any

from ag.config.spec import PolicySpec
from ag.engine.policy import Policy
from ag.errors import UserError
from ag.gates import export
from ag.gates.adapters import MERGED
from ag.gates.folder import check_base
from ag.gates.manifest import ADAPTER_FILES
from ag.vllm.gate_operator import NAME as OPERATOR
from ag.vllm.settings import CACHE_TYPES, KEY, PROTECT, Settings, protected_tokens

#: The releases of vLLM whose functions this package uses.
RELEASES = ("0.32", "0.33")
#: Tells the processes that vLLM starts that the engine evicts.
ACTIVE = "AG_VLLM_ACTIVE"
BLOCK_SIZE = 32  # where the user gives none: vLLM's 128 on a CPU would lose half a block at the end of each row
#: By vLLM's name. The CPU platform takes its own backend, whatever is asked for; a GPU takes a custom one by its name.
BACKENDS = {"CPU_ATTN": "ag.vllm.cpu.CPUEvictionBackend", "CUSTOM": "ag.vllm.cuda.FlashEvictionBackend"}


def register() -> None:
    """Read the settings of each engine that this process makes, or take part in the engine of the process above."""
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config
    if not hasattr(create, "by_ag"):

        @functools.wraps(create)
        def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            settings = Settings.parse(self.additional_config, os.environ)
            activate(settings is not None)
            if settings is None:
                return create(self, *args, **kwargs)
            policy = settings.made_policy
            prepare(self, policy)
            config = create(self, *args, **kwargs)
            check(config, policy)
            config.scheduler_config.scheduler_cls = (
                f"ag.vllm.scheduler.{'Async' * bool(config.scheduler_config.async_scheduling)}EvictionScheduler"
            )
            check_gates(config, settings)
            if config.compilation_config.splitting_ops:  # CUDA graphs have no part in which a gate runs
                config.compilation_config.splitting_ops.append(f"vllm::{OPERATOR}")
            return config

        create_engine_config.by_ag = True  # type: ignore[attr-defined]
        EngineArgs.create_engine_config = create_engine_config
    if os.environ.get(ACTIVE):
        activate(True)


def activate(is_active: bool) -> None:
    """Register our attention backend with vLLM, or unregister it. Engines that were made before keep theirs."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.attention.selector import _cached_get_attn_backend

    _cached_get_attn_backend.cache_clear()
    for name, path in BACKENDS.items():
        member = AttentionBackendEnum[name]
        if is_active:
            register_backend(member, path)
        elif member.is_overridden() and member.get_path() == path:  # another package may have registered its own
            member.clear_override()
    os.environ.pop(ACTIVE, None)
    if is_active:
        os.environ[ACTIVE] = "1"
        install()


def install() -> None:
    """Patch vLLM's functions. Engines without ag's settings behave as before."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if hasattr(GPUModelRunner, "ag_builders"):
        return
    KVCacheSpecRegistry._ensure_registered()  # first: it does nothing once the registry has any entry
    from ag.vllm import gate_operator
    from ag.vllm.backend import EvictionBuilder
    from ag.vllm.scheduler import EndsChunks, EvictionManager, EvictionSpec

    KVCacheSpecRegistry.register(EvictionSpec, EvictionManager, uniform_type_base_spec=FullAttentionSpec)
    gate_operator.install()
    initialize, update, verify, preprocess = (
        GPUModelRunner.initialize_metadata_builders,
        GPUModelRunner._update_states,
        SamplingParams.verify,
        EngineCore.preprocess_add_request,
    )

    @functools.wraps(initialize)
    def initialize_metadata_builders(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = initialize(self, *args, **kwargs)
        builders = [x for groups in self.attn_groups for group in groups for x in group.metadata_builders]
        self.ag_builders = [x for x in builders if isinstance(x, EvictionBuilder)]
        for builder in self.ag_builders:
            builder.set_runner(self)
        return result

    @functools.wraps(update)
    def update_states(self: Any, scheduler_output: Any) -> Any:
        for builder in self.ag_builders:
            builder.forget(scheduler_output.finished_req_ids)
        return update(self, scheduler_output)

    @functools.wraps(verify)
    def verify_params(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            protected_tokens(self, 0)
        except UserError as error:
            raise VLLMValidationError(str(error), parameter=PROTECT) from error  # the server's status 400
        verify(self, *args, **kwargs)

    @functools.wraps(preprocess)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        result = preprocess(self, request)
        if isinstance(self.scheduler, EndsChunks):
            self.scheduler.check(result[0])  # an error in the scheduler itself would end the engine
        return result

    GPUModelRunner.ag_builders = ()
    GPUModelRunner.initialize_metadata_builders = initialize_metadata_builders
    GPUModelRunner._update_states = update_states
    SamplingParams.verify = verify_params
    EngineCore.preprocess_add_request = preprocess_add_request


def prepare(arguments: Any, policy: Policy) -> None:
    """Set what eviction by a policy needs in the arguments of an engine, and refuse another release of vLLM.

    Raises:
        UserError: the release is another one, or an argument is refused.
    """
    from vllm import __version__
    from vllm.envs import disable_envs_cache
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if ".".join(__version__.split(".")[:2]) not in RELEASES:
        raise UserError(
            f"vLLM {__version__}: expected {' or '.join(RELEASES)}, whose functions ag uses; pip install 'ag[vllm]'."
        )
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0") not in ("0", ""):
        raise UserError("VLLM_USE_V2_MODEL_RUNNER=1: expected vLLM's first model runner; unset the variable.")
    # The default on a GPU is the second runner. vLLM reads the variable in each process of the engine, and again while
    # the engine runs, so that it stays set: later engines of this process have the first runner too.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    disable_envs_cache()  # an earlier engine of this process remembers the variables
    refuse(
        {
            f"scheduler_cls={arguments.scheduler_cls}": arguments.scheduler_cls is not None,
            "LoRA adapters that are not merged (enable_lora)": bool(arguments.enable_lora),
            f"pipeline_parallel_size={arguments.pipeline_parallel_size}": arguments.pipeline_parallel_size != 1,
            f"tensor_parallel_size={arguments.tensor_parallel_size}": arguments.tensor_parallel_size != 1,
            f"data_parallel_size={arguments.data_parallel_size}": arguments.data_parallel_size != 1,
            f"prefix caching with schedule={policy.schedule}": (
                policy.block is not None and bool(arguments.enable_prefix_caching)
            ),
        }
    )
    if policy.block is not None:
        arguments.enable_prefix_caching = False  # the keys of a token depend on the whole prompt's length
    if arguments.block_size is None and current_platform.is_cpu():
        arguments.block_size = BLOCK_SIZE
    if not current_platform.is_cpu():
        arguments.attention_backend = AttentionBackendEnum.CUSTOM


def check(config: Any, policy: Policy) -> None:
    """Refuse what eviction by a policy cannot go with.

    Raises:
        UserError: names the setting, its value, and what is expected.
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    speculative = config.speculative_config
    method = None if speculative is None else speculative.method
    refuse(
        {
            "vLLM's second model runner": config.use_v2_model_runner,
            "a KV connector (kv_transfer_config, kv_offloading_size)": config.kv_transfer_config is not None,
            "decode or prefill context parallelism": parallel.decode_context_parallel_size != 1
            or parallel.prefill_context_parallel_size != 1,
            "KV events (kv_events_config)": config.kv_events_config is not None,
            f"kv_cache_dtype={cache.cache_dtype}": cache.cache_dtype not in CACHE_TYPES,
            f"speculative decoding by {method}": method not in (None, "ngram"),
            # a rejected draft cannot take an eviction back
            f"drafts with schedule={policy.schedule}": method is not None and policy.steps is not None,
            "async scheduling with drafts": method is not None and bool(config.scheduler_config.async_scheduling),
            "micro-batches (enable_dbo)": bool(parallel.enable_dbo),
            "MLA": model.use_mla,
            "a hybrid (layers with states)": model.is_hybrid,
            "an encoder": model.is_encoder_decoder,
            f"runner={model.runner_type}": model.runner_type != "generate",
            "images, sound or video": model.is_multimodal_model,
        }
    )


def refuse(settings: Mapping[str, bool]) -> None:
    """Raise ``UserError`` for the first of these settings that is true."""
    for name, is_refused in settings.items():
        if is_refused:
            raise UserError(f"ag in vLLM: {name}: not supported; leave it out, or serve this by ag.serve.")


def check_gates(config: Any, settings: Settings) -> None:
    """Refuse gates of another model, and write the settings where all processes of the engine read them.

    Raises:
        ExportError: the gates were made for another geometry.
        UserError: the model lacks the adapter that the gates were trained with.
    """
    spec, model = PolicySpec.parse(settings.policy), config.model_config
    if spec.path is not None:
        info = export.read_info(spec.path)
        check_base(export.local(spec.path), info, model.hf_text_config)
        adapter = info["sha256"].get(ADAPTER_FILES[1])
        if adapter is not None and getattr(model.hf_config, MERGED, None) != adapter:
            raise UserError(
                f"ag in vLLM: the gates of {spec.path} were trained together with a LoRA adapter, which {model.model} "
                "lacks: serve the model that it is merged into (export.merge=true)."
            )
    if not isinstance(config.additional_config, dict) or KEY not in config.additional_config:
        settings_given = {"policy": settings.policy, "budget": settings.budget, **json.loads(settings.options)}
        config.additional_config = {**(config.additional_config or {}), KEY: settings_given}

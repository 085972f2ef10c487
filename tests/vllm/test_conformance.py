"""What the plugin leans on in vLLM is where it was, with the arguments that it had."""

import importlib
import inspect

import pytest

from ag.vllm.hooks import RELEASES

vllm = pytest.importorskip("vllm", reason="needs vLLM: bash scripts/vllm_env.sh test")

#: Functions and classes that ag/vllm calls, overrides or wraps, with the arguments that it gives or takes.
USED = {
    "vllm.engine.arg_utils:EngineArgs.create_engine_config": "self usage_context headless",
    "vllm.platforms.cpu:CpuPlatform.get_attn_backend_cls": "selected_backend attn_selector_config num_heads",
    "vllm.v1.attention.backends.registry:register_backend": "backend class_path is_mamba",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.clear_override": "self",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.is_overridden": "self",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.get_path": "self include_classname",
    "vllm.v1.attention.selector:_cached_get_attn_backend": "backend attn_selector_config num_heads _run_kv_cache_dtype",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.get_class": "self",
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry._ensure_registered": "vllm_config",
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register": (
        "kvcache_spec_cls manager_class uniform_type_base_spec"
    ),
    "vllm.sampling_params:SamplingParams.verify": (
        "self model_config speculative_config structured_outputs_config tokenizer"
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.initialize_metadata_builders": (
        "self kv_cache_config kernel_block_sizes"
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states": "self scheduler_output",
    "vllm.model_executor.layers.linear:QKVParallelLinear.forward": "self input_",
    "vllm.model_executor.models.utils:extract_layer_index": "layer_name num_attn_module",
    "vllm.utils.torch_utils:direct_register_custom_op": (
        "op_name op_func mutates_args fake_impl target_lib dispatch_key tags"
    ),
    "vllm.forward_context:get_forward_context": "",
    "vllm.v1.attention.backend:AttentionBackend.customize_spec": "spec",
    "vllm.v1.attention.backend:AttentionMetadataBuilder.__init__": (
        "self kv_cache_spec layer_names vllm_config device"
    ),
    "vllm.v1.attention.backend:AttentionMetadataBuilder.build": (
        "self common_prefix_len common_attn_metadata fast_build"
    ),
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward": (
        "self layer query key value kv_cache attn_metadata output output_scale output_block_scale"
    ),
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.__init__": (
        "self num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype logits_soft_cap "
        "attn_type kv_sharing_target_layer_name sinks"
    ),
    "vllm.v1.attention.backends.cpu_attn:_get_attn_isa": "dtype block_size head_size kv_cache_dtype",
    "vllm._custom_ops:cpu_attn_get_scheduler_metadata": (
        "num_reqs num_heads num_kv_heads head_dim seq_lens dtype query_start_loc causal sliding_window_size isa "
        "enable_kv_split dynamic_causal kv_cache_dtype"
    ),
    "vllm._custom_ops:cpu_attn_reshape_and_cache": (
        "key value key_cache value_cache slot_mapping isa k_scale v_scale kv_cache_dtype"
    ),
    "vllm._custom_ops:cpu_attention_with_kv_cache": (
        "query key_cache value_cache output query_start_loc seq_lens scale causal alibi_slopes sliding_window "
        "block_table softcap scheduler_metadata s_aux dynamic_causal k_scale v_scale kv_cache_dtype"
    ),
    "vllm.v1.attention.backends.fa_utils:get_flash_attn_version": (
        "requires_alibi head_size head_size_v has_sinks requires_softcap kv_cache_block_size supports_fa4_hd256"
    ),
    "vllm._custom_ops:reshape_and_cache_flash": (
        "key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale"
    ),
    "vllm.v1.kv_cache_interface:FullAttentionSpec.max_num_blocks_per_req": "self vllm_config max_len",
    "vllm.v1.kv_cache_interface:FullAttentionSpec.max_memory_usage_bytes": "self vllm_config",
    "vllm.v1.kv_cache_interface:FullAttentionSpec.merge": "specs",
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.remove_skipped_blocks": (
        "self request_id processed_computed_tokens num_prompt_tokens"
    ),
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager._remove_blocks_in_range": (
        "self request_id first_block last_block"
    ),
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.get_num_blocks_to_allocate": (
        "self request_id num_tokens new_computed_blocks total_computed_tokens num_local_computed_tokens "
        "num_tokens_main_model apply_admission_cap prefill_end"
    ),
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.allocate_new_blocks": (
        "self request_id num_tokens num_tokens_main_model"
    ),
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.cache_blocks": (
        "self request num_tokens retention_interval replay_boundaries"
    ),
    "vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split": (
        "self request num_new_tokens num_new_local_computed_tokens num_external_computed_tokens"
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.truncate_computed_blocks": "self blocks num_computed_tokens",
    "vllm.envs:disable_envs_cache": "",
    "vllm.v1.engine.core:EngineCore.preprocess_add_request": "self request",
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler.__init__": "self args kwargs",
}
#: Names that ag/vllm reads within functions of vLLM, where no signature shows them: by function, words of its source.
READ = {
    "vllm.v1.core.sched.scheduler:Scheduler._get_local_prefix_cache_hit": [  # 0.33 gives one argument more
        "self.kv_cache_manager.get_computed_blocks(request",
        "return blocks, num_local, shared_prefix_boundary, False",
    ],
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": ["self.need_mamba_block_aligned_split"],
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": [
        "request.num_in_flight_tokens",
        "num_prompt_tokens=request.num_prompt_tokens",
        "apply_admission_cap=True",
    ],
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata": [
        "query_start_loc_cpu=",
        "seq_lens_cpu_upper_bound=",
        "block_table_tensor=",
        "slot_mapping=",
    ],
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states": ["self.requests[", "finished_req_ids"],
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_kv_cache_spec": [
        "AttentionLayerBase",
        "customize_attention_spec",
    ],
    "vllm.v1.worker.utils:customize_attention_spec": ["backend.customize_spec(spec)"],
    "vllm.v1.engine.core:EngineCoreProc.process_input_sockets": [
        "self.preprocess_add_request(",
        "self._handle_request_preproc_error(",
    ],
    "vllm.model_executor.layers.attention.attention:Attention.__init__": [
        "get_impl_cls()",
        "static_forward_context[prefix] = self",
        "AttentionBackendEnum[self.attn_backend.get_name()]",
    ],
}


def found(name):
    module, _, path = name.partition(":")
    value = importlib.import_module(module)
    for part in path.split("."):
        value = inspect.getattr_static(value, part) if inspect.isclass(value) else getattr(value, part)
    value = getattr(value, "__func__", value)
    return inspect.unwrap(value)


def test_release():
    assert ".".join(vllm.__version__.split(".")[:2]) in RELEASES


@pytest.mark.parametrize("name", USED)
def test_arguments(name):
    names = [x for x in inspect.signature(found(name)).parameters if x != "cls"]
    assert names == USED[name].split(), f"{name} of vLLM has other arguments: read what ag/vllm makes of it"


@pytest.mark.parametrize("name", READ)
def test_words(name):
    source = inspect.getsource(found(name))
    assert [word for word in READ[name] if word not in source] == [], f"{name} of vLLM changed: read it again"


def test_requests_and_batches_have_what_is_read():
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

    for kind, names in (
        (SchedulerOutput, ["finished_req_ids"]),
        (CachedRequestState, ["sampling_params", "num_prompt_tokens"]),
    ):
        text = inspect.getsource(kind)
        assert [name for name in names if name not in text] == [], kind
    for function, names in (
        (
            Request.__init__,
            ["self.num_prompt_tokens", "self.num_computed_tokens", "self.sampling_params", "self.resumable"],
        ),
        (InputBatch.__init__, ["self.req_id"]),
    ):
        text = inspect.getsource(function)
        assert [name for name in names if name not in text] == [], function

"""vLLM's server: ``vllm serve MODEL ...``, the module that it starts, and the YAML of ``--config``."""
from __future__ import annotations

from typing import Any

from ..options import Options
from ..plan import ServingPlan
from ..program import JobLaunch, JobProgram
from .server import fold_names, read_cache, read_human, read_json_option, read_weights, set_server_option

# vLLM 0.33, vllm/engine/arg_utils.py and vllm/config/

_ALIASES = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size",
            "ep": "enable_expert_parallel", "q": "quantization", "O": "optimization_level",
            "cc": "compilation_config", "sc": "speculative_config", "dc": "diffusion_config", "ac": "attention_config",
            "dpn": "data_parallel_rank", "dpr": "data_parallel_start_rank", "dpa": "data_parallel_address",
            "dpp": "data_parallel_rpc_port", "dpb": "data_parallel_backend", "dph": "data_parallel_hybrid_lb",
            "dpe": "data_parallel_external_lb", "dpm": "data_parallel_multi_port_external_lb",
            "device_memory_utilization": "gpu_memory_utilization", "dcp": "decode_context_parallel_size",
            "pcp": "prefill_context_parallel_size", "dpl": "data_parallel_size_local", "n": "nnodes",
            "r": "node_rank", "model_tag": "model", "kv_cache_memory": "kv_cache_memory_bytes"}
# Options without a value: of the engine, and of the server before it (vllm/entrypoints/common/cli_args.py).
_SWITCHES = frozenset("""aggregate_engine_logging allow_credentials allow_deprecated_quantization async_scheduling
calculate_kv_scales cohere_is_reasoning_model cudagraph_metrics data_parallel_external_lb data_parallel_hybrid_lb
data_parallel_multi_port_external_lb dcp_q_replicate disable_cascade_attn disable_chunked_mm_input
disable_custom_all_reduce disable_fastapi_docs disable_frontend_multiprocessing disable_hybrid_kv_cache_manager
disable_log_requests disable_log_stats disable_mm_preprocessor_cache disable_nccl_for_dp_synchronization
disable_sliding_window disable_uvicorn_access_log dpe dph dpm enable_* enforce_eager ep
exclude_tools_when_tool_choice_none fail_on_environ_validation fully_sharded_loras grpc headless interleave_mm_strings
jit_monitor_verbose kv_cache_metrics kv_sharing_fast_prefill language_model_only log_error_stack
long_prefill_token_threshold_adaptive mm_device_do_normalize mm_encoder_only monokernel no_* numa_bind
ray_workers_use_nsight return_sampling_mask return_tokens_as_token_ids scheduler_reserve_full_isl skip_mm_profiling
skip_tokenizer_init sleep_mode_offload_cudagraph specialize_active_lora swa_bounded_replay tokens_only
trust_remote_code trust_request_chat_template trust_request_mm_kwargs use_fp64_gumbel use_replayssm use_tqdm_on_load
use_v2_block_manager worker_use_ray""".split())
_WITHOUT_EFFECT = """O0 O1 O2 O3 additional_config aggregate_engine_logging all2all_backend allow_credentials
allow_deprecated_quantization allowed_* anthropic_disabled_thinking_effort api_key api_server_count async_scheduling
attention_backend attention_config aux_output_config calculate_kv_scales chat_template* code_revision cohere_format
cohere_is_reasoning_model collect_detailed_traces compilation_config config config_format convert
cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cudagraph_* custom_histogram_buckets data_parallel_* dbo_*
dcp_* default_chat_template_kwargs default_mm_loras device device_ids disable_access_log_for_endpoints
disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce disable_fastapi_docs
disable_frontend_multiprocessing disable_hybrid_kv_cache_manager disable_log_requests disable_log_stats
disable_mm_preprocessor_cache disable_nccl_for_dp_synchronization disable_uvicorn_access_log
distributed_executor_backend distributed_timeout_seconds download_dir dp_* elastic_ep_max_dp_size
enable_auto_tool_choice enable_batch_sharded_sampling enable_cudagraph_metrics enable_cumem_allocator
enable_ep_weight_filter enable_eplb enable_fault_tolerance enable_flash_late_interaction enable_flashinfer_autotune
enable_force_include_usage enable_layerwise_nvtx_tracing enable_log_* enable_logging_iteration_details
enable_lora_bias enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint enable_mfu_metrics
enable_mixed_moe_lora_format enable_mm_embeds enable_mm_processor_stats enable_moe_shared_loras
enable_nccl_comm_suspend enable_offline_docs enable_per_request_metrics enable_prompt_embeds
enable_prompt_tokens_details enable_reasoning enable_request_id_headers enable_return_routed_experts enable_scale_out
enable_server_load_tracking enable_shm_tensor_arena enable_sleep_mode enable_ssl_refresh
enable_tokenizer_info_endpoint enable_tower_connector_lora enable_trace_replay eplb_*
exclude_tools_when_tool_choice_none expert_placement_strategy fail_on_environ_validation fault_tolerance_config
fingerprint_mode fingerprint_value fully_sharded_loras gdn_prefill_backend generation_config grpc grpc_port
guided_decoding_* h11_* headless hf_config_path hf_token host ignore_patterns interleave_mm_strings
io_processor_plugin ir_op_priority jit_monitor_mode jit_monitor_verbose kda_decode_backend kda_prefill_backend
kernel_config kv_cache_metrics* kv_events_config language_model_only linear_backend load_format log_* logging_config
logits_processor* logprobs_mode long_* lora_* mamba_backend mamba_cache_mode mamba_cache_philox_rounds mamba_config
mamba_ssu_algorithm master_* max_cpu_loras max_cudagraph_capture_size max_log_len max_logprobs
max_long_partial_prefills max_lora_cls_labels max_lora_rank max_loras max_num_active_seqs max_num_partial_prefills
max_num_queued_reqs max_num_queued_tokens max_parallel_loading_workers max_seq_len_to_capture media_io_kwargs
middleware mm_device_do_normalize mm_encoder_* mm_hasher_algorithm mm_processor_* mm_shm_* mm_tensor_ipc model_impl
model_loader_extra_config model_weights moe_backend monokernel nnodes no_async_scheduling node_rank
num_redundant_experts numa_* optimization_level otlp_traces_endpoint override_generation_config override_neuron_config
override_pooler_config per_request_spec_decode_metrics pooler_config port preemption_mode prefill_schedule_interval
prefix_* profiler_config pt_load_map_location ray_workers_use_nsight reasoning_* renderer_num_workers
replayssm_buffer_len response_role return_sampling_mask return_tokens_as_token_ids revision root_path runner
safetensors_* scheduler_* scheduling_policy seed served_model_name show_hidden_metrics_for_version shutdown_timeout
skip_mm_profiling skip_tokenizer_init sleep_* sparse_indexer_topk_backend specialize_active_lora
sse_keep_alive_interval ssl_* stream_interval structured_outputs_config swap_space task tokenizer* tokens_only tool_*
trust_* ubatch_size uds use_fp64_gumbel use_tqdm_on_load use_v2_block_manager uvicorn_* video_pruning_method
video_pruning_rate watchdog_* watermark watermark_config weight_transfer_config worker_*"""


def read(options: Options, launch: JobLaunch) -> ServingPlan:
    """The plan of a command. Raises JobError for what vLLM refuses before it loads a model."""
    options = fold_names(options, _ALIASES)
    model = options.text("model", means="model")
    if model is None:
        raise options.fail("model", "is not there; write vllm serve MODEL")
    tp = options.count("tensor_parallel_size", 1, means="devices that share each layer")
    pp = options.count("pipeline_parallel_size", 1)
    dp = options.count("data_parallel_size", 1)
    ep = tp * dp if options.flag("enable_expert_parallel") else 1
    weights, experts = read_weights(options, model)
    length, fits = _read_length(options)
    share = options.fraction("gpu_memory_utilization", 0.92, means="share of the device's memory that vLLM takes")
    if not 0 < share <= 1:
        raise options.fail("gpu_memory_utilization", "must be above 0 and at most 1")
    sequences = options.number("max_num_seqs", least=1, means="sequences at once")
    chunk = _read_chunk(options, sequences, length)
    drafted = _read_drafts(options)
    cache, block_size = read_cache(options), options.count("block_size", 16)
    stretches = any(options.get(name) for name in ("hf_overrides", "rope_scaling")) or launch.variables.get(
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0") not in ("", "0")
    _leave_out(options)
    options.rest(_WITHOUT_EFFECT, known=_ALIASES.values())
    return ServingPlan(model=model, engine="vllm", weights=weights, experts=experts, cache=cache, block_size=block_size,
                       tp=tp, pp=pp, dp=dp, ep=ep, length=length, fits_length=fits, is_stretched=stretches,
                       memory_share=share, sequences=sequences, chunk=chunk, drafted=drafted)


def _read_length(options: Options) -> tuple[int | None, bool]:
    """The longest sequence, and whether vLLM chooses it by what has room ("auto", or -1)."""
    if str(options.get("max_model_len")) in ("auto", "-1"):
        options.note("max_model_len", "understood", "the longest that has room, at most the model's own")
        return None, True
    return read_human(options, "max_model_len", means="the longest sequence, prompt and answer"), False


def _read_chunk(options: Options, sequences: int | None, length: int | None) -> int | None:
    """vllm/config/scheduler.py, `verify_max_model_len`."""
    chunk = read_human(options, "max_num_batched_tokens", means="tokens of a pass")
    chunked = options.flag("enable_chunked_prefill", True)
    if chunk is not None and sequences is not None and chunk < sequences:
        raise options.fail("max_num_batched_tokens", f"vLLM refuses fewer than max_num_seqs {sequences:,}")
    if not chunked and length is not None:
        if chunk is not None and chunk < length:
            raise options.fail("max_num_batched_tokens", f"vLLM refuses fewer than max_model_len {length:,} without "
                               "chunks of prompts (enable_chunked_prefill)")
        chunk = chunk or max(length, 2048)
    return chunk


def _read_drafts(options: Options) -> int:
    """Tokens that are proposed for each, by ``speculative_config``; the model that proposes them is left out."""
    config = read_json_option(options, "speculative_config")
    parts = {"method": options.text("spec_method"), "model": options.text("spec_model"),
             "num_speculative_tokens": options.number("spec_tokens", least=1)}
    if config is None and not any(parts.values()):
        return 0
    config = {**(config or {}), **{name: value for name, value in parts.items() if value is not None}}
    count = config.get("num_speculative_tokens")
    if isinstance(count, str) and count.isdecimal():
        count = int(count)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise options.fail("speculative_config", "num_speculative_tokens must be a whole number of at least 1")
    method = str(config.get("method") or ("draft_model" if config.get("model") else "mtp"))
    if method.startswith(("ngram", "suffix")):
        options.assume("speculative_config", f"{count} tokens proposed for each, as if by a head of one layer")
    elif method == "draft_model":
        options.note("speculative_config", "not modelled", f"the weights and the cache of {config.get('model')}; "
                     f"{count} tokens are proposed for each, as if by a head of one layer")
    else:
        options.note("speculative_config", "not modelled", f"the weights of its head ({method}); {count} tokens are "
                     "proposed for each")
    return count


def _leave_out(options: Options) -> None:
    if options.flag("enable_lora"):
        options.note("enable_lora", "not modelled", "adapters take memory for max_loras of max_lora_rank, and kernels")
    if not options.flag("enable_prefix_caching", True):
        options.note("enable_prefix_caching", "understood", "requests share no beginning")
    elif options.get("enable_prefix_caching") is not None:
        options.assume("enable_prefix_caching", "no two requests share a beginning")
    if options.flag("enforce_eager"):
        options.note("enforce_eager", "not modelled", "each pass is taken to be one CUDA graph; without, the device "
                     "waits for the host")
    options.leave_out("cpu_offload_gb cpu_offload_params offload_*", "all weights are taken to lie on the device")
    options.leave_out("kv_cache_memory_bytes num_gpu_blocks_override", "the cache is taken to have what "
                      "gpu_memory_utilization leaves")
    options.leave_out("kv_offloading_* kv_transfer_config ec_transfer_config ec_manager_config",
                      "a cache outside of the device is left out")
    options.leave_out("hf_overrides rope_scaling rope_theta model_class_overrides", "the model is taken as its config "
                      "is")
    options.leave_out("enable_dbo disable_sliding_window kv_sharing_fast_prefill kv_cache_dtype_skip_layers "
                      "mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size num_lookahead_slots "
                      "override_attention_dtype quantization_config diffusion_config engram_config enable_hc_sp "
                      "swa_bounded_replay mm_ipc_gpu_memory_gb max_num_scheduled_tokens performance_mode use_replayssm "
                      "enable_elastic_ep mm_encoder_only", "it is left out")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (options.number(name, 1) or 1) > 1:
            options.note(name, "not modelled", "each device is taken to hold whole sequences")
    if options.get("limit_mm_per_prompt") is not None:
        options.assume("limit_mm_per_prompt", "requests are text alone")


def _is_file(data: Any) -> bool:
    names = {str(name).replace("-", "_") for name in data}
    return "model" in data and isinstance(data["model"], str) and bool(
        names & {"max_model_len", "tensor_parallel_size", "gpu_memory_utilization", "max_num_batched_tokens",
                 "served_model_name", "max_num_seqs"})


VLLM = JobProgram(
    name="vllm", version="0.33", source="vllm-project/vllm vllm/engine/arg_utils.py", read=read, is_file=_is_file,
    commands=("vllm serve", "vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server",
              "vllm.entrypoints.cli.main serve"),
    argument="model", switches=_SWITCHES,
    changes={"length": set_server_option("max-model-len"),
             "memory": set_server_option("gpu-memory-utilization"),
             "cache": set_server_option("kv-cache-dtype"), "weights": set_server_option("quantization", "q"),
             "devices": set_server_option("tensor-parallel-size", "tp")})

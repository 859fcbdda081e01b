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
            "cc": "compilation_config", "sc": "speculative_config", "dcp": "decode_context_parallel_size",
            "pcp": "prefill_context_parallel_size", "dpl": "data_parallel_size_local", "n": "nnodes",
            "r": "node_rank", "model_tag": "model", "kv_cache_memory": "kv_cache_memory_bytes"}
# Options without a value: of the engine, and of the server before it (vllm/entrypoints/openai/cli_args.py).
_SWITCHES = frozenset("""trust_remote_code enforce_eager enable_prefix_caching no_enable_prefix_caching
enable_chunked_prefill no_enable_chunked_prefill enable_expert_parallel no_enable_expert_parallel ep enable_lora
no_enable_lora enable_eplb enable_dbo disable_log_stats disable_log_requests enable_log_requests
no_enable_log_requests disable_custom_all_reduce enable_auto_tool_choice enable_sleep_mode headless
skip_tokenizer_init disable_sliding_window disable_cascade_attn async_scheduling no_async_scheduling
fully_sharded_loras enable_reasoning disable_uvicorn_access_log enable_server_load_tracking
enable_force_include_usage enable_tokenizer_info_endpoint trust_request_chat_template return_tokens_as_token_ids
enable_prompt_tokens_details enable_mm_embeds interleave_mm_strings skip_mm_profiling language_model_only
disable_hybrid_kv_cache_manager data_parallel_hybrid_lb data_parallel_external_lb dphl dpe enable_prompt_embeds
use_tqdm_on_load no_use_tqdm_on_load calculate_kv_scales disable_frontend_multiprocessing kv_sharing_fast_prefill
allow_credentials enable_ssl_refresh disable_fastapi_docs enable_request_id_headers disable_mm_preprocessor_cache
disable_chunked_mm_input enable_multimodal_encoder_data_parallel worker_use_ray use_v2_block_manager
enable_return_routed_experts enable_log_outputs enable_log_deltas disable_nccl_for_dp_synchronization
enable_layerwise_nvtx_tracing enable_mfu_metrics enable_cudagraph_metrics kv_cache_metrics grpc""".split())
_WITHOUT_EFFECT = """tokenizer* trust_remote_code seed served_model_name host port uds uvicorn_* api_key chat_template*
allow_credentials allowed_* lora_modules response_role ssl_* enable_ssl_refresh root_path middleware
return_tokens_as_token_ids disable_frontend_multiprocessing enable_request_id_headers enable_auto_tool_choice
tool_* log_config_file max_log_len disable_fastapi_docs enable_prompt_tokens_details enable_server_load_tracking
enable_force_include_usage enable_tokenizer_info_endpoint enable_log_* h11_* headless api_server_count config revision
code_revision hf_token hf_config_path config_format generation_config override_generation_config logits_processor*
logprobs_mode max_logprobs skip_tokenizer_init load_format download_dir safetensors_load_strategy
model_loader_extra_config ignore_patterns use_tqdm_on_load pt_load_map_location reasoning_parser* enable_reasoning
guided_decoding_* structured_outputs_config distributed_executor_backend master_* nnodes node_rank data_parallel_*
max_parallel_loading_workers ray_workers_use_nsight disable_custom_all_reduce worker_cls worker_extension_cls
disable_log_stats disable_log_requests disable_uvicorn_access_log aggregate_engine_logging otlp_traces_endpoint
collect_detailed_traces show_hidden_metrics_for_version kv_events_config kv_cache_metrics* profiler_config
prefix_caching_hash_algo scheduling_policy scheduler_* async_scheduling no_async_scheduling stream_interval
long_prefill_token_threshold max_num_partial_prefills max_long_partial_prefills task runner convert trust_request_*
swap_space preemption_mode enable_sleep_mode mm_processor_* mm_shm_* media_io_kwargs interleave_mm_strings
skip_mm_profiling language_model_only disable_mm_preprocessor_cache disable_chunked_mm_input mm_encoder_*
video_pruning_rate O0 O1 O2 O3 io_processor_plugin enable_mm_embeds enable_prompt_embeds calculate_kv_scales
additional_config optimization_level
compilation_config cudagraph_*
max_cudagraph_capture_size attention_backend attention_config kernel_config moe_backend
all2all_backend linear_backend model_impl enable_eplb eplb_* expert_placement_strategy num_redundant_experts
disable_cascade_attn disable_hybrid_kv_cache_manager use_v2_block_manager worker_use_ray max_seq_len_to_capture
dbo_* ubatch_size disable_nccl_for_dp_synchronization enable_layerwise_nvtx_tracing enable_mfu_metrics
enable_cudagraph_metrics weight_transfer_config fail_on_environ_validation shutdown_timeout default_mm_loras device
override_neuron_config override_pooler_config pooler_config max_lora_rank max_loras max_cpu_loras lora_dtype
lora_extra_vocab_size fully_sharded_loras long_lora_scaling_factors enable_lora_bias mamba_cache_mode
renderer_num_workers watchdog_* grpc"""


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
    if config is None:
        return 0
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
    options.leave_out("cpu_offload_gb cpu_offload_params offload_backend offload_group_size offload_num_in_group "
                      "offload_prefetch_step", "all weights are taken to lie on the device")
    options.leave_out("kv_cache_memory_bytes num_gpu_blocks_override", "the cache is taken to have what "
                      "gpu_memory_utilization leaves")
    options.leave_out("kv_offloading_size kv_offloading_backend kv_transfer_config ec_transfer_config",
                      "a cache outside of the device is left out")
    options.leave_out("hf_overrides rope_scaling rope_theta", "the model is taken as its config is")
    options.leave_out("enable_dbo disable_sliding_window kv_sharing_fast_prefill kv_cache_dtype_skip_layers "
                      "mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size num_lookahead_slots "
                      "override_attention_dtype", "it is left out")
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
    server_changes={"length": set_server_option("max-model-len"),
                    "memory": set_server_option("gpu-memory-utilization"),
                    "cache": set_server_option("kv-cache-dtype"), "weights": set_server_option("quantization", "q"),
                    "devices": set_server_option("tensor-parallel-size", "tp")})

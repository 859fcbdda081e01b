"""SGLang's server: ``python -m sglang.launch_server --model-path ...`` and ``sglang serve``."""
from __future__ import annotations

from ..options import Options
from ..plan import ServingPlan
from ..program import JobLaunch, JobProgram
from .server import fold_names, read_cache, read_weights, set_server_option

# SGLang 0.5.23, python/sglang/srt/arg_groups/fields/ and the hooks beside it; options of earlier 0.5 are known too.

_ALIASES = {"model": "model_path", "tp": "tp_size", "tensor_parallel_size": "tp_size", "pp": "pp_size",
            "pipeline_parallel_size": "pp_size", "dp": "dp_size", "data_parallel_size": "dp_size", "ep": "ep_size",
            "expert_parallel_size": "ep_size", "attention_data_parallel_size": "attn_dp_size",
            "attention_context_parallel_size": "attn_cp_size", "moe_data_parallel_size": "moe_dp_size",
            "decode_context_parallel_size": "dcp_size", "speculative_draft_model": "speculative_draft_model_path",
            "enable_hicache": "enable_hierarchical_cache"}
_SWITCHES = frozenset("""abort_on_priority_when_disabled allow_auto_truncate
checkpoint_engine_wait_weights_before_ready constrained_json_disable_any_whitespace dcp_replicate_q_proj
debug_cuda_graph delete_ckpt_after_loading disable_* disaggregation_decode_enable_offload_kvcache
disaggregation_decode_enable_radix_cache disaggregation_enable_kv_checksum dllm_fdfo enable_* encoder_only enforce_*
experts_shared_outer_loras export_metrics_to_file flashinfer_mla_disable_ragged grpc_mode incremental_streaming_output
is_embedding keep_mm_feature_on_device language_model_only language_only log_requests lora_strict_loading
lora_use_virtual_experts mlx_enable_sampling mm_enable_dp_encoder ple_offload_embedding pre_warm_nccl
prefill_only_disable_kv_cache quantize_and_serve remote_instance_weight_loader_start_seed_via_transfer_engine
return_input_ids return_output_ids schedule_low_priority_values_first show_time_cost skip_server_warmup
skip_tokenizer_init sleep_on_idle smg_grpc_mode speculative_adaptive
speculative_dspark_align_verify_tokens_to_graph_tier speculative_enable_w4a4_mxfp4_megamoe
speculative_use_block_verification speculative_use_rejection_sampling stream_output
stream_response_default_include_usage strip_thinking_cache triton_attention_reduce_in_fp32 trust_mm_content_hashes
trust_remote_code trust_request_chat_template use_ray weight_loader_disable_mmap weight_loader_drop_cache_after_load
weight_loader_prefetch_checkpoints""".split())
_WITHOUT_EFFECT = """abort_on_priority_when_disabled admin_api_key allow_auto_truncate allowed_media_domains api_key
asr_max_buffer_seconds asr_max_concurrent_sessions attention_backend base_gpu_id batch_notify_size bf16_gemm_backend
boundary_reduction bucket_* c128_page_size chat_template checkpoint_engine_wait_weights_before_ready
collect_tokens_histogram completion_template config constrained_* crash_dump_folder cuda_graph_bs_decode
cuda_graph_bs_prefill cuda_graph_config cuda_graph_max_* cuda_graph_prefill_max_context custom_sigquit_handler
custom_weight_loader dcp_comm_backend dcp_replicate_q_proj debug_* decode_attention_backend decode_log_interval
decoupled_* decrypted_config_file decrypted_draft_config_file deepep_* default_chat_template_kwargs
default_priority_value delete_ckpt_after_loading detokenizer_worker_num device
disable_aiter_allreduce_fusion_in_decode disable_aiter_allreduce_fusion_in_prefill disable_attn_tp_gather
disable_chunked_prefix_cache disable_cuda_graph_padding disable_custom_all_reduce disable_fast_image_processor
disable_flashinfer_autotune disable_flashinfer_cutlass_moe_fp4_allgather disable_hybrid_swa_memory
disable_outlines_disk_cache disable_piecewise_cuda_graph disable_priority_preemption disable_radix_cache
disable_shared_experts_fusion disable_tokenizer_batch_decode dist_init_addr dist_timeout dllm_fdfo download_dir dsa_*
dsv4_attn_backend dsv4_prefill_backend dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout
enable_adaptive_dispatch_to_encoder enable_aiter_allreduce_fusion enable_amd_monokernel enable_attn_tp_input_scattered
enable_broadcast_mm_inputs_process enable_cache_report enable_cp_decode_attn_tp enable_cudagraph_gc
enable_custom_logit_processor enable_decoder_swa_bounded_replay enable_deepep_moe enable_deepseek_v4_fp4_indexer
enable_dense_mlp_attn_tp enable_deterministic_inference enable_dp_attention_local_control_broadcast
enable_draft_weights_cpu_backup enable_dsa_cache_layer_split enable_dsa_fused_indexer enable_dynamic_batch_tokenizer
enable_dynamic_chunking enable_elastic_expert_backup enable_encoder_swa_bounded_replay enable_ep_moe enable_eplb
enable_expert_distribution_metrics enable_flashinfer_allreduce_fusion enable_forward_pass_metrics
enable_fused_moe_sum_all_reduce enable_fused_qk_norm_rope enable_http2 enable_http_worker_reuseport
enable_layernorm_sp enable_layerwise_nvtx_marker enable_lean_attention enable_linear_replayssm
enable_linear_replayssm_spec enable_linker_mla_dedup enable_mamba_cache_stochastic_rounding
enable_megamoe_for_layernorm_sp enable_memory_saver enable_metrics enable_metrics_for_all_schedulers
enable_mfu_metrics enable_mm_global_cache enable_mscclpp enable_multimodal enable_nan_detection enable_nccl_nvls
enable_nvidia_megakernel enable_p2p_check enable_page_major_kv_layout enable_pd_role_switch
enable_piecewise_cuda_graph enable_precise_embedding_interpolation enable_prefill_delayer enable_prefix_mm_cache
enable_priority_scheduling enable_profile_cuda_graph enable_quant_communications enable_request_time_stats_logging
enable_response_store enable_return_* enable_scattered_sconv enable_session_radix_cache enable_shared_experts_attn_tp
enable_ssl_refresh enable_streaming_session enable_strict_thinking enable_symm_mem enable_tf32_matmul
enable_tokenizer_batch_encode enable_torch_compile_debug_mode enable_torch_symm_mem enable_tp_lm_head_all_to_all
enable_trace enable_w4a4_mxfp4_megamoe enable_waterfill enable_watermark enable_weights_cpu_backup
encoder_bootstrap_port encoder_register_urls encoder_transfer_backend encoder_urls
enforce_disable_flashinfer_allreduce_fusion enforce_shared_experts_fusion engine_info_bootstrap_port
ep_dispatch_algorithm ep_join_mode ep_join_rank_offset ep_num_redundant_experts eplb_* expert_* export_metrics_to_file
export_metrics_to_file_dir extra_metric_labels fastapi_root_path file_storage_path flashinfer_* flexkv_config_file
forward_* fp4_gemm_runner_backend fp8_gemm_backend fp8_gemm_runner_backend fuseep_mode gated_launch_port gc_threshold
gc_warning_threshold_secs generation_tokens_buckets gpu_id_step grammar_backend grpc_* hf_chat_template_name host
http2_initial_connection_window_size http2_max_concurrent_streams image_processor_backend incremental_streaming_output
init_expert_location json_model_override_args keep_mm_feature_on_device kv_cache_metrics kv_canary kv_canary_real_data
kv_canary_sweep_interval kv_events_config language_model_only limit_mm_data_per_request linear_* lmcache_config_file
load_* log_* lora_drain_wait_threshold lora_eviction_policy lora_strict_loading mamba_backend
mamba_cache_philox_rounds mamba_max_states_per_path mamba_radix_cache_strategy mamba_track_interval max_ep_size
max_lora_chunk_size max_queued_requests media_url_max_file_size_mb min_free_slots_delay mlx_enable_sampling mm_*
model_checksum model_config_parser model_impl model_loader_extra_config modelexpress_config modelopt_* moe_a2a_backend
moe_dense_tp_size moe_runner_backend monokernel_backend mooncake_ib_device msprobe_dump_config nccl_port nnodes
node_rank nsa_* num_continuous_decode_steps num_reserved_decode_tokens numa_node optimistic_prefill_attempts
otlp_service_name otlp_traces_endpoint pdmux_config_path piecewise_cuda_graph_* port pp_async_batch_depth
pp_max_micro_batch_size pre_warm_nccl preferred_sampling_params prefill_attention_backend prefill_decode_interval
prefill_decode_interval_min_bs prefill_delayer_* prefill_kv_cache_dequant_dtype prefill_max_requests
priority_scheduling_preemption_threshold prompt_tokens_buckets qsa_indexer_dtype quantize_and_serve radix_*
random_seed reasoning_parser remote_* retraction_policy return_* revision rl_on_policy_target rl_quant_profile
sampling_* schedule_* scheduler_recv_interval served_model_name show_time_cost sidecar sidecar_args skip_server_warmup
skip_tokenizer_init sleep_on_idle sm_group_num smg_grpc_mode smg_http_sidecar_port soft_watchdog_timeout
spec_trace_dir speculative_accept_threshold_acc speculative_accept_threshold_single speculative_adaptive_config
speculative_attention_mode speculative_dflash_block_size speculative_domino_candidate_pool_size
speculative_draft_attention_backend speculative_draft_kv_cache_dtype speculative_draft_load_format
speculative_draft_model_quantization speculative_draft_model_revision speculative_draft_sink_size
speculative_draft_window_size speculative_dsa_topk_backend speculative_dspark_* speculative_enable_w4a4_mxfp4_megamoe
speculative_moe_a2a_backend speculative_moe_runner_backend speculative_ngram_* speculative_token_map
speculative_use_block_verification speculative_use_rejection_sampling ssl_* startup_weight_load_mode stat_loggers
stream_interval stream_output stream_response_default_include_usage strip_thinking_cache swa_full_tokens_ratio
swa_prefix_tails tbo_token_distribution_threshold tokenizer_* tool_call_parser tool_server trace_modules triton_*
trust_* unified_cache_external_linker_backend unified_cache_external_linker_config use_ray
uvicorn_access_log_exclude_prefixes warmups watchdog_timeout watermark_config weight_*"""


#: What changes the cost, and is left out.
_OTHERS = """enable_two_batch_overlap enable_single_batch_overlap enable_mixed_chunk enable_torch_compile
torch_compile_max_bs quantization_param_path is_embedding enable_dp_lm_head attn_cp_size moe_dp_size dcp_size dwdp_size
enable_prefill_cp cp_strategy enable_kv_cache_sharding shared_experts_tp_size enable_fp32_lm_head dllm_algorithm*
enable_pdmux encoder_only language_only max_mamba_cache_size mamba_full_memory_ratio mamba_ssm_dtype
enable_int8_mamba_checkpoint int8_mamba_ckpt_size enable_multi_layer_eagle speculative_adaptive elastic_ep_* enable_mis
torchao_config enable_double_sparsity"""


def read(options: Options, launch: JobLaunch) -> ServingPlan:
    """The plan of a command. Raises JobError for what SGLang refuses before it loads a model."""
    options = fold_names(options, _ALIASES)
    model = options.text("model_path", means="model")
    if model is None:
        raise options.fail("model_path", "is not there; write --model-path MODEL")
    tp = options.count("tp_size", 1, means="devices that share each layer")
    pp = options.count("pp_size", 1)
    dp, ep = options.count("dp_size", 1), options.count("ep_size", 1)
    name, copies = "attn_dp_size", options.count("attn_dp_size", 1)
    if options.flag("enable_dp_attention"):  # how attn_dp_size was written before 0.5.23
        name, copies, dp = "dp_size", dp, 1
    if copies > 1:
        if dp > 1:
            raise options.fail("attn_dp_size", f"SGLang refuses it with dp_size {dp}")
        if tp % copies:
            raise options.fail(name, f"SGLang refuses attention of {copies} copies over tp_size {tp} devices, which it "
                               "does not divide")
        options.assume(name, f"{copies} copies of attention, each over {tp // copies} of the {tp} devices")
        tp, dp = tp // copies, copies
    if ep not in (1, tp * dp):
        options.assume("ep_size", f"experts are spread over all {tp * dp} devices")
        ep = tp * dp
    weights, experts = read_weights(options, model, "model_path")
    cache = read_cache(options)
    share = None
    if options.get("mem_fraction_static") is not None:
        share = options.fraction("mem_fraction_static", 0.9, means="share of the device's memory for weights and cache")
    if share is not None and not 0 < share < 1:
        raise options.fail("mem_fraction_static", "must be between 0 and 1")
    chunk = options.number("chunked_prefill_size", least=-1, means="tokens of a pass")
    limit = options.number("max_prefill_tokens", 16384, least=1)
    plan = ServingPlan(
        model=model, engine="sglang", weights=weights, experts=experts, cache=cache,
        block_size=options.count("page_size", 1), tp=tp, pp=pp, dp=dp, ep=ep,
        length=options.number("context_length", least=1, means="the longest sequence, prompt and answer"),
        memory_share=share, sequences=options.number("max_running_requests", least=1, means="sequences at once"),
        chunk=limit if chunk == -1 else chunk, drafted=_read_drafts(options))
    _leave_out(options)
    options.rest(_WITHOUT_EFFECT, known=_ALIASES.values())
    return plan


def _read_drafts(options: Options) -> int:
    method = options.text("speculative_algorithm", choices=(
        "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "FROZEN_KV_MTP", "DFLASH", "DSPARK", "UNO"))
    model = options.text("speculative_draft_model_path")
    steps = options.number("speculative_num_steps", least=1)
    options.number("speculative_eagle_topk", least=1)
    count = options.number("speculative_num_draft_tokens", least=1)
    if method is None:
        return 0
    drafted = (count or (steps or 3) + 1) - 1  # speculative_hook.py, `_auto_choose_speculative_params`: most models 3
    if method == "NGRAM":
        options.assume("speculative_algorithm", f"{drafted} tokens proposed for each, as if by a head of one layer")
    else:
        options.note("speculative_algorithm", "not modelled", f"the weights of {model or 'its head'}; {drafted} tokens "
                     "are proposed for each, as if by a head of one layer")
    return drafted


def _leave_out(options: Options) -> None:
    options.leave_out("disable_cuda_graph disable_decode_cuda_graph disable_prefill_cuda_graph cuda_graph_backend_*",
                      "each pass is taken to be one CUDA graph; without, the device waits for the host")
    options.leave_out("disable_overlap_schedule", "the host is taken to prepare a pass while one runs")
    options.leave_out("enable_lora enable_lora_overlap_loading experts_shared_outer_loras lora_* max_lora* "
                      "uno_lora_path", "adapters take memory, and kernels")
    options.leave_out("cpu_offload_gb offload_* ple_offload_* kt_* enable_paged_experts paged_experts_num_resident",
                      "all weights are taken to lie on the device")
    options.leave_out("max_total_tokens enable_unified_memory prefill_only_disable_kv_cache", "the cache is taken to "
                      "have what mem_fraction_static leaves")
    options.leave_out("enable_hierarchical_cache hicache_* disaggregation_* enable_lmcache enable_flexkv "
                      "enable_hisparse hisparse_config enable_unified_cache_external_linker",
                      "a cache outside of the device is left out")
    options.leave_out(_OTHERS, "it is left out")


SGLANG = JobProgram(
    name="sglang", version="0.5.23", source="sgl-project/sglang python/sglang/srt/arg_groups/fields/", read=read,
    commands=("sglang.launch_server", "sglang serve"), argument="model_path", switches=_SWITCHES,
    changes={"length": set_server_option("context-length"),
             "memory": set_server_option("mem-fraction-static"),
             "cache": set_server_option("kv-cache-dtype"), "weights": set_server_option("quantization"),
             "devices": set_server_option("tp-size", "tp", "tensor-parallel-size")})

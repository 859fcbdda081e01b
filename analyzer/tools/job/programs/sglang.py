"""SGLang's server: ``python -m sglang.launch_server --model-path ...`` and ``sglang serve``."""
from __future__ import annotations

from ..options import Options
from ..plan import ServingPlan
from ..program import JobLaunch, JobProgram
from .server import fold_names, read_cache, read_weights, set_server_option

# SGLang 0.5, python/sglang/srt/server_args.py; names and defaults are still to be compared with one version of it.

_ALIASES = {"model": "model_path", "tp": "tp_size", "tensor_parallel_size": "tp_size", "pp": "pp_size",
            "pipeline_parallel_size": "pp_size", "dp": "dp_size", "data_parallel_size": "dp_size", "ep": "ep_size",
            "expert_parallel_size": "ep_size"}
_SWITCHES = frozenset("""trust_remote_code skip_tokenizer_init enable_multimodal is_embedding disable_cuda_graph
disable_cuda_graph_padding disable_radix_cache disable_overlap_schedule disable_custom_all_reduce enable_dp_attention
enable_dp_lm_head enable_ep_moe enable_deepep_moe enable_torch_compile enable_mixed_chunk enable_metrics
enable_p2p_check enable_eplb enable_two_batch_overlap enable_hierarchical_cache enable_lora enable_mscclpp
enable_symm_mem enable_cache_report enable_nan_detection enable_return_hidden_states enable_memory_saver
enable_double_sparsity enable_torch_symm_mem enable_flashinfer_allreduce_fusion log_requests show_time_cost
disable_outlines_disk_cache disable_shared_experts_fusion disable_chunked_prefix_cache allow_auto_truncate
skip_server_warmup disable_cuda_graph_padding enable_nccl_nvls enable_tokenizer_batch_encode grpc_mode
disable_piecewise_cuda_graph enable_deterministic_inference enable_weights_cpu_backup disable_fast_image_processor
enable_metrics_for_all_schedulers moe_dense_tp_size_auto torchao_config_auto""".split())
_WITHOUT_EFFECT = """tokenizer_* trust_remote_code skip_* host port grpc_mode load_format model_loader_extra_config
revision served_model_name chat_template completion_template api_key file_storage_path enable_cache_report
reasoning_parser tool_call_parser tool_server log_* show_time_cost enable_metrics* bucket_* prompt_tokens_buckets
generation_tokens_buckets collect_tokens_histogram decode_log_interval enable_request_time_stats_logging
kv_events_config random_seed constrained_json_* grammar_backend watchdog_timeout dist_* nnodes node_rank
nccl_port device base_gpu_id gpu_id_step download_dir sleep_on_idle stream_interval stream_output schedule_policy
schedule_conservativeness enable_priority_scheduling schedule_low_priority_values_first priority_scheduling_*
sampling_backend attention_backend prefill_attention_backend decode_attention_backend mm_attention_backend
sampling_defaults preferred_sampling_params json_model_override_args disable_outlines_disk_cache
disable_custom_all_reduce enable_mscclpp enable_symm_mem enable_torch_symm_mem enable_p2p_check enable_nccl_nvls
enable_flashinfer_* disable_flashinfer_* triton_attention_* num_continuous_decode_steps delete_ckpt_after_loading
enable_memory_saver allow_auto_truncate enable_custom_logit_processor warmups weight_version custom_weight_loader
crash_dump_folder debug_tensor_dump_* enable_nan_detection cuda_graph_* disable_cuda_graph_padding
disable_radix_cache radix_eviction_policy moe_runner_backend moe_a2a_backend flashinfer_* deepep_* init_expert_location
enable_eplb eplb_* expert_distribution_* enable_expert_distribution_metrics ep_dispatch_algorithm
ep_num_redundant_experts disable_shared_experts_fusion disable_chunked_prefix_cache moe_dense_tp_size
enable_multimodal mm_* keep_mm_feature_on_device disable_fast_image_processor load_balance_method
enable_ep_moe enable_deepep_moe enable_deterministic_inference enable_tokenizer_batch_encode uvicorn_*
model_impl swa_full_tokens_ratio speculative_* max_queued_requests abort_on_priority_when_disabled modelopt_*
quantize_and_serve rl_on_policy_target disable_piecewise_cuda_graph piecewise_cuda_graph_* enable_piecewise_cuda_graph
fp8_gemm_backend fp8_gemm_runner_backend nsa_* kv_cache_metrics config remote_instance_*
enable_weights_cpu_backup mamba_*"""


def read(options: Options, launch: JobLaunch) -> ServingPlan:
    """The plan of a command. Raises JobError for what SGLang refuses before it loads a model."""
    options = fold_names(options, _ALIASES)
    model = options.text("model_path", means="model")
    if model is None:
        raise options.fail("model_path", "is not there; write --model-path MODEL")
    tp = options.count("tp_size", 1, means="devices that share each layer")
    pp = options.count("pp_size", 1)
    dp, ep = options.count("dp_size", 1), options.count("ep_size", 1)
    if options.flag("enable_dp_attention"):
        if tp % dp:
            raise options.fail("dp_size", f"SGLang refuses attention of {dp} copies over tp_size {tp} devices, "
                               "which it does not divide")
        options.assume("enable_dp_attention", f"{dp} copies of attention, each over {tp // dp} of the {tp} devices")
        tp //= dp
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
    method = options.text("speculative_algorithm", choices=("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"))
    model = options.text("speculative_draft_model_path")
    steps = options.number("speculative_num_steps", least=1)
    options.number("speculative_eagle_topk", least=1)
    count = options.number("speculative_num_draft_tokens", least=1)
    if method is None:
        return 0
    drafted = (count or (steps or 3) + 1) - 1
    if method == "NGRAM":
        options.assume("speculative_algorithm", f"{drafted} tokens proposed for each, as if by a head of one layer")
    else:
        options.note("speculative_algorithm", "not modelled", f"the weights of {model or 'its head'}; {drafted} tokens "
                     "are proposed for each, as if by a head of one layer")
    return drafted


def _leave_out(options: Options) -> None:
    if options.flag("disable_cuda_graph"):
        options.note("disable_cuda_graph", "not modelled", "each pass is taken to be one CUDA graph; without, the "
                     "device waits for the host")
    if options.flag("disable_overlap_schedule"):
        options.note("disable_overlap_schedule", "not modelled", "the host is taken to prepare a pass while one runs")
    options.leave_out("enable_lora lora_paths max_loras_per_batch max_lora_rank lora_target_modules lora_backend",
                      "adapters take memory, and kernels")
    options.leave_out("cpu_offload_gb offload_group_size offload_num_in_group offload_mode",
                      "all weights are taken to lie on the device")
    options.leave_out("max_total_tokens", "the cache is taken to have what mem_fraction_static leaves")
    options.leave_out("enable_hierarchical_cache hicache_ratio hicache_size hicache_write_policy hicache_io_backend "
                      "hicache_mem_layout hicache_storage_backend disaggregation_mode disaggregation_transfer_backend "
                      "disaggregation_bootstrap_port disaggregation_ib_device enable_lmcache",
                      "a cache outside of the device is left out")
    options.leave_out("enable_two_batch_overlap enable_mixed_chunk enable_torch_compile torch_compile_max_bs "
                      "enable_double_sparsity torchao_config quantization_param_path is_embedding enable_dp_lm_head "
                      "enable_single_batch_overlap attn_cp_size moe_dp_size", "it is left out")


SGLANG = JobProgram(
    name="sglang", version="0.5", source="sgl-project/sglang python/sglang/srt/server_args.py", read=read,
    commands=("sglang.launch_server", "sglang serve"), argument="model_path", switches=_SWITCHES,
    server_changes={"length": set_server_option("context-length"),
                    "memory": set_server_option("mem-fraction-static"),
                    "cache": set_server_option("kv-cache-dtype"), "weights": set_server_option("quantization"),
                    "devices": set_server_option("tp-size", "tp", "tensor-parallel-size")})

"""vLLM's server: ``vllm serve MODEL ...``, the module that it starts, and the YAML of ``--config``."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..options import Options, names_of
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
_SWITCHES = frozenset(names_of("vllm", "switches").split())


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
    if not options.flag("enable_prefix_caching", True):
        options.note("enable_prefix_caching", "understood", "requests share no beginning")
    elif options.get("enable_prefix_caching") is not None:
        options.assume("enable_prefix_caching", "no two requests share a beginning")
    has_tower = _loads_tower(options)
    options.finish("vllm", known=_ALIASES.values())
    return ServingPlan(model=model, engine="vllm", weights=weights, experts=experts, cache=cache, block_size=block_size,
                       tp=tp, pp=pp, dp=dp, ep=ep, length=length, fits_length=fits, is_stretched=stretches,
                       memory_share=share, sequences=sequences, chunk=chunk, drafted=drafted, has_tower=has_tower)


def _loads_tower(options: Options) -> bool:
    """Whether what reads pictures is loaded: not where prompts may have none (model_executor/models/interfaces.py,
    `_mark_tower_model`; config/multimodal.py, `get_limit_per_prompt`).
    """
    limits = read_json_option(options, "limit_mm_per_prompt")
    counts = [limit.get("count") if isinstance(limit, Mapping) else limit
              for limit in ((limits or {}).get(kind) for kind in ("image", "video"))]
    if options.flag("language_model_only") or counts == [0, 0]:
        options.note("limit_mm_per_prompt" if limits else "language_model_only", "understood",
                     "prompts have no pictures: what reads them is not loaded")
        return False
    if limits is not None:
        options.assume("limit_mm_per_prompt", "requests are text alone, beside room for the largest picture")
    return True


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

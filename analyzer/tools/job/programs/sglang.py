"""SGLang's server: ``python -m sglang.launch_server --model-path ...`` and ``sglang serve``."""
from __future__ import annotations

from ..options import Options, names_of
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
_SWITCHES = frozenset(names_of("sglang", "switches").split())


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
    options.finish("sglang", known=_ALIASES.values())
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


SGLANG = JobProgram(
    name="sglang", version="0.5.23", source="sgl-project/sglang python/sglang/srt/arg_groups/fields/", read=read,
    commands=("sglang.launch_server", "sglang serve"), argument="model_path", switches=_SWITCHES,
    changes={"length": set_server_option("context-length"),
             "memory": set_server_option("mem-fraction-static"),
             "cache": set_server_option("kv-cache-dtype"), "weights": set_server_option("quantization"),
             "devices": set_server_option("tp-size", "tp", "tensor-parallel-size")})

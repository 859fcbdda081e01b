"""SGLang under a dry run: `sgl.Engine`, which holds an engine's memory and takes its time. No process is started."""
from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from analyzer.tools.serving import CACHE, GRAPHS, WEIGHTS

from .engine import StandInEngine, deploy
from .package import check_dry_run
from .saved_file import assume
from .vllm import AnswerTexts, SamplingParams

# Names and arguments as in SGLang 0.5.23, python/sglang/srt/entrypoints/engine.py and srt/constants.py.
VERSION = "0.5.23"
_NEW = 128  # srt/sampling/sampling_params.py: tokens of an answer where nothing says it


class SglangEngine:
    """An engine in the place of `sglang.Engine`; settings that change neither memory nor time are not looked at.

    It gives back memory only with ``enable_memory_saver``; what weights were is lost unless
    ``enable_weights_cpu_backup`` (srt/managers/scheduler_update_weights_mixin.py).
    """

    def __init__(self, model_path: str, *, tokenizer_path: str | None = None, tp_size: int = 1,
                 mem_fraction_static: float | None = None, context_length: int | None = None,
                 max_running_requests: int | None = None, chunked_prefill_size: int | None = None,
                 enable_memory_saver: bool = False, enable_weights_cpu_backup: bool = False,
                 disable_cuda_graph: bool = False, kv_cache_dtype: str = "auto", quantization: str | None = None,
                 **others: Any) -> None:
        import transformers

        check_dry_run("sglang", "this Engine")
        config = transformers.AutoConfig.from_pretrained(model_path)
        self._backs_up = enable_weights_cpu_backup
        # model_executor/cuda_graph_runner.py: else they are not of the allocator that gives memory back
        self._saves_graphs = os.environ.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "0").lower() in ("1", "true")
        self._longest = context_length or getattr(config.get_text_config(), "max_position_embeddings", None)
        deployment = deploy(
            config, str(model_path), engine="sglang", tp=tp_size, share=mem_fraction_static,
            chunk=chunked_prefill_size, sequences=max_running_requests,
            weights={"fp8": "fp8", "awq": "int4", "gptq": "int4"}.get(quantization or "", "bf16"),
            cache="fp8" if kv_cache_dtype.startswith("fp8") else "bf16")
        self._engine = StandInEngine(deployment, is_captured=not disable_cuda_graph, can_sleep=enable_memory_saver)
        self._answering = AnswerTexts(str(model_path), tokenizer_path)
        assume(f"sglang: a stand-in for version {VERSION} took its place. Of {model_path} it held weights, a cache and "
               "captured graphs, in the script's own figures; answers have as many tokens as were asked for at most; "
               "a rollout's time is that of our model of servers. Its processes' own memory is not counted")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the stand-in for sglang.Engine in a dry run has no {name}")

    def generate(self, prompt: str | Sequence[str] | None = None, sampling_params: Any = None,
                 input_ids: Any = None, return_logprob: Any = False, **_: Any) -> Any:
        is_one = isinstance(prompt, str) or input_ids is not None and bool(input_ids) and isinstance(input_ids[0], int)
        given: Any = prompt if input_ids is None else input_ids
        rows = [given] if is_one else list(given)
        asked = sampling_params if isinstance(sampling_params, Sequence) else [sampling_params] * len(rows)
        params = [SamplingParams(int((one or {}).get("n", 1)), (one or {}).get("max_new_tokens", _NEW),
                                 0 if return_logprob else None) for one in asked]
        found = [
            {"text": one.text, "output_ids": one.token_ids, "meta_info": {
                "id": output.request_id, "prompt_tokens": len(output.prompt_token_ids),
                "completion_tokens": len(one.token_ids), "cached_tokens": 0,
                "finish_reason": {"type": "length", "length": len(one.token_ids)},
                **({} if one.logprobs is None else {
                    "output_token_logprobs": [(-1.0, token, None) for token in one.token_ids]})}}
            for output in self._answering.answer(self._engine, rows, params, self._longest)
            for one in output.outputs]
        return found[0] if is_one and len(found) == 1 else found

    async def async_generate(self, *args: Any, **named: Any) -> Any:
        return self.generate(*args, **named)

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        given = (CACHE, WEIGHTS, GRAPHS) if tags is None else tags
        self._engine.sleep([tag for tag in given if tag != GRAPHS or self._saves_graphs], to_host=self._backs_up)

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        self._engine.wake(tags)

    def update_weights_from_tensor(self, named_tensors: Iterable[tuple[str, torch.Tensor]], *_: Any,
                                   **__: Any) -> tuple[bool, str]:
        self._engine.write(named_tensors)
        return True, "Success"

    def flush_cache(self) -> None:
        return None

    def get_server_info(self) -> dict[str, Any]:
        return {"version": VERSION}

    def shutdown(self) -> None:
        self._engine.close()


#: What each module has. Others of the package are not there.
MODULES: dict[str, dict[str, Any]] = {
    "sglang": {"__version__": VERSION, "Engine": SglangEngine}, "sglang.srt": {}, "sglang.srt.entrypoints": {},
    "sglang.srt.entrypoints.engine": {"Engine": SglangEngine},
    "sglang.srt.constants": {"GPU_MEMORY_TYPE_KV_CACHE": CACHE, "GPU_MEMORY_TYPE_WEIGHTS": WEIGHTS,
                             "GPU_MEMORY_TYPE_CUDA_GRAPH": GRAPHS}}

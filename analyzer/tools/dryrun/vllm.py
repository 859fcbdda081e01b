"""vLLM under a dry run: its documented names for training scripts, with an engine that holds memory and takes time."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from analyzer.hardware import simulated_spec

from .engine import StandInEngine, deploy
from .package import check_dry_run
from .saved_file import assume

# Names and arguments as in vLLM 0.31: entrypoints/llm.py, sampling_params.py, outputs.py, logprobs.py,
# device_allocator/cumem.py, distributed/weight_transfer/. TRL 1.16 takes this version as the newest.
VERSION = "0.31.0"
_LARGE = 70 * 2**30  # engine/arg_utils.py, `get_batch_defaults`: more is read at once on such a device, A100 excepted


class SamplingParams:
    """What is asked of each answer: any of vLLM's arguments, of which ``n`` and ``max_tokens`` decide what is given."""

    def __init__(self, n: int = 1, max_tokens: int | None = 16, logprobs: int | None = None, **others: Any) -> None:
        self.n, self.max_tokens, self.logprobs = n, max_tokens, logprobs
        vars(self).update(others)

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None  # as it was not given

    def clone(self) -> SamplingParams:
        return SamplingParams(**vars(self))


class StructuredOutputsParams(SimpleNamespace):
    """A grammar of answers, which here have none."""


class Logprob(SimpleNamespace):
    """Of one token: ``logprob``, ``rank``, ``decoded_token``."""


class CompletionOutput(SimpleNamespace):
    """One answer: ``token_ids``, ``text``, ``logprobs``, ``finish_reason``."""


class RequestOutput(SimpleNamespace):
    """The answers to one prompt: ``outputs``, ``prompt``, ``prompt_token_ids``."""


class LoRARequest(SimpleNamespace):
    """An adapter that an answer is asked with."""

    def __init__(self, lora_name: str = "", lora_int_id: int = 0, lora_path: str = "", **others: Any) -> None:
        super().__init__(lora_name=lora_name, lora_int_id=lora_int_id, lora_path=lora_path, **others)


class AnswerTexts:
    """Texts and token ids of answers, which have the length that was asked for."""

    def __init__(self, model: str, tokenizer: Any = None) -> None:
        self.model, self._tokenizer = model, tokenizer

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None or isinstance(self._tokenizer, str):
            import transformers

            self._tokenizer = transformers.AutoTokenizer.from_pretrained(self._tokenizer or self.model)
        return self._tokenizer

    def word(self) -> tuple[int, str]:
        """A token that stands alone in a text however often it comes."""
        text = " the"
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return (ids[-1], text) if ids else (1, text)

    def read(self, prompt: Any) -> tuple[list[int], str | None]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt), prompt
        if isinstance(prompt, Mapping):
            ids = prompt.get("prompt_token_ids")
            return (list(ids), prompt.get("prompt")) if ids is not None else self.read(prompt["prompt"])
        return list(prompt), None

    def answer(self, engine: StandInEngine, prompts: Sequence[Any], params: Sequence[SamplingParams],
               longest: int | None) -> list[RequestOutput]:
        token, word = self.word()
        given, asked = list[RequestOutput](), list[tuple[int, int]]()
        for prompt, one in zip(prompts, params):
            ids, text = self.read(prompt)
            room = longest - len(ids) if longest is not None else None
            new = room if one.max_tokens is None else one.max_tokens if room is None else min(one.max_tokens, room)
            if new is None or new < 1:
                raise ValueError(f"a prompt of {len(ids)} tokens leaves no room for an answer in the model's "
                                 f"{longest} tokens")
            asked.append((one.n or 1, new))
            row = {token: Logprob(logprob=-1.0, rank=1, decoded_token=word)}
            given.append(RequestOutput(
                request_id=str(len(given)), prompt=text, prompt_token_ids=ids, prompt_logprobs=None, finished=True,
                outputs=[CompletionOutput(
                    index=index, token_ids=[token] * new, text=word * new, cumulative_logprob=-1.0 * new,
                    logprobs=None if one.logprobs is None else [row] * new, finish_reason="length",
                    stop_reason=None) for index in range(one.n or 1)]))
        ids_of = [output.prompt_token_ids for output in given]
        number = sum(n for n, _ in asked)
        engine.sample([len(ids) for ids in ids_of], number, round(sum(n * new for n, new in asked) / max(1, number)),
                      len({tuple(ids) for ids in ids_of}))
        return given


class LLM:
    """An engine in the place of `vllm.LLM`; settings that change neither memory nor time are not looked at."""

    def __init__(self, model: str, *, tokenizer: str | None = None, tensor_parallel_size: int = 1,
                 gpu_memory_utilization: float | None = None, max_model_len: int | None = None,
                 max_num_seqs: int | None = None, max_num_batched_tokens: int | None = None,
                 enable_sleep_mode: bool = False, enforce_eager: bool = False, quantization: str | None = None,
                 kv_cache_dtype: str = "auto", **others: Any) -> None:
        import transformers

        check_dry_run("vllm", "this LLM")
        device = simulated_spec()
        config = transformers.AutoConfig.from_pretrained(model)
        is_large = (device.memory_bytes or 0) >= _LARGE and "a100" not in device.name
        self._model, self._longest = str(model), max_model_len or getattr(
            config.get_text_config(), "max_position_embeddings", None)
        deployment = deploy(
            config, self._model, engine="vllm", tp=tensor_parallel_size, share=gpu_memory_utilization,
            chunk=max_num_batched_tokens or (16384 if is_large else 8192),
            sequences=max_num_seqs or (1024 if is_large else 256), weights=_FORMATS.get(quantization or "", "bf16"),
            cache="fp8" if kv_cache_dtype.startswith("fp8") else "bf16")
        self._engine = StandInEngine(deployment, is_captured=not enforce_eager, can_sleep=enable_sleep_mode)
        self._answering = AnswerTexts(self._model, tokenizer)
        assume(f"vllm: a stand-in for version {VERSION} took its place. Of {self._model} it held weights, a cache of "
               f"{deployment.memory_share or 0:.0%} of the device and captured graphs, in torch's own figures too; "
               "answers have as many tokens as were asked for at most; a rollout's time is that of our model of "
               "servers. What the driver keeps of graphs is not counted")
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self._engine.write))
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner, worker=SimpleNamespace(
                model_runner=runner))),
            model_config=SimpleNamespace(max_model_len=self._longest, hf_config=config),
            reset_prefix_cache=self.reset_prefix_cache, get_tokenizer=self.get_tokenizer)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the stand-in for vllm.LLM in a dry run has no {name}")

    def generate(self, prompts: Any, sampling_params: Any = None, **_: Any) -> list[RequestOutput]:
        rows = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        params = sampling_params or SamplingParams()
        each = list(params) if isinstance(params, Sequence) else [params] * len(rows)
        return self._answering.answer(self._engine, rows, each, self._longest)

    def chat(self, messages: Any, sampling_params: Any = None, **options: Any) -> list[RequestOutput]:
        talks = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        known = {name: options[name] for name in ("add_generation_prompt", "tools", "chat_template") if name in options}
        ids = [self.get_tokenizer().apply_chat_template(talk, tokenize=True, return_dict=False, **{
            "add_generation_prompt": True, **known, **(options.get("chat_template_kwargs") or {})}) for talk in talks]
        return self.generate([{"prompt_token_ids": one} for one in ids], sampling_params)

    def sleep(self, level: int = 1, **_: Any) -> None:
        self._engine.sleep(to_host=level == 1)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._engine.wake(tags)

    def collective_rpc(self, method: Any, timeout: float | None = None, args: Sequence[Any] = (),
                       kwargs: Mapping[str, Any] | None = None) -> list[Any]:
        """Calls that write weights do so; others, which the script's own workers would answer, are refused by name."""
        if method in ("load_weights", "update_weights"):
            return [self._engine.write((kwargs or {}).get("weights", args[0] if args else ()))]
        if method in ("reload_weights", "reset_prefix_cache"):
            return [None]  # which change neither memory nor, by much, time
        if method in ("sleep", "wake_up"):
            return [getattr(self, method)(*args, **(kwargs or {}))]
        raise NotImplementedError(f"collective_rpc({method!r}): the stand-in for vllm in a dry run has no workers")

    def reset_prefix_cache(self, *_: Any, **__: Any) -> bool:
        return True

    def get_tokenizer(self) -> Any:
        return self._answering.tokenizer

    def shutdown(self) -> None:
        self._engine.close()


_FORMATS = {"bitsandbytes": "int4", "awq": "int4", "gptq": "int4", "fp8": "fp8"}


def _set_random_seed(seed: int | None) -> None:
    if seed is not None:
        torch.manual_seed(seed)


def broadcast_packed(iterator: Iterable[Any], group: Any, src: int, post_iter_func: Callable[[Any], torch.Tensor],
                      buffer_size_bytes: int = 2**30, num_buffers: int = 2) -> None:
    """weight_transfer/packed_tensor.py: tensors are packed into buffers of more than that size, two of which are in
    use at once.
    """
    buffers: list[torch.Tensor] = []
    for packed in _pack(iterator, post_iter_func, buffer_size_bytes):
        buffers = [*buffers[-num_buffers + 1:], packed]


def _pack(iterator: Iterable[Any], take: Callable[[Any], torch.Tensor], most: int) -> Iterator[torch.Tensor]:
    waiting: list[torch.Tensor] = []
    for item in iterator:
        waiting.append(take(item).contiguous().view(torch.uint8).view(-1))
        if sum(one.numel() for one in waiting) > most:
            yield torch.cat(waiting)
            waiting.clear()
    if waiting:
        yield torch.cat(waiting)


#: What each module has. Others of the package are not there.
MODULES: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": VERSION, "LLM": LLM, "SamplingParams": SamplingParams, "RequestOutput": RequestOutput,
             "CompletionOutput": CompletionOutput},
    "vllm.sampling_params": {"SamplingParams": SamplingParams, "StructuredOutputsParams": StructuredOutputsParams,
                             "GuidedDecodingParams": StructuredOutputsParams},
    "vllm.outputs": {"RequestOutput": RequestOutput, "CompletionOutput": CompletionOutput},
    "vllm.logprobs": {"Logprob": Logprob}, "vllm.lora": {}, "vllm.lora.request": {"LoRARequest": LoRARequest},
    "vllm.model_executor": {"set_random_seed": _set_random_seed},
    "vllm.utils": {}, "vllm.utils.torch_utils": {"set_random_seed": _set_random_seed},
    "vllm.utils.network_utils": {"get_ip": lambda: "127.0.0.1", "get_open_port": lambda: 51216},
    "vllm.distributed": {}, "vllm.distributed.weight_transfer": {},
    "vllm.distributed.weight_transfer.nccl_common": {"trainer_init": lambda *_, **__: None},
    "vllm.distributed.weight_transfer.packed_tensor": {"packed_nccl_broadcast_producer": broadcast_packed}}

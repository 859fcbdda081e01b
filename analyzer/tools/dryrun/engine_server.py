"""TRL's client of a vLLM server under a dry run: no server is asked, and nothing of it is on the script's devices."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from analyzer.errors import InputError

from .engine import StandInEngine, deploy
from .saved_file import assume
from .vllm import AnswerTexts, SamplingParams, broadcast_packed


def _find_trained() -> Any:
    """The model of the trainer that makes a client, which the server is taken to have too."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        model = getattr(frame.f_locals.get("self"), "model", None)
        if isinstance(model, torch.nn.Module) and hasattr(model, "config"):
            return model
        frame = frame.f_back
    return None


def _check_server(client: Any, *_: Any, **__: Any) -> None:
    model = _find_trained()
    if model is None:
        raise InputError("VLLMClient: no trainer with a model makes it, so it is not known what the server has")
    name = getattr(model, "name_or_path", "") or getattr(model.config, "_name_or_path", "") or type(model).__name__
    deployment = deploy(model.config, name, engine="vllm")
    client.stand_in = StandInEngine(deployment, apart=True), AnswerTexts(name)
    assume(f"vllm: a server of {name} was taken to be there, on 1 x {deployment.device.name} of its own, as vLLM's "
           "newest version; answers have as many tokens as were asked for at most; what is sent to it takes no time "
           "of the network")


def _generate(client: Any, prompts: Sequence[Any], *_: Any, n: int = 1, max_tokens: int = 16,
              logprobs: int | None = 0, **__: Any) -> dict[str, Any]:
    engine, answering = client.stand_in
    given = answering.answer(engine, prompts, [SamplingParams(n, max_tokens, logprobs)] * len(prompts), None)
    answers = [one for output in given for one in output.outputs]
    rows = None if logprobs is None else [[[-1.0] for _ in one.token_ids] for one in answers]
    return {"prompt_ids": [output.prompt_token_ids for output in given],
            "completion_ids": [one.token_ids for one in answers], "logprobs": rows,
            "logprob_token_ids": None if logprobs is None else [[[id] for id in one.token_ids] for one in answers]}


def _chat(client: Any, messages: Sequence[Any], *_: Any, **options: Any) -> dict[str, Any]:
    tokenizer = client.stand_in[1].tokenizer
    return _generate(client, [tokenizer.apply_chat_template(talk, tokenize=True, return_dict=False,
                                                            add_generation_prompt=True) for talk in messages],
                     **{name: options[name] for name in ("n", "max_tokens", "logprobs") if name in options})


def _send(client: Any, metadata: Any, named_params: Iterable[tuple[str, torch.Tensor]]) -> None:
    with client.stand_in[0].copying():
        broadcast_packed(named_params, None, 0, lambda item: item[1])


def _send_one(client: Any, name: str, weights: torch.Tensor) -> None:
    _send(client, None, [(name, weights)])


def _send_all(client: Any, model: torch.nn.Module) -> None:
    _send(client, None, ((name, value.data) for name, value in model.named_parameters()))


@contextmanager
def _update(client: Any) -> Iterator[Any]:
    yield client


def _nothing(*_: Any, **__: Any) -> None:
    return None


#: What to answer instead of functions of TRL's module, by their places in it: TRL 1.16, generation/vllm_client.py.
_METHODS: dict[str, Callable[..., Any]] = {
    "check_server": _check_server, "_get": lambda *_, **__: {"data": [{"id": "model"}], "world_size": 1},
    "get_server_info": lambda *_: {"weight_transfer_config": {}, "model_config": {
        "logprobs_mode": "processed_logprobs"}},
    "generate": _generate, "chat": _chat, "update_named_params": _send, "update_named_param": _send_one,
    "update_model_params": _send_all, "weight_update": _update, "init_communicator": _nothing,
    "reset_prefix_cache": _nothing, "close_communicator": _nothing}
ANSWERS = {f"VLLMClient.{name}": instead for name, instead in _METHODS.items()}

"""An engine that samples under a dry run: what it holds on the simulated device, and how long it takes. None runs."""
from __future__ import annotations

import _thread
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from analyzer.errors import UnknownSpeedError
from analyzer.hardware import find_device, simulated_spec
from analyzer.meta.state import current
from analyzer.recipe import sample_answers
from analyzer.tools.serving import (
    CACHE,
    GRAPHS,
    WAKING,
    WEIGHTS,
    Deployment,
    Layout,
    PassTimer,
    ServedModel,
    Traffic,
    make_deployment,
    read_served_model,
    refuse_start,
    share_device,
    simulate,
)

from .saved_file import assume


class StandInEngine:
    """An engine of a deployment on the device of this process, or ``apart``, on others. It begins awake."""

    def __init__(self, deployment: Deployment, *, apart: bool = False, is_captured: bool = True,
                 can_sleep: bool = True) -> None:
        self.deployment, self.apart, self.can_sleep = deployment, apart, can_sleep
        self._held: dict[str, torch.Tensor] = {}
        self._places: dict[str, int] = {}  #: of weights, by name, where they begin
        self._on_host: torch.Tensor | None = None
        self._written = 0  # how much has a place
        self._timer = PassTimer(deployment)
        if apart:
            return
        free, total = torch.cuda.mem_get_info()
        held = (deployment.device.memory_bytes or total) - free
        if refusal := refuse_start(deployment, held):
            raise ValueError(refusal)  # as engines do
        shared = share_device(deployment, held_bytes=held, is_captured=is_captured)
        self._sizes = {WEIGHTS: shared.weight_bytes, CACHE: shared.cache_bytes or 0, GRAPHS: shared.graph_bytes}
        if shared.cache_bytes is None:
            assume(f"{deployment.device.name}: its memory is not known, so neither is the size of an engine's cache, "
                   "which is left out")
        self.wake()

    def wake(self, tags: Collection[str] | None = None) -> None:
        """Weights are taken first, and come from the host where they went there. What is awake stays."""
        for tag in (*WAKING, GRAPHS):
            if (tags is None or tag in tags) and tag not in self._held and not self.apart:
                held = self._held[tag] = _take(self._sizes[tag], tag)
                if tag == WEIGHTS and self._on_host is not None:
                    held.copy_(self._on_host)
                    self._on_host = None

    def sleep(self, tags: Collection[str] = WAKING, *, to_host: bool = False) -> None:
        """Give back what has these tags; an engine that was not made to sleep gives back nothing."""
        if not self.can_sleep:
            return
        for tag in tags:
            held = self._held.pop(tag, None)
            if held is not None and tag == WEIGHTS and to_host:
                self._on_host = held.cpu()
            del held
        torch.cuda.empty_cache()  # cumem.py, `sleep`; SGLang's release_memory_occupation likewise

    def write(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """The trainer's weights, one after the other, into the engine's; their names."""
        names = []
        with _phase("sync"), torch.no_grad():
            for name, value in weights:
                names.append(name)
                held, flat = self._held.get(WEIGHTS), value.detach().reshape(-1)
                if held is None:
                    raise RuntimeError(f"the engine sleeps: wake it up before {name} is written")
                start = self._places.setdefault(name, self._written)
                self._written = max(self._written, start + flat.numel())
                start = min(start, max(0, held.numel() - flat.numel()))  # what it holds in fewer bits has less room
                held[start:start + flat.numel()].copy_(flat[:held.numel()])
        return names

    def close(self) -> None:
        """Give back all that it has."""
        self._held.clear()
        self._on_host = None

    def copying(self) -> AbstractContextManager[None]:
        """A block in which weights are sent to an engine on other devices."""
        return _phase("sync")

    def sample(self, prompts: Sequence[int], answers: int, new_tokens: int, distinct: int) -> None:
        """Answers of ``new_tokens`` each to prompts of these lengths, of which some are ``distinct``."""
        deployment, mean = self.deployment, max(1, round(sum(prompts) / max(1, len(prompts))))
        read = min(deployment.chunk, distinct * mean)
        rows = min(answers, deployment.engine.sequences)
        logits = 2 * rows * deployment.model.vocabulary * 4 // deployment.layout.tp
        seconds, spread = self._time(Traffic.batch(mean, [new_tokens] * answers, max(1, answers // max(1, distinct))))
        macs = sum(count * product.batch * product.n * product.k * max(1, min(product.experts, deployment.model.top_k))
                   for product, count in deployment.model.products if not product.is_head)
        with _phase("rollout"):
            at = self._held.get(CACHE)
            if at is None:
                at = torch.empty(0, dtype=torch.bfloat16, device="cuda")
            sample_answers(at, answers, answers * new_tokens,
                           0 if self.apart else deployment.pass_bytes(max(read, rows)) + logits,
                           macs * (distinct * mean + answers * new_tokens) // deployment.layout.gpus, seconds, spread)

    def _time(self, traffic: Traffic) -> tuple[float | None, float]:
        """Seconds until all are answered, and within which factor beyond one sums of kernels lie."""
        try:
            return simulate(self.deployment, self._timer, traffic).ends[-1], self._timer.constants["token_spread"]
        except UnknownSpeedError:
            return None, 0.0


def _take(nbytes: int, tag: str) -> torch.Tensor:
    """Memory of an engine, of elements of two bytes."""
    taken = torch.empty(nbytes // 2, dtype=torch.bfloat16, device="cuda")
    recorder = _find_recorder()
    if recorder is not None:
        recorder.memory.mark([taken], "engine", f"{tag} of the engine")
    return taken


def _find_recorder() -> Any:
    recorder = getattr(current(), "recorder", None)
    return recorder if recorder is not None and hasattr(recorder, "enter_block") else None


@contextmanager
def _phase(name: str) -> Iterator[None]:
    """A phase of the cycle, as a script names one by ``record_function``."""
    recorder = _find_recorder()
    heard = recorder is not None and recorder.enter_block(name)
    try:
        yield
    finally:
        if heard:
            recorder.leave_block()


_models: dict[str, ServedModel] = {}  #: by the text of their configs


def _read_model(config: Any, name: str) -> ServedModel:
    """The kernels of a model of transformers, read in a run of its own, of which the mode of the script knows nothing:
    in a thread that is not started by what a mode replaces.
    """
    key = config.to_json_string(use_diff=False)
    if key not in _models:
        failed: list[BaseException] = []
        done = threading.Event()

        def read() -> None:
            try:
                _models[key] = read_served_model(partial(_build, config), name)
            except BaseException as error:  # raised in the script's thread
                failed.append(error)
            finally:
                done.set()

        _thread.start_new_thread(read, ())
        done.wait()
        if failed:
            raise failed[0]
    return _models[key]


def _build(config: Any) -> torch.nn.Module:
    import transformers

    with torch.device("meta"):
        built: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config.get_text_config())
    return built


def deploy(config: Any, name: str, *, engine: str, tp: int = 1, share: float | None = None, chunk: int | None = None,
           sequences: int | None = None, weights: str = "bf16", cache: str = "bf16") -> Deployment:
    """The deployment of a model of transformers on the simulated device. Raises InputError for one that does not
    decode.
    """
    model = _read_model(config, name)
    spec = simulated_spec() or find_device("h200")
    found = make_deployment(model, device=spec, engine=engine, layout=Layout(tp=tp), memory_share=share,
                            weights=weights, cache=cache, prefill_chunk=chunk)
    return found if sequences is None else replace(found, engine=found.engine._replace(sequences=sequences))

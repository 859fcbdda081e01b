"""`measure_generate`: the prefill of a generation and each token after it, told apart while ``generate()`` runs."""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from analyzer.errors import InputError
from analyzer.profilers.flops import make_flops_profiler
from analyzer.profilers.memory import profile_memory
from analyzer.profilers.traffic import profile_traffic
from analyzer.record.tensor_walk import tensors_in
from analyzer.tools.generation import GenerationProfile, GenerationStep
from analyzer.tools.generation.decoder import tensors_kept

from .clock import Clock, choose_clock
from .measure import check_device, make_measured_profiler, make_profile
from .recorder import CallObserver, RuntimeRecorder

_CACHES = ("past_key_values", "cache_params", "cache")  # under which names models take and return what they keep
_AMOUNTS = ("flops", "macs", "read_bytes", "written_bytes", "seconds", "allocated_bytes", "peak_allocated_bytes")


class PassObserver(CallObserver):
    """Notes, of each call of the model, how many tokens of each sequence it reads and what it keeps."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.cache_bytes: list[int | None] = []
        self.cache_kind = "none"
        self._taken: object = None

    def entered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call begins."""
        self.tokens.append(count_tokens(kwargs.get("decoder_input_ids", kwargs.get("input_ids", (args, kwargs)))))
        self._taken = _find_cache(kwargs)

    def left(self, result: Any) -> None:
        """It returned."""
        cache = _find_cache(result if isinstance(result, dict) else getattr(result, "__dict__", {})) or self._taken
        self._taken = None
        if cache is None:
            self.cache_bytes.append(None)
            return
        self.cache_kind = "static" if "Static" in type(cache).__name__ else "dynamic"
        kept = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_kept(cache)}
        self.cache_bytes.append(sum(kept.values()))


def _find_cache(values: Mapping[str, Any]) -> object:
    return next((values[name] for name in _CACHES if values.get(name) is not None), None)


def count_tokens(tree: Any) -> int:
    """The second size of the first tensor that has one."""
    return next((int(t.shape[1]) for t in tensors_in(tree) if t.dim() > 1), 1)


def measure_generate(model: torch.nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *,
                     method: str = "generate", warm_up: int = 1, convention: str = "own",
                     clock: Clock | None = None) -> GenerationProfile:
    """Run ``model.generate(*args, **kwargs)``, after ``warm_up`` runs of it, and tell what the prompt and each token
    after it cost.

    Any ``method`` that calls the model again and again will do. The prefill is the first call of the model, with what
    of it runs before (an encoder). `GenerationProfile.decode` has the mean seconds of all later calls, and the counts
    of the last one, which reads the longest cache. Raises InputError where the model has no such method, or the method
    never calls the model, and whatever the model raises.
    """
    run: Callable[..., Any] | None = getattr(model, method, None)
    if not callable(run):
        raise InputError(f"measure_generate(method={method!r}): {type(model).__name__} has no such method")
    kwargs = dict(kwargs or {})
    for _ in range(warm_up):
        run(*args, **kwargs)
    recorder = RuntimeRecorder(model, clock or choose_clock(check_device(model)), whole=False)
    recorder.observer = PassObserver()
    with recorder.recording():
        run(*args, **kwargs)
    return split_generation(recorder, args, kwargs, convention)


def split_generation(recorder: RuntimeRecorder, args: Sequence[Any], kwargs: Mapping[str, Any],
                     convention: str) -> GenerationProfile:
    """Tell the passes of a recording apart, which is of no other use afterwards."""
    observer = recorder.observer
    if not recorder.root_calls or not isinstance(observer, PassObserver):
        raise InputError(f"measure_generate(): what ran never called {type(recorder.model).__name__} itself")
    prompt = next(
        (t for t in tensors_in((kwargs.get("input_ids", kwargs.get("inputs")), args, dict(kwargs))) if t.dim()), None)
    passes = number_passes(recorder)
    steps = list_steps(recorder, observer, convention)
    prefill = make_profile(recorder, [0], convention, mode="infer")
    decode = make_profile(recorder, range(1, passes), convention, mode="infer") if passes > 1 else None
    return GenerationProfile(name=prefill.name, device=prefill.device, cache=observer.cache_kind,
                             batch_size=1 if prompt is None else int(prompt.shape[0]),
                             prompt_tokens=observer.tokens[0] if prompt is None else count_tokens(prompt),
                             new_tokens=passes, steps=steps, prefill=prefill, decode=decode,
                             assumptions=prefill.assumptions)


def list_steps(recorder: RuntimeRecorder, observer: PassObserver, convention: str) -> tuple[GenerationStep, ...]:
    """What each pass cost."""
    rows: dict[int, dict[str, Any]] = {step: {} for step in range(len(recorder.root_calls))}
    # of no step the mean: each has its own time
    timed = () if recorder.is_simulated else (make_measured_profiler(recorder, ()),)
    for profiler in (make_flops_profiler(convention), profile_traffic, profile_memory, *timed):
        for (step, phase), row in profiler(recorder.log).phases.items():
            if phase == "forward":
                rows[step].update(row)
    found, context = [], 0
    for step, row in rows.items():
        tokens = observer.tokens[step]
        context = context + tokens if observer.cache_kind != "none" else tokens
        amounts: dict[str, Any] = {name: row.get(name) for name in _AMOUNTS}
        found.append(GenerationStep(step, tokens, context, observer.cache_bytes[step], **amounts))
    return tuple(found)


def number_passes(recorder: RuntimeRecorder) -> int:
    """Make each call of the model, with what ran before the first, a step from 0; the result is their number."""
    log, starts = recorder.log, recorder.root_calls[1:]

    def step_of(position: int, field: int) -> int:
        return bisect_right(starts, position, key=itemgetter(field))

    for i in range(len(log.calls)):
        log.call_slots.put_in_step(i, step_of(i, 0))
    recorder.laps = [(None if key is None else (step_of(i, 1), *key[1:]), mark)
                     for i, (key, mark) in enumerate(recorder.laps)]
    for i, node in enumerate(log.nodes):
        node.step = step_of(i, 2)
    for i, record in enumerate(log.phases):
        record.step = step_of(i, 3)
    for lifetime in log.storages.values():
        if lifetime.step >= 0:
            lifetime.step = step_of(lifetime.born, 4)
    log.module_calls.clear()  # those of all passes
    for module in log.modules:
        module.calls = -(-module.calls // (len(starts) + 1))
    log.steps = len(starts) + 1
    return log.steps

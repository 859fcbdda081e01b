"""`measure`: what a step of a model costs on the device at hand, and the annotation of what was timed."""
from __future__ import annotations

import argparse
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch.nn.parameter import is_lazy

from analyzer.api.argument import argument_names, as_arguments, as_keywords, mark_inputs
from analyzer.api.build_profile import build_profile
from analyzer.api.result import Profile
from analyzer.api.run import Run
from analyzer.api.session import Session
from analyzer.errors import InputError, UnknownDeviceError, is_count
from analyzer.fx.fake_tensor import restore_generators, save_generators
from analyzer.fx.module_wrapper import uncompiled
from analyzer.hardware import find_device
from analyzer.meta.intercept.replacement import InterruptsDeferred
from analyzer.meta.state import current
from analyzer.output import check_output
from analyzer.profilers.annotation import WAYS, Annotation, operator_key, sum_seconds
from analyzer.profilers.flops import find_convention, make_flops_profiler
from analyzer.profilers.latency import call_seconds as predict_seconds
from analyzer.profilers.operator.registration import FlopCount
from analyzer.record.eager import EagerStep, OptimizerFactory
from analyzer.record.log import Log
from analyzer.record.options import ProfileOptions
from analyzer.report import choice
from analyzer.report.compat.deepspeed import name_function
from analyzer.report.module_tree import list_holders
from analyzer.report.page.document import check_page
from analyzer.results.info import ModuleInfo
from analyzer.units import add_quantities, format_seconds
from analyzer.zoo import command_option
from analyzer.zoo.input_spec import InputSpec
from analyzer.zoo.target import import_own_code, load_target, model_errors

from .clock import Clock, choose_clock
from .recorder import Key, RuntimeRecorder, device_of, has_data


def make_measured_profiler(recorder: RuntimeRecorder, steps: Sequence[int]) -> Callable[[Log], Annotation]:
    """A profiler of the seconds that ``recorder`` measured: the mean over ``steps``, as the log's last step.

    A module's seconds are those in which it was the innermost one running, so a parent is its children plus its own.
    Operators and nodes have the seconds of their kernels alone. The times of operators are means only where every step
    ran the same operators, else the last step's.
    """

    def profile_measured(log: Log) -> Annotation:
        out = Annotation()
        last = log.steps - 1
        ran = {record.phase for record in log.phases if record.step in steps}
        out.start_rows(log, {f"{way}_seconds": 0.0 for phase, way in WAYS.items() if phase in ran})
        of_phase: dict[tuple[int, str], float] = defaultdict(float)
        laps: dict[Key, float] = defaultdict(float)
        for (_, start), (owner, end) in pairwise(recorder.laps):
            if owner is not None:  # else no module ran
                laps[owner] += recorder.clock.seconds(start, end)
        for (step, phase, module), seconds in laps.items():
            if step not in steps:
                of_phase[step, phase] += seconds
                continue
            of_phase[last, phase] += seconds / len(steps)
            if phase in WAYS:
                out.add(out.modules, module, f"{WAYS[phase]}_seconds", seconds / len(steps))
        for i, seconds in enumerate(call_seconds(recorder, steps)):
            out.module_calls[i]["fwd_seconds"] = seconds
        in_kernels: dict[str, float] = defaultdict(float)
        for index, seconds in operator_seconds(recorder, steps).items():
            call = log.calls[index]
            in_kernels[call.phase] += seconds
            out.add(out.operators, operator_key(call), "seconds", seconds)
            if call.node >= 0 and call.phase in WAYS:
                out.add(out.nodes, call.node, f"{WAYS[call.phase]}_seconds", seconds)
        for key, seconds in of_phase.items():
            out.phases[key]["seconds"] = seconds
        for phase in ran:
            out.phases[last, phase]["kernel_seconds"] = in_kernels[phase]
        steady = {phase: of_phase[last, phase] for phase in ran}
        out.totals = {**sum_seconds(steady), "kernel_seconds": sum(in_kernels.values()),
                      "peak_reserved_bytes": None}  # of an allocator, which was not watched
        return out

    return profile_measured


def operator_seconds(recorder: RuntimeRecorder, steps: Sequence[int]) -> dict[int, float]:
    log = recorder.log
    by_step: dict[int, list[int]] = {step: [] for step in {*steps, log.steps - 1}}
    for index, call in enumerate(log.calls):
        if call.step in by_step and index in recorder.spans:
            by_step[call.step].append(index)
    last = by_step[log.steps - 1]
    names = [log.calls[i].signature.op for i in last]
    same = all([log.calls[i].signature.op for i in by_step[step]] == names for step in steps)
    rows = [by_step[step] for step in steps] if steps and same else [last]
    return {index: sum(recorder.clock.seconds(*recorder.spans[row[k]]) for row in rows) / len(rows)
            for k, index in enumerate(last)}


def call_seconds(recorder: RuntimeRecorder, steps: Sequence[int]) -> list[float]:
    """The mean seconds of each run of a module, submodules included; none where steps differ in what they ran."""
    rows = [recorder.call_spans.get(step, []) for step in steps]
    if not rows or any(len(row) != len(recorder.log.module_calls) for row in rows):
        return []
    return [sum(recorder.clock.seconds(*span) for span in spans) / len(rows) for spans in zip(*rows)]


def measure(model: torch.nn.Module | Callable[[], torch.nn.Module], args: tuple[Any, ...] | Any = (),
            kwargs: dict[str, Any] | None = None, mode: Literal["train", "infer"] = "train",
            loss_fn: Callable[[Any], torch.Tensor] | None = None, optimizer: str | OptimizerFactory | None = None,
            autocast: torch.dtype | None = None, step: Callable[..., Any] | None = None, steps: int = 3,
            warm_up: int = 1, convention: str = "own", clock: Clock | None = None) -> Profile:
    """Run steps of ``model`` on the device that it is on, and tell what they cost: a `Profile` as `analyzer.profile`
    predicts it.

    The arguments are those of `analyzer.profile`, with real tensors. ``warm_up`` steps run first; the mean of the
    ``steps`` after them is told in seconds, and what the last of them ran in FLOPs and bytes. ``convention`` is a way
    of counting FLOPs (``own``, ``deepspeed``). Seconds come from the host's clock, less what the profiler
    itself took, or from events of the accelerator. Afterwards parameters, gradients, buffers and random number
    generators are as they were. Raises InputError for arguments that cannot be used, and whatever the model itself
    raises.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU())
    >>> p = measure(model, args=(torch.rand(8, 64),), optimizer="sgd")
    >>> p.fwd_flops, p.bwd_flops, p.measured_steps, 0 < p.fwd_seconds < p.step_seconds
    (33280, 33024, 3, True)
    """
    if not is_count(steps, 1) or not is_count(warm_up):
        raise InputError(f"measure(steps={steps!r}, warm_up={warm_up!r}): at least one step must be measured")
    if clock is not None and not hasattr(clock, "pause"):
        raise InputError(f"measure(clock={clock!r}): must be a clock of analyzer.tools.runtime.clock, or None")
    session = Session(None, ProfileOptions(steps=warm_up + steps, keep_events=False), mode=mode, optimizer=optimizer,
                      autocast=autocast, loss_fn=loss_fn, step=step)
    built = model() if not isinstance(model, torch.nn.Module) and callable(model) else model
    if not isinstance(built, torch.nn.Module):
        raise InputError(
            f"measure(model={model!r}): must be a torch.nn.Module or a callable of no arguments that builds one")
    if not has_data(built) and current() is None:
        raise InputError(f"{type(built).__name__} is on the meta device and has no data to run on: "
                         f"model.to_empty(device='cpu') gives it some, and analyzer.profile predicts without any")
    args, kwargs, device = as_arguments(args), as_keywords(kwargs), device_of(built)
    if autocast is None and torch.is_autocast_enabled(device.type):  # around this call
        autocast = torch.get_autocast_dtype(device.type)
    with InterruptsDeferred(), unchanged(built, device,
                                         weights=session.optimizer is not None or session.step is not None):
        recorder = RuntimeRecorder(built, clock or choose_clock(device), whole=True)
        mark_inputs(recorder, args, kwargs, argument_names(uncompiled(built), args, kwargs))
        driver = EagerStep(recorder, built, args, kwargs, mode=mode, loss_fn=session.loss_fn,
                           optimizer=session.optimizer if mode == "train" else None, autocast=autocast,
                           step=session.step, device_type=device.type, options=session.options)
        with recorder.recording():
            driver.run()
        compiled_seconds = None
        if list_compiled(built) and not recorder.is_simulated:
            with torch.set_grad_enabled(mode == "train"), torch.autocast(device.type, dtype=autocast,
                                                                         enabled=autocast is not None):
                built(*args, **kwargs)
                time = recorder.clock
                start = time.pause()
                time.go()
                for _ in range(steps):
                    built(*args, **kwargs)
                end = time.pause()
                time.go()
                time.settle()
                compiled_seconds = time.seconds(start, end) / steps
        return make_profile(recorder, range(warm_up, warm_up + steps), convention, mode=mode,
                            autocast=None if autocast is None else str(autocast).removeprefix("torch."),
                            optimizer=session.facts["optimizer"], compiled_seconds=compiled_seconds)


def make_profile(recorder: RuntimeRecorder, steps: Sequence[int], convention: str, *, mode: str,
                 compiled_seconds: float | None = None, **facts: Any) -> Profile:
    """Means of ``steps``, counts of the last; ``compiled_seconds``: a compiled forward pass that is not watched. What
    ran without data was not measured: its seconds are predicted for the simulated device, and unknown without one.
    """
    log, model = recorder.log, recorder.model
    log.steps = steps[-1] + 1
    recorder.modules.describe_wrappers()
    device = device_of(model)
    log.assumptions = ["bytes are those of the tensors alive, without what an allocator rounds up or kernels take for "
                       "themselves"]
    if compiled := list_compiled(model):  # operators are watched one by one, which compiled code does not run
        log.assumptions.append(f"compiled, measured as written: {', '.join(compiled)}" + (
            "" if compiled_seconds is None else
            f"; as compiled, a forward pass takes {format_seconds(compiled_seconds)}"))
    flops = make_flops_profiler(convention)
    # of a model without parameters whose input is on meta an operator gives a tensor without data
    signatures = {call.signature for call in log.calls}
    if recorder.is_simulated or any(spec.device == "meta" for signature in signatures for spec in signature.outputs):
        spec = recorder.spec
        method = "not timed: it ran without data" if spec is None else f"predicted for {spec.name}"
        session = Session(spec, mode=mode, profilers={"flops": flops})
        return build_profile(Run(session, recorder, model), **facts, seconds_method=method)
    session = Session(None, mode=mode, profilers={"flops": flops, "measured": make_measured_profiler(recorder, steps)})
    described = describe_device(device)
    try:
        name = find_device(described.removeprefix("NVIDIA ")).name
    except UnknownDeviceError:
        name = device.type if device.type == "cpu" else described
    facts = {"device": name, "measured_steps": len(steps), **facts,
             "seconds_method": f"measured on {described} ({recorder.clock.name})"}
    return build_profile(Run(session, recorder, model), **facts)


def input_device(model: torch.nn.Module) -> torch.device:
    """Where inputs of a model are made: without data where it has none and nothing simulates a device."""
    return device_of(model) if has_data(model) or current() is not None else torch.device("meta")


def describe_device(device: torch.device) -> str:
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"cpu with {threads} thread{'s' if threads > 1 else ''}"
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else str(device)


def list_compiled(model: torch.nn.Module) -> list[str]:
    """Paths of the compiled parts of a model, its class for the whole of it."""
    return [path or type(uncompiled(module)).__name__ for path, module in model.named_modules()
            if uncompiled(module) is not module or module.__dict__.get("_compiled_call_impl") is not None]


@contextlib.contextmanager
def unchanged(model: torch.nn.Module, device: torch.device, *, weights: bool) -> Iterator[None]:
    """Put back what a step changes: gradients, buffers, random generators, and parameters where ``weights``."""
    kept = [t for t in (*model.buffers(), *(model.parameters() if weights else ())) if not is_lazy(t)]
    copies = [t.detach().clone() for t in kept]
    gradients = [(p, p.grad) for p in model.parameters()]
    generators = save_generators()
    with torch.random.fork_rng([device.index or 0] if device.type != "cpu" else [],
                               device_type=device.type if device.type != "cpu" else "cuda"):
        try:
            for p, _ in gradients:
                p.grad = None
            yield
        finally:
            restore_generators(generators)
            with torch.no_grad():
                for t, copy in zip(kept, copies):
                    t.copy_(copy)
            for p, gradient in gradients:
                p.grad = gradient


_ZERO = ("__flops__", "__macs__", "__duration__", "__start_time__", "__expert_params__", "__model_expert_params__")


@dataclass
class FunctionCost:
    """What the calls of one function in one module cost."""

    flops: int = 0
    macs: int = 0
    duration: float | None = 0.0


class CostAttributes:
    """What DeepSpeed's profiler and flops-profiler leave on modules while they profile. A module's ``__flops__`` and
    ``__macs__`` are of what it does itself, its ``__params__`` and ``__duration__`` (seconds of the forward pass, of a
    simulated device predicted for its kernels; None where neither is known) of all below it too, its
    ``__profile_table__`` has a `FunctionCost` a function.
    """

    def __init__(self, model: torch.nn.Module, convention: str) -> None:
        self._convention, self._by_path = find_convention(convention), dict(model.named_modules())
        self._counts: dict[Any, FlopCount | None] = {}
        self._calls = self._laps = 0        # how much of the recording was read
        self._seconds: dict[str, float | None] = defaultdict(float)
        for module in self._by_path.values():
            module.__dict__.update({name: 0 for name in _ZERO}, __params__=sum(p.numel() for p in module.parameters()),
                                   __profile_table__=defaultdict(FunctionCost))

    def remove(self) -> None:
        for module in self._by_path.values():
            for name in (*_ZERO, "__params__", "__profile_table__"):
                module.__dict__.pop(name, None)

    def fill(self, recorder: RuntimeRecorder) -> None:
        """Add what ran since the last time."""
        log, calls = recorder.log, recorder.log.calls
        if not recorder.is_simulated:
            recorder.clock.settle()
        for index in range(self._calls, len(calls)):
            kind = log.modules[calls[index].module]
            module = self._by_path.get(kind.path)
            if calls[index].phase == "forward" and module is not None:
                self._add_call(recorder, index, kind, module)
        self._calls = len(calls)
        if not recorder.is_simulated:
            for (_, start), (lap, end) in pairwise(recorder.laps[max(0, self._laps - 1):]):
                if lap is not None and lap[1] == "forward":
                    path = log.modules[lap[2]].path
                    self._seconds[path] = add_quantities((self._seconds[path], recorder.clock.seconds(start, end)))
            self._laps = len(recorder.laps)
        is_untimed = recorder.is_simulated and recorder.spec is None
        whole: dict[str, float | None] = defaultdict(lambda: None if is_untimed else 0.0)
        for path, seconds in self._seconds.items():
            for holder in list_holders(path):
                whole[holder] = add_quantities((whole[holder], seconds))
        for path, module in self._by_path.items():
            module.__dict__["__duration__"] = whole[path]

    def _add_call(self, recorder: RuntimeRecorder, index: int, kind: Any, module: torch.nn.Module) -> None:
        """Add one call: measured, or predicted for the device that is simulated."""
        call = recorder.log.calls[index]
        if recorder.is_simulated:
            seconds = None if recorder.spec is None else predict_seconds(call, recorder.spec)
            self._seconds[kind.path] = add_quantities((self._seconds[kind.path], seconds))
        else:
            seconds = recorder.clock.seconds(*recorder.spans[index])
        key = call.signature, kind.type
        if key not in self._counts:
            self._counts[key] = self._convention.count(call, recorder.log)
        count = self._counts[key] or FlopCount(0)
        if not count.flops:
            return
        module.__dict__["__flops__"] += count.flops
        module.__dict__["__macs__"] += count.macs
        kernel = getattr(module, "kernel_size", None)
        described = ModuleInfo(path="", type=type(module).__name__,
                               kernel_size=tuple(kernel) if isinstance(kernel, (tuple, list)) else None)
        entry = module.__dict__["__profile_table__"][name_function(str(call.signature.op), described)]
        entry.flops, entry.macs = entry.flops + count.flops, entry.macs + count.macs
        entry.duration = add_quantities((entry.duration, seconds))


def run_measure(arguments: argparse.Namespace) -> int:
    import_own_code(arguments.target)  # which may register reports
    shown = choice.read_shown(arguments.show)
    check_output(arguments.json)
    check_page(arguments.html)
    device = find_torch_device(arguments.device)
    train = arguments.mode == "train"
    target = load_target(arguments.target)
    recipe = command_option.read_recipe(arguments)
    inputs = command_option.choose_inputs(target, arguments.input, train, recipe.dtype)
    with model_errors(arguments.target):
        with torch.device(device):
            model = recipe.build(target.build).train(train)
        args, kwargs = make_tensors(inputs, device)
        found = measure(model, args, kwargs, steps=arguments.steps, warm_up=arguments.warm_up,
                        convention=arguments.convention, **command_option.find_step(arguments, recipe))
    choice.save_profile(found, arguments.json, arguments.html)  # before anything is printed, for a reader that goes
    print(choice.make_text(found, shown))
    return 0


def find_torch_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"--device {name}: no device of torch; write cpu, cuda or cuda:1") from None
    if device.type != "cpu":
        there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if there is None or there.type != device.type or (device.index or 0) >= torch.accelerator.device_count():
            has = "none" if there is None else f"{torch.accelerator.device_count()} of type {there.type}"
            raise InputError(f"--device {name}: is not here; accelerators that torch sees: {has}")
    return device


def make_tensors(inputs: Sequence[InputSpec],
                 device: torch.device) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    return (tuple(s.fill(device) for s in inputs if s.name is None),
            {s.name: s.fill(device) for s in inputs if s.name is not None})

"""Profilers of a user's training loop: `FlopsProfiler`, under the interface of DeepSpeed's and flops-profiler's, and
`TIDSProfiler`, under that of ruipeterpan/torch_profiler, which shows latency and shapes together.
"""
from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from analyzer.api.argument import set_training
from analyzer.api.result import Profile
from analyzer.errors import InputError
from analyzer.output import FilePath, drawing_plainly
from analyzer.report.compat.deepspeed import DEEPSPEED, Dialect, aggregate, deepspeed_text
from analyzer.report.compat.torchinfo import tids_report
from analyzer.report.module_tree import first_shape
from analyzer.results.build import list_micro_batches
from analyzer.results.info import ModuleInfo
from analyzer.results.node_info import TensorInfo
from analyzer.units import add_quantities

from .clock import Clock, choose_clock
from .measure import CostAttributes, input_device, make_profile
from .recorder import RuntimeRecorder, device_of, has_data


class FlopsProfiler:
    """Measures what a model does between `start_profile` and `stop_profile`: latency, FLOPs, MACs, bytes, by module.

    Forward, backward and optimizer steps are told apart. Counts are those of the forward pass under DeepSpeed's way of
    counting unless ``convention`` says otherwise (``own``). Without `step` all that ran is one step. With
    `step` called at the end of each training step, latencies are the mean of the steps, and counts those of the last;
    with ``start_step`` and ``end_step`` (the last one that is measured) recording begins and ends by itself, whenever
    `start_profile` was called before. ``ds_engine`` is anything with DeepSpeed's ``world_size``, ``dp_world_size``,
    ``mp_world_size``, ``train_micro_batch_size_per_gpu()`` and, where no call of the model is seen,
    ``gradient_accumulation_steps()``. ``recompute_fwd_factor`` says how much of the forward
    pass DeepSpeed's report takes to run again in backward. The text is DeepSpeed's, for scripts that parse it. An
    exception that leaves the model ends the recording; nothing is left on the model or in torch.

    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU())
    >>> prof = FlopsProfiler(model)
    >>> prof.start_profile()
    >>> out = model(torch.rand(8, 16))
    >>> prof.stop_profile()
    >>> prof.get_total_flops(), prof.get_total_macs(as_string=True), prof.get_total_params()
    (8448, '4.1 KMACs', 544)
    >>> prof.end_profile()
    """

    _dialect: Dialect = DEEPSPEED
    _puts_attributes = False

    def __init__(self, model: torch.nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0, *,
                 convention: str = "deepspeed", start_step: int | None = None, end_step: int | None = None,
                 clock: Clock | None = None) -> None:
        if not isinstance(model, torch.nn.Module):
            raise InputError(f"FlopsProfiler({type(model).__name__}): must be a torch.nn.Module")
        if end_step is not None and end_step < (start_step or 0):
            raise InputError(
                f"FlopsProfiler(start_step={start_step}, end_step={end_step}): must not end before it starts")
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.convention, self.start_step, self.end_step, self.clock = convention, start_step, end_step, clock
        self.started = False
        self._recorder: RuntimeRecorder | None = None
        self._ignored: tuple[type, ...] = ()
        self._step = 0
        self._made: tuple[object, Profile] | None = None
        self._attributes: CostAttributes | None = None

    def __enter__(self) -> FlopsProfiler:
        self.start_profile()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop_profile()

    def start_profile(self, ignore_list: Collection[type] | None = None) -> None:
        """Begin to record, or with ``start_step`` to wait for it; what was recorded before is dropped. Modules of the
        types in ``ignore_list`` are not told apart from those that call them.
        """
        self.end_profile()
        self._ignored = tuple(ignore_list or ())
        self.started, self._step = True, 0
        if self.start_step:
            self._put_attributes()
        else:
            self._record()

    def reset_profile(self) -> None:
        """Drop what was recorded; a recording that runs goes on."""
        running = self._recorder is not None and self._recorder.is_running
        self.stop_profile()
        self._recorder = self._made = None
        if running:
            self._record()
        elif self._attributes is not None:
            self._put_attributes()

    def _put_attributes(self) -> None:
        self._attributes = CostAttributes(self.model, self.convention) if self._puts_attributes else None

    def _record(self) -> None:
        self._put_attributes()
        self._recorder = RuntimeRecorder(self.model, self.clock or choose_clock(device_of(self.model)), whole=False,
                                         ignored=self._ignored)
        if self._attributes is not None:
            self._recorder.call_ended = self._attributes.fill
        self._recorder.start()

    def step(self) -> None:
        """A training step has ended."""
        self._step += 1
        if not self.started:
            return
        if self._recorder is None:
            if self._step == self.start_step:
                self._record()
        elif self.end_step is not None and self._step > self.end_step:
            self._recorder.stop()
        else:
            self._recorder.start_step(self._recorder.run.step + 1, placeholders=False)

    def stop_profile(self) -> None:
        """End the recording; what was recorded can still be read."""
        if self._recorder is not None:
            self._recorder.stop()
            if self._attributes is not None:
                self._attributes.fill(self._recorder)

    def end_profile(self) -> None:
        """End the recording, forget it, and take the attributes off."""
        self.stop_profile()
        self.started = False
        self._recorder = self._made = None
        if self._attributes is not None:
            self._attributes.remove()
            self._attributes = None

    @property
    def profile(self) -> Profile:
        """What was recorded so far. Raises InputError where nothing was."""
        recorder = self._recorder
        if recorder is None:
            hint = (f"step {self._step} is before start_step={self.start_step}" if self.started else
                    "call start_profile() first")
            raise InputError(f"FlopsProfiler: nothing is recorded; {hint}")
        state = len(recorder.log.calls), len(recorder.laps)
        if self._made is None or self._made[0] != state:
            self._made = state, self._make(recorder)
        return self._made[1]

    def _make(self, recorder: RuntimeRecorder) -> Profile:
        steps = sorted({record.step for record in recorder.log.phases}) or [recorder.run.step]
        trained = any(record.phase == "backward" for record in recorder.log.phases)
        engine, facts = self.ds_engine, {}
        if engine is not None:
            replicas = engine.dp_world_size
            if replicas is None:  # a sequence is divided over ranks (Ulysses), which are counted then
                replicas = getattr(engine, "seq_dp_world_size", None)
            facts = {"world_size": engine.world_size, "data_parallel_size": replicas,
                     "model_parallel_size": engine.mp_world_size}
            if (batch := getattr(engine, "train_micro_batch_size_per_gpu", None)) is not None:
                # micro-batches of a step: those that were seen, else those that the engine says
                said = getattr(engine, "gradient_accumulation_steps", None)
                facts["batch_size"] = batch() * (len(list_micro_batches(recorder.log, steps[-1])) or (
                    said() if trained and said is not None else 1))
        found = make_profile(recorder, steps, self.convention, mode="train" if trained else "infer", **facts)
        recorder.log.steps = recorder.run.step + 1  # it may go on
        return found

    @property
    def _root(self) -> ModuleInfo:
        root = self.profile.modules
        assert root is not None
        return root

    def get_total_flops(self, as_string: bool = False) -> Any:
        """FLOPs of the forward pass of one step."""
        return self._dialect.flops(self._root.fwd_flops or 0) if as_string else self._root.fwd_flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """MACs of the forward pass of one step."""
        return self._dialect.macs(self._root.fwd_macs or 0) if as_string else self._root.fwd_macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds of the forward pass of one step; None, or ``-`` as text, of a model without data."""
        return self._dialect.latency(self._root.fwd_seconds) if as_string else self._root.fwd_seconds

    def get_total_functional_duration(self, as_string: bool = False) -> Any:
        """Seconds of the operators of the forward pass alone; None, or ``-`` as text, of a model without data."""
        seconds = add_quantities(row.seconds for row in self.profile.operators if row.phase == "forward")
        return self._dialect.latency(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Parameters of the model, each once."""
        return self._dialect.params(self._root.params or 0) if as_string else self._root.params

    def print_model_profile(self, profile_step: int = 1, module_depth: int = -1, top_modules: int = 1,
                            detailed: bool = True, output_file: FilePath | None = None) -> None:
        """Print the report, or write it to ``output_file`` alone; nothing before `start_profile`."""
        if not self.started:
            return
        self.flops, self.macs, self.params = self.get_total_flops(), self.get_total_macs(), self.get_total_params()
        there = {type(module) for module in self.model.modules() if module is not self.model}
        asks = getattr(self.ds_engine, "wall_clock_breakdown", None)
        text = deepspeed_text(
            self.profile, profile_step=profile_step if self.start_step is None else self.start_step,
            module_depth=module_depth, top_modules=top_modules, detailed=detailed, output_file=output_file or None,
            ignore_modules=[kind for kind in self._ignored if kind in there], dialect=self._dialect,
            recompute_fwd_factor=self.recompute_fwd_factor, engine=self.ds_engine is not None,
            wall_clock_breakdown=asks is None or bool(asks()))
        if not output_file:
            with drawing_plainly():
                print(text)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the classes of modules that cost most at each depth."""
        with drawing_plainly():
            print("\n".join(aggregate(self._root, self._dialect, module_depth, top_modules)))


def get_model_profile(model: torch.nn.Module, input_shape: tuple[int, ...] | None = None, args: Any = None,
                      kwargs: dict[str, Any] | None = None, print_profile: bool = True, detailed: bool = True,
                      module_depth: int = -1, top_modules: int = 1, warm_up: int = 1, as_string: bool = True,
                      output_file: FilePath | None = None, ignore_modules: Collection[type] | None = None,
                      func_name: str = "forward", mode: str | None = None, recompute_fwd_factor: float = 0.0
                      ) -> tuple[Any, Any, Any]:
    """Run the model in evaluation mode, print its report and return (FLOPs, MACs, parameters), counted as DeepSpeed
    does.

    The arguments are those of DeepSpeed's and flops-profiler's function: ``input_shape`` stands for one tensor of the
    model's dtype on its device; ``args`` and ``kwargs`` are those of the call; ``warm_up`` runs go before.
    ``func_name`` (or ``mode``) is the method to call. Training flags are as they were afterwards. Raises InputError for
    arguments that cannot be used.

    >>> get_model_profile(torch.nn.Linear(1000, 1000), input_shape=(8, 1000), print_profile=False)
    ('16 M', '8 MMACs', '1 M')
    """
    flops, macs, params = run_profile(
        FlopsProfiler(model, recompute_fwd_factor=recompute_fwd_factor), mode or func_name, input_shape, args, kwargs,
        print_profile=print_profile, detailed=detailed, module_depth=module_depth, top_modules=top_modules,
        warm_up=warm_up, output_file=output_file, ignore_modules=ignore_modules)
    return (DEEPSPEED.flops(flops), DEEPSPEED.macs(macs), DEEPSPEED.params(params)) if as_string else (
        flops, macs, params)


def run_profile(prof: FlopsProfiler, method: str, input_shape: tuple[int, ...] | None, args: Any,
                kwargs: dict[str, Any] | None, *, print_profile: bool, warm_up: int,
                ignore_modules: Collection[type] | None, **report: Any) -> tuple[Any, Any, Any]:
    """Run a method of the profiler's model in evaluation mode, print its report and give FLOPs, MACs and parameters."""
    model = prof.model
    run, call_args, call_kwargs = make_call(model, method, input_shape, args, kwargs)
    with set_training(model, False):
        for _ in range(warm_up if has_data(model) else 0):
            run(*call_args, **call_kwargs)
        try:
            prof.start_profile(ignore_list=ignore_modules)
            run(*call_args, **call_kwargs)
            prof.stop_profile()
            flops, macs, params = prof.get_total_flops(), prof.get_total_macs(), prof.get_total_params()
            if print_profile:
                prof.print_model_profile(warm_up, **report)
        finally:
            prof.end_profile()
    return flops, macs, params


def make_call(model: torch.nn.Module, name: str, input_shape: tuple[int, ...] | None, args: Any,
              kwargs: dict[str, Any] | None) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What to call and with what. Raises InputError where nothing says what it takes, or there is no such method."""
    run = model if name == "forward" else getattr(model, name, None)
    if not callable(run):
        raise InputError(f"get_model_profile(func_name={name!r}): {type(model).__name__} has no such method")
    if input_shape is not None:
        if not isinstance(input_shape, tuple) or not input_shape:
            raise InputError(f"get_model_profile(input_shape={input_shape!r}): must be a tuple of at least one size")
        dtype = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
        return run, (torch.ones(input_shape, dtype=dtype, device=input_device(model)),), dict(kwargs or {})
    args = () if args is None else (args,) if isinstance(args, torch.Tensor) else tuple(args)
    if not args and not kwargs:
        raise InputError("get_model_profile(): give input_shape, args or kwargs, with which the model is called")
    return run, args, dict(kwargs or {})


@dataclass(frozen=True)
class ModuleProfile:
    """One module and those below it, a line of text for each; latencies are in milliseconds, shares of the model."""

    name: str
    type: str
    depth: int
    num_params: int | None
    num_params_pctg: float | None
    input_shape: list[int] | None
    output_shape: list[int] | None
    input_elem_bytes: int | None
    output_elem_bytes: int | None
    fwd_latency: float | None
    fwd_latency_pctg: float | None
    macs: int | None
    macs_pctg: float | None
    fwd_flops: int | None
    fwd_flops_pctg: float | None
    children: list[ModuleProfile]
    profile: Profile = field(repr=False)

    def __str__(self) -> str:
        return tids_report(self.profile) + "\n"


class TIDSProfiler(FlopsProfiler):
    """Measures what a model does between `start_profile` and `generate_profile`.

    >>> import torch
    >>> prof = TIDSProfiler(torch.nn.Sequential(torch.nn.Linear(4, 2)))
    >>> prof.start_profile()
    >>> out = prof.model(torch.rand(3, 4))
    >>> profile = prof.generate_profile()
    >>> profile.type, profile.num_params, profile.output_shape, profile.children[0].fwd_flops
    ('Sequential', 10, [3, 2], 48)
    >>> prof.end_profile()
    """

    def generate_profile(self) -> ModuleProfile:
        """What was measured so far, module by module. Raises InputError where nothing was."""
        return _describe(self._root, self._root, "model", self.profile)


def _describe(module: ModuleInfo, root: ModuleInfo, name: str, profile: Profile) -> ModuleProfile:
    seconds = module.fwd_seconds
    return ModuleProfile(name, module.type, module.depth, module.params, _share(module.params, root.params),
                         first_shape(module.inputs), first_shape(module.outputs), _element_bytes(module.inputs),
                         _element_bytes(module.outputs), None if seconds is None else 1000 * seconds,
                         _share(seconds, root.fwd_seconds), module.fwd_macs, _share(module.fwd_macs, root.fwd_macs),
                         module.fwd_flops, _share(module.fwd_flops, root.fwd_flops),
                         [_describe(child, root, child.path.rpartition(".")[2], profile) for child in module.children],
                         replace(profile, modules=module))


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else 100 * part / whole


def _element_bytes(tensors: Sequence[TensorInfo]) -> int | None:
    return tensors[0].nbytes // tensors[0].numel if tensors and tensors[0].numel else None

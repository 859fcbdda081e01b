"""`dry_run`: executes a training script without data or a GPU, and tells what it would cost."""
from __future__ import annotations

import importlib.util
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from analyzer.api.build_profile import build_profile
from analyzer.api.result import Profile
from analyzer.api.run import Run
from analyzer.api.session import Session
from analyzer.distributed.world import World
from analyzer.distributed.world_state import current_world
from analyzer.errors import InputError, how_to_install
from analyzer.fx.trace.tracer_impl import find_leaf_impl, is_leaf
from analyzer.hardware import DeviceSpec, find_device
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.profilers.communication import name_buffers
from analyzer.profilers.latency import call_seconds
from analyzer.record.log import Log
from analyzer.record.options import ProfileOptions
from analyzer.record.script_frames import Shortages, cut_traceback, format_error, is_shortage
from analyzer.record.script_recorder import EnoughSteps, ScriptRecorder
from analyzer.results.tree import ModuleShape, ParameterShape
from analyzer.units import add_quantities
from analyzer.zoo.torchvision_ops import define_torchvision_ops

from .change import AS_IT_IS, ScriptChange
from .patch import EMPTY_LOADER, scripted
from .saved_file import NotThereError

#: What a script's own clocks are, for the assumptions: in a run without data they tell what Python takes, which is no
#: measurement.
HOST_CLOCK = ("the script reads Python's clock: times that it prints are those of a run without data, not of the "
              "device; torch.cuda.Event answers predicted ones")
_CLOCKS = re.compile(r"\bperf_counter(_ns)?\b|\btime\.(time|monotonic|process_time)(_ns)?\b|\btimeit\b"
                     r"|\bfrom\s+time\s+import\b[^\n]*\b(time|monotonic|process_time)\b")


def reads_clock(script: Path) -> bool:
    return _CLOCKS.search(script.read_text(encoding="utf-8", errors="replace")) is not None


class PredictedTimer:
    """Sums the predicted kernels of the operators that ran on the device; a mark is how many had run."""

    def __init__(self, log: Log, spec: DeviceSpec) -> None:
        self.log, self.spec = log, spec

    def mark(self) -> int:
        return len(self.log.call_slots)

    def seconds(self, start: int, end: int) -> float | None:
        """From one mark to another, 0 where that is earlier; None where the time of an operator is not known."""
        return add_quantities([
            call_seconds(call, self.spec) for call in self.log.calls[start:end]
            if any(tensor.device.startswith(self.spec.kind)
                   for tensor in (*call.signature.outputs, *call.signature.inputs))])

    def describe(self) -> str:
        return f"times predicted for {self.spec.name}, of the kernels between the two events"


_OF_EXTRA = ("accelerate", "bitsandbytes", "datasets", "lightning", "peft", "torchao", "trl")  # `scripts` of pyproject


def _with_causes(error: BaseException) -> list[BaseException]:
    """An error, and what led to it."""
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and not any(one is other for other in found):
            found.append(one)
            waiting += [one.__context__, one.__cause__]
    return found


def advise_on_name(error: BaseException) -> str | None:
    """What a name without a stand-in says, where a library raised another error of its own over it."""
    return next((str(one) for one in _with_causes(error)[1:] if isinstance(one, NotThereError)), None)


def advise_install(error: BaseException) -> str | None:
    """A sentence where ``error``, or what led to it, says that a package of the extra ``scripts`` is missing."""
    for one in _with_causes(error):
        for name in _OF_EXTRA if isinstance(one, ImportError) else ():
            if re.search(rf"\b{name}\b", str(one)) and importlib.util.find_spec(name) is None:
                return (f"{name} is not installed here; {how_to_install('scripts')} has what scripts import, "
                        f"{', '.join(_OF_EXTRA)}. A GPU is not needed for any of them.")
    return None


def advise_on_data(error: BaseException) -> str | None:
    """A sentence where a sampler refused a data set without samples (``RandomSampler``), of data that is elsewhere."""
    if not any("got num_samples=0" in str(one) for one in _with_causes(error)):
        return None
    return ("its data set has no samples here; put a few files of the right sizes where it looks for them, as many as "
            "a batch has: what they contain does not matter")


@dataclass(frozen=True)
class DryRun:
    """What a script did. ``profile`` is of its last whole step, or of all that it did where it took none."""

    profile: Profile
    steps: int                            #: whole optimizer steps that it took
    is_stopped: bool                      #: whether it was ended after the steps asked for; else it ended by itself
    #: what the script raised, its traceback starting in the script; a SystemExit with a code counts
    error: BaseException | None = None

    def format_error(self) -> str:
        """The traceback of ``error`` as Python prints it; empty where there is none."""
        if self.error is None:
            return ""
        if isinstance(self.error, SystemExit):
            return f"the script exited with {self.error.code!r}\n"
        advice = advise_install(self.error) or advise_on_name(self.error) or advise_on_data(self.error)
        return "".join([format_error(self.error), *([] if advice is None else [f"{advice}\n"])])


def dry_run(script: str | Path, arguments: Sequence[str] = (), *, device: str | DeviceSpec = "h200",
            steps: int | None = None, options: ProfileOptions | None = None, world: World | None = None,
            devices: int = 1, allow_download: bool = False, stop_at_oom: bool = False,
            change: ScriptChange = AS_IT_IS, whole: bool = False) -> DryRun:
    """Execute ``script`` as ``python script arguments`` would, on tensors without data that may be on ``device``.

    It is ended when its optimizers have stepped ``steps`` times; by default after three, or where updates follow a
    rollout or a phase that the script names, when the second of such cycles has ended. The process has as many
    ``devices``, cuda:0, cuda:1 and so on. ``torch.cuda`` answers from the simulation. Scalars that only data could give
    (``loss.item()``) are placeholders, `DataLoader` workers are not started, ``torch.save`` writes nothing;
    `Profile.assumptions` lists what was taken so. Names on the hub (``from_pretrained("meta-llama/Llama-3.1-8B")``)
    stand for shapes that ship, and nothing is downloaded, unless ``allow_download`` leaves them to the script. What is
    under ``torch.compile`` is profiled as the compiler makes it. What the script does besides torch it does.
    By default memory is limited to the device's. Where a request fails the script goes on as on a larger device, and
    `Profile.first_shortage` tells where; code that waits for the error, as finders of batch sizes do, is given it
    (`analyzer.record.script_frames`). With ``stop_at_oom`` the error is raised in any case, and
    `Profile.out_of_memory` tells where the script ended. A ``change`` is made to what the script does. The ``whole``
    script runs: it is not ended after the steps, after which the trainers of transformers and Lightning end their loop,
    and what follows runs too. `Profile.course` tells what each part of it has on the device and on the host.
    An error of the script's own is in the result, not raised. Raises InputError for a script that is not there, steps
    below 1 and a script that runs nothing as its `DataLoader` gives no batch, UnknownDeviceError.

    In a ``world`` the script runs as the rank of that world that ``torchrun`` started: it finds the environment and
    initialises `torch.distributed` itself, no other rank is waited for, and the profile is of this rank. Libraries keep
    what they were told of a world for as long as the process lives: run further ranks in other processes, as `analyzer
    dryrun --ranks` does.
    """
    if world is not None:
        world = World(world.spec, world.contents, is_initialized=False)
    path = check_script(script, steps)
    spec = find_device(device)
    with nullcontext() if world is None else world:
        options = options or ProfileOptions(unknown_value="placeholder", limit_to_device=spec.memory_bytes is not None)
        return _execute(path, arguments, spec, steps, replace(options, devices=devices) if devices != 1 else options,
                        allow_download, stop_at_oom, change, whole)


def check_script(script: str | Path, steps: int | None) -> Path:
    path = Path(script)
    if not path.is_file():
        raise InputError(f"{script}: no such file; give the path of a Python script")
    if steps is not None and steps < 1:
        raise InputError(f"steps={steps}: at least one optimizer step is needed")
    return path


def _execute(path: Path, arguments: Sequence[str], spec: DeviceSpec, steps: int | None,
             options: ProfileOptions, allows_download: bool, stops_at_oom: bool, change: ScriptChange,
             is_whole: bool) -> DryRun:
    session = Session(spec, options)
    define_torchvision_ops()  # so that a script can import torchvision beside a torch without CUDA
    error: BaseException | None = None
    is_stopped = False
    left: object = None
    with ExitStack() as until, session.simulate(adopts=False) as mode:
        mode.space.counts = True
        recorder = ScriptRecorder(mode, session.device, is_leaf, find_leaf_impl, steps, _describe, ends=not is_whole)
        run = Run(session, recorder, recorder.script)
        shortages = Shortages(recorder)
        if not stops_at_oom:
            mode.space.let_outgrow(shortages)
        mode.state.timer = PredictedTimer(recorder.log, spec)
        with run.recording():
            try:
                if reads_clock(path):
                    mode.state.assume(HOST_CLOCK)
                with _as_main(path, arguments), _without_accelerate_state(), scripted(
                        until, change, allows_download=allows_download,
                        whole_steps=recorder.steps if is_whole else None), recorder.counting_steps():
                    # keeps what the script made until the log is closed
                    left = runpy.run_path(str(path), run_name="__main__")
                recorder.finish()
            except EnoughSteps:
                is_stopped = True
            except KeyboardInterrupt:
                raise
            except BaseException as raised:
                if is_shortage(raised):
                    error = cut_traceback(raised, path)
                    raise
                recorder.finish()
                error = None if isinstance(raised, SystemExit) and raised.code in (None, 0) else cut_traceback(
                    raised, path)
            finally:
                mode.space.let_outgrow(None)
                for text in shortages.describe():
                    mode.state.assume(text)
        del left
        _check_batches(recorder, path, error)
        whole: dict[str, Any] = {}
        if current_world() is not None:  # torch's wrappers are slow to import
            from analyzer.distributed.collective import current_collectives
            from analyzer.distributed.dtensor import count_whole

            name_buffers(recorder.log, current_collectives().list_made())
            with torch._C.DisableTorchFunction():
                whole["whole_params"] = count_whole(recorder.script)
        trains = any(record.phase == "backward" for record in recorder.log.phases)
        profile = build_profile(run, shape=_join_shapes(recorder), name=path.name, mode="train" if trains else "infer",
                            optimizer=", ".join(recorder.step_counts.of_step(recorder.log.steps - 1)) or None,
                            grad_mode=None, host_peak_bytes=mode.space.host.peak_allocated_bytes, **whole)
    return DryRun(profile, recorder.steps_taken, is_stopped, error)


def _check_batches(recorder: ScriptRecorder, path: Path, error: BaseException | None) -> None:
    """Raise InputError for a script of which no step and no pass ran, as its loader gave no batch."""
    empty = next((text for text in recorder.mode.state.assumptions if text.startswith(EMPTY_LOADER)), None)
    if error is None and empty is not None and not recorder.has_called_model:
        raise InputError(f"{path}: no step and no pass of a model ran, so nothing is known of its memory and time: "
                         f"{empty}. Give the loader data of the right shapes: random tensors will do, such as "
                         "TensorDataset(torch.rand(64, 8)), as many as batch_size at least where drop_last is set")


def _describe(thing: Any, key: Callable[[Any], int]) -> ModuleShape | ParameterShape:
    """What the tree of modules needs of a module, or of a parameter of no module."""
    with torch._C.DisableTorchFunction(), without_modes():
        return ModuleShape.of(thing, key) if isinstance(thing, torch.nn.Module) else ParameterShape.of("", thing, key)


def _join_shapes(recorder: ScriptRecorder) -> ModuleShape:
    """The shape of a script: what it called and stepped, also what it let go of in its last step."""
    named = [(root.name, root.shape) for root in recorder.holdings.gathered]
    whole = _describe(type(recorder.script)(), id)
    assert isinstance(whole, ModuleShape)
    return whole._replace(
        children=tuple([(name, shape) for name, shape in named if isinstance(shape, ModuleShape)]),
        parameters=tuple([shape._replace(name=name) for name, shape in named if isinstance(shape, ParameterShape)]))


@contextmanager
def _without_accelerate_state() -> Iterator[None]:
    """A block in which Accelerate knows of no earlier Accelerator, as in a process of its own; what it knew is put
    back. Private Accelerate API: the states of a process, changed in place (`SharedDict` of accelerate/state.py).
    """
    def find_states() -> dict[str, dict[str, Any]]:
        module = sys.modules.get("accelerate.state")
        return {name: getattr(module, name)._shared_state for name in (
            "PartialState", "AcceleratorState", "GradientState") if hasattr(module, name)}

    before = {name: dict(state) for name, state in find_states().items()}
    for state in find_states().values():
        state.clear()
    try:
        yield
    finally:
        for name, state in find_states().items():
            state.clear()
            state.update(before.get(name, {}))


@contextmanager
def _as_main(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """What ``python path arguments`` finds: sys.argv, the script's folder first on sys.path, the working one last.

    What the script sets of these, of the environment and of the working folder is put back.
    """
    before, environment, folder = (sys.argv, list(sys.path)), dict(os.environ), os.getcwd()
    try:
        sys.argv = [str(path), *arguments]
        sys.path[:] = [str(path.absolute().parent), *sys.path, folder]
        yield
    finally:
        sys.argv, sys.path[:] = before
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        os.chdir(folder)

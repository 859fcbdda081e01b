"""`Run`: a module borrowed and recorded, until its log is finished."""
from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from analyzer.errors import InputError
from analyzer.fx.module_borrow import Borrowed, borrow_module
from analyzer.fx.module_wrapper import find_replica, refuse_sharded
from analyzer.fx.surroundings import keep_surroundings
from analyzer.fx.tensor_key import TensorKeys
from analyzer.fx.trace.tracer_impl import find_leaf_impl, is_leaf
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.meta.address_space import MetaStorage, find_storage
from analyzer.meta.argument import fake_arguments, tell_met
from analyzer.meta.intercept.replacement import InterruptsDeferred
from analyzer.meta.structure import find_paths
from analyzer.on_use import rare_collections
from analyzer.profilers.annotation import Annotation, Profiler
from analyzer.record.log import Log
from analyzer.record.memory_recorder import MemoryRecorder
from analyzer.record.module_recorder import ModuleRecorder
from analyzer.record.options import ProfileOptions
from analyzer.record.recorder import Recorder
from analyzer.record.tensor_walk import walk_modules

from .argument import describe_training, mark_inputs
from .session import Session

#: what is assumed of a model of which each rank has a copy
UNKNOWN_COMMUNICATION = (
    "{}: DistributedDataParallel is run as one rank alone; the bytes that ranks exchange are unknown, and the seconds "
    "of the exchange and the memory of its buckets are in no figure")


class Run:
    """One run of a session; of a module that ``is_replica``, one of several, bytes communicated are unknown."""

    def __init__(self, session: Session, recorder: Recorder, root: torch.nn.Module, borrowed: Borrowed | None = None,
                 *, is_replica: bool = False) -> None:
        self.session, self.recorder, self.root = session, recorder, root
        self._borrowed, self.is_replica = borrowed, is_replica
        #: of profilers that ask nothing of the device, by profiler and what was in the log
        self.annotations: dict[tuple[Profiler, str, int, int], Annotation] = {}

    @property
    def borrowed(self) -> Borrowed:
        assert self._borrowed is not None, "this run borrows no module"
        return self._borrowed

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record for the length of a block; it ends early, and the log says so, where a step needs too much memory."""
        recorder = self.recorder
        with recorder.recording():
            try:
                yield recorder
            except DeviceOutOfMemoryError as error:
                if not recorder.log.steps:
                    raise
                recorder.end_short(error)

    def take_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                    names: Iterable[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments without data in place of those given; they and the module's tensors are there before a step."""
        taken = self.fake_inputs(args, kwargs, self.session.device)
        recorder, borrowed = self.recorder, self.borrowed
        with torch._C.DisableTorchFunction():
            attributes = [fake for fake, _ in borrowed.attributes]
            held = [fake for group in (borrowed.parameters, borrowed.buffers) for _, fake, _ in group]
            recorder.memory.register_existing([*held, *attributes])
            recorder.modules.own_parameters_of(borrowed.by_path.values())
            recorder.memory.mark(attributes, "buffer")
            for fake in attributes:
                tell_met(recorder.mode.state, fake)
            mark_inputs(recorder, *taken, names)
        return taken

    def fake_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                    device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments without data on ``device`` in place of those given."""
        taken: tuple[tuple[Any, ...], dict[str, Any]] = fake_arguments(
            self.recorder.mode.state, (args, dict(kwargs)), device)
        return taken

    def replace_log(self, log: Log) -> None:
        self.recorder.log = log
        self.annotations.clear()

    def describe_training(self) -> None:
        with torch._C.DisableTorchFunction():
            text = describe_training(self.borrowed.walked, self.recorder.log)
        if text is not None:
            self.recorder.log.assumptions.append(text)


@contextmanager
def open_run(session: Session, module: torch.nn.Module, options: ProfileOptions | None = None, *, eager: bool = True,
             given: Any = (), walked: list[tuple[str, torch.nn.Module]] | None = None) -> Iterator[Run]:
    """A run of ``module`` (``walked`` where its modules were listed), which is borrowed for the block; ``eager`` is not
    by a graph interpreter. The containers of what it is ``given`` are put back afterwards.
    """
    walked = walk_modules(module) if walked is None else walked
    refuse_sharded(walked)
    functions = session.loss_fn, session.step, session.factory
    with (InterruptsDeferred(), rare_collections(), session.simulate(options) as mode,
          keep_surroundings(module, functions, given, walked) as surroundings,
          borrow_module(module, session.device, session.further, walked) as borrowed,
          TensorKeys(borrowed, surroundings.records)):
        session.reached = surroundings.modules
        if session.evaluates:
            borrowed.root.eval()
        replica = find_replica(borrowed.walked)
        if replica is not None:
            mode.state.assume(UNKNOWN_COMMUNICATION.format(replica or "the model"))
        modules = ModuleRecorder(MemoryRecorder(mode.space, session.device), borrowed.root, is_leaf if eager else None,
                                 find_leaf_impl if eager else lambda module: None, borrowed.walked)
        if session.options.compiles:
            modules.compiled = borrowed.compiled
        recorder = Recorder(mode, modules)
        for remark in describe_further(session.further, session.mode, session.optimizer, session.step):
            mode.state.assume(remark)
        yield Run(session, recorder, borrowed.root, borrowed, is_replica=replica is not None)


# Modules that run with the model and are no part of it: given as arguments, or reached by its loss function or step.

def list_given(root: nn.Module, named: Iterable[tuple[str, object]]) -> dict[str, nn.Module]:
    """The modules in arguments, ``named`` by forward, that hold tensors and are not in ``root``, by paths beside its
    own: ``heads_0`` is ``heads[0]``.
    """
    given = [(name, steps, module) for name, value in named for steps, module in find_paths(value, nn.Module)]
    inside = {id(module) for _, module in walk_modules(root)} if given else set()
    found: dict[str, nn.Module] = {}
    for name, steps, module in given:
        if id(module) not in inside and any(m._parameters or m._buffers for m in module.modules()):
            inside.update(map(id, module.modules()))
            found[_free_path(root, found, "_".join([name, *[str(step.key) for step in steps]]))] = module
    return found


def add_reached(root: nn.Module, known: Mapping[str, nn.Module], reached: Iterable[nn.Module],
                leaf: torch.Tensor) -> dict[str, nn.Module] | None:
    """``known`` and the module among those ``reached`` that has the parameter ``leaf``; None where none has."""
    for module in reached:
        if not any(module is one for one in known.values()) and any(p is leaf for p in module.parameters()):
            return {**known, _free_path(root, known, type(module).__name__): module}
    return None


def _free_path(root: nn.Module, found: Mapping[str, nn.Module], name: str) -> str:
    path = re.sub(r"\W", "_", name)
    while path in found or hasattr(root, path):
        path += "_"
    return path


def describe_further(further: Mapping[str, nn.Module], mode: str, optimizer: object, step: object) -> list[str]:
    """A sentence on each module that runs with the model: what of the profile it is in."""
    found = []
    for path, module in further.items():
        count = sum(p.numel() for p in module.parameters())
        if not count:
            continue
        text = (f"{path} ({type(module).__name__}) is no part of the model and runs with it: its {count:,} parameters "
                "are among those of the profile")
        if mode == "train" and optimizer is not None and any(p.requires_grad for p in module.parameters()):
            text += ", and the optimizer trains them" if step is None else (
                ", but not of the optimizer that step is given, which has the model's own")
        found.append(text)
    return found


def refuse_outside(named: Iterable[tuple[str, object]]) -> None:
    """Raise InputError where an argument is a module that was built outside of a world."""
    for name, value in named:
        for _, module in find_paths(value, nn.Module):
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.layout is torch.strided and not isinstance(find_storage(tensor), MetaStorage):
                    raise InputError(f"{name}: a {type(module).__name__} that was built outside of the world is given "
                                     "as an argument, and no rank has it; build it in the function that `profile` is "
                                     "given, as a part of the model")

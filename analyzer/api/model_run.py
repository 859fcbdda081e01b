"""A model's steps are run: once for all devices that the run is the same for, and of alike blocks only a few."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from analyzer.api.result import Profile
from analyzer.hardware.catalogue import Alike
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.intercept.patch import OutsideLeafError
from analyzer.meta.intercept.replacement import InterruptsDeferred
from analyzer.meta.state import Restart
from analyzer.on_use import rare_collections
from analyzer.record.eager import RUNS_MODEL, EagerStep
from analyzer.record.log import Log
from analyzer.record.options import ProfileOptions
from analyzer.record.tensor_walk import walk_modules
from analyzer.replay.chain import ENDS, FEWEST, Chain
from analyzer.replay.match import BlocksDiffer, NotRepeated, why_unsupported
from analyzer.replay.repeated_step import RepeatedStep, chains_of
from analyzer.replay.update import UpdateDiffers
from analyzer.results.info import ReplayInfo, ReplayReport
from analyzer.results.tree import list_wrappers

from .argument import expect_values
from .build_profile import build_for, build_profile, build_unplaced
from .run import Run, add_reached, open_run
from .session import Session

#: why blocks at the ends of a chain are run
RUN_FOR_OTHERS = "it is one of the first or last of alike blocks, which are run for the others too"
NO_CHAIN = f"no {FEWEST} neighbours in one of its lists of modules are alike"
FURTHER_RUNS = "modules that are no part of the model run with it"


class ModelCall(NamedTuple):
    """A model, and the arguments that each step calls it with."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: list[str]  #: of the positional arguments
    further: dict[str, torch.nn.Module]  #: modules that hold tensors among the arguments, by the paths that they get


class SharedRun:
    """The run of a session, and what it says of the devices of further sessions, the same request for other devices:
    those have no limit of memory, and code that is compiled is compiled for one device.
    """

    def __init__(self, session: Session, others: Iterable[Session] = ()) -> None:
        self.session = session
        self.others = [other for other in others if other.spec is not None and other.device == session.device]
        session.alike = Alike(other.spec for other in self.others if other.spec is not None)
        self.found: dict[Session, Profile] = {}  #: the profile on each device for which the run was the same
        #: where a device has other workspaces: the first profile whose rows come of the same log
        self.first: dict[Session, Profile] = {}
        self.limited: dict[Session, Profile] = {}  #: as `Session.limit` has it, where the run need not be made again

    def list_alike(self, varied: bool = False) -> list[Session]:
        """The further sessions for whose devices the run went as it would there; ``varied`` are those on which
        workspaces have other sizes.
        """
        alike = self.session.alike
        if alike is None or self.session.frames is not None:
            return []
        return [other for other in self.others if other.spec is not None and other.spec in alike.specs
                and (other.spec.name in alike.varied) == varied]


def run_model(shared: SharedRun, call: ModelCall, reuse: bool, **settings: Any) -> Profile:
    """The profile of a model's steps; ``settings`` are further ones of `EagerStep`."""
    session = shared.session
    mode, step = session.mode, session.step
    session.further = session.further or dict(call.further)
    repeats = Repeats(why_nothing(reuse, session.options.devices), why_no_step(step, session.options),
                      shares_run=bool(shared.others))

    def run_step(run: Run, options: ProfileOptions) -> None:
        if repeats.refusal is None and run.borrowed.has_gradient_hooks:
            repeats.refusal = "hooks run with a parameter's gradient"
        run_args, run_kwargs = run.take_inputs(call.args, call.kwargs, call.names)
        repeats.step = repeats.step_class(run.borrowed.walked)(
            run.recorder, run.root, run_args, run_kwargs, mode=mode, loss_fn=session.loss_fn,
            optimizer=session.optimizer if mode == "train" else None, autocast=session.autocast, step=step,
            device_type=session.device.type, options=options, further=session.further.values(), **settings)
        repeats.step.answers_numbers = session.options.unknown_value != "error"
        if repeats.step.takes_closure and repeats.refusal is None:
            repeats.refusal = RUNS_MODEL
            raise Restart(RUNS_MODEL)
        if isinstance(repeats.step, RepeatedStep):
            repeats.step.chains, repeats.step.shares_run = repeats.chains, repeats.shares_run
            repeats.step.repeats_update = repeats.repeats_update
            repeats.step.step_reason = repeats.step_refusal
        repeats.step.run()

    shared.found[session] = run_repeating(session, call, run_step, repeats, shared)
    return shared.found[session]


def limit_run(shared: SharedRun, session: Session, call: ModelCall, reuse: bool, **settings: Any) -> Profile:
    """What a shared run found for a session, or the profile of a step that gives cached memory back where its device
    has too little.
    """
    if session in shared.limited:
        return shared.limited[session]
    found = shared.found[session]
    limited = session.limit(found.peak_allocated_bytes, found.peak_reserved_bytes)
    if limited is None:
        return found
    again = run_model(SharedRun(limited), call, reuse, **settings)
    return again if again.out_of_memory is None else found


def why_nothing(reuse: bool, devices: int) -> str | None:
    """Why nothing is repeated, as far as that is known before; None where something may be."""
    if not reuse:
        return "reuse=False"
    if devices > 1:
        return "the process has several devices"
    return why_unsupported()


def why_no_step(step: Callable[..., Any] | None, options: ProfileOptions) -> str | None:
    """Why the model of later steps is run; None where they may be written from the first."""
    if step is not None:
        return "the steps are the caller's own"
    if not options.set_to_none:
        return "gradients are added to those of the step before"
    return None if options.steps > 1 else "there is one step"


class Repeats:
    """What need not run: blocks of chains, later steps, a step on the devices that share a run. ``refusal`` is why
    nothing is repeated, ``step_refusal`` why no step is.
    """

    def __init__(self, refusal: str | None, step_refusal: str | None, *, shares_run: bool = False) -> None:
        self.refusal, self.step_refusal, self.shares_run = refusal, step_refusal, shares_run
        self.repeats_update = True  #: whether an optimizer may run for a few blocks alone
        self.chain_refusal: str | None = None  #: why a few blocks do not stand for all
        self.chains: list[Chain] = []  #: of which the run that is under way, or was last, began with a few blocks
        self._found: list[Chain] | None = None
        self.step: EagerStep | None = None

    def step_class(self, walked: Sequence[tuple[str, torch.nn.Module]]) -> type[EagerStep]:
        """What runs the steps of a model, of these modules with their paths, now that it is known what was refused
        before; `chains` are those that it repeats.
        """
        self.chains = []
        if self.refusal is None and self.chain_refusal is None:
            if self._found is None:
                with without_modes():  # objects may say by an operator on tensors whether they are equal
                    self._found = chains_of(walked)
            self.chains = list(self._found)
        is_repeated = self.chains or self.refusal is None and (self.step_refusal is None or self.shares_run)
        return RepeatedStep if is_repeated else EagerStep

    def refuse(self, refused: NotRepeated) -> None:
        """The last run found why it tells nothing: fewer things are repeated in the next."""
        if not self.chains:
            self.refusal = refused.reason
        elif isinstance(refused, UpdateDiffers):
            self.repeats_update = False
        elif isinstance(refused, BlocksDiffer) and any(min(c.head, c.tail) < ENDS[-1] for c in self.chains):
            # two are compared behind those that are not run: every second or third may be called in another way
            self._found = [chain._replace(head=ENDS[-1], tail=ENDS[-1] + 1) for chain in self._found or ()]
        else:
            self.chain_refusal = refused.reason

    def write_limited(self, limited: Session) -> Log | None:
        """The log of the run that is under way, with the limit of memory of a session; None where it has to run."""
        capacity = limited.options.capacity_bytes
        if not isinstance(self.step, RepeatedStep) or capacity is None or limited.spec is None:
            return None
        return self.step.write_limited(capacity, limited.spec.name)

    def write_varied(self, sessions: Iterable[Session]) -> Iterator[tuple[Log, list[Session]]]:
        """Of devices that share the run under way, and differ in workspaces alone, the logs and whose each is."""
        varied = {other.spec.name: other for other in sessions if other.spec is not None}
        if isinstance(self.step, RepeatedStep):
            for names in self.step.group_devices(varied):
                yield self.step.write_for(names[0]), [varied[name] for name in names]

    def report(self, root: torch.nn.Module) -> ReplayReport:
        name, step = type(root).__name__, self.step
        rows = [ReplayInfo(path, "block", type(block).__name__, place in run.chain.skipped,
                           None if place in run.chain.skipped else run.refusal or RUN_FOR_OTHERS)
                for run in (step.short_run.runs if isinstance(step, RepeatedStep) else ())
                for place, members in enumerate(run.chain.members) for path, block in members]
        if not rows:
            rows.append(ReplayInfo("", "block", name, False, self.refusal or self.chain_refusal or NO_CHAIN))
        if step is not None and step.options.steps > 1:
            reason = step.step_reason if isinstance(step, RepeatedStep) else self.refusal or self.step_refusal
            rows.append(ReplayInfo("", "step", name, not step.runs_model, reason))
        return ReplayReport(tuple(rows))


def build_shared(shared: SharedRun, run: Run, repeats: Repeats, take: Callable[[Run, Log], None],
                 **settings: Any) -> Profile:
    """The profile of a run that ended. The sessions that share it get theirs, and each where its device has too little
    for what is cached the one with that limit; ``take`` lets the run have another log.
    """
    shared.found[shared.session] = found = build_profile(run, **settings)
    shared.found.update({other: build_for(other, run, **settings) for other in shared.list_alike()})
    for log, others in repeats.write_varied(shared.list_alike(varied=True)):
        take(run, log)
        for other in others:
            shared.found[other] = build_for(other, run, **settings)
            shared.first[other] = shared.found[others[0]]
    for one, its in shared.found.items():
        limited = one.limit(its.peak_allocated_bytes, its.peak_reserved_bytes)
        limited_log = None if limited is None else repeats.write_limited(limited)
        if limited is not None and limited_log is not None:
            take(run, limited_log)
            shared.limited[one] = build_for(limited, run, **settings)
    return found


def run_repeating(session: Session, call: ModelCall, run_step: Callable[[Run, ProfileOptions], None],
                  repeats: Repeats, shared: SharedRun) -> Profile:
    """The profile of a call, run again with less repeated for as long as a run finds that it repeated too much, and
    with the modules that its loss function reaches and trains.
    """
    module = call.module

    def take(run: Run, log: Log) -> None:
        run.replace_log(log)
        if repeats.step is not None and repeats.step.mode == "infer" and not repeats.step.looks_for_gradient:
            run.describe_training()

    def run_once(options: ProfileOptions) -> Profile:
        walked = walk_modules(module)
        wrappers = list_wrappers(walked)
        if session.further:
            repeats.refusal = repeats.refusal or FURTHER_RUNS
        with open_run(session, module, options, given=(call.args, call.kwargs), walked=walked) as run:
            try:
                with run.recording():
                    run_step(run, options)
                take(run, repeats.step.write_log() if isinstance(repeats.step, RepeatedStep) else run.recorder.log)
                return build_shared(shared, run, repeats, take, is_final=True, wrappers=wrappers,
                                    replay=repeats.report(run.root))
            finally:
                repeats.step = None

    session.restarts = True
    with InterruptsDeferred(), rare_collections():  # also while what a run leaves behind is freed
        while True:
            try:
                return expect_values(run_once, session.options)
            except Restart as restart:
                if isinstance(restart, NotRepeated):
                    repeats.refuse(restart)
                restart.__traceback__ = None  # whose frames hold the run
            except OutsideLeafError as error:
                further = add_reached(module, session.further, session.reached, error.leaf)
                if further is None:
                    raise
                session.further = further
            except DeviceOutOfMemoryError as error:
                return build_unplaced(session, module, error)

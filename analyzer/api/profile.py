"""`profile`: what a training or inference step of a model costs."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch

from analyzer.api.result import Profile
from analyzer.distributed.world import World, current_entered
from analyzer.errors import InputError
from analyzer.fx.module_borrow import uncompiled
from analyzer.fx.surroundings import leaves_no_tensor
from analyzer.hardware import DeviceSpec
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.meta.argument import check_tensors
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.intercept.patch import OutsideLeafError
from analyzer.meta.intercept.replacement import InterruptsDeferred
from analyzer.meta.state import Restart
from analyzer.meta.structure import tensors_of
from analyzer.on_use import rare_collections
from analyzer.record.eager import RUNS_MODEL, EagerStep, GradientFound, OptimizerFactory
from analyzer.record.failure import noting_failures
from analyzer.record.log import Log
from analyzer.record.optimizer_step import has_gradient_hooks
from analyzer.record.options import ProfileOptions
from analyzer.record.tensor_walk import walk_modules
from analyzer.replay.chain import ENDS, FEWEST, Chain
from analyzer.replay.match import why_unsupported
from analyzer.replay.repeated_step import RepeatedStep, chains_of
from analyzer.replay.short_run import BlocksDiffer, NotRepeated
from analyzer.results.info import ReplayInfo, ReplayReport
from analyzer.results.tree import list_wrappers

from .argument import argument_names, as_arguments, as_keywords, build_model, expect_values, keep_flags, without_data
from .chosen_profilers import Profilers
from .further_module import add_reached, list_given, refuse_outside
from .session import Run, Session

__all__ = ["Profile", "ProfileOptions", "profile"]

#: what is assumed of a training step without gradients
NOTHING_TO_TRAIN = ("no parameter and no input requires a gradient, so there is nothing to train: only the forward "
                    "pass is profiled, without backward pass and optimizer")


@leaves_no_tensor
def profile(model: torch.nn.Module | Callable[[], torch.nn.Module], args: tuple[Any, ...] | Any = (),
            kwargs: dict[str, Any] | None = None, mode: Literal["train", "infer"] = "train",
            loss_fn: Callable[[Any], torch.Tensor] | None = None, optimizer: str | OptimizerFactory | None = None,
            autocast: torch.dtype | None = None, step: Callable[..., Any] | None = None,
            device: str | DeviceSpec = "h200", options: ProfileOptions | None = None, reuse: bool = True,
            profilers: Profilers = None, eval: bool = False, world: World | None = None,
            devices: int = 1) -> Profile:
    """Predict what a step of ``model`` costs on ``device``, without running it on data.

    ``model`` is a module on any device (its data is not touched, and it is as it was afterwards), a program by
    ``torch.export``, which runs as it was exported, or a callable of no arguments that builds one, called under
    `MetaTensorMode`; that lives for the call. ``args`` and ``kwargs`` hold real, meta or `MetaTensor` tensors, also in
    containers, dataclasses and other objects. ``mode`` is ``"train"`` (forward, loss, backward, optimizer) or
    ``"infer"``. ``loss_fn(output)`` gives a scalar; by default ``output.loss`` where there is one, else the only scalar
    among the outputs, else the sum of the floating ones. ``optimizer`` is a callable ``params ->
    torch.optim.Optimizer``, a name (docs/usage.md) or ``module:Class``. ``autocast`` is a dtype. ``step(model,
    optimizer, *args, **kwargs)`` replaces the built-in training step. ``profilers`` adds to the default ones, or
    replaces them by name.

    Training flags are left as they are: ``mode="infer"`` runs dropout in a model that is in training mode, and
    ``assumptions`` says so; with ``eval=True`` the profile is that after ``model.eval()``. Where neither a parameter
    nor an input requires a gradient ``mode="train"`` profiles the forward pass (and ``loss_fn``), and the result's
    ``mode`` is ``"infer"``.

    ``devices`` is how many devices of that kind the process has, cuda:0, cuda:1 and so on, as of a model whose layers
    lie on several of them; inputs go to cuda:0 unless they are on another one.

    In a `world` the profile is of the rank that it runs (docs/parallel.md); outside of one what ranks of
    `DistributedDataParallel` communicate is None. A step that would reserve more than the device has, but allocate
    less, runs again with that limit, as PyTorch then gives cached memory back; ``assumptions`` says so. Raises
    InputError for arguments that cannot be used and outside of a world for models sharded over ranks,
    UnknownDeviceError, UnsupportedOperatorError and DataDependentError, and whatever the model itself raises.

    >>> import torch
    >>> p = profile(torch.nn.Linear(1024, 4096), args=(torch.rand(8, 1024),), mode="infer", device="a100")
    >>> p.params, p.param_bytes, p.fwd_flops
    (4198400, 16793600, 67108864)
    """
    if world is not None:
        with world:
            return profile(model, args, kwargs, mode, loss_fn, optimizer, autocast, step, device, options, reuse,
                           profilers, eval, devices=devices)
    options = replace(options or ProfileOptions(), devices=devices) if devices != 1 else options
    if (inside := current_entered()) is not None:
        from .rank import profile_rank  # torch's wrappers are slow to import

        session = Session(device, options, mode=mode, optimizer=optimizer, autocast=autocast, loss_fn=loss_fn,
                          step=step, profilers=profilers, evaluates=eval)
        args, kwargs = as_arguments(args), as_keywords(kwargs)
        check_tensors((args, kwargs))
        refuse_outside([*((f"args[{i}]", value) for i, value in enumerate(args)), *kwargs.items()])
        with noting_failures():
            return profile_rank(session, model, args, kwargs, inside, reuse)
    made = profile_alike([device], model, args, kwargs, mode=mode, loss_fn=loss_fn, optimizer=optimizer,
                         autocast=autocast, step=step, options=options, reuse=reuse, profilers=profilers, eval=eval)
    return made[0].profile


class OnDevice(NamedTuple):
    """The profile on a device, and the first one of the same run: all but the device and times is the same there."""

    profile: Profile
    first: Profile


def profile_alike(devices: Sequence[str | DeviceSpec], model: torch.nn.Module | Callable[[], torch.nn.Module],
                  args: Any = (), kwargs: dict[str, Any] | None = None, *,
                  mode: str = "train", loss_fn: Callable[[Any], torch.Tensor] | None = None,
                  optimizer: str | OptimizerFactory | None = None, autocast: torch.dtype | None = None,
                  step: Callable[..., Any] | None = None, options: ProfileOptions | None = None, reuse: bool = True,
                  profilers: Profilers = None, eval: bool = False) -> list[OnDevice]:
    """The profile on the first of ``devices``, and by the same run on each of the others for which it would be the
    same; outside of a world. The arguments are those of `profile`, which says what it raises.
    """
    settings: dict[str, Any] = dict(autocast=autocast, loss_fn=loss_fn, step=step, profilers=profilers, evaluates=eval)
    session, *others = [Session(device, options, mode=mode, optimizer=optimizer, **settings) for device in devices]
    args, kwargs = as_arguments(args), as_keywords(kwargs)
    check_tensors((args, kwargs))
    built: list[str] = []
    module = model if isinstance(model, torch.nn.Module) else build_model(
        model, built, session.spec, session.options.devices)
    session.remarks = (*built, *session.remarks)
    names = argument_names(module, args, kwargs, step)
    call = ModelCall(module, args, kwargs, names, list_given(module, [*zip(names, args), *kwargs.items()]))
    request = {"model": weakref.ref(model) if isinstance(model, torch.nn.Module) else model,
               "args": without_data(args), "kwargs": without_data(kwargs), "mode": mode, "device": devices[0],
               "optimizer": optimizer, "autocast": autocast, "loss_fn": loss_fn, "step": step, "options": options,
               "profilers": profilers, "eval": eval, _WRITTEN: weakref.ref(uncompiled(module))}
    flags: AbstractContextManager[list[torch.nn.Module]] = keep_flags(module) if eval else nullcontext([])

    def run(session: Session, others: list[Session], **how: Any) -> list[OnDevice]:
        session.share_run(others)
        first = run_model(session, call, reuse, **how)
        made = []
        for one, found in [(session, first), *((other, other.found) for other in session.others)]:
            if found is not None:
                whole = limit_run(one, found, call, reuse, **how)
                whole.remember(request if one is session else {**request, "device": one.spec})
                made.append(OnDevice(whole, one.found_first or first if whole is found else whole))
        return made

    with noting_failures(), flags as modules:
        for inner in modules:  # before alike blocks are looked for; the run calls the model's own eval() too
            inner.training = False
        own = [m.parameters() for m in (module, *call.further.values())]
        if mode == "train" and step is None and not any(
                t.requires_grad for t in chain(*own, tensors_of((args, kwargs)))):
            try:
                bare, *further = [Session(device, options, remarks=[*built, NOTHING_TO_TRAIN], **settings)
                                  for device in devices]
                for one in (bare, *further):
                    one.facts["grad_mode"] = None
                return run(bare, further, looks_for_gradient=True)
            except GradientFound:  # of a tensor that is neither
                pass
        return run(session, others)


#: why blocks at the ends of a chain are run
RUN_FOR_OTHERS = "it is one of the first or last of alike blocks, which are run for the others too"
NO_CHAIN = f"no {FEWEST} neighbours in one of its lists of modules are alike"
FURTHER_RUNS = "modules that are no part of the model run with it"
_WRITTEN = "written"  # in a request: the module behind torch.compile(module)


def read_request(found: Profile, caller: str, written: bool = False) -> dict[str, Any]:
    """The arguments with which `profile` made ``found``; with the module as it is ``written``, where what was given is
    one under ``torch.compile``. Raises InputError, which begins with ``caller``, where they are not known: of a saved
    profile, of a rank's, of a module that is gone.
    """
    if found.request is None:
        raise InputError(f"{caller}: {found.name}: only `analyzer.profile` knows the model, in the process that it ran "
                         "in, outside of a world")
    request = dict(found.request)
    model, inner = request["model"], request.pop(_WRITTEN)
    if isinstance(model, weakref.ref):
        model = inner() if written else model()
        if model is None:
            raise InputError(f"{caller}: {found.name}: the model is gone; keep it, or call analyzer.profile again")
    return {**request, "model": model}


def profile_eagerly(found: Profile) -> Profile:
    """What `Profile.as_eager` gives."""
    request = read_request(found, "as_eager()", written=True)
    return profile(**{**request, "options": replace(request["options"] or ProfileOptions(), compiles=False)})


class ModelCall(NamedTuple):
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: list[str]  #: of the positional arguments
    further: dict[str, torch.nn.Module]  #: modules that hold tensors among the arguments, by the paths that they get


def run_model(session: Session, call: ModelCall, reuse: bool, **settings: Any) -> Profile:
    """The profile of a model's steps; ``settings`` are further ones of `EagerStep`."""
    mode, step = session.mode, session.step
    session.further = session.further or dict(call.further)
    repeats = Repeats(why_nothing(call.module, reuse, session.options.devices), why_no_step(step, session.options),
                      shares_run=bool(session.others))

    def run_step(run: Run, options: ProfileOptions) -> None:
        run_args, run_kwargs = run.take_inputs(call.args, call.kwargs, call.names)
        repeats.step = repeats.step_class(run.root)(
            run.recorder, run.root, run_args, run_kwargs, mode=mode, loss_fn=session.loss_fn,
            optimizer=session.optimizer if mode == "train" else None, autocast=session.autocast, step=step,
            device_type=session.device.type, options=options, further=session.further.values(), **settings)
        repeats.step.answers_numbers = session.options.unknown_value != "error"
        if repeats.step.takes_closure and repeats.refusal is None:
            repeats.refusal = RUNS_MODEL
            raise Restart(RUNS_MODEL)
        if isinstance(repeats.step, RepeatedStep):
            repeats.step.chains, repeats.step.shares_run = repeats.chains, repeats.shares_run
            repeats.step.step_reason = repeats.step_refusal
        repeats.step.run()

    return run_repeating(session, call, run_step, repeats)


def limit_run(session: Session, found: Profile, call: ModelCall, reuse: bool, **settings: Any) -> Profile:
    """What was ``found``, or the profile of a step that gives cached memory back where its device has too little."""
    if session.found_limited is not None:
        return session.found_limited
    limited = session.limit(found.peak_allocated_bytes, found.peak_reserved_bytes)
    if limited is None:
        return found
    again = run_model(limited, call, reuse, **settings)
    return again if again.out_of_memory is None else found


def why_nothing(module: torch.nn.Module, reuse: bool, devices: int) -> str | None:
    """Why nothing is repeated, as far as that is known before; None where something may be."""
    if not reuse:
        return "reuse=False"
    if devices > 1:
        return "the process has several devices"
    if any([has_gradient_hooks(t) for _, m in walk_modules(module) if m._parameters for t in m._parameters.values()
            if t is not None]):
        return "hooks run with a parameter's gradient"
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
        self.chain_refusal: str | None = None  #: why a few blocks do not stand for all
        self.chains: list[Chain] = []  #: of the run that is under way, or was last
        self._found: list[Chain] | None = None
        self.step: EagerStep | None = None

    def step_class(self, root: torch.nn.Module) -> type[EagerStep]:
        """What runs the steps, now that it is known what was refused before; `chains` are those that it repeats."""
        self.chains = []
        if self.refusal is None and self.chain_refusal is None:
            if self._found is None:
                with without_modes():  # objects may say by an operator on tensors whether they are equal
                    self._found = chains_of(root)
            self.chains = list(self._found)
        is_repeated = self.chains or self.refusal is None and (self.step_refusal is None or self.shares_run)
        return RepeatedStep if is_repeated else EagerStep

    def refuse(self, refused: NotRepeated) -> None:
        """The last run found why it tells nothing: fewer things are repeated in the next."""
        if not self.chains:
            self.refusal = refused.reason
        elif isinstance(refused, BlocksDiffer) and any(min(c.head, c.tail) < ENDS[-1] for c in self.chains):
            self._found = [chain._replace(head=ENDS[-1], tail=ENDS[-1]) for chain in self._found or ()]
        else:
            self.chain_refusal = refused.reason

    def write_limited(self, limited: Session) -> Log | None:
        """The log of the run that is under way, with the limit of memory of a session; None where it has to run."""
        capacity = limited.options.capacity_bytes
        if not isinstance(self.step, RepeatedStep) or capacity is None or limited.spec is None:
            return None
        return self.step.write_limited(capacity, limited.spec.name)

    def write_varied(self, session: Session) -> Iterator[tuple[Log, list[Session]]]:
        """Of devices that share the run under way, and differ in workspaces alone, the logs and whose each is."""
        varied = {other.spec.name: other for other in session.list_alike(varied=True) if other.spec is not None}
        if isinstance(self.step, RepeatedStep):
            for names in self.step.group_devices(varied):
                yield self.step.write_for(names[0]), [varied[name] for name in names]

    def report(self, root: torch.nn.Module) -> ReplayReport:
        name, step = type(root).__name__, self.step
        rows = [ReplayInfo(path, "block", type(block).__name__, place in chain.skipped,
                           None if place in chain.skipped else RUN_FOR_OTHERS)
                for chain in self.chains for place, members in enumerate(chain.members) for path, block in members]
        if isinstance(step, RepeatedStep):
            rows += [ReplayInfo(path, "block", type(block).__name__, False, why)
                     for path, block, why in step.short_run.given_up]
        if not rows:
            rows.append(ReplayInfo("", "block", name, False, self.refusal or self.chain_refusal or NO_CHAIN))
        if step is not None and step.options.steps > 1:
            reason = step.step_reason if isinstance(step, RepeatedStep) else self.refusal or self.step_refusal
            rows.append(ReplayInfo("", "step", name, not step.runs_model, reason))
        return ReplayReport(tuple(rows))


def build_shared(session: Session, run: Run, repeats: Repeats, take: Callable[[Run, Log], None],
                 **settings: Any) -> Profile:
    """The profile of a run that ended. The sessions that share it get theirs, and each where its device has too little
    for what is cached the one with that limit; ``take`` lets the run have another log.
    """
    found = run.build(**settings)
    alike = session.list_alike()
    for other in alike:
        other.found = run.build_for(other, **settings)
    for log, others in repeats.write_varied(session):
        take(run, log)
        for other in others:
            other.found = run.build_for(other, **settings)
            other.found_first = others[0].found
        alike += others
    for one, its in [(session, found), *((other, other.found) for other in alike)]:
        assert its is not None
        limited = one.limit(its.peak_allocated_bytes, its.peak_reserved_bytes)
        limited_log = None if limited is None else repeats.write_limited(limited)
        if limited is not None and limited_log is not None:
            take(run, limited_log)
            one.found_limited = run.build_for(limited, **settings)
    return found


def run_repeating(session: Session, call: ModelCall, run_step: Callable[[Run, ProfileOptions], None],
                  repeats: Repeats) -> Profile:
    """The profile of a call, run again with less repeated for as long as a run finds that it repeated too much, and
    with the modules that its loss function reaches and trains.
    """
    module = call.module

    def take(run: Run, log: Log) -> None:
        run.replace_log(log)
        if repeats.step is not None and repeats.step.mode == "infer" and not repeats.step.looks_for_gradient:
            run.describe_training()

    def run_once(options: ProfileOptions) -> Profile:
        wrappers = list_wrappers(module)
        if session.further:
            repeats.refusal = repeats.refusal or FURTHER_RUNS
        with session.open(module, options, given=(call.args, call.kwargs)) as run:
            try:
                with run.recording():
                    run_step(run, options)
                take(run, repeats.step.write_log() if isinstance(repeats.step, RepeatedStep) else run.recorder.log)
                return build_shared(session, run, repeats, take, is_final=True, wrappers=wrappers,
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
                return session.build_unplaced(module, error)

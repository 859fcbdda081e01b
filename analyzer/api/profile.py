"""`profile`: what a training or inference step of a model costs."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from analyzer.api.result import Profile
from analyzer.distributed.world_state import current_world
from analyzer.errors import InputError
from analyzer.fx.module_wrapper import uncompiled
from analyzer.fx.surroundings import leaves_no_tensor
from analyzer.hardware import DeviceSpec
from analyzer.meta.argument import check_tensors
from analyzer.meta.structure import tensors_of
from analyzer.record.eager import GradientFound, OptimizerFactory
from analyzer.record.failure import noting_failures
from analyzer.record.options import ProfileOptions

from .argument import argument_names, as_arguments, as_keywords, build_model, keep_flags, without_data
from .model_run import ModelCall, SharedRun, limit_run, run_model
from .run import list_given, refuse_outside
from .session import Profilers, Session

if TYPE_CHECKING:
    from analyzer.distributed.world import World  # torch.distributed and its wrappers are slow to import

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
    if current_world() is not None:
        from .rank import profile_rank  # torch's wrappers are slow to import

        session = Session(device, options, mode=mode, optimizer=optimizer, autocast=autocast, loss_fn=loss_fn,
                          step=step, profilers=profilers, evaluates=eval)
        args, kwargs = as_arguments(args), as_keywords(kwargs)
        check_tensors((args, kwargs))
        refuse_outside([*((f"args[{i}]", value) for i, value in enumerate(args)), *kwargs.items()])
        with noting_failures():
            return profile_rank(session, model, args, kwargs, reuse)
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
        shared = SharedRun(session, others)
        first = run_model(shared, call, reuse, **how)
        made = []
        for one, found in shared.found.items():
            whole = limit_run(shared, one, call, reuse, **how)
            whole.remember(request if one is session else {**request, "device": one.spec})
            made.append(OnDevice(whole, shared.first.get(one, first) if whole is found else whole))
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

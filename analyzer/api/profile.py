"""`profile`: what a training or inference step of a model costs."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from analyzer.cuda.current_spec import claiming
from analyzer.errors import DataDependentError, InputError
from analyzer.fx.graph.graph_module import forward_signature
from analyzer.fx.module_borrow import Borrowed, borrow_module, uncompiled
from analyzer.fx.trace.leaf_module import find_leaf_impl, is_leaf
from analyzer.hardware import DeviceSpec, find_device
from analyzer.hardware.unseen import list_unseen
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.meta.argument import stand_in_arguments
from analyzer.meta.mode import MetaTensorMode
from analyzer.meta.reserved_touch import ReservedTouch
from analyzer.profilers.annotation import Profiler
from analyzer.profilers.communication import profile_communication
from analyzer.profilers.flops import profile_flops
from analyzer.profilers.latency import make_latency_profiler
from analyzer.profilers.memory import profile_memory
from analyzer.profilers.traffic import profile_traffic
from analyzer.record.collector import rare_collections
from analyzer.record.eager import EagerStep, OptimizerFactory, find_optimizer
from analyzer.record.options import ProfileOptions
from analyzer.record.recorder import Recorder, tensors_in
from analyzer.replay.block_reuse import BlockReuse, pays
from analyzer.replay.played_twice import PlayedTwice
from analyzer.replay.reserved import Reserved
from analyzer.replay.twin import find_twins
from analyzer.results.build import build_profile, build_unplaced_profile
from analyzer.results.profile import Profile
from analyzer.results.wrapper import list_wrappers, show_wrappers

__all__ = ["Profile", "ProfileOptions", "profile"]

Profilers = Mapping[str, Profiler] | Sequence[Profiler] | None


def default_profilers(device: DeviceSpec | None) -> dict[str, Profiler]:
    """The profilers that run unless the caller says otherwise, by name."""
    found: dict[str, Profiler] = {"flops": profile_flops, "traffic": profile_traffic, "memory": profile_memory,
                                  "communication": profile_communication}
    if device is not None:
        found["latency"] = make_latency_profiler(device)
    return found


def choose_profilers(given: Profilers, device: DeviceSpec | None) -> dict[str, Profiler]:
    """The default profilers with those ``given`` in place: a mapping replaces by name or adds, a sequence adds."""
    chosen = default_profilers(device)
    if given is None:
        return chosen
    if isinstance(given, Mapping):
        return {**chosen, **given}
    return {**chosen, **{getattr(f, "__name__", f"profiler_{i}"): f for i, f in enumerate(given)}}


def profile(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    args: tuple[Any, ...] | Any = (),
    kwargs: dict[str, Any] | None = None,
    mode: str = "train",
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    optimizer: str | OptimizerFactory | None = None,
    autocast: torch.dtype | None = None,
    step: Callable[..., Any] | None = None,
    device: str | DeviceSpec = "h200",
    options: ProfileOptions | None = None,
    reuse: bool = True,
    profilers: Profilers = None,
) -> Profile:
    """Predict what a step of ``model`` costs on ``device``, without running it on data.

    ``model`` is a module on any device (its data is not touched, and it is as it was afterwards) or a callable of no
    arguments that builds one, called under `MetaTensorMode`. ``args`` and ``kwargs`` hold real, meta or `MetaTensor`
    tensors.
    ``mode`` is ``"train"`` (forward, loss, backward, optimizer) or ``"infer"``. ``loss_fn(output)`` gives a scalar; by
    default
    ``output.loss`` where there is one, else the sum of the floating outputs. ``optimizer`` is a callable
    ``params -> torch.optim.Optimizer`` or one of ``sgd momentum adam adamw adamw_fused``. ``autocast`` is a dtype.
    ``step(model, optimizer, *args, **kwargs)`` replaces the built-in training step. ``profilers`` adds to, or by name
    replaces, the default ones.

    Bytes are exact integers; FLOPs count a multiply-add as two.
    Raises InputError for arguments that cannot be used, UnknownDeviceError, UnsupportedOperatorError and
    DataDependentError (see `analyzer.errors`), and whatever the model itself raises.

    >>> import torch
    >>> p = profile(torch.nn.Linear(1024, 4096), args=(torch.rand(8, 1024),), mode="infer", device="a100")
    >>> p.params, p.param_bytes, p.fwd_flops
    (4198400, 16793600, 67108864)

    Weight, bias, input and output, and the workspaces of cuBLAS (8,519,680 bytes before Hopper) and cuBLASLt (1 MiB):

    >>> p.phases["forward"].peak_allocated_bytes == 4096 * 1024 * 4 + 4096 * 4 + 8 * 1024 * 4 + 8 * 4096 * 4 + 8_519_680 + 2**20
    True
    """
    options = options or ProfileOptions()
    check_arguments(mode, autocast, options)
    spec = find_device(device)
    factory = find_optimizer(optimizer)
    claim = torch.device("cpu") if spec.kind == "cpu" else torch.device(spec.kind, 0)
    args = as_arguments(args)
    module = model if isinstance(model, torch.nn.Module) else build_model(model)
    names = argument_names(module, args, kwargs or {})
    facts: dict[str, Any] = {"name": type(uncompiled(module)).__name__, "mode": mode, "device": spec.name,
             "optimizer": optimizer if isinstance(optimizer, str) else None if factory is None else "custom",
             "autocast": None if autocast is None else str(autocast).removeprefix("torch.")}
    options, remark = limit_memory(options, spec)
    plays = reuse and step is None and options.capacity_bytes is None and options.set_to_none
    # somebody's own looks at every parameter
    reserves = plays and (mode == "infer" or factory is None or isinstance(optimizer, str))
    excluded: set[type[torch.nn.Module]] = set()

    @rare_collections()
    def run(options: ProfileOptions) -> Profile:
        meta_mode = MetaTensorMode(options, adopted_claim=claim)
        twins = find_twins(module, lambda inner: type(inner) in excluded or is_leaf(inner), pays) if reserves else ()
        wrappers = list_wrappers(module, [twin.block for twin in twins])
        with meta_mode, claiming(spec), borrow_module(module, claim, twins) as borrowed:
            if remark:
                meta_mode.state.assume(remark)
            root = borrowed.root  # a compiled module is profiled as the one it wraps
            recorder = Recorder(meta_mode, root, claim, is_leaf, find_leaf_impl, borrowed.walked)
            with torch._C.DisableTorchFunction():
                blocks = BlockReuse(recorder, root, borrow_module, is_leaf, excluded, borrowed.reserved,
                                    borrowed.lend) if plays else None
            with recorder.recording():
                try:
                    run_args, run_kwargs = stand_in_arguments(meta_mode.state, (args, dict(kwargs or {})), claim)
                    with torch._C.DisableTorchFunction():
                        register_inputs(recorder, root, borrowed, run_args, run_kwargs, names)
                        recorder.reuse = None if blocks is None else blocks.run
                    EagerStep(recorder, root, run_args, run_kwargs, mode=mode, loss_fn=loss_fn,
                              optimizer=factory if mode == "train" else None, autocast=autocast, step=step,
                              device_type=claim.type, options=options, reuse=plays,
                              parameters=borrowed.held[0] if reserves else None, lend=lambda block: None
                              if blocks is None else blocks.lend(block)).run()
                except DeviceOutOfMemoryError as error:
                    if not recorder.log.steps:
                        raise
                    recorder.end_short(error)
                except ReservedTouch as touch:
                    if blocks is not None and blocks.has_played(touch.block):
                        raise PlayedTwice(touch.block) from None
                    raise
            with torch._C.DisableTorchFunction():
                annotations = [f(recorder.log) for f in choose_profilers(profilers, spec).values()]
                return show_wrappers(
                    build_profile(recorder.log, root, annotations, is_final=True,
                                  twins={i: reserved.twin for i, reserved in borrowed.reserved.items()}, **facts),
                    wrappers)

    while True:
        try:
            return expect_values(run, options)
        except PlayedTwice as played:
            excluded.add(played.kind)
        except ReservedTouch:
            reserves = False
        except DeviceOutOfMemoryError as error:
            return build_unplaced_profile(module, error, **facts, assumptions=(remark,) if remark else ())


def expect_values(run: Callable[[ProfileOptions], Profile], options: ProfileOptions) -> Profile:
    """``run(options)``; expected contents are followed only in a second run, for a model that asks for them."""
    if options.unknown_value != "expected":
        return run(options)
    try:
        return run(replace(options, unknown_value="error"))
    except DataDependentError as error:
        try:
            return run(options)
        except (PlayedTwice, DeviceOutOfMemoryError):
            raise
        except Exception:  # what was expected leads nowhere
            raise error from None


def limit_memory(options: ProfileOptions, spec: DeviceSpec) -> tuple[ProfileOptions, str | None]:
    """``options`` with the device's memory as the capacity where they ask for it, and what was taken for granted then.

    Raises InputError where the device's memory is not known.
    """
    if not options.limit_to_device:
        return options, None
    if spec.memory_bytes is None:
        raise InputError(
            f"limit_to_device=True: the memory of {spec.name!r} is not known; give ProfileOptions(capacity_bytes=...)")
    unseen = list_unseen(spec)
    known = sum(u.bytes or 0 for u in unseen)
    remark = (f"the allocator may take {spec.memory_bytes - known:,} bytes: the memory of {spec.name}" +
              "".join(f", less {u.bytes:,} for {u.what}" if u.bytes else f" ({u.what}: unknown, not taken off)"
                      for u in unseen))
    return replace(options, limit_to_device=False, capacity_bytes=spec.memory_bytes - known), remark


def check_arguments(mode: str, autocast: Any, options: Any) -> None:
    """Raise InputError for values that no run could use."""
    if mode not in ("train", "infer"):
        raise InputError(f"mode={mode!r}: must be 'train' or 'infer'")
    if autocast is not None and not isinstance(autocast, torch.dtype):
        raise InputError(f"autocast={autocast!r}: must be a torch.dtype such as torch.bfloat16, or None")
    if not isinstance(options, ProfileOptions):
        raise InputError(f"options={options!r}: must be a ProfileOptions")
    if options.steps < 1:
        raise InputError(f"options.steps={options.steps}: at least one step is needed")


def as_arguments(args: Any) -> tuple[Any, ...]:
    """Positional arguments that were given as a tuple or a list of them, or as the only one."""
    return tuple(args) if isinstance(args, (tuple, list)) else (args,)


def build_model(factory: Any) -> torch.nn.Module:
    """Call a factory under a mode of its own. Raises InputError where it is not callable or gives no module."""
    if not callable(factory):
        raise InputError(f"model={factory!r}: must be a torch.nn.Module or a callable of no arguments that builds one")
    with MetaTensorMode():
        module = factory()
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"model: {factory!r} returned {type(module).__name__}, not a torch.nn.Module")
    return module


def argument_names(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Names of the positional arguments, as forward's signature gives them. Raises InputError where the call does not
    fit it.
    """
    try:
        signature = forward_signature(module)
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"{type(module).__name__}.forward{signature} cannot be called with {len(args)} positional arguments "
            f"and {sorted(kwargs)}: {error}") from None
    except ValueError:  # a builtin without a signature
        return [f"arg{i}" for i in range(len(args))]
    names: list[str] = []
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            names.extend(f"{name}_{i}" for i in range(len(value)))
        elif kind is not inspect.Parameter.VAR_KEYWORD:
            names.append(name)
    return names


def register_inputs(recorder: Recorder, module: torch.nn.Module, borrowed: Borrowed, args: tuple[Any, ...],
                    kwargs: dict[str, Any], names: list[str]) -> None:
    """Tell the recorder what is there before the first step."""
    attributes = [stand_in for stand_in, _ in borrowed.attributes]
    held = [(item, category) if isinstance(item, Reserved) else item
            for items, category in zip(borrowed.held, ("parameter", "buffer")) for item in items]
    recorder.register_existing([*held, *attributes])
    recorder.own_parameters_of(borrowed.by_path.values())
    recorder.mark(attributes, "buffer")
    for name, value in [*zip(names, args), *kwargs.items()]:
        for i, tensor in enumerate(tensors_in(value)):
            recorder.mark([tensor], "input", name if i == 0 else f"{name}_{i}")

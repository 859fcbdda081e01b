"""Private API of DeepSpeed, whose ZeRO runs in a world as the code that it is: what it compiles for a GPU, what it
keeps process-wide, what its optimizers hold, and its JSON configuration.
"""
from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from analyzer.errors import InputError, MissingExtraError, how_to_install
from analyzer.meta import argument as collective_hook  # whose `Collectives` is slow to import
from analyzer.meta.intercept.replacement import Undo, answer
from analyzer.meta.state import current

from .world_state import BUFFER, UNSHARDED, current_world

# What is compiled when an optimizer is made (deepspeed/ops/op_builder): its two Adams are kernels that read gradients,
# parameters and moments once and write the last three, as torch's fused one does.


def _update(gradients: list[torch.Tensor], parameters: list[torch.Tensor], means: list[torch.Tensor],
            squares: list[torch.Tensor], count: torch.Tensor) -> None:
    torch._fused_adamw_(parameters, gradients, means, squares, [], [count] * len(parameters), lr=1e-3, beta1=0.9,
                        beta2=0.999, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False)


def _update_on_device(size: int, flag: torch.Tensor, lists: list[list[torch.Tensor]], *settings: Any) -> None:
    """``multi_tensor_adam_cuda`` of csrc/adam/multi_tensor_adam.cu; the flag is in the place of torch's count."""
    gradients, parameters, means, squares = lists
    _update(gradients, parameters, means, squares, flag)


def _update_on_host(number: int, step: int, *settings_and_tensors: Any) -> None:
    """``adam_update`` of csrc/adam/cpu_adam.cpp: its last arguments are parameter, gradient and both moments."""
    parameter, gradient, mean, square = settings_and_tensors[-4:]
    _update([gradient], [parameter], [mean], [square], parameter.new_empty(()))


_OPERATORS: dict[str, Any] = {
    "fused_adam": SimpleNamespace(multi_tensor_adam=_update_on_device),
    "cpu_adam": SimpleNamespace(create_adam=lambda *settings: None, destroy_adam=lambda number: None,
                                adam_update=_update_on_host)}


def _load(builder: Any, verbose: bool = True) -> Any:
    if builder.name not in _OPERATORS:
        raise InputError(f"DeepSpeed would compile its operator {builder.name!r}, of which only "
                         f"{', '.join(_OPERATORS)} are known here: choose the optimizer Adam or AdamW, no quantized "
                         "communication, and no NVMe")
    return _OPERATORS[builder.name]


def _making(category: str) -> Callable[..., None]:
    def run(original: Any, *args: Any, **kwargs: Any) -> None:
        collectives: Any = collective_hook.impl
        with collectives.making(category):
            original(*args, **kwargs)
    return run


def _recorder() -> Any:
    return getattr(current(), "recorder", None)


def _end_backward(original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """What is left of gradients is reduced behind the backward pass."""
    with _recorder().memory.during("backward"):
        return original(engine, *args, **kwargs)


def _take_step(original: Any, engine: Any, *args: Any, **kwargs: Any) -> None:
    """An update with norms, copies and gathers around it, after which the optimizer holds all that it will."""
    recorder = _recorder()
    recorder.outer_steps += 1  # its optimizer's own step is inside
    try:
        with recorder.memory.during("optimizer"):
            original(engine, *args, **kwargs)
    finally:
        recorder.outer_steps -= 1
        recorder.memory.resume("forward")
    with torch._C.DisableTorchFunction():
        for category, tensor in list_held(engine):
            recorder.memory.mark_built([tensor], category)


def _replacements() -> Iterator[Undo]:
    engine = sys.modules["deepspeed.runtime.engine"].DeepSpeedEngine
    for name, instead in (("_backward_epilogue", _end_backward), ("allreduce_gradients", _end_backward),
                          ("_take_model_step", _take_step)):
        if hasattr(engine, name):  # the first since 0.18
            yield answer(engine, name, instead, passes_original=True, where=_recorder)
    # which of them there are was decided by the device that was there when DeepSpeed was imported
    for name, kind in (("builder", "OpBuilder"), ("cpu.no_impl", "NotImplementedBuilder")):
        if (module := sys.modules.get(f"deepspeed.ops.op_builder.{name}")) is not None:
            yield answer(getattr(module, kind), "load", _load, where=current_world)
    for name, kind, function, category in (
            ("stage_1_and_2", "DeepSpeedZeroOptimizer", "setup_buckets", BUFFER),
            ("partition_parameters", "AllGatherCoalescedHandle", "wait", UNSHARDED)):
        yield answer(getattr(sys.modules[f"deepspeed.runtime.zero.{name}"], kind), function, _making(category),
                     passes_original=True, where=current_world)


_entered: list[ExitStack] = []  # what undoes the replacements of the world, until they are made


def follow_engines() -> None:
    """Make the replacements of a world once DeepSpeed is imported, before it makes process groups."""
    if _entered and "deepspeed.runtime.engine" in sys.modules:
        undo = _entered.pop()
        for replacement in _replacements():
            undo.callback(replacement)


_STATEFUL = ("deepspeed.accelerator.real_accelerator", "deepspeed.comm.comm", "deepspeed.utils.groups")


@contextmanager
def engines_kept_aside() -> Iterator[None]:
    """A block of a world, in which DeepSpeed finds the simulated device, and no process groups yet. Afterwards what it
    keeps process-wide is as before, and so is `torch.nn.functional.linear`, in whose place stage 3 leaves its own.
    """
    before, linear = _forget(), functional.linear
    try:
        with ExitStack() as undo:
            _entered[:] = [undo]
            yield
    finally:
        _entered.clear()
        _forget()
        for name, values in before.items():
            vars(sys.modules[name]).update(values)
        if getattr(functional.linear, "__module__", "").startswith("deepspeed."):
            functional.linear = linear


def _forget() -> dict[str, dict[str, Any]]:
    """What there was of a device and its groups, by module and name; it is forgotten."""
    found: dict[str, dict[str, Any]] = {}
    for module in filter(sys.modules.__contains__, _STATEFUL):
        held = vars(sys.modules[module])
        found[module] = {name: value for name, value in held.items()
                         if name in ("ds_accelerator", "cdb", "mesh_device") or name.isupper() and "_GROUP" in name}
        held.update({name: {} if isinstance(value, dict) else None for name, value in found[module].items()})
    return found


# What an engine is, and what it holds.

def is_engine(module: nn.Module) -> bool:
    package = sys.modules.get("deepspeed.runtime.engine")
    return package is not None and isinstance(module, package.DeepSpeedEngine)


def list_held(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that the optimizer of an engine holds from the start, with their category: the copies in float32 that it
    updates count as its states, as in the paper of ZeRO (Rajbhandari et al., SC 2020, section 3.1: K = 12).
    """
    zero: Any = engine.optimizer
    inner, own = getattr(zero, "optimizer", zero), {id(p) for p in engine.module.parameters()}
    masters = [p for group in inner.param_groups for p in group["params"] if id(p) not in own]
    yield from (("optimizer state", p) for p in [*masters, *getattr(zero, "fp32_partitioned_groups_flat", ())])
    # deepspeed/runtime/zero/stage3.py; one of stage_1_and_2.py makes its buckets in the first backward pass
    if isinstance(gradients := getattr(zero, "grad_partitions_flat_buffer", None), torch.Tensor):
        yield "gradient", gradients
    for bucket in getattr(zero, "ipg_buckets", {}).values():
        held = bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
        yield from ((BUFFER, buffer) for buffer in held if isinstance(buffer, torch.Tensor))


# The file that DeepSpeed is given.

#: by the name of a setting that is "auto", of the width of a model: transformers/integrations/deepspeed.py,
#: ``trainer_config_finalize``
_OF_WIDTH: dict[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda width: width * width,
    "stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
    "stage3_param_persistence_threshold": lambda width: 10 * width}


def make_engine(model: nn.Module, config: str | Path | Mapping[str, Any],
                optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None) -> nn.Module:
    """The engine of DeepSpeed for a model in a `world`, as ``deepspeed.initialize`` makes it of a configuration: its
    JSON file, or what is in it. `profile` of the engine runs ``backward`` and ``step`` of it over
    ``gradient_accumulation_steps`` micro-batches. ``optimizer`` makes one where the configuration names none.

    What is ``"auto"`` is as transformers' trainer has it: buckets by ``model.config.hidden_size``, clipping at 1.0,
    half precision as the parameters are; the rest as if it were not said. Raises InputError for a file that is no
    JSON, for NVMe, and where no optimizer is named; MissingExtraError without DeepSpeed.
    """
    try:
        import deepspeed
    except ImportError as error:
        raise MissingExtraError(f"{_name(config)}: DeepSpeed's own code is run, and it is not installed: "
                                + how_to_install("deepspeed")) from error
    settings = read_config(config, model)
    if optimizer is None and "optimizer" not in settings:
        raise InputError(f'{_name(config)}: names no optimizer: add "optimizer": {{"type": "AdamW"}}, or give one')
    trained = [p for p in model.parameters() if p.requires_grad]
    engine: nn.Module = deepspeed.initialize(model=model, config=settings, model_parameters=trained,
                                             optimizer=None if optimizer is None else optimizer(trained))[0]
    return engine


def _name(config: str | Path | Mapping[str, Any]) -> str:
    return "the configuration of DeepSpeed" if isinstance(config, Mapping) else os.fspath(config)


def read_config(config: str | Path | Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """What a configuration says of a model, without what is "auto"; see `make_engine`."""
    try:
        text = json.dumps(config) if isinstance(config, Mapping) else Path(config).read_text(encoding="utf-8")
        found = json.loads(text)
    except (OSError, ValueError) as error:
        raise InputError(f"{_name(config)}: is no JSON file of DeepSpeed: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{_name(config)}: must hold an object, {{...}}")
    zero = found.get("zero_optimization", {})
    for name in ("offload_optimizer", "offload_param"):
        if (zero.get(name) or {}).get("device") == "nvme":
            raise InputError(f'{_name(config)}: {name} on NVMe (ZeRO-Infinity) is not modelled: give "cpu" or "none"')
    _fill_width(zero, model, _name(config))
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    for name, half in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if found.get(name, {}).get("enabled") == "auto":
            found[name]["enabled"] = dtype is half
    if found.get("gradient_clipping") == "auto":
        found["gradient_clipping"] = 1.0
    if "auto" in found.get("scheduler", {}).get("params", {}).values():
        del found["scheduler"]  # which holds no memory, and changes no time
    found = _without_auto(found)
    if not found.keys() & {"train_batch_size", "train_micro_batch_size_per_gpu"}:
        found["train_micro_batch_size_per_gpu"] = 1  # whose only use is to be compared with the other two
    return found


def _fill_width(zero: dict[str, Any], model: nn.Module, said: str) -> None:
    asked = [name for name in _OF_WIDTH if zero.get(name) == "auto"]
    config: Any = getattr(model, "config", None)
    width = getattr(config, "hidden_size", None) or getattr(getattr(config, "text_config", None), "hidden_size", None)
    if not asked:
        return
    if width is None:
        raise InputError(f'{said}: {", ".join(asked)} is "auto", and {type(model).__name__} has no config.hidden_size: '
                         "give numbers of elements")
    zero.update({name: _OF_WIDTH[name](width) for name in asked})


def _without_auto(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: _without_auto(value) if isinstance(value, dict) else value for name, value in tree.items()
            if value != "auto"}

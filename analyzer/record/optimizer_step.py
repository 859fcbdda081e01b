"""Private torch API: whether an optimizer's step is torch's own code and nothing else."""
from __future__ import annotations

import gc
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import optimizer as _module

from analyzer.output import hold_over_forks

# Optimizers whose code is known: what they do to a parameter depends on its specs and its group's settings, never on
# its size or on other parameters, and within a step no tensor changes its shape or gets another storage.
TORCHS_OWN = frozenset({
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax, torch.optim.AdamW,
    torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD})


_lock = threading.Lock()
hold_over_forks(_lock)
_observers: tuple[tuple[Callable[..., None], Callable[..., None], Callable[..., Any]], ...] = ()  #: never changed
_handles: list[Any] = []


@contextmanager
def observed_steps(before: Callable[..., None], after: Callable[..., None],
                   around: Callable[[Any], Any] = lambda closure: closure) -> Iterator[None]:
    """Calls ``before`` and ``after`` every step of any optimizer in any thread, with the optimizer, and lets it call
    what ``around`` makes of the closure that a step is given.

    One pair of torch's global hooks serves all observers: torch fails where another thread adds one during a step.
    """
    global _observers
    own = before, after, around
    try:
        with _lock:
            _observers += own,
            if not _handles:
                _handles.append(_module.register_optimizer_step_pre_hook(_before_step))
                _handles.append(_module.register_optimizer_step_post_hook(_after_step))
        yield
    finally:
        with _lock:
            _observers = tuple([other for other in _observers if other is not own])
            while _handles and not _observers:
                _handles.pop().remove()


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What runs before a step; the arguments to call it with instead, where it is given a closure."""
    for before, _, _ in _observers:
        before(optimizer)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return None
    for *_, around in _observers:
        closure = around(closure)
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for observer in _observers:
        observer[1](optimizer)


def list_optimizers() -> list[torch.optim.Optimizer]:
    """Those that there are, wrappers around others too."""
    kinds: set[type[torch.optim.Optimizer]] = {torch.optim.Optimizer}
    waiting = list(kinds)
    while waiting:
        waiting = [kind for parent in waiting for kind in parent.__subclasses__() if kind not in kinds]
        kinds.update(waiting)
    # of a million objects each, the class is looked up, which is faster than to ask whether it is a subclass
    return [thing for thing in gc.get_objects() if type(thing) in kinds and getattr(thing, "param_groups", None)]


def begin_compiled(optimizer: torch.optim.Optimizer) -> None:
    """What Dynamo does to an optimizer before it compiles its step, ``OptimizerVariable`` in
    ``torch/_dynamo/variables/optimizer.py``: steps are counted on the accelerator where nothing was counted yet, and
    states are made outside of the graph.
    """
    make = getattr(optimizer, "_init_group", None)
    for group in optimizer.param_groups if make is not None else ():
        held = group["params"]
        if "capturable" in group and all(p.is_cuda and p not in optimizer.state for p in held):
            group["capturable"] = True
        lists: list[list[Any]] = [[] for _ in list(inspect.signature(make).parameters)[1:]]  # type: ignore[arg-type]
        with torch.no_grad():
            make(group, *lists)  # type: ignore[misc]


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks run before or after its step, besides those of `observed_steps`."""
    own = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    return own + len(_module._global_optimizer_pre_hooks) + len(_module._global_optimizer_post_hooks) > len(_handles)


def takes_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def describe_history(optimizer: torch.optim.LBFGS) -> str | None:
    """A sentence on what it does not hold yet; None where it holds all that it ever will."""
    group = optimizer.param_groups[0]
    held, most = len(optimizer.state[group["params"][0]].get("old_dirs") or ()), group["history_size"]
    return None if held >= most else (
        f"LBFGS: after these steps it holds {held} pairs of vectors, of which its history_size allows {most}: in the "
        f"end it holds up to {2 * (most - held)} times the trained parameters more; run more steps to see it")


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def is_updated_in_backward(parameter: torch.Tensor) -> bool:
    """Whether `torch.distributed.optim` steps optimizers of it by a hook on its autograd node, not on itself."""
    return "_in_backward_optimizers" in parameter.__dict__


def share_gradient_hooks(original: torch.Tensor, other: torch.Tensor) -> list[dict[int, Any]]:
    """Let the hooks of ``original`` run with the gradient of ``other`` too; the dictionaries that both now have."""
    names = [name for name in ("_backward_hooks", "_post_accumulate_grad_hooks") if getattr(original, name, None)]
    with torch._C.DisableTorchFunctionSubclass():
        for name in names:
            setattr(other, name, getattr(original, name))
    return [getattr(original, name) for name in names]

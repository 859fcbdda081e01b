"""What a graph module holds, and errors of a forward told with their place."""
from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from analyzer.errors import AnalyzerError, InputError
from analyzer.fx.module_borrow import Borrowed, uncompiled
from analyzer.meta.source_line import is_user_code

from .function_call import HeldModule
from .tape import Tape

# Errors of a forward, told with the module, the line and the arguments that they came from.

Tensor = torch.Tensor


def _place(error: BaseException, tape: Tape) -> str:
    """Where in the user's code an error came up."""
    line = None
    frame: types.TracebackType | None = error.__traceback__
    while frame is not None:
        if is_user_code(frame.tb_frame.f_code.co_filename):
            line = f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
        frame = frame.tb_next
    path, kind = tape.failed_in or ("", "")
    module = f"module {path!r} ({kind.rpartition('.')[2]})" if path else "the root module"
    return f"in {module}" + (f" at {line}" if line else "")


def _describe(meta_args: Mapping[str, Any]) -> str:
    def text(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return type(value).__name__

    return ", ".join(f"{name}={text(value)}" for name, value in meta_args.items()) or "no arguments"


def locate(error: AnalyzerError, tape: Tape, meta_args: Mapping[str, Any]) -> AnalyzerError:
    """An error of this package's, with the place added."""
    return type(error)(f"{error}\nWhile tracing with {_describe(meta_args)}, {_place(error, tape)}.")


def wrap(error: Exception, tape: Tape, meta_args: Mapping[str, Any]) -> InputError:
    """An error of torch's or of the model's: the arguments do not fit it, or it cannot run with them."""
    return InputError(
        f"forward failed {_place(error, tape)}, traced with {_describe(meta_args)}: {type(error).__name__}: {error}")


# What a graph module holds: the modules and tensors that its graph names, at the paths of the original.

def collect_contents(tape: Tape, borrowed: Borrowed) -> dict[str, Any]:
    """What the graph module holds, by path: modules, original tensors and constants."""
    originals = {path: original for group in (borrowed.parameters, borrowed.buffers) for path, _, original in group}
    targets = {n.target: None for n in tape.graph.nodes if n.op in ("call_module", "get_attr")}
    contents: dict[str, Any] = {}
    for target in targets:
        held = tape.constants.get(target, originals.get(target))
        contents[target] = borrowed.by_path[target] if held is None else held
    # code of the root may use whatever the root has
    if any(isinstance(held, HeldModule) for held in contents.values()):
        contents.update({name: child for name, child in borrowed.root._modules.items() if child is not None})
        contents.update({path: original for path, original in originals.items() if "." not in path})
    return contents


def build_skeleton(root: nn.Module, contents: dict[str, Any]) -> nn.Module:
    """A module that holds ``contents`` at their paths, in bare modules with the training flags of the originals."""
    top = nn.Module()
    top.training = root.training
    whole = {path for path, value in contents.items() if isinstance(value, nn.Module)}
    for path in sorted(contents, key=lambda p: p.count(".")):
        *owners, name = path.split(".")
        if any(".".join(owners[:i]) in whole for i in range(1, len(owners) + 1)):
            continue  # comes with a module that is there as a whole
        owner, source = top, root
        for part in owners:
            source = source._modules.get(part, source) or source
            if part not in owner._modules:
                owner._modules[part] = nn.Module()
                owner._modules[part].training = uncompiled(source).training  # type: ignore[union-attr]
            source = uncompiled(source)
            owner = owner._modules[part]  # type: ignore[assignment]
        _hold(owner, name, contents[path], source)
    return top


def _hold(owner: nn.Module, name: str, value: Any, source: nn.Module) -> None:
    if isinstance(value, nn.Module):
        owner._modules[name] = value
    elif isinstance(value, nn.Parameter):
        owner._parameters[name] = value
    elif isinstance(value, Tensor):
        owner._buffers[name] = value
        if name.startswith("_tensor_constant") or name in source._non_persistent_buffers_set:
            owner._non_persistent_buffers_set.add(name)
    else:
        object.__setattr__(owner, name, value)

"""What a graph module holds, what a forward put in the place of it, and errors of a forward told with their place."""
from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from analyzer.errors import AnalyzerError, InputError
from analyzer.fx.module_borrow import Borrowed, uncompiled
from analyzer.meta.source_line import is_user_code
from analyzer.meta.structure import tensors_of

from .function_call import HeldModule
from .input_check import name_spec
from .tape import Tape

Tensor = torch.Tensor


def locate(error: Exception, tape: Tape, meta_args: Mapping[str, Any]) -> AnalyzerError:
    """An error of a forward with the module, the line and the arguments that it came from; one that is torch's or the
    model's own says that the arguments do not fit it, or that it cannot run with them.
    """
    line = ""
    frame: types.TracebackType | None = error.__traceback__
    while frame is not None:
        if is_user_code(frame.tb_frame.f_code.co_filename):
            line = f" at {frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
        frame = frame.tb_next
    path, kind = tape.failed_in or ("", "")
    module = f"module {path!r} ({kind.rpartition('.')[2]})" if path else "the root module"
    place = f"in {module}{line}"
    given = ", ".join(f"{name}={name_spec(v.shape, v.dtype) if isinstance(v, Tensor) else type(v).__name__}"
                      for name, v in meta_args.items()) or "no arguments"
    if isinstance(error, AnalyzerError):
        return type(error)(f"{error}\nWhile tracing with {given}, {place}.")
    return InputError(f"forward failed {place}, traced with {given}: {type(error).__name__}: {error}")


class Assignments:
    """What the modules of ``borrowed`` and the arguments of forward, by name, hold when it begins, for `write` when it
    ends.
    """

    def __init__(self, borrowed: Borrowed, arguments: Mapping[str, Any]) -> None:
        self.borrowed, self.arguments = borrowed, arguments
        self.before = self._list_held()
        self.given = {name: list(tensors_of(value)) for name, value in arguments.items()}

    def _list_held(self) -> dict[tuple[str, str], Any]:
        """Tensors and modules by (path of the module, name), attributes first, without those of TorchScript."""
        return {(path, name): value for path, module in self.borrowed.walked
                if not isinstance(module, torch.jit.ScriptModule)
                for held in (vars(module), module._parameters, module._buffers, module._modules)
                for name, value in held.items() if isinstance(value, (Tensor, nn.Module))}

    def write(self, tape: Tape, result: Any) -> frozenset[int]:
        """Let the graph give the buffers that were replaced their new contents; the ids of the old ones.

        It sets nothing else, and the assumptions say so. ``result`` is what the forward returns.
        """
        now, named = self._list_held(), {path: fake for path, fake, _ in self.borrowed.buffers}
        replaced: list[tuple[Tensor, Tensor]] = []
        for place in {**self.before, **now}:
            value = now.get(place)
            is_new = isinstance(value, Tensor) and self.borrowed.original_of(value) is None
            if value is self.before.get(place) or is_new and tape.find(value) is None:
                continue  # as it was, or set by what is one node
            name = ".".join(filter(None, place))
            fake = named.get(name)
            is_recorded = is_new or not tape.outlined
            if (isinstance(value, Tensor) and fake is not None and is_recorded
                    and sum(held is fake for held in self.before.values()) == 1):
                replaced.append((fake, value))
                continue
            what = "another module" if isinstance(value, nn.Module) else "None"
            if isinstance(value, Tensor):
                what = "a tensor, which is not a registered buffer of that name alone"
            tape.state.assume(f"forward sets {name} to {what}: the graph does not set it")
        for name, given in self.given.items():
            if list(map(id, tensors_of(self.arguments[name]))) != list(map(id, given)):
                tape.state.assume(f"forward puts other tensors into {name}, a container or an object that it is given: "
                                  "the graph does not")
        old = frozenset(id(fake) for fake, _ in replaced)
        targets = [tape.node_of(fake) for fake, _ in replaced]
        for tensor in tensors_of(([value for _, value in replaced], result)):
            if id(tensor) in old:  # the buffer itself, which is about to have other contents
                tape.map(tensor, tape.call_method("view_as", *[tape.node_of(tensor)] * 2))
        for target, value in zip(targets, [tape.node_of(value) for _, value in replaced]):
            tape.call(assign_buffer, target, value)
        return old


def assign_buffer(buffer: Tensor, value: Tensor) -> None:
    """Give ``buffer`` the contents of ``value``, whatever its shape, keeping its identity."""
    buffer.data = value.detach()


def collect_contents(tape: Tape, borrowed: Borrowed) -> dict[str, Any]:
    """What the graph module holds, by path: modules, original tensors and constants."""
    originals = {path: original for group in (borrowed.parameters, borrowed.buffers) for path, _, original in group}
    contents: dict[str, Any] = {}
    for target in dict.fromkeys(n.target for n in tape.graph.nodes if n.op in ("call_module", "get_attr")):
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
        owner: Any = top
        source: Any = root
        for part in owners:
            source = uncompiled(source._modules.get(part, source) or source)
            if part not in owner._modules:
                owner._modules[part] = nn.Module()
                owner._modules[part].training = source.training
            owner = owner._modules[part]
        value = contents[path]
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
    return top

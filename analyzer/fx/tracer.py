"""`symbolic_trace`: from a module to a graph."""
from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter
from typing import Any

import torch
from torch import nn

from analyzer.errors import AnalyzerError, InputError
from analyzer.meta.mode import MetaTensorMode
from analyzer.meta.mode_stack import without_modes
from analyzer.meta.options import MetaOptions
from analyzer.meta.source_line import is_user_code
from analyzer.meta.state import current

from .binding import Bound, bind_arguments
from .codegen import RegionCodeGen
from .graph_module import GraphModule
from .input_check import expectations
from .module_borrow import Borrowed, borrow_module, uncompiled
from .structure import replace_tensors, tensors_of
from .tape import Tape
from .tracing_patch import tracing_patches

Tensor = torch.Tensor
_LITERALS = (bool, int, float, str, type(None), torch.dtype)


def symbolic_trace(root: nn.Module | Callable[..., Any], concrete_args: Mapping[str, Any] | None = None,
                   meta_args: Mapping[str, Any] | None = None, trace_act_ckpt: bool = False,
                   bias_addition_split: bool = False) -> GraphModule:
    """Trace ``root`` into a graph module that shares its parameters and buffers and gives its results.

    ``root``'s own code runs once, on tensors without data, and every torch function that it calls becomes a node; so control flow,
    shapes and containers are what they are in Python, and constants of the graph. ``meta_args`` maps argument names to tensors (with
    or without data; of any device), also nested in containers, dataclasses and objects; ``concrete_args`` maps names to constants.
    For ``*args`` give a tuple under its name; names that forward does not list go to its ``**kwargs``.

    With ``trace_act_ckpt`` the code of the graph uses ``torch.utils.checkpoint`` where ``root`` does; without, such nodes are only
    annotated. With ``bias_addition_split``, the bias of linear and convolution layers is added by a node of its own.

    Raises InputError for arguments that do not fit, and where forward fails for them (with module and line), DataDependentError where
    forward asks for contents that only data could give, UnsupportedOperatorError for an operator without a shape.

    >>> gm = symbolic_trace(nn.Sequential(nn.Linear(4, 2), nn.ReLU()), meta_args={"input": torch.empty(3, 4, device="meta")})
    >>> [(node.op, node.target) for node in gm.graph.nodes]
    [('placeholder', 'input'), ('call_module', '0'), ('call_module', '1'), ('output', 'output')]
    >>> gm(torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """
    module = uncompiled(root) if isinstance(root, nn.Module) else _FunctionModule(root)
    bound = bind_arguments(module.forward, meta_args or {}, concrete_args or {})
    outer = current()
    mode = MetaTensorMode(MetaOptions() if outer is None else outer.options)
    with _torch_state(), mode, borrow_module(module) as borrowed, tracing_patches(), _eager_compiled_functions():
        tape = Tape(mode.state, borrowed, trace_act_ckpt, bias_addition_split)
        values = _stand_in(bound, borrowed)
        _write_placeholders(tape, bound, values)
        args, kwargs = bound.call_arguments(values)
        mode.state.tape = tape
        try:
            result = module(*args, **kwargs)
        except AnalyzerError as error:
            raise _located(error, tape, meta_args or {}) from error
        except Exception as error:
            raise _failure(error, tape, meta_args or {}) from error
        finally:
            mode.state.tape = None
        _write_assignments(tape, borrowed)
        tape.output(result)
        assumptions = list(mode.state.assumptions)
        contents = _contents(tape, borrowed)
    tape.graph.set_codegen(RegionCodeGen(p.name for p in bound.parameters if p.kind is Parameter.KEYWORD_ONLY))
    skeleton = _skeleton(module, borrowed, contents)
    gm = GraphModule(skeleton, tape.graph, _class_name(root))
    gm.meta["assumptions"] = assumptions
    gm.expect([(p.name, p.kind) for p in bound.parameters], [e for p in bound.parameters for e in _expected(p, bound)])
    return gm


class _FunctionModule(nn.Module):
    """A function as a module without tensors of its own."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        if not callable(function):
            raise InputError(f"root must be a module or a function, got {function!r}")
        self.forward = function


def _class_name(root: Any) -> str:
    name = type(root).__name__ if isinstance(root, nn.Module) else getattr(root, "__name__", "function")
    return name if name.isidentifier() else "GraphModule"


def _stand_in(bound: Bound, borrowed: Borrowed) -> dict[str, Any]:
    """The given values with every tensor replaced by one without data."""
    with without_modes():
        return {name: replace_tensors(value, lambda t: borrowed.stand_ins.make(t, readable=True)) for name, value in bound.given.items()}


def _write_placeholders(tape: Tape, bound: Bound, values: dict[str, Any]) -> None:
    for p in bound.parameters:
        if p.kind is Parameter.VAR_POSITIONAL:
            tape.placeholder("*" + p.name, (), values.get(p.name, ()))
        elif p.kind is Parameter.VAR_KEYWORD:
            tape.placeholder("**" + p.name, (), values.get(p.name, {}))
        else:
            tape.placeholder(p.name, _default(p, values), values.get(p.name))


def _default(p: Parameter, values: dict[str, Any]) -> tuple[Any, ...]:
    """The default in the generated signature: that of forward, or the constant that was given."""
    value = values.get(p.name, p.default)
    if isinstance(value, _LITERALS):
        return (value,)
    if p.default is Parameter.empty and next(tensors_of(value), None) is not None:
        return ()
    return (None,)


def _expected(p: Parameter, bound: Bound) -> list[Any]:
    if p.name in bound.given:
        value = bound.given[p.name]
    elif p.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
        return []
    else:
        value = p.default
    return expectations(p.name, value)


def _write_assignments(tape: Tape, borrowed: Borrowed) -> None:
    """Buffers that forward replaced; other attributes that it set are not part of the graph."""
    replaced = set()
    for path, stand_in, _ in borrowed.buffers:
        owner, _, name = path.rpartition(".")
        now = borrowed.root.get_submodule(owner)._buffers.get(name)
        if isinstance(now, Tensor) and now is not stand_in and tape.has_node(now):
            tape.assign_buffer(stand_in, now)
            replaced.add(path)
    for owner, name, value in borrowed.assigned():
        path = f"{owner}.{name}" if owner else name
        if path in replaced or not tape.has_node(value):
            continue
        tape.state.assume(f"forward sets {path} to a tensor, which is not a registered buffer: "
                          f"the graph does not set it")


def _contents(tape: Tape, borrowed: Borrowed) -> dict[str, Any]:
    """What the graph module holds, by path: modules, original tensors and constants."""
    originals = {path: original for group in (borrowed.parameters, borrowed.buffers) for path, _, original in group}
    modules = {path: m for path, m in borrowed.root.named_modules()}
    targets = {n.target: None for n in tape.graph.nodes if n.op in ("call_module", "get_attr")}
    contents: dict[str, Any] = {}
    for target in targets:
        held = tape.constants.get(target, originals.get(target))
        contents[target] = modules[target] if held is None else held
    return contents


def _skeleton(root: nn.Module, borrowed: Borrowed, contents: dict[str, Any]) -> nn.Module:
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


# -- failures ----------------------------------------------------------------------------------------------------


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


def _located(error: AnalyzerError, tape: Tape, meta_args: Mapping[str, Any]) -> AnalyzerError:
    return type(error)(f"{error}\nWhile tracing with {_describe(meta_args)}, {_place(error, tape)}.")


def _failure(error: Exception, tape: Tape, meta_args: Mapping[str, Any]) -> InputError:
    return InputError(f"forward failed {_place(error, tape)}, traced with {_describe(meta_args)}: {type(error).__name__}: {error}")


# -- torch's own state -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _torch_state() -> Iterator[None]:
    """Put grad mode and default dtype back as they were, whatever a forward sets."""
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)


@contextlib.contextmanager
def _eager_compiled_functions() -> Iterator[None]:
    """Let functions under torch.compile run as they are written."""
    if "torch._dynamo.eval_frame" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield

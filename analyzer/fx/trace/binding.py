"""A user's arguments bound to what a forward takes."""
from __future__ import annotations

import difflib
import inspect
import itertools
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, NamedTuple

from analyzer.errors import InputError
from analyzer.meta.structure import holds_tensor


class Bound(NamedTuple):
    """Values of the parameters of a forward, in its order; ``given`` are those that have one."""

    parameters: list[Parameter]
    given: dict[str, Any]

    def name_in_graph(self, p: Parameter) -> str:
        """The name of a parameter in generated code, where ``self`` is the graph module."""
        taken = {q.name for q in self.parameters}
        return next(f"self_{i}" for i in itertools.count(1) if f"self_{i}" not in taken) if p.name == "self" else p.name

    def value_of(self, p: Parameter) -> Any:
        """What a parameter has: what was given, or its default."""
        empty: dict[Any, Any] = {Parameter.VAR_POSITIONAL: (), Parameter.VAR_KEYWORD: {}}
        return self.given.get(p.name, empty.get(p.kind, p.default))

    def call_arguments(self, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``values`` (by parameter name) as positional and keyword arguments."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        by_position = True
        for p in self.parameters:
            if p.kind is Parameter.VAR_POSITIONAL:
                args.extend(values.get(p.name, ()))
                by_position = False
            elif p.kind is Parameter.VAR_KEYWORD:
                kwargs.update(values.get(p.name, {}))
            elif p.name not in values:
                by_position = False
            elif by_position and p.kind is not Parameter.KEYWORD_ONLY:
                args.append(values[p.name])
            else:
                kwargs[p.name] = values[p.name]
        return tuple(args), kwargs


def bind_arguments(forward: Callable[..., Any], meta_args: Mapping[str, Any], concrete_args: Mapping[str,
                                                                                                     Any]) -> Bound:
    """Which parameter gets which value; names that a ``**kwargs`` parameter takes are gathered under its name.

    Raises InputError for a name that forward does not take, a name given twice, a required argument without a value,
    and a value in ``meta_args`` without any tensor.
    """
    parameters = list(inspect.signature(forward).parameters.values())
    by_name = {p.name: p for p in parameters}
    rest = next((p.name for p in parameters if p.kind is Parameter.VAR_KEYWORD), None)
    given: dict[str, Any] = {}
    for source, values in (("meta_args", meta_args), ("concrete_args", concrete_args)):
        if not isinstance(values, Mapping):
            raise InputError(f"{source} must be a dict from argument names to values, got {type(values).__name__}")
        for name, value in values.items():
            if source == "meta_args" and value is not None and not holds_tensor(value):
                raise InputError(f"meta_args[{name!r}] = {value!r:.80} holds no tensor; give one, for instance "
                                 "torch.empty(..., device='meta'), or pass a constant in concrete_args")
            target = given
            if name not in by_name or name == rest and not isinstance(value, Mapping):
                if rest is None:
                    raise InputError(_unknown(source, name, parameters))
                target = given.setdefault(rest, {})
            if name in target:
                raise InputError(f"{name!r} is in meta_args and in concrete_args; give it once")
            target[name] = dict(value) if name == rest else value
    for p in parameters:
        if p.kind is Parameter.VAR_POSITIONAL and not isinstance(given.get(p.name, ()), (tuple, list)):
            raise InputError(
                f"meta_args[{p.name!r}]: forward takes *{p.name}, so give a tuple, got {type(given[p.name]).__name__}")
    missing = [p.name for p in parameters if p.default is Parameter.empty and p.name not in given
               and p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
    if missing:
        raise InputError(f"no value for {', '.join(map(repr, missing))}; forward takes {_names(parameters)}. "
                         f"Put tensors into meta_args and constants into concrete_args")
    varargs = next((i for i, p in enumerate(parameters) if p.kind is Parameter.VAR_POSITIONAL), None)
    if varargs is not None and given.get(parameters[varargs].name):
        for p in parameters[:varargs]:
            given.setdefault(p.name, p.default)  # values of *args can only follow all of these
    return Bound(parameters, given)


def _unknown(source: str, name: str, parameters: list[Parameter]) -> str:
    close = difflib.get_close_matches(name, [p.name for p in parameters], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"{source}[{name!r}]: forward takes no such argument{hint} It takes {_names(parameters)}"


def _names(parameters: list[Parameter]) -> str:
    marks: dict[Any, str] = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}
    return ", ".join(f"{marks.get(p.kind, '')}{p.name}" for p in parameters) or "no arguments"

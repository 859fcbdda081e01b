"""Why a forward cannot be called with what it is given."""
from __future__ import annotations

import inspect
from typing import Any

import torch


def explain_call(name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any],
                 error: TypeError) -> str:
    """Why ``name``, a forward of that signature, cannot be called so, and what to give besides.

    >>> signature = inspect.signature(lambda ids, labels: None)
    >>> print(explain_call("forward", signature, (torch.ones(32, 256),), {}, TypeError()))
    forward(ids, labels) needs labels too; give it, e.g. --input labels=int64:32 on the command line
    """
    try:
        given = signature.bind_partial(*args, **kwargs).arguments
        lacking = [p.name for p in signature.parameters.values() if p.name not in given and p.default is p.empty
                   and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    except TypeError:  # too many, or one of no such name
        said = ", ".join([*[f"{len(args)} by position"] * bool(args), *sorted(kwargs)])
        return f"{name}{signature} cannot be called with {said}: {error}"
    batch = next((str(len(t)) for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.ndim), "SIZES")
    inputs = " ".join(f"--input {name}=int64:{batch}" for name in lacking)
    return f"{name}{signature} needs {', '.join(lacking)} too; give it, e.g. {inputs} on the command line"

"""References to other values in a configuration, as OmegaConf has them: torchtune, NeMo RL, verl."""
from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..options import Options

_DEEPEST = 8  # references that name each other


def resolve_references(options: Options) -> None:
    """Put in the place of references the values that they name, of all layers together."""
    whole: Any = {}
    for _, values in options.layers:
        whole = _merge(whole, values)
    options.layers = [(document, fill_in(values, whole)) for document, values in options.layers]


def _merge(below: Any, above: Any) -> Any:
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    return {name: _merge(below.get(name), above[name]) if name in above else below[name] for name in {**below, **above}}


def fill_in(value: Any, whole: Any, keys: tuple[str, ...] = ()) -> Any:
    """A value with its references filled in: ``${a.b}``, ``${.b}`` of the same mapping, ``${oc.select:a.b,1}`` with a
    value in its place, ``${mul:a,b}``; None where nothing is there.

    >>> fill_in({"a": {"b": 4}, "c": "${mul:${a.b}, 2}"}, {"a": {"b": 4}})["c"]
    8
    """
    if isinstance(value, Mapping):
        return {name: fill_in(inner, whole, (*keys, name)) for name, inner in value.items()}
    if not isinstance(value, str) or not re.fullmatch(r"\$\{.*\}", value):
        return value
    return _resolve(value, whole, keys, 0)


def _resolve(text: Any, whole: Any, keys: tuple[str, ...], depth: int) -> Any:
    if not isinstance(text, str) or depth > _DEEPEST:
        return text
    text = text.strip()
    if not text.startswith("${"):
        return int(text) if re.fullmatch(r"-?\d+", text) else text
    inner = text[2:-1]
    if inner.startswith("mul:"):
        numbers = [_resolve(part, whole, keys, depth + 1) for part in _split(inner[4:])]
        known = all(isinstance(number, (int, float)) for number in numbers) and len(numbers) == 2
        return numbers[0] * numbers[1] if known else None
    usual: Any = None
    if inner.startswith("oc.select:"):
        inner, _, rest = inner[10:].partition(",")
        usual = {"null": None, "true": True, "false": False}.get(rest.strip(), rest.strip() or None)
    path = (*keys[:-1], inner[1:]) if inner.startswith(".") else tuple(inner.split("."))
    found = whole
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return _resolve(usual if found is None else found, whole, path, depth + 1)


def _split(text: str) -> list[str]:
    """Parts between commas that are in no braces."""
    depth, parts = 0, [""]
    for letter in text:
        depth += (letter == "{") - (letter == "}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts

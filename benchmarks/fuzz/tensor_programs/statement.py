"""What a statement of a random program may be: templates, of which those that torch refuses are left out when drawn.

They stand in statements.txt, of one line divided by `` ; ``, whole statements by ``---``. ``{a} {b} {c}`` are tensors
of floating point, ``{i}`` of integers, ``{m}`` of booleans; ``{d} {e}`` dimensions of ``{a}``, ``{n}`` a small number,
``{o}`` and ``{p}`` new names, ``{L}`` a new attribute, ``{M}`` a module that was made before, ``{s}`` the sizes of
``{a}``.
"""
from __future__ import annotations

import re
from pathlib import Path

_TEXT = Path(__file__).with_name("statements.txt").read_text("utf-8")
_TEXTS = dict(re.findall(r"^== (\w+)\n(.*?)\n(?=\n== |\Z)", _TEXT, re.MULTILINE | re.DOTALL))


def _split(name: str) -> list[str]:
    return [template for line in _TEXTS[name].splitlines() for template in line.split(" ; ")]


VIEWS, POINTWISE, REDUCTIONS, PRODUCTS, ARRANGEMENTS, CASTS, INTEGERS, BOOLEANS, WRITES = map(_split, (
    "VIEWS", "POINTWISE", "REDUCTIONS", "PRODUCTS", "ARRANGEMENTS", "CASTS", "INTEGERS", "BOOLEANS", "WRITES"))
#: (a statement of ``__init__``, the call); a layer fits where the sizes do
LAYERS = [tuple(layer.split(" | ")) for layer in _split("LAYERS")]
#: whole statements, of several lines or in a region
BLOCKS = _TEXTS["BLOCKS"].split("\n---\n")
#: what a statement of ``__init__`` does to a module ``{M}`` that was made
SETTINGS = _split("SETTINGS")

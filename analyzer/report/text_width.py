"""Text in the columns of a terminal: how many it takes, and what is shown of it where there are fewer."""
from __future__ import annotations

import re
import unicodedata

_STEERING = ("Cc", "Cf", "Cs", "Zl", "Zp")  # Unicode's categories of controls, formats, surrogates and breaks
_CODE = re.compile(r"\x1b\[\d+m")
_CUT = "..."  # an ellipsis that each encoding has, of the same width in all


def escape_controls(text: str) -> str:
    r"""``text`` without what would steer a terminal: control characters but line breaks and tabs are written out.

    >>> print(escape_controls("conv\x1b[2J"), escape_controls("a\u202eb"))
    conv\x1b[2J a\u202eb
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" or unicodedata.category(c) not in _STEERING else
                   c.encode("unicode_escape").decode() for c in text)


def measure_width(text: str) -> int:
    r"""The columns that a line takes.

    >>> measure_width("conv1"), measure_width("\x1b[1mconv1\x1b[22m"), measure_width("\u6c34"), measure_width("e\u0301")
    (5, 5, 2, 1)
    """
    plain = _CODE.sub("", text)
    if plain.isascii():
        return len(plain)
    return sum([_measure_character(c) for c in plain])


def _measure_character(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut_middle(text: str, width: int) -> str:
    """A name in at most ``width`` columns on one line: of a longer one, its ends, of which the last says most.

    >>> cut_middle("model.layers.11.self_attention.out_proj", 24), cut_middle("conv1", 24)
    ('model.la...tion.out_proj', 'conv1')
    """
    text = clean(text)
    if measure_width(text) <= width:
        return text
    first = (width - len(_CUT)) * 2 // 5
    return _take(text, first) + _CUT + _take(text[::-1], width - len(_CUT) - first)[::-1]


def cut_start(text: str, width: int) -> str:
    """A path in at most ``width`` columns on one line: of a longer one, its end, which says most.

    >>> cut_start("model.layers.11.self_attention.out_proj", 24)
    '...lf_attention.out_proj'
    """
    text = clean(text)
    return text if measure_width(text) <= width else _CUT + _take(text[::-1], width - len(_CUT))[::-1]


def cut_end(text: str, width: int) -> str:
    """A line in at most ``width`` columns: of a longer one, its beginning.

    >>> cut_end("input_ids int64[1, 2048], labels int64[1, 2048]", 30)
    'input_ids int64[1, 2048], l...'
    """
    text = clean(text)
    return text if measure_width(text) <= width else _take(text, width - len(_CUT)) + _CUT


def _take(text: str, width: int) -> str:
    while measure_width(text) > width:
        text = text[:width] if len(text) > width else text[:-1]
    return text


def clean(text: str) -> str:
    r"""``text`` on one line, without what would steer a terminal.

    >>> print(clean("conv\n\x1b[2J"))
    conv\n\x1b[2J
    """
    return escape_controls(text).replace("\n", "\\n").replace("\t", "\\t")

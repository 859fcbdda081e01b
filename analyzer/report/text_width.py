"""Text and tables as wide as the terminal."""
from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile

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
    return sum([0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in plain])


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
    """A path in at most ``width`` columns on one line: of a longer one, its end, which says most."""
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


_STEPS = ((2, 24), (1, 16))  # gap between columns, and how narrow one of texts may become for it; the first that fits


def fit_table(table: Sequence[Sequence[str]], width: int, left: Collection[int], ends: Collection[int],
              has_total: bool = False) -> str:
    """Headings, rows and, where it ``has_total``, their total in lines of at most ``width``. Texts, the columns
    ``left``, become narrower: words are wrapped, a name is cut, in the columns ``ends`` at its start. Quantities
    do not: where they do not fit side by side, the rest of them stands below, after the same first texts.

    >>> print(fit_table([["Op", "Output size", "FLOPs"], ["layer_0", "4.00 KiB", "2.10 M"]], 25, [0], [0]))
               Output
    Op           size   FLOPs
    -------  --------  ------
    layer_0  4.00 KiB  2.10 M
    """
    table = [[clean(cell) for cell in row] for row in table]
    widths = [max(measure_width(part) for part in (*([header] if i in left else header.split()), *cells, ""))
              for i, (header, *cells) in enumerate(zip(*table))]
    every = list(range(len(widths)))
    keys = list(takewhile(lambda i: i in left, every))
    blocks, (gap, least) = [keys], _STEPS[-1]
    for i in every[len(keys):]:
        if len(blocks[-1]) > len(keys) and _sum(
                [min(widths[j], least) if j in left else widths[j] for j in (*blocks[-1], i)], gap) > width:
            blocks.append(keys)
        blocks[-1] = [*blocks[-1], i]
    return "\n\n".join("\n".join(_draw(table, block, widths, width, left, ends, has_total)) for block in blocks)


def _draw(table: Sequence[Sequence[str]], columns: Sequence[int], widths: Sequence[int], width: int,
          left: Collection[int], ends: Collection[int], has_total: bool) -> Iterator[str]:
    gap, sizes = _narrow({i: widths[i] for i in columns}, width, left)
    rule = (" " * gap).join("-" * sizes[i] for i in columns)
    for number, row in enumerate(table):
        cells = [_break(row[i], sizes[i], number == 0 or i != 0 and i in left, i in ends) for i in columns]
        height = max(map(len, cells))
        if has_total and number == len(table) - 1 and number > 1:
            yield rule
        for k in range(height):
            parts = []
            for i, lines in zip(columns, cells, strict=True):
                at = k - (height - len(lines) if number == 0 else 0)  # headings end at the rule
                text = lines[at] if 0 <= at < len(lines) else ""
                space = " " * (sizes[i] - measure_width(text))
                parts.append(text + space if i in left else space + text)
            yield (" " * gap).join(parts).rstrip()
        if number == 0:
            yield rule


def _narrow(widths: dict[int, int], width: int, left: Collection[int]) -> tuple[int, dict[int, int]]:
    for gap, least in _STEPS:
        sizes = dict(widths)
        texts = [i for i in sizes if i in left]
        while texts and _sum(sizes.values(), gap) > width:
            widest = max(texts, key=sizes.__getitem__)
            if sizes[widest] <= least:
                break
            sizes[widest] -= 1
        if _sum(sizes.values(), gap) <= width:
            break
    return gap, sizes


def _sum(widths: Collection[int], gap: int) -> int:
    return sum(widths) + gap * (len(widths) - 1)


def _break(text: str, width: int, has_words: bool, is_end: bool) -> list[str]:
    if measure_width(text) <= width:
        return [text]
    if has_words and " " in text:
        return [cut_end(line, width) for line in textwrap.wrap(text, width, break_on_hyphens=False)]
    return [cut_start(text, width) if is_end else cut_middle(text, width)]

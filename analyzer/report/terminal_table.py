"""Tables as wide as the terminal."""
from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile

from .text_width import clean, cut_end, cut_middle, cut_start, measure_width

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
    """The gap and the widths with which the columns fit, texts as narrow as need be."""
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
    """The lines of a cell."""
    if measure_width(text) <= width:
        return [text]
    if has_words and " " in text:
        return [cut_end(line, width) for line in textwrap.wrap(text, width, break_on_hyphens=False)]
    return [cut_start(text, width) if is_end else cut_middle(text, width)]

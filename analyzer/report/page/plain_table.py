"""A small table of a page, as HTML that needs no script; large ones are drawn by ``assets/grid.js``."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from analyzer.report.text_width import escape_controls


def write_table(headers: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """HTML of a table whose rows begin with their names.

    >>> write_table(("Phase", "Time"), [("<f>", "3 s")]).partition("<tbody>")[2]
    '<tr><th scope="row">&lt;f&gt;</th><td>3 s</td></tr></tbody></table></div>'
    """
    head = "".join(f'<th scope="col">{_write(text)}</th>' for text in headers)
    body = "".join(f'<tr><th scope="row">{_write(row[0])}</th>' + "".join(
        f"<td>{_write(cell)}</td>" for cell in row[1:]) + "</tr>" for row in rows)
    return f'<div class="scroll"><table class="plain"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _write(text: str) -> str:
    return escape(escape_controls(text))

"""Tables are no wider than the terminal: headings break, names are cut, columns go below; no quantity is lost."""
import io
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.cli import main
from analyzer.report.text_table import print_rows
from analyzer.report.text_width import fit_table


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Set how wide the terminal is that stdout writes to."""
    def set_width(columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("NO_COLOR", "1")
        stream = Terminal()
        monkeypatch.setattr(sys, "stdout", stream)
        return stream
    return set_width


@pytest.mark.parametrize("columns", [80])
@pytest.mark.parametrize("words", [
    ["profile", "vit_b_16", "--input", "8x3x224x224", "--show", "table,screen,modules"],
    ["profile", "resnet18", "gpt2", "--device", "t4"],
    ["profile", "vit_b_16", "--input", "8x3x224x224", "--show", "tree"],
])
def test_what_commands_print_fits(terminal, columns, words):
    stream = terminal(columns)
    assert main(words) == 0
    lines = [line for line in stream.getvalue().splitlines() if not line.startswith(("peak in ", "  (node "))]  # text
    assert max(map(len, lines)) <= columns
    assert not re.search(r"\d [KMG]b\b", stream.getvalue()), "one notation: KiB, MiB, GiB"


def test_a_heading_breaks_before_a_name_is_cut_and_a_name_before_columns_go_below(terminal):
    rows = [["call_module", "encoder_layers_encoder_layer_0_self_attention", *["1000.00 MiB"] * 4]]
    headers = ["Op type", "Op", *(f"Accumulated {i}" for i in range(4))]
    terminal(115)
    assert print_rows(headers, rows, left=(0, 1), ends=(0, 1)).splitlines()[0].split() == ["Accumulated"] * 4
    # 11 + 4 * 11 + 5 gaps of 2 leave 35 of 100 for the name
    terminal(100)
    assert print_rows(headers, rows, left=(0, 1), ends=(0, 1)).splitlines()[-1].split()[1] == (
        "..." + rows[0][1][-32:])
    terminal(80)
    assert print_rows(headers, rows, left=(0, 1), ends=(0, 1)).splitlines()[-1].split()[1] == (
        "..." + rows[0][1][-(80 - 11 - 44 - 5 - 3):]), "a gap of 1 comes before a name of less than 24"
    blocks = print_rows([*headers, "Last"], [[*rows[0], "7 B"]], left=(0, 1), ends=(0, 1)).split("\n\n")
    assert [block.splitlines()[-1].split()[0] for block in blocks] == ["call_module"] * 2
    assert [block.splitlines()[-1].split()[-2:] for block in blocks] == [["1000.00", "MiB"], ["7", "B"]]


def test_sentences_are_wrapped_and_the_first_texts_are_cut(terminal):
    terminal(80)
    said = "not known for this device; with the handles 0.50 GiB on an L40S, as its page says"
    text = print_rows(("", "Size", "Source"), [("CUDA context", "-", said)], left=(0, 2))
    assert " ".join(re.sub(r"CUDA context\s+-", "", text.split("-\n", 1)[1]).split()) == said
    assert max(map(len, text.splitlines())) <= 80


def test_simple_and_other_formats_are_as_wide_as_their_cells(terminal):
    terminal(80)
    for fmt in ("simple", "markdown", "csv"):
        assert "x" * 200 in print_rows(("Name", "Size"), [("x" * 200, "1 B")], fmt=fmt)
    assert "x" * 200 not in print_rows(("Name", "Size"), [("x" * 200, "1 B")])


NAMES = st.text("abcdef_.0123", min_size=1, max_size=60)
SIZES = st.integers(0, 2**40).map(lambda value: f"{value}.00 MiB"[-11:].lstrip("."))


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(
    st.lists(st.tuples(NAMES, NAMES, *[SIZES] * n), min_size=1, max_size=4), st.lists(NAMES, min_size=n, max_size=n))),
    st.integers(60, 130))
def test_no_line_is_wider_and_every_quantity_stands_whole(table, width):
    rows, headings = table
    headings = [heading[:20] for heading in headings]
    text = fit_table([["Op type", "Op", *headings], *rows], width, (0, 1), (1, ))
    assert all(len(line) <= width for line in text.splitlines())
    for row in rows:
        for cell in row[2:]:
            assert text.count(cell) >= sum(r[2:].count(cell) for r in rows)

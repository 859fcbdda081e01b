"""What the HTML page of a large model costs: its size, the time to write it and the time until a browser shows it.

    python -m benchmarks.page           # prints a table; two minutes
    python -m benchmarks.page --write   # and puts it into docs/performance.md

Opened in a headless chromium with a window of 1400 x 900, from the address bar to the drawn chart of memory, in wall
time, beside the page of a model of two nodes, which is the time of plotly itself.
"""
from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
from torch import nn

from analyzer import Profile, profile
from analyzer.zoo.gpt2 import GPT2

from .latency_cost import put_section
from .speed_process import ROOT
from .speed_report import say
from .speed_table import markdown

TITLE = "The HTML page"
ROUNDS = 5


def list_models() -> list[tuple[str, Profile]]:
    """Models of two, some hundred and some ten thousand nodes, each one training step."""
    ids = torch.empty(2, 128, dtype=torch.long, device="meta")

    def train(layers: int) -> Profile:
        return profile(lambda: GPT2(vocabulary=1000, hidden=64, layers=layers, heads=4), device="h100",
                       kwargs={"input_ids": ids, "labels": ids}, optimizer="adamw")

    return [("one linear layer", profile(nn.Linear(8, 8), args=(torch.empty(2, 8),), device="h100")),
            ("GPT-2, 12 layers", train(12)), ("GPT-2, 455 layers", train(455))]


def time_opening(path: Path) -> float | None:
    """Seconds until the chart of memory is drawn, the median of some rounds; None where there is no chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        return None
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        rounds = []
        for _ in range(ROUNDS):
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            start = time.perf_counter()
            page.goto(path.as_uri())
            page.wait_for_selector(".memory .main-svg")
            rounds.append(time.perf_counter() - start)
            page.close()
        browser.close()
    return statistics.median(rounds)


def measure() -> list[tuple[str, str, str, str, str]]:
    """A row for each model: nodes, seconds to write its page, megabytes, seconds to open it."""
    rows = []
    for name, found in list_models():
        nodes = len(found.nodes)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "page.html"
            start = time.process_time()
            found.to_html(path)
            written = time.process_time() - start
            opened = time_opening(path)
            rows.append((name, f"{nodes:,}", f"{written:.2f} s", f"{path.stat().st_size / 1e6:.1f} MB",
                         "-" if opened is None else f"{opened:.2f} s"))
    return rows


def describe() -> str:
    """The section of docs/performance.md."""
    text = (f"By `python -m benchmarks.page --write`, {date.today()}, torch {torch.__version__}, {os.cpu_count()} "
            "cores, no GPU: processor time to write the page of a profile whose rows were read, its size, and the "
            f"median of {ROUNDS} openings in a headless chromium, until the chart of memory is drawn. The page of one "
            "linear layer is what plotly takes, 4.8 MB of each file.")
    table = markdown(["model", "nodes", "written in", "size", "opens in"], measure())
    return f"## {TITLE}\n\n{text}\n\n{table}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the section into docs/performance.md")
    arguments = parser.parse_args()
    section = describe()
    say(section)
    if arguments.write:
        path = ROOT / "docs" / "performance.md"
        path.write_text(put_section(path.read_text(), TITLE, section))


if __name__ == "__main__":
    main()

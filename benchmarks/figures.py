"""The figures of docs/img/ that explain: how a run flows, memory over a step, what a budget for activations costs.

    python -m benchmarks.figures            # writes docs/img/*.svg; needs matplotlib, the extra [report]
    python -m benchmarks.figures page       # writes docs/img/page.png, with which the README opens; needs chromium
"""
from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch

from analyzer import profile, symbolic_trace
from analyzer.api.result import Profile
from analyzer.cli import main as run_command
from analyzer.report.page.picture import stack_categories
from analyzer.tools.solver import Planner
from analyzer.zoo import MODELS
from benchmarks.page import ROOT

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402

FOLDER = ROOT / "docs" / "img"
INK = "#808080"  # is read on white and on black
#: From below to above; what is none of these is drawn last.
CATEGORIES = {"parameter": "#4c72b0", "optimizer state": "#8172b3", "gradient": "#55a868", "activation": "#dd8452",
              "temporary": "#c44e52"}
OTHER = "#937860"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "analyzer", "svg.fonttype": "none", "font.family": "sans-serif",
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)}


def draw_flow(axes: Any) -> None:
    """From a model to what is printed: boxes in the order in which a run goes through them."""
    steps = [("model\nand inputs", "yours"), ("run once\nwithout data", "meta/ cuda/ memory/"),
             ("one log", "record/"), ("profilers", "profilers/"), ("Profile", "results/"),
             ("tables, pages,\nfiles, solvers", "report/ solver/")]
    for i, (name, rooms) in enumerate(steps):
        axes.text(i, 0.62, name, ha="center", va="center", fontsize=9,
                  bbox={"boxstyle": "round,pad=0.55", "facecolor": "none", "edgecolor": "#4c72b0"})
        axes.text(i, 0.12, rooms, ha="center", va="center", fontsize=7)
        if i:
            axes.annotate("", (i - 0.37, 0.62), (i - 0.6, 0.62), arrowprops={"arrowstyle": "->", "color": INK})
    axes.set_xlim(-0.6, len(steps) - 0.4)
    axes.set_ylim(0, 1)
    axes.axis("off")


def memory_by_category(found: Profile) -> dict[str, list[int]]:
    """Bytes of each category at each moment of the timeline of a step."""
    rows = {name: [0] * len(found.timeline) for name in (*CATEGORIES, "other")}
    for category, held in stack_categories(found.timeline, found.memory_events).items():
        name = category if category in CATEGORIES else "other"
        rows[name] = [before + nbytes for before, nbytes in zip(rows[name], held.tolist())]
    return rows


def draw_memory(axes: Any) -> None:
    """Who holds memory over the steady step of GPT-2 with AdamW, and where the phases begin."""
    tokens = torch.zeros(4, 512, dtype=torch.int64, device="meta")
    found = profile(MODELS["gpt2"].factory, (tokens,), {"labels": tokens}, optimizer="adamw", device="t4")
    rows = memory_by_category(found)
    totals = [point.allocated_bytes for point in found.timeline]
    drawn = [max(range(i, min(i + 4, len(totals))), key=totals.__getitem__) for i in range(0, len(totals), 4)]
    axes.stackplot(drawn, *([row[i] / 2**30 for i in drawn] for row in rows.values()), labels=list(rows), step="post",
                   colors=[*CATEGORIES.values(), OTHER])
    top = max(totals) / 2**30
    phases = [point.phase or "" for point in found.timeline]
    for i in (i for i in range(len(phases)) if i == 0 or phases[i] != phases[i - 1]):
        axes.axvline(i, color=INK, linewidth=0.6, linestyle=":")
        axes.text(i + 4, 1.09 * top, phases[i] if phases[i] != "zero_grad" else "", fontsize=8, va="top")
    axes.set_ylim(0, 1.1 * top)
    axes.set_xlim(0, len(phases))
    axes.set_xlabel("operator calls of the step")
    axes.set_ylabel("GiB allocated")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8, reverse=True)


def draw_frontier(axes: Any) -> None:
    """What running operators again costs, for every share of the activations' memory that is to be enough."""
    images = torch.empty(64, 3, 224, 224, device="meta")
    gm = symbolic_trace(MODELS["vit_b_16"].factory(), meta_args={"x": images})
    planner = Planner(gm, args=(images,))
    plans = [planner.solve(f"{percent}%") for percent in range(95, 25, -5)]
    most = plans[0].unplanned.peak_activation_bytes
    reached = [plan.planned.peak_activation_bytes / most for plan in plans if plan.planned is not None]
    again = [(plan.overhead or 0) / (plan.fwd_cost or 1) for plan in plans]
    axes.plot([100, *(100 * share for share in reached)], [0, *(100 * share for share in again)], color="#dd8452",
              marker="o", markersize=3)
    axes.invert_xaxis()
    axes.set_xlabel("peak of activations, % of that without a plan")
    axes.set_ylabel("run again, % of the forward FLOPs")


FIGURES: dict[str, tuple[Callable[[Any], None], tuple[float, float]]] = {
    "flow": (draw_flow, (9, 1.5)), "memory_over_a_step": (draw_memory, (9, 3.4)), "frontier": (draw_frontier, (6, 3))}


def draw(name: str, path: Path) -> None:  # write the figure of that name to a file
    function, size = FIGURES[name]
    with matplotlib.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        axes.spines[["top", "right"]].set_visible(False)
        function(axes)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


PICTURE = FOLDER / "page.png"
COMMAND = ("profile", "llama_1b", "--dtype", "bf16", "--optimizer", "adamw", "--device", "h100", "--show", "brief")


def take_picture() -> None:
    """The first screen of a page, 1280 x 860, to a PNG: of the Llama of 1.2 billion parameters that ships with the
    package, a training step with AdamW in bfloat16 on an H100.
    """
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        page = Path(folder) / "page.html"
        run_command([*COMMAND, "--html", str(page)])
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": 1280, "height": 860})
        shown.goto(page.as_uri())
        shown.wait_for_selector(".memory .main-svg")
        shown.screenshot(path=str(PICTURE))
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the figures of docs/img/.")
    parser.add_argument("names", nargs="*", default=list(FIGURES), metavar="NAME")
    for name in parser.parse_args().names:
        if name == "page":
            take_picture()
        else:
            draw(name, FOLDER / f"{name}.svg")
        print(f"docs/img/{name}", file=sys.stderr)


if __name__ == "__main__":
    main()

"""A part of docs/reliability.md: what was tried, how often, and what did not hold."""
from __future__ import annotations

import datetime
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "trust_results"


@dataclass
class Section:
    """What one kind of trial found. ``name`` is the word that `--only` takes."""

    name: str
    title: str
    text: str  #: Markdown: what was done, why it could fail, tables of what came out
    tried: dict[str, int]  #: how many of what, such as ``{"programs": 5000}``
    lost: list[str] = field(default_factory=list)  #: one sentence for each trial that did not hold
    command: str = ""
    where: str = ""
    seconds: float = 0.0


def run_section(measure: Callable[[int | None], Section], count: int | None, command: str) -> Section:
    """What `measure` finds, with the command, the day, the versions and the machine kind."""
    start = time.perf_counter()
    section = measure(count)
    section.seconds = time.perf_counter() - start
    section.command = command
    section.where = (f"{datetime.date.today():%d %B %Y}, torch {torch.__version__}, "
                     f"Python {platform.python_version()}, {os.cpu_count()} cores, {section.seconds:.0f} s")
    return section


def load_sections() -> dict[str, Section]:
    """The sections that were measured last, by name."""
    return {path.stem: Section(**json.loads(path.read_text())) for path in RESULTS.glob("*.json")}


def save_section(section: Section) -> None:
    """Keep a section beside the others, in place of the one of its name."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{section.name}.json").write_text(json.dumps(asdict(section), indent=1) + "\n")

"""What docs/solvers.md names is there, and what is exported is in it."""
import dataclasses
import functools
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import analyzer
import analyzer.fx
import analyzer.meta
from analyzer.results.node_info import NodeInfo, SavedTensorInfo

TEXT = (Path(__file__).parents[2] / "docs" / "solvers.md").read_text()
#: The middle cells of the tables with three columns: our names.
OURS = [name for cells in re.findall(r"^\| [^|]+ \| ([^|]+) \| [^|]*\|$", TEXT, re.MULTILINE)
        for name in re.findall(r"`([A-Za-z_.]+)`", cells)]
TABLES = TEXT[TEXT.index("## Coming from"):TEXT.index("## What is exported")]


def resolve(name: str) -> Any:
    if not name.startswith("analyzer."):
        name = f"analyzer.{name}"
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[i:], found)
    raise AttributeError(name)


@pytest.mark.parametrize("name", sorted(set(OURS)))
def test_each_of_our_names_exists(name: str) -> None:
    assert resolve(name) is not None, f"{name}: docs/solvers.md says that it is there"


def test_every_row_says_what_is_there_here_and_whether_it_is_the_same() -> None:
    rows = [line for line in TABLES.splitlines() if line.startswith("| `") and "| here |" not in line]
    assert len(rows) > 40 and len(OURS) > len(rows)
    for row in rows:
        there, here, verdict = re.findall(r"\| ([^|]+) (?=\|)", row)
        assert "`" in there and "`" in here, row
        assert here.startswith("`node.meta") or set(re.findall(r"`([A-Za-z_.]+)`", here)) <= set(OURS), row
        assert re.match(r"same|differs|as `", verdict), row


def test_every_field_of_the_saved_tensors_is_described() -> None:
    page = (Path(__file__).parents[2] / "docs" / "node_info.md").read_text()
    assert {field.name for field in dataclasses.fields(SavedTensorInfo)} <= set(re.findall(r"`(\w+)`", page))


@pytest.mark.parametrize("module", [analyzer, analyzer.fx, analyzer.meta], ids=lambda m: m.__name__)
def test_what_is_exported_is_shown_and_documented(module: Any) -> None:
    assert dir(module) == sorted(module.__all__)
    described = re.search(rf"^\| `{re.escape(module.__name__)}` \| (.+) \|$", TEXT, re.MULTILINE)
    assert described is not None
    named = set(re.findall(r"`(\w+)`", described[1]))
    exported = {name for name in module.__all__ if not name.startswith("__")}
    assert named - exported == set()
    assert {n for n in exported - named if not (module is analyzer and n.startswith("register_"))} == set()
    for name in module.__all__:
        value = getattr(module, name)
        assert name == "__version__" or (value.__doc__ or "").strip(), f"{name} has no docstring"


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'analyzer' has no attribute 'solved'"):
        _ = analyzer.solved


def test_annotations_are_where_the_page_says() -> None:
    x = torch.empty(2, 4, device="meta")
    gm = analyzer.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 2)), meta_args={"input": x})
    analyzer.fx.ShapeProp(gm).propagate(x)
    node = list(gm.graph.nodes)[1]
    node.meta["sharding"] = ("Shard(0)", "Replicate()")
    analyzer.symbolic_profile(gm, x)
    assert {"tensor_meta", "type", "spec", "info"} <= set(node.meta)
    assert isinstance(node.meta["info"], NodeInfo) and node.meta["info"].sharding == ("Shard(0)", "Replicate()")
    assert analyzer.Profile.from_json(gm.meta["profile"].to_json()).nodes[1].sharding == ("Shard(0)", "Replicate()")

"""Imports point one way: each room sees only the rooms before it."""
from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1] / "analyzer"
# The order of the rooms; a file may import from its own and earlier ones.
ORDER = ["errors", "registry", "deferred", "units", "hardware", "memory", "meta", "record", "fx", "profilers", "report", "profile"]
RANK = {name: i for i, name in enumerate(ORDER)}
# Files that stand between rooms.
RANK.update(input_spec=RANK["meta"], zoo=RANK["meta"], target=RANK["meta"], profile_data=RANK["profilers"], profile_build=RANK["profile"],
            profile_short=RANK["profilers"], profile_parallel=RANK["profilers"], profile_wrapper=RANK["profilers"], module_shape=RANK["profilers"],
            symbolic_profile=RANK["profile"], reprofile=RANK["profile"], progress_bar=RANK["units"],
            parallel=20, solver=20, runtime=20, generation=20, dryrun=20, sweep=20, cli=30,
            __main__=31, __init__=32)


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    if parts == ("memory", "timeline.py"):
        return "profilers"  # it reads the log
    return parts[0] if len(parts) > 1 else path.stem


def imported_rooms(path: Path, top_level_only: bool):
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            package = ["analyzer", *path.relative_to(ROOT).with_suffix("").parts]
            base = package[: len(package) - node.level] if node.level else []
            full = base + (node.module.split(".") if node.module else [])
            if full[:1] == ["analyzer"]:
                for name in [full[1]] if len(full) > 1 else [alias.name for alias in node.names]:
                    yield name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "analyzer" and len(parts) > 1:
                    yield parts[1]


def test_every_file_imports_only_from_its_own_and_earlier_rooms():
    wrong = []
    for path in ROOT.rglob("*.py"):
        room = room_of(path)
        if room == "__init__":
            continue
        for other in imported_rooms(path, top_level_only=True):
            if other != room and RANK[other] > RANK[room]:
                wrong.append(f"{path.relative_to(ROOT)} imports {other}")
    assert wrong == []


def test_every_room_has_a_place_in_the_order():
    assert {room_of(p) for p in ROOT.rglob("*.py")} <= set(RANK)

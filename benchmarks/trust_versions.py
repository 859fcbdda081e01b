"""What `make matrix` found, for docs/reliability.md. It measures nothing: that takes hours, most of them downloads."""
from __future__ import annotations

from .matrix import CORE, format_table, load_outcomes
from .trust_section import Section


def measure(count: int | None = None) -> Section:
    """The outcomes that were kept last, the first ``count``."""
    outcomes = load_outcomes()[:count]
    lost = [f"torch {one.torch}, Python {one.python}: `{name}`" for one in outcomes for name in one.failed]
    lost += [f"torch {one.torch}, Python {one.python}: {one.problem}" for one in outcomes if one.problem]
    partly = "".join(f"\nWith torch {one.torch} and Python {one.python}: `{one.tests}` alone.\n"
                     for one in outcomes if one.tests != "core" and not one.problem)
    return Section("versions", "Versions of torch and Python", f"""
The package stands on private names of torch, on counts of references to tensors and on the order in which autograd
frees them, none of which torch promises. What a version counts is learned from it at run time. The core tests
(`{"`, `".join(path.removeprefix("tests/") for path in CORE)}`)
run under each version in an environment of its own, with the torchvision that was built for it: `make matrix`, of
which this prints what was kept. Builds with CUDA (`cu`) run on a machine without a GPU. A skipped test says what of
this version or machine it lacks.

{format_table(outcomes)}
{partly}""", {"pairs of versions": len(outcomes), "tests": sum(one.passed + len(one.failed) for one in outcomes)}, lost)

"""A plan as plain data: parts of a program that run under checkpoints, what they keep, what that gives."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any, ClassVar, cast

from torch import fx

from analyzer.errors import InputError
from analyzer.report.export.json_format import read_record, write_record
from analyzer.report.page.document import Headline, Panel, Tile, headline_part, summary_part, write_page
from analyzer.report.page.notebook import fold, write_answer, write_fragment, write_picture
from analyzer.report.page.picture import draw_curves
from analyzer.report.text_table import print_rows
from analyzer.saved_format import Fields, SavedFormat
from analyzer.units import format_bytes, format_flops, format_seconds

from .plan_region import PlanRegion, apply_to_graph
from .recorded_step import FrontierPoint, PartitionedStep, StepInfo, StepMemory

_SHOWN = 20  # checkpoints in a notebook


@dataclass(frozen=True, slots=True)
class Plan:
    """What `solve` returns. ``planned`` was measured by replaying the applied plan; None if it was not.

    >>> plan = Plan("demo", 2**30, StepInfo(2**31, 2**31, fwd_flops=100), regions=(PlanRegion(("relu", "conv2")),))
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    format_version: ClassVar[int] = 6  #: of the JSON text; a change of any field below raises it

    model: str
    budget_bytes: int
    unplanned: StepInfo
    planned: StepInfo | None = None
    regions: tuple[PlanRegion, ...] = ()
    budget_of: str = "activations"      #: or "step": what ``budget_bytes`` limits
    method: str = "chain"
    objective: str = "flops"            #: or "seconds"
    device: str | None = None
    fwd_cost: float | None = None       #: of the forward pass, in units of the objective
    cost: float | None = None           #: of what is run again, by the solver's own account
    bound: float | None = None          #: no plan made of the same units costs less; None where that is not known
    assumptions: tuple[str, ...] = ()
    frontier: tuple[FrontierPoint, ...] = field(default=())
    held_bytes: int = 0                 #: held besides all along: the optimizer's states
    update_bytes: int = 0               #: everything at the peak of the optimizer's update, which no plan changes
    #: compiled steps by their budgets, up to the first within what the plan takes; see `find_memory_budget`
    partitioned: tuple[PartitionedStep, ...] = ()

    @property
    def gap(self) -> float | None:
        """By what share ``cost`` may be above the least possible; 0.0: proven optimal, None: not known."""
        if self.bound is None or self.cost is None:
            return None
        return 0.0 if self.cost <= self.bound else (self.cost - self.bound) / self.cost

    @property
    def overhead(self) -> float | None:
        """Measured: FLOPs run again, or seconds more than the step without a plan; None where that is not known."""
        if self.planned is None:
            return None
        if self.objective == "flops":
            return self.planned.recompute_flops
        before, after = self.unplanned.seconds, self.planned.seconds
        return None if before is None or after is None else after - before

    @property
    def memory_budget(self) -> float | None:
        """The ``torch._functorch.config.activation_memory_budget`` with which the compiled step takes no more than the
        plan; None where there is none, or none was sought.
        """
        last = self.partitioned[-1] if self.partitioned else None
        if last is None or self.planned is None or last.peak_bytes > self.whole_step_bytes(self.planned):
            return None
        return last.activation_memory_budget

    def whole_step_bytes(self, step: StepInfo) -> int:
        """The peak of the whole training step of which ``step`` is the forward and backward pass."""
        return step.peak_with_optimizer(self.held_bytes, self.update_bytes)

    def share_of_step(self, overhead: float | None) -> float | None:
        """``overhead`` as a share of the step's seconds without the plan, or of the FLOPs of its forward pass."""
        return None if overhead is None or not self._whole_cost else overhead / self._whole_cost

    @property
    def _whole_cost(self) -> float | None:
        return self.unplanned.seconds if self.objective == "seconds" else self.unplanned.fwd_flops

    def limited_bytes(self, step: StepInfo) -> int:
        """The peak of ``step`` that the budget limits: of its activations, or of the whole step."""
        return self.whole_step_bytes(step) if self.budget_of == "step" else step.peak_activation_bytes

    def apply(self, target: fx.GraphModule) -> fx.GraphModule:
        """``target``, the traced graph or one with the same node names, with the plan in it: a new one that shares its
        parameters. Raises InputError where nodes of the plan are not there, and for what is no graph.
        """
        if not isinstance(target, fx.GraphModule):
            raise InputError(f"plan.apply({type(target).__name__}): takes a GraphModule of symbolic_trace; plan_blocks "
                             "plans a model as it is")
        return apply_to_graph(target, self.regions, self.model)

    def to_json(self, path: str | Path | None = None) -> str:
        """The plan as JSON text, which is also written to ``path`` if one is given."""
        return write_record(self, _FORMAT, path)

    @classmethod
    def from_json(cls, source: str | Path) -> Plan:
        """The plan in JSON text or in a file. Raises ProfileFormatError for a damaged one, InputError for no file."""
        kind: Any = cls
        return cast(Plan, read_record(kind, source, "Plan.from_json", _FORMAT))

    def table(self, fmt: str = "text") -> str:
        """One row a checkpoint: its nodes, what it keeps, what running it again costs."""
        rows = [(r.nodes[0], r.nodes[-1], str(len(r.nodes)), f"{len(r.keeps)} of {r.products}",
                 self.format_cost(r.cost)) for r in self.regions]
        node_count = sum(len(r.nodes) for r in self.regions)
        return print_rows(("First node", "Last node", "Nodes", "Products kept", "Run again"), rows,
                          left=(0, 1), fmt=fmt,
                          total=("total", "", str(node_count), "", self.format_cost(self.cost)))

    def summary(self) -> str:
        """What the plan gives: peaks before and after, overhead, how good it is."""
        before, after = self.unplanned, self.planned
        limited = "activations" if self.budget_of == "activations" else "the whole step"
        return "\n".join([
            f"{self.model}: {len(self.regions)} checkpoints of operators, by method {self.method}",
            f"budget for {limited}: {format_bytes(self.budget_bytes)}",
            f"activations at their peak: {format_bytes(before.peak_activation_bytes)} without the plan" +
            ("" if after is None else f", {format_bytes(after.peak_activation_bytes)} with it "
             f"({_percent(after.peak_activation_bytes, before.peak_activation_bytes)})"),
            f"the whole step: {format_bytes(self.whole_step_bytes(before))}" +
            ("" if after is None else f", {format_bytes(self.whole_step_bytes(after))}") +
            (f" (optimizer states: {format_bytes(self.held_bytes)})" if self.held_bytes else " (without an optimizer)"),
            *self._list_facts(), *[f"assumed: {a}" for a in self.assumptions]])

    def _list_facts(self) -> Iterator[str]:
        before, after = self.unplanned, self.planned
        if after is None:
            yield ("not checked: solve from a graph, or measure the planned model with "
                   "analyzer.tools.solver.measure_step")
        elif after.recompute_flops is not None:
            share = _percent(after.recompute_flops, before.fwd_flops)
            yield f"run again: {format_flops(after.recompute_flops)}" + (
                f", {share} of the forward pass" if before.fwd_flops else "")
        if after is not None and before.seconds is not None and after.seconds is not None:
            yield (f"time on {self.device}, predicted: {format_seconds(before.seconds)}, "
                   f"{format_seconds(after.seconds)} with the plan")
        if self.partitioned:
            yield from self._describe_partitioned()
        if self.gap is not None:
            yield ("proven optimal among divisions into these units" if self.gap == 0 else
                   f"at most {self.gap:.1%} of the overhead is more than the least possible")

    def _describe_partitioned(self) -> Iterator[str]:
        found = self.memory_budget
        step = self.partitioned[-1] if found is not None else min(self.partitioned, key=lambda step: step.peak_bytes)
        again = "" if step.recompute_flops is None else f", {format_flops(step.recompute_flops)} run again"
        took = "" if step.seconds is None else f", {format_seconds(step.seconds)}"
        if found is None:
            yield "torch.compile takes more than the plan, whatever its activation_memory_budget"
        yield (f"torch.compile, activation_memory_budget = {step.activation_memory_budget}: "
               f"{format_bytes(step.peak_bytes)}{again}{took}")

    def _repr_html_(self) -> str:
        before, after = self.unplanned, self.planned
        dearest = sorted(self.regions, key=lambda region: -region.cost)[:_SHOWN]
        named = "" if len(dearest) == len(self.regions) else f", the {_SHOWN} most expensive"
        return write_fragment(
            f"Plan of {self.model}: checkpoints of operators, by method {self.method}",
            write_answer(self._judge(), self._list_tiles()),
            "" if after is None else write_picture(
                lambda: self._draw(before, after), f"Memory over the step. {self._judge().title}"),
            fold(f"What is run again ({len(self.regions)} checkpoints{named})",
                 replace(self, regions=tuple(dearest)).table("html") if dearest else ""),
            fold("The plan in words", f"<pre>{escape(self.summary())}</pre>"))

    def to_html(self, path: str | Path | None = None) -> str:
        """A page of the plan as text, also written to ``path`` if one is given: memory over the step without and with
        it, what it keeps of each module, its frontier, its checkpoints. Raises MissingExtraError without plotly.
        """
        known = (("plan_memory", "Memory over the step", _describe_memory(self)),
                 ("plan_kept", "Kept of each module", _describe_kept(self)),
                 ("frontier", "Budgets and overhead", _describe_frontier(self)),
                 ("plan_regions", "Checkpoints", _describe_regions(self)))
        return write_page(f"Checkpointing of {self.model}", [
            headline_part(self._judge(), self._list_tiles()),
            *(Panel(kind, title, data, has_chart=kind != "plan_regions") for kind, title, data in known
              if data is not None),
            summary_part(self.summary())], path)

    def _judge(self) -> Headline:
        what = "activations" if self.budget_of == "activations" else "the whole step"
        budget = f"a budget of {format_bytes(self.budget_bytes)} for {what}"
        if self.planned is None:
            return Headline.of(None, f"not checked against {budget}")
        reached = self.limited_bytes(self.planned)
        if reached > self.budget_bytes:
            return Headline.of(False, f"does NOT keep within {budget}: {format_bytes(reached)} needed")
        return Headline.of(True, f"keeps within {budget}: {format_bytes(reached)} needed", self._list_facts())

    def _list_tiles(self) -> Iterator[Tile]:
        before, after = self.unplanned, self.planned
        name = "Activations" if self.budget_of == "activations" else "Whole step"
        yield Tile(f"{name} without", format_bytes(self.limited_bytes(before)))
        if after is not None:
            yield Tile(f"{name} with", format_bytes(self.limited_bytes(after)),
                       _percent(self.limited_bytes(after), self.limited_bytes(before)))
        share = self.share_of_step(self.overhead)
        yield Tile("Overhead", self.format_cost(self.overhead), "" if share is None else
                   f"{share:.1%} of the " + ("step" if self.objective == "seconds" else "forward pass"))
        nodes = sum(len(region.nodes) for region in self.regions)
        yield Tile("Checkpoints", str(len(self.regions)), f"of {nodes} nodes")

    def _draw(self, before: StepInfo, after: StepInfo) -> bytes | None:
        if before.memory is None or after.memory is None:
            return None
        limited = self.budget_of == "step", self.held_bytes
        return draw_curves({"without the plan": before.memory.curve(*limited), "with it": after.memory.curve(*limited)},
                           {"budget": self.budget_bytes})

    def __str__(self) -> str:
        return f"{self.summary()}\n\n{self.table()}"

    def format_cost(self, cost: float | None) -> str:
        if self.objective == "seconds":
            return format_seconds(cost)
        return format_flops(None if cost is None else round(cost))


def _without_memory(plan: Fields) -> Fields:
    """A saved plan of version 2, whose steps knew only their peaks."""
    steps = {name: plan[name] for name in ("unplanned", "planned") if isinstance(plan.get(name), dict)}
    return {**plan, **{name: {**step, "memory": None} for name, step in steps.items()}}


def _without_modules(plan: Fields) -> Fields:
    """Of version 5, whose checkpoints could be whole modules; their nodes are told too."""
    regions = [{name: value for name, value in region.items() if name != "module_path"}
               for region in plan["regions"]]
    return {**{name: value for name, value in plan.items() if name != "granularity"}, "regions": regions}


_FORMAT = SavedFormat("analyzer.plan", Plan.format_version, "plan", "solve again",
                      # in version 3 results could wait on the host
                      {2: _without_memory, 3: lambda plan: {name: value for name, value in plan.items()
                                                            if name not in ("offloads", "offload_seconds")},
                       4: lambda plan: {**plan, "partitioned": []}, 5: _without_modules})


def _percent(part: float, whole: float | None) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def format_frontier(plan: Plan) -> str:
    """A row for each budget of ``plan.frontier``: the peak reached and the overhead."""
    shares = [plan.share_of_step(p.overhead) for p in plan.frontier]
    rows = [(format_bytes(p.budget_bytes), format_bytes(p.peak_bytes), plan.format_cost(p.overhead),
             "-" if share is None else f"{share:.2%}") for p, share in zip(plan.frontier, shares)]
    return print_rows(("Budget", "Peak reached", "Overhead",
                       "Of the step" if plan.objective == "seconds" else "Of the forward pass"), rows, left=())


def _describe_memory(plan: Plan) -> dict[str, Any] | None:
    before, after = plan.unplanned.memory, None if plan.planned is None else plan.planned.memory
    if before is None:
        return None
    return {"without": _describe_curve(before), "budget": plan.budget_bytes, "budget_of": plan.budget_of,
            "held": plan.held_bytes, "with": None if after is None else _describe_curve(after),
            "update": plan.update_bytes}


def _describe_curve(memory: StepMemory) -> dict[str, Any]:
    places = {name: i for i, name in enumerate(dict.fromkeys(memory.nodes))}
    return {"activations": memory.activation_bytes, "others": memory.other_bytes, "names": list(places),
            "node": [places[name] for name in memory.nodes], "forward": memory.forward_points}


def _describe_kept(plan: Plan) -> dict[str, Any] | None:
    """The modules, parents first: what each saves without and with the plan, and its checkpointed nodes."""
    before, after = plan.unplanned.memory, None if plan.planned is None else plan.planned.memory
    if before is None or after is None:
        return None
    under = {name for region in plan.regions for name in region.nodes}
    columns = {"before": [(entry.module_path, entry.bytes) for entry in before.saved],
               "after": [(entry.module_path, entry.bytes) for entry in after.saved],
               "checkpointed": [(entry.module_path, 1) for entry in before.saved if entry.node in under]}
    rows: dict[tuple[str, ...], Counter[str]] = {}
    for column, found in columns.items():
        for module_path, quantity in found:
            names = tuple(filter(None, module_path.split(".")))
            for depth in range(len(names) + 1):  # the model first
                rows.setdefault(names[:depth], Counter())[column] += quantity
    if not rows:
        return None
    # numbers in their order, before names
    ordered = sorted(rows, key=lambda path: [(0, int(name), "") if name.isdecimal() else (1, 0, name)
                                             for name in path])
    return {"path": [".".join(path) for path in ordered], "depth": [len(path) for path in ordered],
            **{name: [rows[path][name] for path in ordered] for name in columns}}


def _describe_regions(plan: Plan) -> dict[str, Any] | None:
    regions = plan.regions
    if not regions:
        return None
    return {"unit": plan.objective, "first": [r.nodes[0] for r in regions], "last": [r.nodes[-1] for r in regions],
            "nodes": [list(r.nodes) for r in regions],
            "kept": [len(r.keeps) for r in regions], "products": [r.products for r in regions],
            "cost": [r.cost for r in regions]}


def _describe_frontier(plan: Plan) -> dict[str, Any] | None:
    """The budgets that plans were sought for, with the peak and the overhead of each, and the point of the plan."""
    points = plan.frontier
    if not points:
        return None
    peak = None if plan.planned is None else plan.limited_bytes(plan.planned)
    return {"unit": plan.objective, "whole": plan._whole_cost, "own": {"peak": peak, "overhead": plan.overhead},
            "budget": [point.budget_bytes for point in points], "peak": [point.peak_bytes for point in points],
            "overhead": [point.overhead for point in points]}

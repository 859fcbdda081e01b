"""The reports of DeepSpeed's FLOPs profiler and of flops-profiler with their own labels, in their own order, for
scripts that parse them. The labels are those of ``deepspeed/profiling/flops_profiler/profiler.py`` of
deepspeedai/DeepSpeed, and of ``flops_profiler/profiler.py`` of flops-profiler 0.1.2.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from analyzer.output import write_output
from analyzer.report.module_tree import Ignored, divide, find_root, leave_out
from analyzer.report.speed import note_prediction
from analyzer.report.text_width import escape_controls
from analyzer.results.info import CostInfo, ModuleInfo, OperatorInfo
from analyzer.results.profile import Profile
from analyzer.results.view import register_report
from analyzer.units import UNKNOWN, add_quantities

from . import deepspeed as number
from .deepspeed import NOTATIONS, sum_by_class
from .torchinfo import sum_functions

Write = Callable[[float], str]


@dataclass(frozen=True)
class Dialect:
    """What the reports of one tool have of their own."""

    title: str
    unit: str                                  #: what the figures are of
    width: int                                 #: of labels
    params: Write
    flops: Write
    macs: Write
    rate: Write                                #: FLOPs a second
    latency: Write
    top: str                                   #: above the largest modules
    #: label, field and format of what the aggregated profile compares
    aggregated: tuple[tuple[str, str, Write], ...]
    is_detailed_by_function: bool = False

    @property
    def heading(self) -> str:
        """Its unit as headings have it."""
        return self.unit[0].upper() + self.unit[1:]


def _round(sizes: Sequence[tuple[float, str]], rest: str = "") -> Write:
    """A number with two decimals and a unit, without one as it is."""
    return lambda value: next((f"{round(value / size, 2)} {unit}" for size, unit in sizes if value // size > 0),
                              f"{value}{rest}")


_SI = ((1e9, "G"), (1e6, "M"), (1e3, "K"))
_MACS = _round([(size, f"{unit}MACs") for size, unit in _SI], " MACs")
_RATE = _round([(size, f"{unit}FLOPS") for size, unit in ((1e12, "T"), *_SI)], " FLOPS")
_PARAMS, _COUNT = _round([(1e6, "M"), (1e3, "k")]), _round(_SI)


def _latency(seconds: float) -> str:
    return next((f"{round(seconds * scale, 2)} {unit}" for scale, unit in ((1, "s"), (1e3, "ms"), (1e6, "us"))
                 if seconds * scale > 1), str(seconds))


DEEPSPEED = Dialect(
    "-------------------------- DeepSpeed Flops Profiler --------------------------", "GPU", 70,
    number.params_to_string, number.number_to_string, number.macs_to_string, number.flops_to_string,
    number.duration_to_string, "modules in terms of params, MACs or fwd latency at different model depths:",
    (("params", "params", number.params_to_string), ("MACs", "fwd_macs", number.macs_to_string),
     ("fwd latency", "fwd_seconds", number.duration_to_string)))
FLOPS_PROFILER = Dialect(
    "-------------------------- Flops Profiler --------------------------", "device", 60,
    _PARAMS, _COUNT, _MACS, _RATE, _latency,
    "modules in terms of params, flops, MACs or duration at different model depths:",
    (("params", "params", _PARAMS), ("flops", "fwd_flops", _COUNT), ("MACs", "fwd_macs", _MACS),
     ("fwd latency", "fwd_seconds", _latency)), is_detailed_by_function=True)


@register_report.shipped("deepspeed-exact")
def deepspeed_text(profile: Profile, *, profile_step: int | None = None, module_depth: int = -1, top_modules: int = 1,
                   detailed: bool = True, output_file: str | Path | None = None, ignore_modules: Ignored | None = None,
                   recompute_fwd_factor: float = 0.0, engine: bool = False, wall_clock_breakdown: bool = True) -> str:
    """The report of DeepSpeed's profiler, also written to ``output_file``.

    Labels, order, units and rounding are DeepSpeed's; a figure that is unknown is ``-``. ``engine`` adds the sizes of
    what runs in parallel and the batch, ``wall_clock_breakdown`` the times of backward and step where the profile has
    them. As there, ``module_depth=-1`` leaves out the deepest level.

    >>> costs = {"params": 10, "fwd_macs": 80, "fwd_flops": 160, "fwd_seconds": 1e-3}
    >>> tree = ModuleInfo(path="", type="Net", **costs)
    >>> text = deepspeed_text(Profile(name="Net", mode="infer", modules=tree, **costs))
    >>> [line for line in text.splitlines() if line.startswith(("fwd FLOPS", "Net"))]  # doctest: +NORMALIZE_WHITESPACE
    ['fwd FLOPS per GPU = fwd flops per GPU / fwd latency:                    160 KFLOPS',
     'Net(10 = 100% Params, 80 MACs = 100% MACs, 1 ms = 100% latency, 160 KFLOPS)']
    """
    return _write(profile, DEEPSPEED, _Choice(profile_step, module_depth, top_modules, detailed, output_file,
                                              ignore_modules, engine, wall_clock_breakdown, recompute_fwd_factor))


@register_report.shipped("flops-profiler-exact")
def flops_profiler_text(profile: Profile, *, profile_step: int | None = None, module_depth: int = -1,
                        top_modules: int = 10, detailed: bool = True, output_file: str | Path | None = None,
                        ignore_modules: Ignored | None = None, engine: bool = False,
                        wall_clock_breakdown: bool = True) -> str:
    """The report of flops-profiler, which names the functions within each module."""
    return _write(profile, FLOPS_PROFILER, _Choice(profile_step, module_depth, top_modules, detailed, output_file,
                                                   ignore_modules, engine, wall_clock_breakdown))


class _Choice(NamedTuple):
    """What of a report is asked for."""

    profile_step: int | None
    module_depth: int
    top_modules: int
    detailed: bool
    output_file: str | Path | None
    ignore_modules: Ignored | None
    engine: bool
    wall_clock_breakdown: bool
    recompute_fwd_factor: float = 0.0


def _write(profile: Profile, dialect: Dialect, choice: _Choice) -> str:
    root = find_root(profile.modules, "deepspeed_text()")
    root = leave_out(root, choice.ignore_modules) if choice.ignore_modules else root
    step, rule = choice.profile_step, "-" * 29
    if step is None:
        step = 1 if profile.profile_step is None else profile.profile_step
    lines = ["", dialect.title]
    if dialect.is_detailed_by_function:
        lines.append(f"Profile on Device: {profile.device or UNKNOWN}")
    lines += [f"Profile Summary at step {step}:", "Notations:", NOTATIONS,
              *([] if (note := note_prediction(profile)) is None else [note]), ""]
    lines += [f"{label + ': ':<{dialect.width}}  {value:<8}"
              for label, value in list_figures(profile, root, dialect, choice)]
    lines += ["", f"{rule} Aggregated Profile per {dialect.heading} {rule}",
              *aggregate(root, dialect, choice.module_depth, choice.top_modules)]
    if choice.detailed:
        rule += "-"
        lines += ["", f"{rule} Detailed Profile per {dialect.heading} {rule}",
                  "Behind the name of each module stand, in this order:",
                  "params, percentage of total params, MACs, percentage of total MACs, fwd latency, percentage of "
                  "total fwd latency, fwd FLOPS", "", *print_module(root, _Detail(root, dialect))]
    text = escape_controls("\n".join([*lines, "-" * 78]))
    if choice.output_file is not None:
        path = Path(choice.output_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_output(path, text + "\n")
    return text


def list_figures(profile: Profile, root: ModuleInfo, dialect: Dialect, choice: _Choice) -> Iterator[tuple[str, str]]:
    """Label and figure of each line of the summary."""
    unit, models = dialect.unit, profile.model_parallel_size
    flops, fwd = root.fwd_flops, profile.fwd_seconds if profile.fwd_seconds is not None else root.fwd_seconds
    if choice.engine:
        yield "world size", _plain(profile.world_size)
        yield "data parallel size", _plain(profile.data_parallel_size)
        yield "model parallel size", _plain(models)
        yield f"batch size per {unit}", _plain(profile.batch_size)
    yield f"params per {unit}", _text(dialect.params, root.params)
    yield f"params of model = params per {unit} * mp_size", _text(dialect.params, _times(root.params, models or 1))
    yield f"fwd MACs per {unit}", _text(dialect.macs, root.fwd_macs)
    yield f"fwd flops per {unit}", _text(dialect.flops, flops)
    yield f"fwd flops of model = fwd flops per {unit} * mp_size", _text(dialect.flops, _times(flops, models or 1))
    yield "fwd latency", _text(dialect.latency, fwd)
    yield f"fwd FLOPS per {unit} = fwd flops per {unit} / fwd latency", _text(dialect.rate, divide(flops, fwd))
    bwd, step = profile.bwd_seconds, profile.optimizer_seconds
    if not choice.wall_clock_breakdown or profile.mode != "train" or bwd is None or fwd is None:
        return
    factor = 2 + choice.recompute_fwd_factor
    iteration = add_quantities((fwd, bwd, step))
    yield "bwd latency", _text(dialect.latency, bwd)
    yield f"bwd FLOPS per {unit} = {factor:g} * fwd flops per {unit} / bwd latency", _text(
        dialect.rate, divide(_times(flops, factor), bwd))
    yield f"fwd+bwd FLOPS per {unit} = {factor + 1:g} * fwd flops per {unit} / (fwd+bwd latency)", _text(
        dialect.rate, divide(_times(flops, factor + 1), fwd + bwd))
    yield "step latency", _text(dialect.latency, step)
    yield "iter latency", _text(dialect.latency, iteration)
    yield f"FLOPS per {unit} = {factor + 1:g} * fwd flops per {unit} / iter latency", _text(
        dialect.rate, divide(_times(flops, factor + 1), iteration))
    yield "samples/second", _text(lambda value: str(round(value, 2)),
                                  divide(_times(profile.batch_size, profile.world_size or 1), iteration))


def _plain(value: object) -> str:
    return UNKNOWN if value is None else str(value)


def _text(write: Write, value: float | None) -> str:
    return UNKNOWN if value is None else write(value)


def _times(value: int | None, factor: float) -> float | None:
    return None if value is None else value * factor


def aggregate(root: ModuleInfo, dialect: Dialect = DEEPSPEED, module_depth: int = -1,
              top_modules: int = 1) -> list[str]:
    """Lines that name the classes with the largest sums at each depth above ``module_depth``, or the deepest."""
    sums = sum_by_class(root)
    depths = len(sums) - 1 if module_depth == -1 else min(module_depth, len(sums))
    lines = [f"Top {top_modules} {dialect.top}"]
    for depth, by_class in enumerate(sums[:depths]):
        lines.append(f"depth {depth}:")
        for label, field, write in dialect.aggregated:
            largest = sorted(by_class.items(), key=lambda item: getattr(item[1], field) or 0, reverse=True)
            shown = {kind: _text(write, getattr(costs, field)) for kind, costs in largest[:top_modules]}
            lines.append(f"    {label:<12}- {shown}")
    return lines


@dataclass(frozen=True)
class _Detail:
    """What a module says of itself."""

    root: ModuleInfo
    dialect: Dialect

    def tell(self, module: ModuleInfo) -> str:
        told = self._tell_functions(module) if self.dialect.is_detailed_by_function else self._tell(module)
        return ", ".join([*told, *([module.extra_repr] if module.extra_repr or self.dialect.is_detailed_by_function
                                   else [])])

    def _tell(self, module: ModuleInfo) -> list[str]:
        dialect, rate = self.dialect, divide(module.fwd_flops, module.fwd_seconds)
        return [f"{_text(dialect.params, module.params)} = {self._percent(module, 'params')} Params",
                f"{_text(dialect.macs, module.fwd_macs)} = {self._percent(module, 'fwd_macs')} MACs",
                f"{_text(dialect.latency, module.fwd_seconds)} = {self._percent(module, 'fwd_seconds')} latency",
                _text(lambda value: dialect.rate(round(value, 2)), rate)]

    def _percent(self, costs: CostInfo, name: str) -> str:
        part, whole = getattr(costs, name), getattr(self.root, name)
        return UNKNOWN + "%" if part is None or whole is None else f"{round(100 * part / whole, 2) if whole else 0:g}%"

    def _share(self, part: float | None, whole: float | None) -> str:
        return UNKNOWN if part is None or whole is None else f"{part / whole if whole else 0:.2%}"

    def _tell_functions(self, module: ModuleInfo) -> list[str]:
        dialect, root, functions = self.dialect, self.root, _list_counted(module)
        row = {"param": _text(dialect.params, module.params),
               **self._figures(module.fwd_flops, module.fwd_macs, module.fwd_seconds),
               "params%": self._share(module.params, root.params),
               "flops%": self._share(module.fwd_flops, root.fwd_flops),
               "macs%": self._share(module.fwd_macs, root.fwd_macs),
               "duration%": self._share(module.fwd_seconds, root.fwd_seconds)}
        everything = add_quantities(f.seconds for f in _list_counted(root).values())
        rows = {name: self._tell_function(f, everything) for name, f in functions.items()}
        seconds = add_quantities(f.seconds for f in functions.values())
        return [f"module = {row}", f"functionals = {rows}",
                f"functionals_duration = {_text(dialect.latency, seconds)}"]

    def _tell_function(self, function: OperatorInfo, everything: float | None) -> Mapping[str, Any]:
        root = self.root
        return {**self._figures(function.flops, function.macs, function.seconds),
                "flops%": self._share(function.flops, root.fwd_flops),
                "macs%": self._share(function.macs, root.fwd_macs),
                "duration%/allfuncs": self._share(function.seconds, everything),
                "duration%/e2e": self._share(function.seconds, root.fwd_seconds)}

    def _figures(self, flops: int | None, macs: int | None, seconds: float | None) -> dict[str, str]:
        dialect = self.dialect
        return {"flops": _text(dialect.flops, flops), "macs": _text(dialect.macs, macs),
                "duration": _text(dialect.latency, seconds), "FLOPS": _text(dialect.rate, divide(flops, seconds))}


def _list_counted(module: ModuleInfo) -> dict[str, OperatorInfo]:
    """The functions of a module and all below it that have FLOPs."""
    return {name: function for name, function in sum_functions(module).items() if function.flops}


def print_module(module: ModuleInfo, detail: _Detail) -> list[str]:
    """As a module prints itself; a list of modules says nothing of its own and has alike neighbours in one line."""
    children = [(child.path.rpartition(".")[2], print_module(child, detail)) for child in module.children]
    if module.type == "ModuleList":
        groups = [(list(same), lines) for lines, same in groupby(children, lambda child: child[1])]
        children = [(same[0][0] if len(same) == 1 else f"{same[0][0]}-{same[-1][0]}",
                     [f"{len(same)} x {lines[0]}", *lines[1:]] if len(same) > 1 else lines) for same, lines in groups]
        own = []
    else:
        own = detail.tell(module).split("\n")
    if not children and len(own) <= 1:
        return [f"{module.type}({''.join(own)})"]
    below = [f"  {line}" for name, (first, *rest) in children
             for line in (f"({name}): {first}", *(f"{text}" for text in rest))]
    return [f"{module.type}(", *(f"  {line}" for line in own), *below, ")"]

"""The report of DeepSpeed's FLOPs profiler, and the names that it gives to figures."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from analyzer.errors import InputError, is_count
from analyzer.output import write_output
from analyzer.report.module_tree import Ignored, divide, find_root, format_shapes, has_own_row, leave_out, plain
from analyzer.report.node_table import check_layout, print_rows
from analyzer.report.speed import describe_seconds
from analyzer.report.text_width import escape_controls
from analyzer.results.info import CostInfo, ModuleInfo, OperatorInfo
from analyzer.results.profile import Profile
from analyzer.results.view import register_report
from analyzer.units import add_quantities, format_bytes, format_figure, format_latency, format_share

from .torchinfo import list_functions, sum_functions

# Figures as DeepSpeed's FLOPs profiler prints them, under the names of its functions.
#
# >>> [number_to_string(58_182_404_096), number_to_string(1234, units="M", precision=4), number_to_string(2e-4)]
# ['58.18 G', '0.0012 M', '200 u']
# >>> number_to_string(0), flops_to_string(1.5e12), macs_to_string(29_029_179_392), bytes_to_string(46_758_048)
# ('0 ', '1.5 TFLOPS', '29.03 GMACs', '46.76 MB')
# >>> params_to_string(11_689_512), params_to_string(7e9), duration_to_string(0.00123)
# ('11.69 M', '7 B', '1.23 ms')

_MAGNITUDES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """``num`` with an SI prefix: the given one, else the largest that keeps it at 1 or above."""
    if units is None:
        units = "" if num == 0 else next((u for u, size in _MAGNITUDES.items() if num >= size), "u")
    return f"{round(num / _MAGNITUDES.get(units, 1.0), precision):g} {units}"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """A rate."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """A count."""
    return f"{number_to_string(macs, units, precision)}MACs"


def bytes_to_string(b: float, units: str | None = None, precision: int = 2) -> str:
    """A size, with powers of 1000."""
    return f"{number_to_string(b, units, precision)}B"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """With B for 10^9."""
    return number_to_string(params_num, "G" if units == "B" else units, precision).replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Seconds."""
    return f"{number_to_string(duration, units, precision)}s"


# The figures of one device and of the whole model under the names of DeepSpeed's FLOPs profiler.

NOTATIONS = """\
data parallel size (dp_size), model parallel size (mp_size),
number of parameters (params), number of multiply-accumulate operations (MACs),
number of floating-point operations (flops), floating-point operations per second (FLOPS),
fwd latency (forward propagation latency), bwd latency (backward propagation latency),
step (weights update latency), iter latency (latency of a whole step: fwd, bwd, step and zeroing gradients)"""
# What DeepSpeed takes the backward pass for: its profiler counts the forward one alone.
_BACKWARD_FACTOR = 2


def list_notations(profile: Profile, as_string: bool = True,
                   recompute_fwd_factor: float = 0.0) -> Iterator[tuple[str, str]]:
    """Name and figure of each line; backward and step only of a training step. Raw numbers without ``as_string``;
    unknown is ``-``. ``recompute_fwd_factor`` is DeepSpeed's: how much of the forward pass runs again in backward,
    where the backward pass is not counted.
    """
    def count(value: float | None, unit: str = "", kilo: str = "K") -> str:
        return format_figure(value, unit, kilo) if as_string else plain(value)

    def latency(value: float | None) -> str:
        return format_latency(value) if as_string else plain(value)

    models = profile.model_parallel_size
    fwd_flops, fwd_macs = profile.fwd_flops, profile.fwd_macs
    yield "world size", plain(profile.world_size)
    yield "data parallel size", plain(profile.data_parallel_size)
    yield "model parallel size", plain(models)
    yield "batch size per device", plain(profile.batch_size)
    yield "params per device", count(profile.params, kilo="k")
    if profile.whole_params is None:
        yield "params of model = params per device * mp_size", count(_times(profile.params, models), kilo="k")
    else:  # ranks share parameters: how many copies there are does not count
        yield "params of model", count(profile.whole_params, kilo="k")
    yield "fwd MACs per device", count(fwd_macs, "MACs")
    yield "fwd flops per device", count(fwd_flops)
    yield "fwd flops of model = fwd flops per device * mp_size", count(_times(fwd_flops, models))
    activations = None if profile.modules is None else profile.modules.activation_bytes
    yield "fwd activations per device", format_bytes(activations) if as_string else plain(activations)
    yield "fwd latency", latency(profile.fwd_seconds)
    yield "fwd FLOPS per device = fwd flops per device / fwd latency", count(divide(fwd_flops, profile.fwd_seconds),
                                                                             "FLOPS")
    if profile.mode == "infer":
        yield "iter latency", latency(profile.step_seconds)
        yield "samples/second", count(profile.samples_per_second)
        return
    bwd_flops, name = profile.bwd_flops, "bwd flops per device"
    if bwd_flops is None and fwd_flops is not None and profile.flop_convention == "deepspeed":
        factor = _BACKWARD_FACTOR + recompute_fwd_factor
        bwd_flops, name = round(factor * fwd_flops), f"{factor:g} * fwd flops per device"
    both = None if fwd_flops is None or bwd_flops is None else fwd_flops + bwd_flops
    seconds = profile.fwd_seconds, profile.bwd_seconds
    passes = None if seconds[0] is None or seconds[1] is None else seconds[0] + seconds[1]
    yield "bwd MACs per device", count(profile.bwd_macs, "MACs")
    yield "bwd flops per device", count(profile.bwd_flops)
    yield "bwd latency", latency(profile.bwd_seconds)
    yield f"bwd FLOPS per device = {name} / bwd latency", count(divide(bwd_flops, profile.bwd_seconds), "FLOPS")
    yield "fwd+bwd FLOPS per device = fwd+bwd flops per device / (fwd+bwd latency)", count(
        divide(both, passes), "FLOPS")
    yield "step latency", latency(profile.optimizer_seconds)
    yield "iter latency", latency(profile.step_seconds)
    yield "FLOPS per device = fwd+bwd flops per device / iter latency", count(divide(both, profile.step_seconds),
                                                                              "FLOPS")
    yield "samples/second", count(profile.samples_per_second)


def _times(value: int | None, factor: int | None) -> int | None:
    return None if value is None or factor is None else value * factor


# The report of DeepSpeed's FLOPs profiler and of flops-profiler: summary, aggregated and detailed profile.

STYLES = ("deepspeed", "flops-profiler")
_WIDTH = 78
_ORDER = {
    "deepspeed": "params, percentage of total params, MACs, percentage of total MACs, fwd latency, percentage of total "
    "fwd latency, fwd FLOPS,\n"
    "activation bytes, input shapes -> output shapes, arguments of the module",
    "flops-profiler": "params, flops, MACs, fwd latency, fwd FLOPS and their shares of the model's; the functions that "
    "run in it with their shares of\n"
    "the model's flops and MACs, of the time of all functions (allfuncs) and of the model's fwd latency (e2e); "
    "activation bytes,\n"
    "input shapes -> output shapes, arguments of the module",
}
_NOTE = """\
Note: 1. What a module does outside its submodules is its "(own)" row, so that a module is the sum of the rows right \
below it.
2. Flops are a count, so FLOPS can be above what the device reaches.
3. A module that stands in several places is counted in the first."""


@register_report.shipped("deepspeed")
def deepspeed_report(profile: Profile, *, module_depth: int = -1, top_modules: int = 1, detailed: bool = True,
                     as_string: bool = True, output_file: str | Path | None = None,
                     ignore_modules: Ignored | None = None, depth: int | None = None, style: str = "deepspeed",
                     recompute_fwd_factor: float = 0.0) -> str:
    """The report as text, also written to ``output_file`` if one is given (its folder is made).

    The aggregated profile names, at each depth down to ``module_depth`` (-1: all), the ``top_modules`` classes that
    have most parameters, FLOPs, MACs, latency and activation bytes. ``detailed`` adds the tree of modules, each with
    its figures, down to ``depth``. ``as_string=False`` prints plain numbers (bytes, seconds). ``ignore_modules`` are
    classes, class names or paths that count as their parent's own. ``style="flops-profiler"`` adds what each function
    costs within each module. Under DeepSpeed's convention, which counts no backward pass, that is taken for 2 +
    ``recompute_fwd_factor`` forward passes. Raises InputError for a profile without modules, a depth or a number of
    modules that cannot be, and for unknown names.

    >>> costs = {"params": 10, "fwd_macs": 80, "fwd_flops": 160}
    >>> leaf = ModuleInfo(path="fc", type="Linear", depth=1, extra_repr="in_features=4", **costs)
    >>> tree = ModuleInfo(path="", type="Net", own=CostInfo(params=0), children=(leaf,), **costs)
    >>> profile = Profile(name="Net", mode="infer", modules=tree, **costs)
    >>> [line for line in deepspeed_report(profile).splitlines() if "Linear" in line][-1]
    '  (fc): Linear(10, 100.00% Params, 80 MACs, 100.00% MACs, -, - latency, -, - activations, - -> -, in_features=4)'
    """
    if style not in STYLES:
        raise InputError(f"deepspeed_report(style={style!r}): must be one of {', '.join(map(repr, STYLES))}")
    check_layout(depth, 0, "text", "deepspeed_report()")
    root = find_root(profile.modules, "deepspeed_report()")
    root = leave_out(root, ignore_modules) if ignore_modules else root
    figures = Figures(root, as_string)
    lines = [_rule("Flops Profiler"), _describe_source(profile), "Notations:", NOTATIONS, ""]
    lines += [f"{name + ': ':<76}{value}" for name, value in list_notations(profile, as_string, recompute_fwd_factor)]
    lines += ["", _rule("Aggregated Profile per Device"), *aggregate(root, module_depth, top_modules, figures)]
    if detailed:
        lines += ["", _rule("Detailed Profile per Device"), "Behind the name of each module stand, in this order:",
                  _ORDER[style], "", _NOTE, "", *_print_module(root, figures, style, depth)]
    text = escape_controls("\n".join([*lines, "-" * _WIDTH]))
    if output_file is not None:
        path = Path(output_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_output(path, text + "\n")
    return text


@register_report.shipped("flops-profiler")
def flops_profiler_report(profile: Profile, *, module_depth: int = -1, top_modules: int = 1, detailed: bool = True,
                          as_string: bool = True, output_file: str | Path | None = None, ignore_modules: Any = None,
                          depth: int | None = None) -> str:
    """`deepspeed_report` with the functions that run in each module."""
    return deepspeed_report(profile, module_depth=module_depth, top_modules=top_modules, detailed=detailed,
                            as_string=as_string, output_file=output_file, ignore_modules=ignore_modules, depth=depth,
                            style="flops-profiler")


def _describe_source(profile: Profile) -> str:
    step = "" if profile.profile_step is None else f" at step {profile.profile_step}"
    steps = "" if profile.measured_steps is None else f", mean of {profile.measured_steps} runs"
    device = "" if profile.device is None else f", {profile.device}"
    return (f"Profile Summary{step}: {profile.name}, {profile.mode}{device}; "
            f"latency: {describe_seconds(profile)}{steps}")


def _rule(title: str) -> str:
    return f" {title} ".center(_WIDTH, "-")


class Figures:
    """How figures of modules are printed, and what they are shares of."""

    def __init__(self, root: ModuleInfo, as_string: bool = True) -> None:
        def write(form: Callable[[Any], str]) -> Callable[[Any], str]:
            return form if as_string else plain

        self.root = root
        #: text of a count of parameters, FLOPs or MACs, of FLOPs a second, of seconds and of bytes
        self.params, self.flops = write(partial(format_figure, kilo="k")), write(format_figure)
        self.macs, self.flops_per_second = (write(partial(format_figure, unit=unit)) for unit in ("MACs", "FLOPS"))
        self.latency, self.bytes = write(format_latency), write(format_bytes)
        #: name, field and format of what the aggregated profile compares
        self.quantities = (
            ("params", "params", self.params), ("flops", "fwd_flops", self.flops), ("MACs", "fwd_macs", self.macs),
            ("fwd latency", "fwd_seconds", self.latency), ("bwd flops", "bwd_flops", self.flops),
            ("bwd latency", "bwd_seconds", self.latency), ("step", "optimizer_seconds", self.latency),
            ("activations", "activation_bytes", self.bytes))

    @cached_property
    def functions_seconds(self) -> float | None:
        """Of all functions of the model."""
        return add_quantities(f.seconds for f in sum_functions(self.root).values())

    def rate(self, flops: int | None, seconds: float | None) -> str:
        """Text of FLOPs a second."""
        return self.flops_per_second(divide(flops, seconds))

    def share(self, costs: CostInfo | OperatorInfo, name: str, of: str | None = None) -> str:
        """The part of the whole model's quantity."""
        return format_share(getattr(costs, name), getattr(self.root, of or name))


def aggregate(root: ModuleInfo, module_depth: int = -1, top_modules: int = 1,
              figures: Figures | None = None) -> list[str]:
    """Lines that name the classes with the largest sums at each depth."""
    lines = [
        f"Top {top_modules} classes of modules at each depth by params, flops, MACs, latency and activation bytes:"]
    for depth, rows in groupby(list_largest(root, module_depth, top_modules, figures or Figures(root)), itemgetter(0)):
        lines += [f"depth {depth}:", *(f"    {quantity:<12}- {largest}" for _, quantity, largest in rows)]
    return lines


@register_report.shipped("largest")
def largest_modules(profile: Profile, *, module_depth: int = -1, top_modules: int = 1, as_string: bool = True,
                    ignore_modules: Ignored | None = None, fmt: str = "text") -> str:
    """The aggregated profile as a table: at each depth, the classes of modules that have most of a quantity together.

    >>> leaf = ModuleInfo(path="fc", type="Linear", depth=1, params=10)
    >>> tree = ModuleInfo(path="", type="Net", params=10, children=(leaf,))
    >>> largest_modules(Profile(name="Net", mode="infer", modules=tree), fmt="csv").splitlines()[:3]
    ['Depth,Quantity,Rank,Type,Sum,Share', '0,params,1,Net,10,100.00%', '0,flops,1,Net,-,-']
    """
    check_layout(None, 0, fmt, "largest_modules()")
    root = find_root(profile.modules, "largest_modules()")
    root = leave_out(root, ignore_modules) if ignore_modules else root
    figures = Figures(root, as_string)
    sums, names = sum_by_class(root), {label: name for label, name, _ in figures.quantities}
    rows = [[str(depth), quantity, str(rank), kind, text, figures.share(sums[depth][kind], names[quantity])]
            for depth, quantity, largest in list_largest(root, module_depth, top_modules, figures)
            for rank, (kind, text) in enumerate(largest.items(), 1)]
    return print_rows(["Depth", "Quantity", "Rank", "Type", "Sum", "Share"], rows, left=(0, 1, 3), fmt=fmt)


def list_largest(root: ModuleInfo, module_depth: int, top_modules: int,
                 figures: Figures) -> Iterator[tuple[int, str, dict[str, str]]]:
    """Depth, quantity, and the classes with the largest sums of it and these sums."""
    if not is_count(module_depth, -1) or not is_count(top_modules, 1):
        raise InputError(
            f"module_depth={module_depth!r}, top_modules={top_modules!r}: a depth is 0 or more, or -1 for all, and at "
            "least one module is named")
    sums = sum_by_class(root)
    deepest = len(sums) - 1 if module_depth == -1 else min(module_depth, len(sums) - 1)
    for depth, by_class in enumerate(sums[:deepest + 1]):
        for label, name, write in figures.quantities:
            if getattr(root, name) or not name.startswith(("bwd", "optimizer")):  # of inference there is no more
                largest = sorted(by_class.items(), key=lambda item: -(getattr(item[1], name) or 0))[:top_modules]
                yield depth, label, {kind: write(getattr(costs, name)) for kind, costs in largest}


def sum_by_class(root: ModuleInfo) -> list[dict[str, CostInfo]]:
    """At each depth, what the modules of each class cost together."""
    sums: list[dict[str, CostInfo]] = []
    for module in root.walk():
        depth = module.depth - root.depth
        if depth == len(sums):
            sums.append({})
        costs = CostInfo(**{name: getattr(module, name) for name in CostInfo.__slots__})
        sums[depth][module.type] = sums[depth][module.type] + costs if module.type in sums[depth] else costs
    return sums


def _print_module(module: ModuleInfo, figures: Figures, style: str, depth: int | None) -> list[str]:
    """As the repr of a module, which puts the figures where `extra_repr` stands."""
    told = [*_tell(module, figures, sum_functions(module) if style != "deepspeed" else {}, style),
            f"{figures.bytes(module.activation_bytes)} activations",
            f"{format_shapes(module.inputs)} -> {format_shapes(module.outputs)}"]
    if module.shared_with is not None:
        told.append(f"same as ({module.shared_with or module.type})")
    if module.extra_repr:
        told += module.extra_repr.split("\n")
    line = ", ".join(told)
    if not module.children or module.depth == depth:
        return [f"{module.type}({line})"]
    lines = [f"{module.type}(", f"  {line}"]
    for child in module.children:
        first, *rest = _print_module(child, figures, style, depth)
        lines += [f"  ({child.path.rpartition('.')[2]}): {first}", *(f"  {text}" for text in rest)]
    if has_own_row(module):
        lines += [f"  {text}" for text in _print_own(module, figures, style)]
    return [*lines, ")"]


def _print_own(module: ModuleInfo, figures: Figures, style: str) -> list[str]:
    functions = list_functions(module)
    told = [*_tell(module.own, figures, functions, style), f"{figures.bytes(module.own.activation_bytes)} activations"]
    line = ", ".join(told)
    if style != "deepspeed" or not functions:
        return [f"(own): ({line})"]
    rows = [f"  ({name}): {f.calls} call{'s' if f.calls > 1 else ''}, {figures.flops(f.flops)} flops, "
            f"{figures.share(f, 'flops', 'fwd_flops')} flops, {figures.macs(f.macs)}, "
            f"{figures.share(f, 'macs', 'fwd_macs')} MACs, {figures.latency(f.seconds)}, "
            f"{figures.share(f, 'seconds', 'fwd_seconds')} latency, {figures.rate(f.flops, f.seconds)}"
            for name, f in functions.items()]
    return ["(own): (", f"  {line}", *rows, ")"]


def _tell(costs: CostInfo, figures: Figures, functions: Mapping[str, OperatorInfo], style: str) -> list[str]:
    share = figures.share
    rate = figures.rate(costs.fwd_flops, costs.fwd_seconds)
    if style == "deepspeed":
        return [figures.params(costs.params), f"{share(costs, 'params')} Params", figures.macs(costs.fwd_macs),
                f"{share(costs, 'fwd_macs')} MACs", figures.latency(costs.fwd_seconds),
                f"{share(costs, 'fwd_seconds')} latency", rate]
    row = {"param": figures.params(costs.params), "flops": figures.flops(costs.fwd_flops),
           "macs": figures.macs(costs.fwd_macs), "duration": figures.latency(costs.fwd_seconds), "FLOPS": rate,
           "params%": share(costs, "params"), "flops%": share(costs, "fwd_flops"), "macs%": share(costs, "fwd_macs"),
           "duration%": share(costs, "fwd_seconds")}
    rows = {name: {"flops": figures.flops(f.flops), "macs": figures.macs(f.macs),
                   "duration": figures.latency(f.seconds), "FLOPS": figures.rate(f.flops, f.seconds),
                   "flops%": share(f, "flops", "fwd_flops"), "macs%": share(f, "macs", "fwd_macs"),
                   "duration%/allfuncs": format_share(f.seconds, figures.functions_seconds),
                   "duration%/e2e": share(f, "seconds", "fwd_seconds")}
            for name, f in functions.items()}
    return [f"module = {row}", f"functionals = {rows}",
            f"functionals_duration = {figures.latency(add_quantities(f.seconds for f in functions.values()))}"]

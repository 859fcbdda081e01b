"""The reports of DeepSpeed's FLOPs profiler and of flops-profiler with their own labels, in their own order, for
scripts that parse them, and the functions that a module calls. The labels are those of
``deepspeed/profiling/flops_profiler/profiler.py`` of deepspeedai/DeepSpeed, and of ``flops_profiler/profiler.py`` of
flops-profiler 0.1.2.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from analyzer.errors import InputError, is_count
from analyzer.output import FilePath, write_output
from analyzer.report.module_tree import Ignored, divide, find_root, leave_out, plain
from analyzer.report.speed import note_prediction
from analyzer.report.text_width import escape_controls
from analyzer.results.info import CostInfo, ModuleInfo, OperatorInfo
from analyzer.results.profile import ProfileData
from analyzer.results.view import register_report
from analyzer.units import UNKNOWN, add_quantities

# Where the ATen operator goes by another name than the Python function; torch.nn.functional and torch dispatch so.
_NAMES = {"addmm": "linear", "_addmm_activation": "linear", "bmm": "matmul", "baddbmm": "baddbmm",
          "native_layer_norm": "layer_norm", "native_group_norm": "group_norm", "_softmax": "softmax",
          "_safe_softmax": "softmax", "_log_softmax": "log_softmax", "native_dropout": "dropout",
          "_prelu_kernel": "prelu", "_embedding_bag": "embedding_bag", "nll_loss_forward": "nll_loss",
          "_fused_rms_norm": "rms_norm", "_cudnn_rnn": "rnn", "_unsafe_view": "view", "_to_copy": "to"}
_FAMILIES = ((r".*batch_norm.*", "batch_norm"), (r"_?(adaptive_)?(avg|max)_pool([123])d.*", r"\1\2_pool\3d"),
             (r"_?upsample_.*", "interpolate"), (r"_?scaled_dot_product_.*|_flash_attention.*|_efficient_attention.*",
                                                 "scaled_dot_product_attention"))


def name_function(operator: str, module: ModuleInfo | None = None) -> str:
    """The Python function behind an operator of ``module``; other names stay as they are."""
    space, _, rest = operator.partition(".")
    if space != "aten":
        return ".".join(operator.split(".")[:2]) if rest else operator
    name = rest.partition(".")[0]
    if "convolution" in name:
        dims = len(module.kernel_size) if module is not None and module.kernel_size else 0
        kind = "conv_transpose" if module is not None and "Transpose" in module.type else "conv"
        return f"{kind}{dims}d" if dims else "convolution"
    if name == "mm":  # a linear layer without a bias, or a product of two activations
        return "linear" if module is not None and any(len(p.shape) == 2
                                                      for p in module.parameters.values()) else "matmul"
    for pattern, function in _FAMILIES:
        if (found := re.fullmatch(pattern, name)) is not None:
            return found.expand(function) if "\\" in function else function
    return _NAMES.get(name, name if name.startswith("_") else name.rstrip("_"))


def list_functions(*modules: ModuleInfo) -> dict[str, OperatorInfo]:
    """The functions that the modules themselves called in the forward pass, but those without cost; longest first."""
    found: dict[str, OperatorInfo] = {}
    for module, row in [(m, row) for m in modules for row in m.operators]:
        if row.phase == "forward" and (row.flops != 0 or row.seconds):
            name = name_function(row.operator, module)
            found[name] = found[name] + row if name in found else row
    return dict(sorted(found.items(), key=lambda item: (-(item[1].seconds or 0), -(item[1].flops or 0), item[0])))


def _list_counted(module: ModuleInfo) -> dict[str, OperatorInfo]:
    return {name: function for name, function in list_functions(*module.walk()).items() if function.flops}


_MAGNITUDES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """``num`` with an SI prefix: the given one, else the largest that keeps it at 1 or above.

    >>> [number_to_string(58_182_404_096), number_to_string(1234, units="M", precision=4), number_to_string(2e-4)]
    ['58.18 G', '0.0012 M', '200 u']
    >>> number_to_string(0), flops_to_string(1.5e12), macs_to_string(29_029_179_392), bytes_to_string(46_758_048)
    ('0 ', '1.5 TFLOPS', '29.03 GMACs', '46.76 MB')
    >>> params_to_string(11_689_512), params_to_string(7e9), duration_to_string(0.00123)
    ('11.69 M', '7 B', '1.23 ms')
    """
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


Write = Callable[[float | None], str]


@dataclass(frozen=True)
class Dialect:
    """How one tool writes its report."""

    title: str
    unit: str                                  #: what the figures are of
    width: int                                 #: of labels
    top: str                                   #: above the largest modules
    params: Write
    flops: Write
    macs: Write
    rate: Write                                #: FLOPs a second
    latency: Write
    names_functions: bool


def _known(write: Callable[[float], str]) -> Write:
    return lambda value: UNKNOWN if value is None else write(value)


def _round(sizes: Sequence[tuple[float, str]], rest: str = "") -> Write:
    return _known(lambda value: next((f"{round(value / size, 2)} {unit}" for size, unit in sizes if value // size > 0),
                                     f"{value}{rest}"))


_SI = ((1e9, "G"), (1e6, "M"), (1e3, "K"))
_SECONDS = ((1, "s"), (1e3, "ms"), (1e6, "us"))
DEEPSPEED = Dialect(
    "-------------------------- DeepSpeed Flops Profiler --------------------------", "GPU", 70,
    "modules in terms of params, MACs or fwd latency at different model depths:", _known(params_to_string),
    _known(number_to_string), _known(macs_to_string), _known(flops_to_string), _known(duration_to_string), False)
FLOPS_PROFILER = Dialect(
    "-------------------------- Flops Profiler --------------------------", "device", 60,
    "modules in terms of params, flops, MACs or duration at different model depths:", _round([(1e6, "M"), (1e3, "k")]),
    _round(_SI), _round([(size, f"{unit}MACs") for size, unit in _SI], " MACs"),
    _round([(size, f"{unit}FLOPS") for size, unit in ((1e12, "T"), *_SI)], " FLOPS"),
    _known(lambda seconds: next((f"{round(seconds * scale, 2)} {unit}" for scale, unit in _SECONDS
                                 if seconds * scale > 1), str(seconds))), True)

NOTATIONS = """\
data parallel size (dp_size), model parallel size (mp_size),
number of parameters (params), number of multiply-accumulate operations (MACs),
number of floating-point operations (flops), floating-point operations per second (FLOPS),
fwd latency (forward propagation latency), bwd latency (backward propagation latency),
step (weights update latency), iter latency (latency of a whole step: fwd, bwd, step and zeroing gradients)"""
_RULE = "-" * 29


@register_report.shipped("deepspeed")
def deepspeed_text(profile: ProfileData, *, profile_step: int | None = None, module_depth: int = -1,
                   top_modules: int = 1, detailed: bool = True, output_file: FilePath | None = None,
                   ignore_modules: Ignored | None = None,
                   recompute_fwd_factor: float = 0.0, engine: bool = False, wall_clock_breakdown: bool = True,
                   dialect: Dialect = DEEPSPEED) -> str:
    """The report of DeepSpeed's profiler, also written to ``output_file`` (its folder is made).

    Labels, order, units and rounding are DeepSpeed's; a figure that is unknown is ``-``. ``ignore_modules`` are
    classes, class names or paths that count as their parent's own. ``engine`` adds the sizes of what runs in parallel
    and the batch, ``wall_clock_breakdown`` the times of backward and step where the profile has them; the backward pass
    counts as 2 + ``recompute_fwd_factor`` forward passes. As there, ``module_depth=-1`` leaves out the deepest
    level. Raises InputError for a profile without modules, a depth or a number of modules that cannot be, and for
    unknown names.
    """
    if not is_count(module_depth, -1) or not is_count(top_modules, 1):
        raise InputError(
            f"module_depth={module_depth!r}, top_modules={top_modules!r}: a depth is 0 or more, or -1 for all, and at "
            "least one module is named")
    root = find_root(profile.modules, "report('deepspeed')")
    root = leave_out(root, ignore_modules) if ignore_modules else root
    step = next(step for step in (profile_step, profile.profile_step, 1) if step is not None)
    note, heading = note_prediction(profile), dialect.unit[0].upper() + dialect.unit[1:]
    fwd = root.fwd_seconds if profile.fwd_seconds is None else profile.fwd_seconds
    figures = [*(_list_sizes(profile, dialect) if engine else ()), *_list_forward(profile, root, dialect, fwd)]
    if wall_clock_breakdown and profile.mode == "train" and profile.bwd_seconds is not None and fwd is not None:
        figures += _list_training(profile, root, dialect, fwd, profile.bwd_seconds, 2 + recompute_fwd_factor)
    lines = ["", dialect.title,
             *([f"Profile on Device: {profile.device or UNKNOWN}"] if dialect.names_functions else []),
             f"Profile Summary at step {step}:", "Notations:", NOTATIONS, *([] if note is None else [note]), "",
             *(f"{label + ': ':<{dialect.width}}  {value:<8}" for label, value in figures),
             "", f"{_RULE} Aggregated Profile per {heading} {_RULE}",
             *aggregate(root, dialect, module_depth, top_modules)]
    if detailed:
        lines += ["", f"{_RULE}- Detailed Profile per {heading} {_RULE}-",
                  "After the name of each module come, in this order:",
                  "params, percentage of total params, MACs, percentage of total MACs, fwd latency, percentage of "
                  "total fwd latency, fwd FLOPS", "", *_Detail(root, dialect).print(root)]
    text = escape_controls("\n".join([*lines, "-" * 78]))
    if output_file is not None:
        Path(output_file).parent.mkdir(parents=True, exist_ok=True)
        write_output(output_file, text + "\n")
    return text


@register_report.shipped("flops-profiler")
def flops_profiler_text(profile: ProfileData, *, module_depth: int = -1, top_modules: int = 10, detailed: bool = True,
                        output_file: FilePath | None = None, ignore_modules: Ignored | None = None) -> str:
    """The report of flops-profiler, which names the functions within each module."""
    return deepspeed_text(profile, module_depth=module_depth, top_modules=top_modules, detailed=detailed,
                          output_file=output_file, ignore_modules=ignore_modules, dialect=FLOPS_PROFILER)


def _list_sizes(profile: ProfileData, dialect: Dialect) -> Iterator[tuple[str, str]]:
    yield "world size", plain(profile.world_size)
    yield "data parallel size", plain(profile.data_parallel_size)
    yield "model parallel size", plain(profile.model_parallel_size)
    yield f"batch size per {dialect.unit}", plain(profile.batch_size)


def _list_forward(profile: ProfileData, root: ModuleInfo, dialect: Dialect,
                  fwd: float | None) -> Iterator[tuple[str, str]]:
    unit, models, flops = dialect.unit, profile.model_parallel_size or 1, root.fwd_flops
    yield f"params per {unit}", dialect.params(root.params)
    if profile.whole_params is None:
        yield f"params of model = params per {unit} * mp_size", dialect.params(_times(root.params, models))
    else:  # ranks share parameters: how many copies there are does not count
        yield "params of model", dialect.params(profile.whole_params)
    yield f"fwd MACs per {unit}", dialect.macs(root.fwd_macs)
    yield f"fwd flops per {unit}", dialect.flops(flops)
    yield f"fwd flops of model = fwd flops per {unit} * mp_size", dialect.flops(_times(flops, models))
    yield "fwd latency", dialect.latency(fwd)
    yield f"fwd FLOPS per {unit} = fwd flops per {unit} / fwd latency", dialect.rate(divide(flops, fwd))


def _list_training(profile: ProfileData, root: ModuleInfo, dialect: Dialect, fwd: float, bwd: float,
                   factor: float) -> Iterator[tuple[str, str]]:
    unit, flops, step = dialect.unit, root.fwd_flops, profile.optimizer_seconds
    iteration = add_quantities((fwd, bwd, step))
    samples = divide(_times(profile.batch_size, profile.world_size or 1), iteration)
    both = _times(flops, factor + 1)
    yield "bwd latency", dialect.latency(bwd)
    yield (f"bwd FLOPS per {unit} = {factor:g} * fwd flops per {unit} / bwd latency",
           dialect.rate(divide(_times(flops, factor), bwd)))
    yield (f"fwd+bwd FLOPS per {unit} = {factor + 1:g} * fwd flops per {unit} / (fwd+bwd latency)",
           dialect.rate(divide(both, fwd + bwd)))
    yield "step latency", dialect.latency(step)
    yield "iter latency", dialect.latency(iteration)
    yield (f"FLOPS per {unit} = {factor + 1:g} * fwd flops per {unit} / iter latency",
           dialect.rate(divide(both, iteration)))
    yield "samples/second", UNKNOWN if samples is None else str(round(samples, 2))


def _times(value: int | None, factor: float) -> float | None:
    return None if value is None else value * factor


def aggregate(root: ModuleInfo, dialect: Dialect = DEEPSPEED, module_depth: int = -1,
              top_modules: int = 1) -> list[str]:
    """Lines that name the classes with the largest sums at each depth above ``module_depth``, or the deepest."""
    sums: list[dict[str, CostInfo]] = []
    for module in root.walk():
        depth = module.depth - root.depth
        if depth == len(sums):
            sums.append({})
        costs = CostInfo(**{name: getattr(module, name) for name in CostInfo.__slots__})
        sums[depth][module.type] = sums[depth][module.type] + costs if module.type in sums[depth] else costs
    compared = [("params", "params", dialect.params), ("flops", "fwd_flops", dialect.flops),
                ("MACs", "fwd_macs", dialect.macs), ("fwd latency", "fwd_seconds", dialect.latency)]
    lines = [f"Top {top_modules} {dialect.top}"]
    for depth, by_class in enumerate(sums[:len(sums) - 1 if module_depth == -1 else module_depth]):
        lines.append(f"depth {depth}:")
        for label, field, write in compared:
            if label != "flops" or dialect.names_functions:
                largest = sorted(by_class.items(), key=lambda item: getattr(item[1], field) or 0, reverse=True)
                shown = {kind: write(getattr(costs, field)) for kind, costs in largest[:top_modules]}
                lines.append(f"    {label:<12}- {shown}")
    return lines


class _Detail:
    def __init__(self, root: ModuleInfo, dialect: Dialect) -> None:
        self.root, self.dialect = root, dialect
        self.functions_seconds = add_quantities(f.seconds for f in _list_counted(root).values())

    def print(self, module: ModuleInfo) -> list[str]:
        """As a module prints itself; a list of modules says nothing of its own, its alike neighbours are one line."""
        children = [(child.path.rpartition(".")[2], self.print(child)) for child in module.children]
        own: list[str] = []
        if module.type == "ModuleList":
            groups = [(list(same), lines) for lines, same in groupby(children, lambda child: child[1])]
            children = [(same[0][0] if len(same) == 1 else f"{same[0][0]}-{same[-1][0]}",
                         [f"{len(same)} x {lines[0]}", *lines[1:]] if len(same) > 1 else lines)
                        for same, lines in groups]
        else:
            names_functions = self.dialect.names_functions
            told = self._tell_functions(module) if names_functions else self._tell(module)
            own = ", ".join([*told, *([module.extra_repr] if module.extra_repr or names_functions else [])]).split("\n")
        if not children and len(own) <= 1:
            return [f"{module.type}({''.join(own)})"]
        below = [f"  {line}" for name, (first, *rest) in children for line in (f"({name}): {first}", *rest)]
        return [f"{module.type}(", *(f"  {line}" for line in own), *below, ")"]

    def _tell(self, module: ModuleInfo) -> list[str]:
        dialect, rate = self.dialect, divide(module.fwd_flops, module.fwd_seconds)
        return [f"{dialect.params(module.params)} = {self._percent(module, 'params')} Params",
                f"{dialect.macs(module.fwd_macs)} = {self._percent(module, 'fwd_macs')} MACs",
                f"{dialect.latency(module.fwd_seconds)} = {self._percent(module, 'fwd_seconds')} latency",
                dialect.rate(None if rate is None else round(rate, 2))]

    def _percent(self, costs: CostInfo, name: str) -> str:
        part, whole = getattr(costs, name), getattr(self.root, name)
        return UNKNOWN + "%" if part is None or whole is None else f"{round(100 * part / whole, 2) if whole else 0:g}%"

    def _tell_functions(self, module: ModuleInfo) -> list[str]:
        root, functions, latency = self.root, _list_counted(module), self.dialect.latency
        row = {"param": self.dialect.params(module.params),
               **self._tell_costs(module.fwd_flops, module.fwd_macs, module.fwd_seconds),
               "params%": _share(module.params, root.params), "flops%": _share(module.fwd_flops, root.fwd_flops),
               "macs%": _share(module.fwd_macs, root.fwd_macs),
               "duration%": _share(module.fwd_seconds, root.fwd_seconds)}
        rows = {name: {**self._tell_costs(f.flops, f.macs, f.seconds), "flops%": _share(f.flops, root.fwd_flops),
                       "macs%": _share(f.macs, root.fwd_macs),
                       "duration%/allfuncs": _share(f.seconds, self.functions_seconds),
                       "duration%/e2e": _share(f.seconds, root.fwd_seconds)} for name, f in functions.items()}
        return [f"module = {row}", f"functionals = {rows}",
                f"functionals_duration = {latency(add_quantities(f.seconds for f in functions.values()))}"]

    def _tell_costs(self, flops: int | None, macs: int | None, seconds: float | None) -> dict[str, str]:
        dialect = self.dialect
        return {"flops": dialect.flops(flops), "macs": dialect.macs(macs), "duration": dialect.latency(seconds),
                "FLOPS": dialect.rate(divide(flops, seconds))}


def _share(part: float | None, whole: float | None) -> str:
    return UNKNOWN if part is None or whole is None else f"{part / whole if whole else 0:.2%}"

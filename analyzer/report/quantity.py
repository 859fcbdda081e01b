"""The quantities of a profile by name: ``peak_allocated_bytes``, ``phases.forward.flops``."""
from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Sequence

from analyzer.errors import InputError
from analyzer.results.info import PhaseInfo
from analyzer.results.profile import Profile
from analyzer.units import add_quantities

from .column import Column, name_columns
from .speed import RATES, read_rate

#: Those of the whole step.
QUANTITIES = name_columns(
    Column("params", "Params", "count"), Column("param_bytes", "Param size", "bytes"),
    Column("whole_params", "Params of all ranks", "count"), Column("host_peak_bytes", "Peak of the host", "bytes"),
    Column("buffer_bytes", "Buffer size", "bytes"), Column("optimizer_bytes", "Optimizer states", "bytes"),
    Column("peak_allocated_bytes", "Peak allocated", "bytes"), Column("peak_reserved_bytes", "Peak reserved", "bytes"),
    Column("fwd_flops", "Fwd FLOPs", "count"), Column("bwd_flops", "Bwd FLOPs", "count"),
    Column("fwd_macs", "Fwd MACs", "count"), Column("bwd_macs", "Bwd MACs", "count"),
    Column("recompute_flops", "Recomputed FLOPs", "count"), Column("recompute_macs", "Recomputed MACs", "count"),
    Column("model_flops", "Model FLOPs", "count"), Column("hardware_flops", "Hardware FLOPs", "count"),
    Column("executed_flops", "Executed FLOPs", "count"), Column("optimizer_flops", "Optimizer FLOPs", "count"),
    Column("fwd_seconds", "Fwd time", "seconds"), Column("bwd_seconds", "Bwd time", "seconds"),
    Column("optimizer_seconds", "Optimizer time", "seconds"), Column("step_seconds", "Step time", "seconds"),
    Column("kernel_seconds", "Kernel time", "seconds"), Column("samples_per_second", "Samples/s", "count"),
    Column("tokens_per_second", "Tokens/s", "count"), Column("model_flops_per_second", "Model FLOP/s", "count"),
    Column("mfu", "MFU", "share"), Column("hfu", "HFU", "share"))
#: Sums over the step that are no fields of a profile.
SUMS = name_columns(Column("saved_bytes", "Saved for backward", "bytes"),
                    Column("comm_bytes", "Communicated", "bytes"))
#: Numbers that say what was run, not what it costs.
SETTINGS = ("batch_size", "tokens", "world_size", "data_parallel_size", "model_parallel_size", "profile_step",
            "measured_steps")
#: What is known however far a step came before memory ran out.
OF_MODEL = ("params", "param_bytes", "buffer_bytes")
_OF_PHASE = tuple(field.name for field in dataclasses.fields(PhaseInfo))
_PHASED = ("phases", "first_step")


def find_quantity(name: str, profiles: Sequence[Profile], caller: str) -> Column:
    """The quantity of that name, which at least one of ``profiles`` has a place for. Raises InputError, with the names
    that resemble it, for another.

    >>> find_quantity("step_seconds", [], "check").unit
    'seconds'
    >>> find_quantity("peak_alocated_bytes", [], "check")
    Traceback (most recent call last):
    analyzer.errors.InputError: check: no quantity 'peak_alocated_bytes'; did you mean peak_allocated_bytes or ...?
    """
    if found := QUANTITIES.get(name) or SUMS.get(name):
        return found
    names = list_names(profiles)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3) or [known for known in names if name and name in known][:3]
        if near:
            raise InputError(f"{caller}: no quantity {name!r}; did you mean {' or '.join(near)}?")
        paths = sorted({known.rpartition(".")[0] + "." for known in names if "." in known})
        more = f"; paths begin with {', '.join(paths)}" if paths else ""
        raise InputError(f"{caller}: no quantity {name!r}; quantities are {', '.join(list_names([]))}{more}")
    return Column(name, name, _find_unit(name))


def list_names(profiles: Iterable[Profile]) -> list[str]:
    """The quantities of the step, and by their paths those of the phases and categories that any profile has."""
    names = [*QUANTITIES, *SUMS]
    for profile in profiles:
        names += [f"{step}.{phase}.{field}" for step in _PHASED for phase in getattr(profile, step)
                  for field in _OF_PHASE]
        names += [f"peak_by_category.{category}" for category in profile.peak_by_category]
    return list(dict.fromkeys(names))


def read_quantity(profile: Profile, name: str) -> float | None:
    """Its value; None where it is unknown, or of a phase that the profile does not have.

    >>> p = Profile(name="Net", mode="infer", peak_by_category={"input": 512}, phases={"forward": PhaseInfo(flops=3)})
    >>> [read_quantity(p, name) for name in ("phases.forward.flops", "phases.backward.flops", "fwd_flops")]
    [3, None, None]
    >>> [read_quantity(p, f"peak_by_category.{name}") for name in ("input", "gradient")]
    [512, 0]
    """
    first, _, rest = name.partition(".")
    value: float | None
    if first == "peak_by_category":
        # categories add up to the peak: nothing is in one that is not named
        value = profile.peak_by_category.get(rest, 0) if profile.peak_by_category else None
    elif first in _PHASED:
        phase, _, field = rest.rpartition(".")
        info = getattr(profile, first).get(phase)
        value = None if info is None else getattr(info, field)
    elif name == "saved_bytes":
        value = None if profile.modules is None else profile.modules.saved_bytes
    elif name == "comm_bytes":
        value = add_quantities(phase.comm_bytes for phase in profile.step_phases.values()) if profile.phases else None
    else:
        value = read_rate(profile, name) if name in RATES else getattr(profile, name)
    return value


def read_known(profile: Profile, name: str) -> float | None:
    """The same; None also for what a step that ran out of memory did not come to.

    >>> from analyzer.results.info import OutOfMemoryInfo
    >>> p = Profile(name="Net", mode="infer", params=3, peak_allocated_bytes=12,
    ...             out_of_memory=OutOfMemoryInfo("aten.mm", "forward", 8, 4))
    >>> read_known(p, "params"), read_known(p, "peak_allocated_bytes")
    (3, None)
    """
    return None if profile.out_of_memory is not None and name not in OF_MODEL else read_quantity(profile, name)


def _find_unit(name: str) -> str:
    last = name.rpartition(".")[2]
    if name.startswith("peak_by_category.") or last.endswith("bytes"):
        return "bytes"
    return "seconds" if last.endswith("seconds") else "count"

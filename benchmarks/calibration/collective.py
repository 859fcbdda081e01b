"""Fits the constants of collectives to measured ones and writes ``kernel_time/fitted/collective.json``.

    python -m benchmarks.calibration.collective

Data: ``benchmarks/truth/kernels/nccl.csv.gz`` (nccl-tests of NVIDIA aiconfigurator, Apache-2.0; profiled kernels of
Vidur, MIT) and tables of ``collectives.json`` (github.com/stas00/ml-engineering, CC-BY-SA-4.0; github.com/
VIA-Research/vTrain, MIT). Method: pattern search on the logarithm of each constant for the least mean of
|log(predicted / measured)|, capped at 0.5 so that no outlier rules, every device weighing the same. What the shape of
the curve is (shares of the bandwidth, extra latency of protocols) is common to all; how fast a generation of devices
starts and hops is its own, and a device left out takes the geometric mean over generations.

Left out: Vidur's all-reduces below 1 MiB and its sends below 256 KiB, whose times hold the wait for other ranks (at
64 to 512 KiB the all-reduces take 1.6 to 3.5 times what nccl-tests measures on the same devices, from 4 MiB on 0.9 to
1.2 times), its A100 between hosts, whose network is not told, and the tables below 16 MiB, which hold the launches of
a script or an older NCCL (A100, 1 MiB among 8: 93 and 102 us, where NCCL 2.27 takes 39). Judged but not fitted: Vidur's
all-reduces from 1 to 4 MiB, and V100 (hybrid cube mesh).
"""
from __future__ import annotations

import functools
import hashlib
import json
import math
import pathlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from analyzer.hardware import ClusterSpec, DeviceSpec, cluster_of, find_cluster, find_device
from analyzer.hardware.kernel_time.collective import Cost, Path, estimate_collective, find_path, name_spread
from benchmarks.truth.table import Constants, read_rows, read_truth, rounded, write_constants

_PAIRS = {"a100_80gb": "a100_pcie_pairs", "h100_sxm": "h100_pcie_pairs", "a40": "a40_pairs"}
_HOSTS = {"a100-": "dgx_a100", "h200-": "dgx_h200", "b200-": "aws_p6_b200", "v100-": "dgx1_v100"}  # by a table's name
_PROFILED_BYTES = {"all_reduce": 2**20, "send_recv": 2**18}
_FITTED_BYTES = 4 * 2**20
_TABLED_BYTES = 16 * 2**20
_CAP = 0.5
_FOLDS = 5
_TURNS = 3
_JUDGED = 500  # cases of a device and scheme
_FEWEST = 20  # cases that tell a spread
_SMALL_BYTES = 256 * 2**10
_UNKNOWN_SPREAD = 1.0  # a factor of two: too little measured
FABRICS = ("infiniband", "ethernet")
MEDIA = ("nvlink", "pcie", "host", "sockets", *FABRICS)

#: Where the search begins: round numbers read off the curves. No case moves some, so that they stay: the ring's share
#: of InfiniBand (365 of 400 GB/s on EFA, H200, four hosts: h200-4nodes-allreduce of collectives.json), LL's share of it
#: and what sends side by side and pairs reach over PCI Express and networks (assumed: as over NVLink).
START: Constants = json.loads(pathlib.Path(__file__).with_suffix(".json").read_text())
_OF_GENERATION = ("base_seconds", "nvlink_hop_seconds", "ll128_base_seconds", "send_own_block")
_BLACKWELL_SHARP = 0.74 / 0.85  # nvlsEfficiency of Blackwell and of Hopper: NCCL, src/graph/tuning.cc


class Case(NamedTuple):  # one measured collective; ``source`` is the program or table that told it
    device: str
    architecture: str
    kind: str
    nbytes: int
    ranks: int
    dtype: str
    seconds: float
    path: Path
    roofline: float
    is_fitted: bool
    source: str = ""


def read_cases() -> list[Case]:  # every measured collective whose links are known, in the order of the files
    rows = [case for row in read_rows("nccl") if (case := _read_row(row)) is not None]
    return rows + [case for table in read_truth("kernels/collectives") for case in _table(table)]


def _read_row(row: Mapping[str, str]) -> Case | None:
    is_profiled, nbytes = row["source"].startswith("vidur"), int(row["bytes"])
    ranks, hosts = int(row["gpus"]), int(row["nodes"])
    name = find_device(row["device"].removesuffix(" (Vidur)")).name
    if is_profiled and (nbytes < _PROFILED_BYTES[row["op"]] or hosts > 1 and not (row["source"] == "vidur h100_dgx")):
        return None
    cluster = cluster_of(name)
    if row["link"] == "nvlink pairs":
        cluster = find_cluster(_PAIRS[name])
    elif name == "l40s" and ranks > 2:
        cluster = find_cluster("l40s_host_memory")
    kind = {"send_recv": "send"}.get(row["op"], row["op"])
    return _case(cluster, kind, nbytes, ranks, hosts, row["dtype"], float(row["us"]) * 1e-6,
                 not is_profiled or kind == "send" or nbytes >= _FITTED_BYTES, row["source"])


# Times that each byte of the buffer crosses the slowest link, for n ranks in a ring: NVIDIA nccl-tests,
# doc/PERFORMANCE.md, "Bus bandwidth", Summary. Point-to-point sends cross once.
_CROSSINGS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n, "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n, "all_to_all": lambda n: (n - 1) / n, "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0, "send": lambda n: 1.0}


def _ring_seconds(kind: str, nbytes: int, ranks: int, device: DeviceSpec) -> float | None:
    """Seconds of a ring at the full rate of a link, without latency: what predictions are compared with."""
    bandwidth = device.nvlink_bandwidth or device.pcie_bandwidth
    return None if bandwidth is None else nbytes * _CROSSINGS[kind](ranks) / bandwidth


def _case(cluster: ClusterSpec, kind: str, nbytes: int, ranks: int, hosts: int, dtype: str, seconds: float,
          is_fitted: bool, source: str) -> Case | None:
    path = find_path(cluster, ranks, -(-ranks // hosts))
    roofline = _ring_seconds(kind, nbytes, ranks, cluster.device)
    if path is None or roofline is None:
        return None
    device = cluster.device
    return Case(device.name, device.architecture or "", kind, nbytes, ranks, dtype, seconds, path, roofline, is_fitted,
                source)


def _table(table: Mapping[str, Any]) -> Iterable[Case]:
    """The cases of a table of all-reduces on one known kind of host, or of B200 hosts on EFA."""
    name = table["name"]
    columns = table.get("columns", [])
    cluster = next((find_cluster(cluster) for device, cluster in _HOSTS.items() if name.startswith(device)), None)
    if cluster is None or "bytes" not in columns:
        return
    for row in table["rows"]:
        values = dict(zip(columns, row))
        for hosts, column in ((1, "busbw_gb_s"), (1, "busbw_gb_s_1_node"), (4, "busbw_gb_s_4_nodes")):
            if column not in values or values["bytes"] < (2**20 if hosts > 1 else _TABLED_BYTES):
                continue
            ranks = table["gpus"] if isinstance(table["gpus"], int) else table["gpus"][hosts > 1]
            seconds = 2 * (ranks - 1) / ranks * values["bytes"] / values[column] / 1e9
            case = _case(cluster, table["collective"], values["bytes"], ranks, hosts, "fp16",
                         values["us"] * 1e-6 if "us" in values else seconds, not name.startswith("v100-"), name)
            if case is not None:
                yield case


def _predict(case: Case, constants: Mapping[str, float]) -> Cost:
    return estimate_collective(case.kind, case.nbytes, case.ranks, case.path, constants, case.dtype)


def _search(loss: Callable[[Constants], float], start: Constants, keys: Iterable[str], rounds: int) -> Constants:
    """Each key in turn up or down by its own step, which grows with success and shrinks without."""
    best, least = dict(start), loss(start)
    steps = dict.fromkeys(keys, 0.3)
    for _ in range(rounds):
        for key, step in steps.items():
            for factor in (1 + step, 1 / (1 + step)):
                tried = {**best, key: best[key] * factor}
                value = loss(tried) if tried[key] <= 1 or not key.endswith("_share") else math.inf
                if value < least:
                    best, least, steps[key] = tried, value, min(1.3 * step, 0.5)
                    break
            else:
                steps[key] = step / 2
    return best


def _thin(cases: Iterable[Case], most: int) -> list[Case]:  # a deterministic sample: the ``most`` with the least hash
    return sorted(cases, key=_hash)[:most]


@functools.cache
def _hash(case: Case) -> str:
    return hashlib.md5(repr(case[:7]).encode()).hexdigest()


class Fit(NamedTuple):  # constants by level, as ``find_constants`` merges them; without spreads
    generic: Constants
    architectures: dict[str, Constants]

    def of(self, case: Case) -> Constants:  # the constants of a case, its architecture's before the generic ones
        return {**self.generic, **self.architectures.get(case.architecture, {})}


def fit(cases: Iterable[Case], sample: int = 180, rounds: int = 12) -> Fit:
    """Constants from cases, alternating between what is common and what is a generation's own."""
    by_device: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in cases:
        if case.is_fitted:
            by_device[case.architecture, case.path.medium].append(case)
    groups = [_thin(group, sample) for group in by_device.values()]
    generic = dict(START)
    own = {name: {key: START[key] for key in keys} for name, keys in _told(groups).items()}
    for turn in range(_TURNS):
        for name, constants in own.items():
            mine = [group for group in groups if group[0].architecture == name]
            found = _search(functools.partial(_loss, mine, {}), {**generic, **constants}, constants, rounds)
            own[name] = {key: found[key] for key in constants}
        for key in _OF_GENERATION:  # what a generation without data of its own takes
            values = [math.log(constants[key]) for constants in own.values() if key in constants]
            generic[key] = math.exp(sum(values) / len(values)) if values else START[key]
        if turn < _TURNS - 1:
            generic = _search(functools.partial(_loss, groups, own), generic, START, rounds)
    if "Blackwell" in own:
        own["Blackwell"]["sharp_share"] = generic["sharp_share"] * _BLACKWELL_SHARP
    return Fit(generic, own)


def _told(groups: Iterable[list[Case]]) -> dict[str, tuple[str, ...]]:
    """By architecture, which of its own constants its cases tell: those of latency, if there are small sizes."""
    told: dict[str, tuple[str, ...]] = {}
    for group in groups:
        if sum(case.nbytes < _SMALL_BYTES for case in group) >= _FEWEST:
            keys = _OF_GENERATION if group[0].path.medium == "nvlink" else _OF_GENERATION[:1]
            told[group[0].architecture] = max(keys, told.get(group[0].architecture, ()), key=len)
    return told


def _loss(groups: Iterable[list[Case]], own: Mapping[str, Constants], constants: Constants) -> float:
    """Mean over groups of the mean absolute logarithmic error of their cases, each capped."""
    means = []
    for group in groups:
        name = group[0].architecture
        merged = {**constants, **own.get(name, {})}
        if name == "Blackwell":
            merged["sharp_share"] = constants["sharp_share"] * _BLACKWELL_SHARP
        errors = (abs(math.log(_predict(case, merged).seconds / case.seconds)) for case in group)
        means.append(sum(min(error, _CAP) for error in errors) / len(group))
    return sum(means) / len(means)


class Held(NamedTuple):  # a case predicted with constants that it did not help to fit
    case: Case
    scheme: str
    predicted: Cost

    @property
    def error(self) -> float:  # how far the larger of predicted and measured is above the other
        ratio = self.predicted.seconds / self.case.seconds
        return max(ratio, 1 / ratio) - 1


@functools.cache
def hold_out() -> tuple[Held, ...]:
    """Cases predicted without the fold of their shape, and without their device where others share its medium."""
    cases, held = read_cases(), []
    for fold in range(_FOLDS):
        found = fit(case for case in cases if _fold(case) != fold)
        held += [Held(case, "fold", _predict(case, found.of(case))) for case in cases if _fold(case) == fold]
    for device in dict.fromkeys(case.device for case in cases):
        others = [case for case in cases if case.device != device]
        found, media = fit(others), {case.path.medium for case in others}
        held += [Held(case, "device", _predict(case, found.of(case)))
                 for case in cases if case.device == device and case.path.medium in media]
    return tuple(held)


def _fold(case: Case) -> int:
    shape = f"{case.kind} {case.ranks} {case.nbytes}"
    return int(hashlib.md5(shape.encode()).hexdigest(), 16) % _FOLDS


def _spreads(held: Iterable[Held]) -> Constants:
    """What nine in ten errors stay below, by the name of the constant, where there are enough of them to tell."""
    errors: dict[str, list[float]] = defaultdict(list)
    for one in held:
        errors[name_spread(one.case.path, one.predicted)].append(one.error)
    return {key: round(sorted(values)[int(0.9 * len(values))], 3)
            for key, values in sorted(errors.items()) if len(values) >= _FEWEST}


def _levels(held: Iterable[Held]) -> dict[str, dict[str, Constants]]:
    """Spreads by level: of a device from folds, of an architecture and of all from devices left out.

    A medium of which one machine alone was measured takes twice what its folds say. A network is none of the device's.
    """
    generic, architectures, devices = [], defaultdict(list), defaultdict(list)
    for one in held:
        if one.case.path.medium in FABRICS:
            continue
        if one.scheme == "fold":
            devices[one.case.device].append(one)
        else:
            generic.append(one)
            architectures[one.case.architecture].append(one)
    spreads, of_folds = _spreads(generic), _spreads(one for one in held if one.scheme == "fold")
    for medium in MEDIA:
        for size in ("small", "middle", "large"):
            key = f"{medium}_spread_{size}"
            spreads.setdefault(key, 2 * of_folds.get(key, _UNKNOWN_SPREAD / 2))
    return {"generic": {"": spreads}, "architectures": {k: _spreads(v) for k, v in architectures.items()},
            "devices": {k: _spreads(v) for k, v in devices.items()}}


def cross_validate() -> list[tuple[str, str, str, float, float, float, float]]:
    """Rows (family, device, scheme, measured, predicted, spread, roofline), no case fitted with itself.

    At most 500 of a device and scheme. The spread is the one that the constants' file gives at that level.
    """
    held = hold_out()
    levels = _levels(held)
    groups: dict[tuple[str, str], list[Held]] = defaultdict(list)
    for one in held:
        groups[one.case.device, one.scheme].append(one)
    rows = []
    for (device, scheme), group in groups.items():
        for one in sorted(group, key=lambda one: _hash(one.case))[:_JUDGED]:
            key = name_spread(one.case.path, one.predicted)
            spreads = {**levels["generic"][""], **levels["architectures"].get(one.case.architecture, {})}
            if scheme == "fold":
                spreads |= levels["devices"].get(device, {})
            rows.append(("collective", device, scheme, one.case.seconds, one.predicted.seconds, spreads[key],
                         one.case.roofline))
    return rows


def main() -> None:  # fit to all cases, take the spreads from those held out, and write the file
    found, levels = fit(read_cases()), _levels(hold_out())
    architectures = {name: {**found.architectures.get(name, {}), **levels["architectures"].get(name, {})}
                     for name in sorted({*found.architectures, *levels["architectures"]})}
    write_constants(
        "collective", {
            "data": "benchmarks/truth/kernels/nccl.csv.gz (github.com/ai-dynamo/aiconfigurator, github.com/microsoft/"
                    "vidur), collectives.json (github.com/stas00/ml-engineering, github.com/VIA-Research/vTrain)",
            "licence": "Apache-2.0 (aiconfigurator), MIT (vidur, vTrain), CC-BY-SA-4.0 (ml-engineering)",
            "date": "2026-11",
            "note": "shares of the links' bandwidth and protocols' latencies for all devices, base and hop latency by "
                    "architecture; spreads of devices from 5 folds by shape, others from devices left out"},
        rounded({**found.generic, **levels["generic"][""]}),
        {name: rounded(values) for name, values in architectures.items()},
        {name: rounded(values) for name, values in sorted(levels["devices"].items())})


if __name__ == "__main__":
    main()

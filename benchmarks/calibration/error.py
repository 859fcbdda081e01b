"""Finds what errors of kernels have in common: ``python -m benchmarks.calibration.error``, a quarter of an hour.

Data: the kernels of `matmul`, `attention`, `memory_bound` and `collective`, each predicted with its device left out, as
a step runs on a machine and with libraries that the constants do not know. Kernels of one program (a library and its
version, on one machine), one operator and about one size, a decade wide, are a group: a model's layers run those.

``common_share``: the part of the variance of errors that lies between groups, by a one-way analysis of variance of the
logarithms of predicted over measured (Searle, Casella and McCulloch, Variance Components, 1992, 3.6), whose groups
centre on zero, as a group's own mean is an error too. The mean over families. No measured step has a part in it.
"""
from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from datetime import date
from typing import NamedTuple

from benchmarks.truth.table import write_constants

from . import attention, collective, matmul, matmul_cases, memory_bound

FEWEST = 10  # kernels that tell of a group
LARGEST = 1.0  # logarithm, of an error that counts: above, another kernel ran than was predicted


class Residual(NamedTuple):  # a kernel's error with its device left out, as a logarithm, and the group that it is in
    family: str
    group: Hashable
    error: float


class Share(NamedTuple):
    """Of the errors of a family: standard deviations between groups and within them, and the part between."""

    groups: int
    kernels: int
    common: float
    own: float

    @property
    def share(self) -> float:
        return self.common**2 / (self.common**2 + self.own**2)


def decade(size: float) -> int:
    return round(math.log10(size + 1))


def read_residuals() -> Iterator[Residual]:
    units = matmul.units_of(matmul_cases.all_cases())
    for product in matmul.residuals(units, matmul.own_clocks(units)):
        if product.scheme == "device":
            case = product.case
            flops = 2 * case.batch * case.m * case.n * case.k
            yield Residual("matrix product", (case.device, case.source, case.dtype, case.clock, decade(flops)),
                           math.log(product.seconds / case.seconds))
    for sample, scheme, error, _ in attention.judged():
        if scheme == "device":
            size = sample.size
            pairs = size.batch * size.heads * size.q_len * size.kv_len * size.head_dim
            yield Residual("attention", (sample.device.name, sample.source, sample.phase, decade(pairs)), error)
    for judged in memory_bound.judge_rows():
        if judged.scheme == "device":
            row = judged.row
            yield Residual("memory-bound", (row.device.name, row.op, decade(row.nbytes)),
                           math.log(judged.predicted / row.seconds))
    for held in collective.hold_out():
        if held.scheme == "device":
            message = held.case
            yield Residual("collective", (message.device, message.source, message.kind, decade(message.nbytes)),
                           math.log(held.predicted.seconds / message.seconds))


def find_share(groups: Iterable[Sequence[float]]) -> Share:
    """What errors have in common within their groups.

    >>> find_share([[0.2] * 10, [-0.2] * 10]).share, find_share([[0.2, -0.2] * 5] * 2).share
    (1.0, 0.0)
    """
    told = [[max(-LARGEST, min(LARGEST, error)) for error in group] for group in groups if len(group) >= FEWEST]
    kernels = sum(map(len, told))
    within = math.fsum(statistics.pvariance(group) * len(group) for group in told) / (kernels - len(told))
    noise = within * statistics.fmean(1 / len(group) for group in told)
    between = statistics.fmean(statistics.fmean(group) ** 2 for group in told) - noise
    return Share(len(told), kernels, math.sqrt(max(0.0, between)), math.sqrt(within))


def find_shares(residuals: Iterable[Residual]) -> dict[str, Share]:
    groups: dict[str, dict[Hashable, list[float]]] = defaultdict(lambda: defaultdict(list))
    for residual in residuals:
        groups[residual.family][residual.group].append(residual.error)
    return {family: find_share(of.values()) for family, of in groups.items()}


def main() -> None:
    shares = find_shares(read_residuals())
    note = "; ".join(f"{family} {found.share:.2f}" for family, found in shares.items())
    write_constants("error", {
        "data": "the kernels of benchmarks/truth/kernels, as benchmarks/calibration predicts them with their device "
                "left out", "licence": "that of the data: Apache-2.0 and MIT", "date": date.today().isoformat(),
        "note": f"the part of the variance that kernels of one program, operator and size have in common: {note}"},
        {"common_share": round(statistics.fmean(found.share for found in shares.values()), 2)})


if __name__ == "__main__":
    main()

"""Writes the constants of copies between host and device: ``kernel_time/fitted/host_copy.json``.

    python -m benchmarks.calibration.host_copy

Data: nvbandwidth on an H200 (``benchmarks/truth/kernels/collectives.json``, ``pcie5-x16-h200``, github.com/stas00/
ml-engineering, CC-BY-SA-4.0), CUDA's bandwidthTest on a P100 and a profile of pageable copies, quoted below. Method:
the geometric mean of bandwidth over that of the bus, by direction. Too few for a fold: the spreads are the largest
distance of a point from its mean, and a factor of two for pageable memory, which depends on the host.
"""
from __future__ import annotations

from statistics import geometric_mean

from benchmarks.truth.table import read_truth, rounded, write_constants

_PCIE_5, _PCIE_3 = 64e9, 16e9
# github.com/mpicbg-scicomp/gearshifft/pull/82: bandwidthTest, pinned, 32 MiB, the processor beside the device
_P100 = {"to_device": 12150.7e6, "from_device": 12890.6e6}
# github.com/microsoft/onnxruntime/issues/20947: Nsight Systems, Pageable to Device, MB and seconds
_PAGEABLE = ((1.573e6, 139392e-9), (0.786e6, 70432e-9), (0.786e6, 68896e-9))
# github.com/pytorch/pytorch/pull/138018: Memcpy DtoH (Device -> Pageable) in torch.save on an A100, bytes/s
_PAGEABLE_FROM_DEVICE = 1.4e9
# the floor of a kernel in a CUDA graph of A100, H100 and H200: smallest products of gemm.csv.gz
_LATENCY = 2.5e-6


def main() -> None:
    tables = {table["name"]: table["rows"] for table in read_truth("kernels/collectives")}
    h200 = {"to_device" if name == "host to device" else "from_device": gigabytes * 1e9
            for name, gigabytes in tables["pcie5-x16-h200"]}
    shares = {direction: [h200[direction] / _PCIE_5, _P100[direction] / _PCIE_3] for direction in _P100}
    means = {direction: geometric_mean(values) for direction, values in shares.items()}
    spread = max(max(share / means[direction], means[direction] / share) - 1
                 for direction, values in shares.items() for share in values)
    constants = {"latency_seconds": _LATENCY, "pinned_to_device_share": means["to_device"],
                 "pinned_from_device_share": means["from_device"], "pinned_spread": 2 * spread,
                 "pageable_to_device_bandwidth": geometric_mean(size / seconds for size, seconds in _PAGEABLE),
                 "pageable_from_device_bandwidth": _PAGEABLE_FROM_DEVICE, "pageable_spread": 1.0}
    # the device of the table: its own figures, as near as two digits tell
    devices = {"h200": rounded({f"pinned_{direction}_share": rate / _PCIE_5 for direction, rate in h200.items()})}
    write_constants("host_copy", {
        "data": "benchmarks/truth/kernels/collectives.json, pcie5-x16-h200 (github.com/stas00/ml-engineering); "
                "mpicbg-scicomp/gearshifft pull 82; microsoft/onnxruntime issue 20947; pytorch/pytorch pull 138018",
        "licence": "CC-BY-SA-4.0 (ml-engineering); single figures quoted from the others", "date": "2026-11",
        "note": "shares of the bus's bandwidth from two machines, twice their distance as spread; pageable memory "
                "from one each way"}, rounded(constants), {}, devices)


if __name__ == "__main__":
    main()

"""NVIDIA devices. Rates are dense: where a data sheet prints only the figure with sparsity, half of it stands here.

Memory sizes are what the driver gave a program on one such machine; they differ by some MiB between driver versions.
No document gives the cost of a kernel launch, so it is unknown throughout. Compute capabilities:
developer.nvidia.com/cuda-gpus.
"""
from __future__ import annotations

from typing import Any

from .device_spec import DeviceSpec, PeakRates

_H200_SHEET = ("NVIDIA H200 Tensor Core GPU datasheet, Technical Specifications, H200 SXM "
               "(nvidia.com/en-us/data-center/h200)")
_H200_DRIVER = ("torch.cuda.get_device_properties on an H200: total_memory=143156MB (MiB, rounded down), "
                "multi_processor_count=132, L2_cache_size=60MB "
                "(quoted in github.com/ai-bot-pro/achatbot, deploy/modal/src/llm/vllm/vlm/skywork_r1v.py)")
_H100_PAPER = (
    "NVIDIA H100 Tensor Core GPU Architecture whitepaper v1.04, Table 3 (comparison of A100 and H100), column H100 "
    "SXM5, first figure of each pair (resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper)")
_H100_SHEET = ("NVIDIA H100 Tensor Core GPU datasheet, Technical Specifications, H100 SXM "
               "(nvidia.com/en-us/data-center/h100)")
_A100_PAPER = (
    "NVIDIA A100 Tensor Core GPU Architecture whitepaper V1.0, Table 4 (Comparison of NVIDIA Data Center GPUs), column "
    "A100, first figure of each pair "
    "(images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf)")
_A100_SHEET = (
    "NVIDIA A100 Tensor Core GPU datasheet, specifications, A100 80GB SXM "
    "(nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-nvidia-us-2188504-web.pdf)")
_ADA_PAPER = ("NVIDIA Ada GPU Architecture whitepaper v2.1 "
              "(images.nvidia.com/aem-dam/Solutions/Data-Center/l4/nvidia-ada-gpu-architecture-whitepaper-v2.1.pdf)")
_ADA_FP64 = f"1/64 of fp32: {_ADA_PAPER}, Ada AD102 GPU, note on FP64 cores"
_ADA_FP64_TENSOR = "Ada has no FP64 tensor cores of their own"
_RTX_4090_PAPER = f"{_ADA_PAPER}, Appendix A, Table 2 (GeForce RTX 4090), FP32 accumulation, first figure of each pair"
_L4_SHEET = ("NVIDIA L4 Tensor Core GPU datasheet, specifications "
             "(resources.nvidia.com/en-us-gpu-resources/l4-tensor-datasheet)")
_T4_SHEET = ("NVIDIA T4 Tensor Core GPU datasheet, Performance "
             "(nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf)")
_NO_NVLINK = None, "the card has no NVLink"



def _device(name: str, architecture: str, capability: tuple[int, int], aliases: tuple[str, ...], rates: PeakRates,
            rate_sources: dict[str, str], **figures: tuple[Any, str]) -> DeviceSpec:
    """A device from figures with their sources; of rates, ``all`` is the source of those without one of their own."""
    sources = {"flops_per_second" if rate == "all" else f"flops_per_second.{rate}": source
               for rate, source in rate_sources.items()}
    return DeviceSpec(name, vendor="NVIDIA", architecture=architecture, compute_capability=capability, aliases=aliases,
                      flops_per_second=rates, sources=sources | {name: source for name, (_, source) in figures.items()},
                      **{name: value for name, (value, _) in figures.items()})


def _half(document: str) -> str:
    return f"half of the figure with sparsity: {document}"


def _device_query(machine: str) -> str:
    return f"deviceQuery of the CUDA samples on {machine}"


def _one_way(gigabytes: int, document: str) -> tuple[float, str]:
    """NVIDIA prints a link's bytes/s with both directions added up; a spec holds one direction."""
    # PCI Express x16 by generation, in NVIDIA's data sheets
    lanes = {32: " (Gen3 x16)", 64: " (Gen4 x16)", 128: " (Gen5 x16)"}.get(gigabytes, "")
    return gigabytes * 1e9 / 2, f"half of {gigabytes} GB/s both ways{lanes}: {document}"


H200 = _device(
    "h200", "Hopper", (9, 0), ("h200_sxm", "nvidia_h200"),
    PeakRates(fp64=34e12, fp64_tensor=67e12, fp32=67e12, tf32=989e12 / 2, bf16=1979e12 / 2, fp16=1979e12 / 2,
              fp8=3958e12 / 2, int8=3958e12 / 2),
    {"all": _half(_H200_SHEET), "fp64": _H200_SHEET, "fp64_tensor": _H200_SHEET, "fp32": _H200_SHEET},
    memory_bytes=(143156 * 2**20, _H200_DRIVER), memory_bandwidth=(4.8e12, _H200_SHEET),
    multiprocessors=(132, _H200_DRIVER), l2_bytes=(60 * 2**20, _H200_DRIVER),
    nvlink_bandwidth=_one_way(900, _H200_SHEET), pcie_bandwidth=_one_way(128, _H200_SHEET))

H100_SXM = _device(
    "h100_sxm", "Hopper", (9, 0), ("h100", "nvidia_h100_80gb_hbm3"),
    PeakRates(fp64=33.5e12, fp64_tensor=66.9e12, fp32=66.9e12, tf32=494.7e12, bf16=989.4e12, fp16=989.4e12,
              fp8=1978.9e12, int8=1978.9e12),
    {"all": _H100_PAPER},
    memory_bytes=(85_028_896_768, _device_query("an H100 80GB HBM3, CUDA 12.8 driver: 81090 MBytes")),
    memory_bandwidth=(3352e9, _H100_PAPER), multiprocessors=(132, _H100_PAPER), l2_bytes=(50 * 2**20, _H100_PAPER),
    nvlink_bandwidth=_one_way(900, _H100_SHEET), pcie_bandwidth=_one_way(128, _H100_SHEET))


def _a100(name: str, aliases: tuple[str, ...], **memory: tuple[Any, str]) -> DeviceSpec:
    return _device(
        name, "Ampere", (8, 0), aliases,
        PeakRates(fp64=9.7e12, fp64_tensor=19.5e12, fp32=19.5e12, tf32=156e12, bf16=312e12, fp16=312e12, int8=624e12),
        {"all": _A100_PAPER, "fp8": "Ampere tensor cores have no FP8"}, **memory,
        multiprocessors=(108, _A100_PAPER), l2_bytes=(40 * 2**20, _A100_PAPER),
        nvlink_bandwidth=_one_way(600, _A100_SHEET), pcie_bandwidth=_one_way(64, _A100_SHEET))


A100_40GB = _a100(
    "a100_40gb", ("a100_sxm4_40gb", "nvidia_a100_sxm4_40gb"), memory_bandwidth=(1555e9, _A100_PAPER),
    memory_bytes=(42_298_834_944, _device_query(
        "an A100-SXM4-40GB, CUDA 12.2 driver (github.com/bottlerocket-os/bottlerocket/pull/3873)")))

A100_80GB = _a100(
    "a100_80gb", ("a100", "a100_sxm4_80gb", "nvidia_a100_sxm4_80gb"), memory_bandwidth=(2039e9, _A100_SHEET),
    memory_bytes=(84_987_740_160, _device_query("an A100-SXM4-80GB, CUDA 12.2 driver: 81051 MBytes")))

L4 = _device(
    "l4", "Ada Lovelace", (8, 9), ("nvidia_l4",),
    PeakRates(fp64=30.3e12 / 64, fp32=30.3e12, tf32=120e12 / 2, bf16=242e12 / 2, fp16=242e12 / 2, fp8=485e12 / 2,
              int8=485e12 / 2),
    {"all": _half(_L4_SHEET), "fp64": _ADA_FP64, "fp64_tensor": _ADA_FP64_TENSOR, "fp32": _L4_SHEET},
    memory_bytes=(23_583_784_960, _device_query(
        "an L4, CUDA 12.2 driver (github.com/bottlerocket-os/bottlerocket-kernel-kit/pull/139)")),
    memory_bandwidth=(300e9, _L4_SHEET), l2_bytes=(48 * 2**20, _device_query("an L4: 50331648 bytes")),
    multiprocessors=(58, _device_query("an L4: 58 multiprocessors, 7424 CUDA cores")),
    nvlink_bandwidth=_NO_NVLINK, pcie_bandwidth=_one_way(64, _L4_SHEET))

T4 = _device(
    "t4", "Turing", (7, 5), ("tesla_t4", "nvidia_t4"),
    PeakRates(fp64=8.1e12 / 32, fp32=8.1e12, fp16=65e12, int8=130e12),
    {"all": "Turing tensor cores take FP16, INT8, INT4 and INT1 only",
     "fp64": "1/32 of fp32: NVIDIA Turing GPU Architecture whitepaper WP-09183-001, note on FP64 units",
     "fp32": _T4_SHEET, "fp16": _T4_SHEET, "int8": _T4_SHEET},
    memory_bytes=(15_655_829_504, _device_query(
        "a Tesla T4, CUDA 12.2 driver (github.com/bottlerocket-os/bottlerocket/pull/3798)")),
    memory_bandwidth=(320e9, _device_query("a Tesla T4: 5001 MHz, double data rate, 256-bit bus")),
    multiprocessors=(40, _device_query("a Tesla T4: 40 multiprocessors, 2560 CUDA cores")),
    l2_bytes=(4 * 2**20, _device_query("a Tesla T4: 4194304 bytes")),
    nvlink_bandwidth=_NO_NVLINK, pcie_bandwidth=_one_way(32, _T4_SHEET))

RTX_4090 = _device(
    "rtx_4090", "Ada Lovelace", (8, 9), ("4090", "rtx4090", "geforce_rtx_4090", "nvidia_geforce_rtx_4090"),
    PeakRates(fp64=82.6e12 / 64, fp32=82.6e12, tf32=82.6e12, bf16=165.2e12, fp16=165.2e12, fp8=330.3e12, int8=660.6e12),
    {"all": _RTX_4090_PAPER, "fp64": _ADA_FP64, "fp64_tensor": _ADA_FP64_TENSOR},
    memory_bytes=(25_393_692_672, "torch.cuda.get_device_properties on Linux: total_memory 25393692672 (23.65 GiB in "
                                  "PyTorch's messages)"),
    memory_bandwidth=(1008e9, _RTX_4090_PAPER), multiprocessors=(128, _RTX_4090_PAPER),
    l2_bytes=(73728 * 2**10, f"73728 KB: {_RTX_4090_PAPER}"), nvlink_bandwidth=_NO_NVLINK,
    pcie_bandwidth=_one_way(64, "NVIDIA GeForce RTX 4090 specifications"))

NVIDIA_DEVICES = (H200, H100_SXM, A100_40GB, A100_80GB, L4, T4, RTX_4090)

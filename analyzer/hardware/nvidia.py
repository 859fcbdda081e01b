"""NVIDIA devices. Rates are dense: where a data sheet prints only the figure with sparsity, half of it stands here.

Memory sizes are what the driver gave a program on one such machine; they differ by some MiB between driver versions.
No document gives the cost of a kernel launch, so it is unknown throughout. Compute capabilities:
developer.nvidia.com/cuda-gpus.
"""
from __future__ import annotations

from .device_spec import DeviceSpec, PeakRates

# Both directions added up, as NVIDIA prints them; a spec holds one direction.
_NVLINK_3, _NVLINK_4 = 600e9, 900e9
# PCI Express x16, both directions: NVIDIA's data sheets print 32, 64 and 128 GB/s for Gen3, Gen4 and Gen5.
_PCIE_3, _PCIE_4, _PCIE_5 = 32e9, 64e9, 128e9

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
_RTX_4090_PAPER = f"{_ADA_PAPER}, Appendix A, Table 2 (GeForce RTX 4090), FP32 accumulation, first figure of each pair"
_L4_SHEET = ("NVIDIA L4 Tensor Core GPU datasheet, specifications "
             "(resources.nvidia.com/en-us-gpu-resources/l4-tensor-datasheet)")
_T4_SHEET = ("NVIDIA T4 Tensor Core GPU datasheet, Performance "
             "(nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf)")
_TURING_PAPER = "NVIDIA Turing GPU Architecture whitepaper WP-09183-001"
_NO_NVLINK = "the card has no NVLink"


def _half(document: str) -> str:
    return f"half of the figure with sparsity: {document}"


def _device_query(machine: str) -> str:
    return f"deviceQuery of the CUDA samples on {machine}"


H200 = DeviceSpec(
    "h200", vendor="NVIDIA", architecture="Hopper", compute_capability=(9, 0),
    memory_bytes=143156 * 2**20, memory_bandwidth=4.8e12, multiprocessors=132, l2_bytes=60 * 2**20,
    nvlink_bandwidth=_NVLINK_4 / 2, pcie_bandwidth=_PCIE_5 / 2,
    flops_per_second=PeakRates(fp64=34e12, fp64_tensor=67e12, fp32=67e12, tf32=989e12 / 2, bf16=1979e12 / 2,
                               fp16=1979e12 / 2, fp8=3958e12 / 2, int8=3958e12 / 2),
    aliases=("h200_sxm", "nvidia_h200"),
    sources={
        "memory_bytes": _H200_DRIVER, "memory_bandwidth": _H200_SHEET, "flops_per_second": _half(_H200_SHEET),
        **{f"flops_per_second.{name}": _H200_SHEET for name in ("fp64", "fp64_tensor", "fp32")},
        "multiprocessors": _H200_DRIVER, "l2_bytes": _H200_DRIVER,
        "nvlink_bandwidth": f"half of 900 GB/s both ways: {_H200_SHEET}",
        "pcie_bandwidth": f"half of 128 GB/s both ways (Gen5 x16): {_H200_SHEET}"})

H100_SXM = DeviceSpec(
    "h100_sxm", vendor="NVIDIA", architecture="Hopper", compute_capability=(9, 0),
    memory_bytes=85_028_896_768, memory_bandwidth=3352e9, multiprocessors=132, l2_bytes=50 * 2**20,
    nvlink_bandwidth=_NVLINK_4 / 2, pcie_bandwidth=_PCIE_5 / 2,
    flops_per_second=PeakRates(fp64=33.5e12, fp64_tensor=66.9e12, fp32=66.9e12, tf32=494.7e12, bf16=989.4e12,
                               fp16=989.4e12, fp8=1978.9e12, int8=1978.9e12),
    aliases=("h100", "nvidia_h100_80gb_hbm3"),
    sources={
        "memory_bytes": _device_query("an H100 80GB HBM3, CUDA 12.8 driver: 81090 MBytes"),
        "memory_bandwidth": _H100_PAPER, "flops_per_second": _H100_PAPER, "multiprocessors": _H100_PAPER,
        "l2_bytes": _H100_PAPER,
        "nvlink_bandwidth": f"half of 900 GB/s both ways: {_H100_SHEET}",
        "pcie_bandwidth": f"half of 128 GB/s both ways (Gen5 x16): {_H100_SHEET}"})

_A100_RATES = PeakRates(fp64=9.7e12, fp64_tensor=19.5e12, fp32=19.5e12, tf32=156e12, bf16=312e12, fp16=312e12,
                        int8=624e12)
_A100_SOURCES = {
    "flops_per_second": _A100_PAPER, "flops_per_second.fp8": "Ampere tensor cores have no FP8",
    "multiprocessors": _A100_PAPER, "l2_bytes": _A100_PAPER,
    "nvlink_bandwidth": f"half of 600 GB/s both ways: {_A100_SHEET}",
    "pcie_bandwidth": f"half of 64 GB/s both ways (Gen4 x16): {_A100_SHEET}"}

A100_40GB = DeviceSpec(
    "a100_40gb", vendor="NVIDIA", architecture="Ampere", compute_capability=(8, 0),
    memory_bytes=42_298_834_944, memory_bandwidth=1555e9, multiprocessors=108, l2_bytes=40 * 2**20,
    nvlink_bandwidth=_NVLINK_3 / 2, pcie_bandwidth=_PCIE_4 / 2,
    flops_per_second=_A100_RATES,
    aliases=("a100_sxm4_40gb", "nvidia_a100_sxm4_40gb"),
    sources={
        **_A100_SOURCES,
        "memory_bytes": _device_query(
            "an A100-SXM4-40GB, CUDA 12.2 driver (github.com/bottlerocket-os/bottlerocket/pull/3873)"),
        "memory_bandwidth": _A100_PAPER})

A100_80GB = DeviceSpec(
    "a100_80gb", vendor="NVIDIA", architecture="Ampere", compute_capability=(8, 0),
    memory_bytes=84_987_740_160, memory_bandwidth=2039e9, multiprocessors=108, l2_bytes=40 * 2**20,
    nvlink_bandwidth=_NVLINK_3 / 2, pcie_bandwidth=_PCIE_4 / 2,
    flops_per_second=_A100_RATES,
    aliases=("a100", "a100_sxm4_80gb", "nvidia_a100_sxm4_80gb"),
    sources={
        **_A100_SOURCES,
        "memory_bytes": _device_query("an A100-SXM4-80GB, CUDA 12.2 driver: 81051 MBytes"),
        "memory_bandwidth": _A100_SHEET})

L4 = DeviceSpec(
    "l4", vendor="NVIDIA", architecture="Ada Lovelace", compute_capability=(8, 9),
    memory_bytes=23_583_784_960, memory_bandwidth=300e9, multiprocessors=58, l2_bytes=48 * 2**20,
    pcie_bandwidth=_PCIE_4 / 2,
    flops_per_second=PeakRates(fp64=30.3e12 / 64, fp32=30.3e12, tf32=120e12 / 2, bf16=242e12 / 2, fp16=242e12 / 2,
                               fp8=485e12 / 2, int8=485e12 / 2),
    aliases=("nvidia_l4", ),
    sources={
        "memory_bytes": _device_query(
            "an L4, CUDA 12.2 driver (github.com/bottlerocket-os/bottlerocket-kernel-kit/pull/139)"),
        "memory_bandwidth": _L4_SHEET, "flops_per_second": _half(_L4_SHEET), "flops_per_second.fp64": _ADA_FP64,
        "flops_per_second.fp64_tensor": "Ada has no FP64 tensor cores of their own",
        "flops_per_second.fp32": _L4_SHEET,
        "multiprocessors": _device_query("an L4: 58 multiprocessors, 7424 CUDA cores"),
        "l2_bytes": _device_query("an L4: 50331648 bytes"), "nvlink_bandwidth": _NO_NVLINK,
        "pcie_bandwidth": f"half of 64 GB/s both ways (Gen4 x16): {_L4_SHEET}"})

T4 = DeviceSpec(
    "t4", vendor="NVIDIA", architecture="Turing", compute_capability=(7, 5),
    memory_bytes=15_655_829_504, memory_bandwidth=320e9, multiprocessors=40, l2_bytes=4 * 2**20,
    pcie_bandwidth=_PCIE_3 / 2,
    flops_per_second=PeakRates(fp64=8.1e12 / 32, fp32=8.1e12, fp16=65e12, int8=130e12),
    aliases=("tesla_t4", "nvidia_t4"),
    sources={
        "memory_bytes": _device_query(
            "a Tesla T4, CUDA 12.2 driver (github.com/bottlerocket-os/bottlerocket/pull/3798)"),
        "memory_bandwidth": _device_query("a Tesla T4: 5001 MHz, double data rate, 256-bit bus"),
        "flops_per_second": "Turing tensor cores take FP16, INT8, INT4 and INT1 only",
        "flops_per_second.fp64": f"1/32 of fp32: {_TURING_PAPER}, note on FP64 units",
        "flops_per_second.fp32": _T4_SHEET, "flops_per_second.fp16": _T4_SHEET, "flops_per_second.int8": _T4_SHEET,
        "multiprocessors": _device_query("a Tesla T4: 40 multiprocessors, 2560 CUDA cores"),
        "l2_bytes": _device_query("a Tesla T4: 4194304 bytes"), "nvlink_bandwidth": _NO_NVLINK,
        "pcie_bandwidth": f"half of 32 GB/s both ways (Gen3 x16): {_T4_SHEET}"})

RTX_4090 = DeviceSpec(
    "rtx_4090", vendor="NVIDIA", architecture="Ada Lovelace", compute_capability=(8, 9),
    memory_bytes=25_393_692_672, memory_bandwidth=1008e9, multiprocessors=128, l2_bytes=73728 * 2**10,
    pcie_bandwidth=_PCIE_4 / 2,
    flops_per_second=PeakRates(fp64=82.6e12 / 64, fp32=82.6e12, tf32=82.6e12, bf16=165.2e12, fp16=165.2e12,
                               fp8=330.3e12, int8=660.6e12),
    aliases=("4090", "rtx4090", "geforce_rtx_4090", "nvidia_geforce_rtx_4090"),
    sources={
        "memory_bytes": "torch.cuda.get_device_properties on Linux: total_memory 25393692672 (23.65 GiB in PyTorch's "
                        "messages)",
        "memory_bandwidth": _RTX_4090_PAPER, "flops_per_second": _RTX_4090_PAPER, "flops_per_second.fp64": _ADA_FP64,
        "flops_per_second.fp64_tensor": "Ada has no FP64 tensor cores of their own",
        "multiprocessors": _RTX_4090_PAPER, "l2_bytes": f"73728 KB: {_RTX_4090_PAPER}", "nvlink_bandwidth": _NO_NVLINK,
        "pcie_bandwidth": "half of 64 GB/s both ways (Gen4 x16): NVIDIA GeForce RTX 4090 specifications"})

NVIDIA_DEVICES = (H200, H100_SXM, A100_40GB, A100_80GB, L4, T4, RTX_4090)

"""Operators of torch.distributed that send nothing, and those of which it is not known what they send, with why."""
from __future__ import annotations

#: Operators that send nothing.
SILENT = {
    "c10d::check_for_nan": "looks at a tensor of this rank",
    "_c10d_functional::wait_tensor": "waits for a collective that counts where it began",
    "_c10d_functional::_wrap_tensor_autograd": "wraps the result of a collective",
    "_dtensor::mesh_get_process_group": "looks up a group",
    "symm_mem::_rendezvous": "exchanges addresses on the host, once for a buffer",
    "symm_mem::_barrier": "sets and reads signals of four bytes",
    "symm_mem::get_remote_tensors": "maps the others' memory",
    "symm_mem::memset32_": "sets signals of this rank",
    "symm_mem::stream_write_value32_": "sets a signal of this rank",
    "symm_mem::nccl_wait_for_signal": "waits",
    "symm_mem::nccl_wait_signal": "waits",
    "symm_mem::nvshmem_wait_for_signal": "waits",
    "symm_mem::_async_input_mm": "a product of what was gathered",
}

_SWITCH = "how much of it a switch that adds up or copies carries for one rank is not documented"
_SPLITS = "how much goes where stands in tensors on the device"
_PEER = "one-sided: the whole is what the kernel that calls it makes of it"

#: Operators that communicate bytes which are unknown.
NOT_UNDERSTOOD = {
    "symm_mem::fused_all_gather_scaled_matmul": "its scales are gathered too, or not, which their shapes do not tell",
    "symm_mem::all_to_all_vdev": _SPLITS,
    "symm_mem::all_to_all_vdev_2d": _SPLITS,
    "symm_mem::all_to_all_vdev_2d_offset": _SPLITS,
    "symm_mem::nvshmem_all_to_all": _PEER,
    "symm_mem::nvshmem_broadcast": _PEER,
    "symm_mem::_low_contention_all_gather_ce_multicast": _SWITCH,
    "symm_mem::_low_contention_all_gather_ce_multicast_out": _SWITCH,
    "symm_mem::memcpy_to_multicast_": _SWITCH,
    "symm_mem::multimem_all_gather_out": _SWITCH,
    "symm_mem::multimem_all_reduce_": _SWITCH,
    "symm_mem::multimem_one_shot_all_reduce": _SWITCH,
    "symm_mem::multimem_one_shot_all_reduce_out": _SWITCH,
    "symm_mem::multimem_one_shot_reduce_out": _SWITCH,
    "symm_mem::multi_root_tile_reduce": _PEER,
    "symm_mem::tile_reduce": _PEER,
    "symm_mem::nccl_all_to_all_nd": _PEER,
    "symm_mem::nccl_get": _PEER,
    "symm_mem::nccl_get_out": _PEER,
    "symm_mem::nccl_put": _PEER,
    "symm_mem::nccl_put_signal": _PEER,
    "symm_mem::nccl_put_with_signal": _PEER,
    "symm_mem::nccl_reduce_scatter_offset": _PEER,
    "symm_mem::nvshmem_get": _PEER,
    "symm_mem::nvshmem_get_out": _PEER,
    "symm_mem::nvshmem_put": _PEER,
    "symm_mem::nvshmem_put_with_signal": _PEER,
}

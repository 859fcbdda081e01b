"""Private torch API: which autograd node runs now, and how nodes are numbered."""
from __future__ import annotations

import torch

next_sequence_number = torch._C._autograd._get_sequence_nr
"""The number that the next autograd node made in this thread will get: a node made just now has one less."""


def current_backward_node() -> tuple[int, torch.Tensor | None] | None:
    """(sequence number, leaf) of the node that the engine runs; the leaf where the node accumulates its gradient."""
    node = torch._C._current_autograd_node()
    if node is None:
        return None
    variable = getattr(node, "variable", None) if node.name() == "torch::autograd::AccumulateGrad" else None
    return node._sequence_nr(), variable


def saves_are_hooked() -> bool:
    """Whether hooks are active that see every tensor autograd saves (checkpointing, offloading)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def describe_context() -> tuple[object, ...]:
    """What torch's settings say about how operators run now: autocast, modes, hooks, kernels that may be chosen."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return (nesting, torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu"), saves_are_hooked(),
            torch.is_inference_mode_enabled(), torch.is_anomaly_enabled(), torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(), torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(), torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cudnn.enabled)

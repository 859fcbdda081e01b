"""Real wrappers around GPT-2 medium (354,823,168 parameters), batch 4 x 512, AdamW: bytes of one rank as they follow by
hand from what each wrapper keeps and sends.
"""
from __future__ import annotations

import pytest
import torch
from torch import nn

from analyzer import profile
from analyzer.parallel import world

P = 354_823_168
IDS = torch.zeros(4, 512, dtype=torch.int64)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel
    config = GPT2Config(n_embd=1024, n_layer=24, n_head=16)
    config.use_cache = False
    return GPT2LMHeadModel(config).train().to("cuda")


def ddp():
    return nn.parallel.DistributedDataParallel(gpt2())


def fsdp2(mesh=None, reduced=False):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    settings = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if reduced else {}
    if mesh is not None:
        settings["mesh"] = init_device_mesh("cuda", mesh, mesh_dim_names=("replicate", "shard"))
    model = gpt2()
    for block in model.transformer.h:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    model = gpt2()
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({type(model.transformer.h[0])}),
                                    use_orig_params=True, device_id=0)


def run(build, size):
    """The profile of rank 0, and the most bytes that tensors asked for at once."""
    peaks = []

    def read_peak(log):
        peaks.append(max(phase.peak_requested_bytes for phase in log.phases))
        from analyzer.profilers.annotation import Annotation
        return Annotation()

    with world(size):
        p = profile(build, kwargs={"input_ids": IDS, "labels": IDS.clone()}, optimizer="adamw", profilers=[read_peak])
    return p, peaks[0]


# Of each: parameters (gradients are as many bytes), states but for a step count a tensor, bytes that the forward pass
# and the backward pass communicate, and the peak of requested bytes.
# DDP: all gradients are reduced once. FSDP2 pads each tensor's first dimension to a multiple of the ranks, gathers all
# in forward, all but the root's in backward (the root stays gathered), and reduces and scatters every gradient in
# float32. FSDP1 pads flat parameters of a block, which need no padding here. A peak is one device's peak, less three
# times what the other ranks hold (parameters, two states), plus the root as it is gathered and the next block's.
CASES = {"ddp": (ddp, 8, 4 * P, 8 * P, 0, 4 * P, 12_741_111_816),
         "fsdp2": (fsdp2, 8, 177_415_168, 354_830_336, 1_419_321_344, 1_209_237_504 + 1_419_321_344, 7_856_655_368),
         "fsdp2_bf16": (lambda: fsdp2(reduced=True), 8, 177_415_168, 354_830_336, 709_660_672,
                        604_618_752 + 1_419_321_344, 4_899_460_488),
         "fsdp2_bf16_64": (lambda: fsdp2(reduced=True), 64, 22_179_456, 44_358_912, 709_742_592,
                           604_618_752 + 1_419_485_184, 4_433_835_272),
         "hsdp": (lambda: fsdp2((2, 4)), 8, 354_826_240, 709_652_480, 1_419_304_960,
                  1_209_237_504 + 1_419_304_960 + 354_826_240, 8_388_872_200),
         "fsdp1": (fsdp1, 8, 177_411_584, 354_823_168, 1_419_292_672, 1_209_237_504 + 1_419_292_672, 7_856_615_944)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_bytes_of_a_rank_are_those_derived_by_hand(case):
    build, size, parameters, states, forward, backward, peak = CASES[case]
    p, requested = run(build, size)
    assert p.param_bytes == parameters
    assert p.optimizer_bytes == states
    assert (p.phases["forward"].comm_bytes, p.phases["backward"].comm_bytes) == (forward, backward)
    assert requested == peak
    scattered = [row.module_path for row in p.comm if row.kind == "reduce_scatter"]
    assert len(set(scattered)) == len(scattered)  # each of its own block

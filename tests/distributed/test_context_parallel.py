"""Attention over a sequence that is split over ranks: `context_parallel` of torch, with each of its kernels."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.attention import SDPBackend, sdpa_kernel

from analyzer import profile
from analyzer.parallel import world
from analyzer.profilers.annotation import Annotation

RANKS, BATCH, SEQUENCE, HEADS, WIDTH = 8, 2, 1024, 8, 64
HIDDEN, LOCAL = HEADS * WIDTH, SEQUENCE // RANKS
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
           "efficient": SDPBackend.EFFICIENT_ATTENTION}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.mesh = init_device_mesh("cuda", (RANKS,), mesh_dim_names=("cp",))

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def context_parallel_step(kernel, rotation):
    def step(model, optimizer, x):
        set_rotate_method(rotation)
        x = x.clone()
        with sdpa_kernel([KERNELS[kernel]]), context_parallel(model.mesh, buffers=[x], buffer_seq_dims=[1],
                                                              no_restore_buffers={x}):
            model(x).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kernel", "rank"), [("flash", 0), ("cudnn", 7), ("efficient", 3)])
@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
def test_keys_and_values_go_round(kernel, rank, rotation):
    if kernel == "cudnn" and torch.__version__ < (2, 10):
        with world(RANKS, rank), pytest.raises(RuntimeError, match="Attempting to broadcast a dimension of length 8"):
            profile(lambda: Attention().cuda().to(torch.bfloat16), step=context_parallel_step(kernel, rotation),
                    args=(torch.zeros(BATCH, SEQUENCE, HIDDEN, dtype=torch.bfloat16),))
        return  # as on a GPU: torch 2.9 adds a dimension to cuDNN's log-sum-exp, which has it already
    names = []

    def read(log):
        names.extend(call.signature.op.name() for call in log.calls if call.step == 1)
        return Annotation()

    with world(RANKS, rank):
        p = profile(lambda: Attention().cuda().to(torch.bfloat16), optimizer="adamw", profilers=[read],
                    args=(torch.zeros(BATCH, SEQUENCE, HIDDEN, dtype=torch.bfloat16),),
                    step=context_parallel_step(kernel, rotation))
    # The rank's own keys, and those of 7 others: of all its queries half the keys, or of half its queries all.
    assert names.count(f"aten::_scaled_dot_product_{kernel}_attention") == RANKS
    assert names.count(f"aten::_scaled_dot_product_{kernel}_attention_backward") == RANKS
    pairs = LOCAL * LOCAL + (RANKS - 1) * LOCAL * LOCAL // 2
    assert p.fwd_macs == BATCH * (LOCAL * HIDDEN * 3 * HIDDEN + 2 * HEADS * pairs * WIDTH)
    # Keys and values are gathered at once, or handed on 7 times, forward and backward; their gradients, in float32, are
    # handed on 8 times, back to whose they are.
    own = 2 * BATCH * LOCAL * HIDDEN * 2
    totals = {(row.kind, row.group, row.phase): [0, 0] for row in p.comm}
    for row in p.comm:
        total = totals[row.kind, row.group, row.phase]
        total[0] += 1
        total[1] += row.bytes
    gathered = {("all_gather", "cp", phase): [1, RANKS * own] for phase in ("forward", "backward")}
    assert totals == (gathered | {("all_to_all", "cp", "backward"): [8, 8 * 2 * own]} if rotation == "allgather" else {
        ("all_to_all", "cp", "forward"): [7, 7 * own], ("all_to_all", "cp", "backward"): [15, (7 + 8 * 2) * own]})


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_has_the_same_kernels_and_saves_what_it_gathered():
    """The gather that backward would repeat is a common subexpression of the joint graph."""
    names = []

    def read(log):
        names.extend(str(call.signature.op) for call in log.calls if call.step == 1)
        return Annotation()

    with world(RANKS, 0):
        p = profile(lambda: torch.compile(Attention().cuda().to(torch.bfloat16)), optimizer="adamw", profilers=[read],
                    args=(torch.zeros(BATCH, SEQUENCE, HIDDEN, dtype=torch.bfloat16),),
                    step=context_parallel_step("flash", "allgather"))
    assert names.count("aten._scaled_dot_product_flash_attention.default") == RANKS
    assert names.count("aten._scaled_dot_product_flash_attention_backward.default") == RANKS
    assert [row.phase for row in p.comm if row.kind == "all_gather"] == ["forward"]
    assert [row.graphs for row in p.compiled] == [1]

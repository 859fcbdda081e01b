"""Attention over a sequence that is split over ranks: `context_parallel` of torch, with each of its kernels; by heads
(DeepSpeed-Ulysses), and by messages round a ring."""
import importlib
import json
import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


def to_heads(x, ranks):
    """(batch, heads, tokens of a rank, width) to (batch, heads of a rank, tokens, width), as DeepSpeed-Ulysses does."""
    batch, heads, tokens, width = x.shape
    parts = x.view(batch, ranks, heads // ranks, tokens, width).movedim(1, 0).contiguous()
    whole = all_to_all_single_autograd(parts, None, None, dist.group.WORLD)
    return whole.movedim(0, 2).reshape(batch, heads // ranks, ranks * tokens, width)


def to_tokens(x, ranks):
    batch, heads, tokens, width = x.shape
    parts = x.view(batch, heads, ranks, tokens // ranks, width).movedim(2, 0).contiguous()
    whole = all_to_all_single_autograd(parts, None, None, dist.group.WORLD)
    return whole.movedim(0, 1).reshape(batch, ranks * heads, tokens // ranks, width)


def ulysses(ranks):
    def attend(*qkv):
        return to_tokens(F.scaled_dot_product_attention(*(to_heads(t, ranks) for t in qkv), is_causal=True), ranks)
    return attend


class Ring(torch.autograd.Function):
    """Keys and values go round by messages between neighbours, forward and backward, their gradients behind them, as in
    Ring Attention (Liu et al. 2023); the numbers are not those of attention.
    """

    @staticmethod
    def go_round(held, turns):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for _ in range(turns):
            got = torch.empty_like(held)
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, held, (rank + 1) % ranks),
                                                dist.P2POp(dist.irecv, got, (rank - 1) % ranks)]):
                work.wait()
            held = got
        return held

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        kv = Ring.go_round(torch.stack((k, v)), dist.get_world_size() - 1)
        return F.scaled_dot_product_attention(q, *kv)

    @staticmethod
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        Ring.go_round(torch.stack((k, v)), dist.get_world_size() - 1)
        return (grad, *Ring.go_round(torch.stack((k, v)), dist.get_world_size()))


def ring(ranks):
    return Ring.apply


class Split(Attention):
    """Attention over a rank's tokens by ``attend``, which exchanges what it needs of the others."""

    def __init__(self, attend):
        nn.Module.__init__(self)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.attend = attend

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v)


OWN = BATCH * LOCAL * HIDDEN * 2  # bytes of a rank's queries, keys, values or results
#: calls and bytes of a layer, by kind and phase. Ulysses: queries, keys, values and results, there and back.
EXCHANGES = {
    ulysses: {("all_to_all", way): [4, 4 * OWN] for way in ("forward", "backward")},
    ring: {(kind, way): [calls, calls * 2 * OWN] for kind in ("send", "recv")
           for way, calls in (("forward", RANKS - 1), ("backward", 2 * RANKS - 1))}}


def exchanged(p):
    found = {}
    for row in p.comm:
        total = found.setdefault((row.kind, row.phase), [0, 0])
        total[0] += 1
        total[1] += row.bytes
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", EXCHANGES)
def test_other_ways_exchange_what_follows_by_hand(way):
    """Their time is that of the links: of two hosts, nearly twice as long with half of the fabric."""
    seconds = []
    for fabric in ("25e9", "50e9"):
        with world(RANKS, devices_per_host=4, cluster=f"dgx_h100,fabric={fabric}"):
            p = profile(lambda: Split(way(RANKS)).cuda().bfloat16(), optimizer="sgd", device="h100",
                        args=(torch.zeros(BATCH, 64 * LOCAL, HIDDEN, dtype=torch.bfloat16),))
        assert exchanged(p) == {key: [calls, 64 * n] for key, (calls, n) in EXCHANGES[way].items()}
        seconds.append(sum(row.seconds for row in p.comm))
    assert 1.7 < seconds[0] / seconds[1] < 2.0


def run_for_real(rank, folder):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29615")
    dist.init_process_group("gloo")
    for way in EXCHANGES:
        with CountingExchanges() as counting:
            Split(way(2)).bfloat16()(torch.zeros(BATCH, LOCAL, HIDDEN, dtype=torch.bfloat16)).sum().backward()
        if not rank:
            (folder / f"{way.__name__}.json").write_text(json.dumps(counting.found))
    dist.destroy_process_group()


class CountingExchanges(TorchDispatchMode):
    """Calls and bytes of the operators that exchange tensors."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional") and name in KINDS:
            sent = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            total = self.found.setdefault(KINDS[name], [0, 0])
            total[0] += 1
            total[1] += sent.numel() * sent.element_size()
        return func(*args, **(kwargs or {}))


KINDS = {"all_to_all_single": "all_to_all", "send": "send", "recv_": "recv"}


@pytest.mark.filterwarnings("ignore")
def test_two_real_processes_exchange_as_much(tmp_path):
    torch.multiprocessing.spawn(run_for_real, (tmp_path,), nprocs=2)
    for way in EXCHANGES:
        with world(2):
            p = profile(lambda way=way: Split(way(2)).cuda().bfloat16(),
                        args=(torch.zeros(BATCH, LOCAL, HIDDEN, dtype=torch.bfloat16),))
        predicted = {}
        for (kind, _), (calls, n) in exchanged(p).items():
            total = predicted.setdefault(kind, [0, 0])
            total[0], total[1] = total[0] + calls, total[1] + n
        assert predicted == json.loads((tmp_path / f"{way.__name__}.json").read_text())


class Core(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Flexible(nn.Module):
    mask = None

    def forward(self, q, k, v):
        return flex_attention(q, k, v, block_mask=self.mask)


PARTS = "torch.distributed.tensor.experimental._context_parallel"  # from torch 2.10 on


def split_inside(core, kind):
    model = Split(core)
    model.mesh = init_device_mesh("cuda", (RANKS,), mesh_dim_names=("cp",))
    style = importlib.import_module(PARTS)._ContextParallel(seq_dim=2, attention_type=kind)
    parallelize_module(core, model.mesh, style)
    return model.cuda().to(torch.bfloat16)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("balanced", "rank", "blocks"), [
    (True, 0, 1 + (RANKS - 1) / 2), (False, 0, 1), (False, RANKS - 1, RANKS)])
def test_sequences_are_split_by_torchs_own_functions(balanced, rank, blocks):
    """Of the blocks of LOCAL x LOCAL scores each rank has as many as the others where the split is balanced, head and
    tail; else the first its own, and the last all.
    """
    parts = pytest.importorskip(PARTS)

    def step(model, optimizer, x):
        set_rotate_method("allgather")
        balancer = parts._HeadTailLoadBalancer(SEQUENCE, RANKS, torch.device("cuda")) if balanced else None
        x, = parts._context_parallel_shard(model.mesh, [x], [1], load_balancer=balancer)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            model(x).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    parts._enable_context_parallel_dispatcher()
    try:
        with world(RANKS, rank):
            p = profile(lambda: split_inside(Core(), parts._ContextParallel.AttentionType.SDPA), optimizer="sgd",
                        step=step, args=(torch.zeros(BATCH, SEQUENCE, HIDDEN, dtype=torch.bfloat16),))
    finally:
        parts._disable_context_parallel_dispatcher()
    assert p.fwd_macs == BATCH * (LOCAL * HIDDEN * 3 * HIDDEN + 2 * HEADS * blocks * LOCAL * LOCAL * WIDTH)
    assert exchanged(p) == {("all_gather", "forward"): [1, RANKS * 2 * OWN], ("all_gather", "backward"): [
        1, RANKS * 2 * OWN], ("all_to_all", "backward"): [RANKS, RANKS * 2 * 2 * OWN]}


@pytest.mark.filterwarnings("ignore")
def test_flex_attention_gathers_keys_and_values_once():
    parts = pytest.importorskip(PARTS)

    def step(model, optimizer, x):
        mask = create_block_mask(lambda b, h, q, k: q >= k, BATCH, 1, SEQUENCE, SEQUENCE, device="cuda")
        x, model.attend.mask = parts._context_parallel_shard(model.mesh, [x, mask], [1, 2])
        model(x).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with world(RANKS):
        p = profile(lambda: split_inside(Flexible(), parts._ContextParallel.AttentionType.FLEX), optimizer="sgd",
                    step=step, args=(torch.zeros(BATCH, SEQUENCE, HIDDEN, dtype=torch.bfloat16),))
    assert exchanged(p) == {("all_gather", "forward"): [2, RANKS * 2 * OWN],
                            ("reduce_scatter", "backward"): [2, RANKS * 2 * OWN]}


@pytest.mark.filterwarnings("ignore")
def test_deepspeeds_attention_exchanges_what_ulysses_does():
    pytest.importorskip("deepspeed")
    layer = importlib.import_module("deepspeed.sequence.layer")

    class Ulysses(nn.Module):
        def __init__(self):
            super().__init__()
            importlib.import_module("deepspeed").init_distributed()
            self.inner = layer.DistributedAttention(lambda *qkv: Core()(*(t.transpose(1, 2) for t in qkv)).transpose(
                1, 2), dist.group.WORLD, scatter_idx=2, gather_idx=1)

        def forward(self, *qkv):
            return self.inner(*(t.transpose(1, 2) for t in qkv), 0)

    with world(RANKS):
        p = profile(lambda: Split(Ulysses()).cuda().bfloat16(), optimizer="sgd",
                    args=(torch.zeros(BATCH, LOCAL, HIDDEN, dtype=torch.bfloat16),))
    assert exchanged(p) == EXCHANGES[ulysses]


def test_attention_of_a_later_world_is_not_split_by_sequence():
    experimental = importlib.import_module("torch.distributed.tensor.experimental._attention")
    handlers = DTensor._op_dispatcher._custom_op_handlers
    with world(RANKS):
        experimental._enable_context_parallel_dispatcher()  # which torchtitan never takes back
        assert DTensor._op_dispatcher._custom_op_handlers != handlers
    assert DTensor._op_dispatcher._custom_op_handlers is handlers

"""Groups of kernels and the bytes that they move, derived by hand; see docs/fused.md for the rules."""
import pytest
import torch
from torch import nn

import analyzer
from analyzer import ProfileOptions, profile
from analyzer.errors import InputError
from analyzer.profilers.annotation import Annotation
from analyzer.profilers.fused_graph import Buffer, FusedGraph, Kernel, build_graph
from analyzer.profilers.fused_step import fuse
from tests.call import Call

ROWS, COLUMNS = 128, 256
N = ROWS * COLUMNS * 4  # bytes of x in float32


def fused(model, *args, mode="infer", **options):
    """The kernels of a step, each with the names of its operators."""
    found = []

    def look(log):
        found.extend((kernel, [log.calls[i].signature.op.__name__.partition(".")[0] for i in sorted(kernel.calls)])
                     for kernel in fuse(build_graph(log)))
        return Annotation()

    profile(model, args or (torch.empty(ROWS, COLUMNS, device="meta"),), mode=mode, device="a100", profilers=[look],
            **options)
    return found


def kernels_of(function, *args, **options):
    """Of each kernel of ``function``, which may use a square matrix: its bytes, and the names of its operators."""
    model = Call(function, weight=torch.rand(COLUMNS, COLUMNS, device="meta"))
    return [("extern" if kernel.extern is not None else kernel.moved_bytes, names)
            for kernel, names in fused(model, *args, **options)]


def test_pointwise_chain_reads_and_writes_once():
    assert kernels_of(lambda m, x: torch.relu(x * 2 + 1)) == [(2 * N, ["mul", "add", "relu"])]


def test_softmax_with_scale_and_mask():
    # scores and mask are read, probabilities written; the maxima and sums stay in the kernel
    x, mask = (torch.empty(ROWS, COLUMNS, device="meta") for _ in range(2))
    assert kernels_of(lambda m, x, mask: torch.softmax(x * 0.125 + mask, -1), x, mask) == [
        (3 * N, ["mul", "add", "_softmax"])]


def test_layer_norm_takes_the_residual():
    def block(m, x, y):
        return torch.nn.functional.layer_norm(x + y, (COLUMNS,))

    x, y = (torch.empty(ROWS, COLUMNS, device="meta") for _ in range(2))
    # the mean and the reciprocal deviation (a float a row) are not read by anyone
    (nbytes, names), = kernels_of(block, x, y)
    assert names == ["add", "native_layer_norm"]
    assert nbytes == 3 * N


def test_product_stands_between():
    found = kernels_of(lambda m, x: torch.relu(torch.relu(x + 1) @ m.weight) * 2)
    assert found == [(2 * N, ["add", "relu"]), ("extern", ["mm"]), (2 * N, ["relu", "mul"])]


def test_reductions_over_other_dimensions_stay_apart():
    found = kernels_of(lambda m, x: (x.sum(0), x.sum(1)))
    assert found == [(N + 4 * COLUMNS, ["sum"]), (N + 4 * ROWS, ["sum"])]


def test_reductions_over_the_same_dimension_join():
    assert kernels_of(lambda m, x: (x.sum(1), x.amax(1))) == [(N + 2 * 4 * ROWS, ["sum", "amax"])]


def test_views_are_free_and_casts_in_the_kernel():
    """Transposed, cast, doubled, and copied for the reshape: 4 bytes an element read, 2 written."""
    found = kernels_of(lambda m, x: (x.t().to(torch.bfloat16) * 2).reshape(-1))
    assert found == [(N + N // 2, ["_to_copy", "mul", "clone"])]


def test_mask_of_dropout_is_drawn_in_the_kernel_and_saved():
    found = kernels_of(lambda m, x: nn.functional.dropout(x @ m.weight, 0.5, True), mode="train",
                       loss_fn=lambda out: out.sum())
    # forward reads the product; the loss (4 bytes) is summed in the same kernel; a byte an element is saved
    assert (N + N // 4 + 4, ["native_dropout", "sum"]) in found
    # backward reads the mask and writes the operand of two products; the gradient of a sum is a constant
    assert any(nbytes == N // 4 + N for nbytes, names in found if "native_dropout_backward" in names)


def test_what_nobody_reads_is_not_computed():
    def step(m, x):
        x.exp()
        return x + 1

    assert kernels_of(step) == [(2 * N, ["add"])]


def test_write_into_a_buffer_of_the_module_stays():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(COLUMNS, device="meta"))

        def forward(self, x):
            self.mean.mul_(0.9)
            return x + 1

    assert sorted(kernel.moved_bytes for kernel, _ in fused(Counting())) == [2 * 4 * COLUMNS, 2 * N]


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_reduces_only_in_training(training):
    """In training the columns are reduced in one kernel, and normalized in another with what follows."""
    norm = nn.BatchNorm1d(COLUMNS, device="meta").train(training)
    found = [kernel.moved_bytes for kernel, _ in fused(nn.Sequential(norm, nn.ReLU()))
             if kernel.moved_bytes > 16]  # not the count of batches
    row = 4 * COLUMNS  # of weight, bias, and each of the running and the batch's statistics
    if training:
        reduce, apply = found
        assert N < reduce <= N + 6 * row and 2 * N < apply <= 2 * N + 6 * row
    else:
        assert found == [2 * N + 4 * row]


def test_gradients_are_added_outside_the_graph():
    """The second micro-batch adds to the first one's gradients: autograd's own kernels, one a parameter."""
    def step(model, optimizer, x):
        for _ in range(2):
            model(x).sum().backward()

    found = fused(nn.Linear(64, 32, device="meta"), torch.empty(16, 64, device="meta"), mode="train", step=step)
    assert sum(kernel.extern is not None and names == ["add_"] for kernel, names in found) >= 2


def loops(*rows):
    """A graph of loops over 1,000 elements, each given as what it reads and what it writes."""
    count = 1 + max(buffer for row in rows for part in row[:2] for buffer in part)
    return FusedGraph([Kernel(0, 1000, *rest, reads=dict.fromkeys(reads, 4000.0), writes=dict.fromkeys(writes, 4000.0))
                       for reads, writes, *rest in rows], [Buffer(4000) for _ in range(count)], [0])


def test_no_kernel_waits_for_itself():
    """0 -> a -> 1 -> b (another size) -> 2 -> c, which also reads 1: a and c cannot be one kernel."""
    graph = loops(((0,), (1,)), ((1,), (2,), 7), ((1, 2), (3,)))
    found = fuse(graph)
    order = {kernel: i for i, kernel in enumerate(found)}
    assert all(order[source] < order[kernel] for kernel in found for source in kernel.sources)


def test_most_loops_of_a_kernel():
    graph = loops(*[((i,), (i + 1,)) for i in range(100)])
    assert [kernel.loops for kernel in fuse(graph)] == [64, 36]


def test_distant_loops_that_share_an_input_stay_apart():
    rows = [((0,), (1,)), *[((100 + i,), (200 + i,)) for i in range(70)], ((0,), (2,))]
    assert len(fuse(loops(*rows))) == 72


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down, self.dropout = nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def blocks():
    return nn.Sequential(nn.BatchNorm1d(64), *[Block() for _ in range(3)], nn.Linear(64, 10))


def fused_of(mode, fused="default", rows=4096, **options):
    return profile(blocks, (torch.rand(rows, 64),), mode=mode, device="a100", optimizer="adam",
                   options=ProfileOptions(fused=fused), **options)


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_fused_is_no_longer_and_moves_no_more(mode):
    p = fused_of(mode)
    assert p.fused.kernel_seconds < p.kernel_seconds
    assert p.fused.moved_bytes < p.fused.eager_moved_bytes
    assert p.fused.kernels < p.fused.eager_kernels
    low, high = p.fused.step_seconds_range
    assert low < p.fused.step_seconds < high
    assert p.fused.kernel_seconds <= p.fused.step_seconds
    assert (p.fused.bwd_seconds is None) == (mode == "infer")


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("fused", ["default", "reduce-overhead", "cudagraphs"])
def test_replayed_or_run_is_the_same(mode, fused):
    assert fused_of(mode, fused).fused == fused_of(mode, fused, reuse=False).fused


def test_graphs_launch_at_once():
    """Small kernels: eager waits for its launches, a graph does not; fusing leaves less to run."""
    step = {fused: fused_of("infer", fused, rows=8) for fused in ("default", "reduce-overhead", "cudagraphs")}
    eager = step["cudagraphs"].step_seconds
    assert step["cudagraphs"].fused.step_seconds < eager
    assert step["reduce-overhead"].fused.step_seconds < step["default"].fused.step_seconds
    assert step["cudagraphs"].fused.kernels == step["cudagraphs"].fused.eager_kernels
    assert [step[fused].fused.cuda_graphs for fused in step] == [False, True, True]


def test_kept_in_json_and_told_in_the_summary():
    p = fused_of("infer")
    assert analyzer.Profile.from_json(p.to_json()).fused == p.fused
    assert f"mode default, {p.fused.kernels} kernels instead of {p.fused.eager_kernels}" in p.summary()
    assert "compiled (predicted): step" in repr(p)


def test_other_words_and_devices_are_refused():
    with pytest.raises(InputError, match="fused='max-autotune': must be one of 'default', 'reduce-overhead'"):
        ProfileOptions(fused="max-autotune")
    with pytest.raises(InputError, match="fused='default': .*CUDA devices alone, and 'm1'"):
        profile(blocks, (torch.rand(8, 64),), device="m1", options=ProfileOptions(fused="default"))

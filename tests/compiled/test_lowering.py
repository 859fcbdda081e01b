"""Kernels that TorchInductor makes for a device that is not there: what each reads and writes, and by whose names."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.fx_passes import pad_mm

from analyzer import profile
from analyzer.compiled import lowering
from analyzer.hardware import find_device

ROWS, WIDTH = 64, 32
X, VECTOR = torch.rand(ROWS, WIDTH), torch.rand(WIDTH)
BYTES = ROWS * WIDTH * 4


class Call(nn.Module):
    def __init__(self, function, **settings):
        super().__init__()
        self.functions = [torch.compile(function, **settings)]

    def forward(self, *args):
        return self.functions[0](*args)


def kernels_of(made):
    return [kernel for graph in made for kernel in graph.kernels]


def test_each_private_name_of_inductor_is_there():
    device = find_device("h100")
    missing = [f"{getattr(owner, '__name__', owner)}.{name}"
               for owner, name, _ in (*lowering._claims(device), *lowering._replacements(lowering.LoweredGraph("")))
               if not hasattr(owner, name) and name != "sorted"]
    assert missing == [], f"analyzer/compiled/lowering.py replaces names that torch {torch.__version__} has no more"
    from torch._inductor import config, scheduler

    assert "sorted" in scheduler.Scheduler.free_buffers.__code__.co_names, "buffers are freed in another order"
    unknown = [name for name in lowering._QUIET if name not in config._config]
    assert unknown == [], f"analyzer/compiled/lowering.py sets what torch {torch.__version__} has no setting for"


TABLE = {
    "pointwise": (lambda a, b: a + b.exp(), (X, X + 1), "poi_fused_add_exp", ROWS * WIDTH, 1, [BYTES] * 2, [BYTES]),
    "softmax": (lambda a: a.softmax(-1), (X,), "per_fused__softmax", ROWS, WIDTH, [BYTES], [BYTES]),
    "layer norm": (lambda a, w, b: F.layer_norm(a, (WIDTH,), w, b), (X, VECTOR, VECTOR + 1),
                   "per_fused_native_layer_norm", ROWS, WIDTH, [BYTES, WIDTH * 4, WIDTH * 4], [BYTES]),
    "embedding": (lambda table, i: F.embedding(i, table), (torch.rand(100, WIDTH), torch.arange(16)),
                  "poi_fused_embedding", 16 * WIDTH, 1, [16 * 8, 16 * WIDTH * 4], [16 * WIDTH * 4]),
    "cat": (lambda a, b: torch.cat([a, b]), (X, torch.rand(32, WIDTH)), "poi_fused_cat", 96 * WIDTH, 1,
            [BYTES, BYTES // 2], [BYTES + BYTES // 2]),
    "cumsum": (lambda a: a.cumsum(-1), (torch.rand(64, 1024),), "per_fused_cumsum", 64, 1024, [2**18], [2**18]),
    # in parts, of which each tells the next its sum: 8 bytes for each 256 numbers, Inductor's least
    "cumsum of few rows": (lambda a: a.cumsum(-1), (torch.rand(2, 2**16),), "red_fused_cumsum", 2, 2**16, [2**19],
                           [2**19, 8 * 2 * 2**16 // 256]),
    "sort": (lambda a: a.sort(-1), (torch.rand(64, 64),), "per_fused_sort", 64, 64, [2**14], [2**14, 2**15]),
}


@pytest.mark.parametrize("name", TABLE)
def test_what_a_kernel_reads_and_writes(name, made):
    function, given, title, elements, reduced, read, written = TABLE[name]
    profile(Call(function), args=given, device="h100", mode="infer")
    kernel, = kernels_of(made)
    assert kernel.name.startswith(title) and (kernel.elements, kernel.reduced) == (elements, reduced)
    assert list(kernel.read_bytes) == read and list(kernel.written_bytes) == written


@pytest.mark.parametrize(("inputs", "scattered"), [(3, 1024 * 1024), (1, 0)])
def test_a_transposed_copy_beside_a_sum_of_rows_is_written_element_by_element(inputs, scattered, made):
    """Where eight times as many bytes lie along the rows, a block has one; else blocks of many rows are tried too."""
    def run(*given):
        total = sum(given)
        return total / total.sum(-1, keepdim=True), (total * 2).to(torch.int8).t().contiguous()
    profile(Call(run), args=tuple(torch.rand(1024, 1024) for _ in range(inputs)), device="h100", mode="infer")
    assert [(kernel.reduced, kernel.scattered) for kernel in kernels_of(made)] == [(1024, scattered)]


def test_functions_of_a_vector_that_is_spread_are_counted_for_each_element(made):
    """A quotient in float64 of a number for each column, as a scale of float8 has; of the rows' own once a row."""
    def scale(a, columns):
        rows = a.amax(-1, keepdim=True).double().reciprocal().float()
        return a * columns.double().reciprocal().float() * rows
    profile(Call(scale), args=(X, VECTOR), device="h100", mode="infer")
    profile(Call(lambda a, columns: a * columns.double().reciprocal().float()), args=(X, VECTOR), device="h100",
            mode="infer")
    profile(Call(lambda a, b: a * b.double().reciprocal().float()), args=(X, X + 1), device="h100", mode="infer")
    assert [kernel.spread for kernel in kernels_of(made)] == [
        (("double", ROWS * WIDTH),), (("double", ROWS * WIDTH),), ()]


def test_a_transposed_copy_alone_is_made_of_tiles(made):
    profile(Call(lambda a: (a * 2).t() + a), args=(torch.rand(1024, 1024),), device="h100", mode="infer")
    kernel, = kernels_of(made)
    assert (kernel.kind, kernel.scattered) == ("tiled", 0)


def test_a_compiled_step_of_an_optimizer_has_foreach_kernels(made):
    """A kernel for all parameters: it reads each, its gradient and its momentum, and writes all but the gradient."""
    def make(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)
        optimizer.step = torch.compile(optimizer.step)
        return optimizer
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    nbytes = sum(p.numel() for p in model.parameters()) * 4
    profile(model, args=(X,), device="h100", optimizer=make)
    kernel = kernels_of(made)[-1]
    assert kernel.name.startswith("for_fused") and kernel.elements == nbytes // 4
    assert (sum(kernel.read_bytes), sum(kernel.written_bytes)) == (3 * nbytes, 2 * nbytes)


def test_a_graph_for_the_host_has_kernels_of_cpp(made):
    profile(Call(lambda a, b: (a + b.exp()).softmax(-1)), args=(X, X + 1), device="cpu", mode="infer")
    kernel, = kernels_of(made)
    assert kernel.name.startswith("cpp_fused") and "empty_strided_cpu" in made[0].source
    assert sum(kernel.read_bytes) >= 2 * BYTES and BYTES in kernel.written_bytes


def test_a_librarys_kernel_that_gives_several_tensors_is_one(made):
    """Attention gives its output, the logarithms of the sums, and the state of the random generator."""
    query = torch.rand(1, 4, ROWS, WIDTH, requires_grad=True)
    p = profile(Call(F.scaled_dot_product_attention), args=(query, query, query), device="h100")
    assert "[1]" in made[0].source and (p.compiled[0].fwd_extern_kernels, p.compiled[0].bwd_extern_kernels) == (1, 1)


@pytest.mark.parametrize("device", ["m1", "mi300x", "t4"])
def test_devices_that_are_not_of_hopper(device, made):
    p = profile(Call(lambda a, b: (a + b.exp()).softmax(-1)), args=(X, X + 1), device=device, mode="infer")
    kernel, = kernels_of(made)
    assert sum(kernel.read_bytes) >= 2 * BYTES and BYTES in kernel.written_bytes
    assert p.peak_allocated_bytes and p.kernels == 1


@pytest.mark.parametrize("mode", ["max-autotune", "max-autotune-no-cudagraphs"])
def test_autotuning_takes_the_librarys_kernels(mode, made):
    """The bias is added in the product's kernel; two products that are added are one call."""
    def run(x, weight, bias):
        return x @ x.t() + weight @ x, F.linear(x, weight, bias)
    given = torch.rand(WIDTH, WIDTH), torch.rand(WIDTH, WIDTH), VECTOR
    p = profile(Call(run, mode=mode), args=given, device="h100", mode="infer")
    source = made[0].source
    product = "addmm" if torch.__version__ >= (2, 12) else "bias_addmm"
    assert f"extern_kernels.{product}(" in source and "extern_kernels._mm_plus_mm(" in source and not made[0].kernels
    assert any("max-autotune" in line for line in p.assumptions)
    assert p.compiled[0].cuda_graphs == (mode == "max-autotune")


@pytest.mark.parametrize(("vocabulary", "is_gradient_padded"), [(50257, True), (30522, False)])
def test_products_are_padded_where_an_h200_pads_them(vocabulary, is_gradient_padded, monkeypatch):
    """Heads of GPT-2 and BERT, 16,384 tokens of 768 in bf16: forward, and both gradients. PyTorch 2.11 on an H200 pads
    all but BERT's gradient of the weight, whose first operand, transposed, would have to be copied.
    """
    tokens, width = 16384, 768

    def make(*shape):
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def is_padded(a, b, planned=""):
        monkeypatch.setattr(pad_mm, "should_exclude_padding_time", lambda match, name: name == planned)
        monkeypatch.setattr(pad_mm, "set_cached_should_pad", lambda key, value: None)
        return lowering._is_worth_padding(find_device("h200"), None, a, b, torch.ops.aten.mm)

    hidden, weight, scores = make(tokens, width), make(vocabulary, width), make(tokens, vocabulary)
    assert is_padded(hidden, weight.t())
    assert is_padded(scores, weight, "mat1")
    assert is_padded(scores.t(), hidden, "mat2") is is_gradient_padded


def test_a_head_of_an_odd_vocabulary_is_padded_in_the_program(made):
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.LayerNorm(768), nn.Linear(768, 50257, bias=False)

        def forward(self, x):
            return F.log_softmax(self.head(self.norm(x)), -1)
    profile(torch.compile(Head()), torch.rand(16384, 768), device="h200", mode="infer", autocast=torch.bfloat16)
    assert "(16384, 50264)" in made[0].source


def test_operands_keep_the_strides_that_an_operator_demands():
    """Columns of the second operand of ``_scaled_mm`` lie one behind the other, also of one that a kernel makes."""
    def multiply(x, weight):
        one, half = x.new_ones(()), torch.float8_e4m3fn
        return torch._scaled_mm((x * 2).to(half), (weight.t() * 2).to(half), one, one, out_dtype=torch.bfloat16)

    p = profile(Call(multiply), (X, torch.rand(16, WIDTH)), device="h100", mode="infer")
    assert (p.compiled[0].fwd_kernels, p.compiled[0].fwd_extern_kernels) == (3, 1)

"""Single operators whose path on the claimed GPU is another than on meta, and the place of such paths in the
dispatcher.
"""
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity
from torch.profiler import profile as watch

from analyzer import MetaTensorMode, profile
from analyzer.cuda.kernel_registry import device_kernels
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.tools.runtime import measure
from tests.call import Call

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def rand(*shape, dtype=FP32, grad=True, device="cuda"):
    return torch.rand(*shape, dtype=dtype, device=device, requires_grad=grad)


@pytest.mark.parametrize(("run", "fused"), [
    (lambda: torch.nn.Dropout(0.5).train()(rand(4, 5)), True), (lambda: F.dropout(rand(4, 5), 0.1, False), False),
    (lambda: F.dropout(rand(4, 5), 0.0, True), False), (lambda: F.dropout(rand(0, 5), 0.1, True), False),
    (lambda: F.dropout(rand(4, 5, grad=False), 0.1, True, inplace=True), False),
    (lambda: F.dropout2d(rand(4, 5, 2, 2), 0.1, True), False),
    (lambda: F.dropout(rand(4, 5, device="cpu"), 0.1, True), False)])
def test_dropout_is_fused_where_cuda_fuses_it(mode, run, fused):
    run()
    assert ("native_dropout" in mode.state.recorder.names()) is fused


def test_fused_dropout_saves_booleans(mode):
    F.dropout(rand(4, 5, dtype=BF16), 0.1, True).sum().backward()
    (forward,), (backward,) = map(mode.state.recorder.find, ("native_dropout", "native_dropout_backward"))
    assert [(tuple(s), s.dtype) for s in forward.outputs] == [((4, 5), BF16), ((4, 5), torch.bool)]
    assert backward.inputs[1].dtype is torch.bool


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize(("dtype", "converts"), [(FP16, False), (BF16, True)])
def test_a_float32_softmax_of_float16_needs_no_copy(mode, name, dtype, converts):
    x = rand(4, 5, dtype=dtype)
    mode.state.recorder.calls.clear()
    out = getattr(torch, name)(x, -1, dtype=FP32)
    assert out.dtype is FP32
    assert ("_to_copy" in mode.state.recorder.names()) is converts
    (call,) = mode.state.recorder.find(f"_{name}")
    assert call.args[2] is not converts  # half_to_float


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", ["silu", "mish"])
def test_the_backward_of_an_activation_is_one_kernel(mode, name, device):
    x = rand(4, 5, device=device)
    getattr(F, name)(x).sum().backward()
    assert len(mode.state.recorder.find(f"{name}_backward")) == 1
    assert "sigmoid" not in mode.state.recorder.names() and x.grad.shape == (4, 5)


def test_double_backward_is_composed_as_torch_composes_it(mode):
    x = rand(4, 5)
    (grad,) = torch.autograd.grad(F.silu(x).sum(), x, create_graph=True)
    grad.sum().backward()
    assert x.grad.shape == (4, 5) and mode.state.recorder.find("silu_backward") == []


def test_logsigmoid_saves_no_buffer(mode):
    F.logsigmoid(rand(4, 5)).sum().backward()
    (call,) = mode.state.recorder.find("log_sigmoid_forward")
    assert [s.numel for s in call.outputs] == [20, 0]


def test_one_hot_scatters_into_zeros(mode):
    classes = torch.randint(0, 7, (3, 4), device="cuda")
    mode.state.recorder.calls.clear()
    out = F.one_hot(classes, 7)
    assert (tuple(out.shape), out.dtype) == ((3, 4, 7), torch.int64)
    assert mode.state.recorder.names() == ["zeros", "unsqueeze", "scatter_"]
    assert out.sum(-1).nonzero().shape[0] == 12  # each row has its one
    assert out.permute(2, 0, 1)[0].nonzero().shape[0] == 2  # and each class a seventh of twelve, rounded


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_known_classes_stay_known(mode, device):
    assert F.one_hot(torch.tensor([1, 0], device=device), 3).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert F.one_hot(torch.tensor([1, 0], device=device)).tolist() == [[0, 1], [1, 0]]
    assert F.one_hot(torch.zeros(0, dtype=torch.long, device=device), 3).shape == (0, 3)


@pytest.mark.parametrize(("classes", "count", "text"), [
    ([0, 2], 2, r"one_hot: classes from 0 to 2 are not all in \[0, 2\)"),
    ([-1, 1], -1, r"one_hot: classes from -1 to 1 are not all in \[0, 2\)"),
    ([0, 1], 0, r"num_classes=0 for \[2\], where at least 1 is needed"), ([], -1, r"num_classes=-1 for \[0\], where")])
def test_classes_that_cannot_be_are_refused_on_the_host(classes, count, text):
    classes = torch.tensor(classes, dtype=torch.long)
    with pytest.raises(RuntimeError):
        F.one_hot(classes, count)
    with MetaTensorMode(), pytest.raises(RuntimeError, match=text):
        F.one_hot(classes, count)


def test_bincount_has_as_many_bins_as_asked_for(mode):
    assert torch.bincount(torch.randint(0, 4, (10,), device="cuda"), minlength=4).shape == (4,)
    assert any("bincount" in text for text in mode.state.assumptions)
    assert torch.bincount(torch.tensor([1, 1, 4], device="cuda"), minlength=2).tolist() == [0, 2, 0, 0, 1]


LABELS = [4, 2, 3]
#: targets' shape, lengths, and what the loss is given besides
CTC = {"lists": ((3, 5), lambda n: n, {}), "tuples in one row": ((9,), tuple, {"zero_infinity": True}),
       "tensors": ((3, 5), torch.tensor, {"reduction": "sum"}), "tensors in one row": ((9,), torch.tensor, {}),
       "each": ((9,), torch.tensor, {"reduction": "none"})}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", CTC)
def test_ctc_loss_has_states_for_the_longest_target(mode, name, device):
    shape, make, options = CTC[name]
    log_probs = torch.rand(20, 3, 7, device=device, requires_grad=True).log_softmax(-1)
    targets = torch.randint(1, 7, shape, device=device)
    loss = F.ctc_loss(log_probs, targets, make([20, 18, 20]), make(LABELS), **options)
    assert loss.shape == ((3,) if options.get("reduction") == "none" else ()) and loss.device.type == device
    loss.sum().backward()
    (call,) = mode.state.recorder.find("_ctc_loss")
    with without_modes():
        _, states = torch._ctc_loss(torch.rand(20, 3, 7), torch.randint(1, 7, shape), [20, 18, 20], LABELS)
    # two for each label of the longest target and one more
    assert [tuple(s) for s in call.outputs] == [(3,), tuple(states.shape)] == [(3,), (3, 20, 9)]
    assert not any("ctc_loss" in text for text in mode.state.assumptions)
    assert len(mode.state.recorder.find("_ctc_loss_backward")) == 1


def test_ctc_loss_of_one_sequence(mode):
    loss = F.ctc_loss(rand(20, 7).log_softmax(-1), torch.randint(1, 7, (4,)).cuda(), (20,), (4,), reduction="none")
    assert loss.shape == ()


@pytest.mark.parametrize(("shape", "labels"), [((3, 5), 5), ((10,), 4)])
def test_lengths_that_are_not_known_are_those_that_fit(mode, shape, labels):
    lengths = torch.randint(1, 5, (3,), device="cuda")
    F.ctc_loss(rand(20, 3, 7).log_softmax(-1), torch.randint(1, 7, shape).cuda(), lengths, lengths).backward()
    (call,) = mode.state.recorder.find("_ctc_loss")
    assert tuple(call.outputs[1]) == (3, 20, 2 * labels + 1)
    assert any(f"each target is assumed to have {labels} labels" in text for text in mode.state.assumptions)


def test_cudnn_takes_short_targets_on_the_host(mode):
    log_probs = rand(20, 3, 7).log_softmax(-1)
    F.ctc_loss(log_probs, torch.randint(1, 7, (9,), dtype=torch.int32), [20, 20, 20], LABELS).backward()
    (call,) = mode.state.recorder.find("_cudnn_ctc_loss")
    assert [tuple(s) for s in call.outputs] == [(3,), (20, 3, 7)]


@pytest.mark.parametrize("make", [list, torch.tensor])
def test_the_peak_of_ctc_loss_on_the_host_is_that_of_pytorch(make):
    lengths = make([50] * 3), make(LABELS)
    model = Call(lambda m, x, t: F.ctc_loss(m.linear(x).log_softmax(-1), t, *lengths), linear=torch.nn.Linear(64, 64))
    x, targets = torch.rand(50, 3, 64), torch.randint(1, 64, (9,))
    model(x, targets).backward()
    model.zero_grad()
    with watch(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model(x, targets).backward()
    changes = [event.nbytes() for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    right = sum(t.nbytes for t in (*model.parameters(), x, targets)) + max(itertools.accumulate(changes))
    assert profile(model, (x, targets), device="cpu").peak_allocated_bytes == pytest.approx(right, abs=128)


@pytest.mark.parametrize("rows", [16, 100, 200, 800])
def test_the_peak_of_attention_on_the_host_is_that_of_pytorch(rows):
    """The gradient is copied to have heads behind rows, and each thread has scores of a part."""
    model = Call(lambda m, x: F.scaled_dot_product_attention(*m.linear(x).chunk(3, -1)).sin(),
                 linear=torch.nn.Linear(8, 24, bias=False))
    x = torch.rand(2, 2, rows, 8)
    model(x).sum().backward()
    model.zero_grad()
    with watch(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model(x).sum().backward()
    changes = [event.nbytes() for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    right = sum(t.nbytes for t in (*model.parameters(), x)) + max(itertools.accumulate(changes))
    p = profile(model, (x,), device="cpu")
    assert p.peak_allocated_bytes == pytest.approx(right, abs=128)
    assert p.verdict.operator == "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"


def encoder_layer(**options):
    return torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, **options).cuda().eval()


@pytest.mark.parametrize("options", [{}, dict(norm_first=True), dict(activation="gelu")])
def test_the_fused_encoder_layer_is_the_operators_it_is_made_of(mode, options):
    layer, x = encoder_layer(**options), rand(2, 10, 64, grad=False)
    mode.state.recorder.calls.clear()
    with torch.no_grad():
        assert layer(x).shape == (2, 10, 64)
    names = mode.state.recorder.names()
    # projections of queries, keys and values; attention; projection; two linear layers, the first with its activation
    products = [n for n in names if "mm" in n or "attention" in n]
    assert products == ["addmm", "_scaled_dot_product_efficient_attention", "addmm", "_addmm_activation", "addmm"]
    assert names.count("native_layer_norm") == 2 and "_transformer_encoder_layer_fwd" not in names


def test_the_fused_encoder_layer_with_a_mask_takes_plain_products(mode):
    layer, x = encoder_layer(), rand(2, 10, 64, grad=False)
    mode.state.recorder.calls.clear()
    with torch.no_grad():
        layer(x, src_key_padding_mask=torch.zeros(2, 10, dtype=torch.bool, device="cuda"))
    names = mode.state.recorder.names()
    products = [n for n in names if "mm" in n or "softmax" in n]
    assert products == ["mm", "bmm", "_masked_softmax", "bmm", "addmm", "_addmm_activation", "addmm"]
    (call,) = mode.state.recorder.find("_transform_bias_rescale_qkv")
    assert [tuple(s) for s in call.outputs] == [(2, 4, 10, 16)] * 3


def test_a_stack_of_encoder_layers_makes_no_nested_tensors(mode):
    with torch.no_grad():
        out = torch.nn.TransformerEncoder(encoder_layer(), 2)(
            rand(2, 10, 64, grad=False), src_key_padding_mask=torch.zeros(2, 10, dtype=torch.bool, device="cuda"))
    assert out.shape == (2, 10, 64) and any("left-aligned" in text for text in mode.state.assumptions)


def test_inference_mode_takes_the_same_paths(mode):
    with torch.inference_mode():
        F.batch_norm(rand(2, 3, 8, 8), rand(3), rand(3), rand(3), rand(3))
        F.dropout(rand(4, 5), 0.1, True)
    assert {"cudnn_batch_norm", "native_dropout"} <= set(mode.state.recorder.names())


def test_nothing_is_left_in_the_dispatcher_or_in_the_thread():
    before = (torch._C._dispatch_tls_local_include_set().raw_repr(),
              torch._C._dispatch_tls_local_exclude_set().raw_repr())
    op = torch.ops.aten.dropout.default
    with pytest.raises(ZeroDivisionError), MetaTensorMode():
        assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::dropout", "AutocastIPU")
        raise ZeroDivisionError
    assert op in device_kernels
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::dropout", "AutocastIPU")
    assert before == (torch._C._dispatch_tls_local_include_set().raw_repr(),
                      torch._C._dispatch_tls_local_exclude_set().raw_repr())


# Losses that are summed into the storage of their elements.


@pytest.mark.parametrize("function", [F.mse_loss, F.soft_margin_loss, F.binary_cross_entropy, F.l1_loss])
def test_a_loss_holds_what_the_processor_holds(function):
    def make():
        return Call(lambda m, target: function(m.weight, target), weight=torch.rand(16, 8))

    target = torch.rand(16, 8)
    predicted = profile(make(), args=(target,), device="cpu", reuse=False)
    measured = measure(make(), args=(target,), steps=1)
    for phase in ("forward", "backward"):
        assert predicted.phases[phase].allocated_bytes == measured.phases[phase].allocated_bytes
    assert predicted.phases["forward"].peak_allocated_bytes == measured.phases["forward"].peak_allocated_bytes


@pytest.mark.parametrize(("function", "elements"), [(F.mse_loss, 128), (F.smooth_l1_loss, 128), (F.l1_loss, 1)])
def test_it_is_the_same_on_a_gpu(mode, function, elements):
    loss = function(*torch.rand(2, 16, 8, device="cuda"))
    assert (loss.shape, loss.untyped_storage().nbytes()) == ((), 4 * elements)


# Indices that are known to point outside.

@pytest.mark.parametrize("select", [
    lambda x, i: x.index_select(0, i), lambda x, i: x.gather(0, i), lambda x, i: F.embedding(i, x[:, None])])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_selecting_outside_raises_what_the_processor_raises(select, device):
    with pytest.raises((IndexError, RuntimeError)) as real:
        select(torch.rand(5), torch.tensor([0, 5]))
    with MetaTensorMode():
        assert select(torch.rand(5, device=device), torch.tensor([0, 4], device=device)).shape[0] == 2
        with pytest.raises(type(real.value), match=str(real.value)):
            select(torch.rand(5, device=device), torch.tensor([0, 5], device=device))


# Shapes and strides of grouped products, held to the CPU kernel.

@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="newer than this torch")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("a_shape", "b_shape", "groups"), [
    ((10, 8), (2, 8, 12), [4, 10]), ((2, 4, 8), (8, 10), [4, 10]), ((4, 8), (8, 12), [4, 8]),
    ((2, 4, 8), (2, 8, 12), None)], ids=["ragged rows", "ragged columns", "ragged inner", "batched"])
def test_grouped_products_are_like_the_kernels(a_shape, b_shape, groups, dtype: torch.dtype) -> None:
    def make() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        # each row must start at a multiple of 16 bytes: a view of rows padded to 16 elements
        padded = [torch.zeros(*shape[:-1], 16, dtype=dtype)[..., :shape[-1]] for shape in (a_shape, b_shape)]
        return padded[0], padded[1], None if groups is None else torch.tensor(groups, dtype=torch.int32)

    a, b, offs = make()
    expected = torch._grouped_mm(a, b, offs=offs)
    with MetaTensorMode():
        a, b, offs = make()
        got = torch._grouped_mm(a, b, offs=offs)
        with pytest.raises(RuntimeError, match="cannot multiply"):
            torch._grouped_mm(torch.zeros(4, 8), torch.zeros(2, 16, 8), offs=torch.zeros(2, dtype=torch.int32))
    assert (got.shape, got.stride(), got.dtype) == (expected.shape, expected.stride(), expected.dtype)

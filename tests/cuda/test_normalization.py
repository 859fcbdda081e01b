"""Normalisation on the claimed GPU: which library runs it, and what it saves."""
import pytest
import torch
import torch.nn.functional as F

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def batch_norm(mode, shape, dtype=FP32, weight_dtype=FP32, training=True, affine=True, running=True,
               layout=torch.contiguous_format):
    x = torch.rand(shape, dtype=dtype, device="cuda").to(memory_format=layout).requires_grad_()
    mean, var, weight, bias = (torch.rand(shape[1], dtype=weight_dtype, device="cuda") for _ in range(4))
    mode.state.recorder.calls.clear()
    running_stats = (mean, var) if running else (None, None)
    return F.batch_norm(x, *running_stats, *((weight, bias) if affine else (None, None)), training)


@pytest.mark.parametrize(("uses_cudnn", "shape", "options"), [
    (True, (8, 16, 4, 4), {}),                                            # measured: float32 ResNet
    (False, (8, 16, 4, 4), dict(dtype=BF16)),                             # measured: the same under autocast
    (True, (8, 16, 4, 4), dict(dtype=FP16)),
    (False, (8, 16, 4, 4), dict(dtype=FP16, weight_dtype=FP16)),          # halves need float32 weights
    (True, (8, 16, 10), {}), (False, (8, 16), {}),                        # at least three dimensions
    (False, (8, 16, 4, 4), dict(affine=False)), (True, (8, 16, 4, 4), dict(running=False)),
    (False, (65536, 2, 1), dict(training=False)),                         # at most 65535 in evaluation
    (True, (65536, 2, 1), dict(training=True)),
    (False, (880802, 1, 1), dict(training=True)),                         # at most 880801 in training
    (False, (2**15, 2**8, 2**8), {}),                                     # at most 2**31 - 1 elements
])
def test_cudnn_normalises_batches_where_it_can(mode, uses_cudnn, shape, options):
    batch_norm(mode, shape, **options)
    names = mode.state.recorder.names()
    assert ("cudnn_batch_norm" in names, "native_batch_norm" in names) == (uses_cudnn, not uses_cudnn)


def test_cudnn_can_be_switched_off(mode):
    with torch.backends.cudnn.flags(enabled=False):
        batch_norm(mode, (8, 16, 4, 4))
    assert "native_batch_norm" in mode.state.recorder.names()


def test_training_saves_statistics_and_no_reserve_and_goes_back_through_cudnn(mode):
    out = batch_norm(mode, (8, 16, 4, 4))
    (call,) = mode.state.recorder.find("cudnn_batch_norm")
    assert [(tuple(s), s.dtype) for s in call.outputs] == [((8, 16, 4, 4), FP32), ((16, ), FP32), ((16, ), FP32),
                                                           ((0, ), torch.uint8)]
    out.sum().backward()
    assert len(mode.state.recorder.find("cudnn_batch_norm_backward")) == 1


def test_evaluation_saves_no_statistics(mode):
    batch_norm(mode, (8, 16, 4, 4), training=False)
    (call,) = mode.state.recorder.find("cudnn_batch_norm")
    assert [tuple(s) for s in call.outputs] == [(8, 16, 4, 4), (0,), (0,), (0,)]


def test_channels_last_stays_and_its_reserve_is_an_assumption(mode):
    out = batch_norm(mode, (8, 16, 4, 4), layout=torch.channels_last)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert any("channels-last" in text for text in mode.state.assumptions)


def test_instance_norm_reaches_the_same_choice_from_c_code(mode):
    F.instance_norm(torch.rand(2, 3, 8, 8, device="cuda"), weight=torch.ones(3, device="cuda"), bias=torch.ones(
        3, device="cuda"))
    (call,) = mode.state.recorder.find("cudnn_batch_norm")
    assert tuple(call.inputs[0]) == (1, 6, 8, 8)


def test_rms_norm_is_one_call_with_one_number_per_row(mode):
    x = torch.rand(2, 3, 8, dtype=BF16, device="cuda", requires_grad=True)
    weight = torch.ones(8, dtype=BF16, device="cuda", requires_grad=True)
    mode.state.recorder.calls.clear()
    F.rms_norm(x, (8,), weight).sum().backward()
    (forward,), (backward,) = (mode.state.recorder.find(n) for n in ("_fused_rms_norm", "_fused_rms_norm_backward"))
    assert [(tuple(s), s.dtype) for s in forward.outputs] == [((2, 3, 8), BF16), ((2, 3, 1), FP32)]
    assert [tuple(s) for s in backward.outputs] == [(2, 3, 8), (8,)]
    assert (x.grad.shape, weight.grad.shape) == ((2, 3, 8), (8,))
    assert "rsqrt" not in mode.state.recorder.names()


@pytest.mark.parametrize("case", ["another dtype", "channels last"])
def test_rms_norm_is_composed_where_cuda_composes_it(mode, case):
    if case == "another dtype":
        F.rms_norm(torch.rand(2, 8, dtype=BF16, device="cuda"), (8,), torch.ones(8, device="cuda"))
    else:
        F.rms_norm(torch.rand(2, 3, 4, 8, device="cuda").to(memory_format=torch.channels_last), (8,))
    assert "_fused_rms_norm" not in mode.state.recorder.names() and "rsqrt" in mode.state.recorder.names()

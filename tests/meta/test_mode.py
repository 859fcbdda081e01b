"""MetaTensorMode: claims, construction, copies, and nothing left behind."""
import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from analyzer import MetaTensor, MetaTensorMode, ProfileOptions, profile
from analyzer.errors import InputError, UnsupportedOperatorError
from analyzer.meta.argument import fake_arguments
from analyzer.meta.dispatch import mode as dispatch_mode
from analyzer.meta.intercept.mode_stack import without_modes

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("make", "device", "shape", "dtype"), [
        (lambda: torch.rand(2, 3), CPU, (2, 3), torch.float32),
        (lambda: torch.rand(2, 3, device="cuda"), CUDA, (2, 3), torch.float32),
        (lambda: torch.rand(2).cuda(), CUDA, (2,), torch.float32),
        (lambda: torch.rand(2).cuda().cpu(), CPU, (2,), torch.float32),
        (lambda: torch.rand(2).to("cuda", torch.bfloat16), CUDA, (2,), torch.bfloat16),
        (lambda: torch.rand(2).to(torch.empty(1, dtype=torch.float64, device="cuda")), CUDA, (2,), torch.float64),
        (lambda: torch.rand(2, device="cuda").type(torch.float16), CUDA, (2,), torch.float16),
        (lambda: torch.rand(2).type("torch.cuda.HalfTensor"), CUDA, (2,), torch.float16),
        (lambda: torch.rand(2).type_as(torch.ones(1, dtype=torch.float16, device="cuda")), CUDA, (2,), torch.float16),
        (lambda: torch.tensor([1, 2, 3], device="cuda"), CUDA, (3,), torch.int64),
        (lambda: torch.empty(3, device="cuda").new_tensor([1.0]), CUDA, (1,), torch.float32),
        (lambda: torch.ones_like(torch.empty(3, device="cuda"), device="cpu"), CPU, (3,), torch.float32),
        (lambda: torch.from_numpy(__import__("numpy").zeros((2, 2), dtype="float32")).cuda(), CUDA, (2, 2),
         torch.float32),
    ],
)
def test_a_tensor_claims_the_device_that_its_code_says_during_and_after_the_mode(make, device, shape, dtype):
    with MetaTensorMode():
        x = make()
        assert x.device == device
    assert isinstance(x, MetaTensor)
    assert (x.device, tuple(x.shape), x.dtype) == (device, shape, dtype)
    assert (x.is_cuda, x.is_cpu, x.is_meta) == (device.type == "cuda", device.type == "cpu", False)
    assert x.get_device() == (-1 if device.index is None else device.index)
    assert x.untyped_storage().device == device


def test_to_the_same_device_and_dtype_is_the_tensor_itself():
    with MetaTensorMode():
        x = torch.rand(3, device="cuda")
        assert x.to("cuda") is x
        assert x.cuda() is x
        assert x.to(CUDA, torch.float32) is x
        assert x.to("cuda", copy=True) is not x


def test_the_default_device_is_a_claim_too():
    with MetaTensorMode(), torch.device("cuda"):
        assert torch.rand(3).device == CUDA
        assert torch.nn.Linear(2, 2).weight.device == CUDA


def test_modules_are_built_initialised_and_moved_without_data():
    with MetaTensorMode():
        layer = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.LSTM(8, 8))
        layer = layer.cuda().half()
        assert all(isinstance(p, torch.nn.Parameter) and p.requires_grad for p in layer.parameters())
        assert {(p.device, p.dtype) for p in layer.parameters()} == {(CUDA, torch.float16)}
        torch.nn.init.trunc_normal_(layer[0].weight)
        torch.nn.init.orthogonal_(torch.empty(4, 4))
        torch.nn.init.kaiming_normal_(layer[0].weight)
        assert layer[1].num_batches_tracked.device == CUDA


def test_parameters_without_a_shape_have_a_device():
    outside = torch.nn.LazyLinear(4)
    with MetaTensorMode():
        layer, on_host = torch.nn.LazyLinear(4, device="cuda"), torch.nn.LazyLinear(4)
        assert [str(m.weight.device) for m in (layer, on_host, outside)] == ["cuda:0", "cpu", "cpu"]
        assert layer(torch.rand(2, 3, device="cuda")).shape == (2, 4)
    assert profile(torch.nn.Sequential(torch.nn.LazyConv2d(4, 3)), torch.rand(2, 3, 8, 8), device="h100").params == 112


def test_state_dict_round_trip_and_deepcopy():
    with MetaTensorMode():
        a, b = torch.nn.Linear(3, 4).cuda(), torch.nn.Linear(3, 4).cuda()
        assert b.load_state_dict(a.state_dict()) is not None
        c = copy.deepcopy(a)
        base = torch.rand(10, device="cuda")
        pair = copy.deepcopy([base, base[2:]])
    for model in (a, c, copy.deepcopy(a)):  # the last one after the mode
        assert isinstance(model.weight, MetaTensor) and isinstance(model.weight, torch.nn.Parameter)
        assert model.weight.device == CUDA and model.weight.requires_grad
    assert c.weight.data_ptr() != a.weight.data_ptr() and a.state_dict()["weight"].device == CUDA
    assert pair[1].data_ptr() - pair[0].data_ptr() == 8 and pair[0].data_ptr() != base.data_ptr()
    x = torch.nn.Parameter(a.weight.detach().t())
    y = pickle.loads(pickle.dumps(x))
    assert (y.device, y.shape, y.stride(), y.requires_grad) == (CUDA, (3, 4), (1, 3), True)
    assert isinstance(y, torch.nn.Parameter)


def test_addresses_are_distinct_for_storages_and_offset_for_views():
    with MetaTensorMode():
        x, y = torch.rand(4, 4, device="cuda"), torch.rand(4, 4, device="cuda")
        assert x.data_ptr() != y.data_ptr()
        assert x.data_ptr() % 512 == 0
        assert x[1].data_ptr() - x.data_ptr() == 16
        assert x.t().data_ptr() == x.view(16).data_ptr() == x.untyped_storage().data_ptr() == x.data_ptr()
        assert torch.empty(0, device="cuda").data_ptr() == 0
        gone = x.data_ptr()
        del x
        assert torch.rand(4, 4, device="cuda").data_ptr() == gone  # the allocator's cache hands the block out again


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("use", [
    lambda x, m: m(x), lambda x, m: torch.cat([x, x]), lambda x, m: x.tolist(), lambda x, m: torch.zeros_like(x),
    lambda x, m: bool(x[0, 0] > 0), lambda x, m: x.numpy(), lambda x, m: m.bfloat16()])
def test_what_computes_outside_of_the_mode_is_refused_with_the_way_out(use, device):
    with MetaTensorMode():
        x, model = torch.rand(2, 4, device=device), torch.nn.Linear(4, 4, device=device)
    with pytest.raises(UnsupportedOperatorError, match=r"no data[^$]*Way out: run this inside `with MetaTensorMode"):
        use(x, model)
    with MetaTensorMode():
        assert (x + 1).shape == (2, 4)


def test_shapes_views_and_modules_can_be_used_outside_of_the_mode():
    with MetaTensorMode():
        x, model = torch.rand(4, 4, device="cuda"), torch.nn.Linear(4, 4).cuda()
    assert [type(t) for t in (x[0], *x.chunk(2), x.detach(), x.t(), x.data,
                              model.state_dict()["bias"])] == [MetaTensor] * 7
    assert (x.shape, x.dim(), x.requires_grad, x.is_leaf, len(x), x.grad) == ((4, 4), 2, False, True, 4, None)
    assert sum(p.numel() for p in model.parameters()) == 20 and model.eval().weight.requires_grad_(False).device == CUDA
    assert isinstance(torch.nn.Parameter(x), torch.nn.Parameter)


def test_gradients_go_back_across_a_move():
    with MetaTensorMode():
        w = torch.rand(3, requires_grad=True)
        (w.cuda() * 2).cpu().sum().backward()
        assert w.grad.device == CPU
        v = torch.rand(3, device="cuda", requires_grad=True)
        v.cpu().half().sum().backward()
        assert (v.grad.device, v.grad.dtype) == (CUDA, torch.float32)


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.AdamW(p),
    lambda p: torch.optim.AdamW(p, fused=True), lambda p: torch.optim.AdamW(p, foreach=False),
    lambda p: torch.optim.NAdam(p), lambda p: torch.optim.RAdam(p), lambda p: torch.optim.Adafactor(p)])
def test_optimizers_step_and_keep_their_states_on_the_device(make):
    with MetaTensorMode():
        layer = torch.nn.Linear(8, 8).cuda()
        optimizer = make(layer.parameters())
        for _ in range(3):
            layer(torch.rand(2, 8, device="cuda")).sum().backward()
            torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        assert all(t.device == CUDA for t in states if t.numel() > 1)


def test_optimizers_take_the_foreach_path_as_on_cuda(mode):
    layer = torch.nn.Linear(8, 8).cuda()
    layer(torch.rand(2, 8, device="cuda")).sum().backward()
    torch.optim.AdamW(layer.parameters()).step()
    assert mode.state.recorder.find("_foreach_addcdiv_")


ALIKE = [(3, 4), (5,), (3, 4), (5,), (3, 4)]


@pytest.mark.parametrize("call", [
    lambda lists: torch._foreach_sqrt(lists[0]), lambda lists: torch._foreach_norm(lists[0], 1),
    lambda lists: torch._foreach_add(lists[0], lists[1]), lambda lists: torch._foreach_mul(lists[0], [2, 1.0, 2, 1, 3]),
    lambda lists: torch._foreach_addcdiv_(lists[0], lists[1], lists[1], 0.1),
    lambda lists: torch._foreach_add(lists[0], [*lists[1][:3], lists[1][0], lists[1][4]]),  # (5,) and (3, 4)
    lambda lists: torch._foreach_add_(lists[0], [*lists[1][:4], torch.ones(1, 3, 4)]),
])
def test_a_foreach_operator_looks_at_one_of_alike_elements(mode, call):
    """Transposed, every other one: an element is like others of its strides alone."""
    def make():
        return [[torch.ones(shape).t() if i % 4 else torch.ones(shape) for i, shape in enumerate(ALIKE)]
                for _ in range(2)]

    def describe(run):
        try:
            return [(t.shape, t.stride(), t.dtype) for t in run() or ()]
        except RuntimeError as error:
            return type(error)

    found = describe(lambda: call(make()))
    with without_modes():
        assert found == describe(lambda: call(make()))


def observable_torch():
    """What the mode replaces while it is active."""
    modules = [torch, torch.cuda, torch.nn.Module, torch.nn.functional, torch.nn.init, torch.overrides, torch.autograd,
               torch._C, torch.optim.Optimizer, torch.utils._foreach_utils, torch.Tensor, torch.autograd.Function,
               torch.cuda.amp, torch.random, torch.cuda.memory, torch.cuda.random, torch.accelerator,
               torch.backends.cudnn, torch.cuda.nvtx, torch.cuda.graphs]
    found = {f"{m.__name__}.{k}": v for m in modules for k, v in vars(m).items()
             if callable(v) or isinstance(v, (list, property))}
    found["types"] = list(__import__("sys").modules["torch.optim.optimizer"]._foreach_supported_types)
    found["types2"] = list(torch.utils._foreach_utils._foreach_supported_types)
    found["modes"] = (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack())
    found["capture stream"] = torch.cuda.graphs.graph.default_capture_stream
    found["operators"] = [(dict(op.py_kernels), dict(op.python_key_table), op.non_fallthrough_keys)
                          for op in (torch.ops.higher_order.flex_attention, torch.ops.higher_order.out_dtype)]
    return found


def assert_unchanged(before):
    after = observable_torch()
    assert [k for k in before.keys() | after.keys()
            if before.get(k) is not after.get(k) and before.get(k) != after.get(k)] == []


def test_torch_is_as_it_was_after_the_mode_after_nesting_and_after_an_exception():
    torch.cuda.is_available()
    with MetaTensorMode():
        pass  # whatever is imported at first use is imported now
    before, rng = observable_torch(), torch.get_rng_state()
    mode = MetaTensorMode()
    with mode:
        torch.rand(2, device="cuda")
        with mode, MetaTensorMode():
            assert torch.rand(2, device="cuda").device == CUDA
        assert torch.rand(2, device="cuda").device == CUDA
    assert_unchanged(before)
    with mode:
        pass
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), mode, MetaTensorMode(ProfileOptions(devices=4)):
            torch.nn.Linear(2, 2).cuda()
            torch.cuda.set_device(3)
            raise error
        assert_unchanged(before)
    assert torch.equal(rng, torch.get_rng_state())
    with mode:
        assert torch.cuda.current_device() == 0
    assert not torch.cuda.is_available()
    assert torch.rand(2).device == CPU
    assert type(torch.rand(2)) is torch.Tensor


def test_other_threads_get_torch_as_it_is():
    found = []
    with MetaTensorMode():
        assert torch.cuda.is_available()
        thread = threading.Thread(target=lambda: found.extend([
            torch.cuda.is_available(), torch.cuda.device_count(), type(torch.rand(2) + 1),
            F.dropout(torch.ones(1000), 0.5, True).unique().tolist()]))
        thread.start()
        thread.join()
    assert found == [False, 0, torch.Tensor, [0.0, 2.0]]


def test_real_tensors_met_under_the_mode_are_not_changed():
    real = torch.arange(4.0)
    with MetaTensorMode():
        y = real * 2
        real.add_(1)
        assert isinstance(y, MetaTensor)
    assert real.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_model_with_data_is_refused_in_backward_with_the_way_out():
    """Its gradient would have none: what the engine says of that names neither the model nor a mend."""
    model, x = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)), torch.rand(2, 3, 8, 8)
    with MetaTensorMode(), pytest.raises(InputError, match=r"shape \[4\] .* made outside of the mode.*profile\(model"):
        model(x).mean().backward()
    assert all(p.grad is None for p in model.parameters())
    model(x).mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_code_in_a_backward_pass_makes_tensors_on_the_claimed_device():
    found = []

    def double(grad):
        factor = torch.tensor([2.0], device=grad.device)
        found.append(factor.device)
        return grad * factor.to("cuda:0")

    with MetaTensorMode():
        for run in (lambda y, x: y.backward(), lambda y, x: torch.autograd.backward(y),
                    lambda y, x: torch.autograd.grad(y, x)):
            x = torch.rand(3, device="cuda", requires_grad=True)
            y = x * 2
            y.register_hook(double)
            run(y.sum(), x)
    assert found == [CUDA] * 3


def test_a_tensor_around_tensors_claims_what_they_claim():
    class Around(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device,
                                                       requires_grad=inner.requires_grad)

        def __init__(self, inner):
            self.inner = inner

        def __tensor_flatten__(self):
            return ["inner"], None

        @classmethod
        def __torch_dispatch__(cls, func, types, args, kwargs=None):
            unwrapped = torch.utils._pytree.tree_map_only(Around, lambda t: t.inner, args)
            return torch.utils._pytree.tree_map_only(torch.Tensor, Around, func(*unwrapped, **(kwargs or {})))

    with MetaTensorMode():
        x = Around(torch.rand(2, 3, device="cuda")).requires_grad_()
        y = (x * 2).sum()  # autograd would end the process for a tensor that says it is on a device that is not there
        y.backward()
        assert str(y.device) == str(x.grad.device) == "cuda:0" and type(y) is Around


def test_scripting_works_under_the_mode():
    with MetaTensorMode():
        layer = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
        assert layer(torch.rand(2, 4)).shape == (2, 4)


def test_data_parallel_runs_on_the_claimed_device():
    with MetaTensorMode():
        model = torch.nn.DataParallel(torch.nn.Linear(4, 2).cuda())
        assert str(model(torch.rand(3, 4)).device) == "cuda:0"


def test_the_first_profile_of_a_process_lies_where_later_ones_do(monkeypatch):
    """What is learned once in a process takes no addresses of the run that happens to be the first."""
    monkeypatch.setattr(dispatch_mode, "_alone", [])
    options = ProfileOptions(keep_events=True)
    first, second = (profile(torch.nn.Linear(4, 4), (torch.ones(2, 4),), device="cpu", reuse=False, options=options)
                     .memory_events for _ in range(2))
    assert dispatch_mode._alone and first and first == second


def test_arguments_are_held_by_nothing_but_their_caller(mode):
    gc.disable()
    try:
        given = fake_arguments(mode.state, [torch.rand(4), torch.rand(4, 4).mT], torch.device("cuda", 0))
        seen = [weakref.ref(x) for x in given]
        del given
        assert [x() for x in seen] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("function", [torch.sigmoid, torch.tanh, lambda x: x.softmax(-1), lambda x: x.view(-1).sqrt()])
def test_a_graph_that_is_dropped_without_a_backward_pass_is_freed(function):
    """Also where autograd saved a result."""
    mode = MetaTensorMode()
    with mode:
        x = torch.empty(512, 512, device="cuda", requires_grad=True)
        for _ in range(2):  # the second time from the cache of specs
            y = function(function(function(x)))
            assert mode.space.allocator().allocated_bytes >= 4 << 20
            del y
            assert mode.space.allocator().allocated_bytes == 1 << 20


def test_a_file_of_numbers_is_read_and_its_first_ones_are_known(tmp_path):
    """As loaders of shards do: the header says how many tokens follow."""
    path = tmp_path / "tokens.bin"
    path.write_bytes(torch.tensor([20240520, 1, 7], dtype=torch.int32).numpy().tobytes())
    with MetaTensorMode():
        header = torch.from_file(str(path), False, 3, dtype=torch.int32)
        assert (header[0] == 20240520) and int(header[2]) == 7 and header.device == CPU


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_what_a_mode_of_the_program_passes_on_stays_where_it_is():
    with MetaTensorMode():
        x = torch.rand(4, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        with Passing():  # C++ asks for a cast to where the tensor really is, forward and backward
            y = x.type_as(torch.ones(1, device="cuda"))
            y.sum().backward()
            assert (y.device, x.grad.device, x.grad.dtype) == (CUDA, CUDA, torch.bfloat16)
            assert torch.empty(3, device="meta").device == torch.device("meta")
            assert torch.ops.aten._to_copy.default(y, device=torch.device("cpu")).device == CPU

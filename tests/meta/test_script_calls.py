"""What scripts do before they train: move a model by keywords, set a default dtype, format a loss, draw by weights."""
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from analyzer import MetaTensorMode, ProfileOptions, profile, register_leaf_module, symbolic_profile, symbolic_trace
from analyzer.errors import DataDependentError
from analyzer.meta.state import MetaOptions


@pytest.mark.parametrize("settings", [dict(device="cuda"), dict(device=torch.device("cuda"), dtype=torch.bfloat16),
                                      dict(device="cuda", memory_format=torch.channels_last)], ids=str)
def test_a_module_moves_by_keywords(settings):
    with MetaTensorMode():
        layer = nn.Conv2d(3, 8, 3).to(**settings)
        assert layer.weight.device == torch.device("cuda", 0)
        assert layer.weight.dtype == settings.get("dtype", torch.float32)
        assert layer(torch.randn(1, 3, 9, 9, device="cuda", dtype=layer.weight.dtype)).is_cuda


def test_a_tensor_of_one_number_is_formatted_as_the_number():
    with MetaTensorMode():
        assert f"{torch.tensor(2.5):.2f} {torch.tensor(3):>4} {torch.tensor(0.5)}" == "2.50    3 0.5"
        assert f"{torch.zeros(2)}".startswith("MetaTensor(") and f"{torch.randn(2).sum()}".startswith("MetaTensor(")
        with pytest.raises(DataDependentError):
            f"{torch.randn(2).sum():.2f}"
        with pytest.raises(TypeError):
            f"{torch.zeros(2):.2f}"
    with MetaTensorMode(MetaOptions(unknown_value="placeholder")):
        assert f"{torch.randn(2).sum():.2f}" == "1.00"


INDICES = [lambda: torch.tensor(3), lambda: torch.arange(4)[2], lambda: list(torch.arange(3))[1],
           lambda: torch.arange(6).view(2, 3).sum(1)[1], lambda: torch.tensor([True, False])[0],
           lambda: torch.arange(3, dtype=torch.int32) + 1, lambda: torch.tensor([[1, 2], [3, 4]]) > 2,
           lambda: torch.ones(3, 4).shape[0] * torch.tensor(2)]
TEXTS = [str, repr, lambda x: f"expert_{x}", lambda x: "{}".format(x), lambda x: "%s" % x,  # noqa: UP030, UP031, UP032
         format, lambda x: f"{x:03d}" if x.dim() == 0 else "", lambda x: "%d" % x if x.dim() == 0 else ""]  # noqa: UP031


@pytest.mark.parametrize("make", INDICES)
def test_known_integers_are_written_as_pytorch_writes_them(make):
    right = [text(make()) for text in TEXTS]
    with MetaTensorMode():
        assert [text(make()) for text in TEXTS] == right
        on_device = str(make().cuda())
    assert on_device == right[0].replace(")", ", device='cuda:0')").replace(
        ", dtype=torch.int32, device='cuda:0'", ", device='cuda:0', dtype=torch.int32")


class Chosen(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.experts = nn.ModuleDict({f"expert_{i}": nn.Linear(4, 4) for i in range(3)})
        self.gate, self.name = nn.Linear(4, 3), name

    def forward(self, x):
        return self.experts[self.name(self.gate(x).argmax(-1)[0])](x)


@pytest.mark.parametrize("name", [
    lambda i: f"expert_{i}", lambda i: "expert_" + format(i), lambda i: "expert_{}".format(i),  # noqa: UP032
    lambda i: f"expert_{i:d}", lambda i: "expert_%d" % i])  # noqa: UP031
def test_a_name_of_an_index_without_data_is_refused_with_its_line(name):
    Chosen(name)(torch.rand(2, 4))
    with pytest.raises(DataDependentError, match=r"(?s)test_script_calls\.py:\d+.*Way out"):
        profile(Chosen(name), torch.rand(2, 4), device="h100", mode="infer")
    options = ProfileOptions(unknown_value="placeholder")
    p = profile(Chosen(name), torch.rand(2, 4), device="h100", mode="infer", options=options)
    assert p.fwd_macs == 2 * 4 * (4 + 3)


class Hit(nn.Module):
    """Experts that are found by the names of those that any token chose, as Switch Transformers' are."""

    def __init__(self, classes=4):
        super().__init__()
        self.experts = nn.ModuleDict({f"expert_{i}": nn.Linear(8, 8) for i in range(classes)})
        self.gate = nn.Linear(8, classes)

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        mask, out = nn.functional.one_hot(chosen, len(self.experts)).T, torch.zeros_like(x)
        for index in (mask.sum(1) > 0).nonzero():
            rows, = torch.where(mask[index[0]])
            out.index_add_(0, rows, self.experts[f"expert_{index[0]}"](x[rows]) * weight[rows, None])
        return out


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_a_loop_over_all_classes_goes_by_each(device):
    Hit()(torch.rand(16, 8))
    p = profile(Hit(), torch.rand(16, 8), device=device)
    assert p.fwd_macs == 16 * 8 * 4 + 16 * 8 * 8  # each token by the gate and one expert
    assert {row.path for row in p.modules.walk() if "expert_" in row.path} == {f"experts.expert_{i}" for i in range(4)}


def test_a_draw_by_known_weights_is_one_of_them():
    with MetaTensorMode():
        assert [int(torch.multinomial(torch.tensor([0.0, 1.0, 0.0]), 1)) for _ in range(5)] == [1] * 5
        assert {int(torch.multinomial(torch.ones(2), 1)) for _ in range(40)} == {0, 1}
        share = float(torch.distributions.Beta(torch.tensor(0.2), torch.tensor(0.2)).sample())
        assert 0 <= share <= 1
        assert torch.distributions.Dirichlet(torch.ones(3, device="cuda")).sample((4,)).shape == (4, 3)
        assert torch._standard_gamma(torch.ones(5, device="cuda")).is_cuda


def test_a_product_with_an_output_dtype():
    """What is added may have the dtype of the result; the factors have one of their own."""
    with MetaTensorMode():
        a, b = (torch.empty(8, 8, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        wide = torch.empty(8, 8, device="cuda")
        assert torch.addmm(wide, a, b, out_dtype=torch.float32).dtype == torch.float32
        assert torch.mm(a, b, out_dtype=torch.float32).dtype == torch.float32
        with pytest.raises(RuntimeError, match="same dtype"):
            torch.addmm(wide, a, b)
        with pytest.raises(RuntimeError, match="same dtype"):
            torch.addmm(wide, a, wide, out_dtype=torch.float32)


def test_out_dtype_of_products_of_bytes():
    from torch._higher_order_ops.out_dtype import out_dtype

    with MetaTensorMode():
        a, b = (torch.empty(32, 32, dtype=torch.int8, device="cuda") for _ in range(2))
        assert out_dtype(torch.ops.aten.mm.default, torch.int32, a, b).dtype == torch.int32


def test_a_condition_that_one_side_decides_is_known():
    """A loop that makes text ends at its largest length, whatever the tokens are."""
    with MetaTensorMode():
        unknown = torch.randn(3, device="cuda") > 0
        yes, no = torch.ones(3, dtype=torch.bool, device="cuda"), torch.zeros(3, dtype=torch.bool, device="cuda")
        assert bool((unknown | yes).all()) and bool(torch.logical_or(yes, unknown).all())
        assert not bool((unknown & no).any()) and not bool(torch.logical_and(no, unknown).any())
        unfinished = torch.randint(2, (3,), device="cuda")  # as transformers keeps it
        assert (unfinished & ~yes).max().item() == 0
        for open_condition in (unknown | no, unknown & yes, unknown ^ yes):
            with pytest.raises(DataDependentError):
                open_condition.tolist()


QUESTIONS = {
    "type": lambda x, layer: (type(x), type(layer.weight), type(layer.weight.data), type(layer.weight.detach())),
    "class": lambda x, layer: (x.__class__, layer.weight.__class__.__name__, layer(x).__class__.__name__),
    "parameter": lambda x, layer: (type(nn.Parameter(x.detach())), isinstance(x, nn.Parameter)),
    "buffer": lambda x, layer: (type(nn.Buffer(x)), isinstance(x, nn.Buffer)),
    "table": lambda x, layer: {torch.Tensor: "input", nn.Parameter: "weight"}[type(layer.weight)],
    "legacy": lambda x, layer: [isinstance(x, kind) for kind in (torch.FloatTensor, torch.DoubleTensor,
                                                                 torch.cuda.FloatTensor, torch.LongTensor)],
    "made": lambda x, layer: (type(torch.FloatTensor(2, 3)), torch.LongTensor([1, 2]).tolist(),
                              x.new([1.0]).device.type),
    "storage": lambda x, layer: (torch.is_storage(x.untyped_storage()), torch.is_storage(x), x.untyped_storage().type(),
                                 type(x.untyped_storage()).__name__, x.storage().type()),
    "version": lambda x, layer: (x._version, layer.weight._version, x.clone().add_(1)._version),
    "node": lambda x, layer: [type(y.grad_fn).__name__ for y in (layer(x), layer(x)[0], layer(x).view(-1).exp())],
    "data": lambda x, layer: (x.is_cpu, x.is_cuda, x.is_meta, x.device.type, x.get_device(), x.__dlpack_device__()),
}


class Asks(nn.Module):
    """A layer that refuses to run where it is not told what it was told in a real run."""

    def __init__(self, question):
        super().__init__()
        self.question, self.layer, self.told = question, nn.Linear(4, 4), None
        with torch.no_grad():
            self.layer.weight.mul_(2).add_(1)

    def forward(self, x):
        told = self.question(x, self.layer)
        if self.told is None:
            self.told = told
        elif told != self.told:
            raise AssertionError(f"{told}, and {self.told} in a real run")
        return self.layer(x)


def profile_graph(model, x):
    with register_leaf_module.scope():
        register_leaf_module(Asks)
        symbolic_profile(symbolic_trace(model, meta_args={"x": x}), x)


@pytest.mark.parametrize("run", [
    lambda model, x: profile(model, (x,), device="cpu", options=ProfileOptions(steps=1)),
    lambda model, x: profile(model, (x,), device="cpu", step=lambda model, optimizer, x: model(x)),
    lambda model, x: symbolic_trace(model, meta_args={"x": x}), profile_graph], ids=["train", "step", "trace", "graph"])
@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_what_code_asks_of_tensors_is_answered_as_in_a_real_run(question, run):
    model, x = Asks(question), torch.rand(2, 4)
    model(x)
    run(model, x)


class Scale(nn.Parameter):
    """A kind of parameter that a library marks its weights with."""

    def doubled(self):
        return self * 2


class Marked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), Scale(torch.ones(4))
        assert (type(self.layer.weight), type(torch.empty(2)), type(self.scale)) == (nn.Parameter, torch.Tensor, Scale)

    def forward(self, x):
        assert isinstance(self.scale, Scale) and type(self.layer.weight) is nn.Parameter
        return self.layer(x) * self.scale.doubled()


@pytest.mark.parametrize("model", [Marked, Marked()], ids=["built", "given"])
def test_parameters_of_a_class_of_their_own_have_it(model):
    found = profile(model, (torch.rand(2, 4),), device="h100")
    assert found.params == 24 and [row.name for row in found.nodes if row.fwd_flops is None] == []


def test_a_tensor_on_the_device_has_its_types_there():
    def step(model, optimizer, x):
        assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(x, torch.FloatTensor)
        assert torch.cuda.HalfTensor(2, 3).device == x.device and torch.cuda.LongTensor([1, 2]).tolist() == [1, 2]
        y = model(x)
        assert type(y.cpu().grad_fn).__name__ == y.cpu().grad_fn.name() == "ToCopyBackward0"
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: (saved.device, saved), lambda kept: kept[1]):
            y = y.exp().exp()
        assert {type(node) for node in (y.grad_fn, model.weight)} == {type(y.grad_fn), nn.Parameter}
        y.sum().backward()

    profile(nn.Linear(4, 4), (torch.rand(2, 4),), step=step, device="h100")


class Notes(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.places = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.places |= {(type(t), t.device.type, t.is_cuda) for t in (*args, result) if isinstance(t, torch.Tensor)}
        return result


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_a_dispatch_mode_of_the_program_is_told_the_device(device):
    def step(model, optimizer, x):
        with Notes() as notes:
            model(x).sum().backward()
            with notes:
                x.exp()
            x.sin()
        assert type(notes) is Notes
        on_device = device == "h100"
        assert notes.places == {(kind, "cuda" if on_device else "cpu", on_device)
                                for kind in (torch.Tensor, nn.Parameter)}

    profile(nn.Linear(4, 4), (torch.rand(2, 4),), step=step, device=device)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torchs_fake_mode_within_a_mode_is_not_entered_and_said(device):
    """With a fake tensor of torch's own the process ended."""
    fake = FakeTensorMode()
    with MetaTensorMode() as mode, ExitStack() as undo:
        undo.enter_context(fake)
        with fake:
            model = nn.Linear(4, 4).to(device)
        given = torch.rand(2, 4)
        x = fake.from_tensor(given).to(device)
        assert model(x).device.type == device and not x.requires_grad
        model(x).sum().backward()
        assert model.weight.grad.device.type == device
        weight = fake.from_tensor(model.weight)
        assert type(weight) is type(model.weight) and weight is not model.weight and weight.grad is None
        assert weight.requires_grad
        said = [text for text in mode.state.assumptions if "FakeTensorMode" in text]
    assert len(said) == 2 and all("test_script_calls.py:" in text and "counted as if" in text for text in said)
    with fake:
        assert type(torch.rand(2)) is FakeTensor

"""What code asks of tensors to choose a branch: each answer within a profile is that of a tensor with data."""
import builtins
import warnings

import pytest
import torch
from torch import nn

from analyzer import MetaTensorMode, profile
from analyzer.errors import AnalyzerError

#: Attributes of tensors, methods without arguments, classes that ``isinstance`` and ``type(x) is`` compare with.
ATTRIBUTES = ["__class__", "_version", "_base", *(name for name in dir(torch.Tensor) if not name.startswith("_"))]
CALLED = "type is_contiguous dim numel size stride element_size is_floating_point is_complex is_signed is_inference " \
    "storage_offset get_device is_pinned is_shared has_names int_repr".split()
CLASSES = ("torch.Tensor", "torch.nn.Parameter", "torch.FloatTensor", "torch.LongTensor", "torch.BoolTensor", "int")
FUNCTIONS = "is_tensor is_storage is_floating_point is_complex is_nonzero is_grad_enabled numel".split()
#: What differs on CUDA from the CPU's answer with the device's name in it.
ON_CUDA = {"attribute is_cuda": "True", "attribute is_cpu": "False", "called get_device": "0"}


def kinds(module, x):
    y = module.layer(x)
    indices = torch.arange(x.shape[1], device=x.device)
    return {"input": x, "parameter": module.layer.weight, "frozen parameter": module.frozen, "buffer": module.table,
            "result": y + 1, "view": y.transpose(0, 1), "part": y[:, :1], "half": x.half(), "indices": indices,
            "mask": indices > 1, "detached": y.detach(), "scalar": y.sum(), "expanded": module.table.expand(3, 4)}


def find_class(name):
    owner = torch if name.startswith("torch.") else builtins
    for part in name.removeprefix("torch.").split("."):
        owner = getattr(owner, part)
    return owner


def ask(x):
    """Answers by question, each without its data and its place in memory."""
    asked = {**{f"attribute {name}": lambda name=name: getattr(x, name) for name in ATTRIBUTES},
             **{f"called {name}": lambda name=name: getattr(x, name)() for name in CALLED},
             **{f"class {name}": lambda name=name: (isinstance(x, find_class(name)), type(x) is find_class(name))
                for name in CLASSES},
             **{f"function {name}": lambda name=name: getattr(torch, name)(*(
                 () if "enabled" in name else (x,))) for name in FUNCTIONS}}
    found = {}
    for question, answer in asked.items():
        try:
            found[question] = describe(answer())
        except Exception as error:
            kind = "AnalyzerError" if isinstance(error, AnalyzerError) else type(error).__name__
            found[question] = f"raises {kind}"
    return found


def describe(answer):
    if isinstance(answer, torch.Tensor):
        return (type(answer).__name__, tuple(answer.shape), answer.stride(), str(answer.dtype), str(answer.device),
                answer.requires_grad, answer.is_leaf)
    if callable(answer):
        return "callable"
    if isinstance(answer, tuple):
        return tuple(map(describe, answer))
    plain = (bool, int, float, str, torch.dtype, torch.device, torch.layout)
    return repr(answer) if answer is None or isinstance(answer, plain) else type(answer).__name__


class Asked(nn.Module):
    def __init__(self, tell):
        super().__init__()
        self.tell, self.layer = tell, nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x):
        for kind, tensor in kinds(self, x).items():
            self.tell(kind, ask(tensor))
        return self.layer(x).sum()


def as_on_cuda(question, answer):
    """The answer of the same tensor on CUDA, from that on the CPU."""
    if question.startswith("class torch.") and question.endswith("Tensor") and question != "class torch.Tensor":
        return describe((False, False))
    text = repr(answer).replace("device(type='cpu')", "device(type='cuda', index=0)").replace("'cpu'", "'cuda:0'")
    return text.replace("'torch.", "'torch.cuda.") if question == "called type" else text


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_a_tensor_without_data_answers_as_one_with_data(device):
    real, found = {}, {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Asked(lambda kind, answers: real.update({kind: answers}))(torch.ones(2, 4))
        module = Asked(lambda kind, answers: found.update({kind: answers}))
        profile(module, torch.ones(2, 4), device=device, reuse=False)
    other = {}
    for kind, answers in real.items():
        for question, answer in answers.items():
            mine = found[kind][question]
            right = answer if device == "cpu" else ON_CUDA.get(question) or as_on_cuda(question, answer)
            if mine != "raises AnalyzerError" and mine != right and repr(mine) != right:
                other[kind, question] = mine, right
    assert other == {} and len(real) == 13 and len(real["input"]) > 500


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_places_of_nonzero_elements_are_transposed_in_memory(device):
    real = torch.tensor([[0, 1, 0], [1, 0, 1]]).nonzero()
    with MetaTensorMode():
        found = torch.tensor([[0, 1, 0], [1, 0, 1]], device=device).nonzero()
        assert (found.stride(), found.tolist()) == (real.stride(), real.tolist()) == ((1, 3), real.tolist())


def test_memory_of_a_device_is_not_pinned():
    with MetaTensorMode(), pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        torch.empty(2, device="cuda").pin_memory()


def test_a_tensor_is_set_to_another_where_both_are_one_view_of_a_storage() -> None:
    def ask() -> list[bool]:
        x = torch.zeros(3, 4)
        return [x.is_set_to(other) for other in (x, x.detach(), x.t().t(), x.t(), x[:2], x.view(12), x.clone())]

    with MetaTensorMode():
        found = ask()
    assert found == ask() == [True, True, True, False, False, False, False]

"""What libraries ask of tensors, of a sample: each answer within a profile is that of a tensor with data."""
import pytest
import torch

from analyzer import MetaTensorMode
from benchmarks.fuzz.asked_questions import DIFFERS, KNOWN, Question, compare, find_questions, judge

# kinds of questions by which code takes another branch, beside those of one library
BRANCHES = [
    *(Question("attribute", name) for name in ("grad_fn", "_version", "is_leaf", "__class__", "device", "_base")),
    *(Question("called", name) for name in ("type", "is_contiguous", "numpy", "pin_memory", "nonzero", "int_repr")),
    *(Question("class", name) for name in ("torch.Tensor", "nn.Parameter", "torch.FloatTensor", "torch.LongTensor")),
    *(Question("type", name) for name in ("torch.Tensor", "nn.Parameter")),
    Question("function", "torch.is_tensor"), Question("function", "torch.is_storage")]


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_a_tensor_without_data_answers_as_one_with_data(device):
    questions = [*BRANCHES, *(q for q in find_questions(["torchvision"]) if q.kind != "has")]
    assert len(questions) > 100
    differing = {question: found for (question, kind), found in compare(questions, device).items()
                 if judge(*found) == DIFFERS and question not in KNOWN}
    assert not differing


def test_a_parser_finds_what_code_asks(tmp_path, monkeypatch):
    (tmp_path / "asking.py").write_text("""
def f(x, config):
    if isinstance(x, (torch.Tensor, config.Kind)) and type(x) is nn.Parameter and x.is_leaf:
        return x.dim(), hasattr(x, "shape"), torch.is_tensor(x), torch.device
""")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "asking").mkdir()
    (tmp_path / "asking.py").rename(tmp_path / "asking" / "__init__.py")
    assert {(q.kind, q.text) for q in find_questions(["asking"])} == {
        ("class", "torch.Tensor"), ("type", "nn.Parameter"), ("attribute", "is_leaf"), ("attribute", "dim"),
        ("called", "dim"), ("has", "shape"), ("function", "torch.is_tensor")}


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

"""What is known of a graph's values before anything is profiled."""
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.passes import shape_prop

from analyzer import MetaTensorMode, symbolic_trace
from analyzer.errors import InputError
from analyzer.fx import ShapeProp


class Model(nn.Module):
    """Its values: tensors, pairs and tuples of them, numbers, and one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, image: Tensor) -> Any:
        x = self.norm(self.conv(image)).relu()
        largest, index = x.flatten(2).topk(3)
        return {"scores": largest.half() + 1, "index": index, "rows": x.shape[0], "parts": x.split(2, 1)}


def trace() -> Any:
    return symbolic_trace(Model(), meta_args={"image": torch.empty(2, 3, 8, 8)})


def described(gm: Any) -> dict[str, Any]:
    """Except the type of the output, which is torch.fx's own dictionary there and the model's here."""
    return {n.name: (n.meta.get("tensor_meta"), n.meta["type"] if n.op != "output" else None) for n in gm.graph.nodes}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_it_notes_what_the_pass_of_torch_notes(device: str) -> None:
    ours, theirs = trace(), trace()
    ShapeProp(ours).propagate(torch.empty(2, 3, 8, 8, device=device))
    shape_prop.ShapeProp(theirs).propagate(torch.ones(2, 3, 8, 8))
    assert described(ours) == described(theirs)
    assert described(ours)["topk"][0][1].dtype is torch.int64 and not described(ours)["topk"][0][1].requires_grad


def test_the_pass_of_torch_runs_without_data() -> None:
    gm = trace().to("meta")
    shape_prop.ShapeProp(gm).propagate(torch.empty(2, 3, 8, 8, device="meta"))
    assert all("tensor_meta" in n.meta for n in gm.graph.nodes)
    assert not any("info" in n.meta for n in gm.graph.nodes)


def test_tensors_on_a_simulated_device() -> None:
    with MetaTensorMode():
        model, image = Model().cuda(), torch.empty(2, 3, 8, 8, device="cuda")
        gm = symbolic_trace(model, meta_args={"image": image})
        shape_prop.ShapeProp(gm).propagate(image)
    theirs = {name: meta for name, (meta, _) in described(gm).items()}
    ShapeProp(gm).propagate(image)  # which needs no mode around it
    assert {name: meta for name, (meta, _) in described(gm).items()} == theirs
    assert {n.name: n.meta["spec"].device for n in gm.graph.nodes if n.name in ("conv", "add")} == {
        "conv": "cuda:0", "add": "cuda:0"}


def test_a_node_that_fails_is_named_with_its_line() -> None:
    gm = symbolic_trace(lambda x, y: (x @ y).relu(), meta_args={"x": torch.empty(2, 3), "y": torch.empty(3, 4)})
    assert tuple(ShapeProp(gm).propagate(torch.empty(2, 3), torch.empty(3, 4)).shape) == (2, 4)
    with pytest.raises(InputError, match=r"(?s)matmul.*test_shape_prop.py:\d+"):
        ShapeProp(gm).propagate(torch.empty(2, 3), torch.empty(5, 4))


def test_gradients_follow_the_caller() -> None:
    gm = trace()
    with torch.no_grad():
        ShapeProp(gm).propagate(torch.empty(2, 3, 8, 8))
    assert not next(n for n in gm.graph.nodes if n.name == "conv").meta["tensor_meta"].requires_grad


def test_records_of_scalars_are_true() -> None:
    class Total(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum()

    gm = symbolic_trace(Total(), meta_args={"x": torch.empty(3)})
    ShapeProp(gm).propagate(torch.empty(3))
    assert [n.name for n in gm.graph.nodes if n.meta.get("spec")] == ["x", "sum_1", "output"]

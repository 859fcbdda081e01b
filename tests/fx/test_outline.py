"""Code whose behaviour depends on data is one node: the graph gives the model's results for data that takes other
sizes.
"""
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

from analyzer import register_leaf_module, symbolic_profile, symbolic_trace
from analyzer.errors import DataDependentError, InputError
from analyzer.fx import GraphModule
from benchmarks.coverage.library import provide_nms

from .conftest import assert_equal, run

WIDTH = 6


def positive(x: Tensor) -> Tensor:
    return x[x[:, 0] > 0]


def average(x: Tensor) -> Tensor:
    return x.sum(0) / max(x.shape[0], 1)


def count(x: Tensor) -> int:
    return len(positive(x))


def scale_by_count(x: Tensor) -> Tensor:
    return x * count(x)


def rows(x: Tensor) -> list[Tensor]:
    return [row * (i + 1) for i, row in enumerate(positive(x))]


def sum_of_rows(x: Tensor) -> Tensor:
    return torch.stack([*rows(x), x[0]]).sum(0)


def stretch(x: Tensor) -> Tensor:
    """Each row as often as data adds to a number that is known."""
    times = (x.detach().abs().sum(1) * 3).long() + torch.tensor([1, 2, 1, 2, 1])
    return torch.cat([row.expand(int(n), -1) for row, n in zip(x, times)])


class Thresholds:
    """No module: an object with settings and a tensor."""

    def __init__(self) -> None:
        self.levels = torch.linspace(-1, 1, WIDTH)

    def above(self, x: Tensor) -> Tensor:
        kept = x[(x > self.levels).any(1)]
        return kept.new_ones(kept.shape[0]) @ kept


class Block(nn.Module):
    """A submodule that is to become one node."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        token = torch.where(x.sum(1) > 0)[0]
        if token.numel() == 0:
            return x
        return x.index_add(0, token, self.linear(x[token]))


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x * int(x.argmax())


class Picker(nn.Module):
    """Without tensors, so that the graph can hold one."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x[int(x.detach().sum(1).argmax())] * self.factor


class Weighted(nn.Module):
    """With tensors, which are those of a run: the function around it is one node."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.linspace(1, 2, WIDTH))

    def pick(self, x: Tensor) -> Tensor:
        return x[int(x.detach().sum(1).argmax())]

    def forward(self, x: Tensor) -> Tensor:
        return self.pick(x) * self.weight


def pick_by_method(x: Tensor) -> Tensor:
    return Weighted()(x)


PICKS = {"method": pick_by_method}


class Slot:
    def __init__(self) -> None:
        self.rows: Tensor | None = None

    def append(self, rows: Tensor) -> Tensor:
        self.rows = rows if self.rows is None else torch.cat([self.rows, rows])
        return self.rows


class Memory:
    """What forward makes anew and layers put tensors into, as into a cache of keys and values."""

    def __init__(self) -> None:
        self.slots = [Slot() for _ in range(2)]


class Remembers(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        rows = memory.slots[self.index].append(positive(x))
        return x + rows.sum(0) / (len(rows) + 1)


def fill_object(m: Any, x: Tensor) -> Tensor:
    memory = Memory()
    for layer in m.layers:
        x = layer(x, memory)
    return x + memory.slots[0].rows.sum() * memory.slots[1].rows.sum()  # type: ignore[union-attr]


class Outer(nn.Module):
    """Reads the result of code that is one node: known while tracing, from what unknown data was taken as."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return x * int(self.inner(x))


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tensor([int(x.sum(0).argmax())])


class ReadsWritten(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        counts = torch.zeros(WIDTH, dtype=torch.int64)
        note_best(counts, x)
        return x * (counts.tolist()[1] + 1)


def note_best(counts: Tensor, x: Tensor) -> None:
    counts[int(x.sum(0).argmax())] += 2


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.block, self.thresholds = nn.Linear(WIDTH, WIDTH), Block(), Thresholds()
        self.gate, self.outer, self.written, self.name = Gate(), Outer(), ReadsWritten(), name
        self.layers, self.scale = nn.ModuleList(Remembers(i) for i in range(2)), nn.Parameter(torch.tensor(2.0))

    def method(self, x: Tensor) -> Tensor:
        kept = positive(x)
        return kept.sum(0) * self.scale / (kept.shape[0] + 1)

    def forward(self, x: Tensor) -> Tensor:
        return MODELS[self.name](self, self.linear(x))


#: what it does depends on a value that nothing is known of
READ_VALUES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    # a method of a module with tensors of one run is no node, the function in the table is
    "calls from a table": lambda m, x: PICKS["method"](x) + 1,
    "makes modules": lambda m, x: Picker(2.0)(x) + Picker(3.0)(x).sin(),  # others in each run of its forward
    "reads a result": lambda m, x: m.outer(x) + 1,
    "reads what was written": lambda m, x: m.written(x) + 1,
    "reads a value": lambda m, x: m.gate(x) + 1,
}
MODELS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    **READ_VALUES, "fills an object": fill_object,
    "stretches": lambda m, x: average(stretch(x)),  # numbers of which something is known are no more constants
    "reads a shape": lambda m, x: average(positive(x)),
    "in a module": lambda m, x: m.block(x).view(x.shape[0], 2, -1) * 3, "in a method": lambda m, x: m.method(x) + 1,
    "in an object": lambda m, x: m.thresholds.above(x),
    "returns a number": lambda m, x: scale_by_count(x),  # count() cannot be a node: the function around it is
    "returns a list": lambda m, x: sum_of_rows(x),  # as many rows as data has: the function around it is one node
}


def inputs(seed: int, shift: float = 0.0) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed)) + shift


def trace(model: nn.Module) -> GraphModule:
    return symbolic_trace(model, meta_args={"x": torch.empty(5, WIDTH, device="meta")})


@pytest.mark.parametrize("name", MODELS)
def test_results_and_gradients_are_the_models_whatever_the_data_is(name: str) -> None:
    model = Model(name)
    graph = trace(model)
    for seed, shift in ((0, 0.0), (1, 3.0), (2, -3.0)):
        x = inputs(seed, shift).requires_grad_()
        assert_equal(run(graph, model, (x,), {}), run(model, model, (x,), {}), f"{name}, seed {seed}")
    assert any("asks for what depends on data at" in a and __file__ in a for a in graph.meta["assumptions"])
    if name in READ_VALUES:
        with pytest.raises(DataDependentError, match="in module 'gate'" if "gate" in str(graph.code) else "needs the"):
            symbolic_profile(graph, inputs(0), mode="infer")
    else:
        assert symbolic_profile(graph, inputs(0), mode="infer").meta["profile"].fwd_macs >= 5 * WIDTH * WIDTH


@pytest.mark.parametrize("name", ["calls from a table", "makes modules", "fills an object", "in a module",
                                  "in a method"])
def test_copies_and_pickles_stand_on_their_own(name: str) -> None:
    torch.manual_seed(0)  # some weights give what zeros give
    model, x = Model(name), inputs(0)
    graph = trace(model)
    for other in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        expected = model(x)
        assert torch.equal(other(x), expected)
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        assert torch.equal(model(x), expected)
        assert not torch.equal(other(x), expected)


def test_functions_are_put_back() -> None:
    before = dict(globals()), vars(Model)["method"], vars(Thresholds)["above"]
    for name in ("calls from a table", "in a method", "in an object", "returns a number"):
        trace(Model(name))
    assert (dict(globals()), vars(Model)["method"], vars(Thresholds)["above"]) == before
    assert PICKS == {"method": pick_by_method}


def names(graph: GraphModule) -> list[str]:
    return [n.name for n in graph.graph.nodes if n.op not in ("placeholder", "output")]


def test_only_the_smallest_part_is_hidden() -> None:
    assert names(trace(Model("reads a shape"))) == ["linear", "getitem", "gt", "getitem_1", "average"]
    assert names(trace(Model("in a module")))[:2] == ["linear", "block"]
    found = names(trace(Model("returns a number")))
    assert "scale_by_count" in found and "count" not in found


class StaticSizes(nn.Module):
    """Sizes that do not depend on data, of tensors that others of which do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        kept = positive(x)
        width = kept.shape[1] + kept.shape[-1] + kept.size(1)
        places = torch.where(x[:, 0] > 0)[0]
        summed = torch.zeros(5, WIDTH).index_add(0, places, kept)
        y = self.linear(summed.view(summed.shape[0], -1)) * width + self.linear(kept).sum(0).numel()
        y.index_add_(0, places, self.linear(kept))
        return y.view(y.shape[0], 2, y.shape[1] // 2)


def test_sizes_that_do_not_depend_on_data_are_constants() -> None:
    model = StaticSizes()
    graph = trace(model)
    assert not any("depends on data" in a for a in graph.meta["assumptions"]), graph.meta["assumptions"]
    for seed in range(3):
        torch.testing.assert_close(graph(inputs(seed)), model(inputs(seed)))


class ReadsInRoot(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        kept = positive(x)
        return kept / len(kept)


def test_what_the_root_reads_is_checked_when_the_graph_runs() -> None:
    model = ReadsInRoot()
    graph = trace(model)
    line = ReadsInRoot.forward.__code__.co_firstlineno + 2
    assert any("is a constant of the graph, which raises" in a and a.endswith(f"{__file__}:{line}")
               for a in graph.meta["assumptions"])
    everything = inputs(0).abs()  # as many as were taken while tracing: all
    assert torch.equal(graph(everything), model(everything))
    with pytest.raises(
            InputError, match=
            rf"(?s)dimension 0, which depends on data.*{line} was traced with 5.*Put it into a submodule or a function"
    ):
        graph(-everything)


def test_a_list_whose_length_the_root_reads_is_checked() -> None:
    class Rows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([row * i for i, row in enumerate(positive(x).unbind())]).sum()

    model = Rows()
    graph = trace(model)
    everything = inputs(0).abs()
    assert torch.equal(graph(everything), model(everything))
    everything[0] = -1
    with pytest.raises(InputError, match="traced with 5 items where this data gives 4"):
        graph(everything)


def test_a_registered_leaf_may_read_values() -> None:
    class Leaf(Gate):
        pass

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Leaf())
    with register_leaf_module.scope():
        register_leaf_module(Leaf)
        graph = symbolic_trace(model, meta_args={"input": torch.empty(5, WIDTH)})
    assert names(graph) == ["_0", "_1"]
    for seed in range(3):
        torch.testing.assert_close(graph(inputs(seed)), model(inputs(seed)))


class TwoHeads(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.scores, self.boxes = nn.Linear(width, classes), nn.Linear(width, 4 * classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.scores(x), self.boxes(x)


def test_boxes_are_found_kept_and_cut_out_of_features() -> None:
    """A small detection model, as torchvision builds them."""
    provide_nms()
    torch.manual_seed(0)
    backbone: Any = nn.Sequential(nn.Conv2d(3, 8, 3, stride=8, padding=1), nn.ReLU())
    backbone.out_channels = 8
    rpn = {f"rpn_{when}_nms_top_n_{mode}": n for when, n in (("pre", 20), ("post", 8)) for mode in ("train", "test")}
    model = FasterRCNN(backbone, min_size=64, max_size=64, box_detections_per_img=5, box_score_thresh=0.2, **rpn,
                       rpn_anchor_generator=AnchorGenerator(((16, 32),), ((0.5, 1.0, 2.0),)),
                       box_roi_pool=MultiScaleRoIAlign(["0"], 3, 2), box_predictor=TwoHeads(16, 3),
                       box_head=nn.Sequential(nn.Flatten(), nn.Linear(8 * 9, 16)))
    images = [torch.rand(3, 64, 64) for _ in range(2)]
    targets = [{"boxes": torch.tensor([[4.0, 4.0, 40.0, 50.0]]), "labels": torch.tensor([1])} for _ in images]
    graph = symbolic_trace(model.train(), meta_args={"images": images, "targets": targets})
    for batch in (images, [torch.rand(3, 64, 64) * i for i in range(2)]):
        assert_equal(run(graph, model, (batch, targets), {}), run(model, model, (batch, targets), {}), "in training")
    # layers are nodes of their own
    assert {"roi_heads_box_head_0", "roi_heads_box_head_1", "rpn_head_conv_0_0"} <= set(names(graph))


class MethodWithLayers(nn.Module):
    """A method of the root, which asks for what depends on data, uses layers and weights of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])
        self.gain, self.unused = nn.Parameter(torch.ones(4)), nn.Linear(2, 2)
        self.register_buffer("shift", torch.ones(4))

    def normalize(self, x: Tensor) -> Tensor:
        if bool((x > 0).any()):
            x = self.layers[1](x) * self.gain + self.shift
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(self.layers[0](x)).sum()


@pytest.mark.parametrize("copied", [False, True])
def test_a_graph_that_calls_a_method_of_the_root_holds_what_the_root_holds(traced_like: Any, copied: bool) -> None:
    model = MethodWithLayers()
    gm = traced_like(model, {"x": torch.ones(3, 4)}, other={"x": -torch.rand(3, 4)})
    assert any("normalize" in str(n.target) for n in gm.graph.nodes)
    if copied:
        gm = copy.deepcopy(gm)
        assert gm._root0.module.layers[1] is gm.get_submodule("layers.1") and gm._root0.module is not model
    assert [n for n, _ in gm.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [n for n, _ in gm.named_buffers()] == [n for n, _ in model.named_buffers()]
    gm(torch.rand(3, 4))
    assert int(gm.get_buffer("layers.1.num_batches_tracked")) == 1


class Answers(nn.Module):
    """A method tells the root's own forward something that depends on data."""

    def __init__(self, answer: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.answer = answer

    def ask(self, x: Tensor) -> Any:
        return self.answer(x)

    def forward(self, x: Tensor) -> Tensor:
        found = self.ask(x)
        return x * 2 if found is True else x * (found["n"] if isinstance(found, dict) else found)


ANSWERS: dict[str, Callable[[Tensor], Any]] = {
    "a number": lambda x: int(x.sum()),
    "a truth": lambda x: bool(x.sum() > 0),
    "a count": lambda x: len(x[x > 0]),
    "with tensors": lambda x: {"y": x.exp(), "n": int(x.sum())},
}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_a_function_tells_the_root_is_checked(name: str) -> None:
    model = Answers(ANSWERS[name])
    gm = symbolic_trace(model, meta_args={"x": torch.empty(2, 4, device="meta")})
    right = 0
    for x in (torch.full((2, 4), 1 / 8), torch.ones(2, 4), -torch.ones(2, 4)):
        try:
            assert torch.equal(gm(x), model(x))
            right += 1
        except InputError as error:
            assert "depends on data; the traced forward itself uses it" in str(error)
    assert right

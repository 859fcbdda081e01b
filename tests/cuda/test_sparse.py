"""Sparse tensors: counted and held in memory by what they store, as real ones are; what is not followed is refused."""
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from analyzer import MetaTensorMode, profile
from analyzer.errors import UnsupportedOperatorError
from analyzer.tools.runtime import measure
from tests.call import Call

SIZE, STORED, WIDTH = 400, 900, 8
PLACES = torch.randperm(SIZE * SIZE, generator=torch.Generator().manual_seed(0))[:STORED].sort().values
COO = torch.sparse_coo_tensor(torch.stack((PLACES // SIZE, PLACES % SIZE)), torch.ones(STORED), (SIZE, SIZE),
                              is_coalesced=True, check_invariants=True)
MATRICES = {"coo": COO, "csr": COO.to_sparse_csr().clone(), "csc": COO.to_sparse_csc().clone()}  # a clone is compact
LINEAR = SIZE * 16 * WIDTH


def bytes_of(matrix: Tensor) -> int:
    if matrix.layout is torch.sparse_coo:
        return matrix._indices().nbytes + matrix._values().nbytes
    return STORED * (8 + 4) + (SIZE + 1) * 8


class Graph(nn.Module):
    """A layer of a graph network, whose matrix of edges is given or held."""

    def __init__(self, edges: Tensor | None = None,
                 multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul) -> None:
        super().__init__()
        self.layer, self.multiply = nn.Linear(16, WIDTH), multiply
        self.register_buffer("edges", edges)

    def forward(self, x: Tensor, edges: Tensor | None = None) -> Tensor:
        return self.multiply(self.edges if edges is None else edges, self.layer(x))


@pytest.mark.parametrize(("layout", "held", "reuse"), [("coo", False, True), ("csr", True, True), ("csc", True, False)])
def test_a_product_counts_what_the_matrix_stores(layout: str, held: bool, reuse: bool) -> None:
    matrix, x = MATRICES[layout], torch.rand(SIZE, 16)
    model = Graph(matrix if held else None)
    p = profile(model, args=(x,) if held else (x, matrix), device="h100", reuse=reuse)
    assert p.fwd_macs == p.bwd_macs == LINEAR + STORED * WIDTH
    assert not p.uncounted and p.buffer_bytes == (bytes_of(matrix) if held else 0)
    given = p.peak_by_category["input"] + p.peak_by_category.get("buffer", 0)
    assert bytes_of(matrix) + x.nbytes <= given <= bytes_of(matrix) + x.nbytes + 3 * 512
    assert model.edges is (matrix if held else None)


@pytest.mark.parametrize("multiply", [torch.sparse.mm, lambda a, b: torch.mv(a, b[:, 0]), lambda a, b: (b.t() @ a),
                                      lambda a, b: torch.addmm(torch.ones(SIZE, WIDTH, device=b.device), a, b)])
def test_products_count_as_when_they_are_measured(multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
    given: dict[str, Any] = {"args": (torch.rand(SIZE, 16), COO), "mode": "infer"}
    found = profile(Graph(None, multiply), device="cpu", **given)
    real = measure(Graph(None, multiply), steps=1, **given)
    assert found.fwd_macs == real.fwd_macs > LINEAR
    assert not found.uncounted and not real.uncounted


def stored(result: Tensor) -> Any:
    if result.layout is torch.strided:
        return tuple(result.shape), result.dtype
    parts = [result._indices(), result._values()] if result.layout is torch.sparse_coo else [result.values()]
    return tuple(result.shape), result.dtype, result.layout, [tuple(p.shape) for p in parts]


SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda a: a.clone(), "half": lambda a: a.half(), "t": lambda a: a.t(), "twice": lambda a: a * 2.0,
    "dense": lambda a: a.to_dense(), "values": lambda a: (a * 1.0).values(),
}
OF_COO: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda a: a.transpose(0, 1), "coalesce": lambda a: a.t().coalesce(), "half of it": lambda a: a / 2,
    "mask": lambda a: torch.ones(SIZE, SIZE, device=a.device).sparse_mask(a),
    "dense sum": lambda a: torch.ones(SIZE, SIZE, device=a.device) + a, "total": lambda a: torch.sparse.sum(a),
}


@pytest.mark.parametrize(("layout", "name"), [*((layout, name) for layout in MATRICES for name in SAME),
                                              *(("coo", name) for name in OF_COO)])
def test_results_store_as_much_as_real_ones(layout: str, name: str) -> None:
    function = (SAME | OF_COO)[name]
    found: list[Any] = []

    class Kept(nn.Module):
        def forward(self, a: Tensor) -> Tensor:
            result = function(a)
            found.append((stored(result), result.device.type))
            return torch.ones(1)

    profile(Kept(), args=(MATRICES[layout],), mode="infer", device="h100", reuse=False)
    assert found[0] == (stored(function(MATRICES[layout])), "cuda")


@pytest.mark.parametrize("make", [
    lambda device: torch.sparse_coo_tensor(indices=COO.indices(), values=COO.values(), size=COO.shape, device=device),
    lambda device: torch.sparse_csr_tensor(MATRICES["csr"].crow_indices(), MATRICES["csr"].col_indices(), COO.values(),
                                           COO.shape, device=device)])
def test_a_matrix_is_made_where_it_is_asked_for(make: Callable[[Any], Tensor]) -> None:
    p = profile(Call(lambda m, x: make(x.device) @ x), args=(torch.rand(SIZE, WIDTH),), mode="infer", device="h100")
    assert (p.fwd_macs, p.uncounted) == (STORED * WIDTH, ())


@pytest.mark.parametrize(("make", "states"), [
    (lambda p: torch.optim.SGD(p, 0.1), 0), (torch.optim.SparseAdam, 2), (lambda p: torch.optim.Adagrad(p, 0.1), 1)])
def test_sparse_gradients_are_as_large_as_the_batch(make: Any, states: int) -> None:
    p = profile(nn.Embedding(1000, 16, sparse=True), args=(torch.randint(0, 1000, (64,)),), optimizer=make,
                device="h100")
    table = 1000 * 16 * 4
    assert p.optimizer_bytes == states * table
    gradient = 64 * 16 * 4  # and 512 bytes of the batch's own indices
    assert p.phases["backward"].peak_allocated_bytes < (1 + states) * table + 2 * gradient + 4 * 512


@pytest.mark.parametrize(("run", "text"), [
    (lambda: profile(nn.Embedding(1000, 16, sparse=True), args=(torch.randint(0, 1000, (64,)),), device="h100",
                     optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)), "momentum .*Way out: SGD without"),
    (lambda: profile(Graph(None, lambda a, b: a @ a), args=(torch.rand(SIZE, 16), COO)), "two sparse matrices"),
    (lambda: profile(Graph(None, lambda a, b: torch.sparse.softmax(a, 1)), args=(torch.rand(SIZE, 16), COO)),
     r"_sparse_softmax.default of sparse tensors: .*not followed. .*test_sparse.py:\d+"),
    (lambda: profile(Graph(None, lambda a, b: b.to_sparse() @ b.t()), args=(torch.rand(SIZE, 16), COO)), "_to_sparse"),
])
def test_what_data_decides_is_refused(run: Callable[[], Any], text: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=rf"(?s){text}"):
        run()


def test_they_claim_the_device_of_their_values() -> None:
    with MetaTensorMode():
        a = COO.cuda()
        assert [str(t.device) for t in (a, a.t(), a @ torch.rand(SIZE, 3, device="cuda"))] == ["cuda:0"] * 3
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            a @ torch.rand(SIZE, 3)

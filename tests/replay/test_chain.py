"""Which neighbouring modules are alike, and in what they differ."""
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

from analyzer.record.tensor_walk import walk_modules
from analyzer.replay.chain import FEWEST, are_alike, find_chains


class Layer(nn.Module):
    def __init__(self, number: int = 0, width: int = 4) -> None:
        super().__init__()
        self.number, self.weight = number, nn.Parameter(torch.empty(width, width, device="meta"))


def _edit(change: Callable[[list[nn.Module]], object]) -> nn.Module:
    layers: list[nn.Module] = [Layer() for _ in range(12)]
    change(layers)
    return nn.Sequential(*layers)


def _name(layers: list[nn.Module]) -> None:
    layers[3].weight.is_first = True  # type: ignore[union-attr]


def _mark(layers: list[nn.Module]) -> None:
    """As an optimizer's groups are chosen by, and as what quantizes a weight keeps its sizes."""
    for layer in layers:
        layer.weight.lr_scale, layer.weight.sizes = 0.5, torch.Size((4, 4))  # type: ignore[union-attr]


def _share(layers: list[nn.Module]) -> None:
    layers[7].weight = layers[2].weight


@pytest.mark.parametrize("root, lengths", [
    (nn.Sequential(*(Layer() for _ in range(FEWEST))), [FEWEST]),
    (nn.Sequential(*(Layer() for _ in range(FEWEST - 1))), []),
    (nn.ModuleDict({"down": nn.ModuleList(Layer() for _ in range(9)), "up": nn.ModuleList(Layer() for _ in range(8))}),
     [9, 8]),
    (nn.Sequential(*(Layer(width=4 if i < 9 else 8) for i in range(18))), [9, 9]),
    (nn.Sequential(*(nn.Sequential(*(Layer() for _ in range(9))) for _ in range(10))), [10]),  # not those inside
    (nn.Sequential(*(nn.ReLU() for _ in range(12))), []),
    (_edit(_share), []),
    (_edit(_name), [8]),  # by a parameter's attribute a wrapper may find it
    (_edit(_mark), [12]),
    (_edit(lambda layers: layers.__setitem__(5, layers[4])), []),
    (_edit(lambda layers: layers[3].requires_grad_(False)), [8]),   # behind it
    (_edit(lambda layers: layers[3].register_forward_hook(lambda *_: None)), [8]),
    (_edit(lambda layers: setattr(layers[10], "extra", 1)), [10]),  # before it
    (_edit(lambda layers: layers[3].eval()), [8]),
])
def test_chains_are_runs_of_alike_neighbours(root: nn.Module, lengths: list[int]) -> None:
    assert [len(chain.blocks) for chain in find_chains(walk_modules(root))] == lengths


@pytest.mark.parametrize("layers, blocks", [
    ([Layer(width=4 + i % 2) for i in range(18)], [2] * 9),
    ([Layer(width=4 + i % 2) for i in range(15)], []),                 # seven groups of two
    ([Layer(width=9), *(Layer(width=4 + i % 3) for i in range(26))], [3] * 8),  # two are left at the end
    ([Layer(number=i % 2) for i in range(16)], [2] * 8),               # an attribute takes turns
    ([Layer(number=i % 6 // 5) for i in range(48)], [6] * 8),          # as in Gemma 3
    ([Layer(number=i % 7 // 6) for i in range(56)], [1] * 56),         # more than are looked at
    ([Layer(number=i % 2) for i in range(15)], [1] * 15),              # too few for groups: nothing may read it
    ([Layer(number=i) for i in range(16)], [1] * 16),                  # which never comes again
])
def test_neighbours_that_take_turns_are_one_block(layers: list[nn.Module], blocks: list[int]) -> None:
    found = find_chains(walk_modules(nn.Sequential(*layers)))
    assert [len(members) for chain in found for members in chain.members] == blocks
    assert all(len(modules) == len(members) for chain in found
               for modules, members in zip(chain.modules, chain.members))
    first = 1 if layers[0].weight.shape == (9, 9) else 0  # type: ignore[union-attr]
    assert [int(path) for chain in found for members in chain.members for path, _ in members] == list(
        range(first, first + sum(blocks)))


class Plain:
    def __init__(self, value: object) -> None:
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


@pytest.mark.parametrize("make, is_alike", [
    (lambda i: Plain([1, "a"]), True), (lambda i: Plain(i), False), (lambda i: Slotted(1), False),
    (lambda i: random.Random(0), False), (lambda i: {"scale": Plain(None)}, True)])
def test_objects_are_alike_where_their_whole_state_is(make: Callable[[int], object], is_alike: bool) -> None:
    layers = [Layer() for _ in range(9)]
    for i, layer in enumerate(layers):
        layer.held = make(i)  # type: ignore[assignment]
    chain, = find_chains(walk_modules(nn.Sequential(*layers)))
    assert chain.differing == (set() if is_alike else {("", "held")})


def test_a_chain_says_in_what_its_blocks_differ() -> None:
    layers = nn.ModuleList(Layer(number) for number in range(9))
    chain, = find_chains(walk_modules(nn.ModuleDict({"layers": layers})))
    assert chain.differing == {("", "number")}
    assert chain.members == [[(f"layers.{i}", block)] for i, block in enumerate(chain.blocks)]
    assert list(chain.skipped) == [2, 3, 4, 5, 6] and chain.run == [0, 1, 7, 8]


def test_blocks_cost_alike_where_their_modules_and_parameters_are() -> None:
    """As a search takes them: two are enough, and a mark on a parameter, as Mamba's, makes no other cost."""
    marked = Layer()
    marked.weight._no_weight_decay = True  # type: ignore[attr-defined]
    assert are_alike([Layer(0), marked, Layer(2)])
    assert not are_alike([Layer(), Layer(width=5)])
    assert not are_alike([Layer(), nn.Sequential(Layer())])
    assert not are_alike([nn.Linear(4, 4), nn.Linear(4, 4, bias=False)])

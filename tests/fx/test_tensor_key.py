"""What a model looks up by a tensor, by its id or address, or through a weak reference, in a trace and a profile."""
import weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict
from functools import lru_cache
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from analyzer import profile, symbolic_trace

X = torch.rand(2, 4)


class Model(nn.Module):
    """Two layers and a table; ``choose(model)`` tells whether the second layer runs as well."""

    def __init__(self, fill, choose):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.__dict__["choose"] = choose
        self.__dict__["table"] = fill(self)

    def forward(self, x):
        x = self.a(x)
        return self.b(x) if self.choose(self) else x


def fill_weak(kind):
    def fill(model):
        table = kind()
        table[model.a.weight] = "yes"
        return table
    return fill


def fill_cache(model, size, typed=False):
    """A function that answers yes for what it was asked before, and no afterwards."""
    answers = [{}, {"first": True}]
    function = lru_cache(size, typed)(lambda tensor: answers.pop() if answers else {})
    function(model.a.weight)
    answers.clear()
    return function


#: what a model holds, and the question about it that is answered by yes
TABLES = {
    "a key": (lambda m: {m.a.weight: "yes"}, lambda m: m.table.get(m.a.weight)),
    "keys in another order": (lambda m: {m.b.weight: 0, m.a.weight: 1}, lambda m: list(m.table.values())[1]),
    "an id": (lambda m: {id(m.a.weight): "yes"}, lambda m: m.table.get(id(m.a.weight))),
    "a hash": (lambda m: {hash(m.a.weight): "yes"}, lambda m: m.table.get(hash(m.a.weight))),
    "an address": (lambda m: {m.a.weight.data_ptr(): "yes"}, lambda m: m.table.get(m.a.weight.data_ptr())),
    "a pair": (lambda m: {(m.a.weight, 1): "yes"}, lambda m: m.table.get((m.a.weight, 1))),
    "a set": (lambda m: {m.a.weight}, lambda m: m.a.weight in m.table),
    "a frozen set": (lambda m: frozenset([m.a.weight]), lambda m: m.a.weight in m.table),
    "a set of ids": (lambda m: {id(p) for p in m.a.parameters()}, lambda m: id(m.a.weight) in m.table),
    "a list of ids": (lambda m: [id(p) for p in m.a.parameters()], lambda m: id(m.a.weight) in m.table),
    "a number": (lambda m: id(m.a.weight), lambda m: m.table == id(m.a.weight)),
    "within another": (lambda m: {"of": {m.a.weight: "yes"}}, lambda m: m.table["of"].get(m.a.weight)),
    "a weak dictionary": (fill_weak(WeakTensorKeyDictionary), lambda m: m.table.get(m.a.weight)),
    "a weak dictionary by id": (fill_weak(WeakIdKeyDictionary), lambda m: m.table.get(m.a.weight)),
    "a Counter": (lambda m: Counter([m.a.weight, m.a.weight]), lambda m: m.table[m.a.weight] == 2),
    "a defaultdict": (lambda m: defaultdict(int, {m.a.weight: 1}), lambda m: m.table[m.a.weight]),
    "an OrderedDict": (
        lambda m: OrderedDict([(m.b.weight, 0), (m.a.weight, 1)]), lambda m: list(m.table)[1] is m.a.weight),
    "a UserDict": (lambda m: UserDict({m.a.weight: 1}), lambda m: m.table.get(m.a.weight)),
    "a ChainMap": (lambda m: ChainMap({}, {m.a.weight: 1}), lambda m: m.table.get(m.a.weight)),
    "an object": (lambda m: SimpleNamespace(ids={id(m.a.weight)}), lambda m: id(m.a.weight) in m.table.ids),
    "a tuple of numbers": (lambda m: (id(m.a.weight), (id(m.b.bias),)), lambda m: m.table[1][0] == id(m.b.bias)),
    "a tensor and its id": (
        lambda m: ({m.a.weight: 1}, {id(m.a.weight): 1}),
        lambda m: m.table[0].get(m.a.weight) and m.table[1].get(id(m.a.weight))),
    "a text": (lambda m: {str(id(m.a.weight)): "yes"}, lambda m: m.table.get(f"{id(m.a.weight)}")),
    "a text of sixteen digits": (lambda m: {hex(id(m.a.weight)): 1}, lambda m: m.table.get(f"{id(m.a.weight):#x}")),
    "within a text": (lambda m: [f"of {id(m.a.weight):X}: {id(m.a.bias)}"],
                      lambda m: f"of {id(m.a.weight):X}: {id(m.a.bias)}" in m.table),
    "the text of an address": (lambda m: str(m.a.weight.data_ptr()), lambda m: m.table == str(m.a.weight.data_ptr())),
    "a number of thousands of digits": (
        lambda m: {"1" * 5000: 0, str(id(m.b.bias)): 1}, lambda m: m.table.get(str(id(m.b.bias)))),
    "a text after a letter": (lambda m: {f"b{id(m.a.weight)}": 1}, lambda m: m.table.get(f"b{id(m.a.weight)}")),
    "the id of a storage": (lambda m: {m.a.weight.untyped_storage()._cdata: 1},
                            lambda m: m.table.get(m.a.weight.untyped_storage()._cdata)),
    "a read-only view": (lambda m: MappingProxyType({m.a.weight: 1}), lambda m: m.table.get(m.a.weight)),
    "a table in a read-only view": (
        lambda m: MappingProxyType({"of": {id(m.a.weight)}}), lambda m: id(m.a.weight) in m.table["of"]),
    "a cache": (lambda m: fill_cache(m, None), lambda m: m.table(m.a.weight)),
    "a cache of a few": (lambda m: fill_cache(m, 4), lambda m: m.table(m.a.weight)),
    "a cache by names": (lambda m: fill_cache(m, 4, typed=True), lambda m: m.table(m.a.weight)),
    "a module": (lambda m: {m.a: "yes"}, lambda m: m.table.get(m.a)),
    "a proxy": (lambda m: weakref.proxy(m.b), lambda m: m.table.weight.shape == (4, 4)),
    "a proxy in a list": (lambda m: [weakref.proxy(m.b)], lambda m: m.table[0](X.new_zeros(2, 4)).shape == (2, 4)),
    "a weak reference": (lambda m: weakref.ref(m.b), lambda m: m.table() is m.b),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_trace_looks_up_what_the_model_does(name):
    model = Model(*TABLES[name])
    wanted = model(X)
    traced = symbolic_trace(model, meta_args={"x": torch.empty(2, 4, device="meta")})
    torch.testing.assert_close(traced(X), wanted)
    assert traced.meta["assumptions"] == []
    torch.testing.assert_close(model(X), wanted)  # whose table is as it was


@pytest.mark.parametrize("name", [name for name in TABLES if name != "a proxy in a list"])
def test_a_profile_takes_the_branch_of_the_model(name):
    found = profile(Model(*TABLES[name]), (X,), mode="infer", device="h100")
    assert found.fwd_macs == 2 * (2 * 4 * 4)
    assert profile(Model(lambda m: {}, lambda m: False), (X,), mode="infer", device="h100").fwd_macs == 2 * 4 * 4


_TABLE = {}
_NUMBER = 0


def test_a_table_outside_of_the_model_is_looked_up_and_put_back():
    global _NUMBER
    model = Model(lambda m: None, lambda m: _TABLE[m.a.weight] and _TABLE[id(m.a.bias)] and _NUMBER == id(m.b.bias))
    _TABLE.update({model.a.weight: True, id(model.a.bias): True})
    _NUMBER = id(model.b.bias)
    traced = symbolic_trace(model, meta_args={"x": torch.empty(2, 4, device="meta")})
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["a", "b"]
    assert traced.meta["assumptions"] == []
    assert profile(model, (X,), mode="infer", device="h100").fwd_macs == 64
    assert list(_TABLE)[0] is model.a.weight and list(_TABLE)[1] == id(model.a.bias) and _NUMBER == id(model.b.bias)


def test_what_a_step_adds_to_a_table_names_the_tensors_of_the_model():
    model = Model(lambda m: {}, lambda m: m.seen.setdefault(id(m.a.weight), True))
    seen = model.__dict__["seen"] = {id(model.b.weight): True}
    traced = symbolic_trace(model, meta_args={"x": torch.empty(2, 4, device="meta")})
    assert f"leaves seen as ({id(model.b.weight)}, {id(model.a.weight)}, True, True)" in " ".join(
        traced.meta["assumptions"])
    assert seen == {id(model.b.weight): True}


class Named(nn.Module):
    """What is registered under a name that has the id of a parameter."""

    def __init__(self, kind):
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.rand(4)), nn.Linear(4, 4)
        self.kind, name = kind, f"of_{id(self.scale)}"
        if kind == "modules":
            self.held = nn.ModuleDict({name: nn.Linear(4, 4)})
        elif kind == "parameters":
            self.held = nn.ParameterDict({name: torch.rand(4, 4)})
        elif kind == "a buffer":
            self.register_buffer(name, torch.rand(4, 4))
        else:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x):
        name, x = f"of_{id(self.scale)}", self.layer(x) * self.scale
        if self.kind in ("modules", "parameters"):
            held = self.held[name] if name in self.held else None
        else:
            held = getattr(self, name) if hasattr(self, name) else None
        return x if held is None else held(x) if isinstance(held, nn.Module) else x @ held


@pytest.mark.parametrize("kind", ["modules", "parameters", "a buffer", "a module"])
def test_a_name_that_has_an_id_is_found(kind):
    model = Named(kind)
    names, wanted = list(model.state_dict()), model(X)
    traced = symbolic_trace(model, meta_args={"x": torch.empty(2, 4, device="meta")})
    torch.testing.assert_close(traced(X), wanted)
    for settings in ({"mode": "infer"}, {"optimizer": "adamw"}):
        p = profile(model, (X,), device="h100", **settings)
        assert p.fwd_macs == 2 * (2 * 4 * 4)
        assert f"of_{id(model.scale)}" in " ".join(module.path for module in p.modules.walk()) or kind in (
            "parameters", "a buffer")
    assert list(model.state_dict()) == names and all(
        type(held) is dict for part in model.modules() for held in (part._modules, part._parameters, part._buffers))
    torch.testing.assert_close(model(X), wanted)

"""Nothing of ours is reached from the user's objects after a call, wherever forward put its tensors."""
import contextvars
import dataclasses
import functools
import gc
import queue
import threading
import types
from collections import OrderedDict, UserDict, defaultdict, deque

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import nn

from analyzer import advise, profile, reprofile, symbolic_profile, symbolic_trace
from analyzer.errors import InputError
from analyzer.fx import CheckpointRegion, ShapeProp, set_region
from analyzer.meta.address_space import MetaStorage
from analyzer.tools.solver.budget import InfeasibleBudgetError
from analyzer.tools.solver.planner import solve
from tests.fx import holder_module

LATEST = None
KEPT, SET, LINE, WAITING = [], set(), deque(maxlen=3), queue.Queue()
TABLE, ORDERED, GROUPS, USERS = {"old": 1}, OrderedDict(), defaultdict(list), UserDict()
LOCAL, VARIABLE = threading.local(), contextvars.ContextVar("VARIABLE")
VARIABLE.set(0)
DEEP = types.SimpleNamespace(a=types.SimpleNamespace(b=types.SimpleNamespace(c=types.SimpleNamespace(t=None))))
TENSOR, TEACHER = torch.rand(3), nn.Linear(4, 4)


class Registry:
    latest, items, _hidden = None, [], {}

    @classmethod
    def add(cls, x):
        cls._hidden["x"] = x
        cls.late = x


class Slotted:
    __slots__ = ("t", "u")

    def __init__(self):
        self.t = None


@dataclasses.dataclass
class Record:
    t: object = None
    inner: Slotted = dataclasses.field(default_factory=Slotted)


RECORD = Record()


@functools.lru_cache
def make_mask(size):
    return torch.tril(torch.ones(size, size))


def with_default(x, seen=[]):  # noqa: B006
    seen.append(x)


def with_attribute(x):
    with_attribute.latest = x


def make_closure():
    kept = None

    def keep(x):
        nonlocal kept
        kept = x, kept

    return keep


keep_in_closure = make_closure()


class Keeper:
    """An object that modules hold, which keeps what it is shown."""

    def __init__(self):
        self.seen = None

    def show(self, x):
        self.seen = x
        Registry.latest = x


def in_global(m, x):
    global LATEST
    LATEST = x


def in_new_global(m, x):
    global NEVER_SET
    NEVER_SET = x


def in_containers(m, x):
    KEPT.append([{"x": (x,)}])
    SET.add(x)
    LINE.append(x)
    TABLE["new"] = TABLE["old"] = x
    ORDERED["x"] = GROUPS["x"] = USERS["x"] = x


def in_objects(m, x):
    DEEP.a.b.c.t = RECORD.t = RECORD.inner.t = RECORD.inner.u = x
    WAITING.put(x)


def in_thread_and_context(m, x):
    LOCAL.x = x
    VARIABLE.set(x)


def in_class(m, x):
    Registry.latest = x
    Registry.items.append(x)
    Registry.add(x)


def in_functions(m, x):
    make_mask(x.shape[-1])
    with_default(x)
    with_attribute(x)
    keep_in_closure(x)


def in_other_module(m, x):
    holder_module.keep(x)
    holder_module.new_name = holder_module.cache["more"] = x


def in_attributes_of_tensors(m, x):
    TENSOR.note = m.a.weight.note = x
    x.note = x


def in_registries(m, x):
    m.register_buffer("late", x.detach())
    m.w = nn.Parameter(torch.ones(4))
    m.more = nn.Sequential(nn.Linear(4, 4))
    m.a.register_buffer("inner", torch.zeros(3))
    m.none = x.mean()


def in_attributes(m, x):
    m.kept, m.settings.a.b.c.t = x, x
    m.cache["x"] = x
    m.found.append(x)
    m.keeper.show(x)
    m.hidden[0].register_buffer("late", torch.ones(3))


def in_hooks(m, x):
    m.a.register_forward_hook(lambda *given: keep_in_closure(x))
    m.call_me = lambda: x
    m.bound = Keeper().show


def in_teacher(m, x):
    TEACHER.note = x
    TEACHER.register_buffer("late", torch.ones(3))
    TEACHER(x)


def in_arguments(m, x):
    m.given["list"].append(x)
    m.given["object"].t = x
    m.given["object"].items["x"] = [x]
    m.given["slots"].u = x


def in_made_objects(m, x):
    KEPT.append(Keeper())
    KEPT[-1].seen = types.SimpleNamespace(x=Record(x))
    TABLE["iterator"] = iter([x])
    TABLE["partial"] = functools.partial(keep_in_closure, x)


PUTS = [in_global, in_new_global, in_containers, in_objects, in_thread_and_context, in_class, in_functions,
        in_other_module, in_attributes_of_tensors, in_registries, in_attributes, in_hooks, in_teacher, in_arguments,
        in_made_objects]


class Model(nn.Module):
    def __init__(self, puts, fails=None):
        super().__init__()
        self.puts, self.fails = puts, fails
        self.a = nn.Linear(4, 4)
        self.register_buffer("none", None)
        self.settings = types.SimpleNamespace(a=types.SimpleNamespace(b=Record(types.SimpleNamespace(t=None))))
        self.settings.a.b.c = self.settings.a.b.t
        self.cache, self.found, self.keeper, self.hidden = {}, [], Keeper(), [nn.Linear(2, 2)]

    def forward(self, x, given):
        self.given = given
        y = self.a(x)
        for put in self.puts:
            put(self, y)
        if self.fails is not None:
            raise self.fails("of the model")
        return y + given["tensor"]


class Interrupted(BaseException):
    pass


def arguments():
    return torch.rand(2, 4), {"tensor": torch.rand(4), "list": [], "slots": Slotted(),
                              "object": types.SimpleNamespace(t=None, items={})}


OURS = "analyzer."
THEIRS = "tests.fx"


def children(value):
    """What a value holds, by names."""
    if isinstance(value, types.FunctionType):
        cells = {name: c.cell_contents for name, c in zip(value.__code__.co_freevars, value.__closure__ or ())}
        return {**cells, "defaults": value.__defaults__, "attributes": value.__dict__}
    if isinstance(value, contextvars.ContextVar):
        return {"value": value.get()}
    if isinstance(value, torch.Tensor):
        return {"grad": value.grad if value.is_leaf else None, **value.__dict__}
    if isinstance(value, (dict, types.MappingProxyType)):
        return {**{repr(k): v for k, v in value.items()}, **getattr(value, "__dict__", {})}
    if isinstance(value, (list, tuple, set, deque)):
        return dict(enumerate(value))
    slots = [name for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)]
    if hasattr(value, "__dict__") or slots:
        return {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}
    return dict(enumerate(child for child in gc.get_referents(value) if not isinstance(child, type)))


def observe(**roots):
    """What can be reached from objects, by paths: plain values, else types and identities."""
    found, seen = {}, {}
    waiting = [*roots.items(), ("module", vars(holder_module)), ("globals", globals())]
    while waiting:
        path, value = waiting.pop()
        is_plain = isinstance(value, (int, float, str, bytes, type(None), torch.dtype))
        found[path] = value if is_plain else (type(value).__name__, id(value))
        if is_plain or id(value) in seen or isinstance(value, (types.ModuleType, types.CodeType)) or isinstance(
                value, (type, types.FunctionType)) and not str(value.__module__).startswith(THEIRS) or (
                    type(value).__module__.startswith(("hypothesis", "_pytest"))):
            continue
        seen[id(value)] = value
        assert not type(value).__module__.startswith(OURS), path
        if isinstance(value, torch.Tensor):
            with torch._C.DisableTorchFunction():  # which uninitialised ones refuse
                assert not isinstance(value.untyped_storage(), MetaStorage), path
        waiting += [(f"{path}.{name}", child) for name, child in children(value).items()]
    return found


def assert_same(after, before):
    assert {path: (before.get(path, "nothing"), after.get(path, "nothing")) for path in before.keys() | after.keys()
            if before.get(path, before) != after.get(path, after) and "__slotnames__" not in path} == {}  # of `copy`


def train(model, x, given):
    kept = []

    def loss(out):
        kept.append(out)
        return out.sum()

    before = observe(loss=loss)
    profile(model, (x, given), loss_fn=loss, optimizer="adamw", device="h100")
    assert_same(observe(loss=loss), before)


def step(model, x, given):
    kept, box = [], {}

    def run(model, optimizer, x, given):
        box["optimizer"] = optimizer
        kept.append(model(x, given))
        kept[-1].sum().backward()
        optimizer.step()

    def make(parameters):
        box["made"] = torch.optim.SGD(parameters, lr=0.1)
        return box["made"]

    before = observe(run=run, make=make)
    profile(model, (x, given), step=run, optimizer=make, device="h100")
    assert_same(observe(run=run, make=make), before)


def infer(model, x, given):
    profile(model, x, {"given": given}, mode="infer", device="cpu", reuse=False)


def build(model, x, given):
    profile(lambda: Model(model.puts, model.fails), (x, given), device="h100")


def trace(model, x, given):
    gm = symbolic_trace(model, meta_args={"x": x, "given": given})
    symbolic_profile(gm, x, given)


RUNS = [train, step, infer, build, trace]
FAILURES = [None, ValueError, Interrupted, RuntimeError]


def check(puts, run, fails=None):
    model, (x, given) = Model(puts, fails), arguments()
    before = observe(model=model, x=x, given=given)
    if fails is None:
        run(model, x, given)
    else:
        with pytest.raises((fails, InputError)):
            run(model, x, given)
    assert_same(observe(model=model, x=x, given=given), before)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("put", PUTS)
def test_what_forward_puts_somewhere_is_put_back(put, run):
    check([put], run)


@hypothesis.settings(max_examples=25)
@hypothesis.given(strategies.lists(strategies.sampled_from(PUTS), min_size=2, max_size=6),
                  strategies.sampled_from(RUNS), strategies.sampled_from(FAILURES))
def test_puts_at_random_with_and_without_an_error(puts, run, fails):
    check(puts, run, fails)


def test_flags_beside_a_tensor_are_put_back_with_it_and_plain_values_stay():
    """Code that trusts a flag more than what it stands for would fail afterwards; what only counts is the caller's."""
    shapes = []

    def forward(self, x):
        if not Ready.is_ready:
            Ready.table, Ready.is_ready = torch.ones(4, device=x.device), True
        shapes.append(tuple(x.shape))
        return x * Ready.table

    model = type("Flagged", (nn.Module,), {"forward": forward})()
    profile(model, torch.rand(2, 4), mode="infer")
    assert (Ready.is_ready, Ready.table) == (False, None)
    assert shapes == [(2, 4), (2, 4)] and model(torch.rand(2, 4)).shape == (2, 4)
    Ready.is_ready, Ready.table = False, None


class Ready:
    is_ready, table = False, None


def test_caches_that_held_real_tensors_hold_no_others_afterwards():
    make_mask(2)
    check([in_functions], train)
    assert type(make_mask(2)) is torch.Tensor and type(make_mask(4)) is torch.Tensor
    make_mask.cache_clear()


def test_what_no_look_at_code_finds_is_told(monkeypatch):
    # other threads, such as the monitor that tqdm started in an earlier test, could have made them
    monkeypatch.setattr("threading.active_count", lambda: 1)

    def forward(self, x):
        globals()["FOUND_BY_NAME_ALONE"] = x
        return x * 2

    model = type("Hiding", (nn.Module,), {"forward": forward})()
    with pytest.warns(UserWarning, match="tensors without data stay behind"):
        profile(model, torch.rand(2, 4), mode="infer")
    del globals()["FOUND_BY_NAME_ALONE"]


def test_two_threads_leave_nothing_in_what_they_share():
    """The second begins with the first one's tensors there, and goes on when these were put back."""
    before, (put, begun, over) = observe(), [threading.Event() for _ in range(3)]

    def in_first(m, x):
        TABLE["old"] = x
        KEPT.append(x)
        put.set()
        begun.wait(10)

    def in_second(m, x):
        begun.set()
        over.wait(10)
        TABLE["new"] = x

    second = threading.Thread(target=lambda: put.wait(10) and infer(Model([in_second]), *arguments()))
    second.start()
    infer(Model([in_first]), *arguments())
    assert (KEPT, TABLE) == ([], {"old": 1})
    over.set()
    second.join()
    assert_same(observe(), before)


@pytest.mark.parametrize("run", [train, infer, trace])
def test_plain_values_in_arguments_are_put_back_too(run):
    def in_given(m, x):
        m.given["list"] += [1]
        m.given["object"].items["count"] = m.given["object"].items.get("count", 0) + 1
        m.given.setdefault("late", [])

    check([in_given], run)


def test_a_graph_says_that_it_leaves_containers_as_they_are():
    model, (x, given) = Model([in_arguments]), arguments()
    gm = symbolic_trace(model, meta_args={"x": x, "given": given})
    assert gm.meta["assumptions"] == ["forward puts other tensors into given, a container or an object that it is "
                                      "given: the graph does not",
                                      "forward changes given of the model: the graph does not"]
    torch.testing.assert_close(gm(x, given), Model.forward(model, x, given))


def test_advice_plans_and_graphs_that_are_run_again_leave_nothing():
    model, (x, given) = Model([in_global, in_containers, in_registries, in_attributes]), arguments()
    before = observe(model=model, x=x, given=given)
    advise(model, (x, given), device="a100", optimizer="sgd", quick=True)
    gm = symbolic_profile(symbolic_trace(model, meta_args={"x": x, "given": given}), x, given)
    ShapeProp(gm).propagate(x, given)
    with pytest.raises(InfeasibleBudgetError):
        solve(gm, 1)
    set_region(gm, [next(node for node in gm.graph.nodes if node.op == "call_module")], CheckpointRegion(0))
    reprofile(gm)
    assert_same(observe(model=model, x=x, given=given), before)


def test_a_model_that_another_thread_runs_is_refused():
    begun, done, found = threading.Event(), threading.Event(), []

    def forward(self, x):
        begun.set()
        done.wait(10)
        return self.a(x)

    model = type("Slow", (Model,), {"forward": forward})([])
    thread = threading.Thread(target=lambda: found.append(profile(model, torch.rand(2, 4), mode="infer")))
    thread.start()
    begun.wait(10)
    with pytest.raises(InputError, match="the model .Slow. is profiled or traced in another thread"):
        symbolic_trace(model, meta_args={"x": torch.rand(2, 4)})
    done.set()
    thread.join()
    assert len(found) == 1 and all(type(t) is nn.Parameter for t in model.parameters())
    symbolic_trace(model, meta_args={"x": torch.rand(2, 4)})


def test_lazy_modules_are_lazy_again():
    model = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d())
    before = observe(model=model)
    found = profile(model, torch.rand(3, 6), device="h100")
    assert found.params == 6 * 5 + 5 + 2 * 5
    assert_same(observe(model=model), before)
    with pytest.raises(InputError, match="0.weight, 0.bias, 1.weight: not initialised"):
        symbolic_trace(model, meta_args={"input": torch.rand(3, 6)})
    assert_same(observe(model=model), before)
    assert model(torch.rand(3, 6)).shape == (3, 5)

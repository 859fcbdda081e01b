"""What nothing would find, and what could not be called, is refused when it is registered."""
import pytest
import torch
from torch import nn

import analyzer
from analyzer import (
    Profile,
    profile,
    register_exporter,
    register_flop_impl,
    register_leaf_module,
    register_memory_impl,
    register_report,
    register_shape_impl,
    register_solver,
    register_time_impl,
    register_tracer_impl,
    symbolic_profile,
    symbolic_trace,
)
from analyzer.errors import InputError
from analyzer.meta import MemoryNeed
from analyzer.profilers.flop_registry import FlopCount

NET = Profile(name="Net", mode="infer", params=3)
X = torch.empty(4, 4)


@torch.library.custom_op("registration::scan", mutates_args=())
def scan(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@scan.register_fake
def _(x):
    return torch.empty_like(x)


class Scan(nn.Module):
    def forward(self, x):
        return scan(x)


def double(x):
    return 2 * x


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return double(self.fc(x))


class Pair(nn.Module):
    def forward(self, x):
        return torch._foreach_mul([x, x], 2.0)


def refused(make):
    with pytest.raises(InputError) as caught:
        make()
    return str(caught.value)


OPERATOR_TABLES = [register_flop_impl, register_memory_impl, register_time_impl, register_shape_impl]
UNKNOWN = "aten::mn"


@pytest.mark.parametrize("register", OPERATOR_TABLES, ids=lambda r: r.name)
@pytest.mark.parametrize(("key", "said"), [
    (None, "(None): must be an operator (as torch.ops.aten.mm); write @"), (3, "(3): must be an operator"),
    ("ext.scan", "('ext.scan'): is no name of an operator; write 'ext::scan'"),
    ("torch.ops.aten.mm.out", "('torch.ops.aten.mm.out'): is no name of an operator; write 'aten::mm.out'"),
    ("scan", "('scan'): is no name of an operator; write 'namespace::name'"),
    (UNKNOWN, f"('{UNKNOWN}'): torch {torch.__version__} has no operator of that name")])
def test_what_is_no_operator(register, key, said):
    assert refused(lambda: register(key, double)).startswith(register.name + said)


@pytest.mark.parametrize("register", OPERATOR_TABLES[:3], ids=lambda r: r.name)
@pytest.mark.parametrize("key", [double, len, nn.Linear])
def test_a_function_is_an_operator_where_its_shape_is_registered(register, key):
    """As a bare ``@register_flop_impl`` above a function would register it."""
    assert "a Python function becomes one by register_shape_impl); write @" in refused(lambda: register(key))
    with register_shape_impl.scope(), register.scope():
        register_shape_impl(key, lambda x: x)
        register(key, lambda *args, out=None: None)
        assert key in register


@pytest.mark.parametrize("register", [register_memory_impl, register_shape_impl], ids=lambda r: r.name)
def test_a_name_that_no_library_defines(register):
    assert "no library that is loaded defines it; import it before" in refused(lambda: register("nolib::scan", double))


def test_a_name_whose_library_comes_later_has_a_formula():
    with register_flop_impl.scope():
        register_flop_impl("registration::later", lambda x, out: 5)
        library = torch.library.Library("registration", "FRAGMENT")
        library.define("later(Tensor x) -> Tensor")
        library.impl("later", torch.empty_like, "Meta")

        class Later(nn.Module):
            def forward(self, x):
                return torch.ops.registration.later(x)

        assert profile(Later(), X, mode="infer").fwd_flops == 5


@pytest.mark.parametrize("key", [scan, "registration::scan", torch.ops.registration.scan,
                                 torch.ops.registration.scan.default], ids=str)
def test_what_custom_op_made_is_its_operator(key):
    with register_flop_impl.scope(), register_memory_impl.scope():
        register_flop_impl(key, lambda x, out: 7)
        register_memory_impl(key, lambda x, out: MemoryNeed(workspace_bytes=4096))
        found = profile(Scan(), X, mode="infer")
        assert (found.fwd_flops, found.uncounted) == (7, ())
        assert found.peak_allocated_bytes == 512 + 512 + 4096  # input, output and workspace
        assert key in register_flop_impl


@pytest.mark.parametrize(("result", "flops"), [(8, 8), (8.0, 8), (FlopCount(8, 4), 8), (0, 0)])
def test_counts(result, flops):
    with register_flop_impl.scope():
        register_flop_impl(scan, lambda x, out: result)
        assert profile(Scan(), X, mode="infer").fwd_flops == flops


@pytest.mark.parametrize("result", [-1, True, 2.5, float("nan"), "8", [3], FlopCount(2, -1), FlopCount(2.5)], ids=repr)
def test_what_is_no_count(result):
    with register_flop_impl.scope():
        register_flop_impl(scan, lambda x, out: result)
        said = refused(lambda: profile(Scan(), X, mode="infer"))
    assert f"register_flop_impl(registration.scan.default): its formula returned {result!r}: must be" in said


def test_what_is_no_count_of_an_element():
    with register_flop_impl.scope():
        register_flop_impl("aten::mul", lambda x, y, out: -1)
        said = refused(lambda: profile(Pair(), X, mode="infer"))
    assert "register_flop_impl(aten::mul): its formula returned -1" in said


def test_memory_of_a_function_with_a_registered_shape():
    """A node of a traced graph, which has no schema: its rule is checked and used as an operator's."""
    with register_shape_impl.scope(), register_memory_impl.scope(), register_flop_impl.scope():
        register_shape_impl(double, lambda x: x.new_empty(x.shape))
        register_flop_impl(double, lambda x, out: 7)
        graph = symbolic_trace(Doubled(), {"x": X})

        def costs():
            return symbolic_profile(graph, X, mode="train", device="cpu").meta["profile"]

        plain = costs()
        assert plain.fwd_flops == 2 * 4 * 4 * 4 + 16 + 7  # the product, the loss, and double's own
        with register_memory_impl.scope():
            register_memory_impl(double, lambda x, out: MemoryNeed(saved_bytes=1 << 20))
            kept = costs().phases["forward"].allocated_bytes - plain.phases["forward"].allocated_bytes
            assert kept == 1 << 20  # held until backward
        register_memory_impl(double, lambda x, out: MemoryNeed(saved_bytes=-1))
        assert "saved_bytes=-1: must be a whole number" in refused(costs)


@pytest.mark.parametrize(("register", "impl", "said"), [
    (register_flop_impl, double, "unexpected keyword argument 'out'; it is called as f(*args, out=..., **kwargs)"),
    (register_memory_impl, double, "unexpected keyword argument 'out'; it is called as f(*args, out=..., **kwargs)"),
    (register_time_impl, double, "too many positional arguments; it is called as f(signature, device)"),
    (register_flop_impl, 3, "3 cannot be called; give a function that is called as"),
    (register_shape_impl, 3, "3 cannot be called; give a function that is called as f(*args, **kwargs)")])
def test_functions_that_do_not_take_what_they_are_called_with(register, impl, said):
    scanned = torch.ops.registration.scan
    assert said in refused(lambda: register(scanned, impl))
    assert said in refused(lambda: register(scanned)(impl))
    assert scanned not in register
    assert "None cannot be called" in refused(lambda: register(scanned)(None))


NAMED_TABLES = [register_report, register_exporter, register_solver]


@pytest.mark.parametrize("register", NAMED_TABLES, ids=lambda r: r.name)
@pytest.mark.parametrize("key", [None, double, "", "two words", "a=b", "--flag"])
def test_names_that_no_command_line_could_give(register, key):
    said = refused(lambda: register(key))  # double: a bare decorator
    assert said.startswith(f"{register.name}({key!r}): must be a name, as in @{register.name}(\"name\")")


@pytest.mark.parametrize("register", NAMED_TABLES, ids=lambda r: r.name)
def test_functions_of_a_name_that_take_nothing(register):
    assert "too many positional arguments; it is called as f(" in refused(lambda: register("mine", lambda: ""))


@pytest.mark.parametrize(("key", "said"), [("Block", "'Block'"), (int, "<class 'int'>"), (None, "None")])
def test_what_is_no_class_of_modules(key, said):
    for register in (register_leaf_module, analyzer.register_non_leaf_module, analyzer.register_leaf_module_impl):
        assert refused(lambda register=register: register(key)) == (
            f"{register.name}({said}): must be a class that derives from torch.nn.Module")


def test_what_is_no_function_to_trace():
    assert refused(lambda: register_tracer_impl("softplus")).startswith(
        "register_tracer_impl('softplus'): must be the function that is called")


def test_options_of_exporters_and_reports_from_outside():
    with register_exporter.scope(), register_report.scope():
        register_exporter("mine", lambda profile, path: path)
        register_exporter("keyed", lambda profile, key, caller: (key, caller))
        register_report("silent", lambda profile: None)
        register_report("strict", lambda profile, must: must)
        assert NET.export("mine", "f") == NET.export("mine", path="f") == "f"
        assert NET.export("keyed", key=1, caller=2) == (1, 2)
        assert refused(lambda: NET.export("mine", "f", units=2)) == "export('mine', units=...): its options are path"
        assert refused(lambda: NET.export("mine")) == (
            "export('mine'): missing a required argument: 'path'; its options are path")
        assert refused(lambda: NET.export("mine", 1, 2)) == (
            "export('mine'): too many positional arguments; its options are path")
        assert "report('silent'): returned None: a report returns text" in refused(lambda: NET.report("silent"))
        assert "missing a required argument: 'must'" in refused(lambda: NET.report("strict"))
        assert NET.report("strict", must="text") == "text"


def test_a_function_with_a_registered_shape_runs_in_models_with_data_and_in_blocks_that_are_repeated():
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(8)))
    plain = profile(blocks, X.new_empty(4, 8), device="h100")
    with register_shape_impl.scope(), register_flop_impl.scope():
        register_shape_impl(nn.functional.linear)(nn.functional.linear)
        register_flop_impl(nn.functional.linear)(
            lambda x, weight, bias, out=None: FlopCount(2 * x.numel * weight.shape[0], 0))
        with analyzer.MetaTensorMode():
            assert blocks(torch.empty(4, 8)).shape == (4, 8)
        found = profile(blocks, X.new_empty(4, 8), device="h100")
    assert found.fwd_flops == plain.fwd_flops and found.params == plain.params

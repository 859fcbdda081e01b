"""What is compiled, in reports: the row of a module or function, and the eager step beside the compiled one."""
from dataclasses import replace

import pytest
import torch
from torch import nn

from analyzer import Profile, compare, profile
from analyzer.errors import InputError
from analyzer.profilers.annotation import Annotation
from analyzer.record.log import CompileBreak, CompiledCall, CompiledGraph, Log, LogModule
from analyzer.record.options import ProfileOptions
from analyzer.report.compiled import describe_compiled, draw_beside, draw_compiled
from analyzer.results.build import ProfileBuilder
from analyzer.results.info import BreakInfo, CompiledInfo
from analyzer.results.tree import ModulePaths, ModuleShape

ROW = CompiledInfo(path="h.0", type="Block", calls=1, graphs=2, operators=40, recomputed=9, saved_bytes=2**20,
                   fwd_kernels=5, bwd_kernels=7, fwd_extern_kernels=4, bwd_extern_kernels=8,
                   breaks=(BreakInfo("data decide a size", "net.py:7"),))
BROKEN = (ROW, replace(ROW, path="h.1"), replace(ROW, path="", type="Net", function="loss", breaks=(), graphs=1,
                                                 saved_bytes=None, cuda_graphs=True, config={"dynamic": "True"},
                                                 recompilations=("x has 7 rows, was 8",)))
NET = Profile(name="net", mode="train", compiled=BROKEN)


def test_rows_that_are_alike_are_one_and_breaks_have_their_lines():
    text = draw_compiled(NET)
    lines = [line for line in text.splitlines() if line.startswith(("h.{0-1}", "(model)"))]
    assert lines[0].split()[:3] == ["h.{0-1}", "(2)", "Block"] and lines[1].split()[:2] == ["(model)", "loss"]
    assert lines[0].split()[3:] == ["2", "4", "80", "18", "2.00", "MiB", "10", "8", "14", "16"]
    assert lines[1].split()[2:] == ["1", "1", "40", "9", "-", "5", "4", "7", "8"]
    assert "- h.{0-1} (2) Block: the graph ends at net.py:7: data decide a size" in text
    assert "- (model) loss: compiled again: x has 7 rows, was 8" in text
    assert "- (model) loss: each pass is launched as one CUDA graph" in text and "- (model) loss: dynamic=True" in text


def test_it_is_in_the_texts_and_in_what_is_saved():
    said = "compiled: 2 Block, loss in 5 graphs, 2 breaks; 36 generated kernels and 36 others"
    assert describe_compiled(NET)[0].startswith(said) and describe_compiled(Profile(name="net", mode="infer")) == []
    assert said in " ".join(NET.screen().split()) and said in NET.report("brief")
    assert draw_compiled(NET).splitlines()[3] in NET.summary()
    assert Profile.from_json(NET.to_json()) == NET
    assert "not known here: as_eager(): net: only `analyzer.profile` knows" in " ".join(NET.report("compile").split())
    assert NET.report("compile", fmt="csv").splitlines()[1:] == [
        'h.{0-1} (2) Block,2,4,80,18,2097152,10,8,14,16', "(model) loss,1,1,40,9,,5,4,7,8"]
    with pytest.raises(InputError, match="compile"):
        NET.report("compile", fmt="pdf")


def test_a_log_s_calls_are_rows():
    """Of the last step that ran, all calls of one function together; breaks and recompilations of every step."""
    once = CompiledGraph(4, 1, 256, 2, 3, 1, 2)
    call = CompiledCall(0, 0, "", (once,), (CompileBreak("item", "net.py:7"),))
    again = replaced(call, step=1, graphs=(once, replaced(once, saved_bytes=None)), breaks=(), recompiled="7 rows")
    log = Log(modules=[LogModule("", "Net", None)], steps=2)
    log.compiled_calls = [call, again, again, replaced(again, function="loss", breaks=(CompileBreak("print"),))]
    model = nn.Linear(2, 2)
    rows = ProfileBuilder(log, ModuleShape.of(model), [Annotation()], ModulePaths(), {}, {})._describe_compiled()
    assert rows == (
        CompiledInfo(path="", type="Net", calls=2, graphs=4, operators=16, recomputed=4, saved_bytes=512, fwd_kernels=8,
                     bwd_kernels=12, fwd_extern_kernels=4, bwd_extern_kernels=8,
                     breaks=(BreakInfo("item", "net.py:7"),), recompilations=("7 rows", "7 rows")),
        CompiledInfo(path="", type="Net", function="loss", calls=1, graphs=2, operators=8, recomputed=2,
                     saved_bytes=256, fwd_kernels=4, bwd_kernels=6, fwd_extern_kernels=2, bwd_extern_kernels=4,
                     breaks=(BreakInfo("print"),), recompilations=("7 rows",)))


def replaced(record, **changes):
    return record._replace(**changes)


class Layer(nn.Sequential):
    def forward(self, x):
        return super().forward(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[Layer(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(3)])

    def forward(self, x):
        return self.layers(x) + 1


X = torch.rand(512, 64)


def test_the_eager_step_of_a_compiled_model():
    model = torch.compile(Net())
    plain = profile(model._orig_mod, X, optimizer="sgd", device="h100")
    p = profile(model, X, optimizer="sgd", device="h100")
    eager = p.as_eager()
    assert eager.compiled is None and p.kernels != eager.kernels == plain.kernels
    assert eager.peak_allocated_bytes == plain.peak_allocated_bytes and eager.step_seconds == plain.step_seconds
    told = profile(model, X, optimizer="sgd", device="h100", options=ProfileOptions(compiles=False))
    assert told.phases == eager.phases and told.compiled is None  # with a level for the compiled module in its tree
    assert eager.as_eager() == eager == plain
    assert [*p.inputs] == [*plain.inputs] == ["x"]
    table = draw_beside(eager, p)
    assert f" {eager.kernels} {p.kernels} " in " ".join(table.split()) and "peak allocated" in table


def test_it_is_compared_with_the_compiled_one_module_by_module():
    model = Net()
    before = profile(model, X, optimizer="sgd", device="h100")
    for layer in model.layers:
        layer.compile()
    change = compare(before, profile(model, X, optimizer="sgd", device="h100"))
    assert change.structure == () and any(row.module.startswith("layers") for row in change.modules)
    assert next(row for row in change.totals if row.quantity == "kernels").is_changed
    model = torch.compile(Net())
    change = compare(before, profile(model, X, optimizer="sgd", device="h100"))
    assert change.structure == ()
    assert [text for text in change.settings if not text.startswith("under torch.compile")] == []


def test_a_model_that_is_gone_has_no_eager_step():
    p = profile(Net(), X, device="h100")
    with pytest.raises(InputError, match=r"as_eager\(\): Net: the model is gone"):
        p.as_eager()
    assert p.report("compile").startswith("nothing is under torch.compile")


def test_the_eager_step_where_only_the_module_is_kept():
    model = Net()
    assert profile(torch.compile(model), X, device="h100").as_eager() == profile(model, X, device="h100")

"""What a call of a compiled function does: its results, its graphs and breaks, its rows, and what it leaves behind."""
from __future__ import annotations

import gc
import json
import queue
import threading
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from analyzer import MetaTensorMode, ProfileOptions, profile
from analyzer.compiled import region
from analyzer.compiled.graph_end import GraphEnd
from analyzer.compiled.traced_tensor import exchange, is_held
from analyzer.errors import InputError

ROWS, WIDTH = 64, 32
X = torch.rand(ROWS, WIDTH)
BYTES = ROWS * WIDTH * 4
told: queue.SimpleQueue = queue.SimpleQueue()  # which no profile puts back


class Around(nn.Module):
    """Calls ``function`` with what a layer gives and a parameter, and tells what the results look like."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH, WIDTH))
        self.functions = [function]

    def forward(self, x):
        found = self.functions[0](self.layer(x), self.weight)
        tensors = list(find_tensors(found))
        told.put([look(t) for t in tensors])
        return sum(t.float().sum() for t in tensors)


def find_tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    parts = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else vars(
        value).values() if hasattr(value, "__dict__") and not isinstance(value, torch.Tensor) else ()
    for part in parts:
        yield from find_tensors(part)


def look(tensor):
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, tensor.is_leaf, str(tensor.device)


def run(function, **options):
    found = profile(Around(function), args=(X,), device="h100", **options)
    return found, take_told()[-1]


def take_told():
    found = []
    while not told.empty():
        found.append(told.get())
    return found


def run_compiled(function, settings=None, **options):
    return run(torch.compile(function, **settings or {}), **options)


def forward_bytes(p):
    return p.phases["forward"].allocated_bytes


@dataclass
class Result:
    first: torch.Tensor
    others: list


class Plain:
    pass


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].exp()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x.new_tensor(2.0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * gradient.new_tensor(2.0)


class Weighted(Scaled):
    @staticmethod
    def backward(ctx, gradient):
        return gradient * X[0].clone().to(gradient.device) + gradient.new_tensor([1.0, 2.0])[:1]


def give_object(x, w):
    found = Plain()
    found.a, found.b = x.sin(), [x.cos(), {"c": x * 2}]
    return found


def write_inside(x, w):
    x = x * 1
    x.mul_(2)
    x[:, 0].add_(1)
    return x.sin()


def write_argument(x, w):
    x.add_(1)
    return x * 2, x


def append_outside(x, w):
    kept.clear()
    kept.append(x.sin())
    return kept[0] * 2, kept


kept: list[torch.Tensor] = []


@torch.jit.script
def divide_by_root(x: torch.Tensor):
    return x / torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float))


def write_part_without_grad(x, w):
    with torch.no_grad():
        part = w[:2]
        part.mul_(2)
        print(end="")  # where a graph ends
        del part
    return x @ w


def put_by_mask(x, w):
    y, mask = torch.zeros_like(x), x[:, 0] > 0.5
    y[mask] = (x @ w)[mask]
    return y * 2


RESULTS = {
    "one": lambda x, w: F.gelu(x @ w),
    "views of one": lambda x, w: (x.t(), (y := x * 2), y.view(-1), y[0]),
    "a view of another dtype": lambda x, w: (y := x * 2, y.view(torch.int32)[1:]),
    "a write to a view of another dtype": lambda x, w: ((y := x * 2).view(torch.int32).bitwise_and_(-2), y),
    "a write where no gradients are recorded": write_part_without_grad,
    "scaled by a tensor": lambda x, w: [(x * 2).add_(x, alpha=(two := torch.tensor(2.0))),
                                        (x * 2).addcmul_(x, x, value=two), (x * 2).addcdiv_(x, x + 1, value=two)],
    "parts of one storage as arguments": lambda x, w: torch.compile(lambda a, b: a * b)(*x.chunk(2, -1)),
    "an object": give_object,
    "a dataclass": lambda x, w: Result(x * 2, [x.sin()]),
    "a write to what was made": write_inside,
    "a write to an argument": write_argument,
    "a list of the caller": append_outside,
    "arguments": lambda x, w: (x, w),
    "some without gradient": lambda x, w: (x * 2, x.detach() * 2, (x * 2).detach()),
    "made of numbers": lambda x, w: (x * torch.tensor(2.0), torch.tensor([1.0, 2.0], device=x.device)),
    "made on the host": lambda x, w: x.gather(1, torch.arange(4)[None].to(x.device).expand(ROWS, 4)) * 2,
    "to the host and back": lambda x, w: ((y := x * 2).to("cpu", torch.float64), y.cpu().to(x.device, torch.bfloat16)),
    "of a tensor with data": lambda x, w: x * X,
    "a scripted function that makes a number": lambda x, w: divide_by_root(x),
    "detached, and divided by data": lambda x, w: (x.detach()[:, 0].nonzero(), x * 2),
    "a loss that reads lengths": lambda x, w: F.ctc_loss(
        x.view(ROWS, 1, WIDTH), torch.ones(1, 3, dtype=torch.int64, device=x.device), *torch.tensor([[8], [3]])),
    "known contents": lambda x, w: (x * 2, torch.arange(4, device=x.device)),
    "numbers in a custom function": lambda x, w: Scaled.apply(x) * 2,
    "constants in a custom function's backward pass": lambda x, w: Weighted.apply(x) * 2,
    "a custom function": lambda x, w: Exp.apply(x) * 2,
    "a checkpoint": lambda x, w: checkpoint(lambda a: F.gelu(a @ w), x, use_reentrant=False),
    "vmap": lambda x, w: torch.func.vmap(lambda row: (row * 2).sin())(x),
    "a gradient of torch.func": lambda x, w: torch.func.grad(lambda a: a.sin().sum())(x),
    "autocast": lambda x, w: torch.autocast("cuda", torch.bfloat16)(lambda: F.gelu(x @ w))(),
    "nested": lambda x, w: torch.compile(lambda a: a.sin())(x) @ w,
    "rows put by a mask": put_by_mask,
    "rows by a mask": lambda x, w: (x.sin()[x > 0.5].cos(), x * 2),
}


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", RESULTS)
def test_results_look_as_eager_ones(name):
    function = RESULTS[name]
    assert run_compiled(function)[1] == run(function)[1]
    assert run_compiled(function, mode="infer")[1] == run(function, mode="infer")[1]


def test_the_graph_saves_what_the_partitioner_chooses():
    # eager saves x for sin and sin(x) for cos; the graph saves x alone, from which backward computes both
    eager, compiled = run(lambda x, w: x.sin().cos())[0], run_compiled(lambda x, w: x.sin().cos())[0]
    assert forward_bytes(eager) - forward_bytes(compiled) == BYTES
    call, = compiled.compiled
    assert (call.graphs, call.breaks, call.saved_bytes, call.fwd_kernels, call.bwd_kernels) == (1, (), 0, 1, 1)
    assert call.recomputed == 1  # sin(x); what only backward needs is no recomputation


@pytest.mark.parametrize("backend", ["inductor", "aot_eager_decomp_partition"])
def test_saved_bytes_are_of_what_the_graph_makes(backend):
    # the argument, the weight and its view are handed on too; what is made and its view are one storage
    call, = run_compiled(lambda x, w: ((y := x @ w) @ w.t(), y.t().sin()), {"backend": backend})[0].compiled
    assert call.saved_bytes == BYTES


def test_a_checkpoint_around_all_of_a_graph():
    call, = profile(torch.compile(Checkpointed()), args=(X,), device="h100").compiled
    assert (call.graphs, call.saved_bytes) == (1, 0) and 0 < call.recomputed <= call.operators


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())))

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False)


def test_a_graph_that_ends_inside_of_a_checkpoint_is_told():
    """PyTorch calls that checkpoint as it is written, and runs its graphs again."""
    @torch._dynamo.disable
    def double(x):
        return x * 2

    class Breaks(nn.Module):
        def forward(self, x):
            return double(x)

    model = Checkpointed()
    model.layers.insert(1, Breaks())
    found = profile(torch.compile(model), args=(X,), device="h100")
    assert any(text.startswith("a graph ends inside of a checkpoint (") and text.endswith("memory is told too high")
               for text in found.assumptions)
    assert not any("inside of a checkpoint" in text for text in profile(
        torch.compile(Checkpointed()), args=(X,), device="h100").assumptions)


def test_dynamo_breaks_at_recurrent_layers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.layer = nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH)

        def forward(self, x):
            return self.layer(self.linear(x))[0].sin()

    model = Net()
    call, = profile(torch.compile(model), args=(X,), device="h100").compiled
    assert call.graphs == 2 and "nn.LSTM" in call.breaks[0].reason


def test_a_cell_that_the_compiler_has_no_shapes_of_ends_a_graph():
    call, = run_compiled(lambda x, w: torch.gru_cell(x @ w, x, *[torch.cat([w] * 3)] * 2).sin())[0].compiled
    assert call.graphs == 2 and "_thnn_fused_gru_cell" in call.breaks[0].reason


def test_operators_that_take_a_device():
    call, = run_compiled(lambda x, w: torch.fft.irfft(torch.fft.rfft(x @ w)))[0].compiled
    assert (call.graphs, call.breaks) == (1, ())


def test_what_moves_between_devices_is_copied_in_the_graph(made):
    call, = run_compiled(lambda x, w: (x * torch.arange(WIDTH).to(x.device), x.cpu() * 2), mode="infer")[0].compiled
    (program,) = made
    assert (call.graphs, call.breaks) == (1, ())
    # Inductor makes on the device what a graph makes on the host for it alone (move_constructors_to_gpu)
    assert [kernel.name for kernel in program.kernels] == ["poi_fused__to_copy_arange_mul", "cpp_fused_mul"]
    assert program.source.count(".copy_(") == 1


def test_convolutions_whose_kernels_keep_copies():
    model = nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.ReLU())
    eager, p = (profile(m, args=(torch.rand(4, WIDTH, 16),), device="h100") for m in (model, torch.compile(model)))
    assert p.compiled[0].graphs == 1 and p.kernels < eager.kernels


def make_breaks():
    disabled = torch.compiler.disable(lambda x: x * 3)

    def by_print(x, w):
        y = x @ w
        print(end="")
        return y.sin()

    def by_item(x, w):
        y = x @ w
        return y.sin() if y.sum() > 0 else y

    def by_disabled(x, w):
        return disabled(x @ w).sin()

    def by_graph_break(x, w):
        y = x @ w
        torch._dynamo.graph_break()
        return y.sin()

    return {by_print: "print is called", by_item: "needs the contents of a tensor",
            by_disabled: "torch.compiler.disable keeps the compiler out of make_breaks.<locals>.<lambda>",
            by_graph_break: "torch._dynamo.graph_break()"}


@pytest.mark.parametrize("index", range(4))
def test_a_break_ends_a_graph_and_is_named_with_its_line(index):
    function, reason = list(make_breaks().items())[index]
    options = ProfileOptions(unknown_condition="true")
    p, seen = run_compiled(function, options=options)
    eager, expected = run(function, options=options)
    assert seen == expected and p.fwd_flops == eager.fwd_flops
    call, = p.compiled
    broken, = call.breaks
    assert reason in broken.reason and call.graphs == 2
    first = function.__code__.co_firstlineno
    assert broken.source.startswith(f"{__file__}:") and first < int(broken.source.rpartition(":")[2]) < first + 4


def test_fullgraph_refuses_a_break():
    with pytest.raises(InputError, match=r"fullgraph=True.*breaks.*test_region.py:\d+: print is called"):
        run_compiled(next(iter(make_breaks())), {"fullgraph": True})
    assert run_compiled(RESULTS["one"], {"fullgraph": True})[0].compiled[0].graphs == 1


def test_backends_are_what_they_are():
    function = RESULTS["one"]
    eager, inductor = run(function)[0], run_compiled(function)[0]

    def mine(graph, inputs):
        return graph.forward

    for backend in ("eager", mine):
        p = run_compiled(function, {"backend": backend})[0]
        assert (forward_bytes(p), p.fwd_flops, p.bwd_flops) == (forward_bytes(eager), eager.fwd_flops, eager.bwd_flops)
        assert not p.compiled
    assert p.assumptions == ("torch.compile(backend='mine'): compiled code runs as it is written, because it is not "
                             "known what this backend does",)
    plain = run_compiled(function, {"backend": "aot_eager"})[0].compiled[0]
    assert (plain.fwd_kernels, plain.saved_bytes) == (0, inductor.compiled[0].saved_bytes)
    assert plain.fwd_extern_kernels == plain.operators


def test_what_inductor_takes_apart_stays_whole_for_others():
    def norm(x, w):
        return F.rms_norm((x @ w).bfloat16(), (WIDTH,))
    p, seen = run_compiled(norm, {"backend": "aot_eager"})
    assert seen == run(norm)[1] and p.compiled[0].graphs == 1


@pytest.mark.parametrize("off", [partial(torch.compiler.set_stance, "force_eager"),
                                 partial(torch._dynamo.config.patch, disable=True)])
def test_the_user_may_turn_the_compiler_off(off):
    def function(x, w):
        return x.sin().cos()
    compiled = torch.compile(function)

    def step(model, optimizer, x):
        with off():
            model(x).backward()
    assert not profile(Around(compiled), args=(X,), step=step, device="h100").compiled


def test_an_error_in_the_function_leaves_everything_as_it_was():
    held = []

    def function(x, w):
        held.append(x.sin())
        raise KeyError("mine")
    compiled = torch.compile(function)
    model = Around(compiled)
    layer, weight = model.layer.weight, model.weight
    for _ in range(2):
        with pytest.raises(Exception, match="mine"):
            profile(model, args=(X,), device="h100")
        assert model.layer.weight is layer and model.weight is weight and weight.grad is None
        assert not torch.compiler.is_compiling() and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        cells = dict(zip(compiled.__code__.co_freevars, compiled.__closure__))
        assert cells["fn"].cell_contents is function
    with pytest.raises(KeyError):
        compiled.__wrapped__(X, weight)


def test_an_error_that_the_model_catches_keeps_what_was_done():
    held = []

    def fail(x, w):
        held[:] = [x.sin()]
        raise KeyError

    def catch(x, w):
        try:
            torch.compile(fail)(x, w)
        except KeyError:
            return held[0] * 2
    compiled, eager = run(catch), run(lambda x, w: x.sin() * 2)
    assert compiled[1] == eager[1] and compiled[0].bwd_flops == eager[0].bwd_flops


def test_two_threads_compile_on_their_own():
    function = torch.compile(RESULTS["one"])
    expected, found = forward_bytes(run(function)[0]), []

    def work():
        found.append(forward_bytes(profile(Around(function), args=(X,), device="h100")))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected, expected]
    assert dict(zip(function.__code__.co_freevars, function.__closure__))["fn"].cell_contents is RESULTS["one"]


def test_threads_that_compile_at_once_leave_torch_as_it_was():
    before, peaks = torch.utils.checkpoint._checkpoint_without_reentrant_generator, {}

    def work(width):  # which no other test compiles, so each is lowered here
        peaks[width] = profile(torch.compile(nn.Linear(width, 2 * width)), torch.rand(4, width),
                               device="h100").peak_allocated_bytes

    threads = [threading.Thread(target=work, args=(width,)) for width in (40, 56, 72, 88)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(peaks) == [40, 56, 72, 88]
    assert torch.utils.checkpoint._checkpoint_without_reentrant_generator is before
    assert "apply" not in vars(torch.utils.checkpoint.CheckpointFunction)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Chain(nn.Sequential):
    def forward(self, x):
        return super().forward(x)


def compile_blocks(model):
    for block in model:
        block.compile()
    return model


def compile_forwards(model):
    for block in model:
        block.forward = torch.compile(block.forward)
    return model


def test_blocks_that_are_alike_are_compiled_once(made):
    p = profile(compile_blocks(nn.Sequential(*[Block() for _ in range(4)])), args=(X,), device="h100")
    assert len(made) == 4  # forward and backward of the first, whose input needs no gradient, and of the others
    products = 2 * 2 * ROWS * WIDTH * 128
    assert [m.fwd_flops > products for m in p.modules.walk() if m.path in ("0", "1", "2", "3")] == [True] * 4
    assert [(row.path, len(row.recompilations)) for row in p.compiled] == [("0", 0), ("1", 0), ("2", 0), ("3", 0)]


WAYS = {"the model": torch.compile, "its blocks": compile_blocks, "their forward functions": compile_forwards}


@pytest.mark.parametrize("way", WAYS)
def test_rows_add_up_and_a_replayed_step_is_the_same(way, replaying_torch):
    p, again = [profile(WAYS[way](nn.Sequential(Block(), Block())), args=(X,), device="h100", optimizer="adamw",
                        reuse=reuse) for reuse in (True, False)]
    for column, total in (("fwd_flops", p.fwd_flops), ("bwd_flops", p.bwd_flops)):
        assert sum(getattr(node, column) for node in p.nodes) == total
    assert sum(node.incremental_bytes for node in p.nodes) == p.nodes[-1].accumulate_bytes
    products = [node for node in p.nodes if "mm" in node.name and "fused" not in node.name]
    assert len(products) == 4
    for node in products:  # each has two products in backward, and the gradient of its bias
        assert 2 * node.fwd_flops <= node.bwd_flops < 2.1 * node.fwd_flops
        assert node.module_path.rpartition(".")[2] in ("up", "down")
    one, other = json.loads(p.to_json()), json.loads(again.to_json())
    assert [name for name in one if one[name] != other[name]] == ["replay"]
    assert [row.replayed for row in p.replay if row.kind == "step"] == [True]


class Partly(nn.Module):
    """A block of many modules, one of which, or a function that it calls, is compiled."""

    def __init__(self, way):
        super().__init__()
        self.up = nn.Linear(16, 16)
        self.down = torch.compile(nn.Linear(16, 16)) if way == "module" else nn.Linear(16, 16)
        self.activation = torch.compile(F.gelu) if way == "function" else F.gelu

    def forward(self, x):
        return x + self.down(self.activation(self.up(x)))


@pytest.mark.parametrize("way", ["module", "function"])
def test_blocks_with_a_compiled_part_are_run(way, replaying_torch):
    runs, asked = [], {"args": (torch.rand(4, 16), ), "device": "h100", "optimizer": "adamw"}
    for reuse in (True, False):
        runs.append(profile(nn.Sequential(*[Partly(way) for _ in range(8)]), **asked, reuse=reuse))
    one, other = [json.loads(p.to_json()) for p in runs]
    assert [name for name in one if one[name] != other[name]] == ["replay"]
    reasons = [row.reason for row in runs[0].replay if row.kind == "block"]
    assert reasons == ["it is compiled"]
    assert sum(row.calls for row in runs[0].compiled) == 8


def test_what_a_graph_gives_is_ordered_as_it_was_made_not_as_python_reuses_ids(monkeypatch):
    """A tensor that is made where another one was has its id, and would have its turn."""
    orders = []

    def close(end, live, given):
        orders.append([tensor.shape[0] for tensor in live])
        return found(end, live, given)

    def function(x, weight):
        freed = [x.new_zeros(1) for _ in range(40)]
        first = x.new_zeros(1)
        del freed
        return [first, *(x.new_zeros(count) for count in range(2, 41))]

    found = GraphEnd.close
    monkeypatch.setattr(GraphEnd, "close", close)
    profile(Around(torch.compile(function)), X, mode="infer", device="h100")
    assert orders and all(order == list(range(1, 41)) for order in orders)


def test_asynchronous_tensor_parallelism_is_told_not_to_be_followed():
    p = profile(torch.compile(Block(), options={"_micro_pipeline_tp": True}), args=(X,), device="h100", mode="infer")
    assert any("asynchronous tensor parallelism" in line for line in p.assumptions)


def test_compiled_autograd_is_told_not_to_be_followed():
    def step(model, optimizer, x):
        with torch._dynamo.compiled_autograd._enable(torch.compile()):
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    p = profile(nn.Sequential(Block()), args=(X,), device="h100", optimizer="sgd", step=step)
    assert "compiled autograd is not followed: each backward graph runs by itself, as without it" in p.assumptions


def test_a_function_that_was_compiled_before_the_garbage_collector_froze_all_objects():
    apply = torch.compile(lambda x, weight: F.gelu(x @ weight))
    gc.collect()
    gc.freeze()
    p = profile(Around(apply), torch.rand(ROWS, WIDTH), device="h100")
    assert [row.graphs for row in p.compiled] == [1] and gc.get_freeze_count()


def test_nothing_is_searched_for_a_function_without_the_compiler_that_no_compiled_one_calls(monkeypatch):
    class Noting(TorchDispatchMode):  # PyTorch keeps the compiler out of its method
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def forward(x, weight):
        with Noting():
            return F.gelu(x @ weight)

    torch.compile(forward)  # imports Dynamo
    monkeypatch.setattr(gc, "get_referrers", lambda *objects: 1 / 0)
    p = profile(Around(forward), torch.rand(ROWS, WIDTH), device="h100")
    assert p.fwd_macs > 0 and not p.compiled


def test_a_function_that_is_compiled_twice_keeps_the_settings_of_each():
    def apply(x, weight):
        return F.gelu(x @ weight)
    first, second = torch.compile(apply), torch.compile(apply, backend="eager")  # which is no compiled call
    p = profile(Around(lambda x, weight: second(first(x, weight), weight)), X, device="h100")
    assert [row.calls for row in p.compiled] == [1]


def test_a_step_compiled_whole_breaks_at_its_backward_pass():
    def step(model, optimizer, x):
        model(x).backward()
    model, plain = nn.Sequential(Block(), nn.Flatten(0), nn.Linear(ROWS * WIDTH, 1)), {}
    for name, one in (("eager", step), ("compiled", torch.compile(step))):
        plain[name] = profile(model, args=(X,), step=one, device="h100")
    p = plain["compiled"]
    call, = p.compiled
    assert [b.reason for b in call.breaks] == ["a backward pass runs inside"] and call.graphs == 1
    assert p.phases["backward"].allocated_bytes == plain["eager"].phases["backward"].allocated_bytes


def test_hooks_are_called_as_without_a_compiler():
    def build(way):
        model = nn.Sequential(Block())
        model[0].register_forward_hook(lambda module, args, output: told.put("module"))
        model[0].up.weight.register_hook(lambda gradient: told.put("gradient"))
        model[0].up.weight.register_post_accumulate_grad_hook(lambda parameter: told.put("accumulated"))
        return way(model)
    options = ProfileOptions(steps=1)
    take_told()
    for way in (lambda model: model, compile_blocks):
        profile(build(way), args=(X,), options=options, reuse=False)
        assert take_told() == ["module", "gradient", "accumulated"]


def test_a_size_that_changes_compiles_once_more():
    class Sizes(nn.Module):
        def __init__(self, **settings):
            super().__init__()
            self.layer, self.part = nn.Linear(WIDTH, WIDTH), [torch.compile(lambda x: x.sin(), **settings)]

        def forward(self, x):
            return sum(self.part[0](self.layer(x[:rows])).sum() for rows in (16, 32, 48, 48))
    for settings, sizes in (({}, [(32, 16)]), ({"dynamic": True}, []), ({"dynamic": False}, [(32, 16), (48, 32)])):
        p = profile(Sizes(**settings), args=(X,), device="h100")
        assert [r for call in p.compiled for r in call.recompilations] == [
            f"size 0 of tensor 0 is {now}, it was {before}" for now, before in sizes]


@pytest.mark.parametrize("turn, reason", [
    (lambda part: torch.no_grad(), "gradients are not recorded, before recorded"),
    (lambda part: part.eval() and torch.enable_grad(), "its module is in mode eval, before train"),
    (lambda part: part.eval() and torch.no_grad(),
     "gradients are not recorded, before recorded and its module is in mode eval, before train")])
def test_a_mode_that_changes_is_why_it_compiles_again(turn, reason):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Chain(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
            self.part.compile()

        def forward(self, x):
            first = self.part.train()(x)
            with turn(self.part):
                second = self.part(x)
            return first + second
    p = profile(Twice(), args=(X,), device="h100")
    assert [r for row in p.compiled for r in row.recompilations][:1] == [reason]


def test_compiled_optimizers_have_states_as_dynamo_makes_them():
    def make(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        optimizer.step = torch.compile(optimizer.step)
        return optimizer
    eager = profile(nn.Sequential(Block()), args=(X,), device="h100", optimizer="momentum")
    p = profile(nn.Sequential(Block()), args=(X,), device="h100", optimizer=make)
    assert p.optimizer_bytes == eager.optimizer_bytes
    assert p.phases["optimizer"].allocated_bytes == eager.phases["optimizer"].allocated_bytes


def test_fused_optimizers_are_kept_from_the_compiler():
    """Dynamo disables them: ``TorchPatcher`` of torch/_dynamo/eval_frame.py."""
    def make(parameters):
        optimizer = torch.optim.AdamW(parameters, fused=True)
        optimizer.step = torch.compile(optimizer.step)
        return optimizer
    eager, p = [profile(nn.Sequential(Block()), args=(X,), device="h100", optimizer=one)
                for one in (lambda parameters: torch.optim.AdamW(parameters, fused=True), make)]
    row, = p.compiled
    assert (row.function, row.graphs) == ("Adam.step", 0)
    assert [b.reason for b in row.breaks] == ["torch.compiler.disable keeps the compiler out of _fused_adam"]
    assert p.phases["optimizer"] == eager.phases["optimizer"]


def test_what_python_holds_is_told_from_what_autograd_does():
    with MetaTensorMode():
        x = torch.rand(3, device="cuda", requires_grad=True)
        y = x * 2
        saved = y.sin()
        with torch._C.DisableTorchFunction():
            assert not is_held(y)  # but for this variable
            other = y
            assert is_held(y)
            identity, node = id(y), saved.grad_fn
            exchange(y, torch.zeros(5))
            assert id(other) == identity and other.shape == (5,) and node is saved.grad_fn
    gc.collect()


def test_the_gradient_of_a_sum_outside_of_the_graph_is_copied_into_the_layout_that_backward_was_made_for():
    model, x = nn.Linear(256, 256), torch.rand(4096, 256)  # a result of 4 MiB
    peaks = [profile(m, x, loss_fn=lambda y: y.sum(), device="h100").step_phases["backward"].peak_allocated_bytes
             for m in (model, torch.compile(model))]
    assert 0 <= peaks[1] - peaks[0] < 2**20


class UsesFirst(nn.Module):
    """Uses the first result of a compiled function; autograd gives zeros, contiguous, for what another would get."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.functions = nn.Linear(WIDTH, WIDTH), [torch.compile(function)]

    def forward(self, x):
        return self.functions[0](self.layer(x))[0].square().sum()


@pytest.mark.parametrize(("second", "is_as_output", "copies"), [
    (lambda h: (h + 1).t(), True, 1), (lambda h: (h + 1).t(), False, 0),
    # whose elements share memory, which torch looks at from 2.13 on
    (lambda h: h.sum(1, keepdim=True).expand(ROWS, 4096), torch.__version__ >= (2, 13), 0)])
def test_the_gradient_of_a_result_is_copied_where_it_is_not_laid_out_as_backward_expects_it(
        second, is_as_output, copies):
    with torch._functorch.config.patch(guess_tangent_strides_as_outputs=is_as_output):
        p = profile(UsesFirst(lambda h: (h * 2, second(h))), args=(X,), device="h100")
    assert sum(o.calls for o in p.operators if o.operator == "aten.copy_.default") == copies


@pytest.mark.skipif(not hasattr(torch.autograd.function.BackwardCFunction, "apply_boxed"),
                    reason="before torch 2.13 autograd holds the gradients that it gives a node until the node has run")
def test_the_gradient_of_a_result_is_let_go_of_when_backward_is_done_with_it():
    class Tall(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.rand(65536, 2048))
            self.first, self.second = nn.Linear(2048, 1024, bias=False), nn.Linear(1024, 1024, bias=False)
            self.functions = [torch.compile(lambda x: self.second(self.first(x).relu()))]

        def forward(self, x):
            return self.functions[0](self.x) * 2

    p = profile(Tall(), args=(X,), device="h100", loss_fn=torch.sum)
    parameters, hidden, workspaces = (512 + 8 + 4) * 2**20, 256 * 2**20, 2 * 32 * 2**20
    # at the last product: the gradient of what relu was given, not that of what the function gave, as large
    assert 0 <= p.phases["backward"].peak_allocated_bytes - (2 * parameters + hidden + workspaces) < 2 * BYTES


@pytest.mark.parametrize(("options", "kept"), [({"wrap_inductor_compiled_regions": True}, 2 * 2**20), ({}, 0)])
def test_a_selective_checkpoint_keeps_what_a_graph_gives_where_it_is_told_of_it(options, kept):
    """That is the sine and its argument, which the graph hands to its backward pass: each of 512 x 512 numbers."""
    if not hasattr(torch._inductor.config, "wrap_inductor_compiled_regions"):
        pytest.skip("this PyTorch tells modes of no graph")
    compiled = torch.compile(torch.sin, options=options)

    class Block(nn.Module):
        def __init__(self, keeps):
            super().__init__()
            self.linear, self.keeps = nn.Linear(512, 512, bias=False), keeps

        def choose(self, context, operator, *args, **kwargs):
            kept = self.keeps and operator is torch._higher_order_ops.inductor_compiled_code
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        def forward(self, x):
            return checkpoint(lambda x: compiled(self.linear(x)).neg(), x, use_reentrant=False,
                              context_fn=lambda: create_selective_checkpoint_contexts(self.choose))

    held = [profile(Block(keeps), args=(torch.empty(512, 512, requires_grad=True),), device="h100",
                    optimizer="sgd").phases["forward"].allocated_bytes for keeps in (True, False)]
    assert held[0] - held[1] == kept


def test_a_selective_checkpoint_around_a_graph_keeps_none_of_the_products_that_are_traced():
    class Pair(nn.Module):  # with products of two shapes, each recomputed in float32
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False)

        def forward(self, x):
            return self.b(self.a(x).float().relu().to(x.dtype))

    class Block(nn.Module):
        def __init__(self, policy):
            super().__init__()
            self.inner, self.policy = torch.compile(Pair().bfloat16()), policy

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False,
                              context_fn=lambda: create_selective_checkpoint_contexts(self.policy))

    x = torch.empty(512, 256, dtype=torch.bfloat16, requires_grad=True)
    def keep(kept, context, operator, *args, **kwargs):
        is_kept = operator is torch.ops.aten.mm.default and kept
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    found = [profile(Block(partial(keep, kept)), args=(x,), device="h100", optimizer="sgd") for kept in (True, False)]
    assert len({(p.peak_allocated_bytes, p.bwd_flops, p.phases["backward"].flops) for p in found}) == 1


def test_nothing_is_timed_to_split_a_mixed_reduction():
    model = nn.Sequential(nn.Linear(768, 768), nn.LayerNorm(768))
    found = []
    for tunes in (False, True):  # as the mode max-autotune does
        with torch._inductor.config.patch(coordinate_descent_tuning=tunes):
            found.append(profile(torch.compile(model), (torch.zeros(8192, 768),), device="h100", optimizer=None,
                                 loss_fn=lambda out: out.sum()))
    assert found[0].peak_allocated_bytes == found[1].peak_allocated_bytes
    assert found[0].step_seconds == found[1].step_seconds


def test_kernels_of_several_sizes_are_combined():
    class Sums(nn.Module):  # two results that have nothing to do with each other, of 64 and 4,096 rows
        def forward(self, x, y):
            return x.tanh() + 1, y.exp() * 2

    found = []
    for combines in (False, True):
        with torch._inductor.config.patch(combo_kernels=combines):
            p = profile(torch.compile(Sums()), (torch.zeros(64, 32), torch.zeros(4096, 32)), device="h100",
                        mode="infer")
        found.append((p.phases["forward"].kernels, p.phases["forward"].written_bytes))
    assert found == [(2, 4 * 32 * (64 + 4096)), (1, 4 * 32 * (64 + 4096))]


class Shared(nn.Module):
    """A method is compiled, and called twice under one autocast."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.compiled = torch.compile(self.twice)

    def twice(self, x):
        return self.layer(self.layer(x).relu())

    def forward(self, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.compiled(x).sum() + self.compiled(x).sum()


def test_autocast_keeps_no_casts_from_one_graph_for_another():
    """As in PyTorch, where they would be inputs of the second graph: both are the same."""
    p = profile(Shared(), args=(X,), device="h100")
    row, = p.compiled
    assert (row.function, row.calls, row.graphs, row.recompilations) == ("Shared.twice", 2, 2, ())
    assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize(("oldest", "newest", "said"), [
    ((99, 0), (99, 9), "that of 99.0 to 99.9 is known"),
    ((1, 0), (1, 9), "that of 1.0 to 1.9 is known (ANALYZER_NEWER_COMPILER=1 tries this one)")], ids=["older", "newer"])
def test_compilers_that_are_not_known_are_told_and_what_they_compile_runs_as_written(
        monkeypatch, oldest, newest, said):
    monkeypatch.setattr(region, "OLDEST", oldest)
    monkeypatch.setattr(region, "NEWEST", newest)
    p, eager = (profile(model, args=(X,), device="h100") for model in (torch.compile(Block()), Block()))
    assert p.compiled is None and p.kernels == eager.kernels
    assert any("torch.compile: compiled code runs as it is written" in line and said in line for line in p.assumptions)
    monkeypatch.setenv("ANALYZER_NEWER_COMPILER", "1")
    assert (profile(torch.compile(Block()), args=(X,), device="h100").compiled is not None) == (newest == (1, 9))


def test_the_zero_gradient_of_a_result_without_a_loss_is_of_what_made_the_result():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places, self.head = nn.Embedding(8000, 64), nn.Embedding(128, 64), nn.Linear(64, 8000)

        def forward(self, ids):
            logits = self.head(self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device)))
            return logits, F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    p = profile(torch.compile(Net()), torch.zeros(8, 128, dtype=torch.long), device="h100", loss_fn=lambda out: out[1])
    logits = 4 * 8 * 128 * 8000
    held = {(h.label, h.category): h for h in p.holders if h.bytes >= logits}
    # the product's result, and its zero gradient until the loss's is added to it
    assert {label.partition("_")[0] for label, category in held if category in ("activation", "temporary")} <= {
        "addmm", "per"} and not any("arange" in label for label, _ in held)
    assert any(label.startswith("addmm") and category == "temporary" for label, category in held)

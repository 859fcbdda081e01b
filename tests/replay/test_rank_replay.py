"""Of a sharded model's like blocks some are run: what the log says of the others is what running them says."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from analyzer import ProfileOptions, profile
from analyzer.api import rank
from analyzer.meta.state import NO_EVENT
from analyzer.parallel import world
from analyzer.replay.repeat import Repeat

pytestmark = pytest.mark.filterwarnings("ignore")
BLOCKS, WIDTH = 12, 64
NO_CHAIN = "no 10 neighbours in one of its lists of modules are alike"


class Block(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index = index
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ReadsIndex(Block):
    def forward(self, x):
        return super().forward(x) * (1 if self.index < 100 else 2)


class HoldsFunction(Block):
    """Its function names a variable that is never set."""

    def __init__(self, index):
        super().__init__(index)
        self.find = lambda: later
        if index < 0:
            later = index


class Store:
    def __init__(self):
        self.kept = []


class FillsStore(Block):
    """What it appends is let go of when the model returns, that of one block after that of another."""

    def forward(self, x, store):
        h = self.norm(x)
        store.kept.append((h, h * 2))
        return x + self.down(F.gelu(self.up(h)))


class Tells(Block):
    def forward(self, x):
        self.aux = self.norm(x).mean()
        return super().forward(x)


class Model(nn.Module):
    def __init__(self, block=Block, count=BLOCKS):
        super().__init__()
        self.embed, self.head = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 100)
        self.blocks = nn.ModuleList([block(i) for i in range(count)])

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class KeepsAll(Model):
    def forward(self, tokens):
        x, store = self.embed(tokens), Store()
        for block in self.blocks:
            x = block(x, store)
        return self.head(x)


class ScalesBetween(Model):
    def forward(self, tokens):
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            scale = torch.ones(i % 2 + 1, device=x.device) * 2
            x = block(x)
        return self.head(x) * scale.sum()


class SumsAux(Model):
    def forward(self, tokens):
        return super().forward(tokens) + sum(block.aux for block in self.blocks)


class GivesAll(Model):
    def forward(self, tokens):
        states = [self.embed(tokens)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return self.head(states[-1]), states


def fsdp2(block=Block, mesh=None, checkpoint=False, prefetch=False, last=True, model=Model, count=BLOCKS, **settings):
    model = model(block, count).cuda()
    if mesh is not None:
        settings["mesh"] = init_device_mesh("cuda", mesh, mesh_dim_names=("replicate", "shard"))
    for i, inner in enumerate(model.blocks):
        if checkpoint:
            model.blocks[i] = inner = checkpoint_wrapper(inner)
        fully_shard(inner, reshard_after_forward=last or i < count - 1, **settings)
    if prefetch:
        for inner, following in zip(model.blocks, model.blocks[1:]):
            inner.set_modules_to_forward_prefetch([following])
    return fully_shard(model, **settings)


def reduced(**settings):
    return fsdp2(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32), **settings)


def tensor_parallel():
    model, mesh = Model().cuda(), init_device_mesh("cuda", (8,), mesh_dim_names=("tensor",))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def sharded_tensor_parallel():
    model, mesh = Model().cuda(), init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "tensor"))
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def fsdp1():
    return FullyShardedDataParallel(Model().cuda(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=0)


def two_groups(parameters):
    parameters = list(parameters)
    return torch.optim.RMSprop([{"params": [p for p in parameters if p.ndim > 1]},
                                {"params": [p for p in parameters if p.ndim < 2], "lr": 1e-4}], foreach=False)


def decaying(parameters):
    return torch.optim.SGD([{"params": [p], "lr": 0.9 ** i} for i, p in enumerate(parameters)])


def accumulate(model, optimizer, tokens):
    for _ in range(2):
        model(tokens).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def run(build, reuse, **settings):
    with world(8):
        return profile(build, args=(torch.zeros(2, 16, dtype=torch.int64),), reuse=reuse,
                       **{"optimizer": "adamw", "device": "h200", **settings})


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("build", "settings"), [
    (lambda: reduced(last=False), {}), (lambda: reduced(mesh=(2, 4)), {}), (lambda: fsdp2(checkpoint=True), {}),
    (fsdp2, {"step": accumulate}), (tensor_parallel, {}), (sharded_tensor_parallel, {}),
    (fsdp2, {"optimizer": two_groups}),
    (fsdp2, {"optimizer": torch.optim.Adagrad}), (fsdp2, {"optimizer": decaying}),
    (lambda: fsdp2(HoldsFunction), {"optimizer": None}), (lambda: fsdp2(FillsStore, model=KeepsAll), {}),
], ids=["last_stays", "hsdp_bf16", "checkpointed", "accumulating", "tensor_parallel", "sharded_tensor_parallel",
        "two_groups", "states_from_the_start", "rate_by_depth", "closure_that_is_not_set", "store_let_go"])
def test_replayed_is_run(build, settings, monkeypatch):
    logs, original = [], rank.build_profile
    monkeypatch.setattr(
        rank, "build_profile", lambda run, **facts: logs.append(run.recorder.log) or original(run, **facts))
    replayed, whole = (run(build, reuse, **settings, options=ProfileOptions(keep_events=True))
                       for reuse in (True, False))
    places = [int(row.path.rpartition(".")[2]) for row in replayed.replay if row.replayed]
    assert places == list(range(3, 3 + len(places))) and len(places) in (5, 6)  # the last block may be another
    assert replayed == whole
    mine, other = map(tables, logs)
    for name, rows in mine.items():
        assert rows == other[name], name


def tables(log):
    """What a log says in rows, storages and events of streams numbered in the order of their births."""
    lives = sorted(log.storages.values(), key=lambda life: life.born)
    number = {life.number: i for i, life in enumerate(lives)}
    events = {NO_EVENT: NO_EVENT}
    return {
        "storages": [(life.nbytes, life.block_bytes, life.address, life.born, life.died, life.born_call, life.died_call,
                      life.step, life.node, life.device, life.phase, life.category, life.requires_grad, life.module,
                      life.label) for life in lives],
        "calls": [(call.signature.op, [str(spec) for spec in (*call.signature.inputs, *call.signature.outputs)],
                   log.group_of(call.signature), [number[n] for n in call.inputs], [number[n] for n in call.outputs],
                   call.step, call.phase, call.module, call.node, call.forward, call.recomputed) for call in log.calls],
        "nodes": [(node.op, node.name, node.target, node.module, [number[n] for n, _ in node.outputs], node.inputs,
                   [number[n] for n in node.reads], node.step) for node in log.nodes],
        "module calls": log.module_calls, "modules": log.modules, "phases": log.phases,
        "allocator": list(log.allocator_events), "peak": (log.peak_bytes, log.peak_event, log.peak_workspace_bytes),
        "streams": [mark._replace(event=events.setdefault(mark.event, len(events))) for mark in log.streams.marks],
        "layouts": {(number[n], shape): placed for (n, shape), placed in log.layouts.items() if n in number}}


def test_what_was_assumed_of_the_run_is_told():
    replayed = run(fsdp2, True, device="mi300x")
    assert any("kernels on mi300x are assumed to be those of CUDA" in text for text in replayed.assumptions)
    assert any(row.replayed for row in replayed.replay)


@pytest.mark.parametrize(("build", "reason"), [
    (lambda: fsdp2(prefetch=True), NO_CHAIN), (fsdp1, NO_CHAIN), (lambda: Model(count=9).cuda(), NO_CHAIN),
    (lambda: fsdp2(model=ScalesBetween), "something else runs between blocks that are skipped"),
    (lambda: fsdp2(Tells, model=SumsAux), "with some of its blocks alone it fails: AttributeError: 'FSDPTells' object "
     "has no attribute 'aux'"),
    (lambda: fsdp2(model=GivesAll), "its blocks differ in the operators that they call"),
])
def test_what_is_not_known_to_be_periodic_is_run(build, reason):
    assert [(row.replayed, row.reason) for row in run(build, True).replay] == [(False, reason)]


def test_a_chain_that_reads_in_what_its_blocks_differ_is_run():
    found = run(lambda: fsdp2(ReadsIndex), True)
    assert found == run(lambda: fsdp2(ReadsIndex), False)
    assert not any(row.replayed for row in found.replay)
    assert {row.reason for row in found.replay if row.kind == "block"} == {
        "its blocks read index, in which they differ"}


def test_many_blocks_are_replayed():
    """Whatever is copied or followed for each of them may not be in each other."""
    replayed, whole = (run(lambda: fsdp2(count=64), reuse, mode="infer", optimizer=None) for reuse in (True, False))
    assert sum(row.replayed for row in replayed.replay) == 64 - 6
    assert replayed == whole


def library_model(name, **settings):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(num_attention_heads=4, hidden_size=32, vocab_size=64, **settings)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def sharded_llama():
    model = library_model("Llama", intermediate_size=64, num_hidden_layers=12, num_key_value_heads=2)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


@pytest.mark.parametrize(("build", "settings", "replayed"), [
    (lambda: library_model("OPT", num_hidden_layers=24, ffn_dim=64, word_embed_proj_dim=32), {}, 18),
    (sharded_llama, {"mode": "infer", "optimizer": None}, 6)], ids=["opt", "cache_in_inference"])
def test_models_of_a_library_are_replayed(build, settings, replayed):
    """By default they fill a cache, whose slot is an attribute in which blocks differ."""
    laps, whole = run(build, True, **settings), run(build, False, **settings)
    assert sum(row.replayed for row in laps.replay) == replayed
    assert laps == whole


def test_what_fails_here_is_not_taken_for_the_models_failure(monkeypatch):
    monkeypatch.setattr(Repeat, "write", lambda self, before: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(fsdp2, True)


def accumulate_and_look(model, optimizer, tokens):
    accumulate(model, optimizer, tokens)
    torch.cuda.memory_allocated()


def test_a_step_that_asks_for_memory_in_use_is_run():
    replayed = run(fsdp2, True, step=accumulate_and_look)
    assert [row.reason for row in replayed.replay] == ["a step asks how much memory is in use, or gives it back"]


def drop_some(model, optimizer, tokens):
    model(tokens).sum().backward()
    model.blocks[2].zero_grad()
    model(tokens).sum().backward()
    optimizer.step()


def test_gradients_of_one_block_that_are_dropped_are_no_others():
    """Those of blocks that were not run would stay."""
    replayed = run(fsdp2, True, step=drop_some)
    assert [row.reason for row in replayed.replay] == ["a gradient is dropped or replaced before the step ends"]
    assert replayed == run(fsdp2, False, step=drop_some)

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

from analyzer import profile
from analyzer.parallel import world
from analyzer.replay.lap.extension import Extension

pytestmark = pytest.mark.filterwarnings("ignore")
BLOCKS, WIDTH = 12, 64


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


@pytest.mark.parametrize(("build", "settings"), [
    (lambda: reduced(last=False), {}), (lambda: reduced(mesh=(2, 4)), {}), (lambda: fsdp2(checkpoint=True), {}),
    (fsdp2, {"step": accumulate}), (sharded_tensor_parallel, {}), (fsdp2, {"optimizer": two_groups}),
    (fsdp2, {"optimizer": torch.optim.Adagrad}), (fsdp2, {"optimizer": decaying}),
    (lambda: fsdp2(HoldsFunction), {"optimizer": None}), (lambda: fsdp2(FillsStore, model=KeepsAll), {}),
], ids=["last_stays", "hsdp_bf16", "checkpointed", "accumulating", "sharded_tensor_parallel", "two_groups",
        "states_from_the_start", "rate_by_depth", "closure_that_is_not_set", "store_let_go"])
def test_replayed_is_run(build, settings):
    replayed, whole = run(build, True, **settings), run(build, False, **settings)
    assert [row.path.rpartition(".")[2] for row in replayed.replay if row.replayed] == [
        str(i) for i in range(4, 9)]
    assert replayed == whole


def test_what_was_assumed_of_the_run_is_told():
    replayed = run(fsdp2, True, device="mi300x")
    assert any("kernels on mi300x are assumed to be those of CUDA" in text for text in replayed.assumptions)
    assert any(row.replayed for row in replayed.replay)


@pytest.mark.parametrize(("build", "reason"), [
    (lambda: fsdp2(ReadsIndex), "its blocks read index, in which they differ"),
    (lambda: fsdp2(prefetch=True), "its blocks prefetch blocks that are named"),
    (fsdp1, "FullyShardedDataParallel holds the blocks' parameters in buffers of its own"),
    (lambda: Model(count=11).cuda(), "no list of 12 or more blocks"),
    (lambda: fsdp2(model=ScalesBetween), "something else runs between blocks that are not run"),
    (lambda: fsdp2(Tells, model=SumsAux), "with some of its blocks alone it fails: AttributeError: 'FSDPTells' object "
     "has no attribute 'aux'"),
    (lambda: fsdp2(model=GivesAll), "a module around the blocks gives what one of them made"),
])
def test_what_is_not_known_to_be_periodic_is_run(build, reason):
    assert [(row.replayed, row.reason) for row in run(build, True).replay] == [(False, reason)]


def test_many_blocks_are_replayed():
    """Whatever is copied or followed for each of them may not be in each other."""
    replayed, whole = (run(lambda: fsdp2(count=64), reuse, mode="infer", optimizer=None) for reuse in (True, False))
    assert sum(row.replayed for row in replayed.replay) == 64 - 7
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
    (lambda: library_model("OPT", num_hidden_layers=24, ffn_dim=64, word_embed_proj_dim=32), {}, 17),
    (sharded_llama, {"mode": "infer", "optimizer": None}, 5)], ids=["opt", "cache_in_inference"])
def test_models_of_a_library_are_replayed(build, settings, replayed):
    """By default they fill a cache, whose slot is an attribute in which blocks differ."""
    laps, whole = run(build, True, **settings), run(build, False, **settings)
    assert sum(row.replayed for row in laps.replay) == replayed
    assert laps == whole


def test_what_fails_here_is_not_taken_for_the_models_failure(monkeypatch):
    monkeypatch.setattr(Extension, "write", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(fsdp2, True)


def accumulate_and_look(model, optimizer, tokens):
    accumulate(model, optimizer, tokens)
    torch.cuda.memory_allocated()


def test_a_step_that_asks_for_memory_in_use_is_run():
    replayed = run(fsdp2, True, step=accumulate_and_look)
    assert [row.reason for row in replayed.replay] == ["a step asks how much memory is in use, or gives it back"]

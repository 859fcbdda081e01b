"""Models of blocks that look alike and may do different things: the graph does what each block does."""
from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from analyzer import MetaTensorMode, symbolic_trace
from analyzer.errors import InputError

from .conftest import assert_equal, run

transformers = pytest.importorskip("transformers")
torchvision = pytest.importorskip("torchvision")

X = torch.linspace(-1, 1, 24).reshape(2, 3, 4)


class Block(nn.Module):
    """Two layers and a weight of its own; subclasses do something else as well."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.first, self.second, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.full((4,), 1.0 + index))

    def body(self, x: Tensor) -> Tensor:
        return self.norm(self.second(F.gelu(self.first(x)))) * self.scale

    def forward(self, x: Tensor) -> Any:
        return x + self.body(x)


class Model(nn.Module):
    """Four blocks, one after the other."""

    def __init__(self, kind: Callable[[int], nn.Module], count: int = 4) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.blocks = nn.ModuleList([kind(i) for i in range(count)])

    def forward(self, x: Tensor) -> Any:
        x = x * self.gain
        for block in self.blocks:
            x = block(x)
        return x


# -- blocks that are alike ---------------------------------------------------------------------------------------------


class Several(Block):
    def forward(self, x: Tensor, *rest: Tensor, twice: bool = False) -> Any:
        return {"x": x + self.body(x), "pair": (x, self.body(x) * (2 if twice else 1)), "plain": 3}


class Parts(Block):
    """Uses some of what a call returns, and leaves a result that nobody asks for."""

    def forward(self, x: Tensor) -> Any:
        a, _, b = self.body(x).split([1, 1, 2], dim=-1)
        self.first(x)
        return x + torch.cat([b, a, a], dim=-1)


class Regions(Block):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.first(x)
        with torch.no_grad():
            z = self.first(x).sum(-1, keepdim=True)
        return x + self.second(y.float()) * z


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2


class Custom(Block):
    def forward(self, x: Tensor) -> Any:
        return x + Twice.apply(self.body(x))  # type: ignore[no-untyped-call]


class Normed(nn.Module):
    """A batch norm that writes to its buffers while it trains, and a rectifier in place."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x))) + x  # type: ignore[no-any-return]


class Dropped(Block):
    """A dropout, which gives its input back where the model does not train: what comes later uses that."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Any:
        y = self.drop(x)
        return self.body(y) + x


class Named(Block):
    """An index that is read by nobody."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.name = f"block {index}"


class InPlaceOnItsOwn(Block):
    def forward(self, x: Tensor) -> Any:
        y = self.body(x)
        y += x
        y[..., 0].mul_(2)
        return y


class NextWrites(Model):
    """What follows a block writes to its output."""

    def forward(self, x: Tensor) -> Any:
        x = x * self.gain
        for block in self.blocks:
            x = block(x)
            x += 1
            x.mul_(0.5)
        return x


class Checkpointed(Model):
    def forward(self, x: Tensor) -> Any:
        x = x * self.gain
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if i != 1 else block(x)
        return x


class SomeWithoutGradients(Model):
    def forward(self, x: Tensor) -> Any:
        x = x * self.gain
        for i, block in enumerate(self.blocks):
            with torch.set_grad_enabled(i > 2):
                x = block(x)
        return x


class Through(Block):
    """Returns what it was given as well."""

    def forward(self, x: Tensor) -> Any:
        return x, self.body(x)


class UsesThrough(Model):
    def forward(self, x: Tensor) -> Any:
        x = x * self.gain
        total = torch.zeros_like(x)
        for block in self.blocks:
            x, y = block(x)
            total = total + y + x
        return total


class Dicts(Model):
    def forward(self, x: Tensor) -> Any:
        x = x * self.gain
        for block in self.blocks:
            out = block(x, x, twice=True)
            x = out["x"] + out["pair"][1] * out["plain"]
        return out


def encoder(index: int) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)


class Wide(nn.Sequential):
    def __init__(self, index: int) -> None:
        super().__init__(*[nn.Linear(4, 4) for _ in range(12)])


class CastsWeight(Block):
    """Casts that give back what they are given."""

    def forward(self, x: Tensor) -> Any:
        return x.float() + self.body(x.to(torch.float32)) * self.scale.float() + self.scale


class WritesBuffer(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        self.mean.mul_(0.5).add_(x.detach().mean((0, 1)))  # type: ignore[operator,union-attr]
        return x + self.body(x) * self.mean


class Closure(Block):
    def forward(self, x: Tensor) -> Any:
        def double(y: Tensor) -> Tensor:
            return y * self.scale

        return x + torch.func.vmap(double)(self.body(x))


ALIKE: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Model(Block),
    "several outputs": lambda: Dicts(Several),
    "parts of results": lambda: Model(Parts),
    "regions inside": lambda: Model(Regions),
    "custom function": lambda: Model(Custom),
    "batch norm": lambda: Model(Normed),
    "dropout": lambda: Model(Dropped),
    "index unread": lambda: Model(Named),
    "in place on its own": lambda: Model(InPlaceOnItsOwn),
    "output written to": lambda: NextWrites(Block),
    "checkpointed": lambda: Checkpointed(Block),
    "grad modes": lambda: SomeWithoutGradients(Block, 6),
    "input passed on": lambda: UsesThrough(Through),
    "torch's own layer, a leaf": lambda: Model(encoder),
    "blocks in blocks": lambda: Model(lambda i: nn.Sequential(Block(i), Block(i)), 2),
    "more blocks in blocks": lambda: Model(lambda i: nn.Sequential(Wide(i), Wide(i)), 2),
    "a function of its own under vmap": lambda: Model(Closure),
    "casts its weight": lambda: Model(CastsWeight),
    "casts its weight, checkpointed": lambda: Checkpointed(CastsWeight),
    "writes a buffer": lambda: Model(WritesBuffer),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("train", [True, False])
def test_alike_blocks(traced_like: Any, name: str, train: bool) -> None:
    torch.manual_seed(0)
    model = ALIKE[name]().train(train)
    traced_like(model, {"x": X}, other={"x": X.flip(0) + 1}, trace_act_ckpt=name == "checkpointed")


# -- blocks that are not -----------------------------------------------------------------------------------------------


class ReadsIndex(Block):
    def forward(self, x: Tensor) -> Any:
        return x + self.body(x) * self.index


class Chance(Block):
    def forward(self, x: Tensor) -> Any:
        return x + self.body(x) if random.random() < 0.5 else x * 2


class ChanceOfTorch(Block):
    def forward(self, x: Tensor) -> Any:
        return x + self.body(x) if torch.rand([]) < 0.5 else x * 2


class Counts(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return x + self.body(x) * self.calls


class Shared:
    """State that several blocks hold."""

    def __init__(self) -> None:
        self.step = 0
        self.seen: list[int] = []


class WritesSharedState(Block):
    state = Shared()

    def __init__(self, index: int) -> None:
        super().__init__(index)
        if index == 0:
            type(self).state = Shared()
        self.shared = type(self).state

    def forward(self, x: Tensor) -> Any:
        self.shared.step += 1
        return x + self.body(x) * (self.shared.step % 3)


class WritesSharedList(WritesSharedState):
    def forward(self, x: Tensor) -> Any:
        self.shared.seen.append(self.index)
        return x + self.body(x) * len(self.shared.seen)


class ReadsSharedState(WritesSharedState):
    def forward(self, x: Tensor) -> Any:
        return x + self.body(x) * self.shared.step


STEPS: list[int] = []


class CountsInAGlobal(Block):
    def forward(self, x: Tensor) -> Any:
        STEPS.append(self.index)
        return x + self.body(x) * (len(STEPS) % 4)  # of as many blocks


class ModelWritesSharedState(Model):
    def forward(self, x: Tensor) -> Any:
        for i, block in enumerate(self.blocks):
            block.shared.step = i // 2  # type: ignore[union-attr]
            x = block(x)
        return x


class WritesInput(Block):
    def forward(self, x: Tensor) -> Any:
        x += 1
        return x + self.body(x)


class RectifiesInput(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        return self.body(self.act(x)) + x


class ReturnsView(Block):
    def forward(self, x: Tensor) -> Any:
        self.body(x)
        return x.transpose(0, 1)


class ReturnsSplit(Block):
    def forward(self, x: Tensor) -> Any:
        return self.body(x).split([2, 2], dim=-1)


class UsesSplit(Model):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = torch.cat(block(x), dim=-1)
        return x


class ReplacesBuffer(WritesBuffer):
    def forward(self, x: Tensor) -> Any:
        self.mean = self.mean * 0.5 + x.detach().mean((0, 1))
        return x + self.body(x) * self.mean


class ReadsBuffer(Block):
    """A size that each block has in a buffer."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("width", torch.tensor(1 + index // 2))

    def forward(self, x: Tensor) -> Any:
        return x + self.body(x)[..., :1] * int(self.width)  # type: ignore[arg-type]


class MakesConstant(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.table = torch.full((4,), float(index))

    def forward(self, x: Tensor) -> Any:
        return x + self.body(x) * self.table


class TakesList(Block):
    def forward(self, x: Tensor, seen: list[Tensor]) -> Any:
        seen.append(x)
        return x + self.body(x)


class GivesList(Model):
    def forward(self, x: Tensor) -> Any:
        seen: list[Tensor] = []
        for block in self.blocks:
            x = block(x, seen)
        return sum(seen) + x


class TakesObject(Block):
    def forward(self, x: Tensor, shared: Shared) -> Any:
        shared.step += 1
        return x + self.body(x) * shared.step


class GivesObject(Model):
    def forward(self, x: Tensor) -> Any:
        shared = Shared()
        for block in self.blocks:
            x = block(x, shared)
        return x


class KnownOutput(Block):
    def forward(self, x: Tensor) -> Any:
        return x + self.body(x), torch.arange(4)


class UsesKnown(Model):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x, positions = block(x)
            x = x * positions.tolist()[2]
        return x


class Computes(Block):
    """Has a property that calls torch."""

    @property
    def gate(self) -> Tensor:
        return self.scale.sigmoid()

    def forward(self, x: Tensor) -> Any:
        return x + self.body(x) * self.gate


class SharedLayer(Block):
    layer = nn.Linear(4, 4)

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.common = self.layer

    def forward(self, x: Tensor) -> Any:
        return x + self.body(self.common(x))


class OneBlock(Model):
    """The same block again and again."""

    def __init__(self, kind: Callable[[int], nn.Module]) -> None:
        super().__init__(kind)
        self.blocks = nn.ModuleList([self.blocks[0]] * 4)


class Tied(Model):
    def __init__(self, kind: Callable[[int], nn.Module]) -> None:
        super().__init__(kind)
        for block in self.blocks:
            block.scale = self.blocks[0].scale  # type: ignore[assignment]


class Frozen(Model):
    def __init__(self, kind: Callable[[int], nn.Module]) -> None:
        super().__init__(kind)
        for block in self.blocks[1:]:
            block.requires_grad_(False)


class UsesTheirWeights(Model):
    """Takes weights of blocks before they do."""

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks[1:]:
            x = x * block.scale
        return super().forward(x)


class FromTwoLines(Model):
    def forward(self, x: Tensor) -> Any:
        x = self.blocks[0](x)
        x = self.blocks[1](x)
        x = self.blocks[2](x)
        return self.blocks[3](x)


class Gradient(Model):
    """Differentiates inside of its forward."""

    def forward(self, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = super().forward(x).sum()
            force, = torch.autograd.grad(y, x, create_graph=self.training)
        return y, force


class ReadsCount(Model):
    """Reads what a copied block would have written."""

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return x * int(self.blocks[3].norm.num_batches_tracked)  # type: ignore[arg-type,union-attr]


class Larger(Block):
    """A block of so many layers that much would be saved if it were traced once."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.rest = nn.ModuleList(nn.Identity() for _ in range(5))
        self.parent: list[nn.ModuleList] = []


class FindsItself(Larger):
    def forward(self, x: Tensor) -> Any:
        return x + self.body(x) * (1 + list(self.parent[0]).index(self) % 2)


class ReadsAnAttributeOfItsWeight(Larger):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.scale.factor = 1 + index % 2  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Any:
        return x + self.body(x) * self.scale.factor  # type: ignore[attr-defined]


def with_parents(kind: Callable[[int], nn.Module]) -> nn.Module:
    model = Model(kind, 20)
    for block in model.blocks:
        block.parent.append(model.blocks)  # type: ignore[union-attr,operator,arg-type]
    return model


def hooked(kind: Callable[[int], nn.Module]) -> nn.Module:
    model = Model(kind)
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda m, args, out, i=i: out * (1 + i))
    return model


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "reads its index": lambda: Model(ReadsIndex),
    "chance of Python": lambda: Model(Chance),
    "chance of torch": lambda: Model(ChanceOfTorch),
    "counts its calls": lambda: Model(Counts),
    "writes shared state": lambda: Model(WritesSharedState),
    "writes a shared list": lambda: Model(WritesSharedList),
    "writes a global list": lambda: Model(CountsInAGlobal),
    "reads shared state": lambda: ModelWritesSharedState(ReadsSharedState),
    "writes its input": lambda: Model(WritesInput),
    "rectifies its input": lambda: Model(RectifiesInput),
    "returns a view": lambda: Model(ReturnsView),
    "returns what a call returned": lambda: UsesSplit(ReturnsSplit),
    "replaces a buffer": lambda: Model(ReplacesBuffer),
    "reads a buffer": lambda: Model(ReadsBuffer),
    "holds a constant": lambda: Model(MakesConstant),
    "fills a list": lambda: GivesList(TakesList),
    "changes an object": lambda: GivesObject(TakesObject),
    "known output": lambda: UsesKnown(KnownOutput),
    "computes a property": lambda: Model(Computes),
    "shared layer": lambda: Model(SharedLayer),
    "called again": lambda: OneBlock(Block),
    "tied parameter": lambda: Tied(Block),
    "frozen": lambda: Frozen(Block),
    "weights used before": lambda: UsesTheirWeights(Block),
    "called from several lines": lambda: FromTwoLines(Block),
    "differentiated inside": lambda: Gradient(Block),
    "reads what was copied": lambda: ReadsCount(Normed),
    "finds itself through its parent": lambda: with_parents(FindsItself),
    "reads an attribute of its weight": lambda: Model(ReadsAnAttributeOfItsWeight, 20),
    "hooks": lambda: hooked(Block),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
def test_other_blocks(name: str) -> None:
    torch.manual_seed(0)
    model = OTHERS[name]().train()
    random.seed(7)
    state = random.getstate()
    gm = symbolic_trace(model, meta_args={"x": X})
    assert random.getstate() == state
    if name.startswith("chance"):
        return
    inputs = {"x": X.flip(0) + (0 if "buffer" in name else 1)}
    got = run(gm, model, (), inputs)
    for owner in WritesSharedState, WritesSharedList, ReadsSharedState:
        owner.state.step, owner.state.seen = 0, []
    expected = run(model, model, (), inputs)
    # whose runs differ from each other
    if name not in ("counts its calls", "writes shared state", "writes a shared list"):
        for part in expected:
            assert_equal(got[part], expected[part], f"{name} {part}")


class Moves(Model):
    def forward(self, x: Tensor) -> Any:
        x = x * self.gain
        for block in self.blocks:
            x = block(x.to(block.scale.device))  # type: ignore[arg-type,union-attr]
        return x


def test_blocks_on_another_device() -> None:
    with MetaTensorMode():
        model = Moves(Block, 6).cuda()
        model.blocks[3:].to("cuda:1")
        gm = symbolic_trace(model, meta_args={"x": torch.empty(2, 3, 4, device="cuda")})
    moves = [node.args[1].index for node in gm.graph.nodes if node.target == "to"]
    assert moves == [0, 0, 0, 1, 1, 1]


def test_an_error_in_a_model_of_blocks() -> None:
    class Fails(Model):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) @ torch.ones(7, 7)

    with pytest.raises(InputError, match="must have same reduction dim"):
        symbolic_trace(Fails(Block), meta_args={"x": X})


# -- models ------------------------------------------------------------------------------------------------------------

SMALL: dict[str,
            Any] = dict(vocab_size=60, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32,
                        max_position_embeddings=32, bos_token_id=1, eos_token_id=2, pad_token_id=0)
HEADS: dict[str, Any] = dict(num_key_value_heads=1)


def text(kind: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model_class = getattr(transformers, kind)
        found: nn.Module = model_class(model_class.config_class(**settings))
        return found

    return build


def checkpointing(build: Callable[[], nn.Module], reentrant: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model: Any = build()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return model  # type: ignore[no-any-return]

    return make


OPT: dict[str, Any] = dict(vocab_size=60, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, ffn_dim=32,
                           max_position_embeddings=32)
LLAMA = text("LlamaForCausalLM", **SMALL, **HEADS, use_cache=False)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": text("BertForMaskedLM", **SMALL),
    "electra": text("ElectraForPreTraining", **SMALL),
    "albert": text("AlbertModel", **SMALL),
    "opt": text("OPTForCausalLM", **OPT, use_cache=False),
    "opt with layer drop": text("OPTForCausalLM", **OPT, use_cache=False, layerdrop=0.5),
    "bloom": text("BloomForCausalLM", vocab_size=60, hidden_size=16, n_layer=4, n_head=2, use_cache=False),
    "gpt2": text("GPT2LMHeadModel", vocab_size=60, n_embd=16, n_layer=4, n_head=2, n_positions=32,
                  use_cache=False),
    "gpt2 with a cache": text("GPT2LMHeadModel", vocab_size=60, n_embd=16, n_layer=4, n_head=2, n_positions=32),
    "llama": LLAMA,
    "llama with a cache": text("LlamaForCausalLM", **SMALL, **HEADS),
    "llama with hidden states": text("LlamaForCausalLM", **SMALL, **HEADS, use_cache=False,
                                      output_hidden_states=True),
    "llama, checkpointed": checkpointing(LLAMA, False),
    "llama, checkpointed reentrantly": checkpointing(LLAMA, True),
    "mixtral": text("MixtralForCausalLM", **SMALL, **HEADS, num_local_experts=4, use_cache=False),
    "gemma3": text("Gemma3ForCausalLM", **SMALL, **HEADS, head_dim=8, use_cache=False),
    "t5": text("T5ForConditionalGeneration", vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=4, num_heads=2,
                decoder_start_token_id=0, use_cache=False),
    "mamba": text("MambaForCausalLM", vocab_size=60, hidden_size=16, num_hidden_layers=4, state_size=4,
                   use_cache=False),
    "resnet": lambda: torchvision.models.ResNet(torchvision.models.resnet.Bottleneck, [1, 4, 1, 1], num_classes=5),
    "densenet": lambda: torchvision.models.DenseNet(4, (2, 2), 8, num_classes=5),
    "vit": lambda: torchvision.models.VisionTransformer(32, 8, 4, 2, 16, 32, num_classes=5),
    "swin": lambda: torchvision.models.swin_transformer.SwinTransformer([4, 4], 8, [2, 6], [2, 2], [4, 4],
                                                                        num_classes=5),
    "efficientnet": lambda: torchvision.models.efficientnet_b0(num_classes=5),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().train()
    ids = torch.arange(3, 19).reshape(2, 8)
    given: dict[str, Any] = {"input_ids": ids} if hasattr(model, "config") else {"x": torch.rand(2, 3, 32, 32)}
    if name == "t5":
        given["labels"] = ids
    gm = symbolic_trace(model, meta_args=given, trace_act_ckpt="checkpointed" in name)
    if name == "opt with layer drop":  # which draws layers anew in each run
        return
    got, expected = run(gm, model, (), given), run(model, model, (), given)
    for part in expected:
        assert_equal(got[part], expected[part], part)

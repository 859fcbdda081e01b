"""`auto_checkpoint` by the names of the request for it: within the budget, the same step, and undone."""
import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import analyzer
from analyzer.dropins.torch_checkpoint import auto_checkpoint, checkpointed, find_checkpointable, undo_checkpoint
from analyzer.errors import InputError
from analyzer.tools.solver import BlockChoice, InfeasibleBudgetError
from analyzer.tools.solver.block_choice import apply_choices, undo_choices
from tests.solver.plan_model import ResNet
from tests.solver.test_block_plan import assert_equal, take_step

MIB = 2**20


class Layer(nn.Module):
    """One of GPT-2: on a host attention with dropout is two products, on a GPU one kernel."""

    def __init__(self, width=128, heads=4):
        super().__init__()
        self.heads, self.before, self.after = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                             for part in self.attend(self.before(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.1 * self.training, is_causal=True)
        x = x + F.dropout(self.project(mixed.transpose(1, 2).flatten(-2)), 0.1, self.training)
        return x + self.mlp(self.after(x))


class GPT(nn.Module):
    def __init__(self, layers=6, width=128):
        super().__init__()
        self.embed, self.drop = nn.Embedding(100, width), nn.Dropout(0.1)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 100)

    def forward(self, ids):
        x = self.drop(self.embed(ids))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class UNet(nn.Module):
    """Modules by names of their own, in no list, with results that skip over others."""

    def __init__(self, width=8):
        super().__init__()

        def double(wide, out):
            return nn.Sequential(nn.Conv2d(wide, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
                                 nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True))

        self.down1, self.down2 = double(3, width), double(width, 2 * width)
        self.middle = double(2 * width, 2 * width)
        self.up2, self.up1 = double(4 * width, width), double(2 * width, width)
        self.head, self.drop = nn.Conv2d(width, 2, 1), nn.Dropout2d(0.2)

    def forward(self, x):
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        x = F.interpolate(self.middle(F.max_pool2d(two, 2)), scale_factor=2)
        x = F.interpolate(self.up2(torch.cat([x, two], 1)), scale_factor=2)
        return self.head(self.drop(self.up1(torch.cat([x, one], 1))))


MODELS = {"gpt": (GPT, lambda n: torch.randint(0, 100, (n, 64)), 64, "60%"),
          "resnet": (ResNet, lambda n: torch.rand(n, 3, 32, 32), 256, "60%"),
          "unet": (UNet, lambda n: torch.rand(n, 3, 64, 64), 64, "80%")}


def saved_bytes(model, x):
    """What autograd saves of a forward pass of a copy outside of checkpoints, each memory once."""
    found = {}

    def pack(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        copy.deepcopy(model)(x)  # statistics of batch norms are changed there
    return sum(found.values())


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_within_the_budget_is_the_same_step(name):
    make, make_inputs, size, budget = MODELS[name]
    torch.manual_seed(0)
    model, x, small = make(), make_inputs(size), make_inputs(4)
    model.register_forward_hook(lambda module, args, output: output * 1.0)
    expected, saved = take_step(model, small), saved_bytes(model, small)
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    keys, flags = list(model.state_dict()), [module.training for module in model.modules()]

    assert auto_checkpoint(model, x, memory_budget=budget, optimizer="adamw", device="a100") is model
    plan = model.checkpoint_plan
    assert 0 < len(plan.choices) <= len(find_checkpointable(model))
    assert all(c.runs_again and not (c.keeps or c.skips or c.offloads or c.offloads_input) for c in plan.choices)
    assert plan.planned.peak_reserved_bytes <= plan.budget_bytes < plan.plain.peak_reserved_bytes
    assert plan.planned.recompute_flops > 0 == plan.plain.recompute_flops
    found = analyzer.profile(model, x, optimizer="adamw", device="a100")
    assert (found.peak_allocated_bytes, found.recompute_flops) == (
        plan.planned.peak_allocated_bytes, plan.planned.recompute_flops)
    assert list(model.state_dict()) == keys and [module.training for module in model.modules()] == flags
    assert_equal(take_step(model, small), expected)
    assert saved_bytes(model, small) < saved
    assert_equal(take_step(copy.deepcopy(model), small), expected)

    assert undo_checkpoint(model) is model
    assert {path: dict(vars(module)) for path, module in model.named_modules()} == before
    assert_equal(take_step(model, small), expected)
    assert saved_bytes(model, small) == saved


def test_fewer_checkpoints_would_not_do():
    model, x = GPT(4), torch.randint(0, 100, (64, 128))
    plan = auto_checkpoint(model, x, memory_budget="65%", device="a100").checkpoint_plan
    undo_checkpoint(model)
    paths = find_checkpointable(model)
    assert paths == [f"layers.{i}" for i in range(4)] and 1 < len(plan.choices) < 4
    for fewer in itertools.combinations(paths, len(plan.choices) - 1):
        choices = [BlockChoice(path, True) for path in fewer]
        apply_choices(model, choices, "")
        options = analyzer.ProfileOptions(capacity_bytes=plan.budget_bytes)
        assert analyzer.profile(model, x, device="a100", options=options).out_of_memory is not None
        undo_choices(model, choices, "")


def test_a_saved_model_keeps_its_checkpoints_and_loses_them_when_undone():
    torch.manual_seed(0)
    model, x = GPT(), torch.randint(0, 100, (4, 64))
    expected, plain = take_step(model, x), pickle.dumps(model)
    auto_checkpoint(model, torch.zeros(32, 64, dtype=torch.long, device="meta"), memory_budget=0.6, device="a100")
    loaded = pickle.loads(pickle.dumps(model))
    assert loaded.checkpoint_plan == model.checkpoint_plan
    assert_equal(take_step(loaded, x), expected)
    assert "forward" in vars(loaded.layers[0]) and "forward" not in vars(undo_checkpoint(loaded).layers[0])
    unsaved = pickle.loads(pickle.dumps(undo_checkpoint(model)))
    assert vars(unsaved.layers[0]).keys() == vars(pickle.loads(plain).layers[0]).keys()


def test_checkpoints_last_for_a_with():
    model, x = GPT(), torch.zeros(32, 64, dtype=torch.long)
    with pytest.raises(ValueError, match="of the user"):
        with checkpointed(model, x, memory_budget="60%", device="a100") as planned:
            assert planned is model and model.checkpoint_plan.choices
            raise ValueError("of the user")
    assert not any("forward" in vars(module) for module in model.modules()) and not hasattr(model, "checkpoint_plan")


def test_where_the_budget_is_met_nothing_is_changed():
    model = GPT()
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    auto_checkpoint(model, torch.zeros(32, 64, dtype=torch.long), memory_budget="8GB")
    plan = vars(model).pop("checkpoint_plan")
    assert plan.choices == () and plan.plain == plan.planned and plan.device == "h200"
    assert {path: dict(vars(module)) for path, module in model.named_modules()} == before


def test_the_least_budget_is_told_and_can_be_had():
    model, x = GPT(), torch.zeros(32, 64, dtype=torch.long)
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    with pytest.raises(InfeasibleBudgetError, match=(
            r"auto_checkpoint\(GPT\): memory_budget='10MB': no plan of GPT stays within 9\.54 MiB; the least that "
            r"one takes is ([\d,]+) bytes \([\d.]+ MiB\)")) as error:
        auto_checkpoint(model, x, memory_budget="10MB", device="a100", optimizer=torch.optim.SGD(model.parameters()))
    assert {path: dict(vars(module)) for path, module in model.named_modules()} == before
    least = int(str(error.value).rpartition("takes is ")[2].partition(" ")[0].replace(",", ""))
    auto_checkpoint(model, x, memory_budget=least, device="a100", optimizer="sgd")
    assert model.checkpoint_plan.planned.peak_reserved_bytes == least


class Refusing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, x):
        self.layers(x)
        raise RuntimeError("the model's own")


def test_after_an_error_the_model_is_as_it_was():
    model = Refusing()
    with pytest.raises(RuntimeError, match="the model's own"):
        auto_checkpoint(model, torch.rand(2, 8, 128), memory_budget="50%", device="a100")
    assert not any("forward" in vars(module) for module in model.modules()) and not hasattr(model, "checkpoint_plan")


@pytest.mark.parametrize("make, more, told", [
    (GPT, {"sample_input": None}, "auto_checkpoint(GPT): give sample_input=..., as memory depends on sizes; tensors on "
                                  "'meta' will do"),
    (GPT, {"memory_budget": "8 elephants"}, "budget='8 elephants': write bytes, as an int or as text such as '70GiB'"),
    (GPT, {"memory_budget": 1.5}, "budget=1.5: a share of the activations' memory is above 0 and at most 1; give bytes "
                                  "as an int or as text such as '24GiB'"),
    (GPT, {"blocks": ["layers.9"]}, "plan_blocks(GPT): GPT has no module 'layers.9', which the plan is for"),
    (lambda: nn.Linear(2, 2), {}, "auto_checkpoint(Linear): no module in it holds two others or more; name those that "
                                  "may be checkpointed with blocks=['layers.0', 'layers.1']"),
    (lambda: GPT, {}, "auto_checkpoint(type): takes a torch.nn.Module"),
    (lambda: torch.compile(GPT()), {}, "auto_checkpoint(OptimizedModule): is under torch.compile, which plans by "
     "itself: set torch._functorch.config.activation_memory_budget (`analyzer.tools.solver.find_memory_budget` says to "
     "what)")])
def test_what_cannot_be_planned_is_refused(make, more, told):
    with pytest.raises(InputError) as error:
        auto_checkpoint(make(), **{"sample_input": torch.zeros(2, 8, dtype=torch.long), "memory_budget": "8GB",
                                   "device": "a100", **more})
    assert str(error.value) == told


def test_a_plan_is_made_once_and_undone_once():
    model, x = GPT(2), torch.zeros(2, 8, dtype=torch.long)
    auto_checkpoint(model, x, memory_budget="8GB", device="a100")
    with pytest.raises(InputError, match=r"\(GPT\): the model is under a plan already; undo_checkpoint\(model\)"):
        auto_checkpoint(model, x, memory_budget="8GB", device="a100")
    undo_checkpoint(model)
    with pytest.raises(InputError, match=r"^undo_checkpoint\(GPT\): the model is under no plan of auto_checkpoint$"):
        undo_checkpoint(model)


def test_candidates_are_blocks_and_the_smallest_modules_that_hold_others():
    assert find_checkpointable(UNet()) == ["down1", "down2", "middle", "up2", "up1"]
    both = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), GPT(2), nn.Linear(2, 2))
    assert find_checkpointable(both) == ["0", "1.layers.0", "1.layers.1"]
    both.append(both[0])  # the same once more
    assert find_checkpointable(both) == ["0", "1.layers.0", "1.layers.1"]

"""Which blocks are like an earlier one, and in what they may differ."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from analyzer.replay.isomorph import find_isomorphs

from .block_model import Block, Stack


def stack(change=lambda block: None, count=4):
    """Blocks of which the third was changed."""
    model = Stack(Block(i) for i in range(count))
    change(model.blocks[2])
    return model


def twins_of(model):
    places = {id(module): path for path, module in model.named_modules()}
    found = find_isomorphs(model, lambda module: False, lambda blocks, leaves: blocks >= 3)
    return {places[id(isomorph.block)]: isomorph.differing for isomorph in found}


EQUAL = {"blocks.1": {(0, "index")}, "blocks.2": {(0, "index")}, "blocks.3": {(0, "index")}}


def test_blocks_that_differ_in_a_number():
    assert twins_of(stack()) == EQUAL
    (isomorph, *_) = find_isomorphs(stack(), lambda module: False, lambda blocks, leaves: True)
    assert [type(m).__name__ for m in isomorph.modules] == ["Block", "Linear", "Linear"]
    assert [(t.module, t.name, t.nbytes) for t in isomorph.prototype.tensors] == [
        (1, "weight", 16 * 32 * 4), (1, "bias", 32 * 4), (2, "weight", 16 * 32 * 4), (2, "bias", 16 * 4)]


def transposed(block):
    block.up.weight = nn.Parameter(torch.zeros(16, 32).T)


def part_of_a_larger_one(block):
    block.up.weight = nn.Parameter(torch.zeros(64, 16)[:32])


def renamed(block):
    block.other = block.__dict__.pop("factor")


def without_bias(block):
    block.up.bias = None


@pytest.mark.parametrize("change", [
    lambda block: block.eval(), lambda block: block.half(), lambda block: block.up.requires_grad_(False),
    without_bias, transposed, part_of_a_larger_one, renamed,
    lambda block: block.register_forward_hook(lambda *args: None),
    lambda block: block.up.register_forward_pre_hook(lambda *args: None),
    lambda block: block.up.weight.register_hook(lambda grad: grad),
    lambda block: block.up.weight.register_post_accumulate_grad_hook(lambda p: None),
    lambda block: setattr(block, "cache", [1]), lambda block: setattr(block, "scale", torch.ones(1)),
    lambda block: setattr(block, "friend", nn.ReLU()),
    lambda block: setattr(block, "config", object()), lambda block: block.register_buffer("steps", torch.zeros(())),
    lambda block: setattr(block, "up", nn.Linear(16, 48)),
    lambda block: setattr(block, "down", nn.Sequential(nn.Linear(32, 16))),
])
def test_a_block_that_is_another(change):
    model = stack(change, count=5)
    assert twins_of(model) == {"blocks.1": {(0, "index")}, "blocks.3": {(0, "index")}, "blocks.4": {(0, "index")}}


def test_first_blocks_that_cannot_be_compared():
    """What a borrowed module holds instead of its own is no isomorph's."""
    for value in (torch.ones(1), nn.ReLU(), (1, torch.ones(1))):
        model = Stack(Block(i) for i in range(4))
        for block in model.blocks:
            object.__setattr__(block, "thing", value)
        assert twins_of(model) == {}


def test_settings_that_all_share_are_no_difference():
    model, config = Stack(Block(3) for _ in range(4)), object()
    for block in model.blocks:
        block.config, block.shape = config, (1, 2)
    assert twins_of(model) == {"blocks.1": set(), "blocks.2": set(), "blocks.3": set()}
    model.blocks[1].shape = (1, 2.0)  # equal, and not the same
    assert twins_of(model) == {"blocks.1": {(0, "shape")}, "blocks.2": set(), "blocks.3": set()}


def test_what_somebody_else_holds_is_no_twins():
    model = stack(count=6)
    model.blocks[2].up.weight = model.blocks[1].up.weight                 # tied
    model.head = nn.Linear(16, 32)
    model.head.weight.data = model.blocks[3].up.weight.data               # one storage
    model.again = nn.ModuleList([model.blocks[4].down])                   # a module in two places
    assert twins_of(model) == {}                                          # of one left there is no third
    model = stack(count=8)
    model.head = model.blocks[3].up
    assert sorted(twins_of(model)) == ["blocks.1", "blocks.2", "blocks.4", "blocks.5", "blocks.6", "blocks.7"]


def test_too_few_are_none():
    assert twins_of(Stack(Block(i) for i in range(2))) == {}
    # (4 - 2) x 2
    assert find_isomorphs(stack(), lambda module: False, lambda blocks, leaves: (blocks - 2) * leaves > 4) == []
    assert find_isomorphs(stack(), lambda module: type(module) is Block, lambda blocks, leaves: True) == []


def test_modules_that_hold_themselves():
    model = Stack(Block(i) for i in range(4))
    for block in model.blocks:
        block._modules = {"self": block, **block._modules}
    assert twins_of(model) == {}


def test_what_changed_is_found_and_put_back():
    model = stack()
    isomorph = find_isomorphs(model, lambda module: False, lambda blocks, leaves: True)[1]
    block = isomorph.block
    before = dict(block.__dict__)
    weight = block.up.weight
    for change in (lambda: setattr(block, "index", 7), lambda: setattr(block, "new", 1),
                   lambda: delattr(block, "factor"), lambda: renamed(block),
                   lambda: block.up._forward_hooks.update({1: print}),
                   lambda: setattr(block.up, "weight", nn.Parameter(torch.zeros(32, 16))),
                   lambda: setattr(block, "up", nn.Linear(16, 32)), lambda: block.register_buffer("b", torch.zeros(1)),
                   lambda: block.eval(), lambda: setattr(block, "__dict__", dict(block.__dict__, index=9))):
        assert isomorph.is_unchanged()
        change()
        assert not isomorph.is_unchanged()
        isomorph.put_back()
        assert isomorph.is_unchanged()
        assert block.__dict__ == before and list(block.__dict__) == list(before)
        assert block.up.weight is weight and not block.up._forward_hooks

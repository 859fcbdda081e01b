"""Checkpoints that keep some results: which products are run again in backward, by a count of them."""
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from analyzer.tools.job.checkpoint import checkpoint_some
from analyzer.tools.job.plan import Checkpoints, TrainingPlan

_LAYERS = 4


class _Products(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return operator(*args, **kwargs or {})


def _count(checkpoints: Checkpoints, every: int) -> tuple[int, torch.Tensor]:
    """Products of a backward pass, and a gradient."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=_LAYERS,
                                         num_attention_heads=2, num_key_value_heads=2, vocab_size=64)).train()
    if checkpoints != "none":
        checkpoint_some(model, TrainingPlan(model="", micro_batch=1, length=8, checkpoints=checkpoints,
                                            checkpoint_every=every))
    tokens = torch.arange(8).unsqueeze(0)
    loss = model(input_ids=tokens, labels=tokens).loss
    with _Products() as products:
        loss.backward()
    gradient = model.model.embed_tokens.weight.grad
    assert gradient is not None
    return products.count, gradient


@pytest.mark.parametrize(("checkpoints", "every", "again"), [("operators", 1, 3 * _LAYERS), ("operators", 2, 3 * 2)])
def test_every_second_product_is_run_again(checkpoints: Checkpoints, every: int, again: int) -> None:
    """Of a layer's seven products those of keys, of attention's output and of the MLP's second half are even."""
    usual, gradient = _count("none", 1)
    found, same = _count(checkpoints, every)
    assert found - usual == again
    assert torch.equal(gradient, same)


def test_of_two_blocks_one_is_run_again() -> None:
    """All of the last product's inputs are there before it runs, so that the run ends before or behind it."""
    usual, gradient = _count("none", 1)
    found, same = _count("blocks", 2)
    assert found - usual in (6 * 2, 7 * 2)
    assert torch.equal(gradient, same)

"""Models that plans ask for: what trains in them, and their losses."""
from typing import Any

import pytest
import torch

from analyzer.tools.job.build import make_model
from analyzer.tools.job.plan import TrainingPlan


def _tiny_model() -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2))


@pytest.mark.parametrize("task", ["dpo", "kto", "orpo", "policy"])
def test_what_answers_are_compared_with_stops_no_gradient(task: Any) -> None:
    """One of the reference's scores alone has none: their difference was taken without gradients, too."""
    plan = TrainingPlan(model="", task=task, reference="none" if task == "orpo" else "copy", micro_batch=1, length=8,
                        dtype="fp32")
    model = make_model(plan, _tiny_model)
    model(input_ids=torch.ones(2, 8, dtype=torch.int64)).backward()
    assert {path.split(".")[0] for path, p in model.named_parameters() if p.grad is not None} == {"policy"}

"""DeepSpeed's documented way to profile a model in inference. Only the import is another one than in a script for
DeepSpeed:

    from deepspeed.profiling.flops_profiler import get_model_profile

With `analyzer.tools.runtime` it runs on any device and needs no DeepSpeed; functional operators, activations and
backward are told too.
"""
from __future__ import annotations

from typing import Any

import torch

from analyzer.tools.runtime import get_model_profile


def profile_alexnet(batch_size: int = 256) -> tuple[Any, Any, Any]:
    """One tensor of a known shape as the input."""
    import torchvision.models as models

    model = models.alexnet()
    flops, macs, params = get_model_profile(
        model=model,
        input_shape=(batch_size, 3, 224, 224),  # one positional argument
        args=None,
        kwargs=None,
        print_profile=True,
        detailed=True,
        module_depth=-1,      # down to the innermost modules
        top_modules=1,
        warm_up=1,
        as_string=True,
        output_file=None,     # to stdout
        ignore_modules=None,
    )
    return flops, macs, params


def profile_bert(batch_size: int = 4, seq_len: int = 128, **config: Any) -> tuple[Any, Any, Any]:
    """Keyword arguments made by hand, labels among them."""
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(**config))
    tokens = torch.ones(batch_size, seq_len, dtype=torch.int64)
    inputs = {
        "input_ids": tokens, "token_type_ids": torch.zeros_like(tokens), "attention_mask": torch.ones_like(tokens),
        "labels": torch.ones(batch_size, dtype=torch.int64)
    }
    flops, macs, params = get_model_profile(model, kwargs=inputs, print_profile=True, detailed=True)
    return flops, macs, params


if __name__ == "__main__":
    for found in (profile_alexnet(), profile_bert()):
        for name, value in zip(("Number of flops", "Number of MACs", "Number of parameters"), found):
            print(f"{name + ':':<30}{value}")

"""BERT and T5 of Megatron-LM's functional tests (examples/bert/pretrain_bert.py, examples/t5/pretrain_t5.py)."""
from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

Settings = dict[str, Any]
WORDS = {"bert": 30522, "t5": 28996}  #: of bert-large-uncased-vocab.txt and of bert-large-cased-vocab.txt


def build_bert(row: Settings, config: Any, vocabulary: int) -> nn.Module:  # this stage of BERT with its binary head
    from megatron.core import parallel_state
    from megatron.core.models.bert.bert_layer_specs import (
        bert_layer_local_spec,
        get_bert_layer_with_transformer_engine_spec,
    )
    from megatron.core.models.bert.bert_model import BertModel

    local = row["training"]["other_args"].get("--spec") == "local"
    return BertModel(  # type: ignore[no-any-return]
        config, num_tokentypes=2, vocab_size=vocabulary, max_sequence_length=row["model"]["seq_len"],
        transformer_layer_spec=bert_layer_local_spec if local else get_bert_layer_with_transformer_engine_spec(),
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True)


def build_t5(row: Settings, config: Any, vocabulary: int) -> nn.Module:  # encoder and decoder of as many layers each
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model

    impl = "local" if row["training"]["transformer_impl"] == "local" else "transformer_engine"
    layers = config.num_layers
    return T5Model(  # type: ignore[no-any-return]
        config=config, encoder_config=deepcopy(config), vocab_size=vocabulary, max_sequence_length=512,
        transformer_encoder_layer_spec=getattr(t5_spec, f"get_t5_encoder_with_{impl}_block_spec")(layers),
        transformer_decoder_layer_spec=getattr(t5_spec, f"get_t5_decoder_with_{impl}_block_spec")(layers),
        share_embeddings_and_output_weights=True)


def _integers(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64, device="cuda")


def forward_bert(row: Settings, model: Any, finish: Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    """`forward_step` of pretrain_bert.py."""
    b, s = row["training"]["micro_batch"], row["model"]["seq_len"]
    tokens, types, labels, padding = (_integers(b, s) for _ in range(4))
    loss_mask, order = _integers(b, s).float(), _integers(b)
    output = model(tokens, padding, tokentype_ids=types, lm_labels=labels)

    def compute(out: Any) -> tuple[Tensor, dict[str, Tensor]]:
        losses, logits = out
        mask = loss_mask.float()
        loss = torch.sum(losses.float().view(-1) * mask.reshape(-1)) / mask.sum()
        loss = loss + nn.functional.cross_entropy(logits.view(-1, 2).float(), order.view(-1))
        return loss, {"lm loss": loss.detach()}

    return output, compute


def forward_t5(row: Settings, model: Any, finish: Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    """`forward_step` of pretrain_t5.py."""
    given, b = row["training"]["other_args"], row["training"]["micro_batch"]
    source, target = int(given["--encoder-seq-length"]), int(given["--decoder-seq-length"])
    tokens, words, labels = _integers(b, source), _integers(b, target), _integers(b, target)
    loss_mask = _integers(b, target).float()
    if row["training"]["transformer_impl"] == "local":
        masks = [torch.zeros(b, 1, *shape, dtype=torch.bool, device="cuda")
                 for shape in ((source, source), (target, target), (target, source))]
    else:
        one, two = (torch.zeros(b, 1, 1, n, dtype=torch.bool, device="cuda") for n in (source, target))
        masks = [one, two, (two, one)]  # type: ignore[list-item]
    output = model(tokens, words, *masks, lm_labels=labels)
    return output, lambda out: finish(loss_mask, out)

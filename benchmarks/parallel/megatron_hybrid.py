"""Megatron-LM's hybrid models (pretrain_hybrid.py), whose layers follow a pattern: M Mamba, * attention, - an MLP.

Megatron's mixer runs as itself. What it takes from `mamba_ssm` 2.3, whose kernels need Triton, is stood in for by
functions that allocate and keep what those of ops/triton/ssd_combined.py and layernorm_gated.py do.
"""
from __future__ import annotations

import math
from copy import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.parallel.kernel_launch import triton_stand_in

Settings = dict[str, Any]


def _convolve(xbc: Tensor) -> Tensor:
    """`causal_conv1d_fwd_function`, with the copy that its layout needs where a row is no multiple of 8 elements."""
    return torch.empty_like(_aligned(xbc))


def _aligned(x: Tensor) -> Tensor:  # `ensure_stride`
    return x if x.stride(1) % 8 == 0 else x.contiguous()


class _Scan(torch.autograd.Function):
    """`MambaSplitConv1dScanCombinedFn` with neither a norm nor a projection in it: keeps its input and the scan's
    output before the gate, and convolves and scans again in backward. Numbers of each step and head that backward
    makes after its peak are left out.
    """

    @staticmethod
    def forward(ctx: Any, zxbcdt: Tensor, weight: Tensor, bias: Tensor, dt_bias: Tensor, decay: Tensor, skip: Tensor,
                chunk: int, head: int, groups: int) -> Tensor:
        b, length, _ = zxbcdt.shape
        heads = skip.shape[0]
        state = (weight.shape[0] - heads * head) // groups // 2
        ctx.sizes = at = SimpleNamespace(
            parts=[heads * head, weight.shape[0], heads], steps=(b, heads, length), groups=groups, state=state,
            states=(b, math.ceil(length / chunk), heads, head * state), chunk=chunk)
        _z, xbc, _dt = zxbcdt.split(at.parts, dim=-1)
        _mixed = _convolve(xbc)
        _scanned = _scan(xbc, at, zxbcdt.dtype)
        out, before_gate = (zxbcdt.new_empty(b, length, heads * head) for _ in range(2))
        ctx.save_for_backward(zxbcdt, weight, bias, before_gate, decay, skip, dt_bias)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        zxbcdt, weight, bias, before_gate, decay, skip, dt_bias = ctx.saved_tensors
        at = ctx.sizes
        _z, xbc, dt = zxbcdt.split(at.parts, dim=-1)
        _mixed = _convolve(xbc)
        d_zxbcdt, d_xbc = torch.empty_like(zxbcdt), torch.empty_like(xbc)
        _dt = dt.clone()
        states, *_scanned = _scan(xbc, at, torch.float32)
        _gradient = torch.empty_like(gradient)  # before the gate
        d_states = torch.empty_like(states)
        d_states, states = [torch.empty_like(states, dtype=zxbcdt.dtype) for _ in range(2)]
        splits = _count_splits(at)
        shared = (*zxbcdt.shape[:2], splits, at.groups, at.state)
        _d_b, _d_c = [zxbcdt.new_empty(shared, dtype=torch.float32).sum(2) for _ in range(2)]
        products = (*at.states[:2], splits, at.groups, at.chunk, at.chunk)
        _d_products = zxbcdt.new_empty(products, dtype=torch.float32).sum(2)
        del _dt, states, d_states, _scanned, _gradient, _d_b, _d_c, _d_products
        _copies = _aligned(xbc), _aligned(d_xbc), _aligned(d_zxbcdt.split(at.parts, dim=-1)[1])
        return d_zxbcdt, *[torch.empty_like(t) for t in (weight, bias, dt_bias, decay, skip)], None, None, None


def _scan(xbc: Tensor, at: Any, dtype: torch.dtype) -> list[Tensor]:
    """What is alive after a forward scan: the states of chunks as ``dtype``, made of float32 ones, the last ones, each
    step's size and its sums, and products of B and C within chunks.
    """
    steps = [xbc.new_empty(at.steps, dtype=torch.float32) for _ in range(2)]
    made = xbc.new_empty(at.states, dtype=torch.float32)
    passed = xbc.new_empty(at.states, dtype=dtype)
    last = xbc.new_empty(at.states[0], *at.states[2:], dtype=torch.float32)
    del made
    products = xbc.new_empty(*at.states[:2], at.groups, at.chunk, at.chunk, dtype=torch.float32)
    return [passed, last, products, *steps]


def _count_splits(at: Any) -> int:  # into how many parts the heads of a group are summed
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    of_group: int = at.states[2] // at.groups
    per_program: int = max(min(math.ceil(math.prod(at.states[:3]) / processors), of_group), 1)
    return -(-of_group // per_program)


def scan(zxbcdt: Tensor, weight: Tensor, bias: Tensor, dt_bias: Tensor, A: Tensor, D: Tensor, chunk_size: int,
         headdim: int, ngroups: int = 1, **_: Any) -> Tensor:  # `mamba_split_conv1d_scan_combined`
    out: Tensor = _Scan.apply(  # type: ignore[no-untyped-call]
        zxbcdt, weight, bias, dt_bias, A, D, chunk_size, headdim, ngroups)
    return out


class _GroupNorm(torch.autograd.Function):  # `LayerNormFn` of a root mean square of each group
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: int) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        ctx.group, ctx.shape = group, x.shape
        ctx.save_for_backward(flat, weight, flat.new_empty(flat.numel() // group, dtype=torch.float32))
        return torch.empty_like(flat).view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        gradient = gradient.reshape(x.shape).contiguous()
        warps = min(max(ctx.group // 256, 1), 8)
        rows = math.ceil(torch.cuda.get_device_properties(0).multi_processor_count * math.ceil(4 / warps)
                         / (x.shape[1] // ctx.group))
        out = torch.empty_like(x)
        return out.view(ctx.shape), x.new_empty(rows, x.shape[1], dtype=torch.float32).sum(0).to(weight.dtype), None


class RMSNormGated(nn.Module):  # ``mamba_ssm.ops.triton.layernorm_gated.RMSNorm``, called without a gate
    def __init__(self, hidden_size: int, group_size: int, device: Any = None, dtype: torch.dtype | None = None,
                 **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.group_size = group_size

    def forward(self, x: Tensor) -> Any:
        return _GroupNorm.apply(x, self.weight, self.group_size)  # type: ignore[no-untyped-call]


MAMBA: dict[str, dict[str, Any]] = {
    "mamba_ssm": {}, "mamba_ssm.ops": {}, "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNormGated},
    "mamba_ssm.ops.triton.ssd_combined": {"mamba_split_conv1d_scan_combined": scan, "mamba_chunk_scan_combined": None}}


def stages_of(pattern: str, pp: int) -> list[str]:
    """Layers of each stage; a pattern tells the stages, or is cut in ``pp`` alike. What is behind a slash is of tokens
    that are predicted ahead.

    >>> stages_of("M-M*/*-", 2), stages_of("M|-|M|*", 2)
    (['M-', 'M*'], ['M', '-', 'M', '*'])
    """
    pattern = pattern.split("/")[0]
    if "|" in pattern:
        return pattern.split("|")
    many = len(pattern) // pp
    return [pattern[at * many:(at + 1) * many] for at in range(pp)]


def build_hybrid(row: Settings, config: Any, vocabulary: int, chunk: int) -> nn.Module:
    """This rank's part number ``chunk`` of the model. The release has no parts of its own: it is told its layers."""
    with triton_stand_in():
        from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
    from megatron.core import parallel_state
    from megatron.core.ssm.mamba_block import MambaStack

    given = row["training"]["other_args"]
    stages = stages_of(given["--hybrid-layer-pattern"], row["parallel"]["pp"])
    stage = chunk * parallel_state.get_pipeline_model_parallel_world_size()
    stage += parallel_state.get_pipeline_model_parallel_rank()
    vp = chunk if config.virtual_pipeline_model_parallel_size else None
    select = MambaStack._select_layers_for_pipeline_parallel
    MambaStack._select_layers_for_pipeline_parallel = lambda self, layers: (
        sum(map(len, stages[:stage])), list(stages[stage]))
    config = copy(config)
    config.virtual_pipeline_model_parallel_size = None  # its layers ask which part they are of, and are not told
    try:
        model: nn.Module = _model_class()(
            config, mamba_stack_spec, vocabulary, row["model"]["seq_len"], hybrid_override_pattern="".join(stages),
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp),
            share_embeddings_and_output_weights="--untie-embeddings-and-output-weights" not in given,
            position_embedding_type=given.get("--position-embedding-type", "learned_absolute"))
    finally:
        MambaStack._select_layers_for_pipeline_parallel = select
    if config.mtp_num_layers:
        model.mtp = _build_ahead(config)
    return model


def _model_class() -> Any:
    """Megatron's hybrid model with what predicts tokens ahead, as `process_mtp_loss` of August 2026 does it: each of
    its logits are freed before the next ones are made.
    """
    from megatron.core.models.mamba.mamba_model import MambaModel
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, roll_tensor

    class HybridModel(MambaModel):  # type: ignore[misc]
        def forward(self, tokens: Tensor, ids: Tensor, mask: Tensor | None, labels: Tensor,
                    loss_mask: Tensor | None = None) -> Any:
            if not self.config.mtp_num_layers:
                return super().forward(tokens, ids, mask, labels=labels)
            hidden = self.decoder(self.embedding(input_ids=tokens, position_ids=ids), mask)
            hidden = self.mtp(input_ids=tokens, position_ids=ids, hidden_states=hidden, attention_mask=mask,
                              embedding=self.embedding)
            hidden, *ahead = torch.chunk(hidden, 1 + self.config.mtp_num_layers, dim=0)
            later = labels
            for one in ahead:
                later, _ = roll_tensor(later, shifts=-1, dims=-1, cp_group=self.cp_group)
                loss_mask, count = roll_tensor(loss_mask, shifts=-1, dims=-1, cp_group=self.cp_group)
                loss = self.compute_language_model_loss(later, self.output_layer(one)[0])
                hidden = MTPLossAutoScaler.apply(hidden, loss_mask * loss / count)
            return self.compute_language_model_loss(labels, self.output_layer(hidden)[0])

    return HybridModel


def _build_ahead(config: Any) -> nn.Module:
    """Attention and experts, which are one layer of a GPT model, and the same layer for each token ahead."""
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

    layer = specs.get_gpt_layer_with_transformer_engine_spec(config.num_moe_experts, config.moe_grouped_gemm)
    block = MultiTokenPredictionBlock(config, specs.get_gpt_mtp_block_spec(config, layer, True),
                                      pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    block.layers = nn.ModuleList([block.layers[0]] * config.mtp_num_layers)
    return block  # type: ignore[no-any-return]

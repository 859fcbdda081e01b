"""Rows of torchtitan (and of torchao, measured with it), rebuilt by torchtitan's own models and parallelize functions.

The package is that of one release; what its code did otherwise at the commit of a row is a `Code`.
"""
from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce
from torch.nn.attention import SDPBackend

from benchmarks.parallel import kernel_launch
from benchmarks.parallel.titan import cross_entropy

Settings = dict[str, Any]


@dataclass(frozen=True)
class Code:  # what of torchtitan changed with time
    keeps_logits: bool                               #: in float32, until the next are there; to 2024-06-12 (#391)
    one_root: bool                                   #: embedding, norm and output in one group; to 2025-07-28 (#1094)
    saves_cudnn: bool                                #: attention by cuDNN is on the list of what is kept, from 2025-12
    compiled_loss: bool                              #: with compile on, from 2025-04-02
    keeps_root: bool                                 #: gathered until backward, whatever is asked; PyTorch to #154704
    copies_apart: bool                               #: gradients that are reduced; PyTorch to 2024-06-27 (#129721)
    repeats_keys: bool                               #: and values for grouped queries, before attention; to #2259
    norm_in_steps: bool                              #: RMSNorm is no kernel of its own; PyTorch's to 2025-07 (2.9)
    flash: bool                                      #: cuDNN's attention is for Blackwell alone, to 2025-10-09 (#1776)


def code_of(row: Settings) -> Code:  # by the date of the row's commit, and of its PyTorch where that is older
    date = row["source"]["date"]
    torch_date = row.get("software", {}).get("torch_date", date)
    return Code(keeps_logits=date < "2024-06-12", one_root=date < "2025-07-28", saves_cudnn=date >= "2025-12",
                keeps_root=torch_date < "2025-06-06", copies_apart=torch_date < "2024-06-27",
                repeats_keys=date < "2026-02",
                norm_in_steps=torch_date < "2025-07-15",
                flash=date < "2025-10-09" and "B200" not in row["hardware"]["gpu"],
                compiled_loss=bool(row["training"]["compile"]) and (
                    date >= "2025-04-02" or "loss" in str(row["training"]["compile"]).replace("loss not", "")))


def norm_in_steps(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """What PyTorch's rms_norm was made of before it had a kernel (aten/src/ATen/native/layer_norm.cpp of 2.8)."""
    wide = x.float()
    eps = torch.finfo(wide.dtype).eps if norm.eps is None else norm.eps
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).type_as(x) * norm.weight


def repeat_keys(module: nn.Module, args: Any, kwargs: Any) -> Any:  # `repeat_kv` of torchtitan's models
    def repeat(x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        many = x[:, :, :, None].expand(*x.shape[:3], args[0].shape[1] // x.shape[2], x.shape[3])
        return many.reshape(*x.shape[:2], -1, x.shape[3]).transpose(1, 2)

    return (args[0], *[repeat(x) for x in args[1:3]], *args[3:]), {**kwargs, "enable_gqa": False}


def float8_config(told: str) -> Any:  # torchao's of what a row tells of float8
    from torchao.float8 import Float8LinearConfig  # type: ignore[import-untyped]
    recipe = next((name for name in ("rowwise_with_gw_hp", "rowwise") if name in told), None)
    if recipe is not None:
        return Float8LinearConfig.from_recipe_name(recipe)
    if "tensorwise" not in told:
        raise NotImplementedError(f"float8: {told}")
    return Float8LinearConfig(enable_fsdp_float8_all_gather="all-gather" in told)


def is_flex(row: Settings) -> bool:
    return "Flex" in str(row["training"]["attention_kernel"])


def flavor_of(row: Settings) -> tuple[str, str]:  # torchtitan's names of the row's model
    family = row["model"]["family"].lower()
    if "llama-4-scout" in family:
        return "llama4", "17bx16e"
    if "qwen3" in family:
        return "qwen3", row["model"]["family"].partition("-")[2]
    if "debugmodel" in family:
        return "llama3", "debugmodel_flex_attn" if is_flex(row) else "debugmodel"
    if "llama-2" in family:
        return "llama3", "8B"  # to which the row's sizes are given
    return "llama3", row["model"]["family"].rpartition("-")[2]


class Job:  # one rank of a row: its model, and a step of it
    def __init__(self, row: Settings) -> None:
        self.row, self.code = row, code_of(row)
        self.logits: Tensor | None = None
        self.loss: Any = torch.compile(cross_entropy) if self.code.compiled_loss else cross_entropy

    def build(self) -> nn.Module:  # the model parallelized, its weights made, and its optimizer
        from torchtitan.config import JobConfig
        from torchtitan.distributed import ParallelDims, utils
        from torchtitan.protocols import train_spec
        from torchtitan.tools.utils import set_default_dtype

        row, parallel, training = self.row, self.row["parallel"], self.row["training"]
        family, flavor = flavor_of(row)
        spec = train_spec.get_train_spec(family)
        config = JobConfig()
        config.model.name, config.model.flavor = family, flavor
        config.training.seq_len, config.training.local_batch_size = row["model"]["seq_len"], training["micro_batch"]
        shards = parallel["fsdp"]["degree"] // parallel["cp"]
        config.parallelism.data_parallel_shard_degree = shards
        config.parallelism.data_parallel_replicate_degree = parallel["dp_replicate"]
        config.parallelism.tensor_parallel_degree = parallel["tp"]
        config.parallelism.pipeline_parallel_degree = parallel["pp"]
        config.parallelism.context_parallel_degree = parallel["cp"]
        config.parallelism.expert_parallel_degree = parallel["ep"]
        if "reshard_after_forward True everywhere" in parallel["fsdp"]["kind"]:
            config.parallelism.fsdp_reshard_after_forward = "always"
        config.compile.enable, config.compile.components = bool(training["compile"]), ["model"]
        checkpointing = config.activation_checkpoint
        kind = training["activation_checkpointing"]
        checkpointing.mode = next(mode for mode in ("full", "selective", "none") if kind.startswith(mode))
        checkpointing.selective_ac_option = "2" if "every 2nd block" in kind else "op"
        checkpointing.preserve_rng_state = False
        dims = ParallelDims(dp_replicate=parallel["dp_replicate"], dp_shard=shards, cp=parallel["cp"],
                            tp=parallel["tp"], pp=parallel["pp"], ep=parallel["ep"], etp=1,
                            world_size=row["hardware"]["gpus"])
        arguments = copy.deepcopy(spec.model_args[flavor])
        arguments.vocab_size, arguments.n_layers = row["model"]["vocab"], row["model"]["layers"]
        if "Llama-2" in row["model"]["family"]:  # as torchtitan's `llama2_configs` were
            arguments.dim, arguments.n_heads, arguments.n_kv_heads = (
                row["model"][name] for name in ("hidden", "heads", "kv_heads"))
            arguments.multiple_of, arguments.ffn_dim_multiplier = 256, None
        arguments.update_from_config(config)
        with torch.device("meta"), set_default_dtype(torch.float32):
            model = spec.model_cls(arguments)
        for part in model.modules():
            if self.code.norm_in_steps and isinstance(part, nn.RMSNorm):
                part.__dict__["forward"] = functools.partial(norm_in_steps, part)
            if hasattr(part, "sdpa_backends"):
                if self.code.flash:
                    part.sdpa_backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
                if self.code.repeats_keys:
                    part.register_forward_pre_hook(repeat_keys, with_kwargs=True)
        if training.get("float8"):
            from torchao.float8 import convert_to_float8_training
            convert_to_float8_training(model, config=float8_config(training["float8"]),
                                       module_filter_fn=lambda module, name: name != "output")
        parallelize: Any = importlib.import_module(spec.parallelize_fn.__module__)
        shard, kept = parallelize.apply_fsdp, parallelize._op_sac_save_list
        if self.code.one_root:
            parallelize.apply_fsdp = functools.partial(shard_with_one_root, self.code.keeps_root)
        if not self.code.saves_cudnn:
            parallelize._op_sac_save_list = kept - {torch.ops.aten._scaled_dot_product_cudnn_attention.default}
        if "aten.abs" in kind:
            parallelize._op_sac_save_list = parallelize._op_sac_save_list | {torch.ops.aten.abs.default}
        try:
            spec.parallelize_fn(model, dims, config)
        finally:
            parallelize.apply_fsdp, parallelize._op_sac_save_list = shard, kept
        model.to_empty(device="cuda")
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        model.train()
        fused = "fused" in training["optimizer"] and "not fused" not in training["optimizer"]
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1,
                                           fused=fused, foreach=not fused)
        self.dims, self.utils, self.model = dims, utils, model
        return nn.ModuleList([model])  # which takes no arguments: `step` has them

    def inputs(self) -> tuple[Tensor, Tensor]:
        shape = (self.row["training"]["micro_batch"], self.row["model"]["seq_len"] // self.row["parallel"]["cp"])
        ids = torch.zeros(shape, dtype=torch.int64, device="cuda")
        return ids, torch.zeros_like(ids)

    def step(self, *_: Any) -> None:  # `train_step` of torchtitan/train.py
        reduce = reduce_in_own_stream(foreach_reduce) if self.code.copies_apart else foreach_reduce
        with mock.patch.object(_fsdp_param_group, "foreach_reduce", reduce):
            self.train()

    def train(self) -> None:
        self.optimizer.zero_grad()
        context = self.utils.get_train_context(self.dims.tp_enabled)
        for _micro_batch in range(self.row["training"]["grad_accum"]):
            ids, labels = self.inputs()
            masks = {}
            if is_flex(self.row):
                masks["attention_masks"] = self.model.get_attention_masks(ids, SimpleNamespace(eos_id=0))
            with context():
                logits = self.model(ids, **masks)
                if self.code.keeps_logits:
                    logits = self.logits = logits.float()  # by the model itself
                loss = self.loss(logits, labels)
                del logits
                loss.backward()
        self.utils.clip_grad_norm_(list(self.model.parameters()), 1.0, foreach=True, ep_enabled=self.dims.ep_enabled)
        self.optimizer.step()


def reduce_in_own_stream(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """FSDP2's reduction until #129721: gradients are put together in its stream, whose memory no other has again."""
    def reduced(parameters: Any, gradients: Any, group: Any, stream: Any, scatter: Any, *rest: Any) -> Any:
        before = torch.cuda.current_stream()

        class Scatter:
            allocate = staticmethod(scatter.allocate)

            def __call__(self, **arguments: Any) -> Any:
                before.wait_stream(stream)  # for the copies alone
                return scatter(**arguments)

        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            _, *found = reduce(parameters, gradients, group, stream, Scatter(), *rest)
        return None, *found

    return reduced


def shard_with_one_root(keeps_root: bool, model: Any, mesh: Any, param_dtype: torch.dtype, reduce_dtype: torch.dtype,
                        pp_enabled: bool, cpu_offload: bool = False,
                        reshard_after_forward_policy: str = "default") -> None:
    """`apply_fsdp` until #1094: blocks, the last not resharded after its forward pass, and the rest in the root."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    options: Settings = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype)}
    if cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    always = reshard_after_forward_policy == "always"
    last = max(int(name) for name in model.layers)
    for name, block in model.layers.items():
        reshard = always or reshard_after_forward_policy == "default" and not pp_enabled and int(name) < last
        fully_shard(block, **options, reshard_after_forward=reshard)
    fully_shard(model, **options, reshard_after_forward=not (pp_enabled or keeps_root))


def prepare(row: Settings) -> Job:  # a job, in a process started as torchrun would
    with kernel_launch.triton_stand_in():
        importlib.import_module("torchtitan.protocols.train_spec").get_train_spec(flavor_of(row)[0])
    return Job(row)

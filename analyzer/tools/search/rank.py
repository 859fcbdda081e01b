"""One rank of a layout: its parts divided, checkpointed, compiled and sharded as a script would, and its step."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from analyzer.recipe.optimizer import find_optimizer
from analyzer.record.eager import default_loss

from .distributed_optimizer import DistributedOptimizer, ParamBuffer
from .layout import ONE_STAGE, Layout
from .model_parallel import divide_experts, divide_stage
from .stage import Piece, StageNet, Template, list_experts

#: of logits (samples, tokens, vocabulary) and the tokens that follow
Loss = Callable[[Any, Tensor], Tensor]


def causal_loss(logits: Any, labels: Tensor) -> Tensor:
    """As torchtitan/components/loss.py, `cross_entropy_loss`: in float32, labels already shifted."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def make_part(template: Template, part: Piece, layout: Layout, mesh: Any, is_half: bool) -> StageNet:
    """A part of a model as a rank of a layout holds it, in bfloat16 or in float32: float8 and tensor parallel first,
    then checkpoints, then compiled, then sharded, in the order of torchtitan (torchtitan/models/llama3/infra/
    parallelize.py).
    """
    model = template.cut(part)
    stage = StageNet(model, part, template.path.rpartition(".")[0])
    if is_half:
        stage.to(torch.bfloat16)
    blocks = list(model.get_submodule(template.path).children())[:part.blocks] if template.blocks else []
    if layout.precision == "float8":
        compute_in_float8(blocks or [stage])
    if layout.expert > 1:
        stage.experts = divide_experts(blocks, _flatten(mesh, ("expert", "context", "tensor")))
    elif layout.is_distributed and layout.tensor > 1:  # whose states more ranks share than those of what is divided
        stage.experts = [module for block in blocks for _, module in list_experts(block)]
    if layout.tensor > 1:
        divide_stage(template, stage, blocks, mesh["tensor"], layout.sequence_parallel)
    checkpoint_blocks(blocks, layout.checkpointing)
    if layout.compile:
        for block in blocks or [stage]:
            block.compile()
    if layout.is_sharded:
        shard_stage(stage, blocks, layout, mesh, stage.experts if layout.expert > 1 else [])
    stage.to_empty(device="cpu" if layout.offload and layout.is_sharded else "cuda")
    return stage


def compute_in_float8(modules: Sequence[nn.Module]) -> None:
    """Linear layers whose sizes the products take (multiples of 16), as torchtitan's float8 converter filters them."""
    from torchao import float8  # type: ignore[import-untyped, unused-ignore]

    def takes(module: nn.Module, _path: str) -> bool:
        return isinstance(module, nn.Linear) and module.in_features % 16 == module.out_features % 16 == 0

    for module in modules:
        float8.convert_to_float8_training(module, config=float8.Float8LinearConfig.from_recipe_name("rowwise"),
                                          module_filter_fn=takes)


def shard_stage(stage: nn.Module, blocks: Sequence[nn.Module], layout: Layout, mesh: Any,
                experts: Sequence[nn.Module]) -> None:
    """`fully_shard` of each block, and of the rest; the last block is not resharded between its passes. Experts are
    shared by fewer ranks.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {}
    if layout.precision != "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if layout.offload:
        options["offload_policy"] = CPUOffloadPolicy()
    whole = _join(mesh, ("shard", "data", "outer", "expert", "context"))
    gathers_twice = layout.sharding == "fsdp"
    for module in experts:
        fully_shard(module, mesh=_join(mesh, ("outer", )), reshard_after_forward=gathers_twice, **options)
    for block in blocks:
        fully_shard(block, mesh=whole, reshard_after_forward=gathers_twice and block is not blocks[-1], **options)
    fully_shard(stage, mesh=whole, reshard_after_forward=False, **options)


def _join(mesh: Any, names: Sequence[str]) -> Any:
    """The mesh over which `fully_shard` divides, those of ``names`` that there are as one dimension, with the copies'
    dimension before it where there are some.
    """
    from torch.distributed.device_mesh import DeviceMesh

    held = tuple(name for name in names if name in mesh.mesh_dim_names)
    copies = ("replicate", ) if "replicate" in mesh.mesh_dim_names else ()
    if len(held) < 2:
        return mesh[copies + held]
    flat = _flatten(mesh, held)
    return DeviceMesh._concatenate([mesh["replicate"], flat]) if copies else flat


def _flatten(mesh: Any, names: Sequence[str]) -> Any:
    """Those dimensions of a mesh that there are, as one."""
    held = tuple(name for name in names if name in mesh.mesh_dim_names)
    return mesh[held]._flatten("shard" if "tensor" not in held else "experts") if len(held) > 1 else mesh[held]


def checkpoint_blocks(blocks: Sequence[nn.Module], kind: str) -> None:
    """Run blocks again in backward; of ``"selective"`` ones without attention and every second product."""
    options: dict[str, Any] = {} if kind == "blocks" else {"context_fn": _selective_contexts}
    for block in blocks if kind in ("blocks", "selective") else ():
        block.forward = _run_again(block.forward, options)


def _run_again(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """A function of this file, for Dynamo compiles a block from its forward on, and would leave one of torch as it is:
    torchtitan's wrapper of checkpoints is among the modules that it looks at (torch/_dynamo/trace_rules.py).
    """
    def forward_with_checkpoint(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)

    return forward_with_checkpoint


def _selective_contexts() -> Any:
    """As torchtitan/distributed/activation_checkpoint.py, `_apply_op_sac`: every second `mm` is run again."""
    counts = {False: 0, True: 0}
    kept = {torch.ops.aten._scaled_dot_product_efficient_attention.default,
            torch.ops.aten._scaled_dot_product_flash_attention.default,
            torch.ops.aten._scaled_dot_product_cudnn_attention.default,
            torch.ops._c10d_functional.reduce_scatter_tensor.default}

    def choose(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is torch.ops.aten.mm.default:
            counts[ctx.is_recompute] += 1
            return CheckpointPolicy.PREFER_RECOMPUTE if counts[ctx.is_recompute] % 2 == 0 else (
                CheckpointPolicy.MUST_SAVE)
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


class RankJob:
    """One rank of a layout, as `analyzer.profile` takes it: ``build``, ``step`` and ``inputs`` are called in its world.
    ``stages`` are the places of its stages in the pipeline, ``parts`` what each of them holds. ``meshes`` are those of
    other jobs in one world, by their degrees.
    """

    def __init__(self, template: Template, layout: Layout, parts: Sequence[Piece], stages: Sequence[int],
                 sequence: int, is_bare: bool = False, loss: Loss = causal_loss,
                 meshes: dict[Any, Any] | None = None) -> None:
        self.template, self.layout, self.sequence, self.loss = template, layout, sequence, loss
        self.parts, self.stages, self.is_bare = list(parts), list(stages), is_bare
        self.is_half = is_bare or layout.precision == "bf16" or layout.is_distributed
        self.schedule: Any = None
        self.buffers: list[ParamBuffer] = []
        self._meshes = meshes
        self._steps = 0  # that were begun

    def make_mesh(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        lay = self.layout
        shards = {"data": lay.shard, "context": lay.context} if lay.context > 1 else {"shard": lay.shard}
        if lay.expert > 1:  # ranks of one sequence and of one tensor are among those that have different experts
            inner = lay.expert // (lay.context * lay.tensor)
            shards = {"outer": lay.shard // inner, "expert": inner, "context": lay.context}
        sizes = {"pipeline": lay.pipeline, "replicate": lay.replicate, **shards, "tensor": lay.tensor}
        kept = {name: n for name, n in sizes.items() if n > 1 or name == "outer"} or {"shard": 1}
        known, key = {} if self._meshes is None else self._meshes, tuple(kept.items())
        if key not in known:
            known[key] = init_device_mesh("cuda", tuple(kept.values()), mesh_dim_names=tuple(kept))
        return known[key]

    def build(self) -> nn.Module:
        """Make the rank's stages and, in a pipeline, their schedule."""
        lay, self.mesh, self._steps = self.layout, self.make_mesh(), 0
        made = [make_part(self.template, part, lay, self.mesh, self.is_half) for part in self.parts]
        self.model: Any = made[0]
        if lay.is_distributed and not self.is_bare:
            self.buffers = self._make_buffers(made)
        if lay.pipeline > 1:
            self.schedule = self._make_schedule(made)
        elif lay.sharding in ("ddp", "zero1") and lay.replicate > 1:
            self.model = nn.parallel.DistributedDataParallel(made[0], gradient_as_bucket_view=True)
            return nn.ModuleList([self.model])
        return nn.ModuleList(made)  # which takes no arguments: `step` has them

    def _make_schedule(self, made: Sequence[StageNet]) -> Any:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        lay = self.layout
        group = self.mesh["pipeline"].get_group()
        head: Any = self.template.model.get_submodule(self.template.behind[-1])
        tokens = torch.empty(lay.micro_batch, self._length(), dtype=torch.int64, device="meta")
        hidden, logits = self._hidden(), self._sent(self._length(), head.weight.shape[0])
        stages = [PipelineStage(stage, index, lay.stages, torch.device("cuda"), group=group,
                                input_args=(tokens if stage.part.first else hidden,),
                                output_args=(logits if stage.part.last else hidden,))
                  for stage, index in zip(made, self.stages)]
        cls: Any = get_schedule_class(lay.schedule)
        return cls(stages[0] if lay.schedule in ONE_STAGE else stages, lay.micro_batches, loss_fn=self.loss)

    def _length(self) -> int:
        return self.sequence // self.layout.context

    def _hidden(self) -> Tensor:
        embedding: Any = self.template.model.get_submodule(self.template.before[0])
        length = self._length() // (self.layout.tensor if self.layout.sequence_parallel else 1)
        return self._sent(length, embedding.weight.shape[-1])

    def _sent(self, length: int, width: int) -> Tensor:
        return torch.empty(self.layout.micro_batch, length, width, dtype=torch.bfloat16, device="meta",
                           requires_grad=True)

    def _make_buffers(self, made: Sequence[StageNet]) -> list[ParamBuffer]:
        """Of experts, which fewer ranks share, and of the rest."""
        experts = [module for stage in made for module in stage.experts]
        inner = [module for root in experts for module in root.modules()]
        outer = [module for root in made for module in root.modules() if module not in inner]
        data = ("shard", "data", "outer", "expert", "context")
        copies = self._find_group(("replicate",))
        return [ParamBuffer(modules, self._find_group(names), copies) for modules, names in (
            (inner, ("outer",) if self.layout.expert > 1 else (*data, "tensor")), (outer, data)) if modules]

    def _find_group(self, names: Sequence[str]) -> Any:
        """The ranks along those dimensions of the mesh that there are; None for one rank."""
        if not any(name in self.mesh.mesh_dim_names for name in names):
            return None
        found = _flatten(self.mesh, names)
        return found.get_group() if found.size() > 1 else None

    def make_optimizer(self) -> Any:
        """As `analyzer.profile` takes it: a name, or what makes it of parameters."""
        if self.layout.sharding not in ("zero1", "distributed"):
            return self.layout.optimizer
        factory: Any = find_optimizer(self.layout.optimizer)
        if self.layout.is_distributed:
            return lambda _: DistributedOptimizer(self.buffers, factory, self.layout.offload)
        return lambda parameters: ZeroRedundancyOptimizer(parameters, factory)

    def inputs(self) -> tuple[Any, ...]:
        """What ``step`` is given."""
        if self.layout.pipeline == 1 and not self.parts[0].first:
            return (self._hidden(), )
        if not self.template.takes_tokens:
            return tuple([torch.empty(
                self.layout.micro_batch, *spec.shape[1:], device="meta",
                dtype=torch.bfloat16 if self.is_half and spec.dtype.is_floating_point else spec.dtype)
                          for spec in self.template.inputs])
        return (torch.zeros(self.layout.micro_batches * self.layout.micro_batch, self._length(), dtype=torch.int64), )

    @contextmanager
    def _training(self) -> Iterator[None]:
        """What a step runs in: losses of divided logits, attention over the ranks of one sequence."""
        with ExitStack() as stack:
            if self.layout.context > 1:
                from torch.distributed.tensor.experimental import context_parallel
                from torch.nn.attention import SDPBackend, sdpa_kernel

                # inputs are of this rank's tokens already; what is divided in the place of them is a list of positions
                positions = torch.zeros(1, self._length() * self.layout.context, dtype=torch.int64, device="cuda")
                stack.enter_context(sdpa_kernel([SDPBackend.FLASH_ATTENTION]))
                stack.enter_context(context_parallel(self.mesh["context"], buffers=[positions], buffer_seq_dims=[1]))
            if self.layout.tensor > 1 and self.template.takes_tokens and any(part.last for part in self.parts):
                from torch.distributed.tensor.parallel import loss_parallel

                stack.enter_context(loss_parallel())
            yield

    def step(self, _: nn.Module, optimizer: Any, *inputs: Any) -> None:
        """Passes of all micro-batches, and the update. Without a pipeline the first step, after which optimizer states
        are there and wrappers know the model, is of one micro-batch.
        """
        self._steps += 1
        with self._training():
            if self.schedule is not None:
                given = {"target": inputs[0]} if any(part.last for part in self.parts) else {}
                self.schedule.step(*([inputs[0]] if self.parts[0].first else []), return_outputs=False, **given)
            else:
                self._accumulate(inputs)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    def _accumulate(self, inputs: Sequence[Any]) -> None:
        is_wrapped = isinstance(self.model, nn.parallel.DistributedDataParallel)
        casts = not self.is_half and not self.layout.is_sharded
        count = self.layout.micro_batches if self._steps > 1 else 1
        for i in range(count):
            here = inputs
            if self.template.takes_tokens and self.parts[0].first:
                size = self.layout.micro_batch
                here = [inputs[0][i * size:(i + 1) * size]]
            is_last = i == count - 1
            with self.model.no_sync() if is_wrapped and not is_last else nullcontext():
                with torch.autocast("cuda", dtype=torch.bfloat16) if casts else nullcontext():
                    out = self.model(*here)
                    loss = self._loss(out, here)
                if loss is None:
                    out.backward(torch.empty_like(out))
                else:
                    del out
                    loss.backward()
                del loss

    def _loss(self, out: Any, inputs: Sequence[Any]) -> Tensor | None:
        if not self.parts[-1].last:
            return None
        if not self.template.takes_tokens:
            return default_loss(out)
        labels = inputs[0] if self.parts[0].first else torch.zeros(out.shape[:2], dtype=torch.int64, device="cuda")
        return self.loss(out, labels)

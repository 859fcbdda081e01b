"""Models split over ranks by layers: bytes of one rank as they follow by hand, and modules that communicate."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from analyzer import ProfileOptions, profile
from analyzer.parallel import world
from analyzer.profilers.annotation import Annotation
from analyzer.zoo.llama import Llama, LlamaConfig

IDS = torch.zeros(4, 512, dtype=torch.int64)
ONE_STEP = ProfileOptions(steps=1)


def adamw(params):
    """Parameters that are split and those that are not are in no list together: torch refuses to mix them."""
    return torch.optim.AdamW(params, foreach=False)


LAYERS = 4
# Llama of so many layers in float32: hidden 2048, intermediate 8192, 32 heads of 64, 8 of keys, vocabulary 128,256.
EMBEDDING, NORM = 128_256 * 2048, 2048
SPLIT = 2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192  # elements of a layer's matrices
ACTIVATION = 4 * 512 * 2048 * 4                             # bytes of a layer's input
PLAN = {"self_attn.q_proj": ColwiseParallel, "self_attn.k_proj": ColwiseParallel, "self_attn.v_proj": ColwiseParallel,
        "self_attn.o_proj": RowwiseParallel, "mlp.gate_proj": ColwiseParallel, "mlp.up_proj": ColwiseParallel,
        "mlp.down_proj": RowwiseParallel}


def split_llama(mesh, shard=None):
    model = Llama(LlamaConfig(num_hidden_layers=LAYERS)).cuda()
    for layer in model.model.layers:
        parallelize_module(layer, mesh, {name: style() for name, style in PLAN.items()})
        if shard is not None:
            fully_shard(layer, mesh=shard)
    return model if shard is None else fully_shard(model, mesh=shard)


@pytest.mark.parametrize(("tensor", "data"), [(8, 1), (8, 4)])
def test_a_llama_split_by_columns_and_rows_meets_the_bytes_derived_by_hand(tensor, data):
    def build():
        mesh = init_device_mesh("cuda", (data, tensor), mesh_dim_names=("dp", "tp"))
        return split_llama(mesh["tp"], mesh["dp"] if data > 1 else None)

    with world(tensor * data):
        p = profile(build, args=(IDS,), kwargs={"labels": IDS.clone()}, optimizer=adamw, options=ONE_STEP)
    # Embedding and norms are in every rank of the dimension, matrices of layers are split; FSDP splits all of it again.
    kept = EMBEDDING + (2 * LAYERS + 1) * NORM + LAYERS * SPLIT // tensor
    assert (p.params, p.param_bytes) == (kept // data, 4 * kept // data)
    assert p.optimizer_bytes == 8 * kept // data
    # Every layer sums after attention and after its MLP; backward each of q, k, v, gate and up sums for its own input.
    forward, backward = 2 * LAYERS * ACTIVATION, 5 * LAYERS * ACTIVATION
    if data > 1:  # all is gathered in forward, all but the root's own in backward; every gradient is scattered
        forward += 4 * kept
        backward += 4 * (kept - EMBEDDING - NORM) + 4 * kept
    assert (p.phases["forward"].comm_bytes, p.phases["backward"].comm_bytes) == (forward, backward)
    # Products of 2048 tokens with a part of the matrices, scores and sums of a part of the heads over 4 sequences.
    attention = 2 * 4 * (32 // tensor) * 512 * 512 * 64
    assert p.fwd_macs == 2048 * (LAYERS * SPLIT // tensor + EMBEDDING) + LAYERS * attention


SMALL = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
                    num_key_value_heads=8, tie_word_embeddings=False)
SMALL_IDS = torch.zeros(8, 16, dtype=torch.int64)


def sequence_parallel_llama(mesh, shard=None, checkpoints=False):
    """As torchtitan splits it: norms and the sums of layers along the sequence, the loss along the vocabulary."""
    model = Llama(SMALL)
    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = nn.RMSNorm(64), nn.RMSNorm(64)
    model.model.norm = nn.RMSNorm(64)
    parallelize_module(model.cuda(), mesh, {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)})
    for i, layer in enumerate(model.model.layers):
        plan = {name: style() for name, style in PLAN.items()}
        plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("self_attn.o_proj", "mlp.down_proj")}
        plan |= {name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
        plan |= {"self_attn": PrepareModuleInput(input_layouts=(Shard(1), None, None, None),
                                                 desired_input_layouts=(Replicate(), None, None, None)),
                 "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))}
        parallelize_module(layer, mesh, plan)
        if checkpoints:
            from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
            layer = model.model.layers[i] = checkpoint_wrapper(layer)
        if shard is not None:
            fully_shard(layer, mesh=shard)
    return model if shard is None else fully_shard(model, mesh=shard)


counts = []  # of collectives, by CommDebugMode, a step


def loss_parallel_step(model, optimizer, ids):
    with CommDebugMode() as counted:
        with loss_parallel():
            F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    counts.append({op.__name__.split(".")[0]: n for op, n in counted.get_comm_counts().items()})


NAMES = {"all_gather": ("all_gather_into_tensor", "_allgather_base_"), "all_reduce": ("all_reduce", "allreduce_"),
         "reduce_scatter": ("reduce_scatter_tensor", "_reduce_scatter_base_")}


def profile_sequence_parallel(shape=(1, 8), checkpoints=False, rank=0, profilers=None):
    def build():
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=("rep", "dp", "tp")[3 - len(shape):])
        shard = None if shape[0] == 1 else mesh["dp"] if len(shape) == 2 else mesh["rep", "dp"]
        return sequence_parallel_llama(mesh["tp"], shard, checkpoints)

    counts.clear()
    with world(torch.Size(shape).numel(), rank):
        return profile(build, args=(SMALL_IDS,), optimizer="adamw", step=loss_parallel_step, profilers=profilers)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("shape", "checkpoints"), [((1, 8), True), ((2, 8), False)])
def test_collectives_are_as_many_as_torch_counts(shape, checkpoints):
    p = profile_sequence_parallel(shape, checkpoints, rank=torch.Size(shape).numel() - 1)
    found = {kind: sum(row.kind == kind for row in p.comm) for kind in NAMES}
    assert found == {kind: sum(counts[-1].get(name, 0) for name in names) for kind, names in NAMES.items()}
    assert {row.kind for row in p.comm} == set(NAMES)
    assert p.params == sum({"norms": 5 * 64, "vocabulary": 2 * 512 * 64 // 8, "layers": 2 * (
        4 * 64 * 64 + 3 * 64 * 256) // 8}.values()) // (1 if shape[0] == 1 else shape[-2])


def test_kernels_of_the_device_run_whole_on_parts_and_modules_have_their_collectives():
    calls = []

    def read(log):
        calls.extend((log.modules[call.module].path, call.signature) for call in log.calls if call.step == 1)
        return Annotation()

    p = profile_sequence_parallel(profilers=[read])
    names = [signature.op.name() for _, signature in calls]
    assert names.count("aten::_fused_rms_norm") == names.count("aten::_fused_rms_norm_backward") == 5
    assert names.count("aten::silu") == names.count("aten::silu_backward") == 2
    assert {s.args[0].shape for _, s in calls if s.op.name() == "aten::_fused_rms_norm"} == {(8, 16 // 8, 64)}
    assert {s.args[1].shape for path, s in calls if s.op.name() == "aten::mm" and path.endswith("up_proj")} >= {
        (64, 256 // 8)}
    # An attention layer gathers its input and scatters its sum, forward and backward.
    layer = [(row.kind, row.phase, row.module_path) for row in p.comm if ".0.self_attn" in row.module_path]
    base = "model.layers.0.self_attn"
    assert layer == [("all_gather", "forward", base), ("reduce_scatter", "forward", f"{base}.o_proj"),
                     ("all_gather", "backward", f"{base}.o_proj"), ("reduce_scatter", "backward", base)]


def test_the_result_of_a_functional_collective_is_allocated_once():
    from torch.distributed._functional_collectives import all_gather_tensor, all_reduce

    class Gathers(nn.Module):
        def forward(self, x):
            everyone = torch.distributed.group.WORLD
            return all_reduce(all_gather_tensor(x, 0, everyone), "sum", everyone)

    with world(4):
        p = profile(Gathers, args=(torch.zeros(1024, 256),), mode="infer")
    # what one rank gives, what all gave, and the sum of it
    assert p.peak_allocated_bytes == 2**20 + 2 * 4 * 2**20

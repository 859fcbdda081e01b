"""Compiled graphs beside PyTorch's own: which tensors the forward half saves for the backward half.

The reference is ``torch.compile`` on the host: Dynamo's graphs, AOTAutograd's joint graph of each, Inductor's passes
over it and its partition; only the code that Inductor generates is left out, and graphs run as they are. Ours are made
by the mode for the host too, so that both take the same attention kernels. Left out on both sides: the state of the
host's random generator, which PyTorch saves where a checkpoint runs a random operator again (an accelerator's is no
tensor).
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V

from analyzer import MetaTensorMode
from analyzer.compiled.joint_graph import JointGraph
from analyzer.compiled.lowering import compiling_for
from analyzer.compiled.partition import partition
from analyzer.compiled.trace import FunctionTrace
from analyzer.hardware import find_device
from analyzer.meta.state import active_state

Row = tuple[tuple[int, ...], torch.dtype, bool]  # shape, dtype, whether it is an input of the graph
Make = Callable[[], Any]


def saved_tensors(forward: fx.GraphModule, results: int) -> list[Row]:
    """What a forward half returns beside its results."""
    outputs: Any = forward.graph.output_node().args[0]
    return [(tuple(node.meta["val"].shape), node.meta["val"].dtype, node.op == "placeholder")
            for node in outputs[results:] if isinstance(node, fx.Node) and not _is_generator_state(node)]


def _is_generator_state(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    return isinstance(source, fx.Node) and source.target is torch._prims.rng_prims.run_and_save_rng_state


def reference(model: Callable[..., Any], args: Sequence[Any]) -> list[list[Row]]:
    """Of each graph that torch.compile makes on the host, what its forward half saves."""
    found = []

    def cut(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        halves = min_cut_rematerialization_partition(joint, inputs, **options)
        found.append(saved_tensors(halves[0], options["num_fwd_outputs"]))
        return halves

    def partition_graph(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        fakes = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
        with V.set_fake_mode(detect_fake_mode(fakes)):
            return compile_fx.partition_fn(joint, inputs, **options)

    def keep(graph: fx.GraphModule, inputs: Any) -> fx.GraphModule:
        return graph

    torch._dynamo.reset()
    with mock.patch.object(compile_fx, "min_cut_rematerialization_partition", cut):
        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition_graph,
                               decompositions=select_decomp_table(), keep_inference_input_mutations=True)
        torch.compile(model, backend=backend)(*args)
    return found


class _Stand(torch.autograd.Function):
    """Results of a graph that does not run."""

    @staticmethod
    def forward(ctx: Any, joint: JointGraph, *primals: torch.Tensor) -> Any:
        results = make_results(joint)
        ctx.mark_non_differentiable(*[t for i, t in enumerate(results) if i not in joint.differentiated])
        return tuple(results)


def make_results(joint: JointGraph) -> list[torch.Tensor]:
    """Tensors like the results of a graph."""
    outputs: Any = joint.module.graph.output_node().args[0]
    return [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype)
            for v in [node.meta["val"] for node in outputs[:joint.results]]]


def ours(make: Make, make_args: Make) -> list[list[Row]]:
    """The same of the graphs that the mode makes."""
    found = []

    def run(joint: JointGraph) -> Sequence[Any]:
        results = make_results(joint)
        with compiling_for(find_device("h100")):
            halves = partition(joint)
        if len(halves) == 1:
            return results
        found.append(saved_tensors(halves[0], joint.results))
        return _Stand.apply(joint, *joint.primals)  # type: ignore[no-any-return, no-untyped-call]

    with MetaTensorMode():
        FunctionTrace(active_state(), select_decomp_table(), run, lambda reason: None, {}).call(make(), make_args(), {})
    return found


def compare(make: Make, make_args: Make) -> tuple[list[list[Row]], list[list[Row]]]:
    """What is saved of each graph, ours and PyTorch's."""
    torch.manual_seed(0)
    return ours(make, make_args), reference(make(), make_args())


# ---- models


class Returning(nn.Module):
    """A model of transformers whose result is one tensor."""

    def __init__(self, model: nn.Module, field: str, names: Sequence[str] = ("input_ids",), **options: Any) -> None:
        super().__init__()
        self.model, self.field, self.names, self.options = model, field, names, options

    def forward(self, *args: torch.Tensor) -> Any:
        return getattr(self.model(**dict(zip(self.names, args)), **self.options), self.field)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = [t.view(batch, length, self.heads, -1).transpose(1, 2)
                   for t in self.qkv(self.norm1(x)).split(width, 2)]
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        made: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return made


class GPT(nn.Module):
    """Written by hand; ``checkpoint`` are options of torch.utils.checkpoint, where it checkpoints its blocks."""

    def __init__(self, width: int = 128, heads: int = 4, blocks: int = 3, words: int = 500,
                 checkpoint: dict[str, Any] | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head, self.drop = nn.LayerNorm(width), nn.Linear(width, words, bias=False), nn.Dropout(dropout)
        self.head.weight, self.checkpoint = self.words.weight, checkpoint

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = self.drop(block(hidden) if self.checkpoint is None else torch.utils.checkpoint.checkpoint(
                block, hidden, **self.checkpoint))
        logits = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), x.view(-1))


def save_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """A policy of a selective checkpoint."""
    saves = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    policy = torch.utils.checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if saves else policy.PREFER_RECOMPUTE


def _ids() -> tuple[torch.Tensor, ...]:
    return (torch.zeros(2, 64, dtype=torch.int64),)


def _images(size: int) -> Make:
    return lambda: (torch.rand(2, 3, size, size),)


def list_models() -> dict[str, tuple[Make, Make]]:
    """Each model's name, with what makes it and its arguments."""
    from analyzer.zoo.torchvision_ops import define_torchvision_ops

    define_torchvision_ops()
    import timm
    import torchvision.models as vision
    import transformers as hf

    base: Any = {"vocab_size": 500, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
            "num_attention_heads": 4}
    decoder = {**base, "num_key_value_heads": 2}

    def causal(name: str, **config: Any) -> Make:
        return lambda: Returning(getattr(hf, f"{name}ForCausalLM" if name != "GPT2" else "GPT2LMHeadModel")(
            getattr(hf, f"{name}Config")(**config)), "logits", use_cache=False)

    models = {
        "resnet18": (vision.resnet18, _images(64)), "resnet50": (vision.resnet50, _images(64)),
        "mobilenet_v3_small": (vision.mobilenet_v3_small, _images(64)),
        "densenet121": (vision.densenet121, _images(64)),
        "vit": (lambda: vision.VisionTransformer(32, 16, 3, 4, 128, 256), _images(32)),
        "swin": (lambda: vision.SwinTransformer([4, 4], 48, [2, 2], [2, 4], [7, 7], stochastic_depth_prob=0.1),
                 _images(112)),
        "convnext_tiny": (vision.convnext_tiny, _images(64)),
        **{name: (functools.partial(timm.create_model, name, pretrained=False), _images(64)) for name in (
            "resnet26d", "efficientnet_b0", "regnety_002", "mobilevit_xxs", "poolformer_s12")},
        "gpt2": (causal("GPT2", n_layer=3, n_embd=128, n_head=4, vocab_size=500), _ids),
        "llama": (causal("Llama", **decoder), _ids), "mistral": (causal("Mistral", **decoder), _ids),
        "qwen2": (causal("Qwen2", **decoder), _ids), "gemma": (causal("Gemma", **decoder, head_dim=32), _ids),
        "opt": (lambda: causal("OPT", vocab_size=500, hidden_size=128, ffn_dim=256, num_hidden_layers=3,
                               num_attention_heads=4, word_embed_proj_dim=128, max_position_embeddings=128)().eval(),
                _ids),
        "bert": (lambda: Returning(hf.BertModel(hf.BertConfig(**base)), "last_hidden_state"), _ids),
        "t5": (lambda: Returning(hf.T5ForConditionalGeneration(hf.T5Config(
            vocab_size=500, d_model=128, d_ff=256, d_kv=32, num_layers=2, num_heads=4)), "logits",
            ("input_ids", "decoder_input_ids"), use_cache=False), lambda: (*_ids(), *_ids())),
        "whisper": (lambda: Returning(hf.WhisperForConditionalGeneration(hf.WhisperConfig(
            vocab_size=500, d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, max_source_positions=100,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)), "logits",
            ("input_features", "decoder_input_ids"), use_cache=False).eval(),
            lambda: (torch.rand(2, 80, 200), *_ids())),
        "hf-vit": (lambda: Returning(hf.ViTModel(hf.ViTConfig(
            hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256, image_size=32,
            patch_size=8)), "last_hidden_state", ("pixel_values",)), _images(32)),
    }
    return models

"""Models that plans ask for: what trains in them, and their losses."""
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import analyzer
from analyzer.errors import InputError
from analyzer.recipe import Recipe
from analyzer.tools.job.build import make_model
from analyzer.tools.job.layer import share_codes, unpack_by_operators
from analyzer.tools.job.plan import Adapter, FakeQuantization, TrainedBlocks, TrainingPlan


def _tiny_model() -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2))


@pytest.mark.parametrize("task", ["anchored", "dpo", "kto", "orpo", "policy"])
def test_what_answers_are_compared_with_stops_no_gradient(task: Any) -> None:
    """One of the reference's scores alone has none: their difference was taken without gradients, too."""
    plan = TrainingPlan(model="", task=task, reference="none" if task == "orpo" else "copy", micro_batch=1, length=8,
                        dtype="fp32")
    model = make_model(plan, _tiny_model)
    model(input_ids=torch.ones(2, 8, dtype=torch.int64)).backward()
    assert {path.split(".")[0] for path, p in model.named_parameters() if p.grad is not None} == {"policy"}


@pytest.mark.parametrize(("blocks", "numbers"), [
    (TrainedBlocks(1), {"3"}), (TrainedBlocks(3, "first"), {"0", "1", "2"}), (TrainedBlocks(2, "spread"), {"1", "3"})])
def test_blocks_that_train(blocks: TrainedBlocks, numbers: set[str]) -> None:
    plan = TrainingPlan(model="", micro_batch=1, length=8, trained_blocks=blocks, trained_dtype="fp32",
                        upcast=("norm",))
    model = make_model(plan, _tiny_model)
    trained = [path for path, parameter in model.named_parameters() if parameter.requires_grad]
    assert {path.split(".")[2] for path in trained} == numbers
    assert {str(p.dtype) for p in model.parameters() if p.requires_grad} == {"torch.float32"}
    assert {str(p.dtype) for path, p in model.named_parameters() if "norm" in path} == {"torch.float32"}
    assert model.get_input_embeddings().weight.dtype.itemsize == 2  # type: ignore[operator,union-attr]


def test_parts_of_a_model_get_no_adapters() -> None:
    plan = TrainingPlan(model="", micro_batch=1, length=8, adapter=Adapter(r=2, excluded=("mlp", "layers.0.")))
    trained = [path for path, parameter in make_model(plan, _tiny_model).named_parameters() if parameter.requires_grad]
    assert len(trained) == 3 * 4 * 2 and not any("mlp" in path or ".0." in path for path in trained)


def test_scores_in_parts_are_those_of_all_logits_at_once() -> None:
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    losses = []
    for parts in (None, 5):
        plan = TrainingPlan(model="", task="dpo", reference="copy", micro_batch=2, length=16, dtype="fp32",
                            loss_chunks=parts)
        model = make_model(plan, _tiny_model)
        loss = model(input_ids=ids)
        loss.backward()
        head = [p.grad for path, p in model.named_parameters() if path.startswith("policy.lm_head")]
        assert head[0] is not None
        losses.append((loss.detach(), head[0]))
    torch.testing.assert_close(losses[0], losses[1])


def test_weights_are_quantized_and_back_but_for_adapters() -> None:
    """Inputs of 32 channels are divided by groups of 16, and those of `down_proj`, 64; factors of rank 16 are left."""
    pytest.importorskip("torchao")
    plan = TrainingPlan(model="", micro_batch=1, length=8, adapter=Adapter(r=16), fake_quantization=FakeQuantization(
        group=16))
    model = make_model(plan, _tiny_model)
    changed = {path.rpartition(".")[2] for path, module in model.named_modules()
               if type(module).__name__ == "FakeQuantizedLinear"}
    assert changed == {"base_layer", "lm_head"}
    chunked = make_model(replace(plan, loss_chunks=2, adapter=None), _tiny_model)
    head = chunked.get_output_embeddings().head  # type: ignore[operator]
    assert type(head).__name__ == "Linear" and any(
        type(module).__name__ == "FakeQuantizedLinear" for module in chunked.modules())


def test_experts_in_four_bits_are_whole_while_they_run() -> None:
    import transformers

    def build() -> Any:
        torch.manual_seed(0)
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
            vocab_size=64, hidden_size=64, moe_intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, num_experts=4, num_experts_per_tok=2))

    ids = torch.ones(1, 8, dtype=torch.int64)
    plan = TrainingPlan(model="", micro_batch=1, length=8, dtype="fp32", adapter=Adapter(r=2, targets=("q_proj",)))
    whole, held = (make_model(replace(plan, quantizes_experts=quantizes), build) for quantizes in (False, True))
    assert not any(parameter.ndim == 3 for parameter in held.parameters())
    # codes of half a byte, and a byte for each 64: 4 experts of 64 x (2 x 64 + 64)
    layer = held.get_submodule("model.layers.0.mlp.experts.gate_up_proj_nf4")
    assert (layer.weight.nbytes, layer.absmax.nbytes) == (4 * 64 * 128 // 2, 4 * 128)
    expected, found = (model(input_ids=ids).logits for model in (whole, held))
    torch.testing.assert_close(found, expected, rtol=0.2, atol=0.05)
    assert "gate_up_proj" not in vars(held.get_submodule("model.layers.0.mlp.experts"))
    found.sum().backward()
    with pytest.raises(InputError, match="quantized experts: LlamaForCausalLM has none that are one parameter"):
        make_model(replace(plan, quantizes_experts=True), _tiny_model)


def test_fused_attention_of_a_model_that_cannot_take_pytorchs_own() -> None:
    import transformers

    def build() -> Any:
        return transformers.GptOssForCausalLM(transformers.GptOssConfig(
            vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            head_dim=32, num_key_value_heads=2, num_local_experts=4))

    plan = TrainingPlan(model="", micro_batch=1, length=8, attention="sdpa")
    assert make_model(plan, build).config._attn_implementation == "flex_attention"  # type: ignore[union-attr]
    assert make_model(plan, _tiny_model).config._attn_implementation == "sdpa"  # type: ignore[union-attr]


def test_rotated_inputs_are_those_of_peft() -> None:
    peft = pytest.importorskip("peft")
    plan = TrainingPlan(model="", micro_batch=1, length=8, dtype="fp32",
                        adapter=Adapter(r=4, targets=("q_proj",), rotates=True))
    model, ids = make_model(plan, _tiny_model), torch.arange(8).unsqueeze(0)
    theirs = peft.get_peft_model(_tiny_model(), peft.OFTConfig(
        r=0, oft_block_size=4, target_modules=["q_proj"], use_cayley_neumann=True))
    own = {path: p for path, p in model.named_parameters() if p.requires_grad}
    other = {path: p for path, p in theirs.named_parameters() if p.requires_grad}
    for one, two in zip(own.values(), other.values(), strict=True):
        assert one.shape == two.shape
        torch.nn.init.normal_(one, std=0.1)
        two.data.copy_(one.data)
    for path, parameter in theirs.named_parameters():
        if not parameter.requires_grad:
            parameter.data.copy_(model.get_parameter(path.removeprefix("base_model.model.")).data)
    expected, found = theirs(input_ids=ids).logits, model(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    found.sum().backward()
    expected.sum().backward()
    for one, two in zip(own.values(), other.values(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-3, atol=1e-5)


def test_products_in_eight_bits_but_that_of_the_head() -> None:
    pytest.importorskip("torchao")
    plan = TrainingPlan(model="", micro_batch=1, length=8, computes_in_fp8=True)
    kinds = {path: type(module).__name__ for path, module in make_model(plan, _tiny_model).named_modules()}
    assert kinds["lm_head"] == "Linear" and kinds["model.layers.0.mlp.up_proj"] == "Float8Linear"


def test_weights_of_four_bits_that_operators_unpack() -> None:
    """torchao's way gives the same weight, with two indices of 8 bytes for each byte of codes, values, what they are
    scaled to, and all of that as one: 14 bytes an element of 16 bits.
    """
    def make() -> nn.Module:
        model = Recipe(quantize="nf4").apply(nn.Sequential(nn.Linear(1024, 2048, bias=False, dtype=torch.bfloat16),
                                                           nn.Linear(2048, 1, bias=False, dtype=torch.bfloat16)))
        return model

    plain, unpacked = make(), make()
    unpacked.load_state_dict(plain.state_dict())
    unpack_by_operators(unpacked)
    share_codes(unpacked, torch.float16)  # whatever dtype the codes are held in
    layers: Any = plain[0], unpacked[0]  # type: ignore[index]
    assert layers[1].weight.dtype is torch.float16
    assert torch.equal(layers[0].dequantize(torch.float32), layers[1].dequantize(torch.float32))
    rows = torch.zeros(8, 1024, dtype=torch.bfloat16, device="meta")
    found = [analyzer.profile(model, rows, mode="infer", device="h100").peak_by_category["temporary"]
             for model in (plain, unpacked)]
    elements = 1024 * 2048
    assert found[0] == pytest.approx(2 * elements, rel=0.1)
    assert found[1] == pytest.approx(14 * elements, rel=0.02)

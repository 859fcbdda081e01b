"""Scripts around transformers: a checkpoint of a folder, Trainer, TRL, LoRA, and quantized weights with LoRA."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from llama_folder import EMBEDDING, HEADS, HIDDEN, KV, LAYERS, LINEAR, NORMS, PARAMETERS, WIDE, write_llama_folder

TENSORS = 9 * LAYERS + 3
TOKENS, LENGTH = 4 * 128, 128
ROPE = HIDDEN // HEADS // 2 * LENGTH  # frequencies by positions, a product too
# LoRA of rank 16 on every linear layer of a block: each has (inputs + outputs) × 16
LORA_TENSORS = LAYERS * 14
LORA = 16 * LAYERS * (2 * 2 * HIDDEN + 2 * (HIDDEN + KV) + 3 * (HIDDEN + WIDE))
LORA_SMALL = LAYERS * 2 * 16 * KV  # lora_B of k and v have fewer than 4,096 elements: states of 32 bits


def forward_macs(tokens: int, length: int) -> int:
    attention = 2 * LAYERS * tokens * length * HIDDEN
    return tokens * (LINEAR + EMBEDDING) + attention + HIDDEN // HEADS // 2 * length


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_llama_folder(tmp_path_factory.mktemp("llama")))


def test_scripts_of_transformers(run_dry, folder):
    for name in ("transformers", "accelerate", "peft", "trl", "bitsandbytes", "datasets"):
        pytest.importorskip(name)
    profiles = run_dry(
        ("auto", "from_pretrained.py", [folder, "auto"]), ("cuda", "from_pretrained.py", [folder, "cuda"]),
        ("built", "from_pretrained.py", [folder, "built"]), ("trainer", "transformers_trainer.py", []),
        ("lora", "lora.py", []),
        ("four bits", "qlora.py", [folder, "4"]), ("eight bits", "qlora.py", [folder, "8"]),
        ("sft", "sft.py", [folder]), ("generate", "generate.py", [folder]))
    for name, p in profiles.items():
        assert not p.uncounted and p.device == "h200", name
        assert sum(p.peak_by_category.values()) == p.peak_allocated_bytes, name
    check_loaded(profiles["auto"], profiles["built"])
    check_loaded(profiles["cuda"], profiles["built"])
    check_trainer(profiles["trainer"])
    check_lora(profiles["lora"])
    check_four_bits(profiles["four bits"])
    check_eight_bits(profiles["eight bits"])
    check_sft(profiles["sft"])
    check_generated(profiles["generate"])


def check_loaded(p, built):
    """The checkpoint has no data behind its header; where the weights came from changes no peak."""
    assert (p.params, p.param_bytes) == (PARAMETERS, 2 * PARAMETERS)
    assert p.optimizer_bytes == 2 * 2 * PARAMETERS + 4 * TENSORS  # fused: steps are on the device
    assert p.fwd_macs == forward_macs(TOKENS, LENGTH)
    assert p.recompute_macs == p.fwd_macs - TOKENS * (EMBEDDING + LAYERS * HIDDEN * WIDE) - ROPE  # up to what is saved
    assert p.peak_allocated_bytes == built.peak_allocated_bytes
    assert p.peak_by_category == built.peak_by_category
    assert "checkpoints of safetensors were read for names, shapes and dtypes alone" in p.assumptions


def check_trainer(p):
    """Two micro-batches, weights in float32 under autocast."""
    assert (p.params, p.param_bytes, p.batch_size) == (PARAMETERS, 4 * PARAMETERS, 8)
    assert p.optimizer_bytes == 2 * 4 * PARAMETERS + 4 * TENSORS
    assert p.fwd_macs == 2 * forward_macs(TOKENS, LENGTH)
    assert p.peak_by_category["gradient"] >= 4 * PARAMETERS
    assert 0 < p.recompute_macs < p.fwd_macs


def check_lora(p):
    assert p.params == PARAMETERS + LORA and p.param_bytes == 2 * PARAMETERS + 4 * LORA
    assert p.optimizer_bytes == 2 * 4 * LORA + 4 * LORA_TENSORS
    assert p.fwd_macs == forward_macs(TOKENS, LENGTH) + TOKENS * LORA


def check_four_bits(p):
    """Linear layers in half a byte an element; what prepare_model_for_kbit_training makes float32; LoRA in float32."""
    assert p.params == PARAMETERS + LORA
    assert p.param_bytes == LINEAR // 2 + 4 * (2 * EMBEDDING + NORMS + LORA)
    blocks = LINEAR // 64
    blocks_of_blocks = LAYERS * (2 * 4 + 2 * 2 + 3 * 11)  # of 256, of each layer rounded up
    codes = LAYERS * 7 * (16 + 256 + 1) * 4  # nf4's, that of the scales, and their mean
    rope = 2 * HIDDEN // HEADS // 2 * 4
    assert p.buffer_bytes == blocks + 4 * blocks_of_blocks + codes + rope
    eight_bits = LORA - LORA_SMALL
    blocks_of_states = eight_bits // 256
    assert p.optimizer_bytes == 2 * eight_bits + 2 * 4 * blocks_of_states + 2 * 4 * LORA_SMALL + 2 * 256 * 4
    assert p.fwd_macs == forward_macs(TOKENS, LENGTH) + TOKENS * LORA
    # the weights of a layer are whole while it is multiplied
    operators = {operator.operator for operator in p.operators}
    assert {"bitsandbytes.dequantize_4bit.default", "bitsandbytes.dequantize_blockwise.default"} <= operators


def check_eight_bits(p):
    assert p.params == PARAMETERS + LORA
    assert p.param_bytes == LINEAR + 4 * (2 * EMBEDDING + NORMS + LORA)
    rows = LAYERS * (2 * HIDDEN + 2 * KV + 2 * WIDE + HIDDEN)
    assert p.buffer_bytes == 4 * rows + 2 * HIDDEN // HEADS // 2 * 4
    assert p.fwd_macs == forward_macs(TOKENS, LENGTH) + TOKENS * LORA
    assert any("llm_int8_threshold=6" in a for a in p.assumptions)


def check_sft(p):
    """TRL loads in float32 unless it is told, and its own loss multiplies by the head with ``out_dtype``."""
    assert (p.params, p.param_bytes) == (PARAMETERS, 4 * PARAMETERS)
    assert p.optimizer_bytes == 2 * 4 * PARAMETERS + 4 * TENSORS
    length = 10  # words of a sentence, and its end
    assert p.fwd_macs == 4 * length * LINEAR + 4 * (length - 1) * EMBEDDING + 2 * LAYERS * 4 * length**2 * HIDDEN + (
        HIDDEN // HEADS // 2 * length)


def check_generated(p):
    """Three tokens, then one at a time: four passes in all, of which each gives the logits of its last token."""
    passes = [(3, 3), (1, 4), (1, 5), (1, 6)]
    attention = sum(2 * LAYERS * tokens * seen * HIDDEN for tokens, seen in passes)
    rope = sum(HIDDEN // HEADS // 2 * tokens for tokens, _ in passes)
    assert p.mode == "infer" and p.fwd_macs == 6 * LINEAR + 4 * EMBEDDING + attention + rope

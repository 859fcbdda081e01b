"""Scripts around other libraries: trainers, checkpoints of a folder, weights and states of few bits, LoRA, texts.

All run dry in one process of their own: what they import would keep what it was told of a GPU.
"""
import importlib.util
import json
import os
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
import torch
from torch import nn

from analyzer import Profile

HERE = Path(__file__).parent
TORCHAO = ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig",
           "Float8DynamicActivationFloat8WeightConfig")
#: by name: the libraries that it needs, the script and its arguments, of which "llama" is a folder
JOBS = {
    "lightning": ("lightning", "lightning_fit.py", []), "accelerate": ("accelerate", "accelerate_loop.py", []),
    "evaluating lightning": ("lightning", "evaluating_trainers.py", ["lightning"]),
    "evaluating transformers": ("transformers accelerate", "evaluating_trainers.py", ["transformers"]),
    **{f"bnb {name}": ("bitsandbytes", "few_bits.py", ["bitsandbytes.optim", name])
       for name in ("AdamW8bit", "PagedAdamW8bit", "Lion8bit")},
    **{f"ao {name}": ("torchao", "few_bits.py", ["torchao.optim", name])
       for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")},
    **{name: ("torchao", "torchao_quantized.py", [name]) for name in TORCHAO},
    "auto": ("transformers accelerate", "from_pretrained.py", ["llama", "auto"]),
    "built": ("transformers", "from_pretrained.py", ["llama", "built"]),
    "four bits": ("peft bitsandbytes accelerate", "qlora.py", ["llama", "4"]),
    "eight bits": ("peft bitsandbytes accelerate", "qlora.py", ["llama", "8"]),
    "sft": ("trl datasets", "sft.py", ["llama"]), "generate": ("transformers", "generate.py", ["llama"])}


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    """Gives the profiles of jobs by name, and skips what needs a library that is not there."""
    folder = tmp_path_factory.mktemp("dry")
    write_llama(folder / "llama")
    there = {name: job for name, job in JOBS.items() if all(map(importlib.util.find_spec, job[0].split()))}
    (folder / "jobs.json").write_text(json.dumps([(name, *job[1:]) for name, job in there.items()]))
    path = os.pathsep.join([str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, str(HERE / "run_scripts.py"), str(folder)], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr

    def find(*names: str) -> dict[str, Profile]:
        if missing := [name for name in names if name not in there]:
            pytest.skip(f"{missing} need a library that is not installed")
        for name in names:
            assert (folder / f"{name}.json").exists(), (folder / f"{name}.txt").read_text()[-4000:] + done.stderr[-999:]
        return {name: Profile.from_json(folder / f"{name}.json") for name in names}

    return find


# ---- trainers, optimizers and quantized weights of a small classifier

PARAMETERS = 512 * 256 + 512 + 8 * 512 + 8
LARGE, MIDDLE, SMALL = 512 * 256, 8 * 512, 512 + 8  # elements of the tensors that have 4,096 or more, and of the others
MACS = 64 * (256 * 512 + 512 * 8)
QMAPS = 2 * 256 * 4


@pytest.mark.parametrize("name", ["lightning", "accelerate"])
def test_trainers_of_other_libraries(profiles, name):
    p = profiles(name)[name]
    assert (p.params, p.mode, p.optimizer, p.batch_size) == (PARAMETERS, "train", "AdamW", 128)
    assert p.fwd_macs == 2 * MACS and p.bwd_macs == 2 * (2 * MACS - 64 * 256 * 512)  # two micro-batches
    assert p.optimizer_bytes == 2 * 4 * PARAMETERS  # steps are counted on the host
    assert p.peak_by_category["gradient"] == 4 * (PARAMETERS + 120)  # the last in a block of 512 bytes
    assert not p.uncounted and p.peak_by_category.keys() <= {
        "workspace", "optimizer state", "temporary", "parameter", "gradient", "input", "activation"}


# Lightning's check before the first step, and both after the second one: two batches of twice the size
@pytest.mark.parametrize(("name", "passes"), [("evaluating lightning", 4), ("evaluating transformers", 2)])
def test_evaluation_of_trainers(profiles, name, passes):
    p = profiles(name)[name]
    assert p.fwd_macs == MACS and p.phases["evaluation"].macs == passes * 2 * MACS
    assert any(f"({passes} of " in a for a in p.assumptions)


def test_states_of_few_bits(profiles):
    eight = LARGE + MIDDLE  # elements with states of 8 bits
    blocks = eight // 256
    expected = {
        "bnb AdamW8bit": 2 * eight + 2 * 4 * blocks + 2 * 4 * SMALL + QMAPS,
        # paged states of the large tensor are in unified memory, which is not the device's
        "bnb PagedAdamW8bit": 2 * MIDDLE + 2 * 4 * blocks + 2 * 4 * SMALL + QMAPS,
        "bnb Lion8bit": eight + 4 * blocks + 4 * SMALL + QMAPS // 2,
        # each tensor has maps of its own
        "ao AdamW8bit": 2 * (eight + 4 * blocks) + 2 * QMAPS + 2 * 4 * SMALL,
        "ao AdamW4bit": 2 * (eight // 2 + 4 * eight // 128) + 2 * 2 * 16 * 4 + 2 * 4 * SMALL,
        "ao AdamWFp8": 2 * (eight + 4 * blocks) + 2 * 4 * SMALL}
    found = profiles(*expected)
    assert {name: p.optimizer_bytes for name, p in found.items()} == expected
    for name, p in found.items():
        assert (p.params, p.fwd_macs, p.uncounted) == (PARAMETERS, MACS, ()), name
    # AdamW's 13 operations, its decay, and four to dequantize and quantize what has 8 bits
    assert found["bnb AdamW8bit"].optimizer_flops == 14 * PARAMETERS + 4 * eight
    paged = found["bnb PagedAdamW8bit"]
    assert any("managed memory" in a for a in paged.assumptions)
    saved = found["bnb AdamW8bit"].peak_by_category["optimizer state"] - paged.peak_by_category["optimizer state"]
    assert saved == 2 * LARGE  # what has 100,000 elements or more is in managed memory, its scales are not


def test_weights_of_few_bits(profiles):
    torchao = pytest.importorskip("torchao.quantization")
    found = profiles(*TORCHAO)
    for name, p in found.items():
        assert p.fwd_macs == 2 * 64 * 256 * 512, name
        assert p.params == 2 * 256 * 512 + 512 + 256 and not p.uncounted, name
    for name in TORCHAO[:3]:  # as on data: parts of each weight, biases in bfloat16
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).to(torch.bfloat16)
        torchao.quantize_(model, getattr(torchao, name)())
        parts = [getattr(weight, part) for weight in (model[0].weight, model[2].weight)
                 for part in weight.__tensor_flatten__()[0]]
        assert found[name].param_bytes == sum(part.nbytes for part in parts) + 2 * (512 + 256), name
    last = found[TORCHAO[3]].param_bytes
    assert last is not None and 0 < last - 2 * 256 * 512 - 2 * (512 + 256) <= 4 * (512 + 256)  # scales of rows


# ---- a small Llama of a folder as `from_pretrained` takes it, whose checkpoint ends behind its header

HIDDEN, WIDE, LAYERS, HEADS, KV_HEADS, VOCABULARY = 256, 688, 2, 4, 2, 1024
KV = HIDDEN // HEADS * KV_HEADS
#: parameters of the linear layers of all blocks, of one embedding, of all norms
LINEAR = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV + 3 * HIDDEN * WIDE)
EMBEDDING, NORMS = VOCABULARY * HIDDEN, (2 * LAYERS + 1) * HIDDEN
WHOLE = LINEAR + 2 * EMBEDDING + NORMS
TENSORS = 9 * LAYERS + 3
TOKENS, LENGTH = 4 * 128, 128
ROPE = HIDDEN // HEADS // 2 * LENGTH  # frequencies by positions, a product too
# LoRA of rank 16 on every linear layer of a block: each has (inputs + outputs) × 16
LORA = 16 * LAYERS * (2 * 2 * HIDDEN + 2 * (HIDDEN + KV) + 3 * (HIDDEN + WIDE))
LORA_SMALL = LAYERS * 2 * 16 * KV  # lora_B of k and v have fewer than 4,096 elements: states of 32 bits
FORWARD = TOKENS * (LINEAR + EMBEDDING) + 2 * LAYERS * TOKENS * LENGTH * HIDDEN + ROPE
WORDS = ("<pad>", "<eos>", "<unk>", "what", "is", "and", "it", "?")


def write_llama(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": WIDE,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1,
        "eos_token_id": 1}))
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(WORDS)}, "unk_token": "<unk>"}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>",
        "unk_token": "<unk>"}))
    block = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV, HIDDEN), "self_attn.v_proj": (KV, HIDDEN),
             "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (WIDE, HIDDEN), "mlp.up_proj": (WIDE, HIDDEN),
             "mlp.down_proj": (HIDDEN, WIDE), "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
    shapes = {"model.embed_tokens": (VOCABULARY, HIDDEN), "model.norm": (HIDDEN,), "lm_head": (VOCABULARY, HIDDEN),
              **{f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in block.items()}}
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


def test_a_checkpoint_is_loaded_by_its_header(profiles):
    """It has no data; where the weights came from changes no peak."""
    p, built = profiles("auto", "built").values()
    assert (p.params, p.param_bytes, p.device, p.uncounted) == (WHOLE, 2 * WHOLE, "h200", ())
    assert p.optimizer_bytes == 2 * 2 * WHOLE + 4 * TENSORS  # fused: steps are on the device
    assert p.fwd_macs == FORWARD
    assert p.recompute_macs == p.fwd_macs - TOKENS * (EMBEDDING + LAYERS * HIDDEN * WIDE) - ROPE  # up to what is saved
    assert p.peak_by_category == built.peak_by_category and sum(p.peak_by_category.values()) == p.peak_allocated_bytes
    assert "checkpoints of safetensors were read for names, shapes and dtypes alone" in p.assumptions


def test_lora_on_four_bits(profiles):
    """Linear layers in half a byte an element; what prepare_model_for_kbit_training makes float32; LoRA in float32."""
    p, = profiles("four bits").values()
    assert p.params == WHOLE + LORA and p.fwd_macs == FORWARD + TOKENS * LORA and not p.uncounted
    assert p.param_bytes == LINEAR // 2 + 4 * (2 * EMBEDDING + NORMS + LORA)
    blocks = LINEAR // 64
    blocks_of_blocks = LAYERS * (2 * 4 + 2 * 2 + 3 * 11)  # of 256, of each layer rounded up
    codes = LAYERS * 7 * (16 + 256 + 1) * 4  # nf4's, that of the scales, and their mean
    assert p.buffer_bytes == blocks + 4 * blocks_of_blocks + codes + 2 * HIDDEN // HEADS // 2 * 4
    eight_bits = LORA - LORA_SMALL
    blocks_of_states = eight_bits // 256
    assert p.optimizer_bytes == 2 * eight_bits + 2 * 4 * blocks_of_states + 2 * 4 * LORA_SMALL + 2 * 256 * 4
    # the weights of a layer are whole while it is multiplied
    assert {"bitsandbytes.dequantize_4bit.default", "bitsandbytes.dequantize_blockwise.default"} <= {
        operator.operator for operator in p.operators}


def test_lora_on_eight_bits(profiles):
    p, = profiles("eight bits").values()
    assert p.params == WHOLE + LORA and p.fwd_macs == FORWARD + TOKENS * LORA and not p.uncounted
    assert p.param_bytes == LINEAR + 4 * (2 * EMBEDDING + NORMS + LORA)
    rows = LAYERS * (2 * HIDDEN + 2 * KV + 2 * WIDE + HIDDEN)
    assert p.buffer_bytes == 4 * rows + 2 * HIDDEN // HEADS // 2 * 4
    assert any("llm_int8_threshold=6" in a for a in p.assumptions)


def test_supervised_fine_tuning(profiles):
    """TRL loads in float32 unless it is told, and its own loss multiplies by the head with ``out_dtype``."""
    p, = profiles("sft").values()
    assert (p.params, p.param_bytes, p.uncounted) == (WHOLE, 4 * WHOLE, ())
    assert p.optimizer_bytes == 2 * 4 * WHOLE + 4 * TENSORS
    length = 10  # words of a sentence, and its end
    assert p.fwd_macs == 4 * length * LINEAR + 4 * (length - 1) * EMBEDDING + 2 * LAYERS * 4 * length**2 * HIDDEN + (
        HIDDEN // HEADS // 2 * length)


def test_text_that_a_thread_makes(profiles):
    """Three tokens, then one at a time: four passes in all, of which each gives the logits of its last token."""
    p, = profiles("generate").values()
    passes = [(3, 3), (1, 4), (1, 5), (1, 6)]
    attention = sum(2 * LAYERS * tokens * seen * HIDDEN for tokens, seen in passes)
    rope = sum(HIDDEN // HEADS // 2 * tokens for tokens, _ in passes)
    assert p.mode == "infer" and p.fwd_macs == 6 * LINEAR + 4 * EMBEDDING + attention + rope

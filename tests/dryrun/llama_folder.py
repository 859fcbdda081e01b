"""A folder as `from_pretrained` takes it: a small Llama whose checkpoint ends behind its header, and a tokenizer."""
from __future__ import annotations

import json
from math import prod
from pathlib import Path

HIDDEN, WIDE, LAYERS, HEADS, KV_HEADS, VOCABULARY = 256, 688, 2, 4, 2, 1024
KV = HIDDEN // HEADS * KV_HEADS
#: parameters of the linear layers of all blocks, of one embedding, of all norms
LINEAR = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV + 3 * HIDDEN * WIDE)
EMBEDDING, NORMS = VOCABULARY * HIDDEN, (2 * LAYERS + 1) * HIDDEN
PARAMETERS = LINEAR + 2 * EMBEDDING + NORMS
WORDS = ("<pad>", "<eos>", "<unk>", "what", "is", "and", "it", "?")


def write_llama_folder(folder: Path) -> Path:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN,
              "intermediate_size": WIDE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
              "num_key_value_heads": KV_HEADS, "vocab_size": VOCABULARY, "tie_word_embeddings": False,
              "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config))
    _write_header(folder / "model.safetensors")
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(WORDS)}, "unk_token": "<unk>"}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>",
        "unk_token": "<unk>"}))
    return folder


def _write_header(path: Path) -> None:
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,),
              "lm_head.weight": (VOCABULARY, HIDDEN)}
    for i in range(LAYERS):
        for name, shape in (("self_attn.q_proj", (HIDDEN, HIDDEN)), ("self_attn.k_proj", (KV, HIDDEN)),
                            ("self_attn.v_proj", (KV, HIDDEN)), ("self_attn.o_proj", (HIDDEN, HIDDEN)),
                            ("mlp.gate_proj", (WIDE, HIDDEN)), ("mlp.up_proj", (WIDE, HIDDEN)),
                            ("mlp.down_proj", (HIDDEN, WIDE)), ("input_layernorm", (HIDDEN,)),
                            ("post_attention_layernorm", (HIDDEN,))):
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)

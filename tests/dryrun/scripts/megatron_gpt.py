"""A GPT of Megatron-core, tensor parallel over four of its ranks: torchrun --nproc-per-node 8 megatron_gpt.py."""
import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=4)
tensor_parallel.model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=2, hidden_size=256, num_attention_heads=8, tensor_model_parallel_size=4, bf16=True,
    params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, gradient_accumulation_fusion=False,
    bias_dropout_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False)
model = GPTModel(config, get_gpt_layer_local_spec(normalization="LayerNorm"), vocab_size=1024, max_sequence_length=128,
                 position_embedding_type="learned_absolute").cuda().bfloat16()
optimizer = torch.optim.AdamW(model.parameters())
positions = torch.arange(128, device="cuda").expand(4, -1)
mask = torch.ones(1, 1, 128, 128, dtype=torch.bool, device="cuda").triu(1)
for _ in range(100):
    tokens = torch.randint(0, 1000, (4, 128), device="cuda")
    model(tokens, positions, mask, labels=tokens.clone()).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

"""A language model from a config, trained by transformers' Trainer."""
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Tokens(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        tokens = torch.randint(0, 1024, (128,))
        return {"input_ids": tokens, "labels": tokens}


config = LlamaConfig(hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, vocab_size=1024, use_cache=False)
model = LlamaForCausalLM(config)
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=100,
    bf16=True, gradient_checkpointing=True, optim="adamw_torch_fused", learning_rate=2e-4,
    lr_scheduler_type="cosine", warmup_steps=10, logging_steps=1, save_strategy="no", report_to=[],
    dataloader_num_workers=2, dataloader_pin_memory=True, max_grad_norm=1.0)
Trainer(model, arguments, train_dataset=Tokens()).train()

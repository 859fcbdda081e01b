"""LoRA by peft, trained by Trainer."""
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

config = LlamaConfig(hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, vocab_size=1024, use_cache=False)
model = LlamaForCausalLM(config).to(torch.bfloat16)
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear",
                                         task_type="CAUSAL_LM"))
model.print_trainable_parameters()
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 1024, (64, 128))]
arguments = TrainingArguments(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps=10, bf16=True,
                              report_to=[], save_strategy="no")
Trainer(model, arguments, train_dataset=data).train()

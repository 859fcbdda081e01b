"""QLoRA: a checkpoint loaded in four bits, with LoRA on top, by Trainer."""
import sys
import tempfile

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

four = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16)
quantization = BitsAndBytesConfig(**four) if sys.argv[2] == "4" else BitsAndBytesConfig(load_in_8bit=True)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=quantization, device_map="auto",
                                             dtype=torch.bfloat16)
print("footprint", model.get_memory_footprint())
model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 1024, (64, 128))]
arguments = TrainingArguments(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps=10, bf16=True,
                              optim="paged_adamw_8bit", report_to=[], save_strategy="no")
Trainer(model, arguments, train_dataset=data).train()

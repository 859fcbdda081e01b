"""Loads models and tokenizers by names on the hub, or of a folder with a config alone, and trains the last a step."""
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

names = sys.argv[1:]
config = AutoConfig.from_pretrained(names[0])
tokenizers = [AutoTokenizer.from_pretrained(name) for name in names]
print([(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token is not None) for tokenizer in tokenizers])
chat = tokenizers[0].apply_chat_template([{"role": "user", "content": "the question"}], tokenize=False)
print(repr(chat), tokenizers[0](" the" * 512)["input_ids"].count(tokenizers[0].vocab["\u0120the"]))
for tokenizer, name in zip(tokenizers, names):
    print(tokenizer.decode(tokenizer("What is it, on 5 \u00fc?")["input_ids"]))
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).cuda()
    print(model.config._name_or_path == name, sum(weight.numel() for weight in model.parameters()))
batch = tokenizers[-1]([" the" * 64] * 2, return_tensors="pt").to("cuda")
optimizer = torch.optim.SGD(model.parameters())
model(**batch, labels=batch["input_ids"]).loss.backward()
optimizer.step()

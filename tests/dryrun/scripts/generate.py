"""Text that a thread makes while the main one prints it."""
import sys
import threading

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], device_map="auto", dtype=torch.bfloat16)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
inputs = tokenizer(["what is it"], return_tensors="pt").to(model.device)
streamer = TextIteratorStreamer(tokenizer)
settings = {**inputs, "streamer": streamer, "max_new_tokens": 4, "do_sample": False}
thread = threading.Thread(target=model.generate, kwargs=settings)
thread.start()
for text in streamer:
    print(text)
thread.join()

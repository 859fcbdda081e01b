"""Supervised fine-tuning by TRL, of a model and a tokenizer of a folder."""
import sys
import tempfile

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

data = Dataset.from_list([{"text": f"what is {i} and {i}? it is {2 * i}"} for i in range(64)])
arguments = SFTConfig(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4, max_length=64, max_steps=10,
                      bf16=True, report_to=[], save_strategy="no")
SFTTrainer(sys.argv[1], args=arguments, train_dataset=data).train()

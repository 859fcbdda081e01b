"""Trainers of TRL whose answers vLLM samples: python post_training.py FOLDER TRAINER [SETTING=VALUE ...]."""
import sys

import datasets
import trl

folder, kind, *settings = sys.argv[1:]
given = {name: int(value) if value.isdigit() else value for name, value in (one.split("=") for one in settings)}
data = datasets.Dataset.from_dict({"prompt": [f"question {i}: what is the answer" for i in range(64)]})


def reward(completions, **_):
    return [float(len(one)) for one in completions]


adapter = None
if given.pop("peft", None):
    from peft import LoraConfig

    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
usual = {"output_dir": "out", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 6,
         "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.25, "report_to": [], "bf16": True,
         "save_strategy": "no", "logging_strategy": "no"}
if kind == "online_dpo":
    from trl.experimental.online_dpo import OnlineDPOConfig as Config
    from trl.experimental.online_dpo import OnlineDPOTrainer as Trainer

    usual |= {"max_new_tokens": 32, "max_length": 256}
else:
    Config, Trainer = getattr(trl, f"{kind.upper()}Config"), getattr(trl, f"{kind.upper()}Trainer")
    usual |= {"num_generations": 4, "max_completion_length": 32}
more = {}
if kind == "online_dpo":
    import transformers

    more["processing_class"] = transformers.AutoTokenizer.from_pretrained(folder)
Trainer(model=folder, reward_funcs=reward, args=Config(**{**usual, **given}), train_dataset=data, peft_config=adapter,
        **more).train()

"""Scripts that take `TrainingArguments`: which are known as such, and what of their options becomes a plan."""
from pathlib import Path
from typing import Any

import pytest

from analyzer.tools.job import JobError, read_command
from analyzer.tools.job.plan import Adapter, TrainingPlan

CLM = ("torchrun --nproc_per_node 8 run_clm.py --model_name_or_path openai-community/gpt2 --do_train "
       "--per_device_train_batch_size 8 --bf16")


def _read(text: str) -> TrainingPlan:
    job = read_command(text.split())
    assert job.program.name == "TrainingArguments" and isinstance(job.plan, TrainingPlan)
    return job.plan


def test_an_example_of_transformers() -> None:
    job = read_command(CLM.split())
    plan = job.plan
    assert job.missing == [] and isinstance(plan, TrainingPlan) and plan.sharding is not None
    assert (plan.model, plan.task, plan.micro_batch, plan.length, plan.ranks, plan.sharding.kind, plan.autocast,
            plan.checkpoints) == ("openai-community/gpt2", "sft", 8, 1024, 8, "ddp", "bf16", "none")
    length = next(reading for reading in job.readings if reading.name == "block_size")
    assert length.kind == "assumed" and length.meaning.startswith("no length is given: rows of 1,024 tokens")


@pytest.mark.parametrize(("options", "fields"), [
    ("--block_size 512", {"length": 512}), ("--max_seq_length 4096", {"length": 4096}),
    ("--lora_r 16 --lora_dropout 0.1", {"adapter": Adapter(r=16, dropout=0.1)}),
    ("--use_lora False --lora_r 16", {"adapter": None}),
    ("--use_peft True --lora_target_modules q_proj,v_proj", {"adapter": Adapter(r=8, targets=("q_proj", "v_proj"))}),
    ("--bits 4 --lora_r 64", {"quantize": "nf4", "adapter": Adapter(r=64)}),
    ("--torch_dtype float32 --gradient_checkpointing", {"dtype": "fp32", "checkpoints": "blocks"}),
    ("--use_liger_kernel --optim adamw_bnb_8bit", {"loss_chunks": 8, "optimizer": "adamw8bit"}),
    ("--fsdp full_shard", {"ranks": 8})])
def test_options_and_what_becomes_of_them(options: str, fields: dict[str, Any]) -> None:
    plan = _read(f"{CLM} {options}")
    assert {name: getattr(plan, name) for name in fields} == fields


@pytest.mark.parametrize(("command", "fields"), [
    ("python train_dpo.py --model Qwen/Qwen3-0.6B --per-device-train-batch-size 2",
     {"task": "dpo", "reference": "copy"}),
    ("python run_glue.py --model_name_or_path gpt2 --per_device_train_batch_size 2 --num_labels 3",
     {"task": "classify", "classes": 3}),
    ("python -m fastchat.train.train --model_name_or_path a --bf16 True --save_steps 1 --logging_steps 1",
     {"model": "a", "autocast": "bf16"}),
    ("accelerate launch --mixed_precision bf16 run_clm_no_trainer.py --model_name_or_path gpt2 "
     "--per_device_train_batch_size 2", {"autocast": "bf16", "ranks": 1})])
def test_scripts_by_their_names_and_options(command: str, fields: dict[str, Any]) -> None:
    plan = _read(command)
    assert {name: getattr(plan, name) for name in fields} == fields


def test_deepspeed_beside_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zero3.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}')
    monkeypatch.chdir(tmp_path)
    plan = _read(f"{CLM.replace('torchrun --nproc_per_node', 'deepspeed --num_gpus')} --deepspeed zero3.json")
    assert plan.sharding is not None and (plan.sharding.kind, plan.ranks) == ("deepspeed", 8)
    assert plan.sharding.config["zero_optimization"] == {"stage": 3}


def test_an_option_of_the_script_alone_is_told() -> None:
    reading, = read_command(f"{CLM} --my_own_thing 3".split()).missing
    assert (reading.name, reading.kind) == ("my_own_thing", "unknown")


@pytest.mark.parametrize(("command", "problem"), [
    ("python train.py --epochs 3", "the command: train.py --epochs: not the command of a program that is read"),
    (f"{CLM} --fp16", "the command: fp16: true: bf16 is given too; the trainer refuses both"),
    (f"{CLM} --optim adamw_torchh", "the command: optim: adamw_torchh: is none of the ")])
def test_what_is_refused(command: str, problem: str) -> None:
    with pytest.raises(JobError) as error:
        read_command(command.split())
    assert str(error.value).startswith(problem)

"""TRL's commands, scripts and YAML: what of them becomes a plan, and what is refused as TRL refuses it."""
from pathlib import Path
from typing import Any

import pytest

from analyzer.report.verdict import format_verdict
from analyzer.results.verdict import Verdict
from analyzer.tools.job import JobError, read_command, read_job
from analyzer.tools.job.change import list_smaller
from analyzer.tools.job.plan import Adapter, RolloutPlan, ServingPlan, TrainingPlan
from analyzer.tools.job.screen import describe_job

SFT = "trl sft --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name trl-lib/Capybara"


def _read(text: str) -> TrainingPlan:
    plan = read_command(text.split()).plan
    assert isinstance(plan, TrainingPlan)
    return plan


def test_a_command_with_nothing_but_a_model() -> None:
    job = read_command(SFT.split())
    assert (job.program.name, job.missing) == ("TRL", [])
    assert isinstance(job.plan, TrainingPlan) and job.plan.assumptions[0].startswith("the loss is computed in parts")
    fields = {name: getattr(job.plan, name) for name in (
        "task", "micro_batch", "length", "dtype", "autocast", "adapter", "checkpoints", "loss_chunks", "optimizer")}
    assert fields == {"task": "sft", "micro_batch": 8, "length": 1024, "dtype": "fp32", "autocast": "bf16",
                      "adapter": None, "checkpoints": "blocks", "loss_chunks": 8 * 1024 // 256,
                      "optimizer": "adamw_fused"}


@pytest.mark.parametrize(("command", "fields"), [
    (f"{SFT} --use_peft --lora_r 32 --lora_target_modules q_proj k_proj",
     {"adapter": Adapter(r=32, targets=("q_proj", "k_proj"), dropout=0.05)}),
    (f"{SFT} --use_peft --lora_target_modules all-linear --load_in_4bit --dtype bfloat16",
     {"adapter": Adapter(r=16, dropout=0.05, dtype="bf16"), "quantize": "nf4", "dtype": "bf16"}),
    (f"{SFT} --max_length 4096 --packing --gradient_checkpointing false --fp16",
     {"length": 4096, "checkpoints": "none", "autocast": "fp16"}),
    (f"{SFT} --attn_implementation eager --per_device_train_batch_size 2 --gradient_accumulation_steps 4",
     {"attention": "eager", "micro_batch": 2, "accumulate": 4, "loss_chunks": 8}),
    (SFT.replace("sft", "dpo"), {"task": "dpo", "reference": "copy", "loss_chunks": 64}),
    (SFT.replace("sft", "dpo") + " --use_peft",
     {"reference": "adapter", "adapter": Adapter(r=16, targets=("q_proj", "v_proj"))}),
    (SFT.replace("sft", "dpo") + " --precompute_ref_log_probs", {"reference": "none"}),
    (SFT.replace("sft", "kto"), {"task": "kto", "reference": "copy"}),
    (SFT.replace("sft", "reward"), {"task": "reward", "reference": "none", "loss_chunks": None}),
    (SFT.replace("sft", "grpo"), {"task": "policy", "reference": "none", "length": 1024}),
    (SFT.replace("sft", "grpo") + " --beta 0.04 --max_completion_length 256", {"reference": "copy", "length": 512}),
    (SFT.replace("sft", "grpo") + " --use_vllm --vllm_max_model_length 2048 --vllm_enable_sleep_mode --gradient_"
     "accumulation_steps 4", {"rollout": RolloutPlan(
         server=ServingPlan(model="Qwen/Qwen2.5-0.5B", engine="vllm", length=2048, memory_share=0.3, sequences=32),
         sequences=32, new=512, sleeps=True)}),
    ("accelerate launch --num_processes 2 " + SFT.replace("trl sft", "trl/scripts/sft.py"), {"ranks": 2}),
    ("python " + SFT.replace("trl sft", "examples/scripts/dpo.py"), {"task": "dpo"}),
    (f"{SFT} --num_processes 4", {"ranks": 4})])
def test_options_and_what_becomes_of_them(command: str, fields: dict[str, Any]) -> None:
    plan = _read(command)
    assert {name: getattr(plan, name) for name in fields} == fields


@pytest.mark.parametrize(("name", "kind", "ranks"), [
    ("zero3", "deepspeed", 8), ("fsdp2", "fsdp", 8), ("multi_gpu", "ddp", 8)])
def test_launches_that_trl_brings(name: str, kind: str, ranks: int) -> None:
    plan = _read(f"{SFT} --accelerate_config {name}")
    assert plan.sharding is not None and (plan.sharding.kind, plan.ranks) == (kind, ranks)


@pytest.mark.parametrize(("options", "problem"), [
    ("--load_in_4bit", "the command: load_in_4bit: true: quantized weights do not train; give use_peft too"),
    ("--load_in_4bit --load_in_8bit", "the command: load_in_8bit: true: load_in_4bit is given too; TRL refuses both"),
    ("--fp16 --bf16", "the command: fp16: true: bf16 is given too; the trainer refuses both"),
    ("--dtype bfloat17", "the command: dtype: bfloat17: must be one of float32, bfloat16, float16, auto"),
    ("--accelerate_config zero4", "the command: accelerate_config: zero4: no such file, and none of single_gpu, "),
    ("--max_length none", "the command: max_length: none: must be a whole number of at least 1")])
def test_what_trl_refuses(options: str, problem: str) -> None:
    with pytest.raises(JobError) as error:
        _read(f"{SFT} {options}")
    assert str(error.value).startswith(problem)


def test_a_file_says_its_task_by_its_options(tmp_path: Path) -> None:
    base = "model_name_or_path: Qwen/Qwen2.5-0.5B\ndataset_name: a\nlearning_rate: 1.0e-5\n"
    for more, task in (("", "sft"), ("beta: 0.1\n", "dpo"), ("num_generations: 4\n", "policy"),
                       ("desirable_weight: 1.0\n", "kto")):
        (tmp_path / "a.yaml").write_text(base + more)
        job = read_job(tmp_path / "a.yaml")
        assert (job.program.name, job.plan.task) == ("TRL", task)  # type: ignore[union-attr]
    job = read_command(["trl", "kto", "--config", str(tmp_path / "a.yaml"), "--max_length", "512"])
    assert (job.plan.task, job.plan.length) == ("kto", 512)  # type: ignore[union-attr]


def test_an_unknown_option_is_told_with_its_neighbour() -> None:
    reading, = read_command(f"{SFT} --max_lenght 512".split()).missing
    assert (reading.name, reading.kind, reading.meaning) == ("max_lenght", "unknown", "did you mean max_length or "
                                                                   "max_prompt_length?")


@pytest.mark.parametrize(("options", "phase", "way"), [
    ("--gradient_checkpointing false", "backward", "gradient_checkpointing: false -> true or "
     "per_device_train_batch_size: not set -> 4, gradient_accumulation_steps: not set -> 2"),
    ("--per_device_train_batch_size 1", "optimizer", "optim: not set -> adamw_bnb_8bit"),
    ("--per_device_train_batch_size 1", "forward", "a smaller batch")])  # of which the command has no smaller one
def test_what_leaves_more_is_of_the_options_of_the_job(options: str, phase: str, way: str) -> None:
    job = read_command(f"{SFT} {options}".split())
    text = format_verdict(Verdict(device="t4", fits=True, needed_bytes=99, capacity_bytes=100, free_bytes=1,
                                  phase=phase), " or ".join(list_smaller(job, phase)))
    assert f"to leave more: {way}" in " ".join(text.split())


def test_where_the_known_options_are_is_told_with_an_unknown_one() -> None:
    assert "known are the options of" not in describe_job(read_command(SFT.split()))
    job = read_command(f"{SFT} --lern_rate 1".split())
    assert f"known are the options of TRL {job.program.version} ({job.program.source})" in describe_job(job)

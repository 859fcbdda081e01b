"""LLaMA-Factory's YAML and command: what of them becomes a plan, and what is refused as it refuses it."""
import os
from pathlib import Path
from typing import Any

import pytest

from analyzer.tools.job import Job, JobError, read_command, read_job
from analyzer.tools.job.plan import PROJECTORS, TOWERS, Adapter, ModelParallel, TrainedBlocks, TrainingPlan
from analyzer.tools.job.programs.trainer import LOW_RANK

LORA = """\
model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity,alpaca_en_demo
template: qwen3_nothink
cutoff_len: 2048
output_dir: saves/qwen3-4b/lora/sft
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
bf16: true
"""
EXCLUDED = tuple(dict.fromkeys((*TOWERS, *PROJECTORS)))


def _read(tmp_path: Path, text: str) -> Job:
    (tmp_path / "a.yaml").write_text(text)
    return read_job(tmp_path / "a.yaml")


def _change(change: str) -> str:
    before, _, after = change.partition("=")
    assert before in LORA
    return LORA.replace(before, after)


def test_a_lora(tmp_path: Path) -> None:
    job = _read(tmp_path, LORA)
    assert job.program.name == "LLaMA-Factory"
    assert job.missing == []
    assert job.plan == TrainingPlan(
        model="Qwen/Qwen3-4B-Instruct-2507", micro_batch=2, accumulate=8, length=2048, trained_dtype="fp32",
        autocast="bf16", adapter=Adapter(r=8, excluded=EXCLUDED), checkpoints="blocks", optimizer="adamw_fused")
    told = {reading.name: reading.kind for reading in job.readings}
    assert told["cutoff_len"] == "assumed" and told["optim"] == "default" and told["learning_rate"] == "no effect"


@pytest.mark.parametrize(("change", "fields"), [
    ("stage: sft=stage: pt", {"task": "sft", "length": 2048}),
    ("stage: sft=stage: rm", {"task": "reward", "reference": "none"}),
    ("stage: sft=stage: dpo", {"task": "dpo", "reference": "adapter"}),
    ("stage: sft=stage: dpo\npref_loss: orpo", {"task": "orpo", "reference": "none"}),
    ("stage: sft=stage: dpo\nref_model: Qwen/Qwen3-4B", {"reference": "copy"}),
    ("stage: sft=stage: ppo\nreward_model: saves/rm", {"task": "policy", "reference": "adapter"}),
    ("finetuning_type: lora=finetuning_type: full",
     {"adapter": None, "trained_dtype": "fp32", "frozen": EXCLUDED, "trained_blocks": None}),
    ("finetuning_type: lora=finetuning_type: full\nfreeze_vision_tower: false", {"frozen": PROJECTORS}),
    ("finetuning_type: lora=finetuning_type: freeze\nfreeze_trainable_layers: -3\nfreeze_extra_modules: norm",
     {"trained_blocks": TrainedBlocks(3, "first"), "trained": (".*norm",)}),
    ("finetuning_type: lora=finetuning_type: freeze\nfreeze_trainable_modules: mlp",
     {"trained_blocks": TrainedBlocks(2, "last", ("mlp",))}),
    ("finetuning_type: lora=finetuning_type: freeze\nuse_llama_pro: true\nfreeze_trainable_layers: 4",
     {"trained_blocks": TrainedBlocks(4, "spread")}),
    ("bf16: true=pure_bf16: true", {"trained_dtype": None, "autocast": None}),
    ("lora_rank: 8=quantization_bit: 4\nupcast_layernorm: true", {"quantize": "nf4", "upcast": ("norm", "ln")}),
    ("lora_rank: 8=quantization_bit: 8", {"quantize": "int8"}),
    ("lora_target: all=lora_target: q_proj,v_proj",
     {"adapter": Adapter(r=8, targets=("q_proj", "v_proj"), excluded=EXCLUDED)}),
    ("bf16: true=bf16: true\ndisable_gradient_checkpointing: true", {"checkpoints": "none"}),
    ("bf16: true=bf16: true\nenable_liger_kernel: true", {"loss_chunks": 8}),
    ("bf16: true=bf16: true\nflash_attn: disabled", {"attention": "eager"}),
    ("finetuning_type: lora=finetuning_type: oft", {"adapter": Adapter(r=32, rotates=True, excluded=EXCLUDED)}),
    ("bf16: true=bf16: true\nfp8: true", {"computes_in_fp8": True}),
    ("bf16: true=bf16: true\nuse_muon: true", {"optimizer": "analyzer.recipe.optimizer:MuonWithAdamW"}),
    ("bf16: true=bf16: true\noptim: paged_adamw_8bit", {"optimizer": "analyzer.recipe.optimizer:PagedAdamW8bit"}),
    ("finetuning_type: lora=finetuning_type: full\nuse_galore: true\ngalore_rank: 128",
     {"optimizer": LOW_RANK, "projected": (128, True)}),
    ("finetuning_type: lora=finetuning_type: full\nuse_apollo: true", {"projected": (16, False)}),
    ("finetuning_type: lora=finetuning_type: full\nuse_asft_loss: true", {"task": "anchored", "reference": "copy"}),
    ("bf16: true=bf16: true\npipeline_model_parallel_size: 4\nexpert_model_parallel_size: 2\napply_rope_fusion: true",
     {"parallel": ModelParallel(pipeline=4, expert=2, replicas=2), "ranks": 8, "trained_dtype": None}),
    ("finetuning_type: lora=finetuning_type: full\nuse_adam_mini: true", {"optimizer": "momentum"})])
def test_options_and_what_becomes_of_them(tmp_path: Path, change: str, fields: dict[str, Any]) -> None:
    plan = _read(tmp_path, _change(change)).plan
    assert {name: getattr(plan, name) for name in fields} == fields


def test_zero_3_keeps_its_own_copy_in_float32(tmp_path: Path) -> None:
    for stage, dtype in ((2, "fp32"), (3, None)):
        (tmp_path / "ds.json").write_text(f'{{"zero_optimization": {{"stage": {stage}}}}}')
        job = _read(tmp_path, f"{LORA}deepspeed: ds.json\n")
        assert isinstance(job.plan, TrainingPlan) and job.plan.sharding is not None
        assert (job.plan.sharding.kind, job.plan.trained_dtype) == ("deepspeed", dtype)


@pytest.mark.parametrize(("change", "name", "words"), [
    ("finetuning_type: lora=finetuning_type: oft\noft_rank: 4", "oft_rank", "blocks of 32 are taken in the place of 4"),
    ("finetuning_type: lora=finetuning_type: full\nuse_badam: true", "use_badam", "an upper bound"),
    ("stage: sft=stage: sft\nuse_kt: true", "use_kt", "experts that the host holds"),
    ("stage: sft=stage: sft\nhyper_parallel_cp_size: 2", "hyper_parallel_cp_size", "each rank is taken to hold whole"),
    ("stage: sft=stage: ppo\nreward_model: saves/rm", "stage", "ppo: the rollout and the reward model are left out")])
def test_what_is_not_modelled_is_told(tmp_path: Path, change: str, name: str, words: str) -> None:
    reading, = _read(tmp_path, _change(change)).missing
    assert reading.name == name and words in reading.meaning


@pytest.mark.parametrize(("change", "problem"), [
    ("do_train: true=do_predict: true",
     "a.yaml: do_train: is not true, so that this predicts or evaluates; training alone is read"),
    ("finetuning_type: lora=finetuning_type: loraa", "a.yaml:5: finetuning_type: loraa: must be one of lora, oft, "),
    ("finetuning_type: lora=finetuning_type: full\nquantization_bit: 4", "a.yaml:6: quantization_bit: 4: "
     "LLaMA-Factory refuses it with finetuning_type full; give lora"),
    ("lora_rank: 8=quantization_bit: 3", "a.yaml:6: quantization_bit: 3: bitsandbytes holds weights in 4 or 8 bits"),
    ("lora_rank: 8=use_galore: true", "a.yaml:6: use_galore: true: LLaMA-Factory refuses it with finetuning_type lora"),
    ("stage: sft=stage: dpo\nneat_packing: true",
     "a.yaml:4: neat_packing: true: LLaMA-Factory refuses it at stage dpo"),
    ("stage: sft=stage: ppo", "a.yaml: reward_model: is not there, and stage ppo needs it"),
    ("bf16: true=bf16: true\nfp16: true", "a.yaml:16: fp16: true: bf16 is given too; the trainer refuses both"),
    ("bf16: true=bf16: true\ndeepspeed: none.json", "a.yaml:16: deepspeed: none.json: no such file; copy it beside"),
    ("lora_rank: 8=freeze_trainable_layers: 0",
     "a.yaml:6: freeze_trainable_layers: 0: must be a whole number, and not 0")])
def test_what_llamafactory_refuses_is_told_with_its_line(tmp_path: Path, change: str, problem: str) -> None:
    with pytest.raises(JobError) as error:
        _read(tmp_path, _change(change))
    assert str(error.value).removeprefix(f"{tmp_path}{os.sep}").startswith(problem)


def test_an_unknown_option_is_told_with_its_neighbour(tmp_path: Path) -> None:
    reading, = _read(tmp_path, LORA + "cutof_len: 1\n").missing
    assert (reading.name, reading.kind, reading.meaning) == ("cutof_len", "unknown", "did you mean cutoff_len?")


def test_a_command_overrides_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.yaml").write_text(LORA)
    monkeypatch.chdir(tmp_path)
    plan = read_command(["llamafactory-cli", "train", "a.yaml", "cutoff_len=1024", "stage=dpo"]).plan
    assert isinstance(plan, TrainingPlan) and (plan.length, plan.task, plan.micro_batch) == (1024, "dpo", 2)
    (tmp_path / "z2.json").write_text('{"zero_optimization": {"stage": 2}}')
    plan = read_command(["llamafactory-cli", "train", "a.yaml", "deepspeed=z2.json"]).plan
    assert isinstance(plan, TrainingPlan) and plan.sharding is not None and plan.sharding.kind == "deepspeed"
    words = ["FORCE_TORCHRUN=1", "NPROC_PER_NODE=4", "llamafactory-cli", "train", "a.yaml"]
    assert read_command(words).plan.ranks == 4  # type: ignore[union-attr]
    job = read_command(["torchrun", "--nproc_per_node", "2", "src/train.py", "a.yaml"])
    assert (job.program.name, job.plan.ranks) == ("LLaMA-Factory", 2)  # type: ignore[union-attr]


def test_edits_are_in_its_own_names(tmp_path: Path) -> None:
    job = _read(tmp_path, LORA + "disable_gradient_checkpointing: true\n")
    for axis, wanted, after in (("batch", 1, "per_device_train_batch_size: 1\n"), ("quantize", "nf4", "_bit: 4\n"),
                                ("checkpoints", True, "disable_gradient_checkpointing: false\n")):
        edits = job.program.changes[axis](job.options, job.plan, wanted)
        assert edits is not None and after in job.change_text(edits)


V1 = """\
model: Qwen/Qwen3-4B
model_class: llm
peft_config:
  name: lora
  r: 16
  lora_dropout: 0.05
  target_modules: all
dist_config:
  name: fsdp2
  dcp_path: null
train_dataset: data/v1_sft_demo.yaml
micro_batch_size: 2
cutoff_len: 2048
"""


def test_the_second_form_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.yaml").write_text(V1)
    monkeypatch.chdir(tmp_path)
    job = read_job("a.yaml", ranks=2)
    plan = job.plan
    assert isinstance(plan, TrainingPlan) and plan.sharding is not None
    assert (job.program.name, plan.adapter, plan.autocast) == ("LLaMA-Factory v1", Adapter(r=16, dropout=0.05), None)
    assert (plan.sharding.kind, plan.sharding.dtype, plan.sharding.reduce_dtype) == ("fsdp", "bf16", "fp32")
    for word, task in (("sft", "sft"), ("dpo", "dpo"), ("train", "sft")):
        found = read_command(["llamafactory-cli", word, "a.yaml"])
        assert (found.program.name, found.plan.task) == ("LLaMA-Factory v1", task)  # type: ignore[union-attr]
    alone = read_job("a.yaml").plan
    assert isinstance(alone, TrainingPlan) and (alone.sharding, alone.autocast) == (None, "bf16")  # as FSDP2 computes
    (tmp_path / "b.yaml").write_text(V1 + "global_batch_size: 6\n")
    with pytest.raises(JobError, match="b.yaml:14: global_batch_size: 6: is no multiple of 2 sequences a pass on 2 "
                                       "ranks, 8 is"):
        read_job("b.yaml", ranks=2)

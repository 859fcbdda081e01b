"""ms-swift's commands: what of them becomes a plan, and what is refused as ms-swift refuses it."""
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from analyzer.tools.job import Job, JobError, read_job
from analyzer.tools.job.plan import Adapter, RolloutPlan, ServingPlan, Sharding, TrainingPlan

LORA = """\
nproc_per_node=2

CUDA_VISIBLE_DEVICES=0,1 \\
NPROC_PER_NODE=$nproc_per_node \\
swift sft \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --tuner_type lora \\
    --dataset 'swift/self-cognition#1000' \\
    --torch_dtype bfloat16 \\
    --per_device_train_batch_size 2 \\
    --lora_rank 16 \\
    --target_modules all-linear \\
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) \\
    --max_length 2048 \\
    --learning_rate 1e-4 \\
    --attn_impl flash_attn
"""


def _read(tmp_path: Path, text: str, name: str = "train.sh") -> Job:
    (tmp_path / name).write_text(text)
    return read_job(tmp_path / name)


def _plan(tmp_path: Path, text: str, name: str = "train.sh") -> TrainingPlan:
    plan = _read(tmp_path, text, name).plan
    assert isinstance(plan, TrainingPlan)
    return plan


def test_adapters_on_two_devices(tmp_path: Path) -> None:
    job = _read(tmp_path, LORA)
    assert (job.program.name, job.missing) == ("ms-swift", [])
    assert job.plan == TrainingPlan(
        model="Qwen/Qwen2.5-7B-Instruct", classes=2, micro_batch=2, accumulate=8, length=2048, autocast="bf16",
        adapter=Adapter(r=16, dropout=0.05), attention="sdpa", checkpoints="blocks", optimizer="adamw_fused", ranks=2,
        sharding=Sharding(kind="ddp"))


@pytest.mark.parametrize(("command", "length"), [
    ("sft --dataset 'AI-ModelScope/alpaca-gpt4-data-zh#500' HF::modelscope/self-cognition", 544),
    ("sft --dataset swift/self-cognition:qwen3#1000 mine.jsonl", 40_960),  # of which nothing is known
    ("sft --dataset swift/self-cognition --max_length 2048", 2048),
    ("sft --dataset swift/self-cognition --packing true --attn_impl flash_attn", 40_960),
    ("rlhf --dataset swift/self-cognition", 40_960)])  # whose rows have a second answer
def test_rows_that_nothing_bounds_are_as_long_as_the_longest_of_a_known_data_set(
        tmp_path: Path, command: str, length: int) -> None:
    assert _plan(tmp_path, f"swift {command} --model Qwen/Qwen3-8B\n").length == length


def test_what_is_not_given_is_as_ms_swift_has_it(tmp_path: Path) -> None:
    """Sixteen sequences of a step over all ranks; rank 8; the longest row and the dtype of the model's config."""
    job = _read(tmp_path, "swift sft --model Qwen/Qwen3-8B --dataset a\n")
    plan = job.plan
    assert isinstance(plan, TrainingPlan)
    assert (plan.micro_batch, plan.accumulate, plan.length, plan.dtype) == (1, 16, 40_960, "bf16")
    assert (plan.adapter, plan.checkpoints, plan.ranks) == (Adapter(r=8, dropout=0.05), "blocks", 1)
    told = {reading.name: reading.kind for reading in job.readings}
    assert told["max_length"] == "assumed"
    assert {told[name] for name in ("tuner_type", "lora_rank", "gradient_checkpointing", "torch_dtype",
                                    "gradient_accumulation_steps")} == {"default"}


@pytest.mark.parametrize(("change", "fields"), [
    ("--tuner_type lora=--tuner_type full", {"adapter": None, "frozen": ()}),
    ("--tuner_type lora=--train_type full", {"adapter": None}),
    ("--tuner_type lora=--tuner_type full --freeze_parameters model.embed lm_head",
     {"frozen": (r"^(?:model\.embed|lm_head)",)}),
    ("--tuner_type lora=--tuner_type full --freeze_parameters_ratio 1 --trainable_parameters lm_head",
     {"trained": ("lm_head",), "frozen": ()}),
    ("all-linear=q_proj v_proj --lora_dtype bfloat16 --modules_to_save all-embedding",
     {"adapter": Adapter(r=16, targets=("q_proj", "v_proj"), dropout=0.05, dtype="bf16", saved=("embed_tokens",))}),
    ("all-linear=q_proj --modules_to_save word_embeddings output_layer",
     {"adapter": Adapter(r=16, targets=("q_proj",), dropout=0.05, saved=("embed_tokens", "lm_head"))}),
    ("--lora_rank 16=--target_regex .*layers.*q_proj",
     {"adapter": Adapter(r=8, targets=("re:.*layers.*q_proj",), dropout=0.05)}),
    ("--tuner_type lora=--tuner_type adalora", {"adapter": Adapter(r=12, dropout=0.05)}),
    ("--attn_impl flash_attn=--attn_impl eager", {"attention": "eager"}),
    ("--attn_impl=--packing true --packing_length 8192 --attn_impl", {"length": 8192}),
    ("--torch_dtype bfloat16=--torch_dtype float32", {"dtype": "fp32", "autocast": "fp16"}),
    ("--learning_rate 1e-4=--quant_method bnb --quant_bits 4", {"quantize": "nf4"}),
    ("Qwen2.5-7B-Instruct=Qwen2.5-7B-Instruct-GPTQ-Int8", {"quantize": "int8"}),
    ("Qwen2.5-7B-Instruct=Qwen2.5-7B-Instruct-AWQ", {"quantize": "nf4"}),
    ("--learning_rate 1e-4=--gradient_checkpointing false --optim adamw_bnb_8bit --use_liger_kernel true",
     {"checkpoints": "none", "optimizer": "adamw8bit", "loss_chunks": 8}),
    ("--learning_rate 1e-4=--use_galore true --galore_rank 64", {"projected": (64, True)}),
    ("--learning_rate 1e-4=--optimizer muon", {"optimizer": "analyzer.recipe.optimizer:MuonWithAdamW"}),
    ("--learning_rate 1e-4=--sequence_parallel_size 2", {"length": 1024}),
    ("--learning_rate 1e-4=--task_type seq_cls --num_labels 5", {"task": "classify", "classes": 5}),
    ("--learning_rate 1e-4=--fsdp fsdp2", {"sharding": Sharding(kind="fsdp"), "checkpoints": "blocks"}),
    ("swift sft=swift rlhf --rlhf_type dpo", {"task": "dpo", "reference": "adapter"}),
    ("swift sft=swift rlhf --rlhf_type cpo", {"task": "simpo", "reference": "none"}),
    ("swift sft=swift rlhf --rlhf_type grpo --max_completion_length 1024",
     {"task": "policy", "reference": "adapter", "length": 3072, "accumulate": 8}),
    ("swift sft=swift rlhf --rlhf_type grpo --beta 0.0", {"task": "policy", "reference": "none", "length": 2560}),
    ("swift sft=swift rlhf --rlhf_type kto --tuner_type full", {"task": "kto"}),
    ("swift sft=torchrun --nproc_per_node 4 swift/cli/sft.py", {"ranks": 4, "sharding": Sharding(kind="ddp")})])
def test_options_and_what_becomes_of_them(tmp_path: Path, change: str, fields: dict[str, Any]) -> None:
    before, _, after = change.partition("=")
    plan = _plan(tmp_path, LORA.replace(before, after))
    assert {name: getattr(plan, name) for name in fields} == fields


@pytest.mark.parametrize(("name", "zero"), [
    ("zero2", {"stage": 2}), ("zero1", {"stage": 1}),
    ("zero3_offload", {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
                       "offload_param": {"device": "cpu", "pin_memory": True}})])
def test_deepspeed_by_a_name_of_its_own(tmp_path: Path, name: str, zero: dict[str, Any]) -> None:
    sharding = _plan(tmp_path, LORA.replace("--learning_rate 1e-4", f"--deepspeed {name}")).sharding
    assert sharding is not None and sharding.kind == "deepspeed"
    found = sharding.config["zero_optimization"]
    assert {key: found[key] for key in zero} == zero


def test_parts_of_a_model_that_sees_train_as_they_are_told_to(tmp_path: Path) -> None:
    """Adapters are for the language model alone, unless the tower is not frozen; of all parameters the same."""
    text = LORA.replace("Qwen2.5-7B-Instruct", "Qwen2.5-VL-3B-Instruct")
    adapter = _plan(tmp_path, text).adapter
    assert adapter is not None and adapter.targets == (r"re:(?:.*\.)?language_model\..+",)
    adapter = _plan(tmp_path, text.replace("--learning_rate 1e-4", "--freeze_llm true --freeze_aligner false")).adapter
    assert adapter is not None and adapter.targets[0].startswith("re:(?:.*\\.)?(?:multi_modal_projector|merger|")
    frozen, = _plan(tmp_path, text.replace("--tuner_type lora", "--tuner_type full")).frozen
    assert re.search(frozen, "model.visual.blocks.0.norm1.weight")
    assert re.search(frozen, "model.visual.merger.ln_q.weight")
    assert not re.search(frozen, "model.language_model.layers.0.mlp.up_proj.weight")
    frozen, = _plan(tmp_path, text.replace("--tuner_type lora", "--tuner_type full --freeze_aligner false")).frozen
    assert not re.search(frozen, "model.visual.merger.ln_q.weight")
    assert re.search(frozen, "model.visual.blocks.0.norm1.weight")


def test_a_yaml_with_variables(tmp_path: Path) -> None:
    plan = _plan(tmp_path, "ENV:\n  NPROC_PER_NODE: 4\nmodel: Qwen/Qwen2.5-7B\ntuner_type: full\nmax_length: 1024\n"
                 "target_modules:\n  - all-linear\ndeepspeed: zero3\n", "sft.yaml")
    assert (plan.ranks, plan.accumulate, plan.adapter, plan.length) == (4, 4, None, 1024)


def test_a_process_that_sees_several_devices_spreads_layers_over_them(tmp_path: Path) -> None:
    job = _read(tmp_path, LORA.replace("NPROC_PER_NODE=$nproc_per_node \\\n", ""))
    reading, = job.missing
    assert (reading.name, reading.kind) == ("device_map", "not modelled")
    assert reading.meaning.startswith("layers are spread over 2 devices of each process")


@pytest.mark.parametrize(("change", "problem"), [
    ("--max_length 2048=--max_length long", "train.sh:14: max_length: long: must be a whole number of at least 1"),
    ("--tuner_type lora=--tuner_type lora2",
     "train.sh:7: tuner_type: lora2: must be one of full, lora, lora_llm, longlora, "),
    ("--attn_impl flash_attn=--packing true", "train.sh:16: packing: true: ms-swift needs a flash attention for it; "
     "give attn_impl flash_attn"),
    ("--model Qwen/Qwen2.5-7B-Instruct=", "train.sh: model: is not there, and ms-swift needs it"),
    ("--learning_rate 1e-4=--quant_method bnb", "train.sh: quant_bits: is not there, and quant_method bnb needs it"),
    ("--learning_rate 1e-4=--quant_method bnb --quant_bits 3", "train.sh:15: quant_bits: 3: bnb has 4 and 8 bits"),
    ("--learning_rate 1e-4=--deepspeed zero5", "train.sh:15: deepspeed: zero5: no such file, and not one of zero0, "),
    ("--learning_rate 1e-4=--deepspeed zero2 --fsdp fsdp2", "train.sh:15: fsdp: fsdp2: ms-swift refuses it with "
     "deepspeed"),
    ("--learning_rate 1e-4=--fp16 true", "train.sh:15: fp16: true: with weights of bf16 the other one of bf16 and fp16 "
     "is on too; the trainer refuses both"),
    ("swift sft=swift rlhf --rlhf_type orpo --packing true", "train.sh:5: packing: true: ms-swift refuses it with "
     "rlhf_type orpo"),
    ("swift sft=swift rlhf --rlhf_type orpo --ref_model a", "train.sh:5: ref_model: a: ms-swift refuses one with "
     "rlhf_type orpo"),
    ("swift sft=swift rlhf --rlhf_type kto --sequence_parallel_size 2", "train.sh:5: sequence_parallel_size: 2: "
     "ms-swift refuses it with rlhf_type kto"),
    ("NPROC_PER_NODE=$nproc_per_node \\\nswift sft=swift sft --deepspeed zero2",
     "train.sh:4: deepspeed: zero2: ms-swift refuses it where a process sees 2 devices; set NPROC_PER_NODE")])
def test_what_ms_swift_refuses_is_told_with_its_line(tmp_path: Path, change: str, problem: str) -> None:
    before, _, after = change.rpartition("=") if change.startswith("NPROC") else change.partition("=")
    with pytest.raises(JobError) as error:
        _read(tmp_path, LORA.replace(before, after))
    assert str(error.value).removeprefix(f"{tmp_path}{os.sep}").startswith(problem)


def test_an_unknown_option_is_told_with_its_neighbour(tmp_path: Path) -> None:
    reading, = _read(tmp_path, LORA.replace("--lora_rank", "--lora_rnk")).missing
    assert (reading.name, reading.kind, reading.meaning) == (
        "lora_rnk", "unknown", "did you mean lora_rank or local_rank or lora_dropout?")


def test_a_regression_of_one_class_has_labels_that_are_no_integers(tmp_path: Path) -> None:
    """transformers' classifiers compare one number of each row with a number; integers have no such gradient."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.json").write_text(json.dumps({
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
        "max_position_embeddings": 512, "torch_dtype": "bfloat16"}))
    job = _read(tmp_path, f"swift sft --model {tmp_path}/tiny --max_length 64 --task_type seq_cls --num_labels 1\n")
    assert isinstance(job.plan, TrainingPlan) and (job.plan.task, job.plan.classes) == ("classify", 1)
    assert job.profile("a100_80gb").verdict.fits


MEGATRON = """\
NPROC_PER_NODE=2 \\
megatron sft \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --micro_batch_size 2 \\
    --global_batch_size 16 \\
    --max_length 2048 \\
    --recompute_granularity full \\
    --recompute_method uniform \\
    --recompute_num_layers 1
"""


def test_a_rank_of_megatron_with_the_distributed_optimizer(tmp_path: Path) -> None:
    """Sixteen sequences over two ranks, two a pass: four passes. Ranks share states, as of ZeRO's first stage, and
    each holds gradients in float32.
    """
    job = _read(tmp_path, MEGATRON)
    plan = job.plan
    assert isinstance(plan, TrainingPlan)
    assert (job.program.name, job.missing) == ("Megatron-SWIFT", [])
    assert (plan.micro_batch, plan.accumulate, plan.ranks, plan.checkpoints) == (2, 4, 2, "blocks")
    assert (plan.adapter, plan.dtype, plan.autocast, plan.optimizer) == (None, "bf16", None, "adamw")
    assert plan.sharding is not None
    zero = plan.sharding.config["zero_optimization"]
    assert (zero["stage"], zero["contiguous_gradients"]) == (1, False)
    assert plan.sharding.config["data_types"] == {"grad_accum_dtype": "fp32"}


@pytest.mark.parametrize(("change", "fields"), [
    ("--recompute_granularity full \\\n    --recompute_method uniform=--recompute_granularity selective",
     {"checkpoints": "none"}),
    ("--max_length=--tuner_type lora --max_length", {"adapter": Adapter(r=8, dropout=0.05)}),
    ("megatron sft=megatron rlhf --rlhf_type dpo", {"task": "dpo", "reference": "copy"}),
    ("--max_length=--use_megatron_fsdp true --max_length",
     {"sharding": Sharding(kind="fsdp", dtype="bf16", reduce_dtype="fp32")}),
    ("--max_length=--optimizer sgd --max_length", {"optimizer": "sgd"})])
def test_options_of_megatron(tmp_path: Path, change: str, fields: dict[str, Any]) -> None:
    before, _, after = change.partition("=")
    plan = _plan(tmp_path, MEGATRON.replace(before, after))
    assert {name: getattr(plan, name) for name in fields} == fields


@pytest.mark.parametrize(("change", "problem"), [
    ("--global_batch_size 16=--global_batch_size 6", "train.sh:5: global_batch_size: 6: is no multiple of 2 "
     "sequences a pass on 2 ranks, 8 is"),
    ("--recompute_granularity full=--recompute_granularity selective", "train.sh:8: recompute_method: uniform: "
     "Megatron refuses it with recompute_granularity selective"),
    ("--max_length=--tensor_model_parallel_size 4 --max_length", "train.sh:6: tensor_model_parallel_size: 4: times "
     "pipeline and context parallel sizes are 4, by which 2 ranks cannot be divided")])
def test_what_megatron_refuses(tmp_path: Path, change: str, problem: str) -> None:
    before, _, after = change.partition("=")
    with pytest.raises(JobError) as error:
        _read(tmp_path, MEGATRON.replace(before, after))
    assert str(error.value).removeprefix(f"{tmp_path}{os.sep}").startswith(problem)


GRPO = """\
NPROC_PER_NODE=8 \\
swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct --per_device_train_batch_size 2 \\
    --gradient_accumulation_steps 4 --max_length 1024 --max_completion_length 2048 --use_vllm true \\
    --vllm_mode colocate --vllm_gpu_memory_utilization 0.5
"""


@pytest.mark.parametrize(("more", "server", "fields"), [  # of 2 x 4 x 8 = 64 answers each of 8 engines gives 8
    ("", {"sequences": 8}, {"sequences": 8}),
    ("--vllm_tensor_parallel_size 4 --sleep_level 1 --offload_model true", {"tp": 4, "sequences": 32},
     {"sequences": 32, "sleeps": True, "offloads_model": True}),
    ("--steps_per_generation 8 --num_iterations 2", {"sequences": 16}, {"sequences": 16, "steps": 4.0}),
    ("--generation_batch_size 512 --vllm_max_num_seqs 16 --vllm_max_model_len 4096",
     {"sequences": 16, "length": 4096}, {"sequences": 64, "steps": 8.0}),
    ("--vllm_mode server --vllm_server_host here --async_generate true", {"memory_share": None, "sequences": None},
     {"sequences": 64, "is_apart": True, "overlaps": True})])
def test_rollouts(tmp_path: Path, more: str, server: dict[str, Any], fields: dict[str, Any]) -> None:
    job = _read(tmp_path, f"{GRPO[:-1]} {more}\n")
    assert not job.missing
    usual = {"model": "Qwen/Qwen2.5-7B-Instruct", "engine": "vllm", "memory_share": 0.5}
    assert isinstance(job.plan, TrainingPlan) and job.plan.length == 3072
    assert job.plan.rollout == RolloutPlan(**{"new": 2048, "server": ServingPlan(**{**usual, **server}), **fields})


def test_rollouts_that_are_not_modelled_or_refused(tmp_path: Path) -> None:
    by_itself = _read(tmp_path, GRPO.replace("--use_vllm true", "--use_vllm false"))
    assert [reading.name for reading in by_itself.missing] == ["rlhf_type"] and by_itself.plan.rollout is None
    rewarded = _read(tmp_path, f"{GRPO[:-1]} --reward_model Qwen/Qwen3-0.6B\n")
    assert [reading.name for reading in rewarded.missing] == ["reward_model"]
    with pytest.raises(JobError, match="vllm_tensor_parallel_size: 3: 8 ranks cannot be divided by it"):
        _read(tmp_path, f"{GRPO[:-1]} --vllm_tensor_parallel_size 3\n")


def test_adapters_of_the_language_model_beside_towers_that_train(tmp_path: Path) -> None:
    plan = _plan(tmp_path, "swift sft --model Qwen/Qwen2.5-VL-7B-Instruct --tuner_type lora_llm --max_length 2048\n")
    paths = ("model.visual.blocks.0.attn.qkv.weight", "model.visual.merger.mlp.0.weight", "lm_head.weight",
             "model.language_model.layers.0.mlp.up_proj.lora_A.weight",
             "model.language_model.layers.0.mlp.up_proj.base_layer.weight")
    trains = [path for path in paths if any(re.match(pattern, path) for pattern in plan.trained)]
    assert [path.split(".")[-2] for path in trains] == ["qkv", "0", "lora_A"]
    assert plan.adapter is not None and not re.fullmatch(plan.adapter.targets[0][3:], "model.visual.blocks.0.attn.qkv")


@pytest.mark.parametrize(("more", "fields", "missing"), [
    ("", {"reference": "adapter", "teacher": None}, ["rlhf_type"]),  # half of the answers are the model's own
    ("--teacher_model Qwen/Qwen2.5-14B-Instruct --lmbda 0",
     {"reference": "copy", "teacher": "Qwen/Qwen2.5-14B-Instruct", "rollout": None}, []),
    ("--teacher_model_server http://here:8000 --lmbda 0", {"reference": "none", "teacher": None}, []),
    ("--teacher_model Qwen/Qwen2.5-7B-Instruct --offload_teacher_model true --lmbda 0",
     {"reference": "copy", "teacher": None}, ["offload_teacher_model"])])
def test_teachers(tmp_path: Path, more: str, fields: dict[str, Any], missing: list[str]) -> None:
    job = _read(tmp_path, f"swift rlhf --rlhf_type gkd --model Qwen/Qwen2.5-7B-Instruct --max_length 512 {more}\n")
    assert job.plan.task == "distill" and [reading.name for reading in job.missing] == missing  # type: ignore[union-attr]
    assert {name: getattr(job.plan, name) for name in fields} == fields


def test_half_of_the_answers_are_sampled_for_a_teacher(tmp_path: Path) -> None:
    plan = _plan(tmp_path, f"{GRPO[:-1]} --teacher_model Qwen/Qwen2.5-14B-Instruct\n".replace("grpo", "gkd"))
    assert plan.rollout is not None and (plan.rollout.sequences, plan.rollout.steps) == (8, 2.0)


RAY = """\
rlhf_type: grpo
model: Qwen/Qwen2.5-3B-Instruct
micro_batch_size: 2
global_batch_size: 16
max_length: 512
num_generations: 8
use_vllm: true
train:
  gpus: 4
  tuner_type: lora
  lora_rank: 4
rollout:
  gpus: 2
  vllm_gpu_memory_utilization: 0.4
"""


@pytest.mark.parametrize(("more", "is_apart"), [("", True), ("colocate_groups: [[train, rollout]]\n", False)])
def test_groups_of_devices_under_ray(tmp_path: Path, more: str, is_apart: bool) -> None:
    """What a group is given counts over what all are; engines have devices of their own unless a group has both."""
    (tmp_path / "ray.yaml").write_text(f"lora_rank: 64\n{RAY}{more}")
    (tmp_path / "run.sh").write_text('HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\n'
                                     'megatron rlhf --use_ray true --config "$HERE/ray.yaml"\n')
    job = read_job(tmp_path / "run.sh")
    plan = job.plan
    assert isinstance(plan, TrainingPlan) and plan.rollout is not None and job.missing == []
    assert (plan.ranks, plan.accumulate, plan.adapter) == (4, 2, Adapter(r=4, dropout=0.05))
    assert (plan.rollout.is_apart, plan.rollout.server.memory_share) == (is_apart, None if is_apart else 0.4)


@pytest.mark.parametrize(("before", "after", "problem"), [
    ("gpus: 4", "gpus: many", "ray.yaml:9: train.gpus: many: must be a whole number of at least 1"),
    ("use_vllm: true", "use_vllm: true\ncolocate_groups: 3",
     'ray.yaml:8: colocate_groups: 3: must be a list of lists of groups: [[train, rollout]]'),
    ("lora_rank: 4", "lora_rank: none", "ray.yaml:11: lora_rank: none: must be a whole number of at least 1")])
def test_broken_groups_of_devices(tmp_path: Path, before: str, after: str, problem: str) -> None:
    (tmp_path / "ray.yaml").write_text(RAY.replace(before, after))
    with pytest.raises(JobError) as error:
        read_job(tmp_path / "ray.yaml")
    assert str(error.value).removeprefix(f"{tmp_path}{os.sep}") == problem


def test_a_line_of_a_quotation_that_begins_as_a_comment_would(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text('TEXT="one\n#### two"\nswift sft --model Qwen/Qwen3-0.6B --max_length 64\n')
    assert read_job(tmp_path / "a.sh").plan.length == 64

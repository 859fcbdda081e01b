"""Files of accelerate and DeepSpeed beside a command: how ranks share the model, and what is told of them."""
import json
from pathlib import Path
from typing import Any

import pytest

from analyzer.tools.job import Job, JobError, read_command
from analyzer.tools.job.plan import TrainingPlan

TRAIN = ["train.py", "--model_name_or_path", "gpt2", "--per_device_train_batch_size", "4", "--block_size", "512"]


def _launch(tmp_path: Path, text: str, *more: str) -> Job:
    (tmp_path / "a.yaml").write_text(text)
    return read_command(["accelerate", "launch", "--config_file", str(tmp_path / "a.yaml"), *more, *TRAIN])


@pytest.mark.parametrize("words", [
    [r"C:\venv\Scripts\accelerate.exe", "launch", "--num_processes", "2", r"C:\sd\train_network.py"],
    [r"C:\venv\Scripts\python.exe", "-m", "accelerate.commands.launch", "--num_processes", "2", "train_network.py"]])
def test_paths_of_windows(words: list[str]) -> None:
    job = read_command([*words, "--pretrained_model_name_or_path", r"D:\models\v1-5.safetensors", "--network_module",
                        "networks.lora", "--resolution", "512"])
    assert (job.program.name, job.launch.ranks) == ("sd-scripts", 2)


def test_no_distributed_type_is_one_process(tmp_path: Path) -> None:
    """As of the single_gpu.yaml that TRL ships, which asks for eight and gets one."""
    job = _launch(tmp_path, "distributed_type: 'NO'\nnum_machines: 1\nnum_processes: 8\n")
    assert isinstance(job.plan, TrainingPlan)
    assert (job.plan.ranks, job.plan.sharding) == (1, None)


@pytest.mark.parametrize(("text", "fields"), [
    ("distributed_type: MULTI_GPU\nfsdp_config: {}\ndeepspeed_config: {}\nnum_processes: 4\n",
     {"kind": "ddp", "ranks": 4}),
    ("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: false\nnum_processes: 2\n",
     {"kind": "fsdp", "ranks": 2, "reshards": False}),
    ("distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\nnum_machines: 2\n"
     "num_processes: 8\n", {"kind": "fsdp", "replicas": 0, "ranks_per_host": 4}),
    ("distributed_type: FSDP\nfsdp_config:\n  fsdp_activation_checkpointing: true\nnum_processes: 2\n",
     {"checkpoints": "blocks"}),
    ("distributed_type: DEEPSPEED\nfsdp_config: {}\ndeepspeed_config:\n  zero_stage: 3\n"
     "  offload_optimizer_device: cpu\nnum_processes: 2\nmixed_precision: bf16\n",
     {"kind": "deepspeed", "autocast": "bf16",
      "zero": {"stage": 3, "offload_optimizer": {"device": "cpu"}}})])
def test_how_ranks_share_a_model(tmp_path: Path, text: str, fields: dict[str, Any]) -> None:
    job = _launch(tmp_path, text)
    assert job.missing == []
    plan = job.plan
    assert isinstance(plan, TrainingPlan) and plan.sharding is not None
    found = {**vars(plan.sharding), **vars(plan), "zero": plan.sharding.config.get("zero_optimization")}
    assert {name: found[name] for name in fields} == fields


@pytest.mark.parametrize(("text", "name"), [
    ("mixed_precision: fp8\nnum_processes: 1\n", "mixed_precision"),
    ("dynamo_config:\n  dynamo_backend: INDUCTOR\nnum_processes: 1\n", "dynamo_config.dynamo_backend"),
    ("parallelism_config:\n  parallelism_config_tp_size: 2\nnum_processes: 2\n", "parallelism_config")])
def test_what_is_not_modelled_is_told(tmp_path: Path, text: str, name: str) -> None:
    assert [reading.name for reading in _launch(tmp_path, text).missing] == [name]


def test_options_of_the_launcher_override_its_file(tmp_path: Path) -> None:
    plan = _launch(tmp_path, "distributed_type: MULTI_GPU\nnum_processes: 4\n", "--num_processes", "2").plan
    assert isinstance(plan, TrainingPlan) and plan.ranks == 2


def _with_deepspeed(tmp_path: Path, config: dict[str, Any], *more: str) -> Job:
    (tmp_path / "ds.json").write_text(json.dumps(config))
    return read_command(["deepspeed", "--num_gpus", "2", *TRAIN, "--deepspeed", str(tmp_path / "ds.json"), *more])


def test_a_file_of_deepspeed(tmp_path: Path) -> None:
    job = _with_deepspeed(tmp_path, {"zero_optimization": {"stage": 2}, "compile": {"disable": False}})
    assert [reading.name for reading in job.missing] == ["compile.disable"]
    assert _with_deepspeed(tmp_path, {"train_micro_batch_size_per_gpu": 4}).missing == []
    with pytest.raises(JobError) as error:
        _with_deepspeed(tmp_path, {"train_micro_batch_size_per_gpu": 2})
    assert str(error.value) == (
        f"the command: per_device_train_batch_size: 4: {tmp_path}/ds.json has train_micro_batch_size_per_gpu: 2, and "
        'transformers refuses a difference; write "auto" there')
    with pytest.raises(JobError, match="zero_optimization.stage: 4: must be 0, 1, 2 or 3"):
        _with_deepspeed(tmp_path, {"zero_optimization": {"stage": 4}})


def test_a_file_alone_is_told_to_be_one_of_a_launcher(tmp_path: Path) -> None:
    from analyzer.tools.job import read_job

    (tmp_path / "a.yaml").write_text("distributed_type: FSDP\nnum_processes: 2\n")
    with pytest.raises(JobError, match="is read beside what it launches; give that command: analyzer job -- accelerate "
                                       "launch --config_file FILE"):
        read_job(tmp_path / "a.yaml")

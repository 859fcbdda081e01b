"""Jobs whose ranks divide the model itself: what becomes of their degrees, and the step of all ranks."""
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from analyzer.errors import InputError
from analyzer.tools.job import Job, read_job
from analyzer.tools.job.build import load_model
from analyzer.tools.job.layout import LaidOutJob, make_layout, profile_layout
from analyzer.tools.job.plan import ModelParallel, TrainingPlan
from analyzer.tools.job.screen import describe_job, describe_training

COMMAND = """\
NPROC_PER_NODE=8 megatron sft --model {folder}/tiny --max_length 64 --micro_batch_size 1 --global_batch_size 8 \\
    --tensor_model_parallel_size 2 --pipeline_model_parallel_size 2 --sequence_parallel true \\
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1
"""


def _read(folder: Path, change: str = "=") -> Job:
    (folder / "tiny").mkdir()
    (folder / "tiny/config.json").write_text(json.dumps({
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
        "max_position_embeddings": 512, "torch_dtype": "bfloat16", "tie_word_embeddings": True}))
    before, _, after = change.partition("=")
    (folder / "train.sh").write_text(COMMAND.replace(before, after).format(folder=folder))
    return read_job(folder / "train.sh")


def test_degrees_become_a_layout(tmp_path: Path) -> None:
    """Eight ranks, four of which work on one sequence: two have sequences of their own, eight in four passes."""
    job = _read(tmp_path)
    plan = job.plan
    assert isinstance(plan, TrainingPlan) and job.missing == []
    assert plan.parallel == ModelParallel(tensor=2, pipeline=2)
    assert (plan.ranks, plan.accumulate, plan.tokens) == (8, 4, 8 * 64)
    assert str(make_layout(plan)[0]) == "distributed 2, TP 2, PP 2, 4 x 1, checkpoint blocks"


def test_the_step_of_all_ranks(tmp_path: Path) -> None:
    """Each stage has two blocks, and the head a weight of its own: the first one's embedding is another stage's."""
    job = _read(tmp_path)
    found = job.profile("h100")
    assert isinstance(found, LaidOutJob)
    block = 64 * (64 + 32 + 32 + 64) + (64 + 32 + 32) + 3 * 64 * 128
    # of the biases of q, k and v and of all matrices a half, of the norms all
    sizes = [2 * (block // 2 + 2 * 64) + 256 * 64 // 2 + end for end in (0, 64)]
    assert [stage.params for stage in found.result.best.stages] == sizes
    assert found.verdict.fits and found.verdict.count == 8
    assert found.tokens_per_second == pytest.approx(8 * 64 / found.step_seconds)
    text = f"{describe_job(job)}\n{describe_training(found, 2.0)}"
    for said in ("8 devices by TP 2, PP 2, DP 2", "allocated by the rank that needs most", "dollars a million tokens",
                 "layout: distributed 2, TP 2, PP 2, 4 x 1, checkpoint blocks; ranks wait ",
                 "assumed: gradients are not clipped"):
        assert said in " ".join(text.split())


def test_the_weights_of_a_reference_are_divided_too(tmp_path: Path) -> None:
    found = _read(tmp_path, "megatron sft=megatron rlhf --rlhf_type dpo").profile("h100")
    block = 64 * (64 + 32 + 32 + 64) + (64 + 32 + 32) + 3 * 64 * 128 + 2 * 64
    assert found.beside_bytes == 2 * (4 * block + 64 + 256 * 64) // 4  # 16 bits, by four ranks
    assert found.verdict.needed_bytes == found.result.best.needed_bytes + found.beside_bytes


def test_a_teacher_on_the_host_counts_beside_what_passes_do_not_save(tmp_path: Path) -> None:
    """It is there before the passes that train: of its weights what these need more than the update is free."""
    teach = f"megatron sft=megatron rlhf --rlhf_type gkd --lmbda 0 --teacher_model {tmp_path}/tiny"
    kept = _read(tmp_path, teach).profile("h100")
    text = (tmp_path / "train.sh").read_text()
    (tmp_path / "train.sh").write_text(text.replace("gkd", "gkd --offload_teacher_model true"))
    left = read_job(tmp_path / "train.sh").profile("h100")
    spare = min(stage.peak_bytes - stage.update_peak_bytes for stage in kept.result.best.stages)
    assert kept.beside_bytes > 0 and left.beside_bytes == max(0, kept.beside_bytes - spare)


@pytest.mark.parametrize(("change", "fields"), [
    ("--pipeline_model_parallel_size 2=--context_parallel_size 2", {"context": 2, "pipeline": 1}),
    ("--sequence_parallel true=--virtual_pipeline_model_parallel_size 2",
     {"virtual": 2, "schedule": "Interleaved1F1B", "sequence": False}),
    ("--sequence_parallel true=--use_distributed_optimizer false", {"replicas": 2, "sharding": "distributed"}),
    ("--sequence_parallel true=--expert_model_parallel_size 2 --expert_tensor_parallel_size 2", {"expert": 4}),
    ("--sequence_parallel true=--use_megatron_fsdp true", {"sharding": "fsdp"}),
    ("--sequence_parallel true=--optimizer_cpu_offload true", {"offloads": True})])
def test_options_of_a_layout(tmp_path: Path, change: str, fields: dict[str, object]) -> None:
    plan = _read(tmp_path, change).plan
    assert isinstance(plan, TrainingPlan)
    assert {name: getattr(plan.parallel, name) for name in fields} == fields


def _read_that_sees(folder: Path, command: str) -> Job:
    """One of Qwen's models that see, four blocks of 64 channels beside a tower of two."""
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512,
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e6}}
    (folder / "tiny").mkdir()
    (folder / "tiny/config.json").write_text(json.dumps({
        "model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"], "text_config": text,
        "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
                          "model_type": "qwen2_5_vl"}, "image_token_id": 250, "dtype": "bfloat16"}))
    (folder / "train.sh").write_text(command.format(folder=folder))
    return read_job(folder / "train.sh")


MEGATRON = "NPROC_PER_NODE=2 megatron sft --model {folder}/tiny --max_length 64 --tensor_model_parallel_size 2 "


def test_ranks_divide_the_language_model_of_one_that_sees(tmp_path: Path) -> None:
    job = _read_that_sees(tmp_path, f"{MEGATRON}--global_batch_size 2\n")
    found = job.profile("h100")
    assert isinstance(job.plan, TrainingPlan) and isinstance(found, LaidOutJob)
    build, _ = load_model(job.plan, job.files)
    with torch.device("meta"):
        tower = sum(p.numel() for name, p in build().named_parameters() if "visual" in name)
    block = 64 * (64 + 32 + 32 + 64) + (64 + 32 + 32) + 3 * 64 * 128
    assert [stage.params for stage in found.result.best.stages] == [4 * (block // 2 + 2 * 64) + 256 * 64 + 64]
    assert found.beside_bytes == 2 * tower
    assert "ranks divide the language model; those of the first stage hold its towers whole" in found.assumptions


@pytest.mark.parametrize("command", [
    f"{MEGATRON}--task_type seq_cls --num_labels 2 --global_batch_size 2\n",
    "swift sft --model {folder}/tiny --max_length 64 --task_type seq_cls --num_labels 3 --tuner_type full"])
def test_classes_of_a_model_without_a_classifier(tmp_path: Path, command: str) -> None:
    """The head has as many rows as there are classes, in the place of 256 tokens."""
    job = _read_that_sees(tmp_path, command)
    found = job.profile("h100")
    if isinstance(found, LaidOutJob):
        block = 64 * (64 + 32 + 32 + 64) + (64 + 32 + 32) + 3 * 64 * 128
        ends = 256 * 64 // 2 + 2 * 64 // 2 + 64  # the embedding and the head by two ranks, the norm
        assert found.result.best.stages[0].params == 4 * (block // 2 + 2 * 64) + ends
    else:
        assert isinstance(job.plan, TrainingPlan)
        build, _ = load_model(job.plan, job.files)
        with torch.device("meta"):
            model: Any = build()
        assert model.get_output_embeddings().weight.shape == (3, 64)
        assert found.profile.param_bytes == 2 * sum(p.numel() for p in model.parameters())
    assert found.verdict is not None and found.verdict.fits


def test_states_on_the_host_are_made_there() -> None:
    """A device has weights of 16 bits and gradients of 32, and of master weights nothing, not even as they are made."""
    sizes = {"model_type": "qwen2", "hidden_size": 256, "intermediate_size": 32_768, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    plan = TrainingPlan(model="a", config=sizes, micro_batch=1, length=16, ranks=2,
                        parallel=ModelParallel(tensor=2, offloads=True))
    stage = profile_layout(plan, "h100").result.best.stages[0]
    assert stage.params > 40e6
    assert stage.peak_bytes < 8 * stage.params  # 6 of these, and what is beside them


def test_what_no_layout_has_is_told(tmp_path: Path) -> None:
    job = _read(tmp_path, "--sequence_parallel true=--tuner_type lora --quant_method bnb --quant_bits 4")
    with pytest.raises(InputError, match="tiny: nf4 weights are not divided by ranks here"):
        job.profile("h100")

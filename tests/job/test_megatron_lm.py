"""Commands of Megatron-LM's pretrain_gpt.py: the model of their arguments, layouts, what is refused."""
import os
from pathlib import Path
from typing import Any

import pytest

from analyzer.tools.job import Job, JobError, read_job
from analyzer.tools.job.build import load_model
from analyzer.tools.job.document import Files
from analyzer.tools.job.plan import ModelParallel, TrainingPlan

SCRIPT = """\
# a script of arrays
TP=2
MODEL=(
    --num-layers 4 --hidden-size 256
    # heads of 64 channels
    --num-attention-heads 4  # and one group for each two
    --group-query-attention --num-query-groups 2
    --swiglu --normalization RMSNorm --untie-embeddings-and-output-weights
)
MODEL+=(--attention-dropout 0.0 --hidden-dropout 0.0)
PARALLEL=(--tensor-model-parallel-size $TP --pipeline-model-parallel-size $((TP*1)) --use-distributed-optimizer)
torchrun --nproc_per_node 8 pretrain_gpt.py "${MODEL[@]}" ${PARALLEL[@]} --vocab-size 1000 \\
    --seq-length 128 --micro-batch-size 2 --global-batch-size 16 --bf16 --lr 1e-4
"""


def _read(tmp_path: Path, change: str = "=", ranks: int | None = None) -> Job:
    before, _, after = change.partition("=")
    assert before in SCRIPT
    (tmp_path / "train.sh").write_text(SCRIPT.replace(before, after))
    return read_job(tmp_path / "train.sh", ranks=ranks)


def _plan(tmp_path: Path, change: str = "=", ranks: int | None = None) -> TrainingPlan:
    plan = _read(tmp_path, change, ranks).plan
    assert isinstance(plan, TrainingPlan)
    return plan


def test_arrays_and_arguments(tmp_path: Path) -> None:
    """16 sequences over two ranks that have their own, two a pass. The vocabulary is filled up to 128 times two."""
    job = _read(tmp_path)
    plan = job.plan
    assert isinstance(plan, TrainingPlan) and (job.program.name, job.missing) == ("Megatron-LM", [])
    assert (plan.micro_batch, plan.accumulate, plan.length, plan.ranks, plan.dtype) == (2, 4, 128, 8, "bf16")
    assert plan.parallel == ModelParallel(tensor=2, pipeline=2, sequence=False)
    assert plan.config is not None
    assert {name: plan.config[name] for name in ("model_type", "intermediate_size", "vocab_size", "head_dim")} == {
        "model_type": "llama", "intermediate_size": int(4 * 256 * 2 / 3 / 64) * 64, "vocab_size": 1024, "head_dim": 64}


@pytest.mark.parametrize(("change", "kind", "count"), [
    ("=", "LlamaForCausalLM", 4 * (256 * (256 + 2 * 128 + 256) + 3 * 256 * 640 + 2 * 256) + 2 * 1024 * 256 + 256),
    ("--untie-embeddings-and-output-weights=--qk-layernorm", "Qwen3ForCausalLM",
     4 * (256 * (256 + 2 * 128 + 256) + 3 * 256 * 640 + 2 * 256 + 2 * 64) + 1024 * 256 + 256),
    # biases of four matrices of attention and two of the MLP, norms with a shift
    ("--swiglu --normalization RMSNorm=", "Starcoder2ForCausalLM",
     4 * (256 * (256 + 2 * 128 + 256) + 2 * 256 * 1024 + 768 + 1280 + 4 * 256) + 2 * 1024 * 256 + 2 * 256),
    ("--swiglu=--swiglu --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 320", "MixtralForCausalLM",
     4 * (256 * (256 + 2 * 128 + 256) + 4 * 3 * 256 * 320 + 4 * 256 + 2 * 256) + 2 * 1024 * 256 + 256)])
def test_the_model_of_the_arguments(tmp_path: Path, change: str, kind: str, count: int) -> None:
    import torch

    build, _ = load_model(_plan(tmp_path, change), Files())
    with torch.device("meta"):
        model = build()
    assert (type(model).__name__, sum(parameter.numel() for parameter in model.parameters())) == (kind, count)


@pytest.mark.parametrize(("change", "fields"), [
    ("--use-distributed-optimizer=", {"replicas": 2}),
    ("--use-distributed-optimizer=--sequence-parallel --num-layers-per-virtual-pipeline-stage 1",
     {"sequence": True, "virtual": 2, "schedule": "Interleaved1F1B", "replicas": 2}),
    ("--use-distributed-optimizer=--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
     {"sharding": "fsdp_kept"})])
def test_layouts(tmp_path: Path, change: str, fields: dict[str, Any]) -> None:
    found = _plan(tmp_path, change).parallel
    assert {name: getattr(found, name) for name in fields} == fields


def test_ranks_that_the_script_does_not_say(tmp_path: Path) -> None:
    assert (_plan(tmp_path, ranks=16).ranks, _plan(tmp_path, ranks=16).accumulate) == (16, 2)


@pytest.mark.parametrize(("change", "problem"), [
    ("--nproc_per_node 8=--nproc_per_node 6", "train.sh:12: tensor_model_parallel_size: 2: times pipeline and context "
     "parallel sizes are 4, by which 6 ranks cannot be divided"),
    ("--num-layers 4 =", "train.sh: num_layers: is not there, and Megatron-LM needs it"),
    ("--seq-length 128=", "train.sh: seq_length: is not there, and Megatron-LM needs it"),
    ("--global-batch-size 16=--global-batch-size 6", "train.sh:13: global_batch_size: 6: is no multiple of 2")])
def test_what_megatron_refuses(tmp_path: Path, change: str, problem: str) -> None:
    with pytest.raises(JobError) as error:
        _read(tmp_path, change)
    assert str(error.value).removeprefix(f"{tmp_path}{os.sep}").startswith(problem)


@pytest.mark.parametrize(("change", "edits"), [
    ("=", ["micro_batch_size: 2 -> 1"]),
    # without it a step has the sequences of a pass: 2 of each of the two ranks that have their own
    ("--global-batch-size 16 =", ["micro_batch_size: 2 -> 1", "global_batch_size: not set -> 4"])])
def test_a_smaller_pass_leaves_the_batch_of_a_step(tmp_path: Path, change: str, edits: list[str]) -> None:
    job = _read(tmp_path, change)
    made = job.program.changes["batch"](job.options, job.plan, 1)
    assert made is not None and [str(edit) for edit in made] == edits
    plan = job.change(made).plan
    assert isinstance(plan, TrainingPlan) and isinstance(job.plan, TrainingPlan)
    assert plan.tokens == job.plan.tokens

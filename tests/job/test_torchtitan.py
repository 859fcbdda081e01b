"""torchtitan's TOML: what of it becomes a plan, what is refused, and what changes in it."""
import os
from pathlib import Path
from typing import Any

import pytest

from analyzer.tools.job import Job, JobError, read_command, read_job
from analyzer.tools.job.plan import ModelParallel, PicturePlan, Sharding, TrainingPlan

TOML = """\
[job]
dump_folder = "./outputs"

[model]
name = "llama3"
flavor = "8B"  # of 128,256 tokens

[optimizer]
name = "AdamW"
lr = 3e-4

[training]
local_batch_size = 2
seq_len = 8192
max_norm = 1.0

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1

[activation_checkpoint]
mode = "full"

[compile]
enable = false
"""


def _read(tmp_path: Path, text: str, ranks: int | None = 8) -> Job:
    (tmp_path / "a.toml").write_text(text)
    return read_job(tmp_path / "a.toml", ranks=ranks)


def test_a_file_on_eight_ranks(tmp_path: Path) -> None:
    job = _read(tmp_path, TOML)
    assert (job.program.name, job.missing) == ("torchtitan", [])
    assert job.plan == TrainingPlan(
        model="meta-llama/Llama-3.1-8B", micro_batch=2, length=8192, dtype="fp32", checkpoints="blocks",
        optimizer="adamw_fused", ranks=8, sharding=Sharding(kind="fsdp", dtype="bf16", reduce_dtype="fp32"))


@pytest.mark.parametrize(("before", "after", "fields", "missing"), [
    ("8B", "0.6B", {"model": "torchtitan/llama3-0.6B"}, []),
    ("local_batch_size = 2", "local_batch_size = 2\nglobal_batch_size = 64", {"accumulate": 4}, []),
    ("local_batch_size", "batch_size", {"micro_batch": 2}, []),
    ("replicate_degree = 1\ndata_parallel_shard_degree = -1", "replicate_degree = 8\ndata_parallel_shard_degree = 1",
     {"sharding": Sharding(kind="ddp"), "autocast": "bf16"}, []),
    ('"full"', '"selective"', {"checkpoints": "blocks", "checkpoint_every": 2}, []),
    ('"full"', '"selective"\nselective_ac_option = "op"', {"checkpoints": "operators", "checkpoint_every": 1}, []),
    ('"full"', '"selective"\nselective_ac_option = "3"', {"checkpoints": "blocks", "checkpoint_every": 3}, []),
    ('"full"', '"full"\nselective_ac_option = "op"', {"checkpoints": "blocks", "checkpoint_every": 1}, []),
    ('"full"', '"memory_budget"', {"checkpoints": "blocks"}, ["activation_checkpoint.mode"]),
    ("tensor_parallel_degree = 1", "tensor_parallel_degree = 2", {"ranks": 8, "sharding": None, "parallel":
     ModelParallel(tensor=2, sharding="fsdp")}, []),
    ("tensor_parallel_degree = 1", "tensor_parallel_degree = 2\npipeline_parallel_degree = 2",
     {"micro_batch": 1, "accumulate": 2, "parallel": ModelParallel(tensor=2, pipeline=2, sharding="fsdp_kept")}, []),
    ("enable = false", "enable = true", {"compiles": True}, [])])
def test_options_and_what_becomes_of_them(tmp_path: Path, before: str, after: str, fields: dict[str, Any],
                                          missing: list[str]) -> None:
    assert before in TOML
    job = _read(tmp_path, TOML.replace(before, after))
    assert {name: getattr(job.plan, name) for name in fields} == fields
    assert [reading.name for reading in job.missing] == missing


@pytest.mark.parametrize(("before", "after", "problem"), [
    ("seq_len = 8192", "seq_len = 'long'", "a.toml:14: training.seq_len: long: must be a whole number of at least 1"),
    ("shard_degree = -1", "shard_degree = 4", "a.toml:19: parallelism.data_parallel_shard_degree: 4: degrees of 4 x 1 "
     "x 1 are not the 8 ranks of the job"),
    ("shard_degree = -1", "shard_degree = 0", "a.toml:19: parallelism.data_parallel_shard_degree: 0: must be -1, which "
     "is all ranks, or at least 1"),
    ("local_batch_size = 2", "local_batch_size = 2\nglobal_batch_size = 24", "a.toml:14: training.global_batch_size: "
     "24: is no multiple of 2 sequences a pass on 8 ranks, 32 is"),
    ('"full"', '"most"', "a.toml:23: activation_checkpoint.mode: most: must be one of none, selective, full"),
    ("[model]", "[model", "a.toml:4: is no TOML: ")])
def test_what_is_refused_is_told_with_its_line(tmp_path: Path, before: str, after: str, problem: str) -> None:
    with pytest.raises(JobError) as error:
        _read(tmp_path, TOML.replace(before, after))
    assert str(error.value).removeprefix(f"{tmp_path}{os.sep}").startswith(problem)


def test_a_model_for_trying_things_has_its_own_sizes(tmp_path: Path) -> None:
    job = _read(tmp_path, TOML.replace('"8B"', '"debugmodel"').replace("seq_len = 8192", "seq_len = 128"), None)
    assert job.missing == []
    found = job.profile("h100").profile
    assert found.params == 2 * 2048 * 256 + 6 * (4 * 256**2 + 3 * 256 * 768 + 2 * 256) + 256


def test_a_model_of_transformers(tmp_path: Path) -> None:
    """The backend names it beside the flavor, of which one changes its sizes."""
    text = TOML.replace("llama3", "transformers_modeling_backend").replace('"8B"', '"{}"')
    text += '[hf_transformers]\nmodel = "Qwen/Qwen3-4B"\n'
    full, small = (_read(tmp_path, text.format(flavor)).plan for flavor in ("full", "debugmodel"))
    assert isinstance(full, TrainingPlan) and isinstance(small, TrainingPlan)
    assert (full.model, full.config) == ("Qwen/Qwen3-4B", None)
    assert small.config is not None and (small.config["hidden_size"], small.config["num_hidden_layers"]) == (256, 2)


def test_images(tmp_path: Path) -> None:
    """Each pass encodes its images, and texts of 256 tokens, in the dtype of passes that ranks share."""
    text = TOML.replace('"llama3"\nflavor = "8B"', '"flux"\nflavor = "flux-schnell"').replace(
        "seq_len = 8192", "img_size = 512\nclassifier_free_guidance_prob = 0.4")
    job = _read(tmp_path, f"{text}\n[encoder]\nmax_t5_encoding_len = 256\nt5_encoder = 't5'\n")
    assert job.missing == []
    plan = job.plan
    assert isinstance(plan, TrainingPlan) and plan.picture == PicturePlan(
        height=512, width=512, image_dtype="bf16", text_dtype="bf16", text_tokens=256)
    assert (plan.model, plan.task, plan.length, plan.checkpoints) == (
        "black-forest-labs/FLUX.1-dev", "denoise", 1, "blocks")
    with pytest.raises(JobError, match="global_batch_size: 32: torchtitan's FLUX refuses several passes a step"):
        _read(tmp_path, text.replace("img_size", "global_batch_size = 32\nimg_size"))


def test_one_device_runs_under_autocast(tmp_path: Path) -> None:
    plan = _read(tmp_path, TOML, None).plan
    assert isinstance(plan, TrainingPlan)
    assert (plan.ranks, plan.sharding, plan.autocast, plan.dtype) == (1, None, "bf16", "fp32")


def test_a_command_overrides_its_file(tmp_path: Path) -> None:
    _read(tmp_path, TOML)
    command = (f"torchrun --nproc_per_node 4 -m torchtitan.train --job.config_file {tmp_path / 'a.toml'} "
               "--training.seq_len 4096 --compile.enable")
    plan = read_command(command.split()).plan
    assert isinstance(plan, TrainingPlan)
    assert (plan.ranks, plan.length, plan.compiles, plan.micro_batch) == (4, 4096, True, 2)


def test_edits_keep_the_file_but_for_what_changes(tmp_path: Path) -> None:
    job = _read(tmp_path, TOML)
    edits = job.program.changes["batch"](job.options, job.plan, 1)
    assert edits is not None
    changed = job.change(edits)
    assert (changed.plan.micro_batch, changed.plan.accumulate) == (1, 2)  # type: ignore[union-attr]
    assert "# of 128,256 tokens" in job.change_text(edits)


@pytest.mark.parametrize(("degrees", "edits", "accumulate"), [
    ("tensor_parallel_degree = 2", ["training.local_batch_size: 2 -> 1", "training.global_batch_size: not set -> 8"],
     2),  # 2 sequences of each of 4 groups of ranks
    ("tensor_parallel_degree = 2\ncontext_parallel_degree = 2",
     ["training.local_batch_size: 2 -> 1", "training.global_batch_size: not set -> 4"], 2),
    ("pipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 2",
     ["parallelism.pipeline_parallel_microbatch_size: 2 -> 1"], 2)])
def test_a_smaller_pass_leaves_the_batch_of_a_step(tmp_path: Path, degrees: str, edits: list[str],
                                                   accumulate: int) -> None:
    job = _read(tmp_path, TOML.replace("tensor_parallel_degree = 1", degrees))
    made = job.program.changes["batch"](job.options, job.plan, 1)
    assert made is not None and [str(edit) for edit in made] == edits
    plan = job.change(made).plan
    assert isinstance(plan, TrainingPlan) and isinstance(job.plan, TrainingPlan)
    assert (plan.micro_batch, plan.accumulate, plan.tokens) == (1, accumulate, job.plan.tokens)

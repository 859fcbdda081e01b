"""torchtune's YAML and ``tune run``: what of them becomes a plan, and what is refused as torchtune refuses it."""
import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from analyzer.tools.job import Job, JobError, read_command, read_job
from analyzer.tools.job.plan import Adapter, FakeQuantization, ModelParallel, Sharding, TrainingPlan
from analyzer.tools.job.training import make_for_backward

LORA = """\
output_dir: /tmp/out
model:
  _component_: torchtune.models.llama3_2.lora_llama3_2_1b
  lora_attn_modules: [q_proj, output_proj]
  apply_lora_to_mlp: True
  lora_rank: 64
  lora_dropout: 0.1
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: ${output_dir}/tokenizer.model
  max_seq_len: 2048
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  packed: True
batch_size: 4
batch_size_val: ${batch_size}
optimizer:
  _component_: torch.optim.AdamW
  fused: True
  lr: 3e-4
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
gradient_accumulation_steps: 8
clip_grad_norm: null
compile: False
enable_activation_checkpointing: True
enable_activation_offloading: False
dtype: bf16
"""


def _read(tmp_path: Path, text: str) -> Job:
    (tmp_path / "a.yaml").write_text(text)
    return read_job(tmp_path / "a.yaml")


def test_a_lora(tmp_path: Path) -> None:
    job = _read(tmp_path, LORA)
    assert (job.program.name, job.missing) == ("torchtune", [])
    assert job.plan == TrainingPlan(
        model="meta-llama/Llama-3.2-1B", micro_batch=4, accumulate=8, length=2048, loss_chunks=8, clips=False,
        adapter=Adapter(r=64, targets=("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), dropout=0.1,
                        dtype="bf16"), checkpoints="blocks", optimizer="adamw_fused")


@pytest.mark.parametrize(("change", "fields"), [
    ("lora_llama3_2_1b=qlora_llama3_2_1b", {"quantize": "nf4"}),
    ("  lora_rank: 64=  lora_rank: 64\n  quantize_base: True", {"quantize": "nf4"}),
    ("lora_llama3_2_1b=llama3_2_3b", {"model": "meta-llama/Llama-3.2-3B"}),
    ("clip_grad_norm: null=clip_grad_norm: 1.0", {"clips": True}),
    ("torch.optim.AdamW\n  fused: True=bitsandbytes.optim.PagedAdamW8bit",
     {"optimizer": "analyzer.recipe.optimizer:PagedAdamW8bit"}),
    ("gradient_accumulation_steps: 8=optimizer_in_bwd: True", {"updates_in_backward": True, "accumulate": 1}),
    ("enable_activation_offloading: False=enable_activation_offloading: True", {"checkpoints": "offloaded"}),
    ("torchtune.modules.loss.LinearCrossEntropyLoss=torch.nn.CrossEntropyLoss", {"loss_chunks": None}),
    ("torchtune.modules.loss.LinearCrossEntropyLoss=torchtune.rlhf.loss.DPOLoss",
     {"task": "dpo", "reference": "adapter", "loss_chunks": None}),
    ("clip_grad_norm: null=quantizer:\n  _component_: torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer"
     "\n  groupsize: 128", {"fake_quantization": FakeQuantization(group=128)}),
    ("clip_grad_norm: null=tensor_parallel_dim: 2", {"parallel": ModelParallel(tensor=2, sharding="ddp")}),
    ("max_seq_len: 2048=max_seq_len: null\n  # none", {"length": 4096})])
def test_options_and_what_becomes_of_them(tmp_path: Path, change: str, fields: dict[str, Any]) -> None:
    before, _, after = change.partition("=")
    text = LORA.replace(before, after)
    if "4096" in str(fields):
        text = text.replace("packed: True", "packed: False")
    plan = _read(tmp_path, text).plan
    assert {name: getattr(plan, name) for name in fields} == fields


@pytest.mark.parametrize(("change", "problem"), [
    ("lora_rank: 64=lora_rank: many", "a.yaml:6: model.lora_rank: many: must be a whole number of at least 1"),
    ("[q_proj, output_proj]=[q_proj, o_proj]",
     'a.yaml:4: model.lora_attn_modules: ["q_proj", "o_proj"]: o_proj is none of q_proj, k_proj, v_proj, output_proj'),
    ("lora_llama3_2_1b=lora_llama9_1b", "a.yaml:3: model._component_: torchtune.models.llama3_2.lora_llama9_1b: no "
     "builder of a model that is known: "),
    ("torch.optim.AdamW=my.optim.Secret", "a.yaml:18: optimizer._component_: my.optim.Secret: none of the optimizers "),
    ("clip_grad_norm: null=optimizer_in_bwd: True", "a.yaml:23: gradient_accumulation_steps: 8: torchtune refuses more "
     "than 1 with optimizer_in_bwd"),
    ("enable_activation_checkpointing: True\nenable_activation_offloading: False=enable_activation_offloading: True",
     "a.yaml:26: enable_activation_offloading: true: torchtune refuses it without enable_activation_checkpointing"),
    ("  max_seq_len: 2048\n=", "a.yaml:8: tokenizer: "),
    ("dtype: bf16=dtype: fp16", "a.yaml:28: dtype: fp16: torchtune's recipes refuse fp16")])
def test_what_torchtune_refuses_is_told_with_its_line(tmp_path: Path, change: str, problem: str) -> None:
    before, _, after = change.partition("=")
    assert before in LORA
    with pytest.raises(JobError) as error:
        _read(tmp_path, LORA.replace(before, after))
    assert str(error.value).removeprefix(f"{tmp_path}{os.sep}").startswith(problem)


def test_a_command_with_ranks_and_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes" / "configs" / "llama3_2").mkdir(parents=True)
    (tmp_path / "recipes" / "configs" / "llama3_2" / "1B_lora.yaml").write_text(LORA)
    monkeypatch.chdir(tmp_path)
    command = ("tune run --nproc_per_node 2 lora_finetune_distributed --config llama3_2/1B_lora batch_size=2 "
               "model.lora_attn_modules=['q_proj','v_proj'] custom_sharded_layers=['output'] fsdp_cpu_offload=True")
    plan = read_command(command.split()).plan
    assert isinstance(plan, TrainingPlan)
    assert (plan.ranks, plan.micro_batch) == (2, 2)
    assert plan.sharding == Sharding(kind="fsdp", offloads=True, shares_ends=True)
    assert plan.adapter is not None
    assert plan.adapter.targets[:2] == ("q_proj", "v_proj")
    with pytest.raises(JobError, match="`tune cp llama3/8B_lora FILE.yaml` copies it from torchtune"):
        read_command("tune run lora_finetune_single_device --config llama3/8B_lora".split())


def test_edits_keep_the_file_but_for_what_changes(tmp_path: Path) -> None:
    job = _read(tmp_path, LORA)
    for axis, wanted, before, after in (
            ("quantize", "nf4", "lora_llama3_2_1b", "qlora_llama3_2_1b"), ("length", 1024, "2048", "1024"),
            ("batch", 2, "batch_size: 4\n", "batch_size: 2\n")):
        edits = job.program.changes[axis](job.options, job.plan, wanted)
        assert edits is not None
        changed = LORA.replace(before, after)
        if axis == "batch":
            changed = changed.replace("steps: 8", "steps: 16")
        assert job.change_text(edits) == changed
        assert job.change(edits).plan != job.plan


def test_what_is_updated_in_the_backward_pass_holds_no_gradient() -> None:
    """AdamW updates each parameter by itself, and as it would with all others."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    other = copy.deepcopy(model)
    make_for_backward(torch.optim.AdamW, model.parameters())
    optimizer = torch.optim.AdamW(other.parameters())
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        other(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, model.parameters(), other.parameters()))

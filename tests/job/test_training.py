"""Steps of plans: the same as those of the trainer itself, of ranks, of several tasks; what to change."""
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analyzer import dry_run, read_job
from analyzer.errors import InputError
from analyzer.tools.job import JobError
from analyzer.tools.job.change import Changes
from analyzer.tools.job.document import Files
from analyzer.tools.job.plan import Adapter, Sharding, TrainingPlan
from analyzer.tools.job.screen import describe_change, describe_job
from analyzer.tools.job.training import TrainedJob, profile_training

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 688,
          "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096,
          "max_position_embeddings": 2048, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
SCRIPT = """
import sys, torch
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from peft import LoraConfig, get_peft_model

folder, batch, adapts, recomputes, casts = sys.argv[1], *map(int, sys.argv[2:])
config = AutoConfig.from_pretrained(folder)
dtype = torch.bfloat16 if casts else torch.float32
model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
if adapts:
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.enable_input_require_grads()

class Rows(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, at):
        row = torch.zeros(512, dtype=torch.int64)
        return {"input_ids": row, "labels": row.clone()}

Trainer(model=model, train_dataset=Rows(), args=TrainingArguments(
    output_dir=folder, per_device_train_batch_size=batch, gradient_accumulation_steps=2, bf16=bool(casts),
    gradient_checkpointing=bool(recomputes), gradient_checkpointing_kwargs={"use_reentrant": False},
    optim="adamw_torch_fused", max_steps=2, report_to=[], save_strategy="no")).train()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small decoder, as people have one: a folder with its config.json."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def _plan(folder: Path, **fields: Any) -> TrainingPlan:
    usual = {"model": str(folder), "micro_batch": 2, "accumulate": 2, "length": 512, "autocast": "bf16",
             "attention": "sdpa", "optimizer": "adamw_fused"}
    return TrainingPlan(**{**usual, **fields})


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("fields", "words"), [
    ({}, "2 0 0 1"), ({"dtype": "fp32", "autocast": None}, "2 0 0 0"),
    ({"adapter": Adapter(r=8), "checkpoints": "blocks", "micro_batch": 4}, "4 1 1 1")])
def test_a_step_needs_what_the_trainer_itself_needs(
        folder: Path, tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("peft")
    (tmp_path / "train.py").write_text(SCRIPT)
    run = dry_run(tmp_path / "train.py", [str(folder), *words.split()], device="h100", steps=2)
    assert run.error is None, run.format_error()
    found = profile_training(_plan(folder, **fields), "h100").profile
    assert found.peak_allocated_bytes == pytest.approx(run.profile.peak_allocated_bytes, rel=0.002)
    assert found.peak_reserved_bytes == pytest.approx(run.profile.peak_reserved_bytes, rel=0.01)
    assert found.optimizer_bytes == run.profile.optimizer_bytes


def test_a_step_of_many_passes_is_computed_from_two(folder: Path) -> None:
    two = profile_training(_plan(folder), "h100")
    eight = profile_training(_plan(folder, accumulate=8), "h100")
    assert eight.profile.peak_allocated_bytes == two.profile.peak_allocated_bytes
    assert two.step_seconds is not None and eight.step_seconds is not None
    passes = (two.profile.fwd_seconds or 0) + (two.profile.bwd_seconds or 0)
    assert eight.step_seconds == pytest.approx(two.step_seconds + 3 * passes)
    assert eight.tokens_per_second == pytest.approx(8 * 2 * 512 / eight.step_seconds)


@pytest.mark.parametrize("settings", [
    {"adapter": Adapter(r=8), "quantize": "nf4", "autocast": "bf16", "checkpoints": "blocks"},
    {"autocast": "bf16"}, {"task": "dpo", "reference": "copy", "micro_batch": 1}])
def test_of_blocks_that_are_alike_a_few_are_run(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 12}))
    plan = TrainingPlan(**{"model": str(tmp_path), "micro_batch": 2, "length": 64, "accumulate": 2, **settings})
    found = profile_training(plan, "l4")
    assert any(row.replayed for row in found.profile.replay), found.profile.replay.explain()


def test_tasks_differ_in_their_passes(folder: Path) -> None:
    params = profile_training(_plan(folder), "h100").profile.params
    compared = profile_training(_plan(folder, task="dpo", reference="copy"), "h100").profile
    assert compared.params == 2 * params  # the model and its reference
    adapted = profile_training(_plan(folder, task="dpo", reference="adapter", adapter=Adapter(r=8)), "h100").profile
    without = profile_training(_plan(folder, task="orpo", adapter=Adapter(r=8)), "h100").profile
    assert adapted.params == without.params
    # the reference's pass has no gradients: half as many FLOPs as a forward pass and what follows it for adapters
    assert without.fwd_flops < adapted.fwd_flops <= 2 * without.fwd_flops
    larger = folder / "teacher"
    larger.mkdir(exist_ok=True)
    (larger / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 8, "vocab_size": 4160}))
    taught = profile_training(_plan(folder, task="distill", reference="copy", teacher=str(larger)), "h100").profile
    assert taught.params == params + profile_training(replace(_plan(folder), model=str(larger)), "h100").profile.params
    # both models' logits in 16 bits are there when the loss is computed, each over a temperature
    assert taught.peak_allocated_bytes > 2 * 2 * 2 * 512 * 4096 * 2 + taught.param_bytes
    reward = profile_training(_plan(folder, task="reward"), "h100").profile
    assert reward.params == params - 4096 * 256 + 256  # a head of one number in the place of the vocabulary


def test_checkpoints_whose_inputs_lie_on_the_host(folder: Path) -> None:
    kept, offloaded = (profile_training(_plan(folder, checkpoints=how, accumulate=1), "h100").profile
                       for how in ("blocks", "inputs_offloaded"))
    inputs = 3 * 2 * 512 * 256 * 2  # of all blocks but the first, whose input is the embedding's output, in 16 bits
    saved = kept.peak_allocated_bytes - offloaded.peak_allocated_bytes
    assert inputs <= saved <= inputs + 2 * 512 * 256 * 2


def test_paged_states_need_nothing_of_the_device(folder: Path) -> None:
    """But those of fewer than 100,000 elements: nine norms, and the weights of attention in four blocks."""
    alone, exact, coarse = (profile_training(_plan(folder, optimizer=name), "h100").profile for name in (
        "adamw_fused", "analyzer.recipe.optimizer:PagedAdamW", "analyzer.recipe.optimizer:PagedAdamW8bit"))
    small = 9 * 256 + 4 * 2 * (256 * 256 + 128 * 256)
    assert exact.optimizer_bytes == small * 2 * 4
    assert coarse.optimizer_bytes is not None and coarse.optimizer_bytes < exact.optimizer_bytes
    assert alone.optimizer_bytes > 2 * exact.optimizer_bytes
    assert exact.peak_allocated_bytes < alone.peak_allocated_bytes


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks(folder: Path, kind: str) -> None:
    alone = profile_training(_plan(folder), "h100").profile
    found = profile_training(_plan(folder, ranks=4, sharding=Sharding(kind=kind)), "h100").profile  # type: ignore[arg-type]
    assert found.world is not None and found.world.size == 4
    assert found.comm
    if kind == "fsdp":  # states of a quarter, in float32 where they were in bfloat16
        assert found.optimizer_bytes == pytest.approx(alone.optimizer_bytes / 2, rel=0.01)
        small = profile_training(_plan(folder, ranks=4, sharding=Sharding(kind="fsdp"), optimizer="adamw8bit"), "h100")
        assert small.profile.optimizer_bytes == pytest.approx(found.optimizer_bytes / 4, rel=0.05)  # codes of a byte


def test_ranks_share_weights_of_four_bits(folder: Path) -> None:
    """They were on no device of several (a model of 4 bits under FSDP); the scales are on each."""
    plan = _plan(folder, quantize="nf4", adapter=Adapter(r=8), checkpoints="blocks")
    one = profile_training(plan, "h100").profile
    many = profile_training(replace(plan, ranks=4, sharding=Sharding(kind="fsdp")), "h100").profile
    assert one.param_bytes is not None and many.param_bytes == pytest.approx(one.param_bytes / 4, rel=0.01)
    assert many.peak_by_category is not None and many.peak_by_category["parameter"] >= many.param_bytes


def test_what_a_model_cannot_be(folder: Path) -> None:
    with pytest.raises(InputError, match="lora: LlamaForCausalLM has no linear layer named qkv; it has "):
        profile_training(_plan(folder, adapter=Adapter(r=8, targets=("qkv",))))
    with pytest.raises(InputError, match=r"target modules 'model.\*\*': is no regular expression: "):
        profile_training(_plan(folder, adapter=Adapter(r=8, targets=("re:model.**",))))
    with pytest.raises(InputError, match="leaves no parameter of LlamaForCausalLM to train"):
        profile_training(_plan(folder, trained=("nothing",)))
    with pytest.raises(JobError, match="model nobody/has-this: none of the shapes that ship"):
        profile_training(replace(_plan(folder), model="nobody/has-this"), files=Files())


YAML = """\
base_model: {folder}
datasets:   # of one's own
  - path: data.jsonl
sequence_len: 2048
micro_batch_size: 64
gradient_accumulation_steps: 2
optimizer: adamw_torch_fused
"""


def test_what_to_change_is_a_difference_of_the_file(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.yml"
    path.write_text(YAML.format(folder=folder))
    job = read_job(path)
    assert f"{path}: axolotl 0.18.0, trains" in describe_job(job)
    changes = Changes(job, lambda job: profile_training(job.plan, "t4"))  # type: ignore[arg-type]
    found = changes.find()
    assert found is not None and found.fits and found.keeps_result
    assert isinstance(found.result, TrainedJob)
    text = describe_change(job, found, changes.tried)
    assert "with this it fits: " in text
    assert "-micro_batch_size: 64" in text
    size = found.job.plan.micro_batch  # type: ignore[union-attr]
    assert f"+micro_batch_size: {size}\n" in text
    larger = [change for change in changes.tried if change.job and change.job.plan.micro_batch > size]  # type: ignore
    assert larger and not any(change.fits for change in larger)
    assert "  - path: data.jsonl\n" in job.change_text(found.edits)

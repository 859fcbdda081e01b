"""axolotl's YAML: what of it becomes a plan, and what is refused as axolotl refuses it."""
import os
from pathlib import Path
from typing import Any

import pytest

from analyzer.tools.job import Job, JobError, read_job
from analyzer.tools.job.plan import PROJECTORS, TOWERS, Adapter, FakeQuantization, ModelParallel, TrainingPlan

QLORA = """\
base_model: NousResearch/Llama-3.2-1B
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_dropout: 0.05
lora_target_linear: true
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
sequence_len: 2048
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_bnb_8bit
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
attn_implementation: flash_attention_2
"""


def _read(tmp_path: Path, text: str) -> Job:
    (tmp_path / "a.yml").write_text(text)
    return read_job(tmp_path / "a.yml")


def test_a_qlora(tmp_path: Path) -> None:
    job = _read(tmp_path, QLORA)
    assert job.program.name == "axolotl"
    assert job.missing == []
    assert job.plan == TrainingPlan(
        model="NousResearch/Llama-3.2-1B", micro_batch=2, accumulate=4, length=2048, autocast="bf16", quantize="nf4",
        adapter=Adapter(r=32, dropout=0.05), attention="sdpa", checkpoints="blocks", optimizer="adamw8bit")


@pytest.mark.parametrize(("change", "fields"), [
    ("load_in_4bit: true=", {"adapter": None, "quantize": None}),
    ("gradient_checkpointing: true=gradient_checkpointing: offload", {"checkpoints": "inputs_offloaded"}),
    ("optimizer: adamw_bnb_8bit=", {"optimizer": "adamw_fused"}),
    ("gradient_accumulation_steps: 4=batch_size: 16", {"accumulate": 8}),
    ("bf16: auto=fp16: true\nbf16: false", {"dtype": "fp16", "autocast": "fp16"}),
    ("sample_packing: true=rl: dpo", {"task": "dpo", "reference": "adapter"}),
    ("sample_packing: true=liger_fused_linear_cross_entropy: true", {"loss_chunks": None}),
    ("sample_packing: true=plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_fused_linear_cross_entropy: true",
     {"loss_chunks": 8}),
    ("sample_packing: true=plugins:\n  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin",
     {"loss_chunks": 8}),
    ("gradient_checkpointing: true=gradient_checkpointing: true\nactivation_offloading: true",
     {"checkpoints": "saved_offloaded"}),
    ("sample_packing: true=quantize_moe_experts: true", {"quantizes_experts": True}),
    ("sample_packing: true=qat:\n  activation_dtype: int8\n  weight_dtype: int4\n  group_size: 32",
     {"fake_quantization": FakeQuantization(group=32)}),
    ("optimizer: adamw_bnb_8bit=tensor_parallel_size: 2",
     {"parallel": ModelParallel(tensor=2, sharding="ddp"), "ranks": 2}),
    ("sample_packing: true=freeze_mm_modules: true",
     {"frozen": tuple(rf"(?:^|\.){part}\." for part in (*TOWERS, *PROJECTORS))}),
    ("lora_target_linear: true=lora_target_modules: [q_proj, v_proj]",
     {"adapter": Adapter(r=32, dropout=0.05, targets=("q_proj", "v_proj"))})])
def test_options_and_what_becomes_of_them(tmp_path: Path, change: str, fields: dict[str, Any]) -> None:
    before, _, after = change.partition("=")
    text = QLORA.replace(before, after)
    if "adapter" in fields and fields["adapter"] is None:
        text = text.replace("adapter: qlora\n", "")
    plan = _read(tmp_path, text).plan
    assert {name: getattr(plan, name) for name in fields} == fields


@pytest.mark.parametrize(("change", "problem"), [
    ("micro_batch_size: 2=micro_batch_size: two",
     "a.yml:12: micro_batch_size: two: must be a whole number of at least 1"),
    ("optimizer: adamw_bnb_8bit=optimizer: adamw_bnb_8bits",
     "a.yml:14: optimizer: adamw_bnb_8bits: is none of the "),
    ("load_in_4bit: true=load_in_8bit: true",
     "a.yml:3: adapter: qlora: axolotl refuses load_in_8bit with qlora; give load_in_4bit: true"),
    ("lora_target_linear: true=", "a.yml: lora_target_modules: is not there; axolotl needs it, or lora_target_linear: "
     "true"),
    ("sequence_len: 2048=sequence_len: [1, 2]", "a.yml:10: sequence_len: [1, 2]: must be a whole number of at least 1"),
    ("gradient_checkpointing: true=activation_offloading: true",
     "a.yml:17: activation_offloading: true: axolotl refuses it without gradient_checkpointing"),
    ("bf16: auto=fsdp_version: 2\nfsdp_config: {reshard_after_forward: true}",
     "a.yml:14: optimizer: adamw_bnb_8bit: axolotl refuses it with FSDP2; give adamw_torch_8bit"),
    ("bf16: auto=fsdp_config: {fsdp_offload_params: true}",
     "a.yml:14: optimizer: adamw_bnb_8bit: axolotl refuses it with FSDP1 that offloads parameters; give"),
    ("optimizer: adamw_bnb_8bit=optimizer: muon\ndeepspeed: z2.json", "a.yml:14: optimizer: muon: axolotl refuses it"),
    ("bf16: auto=tensor_parallel_size: 2", "a.yml:14: optimizer: adamw_bnb_8bit: axolotl refuses it with tensor_par"),
    ("bf16: auto=rl: dpo", "a.yml:11: sample_packing: true: axolotl refuses it with rl: dpo"),
    ("sample_packing: true=batch_size: 8",
     "a.yml:11: batch_size: 8: gradient_accumulation_steps is given too; axolotl refuses both"),
    ("bf16: auto=cut_cross_entropy: true\nliger_fused_linear_cross_entropy: true",
     "a.yml:17: liger_fused_linear_cross_entropy: true: cut_cross_entropy is on too; axolotl refuses both"),
    ("gradient_checkpointing: true=gradient_checkpointing: maybe",
     "a.yml:17: gradient_checkpointing: maybe: must be true or false")])
def test_what_axolotl_refuses_is_told_with_its_line(tmp_path: Path, change: str, problem: str) -> None:
    before, _, after = change.partition("=")
    with pytest.raises(JobError) as error:
        _read(tmp_path, QLORA.replace(before, after))
    assert str(error.value).removeprefix(f"{tmp_path}{os.sep}").startswith(problem)


def test_an_unknown_option_is_told_with_its_neighbour(tmp_path: Path) -> None:
    job = _read(tmp_path, QLORA.replace("sample_packing: true", "sample_packin: true"))
    reading, = job.missing
    assert (reading.name, reading.kind, reading.meaning) == ("sample_packin", "unknown", "did you mean sample_packing?")
    assert reading.place.endswith("a.yml:11")


def test_edits_keep_the_file_but_for_what_changes(tmp_path: Path) -> None:
    job = _read(tmp_path, QLORA)
    edits = job.program.changes["batch"](job.options, job.plan, 1)
    assert edits is not None
    changed = job.change(edits)
    assert (changed.plan.micro_batch, changed.plan.accumulate) == (1, 8)  # type: ignore[union-attr]
    assert job.change_text(edits) == QLORA.replace("micro_batch_size: 2", "micro_batch_size: 1").replace(
        "gradient_accumulation_steps: 4", "gradient_accumulation_steps: 8")

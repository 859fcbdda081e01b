"""Broken configurations and commands of every program: one error each, with the file, the line and the key. Nothing is
profiled here.
"""
import os
import shlex
from pathlib import Path

import pytest

from analyzer.tools.job import JobError, read_command, read_job

AXOLOTL = "base_model: Qwen/Qwen3-0.6B\ndatasets:\n  - path: a.jsonl\nsequence_len: 512\nmicro_batch_size: 2\n"
FACTORY = ("model_name_or_path: Qwen/Qwen3-0.6B\ndo_train: true\ndataset: identity\ntemplate: qwen3\noutput_dir: out\n"
           "stage: sft\n")
TUNE = """\
model:
  _component_: torchtune.models.llama3_2.lora_llama3_2_1b
  lora_attn_modules: [q_proj]
  lora_rank: 64
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  max_seq_len: 2048
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
batch_size: 4
optimizer:
  _component_: torch.optim.AdamW
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
"""
TITAN = """\
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
[training]
local_batch_size = 2
seq_len = 8192
[activation_checkpoint]
mode = "full"
"""
KOHYA = """\
[model]
pretrained_model_name_or_path = "sd_xl.safetensors"
network_module = "networks.lora"
[train]
resolution = 1024
train_batch_size = 2
"""
SERVER = "model: Qwen/Qwen3-8B\ntensor-parallel-size: 2\n"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcd", "bcde"))


def _fails(path: Path, text: str, problem: str) -> None:
    path.write_text(text)
    with pytest.raises(JobError) as error:
        read_job(path)
    said = str(error.value).replace(f"{path.parent}/", "")
    assert said.startswith(problem), said
    assert "\n" not in said


@pytest.mark.parametrize(("text", "problem"), [
    ("", "a.yml: is empty, and a configuration is a mapping"), ("# only a comment\n", "a.yml: is empty"),
    ("- a\n- b\n", "a.yml: holds a list, and"), ("just words\n", "a.yml: holds no names, and"),
    ("<html></html>", "a.yml: holds no names"), ("{", "a.yml:1: is no YAML: "),
    ("a: b: c\n", "a.yml:1: is no YAML: mapping values are not allowed here"),
    ("base_model: [x\n", "a.yml:2: is no YAML: expected ',' or ']'"),
    ("base_model: 'x\n", "a.yml:2: is no YAML: found unexpected end of stream"),
    ("base_model: x\n\tmicro_batch_size: 1\n",
     "a.yml:2: is no YAML: found character '\\t' that cannot start any token"),
    ("\x00\x01", "a.yml: is no YAML: unacceptable character #x0000"),
    ("base_model: x\n---\nbase_model: y\n", "a.yml:2: is no YAML: but found another document"),
    (BOMB, "a.yml: has more than 20,000 values"), ("a: &a [*a]\n", "a.yml: is no configuration of torchtune, "),
    ("a: " + "[" * 60 + "]" * 60, "a.yml: has more than 20,000 values, or 40 levels"),
    ("? [a, b]\n: c\n", "a.yml: is no configuration of "), ("zero_optimization: {}\n",
     "a.yml: is read beside what it "),
    ("distributed_type: FSDP\n", "a.yml: is read beside what it launches; give that command: analyzer job -- accel"),
    ("base_model: !!python/object/apply:os.system ['x']\ndatasets: []\n",
     'a.yml:1: base_model: ["x"]: must be one word')])
def test_what_is_no_yaml_of_a_program(tmp_path: Path, text: str, problem: str) -> None:
    _fails(tmp_path / "a.yml", text, problem)


def test_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_bytes("base_model: größe\n".encode("latin-1"))
    (tmp_path / "b.yml").write_bytes(AXOLOTL.encode("utf-16"))
    (tmp_path / "c.yml").mkdir()
    for name, problem in (("a.yml", "a.yml: is no text in UTF-8: byte 14"),
                          ("b.yml", "b.yml: is no text in UTF-8: byte 0"),
                          ("c.yml", "c.yml: cannot be read: Is a directory"),
                          ("d.yml", "d.yml: cannot be read: No such file or directory"),
                          ("e.txt", "e.txt: not the name of a configuration: it must end in .yaml, .yml, .toml, .jso"),
                          ("f.py", "f.py: is a script: `analyzer dryrun ")):
        with pytest.raises(JobError) as error:
            read_job(tmp_path / name)
        assert str(error.value).removeprefix(f"{tmp_path}{os.sep}").startswith(problem), str(error.value)
    (tmp_path / "g.yml").write_bytes(b"\xef\xbb\xbf" + AXOLOTL.encode())  # a mark of the order of bytes is none of it
    assert read_job(tmp_path / "g.yml").program.name == "axolotl"


@pytest.mark.parametrize(("more", "problem"), [
    ("micro_batch_size: two", "a.yml:6: micro_batch_size: two: must be a whole number of at least 1"),
    ("micro_batch_size: 0", "a.yml:6: micro_batch_size: 0: must be a whole"),
    ("micro_batch_size: 1.5", "a.yml:6: micro_batch_size: 1.5: must be a whole"),
    ("micro_batch_size: [1]", "a.yml:6: micro_batch_size: [1]: must be a whole"),
    ("sequence_len: {a: 1}", 'a.yml:6: sequence_len: {"a": 1}: must be a whole'),
    ("sequence_len: true", "a.yml:6: sequence_len: true: must be a whole"),
    ("base_model: [a, b]", 'a.yml:6: base_model: ["a", "b"]: must be one word'),
    ("base_model:", "a.yml:6: base_model: is not there, and axolotl needs it"),
    ("adapter: lora\nlora_target_linear: true\nlora_r: abc", "a.yml:8: lora_r: abc: must be a whole"),
    ("adapter: lora\nlora_target_linear: true\nlora_rank: 8",
     "a.yml: lora_r: is not there, and an adapter needs its rank; "
     "is it lora_rank, at a.yml:8?"),
    ("adapter: lora\nlora_r: 8\nlora_target_modules: {a: b}",
     'a.yml:8: lora_target_modules: {"a": "b"}: must be a list'),
    ("adapter: qlora", "a.yml:6: adapter: qlora: axolotl refuses qlora without load_in_4bit: true"),
    ("load_in_4bit: maybe", "a.yml:6: load_in_4bit: maybe: must be true or false"),
    ("load_in_8bit: true", "a.yml:6: load_in_8bit: true: axolotl refuses quantized weights without an adapter"),
    ("optimizer: adamw_tourch", "a.yml:6: optimizer: adamw_tourch: is none of the "),
    ("optimizer: zzz", "a.yml:6: optimizer: zzz: must be one of adamw_torch, "),
    ("rl: dppo", "a.yml:6: rl: dppo: must be one of dpo, ipo, orpo, simpo, kto, grpo, gdpo, ebft; did you mean dpo"),
    ("bf16: fp8", "a.yml:6: bf16: fp8: must be true or false"),
    ("deepspeed: nowhere.json", "a.yml:6: deepspeed: nowhere.json: no such file; copy it beside the configuration"),
    ("fsdp_config: yes", "a.yml:6: fsdp_config: true: must be a mapping of names to values"),
    ("fsdp_config:\n  fsdp_sharding_strategy: FULL",
     "a.yml:7: fsdp_config.fsdp_sharding_strategy: FULL: must be one of "
     "FULL_SHARD")])
def test_axolotl(tmp_path: Path, more: str, problem: str) -> None:
    """Of a key that is given twice the last one counts, as PyYAML has it."""
    _fails(tmp_path / "a.yml", f"{AXOLOTL}{more}\n", problem)


@pytest.mark.parametrize(("more", "problem"), [
    ("per_device_train_batch_size: many", "b.yaml:7: per_device_train_batch_size: many: must be a whole"),
    ("quantization_bit: 3", "b.yaml:7: quantization_bit: 3: bitsandbytes holds weights in 4 or 8 bits"),
    ("quantization_bit: four", "b.yaml:7: quantization_bit: four: must be a whole"),
    ("finetuning_type: lroa",
     "b.yaml:7: finetuning_type: lroa: must be one of lora, oft, freeze, full; did you mean lora?"),
    ("finetuning_type: full\nquantization_bit: 4", "b.yaml:8: quantization_bit: 4: LLaMA-Factory refuses it with "
     "finetuning_type full"),
    ("stage: sft", "b.yaml:7: stage: is given twice, on line 6 too, which LLaMA-Factory refuses"),
    ("lora_rank: -1", "b.yaml:7: lora_rank: -1: must be a whole"), ("lora_target: 5",
     "b.yaml:7: lora_target: 5: must be"),
    ("bf16: true\nfp16: true", "b.yaml:8: fp16: true: bf16 is given too; the trainer refuses both"),
    ("packing: perhaps", "b.yaml:7: packing: perhaps: must be true or false"),
    ("optim: adamw8bit", "b.yaml:7: optim: adamw8bit: is none of the "),
    ("deepspeed: missing.json", "b.yaml:7: deepspeed: missing.json: no such file")])
def test_llamafactory(tmp_path: Path, more: str, problem: str) -> None:
    _fails(tmp_path / "b.yaml", f"{FACTORY}{more}\n", problem)


@pytest.mark.parametrize(("base", "before", "after", "problem"), [
    (TUNE, "lora_rank: 64", "lora_rank: x", "c.yaml:4: model.lora_rank: x: must be a whole number of at least 1"),
    (TUNE, "lora_llama3_2_1b", "lora_llama3_2_1bb",
     "c.yaml:2: model._component_: torchtune.models.llama3_2.lora_llama3_2_"
     "1bb: no builder of a model that is known"),
    (TUNE, "torchtune.models.llama3_2.lora_llama3_2_1b", "mine.net",
     "c.yaml:2: model._component_: mine.net: no builder"),
    (TUNE, "batch_size: 4", "batch_size: nil", "c.yaml:10: batch_size: nil: must be a whole"),
    (TUNE, "batch_size: 4", "batch_size: 4\nbatch_size: 8",
     "c.yaml:11: batch_size: is given twice, on line 10 too, which "
     "torchtune refuses"),
    (TUNE, "optim.AdamW", "optim.AdamWW",
     "c.yaml:12: optimizer._component_: torch.optim.AdamWW: none of the optimizers"),
    (TUNE, "max_seq_len: 2048", "max_seq_len: x", "c.yaml:7: tokenizer.max_seq_len: x: must be a whole"),
    (TITAN, "local_batch_size = 2", "local_batch_size = 'two'",
     "c.toml:7: training.local_batch_size: two: must be a whole"),
    (TITAN, "seq_len = 8192", "seq_len = -1", "c.toml:8: training.seq_len: -1: must be a whole"),
    (TITAN, "seq_len = 8192", "seq_len =", "c.toml:8: is no TOML: "),
    (TITAN, "seq_len = 8192", "seq_len = 1\nseq_len = 2", 'c.toml:9: is no TOML: Key "seq_len" already exists'),
    (TITAN, '"full"', '"ful"',
     "c.toml:10: activation_checkpoint.mode: ful: must be one of none, selective, full, memory_"
     "budget; did you mean full?"),
    (TITAN, '"AdamW"', '"Adm"',
     "c.toml:5: optimizer.name: Adm: torchtitan has Adam and AdamW alone; did you mean Adam"),
    (TITAN, "[optimizer]", "[optimizer", "c.toml:4: is no TOML: "),
    (KOHYA, "train_batch_size = 2", "train_batch_size = 'x'", "c.toml:6: train_batch_size: x: must be a whole"),
    (KOHYA, "= 1024", "= '1024x768'",
     "c.toml:5: resolution: 1024x768: must be one or two whole numbers of at least 64"),
    (KOHYA, "resolution", "resolutin",
     "c.toml: resolution: is not there, and sd-scripts needs it, here or in dataset_config"
     "; is it resolutin, at c.toml:5?"),
    (KOHYA, "= 1024", "= 1024\noptimizer_type = 'AdamW9bit'", "c.toml:6: optimizer_type: AdamW9bit: is none of the "),
    (KOHYA, "= 1024", "= 1024\nmixed_precision = 'fp8'",
     "c.toml:6: mixed_precision: fp8: must be one of no, fp16, bf16"),
    (KOHYA, "= 1024", "= 1024\ndataset_config = 'none.toml'", "c.toml:6: dataset_config: none.toml: no such file"),
    (SERVER, "size: 2", "size: 0", "c.yaml:2: tensor_parallel_size: 0: must be a whole number of at least 1"),
    (SERVER, "size: 2", "size: 2\nmax-model-len: 4x", "c.yaml:3: max_model_len: 4x: must be a whole"),
    (SERVER, "size: 2", "size: 2\ngpu-memory-utilization: 1.5",
     "c.yaml:3: gpu_memory_utilization: 1.5: must be above 0"),
    (SERVER, "size: 2", "size: 2\ngpu-memory-utilization: high",
     "c.yaml:3: gpu_memory_utilization: high: must be a number"),
    (SERVER, "size: 2", "size: 2\nmax-num-seqs: 8\nquantization: gptqq",
     "c.yaml:4: quantization: gptqq: is none of the "),
    (SERVER, "size: 2", "size: 2\nmax-num-seqs: 8\nspeculative-config: '{bad'",
     "c.yaml:4: speculative_config: {bad: must be "
     "JSON: "),
    (SERVER, "size: 2", "size: 2\nmax-num-batched-tokens: 2\nmax-num-seqs: 8",
     "c.yaml:3: max_num_batched_tokens: 2: vLLM "
     "refuses fewer than max_num_seqs 8"),
    (SERVER, "size: 2", "size: 2\nmax-num-seqs: 8\ndtype: float8", "c.yaml:4: dtype: float8: must be one of auto, ")])
def test_other_files(tmp_path: Path, base: str, before: str, after: str, problem: str) -> None:
    assert before in base
    _fails(tmp_path / problem.partition(":")[0], base.replace(before, after, 1), problem)


TRL = "trl sft --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name trl-lib/Capybara"
SWIFT = "swift sft --model Qwen/Qwen2.5-7B-Instruct --dataset a"
SGLANG = "python -m sglang.launch_server --model-path Qwen/Qwen3-8B"
DREAMBOOTH = ("accelerate launch train_dreambooth_lora_sdxl.py --instance_data_dir d --pretrained_model_name_or_path "
              "stabilityai/stable-diffusion-xl-base-1.0")
PICTURES = f"{DREAMBOOTH} --instance_prompt p"
CLM = ("torchrun --nproc_per_node 2 run_clm.py --model_name_or_path openai-community/gpt2 "
       "--per_device_train_batch_size 8")


@pytest.mark.parametrize(("command", "problem"), [
    (f"{TRL} --per_device_train_batch_size x", "per_device_train_batch_size: x: must be a whole"),
    (f"{TRL} --use_peft maybe", "use_peft: maybe: must be true or false"),
    (f"{TRL} --use_peft --lora_r 0", "lora_r: 0: must be a whole"), (f"{TRL} --bf16 --fp16",
     "fp16: true: bf16 is given too"),
    (f"{TRL} --load_in_4bit --load_in_8bit", "load_in_8bit: true: load_in_4bit is given too; TRL refuses both"),
    (f"{TRL} --attn_implementation", "attn_implementation: true: needs a value after it"),
    (f"{TRL} --config nothere.yaml", "nothere.yaml: no such file"),
    ("trl sfft --model_name_or_path a", "trl sfft: not the command of a program that is read; did you mean trl sft"),
    ("trl sft", "model_name_or_path: is not there, and TRL needs it"),
    ("python", "python: not the command of a program that is read; these are: tune run, "),
    ("accelerate launch", "accelerate launch: launches no program; give the whole command"),
    ("torchrun --nproc_per_node 2", "torchrun --nproc_per_node 2: launches no program"),
    ("vllm server x", "vllm server: not the command of a program that is read; did you mean vllm serve"),
    ("vllm serve", "model: is not there; write vllm serve MODEL"),
    ("tune run lora_finetune_single_device --config nope", "nope: no such file; `tune cp nope FILE.yaml` copies it"),
    ("axolotl train none.yml", "none.yml: no such file; copy it here, or run where the program would"),
    (f"{SWIFT} --tuner_type lorra", "tuner_type: lorra: must be one of full, lora, "),
    (f"{SWIFT} --torch_dtype fp7", "torch_dtype: fp7: must be one of bfloat16, float16, float32"),
    (f"{SWIFT} --deepspeed zero9", "deepspeed: zero9: no such file, and not one of zero0, zero1, "),
    (f"{SWIFT} --quant_bits 3 --quant_method bnb", "quant_bits: 3: bnb has 4 and 8 bits"),
    (f"{SWIFT} --packing true --attn_impl sdpa", "packing: true: ms-swift needs a flash attention for it"),
    (f"{SGLANG} --tp x", "tp_size: x: must be a whole"), (f"{SGLANG} --mem-fraction-static 2",
     "mem_fraction_static: 2: must"),
    (f"{SGLANG} --tp 4 --attn-dp-size 3", "attn_dp_size: 3: SGLang refuses attention of 3 copies over tp_size 4"),
    (f"{SGLANG} --tp 4 --dp 2 --attn-dp-size 2", "attn_dp_size: 2: SGLang refuses it with dp_size 2"),
    (f"{SGLANG} --kv-cache-dtype fp3", "kv_cache_dtype: fp3: is none of the "),
    (f"{SGLANG} --speculative-algorithm EAGEL", "speculative_algorithm: EAGEL: must be one of EAGLE, "),
    (f"{PICTURES} --rank x", "rank: x: must be a whole"), (f"{PICTURES} --mixed_precision fp8",
     "mixed_precision: fp8: must"),
    (f"{CLM} --block_size x", "block_size: x: must be a whole"), (f"{CLM} --torch_dtype f32",
     "torch_dtype: f32: must be one"),
    (f"{CLM} --fsdp full_shart", "fsdp: full_shart: must be some of full_shard, shard_grad_op, no_shard, hybrid_shard, "
     "hybrid_shard_zero2, offload, auto_wrap; did you mean full_shard"),
    (f"{CLM} --optim adamw8", "optim: adamw8: is none of the ")])
def test_commands(command: str, problem: str) -> None:
    with pytest.raises(JobError) as error:
        read_command(shlex.split(command))
    assert str(error.value).startswith(f"the command: {problem}"), str(error.value)


def test_an_option_that_is_meant_is_not_taken_for_one_that_is_missing() -> None:
    with pytest.raises(JobError, match="^the command: instance_prompt: is not there, .* begin without it$"):
        read_command(shlex.split(DREAMBOOTH))


@pytest.mark.parametrize(("name", "text", "problem"), [
    ("ds.json", "", "ds.json:1: is no JSON: Expecting value"), ("ds.json", "{", "ds.json:1: is no JSON: "),
    ("ds.json", "[]", "ds.json: holds a list, and"), ("ds.json", '{"a": 1,\n"a": 2}',
     "ds.json:2: a: is given twice, on line 1"),
    ("ds.json", '{\n"zero_optimization": 3}', "ds.json:2: zero_optimization: 3: must be a mapping"),
    ("ds.json", '{"zero_optimization": {\n"stage": 4}}', "ds.json:2: zero_optimization.stage: 4: must be 0, 1, 2 or 3"),
    ("ds.json", '{"zero_optimization": {\n"stage": "x"}}', "ds.json:2: zero_optimization.stage: x: must be a whole"),
    ("ds.json", '{"bf16": {"enabled": true},\n"fp16": {"enabled": true}}',
     "ds.json:2: fp16: {\"enabled\": true}: bf16 is "
     "enabled too; DeepSpeed refuses both"),
    ("ds.json", '{"train_batch_size": 7}',
     "ds.json:1: train_batch_size: 7: 8 sequences a pass, 1 passes and 2 ranks are 16"),
    ("ds.json", '{"train_micro_batch_size_per_gpu": 4}', "the command: per_device_train_batch_size: 8: ds.json has "),
    ("ds.json", '{"gradient_accumulation_steps": "x"}', "ds.json:1: gradient_accumulation_steps: x: must be a whole"),
    ("ds.json", '{"optimizer": {\n"type": "Adma"}}',
     "ds.json:2: optimizer.type: Adma: neither DeepSpeed nor torch.optim"),
    ("ds.json", '{"zero_optimization": {"stage": 3,\n"offload_optimizer": {"device": "tpu"}}}', "ds.json:2: zero_"
     "optimization.offload_optimizer.device: tpu: must be one of cpu, nvme, none; did you mean cpu?"),
    ("acc.yaml", "distributed_type: FSPD\n",
     "acc.yaml:1: distributed_type: FSPD: must be one of NO, "),
    ("acc.yaml", "distributed_type: FSDP\nnum_processes: x\n", "acc.yaml:2: num_processes: x: must be a whole"),
    ("acc.yaml", "distributed_type: FSDP\nfsdp_config: 3\n", "acc.yaml:2: fsdp_config: 3: must be a mapping"),
    ("acc.yaml", "mixed_precision: bf61\n",
     "acc.yaml:1: mixed_precision: bf61: must be one of no, fp16, bf16, fp8; did"),
    ("acc.yaml", "num_machines: 0\n", "acc.yaml:1: num_machines: 0: must be a whole"),
    ("acc.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 7\n",
     "acc.yaml: zero_optimization.stage: 7"),
    ("acc.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: no.json\n",
     "acc.yaml:3: deepspeed_config.deepspeed_config_file: no.json: no such file")])
def test_files_beside_a_command(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, problem: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    command = f"{CLM} --deepspeed ds.json" if name == "ds.json" else (
        f"accelerate launch --config_file acc.yaml {CLM.partition('2 ')[2]}")
    with pytest.raises(JobError) as error:
        read_command(command.split())
    assert str(error.value).startswith(problem), str(error.value)


@pytest.mark.parametrize(("name", "text", "missing"), [
    ("a.yml", f"{AXOLOTL}gradient_acumulation_steps: 4\n",
     ("gradient_acumulation_steps", 6, "gradient_accumulation_steps")),
    ("a.yml", f"{AXOLOTL}cutoff_len: 100\n", ("cutoff_len", 6, "did you mean sequence_len?")),
    ("a.yml", f"{AXOLOTL}per_device_train_batch_size: 4\n", ("per_device_train_batch_size", 6, "micro_batch_size")),
    ("b.yaml", f"{FACTORY}micro_batch_size: 4\n", ("micro_batch_size", 7, "did you mean per_device_train_batch_size?")),
    ("b.yaml", f"{FACTORY}lora_r: 8\n", ("lora_r", 7, "did you mean lora_rank?")),
    ("b.yaml", f"{FACTORY}max_seq_length: 8\n", ("max_seq_length", 7, "did you mean cutoff_len")),
    ("c.yaml", TUNE.replace("lora_rank", "lora_rnak"), ("model.lora_rnak", 4, "lora_rank")),
    ("c.yaml", TUNE.replace("batch_size", "batchsize"), ("batchsize", 10, "batch_size")),
    ("c.toml", TITAN.replace("[activation_checkpoint]", "[activation_checkpoints]"), ("activation_checkpoints", 9,
     "did you mean activation_checkpoint")),
    ("c.toml", TITAN.replace("seq_len", "seqlen"), ("training.seqlen", 8, "seq_len")),
    ("d.toml", KOHYA.replace("train_batch_size", "train_batchsize"), ("train_batchsize", 6, "train_batch_size")),
    ("e.yaml", f"{SERVER}max_num_seq: 4\n", ("max_num_seq", 3, "max_num_seqs"))])
def test_keys_that_are_not_known(tmp_path: Path, name: str, text: str, missing: tuple[str, int, str]) -> None:
    """Each is told before all else, with its line and the name that is meant."""
    (tmp_path / name).write_text(text)
    found, = read_job(tmp_path / name).missing
    assert (found.name, found.place, found.kind) == (missing[0], f"{tmp_path / name}:{missing[1]}", "unknown")
    assert missing[2] in found.meaning


def test_a_key_that_is_given_twice(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(f"{AXOLOTL}micro_batch_size: 4  # this one\n")
    job = read_job(tmp_path / "a.yml")
    assert job.plan.micro_batch == 4  # type: ignore[union-attr]
    told = next(each for each in job.readings if str(each.value).startswith("given twice"))
    assert (told.name, told.kind, told.place) == ("micro_batch_size", "assumed", f"{tmp_path / 'a.yml'}:6")
    edits = job.program.changes["batch"](job.options, job.plan, 2)
    assert "micro_batch_size: 2  # this one\n" in job.change_text(edits or [])

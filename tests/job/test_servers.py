"""Commands of servers: what of them becomes a plan, what they refuse, whether they start, and what to change."""
from pathlib import Path
from typing import Any

import pytest

from analyzer.cli import main
from analyzer.hardware import find_device
from analyzer.tools.job import JobError, read_command, read_job
from analyzer.tools.job.plan import ServingPlan
from analyzer.tools.job.serving import ServerStart, start_server, stored_format

TINY = "HuggingFaceTB/SmolLM2-135M"  # 30 layers, 3 heads of keys of 64 channels, 8,192 positions


def _plan(command: str) -> ServingPlan:
    plan = read_command(command.split()).plan
    assert isinstance(plan, ServingPlan)
    return plan


def test_a_command_of_vllm() -> None:
    job = read_command("vllm serve Qwen/Qwen3-32B-FP8 -tp 2 --max-model-len 32K --gpu-memory-utilization=0.95 "
                       "--kv-cache-dtype fp8 --max-num-seqs 64 --trust-remote-code --port 8000".split())
    assert job.missing == []
    assert job.plan == ServingPlan(
        model="Qwen/Qwen3-32B-FP8", engine="vllm", weights="fp8", cache="fp8", tp=2, length=32768, memory_share=0.95,
        sequences=64)


def test_a_command_of_sglang() -> None:
    job = read_command("python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8 --dp 8 "
                       "--enable-dp-attention --ep 8 --mem-fraction-static 0.85 --context-length 16384".split())
    assert job.missing == []
    assert job.plan == ServingPlan(
        model="deepseek-ai/DeepSeek-V3", engine="sglang", block_size=1, dp=8, ep=8, length=16384, memory_share=0.85)


@pytest.mark.parametrize(("words", "fields"), [
    ("--tp 8 --attn-dp-size 4", {"tp": 2, "dp": 4}), ("--tp 2 --data-parallel-size 3", {"tp": 2, "dp": 3}),
    ("--speculative-algorithm EAGLE --enable-prefill-delayer --trust-remote-code", {"drafted": 3}),
    ("--quantization w4afp8 --kv-cache-dtype mxfp8", {"weights": "fp8", "experts": "int4", "cache": "fp8"}),
    ("--chunked-prefill-size -1", {"chunk": 16384})])
def test_options_of_sglang(words: str, fields: dict[str, Any]) -> None:
    plan = _plan(f"sglang serve {words} {TINY}" if words.endswith("code") else
                 f"python -m sglang.launch_server --model {TINY} {words}")
    assert {"model": plan.model, **{name: getattr(plan, name) for name in fields}} == {"model": TINY, **fields}


@pytest.mark.parametrize(("device", "chunk", "decoding", "prompts"), [
    # sizes of captured prompts: 8 to 32 by 4, 14 to 256, 8 to 512, 8 to 1,024, 12 to 4,096, then each 512
    ("t4", 2048, 8, 8 + 14 + 8 + 8 + 4), ("l4", 4096, 48, 50), ("h100", 8192, 256, 50 + 8), ("b200", 16384, 512, 74)])
def test_the_share_of_the_memory_that_sglang_takes(device: str, chunk: int, decoding: int, prompts: int) -> None:
    engine = start_server(_plan(f"sglang serve {TINY}"), device).deployment.engine
    memory = find_device(device).memory_bytes / 2**20  # type: ignore[operator]
    reserved = 512 + 1.5 * chunk + 1024 / 8 + 2 * decoding + 8 * prompts
    assert engine.chunk == chunk
    assert engine.memory_share == round((memory - reserved) / memory, 3)


@pytest.mark.parametrize(("words", "fields"), [
    ("--spec-method ngram --spec-tokens 4", {"drafted": 4}), ("--device-memory-utilization 0.5", {"memory_share": 0.5}),
    ("--max-model-len 32k", {"length": 32000}),
    ("--max-model-len auto", {"length": None, "fits_length": True}),
    ("--quantization bitsandbytes", {"weights": "int4"}),
    ("--quantization mxfp4", {"weights": "bf16", "experts": "mxfp4"}),
    ("--dtype half", {"weights": "fp16"}),
    ("-dp 2 -tp 4 --enable-expert-parallel", {"dp": 2, "tp": 4, "ep": 8}),
    ("--no-enable-chunked-prefill --max-model-len 4096", {"chunk": 4096}),
    ("--limit-mm-per-prompt {\"image\":0,\"video\":{\"count\":0}}", {"has_tower": False}),
    ("--limit-mm-per-prompt {\"image\":2}", {"has_tower": True}), ("--language-model-only", {"has_tower": False}),
    ("--speculative-config {\"method\":\"ngram\",\"num_speculative_tokens\":4}", {"drafted": 4})])
def test_options_of_vllm(words: str, fields: dict[str, Any]) -> None:
    plan = _plan(f"vllm serve {TINY} {words}")
    assert {name: getattr(plan, name) for name in fields} == fields


@pytest.mark.parametrize(("model", "weights"), [
    ("Qwen/Qwen2.5-32B-Instruct-AWQ", "int4"), ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "int8"),
    ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "fp8"), ("RedHatAI/Qwen2.5-7B-quantized.w4a16", "int4"),
    ("nvidia/Llama-3.1-8B-Instruct-NVFP4", "nvfp4"), ("Qwen/Qwen3-8B", None)])
def test_weights_by_the_name_of_a_model(model: str, weights: str | None) -> None:
    assert _plan(f"vllm serve {model}").weights == weights


@pytest.mark.parametrize(("words", "problem"), [
    ("--max-model-len many", "the command: max_model_len: many: must be a whole number of at least 1"),
    ("--gpu-memory-utilization 1.2", "the command: gpu_memory_utilization: 1.2: must be above 0 and at most 1"),
    ("--quantization fp9", "the command: quantization: fp9: is none of the "),
    ("--max-num-seqs 512 --max-num-batched-tokens 256",
     "the command: max_num_batched_tokens: 256: vLLM refuses fewer than max_num_seqs 512"),
    ("--speculative-config {}", "the command: speculative_config: {}: num_speculative_tokens must be a whole number"),
    ("--tensor-parallel-size 0", "the command: tensor_parallel_size: 0: must be a whole number of at least 1")])
def test_what_vllm_refuses(words: str, problem: str) -> None:
    with pytest.raises(JobError) as error:
        _plan(f"vllm serve {TINY} {words}")
    assert str(error.value).startswith(problem)


def test_an_unknown_option_has_its_neighbour() -> None:
    reading, = read_command(f"vllm serve {TINY} --max-model-length 4096".split()).missing
    assert (reading.name, reading.kind) == ("max_model_length", "unknown")
    assert "max_model_len" in reading.meaning


def test_a_file_of_vllm_alone_or_under_a_command(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text(f"model: {TINY}\nmax-model-len: 4096\ntensor-parallel-size: 2\n")
    plan = read_job(tmp_path / "serve.yaml").plan
    assert isinstance(plan, ServingPlan)
    assert (plan.model, plan.length, plan.tp) == (TINY, 4096, 2)
    assert _plan(f"vllm serve --config {tmp_path / 'serve.yaml'} -tp 3") == ServingPlan(
        model=TINY, engine="vllm", length=4096, tp=3, memory_share=0.92)


@pytest.mark.parametrize(("config", "formats"), [
    (None, ("bf16", None)), ({"quant_method": "mxfp4"}, ("bf16", "mxfp4")),
    ({"quant_method": "awq", "bits": 4}, ("int4", None)), ({"quant_method": "gptq", "bits": 8}, ("int8", None)),
    ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}}},
     ("fp8", None))])
def test_weights_by_the_config_of_a_checkpoint(config: Any, formats: Any) -> None:
    assert stored_format(config) == formats


def _start(words: str, share: float) -> ServerStart:
    return start_server(_plan(f"vllm serve {TINY} --gpu-memory-utilization {share} {words}"), "rtx_4090")


def test_a_server_starts_where_one_longest_sequence_has_room() -> None:
    """A token of the cache has 2 x 3 heads x 64 channels x 2 bytes x 30 layers: 23,040 bytes, a page 16 of them."""
    start = _start("", 0.05)
    assert (start.longest, start.longest_bytes) == (8192, 8192 * 23040)
    assert start.refusal == ""
    assert start.room_bytes is not None
    held = start.deployment.weight_bytes() + start.deployment.activation_bytes()
    assert start.room_bytes == int(0.05 * start.deployment.device.memory_bytes) - held  # type: ignore[operator]
    assert start.sequences == start.room_bytes / (8192 * 23040)
    share = (held + 1000 * 23040) / start.deployment.device.memory_bytes  # type: ignore[operator]
    less = _start("", round(share, 6))
    assert less.most_tokens == 992  # 62 pages
    assert less.refusal.startswith("To serve at least one request with the model's max seq len (8192), (0.18 GiB KV "
                                   "cache is needed, which is larger than the available KV cache memory (0.02 GiB).")
    assert "the estimated maximum model length is 992." in less.refusal
    assert _start("--max-model-len auto", round(share, 6)).longest == 992
    assert _start("", 0.001).refusal.startswith("No available memory for the cache blocks.")
    assert _start("--max-model-len 16384", 0.9).refusal.startswith(
        "User-specified max_model_len (16384) is greater than the derived max_model_len")


def test_what_to_change_is_told_as_a_difference_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """9 heads are not shared by 2 devices, so that more of them are not proposed."""
    assert main(["job", "--device", "rtx_4090", "--", "vllm", "serve", TINY, "--gpu-memory-utilization", "0.02"]) == 3
    said = capsys.readouterr().out
    assert "does NOT start on 1 x rtx_4090; vllm says: To serve at least one request" in said
    assert f"-vllm serve {TINY} --gpu-memory-utilization 0.02\n" in said
    assert f"+vllm serve {TINY} --gpu-memory-utilization 0.02 --max-model-len 4096\n" in said
    rows = [line.split()[:3] for line in said.partition("Change")[2].splitlines()[2:6]]
    assert [[name, value] for name, value, _ in rows] == [
        ["--max-model-len", "4096"], ["--gpu-memory-utilization", "0.95"], ["--kv-cache-dtype", "fp8"],
        ["--quantization", "fp8"]]

"""Prompts and answers on devices of their own."""
import pytest

from analyzer.cli import main
from analyzer.errors import InputError
from analyzer.tools.serving import Batch, Chunk, Layout, PassTimer, make_deployment, read_served_model
from analyzer.tools.serving.pools import DevicePool, profile_pools, read_pool, send_seconds
from analyzer.zoo.target import load_target


@pytest.fixture(scope="module")
def llama():
    return read_served_model(load_target("hf:llama-3.1-8b").build, "hf:llama-3.1-8b")


@pytest.mark.parametrize(("text", "pool", "replicas"), [
    ("4xh100:tp2", DevicePool(4, "h100", Layout(2)), 2), ("8xb200", DevicePool(8, "b200", Layout()), 8),
    ("16xh200:dp8ep8", DevicePool(16, "h200", Layout(dp=8, ep=8)), 2)])
def test_pools_are_read(text, pool, replicas):
    assert (read_pool(text), read_pool(text).replicas) == (pool, replicas)


@pytest.mark.parametrize(("text", "said"), [
    ("h100:tp2", "a pool is GPUSxDEVICE:LAYOUT"), ("4xh100:tp", "a pool is GPUSxDEVICE:LAYOUT"),
    ("6xh100:tp4", "6 devices are not replicas of tp4, of 4 each"), ("2xh100:tp4", "2 devices are not replicas")])
def test_pools_that_cannot_be(text, said):
    with pytest.raises(InputError, match=said):
        read_pool(text)


def test_the_cache_goes_over_the_network_or_within_a_host(llama):
    """32 layers of keys and values, 8 heads of 128 in 16 bits, by whole pages; ranks send their heads."""
    deployment = make_deployment(llama, device="h100", layout=Layout(2))
    nbytes, cluster = deployment.cache_bytes(1024), deployment.cluster
    assert nbytes == 2 * 32 * 8 // 2 * 128 * 2 * 1024
    assert send_seconds(deployment, 1024, 16) == nbytes / cluster.fabric.bandwidth
    assert send_seconds(deployment, 1024, 8) < send_seconds(deployment, 1024, 16)


def test_few_clients_see_a_prompt_alone_and_tokens_of_few(llama):
    """One client: its prompt is read alone, sent, and it decodes alone."""
    found = profile_pools(llama, 1024, 64, DevicePool(2, "h100"), DevicePool(1, "h100"), concurrency=1)
    timer = PassTimer(make_deployment(llama, device="h100"))
    alone = timer.seconds(Batch(0, 1, (Chunk(1024, 1024),)))
    start = timer.constants["vllm.request_seconds"]
    assert found.first_seconds == pytest.approx(alone + found.sent_seconds + start, rel=0.35)
    assert found.token_seconds == pytest.approx(timer.seconds(Batch(1, 1024 + 32)), rel=0.02)
    assert found.is_stable
    assert found.rate == pytest.approx(1 / (found.first_seconds + 63 * found.token_seconds), rel=0.1)


def test_the_pool_that_is_too_small_is_busy(llama):
    """Long prompts and short answers keep the pool of prompts busy, and the other way round."""
    prompts = profile_pools(llama, 4096, 16, DevicePool(1, "h100"), DevicePool(4, "h100"), concurrency=64)
    answers = profile_pools(llama, 256, 256, DevicePool(4, "h100"), DevicePool(1, "h100"), concurrency=256)
    assert prompts.prefill_busy > 0.8 > prompts.decode_busy
    assert prompts.rate == pytest.approx(64 / (prompts.first_seconds + 15 * prompts.token_seconds), rel=0.1)
    assert answers.decode_busy > 0.7 > answers.prefill_busy


def test_copies_of_attention_share_the_clients():
    """Of a model with experts: as many answers a second as there are clients in the time of one."""
    model = read_served_model(load_target("hf:gpt-oss-20b").build, "hf:gpt-oss-20b")
    found = profile_pools(model, 256, 64, DevicePool(4, "h100", Layout(4)), DevicePool(4, "h100", Layout(dp=4, ep=4)),
                          concurrency=64)
    assert found.rate == pytest.approx(64 / (found.first_seconds + 63 * found.token_seconds), rel=0.1)


def test_command_line(capsys):
    assert main(["generate", "hf:llama-3.1-8b", "--prefill", "2xh100", "--decode", "2xh100:tp2", "--rate", "4",
                 "--prompt", "1024", "--new-tokens", "32"]) == 0
    shown = capsys.readouterr().out
    assert "prefill  2 x tp1 on h100" in shown and "decode   1 x tp2 on h100" in shown
    assert main(["generate", "hf:llama-3.1-8b", "--prefill", "2xh100"]) == 2
    assert "two pools are given together" in capsys.readouterr().err
    assert main(["generate", "hf:llama-3.1-8b", "--prefill", "2xh100", "--decode", "2xh100", "--tp", "2"]) == 2
    assert "--tp: does not work with --prefill and --decode" in capsys.readouterr().err

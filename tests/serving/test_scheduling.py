"""How servers schedule by their versions and settings, and passes that are no CUDA graphs; times derived by hand."""
from collections import deque
from dataclasses import replace

import pytest

from analyzer.cli import main
from analyzer.errors import InputError
from analyzer.hardware import find_device
from analyzer.tools.serving import (
    Batch,
    Chunk,
    Layout,
    PassTimer,
    Traffic,
    make_deployment,
    profile_served,
    read_served_model,
)
from analyzer.tools.serving.deployment import WEIGHT_FORMATS
from analyzer.tools.serving.engine import ENGINES, find_engine
from analyzer.tools.serving.product_time import find_narrow
from analyzer.tools.serving.simulation import Scheduler
from analyzer.zoo.target import load_target


@pytest.fixture(scope="module")
def llama():
    return read_served_model(load_target("hf:llama-3.1-8b").build, "hf:llama-3.1-8b")


@pytest.fixture(scope="module")
def deepseek():
    return read_served_model(load_target("hf:deepseek-v3").build, "hf:deepseek-v3")


class Even:
    """A timer by which a pass takes a second, and one that reads prompts four."""

    constants = {f"{name}.request_seconds": 0.0 for name in ENGINES}

    def seconds(self, batch):
        return 4.0 if batch.chunks else 1.0


def schedule(llama, monkeypatch, arrivals, prompts=100, new=8, **engine):
    found = make_deployment(llama)
    found = replace(found, engine=found.engine._replace(overlaps=False, **engine))
    monkeypatch.setattr(Scheduler, "_come", lambda self: deque(arrivals))
    line = Scheduler(found, Even(), Traffic(prompts, new, rate=1.0), len(arrivals)).run()
    return sorted((served.first_seconds, served.token_seconds) for served in line.requests)


@pytest.mark.parametrize(("name", "version", "holds_first", "graph_tokens"), [
    ("sglang", "0.4.8", True, 0), ("sglang", "0.4.9.post2", False, 0), ("sglang", "0.5.9", False, 0),
    ("sglang", "0.5.10", False, 8192), ("sglang", None, False, 8192), ("trtllm", "0.21", True, 0),
    ("trtllm", "1.0.0rc3", False, 0), ("vllm", "0.11", False, 512)])
def test_what_versions_of_servers_differ_in(name, version, holds_first, graph_tokens):
    engine = find_engine(name, version)
    assert (engine.holds_first, engine.graph_tokens) == (holds_first, graph_tokens)


def test_a_first_token_that_waits_for_its_interval(llama, monkeypatch):
    """The first of 8 tokens is there after four seconds, the fourth three passes later; the eighth at 11."""
    assert schedule(llama, monkeypatch, [0.0], stream_interval=4) == [(4.0, 1.0)]
    assert schedule(llama, monkeypatch, [0.0], stream_interval=4, holds_first=True) == [(7.0, pytest.approx(4 / 7))]


@pytest.mark.parametrize(("passes", "share", "first"), [
    # the second comes at 4.5 and is seen at 5; it waits for three passes of one that decodes, until 8, and takes four;
    # no longer where its prompt fills the share: 100 tokens and one that decodes, of 8,192
    (0, 0.0, 4.5), (3, 0.9, 7.5), (3, 0.01, 4.5)])
def test_prompts_that_wait_for_others(llama, monkeypatch, passes, share, first):
    found = schedule(llama, monkeypatch, [0.0, 4.5], wait_passes=passes, wait_share=share)
    assert [seconds for seconds, _ in found] == [4.0, first]


@pytest.mark.parametrize(("splits", "last"), [(True, 8.0), (False, 12.0)])
def test_prompts_that_are_split(llama, monkeypatch, splits, last):
    """Three prompts of 100 tokens, 160 a pass: the second and the third are read in the second pass where 60 tokens of
    the second were read in the first, else each in a pass of its own.
    """
    found = schedule(llama, monkeypatch, [0.0, 0.0, 0.0], chunk=160, splits=splits)
    assert [seconds for seconds, _ in found] == [4.0, 8.0, last]


@pytest.mark.parametrize(("engine", "version", "prompt", "is_launched"), [
    ("trtllm", None, 64, True), ("sglang", "0.5.9", 64, True), ("sglang", "0.5.10", 64, False),
    ("vllm", "0.14", 64, False)])
def test_kernels_of_a_pass_that_is_no_graph_are_launched_one_by_one(llama, engine, version, prompt, is_launched):
    timer = PassTimer(make_deployment(llama, device="h100", engine=engine, version=version, layout=Layout(8)))
    time = timer.time(Batch(0, 1, (Chunk(prompt, prompt),)))
    launches = sum(number for number, _ in time.parts.values())
    launching = launches * timer.constants[f"{engine}.launch_seconds"]
    busy = max(time.kernel_seconds, launching) if is_launched else time.kernel_seconds
    assert time.seconds == pytest.approx(timer.constants["gap_seconds"] + busy)
    assert timer.seconds(Batch(0, 1, (Chunk(prompt, prompt),))) == pytest.approx(time.seconds, rel=0.02)


def test_graphs_of_prompts_that_sglang_does_not_have(deepseek):
    tokens = {(device, dp): make_deployment(deepseek, device=device, layout=Layout(8 // dp, dp=dp), engine="sglang",
                                            weights="fp8-block").graph_tokens
              for device in ("h200", "b200") for dp in (1, 8)}
    assert tokens == {("h200", 1): 8192, ("h200", 8): 0, ("b200", 1): 0, ("b200", 8): 0}


def test_copies_of_attention_share_the_tokens_of_a_pass_of_sglang(deepseek, llama):
    chunks = {(engine, dp): make_deployment(deepseek, device="b200", layout=Layout(8 // dp, dp=dp), engine=engine,
                                            prefill_chunk=16384).chunk
              for engine in ("sglang", "vllm") for dp in (1, 8)}
    assert chunks == {("sglang", 1): 16384, ("sglang", 8): 2048, ("vllm", 1): 16384, ("vllm", 8): 16384}
    assert make_deployment(llama, layout=Layout(dp=2), engine="sglang").chunk == 8192  # copies of all of it
    tokens = []

    class Reading(Even):
        def seconds(self, batch):
            tokens.extend(chunk.tokens for chunk in batch.chunks)
            return super().seconds(batch)

    found = make_deployment(deepseek, device="b200", layout=Layout(1, dp=8, ep=8), engine="sglang")
    Scheduler(found, Reading(), Traffic(4000, 4, concurrency=1, bursts=True), 1).run()
    assert tokens == [1024, 1024, 1024, 928]


def test_weights_are_held_as_the_model_is_published(deepseek, llama):
    gpt_oss = read_served_model(load_target("hf:gpt-oss-20b").build, "gpt-oss-20b")
    found = [(each.weights, each.experts) for each in map(make_deployment, (deepseek, llama, gpt_oss))]
    assert found == [("fp8-block", None), ("bf16", None), ("bf16", "mxfp4")]
    given = make_deployment(gpt_oss, weights="bf16")
    assert (given.weights, given.experts) == ("bf16", None)


def test_devices_of_other_vendors(llama):
    """CDNA 3 has compute capability 9.4, by which it is no Hopper, and TensorRT-LLM does not run on it."""
    text = profile_served(llama, 64, 8, device="mi300x").summary().replace("\n  ", " ")
    assert "nothing of AMD was measured" in text and "ranges are not calibrated" in text
    assert "not calibrated" not in profile_served(llama, 64, 8, device="h200").summary()
    with pytest.raises(InputError, match="TensorRT-LLM runs on NVIDIA's devices, and mi300x is AMD's"):
        make_deployment(llama, device="mi300x", engine="trtllm")


@pytest.mark.parametrize(("device", "formats"), [
    ("mi300x", ["fp8"]), ("mi355x", ["fp8", "mxfp4"]), ("b200", ["fp8", "mxfp4", "nvfp4"]), ("h100", ["fp8"]),
    ("a100_80gb", [])])
def test_formats_in_which_devices_multiply(device, formats):
    """AMD's white paper of CDNA 4 has MXFP4, which CDNA 3 has not; NVFP4 is NVIDIA's, from Blackwell on."""
    found = [name for name in ("fp8", "mxfp4", "nvfp4") if find_narrow(WEIGHT_FORMATS[name], find_device(device))]
    assert found == formats


def test_a_published_model_of_8_bits_fits_where_it_runs(capsys):
    """671 G parameters take 156 GiB of each of four B200, of which 16 bits would take twice as much."""
    command = ["generate", "hf:deepseek-r1", "--device", "b200", "--tp", "4", "--prompt", "128", "--new-tokens", "8",
               "--concurrency", "1"]
    assert main(command) == 0
    assert "fp8-block, cache bf16" in capsys.readouterr().out
    assert main([*command, "--weights", "bf16"]) == 3
    capsys.readouterr()
    assert main([*command[:2], "--device", "b300", *command[4:], "--images", "1"]) != 0
    assert "reads no pictures" in capsys.readouterr().err


def test_shared_experts_are_reduced_with_the_others(deepseek):
    """Attention and what follows it, 61 times; inputs of products are quantized by blocks, each by one kernel."""
    timer = PassTimer(make_deployment(deepseek, device="h200", layout=Layout(8), weights="fp8-block"))
    parts = timer.time(Batch(8, 1024)).parts
    assert parts["all-reduce"][0] == 2 * 61
    products = sum(count for product, count in deepseek.products if product.is_held and not product.is_head)
    assert parts["quantization"][0] == products
    assert "quantization" not in PassTimer(make_deployment(
        deepseek, device="h200", layout=Layout(8), weights="fp8")).time(Batch(8, 1024)).parts


def test_a_burst_waits_in_order(llama):
    """Clients that begin at once wait for each other's prompts; in the steady state only a few come together."""
    options = {"concurrency": 8, "device": "h100"}
    burst, steady = (profile_served(llama, 4096, 32, bursts=bursts, **options) for bursts in (True, False))
    assert burst.first_token.mean > steady.first_token.mean
    with pytest.raises(InputError, match="clients that begin at once have a concurrency"):
        profile_served(llama, rate=1.0, bursts=True)


@pytest.mark.parametrize(("given", "said"), [
    ({"prefill_chunk": 0}, "--prefill-chunk 0: must be 1 or more"),
    ({"batch_wait": (-1, 0.5)}, "--batch-wait -1:0.5: PASSES:SHARE"),
    ({"batch_wait": (20, 1.5)}, "--batch-wait 20:1.5: PASSES:SHARE")])
def test_settings_that_cannot_be(llama, given, said):
    with pytest.raises(InputError, match=said):
        make_deployment(llama, **given)


def test_a_version_is_part_of_the_servers_name(capsys):
    """Before 0.5.10 SGLang launches the kernels of prompts one by one; a card without measurements is told."""
    said = []
    for server in ("sglang:0.5.6", "sglang"):
        assert main(["generate", "hf:llama-3.1-8b", "--server", server, "--device", "b200", "--new-tokens", "8"]) == 0
        said.append(" ".join(capsys.readouterr().out.split()))
    assert ["are no CUDA graphs" in text for text in said] == [True, False]
    assert all("ranges are not calibrated" in text for text in said)

"""Engines beside a trainer: bytes awake, asleep and while weights are written, by hand from one model of two layers."""
from dataclasses import replace

import pytest

from analyzer.errors import InputError
from analyzer.hardware import find_device
from analyzer.tools.serving import Deployment, ServedModel, make_deployment, refuse_start, share_device
from analyzer.tools.serving.served_model import AttentionKernel, Product
from analyzer.tools.serving.shared_device import CACHE, GRAPHS, WEIGHTS

GIB = 2**30
MODEL = ServedModel(
    name="two layers", hidden=1024, vocabulary=32_000, shares_table=True,
    kernels={Product((4096, 4096), 1024, split="column"): 2, Product((32_000,), 1024, is_head=True): 1,
             AttentionKernel(8, 8, 128, 128): 2})
# Products of 2 x 8,192 x 1,024 in 16 bits, and the table, padded to a multiple of 64 rows, which 32,000 is.
WEIGHT_BYTES = 2 * 8192 * 1024 * 2 + 32_000 * 1024 * 2


def _deploy(engine: str, **settings: object) -> Deployment:
    found = make_deployment(MODEL, device=replace(find_device("h100"), memory_bytes=80 * GIB), engine=engine,
                            memory_share=0.25, **settings)  # type: ignore[arg-type]
    return replace(found, engine=found.engine._replace(sequences=64))


def _pass_bytes(tokens: int) -> int:
    """Of the widest product and its input, each twice, in 16 bits."""
    return tokens * (2 * 8192 + 4 * 1024) * 2


def test_what_vllm_holds() -> None:
    """A quarter of the device, in which weights, cache and the largest pass lie; graphs of 2 x 64 tokens beside it."""
    engine = share_device(_deploy("vllm"), held_bytes=30 * GIB, level=1)
    largest = _pass_bytes(8192) + 2 * 64 * 32_000 * 4
    assert (engine.weight_bytes, engine.pass_bytes, engine.graph_bytes) == (WEIGHT_BYTES, largest, _pass_bytes(128))
    assert engine.cache_bytes == 20 * GIB - WEIGHT_BYTES - largest
    assert engine.sampling_bytes == 20 * GIB + engine.graph_bytes
    assert engine.held_bytes() == 20 * GIB - largest + engine.graph_bytes
    assert engine.copy_bytes(GIB) == WEIGHT_BYTES + engine.graph_bytes + GIB
    assert (engine.resting_bytes, engine.host_bytes) == (engine.graph_bytes, WEIGHT_BYTES)
    assert (replace(engine, level=2).resting_bytes, replace(engine, level=2).host_bytes) == (engine.graph_bytes, 0)
    assert replace(engine, level=0).resting_bytes == engine.held_bytes()
    assert share_device(_deploy("vllm"), is_captured=False).graph_bytes == 0


def test_what_wakes_in_turn() -> None:
    engine = share_device(_deploy("vllm"), level=2)
    states = [engine.held_bytes(awake) for awake in ((), (WEIGHTS,), (WEIGHTS, CACHE))]
    assert states == [engine.graph_bytes, engine.graph_bytes + WEIGHT_BYTES, engine.held_bytes()]
    assert replace(engine, stays=()).held_bytes((WEIGHTS,)) == WEIGHT_BYTES
    assert replace(engine, stays=()).held_bytes() == engine.held_bytes((WEIGHTS, CACHE, GRAPHS))


def test_sglang_takes_its_share_of_what_is_free() -> None:
    engine = share_device(_deploy("sglang"), held_bytes=20 * GIB, releases_graphs=True, level=1)
    assert engine.cache_bytes == 15 * GIB - WEIGHT_BYTES and engine.resting_bytes == 0
    assert share_device(_deploy("trtllm"), held_bytes=20 * GIB).cache_bytes == int(
        0.25 * (60 * GIB - WEIGHT_BYTES - engine.pass_bytes))


@pytest.mark.parametrize(("level", "offload", "sync", "rollout", "update"), [
    (0, None, "all + 30", "all + pass + 30", "all + 40"), (2, None, "weights + 30", "all + pass + 30", "graphs + 40"),
    (2, 10, "weights + 30", "all + pass + 10", "graphs + 40")])
def test_peaks_beside_a_trainer(level: int, offload: int | None, sync: str, rollout: str, update: str) -> None:
    """Of 30 GiB between phases, 10 where its parts leave while answers are sampled, and an update of 40."""
    engine = share_device(_deploy("vllm"), level=level)
    sizes = {"all": engine.held_bytes(), "pass": engine.pass_bytes, "graphs": engine.graph_bytes,
             "weights": WEIGHT_BYTES + engine.graph_bytes}
    found = engine.peaks(held_bytes=30 * GIB, update_bytes=40 * GIB,
                         sampling_held_bytes=None if offload is None else offload * GIB)
    assert found == {name: sum(int(word) * GIB if word.isdigit() else sizes[word] or 0 for word in told.split(" + "))
                     for name, told in (("sync", sync), ("rollout", rollout), ("update", update))}


def test_an_engine_that_does_not_start() -> None:
    deployment = _deploy("vllm")
    assert refuse_start(deployment, 60 * GIB) == "" and refuse_start(deployment, 79 * GIB).startswith(
        "Free memory on device (1.00 GiB/80.00 GiB) on startup is less than desired GPU memory utilization (0.25")
    with pytest.raises(InputError, match=r"held_bytes=83751862272\): Free memory"):
        share_device(deployment, held_bytes=78 * GIB)
    small = replace(deployment, engine=deployment.engine._replace(memory_share=0.001))
    assert "no memory is left for the cache" in refuse_start(small)
    with pytest.raises(InputError, match="level=3"):
        share_device(deployment, level=3)
    with pytest.raises(InputError, match="TensorRT-LLM"):
        share_device(_deploy("trtllm"), level=1)


def test_an_unknown_memory_is_no_zero() -> None:
    deployment = _deploy("vllm")
    engine = share_device(replace(deployment, device=replace(deployment.device, memory_bytes=None)), level=1)
    assert (engine.cache_bytes, engine.sampling_bytes, engine.held_bytes()) == (None, None, None)
    assert engine.copy_bytes() == WEIGHT_BYTES + engine.graph_bytes and refuse_start(
        replace(deployment, device=replace(deployment.device, memory_bytes=None)), GIB) == ""
    assert engine.peaks(held_bytes=1, update_bytes=2) == {
        "sync": 1 + WEIGHT_BYTES + engine.graph_bytes, "rollout": None, "update": 2 + engine.graph_bytes}

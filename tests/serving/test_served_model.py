"""Served models: kernels read off the model's own operators, bytes by vLLM's formulas, passes, schedules, fleets."""
import json
import math
import re
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from analyzer.cli import main
from analyzer.errors import InputError
from analyzer.hardware import cluster_of, find_device
from analyzer.tools.serving import (
    Batch,
    Chunk,
    FleetTarget,
    Layout,
    PassTimer,
    ServedProfile,
    Traffic,
    find_fleets,
    make_deployment,
    profile_served,
    read_served_model,
    simulate,
)
from analyzer.tools.serving.deployment import WEIGHT_FORMATS
from analyzer.tools.serving.engine import ENGINES
from analyzer.tools.serving.fleet import price_of
from analyzer.tools.serving.pass_time import choose_experts, spread_over_experts
from analyzer.tools.serving.product_time import product_time
from analyzer.tools.serving.served_model import AttentionKernel, PassKernel, Product
from analyzer.tools.serving.simulation import NoRoomError, Scheduler
from analyzer.tools.serving.watts import find_work
from analyzer.zoo.target import load_target


def read(name):
    return read_served_model(load_target(name).build, name)


@pytest.fixture(scope="module")
def llama():
    return read("hf:llama-3.1-8b")


@pytest.fixture(scope="module")
def gpt_oss():
    return read("hf:gpt-oss-20b")


@pytest.fixture(scope="module")
def deepseek():
    return read("hf:deepseek-v3")


# ---------------------------------------------------------------- kernels of a pass


def test_a_decoder_of_grouped_heads(llama):
    """32 layers of 32 heads and 8 of keys, 128 channels each; hidden 4,096, inner 14,336, 128,256 tokens."""
    assert {(p.parts, p.k, p.split): count for p, count in llama.products} == {
        ((4096, 1024, 1024), 4096, "column"): 32, ((4096,), 4096, "row"): 32,
        ((14336, 14336), 4096, "column"): 32, ((4096,), 14336, "row"): 32, ((128256,), 4096, "column"): 1}
    assert llama.attentions == [(AttentionKernel(32, 8, 128, 128), 32)]
    fused = {(k.name, k.token_bytes) for k in llama.kernels if isinstance(k, PassKernel)}
    assert ("residual add and norm", 2 * 4 * 4096) in fused  # reads two rows, writes two
    assert ("activation", 2 * 3 * 14336) in fused            # gate and up in, their product out


def test_experts_and_windows(gpt_oss):
    """24 layers, every other one with a window of 128; 32 experts, 4 a token, of 2,880 channels."""
    assert gpt_oss.top_k == 4 and gpt_oss.has_experts
    assert {(k.window, count) for k, count in gpt_oss.attentions} == {(128, 12), (0, 12)}
    assert {(p.parts, p.k, p.rows, p.split): count for p, count in gpt_oss.products if p.experts} == {
        ((5760,), 2880, 4, "column"): 24, ((2880,), 2880, 4, "row"): 24}
    assert [(p.split, p.is_held) for p, _ in gpt_oss.products if p.n == 32] == [("none", False)]  # the router


def test_latent_attention(deepseek):
    """61 layers: queries of rank 1,536 and latents of 512 + 64, which every rank keeps; 128 heads of 192 and 128."""
    ((kernel, count),) = deepseek.attentions
    assert kernel == AttentionKernel(128, 1, 576, 512, is_latent=True, expanded=(192, 128)) and count == 61
    assert next(p.least for p, _ in deepseek.products if p.parts == (1536, 576)) == (1536, 576)


class Own(nn.Module):
    """A decoder of its own code: attention by products and a softmax."""

    def __init__(self, hidden=64, heads=4, layers=3, vocabulary=500):
        super().__init__()
        self.table, self.heads = nn.Embedding(vocabulary, hidden), heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers))
        self.qkv = nn.ModuleList(nn.Linear(hidden, 3 * hidden) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.table(tokens)
        batch, count, hidden = x.shape
        for norm, qkv, out in zip(self.norms, self.qkv, self.out):
            q, k, v = qkv(norm(x)).view(batch, count, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            scores = (q @ k.transpose(2, 3)).softmax(-1)
            x = x + out((scores @ v).transpose(1, 2).reshape(batch, count, hidden))
        return self.head(x)


def test_a_module_of_its_own_code():
    model = read_served_model(Own)
    assert model.attentions == [(AttentionKernel(4, 4, 16, 16), 3)]
    assert {(p.parts, p.split, p.is_head): count for p, count in model.products} == {
        ((192,), "column", False): 3, ((64,), "row", False): 3, ((500,), "column", True): 1}
    assert profile_served(model, 32, 8, concurrency=2, device="l4").each_token.mean > 0


class Encoders(nn.Module):
    """Layers of PyTorch's own, which run as one operator's parts in evaluation; or none at all."""

    def __init__(self, layers=2):
        super().__init__()
        self.table = nn.Embedding(500, 64)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(64, 500)

    def forward(self, tokens):
        x = self.table(tokens)
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf, device=x.device).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x)


def test_layers_of_pytorch():
    model = read_served_model(Encoders)
    assert model.attentions == [(AttentionKernel(4, 4, 16, 16), 2)]
    assert {(p.parts, p.k, p.split): count for p, count in model.products} == {
        ((192,), 64, "column"): 2, ((64,), 64, "row"): 2, ((128,), 64, "column"): 2, ((64,), 128, "row"): 2,
        ((500,), 64, "column"): 1}
    found = profile_served(lambda: Encoders(0), 32, 8, device="l4")
    assert found.cache_token_bytes == 0 and "no attention was found among its operators" in found.summary()


# ---------------------------------------------------------------- bytes by hand


def deploy(model, layout=Layout(), device="h100", **settings):  # noqa: B008
    return make_deployment(model, device=device, layout=layout, **settings)


def test_weights_by_hand(llama):
    layer = (4096 + 2 * 1024) * 4096 + 4096 * 4096 + 3 * 14336 * 4096
    table, norms = 128256 * 4096, 65 * 4096
    assert deploy(llama).weight_bytes() == 2 * (32 * layer + 2 * table + norms) == 2 * 8_030_261_248
    assert deploy(llama, Layout(tp=2)).weight_bytes() == 2 * (32 * layer // 2 + table + norms)
    assert deploy(llama, weights="fp8").weight_bytes() == 32 * layer + 2 * (2 * table + norms)
    assert deploy(llama, weights="int4").weight_bytes() == 32 * layer * 33 // 64 + 2 * (2 * table + norms)


def test_a_rank_keeps_whole_heads_of_keys(llama):
    """16 ranks share 8 heads of keys: each keeps one, so its product of queries, keys and values is wider."""
    local = deploy(llama, Layout(tp=16)).local_product(next(p for p, _ in llama.products if len(p.parts) == 3))
    assert local.parts == (256, 128, 128)


@pytest.mark.parametrize(("layout", "cache", "nbytes"), [
    (Layout(), "bf16", 2 * 32 * 8 * 128 * 2), (Layout(tp=4), "bf16", 2 * 32 * 2 * 128 * 2),
    (Layout(tp=16), "bf16", 2 * 32 * 1 * 128 * 2), (Layout(pp=2), "bf16", 2 * 16 * 8 * 128 * 2),
    (Layout(), "fp8", 2 * 32 * 8 * 128)])
def test_cache_of_a_token(llama, layout, cache, nbytes):
    assert deploy(llama, layout, cache=cache).cache_token_bytes() == nbytes


def test_caches_of_windows_and_latents(gpt_oss, deepseek):
    per_token = 2 * 8 * 64 * 2  # keys and values of a layer
    pages = math.ceil(1000 / 16)
    assert deploy(gpt_oss).cache_bytes(1000) == per_token * 16 * (12 * pages + 12 * (128 // 16 + 1))
    assert deploy(deepseek, Layout(tp=8), "h200").cache_token_bytes() == 61 * 576 * 2  # latents are on every rank


@pytest.mark.parametrize(("name", "bits"), [("bf16", 16), ("fp8", 8), ("int4", 4.125), ("mxfp4", 4.25), ("nvfp4", 4.5)])
def test_bits_of_weights(name, bits):
    assert WEIGHT_FORMATS[name].bits == bits


# ---------------------------------------------------------------- time of a pass


def test_a_pass_reads_its_weights_once(llama):
    """15 GB at 3.35 TB/s take 4.5 ms; kernels reach 85 % of that."""
    time = PassTimer(deploy(llama)).time(Batch(1, 100))
    assert 4.5e-3 < time.kernel_seconds < 6.5e-3 and time.bound == "memory"
    assert sum(seconds for _, seconds in time.parts.values()) == pytest.approx(time.kernel_seconds)
    assert sum(time.bounds.values()) == pytest.approx(time.kernel_seconds)


def test_ranks_add_collectives_and_take_off_the_rest(llama):
    one, four = (PassTimer(deploy(llama, Layout(tp=tp))).time(Batch(16, 1000)) for tp in (1, 4))
    assert "all-reduce" not in one.parts and four.parts["all-reduce"][0] == 64  # two a layer
    assert four.parts["products"][1] < one.parts["products"][1] / 2


@pytest.mark.parametrize(("layout", "exchanges"), [
    # all ranks have all tokens: sums of attention and of experts are reduced
    (Layout(tp=4), {"all-reduce": 48}), (Layout(tp=4, ep=4), {"all-reduce": 48}),
    (Layout(tp=4, ep=2), {"all-reduce": 48}),
    # copies of attention: tokens go to the ranks of their experts and back, or to all ranks where experts are split
    (Layout(dp=4, ep=4), {"all-to-all": 48}), (Layout(tp=2, dp=2, ep=4), {"all-reduce": 24, "all-to-all": 48}),
    (Layout(dp=4), {"gathering of tokens": 24, "scattering of sums": 24}),
    (Layout(dp=4, ep=2), {"gathering of tokens": 24, "scattering of sums": 24})])
def test_experts_over_ranks(gpt_oss, layout, exchanges):
    """24 layers of 32 experts of 2 x 2,880 and 2,880 columns; each rank holds an even share of them all."""
    deployment = deploy(gpt_oss, layout, experts="mxfp4", engine="sglang")
    parts = PassTimer(deployment).time(Batch(16, 1000)).parts
    assert {name: parts[name][0] for name in parts if name in (
        "all-reduce", "all-to-all", "gathering of tokens", "scattering of sums")} == exchanges
    experts = [product for product, _ in gpt_oss.products if product.experts]
    held = sum(math.ceil(product.experts / layout.ep) * local.n * local.k for product in experts
               for local in [deployment.local_product(product)])
    assert held == sum(product.elements for product in experts) / 4


def test_copies_of_attention_share_experts(gpt_oss):
    """4 copies of 16 sequences choose as many experts as 64 sequences of one copy do."""
    experts = next(product for product, _ in gpt_oss.products if product.experts)
    one, four = (choose_experts(deploy(gpt_oss, layout, engine="sglang"), experts, Batch(number, 1000))
                 for layout, number in ((Layout(tp=4), 64), (Layout(dp=4), 16)))
    assert one == four


def test_few_bits_are_faster_where_memory_bounds():
    h100, b200 = find_device("h100"), find_device("b200")
    times = {(d.name, name): product_time(1, 8, 8192, 8192, WEIGHT_FORMATS[name], d).seconds
             for d in (h100, b200) for name in ("bf16", "fp8", "int4", "nvfp4")}
    assert times["h100_sxm", "int4"] < times["h100_sxm", "fp8"] < times["h100_sxm", "bf16"]
    assert times["b200", "nvfp4"] < times["b200", "fp8"]
    many = {name: product_time(1, 8192, 8192, 8192, WEIGHT_FORMATS[name], h100).seconds for name in ("bf16", "int4")}
    assert many["int4"] > many["bf16"]  # expanded by slower instructions


@pytest.mark.parametrize(("experts", "local", "chosen", "skew", "active", "rows"), [
    (8, 8, 8, 0.0, round(8 * (1 - (7 / 8)**8)), 8.0), (8, 2, 800, 0.0, 2, 200.0), (4, 1, 300, 1.0, 1, 144.0)])
def test_experts_that_tokens_choose(experts, local, chosen, skew, active, rows):
    """The last: Zipf's law gives the most popular of four 1 / (1 + 1/2 + 1/3 + 1/4) = 0.48."""
    assert spread_over_experts(experts, local, chosen, skew) == (active, pytest.approx(rows))


def test_what_a_pass_does(llama, gpt_oss):
    """64 sequences: 2 FLOPs for each weight of products and each sequence; each weight and 1,000 tokens of each cache
    are read. A chunk of 512 tokens sees 256.5 of them in the mean.
    """
    timer = PassTimer(deploy(llama))
    weights = 32 * ((4096 + 2048) * 4096 + 4096 * 4096 + 3 * 14336 * 4096) + 128256 * 4096
    work = find_work(timer, Batch(64, 1000))
    attention = 2 * 32 * 1000 * 32 * 2 * 128
    assert work.product_seconds == pytest.approx(64 * (2 * weights + attention) / 989.4e12, rel=1e-6)
    read = 2 * weights + 64 * 1000 * 2 * 32 * 8 * 128 * 2
    assert read / 3.352e12 < work.traffic_seconds < 1.05 * read / 3.352e12
    assert sum(work.spent.values()) == pytest.approx(timer.time(Batch(64, 1000)).seconds)
    with_chunk = find_work(timer, Batch(64, 1000, (Chunk(512, 512),)))
    more = 512 * (2 * (weights - 128256 * 4096) + 2 * 32 * 256.5 * 32 * 2 * 128) + 2 * 128256 * 4096
    assert with_chunk.product_seconds - work.product_seconds == pytest.approx(more / 989.4e12, rel=1e-6)
    whole, half = (find_work(PassTimer(deploy(gpt_oss, Layout(tp))), Batch(64, 1000)) for tp in (1, 2))
    assert 1.8 < whole.traffic_seconds / half.traffic_seconds < 2


# ---------------------------------------------------------------- schedules


def test_in_the_steady_state_clients_share_the_server(llama):
    """Of C clients, tokens a second are C tokens in each (TTFT + new x TPOT)."""
    deployment = deploy(llama)
    line = simulate(deployment, PassTimer(deployment), Traffic(512, 128, 16), 160)
    start = PassTimer(deployment).constants["vllm.request_seconds"]
    whole = line.mean("first_seconds") - start + 127 * line.mean("token_seconds")
    assert line.tokens_per_second == pytest.approx(16 * 128 / whole, rel=0.05)


def test_prompts_of_others_lengthen_tokens(llama):
    deployment = deploy(llama)
    short, long = (simulate(deployment, PassTimer(deployment), Traffic(tokens, 128, 32)) for tokens in (64, 4096))
    assert long.mean("token_seconds") > 2 * short.mean("token_seconds")


def test_requests_wait_for_room_in_the_cache(llama):
    deployment = deploy(llama, device="l4", weights="fp8")  # room for some thirty whole sequences
    line = simulate(deployment, PassTimer(deployment), Traffic(1024, 1024, 100))
    assert line.is_full and line.running < 60


def test_a_rate_has_percentiles_and_a_limit(llama):
    slow = profile_served(llama, 512, 64, rate=1.0, device="h100")
    fast = profile_served(llama, 512, 64, rate=10_000.0, device="h100")
    assert slow.is_stable and not fast.is_stable
    assert slow.first_token.median <= slow.first_token.p99 < fast.first_token.p99


def test_drafts_that_are_kept_save_passes(llama):
    plain, drafted = (profile_served(llama, 512, 128, concurrency=1, device="h100", drafted=n, acceptance=0.8)
                      for n in (0, 3))
    assert plain.each_token.mean / 3 < drafted.each_token.mean < plain.each_token.mean / 1.8  # 2.95 tokens a pass


def test_prefill_and_decode_apart(llama):
    deployment = make_deployment(llama, device="h100")
    found = find_fleets([deployment], FleetTarget(0.3, 0.015, 20), 1024, 128, prices=[2.5], repository="org/model")
    assert found.fleets[0].gpus == min(fleet.gpus for fleet in found.fleets)
    assert found.fleets[0].dollars_per_hour == 2.5 * found.fleets[0].gpus
    assert all(f.first_seconds <= 0.3 and f.token_seconds <= 0.015 for f in found.fleets)
    apart = next(fleet for fleet in found.fleets if len(fleet.pools) == 2)
    assert set(apart.commands) == {"Dynamo"} and "--is-prefill-worker" in apart.commands["Dynamo"][1]
    whole = next(fleet for fleet in found.fleets if len(fleet.pools) == 1)
    assert whole.commands["vLLM"][0].startswith("vllm serve org/model --tensor-parallel-size")
    assert not find_fleets([deployment], FleetTarget(1e-3, 1e-3, 1), 1024, 128).fleets


def test_a_layout_without_room_does_not_end_the_search(gpt_oss):
    """Memory for one sequence of 100,000 tokens and no more: the schedule, which counts the bytes of a token as they
    are at 4,096, where windows have a greater part, has room for fewer.
    """
    deployment = make_deployment(gpt_oss, device="l4", experts="mxfp4")
    held = deployment.weight_bytes() + deployment.activation_bytes() + deployment.cache_bytes(100_000)
    tight = replace(deployment, device=replace(deployment.device, memory_bytes=math.ceil(held / 0.92)))
    assert tight.most_sequences(100_000) == 1
    found = find_fleets([tight], FleetTarget(1000, 1, 0.001), 99_900, 100)
    assert found.fleets and "l4 tp1: hf:gpt-oss-20b: no room for one sequence of 100,000 tokens" in found.refused[0]


# ---------------------------------------------------------------- the answer, and what is refused


def test_json_is_read_again(llama, tmp_path):
    found = profile_served(llama, 128, 16, concurrency=4, device="h200", price=3.0, carbon=400.0)
    assert ServedProfile.from_json(found.to_json()) == found
    assert found.dollars_per_million == pytest.approx(1e6 / found.tokens_per_second * 3 / 3600)
    assert found.joules_range[0] < found.joules_per_token < found.joules_range[1]
    assert found.grams_per_million == pytest.approx(1e6 * found.joules_per_token / 3.6e6 * 400)


@pytest.mark.parametrize(("layout", "said"), [
    (Layout(tp=3), "does not divide the 32 heads"), (Layout(pp=33), "has 32 layers"),
    (Layout(tp=2, ep=2), "no experts"),
    (Layout(ep=2), "--ep 2"), (Layout(tp=0), "must be 1 or more")])
def test_layouts_that_cannot_be(llama, layout, said):
    with pytest.raises(InputError, match=said):
        make_deployment(llama, layout=layout)


def test_what_has_no_room_is_told(llama):
    with pytest.raises(NoRoomError, match="no room for one sequence of 1,024 tokens.*--tp"):
        profile_served(llama, 1000, 24, device="t4")


def test_vllm_spreads_experts_over_all_ranks_or_none(gpt_oss):
    with pytest.raises(InputError, match="--ep 2: vLLM spreads experts over all ranks of a stage, 4 of --tp 4"):
        deploy(gpt_oss, Layout(tp=4, ep=2))


@pytest.mark.parametrize(("engine", "share", "within"), [
    ({"engine": "vllm"}, 0.92, True), ({"engine": "vllm", "version": "0.13.1"}, 0.9, True),
    ({"engine": "vllm", "memory_share": 0.5}, 0.5, True),
    # less the larger of 10 GiB and 512 + 8,192 x 1.5 + 256 x 2 + 1,024 / 8 MiB, and 8 for 58 sizes of prompts
    ({"engine": "sglang"}, round((81559 - 13440 - 58 * 8) / 81559, 3), False),
    ({"engine": "sglang", "memory_share": 0.7}, 0.7, False)])
def test_what_a_server_takes_of_the_memory(llama, engine, share, within):
    found = deploy(llama, **engine)
    found = replace(found, device=replace(found.device, memory_bytes=81559 << 20))  # of an H100, as nvidia-smi says
    assert found.memory_share == share
    activations = found.activation_bytes() if within else 0
    assert found.room_bytes() == int(share * (81559 << 20)) - found.weight_bytes() - activations
    said = f"takes {share:.1%} of the device's memory" in profile_served(found, 64, 4).summary().replace("\n  ", " ")
    assert said is ("memory_share" not in engine)  # what was given is not assumed


@pytest.mark.parametrize(("given", "said"), [
    ({"memory_share": 1.5}, "--memory-share 1.5: a share lies above 0"),
    ({"receive_interval": 0}, "--receive-interval 0: must be 1 or more"),
    ({"version": "new"}, "a version begins with two numbers")])
def test_settings_of_a_server_that_cannot_be(llama, given, said):
    with pytest.raises(InputError, match=said):
        make_deployment(llama, **given)


class Even:
    """A timer by which a pass takes a second, and a prompt's four."""

    constants = {f"{name}.request_seconds": 0.0 for name in ENGINES}

    def seconds(self, batch):
        return 4.0 if batch.chunks else 1.0


@pytest.mark.parametrize(("engine", "interval", "first"), [
    # two clients of 8 tokens, of which the first comes to an idle server, the second 4.5 seconds later, when the first
    # decodes; it is seen at 5 where the host waits for a pass, at 6 where it works ahead, and every fourth pass at 8
    ({"overlaps": False}, 1, 4.5), ({"overlaps": True}, 1, 5.5), ({"overlaps": False}, 4, 7.5)])
def test_when_a_request_is_seen(llama, monkeypatch, engine, interval, first):
    found = deploy(llama)
    found = replace(found, engine=found.engine._replace(receive_interval=interval, **engine))
    monkeypatch.setattr(Scheduler, "_come", lambda self: deque([0.0, 4.5]))
    line = Scheduler(found, Even(), Traffic(100, 8, rate=1.0), 2).run()
    assert [served.first_seconds for served in sorted(line.requests)] == [4.0, first]


@pytest.mark.parametrize(("mixes", "token"), [(True, 1 + 3 / 7), (False, 1 + 4 / 7)])
def test_prompts_that_others_wait_for(llama, monkeypatch, mixes, token):
    """8 tokens take 7 passes after the first; where prompts have passes of their own, a prompt adds its own to them,
    else it makes one of them four seconds long.
    """
    found = deploy(llama)
    found = replace(found, engine=found.engine._replace(overlaps=False, mixes=mixes))
    monkeypatch.setattr(Scheduler, "_come", lambda self: deque([0.0, 4.5]))
    line = Scheduler(found, Even(), Traffic(100, 8, rate=1.0), 2).run()
    assert max(served.token_seconds for served in line.requests) == pytest.approx(token)


def test_prices():
    assert price_of("2.5", ["t4", "l4"]) == [2.5, 2.5] and price_of("h100=1,l40s=2", ["l40s", "t4"]) == [2.0, None]
    with pytest.raises(InputError, match="--price x"):
        price_of("x", ["t4"])


def test_engines_and_clusters_are_known():
    assert set(ENGINES) == {"vllm", "sglang", "trtllm"} and cluster_of("h100").link is not None
    assert Batch(4, 10, (Chunk(5, 5),), 2).tokens == 13
    assert Product((6, 2), 3, experts=4).elements == 96


def test_command_line(capsys, tmp_path):
    start = ["generate", "hf:gpt2", "--prompt", "100", "--new-tokens", "20", "--device", "l4"]
    assert main([*start, "--engine", "server", "--json", str(tmp_path / "served.json")]) == 0
    assert "bound by" in capsys.readouterr().out
    assert ServedProfile.from_json(tmp_path / "served.json").device == "l4"
    assert main([*start, "--concurrency", "1,4"]) == 0
    assert "Tokens/s/GPU" in capsys.readouterr().out
    assert main([*start, "--server", "sglang"]) == 0  # the name of a server asks for one
    assert "(tp1), sglang, bf16" in capsys.readouterr().out
    assert main([*start, "--batches", "1,2"]) == 0
    assert "a pass is one CUDA graph" in capsys.readouterr().out
    for wrong, said in ((["--engine", "transformers", "--rate", "2"], "--rate: works only with --engine server"),
                        (["--tpot", "5ms"], "add --ttft, --rate"),
                        (["--max-sequences", "--tp", "2"], "--tp: does not work"),
                        (["--engine", "transformers", "--server", "sglang"], "--server sglang: works only with"),
                        (["--server", "vlm"], "--server vlm: must be one of vllm, sglang, trtllm"),
                        (["--server", "vllm:0.14", "--server-version", "0.13"], "give one version"),
                        (["--server", "vllm", "--memory-share", "1.5"], "--memory-share 1.5: a share lies above 0"),
                        (["--receive-interval", "0"], "--receive-interval 0: must be 1 or more"),
                        (["--rate", "0"], "rate 0: requests a second are above 0"),
                        (["--rate", "nan"], "rate nan: requests a second are above 0"),
                        (["--rate", "2", "--concurrency", "3"], "give one of them")):
        assert main([*start, *wrong]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(("target", "served"), [
    ("hf:bare.json", "MODEL"), ("hf:named.json", "org/Tiny"), ("hf:odd.json", "'my model; x'"),
    ("hf:folder", "folder")])
def test_commands_name_the_weights(capsys, tmp_path, monkeypatch, target, served):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
              "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 100}
    for path, name in (("bare.json", {}), ("named.json", {"_name_or_path": "org/Tiny"}), ("folder/config.json", {}),
                       ("odd.json", {"_name_or_path": "my model; x"})):
        Path(path).write_text(json.dumps(config | name))
    assert main(["generate", target, "--ttft", "1s", "--tpot", "50ms", "--rate", "1", "--prompt", "64", "--new-tokens",
                 "8", "--device", "h100"]) == 0
    out = capsys.readouterr().out
    assert f"vllm serve {served} --tensor-parallel-size" in out
    assert ("MODEL: the folder of the weights, or their name on the hub" in out) is (served == "MODEL")


@pytest.mark.parametrize(("device", "said"), [
    ("h100", r"room of \d+.\d+ GiB for 1,0\d\d whole sequences, of which vllm runs at most 1,024 at once$"),
    ("l4", r"room of \d.\d+ GiB for \d\d whole sequences$")])
def test_the_room_and_the_most_are_told_apart(llama, device, said):
    """54 of 80 GiB hold 1,027 times 54 MiB; vLLM's max_num_seqs is 1,024 there."""
    text = profile_served(llama, 400, 32, device=device).summary().replace("\n  ", " ")
    assert re.search(said, text, re.MULTILINE)


def test_nothing_stays_of_a_reading():
    model = Own()
    before = torch.random.get_rng_state()
    read_served_model(model)
    assert model.training and torch.equal(before, torch.random.get_rng_state())

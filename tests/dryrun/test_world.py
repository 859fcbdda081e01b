"""Scripts as ranks of a job: what each rank holds and sends follows by hand from what the wrappers keep."""
import importlib.util
import os
import textwrap
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from analyzer.api.result import Profile
from analyzer.cli import main
from analyzer.distributed.world import World
from analyzer.parallel import RankTable, world
from analyzer.results.run_cost import CommInfo
from analyzer.results.world import GroupInfo, RankRun, WorldInfo
from analyzer.tools.dryrun.job import RankResult, dry_run_ranks, list_peers
from analyzer.tools.dryrun.script import dry_run

EXAMPLES = Path(__file__).parents[2] / "examples"
LINEAR = 256 * 512 + 512 + 512 * 8 + 8  # parameters of the small model of the examples


def test_data_parallel_example(capsys):
    run = dry_run(EXAMPLES / "ddp_train.py", world=world(64, rank=11))
    assert run.error is None and run.steps == 3, run.format_error()
    p = run.profile
    assert (p.param_bytes, p.optimizer_bytes) == (4 * LINEAR, 8 * LINEAR)  # two moments
    assert {name: phase.comm_bytes for name, phase in p.phases.items()} == {
        "forward": 0, "backward": 4 * LINEAR, "optimizer": 0, "zero_grad": 0}
    row, = p.comm or ()
    # all gradients fit in the bucket of 25 MiB; a ring sends 63/64 of it twice
    assert (row.kind, row.ranks, row.bytes, row.wire_bytes) == ("all_reduce", 64, 4 * LINEAR, 2 * 63 * 4 * LINEAR // 64)
    assert p.world is not None and (p.world.size, p.world.rank) == (64, 11)
    assert [x.device for x in p.inputs.values()] == ["cuda:3"] and p.batch_size == 16
    assert capsys.readouterr().out == ""  # rank 0 prints


# of the decoder of examples/fsdp2_train.py: embedding and head, and a layer: attention, feed-forward, two norms
ENDS = 2 * 1024 * 256
LAYER = 4 * 256 * 256 + 4 * 256 + 8 * 256 * 256 + 5 * 256 + 4 * 256
TENSORS = 2 + 4 * 12


def test_sharded_example_saves_its_states():
    run = dry_run(EXAMPLES / "fsdp2_train.py", world=world(64, rank=0))
    assert run.error is None and run.steps == 3, run.format_error()
    p, params = run.profile, ENDS + 4 * LAYER
    assert p.params == params // 64
    assert p.param_bytes == 4 * params // 64  # every first dimension is a multiple of 64
    assert p.optimizer_bytes == 8 * params // 64
    assert {name: phase.comm_bytes for name, phase in p.phases.items()} == {
        "forward": 2 * params,                        # gathered in bfloat16
        "backward": 2 * 4 * LAYER + 4 * params,       # the root stays gathered; gradients are reduced in float32
        "optimizer": 4 * TENSORS, "zero_grad": 0}     # a norm of each tensor
    assert p.host_peak_bytes is not None
    # rank 0 has the whole model on the host, beside the step counts
    assert 0 <= p.host_peak_bytes - 4 * params - 4 * TENSORS <= 1024
    assert any("'checkpoint'" in text and "wrote nothing" in text for text in p.assumptions)
    assert not Path("checkpoint").exists() and not Path("checkpoint_async").exists()


def write(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text))
    return path


def test_nothing_waits_for_other_ranks(tmp_path):
    """As the tutorials of PyTorch start processes, and every call that another rank would have to answer."""
    run = dry_run(write(tmp_path, """
    import os, torch, torch.distributed as dist, torch.multiprocessing as mp
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    def main(rank, size):
        dist.init_process_group("nccl", init_method="tcp://10.0.0.1:23456", rank=rank, world_size=size)
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (5, 8, "nccl")
        store = dist.TCPStore("10.0.0.1", 1234, size, rank == 0)
        assert store.add("arrived", 1) == size
        store.wait(["set by another rank"])
        torch.cuda.set_device(rank)
        model = DistributedDataParallel(nn.Linear(256, 256).to(rank), device_ids=[rank])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(10):
            model(torch.randn(8, 256).to(rank)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            x = torch.zeros(4, device=rank)
            dist.recv(x, src=1)
            dist.irecv(x, src=1).wait()
            dist.send(x, 1)
            dist.barrier(device_ids=[rank])
            dist.monitored_barrier(dist.new_group(backend="gloo"))
            told = [None] * size
            dist.all_gather_object(told, {"rank": rank})
            assert told[0] == {"rank": 5}
        assert dist.new_group([0, 1], backend="gloo") is dist.GroupMember.NON_GROUP_MEMBER
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        assert dist.get_backend() == "gloo"
        store.get("a key of rank 0")

    mp.spawn(main, args=(torch.cuda.device_count(),), nprocs=torch.cuda.device_count())
    """), world=world(8, rank=5), steps=11)
    assert run.steps == 10 and run.profile.param_bytes == 4 * (256 * 256 + 256)
    assert str(run.error) == ("rank 5 waits for 'a key of rank 0' in a store, which another rank sets: no other rank "
                              "runs; broadcast the value, or set it in every rank")


def test_a_launcher_inside_a_script_runs_the_rank_in_this_process(tmp_path):
    run = dry_run(write(tmp_path, f"""
    from torch.distributed.run import main
    main(["--nproc-per-node", "8", "--nnodes", "8", {str(EXAMPLES / 'ddp_train.py')!r}])
    """), world=world(64, rank=1))
    assert run.steps == 3 and run.profile.param_bytes == 4 * LINEAR, run.format_error()


@pytest.mark.parametrize("text", ["import torch.distributed as dist; dist.init_process_group('nccl')",
                                  "import torch.multiprocessing as mp; mp.spawn(print, nprocs=4)"])
def test_without_a_world_a_script_of_many_ranks_is_told_of_it(tmp_path, monkeypatch, text):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    assert "add --world 4" in str(dry_run(write(tmp_path, text)).error)


@pytest.mark.parametrize("begin", ["dist.init_process_group('nccl', rank=0, world_size=1); main(0)",
                                   "os.environ.update(WORLD_SIZE='1', RANK='0'); dist.init_process_group(); main(0)",
                                   "mp.spawn(main, nprocs=torch.cuda.device_count())"])
def test_a_job_of_one_process_needs_no_world(tmp_path, begin):
    """Scripts that always start one: its gradients are reduced in buckets as in any other."""
    run = dry_run(write(tmp_path, f"""
    import os, torch, torch.distributed as dist, torch.multiprocessing as mp
    from torch.distributed import init_process_group
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    def main(rank):
        if not dist.is_initialized():
            init_process_group("nccl", init_method="tcp://localhost:1234", rank=rank, world_size=1)
        model = DistributedDataParallel(torch.nn.Linear(256, 256).cuda(rank), device_ids=[rank])
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        for _ in range(3):
            model(torch.randn(8, 256).cuda(rank)).sum().backward()
            optimizer.step()

    {begin}
    """))
    assert run.error is None, run.format_error()
    assert run.steps == 3 and run.profile.phases["backward"].comm_bytes == 4 * (256 * 256 + 256)
    assert not dist.is_initialized() and "WORLD_SIZE" not in os.environ


def test_memory_is_that_of_the_device_that_a_rank_uses(tmp_path):
    """A launcher that shows each process one device: all of them are cuda:0."""
    run = dry_run(write(tmp_path, """
    import torch
    model = torch.nn.Linear(1024, 1024).cuda()
    torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(2, 1024, device="cuda"))
    """), world=world(8, rank=3))
    assert run.error is None and (run.profile.peak_allocated_bytes or 0) >= 4 * 1024 * 1024
    assert any("the script is on cuda:0, though its local rank is 3" in text for text in run.profile.assumptions)


RANK_ZERO_HOLDS_MORE = """
import os, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
model = nn.parallel.DistributedDataParallel(nn.Linear(1024, 1024, bias=False).to(device))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
averaged = [torch.empty(2**20, device=device)] if dist.get_rank() == 0 else []
for step in range(9):
    model(torch.ones(8, 1024, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


class InThisProcess:
    """A rank that runs here: PyTorch alone keeps nothing of a world."""

    def __init__(self, job, *, shows):
        run = dry_run(job.script, job.arguments, device=job.device, steps=job.steps, world=World(job.world))
        self.result = RankResult(run.profile, run.steps, run.is_stopped, run.format_error())

    def wait(self):
        return self.result

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass


def test_ranks_that_differ_are_run_and_told(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("analyzer.tools.dryrun.job.RankProcess", InThisProcess)
    path = write(tmp_path, RANK_ZERO_HOLDS_MORE)
    saved, page = tmp_path / "ranks.json", tmp_path / "ranks.html"
    assert main(["dryrun", "--world", "16", "--json", str(saved), "--html", str(page), "--show", "brief",
                 str(path)]) == 0
    out = capfd.readouterr().out
    table = RankTable.from_json(saved)
    assert page.read_text() == table.to_html()
    assert [(row.ranks, row.kind) for row in table.rows] == [((0,), "first"), ((1, 15), "neither first nor last, last")]
    assert table.fullest is not None and table.fullest.rank == 0
    assert table.rows[0].param_bytes == table.rows[1].comm_bytes == 4 * 2**20
    own, other = (table.profiles[rank].phases["backward"].allocated_bytes or 0 for rank in (0, 1))
    assert own - other == 4 * 2**20
    assert "as 3 of 16 ranks" in out and "most memory: rank 0 (first)" in out and "3 of 16 ranks were run" in out
    line, = [line for line in out.splitlines() if "neither first nor last, last" in line]
    assert "4.00 MiB" in line


BLOCK, HEAD = 256 * 1024 + 1024 + 1024 * 256 + 256, 256 * 8 + 8


@pytest.fixture(scope="module")
def ranks():
    """A rank of a script of each library, in processes of their own, which run beside each other."""
    jobs = {"accelerate": ("accelerate_fsdp.py", 8, 3, 8), "lightning": ("lightning_ddp.py", 8, 6, 4)}

    def run(script, size, rank, devices_per_host):
        done = dry_run_ranks(EXAMPLES / script, size=size, ranks=[rank], devices_per_host=devices_per_host)
        assert done.failed_rank is None, done.results[rank].error
        return done.table.profiles[rank]

    with ThreadPoolExecutor(2) as pool:
        found = {name: pool.submit(run, *job) for name, job in jobs.items() if importlib.util.find_spec(name)}
    return {name: future.result() for name, future in found.items()}


def sum_bytes(p):
    found = Counter()
    for row in p.comm or ():
        found[row.kind, row.phase] += row.bytes or 0
    return dict(found)


def test_accelerate_fully_sharded(ranks):
    pytest.importorskip("accelerate")
    p, params = ranks["accelerate"], 3 * BLOCK + HEAD
    assert (p.param_bytes, p.optimizer_bytes) == (4 * params // 8, 8 * params // 8)
    assert sum_bytes(p) == {("all_gather", "forward"): 4 * params, ("all_gather", "backward"): 4 * 3 * BLOCK,
                            ("reduce_scatter", "backward"): 4 * params, ("all_reduce", "optimizer"): 4 * 14}


def test_lightning_on_two_hosts(ranks):
    pytest.importorskip("lightning")
    p = ranks["lightning"]
    assert (p.param_bytes, p.optimizer_bytes) == (4 * LINEAR, 8 * LINEAR)
    assert sum_bytes(p)["all_reduce", "backward"] == 4 * LINEAR
    assert [x.device for x in p.inputs.values()][:1] == ["cuda:2"]


def test_ranks_of_other_stages_are_those_that_a_rank_sends_to():
    info = WorldInfo(16, 1, groups=(GroupInfo("world", 16, (RankRun(0, 15),)), GroupInfo("pp", 4, (RankRun(1, 13, 4),)),
                                    GroupInfo("dp", 4, (RankRun(0, 3),))))
    profile = Profile(name="train.py", mode="train", world=info, comm=(CommInfo("send", "pp", 4, 64, 64, peer=5),
                                                             CommInfo("all_reduce", "dp", 4, 64, 96)))
    assert list_peers(profile) == [5, 9, 13]


@pytest.mark.parametrize("words, message", [
    (["--rank", "3"], "--rank 3: needs the number of ranks; add --world N"),
    (["--world", "8", "--rank", "8"], "world(size=8, rank=8): the ranks are 0 to 7"),
    (["--world", "8", "--rank", "1", "--ranks", "2,3"], "--rank 1 --ranks 2,3: give one of them"),
    (["--world", "8", "--ranks", "0,9"], "world(size=8, rank=9): the ranks are 0 to 7")])
def test_command_lines_that_cannot_be(tmp_path, capsys, words, message):
    assert main(["dryrun", *words, str(write(tmp_path, ""))]) == 2
    assert message in capsys.readouterr().err


def test_a_factory_that_wraps_is_profiled_as_one_rank(tmp_path, capsys):
    path = write(tmp_path, """
    import torch
    from torch.distributed.fsdp import fully_shard

    def build():
        return fully_shard(torch.nn.Linear(1024, 1024, bias=False).cuda())
    """)
    saved = tmp_path / "profile.json"
    assert main(["profile", f"{path}:build", "--input", "8x1024", "--optimizer", "sgd", "--world", "16", "--rank", "9",
                 "--cluster", "dgx_h100", "--show", "brief", "--json", str(saved)]) == 0
    p = Profile.from_json(saved)
    assert p.param_bytes == 4 * 2**20 // 16 and p.world is not None and (p.world.size, p.world.rank) == (16, 9)
    assert p.phases["forward"].comm_bytes == p.phases["backward"].comm_bytes == 4 * 2**20  # gathered once: a root
    assert main(["profile", f"{path}:build", "--input", "8x1024", "--rank", "9"]) == 2
    assert "--rank 9: needs the number of ranks; add --world N" in capsys.readouterr().err


@pytest.mark.parametrize("device, text", [
    # 1 GiB, 547,283,272 bytes of an RTX 4090's context, and 688 MiB of NCCL's buffers
    ("a100_80gb", "2.18 GiB"),
    # 1 GiB and 702,734,664 bytes of context; how much NCCL takes is not known
    ("h200", "at least 1.65 GiB")])
def test_what_is_in_use_on_the_device_of_a_rank(device, text):
    p = Profile(name="train.py", mode="train", device=device, world=WorldInfo(8, 0), peak_allocated_bytes=2**29,
                world_size=8, peak_reserved_bytes=2**30)
    line, = [line for line in p.summary().splitlines() if "nvidia-smi" in line]
    assert line.split("shows")[1].strip() == text
    assert "nvidia-smi" not in replace(p, world=None).summary()


@pytest.mark.parametrize("before, current", [("", 3), ("x = torch.ones(3, device='cuda')", 0),
                                             ("torch.cuda.set_device(1)", 1)])
def test_a_mesh_sets_the_device_where_the_script_did_not(before, current, tmp_path, capsys):
    """`DeviceMesh._setup_world_group_and_device` asks whether CUDA is initialized; pytorch/examples rely on it."""
    (tmp_path / "train.py").write_text(textwrap.dedent(f"""
        import torch, torch.distributed as dist
        dist.init_process_group("nccl")
        {before}
        dist.init_device_mesh("cuda", (4,))
        print(torch.cuda.current_device())"""))
    run = dry_run(tmp_path / "train.py", world=world(4, rank=3))
    assert run.error is None, run.format_error()
    assert capsys.readouterr().out.split() == [str(current)]

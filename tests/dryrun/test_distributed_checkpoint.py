"""What a script writes by `torch.distributed.checkpoint` is found again, by it and by what looks at the folder."""
import textwrap

import pytest

from analyzer.parallel import world
from analyzer.tools.dryrun.script import dry_run


@pytest.fixture
def run(tmp_path):
    def run(*parts, **options):
        path = tmp_path / "script.py"
        path.write_text("import os, sys, torch\nfrom torch import nn\nimport torch.distributed.checkpoint as dcp\n"
                        + "".join(map(textwrap.dedent, parts)))
        return dry_run(path, [str(tmp_path / "saved")], **options)
    return run


STEP = """
model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.Adam(model.parameters())
def step():
    model(torch.rand(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
step()
"""


def test_a_checkpoint_is_loaded_again(run, tmp_path, capsys):
    found = run(STEP, """
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 7}
    dcp.save(states, checkpoint_id=os.path.join(sys.argv[1], "step_1"))
    print(sorted(os.listdir(sys.argv[1])), sorted(os.listdir(os.path.join(sys.argv[1], "step_1"))))
    print(os.path.isdir(sys.argv[1]), [(e.name, e.is_dir()) for e in os.scandir(sys.argv[1])])
    read = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 0}
    before = torch.cuda.memory_allocated()
    dcp.load(read, checkpoint_id=os.path.join(sys.argv[1], "step_1"))
    print(read["epoch"], read["model"]["weight"].device, torch.cuda.memory_allocated() - before)
    model.load_state_dict(read["model"])
    optimizer.load_state_dict(read["optimizer"])
    step()
    """)
    assert found.error is None, found.format_error()
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "['step_1'] ['.metadata', '__0_0.distcp']", "True [('step_1', True)]", "7 cuda:0 0"]
    assert not (tmp_path / "saved").exists()
    assert any("'step_1'" in text or "step_1" in text and "wrote nothing" in text for text in found.profile.assumptions)


#: how a checkpoint is written, and what reads it
LAYOUTS = {
    "nothing flattened": ("planner=dcp.DefaultSavePlanner(flatten_state_dict=False)",
                          "planner=dcp.DefaultLoadPlanner(flatten_state_dict=False)"),
    "partial loads": ("no_dist=True", "planner=dcp.DefaultLoadPlanner(allow_partial_load=True)"),
    "plans that are kept": ("planner=dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True, enable_plan_caching=True)",
                            "no_dist=True"),
    "a file for each tensor, by threads": (
        "storage_writer=dcp.FileSystemWriter(sys.argv[1], single_file_per_rank=False, thread_count=4)",
        "storage_reader=dcp.FileSystemReader(sys.argv[1])"),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("call", ["dcp.save({}, {})", "dcp.async_save({}, {}).result()"])
def test_a_checkpoint_of_another_layout_is_loaded_again(run, tmp_path, capsys, name, call):
    saved, loaded = LAYOUTS[name]
    save = call.format("make(7)", f"checkpoint_id=sys.argv[1], {saved}, no_dist=True".replace(
        "no_dist=True, no_dist", "no_dist"))
    found = run(STEP, f"""
    def make(epoch):
        return {{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "n": {{"e": [epoch]}}}}
    for _ in range(4):
        {save}
        read = make(0)
        dcp.load(read, checkpoint_id=sys.argv[1], {loaded})
    model.load_state_dict(read["model"])
    optimizer.load_state_dict(read["optimizer"])
    step()
    print(read["n"])
    """)
    assert found.error is None, found.format_error()
    epoch = 0 if name == "nothing flattened" else 7  # PyTorch puts back no number in a container that is one item
    assert capsys.readouterr().out.splitlines()[-1] == f"{{'e': [{epoch}]}}"
    assert not (tmp_path / "saved").exists()


def test_files_of_safetensors_are_written_and_read_again(run, tmp_path, capsys):
    found = run(STEP, """
    from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
    import safetensors.torch
    tensors = dict(model.state_dict())
    dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(sys.argv[1], {name: 1 for name in tensors}), no_dist=True)
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(read, storage_reader=HuggingFaceStorageReader(sys.argv[1]), no_dist=True)
    model.load_state_dict(read)
    print(sorted(name.rpartition(".")[2] for name in os.listdir(sys.argv[1])))
    saved = safetensors.torch.save({"w": model.weight.detach()}, {"format": "pt"})
    print(len(saved) % 8, b'"data_offsets": [0, 16384]' in saved)
    """)
    assert found.error is None, found.format_error()
    assert capsys.readouterr().out.splitlines()[-2:] == ["['json', 'safetensors']", "0 True"]


def test_a_second_save_takes_the_place_of_the_first_and_a_removed_one_is_gone(run, capsys):
    found = run(STEP, """
    import shutil
    path = sys.argv[1]
    for epoch in (1, 2):
        dcp.save({"epoch": epoch, "model": model.state_dict()}, checkpoint_id=path)
    read = {"epoch": 0, "model": model.state_dict()}
    dcp.load(read, checkpoint_id=path)
    print(read["epoch"], len(os.listdir(path)))
    shutil.rmtree(path)
    print(os.path.exists(path))
    try:
        dcp.load(read, checkpoint_id=path)
    except BaseException as error:
        print("No such file" in str(error))
    """)
    assert found.error is None, found.format_error()
    assert capsys.readouterr().out.splitlines()[-3:] == ["2 2", "False", "True"]


def test_another_shape_and_a_missing_name_are_refused_as_by_pytorch(run, capsys):
    found = run(STEP, """
    dcp.save({"w": model.weight}, checkpoint_id=sys.argv[1])
    for read in ({"w": torch.zeros(3, 64)}, {"v": torch.zeros(64, 64)}):
        try:
            dcp.load(read, checkpoint_id=sys.argv[1])
        except BaseException as error:
            print([word for word in ("Size mismatch", "Missing key") if word in str(error)])
    """)
    assert found.error is None, found.format_error()
    assert capsys.readouterr().out.splitlines()[-2:] == ["['Size mismatch']", "['Missing key']"]


@pytest.mark.parametrize("rank", [0, 3])  # the coordinator of the plans, and one to which it would send its own
def test_a_rank_writes_its_shards_and_reads_them_again(rank, run, capsys):
    found = run("""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    def step():
        model(torch.rand(4, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    step()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=sys.argv[1])
    print([name for name in os.listdir(sys.argv[1]) if name.startswith("__")])
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=sys.argv[1])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    step()
    print(weights["0.weight"].to_local().shape)
    """, world=world(4, rank), whole=True)
    assert found.error is None, found.format_error()
    assert capsys.readouterr().out.splitlines()[-2:] == [f"['__{rank}_0.distcp']", "torch.Size([16, 64])"]
    shards = 4 * (2 * (64 * 64 + 64)) // 4
    assert found.profile.optimizer_bytes == 2 * shards
    saving = next(phase for phase in found.profile.course.phases if phase.name == "saving")
    assert 3 * shards <= saving.host_peak_bytes < 4 * shards  # its shards and their states, no other's


def test_a_process_that_saves_needs_a_group_as_in_pytorch(run):
    found = run(STEP, """
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
    dcp.async_save({"model": model.state_dict()}, checkpoint_id=sys.argv[1],
                   async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()
    """)
    assert "Default process group has not been initialized" in found.format_error()

"""DeepSpeed's ZeRO: bytes of a rank as they follow by hand from its settings, and its configuration files.

The model has ``LAYERS`` linear layers of ``W`` weights and ``B`` biases in bfloat16. Of ``RANKS`` ranks each has ``S``
elements: 2S bytes of parameters, 2S of gradients, and 12S of states, which are a copy in float32 and two moments (the
paper of ZeRO, section 3.1). Weights are gathered, biases stay whole, as the threshold of persistence says.
"""
import importlib
import json
import os
import sys
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from analyzer import profile
from analyzer.cli import main
from analyzer.distributed.deepspeed import make_engine, read_config
from analyzer.errors import InputError, MissingExtraError
from analyzer.parallel import world
from analyzer.profilers.annotation import Annotation
from analyzer.profilers.communication import find_message
from analyzer.tools.dryrun.script import dry_run

RANKS, WIDTH, LAYERS = 8, 256, 4
W, B = WIDTH * WIDTH, WIDTH
P = LAYERS * (W + B)
S = P // RANKS
BUCKET = 300_000


def model():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def config(stage, settings=(), **others):
    zero = {"stage": stage, "reduce_bucket_size": BUCKET, "stage3_param_persistence_threshold": 1000, **dict(settings)}
    return {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}, "zero_optimization": zero, **others}


def run(stage, settings=(), dtype=torch.bfloat16, **others):
    pytest.importorskip("deepspeed")
    with world(RANKS):
        return profile(lambda: make_engine(model(), config(stage, settings, **others)), device="h100_sxm",
                       args=(torch.zeros(2, WIDTH, dtype=dtype),))


def sent(p):
    total = {}
    for row in p.comm:
        total[row.kind, row.phase] = total.get((row.kind, row.phase), 0) + row.bytes
    return total


AT_ONCE = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}  # released and gathered layer by layer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("settings", "forward", "backward", "live"), [
    ({}, LAYERS, 0, LAYERS),                              # fewer parameters than stay live: gathered once
    (AT_ONCE, LAYERS, LAYERS, 1),
    ({"stage3_max_reuse_distance": 1, "stage3_prefetch_bucket_size": 0}, LAYERS, LAYERS - 1, 1),  # the last is next
    # One ahead: the turn of the last layer in forward fetches the one before it, which is the next to come that is not
    # there; the whole model's turn in backward the second; the last layer's the first. Then all are there.
    ({"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": W}, LAYERS + 1, LAYERS - 2, LAYERS),
    ({"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": W, "stage3_max_live_parameters": W},
     LAYERS, LAYERS, 1),  # the next one would be more than may be live
], ids=["kept", "layer by layer", "reused", "prefetched", "limited"])
def test_stage_3_gathers_as_its_settings_say(settings, forward, backward, live):
    p = run(3, settings)
    assert (p.params, p.whole_params, p.param_bytes, p.optimizer_bytes) == (S, P, 2 * S, 12 * S)
    gathered = {("all_gather", "forward"): 2 * W * forward}
    if backward:
        gathered["all_gather", "backward"] = 2 * W * backward
    assert sent(p) == gathered | {("reduce_scatter", "backward"): 2 * P, ("all_reduce", "optimizer"): 8,
                                  ("all_gather", "optimizer"): 2 * LAYERS * B}
    assert p.peak_by_category["unsharded parameter"] == 2 * (live * W + LAYERS * B)
    assert 2 * S <= p.peak_by_category["gradient"] <= 2 * S + 512


@pytest.mark.filterwarnings("ignore")
def test_a_bucket_of_gradients_is_as_large_as_the_file_says():
    """Elements in bfloat16; the allocator rounds to 512 bytes."""
    peaks = [run(3, {**AT_ONCE, "reduce_bucket_size": size}).peak_allocated_bytes for size in (512_000, 1_024_000)]
    assert peaks[1] - peaks[0] == 2 * 512_000


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_keep_all_parameters_and_a_part_of_the_states(stage):
    p = run(stage)
    assert (p.params, p.whole_params, p.param_bytes, p.optimizer_bytes) == (P, P, 2 * P, 12 * S)
    # use_multi_rank_bucket_allreduce: buckets are all-reduced; then flags of an overflow, and a norm
    assert sent(p) == {("all_reduce", "backward"): 2 * P, ("all_reduce", "optimizer"): 5,
                       ("all_gather", "optimizer"): 2 * P}
    assert p.peak_by_category["communication buffer"] >= 2 * BUCKET > p.peak_by_category.get("temporary", 0)


@pytest.mark.filterwarnings("ignore")
def test_what_is_offloaded_is_on_the_host():
    """Stage 3: copies, their gradients and moments in float32, parameters and gradients in bfloat16 (and a norm)."""
    p = run(3, {name: {"device": "cpu"} for name in ("offload_optimizer", "offload_param")})
    assert p.optimizer_bytes == 0 and not {"optimizer state", "gradient"} & p.peak_by_category.keys()
    assert 20 * S <= p.host_peak_bytes < 20 * S + 512


@pytest.mark.filterwarnings("ignore")
def test_micro_batches_are_those_of_the_file():
    p = run(3, AT_ONCE, gradient_accumulation_steps=3)
    assert sent(p)["reduce_scatter", "backward"] == 3 * 2 * P and sent(p)["all_gather", "forward"] == 3 * 2 * LAYERS * W
    p = run(0, fp16={"enabled": True}, bf16={"enabled": False}, dtype=torch.float16)
    assert sent(p) == {("all_reduce", "backward"): 2 * P} and p.optimizer_bytes == 12 * P


SCRIPT = """
import deepspeed, sys, torch
from torch import nn
net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=sys.argv[1])
for _ in range(4):
    loss = engine(torch.zeros(2, 256, dtype=torch.bfloat16, device=engine.device)).float().pow(2).mean()
    engine.backward(loss)
    engine.step()
"""


@pytest.mark.filterwarnings("ignore")
def test_a_script_that_imports_deepspeed_itself_is_run_dry(tmp_path):
    pytest.importorskip("deepspeed")
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "ds.json").write_text(json.dumps({**config(3, AT_ONCE), "train_micro_batch_size_per_gpu": 2}))
    done = dry_run(tmp_path / "train.py", [str(tmp_path / "ds.json")], world=world(RANKS), device="h100_sxm", steps=4)
    assert done.error is None, done.format_error()
    p = done.profile
    assert (p.params, p.whole_params, p.param_bytes, p.optimizer_bytes) == (S, P, 2 * S, 12 * S)
    assert sent(p) == {("all_gather", "forward"): 2 * W * LAYERS, ("all_gather", "backward"): 2 * W * LAYERS,
                       ("reduce_scatter", "backward"): 2 * P, ("all_reduce", "optimizer"): 8,
                       ("all_gather", "optimizer"): 2 * LAYERS * B}


class Counting(TorchDispatchMode):
    """Calls of each collective, and the bytes of its largest tensor."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self.found[func._schema.name, "bytes"] += max(t.numel() * t.element_size() for t in tensors)
            self.found[func._schema.name, "calls"] += 1
        return func(*args, **(kwargs or {}))


def run_for_real(rank, settings, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_SIZE="2", DS_ACCELERATOR="cpu",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="29613")
    deepspeed = importlib.import_module("deepspeed")
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # which is compiled
    settings["optimizer"]["params"] = {"torch_adam": True}
    net = model()
    engine = deepspeed.initialize(model=net, config=settings, model_parameters=[*net.parameters()])[0]
    for _ in range(3):
        with Counting() as counting:
            loss = engine(torch.zeros(2, WIDTH, dtype=torch.bfloat16)).float().pow(2).mean()
            engine.backward(loss)
            engine.step()
    if not rank:
        (folder / "found.json").write_text(json.dumps([[*key, n] for key, n in counting.found.items()]))


@pytest.mark.filterwarnings("ignore")
def test_collectives_are_those_of_real_processes(tmp_path):
    pytest.importorskip("deepspeed")
    settings = {"stage3_prefetch_bucket_size": W, "stage3_max_live_parameters": 2 * W, "stage3_max_reuse_distance": 999}
    given = {**config(3, settings), "train_micro_batch_size_per_gpu": 2}
    torch.multiprocessing.spawn(run_for_real, (given, tmp_path), nprocs=2)
    predicted = Counter()

    def read(log):
        for call in log.calls:
            if call.step == log.steps - 1 and call.signature.op.namespace == "c10d":
                predicted[call.signature.op._schema.name, "calls"] += 1
                predicted[call.signature.op._schema.name, "bytes"] += find_message(log, call).bytes
        return Annotation()

    with world(2):
        profile(lambda: make_engine(model(), given), args=(torch.zeros(2, WIDTH, dtype=torch.bfloat16),),
                device="h100_sxm", profilers=[read])
    assert predicted == {(name, what): n for name, what, n in json.loads((tmp_path / "found.json").read_text())}


@pytest.mark.filterwarnings("ignore")
def test_what_deepspeed_keeps_process_wide_is_as_before():
    deepspeed, linear = pytest.importorskip("deepspeed"), nn.functional.linear
    device = deepspeed.accelerator.real_accelerator.ds_accelerator
    run(3)
    assert nn.functional.linear is linear and deepspeed.comm.comm.cdb is None
    assert deepspeed.accelerator.real_accelerator.ds_accelerator is device
    assert deepspeed.utils.groups._WORLD_GROUP is None and not deepspeed.utils.groups._EXPERT_PARALLEL_GROUP


@pytest.mark.filterwarnings("ignore")
def test_operators_that_are_not_known_are_refused():
    with pytest.raises(InputError, match="would compile its operator .*, of which only fused_adam, cpu_adam are kn"):
        run(1, optimizer={"type": "Lamb"})
    with pytest.raises(InputError, match="the configuration of DeepSpeed: names no optimizer"):
        run(3, optimizer="auto")


class Sized(nn.Linear):
    class config:
        hidden_size = 100


AUTO = {"train_batch_size": "auto", "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                              "stage3_param_persistence_threshold": "auto", "overlap_comm": True}}


def test_what_is_auto_is_as_the_trainer_of_transformers_has_it(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(AUTO))
    assert read_config(tmp_path / "ds.json", Sized(4, 4).bfloat16()) == {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "bf16": {"enabled": True},
        "fp16": {"enabled": False}, "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 10_000, "stage3_prefetch_bucket_size": 9_000,
                              "stage3_param_persistence_threshold": 1_000, "overlap_comm": True}}


@pytest.mark.parametrize(("given", "said"), [
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
     "offload_param on NVMe (ZeRO-Infinity) is not modelled: give \"cpu\" or \"none\""),
    ({"zero_optimization": {"reduce_bucket_size": "auto"}}, "reduce_bucket_size is \"auto\", and Linear has no "
     "config.hidden_size: give numbers of elements"),
    ([], "must hold an object, {...}"), ("{", "is no JSON file of DeepSpeed: ")])
def test_a_file_that_cannot_be_used_says_why(given, said, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(given if isinstance(given, str) else json.dumps(given))
    with pytest.raises(InputError) as error:
        read_config(path, nn.Linear(4, 4))
    assert str(error.value).startswith(f"{path}: ") and said in str(error.value)


def test_without_deepspeed_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(MissingExtraError, match=r"ds.json: DeepSpeed's own code is run, and it is not installed: pip "
                                                r"install -e '.\[deepspeed\]' in"):
        make_engine(nn.Linear(4, 4), "ds.json")


def test_the_command_says_what_lacks(capsys):
    assert main(["profile", "gpt2", "--deepspeed", "ds.json"]) == 2
    assert "--deepspeed ds.json: needs the number of ranks; add --world N" in capsys.readouterr().err
    assert main(["profile", "gpt2", "--world", "8", "--deepspeed", "ds.json", "--accumulate", "2"]) == 2
    said = "--accumulate 2: DeepSpeed has its own setting for this; set gradient_accumulation_steps in ds.json instead"
    assert said in capsys.readouterr().err

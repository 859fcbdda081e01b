"""The steady step in time: its spans add up to what the profile says of it."""
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from analyzer import Profile, ProfileOptions, profile
from analyzer.hardware import find_device
from analyzer.parallel import world
from analyzer.profilers.stream_schedule import Cover
from analyzer.zoo import MODELS

pytestmark = pytest.mark.filterwarnings("ignore")
CPU = replace(find_device("h100"), name="a host", kind="cpu")  #: a host whose times need not be measured
IMAGES = torch.empty(2, 3, 64, 64, device="meta")


class ReadsBack(nn.Module):
    """Waits for the device twice: for a value, and as the program says."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        y = self.linear(x)
        torch.cuda.synchronize()
        return y[y > 0].sum()


def sharded():
    from torch.distributed.fsdp import fully_shard
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(3)]).cuda()
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def replicated():
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(3)]).cuda()
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)  # a bucket each


class Offloads(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)])

    def forward(self, x):
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return self.layers(x)


def twice(model, optimizer, x):
    """A step of two micro-batches."""
    for part in x.chunk(2):
        model(part).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


CASES = {
    "training": (MODELS["resnet18"].factory, (IMAGES,), {"optimizer": "adamw"}, 1),
    "inference": (MODELS["resnet18"].factory, (IMAGES,), {"mode": "infer"}, 1),
    "micro-batches": (lambda: nn.Linear(256, 256), (torch.empty(8, 256),), {"optimizer": "adam", "step": twice}, 1),
    "transformer": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, batch_first=True), 3),
                    (torch.empty(4, 16, 64),), {"optimizer": "adamw"}, 1),
    "waits": (ReadsBack, (torch.empty(8, 64),), {"options": ProfileOptions(unknown_size="worst")}, 1),
    "offloaded": (Offloads, (torch.empty(64, 256),), {"optimizer": "sgd"}, 1),
    "on the host": (MODELS["resnet18"].factory, (IMAGES,), {"optimizer": "sgd", "device": CPU}, 1),
    "sharded": (sharded, (torch.empty(4, 512),), {"optimizer": "sgd"}, 8),
    "replicated": (replicated, (torch.empty(4, 512),), {"optimizer": "adam"}, 8),
}


def run(name: str, **more) -> Profile:
    model, args, options, ranks = CASES[name]
    options = {"device": "h100", **options, **more}
    if ranks == 1:
        return profile(model, args, **options)
    with world(ranks):
        return profile(model, args, **options)


def picoseconds(seconds: float) -> int:
    return round(seconds * 10**12)


def cover(spans) -> Cover:
    return Cover([(picoseconds(span.start_seconds), picoseconds(span.end_seconds)) for span in spans])


@pytest.mark.parametrize("name", CASES)
def test_spans_add_up_to_the_step(name):
    p = run(name)
    host = [span for span in p.spans if span.lane == "host"]
    device = [span for span in p.spans if span.lane != "host"]
    assert {span.kind for span in host} <= {"launch", "wait"}
    assert {span.kind for span in device} <= {"kernel", "collective", "copy"}
    assert [span.start_seconds for span in p.spans] == sorted(span.start_seconds for span in p.spans)
    # wall time of the step and of each of its phases; that of micro-batches is of several parts
    whole = picoseconds(p.step_seconds)
    assert max(picoseconds(span.end_seconds) for span in p.spans) == whole
    if name != "micro-batches":
        end = 0
        for phase, row in p.phases.items():
            end += picoseconds(row.seconds)
            last = max([picoseconds(s.end_seconds) for s in p.spans if s.phase == phase], default=0)
            assert last == end or row.seconds == 0 and last <= end
    # kernels, and the time in which none runs
    assert sum(picoseconds(span.seconds) for span in device) == picoseconds(p.kernel_seconds)
    if name != "on the host":
        idle = whole - cover(device).within(0, whole)
        assert idle == sum(picoseconds(phase.launch_seconds) for phase in p.phases.values())
    # the host does one thing at a time, each stream too
    for lane in dict.fromkeys(span.lane for span in p.spans):
        spans = [span for span in p.spans if span.lane == lane]
        assert cover(spans).within(0, whole) == sum(picoseconds(span.seconds) for span in spans)


@pytest.mark.parametrize("name", ["sharded", "replicated"])
def test_exposed_communication_is_where_only_communication_runs(name):
    p = run(name)
    collectives = [span for span in p.spans if span.kind == "collective"]
    others = cover(span for span in p.spans if span.kind == "kernel")
    both = cover(span for span in p.spans if span.kind in ("kernel", "collective"))
    whole = picoseconds(p.step_seconds)
    exposed = sum(picoseconds(phase.exposed_comm_seconds) for phase in p.phases.values())
    assert both.within(0, whole) - others.within(0, whole) == exposed > 0
    assert [(picoseconds(s.start_seconds), picoseconds(s.seconds)) for s in collectives] == sorted(
        (picoseconds(row.start_seconds), picoseconds(row.seconds)) for row in p.comm)


@pytest.mark.parametrize(("name", "lanes"), [
    ("micro-batches", {"host", "compute"}), ("on the host", {"host", "compute"}),
    ("replicated", {"host", "compute", "world all_reduce"}),
    # the second stream copies what is to be gathered together
    ("sharded", {"host", "compute", "stream 1", "world all_gather", "world reduce_scatter"}),
])
def test_lanes_have_the_names_of_what_they_do(name, lanes):
    assert {span.lane for span in run(name).spans} == lanes


@pytest.mark.parametrize("name", ["transformer", "micro-batches"])
def test_replayed_parts_have_the_same_spans(name):
    assert run(name).spans == run(name, reuse=False).spans != ()


@pytest.mark.parametrize("name", ["transformer", "sharded"])
def test_kernels_name_their_launch(name):
    p = run(name)
    names = {node.name: node for node in p.nodes}
    paths = {module.path for module in p.modules.walk()}
    for span in p.spans:
        assert span.module_path in paths and span.phase in p.phases
        assert (span.name == span.operator) if span.node is None else names[span.node] and span.name == span.node
        if span.lane == "host":
            assert span.launch is None
            continue
        launch = p.spans[span.launch]
        assert launch[:2] == ("host", "launch") and launch[2:7] == span[2:7]
        assert picoseconds(launch.end_seconds) <= picoseconds(span.start_seconds)
    launches = [span.launch for span in p.spans if span.lane == "compute"]
    assert launches == sorted(set(launches))  # in order, each its own


def test_the_host_waits_for_what_it_reads_and_where_the_program_says_so():
    p = run("waits")
    waits = [(span.name, span.operator, span.module_path, span.phase) for span in p.spans if span.kind == "wait"]
    assert waits[0] == ("synchronize", None, "", "forward")
    assert waits[1][1] == "aten.nonzero.default" and waits[1][3] == "forward"
    kernels = [span for span in p.spans if span.lane == "compute"]
    linear = next(span for span in kernels if span.node == "linear")
    wait = next(span for span in p.spans if span.kind == "wait")
    notice = wait.end_seconds - linear.end_seconds  # the host takes this long to see that the device is done
    assert notice > 0 and not [s for s in kernels if linear.end_seconds < s.start_seconds < wait.end_seconds]


def test_copies_are_told_from_kernels():
    p = run("offloaded")
    copies = Counter((span.phase, span.operator) for span in p.spans if span.kind == "copy")
    # the inputs of three layers, and the weights of two: the first one's input asks for no gradient
    assert copies == {("forward", "aten.copy_.default"): 5, ("backward", "aten._to_copy.default"): 5}

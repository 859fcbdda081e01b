"""Collectives report their bytes on their own node, forward and backward, and in the phase totals."""
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from analyzer import Profile, profile, symbolic_profile, symbolic_trace
from tests.call import Call

pytestmark = pytest.mark.filterwarnings("ignore")
WORLD = 4
LAYER = nn.Linear(1024, 1024, bias=False)
N = 256 * 1024 * 4  # bytes of the activation: 256 x 1024 float32


@pytest.fixture(scope="module", autouse=True)
def group():
    """A process group that moves no data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()


def all_reduce(y):
    import torch.distributed.nn.functional as dnn
    return dnn.all_reduce(y)


def all_gather(y):
    from torch.distributed._functional_collectives import all_gather_tensor_autograd
    return all_gather_tensor_autograd(y, 0, dist.group.WORLD)


def reduce_scatter(y):
    from torch.distributed._functional_collectives import reduce_scatter_tensor_autograd
    return reduce_scatter_tensor_autograd(y, "sum", 0, dist.group.WORLD)


def in_place(y):
    dist.all_reduce(y)
    return y


# of an all-gather the gathered tensor counts, of a reduce-scatter the whole input; each is the other's gradient
CASES = [(all_reduce, "allreduce", N, N), (all_gather, "all_gather", WORLD * N, WORLD * N),
         (reduce_scatter, "reduce_scatter", N, N), (in_place, "allreduce", N, 0)]


MODEL = Call(lambda m, x: all_reduce(m.layer(x)), layer=LAYER)


@pytest.mark.parametrize(("collective", "name", "forward", "backward"), CASES)
def test_bytes_are_on_the_collectives_own_node_and_in_the_phases(collective, name, forward, backward):
    model, x = Call(lambda m, x: collective(m.layer(x)), layer=LAYER), torch.empty(256, 1024)
    p = profile(model, args=(x,))
    rows = [(n.name, n.fwd_comm_bytes, n.bwd_comm_bytes) for n in p.nodes if n.fwd_comm_bytes or n.bwd_comm_bytes]
    assert len(rows) == 1
    assert rows[0][0].startswith(name)
    assert rows[0][1:] == (forward, backward)
    assert (p.phases["forward"].comm_bytes, p.phases["backward"].comm_bytes) == (forward, backward)
    assert (p.modules.fwd_comm_bytes, p.modules.bwd_comm_bytes) == (forward, backward)
    assert p.uncounted == ()
    gm = symbolic_profile(symbolic_trace(model, meta_args={"args": (x,)}), x)  # which reports the same
    rows = [n.meta["info"] for n in gm.graph.nodes if n.meta["info"].fwd_comm_bytes or n.meta["info"].bwd_comm_bytes]
    assert [(r.fwd_comm_bytes, r.bwd_comm_bytes) for r in rows] == [(forward, backward)]


def headings(text):
    return [" ".join(words.split()) for words in re.split(r"\s{2,}", text.splitlines()[0].strip())]


def test_the_node_table_has_columns_for_it_where_there_is_some(capsys):
    x = torch.empty(256, 1024)
    p = profile(MODEL, args=(x,))
    assert p.communicates is True
    assert headings(p.table(fmt="simple"))[10:] == ["Fwd comm", "Bwd comm"]
    more = p.table(columns=["Bwd comm", "fwd_macs"], fmt="simple")
    assert headings(more)[10:] == ["Bwd comm", "Fwd MACs", "Fwd comm"]
    total = p.table().splitlines()[-1]
    assert total.count("1.00 MiB") >= 2, "the activation, there and back"
    symbolic_profile(symbolic_trace(MODEL, meta_args={"args": (x,)}), x, verbose=True)
    lines = capsys.readouterr().out.splitlines()  # on two lines of at most 120
    assert lines[1].split()[-4:] == ["Fwd", "comm", "Bwd", "comm"] and max(map(len, lines)) <= 120
    assert "Fwd comm" in p.report("table", fmt="markdown") and "fwd_comm_bytes" in p.report(
        "table", fmt="csv")


def test_and_none_where_there_is_none():
    p = profile(LAYER, args=(torch.empty(256, 1024),))
    assert p.communicates is False and len(headings(p.table(fmt="simple"))) == 10
    assert "comm" not in p.report("table", fmt="markdown")


def test_what_is_unknown_is_shown_as_such():
    p = profile(nn.parallel.DistributedDataParallel(nn.Linear(1024, 1024, bias=False)), args=(torch.empty(256, 1024),))
    assert p.communicates is None and p.comm is None
    lines = [line.split() for line in p.table(fmt="simple").splitlines()]
    assert headings(p.table(fmt="simple"))[10:] == ["Fwd comm", "Bwd comm"]
    assert all(line[-2:] == ["-", "-"] for line in lines[2:] if line and not line[0].startswith("--"))
    assert Profile.from_json(p.to_json()).table() == p.table()

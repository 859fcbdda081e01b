"""Copies by `copy`, `pickle` and files: each is what PyTorch makes of tensors with data, which run beside it here."""
import copy
import io
import pickle

import pytest
import torch
from torch import nn

from analyzer import MetaTensor, MetaTensorMode, ProfileOptions, profile
from analyzer.meta.address_space import MetaStorage


def trained():
    parameter = nn.Parameter(torch.rand(3, 4))
    parameter.square().sum().backward()
    parameter.tag = "kept"
    return parameter


def views():
    base = torch.rand(4, 6)
    return [base, base[2:], base.t(), nn.Parameter(base[:, 1:3])]


def leaf():
    x = torch.rand(2, 3, requires_grad=True)
    x.sum().backward()
    x.tag = ["kept"]
    return x


def tied():
    layer = nn.Linear(3, 3)
    return nn.ModuleList([layer, nn.Linear(3, 3), layer])


def with_buffers():
    norm = nn.BatchNorm1d(4)
    norm(torch.rand(3, 4)).sum().backward()
    norm.same = norm.running_mean
    return norm


def optimizer_state():
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.rand(1, 3)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


MAKERS = [trained, views, leaf, tied, with_buffers, optimizer_state, lambda: nn.Embedding(3, 4).half(),
          lambda: nn.Buffer(torch.arange(6)), lambda: torch.rand(1).expand(5),
          lambda: torch.sparse_coo_tensor([[0, 1], [2, 0]], [1., 2.], (2, 3))]


def saved(value, weights_only=False, **options):
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


COPIERS = [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), saved]


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, nn.Module):
        value = [*value.parameters(), *value.buffers()]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in (value if isinstance(value, (list, tuple)) else ()) for t in tensors_in(v)]


def describe(before, after):
    """Each tensor: what it is, and how many of them have storages, of how many bytes, that those copied have too."""
    told = []
    for t in tensors_in(after):
        dense = t.coalesce().values() if t.layout is torch.sparse_coo else t
        told.append((isinstance(t, nn.Parameter), isinstance(t, nn.Buffer), t.requires_grad, t.grad is None, t.dtype,
                     getattr(t, "tag", None), tuple(t.shape), tuple(dense.stride()), dense.storage_offset()))
    def storages(value):
        return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_in(value)
                if t.layout is torch.strided}
    old, new = storages(before), storages(after)
    return told, sorted(new.values()), len(old.keys() & new.keys())


@pytest.mark.parametrize("copier", COPIERS, ids=["copy", "deepcopy", "pickle", "save"])
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_copy_is_what_pytorch_makes(make, copier, device):
    value = make()
    right = describe(value, copier(value))
    with MetaTensorMode(), torch.device(device):
        value = make()
        assert describe(value, copier(value)) == right
    if copier is copy.deepcopy:
        assert describe(value, copier(value)) == right  # outside of the mode


@pytest.mark.parametrize("make", MAKERS)
def test_a_deep_copy_under_the_mode_of_what_has_data_is_what_pytorch_makes(make):
    value = make()
    right = describe(value, copy.deepcopy(value))
    with MetaTensorMode():
        copied = copy.deepcopy(value)
        assert describe(value, copied) == right
    assert all(isinstance(t, MetaTensor) for t in tensors_in(copied))


def place(value):
    return {t.device for t in tensors_in(value)}


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), saved,
                                    lambda x: saved(x, True), lambda x: saved(x, _use_new_zipfile_serialization=False)])
def test_a_copy_takes_its_bytes_where_the_original_is(copier):
    with MetaTensorMode():
        kept = {"weight": torch.rand(256, 256, device="cuda"), "steps": torch.arange(3, device="cuda")}
        before = torch.cuda.memory_allocated()
        made = copier(kept)
        assert place(made) == {torch.device("cuda", 0)}
        assert torch.cuda.memory_allocated() - before == 256 * 256 * 4 + 512
        assert made["steps"].tolist() == [0, 1, 2]
        del made
        assert torch.cuda.memory_allocated() == before


def test_a_copied_model_counts_in_a_step():
    """Weight, its gradient and the copy, which has no gradient."""
    copied = []

    def peak(copier):
        def step(model, optimizer, x):
            model(x).sum().backward()
            if not hasattr(model, "kept"):
                model.kept = [copier(model)]
                copied.append(model.kept[0].weight.grad)
            optimizer.step()
            optimizer.zero_grad()
        return profile(nn.Linear(256, 256, bias=False), (torch.rand(1, 256),), step=step, device="cpu",
                       optimizer=lambda p: torch.optim.SGD(p, .1), options=ProfileOptions(steps=3)).peak_allocated_bytes
    peaks = {peak(copier) for copier in COPIERS[1:]}
    assert copied == [None] * 3
    assert all(3 * 2**18 < p < 3 * 2**18 + 2**14 for p in peaks)


LOCATIONS = ["cuda", "cuda:0", "cpu", "meta", torch.device("cuda"), torch.device("cuda", 0), {"cpu": "cuda:0"}, {},
             None, lambda storage, where: storage, lambda storage, where: storage.cuda(), lambda storage, where: None]


def devices(where):
    given = {"cuda": "cuda", "meta": "meta"}
    name = str(where)
    if callable(where):
        return "cuda" if "cuda" in where.__code__.co_names else "cpu"
    return next((given[kind] for kind in given if kind in name), "cpu")


@pytest.mark.parametrize("where", LOCATIONS, ids=range(len(LOCATIONS)))
@pytest.mark.parametrize("form", ["zip", "legacy", "mapped"])
def test_a_file_is_read_to_where_it_is_asked_for(where, form, tmp_path):
    base = torch.arange(1 << 10)
    path = tmp_path / "saved.pt"
    torch.save({"a": base, "b": base[10:], "c": torch.ones(2, 2)}, path,
               _use_new_zipfile_serialization=form != "legacy")
    with MetaTensorMode() as mode:
        found = torch.load(path, map_location=where, mmap=True if form == "mapped" else None)
        kind = devices(where)
        assert {t.device.type for t in found.values()} == {kind}
        memory = mode.space.allocator() if kind == "cuda" else mode.space.host if kind == "cpu" else mode.space.nowhere
        if form != "mapped" and kind != "meta":  # slices of the whole file; storages that PyTorch does not share
            assert memory.allocated_bytes == (1 << 13) + (512 if kind == "cuda" else 16)
        assert found["a"].untyped_storage()._cdata == found["b"].untyped_storage()._cdata or kind == "meta"
        assert isinstance(found["c"].untyped_storage(), MetaStorage) and isinstance(found["c"], MetaTensor)
        if kind != "meta":
            assert found["b"][3].item() == 13 and (found["a"] + 1).tolist()[:2] == [1, 2]
        del found
        assert memory.allocated_bytes == 0


@pytest.mark.parametrize("where", LOCATIONS[:8], ids=range(8))
def test_what_is_saved_without_data_is_read_to_where_it_is_asked_for(where):
    with MetaTensorMode():
        file = io.BytesIO()
        torch.save(nn.Linear(2, 2).state_dict(), file)
        file.seek(0)
        found = torch.load(file, map_location=where)
        assert {t.device.type for t in found.values()} == {devices(where)}


def test_pickles_of_tensors_with_data_are_read():
    text = pickle.dumps({"x": torch.arange(4), "p": nn.Parameter(torch.rand(300, 300))})
    with MetaTensorMode() as mode:
        found = pickle.loads(text)
        assert found["x"].sum().item() == 6 and found["p"].requires_grad and isinstance(found["p"], nn.Parameter)
        assert mode.space.host.allocated_bytes >= 360_000
        nn.Linear(300, 300).load_state_dict({"weight": found["p"], "bias": torch.zeros(300)})
    assert torch.equal(pickle.loads(text)["x"], torch.arange(4))

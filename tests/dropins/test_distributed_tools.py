"""`analyzer.dropins.distributed_tools`: torch's estimators, used as they are, with predicted seconds."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import runtime_estimator, sac_estimator
from torch.distributed._tools.mem_tracker import MemTracker

from analyzer import MetaTensorMode, profile
from analyzer.dropins.distributed_tools import RuntimeEstimator, SACEstimator
from analyzer.errors import InputError, UnknownDeviceError
from analyzer.hardware import find_device
from analyzer.hardware.current_spec import simulating
from tests.dropins.sample_model import make_model

MODE = "operator-level-cost-model"


class Block(nn.Module):
    def __init__(self, size=64):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(size, 4 * size), nn.Linear(4 * size, size), nn.Dropout()

    def forward(self, x):
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square()


def estimate(estimator, mode, device):
    """One training step, as torch's documentation has it."""
    with mode:
        with torch.device(device):
            module, x = Net(), torch.rand(8, 64)
        optimizer = torch.optim.SGD(module.parameters())
        with estimator(estimate_mode_type=MODE):
            loss = module(x).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return estimator


@pytest.mark.parametrize("device", ["h100", "a100"])
def test_times_are_those_that_a_profile_predicts(device, capsys):
    found = estimate(RuntimeEstimator(device), MetaTensorMode(), "cuda")
    assert isinstance(found, runtime_estimator.RuntimeEstimator)
    expected = profile(Net(), args=(torch.rand(8, 64), ), device=device, optimizer="sgd")
    # the model itself has its loss too
    called = [module for module in expected.modules.walk() if module.calls and module.path]
    assert len(called) == 2 * 4
    for module in called:
        times = found.mod_runtimes[f"Net.{module.path}"]
        assert (times["fw"], times["bw"]) == pytest.approx((1e3 * module.fwd_seconds, 1e3 * module.bwd_seconds))
    assert found.total_runtime == pytest.approx(sum(found.mod_runtimes["Global"].values()))
    assert found.mod_fw_pre_order[:3] == ["Net", "Net.blocks.0", "Net.blocks.0.up"]
    assert found.mod_fw_post_order[-1] == "Net" == found.mod_bw_pre_order[0]
    capsys.readouterr()
    found.display_modulewise_stats(depth=1)
    assert "\nNet fw: " in capsys.readouterr().out


def test_a_script_under_fake_tensors_runs_too(capsys):
    found = estimate(RuntimeEstimator("h100"), FakeTensorMode(), "cpu")
    expected = estimate(RuntimeEstimator("h100"), MetaTensorMode(), "cpu")
    assert found.mod_fw_pre_order == expected.mod_fw_pre_order
    assert found.mod_runtimes["Net"]["fw"] == pytest.approx(expected.mod_runtimes["Net"]["fw"], rel=0.05)
    assert capsys.readouterr().out.count(f"Estimated ({MODE})total_time: ") == 2


def test_the_device_is_the_simulated_one_unless_it_is_named():
    with simulating(find_device("a100")):
        inside = estimate(RuntimeEstimator(), MetaTensorMode(), "cuda")
    outside = estimate(RuntimeEstimator(), MetaTensorMode(), "cuda")
    for found, device in ((inside, "a100"), (outside, "h200")):
        assert found.total_runtime == estimate(RuntimeEstimator(device), MetaTensorMode(), "cuda").total_runtime


def test_statistics_of_recomputation(capsys):
    estimator = SACEstimator("h100")
    assert isinstance(estimator, sac_estimator.SACEstimator)
    with MetaTensorMode():
        with torch.device("cuda"):
            module, x = Net(), torch.rand(8, 64)
        with estimator(MODE):
            module(x)
    stats = estimator.sac_mod_stats["Net.blocks.0"]
    names = [name for name in stats.func_names if name != "t"]
    assert names == ["addmm", "gelu", "addmm", "native_dropout", "add"]
    made = dict(zip(stats.func_names, stats.memory))
    assert made["gelu"] == 8 * 256 * 4 and made["native_dropout"] == 8 * 64 * 4 + 8 * 64
    assert [stats.func_names[i] for i in stats.rand_ops] == ["native_dropout"]
    assert [stats.func_names[i] for i in stats.view_like_ops] == ["t", "t"]
    assert min(t for name, t in zip(stats.func_names, stats.runtimes) if name != "t") > 0
    order = estimator.sac_mod_greedy_order_meta["Net.blocks.0"].msps_meta
    assert [row.msps for row in order] == sorted((row.msps for row in order), reverse=True)
    estimator.display_modulewise_sac_stats(depth=3, print_tabular=True)
    printed = capsys.readouterr().out
    assert "Module: Net.blocks.0\n" in printed and "native_dropout" in printed
    assert set(estimator.sac_mod_stats) == {"Net", "Net.blocks.0", "Net.blocks.1"}


def test_a_model_of_transformers():
    estimator = RuntimeEstimator("h100")
    with MetaTensorMode():
        model, (tokens, ) = make_model("bert")
        model, tokens = model.cuda(), tokens.cuda()
        with estimator(MODE):
            model(tokens)
    assert estimator.mod_runtimes["BertModel"]["fw"] == estimator.total_runtime > 0


def test_torchs_memory_tracker_runs_as_it_is():
    tracker = MemTracker()
    with MetaTensorMode():
        with torch.device("cuda"):
            module, x = Net(), torch.rand(8, 64)
        optimizer = torch.optim.Adam(module.parameters())
        tracker.track_external(module, optimizer, x)
        with tracker:
            module(x).sum().backward()
            optimizer.step()
    found = {kind.value: nbytes for kind, nbytes in tracker.get_tracker_snapshot()[torch.device("cuda", 0)].items()
             if kind != "Total"}
    params = sum(-(-p.nbytes // 512) * 512 for p in module.parameters())
    assert (found["Parameter"], found["Gradient"]) == (params, params) and found["Optstate"] == 2 * params


def test_what_cannot_be_estimated():
    with pytest.raises(InputError, match="MetaTensorMode"), RuntimeEstimator():
        pass
    with pytest.raises(InputError, match="MetaTensorMode"), SACEstimator():
        pass
    with pytest.raises(UnknownDeviceError):
        RuntimeEstimator("h1000")
    for kind in (RuntimeEstimator, SACEstimator):
        with pytest.raises(NotImplementedError, match="operator-level-benchmark"):
            kind()("operator-level-benchmark")


def test_nothing_is_left_behind():
    from torch.nn.modules import module

    hooks = len(module._global_forward_hooks), len(module._global_forward_pre_hooks)
    for _ in range(2):
        estimate(RuntimeEstimator(), MetaTensorMode(), "cuda")
        with pytest.raises(ZeroDivisionError), MetaTensorMode(), SACEstimator()(MODE):
            raise ZeroDivisionError
    assert (len(module._global_forward_hooks), len(module._global_forward_pre_hooks)) == hooks
    assert torch.ones(2).sum() == 2

"""Everything that reads a file or a text from outside, each with what it accepts and a way to read it."""
from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from analyzer import Profile, profile, symbolic_trace
from analyzer.dropins.deepspeed import profile_with_config
from analyzer.hardware import find_cluster, find_device
from analyzer.hardware.device_file import read_device
from analyzer.parallel import list_actions
from analyzer.parallel.pipeline_timeline import join_timeline
from analyzer.parallel.rank_row import StageCost, describe_rank
from analyzer.parallel.rank_table import RankTable
from analyzer.report.check import check_profile, format_check
from analyzer.show import write_view
from analyzer.tools.calibration.bench import Point
from analyzer.tools.calibration.calibrate import calibrate
from analyzer.tools.generation import GenerationProfile, profile_generate
from analyzer.tools.solver import Plan, Planner
from analyzer.tools.sweep import sweep
from analyzer.zoo.target import load_target

from .hostile_json import Path as Place


class Reader(NamedTuple):
    """A reader: ``read`` takes a path and returns what is there; ``use`` looks at it in every way. ``suffix`` is the
    ending of its files; of what is ``loose`` any value may be right.
    """

    name: str
    sample: str
    read: Callable[[Path], Any]
    use: Callable[[Any], object] = repr
    suffix: str = ".json"
    loose: Callable[[Place], bool] = lambda place: False
    is_partial: bool = False  #: fields may be left out
    repeats: str = "hostile"  #: what its errors repeat: the file, or the section that they are about
    skips: Callable[[Place], bool] = lambda place: False  #: what another reader is tried with
    takes: tuple[str, ...] = ()  #: names of damaged texts that are right ones here


class Net(nn.Module):
    """Two layers: what a saved profile of it holds is of every kind and little."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act = nn.Linear(8, 16), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.act(self.first(x))
        return hidden


def list_readers(folder: Path, names: Collection[str] = ()) -> list[Reader]:
    """The readers of these names, else all; files that samples are made of lie in ``folder``."""
    return [make(folder) for name, make in _READERS.items() if not names or name in names]


@cache
def profile_net() -> Profile:
    """A profile of the two layers."""
    return profile(Net(), args=(torch.ones(4, 8),), optimizer="sgd", device="h100")


def _profile_reader(folder: Path) -> Reader:
    """What `Profile.to_json` wrote."""
    return Reader("saved profile", profile_net().to_json(), Profile.from_json, use_profile, loose=_is_free)


def _check_reader(folder: Path) -> Reader:
    """The same, given to ``analyzer check``."""
    return Reader("baseline of check", profile_net().to_json(), _check, loose=_is_free,
                  skips=lambda place: len(place) > 1)


def _ranks() -> str:
    timeline = join_timeline(list_actions("1F1B", ranks=2, micro_batches=2), [StageCost(1.0, 2.0)] * 2)
    found = profile_net()
    rows = describe_rank(found, 0, (0,), "stage 1 of 2"), describe_rank(found, 1, (1,), "stage 2 of 2")
    return RankTable(2, rows, timeline, ("none",), {0: found}).to_json()


def _ranks_reader(folder: Path) -> Reader:
    """What `RankTable.to_json` wrote."""
    return Reader("table of ranks", _ranks(), RankTable.from_json, use_ranks, loose=_is_free_of_ranks,
                  skips=_is_of_profile)


def _view_reader(folder: Path) -> Reader:
    """The same, given to ``analyzer view``."""
    return Reader("files of view", _ranks(), lambda path: write_view([path]), loose=_is_free_of_ranks,
                  skips=_is_of_profile)


def _generation_reader(folder: Path) -> Reader:
    """What `GenerationProfile.to_json` wrote."""
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    found = profile_generate(load_target(f"hf:{folder / 'config.json'}").build, 4, 3, batch_size=1)
    return Reader("saved generation", found.to_json(), GenerationProfile.from_json, lambda p: p.summary(),
                  loose=lambda place: _is_free(place[1:]))  # a profile of the prompt, and one of a token


def _plan_reader(folder: Path) -> Reader:
    """What `Plan.to_json` wrote."""
    x = torch.ones(4, 8)
    model = nn.Sequential(*[Net() if i % 2 else nn.Linear(16 if i else 8, 8) for i in range(4)])
    plan = Planner(symbolic_trace(model, meta_args={"input": x}), (x,)).solve(0.9)
    return Reader("plan", plan.to_json(), Plan.from_json, use_plan)


def _device_reader(folder: Path) -> Reader:
    """What `DeviceSpec.to_dict` gives."""
    text = json.dumps(find_device("a100_40gb").to_dict())
    return Reader("device", text, read_device, use_device, is_partial=True, loose=_is_constant)


def _cluster_reader(folder: Path) -> Reader:
    """What `ClusterSpec.to_dict` gives."""
    text = json.dumps(find_cluster("dgx_h100").to_dict())
    return Reader("cluster", text, lambda path: find_cluster(str(path)), lambda cluster: list(cluster.figures()),
                  is_partial=True, loose=_is_constant)


def _calibration_reader(folder: Path) -> Reader:
    """What an interrupted ``analyzer calibrate`` left."""
    counted = itertools.count()

    def bench(point: Point) -> float | None:
        return _stop(point) if next(counted) > 2 else 1e-3

    with contextlib.suppress(KeyboardInterrupt):
        calibrate(folder / "card.json", "cuda", quick=True, bench=bench, like=find_device("a10"))
    return Reader("calibration", (folder / "card.json").read_text(), _calibrate,
                  loose=lambda place: "seconds" in place or place[-1:] == ("quick",))  # of which another is begun anew


def _sweep_reader(folder: Path) -> Reader:
    """The file that a sweep goes on from."""
    _sweep(folder / "rows.jsonl")
    return Reader("rows of a sweep", (folder / "rows.jsonl").read_text(), _sweep, lambda result: result.to_csv(),
                  ".jsonl", loose=lambda place: True)


def _config_reader(folder: Path) -> Reader:
    """The config.json of a model of transformers."""
    return Reader("config of a model", json.dumps(_CONFIG), lambda path: load_target(f"hf:{path}"),
                  loose=lambda place: True)


def _deepspeed_reader(folder: Path) -> Reader:
    """What its engine is given."""
    return Reader("configuration of DeepSpeed", json.dumps(_DEEPSPEED), lambda path: profile_with_config(Net(), path),
                  loose=lambda place: "flops_profiler" not in place or place[-1] == "module_depth", is_partial=True,
                  repeats="", takes=("500 objects", "500 lists in a field", "only '{}'"))  # what is there is others'


_CONFIG = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_head": 2, "n_embd": 8,
           "n_positions": 16, "vocab_size": 32, "attn_pdrop": 0.1, "activation_function": "gelu_new",
           "bos_token_id": 1, "eos_token_id": 1}
_DEEPSPEED = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
              "wall_clock_breakdown": False, "flops_profiler": {
                  "enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True}}


def use_profile(found: Profile) -> None:
    """Every view and file of a profile but the slow ones."""
    for view in (found.summary, found.table, found.module_tree, found.to_json, found.to_networkx, found.fits,
                 found.to_chrome_trace, found.to_memory_snapshot, repr_of(found)):
        view()


def repr_of(found: object) -> Callable[[], str]:
    return lambda: repr(found)


def use_ranks(table: RankTable) -> None:
    table.render()
    table.to_json()


def use_plan(plan: Plan) -> None:
    str(plan)


def use_device(device: Any) -> None:
    found = profile(Net(), args=(torch.ones(4, 8),), mode="infer", device=device)
    found.summary()
    found.to_json()


def _check(path: Path) -> object:
    return format_check(check_profile(profile_net(), Profile.from_json(path)))


def _is_free(place: Place) -> bool:
    """What is of a user's own making, any names among it, or a figure that follows from others."""
    is_moment = "start_seconds" in place or place[:1] == ("timeline",) and place[-1] in (0, 5)  # a call, or its name
    is_own = any(key in place for key in ("extra", "options", "derived", "region", "values"))
    return is_moment or is_own or place == ("peak_by_category",) or place[-2:-1] in (
        ("parameters",), ("peak_by_category",), ("inputs",), ("phases",), ("first_step",), ("mesh",))


def _is_free_of_ranks(place: Place) -> bool:
    # a rank that was not run has no profile, and the first version no number
    return _is_free(place) or place in (("profiles", "0"), ("version",))


def _is_of_profile(place: Place) -> bool:
    return place[:1] == ("profiles",) and len(place) > 2


def _is_constant(place: Place) -> bool:
    """A constant of a kernel's model, any of which may be negative."""
    return "calibration" in place


def _calibrate(path: Path) -> object:
    """The file of an earlier call is read; nothing more is measured."""
    with contextlib.suppress(KeyboardInterrupt):
        return calibrate(path, "cuda", quick=True, bench=_stop, like=find_device("a10"))
    return None


def _stop(point: Point) -> float | None:
    raise KeyboardInterrupt


def _sweep(path: Path) -> object:
    return sweep(lambda: Net(), {"batch": 2, "mode": "infer"}, inputs=["{batch}x8"], workers=0, resume=path)


_READERS: dict[str, Callable[[Path], Reader]] = {
    "saved profile": _profile_reader, "baseline of check": _check_reader, "table of ranks": _ranks_reader,
    "files of view": _view_reader, "saved generation": _generation_reader, "plan": _plan_reader,
    "device": _device_reader, "cluster": _cluster_reader, "calibration": _calibration_reader,
    "rows of a sweep": _sweep_reader, "config of a model": _config_reader,
    "configuration of DeepSpeed": _deepspeed_reader}

"""Everything that reads a file or a text from outside, each with what it accepts and a way to read it."""
from __future__ import annotations

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
from analyzer.hardware.device_spec import read_device
from analyzer.parallel import list_actions
from analyzer.parallel.pipeline_timeline import join_timeline
from analyzer.parallel.rank_row import StageCost, describe_rank
from analyzer.parallel.rank_table import RankTable
from analyzer.report.check import check_profile, format_check
from analyzer.show import write_view
from analyzer.tools.generation import GenerationProfile, profile_generate
from analyzer.tools.solver import Plan, Planner
from analyzer.zoo.target import load_target
from benchmarks.fuzz.hostile_json import Path as Place


class Reader(NamedTuple):
    """A reader: ``make`` writes a valid file's text, in a folder for what it is made of, ``read`` takes a path and
    returns what is there; ``use`` looks at it in every way.
    """

    name: str
    make: Callable[[Path], str]
    read: Callable[[Path], Any]
    use: Callable[[Any], object] = repr
    loose: Callable[[Place], bool] = lambda place: False  #: any value there may be right
    is_partial: bool = False  #: fields may be left out
    repeats: str = "hostile"  #: what its errors repeat: the file, or the section that they are about
    skips: Callable[[Place], bool] = lambda place: False  #: what another reader is tried with
    takes: tuple[str, ...] = ()  #: names of damaged texts that are right ones here
    sample: str = ""  #: what ``make`` gave


class Net(nn.Module):  # two layers: what a saved profile of it holds is of every kind and little
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act = nn.Linear(8, 16), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.act(self.first(x))
        return hidden


def list_readers(folder: Path, names: Collection[str] = ()) -> list[Reader]:
    """The readers of these names, else all, each with its sample."""
    return [reader._replace(sample=reader.make(folder)) for reader in READERS if not names or reader.name in names]


@cache
def profile_net() -> Profile:
    return profile(Net(), args=(torch.ones(4, 8),), optimizer="sgd", device="h100")


def _make_ranks(folder: Path) -> str:
    timeline = join_timeline(list_actions("1F1B", ranks=2, micro_batches=2), [StageCost(1.0, 2.0)] * 2)
    found = profile_net()
    rows = describe_rank(found, 0, (0,), "stage 1 of 2"), describe_rank(found, 1, (1,), "stage 2 of 2")
    return RankTable(2, rows, timeline, ("none",), {0: found}).to_json()


def _make_generation(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    return profile_generate(load_target(f"hf:{folder / 'config.json'}").build, 4, 3, batch_size=1).to_json()


def _make_plan(folder: Path) -> str:
    x = torch.ones(4, 8)
    model = nn.Sequential(*[Net() if i % 2 else nn.Linear(16 if i else 8, 8) for i in range(4)])
    return Planner(symbolic_trace(model, meta_args={"input": x}), (x,)).solve(0.9).to_json()


_CONFIG = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_head": 2, "n_embd": 8,
           "n_positions": 16, "vocab_size": 32, "attn_pdrop": 0.1, "activation_function": "gelu_new",
           "bos_token_id": 1, "eos_token_id": 1}
_DEEPSPEED = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
              "wall_clock_breakdown": False, "flops_profiler": {
                  "enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True}}


def use_profile(found: Profile) -> None:  # every view and file of a profile but the slow ones
    for view in (found.summary, found.table, found.module_tree, found.to_json, found.to_networkx, found.fits,
                 found.to_chrome_trace, found.to_memory_snapshot, lambda: repr(found)):
        view()


def use_device(device: Any) -> None:
    found = profile(Net(), args=(torch.ones(4, 8),), mode="infer", device=device)
    found.summary()
    found.to_json()


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


def _is_constant(place: Place) -> bool:  # a constant of a kernel's model, any of which may be negative
    return "calibration" in place


READERS = (
    Reader("saved profile", lambda _: profile_net().to_json(), Profile.from_json, use_profile, loose=_is_free),
    Reader("baseline of check", lambda _: profile_net().to_json(),
           lambda path: format_check(check_profile(profile_net(), Profile.from_json(path))), loose=_is_free,
           skips=lambda place: len(place) > 1),
    Reader("table of ranks", _make_ranks, RankTable.from_json, lambda table: (table.render(), table.to_json()),
           loose=_is_free_of_ranks, skips=_is_of_profile),
    Reader("files of view", _make_ranks, lambda path: write_view([path]), loose=_is_free_of_ranks,
           skips=_is_of_profile),
    Reader("saved generation", _make_generation, GenerationProfile.from_json, lambda found: found.summary(),
           loose=lambda place: _is_free(place[1:])),  # a profile of the prompt, and one of a token
    Reader("plan", _make_plan, Plan.from_json, str),
    Reader("device", lambda _: json.dumps(find_device("a100_40gb").to_dict()), read_device, use_device,
           is_partial=True, loose=_is_constant),
    Reader("cluster", lambda _: json.dumps(find_cluster("dgx_h100").to_dict()), lambda path: find_cluster(str(path)),
           lambda cluster: list(cluster.figures()), is_partial=True, loose=_is_constant),
    Reader("config of a model", lambda _: json.dumps(_CONFIG), lambda path: load_target(f"hf:{path}"),
           loose=lambda place: True),
    Reader("configuration of DeepSpeed", lambda _: json.dumps(_DEEPSPEED),
           lambda path: profile_with_config(Net(), path),
           loose=lambda place: "flops_profiler" not in place or place[-1] == "module_depth", is_partial=True,
           repeats="", takes=("500 objects", "500 lists in a field", "only '{}'")))  # what is there is others'

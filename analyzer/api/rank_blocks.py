"""Blocks of a rank's model, a few of which are run for all that are alike."""
from __future__ import annotations

import torch

from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.record.log import Log
from analyzer.record.recorder import Recorder
from analyzer.record.tensor_walk import walk_modules
from analyzer.replay.chain import Chain
from analyzer.replay.match import NotRepeated
from analyzer.replay.placing import Before
from analyzer.replay.repeated_step import chains_of, write_repeated
from analyzer.replay.short_run import ShortRun
from analyzer.results.info import ReplayInfo

#: FSDP gathers in the backward pass of a block what the block two places before it needs
_REACH = 2
_ENDS = 3      # blocks that are run at each end of a chain
_FEWEST = 10   # of fewer, running all takes no longer than looking at what some do
NO_CHAIN = f"no {_FEWEST} neighbours in one of its lists of modules are alike"


def find_chains(module: torch.nn.Module) -> list[Chain]:
    """The chains of a module that are long enough."""
    with without_modes():  # objects may say by an operator on tensors whether they are equal
        # compiled, the first block makes less than others do, and what it makes is seen from the third
        return [chain._replace(head=_ENDS + any(map(_is_compiled, chain.modules[0])), tail=_ENDS)
                for chain in chains_of(walk_modules(module)) if len(chain.blocks) >= _FEWEST]


def _is_compiled(module: torch.nn.Module) -> bool:
    return module._compiled_call_impl is not None


class RankBlocks:
    """Chains of a rank's model in a run that begins: ``short_run`` runs a few blocks of each, ``before`` is the memory
    in which the log of all is placed.
    """

    def __init__(self, recorder: Recorder, chains: list[Chain]) -> None:
        self.before = Before.of(recorder)
        self.short_run = ShortRun(recorder, chains, reach=_REACH, takes_streams=True)

    def list_rows(self) -> list[ReplayInfo]:
        """What became of each block that need not run."""
        return [ReplayInfo(path, "block", type(block).__name__, run.refusal is None, run.refusal)
                for run in self.short_run.runs for place, members in enumerate(run.chain.members)
                if run.refusal is not None or place in run.chain.skipped for path, block in members]

    def write_log(self) -> Log:
        """The log of a run of all blocks. Raises NotRepeated."""
        if (reason := self.short_run.why_not_written()) is not None:
            raise NotRepeated(reason)
        return write_repeated(self.short_run, self.before)[1]

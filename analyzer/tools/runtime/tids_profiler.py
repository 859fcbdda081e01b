"""`TIDSProfiler`: the interface of ruipeterpan/torch_profiler, which shows latency and shapes together."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from analyzer.report.compat.torchinfo import tids_report
from analyzer.report.module_tree import first_shape
from analyzer.results.info import ModuleInfo
from analyzer.results.node_info import TensorInfo
from analyzer.results.profile import Profile

from .flops_profiler import FlopsProfiler


@dataclass(frozen=True)
class ModuleProfile:
    """One module and those below it, a line of text for each; latencies are in milliseconds, shares of the model."""

    name: str
    type: str
    depth: int
    num_params: int | None
    num_params_pctg: float | None
    input_shape: list[int] | None
    output_shape: list[int] | None
    input_elem_bytes: int | None
    output_elem_bytes: int | None
    fwd_latency: float | None
    fwd_latency_pctg: float | None
    macs: int | None
    macs_pctg: float | None
    fwd_flops: int | None
    fwd_flops_pctg: float | None
    children: list[ModuleProfile]
    profile: Profile = field(repr=False)

    def __str__(self) -> str:
        return tids_report(self.profile) + "\n"


class TIDSProfiler(FlopsProfiler):
    """Measures what a model does between `start_profile` and `generate_profile`.

    >>> import torch
    >>> prof = TIDSProfiler(torch.nn.Sequential(torch.nn.Linear(4, 2)))
    >>> prof.start_profile()
    >>> out = prof.model(torch.rand(3, 4))
    >>> profile = prof.generate_profile()
    >>> profile.type, profile.num_params, profile.output_shape, profile.children[0].fwd_flops
    ('Sequential', 10, [3, 2], 48)
    >>> prof.end_profile()
    """

    def generate_profile(self) -> ModuleProfile:
        """What was measured so far, module by module. Raises InputError where nothing was."""
        return _describe(self._root, self._root, "model", self.profile)


def _describe(module: ModuleInfo, root: ModuleInfo, name: str, profile: Profile) -> ModuleProfile:
    seconds = module.fwd_seconds
    return ModuleProfile(name, module.type, module.depth, module.params, _share(module.params, root.params),
                         first_shape(module.inputs), first_shape(module.outputs), _element_bytes(module.inputs),
                         _element_bytes(module.outputs), None if seconds is None else 1000 * seconds,
                         _share(seconds, root.fwd_seconds), module.fwd_macs, _share(module.fwd_macs, root.fwd_macs),
                         module.fwd_flops, _share(module.fwd_flops, root.fwd_flops),
                         [_describe(child, root, child.path.rpartition(".")[2], profile) for child in module.children],
                         replace(profile, modules=module))


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else 100 * part / whole


def _element_bytes(tensors: Sequence[TensorInfo]) -> int | None:
    return tensors[0].nbytes // tensors[0].numel if tensors and tensors[0].numel else None

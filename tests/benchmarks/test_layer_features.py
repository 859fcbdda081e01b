"""What models do besides calling layers: each profiles in both modes, and its trace gives its results and gradients."""
import functools

import pytest
import torch

from analyzer import profile
from analyzer.record.options import ProfileOptions
from benchmarks.coverage.check import Case, check_case
from benchmarks.coverage.layers import layer_cases

NAMES = """
mixture of experts (routed by nonzero)|mixture of experts (routed by counts)|sizes that only data gives
custom operator|Triton operator|torch.compile'd function|torch.jit.script'ed function
torch.jit.script'ed submodule with weights|shared and tied modules|parametrization of one's own|spectral norm
weight norm (old)|hooks of all kinds|buffers changed in forward|layer drop (Python's generator)|stochastic depth
rotary embedding by complex numbers|Embedding(sparse gradient)|weights in int8|product in int8|product in float8
quantised layers|simulated quantisation|nested tensors (attention)|flex_attention (block mask)
torch.func.functional_call, jvp and vmap of a module|DataParallel
"""


@functools.cache
def cases() -> dict[str, Case]:
    return {case.name.removeprefix("torch.nn:"): case for case in layer_cases()}


@pytest.mark.sweep(9)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES.strip().replace("\n", "|").split("|"))
def test_profiles_and_traces(name):
    row = check_case(cases()[name])
    assert "unusable" not in row, row["unusable"]
    # PyTorch has no backward for it on a host
    steps = {"infer", "trace"} if name.startswith("flex") else {"train", "infer", "trace"}
    assert {step: row[step] for step in steps} == dict.fromkeys(steps, "pass")


# Each token goes to 2 of 4 experts: the policy says how many each of them gets.
@pytest.mark.parametrize(("policy", "tokens"), [("balanced", 8), ("worst", 32), (5, 5)])
def test_the_policy_for_unknown_sizes_is_named_and_decides_what_experts_cost(policy, tokens):
    model = cases()["mixture of experts (routed by nonzero)"].candidates()[0].build()
    p = profile(model, args=(torch.rand(16, 8),), mode="infer", options=ProfileOptions(unknown_size=policy))
    experts = next(m for m in p.modules.walk() if m.path == "block.experts")
    assert experts.fwd_macs == 4 * tokens * 8 * 8
    name = {"balanced": "balanced", "worst": "worst case", 5: "the bound given"}[policy]
    assert any(f"({name})" in a and "layer_features.py" in a for a in p.assumptions)

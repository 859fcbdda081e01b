"""Liger's kernels under a dry run: scores of all tokens are never there, and gradients of the head are made forward."""
import importlib.util
import textwrap

import pytest

from analyzer import Profile
from analyzer.tools.dryrun.script import dry_run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is not None, reason="liger_kernel is there")

SCRIPT = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=8192, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()
if sys.argv[1] == "liger":
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    apply_liger_kernel_to_llama(model=model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ids = torch.randint(0, 8192, (4, 128), device="cuda")
model(input_ids=ids, labels=ids).loss.backward()
optimizer.step()
"""
ROWS, HEAD = 4 * 128, 8192 * 256


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Profile]:
    path = tmp_path_factory.mktemp("liger") / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    found = {name: dry_run(path, [name], device="h100", steps=1) for name in ("liger", "plain")}
    for run in found.values():
        assert run.error is None, run.format_error()
    return {name: run.profile for name, run in found.items()}


def test_products_of_the_head_are_all_in_the_forward_pass(profiles: dict[str, Profile]) -> None:
    liger, plain = profiles["liger"], profiles["plain"]
    assert liger.fwd_macs - plain.fwd_macs == plain.bwd_macs - liger.bwd_macs == 2 * ROWS * HEAD
    assert any(text.startswith("liger_kernel: a stand-in") for text in liger.assumptions)
    assert not any("liger" in text for text in plain.assumptions)


def test_scores_of_all_rows_are_never_there(profiles: dict[str, Profile]) -> None:
    """Vocabulary / channels is 32, so 16 rows at a time. Plain, they are there in 32 bits at least, while it has
    the head's gradient already.
    """
    less = profiles["plain"].peak_allocated_bytes - profiles["liger"].peak_allocated_bytes
    assert less > ROWS * 8192 * 4 - HEAD * 2
    chunk, = [row for row in profiles["liger"].operators if row.operator == "aten.addmm_.default"]
    assert (chunk.calls, chunk.macs) == (ROWS // 16, ROWS * HEAD)

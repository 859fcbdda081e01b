"""FlashAttention's package under a dry run: its kernels by hand from their shapes, and nothing of it left behind."""
import importlib.util
import textwrap
from pathlib import Path

import pytest
from transformers.utils import import_utils

from analyzer.tools.dryrun.script import DryRun, dry_run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash_attn is installed")

HEAD = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, attn_implementation="flash_attention_{version}")
model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ids = torch.randint(0, 512, (4, 128), device="cuda")
"""


def _run(tmp_path: Path, text: str, version: int = 2) -> DryRun:
    path = tmp_path / "script.py"
    path.write_text(HEAD.replace("{version}", str(version)) + textwrap.dedent(text))
    found = dry_run(path, device="h100", steps=1)
    assert found.error is None, found.format_error()
    return found


@pytest.mark.parametrize("version", [2, 3])
def test_a_model_of_transformers(tmp_path: Path, version: int) -> None:
    """Products of 4 texts x 4 heads x 128 x 128 pairs x 64 channels, twice forward and five times backward, a layer."""
    found = _run(tmp_path, """
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        """, version).profile
    rows = {row.operator: row for row in found.operators}
    pairs = 2 * 4 * 4 * 128 * 128 * 64
    assert rows["aten._flash_attention_forward.default"].macs == 2 * pairs
    assert rows["aten._flash_attention_backward.default"].macs == 5 * pairs
    assert sum("flash_attn: a stand-in for version" in text for text in found.assumptions) == 1
    assert not import_utils.is_flash_attn_2_available() and not import_utils.is_flash_attn_3_available()
    assert "flash_attn" not in import_utils.PACKAGE_DISTRIBUTION_MAPPING
    from transformers import modeling_flash_attention_utils as own

    assert own._loaded_implementation is None and own._flash_fn is None


def test_packed_texts(tmp_path: Path) -> None:
    """Of 300 tokens with grouped queries: gradients of keys and values a query head each are held while it runs, and
    row sums and the query's gradient in 32 bits of 300 tokens and 128 for each of three texts.
    """
    found = _run(tmp_path, """
        from flash_attn import flash_attn_varlen_func
        class Packed(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(64, device="cuda", dtype=torch.bfloat16))
            def forward(self, q, k):
                starts = torch.tensor([0, 100, 180, 300], dtype=torch.int32, device="cuda")
                return flash_attn_varlen_func(q * self.scale, k * self.scale, k, starts, starts, 120, 120, causal=True)
        packed = Packed()
        del model
        optimizer = torch.optim.SGD(packed.parameters(), lr=0.1)
        q, k = (torch.randn(300, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2))
        packed(q, k).sum().backward()
        optimizer.step()
        """).profile
    backward, = [row for row in found.operators if row.operator == "aten._flash_attention_backward.default"]
    rows = 300 + 3 * 128
    held = 8 * rows * 4 + rows * 8 * 64 * 4 + 2 * (300 * 8 * 64 * 2)
    assert backward.calls == 1
    assert found.peak_by_category["workspace"] == pytest.approx(held, rel=0.01)


def test_padding_is_not_taken_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _run(tmp_path, """
        from flash_attn.bert_padding import pad_input, unpad_input
        x = torch.randn(4, 128, 8, device="cuda")
        rows, indices, starts, longest, used = unpad_input(x, torch.randint(0, 2, (4, 128), device="cuda"))
        print(tuple(rows.shape), tuple(starts.shape), longest, tuple(used.shape))
        print(tuple(pad_input(rows, indices, 4, 128).shape))
        """)
    assert capsys.readouterr().out.splitlines() == ["(512, 8) (5,) 128 (4,)", "(4, 128, 8)"]
    assert any("masks of padding have no data" in text for text in found.profile.assumptions)

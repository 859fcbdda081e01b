"""generate() by prefill and decoding."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from analyzer.errors import InputError
from analyzer.runtime import get_model_profile, measure_generate
from tests.runtime.conftest import Busy

PROMPT, NEW = 6, 5


@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                      vocab_size=40, pad_token_id=0, eos_token_id=None)
    return transformers.LlamaForCausalLM(config).eval()


def arguments():
    return {"input_ids": torch.ones(2, PROMPT, dtype=torch.int64), "max_new_tokens": NEW, "do_sample": False}


def weights_of_a_token():
    """Of two layers: queries and outputs, keys and values, the three products of the MLP."""
    return 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)


def test_prefill_reads_the_prompt_and_each_token_reads_one_more(llama):
    found = measure_generate(llama, kwargs=arguments())
    assert found.decode_steps == NEW - 1
    head, rope = 2 * 32 * 40, 2 * 4  # only the last token meets the vocabulary; the angles of 4 frequencies
    attended = 2 * 2 * 2 * 32 * PROMPT * PROMPT  # two layers, two products, two sequences
    assert found.prefill.fwd_macs == 2 * PROMPT * weights_of_a_token() + attended + head + rope * PROMPT
    last = PROMPT + NEW - 1  # keys in the cache at the last token
    assert found.decode.fwd_macs == 2 * weights_of_a_token() + 2 * 2 * 2 * 32 * last + head + rope
    assert found.whole.modules.calls == NEW and found.decode.modules.calls == 1
    assert found.whole.fwd_seconds == pytest.approx(found.prefill.fwd_seconds + found.decode_seconds)
    assert found.steps_per_second == pytest.approx(1 / found.decode.fwd_seconds)
    for p in (found.prefill, found.decode, found.whole):
        assert p.modules.fwd_seconds == pytest.approx(p.fwd_seconds)
    assert found.decode.measured_steps == NEW - 1


def test_the_parts_of_a_generation_add_up_to_all_of_it(stream):
    class Writer(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.part = Busy(stream, 20, 0), Busy(stream, 0, 0)

        def forward(self, x):
            self.part.fwd = len(x)
            return torch.cat([x, self.part(x)[-1:]])

        def write(self, x, count):
            self.encoder(x)
            for _ in range(count):
                stream.work(1000)  # choosing a token is none of the model's
                x = self(x)
            return x

    found = measure_generate(Writer(), (torch.ones(3), 4), method="write", clock=stream.clock())
    assert (found.prefill.fwd_seconds, found.decode.fwd_seconds, found.whole.fwd_seconds) == pytest.approx((0.023, 0.005, 0.038))
    assert found.decode.modules.children[1].fwd_flops == 2 * 6  # of the last one, of six elements
    lines = [line.split() for line in found.summary().splitlines()]
    assert (lines[2][:2], lines[3][:4], lines[5][:2]) == (["prefill", "1"], ["decode,", "a", "token", "3"], ["200.00", "tokens"])


def test_one_pass_has_no_decoding(llama):
    found = measure_generate(llama, kwargs={**arguments(), "max_new_tokens": 1})
    assert found.decode is None and found.decode_steps == 0 and found.steps_per_second is None
    assert "decode" not in found.summary()


@pytest.mark.parametrize("way", [{"mode": "generate"}, {"func_name": "generate"}])
def test_get_model_profile_of_generate_counts_all_passes_and_tells_them_apart(llama, way, capsys, tmp_path):
    flops, macs, params = get_model_profile(llama, kwargs=arguments(), as_string=False, detailed=False, **way)
    printed = capsys.readouterr().out
    assert macs == measure_generate(llama, kwargs=arguments()).whole.fwd_macs
    assert params == sum(p.numel() for p in llama.parameters())
    assert "prefill" in printed and "tokens a second" in printed and printed.index("fwd MACs per device") < printed.index("prefill")
    get_model_profile(llama, kwargs=arguments(), output_file=str(tmp_path / "r.txt"), warm_up=0, **way)
    assert "tokens a second" in (tmp_path / "r.txt").read_text() and capsys.readouterr().out == ""


def test_errors_repeat_what_was_given():
    with pytest.raises(InputError, match="method='generate'.*Linear has no such method"):
        measure_generate(nn.Linear(2, 2))
    with pytest.raises(InputError, match="never called Linear itself"):
        measure_generate(nn.Linear(2, 2), (True,), method="zero_grad")

"""generate() by prefill and decoding."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec
from analyzer.tools.generation import profile_generate
from analyzer.tools.runtime import get_model_profile, measure_generate
from tests.runtime.conftest import Busy

PROMPT, NEW = 6, 5


@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, vocab_size=40, pad_token_id=0, eos_token_id=None)
    return transformers.LlamaForCausalLM(config).eval()


def arguments():
    return {"input_ids": torch.ones(2, PROMPT, dtype=torch.int64), "max_new_tokens": NEW, "do_sample": False}


def weights_of_a_token():
    """Of two layers: queries and outputs, keys and values, the three products of the MLP."""
    return 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)


def test_prefill_reads_the_prompt_and_each_token_reads_one_more(llama):
    found = measure_generate(llama, kwargs=arguments())
    head, rope = 2 * 32 * 40, 2 * 4  # only the last token meets the vocabulary; the angles of 4 frequencies
    attended = 2 * 2 * 2 * 32  # two layers, two products, two sequences: of each token and key
    expected = [2 * PROMPT * weights_of_a_token() + attended * PROMPT**2 + head + rope * PROMPT]
    expected += [2 * weights_of_a_token() + attended * keys + head + rope for keys in range(PROMPT + 1, PROMPT + NEW)]
    assert [step.macs for step in found.steps] == expected
    assert (found.prefill.fwd_macs, found.decode.fwd_macs) == (expected[0], expected[-1])
    assert [step.tokens for step in found.steps] == [PROMPT, 1, 1, 1, 1]
    assert [step.context_tokens for step in found.steps] == list(range(PROMPT, PROMPT + NEW))
    # keys and values of 2 heads of 8 channels, in two layers and two sequences
    assert [step.cache_bytes
            for step in found.steps] == [2 * 2 * 2 * 2 * 8 * 4 * keys for keys in range(PROMPT, PROMPT + NEW)]
    assert (found.cache, found.batch_size, found.prompt_tokens, found.new_tokens) == ("dynamic", 2, PROMPT, NEW)
    assert found.seconds == pytest.approx(found.prefill.fwd_seconds + (NEW - 1) * found.decode.fwd_seconds)
    assert all(0 < step.seconds < found.seconds for step in found.steps)
    for p in (found.prefill, found.decode):
        assert p.modules.fwd_seconds == pytest.approx(p.fwd_seconds) and p.modules.calls == 1
    assert (found.prefill.measured_steps, found.decode.measured_steps) == (1, NEW - 1)
    assert type(found).from_json(found.to_json()).steps == found.steps


def test_counts_of_a_generation_are_those_predicted(llama):
    measured = measure_generate(llama, kwargs={**arguments(), "input_ids": torch.ones(1, PROMPT, dtype=torch.int64)})
    predicted = profile_generate(llama, PROMPT, NEW, batch_size=1, device=DeviceSpec("host", kind="cpu"))
    rows = [[(s.index, s.tokens, s.context_tokens, s.cache_bytes, s.macs) for s in p.steps]
            for p in (measured, predicted)]
    assert rows[0] == rows[1]


def test_the_time_of_each_pass_is_its_own_and_what_runs_between_is_nobodys(stream):
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
    assert [step.seconds for step in found.steps] == pytest.approx([0.023, 0.004, 0.005, 0.006])
    assert (found.prefill.fwd_seconds, found.decode.fwd_seconds, found.seconds) == pytest.approx((0.023, 0.005, 0.038))
    assert found.decode.modules.children[1].fwd_flops == 2 * 6  # of the last one, of six elements
    assert (found.cache, found.cache_bytes) == ("none", None)


def test_an_encoder_is_part_of_the_prefill():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2, vocab_size=30,
                                   decoder_start_token_id=0, pad_token_id=0, eos_token_id=None)
    model = transformers.T5ForConditionalGeneration(config).eval()
    found = measure_generate(model, (torch.ones(1, 7, dtype=torch.int64),), {"max_new_tokens": 3, "do_sample": False})
    parts = [{m.path: m.fwd_macs for m in p.modules.children} for p in (found.prefill, found.decode)]
    assert parts[0]["encoder"] > 0 and parts[1]["encoder"] == 0 and parts[1]["decoder"] > 0
    assert (found.prompt_tokens, [step.tokens for step in found.steps]) == (7, [1, 1, 1])


def test_one_pass_has_no_decoding(llama):
    found = measure_generate(llama, kwargs={**arguments(), "max_new_tokens": 1})
    assert found.decode is None and found.new_tokens == 1 and found.decode_seconds == 0


@pytest.mark.parametrize("way", [{"mode": "generate"}, {"func_name": "generate"}])
def test_get_model_profile_of_generate_counts_all_passes_and_tells_them_apart(llama, way, capsys, tmp_path):
    flops, macs, params = get_model_profile(llama, kwargs=arguments(), as_string=False, detailed=False, **way)
    printed = capsys.readouterr().out
    assert macs == sum(step.macs for step in measure_generate(llama, kwargs=arguments()).steps)
    assert params == sum(p.numel() for p in llama.parameters())
    assert "prefill" in printed and "new tokens a second" in printed and printed.index(
        "fwd MACs per device") < printed.index("prefill")
    get_model_profile(llama, kwargs=arguments(), output_file=str(tmp_path / "r.txt"), warm_up=0, **way)
    assert "tokens a second" in (tmp_path / "r.txt").read_text() and capsys.readouterr().out == ""


def test_errors_repeat_what_was_given():
    with pytest.raises(InputError, match="method='generate'.*Linear has no such method"):
        measure_generate(nn.Linear(2, 2))
    with pytest.raises(InputError, match="never called Linear itself"):
        measure_generate(nn.Linear(2, 2), (True,), method="zero_grad")

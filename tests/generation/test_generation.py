"""Predicted generation: the cache's growth to the byte, passes between those that were run, real runs on the CPU,
errors.
"""
import json
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from analyzer import ProfileOptions, profile
from analyzer.cli import main
from analyzer.errors import AnalyzerError, InputError
from analyzer.tools.generation import GenerationProfile, profile_generate
from analyzer.tools.generation.decoder import tensors_kept
from analyzer.zoo.causal_lm import KeyValueCache
from analyzer.zoo.gpt2 import GPT2
from analyzer.zoo.llama import Llama, LlamaConfig

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100
}


def gpt2():
    return GPT2(vocabulary=100, positions=64, hidden=32, layers=2, heads=4)


def llama():
    return Llama(LlamaConfig(**SMALL))


def transformers_model(name, **options):
    transformers = pytest.importorskip("transformers")
    config, _, head = name.partition(":")
    return lambda: getattr(transformers, head or f"{config}ForCausalLM")(getattr(transformers, f"{config}Config")
                                                                         (**options))


T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 100}


def kept_bytes(channels, tokens, layers=2, width=4, batch=2):
    return 2 * layers * channels * width * tokens * batch  # keys and values


@pytest.mark.parametrize(("build", "channels"), [(gpt2, 32), (llama, 16), ("Llama", 16), ("GPT2", 32)],
                         ids=["gpt2", "llama", "hf llama", "hf gpt2"])
def test_cache_grows_by_keys_and_values_of_a_token(build, channels):
    if isinstance(build, str):
        options = SMALL if build == "Llama" else {
            "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2
        }
        build = transformers_model(build + ("" if build == "Llama" else ":GPT2LMHeadModel"), **options)
    p = profile_generate(build, 7, 5, batch_size=2, samples=None)
    assert [(s.index, s.tokens, s.context_tokens, s.cache_bytes) for s in p.steps] == [
        (i, 7 if i == 0 else 1, 7 + i, kept_bytes(channels, 7 + i)) for i in range(5)]
    assert not any(s.interpolated for s in p.steps)
    grown = [b.flops - a.flops for a, b in zip(p.steps[1:], p.steps[2:])]
    assert len(set(grown)) == 1 and grown[0] > 0  # each token attends to one more
    assert p.prefill.modules.fwd_flops <= p.steps[0].flops and p.decode.batch_size == 2


def test_static_cache_takes_room_for_all_at_once():
    p = profile_generate(llama, 7, 5, cache="static", batch_size=2, samples=None)
    assert {s.cache_bytes for s in p.steps} == {kept_bytes(16, 12)}
    assert p.steps[1].allocated_bytes == p.steps[-1].allocated_bytes


def test_prefill_is_a_forward_pass_without_gradients():
    p = profile_generate(gpt2, 16, 1)
    plain = profile(gpt2, args=(torch.ones(1, 16, dtype=torch.int64),), mode="infer")
    assert (p.decode, len(p.steps)) == (None, 1)
    # the choice of the next token
    assert p.steps[0].macs == plain.fwd_macs and p.steps[0].flops - plain.fwd_flops < 100 * 16 * 3


def test_straight_lines_meet_what_is_run():
    some, every = (profile_generate(gpt2, 5, 30, samples=samples) for samples in (3, None))
    assert [s.interpolated for s in some.steps].count(False) == 4
    for name in ("index", "tokens", "context_tokens", "cache_bytes", "flops", "macs", "read_bytes", "written_bytes"):
        assert [getattr(s, name) for s in some.steps] == [getattr(s, name) for s in every.steps], name
    assert some.seconds == pytest.approx(every.seconds, rel=1e-9)
    assert some.steps[-1].allocated_bytes == every.steps[-1].allocated_bytes
    # between, blocks are rounded up to 512 bytes, of each of 4 tensors
    assert all(abs(a.allocated_bytes - b.allocated_bytes) <= 4 * 512 for a, b in zip(some.steps, every.steps))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_lines_bend_where_a_window_is_full(cache):
    build = transformers_model("Mistral", sliding_window=12, **SMALL)
    some, every = (profile_generate(build, 8, 20, cache=cache, samples=samples) for samples in (2, None))
    assert [(s.flops, s.cache_bytes, s.read_bytes) for s in some.steps] == [(s.flops, s.cache_bytes, s.read_bytes)
                                                                            for s in every.steps]
    assert any(s.interpolated for s in some.steps)


@pytest.mark.parametrize(("name", "options"), [
    ("T5:T5ForConditionalGeneration", T5), ("Mamba", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 100})])
def test_other_kinds_of_models(name, options):
    p = profile_generate(transformers_model(name, **options), 9, 4, samples=None)
    assert p.seconds and p.flops and all(s.cache_bytes for s in p.steps)
    grown = [b.cache_bytes - a.cache_bytes for a, b in zip(p.steps[1:], p.steps[2:])]
    # a state of one size; the decoder's own attention
    assert set(grown) == ({0} if name == "Mamba" else {kept_bytes(32, 1, batch=1)})


WHISPER = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 100, "encoder_attention_heads": 4,
           "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8,
           "max_source_positions": 50, "max_target_positions": 20, "pad_token_id": 0, "bos_token_id": 1,
           "eos_token_id": 2, "decoder_start_token_id": 3}


def assert_passes_are_real(build, prompt):
    """Multiply-adds and cache of each pass are those that `generate()` has on this CPU."""
    model, real = build().eval(), []

    def take(module, args, output):
        real.append((counted.get_total_flops() // 2, sum(t.nbytes for t in tensors_kept(output.past_key_values))))

    handle = model.register_forward_hook(take)
    # torch's counter knows no fused attention of the CPU
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        model.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    handle.remove()
    predicted = profile_generate(model, prompt.shape[1], 4, batch_size=2, device="cpu", samples=None)
    assert list(accumulate(step.macs for step in predicted.steps)) == [macs for macs, _ in real]
    assert [step.cache_bytes for step in predicted.steps] == [nbytes for _, nbytes in real]


def test_speech_is_read_by_the_encoder():
    build = transformers_model("Whisper:WhisperForConditionalGeneration", **WHISPER)
    dynamic, static = (profile_generate(build, new_tokens=5, prompt=torch.zeros(1, 8, 100), cache=cache, samples=None)
                       for cache in ("dynamic", "static"))
    assert dynamic.prompt_tokens == 100
    crossed = kept_bytes(32, 50, batch=1)  # a convolution halves the 100 frames
    assert [s.cache_bytes - crossed for s in dynamic.steps] == [kept_bytes(32, 1 + i, batch=1) for i in range(5)]
    # and how much of it is filled
    assert {s.cache_bytes - crossed for s in static.steps} == {kept_bytes(32, 6, batch=1) + 2 * 8}


def test_a_speech_model_reads_spectrograms_of_its_own_length(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"],
                                  **WHISPER}))
    command = ["generate", f"hf:{config}", "--new-tokens", "5", "--batch", "2"]
    assert main([*command, "--json", str(tmp_path / "p.json")]) == 0
    assert "the prompt is a spectrogram of 100 frames with 8 channels" in capsys.readouterr().out
    p = GenerationProfile.from_json(tmp_path / "p.json")
    build = transformers_model("Whisper:WhisperForConditionalGeneration", **WHISPER)
    expected = profile_generate(build, new_tokens=5, prompt=torch.zeros(2, 8, 100))
    assert p.prompt_tokens == 100 and p.steps == expected.steps
    assert_passes_are_real(build, torch.zeros(2, 8, 100))
    assert main([*command, "--dtype", "bf16"]) == 0
    capsys.readouterr()
    assert main(["generate", f"hf:{config}", "--new-tokens", "21"]) == 2  # the first is read after the start
    assert "WhisperForConditionalGeneration has 20 positions, and together these take 21" in capsys.readouterr().err


def test_an_encoder_of_images_needs_its_prompt():
    class Captioner(nn.Linear):
        main_input_name, config = "pixel_values", SimpleNamespace(is_encoder_decoder=True)

    with pytest.raises(InputError, match=r"its encoder reads pixel_values, not tokens; .* prompt="):
        profile_generate(Captioner(4, 4))


@pytest.mark.parametrize(("name", "options"), [
    ("Llama", SMALL), ("T5:T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0, "pad_token_id": 0})])
def test_passes_are_those_of_a_real_generation(name, options):
    assert_passes_are_real(transformers_model(name, **options), torch.randint(3, 100, (2, 9)))


def test_a_cache_changes_no_result():
    torch.manual_seed(0)
    for model in (gpt2().eval(), llama().eval()):
        ids = torch.randint(100, (2, 9))
        for cache in (KeyValueCache(), KeyValueCache(max_tokens=9)):
            with torch.no_grad():
                parts = [model(ids[:, start:end], cache=cache) for start, end in ((0, 5), (5, 6), (6, 9))]
                torch.testing.assert_close(torch.cat(parts, 1), model(ids))


def test_a_model_without_a_cache_reads_all_tokens_again():
    class Bigram(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 10)

        def forward(self, ids):
            return self.table(ids)

    p = profile_generate(Bigram, 4, 3, samples=None)
    assert (p.cache, [s.tokens for s in p.steps], [s.cache_bytes for s in p.steps]) == ("none", [4, 5, 6], [0, 0, 0])


def test_model_is_as_it_was():
    model = gpt2().train()
    before = {name: value.data_ptr() for name, value in model.named_parameters()}
    profile_generate(model, 4, 2)
    assert all(m.training for m in model.modules())
    assert before == {name: value.data_ptr() for name, value in model.named_parameters()}
    with pytest.raises(InputError):
        profile_generate(model, 4, 2, cache="none")
    assert all(m.training for m in model.modules())


def test_decode_profile_is_of_the_last_token():
    p = profile_generate(llama, 8, 4)
    calls = {call.path: call for call in p.decode.module_calls}
    assert calls["lm_head"].inputs[0].shape == (1, 1, 32) and p.prefill.module_calls[-1].inputs[0].shape == (1, 8, 32)
    assert p.decode.modules.calls == 1 and p.decode.modules.children[0].outputs[0].shape == (1, 1, 32)
    assert "Linear: 1-2" in p.decode.report("torchinfo", depth=1)


def test_saved_and_read(tmp_path):
    p = profile_generate(gpt2, 4, 3)
    path = tmp_path / "g.json"
    text = p.to_json(path)
    assert GenerationProfile.from_json(path) == GenerationProfile.from_json(text) == p


def test_figures_are_those_of_the_steps():
    p = profile_generate(gpt2, 4, 3, batch_size=2)
    seconds = [s.seconds for s in p.steps]
    assert (p.prefill_seconds, p.decode_seconds, p.seconds) == (seconds[0], sum(seconds[1:]), pytest.approx(
        sum(seconds)))
    assert p.tokens_per_second == 2 * 3 / p.seconds and p.flops == sum(s.flops for s in p.steps)
    assert p.peak_allocated_bytes == max(s.peak_allocated_bytes for s in p.steps)
    unknown = replace(p, steps=(replace(p.steps[0], seconds=None), *p.steps[1:]))
    assert (unknown.seconds, unknown.tokens_per_second, unknown.decode_seconds) == (None, None, p.decode_seconds)
    lines = p.table(rows=2).splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["prefill", "token"] and "token 3" in lines[-1]
    assert p.table(fmt="csv").startswith("Pass,Tokens,Context,Cache,")


@pytest.mark.parametrize(("options", "words"), [
    ({"prompt_tokens": 0}, ["prompt_tokens=0"]), ({"new_tokens": 0}, ["new_tokens=0"]), ({"samples": 0}, ["samples=0"]),
    ({"cache": "paged"}, ["cache='paged'", "'static'"]), ({"device": "h2000"}, ["h2000"]),
    ({"autocast": "bf16"}, ["autocast='bf16'"])])
def test_errors(options, words):
    with pytest.raises(AnalyzerError) as caught:
        profile_generate(gpt2, **{"prompt_tokens": 4, "new_tokens": 2, **options})
    assert all(word in str(caught.value) for word in words)


def test_models_that_do_not_generate():
    with pytest.raises(InputError, match="BertModel cannot generate"):
        profile_generate(transformers_model("Bert:BertModel", hidden_size=32, num_hidden_layers=1,
                                            num_attention_heads=4, intermediate_size=32), 4, 2)
    with pytest.raises(InputError, match="Tensor, in which there are no logits"):
        profile_generate(lambda: nn.Flatten(), 4, 2)
    with pytest.raises(InputError, match=r"prompt of shape \(4,\)"):
        profile_generate(gpt2, prompt=torch.ones(4, dtype=torch.int64))


def test_command_line(capsys, tmp_path):
    path = tmp_path / "g.json"
    assert main(["generate", "gpt2", "--prompt", "8", "--new-tokens", "4", "--dtype", "bf16", "--samples", "2",
                 "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "8 + 4 tokens of 1 sequence, dynamic cache, on h200" in out and "token 3 ~" in out
    read = GenerationProfile.from_json(path)
    # 12 layers of 768 channels in bfloat16; the last token is not read
    assert read.cache_bytes == 2 * 12 * 768 * 2 * 11
    assert main(["show", str(path), "--report", "tree", "--depth", "0"]) == 0
    assert capsys.readouterr().out.count("GPT2") == 4  # name and class, of the prefill and of the token
    for words in (["--dtype", "int64"], ["--report", "tids"], ["--prompt", "0"]):
        assert main(["generate", "gpt2", *words]) == 2
        assert capsys.readouterr().err.startswith("analyzer: ")


def test_memory_that_runs_out_is_told_with_the_pass():
    def build():
        return GPT2(vocabulary=100, positions=64, hidden=256, layers=2, heads=4)

    def run(capacity_bytes=None):
        return profile_generate(build, 1, 12, batch_size=256, samples=None,
                                options=ProfileOptions(capacity_bytes=capacity_bytes))

    enough = run()
    assert enough.out_of_memory is None
    p = run(enough.peak_allocated_bytes - 1)
    assert p.out_of_memory is not None and p.out_of_memory.step == len(p.steps) > 1
    assert [s.cache_bytes for s in p.steps] == [s.cache_bytes for s in enough.steps[:len(p.steps)]]
    assert (p.seconds, p.flops, p.prefill_seconds) == (None, None, enough.prefill_seconds)
    assert f"OUT OF MEMORY at token {len(p.steps) + 1}: aten." in p.summary()
    assert GenerationProfile.from_json(p.to_json()) == p and p.decode is not None
    first = run(enough.prefill.param_bytes + 2**22)
    assert (first.steps, first.decode, first.out_of_memory.step, first.cache_bytes) == ((), None, 0, None)
    none = run(2**20)
    assert (none.steps, none.out_of_memory.phase) == ((), "setup") and "OUT OF MEMORY" in none.summary()


@pytest.mark.parametrize(("name", "options", "positions"), [
    ("GPT2:GPT2LMHeadModel", {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16}, 16),
    ("OPT", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 16,
             "word_embed_proj_dim": 32, "ffn_dim": 32}, 16),
])
def test_more_tokens_than_positions_are_refused(name, options, positions):
    build = transformers_model(name, vocab_size=100, bos_token_id=1, eos_token_id=2, **options)
    assert profile_generate(build, positions - 2, 3).steps[-1].context_tokens == positions
    with pytest.raises(InputError, match=rf"prompt_tokens={positions - 1}, new_tokens=3.* has {positions} positions, "
                                         rf"and together these take {positions + 1}"):
        profile_generate(build, positions - 1, 3)


def test_a_table_of_positions_that_is_not_the_decoders_limits_nothing():
    build = transformers_model("GPT2:GPT2LMHeadModel", n_embd=32, n_layer=1, n_head=4, n_positions=16, vocab_size=100,
                               bos_token_id=1, eos_token_id=2)

    def build_with_images():
        model = build()
        model.vision = nn.ModuleDict({"position_embedding": nn.Embedding(4, 8)})
        return model

    assert profile_generate(build_with_images, 10, 3).steps[-1].context_tokens == 12
    with pytest.raises(InputError, match="has 16 positions"):
        profile_generate(build_with_images, 16, 2)


@pytest.mark.parametrize("words", [["resnet50"], ["resnet18", "--batch", "2"]])
def test_a_model_that_reads_no_tokens_is_named(words, capsys):
    assert main(["generate", *words, "--prompt", "8", "--new-tokens", "2"]) == 2
    error = capsys.readouterr().err
    assert "ResNet is no model that generates text: it has no embedding of tokens" in error

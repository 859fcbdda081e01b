"""The options of a recipe mean the same for every command."""
import pytest

from analyzer import Profile
from analyzer.cli import main

SMALL = ("--input", "input_ids=int64:1x32")


@pytest.fixture
def small(tmp_path):
    """A GPT-2 of two layers, by its config."""
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 64, '
                    '"n_head": 2, "vocab_size": 256, "n_positions": 64}')
    return f"hf:{path}"


def profiled(tmp_path, target, *words):
    path = tmp_path / "p.json"
    assert main(["profile", target, *SMALL, "--show", "summary", "--json", str(path), *words]) == 0
    return Profile.from_json(path)


def test_all_at_once(tmp_path, capsys, small):
    p = profiled(tmp_path, small, "--dtype", "bf16", "--quantize", "nf4", "--lora", "r=4", "--checkpointing",
                 "--accumulate", "2", "--optimizer", "adamw8bit", "--attention", "eager", "--loss-chunks", "4")
    layers = (64, 192), (64, 64), (64, 256), (256, 64)
    assert p.modules.trainable_params == 2 * sum(4 * (n + k) for n, k in layers)
    assert p.recompute_flops > 0 and p.batch_size == 2 and p.optimizer == "adamw8bit"


def test_a_compiled_model_is_told(tmp_path, capsys, small):
    p = profiled(tmp_path, small, "--compile", "reduce-overhead")
    assert p.made_by.options["compile"] == "reduce-overhead" and [row.path for row in p.compiled] == ["_orig_mod"]
    blocks = profiled(tmp_path, small, "--compile", "blocks").compiled
    assert [row.path for row in blocks] == ["transformer.h.0", "transformer.h.1"] and blocks[0].recomputed
    assert "transformer.h.{0-1} (2) GPT2Block  " in capsys.readouterr().out


@pytest.mark.sweep(3)
@pytest.mark.parametrize("words", [
    "fit {} --device t4 --at-most 4 --dtype bf16 --lora r=4 --quantize int8 --optimizer adamw8bit",
    "fit {} --input input_ids=int64:1x32 --device t4 --device l4 --dtype bf16 --lora r=4 --optimizer adamw8bit",
    "sweep {} --workers 0 --accumulate 1,2 --sequence 32 --batch 1 --dtype bf16 --lora r=4 --quantize int8",
    "generate {} --prompt 16 --new-tokens 4 --quantize int4 --dtype bf16",
    "plan {} --input input_ids=int64:1x32 --budget 60% --dtype bf16 --lora r=4 --optimizer adamw8bit",
    "measure {} --input input_ids=int64:1x8 --steps 1 --warm-up 0 --lora r=2 --quantize nf4 --optimizer adamw8bit "
    "--accumulate 2"])
def test_other_commands(run, small, words):
    code, out, err = run(*words.format(small).split())
    assert code == 0, err


@pytest.mark.parametrize(("words", "text"), [
    (("--dtype", "bf61"), "analyzer: --dtype bf61: no floating dtype; did you mean bf16? one of bf16, fp16, fp32"),
    (("--lora", "q_proj"), "analyzer: --lora q_proj: 'q_proj' is not one of r=16")])
def test_errors(run, words, text):
    code, out, err = run("profile", "gpt2", *words)
    assert code == 2 and err.startswith(text)

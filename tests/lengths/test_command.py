"""`analyzer profile TARGET --lengths` and `analyzer job FILE --lengths`."""
import json
from pathlib import Path

import pytest

from analyzer.cli import main

ROOT = Path(__file__).parents[2]
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64,
          "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LENGTHS = "lognormal:mean=60,p99=200,max=256,samples=80"


@pytest.fixture
def config(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(CONFIG))
    return path


def test_an_epoch_of_a_target(config, tmp_path, capsys):
    saved = tmp_path / "epoch.json"
    assert main(["profile", f"hf:{config}", "--lengths", LENGTHS, "--batching", "grouped,batch=4", "--optimizer",
                 "adamw", "--device", "l4", "--json", str(saved)]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 40 and max(map(len, text.splitlines())) <= 120
    for part in ("an epoch of 20 steps on l4 (optimizer adamw), 80 samples", "batches of 4, grouped by length",
                 "fits: 0 of 20 steps fail", "expandable segments", "sequence is a multiple of 8",
                 "assumed: batches have an attention_mask"):
        assert part in text, part
    found = json.loads(saved.read_text())
    assert len(found["reserved"]) == len(found["seconds"]) == 20 and found["epoch_seconds"] == sum(found["seconds"])


def test_an_epoch_of_a_job(config, capsys):
    words = ["job", str(ROOT / "examples/jobs/qlora.yml"), "--model", str(config.parent), "--device", "l4", "--lengths",
             LENGTHS]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "an epoch of 10 steps on l4" in text and "batches of 8, in random order" in text


@pytest.mark.parametrize("words, told", [
    (["profile", "gpt2", "--batching", "grouped"], "--batching grouped: is of an epoch of batches; add --lengths"),
    (["profile", "gpt2", "--lengths", LENGTHS, "--show", "table"], "--show table: is of one step"),
    (["profile", "resnet18", "--input", "{batch}x3x{height}x{width}", "--lengths", LENGTHS, "--batching", "batch=2"],
     "is of one dimension, and inputs name 2"),
    (["profile", "resnet18", "--input", "{batch}x3x64x64", "--lengths", LENGTHS], "says which size varies"),
    (["profile", "resnet18", "--input", "{batch}x3x{side}x{side}", "--lengths", LENGTHS],
     "do not say how many samples a batch has; give --batching batch=N"),
    (["job", "{root}/examples/jobs/qlora.yml", "--padding", "max"], "max: is of an epoch of batches; add --lengths"),
    (["job", "--lengths", LENGTHS, "--", "vllm", "serve", "Qwen/Qwen3-8B"], "this one serves"),
    (["job", "{root}/examples/jobs/text_to_image.sh", "--lengths", LENGTHS], "rows of this job have images")])
def test_what_an_epoch_is_not_told_of(words, told, capsys):
    assert main([word.replace("{root}", str(ROOT)) for word in words]) == 2
    assert told in capsys.readouterr().err

"""Scripts that load by name: shapes that ship, folders with a config alone, names that are neither.

All run dry in one process of their own, without a network.
"""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from analyzer import MetaTensorMode, Profile
from analyzer.tools.dryrun import pipeline, stand_in
from analyzer.tools.dryrun.script import dry_run
from analyzer.tools.dryrun.tokenizer import save_tokenizer

HERE = Path(__file__).parent
NAME = "HuggingFaceTB/SmolLM2-135M"
#: by name: the script and its arguments, of which "own" is a folder with a config alone
JOBS = {"models": ("by_name.py", [f"{NAME}-Instruct", "own"]), "unknown": ("by_name.py", ["someone/new-model"]),
        "data sets": ("data_sets_by_name.py", []), "pipeline": ("pipeline_by_name.py", [])}
OWN = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
       "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024,
       "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": [2, 3]}
#: parameters of that: two embeddings, of each layer four products of attention and three of the MLP, and norms
OF_OWN = 2 * 1024 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 5 * 64


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder where the jobs ran, each with what it printed and, where it did not fail, its profile."""
    pytest.importorskip("transformers")
    pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("names")
    (folder / "own").mkdir()
    (folder / "own" / "config.json").write_text(json.dumps(OWN))
    (folder / "jobs.json").write_text(json.dumps([(name, *job) for name, job in JOBS.items()]))
    path = os.pathsep.join([str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HOME": str(folder / "cache"), "TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, str(HERE / "run_scripts.py"), str(folder)], capture_output=True, text=True,
                          env=environment)
    assert done.returncode == 0, done.stderr
    return folder


def said(folder: Path, name: str) -> list[str]:
    return (folder / f"{name}.txt").read_text().splitlines()


def test_a_model_by_name_and_one_of_a_config_alone(ran):
    lines = said(ran, "models")
    assert lines[0] == "[(49152, 2, True), (1024, 2, True)]", lines
    assert lines[1] == r"'<|im_start|>user\nthe question<|im_end|>\n' 512"
    assert lines[2:6] == ["What is it, on 5 ü?", "True 134515008", "What is it, on 5 ü?", f"True {OF_OWN}"]
    p = Profile.from_json(ran / "models.json")
    assert p.params == OF_OWN and p.param_bytes == 2 * OF_OWN and not p.uncounted
    tokens = "vocabulary of {} and the chat template ChatML: lengths of texts are not those of the real one"
    assert {f"{NAME}-Instruct: the shape of {NAME} that ships with analyzer, weights without data",
            f"{NAME}-Instruct: its tokenizer is a stand-in with a {tokens.format('49,152')}",
            f"own: its tokenizer is a stand-in with a {tokens.format('1,024')}",
            "checkpoints of safetensors were read for names, shapes and dtypes alone"} <= set(p.assumptions)


def test_an_unknown_name_says_both_ways_out(ran):
    assert said(ran, "unknown")[-2].endswith(
        "someone/new-model: not loaded, as a dry run downloads nothing, and none of the shapes that ship with analyzer "
        "(`analyzer models`). Copy its config.json to a folder and give that folder for the name (no weights and no "
        "tokenizer are needed), or run the dry run with --allow-download (allow_download=True), which leaves the "
        "script its own way")


def test_nothing_is_left(ran):
    assert os.listdir(ran / "own") == ["config.json"]
    assert [name for name in os.listdir(ran) if name.startswith("analyzer-hub")] == []


def test_the_hub_is_offline_unless_downloads_are_allowed(tmp_path, capsys):
    constants = pytest.importorskip("huggingface_hub.constants")
    script = tmp_path / "asks.py"
    script.write_text("import huggingface_hub\nprint(huggingface_hub.is_offline_mode())\n1 / 0\n")
    before, found = constants.HF_HUB_OFFLINE, __import__("huggingface_hub").hf_hub_download
    for allowed in (False, True):
        run = dry_run(script, allow_download=allowed)
        assert isinstance(run.error, ZeroDivisionError)
    assert capsys.readouterr().out.split() == ["True", str(before)]
    assert constants.HF_HUB_OFFLINE == before and __import__("huggingface_hub").hf_hub_download is found


def test_data_sets_by_name(ran):
    lines = said(ran, "data sets")
    splits = {"train": 256, "test": 256, "unsupervised": 256}
    assert lines[0] == f"{splits} ['neg', 'pos'] ['text', 'label']", lines
    assert lines[1] == f"64 {256 + 10} [5, 256]" and lines[2] == "[512, 512]"
    words = " ".join(["the"] * 32)
    assert lines[3] == str({"sentence1": words, "sentence2": words, "label": 1, "idx": 0})
    assert lines[4] == "assistant (500, 500) {'text': ['the'], 'answer_start': [0]}"
    assert lines[5] == "[0, 1, 2]"
    configs = "it has cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte, wnli"
    assert lines[6] == f"InputError: load_dataset('glue') needs a config; {configs}"
    assert lines[7] == f"InputError: load_dataset('glue') has no config 'mrcp' in its stand-in; {configs}"
    ways = ("Save a few of its rows to a file, as in data.select(range(300)).to_json(FILE), and load that: "
            'load_dataset("json", data_files=FILE), or run the dry run with --allow-download (allow_download=True), '
            "which leaves the script its own way")
    start = "not loaded, as a dry run downloads nothing, and none of the data sets that have a stand-in"
    assert lines[8] == f"NotThereError: someone/new-data: {start}. {ways}"
    assert lines[9] == f"NotThereError: someone/imbd: {start}. {ways}; did you mean imdb?"


def test_components_of_a_pipeline_by_name(ran):
    """As many parameters as the published components have."""
    pytest.importorskip("diffusers")
    lines = said(ran, "pipeline")
    assert lines[:4] == ["49408 77 77", "CLIPTextModel 123060480", "AutoencoderKL 83653863",
                         "UNet2DConditionModel 859520964"], lines


@pytest.mark.parametrize(("config", "name"), [
    ("T5Config", "T5TokenizerFast"), ("T5Config", "AutoTokenizer"), ("CLIPTextConfig", "CLIPTokenizer"),
    ("BertConfig", "BertTokenizer"), ("BertConfig", "AutoTokenizer"), ("DistilBertConfig", "DistilBertTokenizer"),
    ("GemmaConfig", "GemmaTokenizer"), ("Gemma2Config", "AutoTokenizer"), ("LlamaConfig", "LlamaTokenizerFast"),
    ("GPT2Config", "GPT2Tokenizer"),
    ("XLMRobertaConfig", "XLMRobertaTokenizer")])
def test_a_stand_in_is_read_by_the_tokenizer_of_its_model(tmp_path: Path, config: str, name: str) -> None:
    """Each makes itself of the file's vocabulary: of pieces with scores, of words with their own unknown one, of
    pairs."""
    transformers = pytest.importorskip("transformers")
    own = getattr(transformers, config)()
    own.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, name, own)
    tokenizer = getattr(transformers, name).from_pretrained(tmp_path)
    rows = tokenizer(["the answer", "the"], padding="max_length", max_length=12, truncation=True)["input_ids"]
    assert [len(row) for row in rows] == [12, 12] and max(map(max, rows)) < own.vocab_size
    assert "th" in tokenizer.decode(rows[1], skip_special_tokens=True)  # CLIP has another letter at the end of a word


@pytest.mark.parametrize("place, describe", [
    (stand_in, lambda folder: stand_in._describe_weights(folder)),
    (pipeline, lambda folder: pipeline._describe_weights("AutoencoderKL", {"block_out_channels": [32]}))],
    ids=["transformers", "diffusers"])
def test_weights_are_described_without_memory(tmp_path, monkeypatch, place, describe):
    """Under a mode, of which neither the meta device nor an initialization may get hold: 8B took 16 GiB and 85 s."""
    pytest.importorskip("diffusers")
    (tmp_path / "config.json").write_text(json.dumps(OWN))
    described = {}
    monkeypatch.setattr(place, "make_header", lambda tensors, told: described.update(tensors) or {})
    with MetaTensorMode():
        describe(tmp_path)
    assert described and all([type(tensor) is torch.Tensor and tensor.is_meta for tensor in described.values()])


def test_encodings_of_tiktoken_are_not_downloaded(tmp_path, monkeypatch):
    """Each has the tokens that tiktoken says, and gives texts back; special ones are at their numbers."""
    tiktoken = pytest.importorskip("tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))  # where there is none
    path = tmp_path / "train.py"
    path.write_text("""
import tiktoken, torch
text = "The answer, in short: it's na\u00efve <3"
for name, size, end in (("gpt2", 50257, 50256), ("r50k_base", 50257, 50256), ("p50k_base", 50281, 50256),
                        ("cl100k_base", 100277, 100257), ("o200k_base", 200019, 199999)):
    encoding = tiktoken.get_encoding(name)
    assert (encoding.n_vocab, encoding.eot_token) == (size, end)
    assert encoding.decode(encoding.encode(text)) == text and len(encoding.encode("the answer")) == 2
model = torch.nn.Embedding(encoding.n_vocab, 8).cuda()
model(torch.tensor(encoding.encode(text)).cuda()).sum().backward()
""")
    run = dry_run(path)
    assert run.error is None, run.format_error()
    assert run.profile.params == 200_019 * 8
    assert any("tiktoken's encoding cl100k_base is a stand-in" in text for text in run.profile.assumptions)
    assert not tiktoken.registry.ENCODINGS and not list(tmp_path.glob("*.tmp"))
    path.write_text("import tiktoken.load; tiktoken.load.read_file('https://example.com/own.tiktoken')")
    assert str(dry_run(path).error) == (
        "https://example.com/own.tiktoken would be downloaded; nothing is, unless --allow-download is given. Download "
        "it once and give its path")

"""Configurations as text: what is read of them, where errors say that a value stands, and changes in place."""
from pathlib import Path

import pytest

from analyzer.tools.job.document import Document, Edit, Files, JobError, read_text

YAML = """\
# a configuration
base_model: meta-llama/Llama-3.2-1B   # the model
lora: &shared
  r: 16       # rank
  targets: ["q_proj", v_proj]
other: *shared
micro_batch_size: 4
flag: yes
word: "yes"
empty:
rate: 2e-5
"""


def test_yaml_is_read_with_lines_aliases_and_the_words_of_its_first_version() -> None:
    document = read_text(YAML, "a.yml")
    assert document.data == {
        "base_model": "meta-llama/Llama-3.2-1B", "lora": {"r": 16, "targets": ["q_proj", "v_proj"]},
        "other": {"r": 16, "targets": ["q_proj", "v_proj"]}, "micro_batch_size": 4, "flag": True, "word": "yes",
        "empty": None, "rate": 2e-5}
    assert document.place("micro_batch_size") == "a.yml:7"
    assert document.place("lora", "r") == "a.yml:4"
    assert document.place("not_there") == "a.yml"


@pytest.mark.parametrize(("edit", "line"), [
    (Edit(("micro_batch_size",), 4, 2), "micro_batch_size: 2"),
    (Edit(("base_model",), "meta-llama/Llama-3.2-1B", "gpt2"), "base_model: gpt2   # the model"),
    (Edit(("lora", "r"), 16, 8), "  r: 8       # rank"),
    (Edit(("empty",), None, True), "empty: true"),
    (Edit(("flag",), True, False), "flag: false"),
    (Edit(("new",), None, "nf4"), "new: nf4")])
def test_a_change_of_yaml_leaves_all_other_lines_as_they_are(edit: Edit, line: str) -> None:
    before, after = YAML.splitlines(), read_text(YAML, "a.yml").change([edit]).splitlines()
    assert line in after
    assert sorted(set(after) - set(before)) == [line]
    assert len(set(before) - set(after)) == (edit.keys != ("new",))


def test_a_change_of_toml_and_json_keeps_comments_and_order() -> None:
    toml = "[training]\nlocal_batch_size = 8  # of a rank\nseq_len = 2048\n"
    assert read_text(toml, "a.toml", "toml").change([Edit(("training", "local_batch_size"), 8, 4)]) == toml.replace(
        "= 8", "= 4")
    assert read_text(toml, "a.toml", "toml").place("training", "seq_len") == "a.toml:3"
    json = '{\n  "zero": {\n    "stage": 2\n  },\n  "fp16": {}\n}\n'
    assert read_text(json, "a.json", "json").change([Edit(("zero", "stage"), 2, 3)]) == json.replace("2\n", "3\n")


def _command(text: str, *lines: int) -> Document:
    return Document("run.sh", text, {}, {(str(line),): line for line in lines}, "command")


@pytest.mark.parametrize(("text", "edit", "after"), [
    ("swift sft --batch 4 --lr 1e-4", Edit(("batch",), "4", 2), "swift sft --batch 2 --lr 1e-4"),
    ("swift sft --batch=4", Edit(("batch",), "4", 2), "swift sft --batch=2"),
    ("vllm serve m --max-model-len 8", Edit(("max_model_len",), "8", 4), "vllm serve m --max-model-len 4"),
    ("swift sft --lr 1", Edit(("packing",), None, True), "swift sft --lr 1 --packing true")])
def test_a_change_of_a_command(text: str, edit: Edit, after: str) -> None:
    assert _command(text, 0).change([edit]) == after


def test_a_change_of_a_script_goes_to_the_line_of_the_last_option() -> None:
    text = "set -e\nswift sft \\\n    --model m \\\n    --lr 1\necho done\n"
    changed = _command(text, 2, 3).change([Edit(("packing",), None, True)])
    assert changed == text.replace("--lr 1", "--lr 1 --packing true")


@pytest.mark.parametrize(("text", "problem"), [
    ("a: [1, 2", "a.yml:1: is no YAML: "),
    ("- a\n- b\n", "a.yml: holds a list, and a configuration is a mapping of names to values"),
    ("a: !!python/object/apply:os.system ['echo']", None),
    ("a: &a [x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, *b, *b, *b, *b, *b]\n"
     "d: &d [*c, *c, *c, *c, *c, *c, *c, *c, *c]\ne: &e [*d, *d, *d, *d, *d, *d, *d, *d, *d]\nf: [*e, *e, *e]\n",
     "a.yml: has more than 20,000 values, or 40 levels (aliases written out)")])
def test_hostile_and_broken_yaml(text: str, problem: "str | None") -> None:
    if problem is None:  # a tag makes no object: what is under it is data
        assert read_text(text, "a.yml").data == {"a": ["echo"]}
        return
    with pytest.raises(JobError) as error:
        read_text(text, "a.yml")
    assert str(error.value).startswith(problem)


def test_files_are_found_beside_the_configuration_and_above_it(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "zero2.json").write_text("{}")
    (tmp_path / "examples" / "llama").mkdir(parents=True)
    files = Files(tmp_path / "examples" / "llama")
    assert files.find("deepspeed/zero2.json") == str(tmp_path / "deepspeed" / "zero2.json")
    assert files.find("deepspeed/zero3.json") is None
    with pytest.raises(JobError, match="cannot be read: No such file"):
        files.document(str(tmp_path / "none.yml"))
    (tmp_path / "binary.yml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(JobError, match="is no text in UTF-8: byte 3"):
        files.document(str(tmp_path / "binary.yml"))
    (tmp_path / "large.yml").write_text("a: 1\n" * 300_000)
    with pytest.raises(JobError, match="has 1,500,000 bytes, a configuration at most 1,048,576"):
        files.document(str(tmp_path / "large.yml"))

"""The benchmark of programs' own examples: which files count, and which options stand in the way."""
from pathlib import Path

from benchmarks.coverage.job_examples import TooLongError, copy_without_comments, count_reasons, limit, read_examples

CLEAN = "base_model: gpt2\nsequence_len: 64\nmicro_batch_size: 1\ndatasets: []\nsample_packing: true  # odd: 1\n"
FILES = {"clean.yml": CLEAN, "unknown.yml": f"{CLEAN}odd: 1\n", "refused.yml": CLEAN.replace("64", "many"),
         "other.yaml": "do_train: true\nmodel_name_or_path: gpt2\nstage: sft\nfinetuning_type: full\n"
                       "template: t\ncutoff_len: 8\n",
         "none.yaml": "a: 1\n", "run.sh": "echo hello\n", "notes.txt": CLEAN}


def test_examples_of_a_program(tmp_path: Path) -> None:
    source, copied = tmp_path / "source", tmp_path / "copied"
    (source / "examples").mkdir(parents=True)
    for name, text in FILES.items():
        (source / "examples" / name).write_text(text)
    copy_without_comments(source, copied)
    assert "#" not in (copied / "examples/clean.yml").read_text()
    found = list(read_examples(copied, "examples", "axolotl"))
    assert [(example.path, example.job is not None, example.is_clean) for example in found] == [
        ("examples/clean.yml", True, True), ("examples/refused.yml", False, False),
        ("examples/unknown.yml", True, False)]
    assert found[1].why.startswith("examples/refused.yml:2: sequence_len: many: must be a whole number")
    assert [row[:3] for row in count_reasons(found)] == [("odd", 1, 1)]


def test_an_example_ends_when_its_time_is_over() -> None:
    try:
        with limit(1):
            while True:
                pass
    except TooLongError as error:
        assert str(error) == "took longer than 1 s"

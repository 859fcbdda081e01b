"""Models of all families: profiled in both modes, traced, and the graph's results compared with the original's on data.
"""
import functools

import pytest
import torch

from benchmarks.coverage.check import Case, check_case, group_reason
from benchmarks.coverage.models import STEPS, choose_sample, list_blocks, list_cases, summarize

SAMPLE = """
torchvision:shufflenet_v2_x0_5 torchvision:lraspp_mobilenet_v3_large timm:vit_tiny_patch16_224 timm:mobileone_s0
timm:gemma4_vit_167m timm:levit_128s transformers:BertForMaskedLM transformers:T5ForConditionalGeneration
transformers:MixtralForCausalLM transformers:DebertaV2ForTokenClassification transformers:MambaForCausalLM
transformers:ViltForQuestionAnswering transformers:Wav2Vec2ForCTC transformers:Qwen2VLForConditionalGeneration
torch.nn:Transformer torch.nn:LazyConv2d torch.nn:autograd.Function torch.nn:vmap-built|mask torch.nn:sparse|matrix
"""
NAMES = [name.replace("|", " ") for name in SAMPLE.split()]


@functools.cache
def cases() -> dict[str, Case]:
    return {case.name: case for case in list_cases(["torchvision", "timm", "transformers", "torch.nn"])}


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", NAMES)
def test_profiles_and_traces(name):
    row = check_case(cases()[name])
    assert "unusable" not in row, row["unusable"]
    assert {step: row[step] for step in STEPS} == dict.fromkeys(STEPS, "pass")


def test_a_sample_takes_families_and_groups_in_turn():
    many = [Case(f"{f}:{g}{i}", f, g, lambda: []) for f, groups in (("timm", "abc"), ("torch.nn", "d"))
            for g in groups for i in range(10)]
    chosen = choose_sample(many, 8)
    assert [sum(c.family == f for c in chosen) for f in ("timm", "torch.nn")] == [4, 4]
    assert {c.group for c in chosen} == {"a", "b", "c", "d"}
    assert choose_sample(many, 8) == chosen != choose_sample(many, 8, seed=1)
    assert len(choose_sample(many, 1000)) == len(many)


def test_the_table_counts_what_pytorch_can_run():
    rows = [{"name": "timm:a", "family": "timm", "train": "pass", "infer": "pass", "trace": "pass"},
            {"name": "timm:b", "family": "timm", "train": "pass", "infer": "Error: no", "trace": "pass"},
            {"name": "timm:c", "family": "timm", "unusable": "needs a package"}]
    assert summarize(rows) == [["timm", "3", "2", "2/2 (100.0%)", "1/2 (50.0%)", "2/2 (100.0%)", "50.0%"]]
    failures = list_blocks(rows, "coverage.models sweep")
    assert failures["coverage.models failures"] .endswith("| `timm:b` | infer  | Error: no |")
    assert failures["coverage.models unusable"] .endswith("| `timm:c` | needs a package |")


def test_reasons_are_grouped_without_what_differs():
    a, b = "Error: 'x.y' of size 12 at /a/b/model.py:31", "Error: 'z' of size 7 at /c/model.py:2"
    assert group_reason(a) == group_reason(b) == "Error: '…' of size # at model.py"


def test_a_model_that_pytorch_cannot_run_is_not_judged():
    def fail():
        raise RuntimeError("no such file")

    row = check_case(Case("timm:x", "timm", "x", fail))
    assert row["unusable"] == "RuntimeError: no such file"
    assert not {"train", "infer", "trace"} & row.keys()


def test_nms_keeps_the_best_of_boxes_that_overlap():
    from benchmarks.coverage.library import suppress

    boxes = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 1.9], [3, 3, 4, 4], [0, 0, 1, 1]])
    assert suppress(boxes, torch.tensor([0.5, 0.9, 0.7, 0.1]), 0.5).tolist() == [1, 2, 3]
    assert suppress(boxes[:0], torch.zeros(0), 0.5).tolist() == []

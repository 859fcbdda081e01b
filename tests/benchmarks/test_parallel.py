"""Published runs on many GPUs, rebuilt: a row of each family, and the stand-in for Transformer Engine by hand."""
import copy
from importlib.util import find_spec

import pytest
import torch

from analyzer import profile
from analyzer.parallel import world
from benchmarks.accuracy import parallel as accuracy_parallel
from benchmarks.accuracy.parallel import find_reason, has_memory, judge_time, measured_bytes, read_rows
from benchmarks.accuracy.rank import judge
from benchmarks.parallel import fms_fsdp, transformer_engine
from benchmarks.parallel.family import APART, Prediction, family_of, find_lacking, note_of, predict
from benchmarks.parallel.rank import CASES
from benchmarks.truth.table import read_truth

ROWS = {row["id"]: row for row in read_rows()}
SAMPLE = {"megatron-golden-gpt-gpt3-mcore-te-tp1-pp1-dist-optimizer-fim-dataset-dev-dgx-h100": 0.001,
          "megatron-golden-moe-deepseek-proxy-fsdp-ep2-fsdp2-ep-overlap-dev-dgx-h100": 0.005,
          "megatron-golden-gpt-gpt3-mcore-te-tp2-zp-z3-resume-fsdp-dtensor-dev-dgx-gb200": 0.001,
          "torchtitan-202604-llama3-debug-4h100-fsdp4": 0.02}


@pytest.mark.parametrize("row", SAMPLE)
def test_a_row_of_each_family_is_met(row):
    family = family_of(ROWS[row])
    if find_spec(family.package) is None:  # importing it is the rebuild's, which has stand-ins for what it imports
        pytest.skip(f"{family.package} is not installed: pip install -e '.[parallel]'")
    assert abs(predict(ROWS[row]).predicted / measured_bytes(ROWS[row]) - 1) < SAMPLE[row]


def test_frozen_layers_hold_their_inputs_and_gradients_until_backward_ends():
    """Of two ranks each holds, at the peak in the first layer's backward pass, of a layer: half of its 590,336 16-bit
    weights; of the 28,672 float32 numbers of its adapters half of them, of their gradients and of their two states;
    and of 2 x 128 tokens the 256 numbers that went into it and their gradients, in 16 bits.
    """
    row = copy.deepcopy(ROWS["fms-acceleration-mistral-7b-v0.1-2a100-lora-mb2"])
    row["model"].update(hidden=256, ffn=512, heads=4, kv_heads=2, vocab=64, seq_len=128)
    few, more = (predict({**row, "model": {**row["model"], "layers": layers}}).predicted for layers in (4, 8))
    by_hand = 590_336 + 28_672 * (4 + 4 + 8) // 2 + 2 * 128 * 256 * 2 * 2
    assert (more - few) / 4 == pytest.approx(by_hand, abs=8192)  # rounded to blocks of 512 bytes


def test_each_row_is_rebuilt_or_told_why_not():
    assert sum(map(has_memory, ROWS.values())) == 161 + 12  # and the runs on B200
    assert all(family_of(row) is not None or note_of(row, APART) is not None for row in ROWS.values())


def test_steps_of_rows_that_guess_are_told_apart_and_those_with_a_pipeline_left_out():
    found = Prediction("", 2, 3, 0.5, "reserved", 1.0, 0.9, 1.2)
    exact, guessed = (judge_time(ROWS[f"fms-fsdp-{name}-96xh100"], found) for name in ("compile-7b", "eager-13b"))
    assert (exact.family, guessed.family) == ("fms-fsdp", "fms-fsdp, with a guess")
    assert (exact.measured, exact.predicted, exact.low, exact.high) == (0.8533, 1.0, 0.9, 1.2)
    assert judge_time(ROWS["megatron-golden-gpt-gpt3-7b-tp1-pp4-memory-speed-dev-dgx-h100"], found) is None
    with_engine = ROWS["megatron-golden-gpt-gpt3-7b-tp4-pp1-memory-speed-dev-dgx-h100"]  # without its Python
    assert judge_time(with_engine, found) is None and with_engine["measured"]["step_s"]


def test_blocks_of_fms_fsdp_are_checkpointed_evenly():
    """A block is where its number, times the share, reaches the next half: 0.4 of four are the second and the last."""
    row = copy.deepcopy(ROWS["fms-fsdp-eager-13b-96xh100"])
    row["model"].update(layers=4, hidden=64, ffn=96, heads=4, kv_heads=2, vocab=100, seq_len=16)
    row["training"]["checkpointed_share"], row["hardware"]["gpus"] = 0.4, 8
    with world(8):
        job = fms_fsdp.prepare(row)
        model = job.build()
    kinds = [type(layer._fsdp_wrapped_module).__name__ for layer in model.layers]
    assert kinds == ["Block", "CheckpointWrapper", "Block", "CheckpointWrapper"]
    assert predict(row).step_seconds > 0


def test_a_row_with_a_feature_that_the_rebuild_lacks_is_refused_by_name():
    row = ROWS["megatron-golden-gpt-gpt3-mcore-te-tp2-pp1-modelopt-distill-resume-dev-dgx-gb200"]
    assert find_reason(row) == find_lacking(row) == "a second model, the teacher, whose shape its checkpoint tells"
    with pytest.raises(NotImplementedError, match="the rebuild does not do a second model, the teacher"):
        predict(row)


def test_jobs_that_are_alike_are_made_once_and_those_that_were_kept_never_again(tmp_path, monkeypatch):
    """On B200 four micro-batches and eight are one job, two and four ranks that split tensors are two."""
    made = []
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(accuracy_parallel, "predict", lambda row: made.append(row["id"]) or Prediction(
        row["id"], 2, 3, 0.5, "allocated"))
    rows = [ROWS[f"b200-{name}_cef"] for name in (
        "llama3_70b_tp2_pp1_dp4_l12_mbc4", "llama3_70b_tp2_pp1_dp4_l12_mbc8", "llama3_70b_l12_tp4_pp1_dp2_mbc4")]
    found = accuracy_parallel.judge_all(rows, 1, tmp_path / "kept.jsonl")
    assert len(made) == 2 and found.keys() == {row["id"] for row in rows}
    assert accuracy_parallel.judge_all(rows, 1, tmp_path / "kept.jsonl") == found and len(made) == 2


def test_each_measured_rank_is_a_case_and_one_is_met_to_the_page_of_the_allocator():
    rows = {row["case"]: row for row in read_truth("rank_memory")["rows"]}
    assert rows.keys() == CASES.keys()
    assert judge(rows["FSDP2, 4,096 tokens"]).errors == pytest.approx((0, 0), abs=1e-5)


@pytest.mark.parametrize(("float8", "keeps_input"), [(False, False), (True, False), (True, True)])
def test_layers_of_the_stand_in_save_what_those_of_transformer_engine_do(float8, keeps_input):
    s, b, h, heads = 64, 2, 256, 4

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            settings = {"params_dtype": torch.bfloat16, "bias": False}
            self.qkv = transformer_engine.LayerNormLinear(h, 3 * h, **settings)
            self.attention = transformer_engine.DotProductAttention(heads, h // heads)
            self.out = transformer_engine.Linear(h, h, **settings)
            self.out.save_original_input = keeps_input  # which attention holds in 16 bits

        def forward(self, x):
            with transformer_engine.autocast(enabled=float8):
                q, k, v = self.qkv(x).view(s, b, heads, -1).split(h // heads, dim=3)
                return self.out(self.attention(q, k, v))

    x = torch.zeros(s, b, h, dtype=torch.bfloat16)
    with transformer_engine.fresh("auto"), world(1):
        p = profile(lambda: Block().cuda(), (x,), device="h100_sxm")
    tokens = s * b
    # the input and that normed; query, key and value as one; the output of attention: each of 2 bytes an element. Of
    # float32: two statistics a token, a log-sum-exp a token and head. In float8 what is normed has a byte an element,
    # and so has what goes into the last layer, beside the output of attention unless that is taken
    saved = tokens * (h + 3 * h + h) * 2 + 2 * tokens * 4 + tokens * heads * 4
    saved += tokens * h * (2 - float8) + tokens * h * (float8 and not keeps_input)
    assert p.nodes[-1].accumulate_bytes == saved
    assert "workspace" not in p.peak_by_category  # PyTorch's, of which its products take none


@pytest.mark.parametrize(("backend", "device", "copies"), [
    ("auto", "h100_sxm", 0), ("flash", "h100_sxm", 1), ("auto", "a100_80gb", 1), ("auto", "gb200", 1)])
def test_flash_attention_copies_what_goes_in_and_what_comes_out(monkeypatch, backend, device, copies):
    """cuDNN has no deterministic backward pass with dropout on Blackwell, and Ampere prefers FlashAttention."""
    s, b, heads, size = 64, 2, 4, 32
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = transformer_engine.DotProductAttention(heads, size, attention_dropout=0.1)
            self.out = transformer_engine.Linear(heads * size, 8, params_dtype=torch.bfloat16, bias=False)

        def forward(self, q, k, v):
            return self.out(self.attention(q, k, v))

    given = [torch.zeros(s, b, heads, size, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    with transformer_engine.fresh(backend), world(1):
        p = profile(lambda: Block().cuda(), given, device=device)
    output, statistics = s * b * heads * size * 2, s * b * heads * 4
    assert p.nodes[-1].accumulate_bytes == output * (3 + 1) * (1 + copies) + statistics


@pytest.mark.parametrize(("way", "sent"), [
    ("p2p", {"send": (3 * 2 * 2, 2 * 3 * 2 * 2)}), ("a2a", {"all_to_all": (2 * 8 + 2 * 2, 2 * 8 + 2 * 2)}),
    ("all_gather", {"all_gather": (4 * 2 * 2, 4 * 2 * 2), "reduce_scatter": (0, 4 * 2 * 2)})])
def test_attention_of_the_stand_in_computes_and_sends_what_follows_by_hand(way, sent):
    """Of 4 ranks, in units of a head of a rank: there are 2 of keys and of values, 8 of queries and of outputs."""
    s, b, heads, keys, size, ranks = 64, 2, 8, 2, 32, 4

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            group = torch.distributed.group.WORLD
            self.attention = transformer_engine.DotProductAttention(heads, size, cp_group=group, cp_comm_type=way)
            self.out = transformer_engine.Linear(heads * size, 8, params_dtype=torch.bfloat16, bias=False,
                                                 fuse_wgrad_accumulation=True)
            self.out.weight.main_grad = torch.zeros(8, heads * size, device="cuda")

        def forward(self, q, k, v):
            return self.out(self.attention(q, k, v))

    given = [torch.zeros(s, b, n, size, dtype=torch.bfloat16, requires_grad=True) for n in (heads, keys, keys)]
    with transformer_engine.fresh("auto"), world(ranks):
        p = profile(lambda: Block().cuda(), given, device="h100_sxm", optimizer=None)
    pairs, product = b * heads * s * s * ranks, s * b * heads * size * 8
    assert (p.fwd_macs, p.bwd_macs) == (2 * pairs * size + product, 5 * pairs * size + 2 * product)
    unit = s * b * size * 2
    assert {kind: tuple(sum(row.bytes for row in p.comm if (row.kind, row.phase) == (kind, phase))
                        for phase in ("forward", "backward")) for kind in sent} == {
        kind: tuple(n * unit for n in counts) for kind, counts in sent.items()}


@pytest.mark.parametrize("splits", [[48, 16], [1, 1]])  # known, or not
def test_experts_of_the_stand_in_multiply_all_rows(splits):
    rows, width, wide = 64, 32, 128

    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = transformer_engine.GroupedLinear(2, width, wide, bias=False, params_dtype=torch.bfloat16)

        def forward(self, x):
            return self.up(x, splits)

    x = torch.zeros(rows, width, dtype=torch.bfloat16, requires_grad=True)
    with transformer_engine.fresh("auto"), world(1):
        p = profile(lambda: Experts().cuda(), (x,), device="h100_sxm", optimizer=None)
    assert (p.fwd_macs, p.bwd_macs) == (rows * width * wide, 2 * rows * width * wide)


@pytest.mark.parametrize(("half", "copies", "expected"), [
    (False, {}, 8), (True, {}, 4), (True, {"master_weights": True}, 8),
    (True, {"master_weights": True, "store_param_remainders": True}, 6)])
def test_the_stand_in_for_adam_keeps_what_it_is_told_to(half, copies, expected):
    """A byte an element: two moments, of 16 or 32 bits, and the copy of a parameter or the half that it lacks."""
    dtype = torch.bfloat16 if half else torch.float32
    parameter = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
    optimizer = transformer_engine.FusedAdam([parameter], exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype, **copies)
    optimizer.step()
    assert not optimizer.state[parameter]
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert sum(state.nbytes for state in optimizer.state[parameter].values()) == 8 * expected


@pytest.mark.parametrize(("mode", "communicated"), [("column", 1), (None, 0)])
def test_a_linear_layer_communicates_by_the_mode_that_it_has_when_it_runs(mode, communicated):
    def build():
        layer = transformer_engine.Linear(8, 16, sequence_parallel=True, tp_group=torch.distributed.group.WORLD,
                                          tp_size=2, params_dtype=torch.bfloat16, bias=False, parallel_mode="column")
        layer.parallel_mode = mode
        return layer

    with transformer_engine.fresh("auto"), world(2):
        p = profile(build, (torch.zeros(4, 8, dtype=torch.bfloat16),), mode="infer", device="h100_sxm")
    assert len(p.comm) == communicated


@pytest.mark.parametrize(("layout", "a", "b"), [("TN", (8, 4), (2, 4)), ("NN", (4, 8), (2, 4)), ("NT", (4, 8), (4, 2))])
def test_the_stand_in_multiplies_as_cublas_lays_out(layout, a, b):
    with transformer_engine.fresh("auto"), world(1):
        made, = transformer_engine.general_gemm(torch.zeros(a), torch.zeros(b), torch.float64, layout)
        assert (*made.shape, made.dtype) == (2, 8, torch.float64)
        held = [transformer_engine.Dummy.take([2, 8], torch.bfloat16) for _ in range(2)]
        assert held[0].untyped_storage()._cdata == held[1].untyped_storage()._cdata  # one a size

"""Sizes that depend on data: the stated policy, and its trace in the assumptions."""
import pytest
import torch
import torch.nn.functional as F

from analyzer import MetaTensorMode, ProfileOptions, profile
from analyzer.errors import DataDependentError, InputError
from analyzer.meta.state import MetaOptions
from tests.call import Call


def routed(tokens=64, experts=8, top_k=2):
    """Rows that each expert gets, computed as mixture-of-experts layers do."""
    chosen = torch.topk(torch.rand(tokens, experts), top_k).indices
    mask = F.one_hot(chosen, num_classes=experts).permute(2, 1, 0)
    hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    return [len(torch.where(mask[e].squeeze(0))[0]) for e in hit]


@pytest.mark.parametrize(("policy", "rows"), [("balanced", [16] * 8), ("worst", [128] * 8), (5, [5] * 5)])
def test_experts_get_what_the_policy_says(policy, rows):
    with MetaTensorMode(MetaOptions(unknown_size=policy)) as mode:
        assert routed() == rows  # balanced: 64 tokens x 2 choices / 8 experts
        assert any("nonzero" in text for text in mode.state.assumptions)


def one_hot_marks(chosen, bins):
    return F.one_hot(chosen, num_classes=bins)


def compared_marks(chosen, bins):
    return (chosen[..., None] == torch.arange(bins)).long()


def scattered_marks(chosen, bins):
    return torch.zeros(*chosen.shape, bins, dtype=torch.long).scatter(-1, chosen[..., None], 1)


@pytest.mark.parametrize("more", [0, 1, 3])
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("mark", [one_hot_marks, compared_marks, scattered_marks])
def test_bins_behind_all_classes_take_nothing_from_them(mark, drops, more):
    """Padded or dropped choices are marked behind all experts; none is expected there."""
    with MetaTensorMode() as mode:
        chosen = torch.topk(torch.rand(64, 8), 2).indices
        if drops and more:
            chosen = chosen.masked_fill(torch.rand(64, 2) < 0.1, 8)
        marks = mark(chosen, 8 + more).permute(2, 1, 0)
        assert [len(torch.where(marks[e])[0]) for e in range(8)] == [16] * 8
        counts = marks.sum(dim=(-1, -2))
        assert counts.tolist() == [16] * 8 + [0] * more
        assert len(torch.greater(counts, 0).nonzero()) == 8
        assert torch.bincount(chosen.flatten(), minlength=8 + more).tolist() == [16] * 8 + [0] * more
        assert not any(f"into {8 + more} bins" in text for text in mode.state.assumptions) or not more


@pytest.mark.parametrize("drop", [
    lambda chosen, out: torch.where(out, torch.full_like(chosen, 8), chosen),
    lambda chosen, out: torch.where(out, 8, chosen), lambda chosen, out: chosen.masked_fill(out, torch.tensor(-1)),
    lambda chosen, out: chosen.masked_fill_(out, 8), lambda chosen, out: chosen.clamp(0, 8),
    lambda chosen, out: chosen.flatten().sort().values.view_as(chosen)])
def test_choices_among_which_some_are_dropped_are_among_the_classes(drop):
    with MetaTensorMode():
        chosen = drop(torch.topk(torch.rand(64, 8), 2).indices, torch.rand(64, 2) < 0.1)
        assert [len((chosen == e).nonzero()) for e in range(8)] == [16] * 8
        assert [len((chosen == e).any(-1).nonzero()) for e in range(8)] == [16] * 8  # the two of a token differ
        assert torch.histc(chosen.flatten().float(), bins=9, min=0, max=8).long().tolist() == [16] * 8 + [0]
        assert bool((chosen == 3).any())


def set_columns(scores, columns, value=-1e9):
    scores = scores.clone()
    scores[:, columns] = value
    return scores


def fill_around(scores):
    padded = torch.full((64, 12), torch.finfo(scores.dtype).min)
    padded[:, :8] = scores
    return padded


OK = [True, True, False, True, True, True, False, True]
#: scores of 8 experts in, out those of which some are barred; the experts that are left
BARRED = {
    "a column behind": (lambda s: torch.cat([s, torch.full((64, 1), -1e9)], -1), range(8)),
    "columns of the least number": (
        lambda s: torch.cat([s, s.new_full((64, 4), torch.finfo(s.dtype).min)], -1), range(8)),
    "columns before": (lambda s: torch.cat([torch.full((64, 2), -torch.inf), s], -1), range(2, 10)),
    "padding": (lambda s: F.pad(s, (0, 4), value=-1e9), range(8)),
    "padding on both sides": (lambda s: F.pad(s, (1, 3), value=-torch.inf), range(1, 9)),
    "a slice that is set": (lambda s: set_columns(torch.cat([s, s.new_zeros(64, 2)], -1), slice(8, None)), range(8)),
    "scores set in a tensor of the least number": (fill_around, range(8)),
    "one column that is set": (lambda s: set_columns(s, 2), [0, 1, 3, 4, 5, 6, 7]),
    "columns that are set": (lambda s: set_columns(s, [2, -1], -torch.inf), [0, 1, 3, 4, 5, 6]),
    "columns of a mask that are set": (lambda s: set_columns(s, ~torch.tensor(OK)), [0, 1, 3, 4, 5, 7]),
    "a mask": (lambda s: s.masked_fill(~torch.tensor(OK), -1e9), [0, 1, 3, 4, 5, 7]),
    "a mask in place": (lambda s: s.masked_fill_(~torch.tensor(OK), -1e9), [0, 1, 3, 4, 5, 7]),
    "a mask that is added": (lambda s: s + (1.0 - torch.tensor(OK).float()) * -1e9, [0, 1, 3, 4, 5, 7]),
    "a mask of many rows": (lambda s: s + torch.zeros(8).masked_fill(~torch.tensor(OK), -1e9).expand(64, 8),
                            [0, 1, 3, 4, 5, 7]),
    "a mask that is subtracted": (lambda s: s - (~torch.tensor(OK)).float() * 1e9, [0, 1, 3, 4, 5, 7]),
    "a mask with a factor": (lambda s: torch.sub(s, torch.tensor(OK).logical_not().float(), alpha=1e9),
                             [0, 1, 3, 4, 5, 7]),
    "a mask that is added into another tensor": (
        lambda s: torch.add(s, torch.zeros(8).masked_fill(~torch.tensor(OK), -1e9), out=torch.empty(64, 8)),
        [0, 1, 3, 4, 5, 7]),
    "a choice into another tensor": (
        lambda s: torch.where(torch.tensor(OK), s, torch.tensor(-1e9), out=torch.empty(64, 8)), [0, 1, 3, 4, 5, 7]),
    "the lesser of two": (
        lambda s: torch.minimum(s, torch.full((8,), torch.inf).masked_fill(~torch.tensor(OK), -1e9)),
        [0, 1, 3, 4, 5, 7]),
    "a choice": (lambda s: torch.where(torch.tensor(OK), s, -1e4), [0, 1, 3, 4, 5, 7]),
    "a choice among tensors": (
        lambda s: torch.where(torch.tensor(OK), s, torch.full_like(s, -1e9)), [0, 1, 3, 4, 5, 7]),
    "index_fill": (lambda s: s.index_fill(-1, torch.tensor([1]), -1e9), [0, 2, 3, 4, 5, 6, 7]),
    "noise upon it": (lambda s: F.pad(s, (0, 1), value=-1e9) + torch.randn(64, 9), range(8)),
    "another scale and dtype": (lambda s: (F.pad(s, (0, 1), value=-1e9) / 2.0).bfloat16().float(), range(8)),
    "no mask": (lambda s: s, range(8)),
    "a mask that bars nothing": (lambda s: s.masked_fill(~torch.tensor(OK), 0.5), range(8)),
    "other columns in other rows": (lambda s: s.masked_fill(torch.eye(8).bool().repeat(8, 1), -1e9), range(8)),
    "padding by a score": (lambda s: F.pad(s, (0, 2), value=0.0), range(10)),
    "what is overwritten": (lambda s: F.pad(s, (0, 2), value=-1e9).normal_(), range(10)),
}


@pytest.mark.parametrize("scale", [lambda s: s, lambda s: s.softmax(-1), lambda s: s.float().sigmoid()])
@pytest.mark.parametrize("name", BARRED)
def test_no_token_is_expected_in_a_barred_column(name, scale):
    bar, left = BARRED[name]
    with MetaTensorMode():
        scores = scale(bar(torch.rand(64, 8)))
        bins, share = scores.shape[-1], 128 / len(left)
        chosen = torch.topk(scores, 2).indices
        marks = F.one_hot(chosen, num_classes=bins).permute(2, 1, 0)
        found = {
            "marks": [len(torch.where(marks[e])[0]) for e in range(bins)],
            "compared": [len((chosen == e).nonzero()) for e in range(bins)],
            "summed": marks.sum((-1, -2)).tolist(),
            "counted": torch.bincount(chosen.flatten(), minlength=bins).tolist(),
            "added": torch.zeros(bins, dtype=torch.long).scatter_add_(
                0, chosen.flatten(), torch.ones(128, dtype=torch.long)).tolist()}
        for how, counts in found.items():
            assert all(abs(n - (share if e in left else 0)) < 1 for e, n in enumerate(counts)), (how, counts)
        assert all(sum(counts) == 128 for counts in (found["summed"], found["counted"], found["added"]))


class Router(torch.nn.Module):
    """Eight experts, of which a buffer says which get nothing; ``rows`` are how many tokens each got in each call."""

    def __init__(self, mask, bar, rows):
        super().__init__()
        self.__dict__["record"] = rows.append
        self.gate, self.bar = torch.nn.Linear(4, 8), bar
        self.experts = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(8)])
        self.register_buffer("mask", mask)

    def forward(self, x):
        chosen = torch.topk(self.bar(self.gate(x), self.mask), 2).indices
        rows = [torch.where(chosen == e)[0] for e in range(8)]
        self.record(list(map(len, rows)))
        for found, expert in zip(rows, self.experts):
            expert(x[found])
        return x


#: contents of a buffer, and how a router uses them
MASKS = {
    "infinite": (torch.zeros(8).masked_fill(~torch.tensor(OK), -torch.inf), torch.add),
    "far below": (torch.zeros(1, 8).masked_fill(~torch.tensor(OK), -1e9), torch.add),
    "in place": (torch.zeros(8).masked_fill(~torch.tensor(OK), -1e9), lambda s, m: s.clone().add_(m)),
    "in bfloat16": (torch.zeros(8).masked_fill(~torch.tensor(OK), -1e9).bfloat16(), torch.add),
    "compared": (torch.zeros(8).masked_fill(~torch.tensor(OK), -torch.inf),
                 lambda s, m: s.masked_fill(m == -torch.inf, -1e9)),
    "subtracted": (torch.zeros(8).masked_fill(~torch.tensor(OK), 1e9), torch.sub),
    "zeros and ones": (torch.tensor(OK).float(), lambda s, m: s + (1 - m) * -1e9),
    "a logarithm": (torch.tensor(OK).float(), lambda s, m: s + m.log()),
    "as booleans": (torch.tensor(OK).float(), lambda s, m: torch.where(m.bool(), s, -torch.inf)),
}


@pytest.mark.parametrize("name", MASKS)
def test_no_token_is_expected_where_a_buffer_of_floats_bars_an_expert(name):
    rows = []
    model = Router(*MASKS[name], rows)
    model(torch.rand(480, 4))
    assert sum(rows[0]) == 960 and rows[0][2] == rows[0][6] == 0
    found = profile(model, (torch.rand(60, 4),), mode="infer", device="h100")
    assert rows[-1] == [20, 20, 0, 20, 20, 20, 0, 20]  # 120 choices among six
    assert found.fwd_macs == 60 * 4 * 8 + 120 * 4 * 4


#: which choices are asked for, and how many of 64 tokens, of two choices each among eight classes, have such a one
MASKED = {
    "from one on": (lambda c: c >= 6, 32), "below one": (lambda c: c < 1, 16), "up to one": (lambda c: c <= 0, 16),
    "within bounds": (lambda c: (c >= 2) & (c < 4), 32), "not within": (lambda c: ~((c >= 1) & (c < 8)), 16),
    "one of two": (lambda c: (c == 3) | (c == 5), 32), "none": (lambda c: (c > 1) & (c < 2), 0),
    "one that is not there": (lambda c: c == 8, 0), "all but": (lambda c: (c != 3).logical_not(), 16),
}


@pytest.mark.parametrize("name", MASKED)
def test_a_rank_gets_the_tokens_of_its_own_experts(name):
    mask, rows = MASKED[name]
    real = mask(torch.rand(6400, 8).topk(2).indices)
    assert abs(real.sum().item() - 100 * rows) < 600
    with MetaTensorMode():
        marked = mask(torch.rand(64, 8).topk(2).indices)
        assert len(marked.nonzero()) == len(X[marked.any(-1)]) == rows


X = torch.rand(64, 16)
#: scores of 8 experts in, out the rows of X that each of them gets
WAYS = {
    "the largest": lambda s: [X[s.max(-1).indices == e] for e in range(8)],
    "a sort": lambda s: [X[(s.sort(-1, descending=True).indices[:, :2] == e).any(-1)] for e in range(8)],
    "a stable sort": lambda s: [
        X[(s.sort(stable=True, dim=-1, descending=True)[1][:, :2] == e).any(-1)] for e in range(8)],
    "argsort": lambda s: [X[(s.argsort(-1)[:, -2:] == e).any(-1)] for e in range(8)],
    "a draw": lambda s: (lambda chosen: [X[(chosen == e).any(-1)] for e in range(8)])(
        torch.multinomial(s.softmax(-1), 2)),
    "a class in a tensor": lambda s: [X[(s.topk(2).indices == torch.tensor(e)).any(-1)] for e in range(8)],
    "booleans that are scattered": lambda s: [
        X[torch.zeros(64, 8, dtype=torch.bool).scatter_(1, s.topk(2).indices, True)[:, e]] for e in range(8)],
    "weights that are scattered": lambda s: [
        X[torch.zeros(64, 8).scatter(1, s.topk(2).indices, s.topk(2).values)[:, e] > 0] for e in range(8)],
    "a masked selection": lambda s: [
        X.masked_select((s.topk(2).indices == e).any(1, keepdim=True)).view(-1, 16) for e in range(8)],
    "the largest of marks": lambda s: [
        X[(s.topk(2).indices == e).float().max(-1).values > 0.5] for e in range(8)],
    "marks above zero": lambda s: [X[(s.topk(2).indices == e).float().amax(-1) > 0] for e in range(8)],
    "those that there are": lambda s: [X[(s.topk(2).indices == e).any(-1)] for e in s.topk(2).indices.unique()],
    "how many there are of each": lambda s: [
        X[:count] for count in s.topk(2).indices.unique(return_counts=True)[1].tolist()],
}


@pytest.mark.parametrize("name", WAYS)
def test_each_of_alike_experts_gets_as_many_rows(name):
    """64 tokens of two choices, or of one, among eight; really, about as many of each."""
    rows = 8 if name == "the largest" else 16
    real = [len(found) for found in WAYS[name](torch.rand(64, 8))][:8]
    assert sum(real) == 8 * rows and all(found > 0 for found in real)
    with MetaTensorMode():
        assert [len(found) for found in WAYS[name](torch.rand(64, 8))][:8] == [rows] * 8


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float64])
def test_numbers_that_the_host_does_not_compare_are_written_in_part(dtype):
    """States of an optimizer in eight bits: torch on a CPU has no comparison of these."""
    with MetaTensorMode():
        states = torch.zeros(4, 8).to(dtype)
        states[:, 2:4].copy_(torch.ones(4, 2).to(dtype))
        assert states.float()[:, 2:4].sum().item() == 8
        assert states.fill_(1).float().sum().item() == 32


def test_a_real_router_sends_nothing_to_barred_columns():
    torch.manual_seed(0)
    for name, (bar, left) in BARRED.items():
        if name not in ("padding by a score", "what is overwritten"):
            assert set(torch.topk(bar(torch.rand(64, 8)), 2).indices.flatten().tolist()) == set(left), name


def test_a_bound_that_changes_choices_is_not_passed_over():
    with MetaTensorMode():
        chosen = torch.topk(torch.rand(64, 8), 2).indices.clamp(max=3)
        assert [len((chosen == e).nonzero()) for e in range(5)] == [16, 16, 16, 80, 0]


@pytest.mark.parametrize(("call", "text"), [
    (lambda x: x.nonzero(), "unknown_size='balanced'"), (lambda x: x.long().bincount(), "scatter_add_"),
    (lambda x: x.repeat_interleave(x.long()), "output_size")])
def test_the_policy_error_refuses(call, text):
    with MetaTensorMode(MetaOptions(unknown_size="error")), pytest.raises(DataDependentError, match=text):
        call(torch.rand(4))


@pytest.mark.parametrize(("call", "shape"), [
    (lambda x: x[x > 0], (12,)), (lambda x: torch.masked_select(x, x > 0), (12,)), (lambda x: x.nonzero(), (12, 2)),
    (lambda x: torch.unique(x), (12,)), (lambda x: torch.unique(x, dim=0), (3, 4))])
def test_without_any_hint_all_elements_count(call, shape):
    with MetaTensorMode() as mode:
        assert tuple(call(torch.rand(3, 4)).shape) == shape
        assert mode.state.assumptions


@pytest.mark.parametrize("bad", [dict(unknown_size="most"), dict(unknown_size=-1), dict(unknown_value="guess"),
                                 dict(unknown_condition="maybe"), dict(skew=-float("inf")), dict(skew="much")])
def test_options_that_mean_nothing_are_refused(bad):
    with pytest.raises(InputError, match=repr(next(iter(bad.values())))):
        MetaOptions(**bad)


@pytest.mark.parametrize("count",
                         [lambda chosen: torch.bincount(chosen, minlength=4),
                          lambda chosen: torch.histc(chosen.float(), bins=4, min=0, max=3)])
def test_counts_of_unknown_classes_are_balanced_so_that_routing_by_offsets_works(count):
    with MetaTensorMode() as mode:
        chosen = torch.rand(10, 4, device="cuda").argmax(-1)
        ends = count(chosen).cumsum(0).long()
        assert ends.tolist() == [2, 5, 7, 10]
        x = torch.rand(10, 8, device="cuda")
        assert [x[0 if i == 0 else ends[i - 1]:ends[i]].shape[0] for i in range(4)] == [2, 3, 2, 3]
        assert any("fall evenly into 4 bins" in a for a in mode.state.assumptions)


@pytest.mark.parametrize(("policy", "classes", "each"), [("balanced", 5, 4), ("worst", 5, 20), (3, 3, 3)])
def test_classes_picked_from_known_ones_are_no_more_than_those(policy, classes, each):
    """Labels of boxes: one of five for each, those of boxes with a high score kept, then taken class by class."""
    with MetaTensorMode(MetaOptions(unknown_size=policy)):
        labels = torch.arange(5).repeat(4)
        kept = labels[torch.rand(20).argsort()]
        found = torch.unique(kept)
        assert len(found) == classes
        assert [len(torch.where(kept == label)[0]) for label in found] == [each] * classes


class Cut(torch.nn.Module):
    """Cuts a region around each of some anchors, moved by what a layer says, out of an image."""

    def __init__(self, anchors):
        super().__init__()
        self.anchors = torch.tensor(anchors)
        self.moves = torch.nn.Linear(4, 4)

    def forward(self, image):
        boxes = (self.anchors + self.moves(self.anchors)).clamp(min=0)
        sizes = []
        for x1, y1, x2, y2 in boxes:
            width, height = int(x2 - x1), int((y2 - y1).ceil().item())
            sizes.append(torch.nn.functional.interpolate(image, size=(height, width)).sum())
        return torch.stack(sizes)


ANCHORS = [[0.0, 0.0, 4.0, 3.0], [2.0, 1.0, 10.0, 6.0]]


def test_unknown_scalars_are_what_is_known_of_them():
    """Moves are taken as zero, so the boxes are the anchors: 4 x 3 and 8 x 5."""
    p = profile(Cut(ANCHORS), args=(torch.rand(1, 2, 16, 16),), mode="infer")
    sizes = [op.written_bytes // 4 for op in p.modules.operators if "upsample" in op.operator]
    assert sizes == [2 * 4 * 3 + 2 * 8 * 5]
    assert any("was taken as 8, its value where what the layers compute is zero" in a for a in p.assumptions)


def test_what_the_host_has_no_kernel_for_is_unknown_as_the_rest():
    """Anchors behind a layer whose kernel on the claimed device, cuDNN's, is not on the host."""
    def cut(m, x):
        y = m.norm(x)
        width = torch.tensor([2.0, 5.0], device=x.device) + y.mean((2, 3))[0, :2]
        return y[..., :int(width[1])].sum()

    p = profile(Call(cut, norm=torch.nn.BatchNorm2d(4)), args=(torch.rand(2, 4, 8, 8),))
    assert any("was taken as 5, its value where what the layers compute is zero" in a for a in p.assumptions)
    assert any("cudnn_batch_norm" in op.operator for module in p.modules.walk() for op in module.operators)


@pytest.mark.parametrize("options", [ProfileOptions(unknown_value="error"), None])
def test_a_scalar_of_which_nothing_is_known_is_an_error(options):
    model, args = Cut(ANCHORS), (torch.rand(1, 2, 16, 16),)
    if options is None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), Call(lambda m, x: x * int(x.argmax())))
        args = (torch.rand(2, 4),)
    with pytest.raises(DataDependentError, match=r"(?s)test_data_dependent.py:\d+.*Way out"):
        profile(model, args=args, mode="infer", options=options)


def test_numpy_is_given_finite_numbers_where_zeros_lead_to_none():
    with MetaTensorMode(MetaOptions(unknown_value="expected")):
        scales = torch.tensor([1.0, 0.0]) + torch.rand(2)
        assert (torch.tensor([3.0, 4.0]) * scales).numpy().tolist() == [3, 0]
        assert (torch.tensor([3.0, 4.0]) / scales).numpy().tolist() == [1, 1]  # and not [3, inf]


def test_indices_that_data_gives_are_taken_to_be_the_first():
    with MetaTensorMode(MetaOptions(unknown_value="expected")):
        anchors = torch.tensor(ANCHORS)
        kept = anchors[torch.where(torch.rand(2) > 0.5)[0]]
        assert (kept * 2).tolist() == [[2 * v for v in row] for row in ANCHORS]


ROWS = 4000


def unknown(count):
    """So many of 4000 places, which data gives."""
    return torch.rand(ROWS).topk(count).indices


def marked(count, dtype=torch.bool):
    marks = torch.zeros(ROWS, dtype=dtype)
    marks[unknown(count)] = 1
    return marks


def scattered(shape, *written):
    out = torch.zeros(shape, dtype=torch.long)
    return out.scatter_(1, torch.rand(shape).topk(3).indices, *written)


def part_of(marks, write):
    write(marks[:100])
    return marks


# What is marked in zeros, and the most that can be: more than on data only where two marks may meet.
MARKED = {
    "rows of a sampler": (lambda: marked(256), 256), "of another dtype": (lambda: marked(100, torch.uint8) >= 1, 100),
    "several images": (lambda: torch.cat([marked(100), marked(28)]), 128),
    "either": (lambda: marked(9) | marked(8), 17),
    "both": (lambda: (torch.rand(ROWS) > 0) & marked(9), 9), "chosen classes": (lambda: scattered((40, 100), 1), 120),
    "of a known mask": (lambda: (torch.arange(ROWS) < 100) | marked(10), 110),
    "view": (lambda: marked(9).view(40, -1), 9),
    "filled": (lambda: torch.zeros(ROWS).long().masked_fill_(marked(60), 5), 60), "not": (lambda: ~marked(9), ROWS),
    "whole rows": (lambda: torch.zeros(40, 100).bool().index_fill_(0, torch.rand(40).topk(3).indices, True), 300),
    "chosen": (lambda: torch.where(marked(60), 7, 0), 60), "expanded": (lambda: marked(9).expand(5, -1).clone(), 45),
    "a part of it": (lambda: part_of(marked(60), lambda part: part.logical_and_(marked(3)[:100])), 60),
    "a part filled": (lambda: part_of(marked(60), lambda part: part.fill_(True)), 160),
    "zeros put": (lambda: marked(60).index_put_((unknown(9),), torch.tensor(False)), 60),
    "more than contents are kept of": (lambda: torch.zeros(3_000_000).bool().index_fill_(0, unknown(9), True), 9),
    "plus one": (lambda: marked(9, torch.long) + 1, ROWS),
    "overwritten": (lambda: marked(9).copy_(torch.rand(ROWS) > 0), ROWS),
}


@pytest.mark.parametrize("name", MARKED)
def test_what_data_marks_in_zeros_is_no_more_than_was_written(name):
    make, most = MARKED[name]
    real = torch.count_nonzero(make())
    assert real <= most
    for policy in ("balanced", "worst"):
        with MetaTensorMode(MetaOptions(unknown_size=policy)):
            assert len(make().nonzero()) == most


class Sampler(torch.nn.Module):
    """Trains on 256 of the rows, as detectors sample anchors."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64, bias=False)

    def forward(self, x):
        chosen = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        chosen[self.layer(x)[:, 0].topk(256).indices] = True
        return self.layer(x[torch.where(chosen)[0]])


@pytest.mark.parametrize("reuse", [False, True])
def test_a_layer_behind_a_sampler_is_counted_for_what_it_samples(reuse):
    p = profile(torch.nn.Sequential(Sampler(), Sampler()), args=(torch.rand(ROWS, 64),), mode="infer", reuse=reuse)
    assert p.fwd_macs == (ROWS + 3 * 256) * 64 * 64
    assert any("256 of 4000 elements taken as nonzero (no more are set)" in a for a in p.assumptions)

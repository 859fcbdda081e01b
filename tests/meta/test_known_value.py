"""Values of small tensors follow from their factory, through views and in-place operators, as on real tensors."""
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from analyzer import MetaTensorMode
from analyzer.errors import DataDependentError
from analyzer.meta.state import MetaOptions
from analyzer.meta.value.known_value import LARGEST_FLOATING, LARGEST_INTEGER, Written


@pytest.mark.parametrize("compute", [
    lambda: (torch.arange(4)[:, None] >= torch.arange(4)[None]),
    lambda: torch.tensor([[1, 2], [3, 4]]).t().contiguous().view(-1),
    lambda: torch.cat([torch.zeros(2, dtype=torch.int64), torch.arange(3)]),
    lambda: torch.stack(torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij")),
    lambda: torch.where(torch.arange(4) > 1, 1, 0),
    lambda: torch.arange(4).to(torch.float32).mean(),
    lambda: torch.arange(4).repeat_interleave(torch.tensor([0, 1, 2, 1])),
    lambda: torch.arange(4).nonzero(),
    lambda: torch.tensor([1, 0, 2])[torch.tensor([True, False, True])],
    lambda: torch.tensor([3, 1, 3]).unique(),
    lambda: torch.zeros(3, dtype=torch.int64).scatter(0, torch.tensor([1]), 5),
    lambda: torch.tensor_split(torch.arange(5), torch.tensor([1, 3]))[1],
    lambda: torch.arange(6).view(2, 3).tensor_split(tensor_indices_or_sections=torch.tensor(3), dim=1)[1],
])
def test_values_equal_those_of_real_tensors(compute):
    expected = compute().tolist()
    with MetaTensorMode():
        assert compute().tolist() == expected
        assert compute().cuda().tolist() == expected


def _in_place(x):
    x[1:3] = 7
    y = x.view(2, 3)
    y.add_(1)
    y[:, 0].zero_()
    x.t_()
    z = y.clone()
    z += x.view(2, 3)
    y.fill_(2)
    return [x.tolist(), y.tolist(), z.tolist()]


def test_in_place_operators_reach_every_view():
    expected = _in_place(torch.arange(6))
    with MetaTensorMode():
        assert _in_place(torch.arange(6)) == expected


OPERATIONS = {
    "add_": lambda ts, i, n: ts[i].add_(n),
    "mul": lambda ts, i, n: ts.append(ts[i] * n),
    "slice": lambda ts, i, n: ts.append(ts[i][n % max(1, len(ts[i])):]) if ts[i].dim() else None,
    "flip": lambda ts, i, n: ts.append(ts[i].flip(0)) if ts[i].dim() else None,
    "fill_": lambda ts, i, n: ts[i].fill_(n),
    "copy_": lambda ts, i, n: ts[i].copy_(ts[i].flip(0)) if ts[i].dim() else None,
    "setitem": lambda ts, i, n: ts[i].__setitem__(0, n) if ts[i].dim() and len(ts[i]) else None,
    "as_strided": lambda ts, i, n: ts.append(torch.as_strided(ts[0], (2, 2), (1, 2), n % 3)),
    "sum": lambda ts, i, n: ts.append(ts[i].sum()),
    "foreach": lambda ts, i, n: torch._foreach_add_([ts[i], torch.arange(2)], n),
    "gt": lambda ts, i, n: ts.append((ts[i] > n).long()),
}


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 10), st.integers(-3, 3)), max_size=12))
def test_any_program_of_integer_operators_gives_the_values_of_a_real_run(program):
    def run():
        tensors = [torch.arange(8)]
        for name, i, n in program:
            OPERATIONS[name](tensors, i % len(tensors), n)
        return [t.tolist() for t in tensors]

    expected = run()
    with MetaTensorMode():
        assert run() == expected


def test_a_long_chain_of_updates_is_no_deep_recursion():
    with MetaTensorMode():
        x = torch.zeros((), dtype=torch.int64)
        for _ in range(5000):
            x = x + 1
        assert x.item() == 5000


def test_unknown_data_raises_an_error_that_names_the_line_and_the_way_out():
    with MetaTensorMode(), pytest.raises(DataDependentError,
                                         match=r"(?s)aten.item.*test_known_value.py:\d+.*placeholder"):
        bool(torch.rand(3).sum() > 1)


def test_a_placeholder_is_taken_and_noted_where_the_user_chose_so():
    with MetaTensorMode(MetaOptions(unknown_value="placeholder")) as mode:
        assert torch.rand(3).sum().item() == 1.0
        assert len(mode.state.assumptions) == 1


@pytest.mark.parametrize(("most", "dtype", "is_made"), [
    (LARGEST_INTEGER, torch.int64, True), (LARGEST_INTEGER, torch.float32, True), (LARGEST_INTEGER, torch.int64, False),
    (LARGEST_FLOATING, torch.float32, False)])
def test_only_small_contents_are_kept_and_only_small_data_is_read(most, dtype, is_made):
    data = [torch.ones(count, dtype=dtype) for count in (most, most + 1)]
    with MetaTensorMode():
        known, unknown = (torch.ones(len(x), dtype=dtype) if is_made else x + 0 for x in data)
        assert known[-1].item() == 1
        with pytest.raises(DataDependentError):
            unknown[-1].item()


def test_a_write_of_unknown_data_is_forgotten_everywhere():
    with MetaTensorMode():
        x = torch.zeros(4, dtype=torch.int64)
        view = x[:2]
        x[3] = torch.randint(0, 5, (1,)).expand(2)[0] + torch.randint(0, 9, (4, 4)).sum()
        with pytest.raises(DataDependentError):
            view[0].item()


def test_what_is_read_into_the_array_of_an_empty_tensor_is_in_the_tensor():
    with MetaTensorMode(MetaOptions(unknown_value="placeholder")):
        tokens = torch.empty(6, dtype=torch.uint16, pin_memory=True)
        assert io.BytesIO(bytes([7, 0, 1, 0, 7, 0, 0, 1, 2, 0, 7, 0])).readinto(tokens.numpy()) == 12
        assert tokens[2:].tolist() == [7, 256, 2, 7] and (tokens == 7).nonzero().tolist() == [[0], [2], [5]]
        assert tokens.cuda()[3].item() == 256


def test_a_number_is_copied_to_a_mask():
    with MetaTensorMode():
        mask = torch.zeros(4, dtype=torch.bool)
        mask[1:].copy_(True)
        assert mask.tolist() == [False, True, True, True]
        big = torch.zeros(1 << 22, dtype=torch.bool, device="cuda")  # of which only is known how many are set
        assert big.copy_(1).nonzero().shape[0] == 1 << 22 and big.copy_(0).nonzero().shape[0] == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_known_contents_leave_as_a_numpy_array(dtype):
    with MetaTensorMode():
        x = torch.tensor([3, 0, 1]).to(dtype)
        assert x.numpy().tolist() == [3, 0, 1] == x.tolist() and (x + 1).numpy().tolist() == [4, 1, 2]
        assert __import__("numpy").asarray(x[1:]).tolist() == [0, 1]


@pytest.mark.parametrize("index", [
    [0, 2], (slice(None), [-1, 0]), (Ellipsis, [True, False, True]), [[0, 1], [1, 0]],
    (slice(None), __import__("numpy").array([1, 1])), ((0, 1), (2, 2))])
def test_indices_given_as_lists_keep_their_values(index):
    real = torch.arange(9).view(3, 3)
    picked = real[index].tolist()
    real[index] = 7
    with MetaTensorMode():
        x = torch.arange(9).view(3, 3)
        assert x[index].tolist() == picked
        x[index] = 7
        assert x.tolist() == real.tolist()


def pick_rows(x, places):
    rows, columns = zip(*places)  # tuples of tensors without dimensions
    x[rows, columns] = 7
    return x[rows, (0, columns[0])]


def test_indices_given_as_tuples_of_scalars_keep_their_values():
    picked = pick_rows(real := torch.arange(9).view(3, 3), torch.tensor([[0, 1], [2, 2]]))
    with MetaTensorMode():
        mine = pick_rows(x := torch.arange(9).view(3, 3), torch.tensor([[0, 1], [2, 2]]))
        assert (mine.tolist(), x.tolist()) == (picked.tolist(), real.tolist())
        unknown = pick_rows(torch.rand(3, 3), torch.rand(2, 2).long())
        assert unknown.shape == (2,)


def test_unknown_floating_data_is_taken_to_be_finite_and_that_is_noted():
    with MetaTensorMode() as mode:
        x = torch.rand(300, 300)
        assert torch.isfinite(x).all().item() is True
        assert torch.isnan(x).any().item() is False
        assert torch.isinf(x).any().item() is False
        assert any("finite" in a for a in mode.state.assumptions)
        assert torch.isfinite(torch.tensor([1.0, float("inf")])).all().item() is False
        with pytest.raises(DataDependentError):
            bool((x == float("-inf")).any())


def test_a_number_that_is_copied_onto_itself_stays_unknown():
    with MetaTensorMode():
        x = torch.empty((), device="cuda")
        x.copy_(x)
        with pytest.raises(DataDependentError, match="needs the contents of a tensor"):
            float(x)


def test_integers_are_counted_as_cuda_counts_them():
    with MetaTensorMode():
        counted = torch.histc(torch.arange(6, device="cuda") % 4, bins=4, min=0, max=4)
        assert (counted.dtype, counted.tolist()) == (torch.int64, [2, 2, 1, 1])


@pytest.mark.parametrize("write", [
    lambda x: x.fill_(7), lambda x: x[1:].zero_(), lambda x: x.__setitem__(0, 9), lambda x: x.view(2, 3).add_(1),
    lambda x: torch._foreach_zero_([x]), lambda x: torch.nn.init.ones_(x), lambda x: x.copy_(torch.ones(1))])
def test_what_is_written_outside_of_the_mode_is_not_known_afterwards(write):
    """It was taken for what it held before."""
    with MetaTensorMode():
        x = torch.arange(6)
    write(x)
    with MetaTensorMode(), pytest.raises(DataDependentError, match="needs the contents of a tensor that has no data"):
        x.sum().item()


def test_buffers_that_are_loaded_outside_of_the_mode_are_known():
    def make():
        layer = torch.nn.Module()
        layer.steps = torch.nn.Buffer(torch.arange(4))
        layer.window = torch.nn.Buffer(torch.arange(6).view(2, 3).t())
        return layer
    real = make()
    real.steps.mul_(10)
    with MetaTensorMode():
        model, other = make(), make()
    model.load_state_dict(real.state_dict())
    real.steps.zero_()
    other.load_state_dict(model.state_dict())
    with MetaTensorMode():
        for loaded in (model, other):
            assert loaded.steps.tolist() == [0, 10, 20, 30] and loaded.window.tolist() == [[0, 3], [1, 4], [2, 5]]


def _placed():
    order = torch.tensor([2, 0, 1])
    inverse, halves = torch.empty_like(order), torch.empty(4, dtype=torch.int32)
    marks = order.new_empty(2, dtype=torch.bool)
    inverse[order] = torch.arange(3)
    halves[:2] = 3
    halves[2:] = torch.arange(2, dtype=torch.int32)
    marks[0], marks[1:] = True, False
    packed = nn.utils.rnn.pack_sequence([torch.rand(n, 4) for n in (2, 4, 3)], enforce_sorted=False)
    return [inverse.tolist(), halves.tolist(), marks.tolist(), torch.empty(3, dtype=torch.int64).index_copy_(
        0, order, torch.arange(3)).tolist(), packed.unsorted_indices.tolist(),
        [len(part) for part in nn.utils.rnn.unpack_sequence(packed)]]


@pytest.mark.parametrize("options", [{}, {"unknown_value": "placeholder"}])
def test_what_is_put_into_an_empty_tensor_part_by_part_is_known(options):
    """The order of a PackedSequence is undone so; as a placeholder every sample was the first."""
    expected = _placed()
    assert expected[-1] == [2, 4, 3]
    with MetaTensorMode(MetaOptions(**options)):
        assert _placed() == expected


def test_what_nothing_was_written_to_is_not_known():
    with MetaTensorMode(), pytest.raises(DataDependentError):
        torch.empty(2, dtype=torch.int64).add_(1)[0].item()


@pytest.mark.parametrize("is_training", [True, False])
def test_scores_filled_like_a_known_mask_are_known(is_training):
    """`torch.nn.TransformerEncoder` asks whether a mask is that of a causal model."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(is_training)
    mask = torch.zeros(4, 4, dtype=torch.bool)
    with MetaTensorMode():
        assert model(torch.zeros(2, 4, 8), mask.clone()).shape == (2, 4, 8)


def test_a_buffer_that_is_filled_piece_by_piece_is_looked_at_once_a_piece(monkeypatch):
    """Each write reads what was there before, twice: a search without a memory of what it saw takes 2**64 steps."""
    asked = 0
    parents = Written._parents

    def count(written):
        nonlocal asked
        asked += 1
        assert asked < 1000
        return parents(written)

    monkeypatch.setattr(Written, "_parents", count)
    with MetaTensorMode():
        tokens = torch.empty(1 << 15, dtype=torch.int64)
        for start in range(0, 1 << 15, 1 << 9):
            tokens[start:start + (1 << 9)] = torch.tensor([7] * (1 << 9))
        rows = nn.Embedding(8, 4)(tokens)
        assert rows.shape == (1 << 15, 4) and 64 <= asked
        known = tokens.untyped_storage().known
        assert isinstance(known, Written) and known.before is known.call is None  # earlier contents are let go

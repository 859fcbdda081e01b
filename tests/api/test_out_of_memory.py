"""A step that needs more memory than there is: where it ends, what is known, and that all is as it was."""
import pytest
import torch
from torch import nn

from analyzer import Profile, ProfileOptions, profile
from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.meta.mode import MetaTensorMode
from analyzer.meta.state import current
from analyzer.parallel import world

MIB = 2**20


def blocks():
    """Four linear layers of 16 MiB each; without bias, so that every size is exact."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.Sigmoid()) for _ in range(4)))


def run(capacity_mib, rows=2048, **more):
    more = {"optimizer": "momentum", **more}
    return profile(blocks, args=(torch.empty(rows, 2048), ), options=ProfileOptions(capacity_bytes=capacity_mib * MIB),
                   **more)


# Held: 64 MiB of weights, 16 of input, 33 of library workspaces from the first product on. Each block then keeps the 16
# MiB that its sigmoid returns; its product's 16 MiB die when the sigmoid has read them. With rows=2048 every block is
# 16 MiB = one segment.
@pytest.mark.parametrize(("capacity_mib", "operator", "phase", "step", "node", "module", "short_mib"), [
    (79, "placing the model and its inputs", "setup", None, None, None, 1),    # 64 + 16
    (90, "aten.mm.default", "forward", 0, "_0_0", "0.0", 6),                   # 80 + 16 of the first product
    (111, "aten.mm.default", "forward", 0, "_0_0", "0.0", 17),                 # 80 + 16 + 32 of cuBLAS
    (143, "aten.sigmoid.default", "forward", 0, "_0_1", "0.1", 1),             # 80 + 32 + 32
])
def test_where_the_first_step_ends(capacity_mib, operator, phase, step, node, module, short_mib):
    p = run(capacity_mib)
    short = p.out_of_memory
    assert (short.operator, short.phase, short.step, short.node, short.module_path) == (operator, phase, step, node,
                                                                                        module)
    assert short.short_bytes == short_mib * MIB
    assert short.capacity_bytes == capacity_mib * MIB
    assert short.reserved_bytes + short.requested_bytes - short.short_bytes <= short.capacity_bytes


def test_a_rank_ends_where_its_memory_does():
    with world(2, 0, cluster="dgx_h100"):
        short = run(143, device="h100_sxm").out_of_memory
    assert (short.operator, short.phase, short.step, short.module_path) == ("aten.sigmoid.default", "forward", 0, "0.1")
    assert short.short_bytes == MIB  # as of a model outside of a world


class Growing(nn.Module):
    """Makes ever larger tensors, each of which needs a segment of its own while those before it are cached."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        for mib in range(30, 90, 10):
            torch.empty(mib * MIB, dtype=torch.uint8, device=x.device)
        return (x * self.weight).sum()


def test_a_rank_that_reserves_too_much_gives_cached_memory_back():
    card, args = DeviceSpec("card", memory_bytes=143 * MIB), (torch.empty(4),)
    plain = profile(Growing, args=args, device=card)
    assert 80 * MIB < plain.peak_allocated_bytes < plain.peak_reserved_bytes <= 143 * MIB
    with world(2, 0):
        built, held = profile(Growing, args=args, device=card), Growing().cuda()
        given = profile(held, args=args, device=card)
    assert (built.peak_allocated_bytes, built.peak_reserved_bytes, built.verdict.fits) == (
        plain.peak_allocated_bytes, plain.peak_reserved_bytes, plain.verdict.fits)
    assert any(a.startswith("the allocator may take 143.00 MiB") for a in built.assumptions)
    assert given.peak_reserved_bytes > 300 * MIB and "Give `profile` the function that builds" in given.assumptions[-1]


def test_what_is_not_finished_is_unknown():
    p = run(200)  # forward needs 80 + 32 + 4 * 16 + 16 = 192 MiB, backward another 32 of cuBLAS
    short = p.out_of_memory
    assert (short.phase, short.step) == ("backward", 0)
    macs = 4 * 2048**3
    assert (p.fwd_macs, p.fwd_flops) == (macs, 2 * macs + p.fwd_flops - 2 * macs)
    assert {
        p.bwd_macs, p.bwd_flops, p.recompute_flops, p.optimizer_flops, p.optimizer_bytes, p.step_seconds,
        p.step_seconds_range, p.bwd_seconds
    } == {None}
    assert list(p.first_step) == ["forward"] and p.phases == {}
    assert p.modules.fwd_macs == macs and p.modules.bwd_macs is None
    assert {n.bwd_flops for n in p.nodes} == {None}
    assert next(n for n in p.nodes if n.name == "_0_1").incremental_bytes == 16 * MIB
    assert (p.params, p.param_bytes) == (4 * 2048**2, 64 * MIB)


def test_in_the_forward_pass_only_the_model_is_known():
    p = run(150)
    assert p.out_of_memory.phase == "forward"
    assert {p.fwd_macs, p.fwd_flops, p.bwd_flops, p.fwd_seconds} == {None}
    assert {n.incremental_bytes for n in p.nodes} == {None} and {m.activation_bytes for m in p.modules.walk()} == {None}
    assert p.first_step == p.phases == {}
    assert p.param_bytes == 64 * MIB and p.modules.params == 4 * 2048**2


def test_a_later_step_leaves_the_first_one_known():
    whole = profile(blocks, args=(torch.empty(2048, 2048),), optimizer="momentum")
    # the second step holds 64 MiB of momenta more than the first at its peak
    capacity = whole.peak_reserved_bytes // MIB - 8
    p = run(capacity)
    assert p.out_of_memory.step == 1
    assert (p.fwd_macs, p.bwd_macs, p.optimizer_bytes) == (whole.fwd_macs, whole.bwd_macs, whole.optimizer_bytes)
    assert {n: f.allocated_bytes
            for n, f in p.first_step.items()} == {n: f.allocated_bytes for n, f in whole.first_step.items()}
    assert p.phases == {}
    enough = run(whole.peak_reserved_bytes // MIB)
    assert enough.out_of_memory is None and enough.peak_allocated_bytes == whole.peak_allocated_bytes


@pytest.mark.parametrize("capacity_mib", [143, 260])
def test_holders_are_those_of_the_moment_it_ran_out(capacity_mib):
    p = run(capacity_mib)
    assert sum(h.bytes for h in p.holders) == p.out_of_memory.allocated_bytes
    assert {h.label for h in p.holders if h.category == "parameter"} == {f"{i}.0.weight" for i in range(4)}
    assert p.peak_allocated_bytes >= p.out_of_memory.allocated_bytes
    assert sum(p.peak_by_category.values()) == p.peak_allocated_bytes


def test_the_text_tells_it():
    text = run(143).summary()
    assert (
        "OUT OF MEMORY\n  aten.sigmoid.default in forward of step 1, node _0_1, module 0.1 asks for 16.00 MiB, 1.00 "
        "MiB more than there is: "
        "128.00 MiB allocated, 128.00 MiB reserved, 143.00 MiB on the device") in text
    assert "When memory ran out, largest holders" in text and "Peak memory until it ran out" in text
    assert "placing the model and its inputs in setup" in run(79).summary()


@pytest.mark.parametrize("capacity_mib", [79, 260])
def test_every_view_works(capacity_mib):
    p = run(capacity_mib)
    assert Profile.from_json(p.to_json()) == p
    assert "OUT OF MEMORY" in p.to_html()
    p.table(), p.to_chrome_trace()
    assert (p.modules is None) == (p.out_of_memory.phase == "setup")
    assert p.fits().fits is None and p.fits(DeviceSpec("small", memory_bytes=capacity_mib * MIB)).fits is False


def test_all_is_as_it_was():
    model = blocks()
    before = {name: (p, p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()}
    call = nn.Module.__call__
    for capacity_mib in (79, 260):
        p = profile(model, args=(torch.empty(2048, 2048), ), optimizer="momentum",
                    options=ProfileOptions(capacity_bytes=capacity_mib * MIB))
        assert p.out_of_memory is not None
        assert {name: (p, p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()} == before
        assert all(p.grad is None for p in model.parameters())
        assert current() is None and nn.Module.__call__ is call and not torch.cuda.is_available()
    assert model(torch.ones(1, 2048)).shape == (1, 2048)


def test_a_step_that_catches_the_error_goes_on():
    """As training loops do that try a smaller batch: only what leaves the step ends it."""
    sizes = []

    def step(model, optimizer, x):
        rows = len(x)
        while rows:
            try:
                model(x[:rows]).sum().backward()
                break
            except MemoryError:
                rows //= 2
        sizes.append(rows)
        optimizer.step()
        optimizer.zero_grad()

    p = run(400, rows=8192, step=step, optimizer="sgd")
    assert p.out_of_memory is None and sizes == [4096, 4096]


def test_the_devices_own_memory():
    card = DeviceSpec("card", memory_bytes=143 * MIB)
    p = profile(blocks, args=(torch.empty(2048, 2048),), device=card, options=ProfileOptions(limit_to_device=True))
    assert p.out_of_memory.capacity_bytes == 143 * MIB
    assert any(a.startswith("the allocator may take 143.00 MiB: the memory of card") for a in p.assumptions)
    with pytest.raises(InputError, match="the memory of 'blank' is not known"):
        profile(blocks, args=(torch.empty(2, 2048), ), device=DeviceSpec("blank"),
                options=ProfileOptions(limit_to_device=True))


@pytest.mark.parametrize(("options", "text"), [
    (dict(capacity_bytes=0), "capacity_bytes=0: must be positive"),
    (dict(capacity_bytes=1, limit_to_device=True), "limit_to_device=True and capacity_bytes=1: give one"),
])
def test_limits_that_cannot_be(options, text):
    with pytest.raises(InputError, match=text):
        ProfileOptions(**options)


def test_under_the_mode_alone_the_error_is_raised_and_books_balance():
    from analyzer.meta.state import MetaOptions

    mode = MetaTensorMode(MetaOptions(capacity_bytes=24 * MIB))
    with mode:
        kept = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")  # takes a segment of 20 MiB
        with pytest.raises(DeviceOutOfMemoryError, match="33,554,432 bytes"):
            torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        assert mode.space.allocator().allocated_bytes == kept.nbytes
        with pytest.raises(DeviceOutOfMemoryError):
            kept.untyped_storage().resize_(64 * MIB)
        del kept
        assert mode.space.allocator().allocated_bytes == 0

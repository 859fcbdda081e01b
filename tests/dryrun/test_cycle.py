"""A script that does more than update has a cycle: its phases come in the order of the run, each with its own peak."""
import re
import textwrap

import pytest

import analyzer
from analyzer import Profile
from analyzer.errors import InputError
from analyzer.tools.dryrun.script import dry_run

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 64), nn.Linear(64, 100, bias=False)
    def forward(self, ids):
        return self.head(self.embed(ids))
def build(width=8, hidden=128):
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, width)).cuda()
class Generator(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
class Critic(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
def batch(rows=32):
    return torch.randn(rows, 64, device="cuda")
def train(loss, *optimizers):
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
"""
PRODUCTS = 2 * 32 * (64 * 128 + 128 * 8)  # FLOPs of `build` on `batch`, which do little else

POLICY = """
model, reference, sampler = Net().cuda(), Net().cuda(), Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for update in range(6):
    ids = torch.randint(0, 100, (8, 1), device="cuda")
    with torch.no_grad():
        for _ in range(16):
            ids = torch.cat([ids, sampler(ids)[:, -1:].argmax(-1)], 1)
        old = model(ids).log_softmax(-1)
        expected = reference(ids).log_softmax(-1)
    for epoch in range(4):
        new = model(ids).log_softmax(-1)
        train((new - old).exp().mean() + (expected - new).mean(), optimizer)
    sampler.load_state_dict(model.state_dict())
    torch.save(model.state_dict(), "policy.pt")
"""
OF_EACH = {  # the script, the phases of a cycle, its optimizer steps, parts of the first and the last phase
    "policy": (POLICY, ("rollout", "scoring", "update", "sync", "save"), 4),
    "gan": ("""
        generator, critic = Generator().cuda(), Critic().cuda()
        of_generator, of_critic = [torch.optim.Adam(m.parameters()) for m in (generator, critic)]
        for step in range(6):
            train(critic(generator(batch()).detach()).mean() - critic(batch()).mean(), of_critic)
            train(-critic(generator(batch())).mean(), of_generator)
        """, ("update Critic", "update Generator"), 1),
    "a critic that steps more often": ("""
        generator, critic = Generator().cuda(), Critic().cuda()
        of_generator, of_critic = [torch.optim.Adam(m.parameters()) for m in (generator, critic)]
        for step in range(20):
            with torch.no_grad():
                fake = generator(batch())
            train(critic(fake).mean() - critic(batch()).mean(), of_critic)
            if step % 5 == 4:
                train(-critic(generator(batch())).mean(), of_generator)
        """, ("scoring", "update Critic", "update Generator"), 1),
    "distillation": ("""
        teacher, student = build(hidden=512), build()
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        for step in range(6):
            x = batch()
            with torch.no_grad():
                target = teacher(x).softmax(-1)
            train(F.cross_entropy(student(x), target), optimizer)
        """, ("scoring", "update"), 1),
    "averages of two models": ("""
        left, right, average = build(), build(1), build()
        first, second = torch.optim.SGD(left.parameters(), lr=0.1), torch.optim.Adam(right.parameters())
        with torch.no_grad():
            average(batch())
        for step in range(6):
            x = batch()
            train((left(x).mean() + right(x).mean()), first, second)
            with torch.no_grad():
                for kept, new in zip(average.parameters(), left.parameters()):
                    kept.lerp_(new, 0.01)
        """, ("update", "sync"), 1),
    "self-play": ("""
        one, other = build(64), build(64)
        optimizer = torch.optim.Adam(one.parameters())
        for game in range(6):
            x = start = batch()
            with torch.no_grad():
                for move in range(5):
                    x = x + one(x)
                    x = x - other(x)
            for epoch in range(2):
                train(F.mse_loss(one(start), x), optimizer)
            if game % 1 == 0:
                other.load_state_dict(one.state_dict())
        """, ("rollout", "update", "sync"), 2),
    "objectives in turn, by their names": ("""
        from torch.profiler import record_function
        model = build()
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(6):
            with record_function("contrastive"):
                x, y = model(batch()), model(batch())
                train((x @ y.T).log_softmax(-1).diagonal().mean(), optimizer)
            with record_function("denoising"):
                train(F.mse_loss(model(batch()), torch.zeros(32, 8, device="cuda")), optimizer)
        """, ("contrastive", "denoising"), 2),
    "accumulation and evaluation": ("""
        model = build()
        optimizer = torch.optim.Adam(model.parameters())
        for micro in range(40):
            (model(batch()).mean() / 4).backward()
            if micro % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
                model.eval()
                with torch.no_grad():
                    print(model(batch(512)).mean().item())
                model.train()
        """, ("update", "evaluation"), 1),
}


@pytest.fixture
def run(tmp_path):
    def run(text, **options):
        path = tmp_path / "train.py"
        path.write_text(HEAD + textwrap.dedent(text))
        found = dry_run(path, device="h100", **options)
        assert found.error is None, found.format_error()
        return found
    return run


@pytest.mark.parametrize("name", OF_EACH)
def test_the_phases_of_a_cycle_come_in_the_order_of_the_run(run, name):
    text, phases, steps = OF_EACH[name]
    found = run(text).profile
    assert [cycle.number for cycle in found.cycles] == [1, 2]
    for cycle in found.cycles:
        assert tuple(phase.name for phase in cycle.phases) == phases and cycle.steps == steps
        assert cycle.seconds == pytest.approx(sum(phase.seconds for phase in cycle.phases))
        assert cycle.seconds_range[0] < cycle.seconds < cycle.seconds_range[1]
    assert found.peak_allocated_bytes >= max(cycle.peak_allocated_bytes for cycle in found.cycles)
    assert Profile.from_json(found.to_json()).cycles == found.cycles
    assert all(phase in found.report("screen") and phase in found.report("cycle") for phase in phases)


def test_the_figures_of_a_rollout_and_its_updates(run):
    found = run(POLICY)
    assert found.is_stopped and found.steps == 8  # it ends where the third cycle begins
    first, second = found.profile.cycles
    rollout, scoring, update, sync, save = second.phases
    layer = 2 * 64 * 100
    assert rollout.passes == 16 and rollout.samples == 16 * 8 and rollout.tokens == 8 * sum(range(1, 17))
    products = 8 * sum(range(1, 17)) * layer
    assert products <= rollout.flops < 1.01 * products
    assert scoring.passes == 2 and scoring.tokens == 8 * 17 and update.passes == update.steps == 4
    assert (second.samples, second.generated_tokens) == (8, 8 * 16)
    assert second.generated_tokens_per_second == pytest.approx(8 * 16 / second.seconds)
    # the second rollout finds two states of AdamW, the workspace of backward products, and what the script's names hold
    # of the first: three tensors of (8, 17, 100), in blocks of 512 bytes
    weights, workspace, kept = 2 * 4 * 6400, 2**25, 3 * 107 * 512
    assert rollout.peak_allocated_bytes - first.phases[0].peak_allocated_bytes == 2 * weights + workspace + kept
    assert rollout.allocated_bytes < update.peak_allocated_bytes and sync.flops == 0 and save.kernels == 0
    assert second.held["optimizer state"] == first.held["optimizer state"] == 2 * weights
    assert "peaks above those of the first cycle: rollout 32." in found.profile.report("screen")


AVERAGE_NOW_AND_THEN = """
    model, average = build(), build()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(20):
        train(model(batch()).mean(), optimizer)
        if step % 5 == 0:
            average.load_state_dict(model.state_dict())
    """


@pytest.mark.parametrize("steps, cycles", [(3, []), (7, [1, 5])])
def test_what_follows_some_updates_makes_a_cycle_once_it_came_again(run, steps, cycles):
    """Copies come after steps 1 and 6: three steps show one of them, and seven show a cycle of one step and of five."""
    assert [cycle.steps for cycle in run(AVERAGE_NOW_AND_THEN, steps=steps).profile.cycles] == cycles


def test_a_pass_of_the_same_model_over_what_it_wrote_scores(run):
    text = POLICY.replace("sampler(ids)", "model(ids)").replace("""
        old = model(ids).log_softmax(-1)
        expected = reference(ids).log_softmax(-1)
""", """
        expected = reference(ids).log_softmax(-1)
        old = model(ids).log_softmax(-1)
""")
    rollout, scoring, *_ = run(text).profile.cycles[1].phases
    assert (rollout.passes, rollout.tokens) == (16, 8 * sum(range(1, 17)))
    assert (scoring.name, scoring.passes, scoring.tokens) == ("scoring", 2, 8 * 17)


def test_a_last_action_that_nothing_reads_is_of_the_rollout(run):
    """Five passes act, and what the last one leads to is thrown away: states before actions are learned from."""
    cycles = run("""
        actor = build(64)
        optimizer = torch.optim.Adam(actor.parameters())
        for update in range(4):
            state, states = batch(), []
            with torch.no_grad():
                for _ in range(5):
                    states.append(state)
                    state = state + actor(state)
            for state in states:
                train(actor(state).mean(), optimizer)
    """).profile.cycles
    for cycle in cycles:
        assert [(phase.name, phase.passes) for phase in cycle.phases] == [("rollout", 5), ("update", 5)]


@pytest.mark.parametrize(("length", "phases"), [
    (17, ["rollout", "scoring", "update", "sync", "save"]), (12, ["scoring", "update", "sync", "evaluation", "save"])])
def test_a_rollout_through_the_host_is_known_by_its_length(run, length, phases):
    text = POLICY.replace("        old =", f"""        rows = [row[:{length}] for row in ids.tolist()]
        ids = torch.tensor(rows).cuda()
        old =""")
    found = run(text, steps=12).profile
    assert sorted(phase.name for phase in found.cycles[1].phases) == sorted(phases)


def test_what_is_printed_between_a_step_and_the_freeing_of_gradients_is_of_the_update(run):
    names = [[phase.name for phase in cycle.phases] for cycle in run("""
        from torch.profiler import record_function
        class Named(nn.Linear):
            def forward(self, x):
                with record_function("inside of a module"):
                    return super().forward(x)
        teacher, model = build(), nn.Sequential(Named(64, 8)).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(6):
            with torch.no_grad():
                target = teacher(batch())
            loss = F.mse_loss(model(batch()), target)
            loss.backward()
            optimizer.step()
            print((loss.detach() * 2).mean().item())
            optimizer.zero_grad()
        """).profile.cycles]
    assert names == [["scoring", "update"]] * 2


def test_gradients_that_are_freed_are_not_held_by_the_next_phase(run):
    cycles = run("""
        model = nn.Linear(1024, 1024, bias=False).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            with torch.no_grad():
                target = model(torch.randn(8, 1024, device="cuda"))
            train((model(torch.randn(8, 1024, device="cuda")) - target).mean(), optimizer)
        """).profile.cycles
    (_, update), (scoring, again) = [cycle.phases for cycle in cycles]
    weight = 1024 * 1024 * 4
    assert update.peak_allocated_bytes >= update.allocated_bytes + weight
    assert scoring.peak_allocated_bytes < update.allocated_bytes + weight / 10
    assert [sum(cycle.held.values()) for cycle in cycles] == [update.allocated_bytes, again.allocated_bytes]
    assert "gradient" not in cycles[1].held


@pytest.mark.parametrize("steps", [4, 5, 8])
def test_as_many_steps_as_were_asked_for(run, steps):
    found = run(POLICY, steps=steps)
    assert found.steps == steps and len(found.profile.cycles) == 1 + (steps == 8)
    assert found.profile.cycles[0].phases[0].passes == 16


@pytest.mark.parametrize("text", ["""
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(10):
        train(model(batch()).mean(), optimizer)
    """, """
    model, encoder = build(), build(64)
    optimizer = torch.optim.Adam(model.parameters())
    with torch.no_grad():
        x = encoder(batch())
    for step in range(10):
        train(model(x).mean(), optimizer)
    """, """
    model, encoder = build(), build(64)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(10):
        if step == 0:
            with torch.no_grad():
                print(model(batch()).mean().item())
        train(model(batch()).mean(), optimizer)
    """], ids=["plain", "encoded before", "evaluated before"])
def test_what_does_not_come_again_is_not_waited_for(run, text):
    found = run(text)
    assert found.steps == 3 and found.is_stopped
    assert not [cycle for cycle in found.profile.cycles if cycle.number > 1]


def test_a_phase_by_its_name_is_the_same_with_a_profiler_and_without(run):
    text = """
        import analyzer
        from torch.profiler import record_function
        model = build()
        optimizer = torch.optim.Adam(model.parameters())
        for iteration in range(6):
            with {block}("iteration"):
                with {block}("play"):
                    with torch.no_grad():
                        target = model(batch()) + model(batch())
                with {block}("learn"):
                    for epoch in range(4):
                        train(F.mse_loss(model(batch()), target), optimizer)
        """
    one, other = [run(text.format(block=block)).profile for block in ("analyzer.phase", "record_function")]
    assert one.cycles == other.cycles and [phase.name for phase in one.cycles[1].phases] == ["play", "learn"]
    assert one.cycles[1].steps == 4 and one.cycles[1].phases[0].passes == 2
    assert 2 * PRODUCTS < one.cycles[1].phases[0].flops < 2.1 * PRODUCTS
    assert isinstance(analyzer.phase("play"), type(analyzer.phase("learn")))


@pytest.mark.parametrize("name", [3, None, b"play", ["play"]])
def test_the_name_of_a_phase_is_a_text(name):
    with pytest.raises(InputError, match=re.escape(f"analyzer.phase({name!r}): a phase is named by a text")):
        analyzer.phase(name)

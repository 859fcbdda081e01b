"""A step of post-training, phase by phase."""
from __future__ import annotations

from dataclasses import replace

from analyzer.hardware import list_unseen
from analyzer.hardware.kernel_time.collective import collective_time, host_copy_time
from analyzer.hardware.kernel_time.estimate import KernelTime
from analyzer.tools.serving import ServedModel, read_served_model, share_device
from analyzer.zoo.target import Target, model_errors

from .plan import PosttrainPlan
from .result import PosttrainPhase, PosttrainProfile
from .rollout import Rollout, Sampler
from .score import PolicyLoss
from .trainer import HeldByRank, Trainer, divide_passes


class Planner:
    """Plans of one model: what was profiled for one is known for the next."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._served: ServedModel | None = None
        self._trainers: dict[object, Trainer] = {}
        self._samplers: dict[object, Sampler] = {}

    def trainer(self, plan: PosttrainPlan) -> Trainer:
        key = plan.cluster.name, plan.lora, plan.loss_chunks, plan.entropy
        if key not in self._trainers:
            self._trainers[key] = Trainer(self.target, plan.cluster, plan.lora,
                                          PolicyLoss(plan.loss_chunks, plan.entropy))
        return self._trainers[key]

    def sampler(self, plan: PosttrainPlan) -> Sampler:
        if self._served is None:
            with model_errors(self.target.name):
                self._served = read_served_model(self.target.build, self.target.name)
        key = plan.cluster.name
        if key not in self._samplers:
            self._samplers[key] = Sampler(self._served, plan.cluster)
        return self._samplers[key]

    def plan(self, plan: PosttrainPlan, price: float | None = None) -> PosttrainProfile:
        """Raises InputError for a layout that the model cannot have, NoRoomError where no engine holds it."""
        rollout = None if plan.engine is None else self.sampler(plan).sample(plan)
        return _Step(plan, self.trainer(plan), rollout).run(price)


class _Step:
    """One step: its phases in their order."""

    def __init__(self, plan: PosttrainPlan, trainer: Trainer, rollout: Rollout | None) -> None:
        self.plan, self.trainer, self.rollout = plan, trainer, rollout
        self.layout = plan.layout
        self.engine = None if rollout is None or plan.engine is None else share_device(
            rollout.deployment, level=plan.engine.sleep if plan.shares else 0)
        self.device, self.cluster = plan.cluster.device, plan.cluster
        self.held = trainer.held(self.layout)
        if plan.critic:
            self.held = HeldByRank(2 * self.held.model, 2 * self.held.optimizer)
        self.unseen = sum(unseen.bytes or 0 for unseen in list_unseen(self.device, plan.devices))
        self.per_host = min(plan.devices, plan.cluster.devices_per_host)
        self.phases: list[PosttrainPhase] = []
        self.assumptions = list(plan.assumptions)

    # --- what lies on a card beside what a phase itself needs ---

    @property
    def asleep_bytes(self) -> int:
        """Of an engine that shares the card, while the model trains."""
        return 0 if self.engine is None or not self.plan.shares else self.engine.resting_bytes or 0

    @property
    def beside(self) -> int:
        """What stays of the trainer while engines sample."""
        plan = self.plan
        return (0 if plan.offloads_model else self.held.model) + (
            0 if plan.offloads_optimizer else self.held.optimizer)

    @property
    def reference_bytes(self) -> int:
        """Of a reference's weights on a rank, in 16 bits, shared by its ranks as the policy's are."""
        if self.plan.reference != "copy":
            return 0
        return self.held.model // (2 if self.layout.precision == "mixed" and self.layout.is_sharded else 1)

    def run(self, price: float | None) -> PosttrainProfile:
        plan = self.plan
        if self.rollout is not None:
            self._sync(self.rollout)
            self._sample(self.rollout)
        self._score()
        self._update()
        seconds, low, high, waits = self._join()
        idle = self._idle_share(seconds)
        rollout = self.rollout
        self._assume()
        return PosttrainProfile(
            name=plan.model, algorithm=plan.algorithm, devices=plan.devices, device=self.device.name,
            trainer=self._tell_trainer(), engine="" if rollout is None else self._tell_engine(rollout),
            sequences=plan.sequences, prompt_tokens=plan.prompt, answer_tokens=plan.answers.mean,
            longest_tokens=plan.longest, phases=tuple(self.phases), step_seconds=seconds, step_range=(low, high),
            waits_for=waits, tail_seconds=0.0 if rollout is None else rollout.tail_seconds, idle_share=idle,
            capacity_bytes=self.device.memory_bytes, price=price, micro_batch_tokens=plan.room,
            room_sequences=None if rollout is None else rollout.deployment.most_sequences(plan.longest),
            assumptions=tuple(self.assumptions))

    # --- phases ---

    def _add(self, name: str, cards: str, seconds: float, spread: float, bound: str, card: int | None,
             host: int = 0, said: str = "", low: float | None = None) -> None:
        least = seconds / (1 + spread) if low is None else low
        self.phases.append(PosttrainPhase(name, cards, seconds, least, seconds * (1 + spread), bound, card, host, said))

    def _sync(self, rollout: Rollout) -> None:
        """Weights to the engines: gathered by the ranks that share them, and sent to engines elsewhere; what leaves the
        card and comes back for that.
        """
        plan, whole = self.plan, self.trainer.whole_bytes()
        times: list[tuple[KernelTime, int]] = []
        share = plan.trainer_devices // max(1, self.layout.replicate)
        gathered = self._time("all_gather", whole, min(share, plan.trainer_devices))
        times.append((gathered, 1))
        if not plan.shares:
            times.append((self._time("broadcast", whole, 1 + plan.engine_devices), 1))
        moved = 0
        if plan.shares:
            model, optimizer = (self.held.model * plan.offloads_model, self.held.optimizer * plan.offloads_optimizer)
            for to_device in (False, True):
                times += [(self._copy(model, to_device), 1), (self._copy(optimizer, to_device, plan.pins), 1)]
            moved = model + optimizer
        seconds = sum(time.seconds * count for time, count in times)
        spread = max((time.spread for time, _ in times), default=0.0)
        self._add("sync", "all", seconds, spread, "communication", self._sync_bytes(), moved * self.per_host)

    def _sync_bytes(self) -> int | None:
        """Of a card on which the trainer's weights and the engine's are at once, its cache asleep; or of the fuller
        card where they have cards of their own.
        """
        plan, engine = self.plan, self.engine
        assert engine is not None
        stays = self.held.model + (0 if plan.offloads_optimizer and plan.shares else self.held.optimizer)
        if plan.shares:
            found = engine.copy_bytes(self._gather_bytes())
            return None if found is None else found + stays + self.unseen
        own = engine.sampling_bytes
        return None if own is None else max(own, stays + self._gather_bytes()) + self.unseen

    def _gather_bytes(self) -> int:
        """A block and the largest of the ends, gathered whole in 16 bits on their way to an engine."""
        sizes = self.trainer.sizes()
        return 2 * max(sizes.block, sizes.before, sizes.behind)

    def _sample(self, rollout: Rollout) -> None:
        plan, awake = self.plan, None if self.engine is None else self.engine.sampling_bytes
        card = None if awake is None else awake + (self.beside if plan.shares else 0) + self.unseen
        host = 0 if not plan.shares else self.per_host * (
            (self.held.model if plan.offloads_model else 0) + (
                self.held.optimizer if plan.offloads_optimizer else 0))
        self._add("rollout", "all" if plan.shares else "engines", rollout.seconds, rollout.spread, rollout.bound, card,
                  host + self._host_bytes(False))

    def _host_bytes(self, is_training: bool) -> int:
        """Of one host: what leaves its cards for a while, a reference that waits, states that always lie there."""
        plan, total = self.plan, 0
        if plan.reference == "copy" and plan.shares:
            total += self.reference_bytes
        if is_training and plan.shares and self.engine is not None:
            total += self.engine.host_bytes
        return total * self.per_host

    def _score(self) -> None:
        """Passes without gradients: the policy's own log probabilities, the reference's, the critic's values."""
        plan, layout = self.plan, self.layout
        names = [name for name, there in (("old log probabilities", plan.scores_old and plan.engine is not None),
                                          ("the reference's", plan.reference != "none"), ("values", plan.critic))
                 if there]
        if not names:
            return
        passes = divide_passes(plan, plan.sequences, plan.score_room, layout.data)
        seconds, spread, bound = self.trainer.score_seconds(layout, passes)
        total = seconds * len(names)
        if plan.reference == "copy" and plan.shares:  # its weights come and go
            total += sum(self._copy(self.reference_bytes, way).seconds for way in (True, False))
        resident = 0 if plan.shares and plan.offloads_optimizer else self.held.optimizer
        peak = self.trainer.score_bytes(layout, plan.score_room)
        card = peak + resident + self.reference_bytes + self.asleep_bytes + self.unseen
        if plan.critic:
            card += self.held.model // 2
        self._add("scoring", "all" if plan.shares or not plan.engine else "trainer", total, spread, bound, card,
                  self._host_bytes(True) + self.per_host * (
                      self.held.optimizer if plan.shares and plan.offloads_optimizer else 0),
                  f"{', '.join(names)}: {passes.count} x {passes.rows} x {passes.tokens:,} tokens a rank each")

    def _update(self) -> None:
        plan, layout = self.plan, self.layout
        each = max(1, plan.sequences // plan.updates)
        passes = divide_passes(plan, each, plan.room, layout.data)
        step, part = self.trainer.update(layout, passes)
        full = self.trainer.fullest_update(layout, plan.room)
        number = plan.updates * plan.epochs * (2 if plan.critic else 1)
        count = number * part
        low, high = step.step_seconds_range or (step.step_seconds, step.step_seconds)
        card = max(step.needed_bytes, full.needed_bytes) + self.asleep_bytes
        if plan.critic:
            card += (self.held.model + self.held.optimizer) // 2
        if plan.reference == "copy" and not plan.shares:
            card += self.reference_bytes
        host = self._host_bytes(True) + (self._state_bytes() * self.per_host if layout.offload else 0)
        self._add("update", "all" if plan.shares or not plan.engine else "trainer", count * step.step_seconds,
                  high / step.step_seconds - 1, step.bound, card, host,
                  f"{number} x {passes.count} micro-batches of {passes.rows} x {passes.tokens:,} tokens a rank",
                  count * low)

    def _state_bytes(self) -> int:
        """Of a rank whose states lie on the host."""
        held = self.trainer.held(replace(self.layout, offload=False))
        return held.optimizer + held.model

    # --- together ---

    def _join(self) -> tuple[float, float, float, str]:
        phases = self.phases
        if not self.plan.lag:
            sums = [sum(getattr(phase, name) for phase in phases) for name in ("seconds", "low", "high")]
            longest = max(phases, key=lambda phase: phase.seconds)
            return sums[0], sums[1], sums[2], f"{longest.name} takes longest"
        engines = [phase for phase in phases if phase.name == "rollout"]
        trainer = [phase for phase in phases if phase.name != "rollout"]
        if not self.plan.in_flight:  # engines wait for their weights, too
            engines += [phase for phase in phases if phase.name == "sync"]
        sums = [max(sum(getattr(phase, name) for phase in side) for side in (engines, trainer))
                for name in ("seconds", "low", "high")]
        mine, theirs = (sum(phase.seconds for phase in side) for side in (trainer, engines))
        return sums[0], sums[1], sums[2], "the trainer waits for engines" if theirs > mine else (
            "engines wait for the trainer")

    def _idle_share(self, step: float) -> float:
        """Of all cards' time: those of one side while the other works, and empty places of engines in a rollout."""
        plan, rollout = self.plan, self.rollout
        if rollout is None:
            return 0.0
        busy = {"all": plan.devices, "trainer": plan.trainer_devices, "engines": plan.engine_devices}
        used = sum(phase.seconds * busy[phase.cards] * ((1 - rollout.idle_share) if phase.name == "rollout" else 1.0)
                   for phase in self.phases)
        return max(0.0, 1 - used / (step * plan.devices))

    def _time(self, kind: str, nbytes: int, ranks: int) -> KernelTime:
        found = collective_time(kind, nbytes, max(1, ranks), self.cluster)
        if found is None:
            self.assumptions.append(f"{kind} of weights takes no time: a link of {self.cluster.name} is unknown")
            return KernelTime(0.0, 0.0, "communication")
        return found

    def _copy(self, nbytes: int, to_device: bool, is_pinned: bool = True) -> KernelTime:
        found = host_copy_time(nbytes, self.device, pinned=is_pinned, to_device=to_device)
        if found is None:
            self.assumptions.append("copies to the host take no time: the bus of the device is unknown")
            return KernelTime(0.0, 0.0, "communication")
        return found

    def _tell_trainer(self) -> str:
        plan = self.plan
        leaves = [name for name, there in (("weights", plan.offloads_model), ("optimizer", plan.offloads_optimizer))
                  if there and plan.shares]
        said = f"{plan.trainer_devices} cards{' that engines share' * plan.shares}, {_without_batch(self.layout)}"
        said += f", micro-batches of {plan.room:,} tokens at most" + ("" if plan.packs else f" in {plan.rows} rows")
        return said + (f"; {' and '.join(leaves)} on the host while engines sample" if leaves else "")

    def _tell_engine(self, rollout: Rollout) -> str:
        plan, deployment = self.plan, rollout.deployment
        assert plan.engine is not None
        share = deployment.memory_share
        said = (f"{rollout.engines} x {deployment.engine.name} ({rollout.layout}), {deployment.weights}, "
                f"{rollout.sequences:,} answers each at once")
        if share is not None and not deployment.engine.of_free:
            said += f", {share:.0%} of a card"
        if plan.shares:
            said += f", asleep (level {plan.engine.sleep}) while the model trains" if plan.engine.sleep else (
                ", awake while the model trains")
        return said + (f"; weights {plan.lag} step{'s' * (plan.lag > 1)} old" if plan.lag else "")

    def _assume(self) -> None:
        plan = self.plan
        if self.trainer.assumed:
            self.assumptions.append(self.trainer.assumed)
        self.assumptions.append(f"answers: {plan.answers.source}")
        if plan.engine is not None:
            self.assumptions.append("rewards take no time, and no card has a model for them")
        if plan.critic:
            self.assumptions.append("the critic has the size of the policy, and its own optimizer; it is divided alike")
        if self.layout.devices > 1:
            self.assumptions.append("ranks have equally many tokens")


def _without_batch(layout: object) -> str:
    return ", ".join(part for part in str(layout).split(", ") if " x " not in part)

"""Rollouts: how long engines take for the answers of a step, and how long the longest ones keep them."""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from analyzer.errors import InputError
from analyzer.hardware import ClusterSpec
from analyzer.tools.serving import Batch, Deployment, PassTimer, ServedModel, Traffic, make_deployment, simulate
from analyzer.tools.serving import Layout as EngineLayout
from analyzer.tools.serving.simulation import NoRoomError, Timeline, cut_answers

from .plan import EnginePlan, PosttrainPlan

#: Beside a trainer: NeMo RL 0.5, examples/configs/grpo_math_1B.yaml, ``gpu_memory_utilization``.
SHARED_SHARE = 0.6
_DEGREES = (1, 2, 4, 8, 16, 32)  # ranks of an engine that are tried
_NEARLY_ALL = 0.9   # of the answers: what comes after them is the tail
_ROUNDS = 3         # of answers, of which the middle one is taken where engines never run empty


@dataclass(frozen=True)
class Rollout:
    """The answers of a step. ``seconds``: until the last one is there; ``tail_seconds``: of them those in which one in
    ten is left; ``idle_share``: of the time of all engines' places for sequences, what stands empty.

    - ``engines``: how many; ``sequences``: of each; ``bound``: of a pass with as many sequences as decode in the mean.
    - ``is_full``: whether sequences waited for room in the cache.
    """

    deployment: Deployment
    engines: int
    sequences: int
    seconds: float
    spread: float
    tail_seconds: float
    idle_share: float
    bound: str
    is_full: bool
    answer_tokens: int

    @property
    def layout(self) -> EngineLayout:
        return self.deployment.layout


class Sampler:
    """Simulates engines of one model; what was simulated once is kept."""

    def __init__(self, model: ServedModel, cluster: ClusterSpec) -> None:
        self.model, self.cluster = model, cluster
        self._timers: dict[tuple[EngineLayout, EnginePlan, bool], PassTimer] = {}
        self._simulate = lru_cache(maxsize=None)(self._simulate_plan)

    def deploy(self, engine: EnginePlan, layout: EngineLayout, is_shared: bool) -> Deployment:
        """One engine. Raises InputError for a layout that the model cannot have."""
        share = engine.memory_share or (SHARED_SHARE if is_shared else None)
        return make_deployment(
            self.model, device=self.cluster.device, cluster=self.cluster, layout=layout, engine=engine.server,
            version=engine.version, memory_share=share, weights=engine.weights, experts=engine.experts,
            cache=engine.cache)

    def sample(self, plan: PosttrainPlan) -> Rollout:
        """The rollout of a plan, by its layout of an engine or the fastest. Raises NoRoomError where none fits."""
        engine = plan.engine
        assert engine is not None
        if engine.layout is not None:
            return self._simulate(plan, engine.layout)
        found: list[Rollout] = []
        problem: InputError | None = None
        for tp in (tp for tp in _DEGREES if plan.engine_devices % tp == 0):
            try:
                found.append(self._simulate(plan, EngineLayout(tp)))
            except InputError as error:  # heads that it does not divide, or no room
                problem = problem or error
            if len(found) > 1 and found[-1].seconds > found[-2].seconds:
                break  # more ranks an engine wait longer for each other
        if not found:
            raise NoRoomError(f"{plan.model}: no engine holds it on {plan.engine_devices} {self.cluster.device.name}: "
                              f"{problem}")
        return min(found, key=lambda rollout: rollout.seconds)

    def _simulate_plan(self, plan: PosttrainPlan, layout: EngineLayout) -> Rollout:
        engine = plan.engine
        assert engine is not None
        engines, rest = divmod(plan.engine_devices, layout.gpus)
        if rest or not engines:
            raise InputError(f"engines of {layout.gpus} devices ({layout}): {plan.engine_devices} devices are no "
                             "multiple of them")
        key = layout, engine, plan.shares
        if key not in self._timers:
            self._timers[key] = PassTimer(self.deploy(engine, layout, plan.shares))
        timer = self._timers[key]
        groups = _share(plan, engines)
        continuous = plan.lag > 0 and plan.in_flight
        slots = engine.sequences
        lines = [self._run(timer, plan, group, slots, continuous) for group in groups]
        slowest = max(lines, key=lambda found: found[1])
        line, seconds = slowest
        most = min(len(groups[0]), timer.deployment.engine.sequences, slots or len(groups[0]))
        nearly = line.ends[min(len(line.ends) - 1, int(_NEARLY_ALL * len(line.ends)))]
        idle = 0.0 if continuous else 1 - min(1.0, line.running * layout.dp * layout.pp / most)
        batch = Batch(max(1, round(line.running)), max(1, round(line.context)))
        return Rollout(timer.deployment, engines, len(groups[0]), seconds * plan.oversample,
                       timer.constants["token_spread"], 0.0 if continuous else seconds - nearly, idle,
                       timer.time(batch).bound, line.is_full, sum(plan.answers.draw(plan.sequences)))

    @staticmethod
    def _run(timer: PassTimer, plan: PosttrainPlan, answers: tuple[int, ...], slots: int | None,
             continuous: bool) -> tuple[Timeline, float]:
        if not continuous:
            line = simulate(timer.deployment, timer, Traffic.batch(plan.prompt, answers, plan.samples, slots))
            return line, line.ends[-1]
        # as many sequences are always asked for as answer ``lag`` steps
        here = min(slots or len(answers) * plan.lag, len(answers) * plan.lag)
        rounds = answers * max(_ROUNDS, 2 * plan.lag + 1)
        line = simulate(timer.deployment, timer, Traffic.batch(plan.prompt, rounds, plan.samples, here))
        half, size = len(line.ends) // 2, len(line.ends) // len(rounds) * len(answers) or len(answers)
        last = min(len(line.ends) - 1, half + size // 2)
        first = max(0, last - size)
        return line, line.ends[last] - line.ends[first]


def _share(plan: PosttrainPlan, engines: int) -> list[tuple[int, ...]]:
    """The answers of the engine that has most tokens of them, and of that which has the longest one: each has equally
    many, in a row, so that those of one prompt are together.
    """
    parts = cut_answers(plan.answers.draw(plan.sequences), engines)
    return list(dict.fromkeys((max(parts, key=sum), max(parts, key=max))))

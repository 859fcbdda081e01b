"""The scheduler of a server, pass by pass: requests come, are seen, wait, are read in chunks, decode, and go."""
from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from analyzer.errors import InputError

from .batch import Batch, Chunk
from .deployment import Deployment
from .pass_time import PassTimer


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a server is asked for: prompts and answers of so many tokens, and how requests come.

    - ``concurrency``: clients that each ask again as soon as they are answered, in the steady state: those of the
      beginning have got an even share of their tokens; or ``rate``: requests a second that come at random (Poisson).
    - ``least_share``: lengths are even between this share of the given ones and the whole (1: all alike).
    - ``bursts``: clients all begin at once, as benchmarks do (vLLM benchmark_serving), and ask ten times each.
    - ``slots``: sequences that decode at once at most; None: what the engine and the cache have room for.
    - ``answers``: tokens of the answers of a batch that all come at once and once each, in the place of ``bursts``;
      ``samples`` of them in a row have one prompt, which is read once (vLLM's prefix caching: v1/core/kv_cache_manager.
      py, `allocate_slots` caches full blocks as soon as they are scheduled).
    - ``is_read``: prompts come with their cache, read elsewhere, each ``delay`` seconds after its client's last answer.
    - ``drafted``, ``accepted``: tokens that a draft proposes, and the mean number of them that are kept.
    """

    prompt_tokens: int
    new_tokens: int
    concurrency: int | None = None
    rate: float | None = None
    least_share: float = 1.0
    slots: int | None = None
    bursts: bool = False
    is_read: bool = False
    delay: float = 0.0
    drafted: int = 0
    accepted: float = 0.0
    answers: tuple[int, ...] = ()
    samples: int = 1

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise InputError(f"Traffic(concurrency={self.concurrency!r}, rate={self.rate!r}): give one of them")
        if self.prompt_tokens < 1 or self.new_tokens < 1 or self.concurrency is not None and self.concurrency < 1:
            raise InputError(f"{self!r}: tokens, concurrency and rate are above 0")
        if self.rate is not None and not 0 < self.rate < inf:
            raise InputError(f"rate {self.rate:g}: requests a second are above 0 and finite")
        if not 0 < self.least_share <= 1 or self.drafted and not 0 <= self.accepted <= self.drafted:
            raise InputError(f"{self!r}: least_share lies above 0 and is at most 1; accepted is at most drafted")
        if self.answers and (self.concurrency != len(self.answers) or not self.bursts or self.samples < 1 or not all(
                1 <= new <= self.new_tokens for new in self.answers)):
            raise InputError(f"Traffic(answers=...) of {len(self.answers)}: concurrency is their number, bursts is "
                             "True, each has 1 to new_tokens tokens, and samples is 1 or more")

    @classmethod
    def batch(cls, prompt_tokens: int, answers: Sequence[int], samples: int = 1, slots: int | None = None) -> Traffic:
        """A batch of answers of these tokens, asked for at once.

        >>> Traffic.batch(100, [5, 9]).new_tokens
        9
        """
        return cls(prompt_tokens, max(answers), len(answers), slots=slots, bursts=True, answers=tuple(answers),
                   samples=samples)


class NoRoomError(InputError):
    """Not even one sequence has room beside the weights."""


class Served(NamedTuple):
    """One request, seconds: to its first token, and between two tokens in the mean."""

    first_seconds: float
    token_seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What became of all requests of one rank."""

    requests: tuple[Served, ...]
    running: float                 #: sequences that decode, in the mean over time
    context: float                 #: tokens of each of them
    prompt_tokens: float           #: of prompts that a pass reads, in the mean over passes
    is_full: bool                  #: whether requests waited for room in the cache
    is_stable: bool = True         #: False where requests come faster than they are answered
    tokens_per_second: float = 0.0
    ends: tuple[float, ...] = ()   #: seconds at which requests were answered, in their order

    def mean(self, name: str) -> float:
        return float(sum(getattr(request, name) for request in self.requests) / max(1, len(self.requests)))

    def percentile(self, name: str, share: float) -> float:
        ordered = sorted(getattr(request, name) for request in self.requests)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


@dataclass(slots=True)
class _Request:
    arrival: float
    prompt: int
    new: int
    read: int = 0          # tokens of the prompt that were read
    first: float = -1.0    # when its first token was there
    order: int = 0         # of its arrival among all


_MOST_STEPS = 64  # passes that are assumed to be alike while no request comes or goes
_SEED = 17
_ENOUGH = 16      # requests that tell how long those take that are answered


class Scheduler:
    """One rank of a deployment under some traffic. ``requests``: how many are simulated."""

    def __init__(self, deployment: Deployment, timer: PassTimer, traffic: Traffic, requests: int) -> None:
        self.deployment, self.timer, self.traffic, self.count = deployment, timer, traffic, requests
        self.random = random.Random(_SEED)
        self.engine = deployment.engine
        room = deployment.room_bytes()
        per_token = max(1, deployment.cache_bytes(4096) // 4096)
        stages = deployment.layout.pp  # each works on a batch of its own, with its share of the cache
        self.capacity = None if room is None else max(0, room) // per_token // stages  # tokens in the cache
        self.slots = min(self.engine.sequences, traffic.slots or self.engine.sequences)
        self.pace = 1.0 + (traffic.accepted if traffic.drafted else 0.0)      # tokens that a pass gives a sequence
        self.now = 0.0
        self.decoded = 0.0               # tokens that each sequence has got since the beginning
        self.sent: deque[_Request] = deque()     # that the scheduler has not seen yet
        self.waiting: deque[_Request] = deque()
        self.composed = 0.0              # when the pass that is next was composed
        self.unseen = 0                  # passes of decoding since the scheduler looked for requests
        self.waited = 0                  # passes of decoding for which prompts have waited for others
        self.reading: list[_Request] = []
        self.running: list[tuple[float, int, _Request]] = []  # by the count of decoded tokens at which it ends
        self.context = 0.0               # tokens in the cache of those that decode
        self.taken = 0                   # tokens that are reserved, or read
        self.done: list[Served] = []
        self.ends: list[float] = []
        self.answered = 0                # tokens, of all requests
        self.born = self.passes = self.prompts = 0
        self.is_full = False
        self.area = self.context_area = 0.0

    def run(self) -> Timeline:
        """Raises NoRoomError."""
        longest = self.traffic.prompt_tokens + self.traffic.new_tokens
        if self.capacity is not None and self.capacity < longest:
            raise NoRoomError(
                f"{self.deployment.model.name}: no room for one sequence of {longest:,} tokens beside the weights on "
                f"{self.deployment.device.name} as {self.deployment.layout}; spread it over more devices (--tp), or "
                "hold weights and cache in fewer bits")
        arrivals = self._come()
        self._begin_midway()
        while len(self.done) < self.count:
            while arrivals and arrivals[0] <= self.now:
                self._ask(arrivals.popleft())
            if not (self.sent or self.waiting or self.reading or self.running):
                self.now = self.composed = arrivals[0]
                continue
            if not (self.waiting or self.reading or self.running):
                self.now = max(self.now, self.sent[0].arrival)
            self._receive()
            self._step(arrivals[0] if arrivals else None)
            if self.traffic.rate and len(self.waiting) + len(self.sent) > self.count // 2 and len(self.done) > _ENOUGH:
                break  # it will not catch up
        stable = not self.traffic.rate or len(self.done) >= self.count and not self._waits_ever_longer()
        return Timeline(tuple(self.done), self.area / max(self.now, 1e-12),
                        self.context_area / max(self.area, 1e-12), self.prompts / max(1, self.passes), self.is_full,
                        stable, self.answered / self.now if self.now else 0.0, tuple(self.ends))

    def _waits_ever_longer(self) -> bool:
        """Whether the last quarter of the requests waited much longer than the second: 7 to 3 where a queue grows."""
        quarter = len(self.done) // 4
        early, late = (sum(request.first_seconds for request in part) for part in (
            self.done[quarter:2 * quarter], self.done[-quarter:]))
        return late > 1.8 * early

    def _come(self) -> deque[float]:
        if self.traffic.rate is None:
            for _ in range(self.traffic.concurrency or 1):
                self._ask(0.0)
            return deque()
        times, now = deque[float](), 0.0
        for _ in range(self.count * 2):  # more than are waited for, so that the last ones are not alone
            now += self.random.expovariate(self.traffic.rate)
            times.append(now)
        return times

    def _begin_midway(self) -> None:
        """Clients have been served for a while: as many as have room decode, each somewhere in its answer."""
        if self.traffic.rate is not None or self.traffic.bursts:
            return
        while self.sent and len(self.running) < self.slots:
            request = self.sent[0]
            need = request.prompt + request.new
            if self.capacity is not None and self.taken + need > self.capacity:
                break
            self.taken += need
            got = self.random.randrange(max(1, request.new - 1))
            self.context += request.prompt + got
            request.first = 0.0
            heapq.heappush(self.running, (self.decoded + request.new - 1 - got, request.order, request))
            self.sent.popleft()
        if not self.engine.reserves:
            self.taken = 0

    def _ask(self, time: float) -> None:
        traffic = self.traffic
        share = self.random.uniform(traffic.least_share, 1.0), self.random.uniform(traffic.least_share, 1.0)
        new = traffic.answers[self.born] if traffic.answers else max(1, round(traffic.new_tokens * share[1]))
        prompt = max(1, round(traffic.prompt_tokens * share[0]))
        block = self.deployment.block_size  # the last block of a prompt that is there is read again
        known = 0 if self.born % traffic.samples == 0 else (prompt - 1) // block * block
        self.sent.append(_Request(time, prompt, new, known, order=self.born))
        self.born += 1

    def _receive(self) -> None:
        """See the requests that were there when the next pass was composed: before the one that runs had begun, where
        the host works ahead. While others decode, a scheduler looks only after so many passes.
        """
        is_idle = not (self.waiting or self.reading or self.running)
        if not is_idle and self.unseen < self.engine.receive_interval:
            return
        self.unseen = 0
        latest = self.composed if self.engine.overlaps and not is_idle else self.now
        while self.sent and self.sent[0].arrival <= latest:
            self.waiting.append(self.sent.popleft())

    def _step(self, next_arrival: float | None) -> None:
        chunks = self._admit()
        number, size = len(self.running), 1 + self.traffic.drafted
        if chunks and not self.engine.mixes:  # those that decode wait
            number = 0
        steps = 1
        if self.traffic.is_read:  # their first token came from elsewhere
            for request in self.reading:
                request.first = self.now
                self._begin(request)
            self.reading.clear()
            number = len(self.running)
        if not chunks and number:
            left = (self.running[0][0] - self.decoded) / self.pace
            steps = max(1, min(_MOST_STEPS, int(left) if left == int(left) else int(left) + 1))
            if self.sent:  # until they are seen
                steps = min(steps, max(1, self.engine.receive_interval - self.unseen))
            if self.waited:
                steps = min(steps, self.engine.wait_passes - self.waited + 1)
                self.waited += steps - 1
        context = (self.context / number if number else 0.0) + steps * self.pace / 2
        seconds = self.timer.seconds(Batch(number, max(1, round(context)), tuple(chunks), size))
        seconds *= 1 + self.traffic.drafted / self.deployment.model.layers  # drafts, by a head of one layer
        if next_arrival is not None and steps > 1 and self.now + steps * seconds > next_arrival:
            steps = max(1, min(steps, int((next_arrival - self.now) / seconds) + 1))
        self.unseen = self.engine.receive_interval if chunks else self.unseen + steps
        self.composed = self.now + (steps - 1) * seconds
        self.passes += steps
        self.prompts += sum(chunk.tokens for chunk in chunks)
        self.now += steps * seconds
        self.area += number * steps * seconds
        self.context_area += number * context * steps * seconds
        if number:
            self.decoded += steps * self.pace
            self.context += number * steps * self.pace
        self._finish()
        for request in [request for request in self.reading if request.read >= request.prompt]:
            self.reading.remove(request)
            self._begin(request)
        self._make_room()

    def _admit(self) -> list[Chunk]:
        """Chunks of the next pass: those under way first, then those that wait and have room."""
        budget = self.deployment.chunk - (len(self.running) if self.engine.mixes else 0)
        chunks: list[Chunk] = []
        if self._waits_for_others():
            return chunks
        for request in self.reading:
            budget -= self._read(request, budget, chunks)
        while self.waiting and budget > 0 and len(self.running) + len(self.reading) < self.slots:
            request = self.waiting[0]
            if not self.engine.splits and chunks and request.prompt > budget:
                break
            need = request.prompt + (request.new if self.engine.reserves else 0)
            used = self.taken if self.engine.reserves else self.context + sum(r.prompt for r in self.reading)
            if self.capacity is not None and used + need > self.capacity and (self.running or self.reading):
                self.is_full = True
                break
            self.taken += need
            self.reading.append(self.waiting.popleft())
            if self.traffic.is_read:
                request.read = request.prompt
            budget -= self._read(request, budget, chunks)
        return chunks

    def _waits_for_others(self) -> bool:
        """Whether prompts wait for more of them (TensorRT-LLM's py_executor.py, ``_waiting_requests``)."""
        engine, slots = self.engine, self.slots - len(self.running)
        prompts = sum(request.prompt for request in itertools.islice(self.waiting, slots))
        if not self.running or self.reading or not prompts or self.waited >= engine.wait_passes or (
                len(self.running) + prompts >= engine.wait_share * self.deployment.chunk):
            self.waited = 0
            return False
        self.waited += 1
        return True

    @staticmethod
    def _read(request: _Request, budget: int, chunks: list[Chunk]) -> int:
        tokens = min(budget, request.prompt - request.read)
        if tokens > 0:
            request.read += tokens
            chunks.append(Chunk(tokens, request.read))
        return max(0, tokens)

    def _begin(self, request: _Request) -> None:
        """Its prompt is read, which gives its first token."""
        if request.first < 0:
            request.first = self.now
        if request.new <= 1:
            self._answer(request)
            return
        self.context += request.prompt
        heapq.heappush(self.running, (self.decoded + request.new - 1, request.order, request))

    def _finish(self) -> None:
        while self.running and self.running[0][0] <= self.decoded + 1e-9:
            end, _, request = heapq.heappop(self.running)
            self.context -= request.prompt + self.decoded - (end - request.new + 1)
            self._answer(request)

    def _answer(self, request: _Request) -> None:
        if self.engine.reserves:
            self.taken -= request.prompt + request.new
        self.answered += request.new
        if self.traffic.bursts or request.order >= (self.traffic.concurrency or 0):  # not of the beginning
            between = (self.now - request.first) / max(1, request.new - 1)
            if self.engine.holds_first:  # tokens of the first interval are sent together
                request.first += between * (min(self.engine.stream_interval, request.new) - 1)
                between = (self.now - request.first) / max(1, request.new - 1)
            self.done.append(Served(request.first - request.arrival, between))
            self.ends.append(self.now)
        if self.traffic.rate is None and not (self.traffic.bursts and self.born >= self.count):
            self._ask(self.now + self.traffic.delay)

    def _make_room(self) -> None:
        """Where pages run out, the sequence that came last starts over: its tokens are read again as a prompt."""
        while not self.engine.reserves and self.capacity is not None and self.context > self.capacity and len(
                self.running) > 1:
            last = max(self.running, key=lambda item: item[1])
            self.running.remove(last)
            heapq.heapify(self.running)
            end, _, request = last
            got = round(self.decoded - (end - request.new + 1))
            self.context -= request.prompt + got
            self.is_full = True
            again = _Request(request.arrival, request.prompt + got, max(2, request.new - got), first=request.first,
                             order=request.order)
            self.waiting.appendleft(again)


def simulate(deployment: Deployment, timer: PassTimer, traffic: Traffic, requests: int | None = None) -> Timeline:
    """What becomes of ``traffic`` on one replica: its clients, or its requests, are shared evenly by the copies of
    attention, and by the batches that its stages work on at a time. Raises NoRoomError.
    """
    copies = deployment.layout.dp * deployment.layout.pp
    own = traffic if copies == 1 else _share(traffic, copies)
    if requests is None:  # several for each client, and enough for a 99th percentile at a rate
        clients = own.concurrency or 1
        requests = clients if own.answers else 10 * clients if own.bursts else (
            500 if own.rate is not None else max(32, 3 * clients))
    found = Scheduler(deployment, timer, own, requests).run()
    start = timer.constants[f"{deployment.engine.name}.request_seconds"]
    served = tuple(request._replace(first_seconds=request.first_seconds + start) for request in found.requests)
    return replace(found, requests=served)


def cut_answers(answers: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
    """Answers in ``parts`` of equally many in a row, the last one with what is left."""
    size = -(-len(answers) // parts)
    return [answers[start:start + size] for start in range(0, len(answers), size)]


def _share(traffic: Traffic, copies: int) -> Traffic:
    """What one of several copies gets: of answers in a row those that have most tokens together."""
    if traffic.answers:
        own = max(cut_answers(traffic.answers, copies), key=sum)
        return replace(traffic, answers=own, concurrency=len(own), new_tokens=max(own))
    return replace(traffic, concurrency=None if traffic.concurrency is None else max(1, round(
        traffic.concurrency / copies)), rate=None if traffic.rate is None else traffic.rate / copies)

"""A fleet of GPUs that serves a trace: continuous batching, event by event, in plain Python.

A step costs c₀ + c₁ · tokens + c₂ · context, and c₃ for each pair of a prompt's token with one
that it looks back on. Between two events a batch only grows, so its steps are summed in closed
form: a run of thousands of requests takes a tenth of a second. A policy is a `Fleet` with other
fields. Run by itself, the program holds the simulator to formulas.

Not simulated: a block is reserved for an answer's last token from the start (no preemption),
conversations are forgotten whole, drafts are accepted at their mean, what sinks to a tier takes
no time, and a GPU never fails.
"""

import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from fleet_trace import Request, trace

BLOCK = 16  # tokens
FIRST, STEP = 80.0, 1.2  # seconds of the trace, and between two speeds, in a search
TICK = 5.0  # seconds between two looks at the load
TTFT, TPOT, KEPT = 1.0, 0.050, 0.9  # promises in seconds; share that must keep both


# --8<-- [start:costs]
@dataclass(frozen=True)
class Hardware:
    """A GPU's data sheet, as in the planner's hardware.toml."""

    flops: float  # a second, bf16
    bandwidth: float  # bytes a second
    memory: float  # bytes


H100 = Hardware(989e12, 3.35e12, 80e9)
A100 = Hardware(312e12, 2.039e12, 80e9)
B200 = Hardware(2250e12, 8e12, 180e9)
NETWORK = 50e9  # bytes/s of one card at its full rate, 400 Gbit/s; one for each GPU
EFFICIENCY = 0.5  # of the data sheet that kernels reach
PARAMETERS, MULTIPLIED = 8.03e9, 7.50e9  # Llama 3 8B: all, and all but the input embeddings
LAYERS, HIDDEN = 32, 4096
CACHE = 2 * LAYERS * 8 * 128 * 2  # bytes of one token: keys and values of eight heads in bf16


@dataclass(frozen=True)
class Tier:
    """A place for conversations that the GPU has no room for."""

    name: str
    tokens: int  # that it holds, for each GPU or, if shared, for all
    rate: float  # bytes a second for each GPU
    shared: bool = False


@dataclass(frozen=True)
class Fleet:
    """Everything that a policy may change."""

    gpus: int = 8
    route: str = "estimate"
    budget: int = 512  # tokens of a step
    longest_step: float = math.inf  # seconds that a piece of a prompt may stretch a step to
    fair: bool = False  # prompts take turns, a piece at a time; else first come
    slots: int = 256
    keep: bool = True  # whether prefixes stay in the cache
    tiers: tuple[Tier, ...] = ()
    wait: bool = True  # for a tier, also where computing again were faster
    cache: int = CACHE
    attention: bool = True  # count the arithmetic of a prompt's attention: c₃
    hardware: Hardware = H100
    prefills: int = 0  # of the GPUs, for prompts alone; the rest only decode
    decode_on: Hardware | None = None  # what those are, if they are others
    link: float = NETWORK
    drafts: int = 0  # tokens drafted a step
    accepted: float = 0.0  # chance that a draft survives, given that those before it did
    draft_cost: float = 0.0  # of a step of the target, for each draft
    host: float = 0.0  # seconds of Python a step, and for each sequence of it
    host_each: float = 0.0
    overlap: bool = True  # the host prepares a step while the GPU runs the one before
    launch: float = 0.0  # seconds in which the kernels of a step can be launched one by one
    captured: tuple[int, ...] = ()  # batches with a graph: padded to, and launched at once
    reserved: float = 0.0  # bytes that graphs take
    most: int = 0  # GPUs up to which the fleet may grow; 0: it does not
    cold: float = 0.0  # seconds until a new one serves
    target: float = 0.0  # requests inside, for each GPU, that scaling aims at
    hold: float = 0.0  # seconds for which no more must have been asked for, before one goes


# --8<-- [end:costs]


@dataclass(slots=True)
class Job:
    """A request on its way."""

    request: Request
    arrival: float
    left: int  # tokens of the prompt that have not run
    found: int = 0  # tokens of it that a cache had
    loaded: int = 0  # tokens that a lower tier brought, if one did
    blocks: int = 0
    first: float = 0.0
    last: float = 0.0
    begun: float = 0.0  # the GPU's `progress` when its decoding began
    decoded: bool = False  # its prompt ran elsewhere


class Store:
    """A tier: what was used least recently is forgotten first."""

    def __init__(self, tokens: int) -> None:
        self.room, self.entries = tokens, OrderedDict()

    def put(self, key: tuple, tokens: int) -> list[tuple[tuple, int]]:
        """Keep an entry; return those that had to go."""
        self.room += self.entries.pop(key, 0)
        self.entries[key] = tokens
        self.room -= tokens
        gone = []
        while self.room < 0:
            gone.append(self.entries.popitem(last=False))
            self.room += gone[-1][1]
        return gone

    def get(self, key: tuple) -> int:
        if key in self.entries:
            self.entries.move_to_end(key)
        return self.entries.get(key, 0)


# --8<-- [start:gpu]
class Gpu:
    """One engine: its queue, its blocks, and the steps that it takes."""

    def __init__(self, fleet: Fleet, hardware: Hardware, shared: list[Store | None]) -> None:
        self.fleet = fleet
        flops, bandwidth = EFFICIENCY * hardware.flops, EFFICIENCY * hardware.bandwidth
        self.fixed, self.token = 2 * MULTIPLIED / bandwidth, 2 * MULTIPLIED / flops
        self.context_token = fleet.cache / bandwidth
        self.pair = fleet.attention * 4 * LAYERS * HIDDEN / flops
        room = 0.9 * hardware.memory - 2 * PARAMETERS - fleet.reserved
        self.blocks = self.free = int(room / fleet.cache) // BLOCK
        self.waiting: deque[Job] = deque()
        self.prompts: deque[Job] = deque()
        self.decoding: list[tuple[float, int, Job]] = []  # a heap: at which progress one ends
        self.begun: list[Job] = []  # whose decoding begins with the next step
        self.idle: OrderedDict[tuple, tuple[int, int]] = OrderedDict()  # key: blocks, tokens
        self.users: dict[int, int] = {}  # running requests that begin with a shared prompt
        self.tiers = [s or Store(t.tokens) for s, t in zip(shared, fleet.tiers, strict=True)]
        self.loading = [0.0] * len(self.tiers)  # until when each tier's link is taken
        self.pending = self.inside = 0  # tokens of prompts; requests
        self.idle_blocks = self.number = self.computed = self.generated = 0
        self.context = self.progress = self.at = (
            0.0  # tokens looked back on; those of an answer
        )
        self.gain = sum(
            fleet.accepted**i for i in range(fleet.drafts + 1)
        )  # a step, on average
        self.run, self.pace = 0, (0.0, 0.0)
        self.pieces: list[Job] = []
        self.firsts: list[Job] = []
        self.area = self.since = 0.0  # requests inside, summed over time
        self.splits = False  # whether it only prefills
        self.ends: float | None = None
        self.arrives = self.sends = 0.0  # until when the link to it, and from it, is taken
        self.ordered = self.paid = 0.0  # since when it is paid for; seconds before that
        self.leaving = False

    def holds(self, r: Request) -> int:
        """Tokens of a prompt that lie in the GPU."""
        own = self.idle.get(("own", r.conversation))
        if own:
            return min(own[1], r.prompt - 1)
        known = r.system in self.users or ("system", r.system) in self.idle
        return r.shared if known else 0

    def find(self, r: Request, now: float) -> tuple[int, int, float]:
        """Tokens of the longest beginning that is worth its wait, its tier, and when it is up.

        A tier's link loads one conversation after the other. Tier −1 is the GPU.
        """
        best = here = self.holds(r) if self.fleet.keep else 0
        level, up = -1, now
        if not self.tiers:
            return best, level, up
        for n, (tier, store) in enumerate(zip(self.fleet.tiers, self.tiers, strict=True)):
            held = min(store.get(("own", r.conversation)), r.prompt - 1)
            there = max(now, self.loading[n]) + (held - here) * self.fleet.cache / tier.rate
            faster = there - now < self.token * (held - here)
            if held > best and (self.fleet.wait or faster):
                best, level, up = held, n, there
        return best, level, up

    def enter(self, job: Job, now: float) -> None:
        self.area += self.inside * (now - self.since)
        self.since = now
        self.inside += 1
        self.pending += job.left
        self.waiting.append(job)

    def admit(self, now: float) -> None:
        """Take what fits: blocks of prompt and whole answer, idle ones if need be."""
        while self.waiting:
            job = self.waiting[0]
            r, keep = job.request, self.fleet.keep and not job.decoded
            running = len(self.prompts) + len(self.decoding) + len(self.begun)
            tokens = r.prompt - keep * r.shared + (0 if self.splits else r.answer)
            job.blocks = -(-tokens // BLOCK)
            shared = r.shared // BLOCK if keep and r.system not in self.users else 0
            room = self.free + self.idle_blocks
            if running == self.fleet.slots or job.blocks + shared > room:
                return
            self.waiting.popleft()
            self.pending -= job.left
            if keep:
                job.found = max(self.holds(r), job.loaded) // BLOCK * BLOCK
                self.wake(("own", r.conversation))
                self.wake(("system", r.system))
                self.take(shared)
                self.users[r.system] = self.users.get(r.system, 0) + 1
            self.take(job.blocks)
            if job.decoded:
                self.begun.append(job)
            else:
                job.left = r.prompt - job.found
                self.pending += job.left
                self.prompts.append(job)

    def wake(self, key: tuple) -> None:
        """What is about to be used lies idle no more."""
        blocks, _ = self.idle.pop(key, (0, 0))
        self.idle_blocks -= blocks
        self.free += blocks

    def rest(self, key: tuple, blocks: int, tokens: int) -> None:
        """Blocks that nobody uses can be found again until they are needed."""
        self.wake(key)
        self.idle[key] = blocks, tokens
        self.idle_blocks += blocks

    def take(self, blocks: int) -> None:
        """Blocks from the free ones, and from what was used least recently."""
        while self.free < blocks:
            key, (gone, tokens) = self.idle.popitem(last=False)
            self.idle_blocks -= gone
            self.free += gone
            self.sink(key, tokens)
        self.free -= blocks

    def sink(self, key: tuple, tokens: int) -> None:
        """What leaves the GPU falls from tier to tier."""
        falling = [(key, tokens)] if key[0] == "own" else []
        for store in self.tiers:
            falling = [gone for each in falling for gone in store.put(*each)]

    def leave(self, job: Job, now: float) -> None:
        """Give the blocks back, or let them rest."""
        self.area += self.inside * (now - self.since)
        self.since = now
        self.inside -= 1
        r = job.request
        if not self.fleet.keep or job.decoded:
            self.free += job.blocks
            return
        tokens = r.prompt + (0 if self.splits else r.answer - 1)
        self.rest(("own", r.conversation), job.blocks, tokens)
        for tier, store in zip(self.fleet.tiers, self.tiers, strict=True):
            if tier.shared:  # written through: the next turn may come to another GPU
                store.put(("own", r.conversation), tokens)
        self.users[r.system] -= 1
        if not self.users[r.system]:
            del self.users[r.system]
            self.rest(("system", r.system), r.shared // BLOCK, r.shared)

    def forget(self, now: float) -> None:
        """Paid for no more; what its cache knew is lost."""
        self.paid += now - self.ordered
        self.free += self.idle_blocks
        self.idle_blocks, self.leaving = 0, False
        self.idle.clear()

    # --8<-- [end:gpu]

    # --8<-- [start:step]
    def seconds(self, batch: int, tokens: int, context: float, pairs: float) -> float:
        """One step: `batch` answers, `tokens` of prompts, what both look back on."""
        fleet = self.fleet
        padded = 0
        if fleet.captured and not tokens:
            padded = next((size for size in fleet.captured if size >= batch), 0)
        rows = (padded or batch) * (1 + fleet.drafts)
        gpu = self.fixed + self.token * (rows + tokens) + self.context_token * context
        gpu += self.pair * pairs
        if batch:  # a draft is a small step of its own
            one = self.fixed + self.token * batch + self.context_token * context
            gpu += fleet.drafts * fleet.draft_cost * one
        host, launch = fleet.host + fleet.host_each * batch, 0 if padded else fleet.launch
        return max(gpu, host + launch) if fleet.overlap else host + max(gpu, launch)

    def begin(self, now: float) -> float | None:
        """Start the next step, or as many as pass before anything changes; when they end."""
        if self.waiting:
            self.admit(now)
        self.firsts = []
        for job in self.begun:
            if job.decoded:
                self.firsts.append(job)
            job.begun = self.progress
            self.context += job.request.prompt + 1
            ends = self.progress + job.request.answer - 1
            heapq.heappush(self.decoding, (ends, self.number, job))
            self.number += 1
        self.begun, self.pieces = [], []
        batch, tokens, context, pairs = len(self.decoding), 0, self.context, 0.0
        fleet = self.fleet
        if not batch and not self.prompts:
            return None
        while self.prompts and tokens + batch < fleet.budget:
            job = self.prompts[0]
            behind = job.request.prompt - job.left
            piece = min(job.left, fleet.budget - tokens - batch)
            if fleet.longest_step < math.inf:
                piece = self.bounded(piece, batch, tokens, context, pairs, behind)
            job.left -= piece
            tokens += piece
            context += behind + piece
            pairs += piece * (behind + piece / 2)
            self.pieces.append(job)
            if job.left:
                self.prompts.rotate(-fleet.fair)  # the others first, next time
                break
            self.prompts.popleft()
        self.pending -= tokens
        self.computed += tokens
        one, growth, many = self.seconds(batch, tokens, context, pairs), 0.0, 1
        if not tokens and not self.firsts:  # alike until an answer ends; each a little longer
            many = math.ceil((self.decoding[0][0] - self.progress) / self.gain - 1e-9)
            if many > 1:
                last = self.seconds(batch, 0, context + (many - 1) * batch * self.gain, 0.0)
                growth = (last - one) / (many - 1)
        self.run, self.pace, self.at = many, (one, growth), now
        return now + self.took()

    def took(self) -> float:
        """Seconds of the steps of this run."""
        one, growth = self.pace
        return self.run * one + growth * self.run * (self.run - 1) / 2

    def bounded(
        self, piece: int, batch: int, tokens: int, context: float, pairs: float, behind: int
    ) -> int:
        """A piece, a block at least, that is halved until its step stays below the bound."""
        while piece > BLOCK:
            more = pairs + piece * (behind + piece / 2)
            step = self.seconds(batch, tokens + piece, context + behind + piece, more)
            if step <= self.fleet.longest_step:
                break
            piece = max(BLOCK, piece // 2)
        return piece

    def cut(self, now: float) -> float:
        """Somebody has come: stop at the end of the step that runs; when that is."""
        one, growth = self.pace
        most, self.run = self.run, max(1, int((now - self.at) / (one + growth * self.run)))
        while self.run < most and self.took() < now - self.at:
            self.run += 1
        return self.at + self.took()

    def end(self, now: float) -> list[Job]:
        """The steps that ran have ended; the jobs that are through."""
        batch, done = len(self.decoding), []
        self.progress += self.run * self.gain
        self.generated += batch * self.run * self.gain
        self.context += batch * self.run * self.gain
        for job in self.firsts:
            job.first = now
        for job in self.pieces:
            if not job.left:
                job.first = now
                (done if self.splits or job.request.answer == 1 else self.begun).append(job)
        while self.decoding and self.decoding[0][0] <= self.progress + 1e-9:
            job = heapq.heappop(self.decoding)[2]
            self.context -= job.request.prompt + 1 + self.progress - job.begun
            done.append(job)
        for job in done:
            job.last = now
            self.leave(job, now)
        self.run = 0
        return done

    # --8<-- [end:step]


# --8<-- [start:routes]
def estimate(gpu: Gpu, r: Request, now: float, more: int = 0) -> float:
    """Seconds until a first token here and `more`: what loads, what waits, what is computed."""
    held, _, up = gpu.find(r, now)
    tokens = gpu.pending + r.prompt - held
    steps = more + tokens / max(64, gpu.fleet.budget - len(gpu.decoding))
    return up - now + gpu.token * tokens + steps * (gpu.fixed + gpu.context_token * gpu.context)


ROUTES: dict[str, Callable[[list[Gpu], Request, float], Gpu]] = {
    "round robin": lambda gpus, r, now: gpus[r.number % len(gpus)],
    "least loaded": lambda gpus, r, now: min(gpus, key=lambda g: g.inside),
    "sticky": lambda gpus, r, now: gpus[r.conversation % len(gpus)],
    "longest match": lambda gpus, r, now: max(
        gpus, key=lambda g: (g.find(r, now)[0], -g.inside)
    ),
    "estimate": lambda gpus, r, now: min(gpus, key=lambda g: estimate(g, r, now)),
    "estimate + 20": lambda gpus, r, now: min(gpus, key=lambda g: estimate(g, r, now, 20)),
}
# --8<-- [end:routes]


@dataclass
class Run:
    """What came of a trace."""

    jobs: list[Job]
    gpus: list[Gpu]
    end: float = 0.0
    sent: int = 0  # bytes of caches, from prefill to decode
    paid: float = 0.0  # seconds of GPUs, from the order to the end

    def late(self, share: float) -> tuple[float, float]:
        """Percentiles of TTFT and TPOT in seconds, by nearest rank."""
        at = math.ceil(share * len(self.jobs)) - 1
        ttft, tpot = zip(*map(waits, self.jobs), strict=True)
        return sorted(ttft)[at], sorted(tpot)[at]

    def kept(self, ttft: float = TTFT, tpot: float = TPOT) -> float:
        """The share of requests that kept both promises."""
        return sum(a <= ttft and b <= tpot for a, b in map(waits, self.jobs)) / len(self.jobs)

    def cached(self) -> float:
        """The share of the prompts' tokens that was not computed."""
        return sum(j.found for j in self.jobs) / sum(j.request.prompt for j in self.jobs)


def waits(job: Job) -> tuple[float, float]:
    """Seconds to the first token, and for each further one."""
    return job.first - job.arrival, (job.last - job.first) / max(1, job.request.answer - 1)


# --8<-- [start:serve]
def serve(fleet: Fleet, requests: Sequence[Request], speed: float = 1.0) -> Run:
    """The trace through the fleet, `speed` times as fast as it was made."""
    pools = [Store(t.tokens) if t.shared else None for t in fleet.tiers]
    decode_on = fleet.decode_on or fleet.hardware
    decodes = [Gpu(fleet, decode_on, pools) for _ in range(fleet.prefills, fleet.gpus)]
    prefills = [Gpu(fleet, fleet.hardware, pools) for _ in range(fleet.prefills)]
    for gpu in prefills:
        gpu.splits = True
    front = prefills or decodes
    spare = [Gpu(fleet, fleet.hardware, pools) for _ in range(fleet.most - fleet.gpus)]
    gpus, asked = prefills + decodes + spare, deque(maxlen=1 + int(fleet.hold / TICK))
    run, events, order = Run([], gpus), [], itertools.count()

    def later(at: float, gpu: Gpu | None, what: object) -> None:
        heapq.heappush(events, (at, next(order), gpu, what))

    def start(gpu: Gpu, now: float) -> None:
        gpu.ends = gpu.begin(now)
        if gpu.ends is not None:
            later(gpu.ends, gpu, None)

    for r in requests:  # in order, so the list is a heap
        events.append((r.arrival / speed, next(order), None, r))
    if spare:
        later(0.0, None, "scale")
    while events:
        now, _, gpu, what = heapq.heappop(events)
        if what is None:
            if not gpu.run or gpu.ends != now:
                continue  # somebody had come, and it ended earlier
            for job in gpu.end(now):
                if not gpu.splits or job.request.answer == 1:
                    run.jobs.append(job)
                    continue
                to = min(decodes, key=lambda g: g.inside)
                job.decoded, bytes_ = True, job.request.prompt * fleet.cache
                begins = max(now, gpu.sends, to.arrives)  # both cards are free
                gpu.sends = to.arrives = begins + bytes_ / fleet.link
                run.sent += bytes_
                later(to.arrives, to, job)
            start(gpu, now)
            if gpu.leaving:
                later(now, gpu, "leaves")
            continue
        if isinstance(what, Request):  # it arrives: which GPU?
            gpu = ROUTES[fleet.route](front, what, now)
            held, level, up = gpu.find(what, now)
            what = Job(what, now, what.prompt - held)
            if level >= 0:
                what.loaded = held
                gpu.loading[level] = up
                later(up, gpu, what)
                continue
        if isinstance(what, Job):
            gpu.enter(what, now)
            if not gpu.run:
                start(gpu, now)
            elif gpu.run > 1 and gpu.cut(now) < gpu.ends:
                gpu.ends = gpu.at + gpu.took()
                later(gpu.ends, gpu, None)
        elif what == "scale":
            want = wanted(fleet, front, asked)
            leaving = sum(gpu.leaving for gpu in gpus)
            coming = len(gpus) - len(front) - len(spare) - leaving
            for gpu in spare[: max(0, want - len(front) - coming)]:
                spare.remove(gpu)
                gpu.ordered = now
                later(now + fleet.cold, gpu, "serves")
            if max(asked) < len(front):  # the emptiest goes, once it has answered what it has
                gpu = min(front, key=lambda g: g.inside)
                front.remove(gpu)
                gpu.leaving = True
                later(now, gpu, "leaves")
            if len(run.jobs) < len(requests):
                later(now + TICK, None, "scale")
        elif what == "serves":
            front.append(gpu)
        elif what == "leaves" and gpu.leaving and not gpu.inside:
            spare.append(gpu)
            gpu.forget(now)
    run.end = max(job.last for job in run.jobs)
    run.paid = sum(g.paid + (0 if g in spare else run.end - g.ordered) for g in gpus)
    return run


# --8<-- [end:serve]


# --8<-- [start:scale]
def wanted(fleet: Fleet, front: list[Gpu], asked: deque[int]) -> int:
    """How many GPUs the requests inside ask for; `asked` keeps it for a while."""
    inside = sum(gpu.inside for gpu in front)
    asked.append(min(max(fleet.gpus, math.ceil(inside / fleet.target)), fleet.most))
    return asked[-1]


# --8<-- [end:scale]


def conserved(run: Run) -> None:
    """Every token was made once, and every block is back."""
    for gpu in run.gpus:
        assert not (gpu.inside or gpu.pending or gpu.users or gpu.decoding)
        assert gpu.free + gpu.idle_blocks == gpu.blocks
        assert gpu.idle_blocks == sum(blocks for blocks, _ in gpu.idle.values())
        assert abs(gpu.context) < 1e-3
    assert sum(g.computed for g in run.gpus) == sum(
        job.request.prompt - job.found for job in run.jobs
    )
    answers = sum(job.request.answer - 1 for job in run.jobs)
    assert sum(g.generated for g in run.gpus) == answers, "one token a step"


# --8<-- [start:goodput]
@cache
def first() -> list[Request]:
    """The first 80 s of the trace."""
    return [r for r in trace() if r.arrival < FIRST]


@cache
def at_speed(fleet: Fleet, step: float) -> Run:
    """They, at one of the speeds that are 20% apart."""
    run = serve(fleet, first(), STEP**step)
    if not fleet.drafts:  # with them, an answer's last step draws more than it needs
        conserved(run)
    return run


def step_below(speed: float) -> float:
    """The half step at a speed, or just below it."""
    return math.floor(2 * math.log(speed, STEP)) / 2


def goodput(fleet: Fleet, guess: float = 1.0, ttft: float = TTFT, tpot: float = TPOT) -> float:
    """The most requests/s of which KEPT keep both promises; 0 where not even few do.

    From the guess the speed goes down or up, 10% at a time, to where the share crosses KEPT.
    Between two speeds the share is taken to be straight.
    """

    def share(step: float) -> float:
        return at_speed(fleet, step).kept(ttft, tpot)

    low = step_below(guess)
    while share(low) < KEPT:
        low -= 0.5
        if low < -14:
            return 0.0
    while share(low + 0.5) >= KEPT:
        low += 0.5
        if low > 14:
            return math.inf  # 80 s of requests at once: nothing that the promise forbids
    above, below = share(low), share(low + 0.5)
    speed = STEP ** (low + 0.5 * (above - KEPT) / (above - below))
    return speed * len(first()) / FIRST


# --8<-- [end:goodput]


def main() -> None:
    requests = trace()
    print(f"{len(requests)} requests: in time, cached, p99 of TTFT and TPOT, the busiest")
    for route in ROUTES:
        run = serve(Fleet(route=route), requests)
        conserved(run)
        inside = sum(g.area for g in run.gpus) / run.end
        stay = sum(job.last - job.arrival for job in run.jobs) / len(run.jobs)
        assert abs(inside / (len(run.jobs) / run.end * stay) - 1) < 1e-9, "Little"
        ttft, tpot = run.late(0.99)
        made = [gpu.generated for gpu in run.gpus]
        print(
            f"{route:14} {run.kept():6.1%} {run.cached():6.1%} {ttft:8.2f} s "
            f"{1e3 * tpot:4.0f} ms {max(made) / sum(made):6.0%}; "
            f"{inside:5.1f} inside, by Little"
        )
    print("each token made once, each block back")


if __name__ == "__main__":
    main()

"""Simulate a fleet of GPUs that serves a trace of requests with continuous batching.

A step costs c₀ + c₁ · tokens + c₂ · context tokens, and c₃ for each pair of a prompt token and
a token before it. Between two events, the batch of a GPU does not change. The simulator
therefore adds up all steps between two events with one formula, and a trace of thousands of
requests needs only a few tenths of a second. A serving policy is a `Fleet` with other settings.

Run alone, the program compares six ways to choose a GPU for a request. It also checks the
number of active requests with Little's law.

The simulator leaves out: preemption (the blocks of the whole answer are reserved at the start),
partial eviction (the cache of a conversation is dropped as a whole), the randomness of accepted
drafts (every step accepts the mean), the time to copy an evicted cache to a tier, and failures.
"""

import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from fleet_trace import Request, trace

BLOCK = 16  # tokens in one block of the paged cache
SEARCH_SECONDS = 80.0  # the search for the goodput uses this part of the trace
SPEED_RATIO = 1.2  # the search tries speeds that differ by half a power of this ratio
SCALING_INTERVAL = 5.0  # seconds between two decisions of the autoscaler
TTFT_LIMIT, TPOT_LIMIT = 1.0, 0.050  # seconds
REQUIRED_SHARE = 0.9  # share of the requests that must keep both limits


# --8<-- [start:hardware]
@dataclass(frozen=True)
class Hardware:
    """The data sheet of a GPU, as in the planner's hardware.toml."""

    flops: float  # per second, bf16
    bandwidth: float  # of the memory, bytes per second
    memory: float  # bytes


H100 = Hardware(989e12, 3.35e12, 80e9)
A100 = Hardware(312e12, 2.039e12, 80e9)
B200 = Hardware(2250e12, 8e12, 180e9)
NETWORK = 50e9  # bytes per second of a network card of 400 Gbit/s; each GPU has one card
EFFICIENCY = 0.5  # fraction of the data sheet's rates that kernels reach
PARAMETERS = 8.03e9  # of Llama 3 8B
MATMUL_PARAMETERS = 7.50e9  # without the input embedding, which is only looked up
LAYERS, HIDDEN = 32, 4096
CACHE_BYTES = 2 * LAYERS * 8 * 128 * 2  # per token: keys and values of 8 heads in bf16
# --8<-- [end:hardware]


@dataclass(frozen=True)
class Tier:
    """A place below the GPU's memory that stores the caches of waiting conversations."""

    name: str
    capacity: int  # tokens for each GPU, or for all GPUs together if the tier is shared
    bandwidth: float  # bytes per second for each GPU
    shared: bool = False


@dataclass(frozen=True)
class Fleet:
    """The settings that a policy may change. The default values are the baseline."""

    gpus: int = 8
    routing: str = "estimate"  # a key of ROUTERS
    token_budget: int = 512  # tokens per step
    max_step: float = math.inf  # seconds; pieces of prompts are cut so that a step stays below
    interleave: bool = False  # prompts take turns piece by piece; otherwise first come
    max_sequences: int = 256  # per GPU
    prefix_caching: bool = True
    tiers: tuple[Tier, ...] = ()
    always_load: bool = True  # load from a tier even if computing the prompt again is faster
    cache_bytes: int = CACHE_BYTES  # per token
    count_attention: bool = True  # count the FLOPs of a prompt's attention (c₃)
    hardware: Hardware = H100
    prefill_gpus: int = 0  # GPUs that only prefill; the other GPUs then only decode
    decode_hardware: Hardware | None = None  # if the decoding GPUs are of another type
    link: float = NETWORK  # bytes per second between prefill and decode
    drafts: int = 0  # draft tokens per step of speculative decoding
    acceptance: float = 0.0  # probability that a draft is accepted after the ones before it
    draft_cost: float = 0.0  # time of a draft step divided by the time of the model's step
    host: float = 0.0  # seconds of host work per step
    host_per_sequence: float = 0.0  # seconds of host work per step and sequence
    overlap: bool = True  # the host prepares the next step while the GPU computes
    launch: float = 0.0  # seconds to launch all kernels of a step one by one
    graph_sizes: tuple[int, ...] = ()  # batch sizes with a captured CUDA graph
    reserved_bytes: float = 0.0  # memory that is not available for the cache
    max_gpus: int = 0  # the autoscaler's upper limit; 0 switches the autoscaler off
    cold_start: float = 0.0  # seconds from the order of a GPU until it serves
    requests_per_gpu: float = 0.0  # number of active requests that the autoscaler aims at
    scale_down_delay: float = 0.0  # seconds of low demand before a GPU is released


@dataclass(slots=True)
class Job:
    """A request while it is served. All times are in seconds."""

    request: Request
    arrival: float
    prompt_left: int  # prompt tokens that are not computed yet
    cached: int = 0  # prompt tokens that were found in a cache
    loaded: int = 0  # prompt tokens that were loaded from a tier
    blocks: int = 0  # cache blocks that the job has allocated
    first_token: float = 0.0  # time of the first token
    last_token: float = 0.0  # time of the last token
    start_progress: float = 0.0  # the GPU's `progress` when this job began to decode
    transferred: bool = False  # the prompt was computed by another GPU


class LRUCache:
    """Conversations of a tier. The least recently used conversations are evicted first."""

    def __init__(self, tokens: int) -> None:
        self.free_tokens = tokens
        self.entries: OrderedDict[tuple, int] = OrderedDict()

    def put(self, key: tuple, tokens: int) -> list[tuple[tuple, int]]:
        """Store an entry, and return the entries that were evicted for it."""
        self.free_tokens += self.entries.pop(key, 0)
        self.entries[key] = tokens
        self.free_tokens -= tokens
        evicted = []
        while self.free_tokens < 0:
            evicted.append(self.entries.popitem(last=False))
            self.free_tokens += evicted[-1][1]
        return evicted

    def get(self, key: tuple) -> int:
        """The tokens of an entry, which becomes the most recently used one; 0 if missing."""
        if key in self.entries:
            self.entries.move_to_end(key)
        return self.entries.get(key, 0)


# --8<-- [start:gpu]
class Gpu:
    """One inference engine: its queue, its cache blocks and its steps."""

    def __init__(self, fleet: Fleet, hardware: Hardware, shared: list[LRUCache | None]) -> None:
        self.fleet = fleet
        flops, bandwidth = EFFICIENCY * hardware.flops, EFFICIENCY * hardware.bandwidth
        # the four constants of the cost of a step, in seconds
        self.weights_cost = 2 * MATMUL_PARAMETERS / bandwidth  # c₀
        self.token_cost = 2 * MATMUL_PARAMETERS / flops  # c₁
        self.context_cost = fleet.cache_bytes / bandwidth  # c₂
        self.pair_cost = fleet.count_attention * 4 * LAYERS * HIDDEN / flops  # c₃
        # the paged cache
        cache_memory = 0.9 * hardware.memory - 2 * PARAMETERS - fleet.reserved_bytes
        self.total_blocks = int(cache_memory / fleet.cache_bytes) // BLOCK
        self.free_blocks = self.total_blocks
        self.unused: OrderedDict[tuple, tuple[int, int]] = OrderedDict()
        """Cached prefixes that no running request uses, least recent first: blocks, tokens."""
        self.unused_blocks = 0
        self.system_users: dict[int, int] = {}  # running requests per system prompt
        self.tiers = [
            store or LRUCache(tier.capacity)
            for store, tier in zip(shared, fleet.tiers, strict=True)
        ]
        self.load_ends = [0.0] * len(self.tiers)  # time until which a tier's link is busy
        # the requests
        self.waiting: deque[Job] = deque()
        self.prefilling: deque[Job] = deque()
        self.starting: list[Job] = []  # they decode from the next step on
        self.decoding: list[tuple[float, int, Job]] = []  # heap: the final progress of a job
        self.heap_counter = 0  # breaks ties in the heap
        self.prefill_only = False
        self.active = 0  # requests on this GPU
        self.queued_tokens = 0  # prompt tokens that wait or run
        self.context = 0.0  # tokens in the context of all decoding answers
        self.progress = 0.0  # tokens that an answer would have by now if it always decoded
        self.tokens_per_step = sum(fleet.acceptance**i for i in range(fleet.drafts + 1))
        # the current run of steps: its first step takes first_step seconds, and each further
        # step takes step_growth seconds more than the step before it
        self.run_steps, self.first_step, self.step_growth = 0, 0.0, 0.0
        self.run_start = 0.0
        self.run_end: float | None = None
        self.pieces: list[Job] = []  # jobs with a piece of their prompt in this step
        self.first_decodes: list[Job] = []  # transferred jobs whose first token is in this run
        # totals
        self.computed_tokens, self.generated_tokens = 0, 0.0
        self.request_seconds, self.last_change = 0.0, 0.0  # integral of `active` over time
        # the links between GPUs, and the autoscaler
        self.receive_ends = self.send_ends = 0.0  # times until which the links are busy
        self.ordered_at = self.paid_before = 0.0
        self.draining = False  # gets no new requests, and is released when it is empty

    def cached_prefix(self, r: Request) -> int:
        """The tokens at the beginning of a prompt that are in this GPU's cache."""
        conversation = self.unused.get(("conversation", r.conversation))
        if conversation:
            return min(conversation[1], r.prompt - 1)
        known = r.system in self.system_users or ("system", r.system) in self.unused
        return r.shared if known else 0

    def longest_prefix(self, r: Request, now: float) -> tuple[int, int, float]:
        """The tokens of the best prefix, its tier (-1 is the GPU), and the time it is ready.

        The link of a tier loads one conversation after the other.
        """
        best = here = self.cached_prefix(r) if self.fleet.prefix_caching else 0
        level, ready = -1, now
        if not self.tiers:
            return best, level, ready
        for n, (tier, store) in enumerate(zip(self.fleet.tiers, self.tiers, strict=True)):
            tokens = min(store.get(("conversation", r.conversation)), r.prompt - 1)
            transfer = (tokens - here) * self.fleet.cache_bytes / tier.bandwidth
            loaded = max(now, self.load_ends[n]) + transfer
            faster = loaded - now < self.token_cost * (tokens - here)
            if tokens > best and (self.fleet.always_load or faster):
                best, level, ready = tokens, n, loaded
        return best, level, ready

    def count_requests(self, change: int, now: float) -> None:
        self.request_seconds += self.active * (now - self.last_change)
        self.last_change = now
        self.active += change

    def enqueue(self, job: Job, now: float) -> None:
        self.count_requests(1, now)
        self.queued_tokens += job.prompt_left
        self.waiting.append(job)

    def admit(self) -> None:
        """Start waiting jobs while blocks for the prompt and the whole answer are available."""
        while self.waiting:
            job = self.waiting[0]
            r, use_cache = job.request, self.fleet.prefix_caching and not job.transferred
            running = len(self.prefilling) + len(self.decoding) + len(self.starting)
            tokens = r.prompt - use_cache * r.shared + (0 if self.prefill_only else r.answer)
            job.blocks = -(-tokens // BLOCK)
            shared = r.shared // BLOCK if use_cache and r.system not in self.system_users else 0
            available = self.free_blocks + self.unused_blocks
            if running == self.fleet.max_sequences or job.blocks + shared > available:
                return
            self.waiting.popleft()
            self.queued_tokens -= job.prompt_left
            if use_cache:
                job.cached = max(self.cached_prefix(r), job.loaded) // BLOCK * BLOCK
                self.remove_unused(("conversation", r.conversation))
                self.remove_unused(("system", r.system))
                self.allocate(shared)
                self.system_users[r.system] = self.system_users.get(r.system, 0) + 1
            self.allocate(job.blocks)
            if job.transferred:
                self.starting.append(job)
            else:
                job.prompt_left = r.prompt - job.cached
                self.queued_tokens += job.prompt_left
                self.prefilling.append(job)

    def remove_unused(self, key: tuple) -> None:
        """Take a prefix out of the unused ones, because it is used again or replaced."""
        blocks, _ = self.unused.pop(key, (0, 0))
        self.unused_blocks -= blocks
        self.free_blocks += blocks

    def add_unused(self, key: tuple, blocks: int, tokens: int) -> None:
        """Keep a prefix that nobody uses. It can be found until its blocks are needed."""
        self.remove_unused(key)
        self.unused[key] = blocks, tokens
        self.unused_blocks += blocks

    def allocate(self, blocks: int) -> None:
        """Take free blocks, and evict the least recently used prefixes if necessary."""
        while self.free_blocks < blocks:
            key, (evicted, tokens) = self.unused.popitem(last=False)
            self.unused_blocks -= evicted
            self.free_blocks += evicted
            self.demote(key, tokens)
        self.free_blocks -= blocks

    def demote(self, key: tuple, tokens: int) -> None:
        """Move an evicted conversation to the first tier, whose evictions go to the next."""
        evicted = [(key, tokens)] if key[0] == "conversation" else []
        for store in self.tiers:
            evicted = [entry for each in evicted for entry in store.put(*each)]

    def release(self, job: Job, now: float) -> None:
        """Free the blocks of a finished job, or keep them as an unused prefix."""
        self.count_requests(-1, now)
        r = job.request
        if not self.fleet.prefix_caching or job.transferred:
            self.free_blocks += job.blocks
            return
        tokens = r.prompt + (0 if self.prefill_only else r.answer - 1)
        self.add_unused(("conversation", r.conversation), job.blocks, tokens)
        for tier, store in zip(self.fleet.tiers, self.tiers, strict=True):
            if tier.shared:  # written at once, because the next turn may go to another GPU
                store.put(("conversation", r.conversation), tokens)
        self.system_users[r.system] -= 1
        if not self.system_users[r.system]:
            del self.system_users[r.system]
            self.add_unused(("system", r.system), r.shared // BLOCK, r.shared)

    def shut_down(self, now: float) -> None:
        """Return the GPU to the provider. Its cache is lost."""
        self.paid_before += now - self.ordered_at
        self.free_blocks += self.unused_blocks
        self.unused_blocks, self.draining = 0, False
        self.unused.clear()

    # --8<-- [end:gpu]

    # --8<-- [start:step]
    def step_seconds(self, batch: int, tokens: int, context: float, pairs: float) -> float:
        """The time of one step.

        batch:   number of answers that decode one token
        tokens:  number of prompt tokens
        context: tokens that the answers and the prompts look back on
        pairs:   pairs of a prompt token and a token before it
        """
        fleet = self.fleet
        padded = 0  # a CUDA graph runs with the next captured batch size
        if fleet.graph_sizes and not tokens:
            padded = next((size for size in fleet.graph_sizes if size >= batch), 0)
        rows = (padded or batch) * (1 + fleet.drafts)
        gpu = self.weights_cost + self.token_cost * (rows + tokens)
        gpu += self.context_cost * context + self.pair_cost * pairs
        if batch:  # each draft token is a cheaper step
            step = self.weights_cost + self.token_cost * batch + self.context_cost * context
            gpu += fleet.drafts * fleet.draft_cost * step
        host = fleet.host + fleet.host_per_sequence * batch
        launch = 0 if padded else fleet.launch
        return max(gpu, host + launch) if fleet.overlap else host + max(gpu, launch)

    # --8<-- [end:step]

    # --8<-- [start:run]
    def start_run(self, now: float) -> float | None:
        """Start one step, or all steps until an answer ends. Return the time of the end."""
        if self.waiting:
            self.admit()
        self.start_decoding()
        batch, context = len(self.decoding), self.context
        if not batch and not self.prefilling:
            return None
        tokens, context, pairs = self.add_prompt_pieces(batch, context)
        self.queued_tokens -= tokens
        self.computed_tokens += tokens
        self.first_step = self.step_seconds(batch, tokens, context, pairs)
        self.run_steps, self.step_growth = 1, 0.0
        if not tokens and not self.first_decodes:  # the batch is constant until an answer ends
            left = self.decoding[0][0] - self.progress
            steps = math.ceil(left / self.tokens_per_step - 1e-9)
            if steps > 1:
                longer = context + (steps - 1) * batch * self.tokens_per_step
                last_step = self.step_seconds(batch, 0, longer, 0.0)
                self.step_growth = (last_step - self.first_step) / (steps - 1)
                self.run_steps = steps
        self.run_start = now
        return now + self.run_seconds()

    def run_seconds(self) -> float:
        """The time of all steps of this run, an arithmetic series."""
        n = self.run_steps
        return n * self.first_step + self.step_growth * n * (n - 1) / 2

    # --8<-- [end:run]

    def start_decoding(self) -> None:
        """Move the jobs whose prompt is complete to the decoding batch."""
        self.first_decodes = [job for job in self.starting if job.transferred]
        for job in self.starting:
            job.start_progress = self.progress
            self.context += job.request.prompt + 1
            final = self.progress + job.request.answer - 1
            heapq.heappush(self.decoding, (final, self.heap_counter, job))
            self.heap_counter += 1
        self.starting = []

    # --8<-- [start:pieces]
    def add_prompt_pieces(self, batch: int, context: float) -> tuple[int, float, float]:
        """Fill the step with pieces of prompts up to the token budget.

        Return the prompt tokens, the context tokens with those of the pieces, and the pairs.
        """
        tokens, pairs, self.pieces = 0, 0.0, []
        while self.prefilling and tokens + batch < self.fleet.token_budget:
            job = self.prefilling[0]
            behind = job.request.prompt - job.prompt_left  # tokens before this piece
            piece = min(job.prompt_left, self.fleet.token_budget - tokens - batch)
            if self.fleet.max_step < math.inf:
                piece = self.shorten(piece, batch, tokens, context, pairs, behind)
            job.prompt_left -= piece
            tokens += piece
            context += behind + piece
            pairs += piece * (behind + piece / 2)
            self.pieces.append(job)
            if job.prompt_left:
                self.prefilling.rotate(-self.fleet.interleave)  # another prompt comes next
                break
            self.prefilling.popleft()
        return tokens, context, pairs

    def shorten(
        self, piece: int, batch: int, tokens: int, context: float, pairs: float, behind: int
    ) -> int:
        """Halve a piece until its step takes at most max_step, or the piece is one block."""
        while piece > BLOCK:
            more = pairs + piece * (behind + piece / 2)
            step = self.step_seconds(batch, tokens + piece, context + behind + piece, more)
            if step <= self.fleet.max_step:
                break
            piece = max(BLOCK, piece // 2)
        return piece

    # --8<-- [end:pieces]

    def interrupt(self, now: float) -> float:
        """A request has arrived: end the run after the current step, and return that time."""
        planned, elapsed = self.run_steps, now - self.run_start
        longest_step = self.first_step + self.step_growth * planned
        self.run_steps = max(1, int(elapsed / longest_step))
        while self.run_steps < planned and self.run_seconds() < elapsed:
            self.run_steps += 1
        return self.run_start + self.run_seconds()

    def finish_run(self, now: float) -> list[Job]:
        """Account for the steps of the run that ends now, and return the finished jobs."""
        batch, finished = len(self.decoding), []
        self.progress += self.run_steps * self.tokens_per_step
        self.generated_tokens += batch * self.run_steps * self.tokens_per_step
        self.context += batch * self.run_steps * self.tokens_per_step
        for job in self.first_decodes:
            job.first_token = now
        for job in self.pieces:
            if not job.prompt_left:  # the last piece of a prompt gives the first token
                job.first_token = now
                complete = self.prefill_only or job.request.answer == 1
                (finished if complete else self.starting).append(job)
        while self.decoding and self.decoding[0][0] <= self.progress + 1e-9:
            job = heapq.heappop(self.decoding)[2]
            self.context -= job.request.prompt + 1 + self.progress - job.start_progress
            finished.append(job)
        for job in finished:
            job.last_token = now
            self.release(job, now)
        self.run_steps = 0
        return finished


# --8<-- [start:routes]
def estimate(gpu: Gpu, r: Request, now: float, more_steps: int = 0) -> float:
    """Estimated seconds until this GPU has the first token and `more_steps` further tokens."""
    prefix, _, ready = gpu.longest_prefix(r, now)
    tokens = gpu.queued_tokens + r.prompt - prefix
    free_budget = max(64, gpu.fleet.token_budget - len(gpu.decoding))
    steps = more_steps + tokens / free_budget
    step = gpu.weights_cost + gpu.context_cost * gpu.context
    return ready - now + gpu.token_cost * tokens + steps * step


ROUTERS: dict[str, Callable[[list[Gpu], Request, float], Gpu]] = {
    "round robin": lambda gpus, r, now: gpus[r.number % len(gpus)],
    "least loaded": lambda gpus, r, now: min(gpus, key=lambda g: g.active),
    "sticky": lambda gpus, r, now: gpus[r.conversation % len(gpus)],
    "longest match": lambda gpus, r, now: max(
        gpus, key=lambda g: (g.longest_prefix(r, now)[0], -g.active)
    ),
    "estimate": lambda gpus, r, now: min(gpus, key=lambda g: estimate(g, r, now)),
    "estimate + 20": lambda gpus, r, now: min(gpus, key=lambda g: estimate(g, r, now, 20)),
}
# --8<-- [end:routes]


@dataclass
class Result:
    """The finished jobs of a simulated trace, and the GPUs that served them."""

    jobs: list[Job]
    gpus: list[Gpu]
    end: float = 0.0  # time of the last token
    transferred_bytes: int = 0  # of caches, from prefill to decode
    gpu_seconds: float = 0.0  # GPU time that is paid for, from the order to the end

    def percentiles(self, share: float) -> tuple[float, float]:
        """Percentiles of TTFT and TPOT in seconds, by the nearest rank; `share` is 0 to 1."""
        index = math.ceil(share * len(self.jobs)) - 1
        ttft, tpot = zip(*map(latencies, self.jobs), strict=True)
        return sorted(ttft)[index], sorted(tpot)[index]

    def in_time(self, ttft: float = TTFT_LIMIT, tpot: float = TPOT_LIMIT) -> float:
        """The share of the requests that keep both limits, which are in seconds."""
        return sum(a <= ttft and b <= tpot for a, b in map(latencies, self.jobs)) / len(
            self.jobs
        )

    def cached_share(self) -> float:
        """The share of all prompt tokens that were found in a cache."""
        return sum(j.cached for j in self.jobs) / sum(j.request.prompt for j in self.jobs)


def latencies(job: Job) -> tuple[float, float]:
    """The TTFT and the TPOT of a finished job, in seconds."""
    further_tokens = max(1, job.request.answer - 1)
    return (
        job.first_token - job.arrival,
        (job.last_token - job.first_token) / further_tokens,
    )


# --8<-- [start:serve]
def serve(fleet: Fleet, requests: Sequence[Request], speed: float = 1.0) -> Result:
    """Simulate a fleet. With speed 2, the requests arrive twice as fast as in the trace."""
    stores = [LRUCache(tier.capacity) if tier.shared else None for tier in fleet.tiers]
    decode_hardware = fleet.decode_hardware or fleet.hardware
    decodes = [
        Gpu(fleet, decode_hardware, stores) for _ in range(fleet.prefill_gpus, fleet.gpus)
    ]
    prefills = [Gpu(fleet, fleet.hardware, stores) for _ in range(fleet.prefill_gpus)]
    for gpu in prefills:
        gpu.prefill_only = True
    routable = prefills or decodes  # GPUs that get new requests
    spare = [Gpu(fleet, fleet.hardware, stores) for _ in range(fleet.max_gpus - fleet.gpus)]
    gpus = prefills + decodes + spare
    demand = deque(maxlen=1 + int(fleet.scale_down_delay / SCALING_INTERVAL))
    result, events, order = Result([], gpus), [], itertools.count()

    def schedule(time: float, gpu: Gpu | None, event: object) -> None:
        heapq.heappush(events, (time, next(order), gpu, event))

    def start(gpu: Gpu, now: float) -> None:
        gpu.run_end = gpu.start_run(now)
        if gpu.run_end is not None:
            schedule(gpu.run_end, gpu, None)

    for r in requests:  # in the order of arrival, so the list is already a heap
        events.append((r.arrival / speed, next(order), None, r))
    if spare:
        schedule(0.0, None, "scale")
    while events:
        now, _, gpu, event = heapq.heappop(events)
        if event is None:  # a run of steps ends
            if not gpu.run_steps or gpu.run_end != now:
                continue  # the run was interrupted and has ended earlier
            for job in gpu.finish_run(now):
                if not gpu.prefill_only or job.request.answer == 1:
                    result.jobs.append(job)
                    continue
                target = min(decodes, key=lambda g: g.active)
                job.transferred, size = True, job.request.prompt * fleet.cache_bytes
                begin = max(now, gpu.send_ends, target.receive_ends)  # both links are free
                gpu.send_ends = target.receive_ends = begin + size / fleet.link
                result.transferred_bytes += size
                schedule(target.receive_ends, target, job)
            start(gpu, now)
            if gpu.draining:
                schedule(now, gpu, "release")
            continue
        if isinstance(event, Request):  # a request arrives, and the router chooses a GPU
            gpu = ROUTERS[fleet.routing](routable, event, now)
            prefix, level, ready = gpu.longest_prefix(event, now)
            event = Job(event, now, event.prompt - prefix)
            if level >= 0:
                event.loaded = prefix
                gpu.load_ends[level] = ready
                schedule(ready, gpu, event)
                continue
        if isinstance(event, Job):  # a job reaches its GPU
            gpu.enqueue(event, now)
            if not gpu.run_steps:
                start(gpu, now)
            elif gpu.run_steps > 1 and gpu.interrupt(now) < gpu.run_end:
                gpu.run_end = gpu.run_start + gpu.run_seconds()
                schedule(gpu.run_end, gpu, None)
        elif event == "scale":
            desired = desired_gpus(fleet, routable, demand)
            draining = sum(gpu.draining for gpu in gpus)
            starting = len(gpus) - len(routable) - len(spare) - draining
            for gpu in spare[: max(0, desired - len(routable) - starting)]:
                spare.remove(gpu)
                gpu.ordered_at = now
                schedule(now + fleet.cold_start, gpu, "ready")
            if max(demand) < len(routable):  # release the GPU with the fewest requests
                gpu = min(routable, key=lambda g: g.active)
                routable.remove(gpu)
                gpu.draining = True
                schedule(now, gpu, "release")
            if len(result.jobs) < len(requests):
                schedule(now + SCALING_INTERVAL, None, "scale")
        elif event == "ready":
            routable.append(gpu)
        elif event == "release" and gpu.draining and not gpu.active:
            spare.append(gpu)
            gpu.shut_down(now)
    result.end = max(job.last_token for job in result.jobs)
    result.gpu_seconds = sum(
        g.paid_before + (0 if g in spare else result.end - g.ordered_at) for g in gpus
    )
    return result


# --8<-- [end:serve]


# --8<-- [start:scale]
def desired_gpus(fleet: Fleet, routable: list[Gpu], demand: deque[int]) -> int:
    """The number of GPUs for the requests that are active now, which is added to `demand`."""
    active = sum(gpu.active for gpu in routable)
    needed = math.ceil(active / fleet.requests_per_gpu)
    demand.append(min(max(fleet.gpus, needed), fleet.max_gpus))
    return demand[-1]


# --8<-- [end:scale]


def check_conservation(result: Result) -> None:
    """Every token was computed exactly once, and every block is free or unused at the end."""
    for gpu in result.gpus:
        assert not (gpu.active or gpu.queued_tokens or gpu.system_users or gpu.decoding)
        assert gpu.free_blocks + gpu.unused_blocks == gpu.total_blocks
        assert gpu.unused_blocks == sum(blocks for blocks, _ in gpu.unused.values())
        assert abs(gpu.context) < 1e-3
    assert sum(g.computed_tokens for g in result.gpus) == sum(
        job.request.prompt - job.cached for job in result.jobs
    )
    answers = sum(job.request.answer - 1 for job in result.jobs)
    assert sum(g.generated_tokens for g in result.gpus) == answers, "one token per step"


# --8<-- [start:goodput]
@cache
def search_trace() -> list[Request]:
    """The part of the trace that the search for the goodput uses."""
    return [r for r in trace() if r.arrival < SEARCH_SECONDS]


@cache
def run_at(fleet: Fleet, exponent: float) -> Result:
    """Serve this part of the trace at the speed SPEED_RATIO ** exponent."""
    result = serve(fleet, search_trace(), SPEED_RATIO**exponent)
    if not fleet.drafts:  # with drafts, the last step of an answer generates too many tokens
        check_conservation(result)
    return result


def exponent_below(speed: float) -> float:
    """The largest multiple of 1/2 whose speed is not above `speed`."""
    return math.floor(2 * math.log(speed, SPEED_RATIO)) / 2


def goodput(
    fleet: Fleet, guess: float = 1.0, ttft: float = TTFT_LIMIT, tpot: float = TPOT_LIMIT
) -> float:
    """The highest rate, in requests/s, at which REQUIRED_SHARE of the requests are in time.

    The search starts at the speed `guess` and changes it by 10% until the share crosses
    REQUIRED_SHARE. Between two speeds it interpolates linearly. The result is 0 if the share
    is too small at every speed, and infinite if the limits never bind.
    """

    def share(exponent: float) -> float:
        return run_at(fleet, exponent).in_time(ttft, tpot)

    low = exponent_below(guess)
    while share(low) < REQUIRED_SHARE:
        low -= 0.5
        if low < -14:
            return 0.0
    while share(low + 0.5) >= REQUIRED_SHARE:
        low += 0.5
        if low > 14:
            return math.inf
    above, below = share(low), share(low + 0.5)
    speed = SPEED_RATIO ** (low + 0.5 * (above - REQUIRED_SHARE) / (above - below))
    return speed * len(search_trace()) / SEARCH_SECONDS


# --8<-- [end:goodput]


def main() -> None:
    requests = trace()
    print(f"{len(requests)} requests on {Fleet().gpus} GPUs")
    print("                         cached    TTFT     TPOT   tokens of the    active")
    print("router         in time   tokens     p99      p99     busiest GPU  requests")
    for routing in ROUTERS:
        result = serve(Fleet(routing=routing), requests)
        check_conservation(result)
        active = sum(g.request_seconds for g in result.gpus) / result.end
        stay = sum(job.last_token - job.arrival for job in result.jobs) / len(result.jobs)
        rate = len(result.jobs) / result.end
        assert abs(active / (rate * stay) - 1) < 1e-9, "Little's law"
        ttft, tpot = result.percentiles(0.99)
        tokens = [gpu.generated_tokens for gpu in result.gpus]
        print(
            f"{routing:14} {result.in_time():7.1%}  {result.cached_share():7.1%} "
            f"{ttft:7.2f} s {1e3 * tpot:5.0f} ms {max(tokens) / sum(tokens):14.0%} "
            f"{active:10.1f}"
        )
    slow = serve(Fleet(routing="longest match"), requests, 0.1)
    print(f"longest match with a tenth of the load: {slow.in_time():.1%} in time")
    assert slow.in_time() < REQUIRED_SHARE
    print("every token was computed once, and every block is free again")


if __name__ == "__main__":
    main()

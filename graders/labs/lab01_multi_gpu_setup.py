"""The steps of lab 01: what each must do, how that is measured, and the hint for each symptom.

No measurement here depends on how fast the machine is: times are taken with a clock that the
probe moves, and links have invented speeds.
"""

import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from graders.runner import Judge
from graders.tools import Lab, Wrong, ask, judge_devices, named, near, same, second_machine

HINTS = {
    "not_a_device": "pick_device() must return a torch.device: the accelerator with this "
    'index, or torch.device("cpu").',
    "no_accelerator": "With as many accelerators as ranks on this machine, use them: compare "
    "torch.accelerator.device_count() with local_world.",
    "no_index": "torch.accelerator.current_accelerator() has a type and no index: every "
    "process of a machine would take device 0. Return torch.device(its type, local_rank).",
    "device_index": "A machine counts its devices from 0, so the index is the local rank: RANK "
    "counts over all machines.",
    "shared_device": "There are fewer accelerators here than ranks. NCCL refuses two ranks on "
    "one device: fall back to the CPU for all of them.",
    "not_current": "Tensors that are made without a device, and NCCL's own, go to the current "
    "device, which is 0 until torch.accelerator.set_device_index(local_rank).",
    "not_joined": "start_group() must call dist.init_process_group with store, rank and "
    "world_size.",
    "own_store": "Without store=store, init_process_group looks for a store by itself, at "
    "MASTER_ADDR: not the one that has just been tested, and perhaps none at all.",
    "bound_on_cpu": "device_id is for accelerators only. On the CPU leave it out and name the "
    'backend, "gloo".',
    "no_timeout": "Pass timeout=timeout. The default is half an hour on gloo: so long would a "
    "rank wait for one that has died.",
    "gloo_on_gpu": "gloo moves a GPU's tensors by way of the host. On an accelerator pass "
    "device_id=device and no backend: torch knows which one belongs to it.",
    "not_bound": "On an accelerator pass device_id=device: the group is then bound to it, and "
    "connects now and not in the first collective.",
    "no_backend": 'On the CPU name the backend, "gloo": with none, torch starts one for each '
    "kind of device that the machine has.",
    "root_fixed": "The root is an argument: it need not be rank 0.",
    "everybody": "In a gather and in a reduce only the root ends with something; for the other "
    "ranks the answer is None.",
    "nobody": "Only gather and reduce leave ranks with nothing: return what this one gives.",
    "not_summed": "A collective with `reduce` in its name adds the rows up: table.sum(dim=0).",
    "summed": "Only collectives with `reduce` in their name add anything up.",
    "whole_sum": "After a reduce-scatter each rank has only its own cell of the sum: "
    "table.sum(dim=0)[rank].",
    "transposed": "Rows and columns are swapped. table[r, k] is what rank r has for rank k: "
    "rank k receives column k, table[:, k].",
    "neighbour": "Rank k sends to rank k + 1, so it receives the row of rank k - 1, and rank 0 "
    "that of the last: (rank - 1) % world.",
    "other_part": "Put the sentence of the step's table beside your line: which rank's row is "
    "it, which cell, and is it one or all?",
    "facts_own": "Every place of the list must hold what another rank passed: let "
    "dist.all_gather_object(everybody, mine) fill it.",
    "facts_shape": "Return a list with one dictionary for each rank, on every rank.",
    "facts_order": "The facts of all ranks are there, but not in rank order. "
    "all_gather_object puts what rank r passed in place r: leave it there.",
    "facts_root": "Only one rank has the facts. All ranks go on to use them: gather to all, "
    "and let one of them print.",
    "no_warm_up": "The slow first calls are among the timed ones. Call work() warm_up times "
    "before the clock starts.",
    "calls": "Call work() warm_up times, and then exactly `repeats` times with the clock.",
    "not_settled": "The clock was read while the device was still working: you have timed the "
    "queueing. Call settle() after work() and before the second reading.",
    "settled_late": "Work from before the first reading was still going on when the clock "
    "started. Call settle() before the first reading of each call too.",
    "mean": "That is the mean. One disturbed call spoils it; statistics.median ignores it.",
    "minimum": "That is the fastest call. The luckiest of many says little about the next one: "
    "take statistics.median.",
    "total": "That is the time of all calls together. Return the median time of one.",
    "time_other": "Read the clock before and after every call, keep the differences, return "
    "their median.",
    "units": "Return bytes per second, both times; the report divides by 1e9 when it prints.",
    "pair": "Return two numbers: the algorithm bandwidth and the bus bandwidth.",
    "half_ring": "A ring goes round twice: world - 1 steps to add up, and as many to hand out. "
    "The factor is 2 * (world - 1) / world.",
    "no_factor": "Bus and algorithm bandwidth differ by what each link has to carry: "
    "2 * (world - 1) / world times the bytes.",
    "factor_n": "Each of the 2 * (world - 1) messages of the ring is a chunk, and a chunk is "
    "1 / world of the bytes.",
    "bus_other": "The algorithm bandwidth is bytes / seconds; the bus bandwidth is that times "
    "2 * (world - 1) / world.",
    "all_kinds": "A healthy link between machines is slower than one inside: compare each link "
    "with the median of its own kind.",
    "mean_link": "One very slow link moves the mean so far that other slow ones look normal. "
    "Compare with statistics.median.",
    "fast_links": "You report fast links. Slow is more latency, latency > factor * median, or "
    "less bandwidth, bandwidth < median / factor.",
    "no_latency": "A link with normal bandwidth and ten times the latency is slow too.",
    "no_bandwidth": "A link with normal latency and a tenth of the bandwidth is slow too.",
    "factor_fixed": "How much slower counts is an argument: use `factor`.",
    "links_other": "A link is slow if latency > factor * the median latency of its kind, or "
    "bandwidth < the median bandwidth of its kind / factor; return them in their order.",
    "one_key": "All ranks write to one key, and the last one wins. A rank needs a key of its "
    'own: f"{call}/{rank}".',
    "stale": "What comes back was said in an earlier call. Keys stay in the store, so the "
    "call must be part of the key.",
    "not_told": "The ranks do not see what the others said. Set your own key first, then wait "
    "for the key of each rank and read it.",
    "bytes": "store.get returns bytes: decode() them.",
    "endless_wait": "One rank did not come, and the others waited until the store's own "
    "timeout. store.wait([key], timeout) gives up when you want it to; catch "
    "dist.DistStoreError and put None in the place of that rank.",
    "gave_up": "One rank did not come, and what the others said is lost with it. Catch "
    "dist.DistStoreError for each rank by itself, and put None in its place.",
    "no_collective": "This must work while the group is stuck, so it may call no collective: "
    "use the store alone.",
}

LAB = Lab(HINTS)


# --- step 1 -------------------------------------------------------------------------------


@LAB.step(
    1, "pick the device of a local rank",
    "each rank takes its own accelerator, or all take the CPU if they are too few",
    "pick_device", joins=False,
)  # fmt: skip
def device(theirs, ours, lesson):
    n, current = lesson.world, []

    def pick(number: int, rank: int) -> str:
        with second_machine(number, rank, n) as chosen:
            found = theirs.pick_device(rank, n)
        is_device = isinstance(found, torch.device)
        ask(is_device, "pick_device() does not return a torch.device", "not_a_device")
        if number > n:
            current.extend(str(call.args[0]) for call in chosen.mock_calls[-1:])
        return str(found)

    yield from judge_devices(n, pick, n + 1, n - 1, 0, no_index="no_index")
    yield "with too few of them, all would take the CPU"
    made_current = len(current) == n
    ask(made_current, "the device is returned, but not made the current one", "not_current")
    last = [name.removeprefix("cuda:") for name in current]
    right = last == [str(rank) for rank in range(n)]
    ask(right, f"the current devices are {', '.join(last)}", "device_index")


# --- step 2 -------------------------------------------------------------------------------

WAIT = timedelta(seconds=17)


@LAB.step(
    2, "start the group, with a timeout",
    "all ranks are in one group, which meets at the tested store and has a timeout",
    "start_group", joins=False,
)  # fmt: skip
def group(theirs, ours, lesson):
    rank, n = lesson.rank, lesson.world
    store, real = dist.PrefixStore("ours", lesson.store), dist.init_process_group

    def start(device: torch.device, init: Callable) -> list[dict]:
        """What the last init_process_group is given; `init` is called in its place."""
        calls: list[dict] = []

        def noted(*args: Any, **kwargs: Any) -> None:
            calls.append(dict(zip(("backend", "init_method", "timeout"), args, strict=False)))
            calls[-1] |= kwargs
            if torch.device(kwargs.get("device_id") or "meta").type == "cpu":
                kwargs.pop("device_id")  # torch would refuse it; there is a hint for it
            init(*args, **kwargs)

        with (
            mock.patch.object(dist, "init_process_group", noted),
            mock.patch.object(theirs, "init_process_group", noted, create=True),
        ):
            theirs.start_group(store, device, rank, n, WAIT)
        return calls[-1:]

    gpu = start(torch.device("cuda", rank), mock.Mock())
    cpu = start(torch.device("cpu"), real)
    ask(dist.is_initialized(), "no process group has been started", "not_joined")
    who = dist.get_rank(), dist.get_world_size()
    ask(who == (rank, n), f"rank {rank} sees itself as rank {who[0]} of {who[1]}", "not_joined")
    dist.all_reduce(torch.ones(1))
    yield f"{n} ranks are in one group on the CPU"
    ask(cpu and gpu, "on an accelerator no group is started", "not_joined")
    (cpu,), (gpu,) = cpu, gpu
    bound, gpu_bound = (call.get("device_id") is not None for call in (cpu, gpu))
    ask(not bound, "on the CPU the group is given a device_id", "bound_on_cpu")
    for where, call in (("the CPU", cpu), ("an accelerator", gpu)):
        met = call.get("store") is store
        ask(met, f"on {where} the group does not meet at `store`", "own_store")
        given = call.get("timeout")
        said = f"{given.total_seconds():g} s" if given else "the default"
        what = f"on {where} the timeout is {said}, and not {WAIT.total_seconds():g} s"
        ask(given == WAIT, what, "no_timeout")
    yield "it meets at the store that was tested, and waits no longer than it is told"
    gloo = "gloo" in str(gpu.get("backend"))
    ask(not gloo, "on an accelerator the backend is gloo", "gloo_on_gpu")
    ask(gpu_bound, "on an accelerator the group has no device", "not_bound")
    ask("gloo" in str(cpu.get("backend")), "on the CPU no backend is named", "no_backend")


# --- step 3 -------------------------------------------------------------------------------

ROOTED = ("gather", "reduce")
SUMMED = ("reduce", "all-reduce", "reduce-scatter")


def recognise(
    name: str, given: Any, table: torch.Tensor, rank: int, root: int, expected: Callable
) -> str:
    """What an answer is: "right", or the name of the mistake."""
    n, total, across = len(table), table.sum(dim=0), table.sum(dim=1)
    true = expected(name, table, rank, root)

    if given is None or true is None:
        if given is true:
            return "right"
        if name not in ROOTED:
            return "nobody"
        return "everybody" if true is None and rank != 0 else "root_fixed"
    others = [expected(name, table, rank, other) for other in range(n) if other != root]
    known = {"right": [true], "root_fixed": others}
    if name in SUMMED:
        known["whole_sum"] = [total] if name == "reduce-scatter" else []
        known["transposed"] = [across, *across]
        known["not_summed"] = [table, *table, *table.unbind(1), *table.flatten(0, 1)]
    else:
        known["summed"] = [total, *total, across, *across]
        known["neighbour"] = table if name == "send/recv" else []
        roots, swapped = range(n) if name == "scatter" else [root], table.transpose(0, 1)
        known["transposed"] = [expected(name, swapped, rank, other) for other in roots]
    fits = (
        hint
        for hint, parts in known.items()
        if any(each is not None and same(given, each) for each in parts)
    )
    return next(fits, "other_part")


@LAB.step(
    3, "what each collective must give",
    "nine collectives are parts of one table, for every rank and every root",
    "expected", worlds=(3, 2, 1, 4), joins=False,
)  # fmt: skip
def collectives(theirs, ours, lesson):
    n = lesson.world
    generator = torch.Generator().manual_seed(n)
    table = torch.randint(1000, (n, n, 5), generator=generator).float()
    for name in ours.NAMES:
        wrong: dict[str, list[tuple[int, int]]] = {}
        for rank, root in itertools.product(range(n), range(n)):
            given = theirs.expected(name, table.clone(), rank, root)
            kind = recognise(name, given, table, rank, root, ours.expected)
            if kind != "right":
                wrong.setdefault(kind, []).append((rank, root))
        if wrong:
            kind = max(wrong, key=lambda kind: len(wrong[kind]))
            rank, root = wrong[kind][0]
            where = f", root {root}" if name in ("broadcast", "scatter", *ROOTED) else ""
            raise Wrong(f"{name} is not right on rank {rank}{where}", kind)
        yield name


# --- step 4 -------------------------------------------------------------------------------


@LAB.step(
    4, "gather the facts, print them in rank order",
    "every rank has the facts of all, in rank order", "gather_facts", worlds=(3, 2, 1, 4),
)  # fmt: skip
def facts(theirs, ours, lesson):
    mine = {"rank": lesson.rank, "host": f"node{lesson.rank % 2}", "gpus": [1] * lesson.rank}
    given = theirs.gather_facts(mine, lesson.world)
    readable = isinstance(given, (list, tuple)) and all(isinstance(x, dict) for x in given)
    lesson.fact("given", [fact.get("rank") for fact in given] if readable else None)
    lesson.fact("nothing", given is None)


@facts.judge
def _(group):
    n, nothing = group.world, group.facts("nothing")
    ranks = ", ".join(str(rank) for rank in range(n) if not nothing[rank])
    some = any(nothing) and not all(nothing)
    ask(not some, f"only rank {ranks} of {n} gets the facts", "facts_root")
    for rank, given in enumerate(group.facts("given")):
        number = "no list" if given is None else f"a list of {len(given)}"
        ask(len(given or ()) == n, f"rank {rank} of {n} gets {number}", "facts_shape")
        what = f"rank {rank} gets the facts of ranks {', '.join(map(str, given))}"
        all_there = sorted(map(str, given)) == sorted(map(str, range(n)))
        ask(given == list(range(n)) or not all_there, what, "facts_order")
        ask(all_there, f"rank {rank} of {n} does not get the facts of all others", "facts_own")
    yield "every rank has the facts of all"


# --- step 5 -------------------------------------------------------------------------------

FIRST, DISTURBED, QUEUEING, WARM_UP = 100.0, 60.0, 1e-4, 2
DURATIONS = (2.0, 3.0, DISTURBED, 1.0, 2.5, 2.0, 4.0)


class Stopwatch:
    """A clock that only work moves, and a device that works behind its back."""

    def __init__(self, queues: bool):
        self.now, self.ready, self.queues = 1000.0, 1000.0, queues
        self.calls, self.busy = 0, []

    def read(self) -> float:
        self.busy.append(self.ready > self.now)
        return self.now

    def work(self) -> None:
        timed = self.calls - WARM_UP
        length = FIRST if timed < 0 else DURATIONS[timed % len(DURATIONS)]
        self.calls += 1
        self.now += QUEUEING
        self.ready = max(self.ready, self.now) + length
        if not self.queues:
            self.now = self.ready

    def synchronize(self, *_: Any, **__: Any) -> None:
        self.now = max(self.now, self.ready)

    @contextlib.contextmanager
    def set(self, theirs: ModuleType):
        """Put it in place of every clock, and the device in place of those there are."""
        with (
            clock_of(theirs, self.read),
            mock.patch.object(torch.accelerator, "synchronize", self.synchronize),
            mock.patch.object(torch.cuda, "synchronize", self.synchronize),
        ):
            yield


@contextlib.contextmanager
def clock_of(theirs: ModuleType, read: Callable[[], float], **more: Callable):
    """Put `read` in place of every clock, also where one was imported by name."""
    nanoseconds = lambda: int(read() * 1e9)  # noqa: E731
    clocks = dict.fromkeys(("perf_counter", "monotonic", "time"), read)
    clocks |= {f"{name}_ns": nanoseconds for name in clocks} | more
    by_name = {name: clock for name, clock in clocks.items() if name != "time"}
    with (
        mock.patch.multiple(time, **clocks),
        mock.patch.multiple(theirs, create=True, **by_name),
    ):
        yield


@LAB.alone(
    5, "time it properly",
    "warmed up, settled before every reading of the clock, and the median",
    "median_seconds",
)  # fmt: skip
def median(theirs, ours, lesson):
    repeats, true = len(DURATIONS), statistics.median(DURATIONS)
    with_first = [FIRST] * WARM_UP + [*DURATIONS]
    known = {
        "mean": statistics.mean(DURATIONS),
        "minimum": min(DURATIONS),
        "total": [sum(DURATIONS), sum(with_first)],
        "no_warm_up": list(map(statistics.median, (with_first[:repeats], with_first))),
    }
    for device, where in (
        (torch.device("cpu"), "on the CPU"),
        (torch.device("cuda", 0), "on a device that works in the background"),
    ):
        watch = Stopwatch(queues=device.type == "cuda")
        with watch.set(theirs):
            given = theirs.median_seconds(watch.work, device, repeats=repeats, warm_up=WARM_UP)
        what = f"{where} work() was called {repeats} times in all"
        ask(watch.calls != repeats, what, "no_warm_up")
        what = f"{where} {WARM_UP} and {repeats} calls were asked for, and {watch.calls} made"
        ask(watch.calls == repeats + WARM_UP, what, "calls")
        what = f"{where} the answer is {float(given):g} s, and not {true:g} s"
        if watch.queues:
            ask(not any(watch.busy[1::2]), what, "not_settled")
            started = f"{where} the clock started while earlier work was going on"
            ask(not any(watch.busy[0::2]), started, "settled_late")
        ask(near(given, true, 1e-3), what, named(given, known, 1e-3, "time_other"))
        yield f"the median {where}"


# --- step 6 -------------------------------------------------------------------------------

CASES = ((2**30, 0.25, 8), (4096, 2e-5, 3), (2**20, 1e-3, 2), (2**20, 1e-3, 1))
UNITS = (1e3, 1e6, 1e9, 2**10, 2**20, 2**30, 1 / 8, 8e-9)


@LAB.alone(
    6, "from a time to a bandwidth",
    "algorithm and bus bandwidth are those of the ring, for 1 to 8 ranks", "bus_bandwidth",
)  # fmt: skip
def bandwidth(theirs, ours, lesson):
    for nbytes, seconds, n in CASES:
        answer = theirs.bus_bandwidth(nbytes, seconds, n)
        pair = isinstance(answer, (tuple, list)) and len(answer) == 2
        ask(pair, "bus_bandwidth() does not return two numbers", "pair")
        algorithm, bus = map(float, answer)
        true, factor = nbytes / seconds, 2 * (n - 1) / n
        case = f"for {nbytes} bytes in {seconds:g} s over {n} ranks"
        what = f"{case} the algorithm bandwidth is "
        units = any(near(algorithm, true / unit) for unit in UNITS)
        ask(not units, f"{what}{algorithm:.3g}, and not {true:.3g}", "units")
        swapped = near(bus, true) and near(algorithm, true * factor)
        what = f"{what}{algorithm:.4g}, and not {true:.4g}"
        ask(near(algorithm, true), what, "pair" if swapped else "bus_other")
        yield f"{case} the algorithm bandwidth"
        what = f"{case} the bus bandwidth is {bus:.4g}, and not {true * factor:.4g}"
        known = {"half_ring": factor / 2, "no_factor": 1.0, "factor_n": 2.0 * (n - 1)}
        ask(near(bus, true * factor), what, named(bus / true, known, other="bus_other"))


# --- step 7 -------------------------------------------------------------------------------

NEAR, FAR = "same machine", "between machines"
# kind, latency, bandwidth; and the places of the slow ones for a factor of 3
SCENES = {
    "healthy": ([(NEAR, 1e-5, 9e10), (NEAR, 1.2e-5, 1e11), (FAR, 5e-5, 1e10), (FAR, 6e-5, 9e9),
                 (NEAR, 1.1e-5, 9.5e10), (NEAR, 1e-5, 9e10), (NEAR, 1e-5, 9e10)], []),
    "bandwidth": ([(NEAR, 1e-5, 9e10), (NEAR, 1.1e-5, 1e11), (NEAR, 1e-5, 1e10),
                   (NEAR, 1e-5, 9e10)], [2]),
    "latency": ([(FAR, 5e-5, 1e10), (FAR, 9e-4, 1e10), (FAR, 5e-5, 1.1e10), (FAR, 5e-5, 1e10),
                 (FAR, 5e-5, 1e10), (FAR, 5e-5, 1e10)], [1]),
    "very slow": ([(FAR, 5e-5, 1e10), (FAR, 5e-5, 1e10), (FAR, 6e-5, 3.4e9),
                   (FAR, 9.0, 1e4), (FAR, 2e-4, 1e10), (FAR, 5e-5, 1e10)], [3, 4]),
    "only one": ([(NEAR, 1e-5, 9e10), (FAR, 1e-2, 1e7), (NEAR, 1e-5, 9e10)], []),
    "fast": ([(FAR, 5e-5, 1e10), (FAR, 1e-5, 4e10), (FAR, 5e-5, 1e10), (FAR, 5e-5, 1e10),
              (FAR, 5e-5, 1e10), (FAR, 5e-5, 1e10)], []),
}  # fmt: skip


@LAB.alone(
    7, "find the slow link",
    "slow links are found, each against the median of its own kind, and no healthy one",
    "slow_links",
)  # fmt: skip
def links(theirs, ours, lesson):
    def places(rows: list, factor: float) -> list[int]:
        links = [ours.Link(0, b, *row) for b, row in enumerate(rows, start=1)]
        return [links.index(link) for link in theirs.slow_links(links, factor)]

    def expect(name: str, good: bool, hint: str) -> None:
        rows, true = SCENES[name]
        what = f"of {len(rows)} links (scene: {name}) numbers {slow[name]} are called slow"
        ask(good, f"{what}, and not {true}", hint)

    slow = {name: places(rows, 3) for name, (rows, _) in SCENES.items()}
    expect("fast", not slow["fast"], "fast_links")
    kinds = {SCENES["healthy"][0][place][0] for place in slow["healthy"]}
    expect("healthy", kinds != {FAR}, "all_kinds")
    expect("bandwidth", slow["bandwidth"], "no_bandwidth")
    expect("latency", slow["latency"], "no_latency")
    yield "one slow link among good ones is found"
    hint = "mean_link" if slow["very slow"] == [3] else "links_other"
    expect("very slow", slow["very slow"] == [3, 4], hint)
    expect("only one", not slow["only one"], "all_kinds")
    for name, (_, true) in SCENES.items():
        expect(name, slow[name] == true, "links_other")
    found = places(SCENES["bandwidth"][0], 20)
    ask(not found, f"with factor=20 numbers {found} are called slow", "factor_fixed")


# --- step 8 -------------------------------------------------------------------------------

LONG, SHORT = timedelta(seconds=30), timedelta(seconds=2)
MOMENT = timedelta(milliseconds=1)  # what a look at the store takes


class Meeting(dist.Store):
    """A store for ranks which are threads, and their clock, which only waiting moves.

    One rank runs at a time, until it waits or returns. Once all wait for what nobody has said,
    the clock goes to where the first of them gives up. So nobody is late because of the
    machine, and nobody waits for the machine's clock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now, self.said = 0.0, {}
        self.turn = threading.Condition()
        self.living, self.waiting = 0, {}  # how many; thread: how long, and for which keys

    def run(self, ranks: list[Callable[[], Any]]) -> list[Any]:
        """What each returns."""

        def live(rank: Callable[[], Any]) -> Any:
            with self.turn:
                try:
                    return rank()
                finally:
                    self.living -= 1
                    self.turn.notify_all()

        self.living = len(ranks)
        with ThreadPoolExecutor(self.living) as threads:
            return list(threads.map(live, ranks))

    def all_wait(self) -> bool:
        """Whether no rank can go on."""
        found = (self.said.keys() >= keys for _, keys in self.waiting.values())
        return len(self.waiting) == self.living and not any(found)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        patience = (self.timeout if timeout is None else timeout).total_seconds()
        mine = until, wanted = self.now + patience, set(keys)

        def over() -> bool:
            return self.all_wait() and until == min(end for end, _ in self.waiting.values())

        with self.turn:
            self.waiting[threading.get_ident()] = mine
            self.turn.notify_all()
            self.turn.wait_for(lambda: self.said.keys() >= wanted or over())
            del self.waiting[threading.get_ident()]
        if not self.said.keys() >= wanted:
            self.now = until
            raise dist.DistStoreError(f"wait timeout after {patience:g} s, keys: {keys}")

    def sleep(self, seconds: float) -> None:
        with contextlib.suppress(dist.DistStoreError):
            self.wait([None], timedelta(seconds=seconds))  # nobody says that

    def check(self, keys: list[str]) -> bool:
        with contextlib.suppress(dist.DistStoreError):
            return self.wait(keys, MOMENT) is None
        return False

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.said[key]

    def set(self, key: str, value: str | bytes) -> None:
        self.said[key] = value.encode() if isinstance(value, str) else bytes(value)

    def append(self, key: str, value: str | bytes) -> None:
        before = self.said.get(key, b"")
        self.set(key, value)
        self.said[key] = before + self.said[key]

    def add(self, key: str, number: int) -> int:
        self.said[key] = b"%d" % (int(self.said.get(key, 0)) + number)
        return int(self.said[key])

    def delete_key(self, key: str) -> bool:
        return self.said.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self.said)


@LAB.alone(
    8, "compare before the collective",
    "every rank hears what all will call, each time anew, and who does not come is named",
    "exchange_metadata",
    crashes={
        "[Pp]rocess group has not been initialized": "no_collective",
        "wait timeout": "endless_wait",
    },
)  # fmt: skip
def exchange(theirs, ours, lesson):
    joined = mock.Mock(side_effect=Wrong("a process group is started", "no_collective"))
    with (
        mock.patch.object(dist, "init_process_group", joined),
        mock.patch.object(theirs, "init_process_group", joined, create=True),
    ):
        for n in (2, 3, 1, 4):
            yield from compare(theirs, n)
            names = ", ".join(sorted({call.name for call in lesson.calls}))
            ask(not names, f"{names} was called", "no_collective")


def compare(theirs: ModuleType, n: int) -> Judge:
    """Two calls that all ranks come to, and one to which the last does not.

    The first rank that runs and does not wait reads what others said in the last call.
    """
    store = Meeting()

    def call(number: int, ranks: int, patience: timedelta) -> list[list | None]:
        """What each rank hears."""

        def hear(rank: int) -> list | None:
            mine = f"float32 [{10 * number + rank}]"
            given = theirs.exchange_metadata(store, f"call {number}", mine, rank, n, patience)
            if not isinstance(given, (list, tuple)):
                return None
            return [f"bytes {x!r}" if isinstance(x, bytes) else x for x in given]

        with clock_of(theirs, lambda: store.now, sleep=store.sleep):
            return store.run([partial(hear, rank) for rank in range(ranks)])

    def said(texts: list | None) -> str:
        return "nothing" if texts is None else ", ".join(map(str, texts))

    for number in range(2):
        true = [f"float32 [{10 * number + other}]" for other in range(n)]
        for rank, texts in enumerate(call(number, n, LONG)):
            what = f"in call {number + 1} rank {rank} of {n} hears {said(texts)}"
            bytes_left = any(str(text).startswith("bytes ") for text in texts or [])
            ask(not bytes_left, what, "bytes")
            stale = number and {f"float32 [{other}]" for other in range(n)} & set(texts or [])
            ask(not stale, what, "stale")
            one = texts is not None and len(texts) == n > 1 and set(texts) <= set(true)
            ask(texts == true, what, "one_key" if one else "not_told")
    yield f"two calls are told apart, and every rank of {n} hears all"
    began = store.now
    absent = [f"float32 [{20 + other}]" for other in range(n - 1)] + [None]
    for rank, texts in enumerate(call(2, n - 1, SHORT) if n > 1 else ()):
        what = f"rank {n - 1} does not come, and rank {rank} of {n} hears {said(texts)}"
        ask(texts == absent, what, "gave_up")
    waited = f"{store.now - began:g} s and not {SHORT.total_seconds():g} s"
    what = f"rank {n - 1} does not come, and the others wait for {waited}"
    ask(store.now - began <= n * SHORT.total_seconds(), what, "endless_wait")

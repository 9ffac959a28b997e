"""The steps of lab 01: what each must do, how that is measured, and the hint for each symptom.

No measurement here depends on how fast the machine is: times are taken with a clock that the
probe moves, and links have invented speeds.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from graders.runner import Group, Lesson, Step, Wrong

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
    "gloo_on_gpu": "gloo is for the CPU. On an accelerator pass device_id=device and no "
    "backend: torch knows which one belongs to it.",
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


# --- step 1 -------------------------------------------------------------------------------


@contextlib.contextmanager
def accelerators(number: int) -> Iterator[mock.Mock]:
    """A machine with so many GPUs, as torch would tell; yields what sets the current one."""
    chosen = mock.Mock()
    with (
        mock.patch.object(torch.accelerator, "is_available", lambda: number > 0),
        mock.patch.object(torch.accelerator, "device_count", lambda: number),
        mock.patch.object(
            torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda")
        ),
        mock.patch.object(torch.accelerator, "set_device_index", chosen),
        mock.patch.object(torch.accelerator, "set_device_idx", chosen, create=True),
        mock.patch.object(torch.cuda, "is_available", lambda: number > 0),
        mock.patch.object(torch.cuda, "device_count", lambda: number),
        mock.patch.object(torch.cuda, "set_device", chosen),
    ):
        yield chosen


def probe_device(lesson: Lesson) -> None:
    pick, local_rank, n = lesson.module.pick_device, lesson.rank, lesson.world
    second = {"RANK": str(local_rank + n), "WORLD_SIZE": str(2 * n)}
    with mock.patch.dict(os.environ, second):
        for name, number in (("enough", n + 1), ("too few", n - 1), ("none", 0)):
            with accelerators(number) as chosen:
                device = pick(local_rank, n)
            lesson.fact(name, str(device) if isinstance(device, torch.device) else None)
            lesson.fact(f"{name} chosen", [str(call.args[0]) for call in chosen.mock_calls])


def judge_device(group: Group, right: Callable[[str], None]) -> None:
    n = group.world
    if any(None in group.facts(name) for name in ("enough", "too few", "none")):
        raise Wrong("pick_device() does not return a torch.device", HINTS["not_a_device"])
    enough = group.facts("enough")
    if "cpu" in enough:
        what = f"on a machine with {n + 1} accelerators, the devices are {', '.join(enough)}"
        raise Wrong(what, HINTS["no_accelerator"])
    if enough != [f"cuda:{r}" for r in range(n)]:
        what = f"on the second machine of two, the devices are {', '.join(enough)}"
        raise Wrong(
            what, HINTS["device_index" if any(":" in d for d in enough) else "no_index"]
        )
    right("on a GPU machine every rank would take its own GPU")
    for name, number in (("too few", n - 1), ("none", 0)):
        if group.facts(name) != ["cpu"] * n:
            what = f"with {number} for {n} ranks, the devices are "
            raise Wrong(what + ", ".join(group.facts(name)), HINTS["shared_device"])
    right("with too few of them, all would take the CPU")
    chosen = group.facts("enough chosen")
    if any(not calls for calls in chosen):
        raise Wrong(
            "the device is returned, but not made the current one", HINTS["not_current"]
        )
    last = [calls[-1].removeprefix("cuda:") for calls in chosen]
    if last != [str(r) for r in range(n)]:
        raise Wrong(f"the current devices are {', '.join(last)}", HINTS["device_index"])


# --- step 2 -------------------------------------------------------------------------------

WAIT = timedelta(seconds=17)


def probe_start(lesson: Lesson) -> None:
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    store = dist.PrefixStore("ours", store)
    real = dist.init_process_group

    def start(device: torch.device, init: Callable) -> list[dict]:
        calls: list[dict] = []

        def noted(*args: Any, **kwargs: Any) -> None:
            given = (
                dict(zip(("backend", "init_method", "timeout"), args, strict=False)) | kwargs
            )
            seconds = given.get("timeout") and given["timeout"].total_seconds()
            backend, bound = given.get("backend"), given.get("device_id")
            calls.append(
                {
                    "store": given.get("store") is store,
                    "timeout": seconds,
                    "backend": backend and str(backend),
                    "device": None if bound is None else str(bound),
                }
            )
            if bound is not None and torch.device(bound).type == "cpu":
                kwargs.pop("device_id")  # torch would refuse it; the judge has a hint for it
            init(*args, **kwargs)

        with (
            mock.patch.object(dist, "init_process_group", noted),
            mock.patch.object(lesson.module, "init_process_group", noted, create=True),
        ):
            lesson.module.start_group(store, device, lesson.rank, lesson.world, WAIT)
        return calls

    lesson.fact("gpu", start(torch.device("cuda", lesson.rank), mock.Mock()))
    lesson.fact("cpu", start(torch.device("cpu"), real))
    lesson.fact("joined", dist.is_initialized())
    if dist.is_initialized():
        lesson.fact("who", [dist.get_rank(), dist.get_world_size(), dist.get_backend()])
        total = torch.tensor(float(lesson.rank + 1))
        dist.all_reduce(total)


def judge_start(group: Group, right: Callable[[str], None]) -> None:
    n = group.world
    if not all(group.facts("joined")):
        raise Wrong("no process group has been started", HINTS["not_joined"])
    who = [tuple(fact[:2]) for fact in group.facts("who")]
    if who != [(r, n) for r in range(n)]:
        raise Wrong(f"the ranks see themselves as {who}", HINTS["not_joined"])
    right(f"{n} ranks are in one group on the CPU")
    cpu, gpu = group.facts("cpu")[0][-1:], group.facts("gpu")[0][-1:]
    if not cpu or not gpu:
        raise Wrong("on an accelerator no group is started", HINTS["not_joined"])
    if cpu[0]["device"] is not None:
        raise Wrong("on the CPU the group is given a device_id", HINTS["bound_on_cpu"])
    for where, call in (("the CPU", cpu[0]), ("an accelerator", gpu[0])):
        if not call["store"]:
            raise Wrong(f"on {where} the group does not meet at `store`", HINTS["own_store"])
        if call["timeout"] != WAIT.total_seconds():
            given = "the default" if call["timeout"] is None else f"{call['timeout']:g} s"
            what = f"on {where} the timeout is {given}, and not {WAIT.total_seconds():g} s"
            raise Wrong(what, HINTS["no_timeout"])
    right("it meets at the store that was tested, and waits no longer than it is told")
    if "gloo" in (gpu[0]["backend"] or ""):
        raise Wrong("on an accelerator the backend is gloo", HINTS["gloo_on_gpu"])
    if gpu[0]["device"] is None:
        raise Wrong("on an accelerator the group has no device", HINTS["not_bound"])
    if "gloo" not in (cpu[0]["backend"] or ""):
        raise Wrong("on the CPU no backend is named", HINTS["no_backend"])


# --- step 3 -------------------------------------------------------------------------------

ROOTED = ("gather", "reduce")
SUMMED = ("reduce", "all-reduce", "reduce-scatter")


def part(name: str, table: torch.Tensor, rank: int, root: int) -> torch.Tensor | None:
    """Step 3 as it should be."""
    total = table.sum(dim=0)
    match name:
        case "broadcast":
            return table[root]
        case "scatter":
            return table[root, rank]
        case "gather":
            return table if rank == root else None
        case "all-gather":
            return table
        case "reduce":
            return total if rank == root else None
        case "all-reduce":
            return total
        case "reduce-scatter":
            return total[rank]
        case "all-to-all":
            return table[:, rank]
        case _:
            return table[(rank - 1) % len(table)]


COLLECTIVES = (
    "broadcast", "scatter", "gather", "all-gather", "reduce", "all-reduce", "reduce-scatter",
    "all-to-all", "send/recv",
)  # fmt: skip


def recognise(name: str, given: Any, table: torch.Tensor, rank: int, root: int) -> str:
    """What an answer is: "right", or the name of the mistake."""
    n, total = len(table), table.sum(dim=0)
    true = part(name, table, rank, root)

    def equals(candidate: torch.Tensor | None) -> bool:
        return (
            isinstance(given, torch.Tensor)
            and candidate is not None
            and given.shape == candidate.shape
            and torch.equal(given, candidate)
        )

    if given is None or true is None:
        if given is None and true is None:
            return "right"
        if name not in ROOTED:
            return "nobody"
        return "everybody" if true is None and rank != 0 else "root_fixed"
    if equals(true):
        return "right"
    if any(equals(part(name, table, rank, other)) for other in range(n) if other != root):
        return "root_fixed"
    parts = [table, *table, *table.unbind(1), *table.flatten(0, 1)]
    if name in SUMMED:
        if name == "reduce-scatter" and equals(total):
            return "whole_sum"
        if any(map(equals, [table.sum(dim=1), *table.sum(dim=1)])):
            return "transposed"
        return "not_summed" if any(map(equals, parts)) else "other_part"
    if any(map(equals, [total, *total, table.sum(dim=1), *table.sum(dim=1)])):
        return "summed"
    if name == "send/recv" and any(map(equals, table)):
        return "neighbour"
    swapped = table.transpose(0, 1)
    if equals(part(name, swapped, rank, root)) or (
        name == "scatter" and any(equals(part(name, swapped, rank, q)) for q in range(n))
    ):
        return "transposed"
    return "other_part"


def probe_expected(lesson: Lesson) -> None:
    n = lesson.world
    generator = torch.Generator().manual_seed(n)
    table = torch.randint(1000, (n, n, 5), generator=generator).float()
    found: list[list] = []
    for root in range(n):
        for name in COLLECTIVES:
            given = lesson.module.expected(name, table.clone(), lesson.rank, root)
            found.append([name, root, recognise(name, given, table, lesson.rank, root)])
    lesson.fact("found", found)


def judge_expected(group: Group, right: Callable[[str], None]) -> None:
    found = [
        (rank, *entry) for rank, facts in enumerate(group.facts("found")) for entry in facts
    ]
    for name in COLLECTIVES:
        wrong = [entry for entry in found if entry[1] == name and entry[3] != "right"]
        if not wrong:
            right(name)
            continue
        kinds = [entry[3] for entry in wrong]
        kind = max(dict.fromkeys(kinds), key=kinds.count)
        rank, _, root, _ = next(entry for entry in wrong if entry[3] == kind)
        where = f", root {root}" if name in ("broadcast", "scatter", *ROOTED) else ""
        raise Wrong(f"{name} is not right on rank {rank}{where}", HINTS[kind])


# --- step 4 -------------------------------------------------------------------------------


def probe_facts(lesson: Lesson) -> None:
    mine = {"rank": lesson.rank, "host": f"node{lesson.rank % 2}", "gpus": [1] * lesson.rank}
    given = lesson.module.gather_facts(mine, lesson.world)
    readable = isinstance(given, (list, tuple)) and all(isinstance(x, dict) for x in given)
    lesson.fact("given", [fact.get("rank") for fact in given] if readable else None)
    lesson.fact("nothing", given is None)


def judge_facts(group: Group, right: Callable[[str], None]) -> None:
    n, given = group.world, group.facts("given")
    nothing = group.facts("nothing")
    if any(nothing) and not all(nothing):
        ranks = ", ".join(str(r) for r in range(n) if not nothing[r])
        raise Wrong(f"only rank {ranks} of {n} gets the facts", HINTS["facts_root"])
    for r, ranks in enumerate(given):
        if ranks is None or len(ranks) != n:
            number = "no list" if ranks is None else f"a list of {len(ranks)}"
            raise Wrong(f"rank {r} of {n} gets {number}", HINTS["facts_shape"])
        if ranks == list(range(n)):
            continue
        if sorted(map(str, ranks)) == sorted(map(str, range(n))):
            places = ", ".join(map(str, ranks))
            raise Wrong(f"rank {r} gets the facts of ranks {places}", HINTS["facts_order"])
        what = f"rank {r} of {n} does not get the facts of all others"
        raise Wrong(what, HINTS["facts_own"])
    right("every rank has the facts of all")


# --- step 5 -------------------------------------------------------------------------------

FIRST, DISTURBED, QUEUEING = 100.0, 60.0, 1e-4
DURATIONS = (2.0, 3.0, DISTURBED, 1.0, 2.5, 2.0, 4.0)


class Stopwatch:
    """A clock that only work moves, and a device that works behind its back."""

    def __init__(self, queues: bool):
        self.now, self.ready, self.queues = 1000.0, 1000.0, queues
        self.calls, self.reads, self.busy = 0, 0, []
        self.warm_up = 0

    def read(self) -> float:
        self.busy.append(self.ready > self.now)
        self.reads += 1
        return self.now

    def work(self) -> None:
        timed = self.calls - self.warm_up
        length = FIRST if timed < 0 else DURATIONS[timed % len(DURATIONS)]
        self.calls += 1
        self.now += QUEUEING
        self.ready = max(self.ready, self.now) + length
        if not self.queues:
            self.now = self.ready

    def synchronize(self, *_: Any, **__: Any) -> None:
        self.now = max(self.now, self.ready)


def probe_median(lesson: Lesson) -> None:
    for name, queues in (("cpu", False), ("gpu", True)):
        watch = Stopwatch(queues)
        watch.warm_up = 2
        device = torch.device("cuda", 0) if queues else torch.device("cpu")
        with contextlib.ExitStack() as stack:
            for clock in ("perf_counter", "monotonic", "time"):
                stack.enter_context(mock.patch.object(time, clock, watch.read))
            for clock in ("perf_counter_ns", "monotonic_ns", "time_ns"):
                nanoseconds = lambda: int(watch.read() * 1e9)  # noqa: B023, E731
                stack.enter_context(mock.patch.object(time, clock, nanoseconds))
            for module in (torch.accelerator, torch.cuda):
                stack.enter_context(mock.patch.object(module, "synchronize", watch.synchronize))
            given = lesson.module.median_seconds(
                watch.work, device, repeats=len(DURATIONS), warm_up=2
            )
        lesson.fact(name, {"given": float(given), "calls": watch.calls, "busy": watch.busy})


def judge_median(group: Group, right: Callable[[str], None]) -> None:
    repeats, warm = len(DURATIONS), 2
    for name in ("cpu", "gpu"):
        fact = group.facts(name)[0]
        given, calls, busy = fact["given"], fact["calls"], fact["busy"]
        where = "on the CPU" if name == "cpu" else "on a device that works in the background"
        with_first = sorted([FIRST] * warm + list(DURATIONS[: repeats - warm]))

        def near(value: float, given: float = given) -> bool:
            return abs(given - value) < 0.01

        what = f"{where} the answer is {given:g} s, and not {statistics.median(DURATIONS):g} s"
        if calls == repeats:
            raise Wrong(
                f"{where} work() was called {repeats} times in all", HINTS["no_warm_up"]
            )
        if calls != repeats + warm:
            right_calls = f"{warm} and {repeats} calls were asked for"
            raise Wrong(f"{where} {right_calls}, and {calls} made", HINTS["calls"])
        if name == "gpu" and any(busy[1::2]):
            raise Wrong(what, HINTS["not_settled"])
        if name == "gpu" and any(busy[0::2]):
            what = f"{where} the clock started while earlier work was going on"
            raise Wrong(what, HINTS["settled_late"])
        if near(statistics.median(DURATIONS)):
            right(f"the median {where}")
            continue
        if near(statistics.mean(DURATIONS)):
            raise Wrong(what, HINTS["mean"])
        if near(min(DURATIONS)):
            raise Wrong(what, HINTS["minimum"])
        if near(sum(DURATIONS)) or near(sum(DURATIONS) + warm * FIRST):
            raise Wrong(what, HINTS["total"])
        firsts = (
            statistics.median(with_first),
            statistics.median([FIRST] * warm + [*DURATIONS]),
        )
        if any(map(near, firsts)):
            raise Wrong(what, HINTS["no_warm_up"])
        raise Wrong(what, HINTS["time_other"])


# --- step 6 -------------------------------------------------------------------------------

CASES = ((2**30, 0.25, 8), (4096, 2e-5, 3), (2**20, 1e-3, 2), (2**20, 1e-3, 1))


def probe_bandwidth(lesson: Lesson) -> None:
    given = []
    for nbytes, seconds, world in CASES:
        answer = lesson.module.bus_bandwidth(nbytes, seconds, world)
        pair = isinstance(answer, (tuple, list)) and len(answer) == 2
        given.append([float(x) for x in answer] if pair else None)
    lesson.fact("given", given)


def judge_bandwidth(group: Group, right: Callable[[str], None]) -> None:
    given = group.facts("given")[0]
    if None in given:
        raise Wrong("bus_bandwidth() does not return two numbers", HINTS["pair"])
    for (nbytes, seconds, n), (algorithm, bus) in zip(CASES, given, strict=True):
        true, factor = nbytes / seconds, 2 * (n - 1) / n
        case = f"for {nbytes} bytes in {seconds:g} s over {n} ranks"

        def near(a: float, b: float) -> bool:
            return abs(a - b) <= 1e-6 * max(abs(a), abs(b))

        for unit in (1e3, 1e6, 1e9, 2**10, 2**20, 2**30, 1 / 8, 8e-9):
            if near(algorithm, true / unit):
                what = f"{case} the algorithm bandwidth is {algorithm:.3g}, and not {true:.3g}"
                raise Wrong(what, HINTS["units"])
        if not near(algorithm, true):
            swapped = near(bus, true) and near(algorithm, true * factor)
            hint = HINTS["pair" if swapped else "bus_other"]
            what = f"{case} the algorithm bandwidth is {algorithm:.4g}, and not {true:.4g}"
            raise Wrong(what, hint)
        right(f"{case} the algorithm bandwidth")
        if near(bus, true * factor) or abs(bus - true * factor) < 1e-9:
            continue
        what = f"{case} the bus bandwidth is {bus:.4g}, and not {true * factor:.4g}"
        if near(bus, true * factor / 2):
            raise Wrong(what, HINTS["half_ring"])
        if near(bus, true):
            raise Wrong(what, HINTS["no_factor"])
        if near(bus, true * 2 * (n - 1)):
            raise Wrong(what, HINTS["factor_n"])
        raise Wrong(what, HINTS["bus_other"])


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


def probe_links(lesson: Lesson) -> None:
    make = getattr(lesson.module, "Link", None)
    if make is None:
        raise LookupError("Link")

    def places(rows: list, factor: float) -> list[int]:
        links = [make(0, b, *row) for b, row in enumerate(rows, start=1)]
        return [links.index(link) for link in lesson.module.slow_links(links, factor)]

    lesson.fact("slow", {name: places(rows, 3) for name, (rows, _) in SCENES.items()})
    lesson.fact("patient", places(SCENES["bandwidth"][0], 20))


def judge_links(group: Group, right: Callable[[str], None]) -> None:
    slow = group.facts("slow")[0]
    what = {
        name: f"of {len(rows)} links (scene: {name}) numbers "
        f"{slow[name]} are called slow, and not {true}"
        for name, (rows, true) in SCENES.items()
    }
    if slow["fast"]:
        raise Wrong(what["fast"], HINTS["fast_links"])
    if slow["healthy"] and all(SCENES["healthy"][0][n][0] == FAR for n in slow["healthy"]):
        raise Wrong(what["healthy"], HINTS["all_kinds"])
    if slow["bandwidth"] == []:
        raise Wrong(what["bandwidth"], HINTS["no_bandwidth"])
    if slow["latency"] == []:
        raise Wrong(what["latency"], HINTS["no_latency"])
    right("one slow link among good ones is found")
    if slow["very slow"] != [3, 4]:
        mean = slow["very slow"] == [3]
        raise Wrong(what["very slow"], HINTS["mean_link" if mean else "links_other"])
    if slow["only one"]:
        raise Wrong(what["only one"], HINTS["all_kinds"])
    for name, (_, true) in SCENES.items():
        if slow[name] != true:
            raise Wrong(what[name], HINTS["links_other"])
    if group.facts("patient")[0]:
        found = group.facts("patient")[0]
        raise Wrong(f"with factor=20 numbers {found} are called slow", HINTS["factor_fixed"])


# --- step 8 -------------------------------------------------------------------------------

LONG, SHORT, LATE = timedelta(seconds=30), timedelta(seconds=0.7), 0.5


def probe_exchange(lesson: Lesson) -> None:
    rank, n = lesson.rank, lesson.world
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
        timeout=timedelta(seconds=2),
    )  # fmt: skip

    def together(name: str) -> None:
        store.add(name, 1)
        while store.add(name, 0) < n:
            time.sleep(0.01)

    def exchange(call: str, mine: str, patience: timedelta) -> list | None:
        given = lesson.module.exchange_metadata(store, call, mine, rank, n, patience)
        if not isinstance(given, (list, tuple)):
            return None
        return [f"bytes {x!r}" if isinstance(x, bytes) else x for x in given]

    together("probe begins")
    for number in range(2):
        if number and rank == n - 1:
            time.sleep(LATE)  # who reads what is there already reads the last call's text
        texts = exchange(f"call {number}", f"float32 [{10 * number + rank}]", LONG)
        lesson.fact(f"call {number}", texts)
        together(f"probe {number}")
    if n > 1 and not lesson.calls:
        if rank < n - 1:
            lesson.fact("silent", exchange("call 2", f"float32 [{20 + rank}]", SHORT))
        together("probe ends")


def judge_exchange(group: Group, right: Callable[[str], None]) -> None:
    n = group.world
    collectives = sorted({call.name for rank in group.ranks for call in rank.calls})
    if collectives:
        raise Wrong(f"{', '.join(collectives)} was called", HINTS["no_collective"])
    for number in range(2):
        true = [f"float32 [{10 * number + rank}]" for rank in range(n)]
        for rank, texts in enumerate(group.facts(f"call {number}")):
            if texts == true:
                continue
            heard = "nothing" if texts is None else ", ".join(map(str, texts))
            what = f"in call {number + 1} rank {rank} hears {heard}"
            said = set(texts or [])
            if any(str(text).startswith("bytes ") for text in said):
                raise Wrong(what, HINTS["bytes"])
            if number and said & {f"float32 [{other}]" for other in range(n)}:
                raise Wrong(what, HINTS["stale"])
            one = texts is not None and len(texts) == n > 1 and said <= set(true)
            raise Wrong(what, HINTS["one_key" if one else "not_told"])
    right("two calls are told apart, and every rank hears all")
    for rank, texts in enumerate(group.facts("silent")[: n - 1] if n > 1 else []):
        true = [f"float32 [{20 + other}]" for other in range(n - 1)] + [None]
        if texts != true:
            heard = "nothing" if texts is None else ", ".join(map(str, texts))
            what = f"rank {n - 1} does not come, and rank {rank} hears {heard}"
            raise Wrong(what, HINTS["gave_up"])


# --- all of them --------------------------------------------------------------------------

STORE_CRASHES = (
    ("[Pp]rocess group has not been initialized", HINTS["no_collective"]),
    (r"wait timeout|[Tt]imed? ?out|timeout", HINTS["endless_wait"]),
)

STEPS = [
    Step(
        1,
        "pick the device of a local rank",
        "each rank takes its own accelerator, or all take the CPU if they are too few",
        probe_device,
        judge_device,
        uses=("pick_device",),
        joins=False,
    ),
    Step(
        2,
        "start the group, with a timeout",
        "all ranks are in one group, which meets at the tested store and has a timeout",
        probe_start,
        judge_start,
        uses=("start_group",),
        joins=False,
    ),
    Step(
        3,
        "what each collective must give",
        "nine collectives are parts of one table, for every rank and every root",
        probe_expected,
        judge_expected,
        uses=("expected",),
        worlds=(3, 2, 1, 4),
        joins=False,
    ),
    Step(
        4,
        "gather the facts, print them in rank order",
        "every rank has the facts of all, in rank order",
        probe_facts,
        judge_facts,
        uses=("gather_facts",),
        worlds=(3, 2, 1, 4),
    ),
    Step(
        5,
        "time it properly",
        "warmed up, settled before every reading of the clock, and the median",
        probe_median,
        judge_median,
        uses=("median_seconds",),
        worlds=(1,),
        joins=False,
    ),
    Step(
        6,
        "from a time to a bandwidth",
        "algorithm and bus bandwidth are those of the ring, for 1 to 8 ranks",
        probe_bandwidth,
        judge_bandwidth,
        uses=("bus_bandwidth",),
        worlds=(1,),
        joins=False,
    ),
    Step(
        7,
        "find the slow link",
        "slow links are found, each against the median of its own kind, and no healthy one",
        probe_links,
        judge_links,
        uses=("slow_links",),
        worlds=(1,),
        joins=False,
    ),
    Step(
        8,
        "compare before the collective",
        "every rank hears what all will call, each time anew, and who does not come is named",
        probe_exchange,
        judge_exchange,
        uses=("exchange_metadata",),
        worlds=(2, 3, 1, 4),
        joins=False,
        symmetric=False,
        crashes=STORE_CRASHES,
    ),
]

"""Grade lab 01: test each step, and choose the hint that fits the mistake.

No result depends on the speed of the machine, because times are read from a simulated clock,
and the links have invented speeds.
"""

import contextlib
import inspect
import itertools
import statistics
import threading
import time
import timeit
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from graders.dsl import (
    Lab,
    Wrong,
    allclose,
    isclose,
    judge_devices,
    matching_hint,
    require,
    second_machine,
)
from graders.protocol import Judge

LAB = Lab()


# --- step 1 -------------------------------------------------------------------------------


@LAB.step(
    1, "pick the device of a local rank",
    "each rank uses its own accelerator, or all ranks use the CPU if there are too few",
    "pick_device", joins=False,
)  # fmt: skip
def device(submission, reference, lesson):
    n, current, unneeded = lesson.world, [], []

    def pick(number: int, rank: int) -> str:
        with second_machine(number, rank, n) as chosen:
            found = submission.pick_device(rank, n)
        is_device = isinstance(found, torch.device)
        require(is_device, "pick_device() does not return a torch.device", "not_a_device")
        made = [
            str(next(iter((*call.args, *call.kwargs.values())))) for call in chosen.mock_calls
        ]
        if number > n:
            current.extend(made[-1:])
        elif number < n:
            unneeded.extend(made)
        return str(found)

    yield from judge_devices(n, pick, n + 1, n - 1, 0, no_index="no_index")
    require(
        not unneeded,
        "with too few accelerators, pick_device() still sets the current device",
        "set_too_early",
    )
    yield "if there are too few of them, all ranks use the CPU"
    exact = [pick(n, each) for each in range(n)]
    what = f"with {n} accelerators for {n} ranks, the devices are {', '.join(exact)}"
    require("cpu" not in exact, what, "exact_fit")
    made_current = len(current) == n
    what = "pick_device() returns the device, but does not make it the current device"
    require(made_current, what, "not_current")
    last = [name.removeprefix("cuda:") for name in current]
    right = last == [str(rank) for rank in range(n)]
    require(right, f"the current devices are {', '.join(last)}", "device_index")


# --- step 2 -------------------------------------------------------------------------------

TIMEOUT = timedelta(seconds=17)


@LAB.step(
    2, "start the group, with a timeout",
    "all ranks are in one group, which uses the tested store and the given timeout",
    "start_group", joins=False,
    crashes={
        "must be positive|rank must be|rank argument|world_size argument": "rank_and_world",
        "Cannot specify both init_method and store": "own_store",
        "Expected timeout argument": "timeout_kind",
    },
)  # fmt: skip
def group(submission, reference, lesson):
    rank, n = lesson.rank, lesson.world
    store, real = dist.PrefixStore("grader", lesson.store), dist.init_process_group
    signature = inspect.signature(real)

    def start(device: torch.device) -> list[dict]:
        """Call start_group, and return the arguments of its last init_process_group, if any.

        On an accelerator, torch's fake process group is started.
        """
        calls: list[dict] = []

        def record(*args: Any, **kwargs: Any) -> None:
            calls.append(signature.bind(*args, **kwargs).arguments)
            if device.type == "cpu":
                if torch.device(kwargs.get("device_id") or "meta").type == "cpu":
                    kwargs.pop("device_id")  # torch would raise an error without our hint
                real(*args, **kwargs)
            else:
                real("fake", store=FakeStore(), rank=rank, world_size=n)

        with (
            mock.patch.object(dist, "init_process_group", record),
            mock.patch.object(distributed_c10d, "init_process_group", record),
            mock.patch.object(submission, "init_process_group", record, create=True),
        ):
            submission.start_group(store, device, rank, n, TIMEOUT)
        return calls[-1:]

    gpu = start(torch.device("cuda", rank))
    if dist.is_initialized():
        dist.destroy_process_group()
    cpu = start(torch.device("cpu"))
    require(dist.is_initialized(), "on the CPU no process group is started", "not_joined")
    actual = dist.get_rank(), dist.get_world_size()
    what = f"rank {rank} of {n} became rank {actual[0]} of {actual[1]}"
    require(actual == (rank, n), what, "rank_and_world")
    dist.all_reduce(torch.ones(1))
    yield f"{n} ranks are in one group on the CPU"
    require(cpu and gpu, "on an accelerator no process group is started", "not_joined")
    (cpu,), (gpu,) = cpu, gpu
    device_id, gpu_device_id = cpu.get("device_id"), gpu.get("device_id")
    require(device_id is None, "on the CPU the group is given a device_id", "bound_on_cpu")
    for where, call in (("the CPU", cpu), ("an accelerator", gpu)):
        what = f"on {where} the group does not use the given store"
        require(is_store(call.get("store"), store), what, "own_store")
        given = call.get("rank"), call.get("world_size")
        what = f"on {where} the group is given rank={given[0]} and world_size={given[1]}"
        require(given == (rank, n), f"{what} on rank {rank} of {n}", "rank_and_world")
        timeout = call.get("timeout")
        is_timeout = isinstance(timeout, timedelta | None)
        what = f"on {where} the timeout is a {type(timeout).__name__}"
        require(is_timeout, what, "timeout_kind")
        shown = f"{timeout.total_seconds():g} s" if timeout else "the default of torch"
        what = f"on {where} the timeout is {shown}, and not {TIMEOUT.total_seconds():g} s"
        require(timeout == TIMEOUT, what, "no_timeout")
    yield "the group uses the tested store and the given timeout"
    gloo = backend_for("cuda", gpu) == "gloo"
    require(not gloo, "on an accelerator the backend is gloo", "gloo_on_gpu")
    require(
        gpu_device_id is not None, "on an accelerator the group has no device_id", "not_bound"
    )
    what = f"the device is cuda:{rank}, and the device_id is {gpu_device_id}"
    require(torch.device(gpu_device_id) == torch.device("cuda", rank), what, "bound_elsewhere")
    require(backend_for("cpu", cpu) == "gloo", "on the CPU no backend is named", "no_backend")


def is_store(given: Any, store: dist.Store) -> bool:
    """Return whether `given` is the store, or the store with a prefix for its keys."""
    while isinstance(given, dist.PrefixStore) and given is not store:
        given = given.underlying_store
    return given is store


def backend_for(kind: str, call: dict) -> str:
    """Return the backend for a kind of device, from "gloo" or from "cpu:gloo,cuda:nccl"."""
    named = str(call.get("backend")).lower()
    pairs = (part.rpartition(":") for part in named.split(","))
    return next((name for device, _, name in pairs if device in ("", kind)), "")


# --- step 3 -------------------------------------------------------------------------------

ROOTED = ("gather", "reduce")
SUMMED = ("reduce", "all-reduce", "reduce-scatter")


def recognise(
    name: str, answer: Any, table: torch.Tensor, rank: int, root: int, expected: Callable
) -> str:
    """Return "right", or the hint for the mistake that explains a wrong answer."""
    n, total, across = len(table), table.sum(dim=0), table.sum(dim=1)
    true = expected(name, table, rank, root)

    if answer is None or true is None:
        if answer is true:
            return "right"
        if name not in ROOTED:
            return "nobody"
        return "everybody" if true is None and rank != 0 else "root_fixed"
    others = [expected(name, table, rank, other) for other in range(n) if other != root]
    if not isinstance(answer, torch.Tensor):
        return "not_a_tensor"
    known = {"right": [true], "root_fixed": others}
    if name in SUMMED:
        known["averaged"] = [true / n]
        known["other_cell"] = total if name == "reduce-scatter" else []
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
        if any(each is not None and allclose(answer, each) for each in parts)
    )
    reshaped = answer.shape != true.shape and answer.numel() in (1, true.numel())
    found = next(fits, "shape" if reshaped else "other_part")
    return "dtype" if found == "right" and answer.dtype != table.dtype else found


def root_mistake(answers: dict, expected: Callable) -> str:
    """Return a hint if all answers are right for a wrong root: rank 0, or the rank itself.

    `answers` contains the answers by rank and root. `expected(rank, root)` returns the right
    answer. If the answers do not fit, return an empty string.
    """
    others = {"root_fixed": lambda rank: 0, "root_is_rank": lambda rank: rank}
    if len(answers) == 1:
        return ""
    if expected(0, 1) is None:  # a gather or a reduce
        del others["root_is_rank"]
    for hint, other in others.items():
        wanted = {(rank, root): expected(rank, other(rank)) for rank, root in answers}
        if all(
            answer is wanted[key] if wanted[key] is None else allclose(answer, wanted[key])
            for key, answer in answers.items()
        ):
            return hint
    return ""


def described(answer: Any) -> str:
    """Describe an answer in a few words."""
    if isinstance(answer, torch.Tensor):
        return f"a tensor of the shape {list(answer.shape)} and dtype {str(answer.dtype)[6:]}"
    return "None" if answer is None else f"a {type(answer).__name__}"


@LAB.step(
    3, "what each collective must give",
    "the results of nine collectives are right for every rank and every root",
    "expected", world_sizes=(3, 2, 1, 4), joins=False,
    crashes={r"^'[a-z/-]+'$": "every_name"},
)  # fmt: skip
def collectives(submission, reference, lesson):
    n = lesson.world
    generator = torch.Generator().manual_seed(n)
    table = torch.randint(1000, (n, n, 5), generator=generator).float()
    for name in reference.NAMES:
        wrong: dict[str, list[tuple[int, int]]] = {}
        answers, true = {}, partial(reference.expected, name, table)
        for rank, root in itertools.product(range(n), range(n)):
            copy = table.clone()
            answers[rank, root] = answer = submission.expected(name, copy, rank, root)
            what = f"expected() changes the table when it is called for {name}"
            require(torch.equal(copy, table), what, "table_changed")
            kind = recognise(name, answer, table, rank, root, reference.expected)
            if kind != "right":
                wrong.setdefault(kind, []).append((rank, root))
        if wrong:
            kind = max(wrong, key=lambda kind: len(wrong[kind]))
            rank, root = wrong[kind][0]
            rooted = name in ("broadcast", "scatter", *ROOTED)
            where = f" with root {root}" if rooted else ""
            what = f"for {name}{where} on rank {rank}, expected() returns "
            found, wanted = map(described, (answers[rank, root], true(rank, root)))
            what += "wrong numbers" if found == wanted else f"{found}, and not {wanted}"
            raise Wrong(what, (rooted and root_mistake(answers, true)) or kind)
        yield name


# --- step 4 -------------------------------------------------------------------------------


@LAB.step(
    4, "gather the facts, print them in rank order",
    "every rank has the facts of all, in rank order", "gather_facts", world_sizes=(3, 2, 1, 4),
    crashes={
        r"^'\w+'$": "facts_keys",
        "list assignment index": "facts_places",
        "non-destination": "facts_root",
    },
)  # fmt: skip
def facts(submission, reference, lesson):
    mine = {"number": lesson.rank, "seconds": 0.5, "gpus": [1] * lesson.rank}
    answer = submission.gather_facts(mine, lesson.world)
    before = list(answer) if isinstance(answer, list) else answer
    submission.gather_facts({"number": -1 - lesson.rank}, lesson.world)
    lesson.fact("is_changed", answer != before)
    is_list = isinstance(before, (list, tuple)) and all(isinstance(x, dict) for x in before)
    lesson.fact("numbers", [fact.get("number") for fact in before] if is_list else None)
    lesson.fact("is_none", before is None)


@facts.judge
def _(group):
    n, is_none, lists = group.world, group.facts("is_none"), group.facts("numbers")
    require(not all(is_none), "gather_facts() returns None on every rank", "facts_none")
    ranks = ", ".join(str(rank) for rank in range(n) if not is_none[rank])
    require(not any(is_none), f"only rank {ranks} of {n} gets the facts", "facts_root")
    full = [rank for rank, numbers in enumerate(lists) if numbers == list(range(n))]
    empty = [rank for rank, numbers in enumerate(lists) if numbers and set(numbers) == {None}]
    if len(full) == 1 and len(empty) == n - 1 > 0:
        raise Wrong(f"only rank {full[0]} of {n} gets the facts", "facts_root")
    for rank, numbers in enumerate(lists):
        shown = "no list of dictionaries" if numbers is None else f"a list of {len(numbers)}"
        require(len(numbers or ()) == n, f"rank {rank} of {n} gets {shown}", "facts_shape")
        what = f"rank {rank} gets the facts of ranks {', '.join(map(str, numbers))}"
        is_complete = sorted(map(str, numbers)) == sorted(map(str, range(n)))
        require(numbers == list(range(n)) or not is_complete, what, "facts_order")
        require(
            is_complete, f"rank {rank} of {n} does not get the facts of all ranks", "facts_own"
        )
    what = "a second call changes the list that the first call returned"
    require(not any(group.facts("is_changed")), what, "facts_reused")
    yield "every rank has the facts of all"


# --- step 5 -------------------------------------------------------------------------------

# seconds: of a warm-up call, of a call that was disturbed, and of a launch
WARM_UP_TIME, OUTLIER, LAUNCH_TIME = 100.0, 60.0, 1e-4
WARM_UP = 2  # calls
DURATIONS = (2.0, 3.0, OUTLIER, 1.0, 2.5, 2.0, 4.0)


class Stopwatch:
    """A simulated clock, which only work moves, and a simulated device.

    With `is_async`, the device works in the background: a call of `work` ends before its work
    is finished.
    """

    def __init__(self, is_async: bool):
        self.now, self.is_async = 1000.0, is_async
        self.ready_at = 1000.0  # the time at which the device has finished its work
        self.calls = 0
        self.was_busy: list[bool] = []  # for each reading of the clock

    def read(self) -> float:
        self.was_busy.append(self.ready_at > self.now)
        return self.now

    def work(self) -> None:
        timed = self.calls - WARM_UP
        length = WARM_UP_TIME if timed < 0 else DURATIONS[timed % len(DURATIONS)]
        self.calls += 1
        self.now += LAUNCH_TIME
        self.ready_at = max(self.ready_at, self.now) + length
        if not self.is_async:
            self.now = self.ready_at

    def synchronize(self, *_: Any, **__: Any) -> None:
        what = "on the CPU, synchronize() of an accelerator is called"
        require(self.is_async, what, "cpu_sync")
        self.now = max(self.now, self.ready_at)

    @contextlib.contextmanager
    def replace_clocks(self, submission: ModuleType):
        """Replace every clock by this one, and synchronize() of torch by the one above."""
        with (
            replace_clocks(submission, self.read),
            mock.patch.object(torch.accelerator, "synchronize", self.synchronize),
            mock.patch.object(torch.cuda, "synchronize", self.synchronize),
        ):
            yield


@contextlib.contextmanager
def replace_clocks(submission: ModuleType, read: Callable[[], float], **others: Callable):
    """Let every clock return `read()`, including clocks that the learner imported by name.

    `others` replaces other functions of the module `time`.
    """

    def refuse() -> None:
        raise Wrong("the time is read from time.process_time or thread_time", "process_time")

    nanoseconds = lambda: int(read() * 1e9)  # noqa: E731
    clocks = dict.fromkeys(("perf_counter", "monotonic", "time"), read)
    clocks |= {f"{name}_ns": nanoseconds for name in clocks}
    clocks |= dict.fromkeys(("process_time", "thread_time"), refuse) | others
    replacements = {getattr(time, name): clock for name, clock in clocks.items()}
    by_name = {
        name: replacements[value]
        for name, value in vars(submission).items()
        if type(value) is type(time.time) and value in replacements
    }
    defaults = timeit.timeit.__defaults__
    with (
        mock.patch.multiple(time, **clocks),
        mock.patch.object(timeit, "default_timer", read),
        mock.patch.object(timeit.timeit, "__defaults__", (*defaults[:2], read, *defaults[3:])),
        mock.patch.dict(vars(submission), by_name),
    ):
        yield


@LAB.alone(
    5, "time it properly",
    "it warms up, settles before every reading of the clock, and returns the median",
    "median_seconds",
)  # fmt: skip
def median(submission, reference, lesson):
    repeats, true = len(DURATIONS), statistics.median(DURATIONS)
    all_durations = [WARM_UP_TIME] * WARM_UP + [*DURATIONS]
    known = {
        "mean": statistics.mean(DURATIONS),
        "minimum": min(DURATIONS),
        "total": [sum(DURATIONS), sum(all_durations)],
        "no_warm_up": [
            statistics.median(each) for each in (all_durations[:repeats], all_durations)
        ],
    }
    for device, where in (
        (torch.device("cpu"), "on the CPU"),
        (torch.device("cuda", 0), "on a device that works in the background"),
    ):
        watch = Stopwatch(is_async=device.type == "cuda")
        with watch.replace_clocks(submission):
            answer = submission.median_seconds(
                watch.work, device, repeats=repeats, warm_up=WARM_UP
            )
        is_number = isinstance(answer, int | float | torch.Tensor)
        is_number = is_number and not isinstance(answer, bool)
        what = f"median_seconds() returns {described(answer)}"
        require(is_number and torch.as_tensor(answer).numel() == 1, what, "time_kind")
        what = f"{where} work() was called only {repeats} times, so no call warmed up"
        require(watch.calls != repeats, what, "no_warm_up")
        what = f"{where} {WARM_UP} warm-up calls and {repeats} timed calls were requested, "
        what += f"but work() was called {watch.calls} times"
        require(watch.calls == repeats + WARM_UP, what, "calls")
        what = f"{where} the answer is {float(answer):g} s, and not {true:g} s"
        if watch.is_async:
            require(not any(watch.was_busy[1::2]), what, "not_settled")
            started = f"{where} the clock started while earlier work was still running"
            require(not any(watch.was_busy[0::2]), started, "settled_late")
        require(
            isclose(answer, true, 1e-3), what, matching_hint(answer, known, 1e-3, "time_other")
        )
        yield f"the median is right {where}"


# --- step 6 -------------------------------------------------------------------------------

CASES = ((2**30, 0.25, 8), (4096, 2e-5, 3), (2**20, 1e-3, 2), (2**20, 1e-3, 1))
UNITS = (1e3, 1e6, 1e9, 2**10, 2**20, 2**30, 1 / 8, 8e-9)


@LAB.alone(
    6, "from a time to a bandwidth",
    "both bandwidths are those of a ring of 1, 2, 3 and 8 ranks", "bus_bandwidth",
)  # fmt: skip
def bandwidth(submission, reference, lesson):
    for nbytes, seconds, n in CASES:
        answer = submission.bus_bandwidth(nbytes, seconds, n)
        pair = isinstance(answer, (tuple, list)) and len(answer) == 2
        pair = pair and not any(isinstance(each, str | None) for each in answer)
        require(pair, "bus_bandwidth() does not return two numbers", "pair")
        algorithm, bus = map(float, answer)
        true, factor = nbytes / seconds, 2 * (n - 1) / n
        case = f"for {nbytes} bytes in {seconds:g} s over {n} rank{'s' * (n > 1)}"
        what = f"{case} the algorithm bandwidth is "
        units = any(isclose(algorithm, true / unit) for unit in UNITS)
        require(not units, f"{what}{algorithm:.3g}, and not {true:.3g}", "units")
        swapped = isclose(bus, true) and isclose(algorithm, true * factor)
        what = f"{what}{algorithm:.4g}, and not {true:.4g}"
        require(isclose(algorithm, true), what, "pair_order" if swapped else "bus_other")
        yield f"the algorithm bandwidth {case}"
        what = f"{case} the bus bandwidth is {bus:.4g}, and not {true * factor:.4g}"
        known = {"half_ring": factor / 2, "no_factor": 1.0, "factor_n": 2.0 * (n - 1)}
        hint = matching_hint(bus / true, known, other="bus_other") if n > 1 else "one_rank"
        require(isclose(bus, true * factor), what, hint)


# --- step 7 -------------------------------------------------------------------------------

NEAR, FAR = "same machine", "between machines"
# links as (kind, latency, bandwidth), and the indices of the slow links for a factor of 3
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
    "mixed": ([(NEAR, 1e-5, 9e10), (FAR, 5e-5, 1e10), (NEAR, 1e-5, 1e10), (FAR, 5e-5, 1e9),
               (NEAR, 9e-4, 9e10), (FAR, 5e-5, 1e10), (NEAR, 1e-5, 9e10), (NEAR, 1e-5, 9e10),
               (NEAR, 1e-5, 9e10), (FAR, 5e-5, 1e10)], [2, 3, 4]),
    "very fast": ([(FAR, 5e-5, 1e10)] * 4 + [(FAR, 5e-5, 1e12)], []),
    "even": ([(NEAR, 1.0, 1e9), (NEAR, 1.0, 1e9), (NEAR, 4.0, 1e9), (NEAR, 10.0, 1e9)], [3]),
    "edge": ([(NEAR, 1.0, 3e9)] * 3 + [(NEAR, 3.0, 3e9), (NEAR, 1.0, 1e9)], []),
    "fast": ([(FAR, 5e-5, 1e10), (FAR, 1e-5, 4e10), (FAR, 5e-5, 1e10), (FAR, 5e-5, 1e10),
              (FAR, 5e-5, 1e10), (FAR, 5e-5, 1e10)], []),
}  # fmt: skip


@LAB.alone(
    7, "find the slow link",
    "all slow links are found by the median of their kind, and no healthy link",
    "slow_links",
    crashes={"no median for empty|mean requires at least one": "only_one"},
)  # fmt: skip
def links(submission, reference, lesson):
    def slow_indices(rows: list, factor: float) -> list[int]:
        links = [reference.Link(0, b, *row) for b, row in enumerate(rows, start=1)]
        argument = list(links)
        found = submission.slow_links(argument, factor)
        require(
            argument == links, "slow_links() changes the list of the links", "links_changed"
        )
        what = f"slow_links() returns a {type(found).__name__}"
        require(isinstance(found, Iterable), what, "links_kind")
        found = list(found)
        what = f"{what} of {type(found[0]).__name__} objects" if found else what
        require(all(each in links for each in found), what, "links_kind")
        return [links.index(link) for link in found]

    def expect(name: str, good: bool, hint: str) -> None:
        rows, true = SCENES[name]
        found = ", ".join(map(str, slow[name])) or "none"
        what = f"of the {len(rows)} links of the example {name!r}, these are returned: {found}"
        require(good, f"{what}. These are slow: {', '.join(map(str, true)) or 'none'}", hint)

    slow = {name: slow_indices(rows, 3) for name, (rows, _) in SCENES.items()}
    expect("fast", not slow["fast"], "fast_links")
    kinds = {SCENES["healthy"][0][index][0] for index in slow["healthy"]}
    expect("healthy", kinds != {FAR}, "all_kinds")
    expect("bandwidth", slow["bandwidth"], "no_bandwidth")
    expect("latency", slow["latency"], "no_latency")
    yield "one slow link among healthy links is found"
    first = slow["mixed"] == [2]
    expect(
        "mixed", sorted(slow["mixed"]) == [2, 3, 4], "links_first" if first else "links_grouped"
    )
    expect("mixed", slow["mixed"] == [2, 3, 4], "links_order")
    hint = "mean_link" if slow["very slow"] == [3] else "links_other"
    expect("very slow", slow["very slow"] == [3, 4], hint)
    expect("very fast", not slow["very fast"], "mean_link")
    expect("only one", not slow["only one"], "all_kinds")
    expect("even", slow["even"] == [3], "median_of_all")
    expect("edge", not slow["edge"], "links_edge")
    for name, (_, true) in SCENES.items():
        expect(name, slow[name] == true, "links_other")
    found = slow_indices(SCENES["bandwidth"][0], 20)
    require(
        not found,
        f"with factor=20, slow_links() returns links that are only 9 times slower: {found}",
        "factor_fixed",
    )


# --- step 8 -------------------------------------------------------------------------------

LONG, SHORT = timedelta(seconds=30), timedelta(seconds=2)
CHECK_TIME = timedelta(milliseconds=1)  # the time that one check of the store needs


class SimulatedStore(dist.Store):
    """A store for ranks that are threads, with a simulated clock, which only waiting moves.

    One rank runs at a time, until it waits or returns. If all ranks wait for keys that no rank
    has set, the clock moves to the end of the first timeout. Therefore the speed of the machine
    cannot make a rank late, and no rank waits in real time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.values: dict[str, bytes] = {}
        self.condition = threading.Condition()
        self.running = 0  # the number of ranks that have not returned
        self.waiting: dict[int, tuple[float, set]] = {}  # by thread: end of the timeout, keys

    def run(self, ranks: list[Callable[[], Any]]) -> list[Any]:
        """Run each rank in a thread, and return their results."""

        def run_rank(rank: Callable[[], Any]) -> Any:
            with self.condition:
                try:
                    return rank()
                finally:
                    self.running -= 1
                    self.condition.notify_all()

        self.running = len(ranks)
        with ThreadPoolExecutor(self.running) as threads:
            return list(threads.map(run_rank, ranks))

    def all_wait(self) -> bool:
        """Return whether no rank can continue."""
        can_continue = (self.values.keys() >= keys for _, keys in self.waiting.values())
        return len(self.waiting) == self.running and not any(can_continue)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = (self.timeout if timeout is None else timeout).total_seconds()
        end, wanted = self.now + seconds, set(keys)

        def is_first_timeout() -> bool:
            return self.all_wait() and end == min(each for each, _ in self.waiting.values())

        with self.condition:
            self.waiting[threading.get_ident()] = end, wanted
            self.condition.notify_all()
            self.condition.wait_for(lambda: self.values.keys() >= wanted or is_first_timeout())
            del self.waiting[threading.get_ident()]
        if not self.values.keys() >= wanted:
            self.now = end
            raise dist.DistStoreError(f"wait timeout after {seconds:g} s, keys: {keys}")

    def sleep(self, seconds: float) -> None:
        with contextlib.suppress(dist.DistStoreError):
            self.wait([None], timedelta(seconds=seconds))  # no rank sets this key

    def check(self, keys: list[str]) -> bool:
        with contextlib.suppress(dist.DistStoreError):
            return self.wait(keys, CHECK_TIME) is None
        return False

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.values[key]

    def set(self, key: str, value: str | bytes) -> None:
        self.values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def append(self, key: str, value: str | bytes) -> None:
        before = self.values.get(key, b"")
        self.set(key, value)
        self.values[key] = before + self.values[key]

    def add(self, key: str, number: int) -> int:
        self.values[key] = b"%d" % (int(self.values.get(key, 0)) + number)
        return int(self.values[key])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.values.get(key, b"") == expected.encode():
            self.set(key, desired)
        return self.values.get(key, expected.encode())

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self.values)


@LAB.alone(
    8, "compare before the collective",
    "every rank gets the texts of all ranks in each call, and None for a missing rank",
    "exchange_metadata",
    crashes={
        "[Pp]rocess group has not been initialized": "no_collective",
        "wait timeout": "endless_wait",
    },
)  # fmt: skip
def exchange(submission, reference, lesson):
    refuse = mock.Mock(side_effect=Wrong("a process group is started", "no_collective"))
    with (
        mock.patch.object(dist, "init_process_group", refuse),
        mock.patch.object(submission, "init_process_group", refuse, create=True),
    ):
        for n in (2, 3, 1, 11):
            yield from compare(submission, n)
            names = ", ".join(sorted({call.name for call in lesson.calls}))
            require(not names, f"{names} was called", "no_collective")


def compare(submission: ModuleType, n: int) -> Judge:
    """Judge two calls that all ranks make, and a third call that one rank does not make.

    In the first two calls rank 0 is late. If the keys are wrong, the other ranks then read the
    text of an earlier call. With more than ten ranks, some wrong ways to build a key give the
    same key twice.
    """
    store = SimulatedStore()

    def call(number: int, ranks: Iterable[int], timeout: timedelta, delay: float = 0) -> dict:
        """Return what each rank gets, by its number. Rank 0 starts after the delay."""

        def run(rank: int) -> Any:
            mine, name = f"float32 [{100 * number + rank}]", f"all-reduce {'1' * number}"
            if rank == 0 and delay:
                store.sleep(delay)
            texts = submission.exchange_metadata(store, name, mine, rank, n, timeout)
            what = f"exchange_metadata() returns a {type(texts).__name__}"
            require(isinstance(texts, (list, tuple)), what, "texts_kind")
            return [f"bytes {x!r}" if isinstance(x, bytes) else x for x in texts]

        with replace_clocks(submission, lambda: store.now, sleep=store.sleep):
            return dict(zip(ranks, store.run([partial(run, r) for r in ranks]), strict=True))

    def shown(texts: list) -> str:
        return ", ".join(map(repr, texts)) or "an empty list"

    def texts_of(number: int) -> list[str]:
        return [f"float32 [{100 * number + other}]" for other in range(n)]

    for number in (1, 2):
        true, delay = texts_of(number), LONG.total_seconds() / 30 if n > 2 else 0
        for rank, texts in call(number, range(n), LONG, delay).items():
            what = f"in call {number} of {n} ranks, rank {rank} gets {shown(texts)}"
            require(not any(str(text).startswith("bytes ") for text in texts), what, "bytes")
            is_stale = number == 2 and set(texts_of(1)) & set(texts)
            require(not is_stale, what, "stale" if n < 11 else "joined_key")
            is_one_key = len(texts) == n > 1 and set(texts) <= set(true)
            is_early = len(texts) == n > 2 and rank and texts == [None, *true[1:]]
            hint = "one_key" if is_one_key else "too_early" if is_early else "not_told"
            require(texts == true, what, hint)
    yield f"two calls of {n} rank{'s' * (n > 1)} do not mix their texts"
    if n in (1, 11):
        return
    absent, start = n // 2, store.now
    true = [None if other == absent else text for other, text in enumerate(texts_of(3))]
    for rank, texts in call(3, [r for r in range(n) if r != absent], SHORT).items():
        what = f"rank {absent} of {n} makes no call, and rank {rank} gets {shown(texts)}"
        require(len(texts) == n, what, "no_place")
        is_placeholder = [*texts[:absent], None, *texts[absent + 1 :]] == true
        require(texts == true, what, "placeholder" if is_placeholder else "gave_up")
    waited = f"{store.now - start:g} s and not {SHORT.total_seconds():g} s"
    what = f"rank {absent} of {n} makes no call, and the other ranks wait for {waited}"
    require(store.now - start <= n * SHORT.total_seconds(), what, "endless_wait")

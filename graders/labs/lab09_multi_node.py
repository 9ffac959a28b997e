"""Grade lab 09: test each step, and choose the hint that fits the mistake.

The grader needs no cluster. Commands and formulas are compared with those of the finished lab
for several clusters. If a number is wrong, it is compared with the numbers that common mistakes
give. If it equals one of these, this mistake determines the hint. Steps that send data run in
groups of processes, whose calls are recorded.
"""

import contextlib
import ipaddress
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from graders.dsl import Lab, Wrong, isclose, matching_hint, require, show
from graders.protocol import Group, Judge

LAB = Lab()


# --- step 1 -------------------------------------------------------------------------------

# (node, nodes, ranks, master, port)
CLUSTERS = ((0, 2, 4, "alpha", 29500), (1, 2, 4, "alpha", 29500), (2, 5, 8, "beta3", 29611))


def options_of(words: Any) -> dict[str, str]:
    """Return the options by name, with dashes. Raise `Wrong` for an unknown torchrun option."""
    from torch.distributed.run import get_args_parser

    actions = get_args_parser()._actions
    known = {name: action.nargs for action in actions for name in action.option_strings}
    kind = type(words).__name__
    what = f"the function returns an object of type {kind}"
    require(isinstance(words, (list, tuple)), what, "words_kind")
    for word in words:
        what = f"one element of the {kind} has the type {type(word).__name__}"
        require(isinstance(word, str), what, "words_kind")
    options, remaining = {}, list(words)
    while remaining:
        name, equals, value = remaining.pop(0).partition("=")
        is_option = name.startswith("--") and " " not in name
        require(is_option, f"one element of the {kind} is {name!r}", "words_kind")
        require(name in known, f"one option is {name}", "not_an_option")
        if not equals and known[name] != 0 and remaining:
            value = remaining.pop(0)
        options[name[2:].replace("_", "-")] = value
    return options


@LAB.alone(
    1, "the same job, from every node",
    "the five options are right for three nodes of two clusters", "static_words",
)  # fmt: skip
def static(submission, reference, lesson):
    for case in CLUSTERS:
        node, nodes, ranks, master, port = case
        words = submission.static_words(*case)
        options = options_of(words)
        what = f"on node {node} of {nodes} with {ranks} ranks each, the options are "
        what += " ".join(words)
        require("standalone" not in options, what, "standalone")
        is_static = options.pop("rdzv-backend", "static") == "static"
        is_elastic = any(name.startswith("rdzv") for name in options)
        require(is_static and not is_elastic, what, "static_elastic")
        require(options.get("nnodes") in (f"{nodes}", f"{nodes}:{nodes}"), what, "nnodes")
        require(options.get("nproc-per-node") == f"{ranks}", what, "nproc")
        number = options.get("node-rank", "0")
        is_rank = number == f"{node * ranks}"
        require(number == f"{node}", what, "node_rank_of_rank" if is_rank else "node_rank")
        address = options.get("master-addr", "127.0.0.1")
        is_local = address in ("localhost", "127.0.0.1")
        require(address == master, what, "master_localhost" if is_local else "master")
        require(options.get("master-port") == f"{port}", what, "port")


# --- step 2 -------------------------------------------------------------------------------

LO = {"lo": "127.0.0.1/8"}
DOCKER = {"docker0": "172.17.0.1/16"}
MACHINES = (
    (LO | DOCKER | {"eth0": "10.77.0.1/24"}, "10.77.0.2"),
    (LO | {"eno1": "10.77.1.4/26", "eno2": "10.77.1.70/26"}, "10.77.1.100"),
    (LO | {"eth0": "192.168.1.5/24", "ib0": "10.1.2.3/16"} | DOCKER, "10.1.200.9"),
    (LO | {"eno1": "10.0.0.7/8", "hsn0": "10.5.0.7/16"}, "10.5.3.1"),
    (LO | {"hsn0": "10.5.0.7/16", "eno1": "10.0.0.7/8"}, "10.5.3.1"),
    (LO, "127.0.0.1"),
    (LO | DOCKER | {"eth0": "10.77.0.1/24"}, "10.78.0.1"),
)


@LAB.alone(
    2, "which interface",
    "both variables name the interface whose network contains the peer",
    "socket_variables", crashes={"has host bits set": "socket_host_bits"},
)  # fmt: skip
def sockets(submission, reference, lesson):
    for machine, peer in MACHINES:
        networks = {
            name: ipaddress.ip_interface(each).network for name, each in machine.items()
        }
        matches = [name for name in networks if ipaddress.ip_address(peer) in networks[name]]
        error = ""
        try:
            value = submission.socket_variables(dict(machine), peer)
            found = dict(value) if isinstance(value, dict) else repr(value)
        except LookupError:
            found = "LookupError"
        except Exception as failure:  # for example of max() or next() without an element
            if matches:
                raise
            found = error = f"{type(failure).__name__}: {failure}"
        interfaces = ", ".join(f"{name} {address}" for name, address in machine.items())
        what = f"the interfaces are {interfaces}, and the peer is {peer}; the function "
        has_raised = not isinstance(found, dict) and found in ("LookupError", error)
        what += f"raises {found}" if has_raised else f"returns {found}"
        if not matches:
            require(found == "LookupError", what, "socket_lookup")
            continue
        require(found != "LookupError", what, "socket_leads")
        require(isinstance(found, dict), what, "socket_kind")
        names = [found.get(f"{library}_SOCKET_IFNAME") for library in ("GLOO", "NCCL")]
        require(None not in names, what, "socket_both")
        true = max(matches, key=lambda name: networks[name].prefixlen)
        if {names[0], str(names[1]).lstrip("=")} != {true}:
            wrong = names[1] if names[0] == true else names[0]
            hint = socket_mistake(wrong, machine, peer, matches)
            differ = hint != "socket_address" and true in {str(n).lstrip("=") for n in names}
            raise Wrong(what, "socket_same" if differ else hint)
        yield f"both variables name {true} for the peer {peer}"


def socket_mistake(name: str, machine: dict[str, str], peer: str, matches: list[str]) -> str:
    """Return the hint for a wrong interface."""
    if any(name in (text, text.split("/")[0]) for text in machine.values()):
        return "socket_address"
    if name not in machine:
        return "socket_fixed"
    if name in matches:
        return "socket_longest"
    if machine[name].rpartition(".")[0] == peer.rpartition(".")[0]:
        return "socket_text"
    if name == next((other for other in machine if other != "lo"), None):
        return "socket_fixed" if name == "eth0" else "socket_first"
    return "socket"


# --- step 3 -------------------------------------------------------------------------------


def groups_of(make_groups: Callable, nodes: int, ranks: int, rank: int) -> list:
    """Return the groups that one rank creates, and the groups that it returns.

    The groups are fake process groups of torch, which need no other ranks.
    """
    real, world, created = dist.new_group, nodes * ranks, []

    def record(*args: Any, **kwargs: Any) -> Any:
        members = kwargs.get("ranks", args[0] if args else None)
        # with use_local_synchronization, only the members call new_group
        if not kwargs.get("use_local_synchronization"):
            created.append(sorted(map(int, range(world) if members is None else members)))
        try:
            return real(members)
        except (ValueError, RuntimeError):  # some of these ranks do not exist
            return dist.GroupMember.NON_GROUP_MEMBER

    variables = {"RANK": rank, "WORLD_SIZE": world, "GROUP_RANK": rank // ranks}
    variables |= {"LOCAL_RANK": rank % ranks, "LOCAL_WORLD_SIZE": ranks}
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        with (
            mock.patch.object(dist, "new_group", record),
            mock.patch.object(dist.distributed_c10d, "new_group", record),
            mock.patch.dict("os.environ", {key: str(n) for key, n in variables.items()}),
        ):
            returned = make_groups(nodes, ranks)
        pair = returned if isinstance(returned, (list, tuple)) else [returned]
        are_groups = [isinstance(each, dist.ProcessGroup) for each in pair]
        are_members = [each is not dist.GroupMember.NON_GROUP_MEMBER for each in pair]
        kinds = ", ".join(type(each).__name__ for each in pair)
        good = len(pair) == 2 and (any(are_groups) or not all(are_members))
        require(good, f"make_groups() returns {kinds}", "groups_pair")
        returned_ranks = [
            dist.get_process_group_ranks(each) if is_group else []
            for each, is_group in zip(pair, are_groups, strict=True)
        ]
    finally:
        dist.destroy_process_group()
    return [created, returned_ranks]


@LAB.alone(
    3, "groups along the wires",
    "every rank creates all groups in one order, and returns its inner and its outer group",
    "make_groups",
    crashes={"index out of range": "groups_index"},
)  # fmt: skip
def groups(submission, reference, lesson):
    for nodes, ranks in ((2, 3), (3, 2), (2, 2)):
        at, all_ranks = f"with {nodes} nodes of {ranks} ranks", range(nodes * ranks)
        of_ranks = [groups_of(submission.make_groups, nodes, ranks, rank) for rank in all_ranks]
        first, _ = of_ranks[0]
        for rank, (created, returned) in enumerate(of_ranks):
            what = f"{at}, rank 0 creates the groups {first}, but rank {rank} creates {created}"
            require(created == first, what, "groups_by_all")
            true = [
                [n for n in all_ranks if n // ranks == rank // ranks],
                [n for n in all_ranks if n % ranks == rank % ranks],
            ]
            hint = "groups_counts"
            if returned == true[::-1]:
                hint = "groups_swapped"
            elif len(returned) == 2 and all(group in created for group in true):
                hint = "groups_kept"
            elif returned[:1] == [[n for n in all_ranks if n % nodes == rank % nodes]]:
                hint = "groups_neighbours"
            what = f"{at}, rank {rank} returns the groups {returned}, and not {true}"
            require(returned == true, what, hint)
        yield f"{at}, the inner and the outer group of every rank are right"


# --- step 4 -------------------------------------------------------------------------------

SIZES = ((3e6, 3, 5), (8e9, 4, 8), (6e6, 2, 2))  # bytes, nodes, ranks


@LAB.alone(
    4, "how many bytes cross",
    "the bytes of the flat and the hierarchical all-reduce are right for three clusters",
    "flat_crossing hierarchical_crossing",
)  # fmt: skip
def crossing(submission, reference, lesson):
    for name, hint in (("flat_crossing", "flat"), ("hierarchical_crossing", "outer")):
        for case in SIZES:
            size, nodes, ranks = case
            found, true = getattr(submission, name)(*case), getattr(reference, name)(*case)
            kind = type(found).__name__
            require(
                isinstance(found, (int, float)),
                f"{name} returns an object of type {kind}",
                "bytes_kind",
            )
            if hint == "flat":
                known = {"flat_every_rank": ranks * true}
                known["flat_nodes"] = reference.flat_crossing(size, nodes, 1)
                known["flat_ranks"] = reference.flat_crossing(size, 1, ranks)
            else:
                known = {"outer_one": true / ranks, "outer_whole": ranks * true}
                known["outer_all_ranks"] = reference.flat_crossing(*case)
            known |= {"half_ring": true / 2, hint: found}
            what = f"for {size:,.0f} bytes and {nodes} nodes with {ranks} ranks each, "
            what += f"{name} returns {found:,.0f}"
            require(isclose(found, true, 1e-9), what, matching_hint(found, known))
        yield f"{name} is right for {len(SIZES)} clusters"


# --- step 5 -------------------------------------------------------------------------------

LENGTH = 24
COLLECTIVES = (
    "all_reduce reduce_scatter reduce_scatter_tensor reduce_scatter_single all_gather "
    "all_gather_into_tensor all_gather_single all_gather_object reduce broadcast gather "
    "scatter all_to_all all_to_all_single send isend"
)
FUNCTIONAL = (
    "all_reduce reduce_scatter_tensor all_gather_tensor all_gather_single all_to_all_single "
    "broadcast reduce_scatter_single"
)


@contextlib.contextmanager
def record_collectives(calls: list) -> Iterator[None]:
    """Record the name, the number of elements, the ranks and the dtype of each collective.

    Collectives that are called inside of other collectives are not recorded.
    """
    running: list[str] = []

    def recording(name: str, real: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if running:
                return real(*args, **kwargs)
            given = tree_leaves((args, kwargs))
            tensors = [each for each in given if isinstance(each, torch.Tensor)]
            group = next((each for each in given if isinstance(each, dist.ProcessGroup)), None)
            numbers = max((t.numel() for t in tensors), default=0)
            dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
            calls.append([name, numbers, dist.get_process_group_ranks(group), dtype])
            running.append(name)
            try:
                return real(*args, **kwargs)
            finally:
                running.pop()

        return call

    with contextlib.ExitStack() as stack:
        for module, names in ((dist, COLLECTIVES), (functional, FUNCTIONAL)):
            for name in [name for name in names.split() if hasattr(module, name)]:
                patched = recording(name, getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, patched))
        yield


@LAB.step(
    5, "the hierarchical all-reduce",
    "every rank has the sum over all ranks, and only one piece crosses in each outer group",
    "hierarchical_all_reduce", world_sizes=(4, 6), symmetric=False,
    crashes={"tensor list size|[Ii]nput list|must be world size": "pieces_number"},
)  # fmt: skip
def hierarchical(submission, reference, lesson):
    rank, nodes = lesson.rank, lesson.world // 2
    for nodes in (2, 3) if lesson.world == 6 else (2,):
        k = lesson.world // nodes
        inner, outer = reference.make_groups(nodes, k)
        values = [
            torch.arange(LENGTH, dtype=torch.float64) + 10.0**r for r in range(lesson.world)
        ]
        tensor, calls, start = values[rank].clone(), [], len(lesson.calls)
        with record_collectives(calls):
            submission.hierarchical_all_reduce(tensor, inner, outer)
        node_sum, total = sum(values[rank // k * k :][:k]), sum(values)
        mine = slice(rank % k * (LENGTH // k), (rank % k + 1) * (LENGTH // k))
        outcomes = {
            "right": torch.equal(tensor, total),
            "unchanged": torch.equal(tensor, values[rank]),
            "inside": torch.equal(tensor, node_sum),
            "twice": torch.allclose(tensor, total * k),
            "own piece": torch.equal(tensor[mine], total[mine]),
            "other": True,
        }
        lesson.fact(f"outcome {nodes}", next(name for name, fits in outcomes.items() if fits))
        lesson.fact(f"calls {nodes}", calls)
        started = [c for c in lesson.calls[start:] if c.asynchronous]
        reduced = [call for call in started if call.name == "all_reduce"]
        lesson.fact(f"waited {nodes}", all(call.returned for call in reduced))


@hierarchical.judge
def _(group):
    for nodes in (2, 3) if group.world == 6 else (2,):
        yield from judge_hierarchical(group, nodes)


OUTCOMES = {
    "unchanged": "has not changed",
    "inside": "has the sum of its node only",
    "twice": "has a multiple of the sum",
    "own piece": "is right in one piece only",
    "other": "has wrong numbers",
}


def judge_hierarchical(group: Group, nodes: int) -> Judge:
    """Judge the result and the traffic on a cluster with this number of nodes."""
    k = group.world // nodes
    hints = {"inside": "inside_only", "twice": "twice", "own piece": "no_gather"}
    shown = "; ".join(
        f"{name} of {numbers} numbers over {len(ranks)} ranks"
        for name, numbers, ranks, _ in group.facts(f"calls {nodes}")[0]
    )
    hints["unchanged"] = "not_in_place" if "gather" in shown else "no_gather"
    waited = all(group.facts(f"waited {nodes}"))
    for rank, outcome in enumerate(group.facts(f"outcome {nodes}")):
        what = f"with {nodes} nodes of {k} ranks, the tensor of rank {rank} "
        what += f"{OUTCOMES.get(outcome)}; rank 0 called {shown}"
        hint = hints.get(outcome, "hierarchical")
        hint = "only_two" if nodes == 3 else hint
        require(outcome == "right", what, hint if waited else "not_waited")
    yield f"with {nodes} nodes of {k} ranks, every rank has the sum over all ranks"
    crossing = [
        [call for call in calls if len({r // k for r in call[2]}) > 1]
        for calls in group.facts(f"calls {nodes}")
    ]
    senders = [str(rank) for rank, calls in enumerate(crossing) if calls]
    what = f"only ranks {', '.join(senders)} send to another node"
    require(len(senders) in (0, group.world), what, "leader")
    for name, numbers, ranks, _ in itertools.chain(*crossing):
        what = f"{name} of {numbers} of the {LENGTH} numbers was called over ranks {ranks}, "
        what += "which are on different nodes"
        require(len(ranks) <= nodes, what, "still_flat")
        require(numbers <= LENGTH // k, what, "whole_crosses")


# --- step 6 -------------------------------------------------------------------------------

MODELS = [
    dict(zip(("layers", "hidden", "tokens", "width", "tp", "pp", "dp"), case, strict=True))
    for case in (
        (8, 128, 512, 4, 8, 2, 3),
        (12, 64, 1000, 4, 2, 3, 4),
        (6, 96, 300, 4, 1, 1, 1),
        (10, 32, 50, 2, 8, 5, 2),
    )
]
ORDERS = (
    {"tp": 35.0, "pp": 0.5, "dp": 7.0},
    {"tp": 1.0, "pp": 4.0, "dp": 9.0},
    {"tp": 2.0, "pp": 1.0, "dp": 3.0},
    {"dp": 5.0, "tp": 6.0},
)


def traffic_mistakes(
    axis: str, true: float, layers: int, hidden: int, tokens: int, width: int, tp: int, pp: int,
    dp: int,
) -> dict[str, float]:  # fmt: skip
    """Return the bytes that common mistakes give along this axis, by hint."""
    activation, own_layers = tokens * hidden * width, layers / pp
    mistakes = {
        "tp": {
            "tp_forward": true / 2,
            "tp_layers": true * pp,
            "tp_pieces": true / tp,
            "no_ring": 4 * own_layers * activation,
        },
        "pp": {
            "pp_forward": activation * (pp > 1),
            "pp_ends": 2 * activation if pp <= 2 else math.nan,
            "pp_layers": true * own_layers,
            "pp_mean": 2 * (pp - 1) / pp * activation if pp > 2 else math.nan,
            "pp_whole": [true / tp, true / dp, true / tp / dp],
        },
        "dp": {
            "dp_whole": [true * tp * pp, true * tp, true * pp],
            "half_ring": true / 2,
            "no_ring": 12 * hidden**2 * own_layers / tp * width,
        },
    }
    return mistakes[axis] | {"width": true / width}


def is_traffic(found: Any) -> bool:
    """Return whether `found` is a dict with a number for each axis."""
    fits = isinstance(found, dict) and set(found) == {"tp", "pp", "dp"}
    return fits and all(isinstance(value, (int, float)) for value in found.values())


@LAB.alone(
    6, "where TP, PP and DP lie",
    "the bytes along each axis of four models are right, and so is the order of the axes",
    "traffic axis_order",
)  # fmt: skip
def placement(submission, reference, lesson):
    sent = [submission.traffic(**case) for case in MODELS]
    what = f"traffic() returns {show(sent[0])}"
    require(all(map(is_traffic, sent)), what, "traffic_keys")
    for axis in ("tp", "pp", "dp"):
        for case, bytes_along in zip(MODELS, sent, strict=True):
            found, true = bytes_along[axis], reference.traffic(**case)[axis]
            cluster = ", ".join(f"{name} {value}" for name, value in case.items())
            what = f"with {cluster}, traffic() returns {found:,.0f} bytes along {axis}"
            known = traffic_mistakes(axis, true, **case) | {"traffic": found}
            require(math.isclose(found, true, abs_tol=1e-6), what, matching_hint(found, known))
        yield f"the bytes along {axis} are right"
    for given in ORDERS:
        found, true = submission.axis_order(dict(given)), reference.axis_order(given)
        listed = isinstance(found, (list, tuple)) and all(isinstance(x, str) for x in found)
        require(listed, f"axis_order() returns {show(found)}", "order_kind")
        order = list(found)
        hint = "order_reversed" if order == true[::-1] else "order_fixed"
        require(order == true, f"if the bytes are {given}, the order is {order}", hint)


# --- step 7 -------------------------------------------------------------------------------


class Bucket:
    """A bucket with the methods that DDP's buckets have for hooks."""

    def __init__(self, flat: torch.Tensor):
        self.flat = flat

    def buffer(self) -> torch.Tensor:
        return self.flat

    def set_buffer(self, flat: torch.Tensor) -> None:
        self.flat = flat

    def gradients(self) -> list[torch.Tensor]:
        return [self.flat]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


@LAB.step(
    7, "fewer bytes for the same gradient",
    "the hook averages in its group, sends bf16, and does not wait", "bf16_hook",
    world_sizes=(3,), symmetric=False,
    crashes={
        "when running the callback": "future_value",
        "completed\\(\\)|[Ff]uture": "not_a_future",
        "dtype|BFloat16|Half": "stays_narrow",
    },
)  # fmt: skip
def hook(submission, reference, lesson):
    pair, calls = dist.new_group([0, 1]), []
    if lesson.rank == 2:
        return
    rows = [torch.rand(300, generator=torch.Generator().manual_seed(r)) + 0.5 for r in (0, 1)]
    own = rows[lesson.rank]
    with record_collectives(calls):
        future = submission.bf16_hook(pair, Bucket(own.clone()))
    is_future = isinstance(future, torch._C.Future)  # the base class of torch's futures
    what = f"the hook returns an object of type {type(future).__name__}"
    require(is_future, what, "not_a_future")
    for call in lesson.calls:
        waits = not call.asynchronous or (call.name == "all_reduce" and call.waited)
        require(not waits, f"the hook waits for its {call.name}", "hook_waits")
    require(calls, "the hook called no collective", "not_sent")
    for name, _, ranks, _ in calls:
        what = f"the hook got a group of 2 of the 3 ranks, but called {name} in another group"
        require(ranks == [0, 1], what, "world_group")
    for *_, dtype in calls:
        hint = "fp16" if dtype == "float16" else "not_narrow"
        require(dtype == "bfloat16", f"the hook sends {dtype}", hint)
    yield "the hook starts its all-reduce in bf16 and in its group, and does not wait"
    value = future.wait()
    is_list = isinstance(value, list) and len(value) == 1 and torch.is_tensor(value[0])
    if is_list and value[0].dtype == torch.bfloat16:
        what = "the hook returns the future of the all-reduce, whose value is the sum in bf16"
        raise Wrong(what, "not_divided")
    what = f"the value of the future has the type {type(value).__name__}"
    require(torch.is_tensor(value), what, "future_kind" if is_list else "future_value")
    ratio = value.float() / ((rows[0] + rows[1]) / 2)
    low, high = ratio.min().item(), ratio.max().item()
    what = f"on rank {lesson.rank}, the result is {low:.4f} to {high:.4f} times the mean"
    if low < 0.98 or high > 1.02:
        require((value.float() - own).abs().max() >= 0.01, what, "not_sent")
        known = {"not_divided": 2.0, "divided_twice": 0.5, "divided_by_world": 2 / 3}
        factor = (low + high) / 2
        known = known if high - low < 0.1 else {}
        raise Wrong(what, matching_hint(factor, known | {"average": factor}, 0.02))
    dtype = str(value.dtype).removeprefix("torch.")
    require(
        dtype == "float32", f"the value of the future has the dtype {dtype}", "stays_narrow"
    )


# --- step 8 -------------------------------------------------------------------------------


@LAB.alone(
    8, "elastic rendezvous",
    "the six options are right for three clusters, and the same on all nodes", "elastic_words",
)  # fmt: skip
def elastic(submission, reference, lesson):
    for number, (_, nodes, ranks, master, port) in enumerate(CLUSTERS):
        words = submission.elastic_words(nodes, ranks, master, port, f"job{number}")
        options = options_of(words)
        what = f"for {nodes} nodes with {ranks} ranks each, the options are {' '.join(words)}"
        require("standalone" not in options, what, "standalone")
        static_options = {"node-rank", "master-addr", "master-port"} & set(options)
        require(not static_options, what, "elastic_master")
        require("is_host" not in options.get("rdzv-conf", ""), what, "elastic_host")
        for name, value, hint in (
            ("nnodes", f"1:{nodes}", "elastic_range"),
            ("nproc-per-node", f"{ranks}", "nproc"),
            ("rdzv-backend", "c10d", "elastic_backend"),
            ("rdzv-endpoint", f"{master}:{port}", "elastic_endpoint"),
            ("rdzv-id", f"job{number}", "elastic_id"),
            ("max-restarts", "3", "elastic_restarts"),
        ):
            require(options.get(name) == value, what, hint)

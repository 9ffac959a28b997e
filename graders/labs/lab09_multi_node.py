"""The steps of lab 09: what each must do, how that is measured, and the hint for each symptom.

No cluster is built here. Most steps of this lab are commands and formulas: they are compared
for several clusters, some of which no machine on a desk could be. Where a number is wrong, it
is compared with what the common mistakes give, and the one that it equals names the hint. The
steps that send run in groups of processes, whose calls are noted.
"""

import ipaddress
import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from graders.tools import Lab, Wrong, ask, named, near

HINTS = {
    "words_kind": "Return a list of strings, each of the form --name=value, with the names of "
    "the table.",
    "not_an_option": "torchrun has no such option: `torchrun --help` lists them all.",
    "nnodes": "--nnodes is the number of nodes, on all nodes the same.",
    "nproc": "--nproc-per-node is the number of ranks that this agent starts, those of one "
    "node.",
    "node_rank": "Each agent must know which node it is, or all of them take the same ranks: "
    "--node-rank is the argument `node`.",
    "node_rank_of_rank": "--node-rank counts nodes, not ranks: the agent numbers its ranks "
    "itself.",
    "master_localhost": "localhost is another machine on every node. Agents of other nodes "
    "must find node 0: pass on its name.",
    "master": "--master-addr is the name of node 0, the argument `master`, on all nodes.",
    "port": "--master-port is the one that node 0 listens at: the same on all nodes.",
    "standalone": "--standalone is for one machine: it takes a port of its own on localhost.",
    "static_elastic": "Step 1 is the static rendezvous: no --rdzv options, all is in the five "
    "of the table.",
    "socket_both": "Both variables are needed: gloo reads GLOO_SOCKET_IFNAME, NCCL reads "
    "NCCL_SOCKET_IFNAME.",
    "socket_address": "The variables hold the name of an interface, not its address.",
    "socket_fixed": "The name is not the same on all machines: look which interface leads to "
    "the peer.",
    "socket_first": "That is some interface that is not the loopback. It must be one whose "
    "network holds the peer, and docker0 leads to nobody.",
    "socket_text": "The beginning of an address, as text, is not its network: that ends after "
    "as many bits as the prefix says. ipaddress.ip_interface(...).network knows.",
    "socket_longest": "Several networks hold the peer. Take the one with the longest prefix, "
    "as the kernel does.",
    "socket_lookup": "If no interface leads to the peer, raise LookupError: any name would be "
    "wrong.",
    "socket": "Of the interfaces whose network holds the peer, take the one with the longest "
    "prefix.",
    "groups_by_all": "dist.new_group is called by every rank for every group, in the same "
    "order, also for the groups the rank is not in. Make all of them, keep yours.",
    "groups_swapped": "First the inner group, then the outer one.",
    "groups_neighbours": "Ranks of one node are neighbours in number: node 0 has the ranks 0 "
    "to ranks - 1.",
    "groups_counts": "There are as many inner groups as nodes, each with all ranks of one; and "
    "as many outer groups as ranks on a node. The numbers of nodes and ranks may differ.",
    "groups_kept": "Return the groups that this rank is in: the inner one of its node, the "
    "outer one of its place on the node.",
    "bytes_kind": "Return a number of bytes.",
    "flat_every_rank": "Not every rank of a node has its neighbour on another node: one does.",
    "flat_nodes": "The ring goes over all ranks, not over the nodes: N = nodes · ranks.",
    "half_ring": "A ring all-reduce goes round twice: a reduce-scatter, then an all-gather.",
    "flat": "One rank of the node sends to the next node what every rank of a ring sends: "
    "2 (N - 1) / N of the size.",
    "outer_one": "That is one outer group. There are `ranks` of them, and all cross.",
    "outer_whole": "An outer group all-reduces one piece, size / ranks.",
    "outer_all_ranks": "The rings across have one rank of each node: n, not n · ranks.",
    "outer": "`ranks` rings over the nodes, each of size / ranks bytes.",
    "inside_only": "The sums stop at the node's border: all-reduce your piece in the outer "
    "group.",
    "no_gather": "Each rank knows the total of its own piece alone. All-gather the pieces "
    "inside the node.",
    "whole_crosses": "The result is right, but the whole tensor crosses in every outer group. "
    "Reduce-scatter first: then one piece of it crosses in each.",
    "still_flat": "The result is right, but a collective over all ranks crosses the link as "
    "the flat one does. Use the inner and the outer group only.",
    "twice": "Numbers were added more than once: after an all-reduce inside every rank has the "
    "node's sum, and a collective over all ranks adds it again.",
    "leader": "One rank of each node carries everything across, and the others wait for it. "
    "Let each carry its piece: on real nodes each has a network card of its own.",
    "not_in_place": "The tensor that was passed has not changed. Its pieces must be views of "
    "it: chunk gives views, and a list of new tensors is not written back.",
    "hierarchical": "Reduce-scatter in the inner group, all-reduce the piece in the outer "
    "group, all-gather in the inner group.",
    "tp_forward": "TP all-reduces in forward and in backward: two each in every layer, four in "
    "all.",
    "tp_layers": "A rank holds layers / pp of the layers, and all-reduces only in these.",
    "tp_pieces": "TP all-reduces the whole activation: each rank holds one term of every "
    "number, not a part of the numbers.",
    "pp_layers": "A stage sends at its border only, once for all of its layers.",
    "pp_ends": "With two stages each has one neighbour, and sends once: an activation or a "
    "gradient. Only a stage in the middle sends both; a single one sends nothing.",
    "pp_forward": "A stage in the middle sends an activation forward and a gradient back.",
    "dp_whole": "A rank holds 1 / (tp · pp) of the parameters, and all-reduces the gradients "
    "of these.",
    "no_ring": "An all-reduce over n ranks sends 2 (n - 1) / n of its size from every rank, "
    "and nothing if n is 1.",
    "width": "That is a count of numbers: each has `width` bytes.",
    "traffic_keys": 'Return a dict with the keys "tp", "pp" and "dp", and a number for each.',
    "traffic": "Count again what one rank sends along this axis in one step, in bytes.",
    "order_reversed": "What sends least may cross: it comes first.",
    "order_fixed": "The order follows from the numbers: they can turn it round.",
    "not_divided": "That is the sum over the ranks. A hook replaces DDP's all-reduce and also "
    "its division: divide by the size of the group.",
    "divided_twice": "The gradient is too small by a factor of the group's size: divide once.",
    "not_sent": "Every rank keeps its own gradient. all-reduce the narrow tensor.",
    "not_narrow": "What was sent is not bf16: convert the buffer before the all-reduce.",
    "fp16": "fp16 ends at 65504: larger gradients become infinite. bf16 has the range of fp32.",
    "hook_waits": "The hook waits for its all-reduce, and backward for the hook. Pass "
    "async_op=True and return a future of the result.",
    "not_a_future": "The hook must return a torch.futures.Future: work.get_future().then(...).",
    "stays_narrow": "The future's tensor must have the dtype of the bucket: widen it first.",
    "world_group": "The hook must reduce in the group that it is given.",
    "average": "The bucket is not the mean over the ranks.",
    "elastic_range": "--nnodes is a range here: 1:nodes, from the fewest to the most.",
    "elastic_backend": "--rdzv-backend=c10d is the elastic one; without it torchrun takes "
    "`static`.",
    "elastic_master": "An elastic agent has no --node-rank and no --master-addr: it meets the "
    "others at --rdzv-endpoint, and gets its place there.",
    "elastic_endpoint": "--rdzv-endpoint is HOST:PORT of the one store, the same on all nodes.",
    "elastic_id": "--rdzv-id is the name of the job, so that agents of another job are not "
    "taken for its own.",
    "elastic_restarts": "--max-restarts says how often the ranks may start again; torchrun "
    "takes 0 if it is not told.",
}  # fmt: skip

LAB = Lab(HINTS)


# --- step 1 -------------------------------------------------------------------------------

# (node, nodes, ranks, master, port)
CLUSTERS = ((0, 2, 4, "alpha", 29500), (1, 2, 4, "alpha", 29500), (2, 5, 8, "beta3", 29611))


def options_of(words: Any) -> dict[str, str]:
    """The options by name, with dashes; raises `Wrong` for what torchrun does not know."""
    from torch.distributed.run import get_args_parser

    actions = get_args_parser()._actions
    known = {name: action.nargs for action in actions for name in action.option_strings}
    kind = type(words).__name__
    ask(isinstance(words, (list, tuple)), f"the words are a {kind}", "words_kind")
    for word in words:
        what = f"the words are a {kind} with one {type(word).__name__}"
        ask(isinstance(word, str), what, "words_kind")
    options, rest = {}, list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        ask(name.startswith("--"), f"a word is {name!r}", "words_kind")
        ask(name in known, f"one option is {name}", "not_an_option")
        if not equals and known[name] != 0 and rest:
            value = rest.pop(0)
        options[name[2:].replace("_", "-")] = value
    return options


@LAB.alone(
    1, "the same job, from every node", "the five options of every node of three clusters",
    "static_words",
)  # fmt: skip
def static(theirs, ours, lesson):
    for case in CLUSTERS:
        node, nodes, ranks, master, port = case
        words = theirs.static_words(*case)
        options = options_of(words)
        what = f"for node {node} of {nodes} with {ranks} ranks each: {' '.join(words)}"
        ask("standalone" not in options, what, "standalone")
        ask(not any(name.startswith("rdzv") for name in options), what, "static_elastic")
        ask(options.get("nnodes") in (f"{nodes}", f"{nodes}:{nodes}"), what, "nnodes")
        ask(options.get("nproc-per-node") == f"{ranks}", what, "nproc")
        number = options.get("node-rank", "0")
        of_rank = number == f"{node * ranks}"
        ask(number == f"{node}", what, "node_rank_of_rank" if of_rank else "node_rank")
        address = options.get("master-addr", "127.0.0.1")
        local = address in ("localhost", "127.0.0.1")
        ask(address == master, what, "master_localhost" if local else "master")
        ask(options.get("master-port") == f"{port}", what, "port")


# --- step 2 -------------------------------------------------------------------------------

LO = {"lo": "127.0.0.1/8"}
DOCKER = {"docker0": "172.17.0.1/16"}
MACHINES = (
    (LO | DOCKER | {"eth0": "10.77.0.1/24"}, "10.77.0.2"),
    (LO | {"eno1": "10.77.1.4/26", "eno2": "10.77.1.70/26"}, "10.77.1.100"),
    (LO | {"eth0": "192.168.1.5/24", "ib0": "10.1.2.3/16"} | DOCKER, "10.1.200.9"),
    (LO | {"eno1": "10.0.0.7/8", "hsn0": "10.5.0.7/16"}, "10.5.3.1"),
    (LO, "127.0.0.1"),
    (LO | DOCKER | {"eth0": "10.77.0.1/24"}, "10.78.0.1"),
)


@LAB.alone(
    2, "which interface",
    "the interface that leads to the peer, by its network, in both variables",
    "socket_variables",
)  # fmt: skip
def sockets(theirs, ours, lesson):
    for machine, peer in MACHINES:
        networks = {
            name: ipaddress.ip_interface(each).network for name, each in machine.items()
        }
        leads = [name for name in networks if ipaddress.ip_address(peer) in networks[name]]
        try:
            value = theirs.socket_variables(dict(machine), peer)
            found = dict(value) if isinstance(value, dict) else repr(value)
        except LookupError:
            found = "LookupError"
        except Exception as error:  # max() or next() of nothing, say
            if leads:
                raise
            found = f"{type(error).__name__}: {error}"
        what = f"with {machine} and the peer {peer}: {found}"
        if not leads:
            ask(found == "LookupError", what, "socket_lookup")
            continue
        ask(isinstance(found, dict), what, "socket")
        names = [found.get(f"{library}_SOCKET_IFNAME") for library in ("GLOO", "NCCL")]
        ask(None not in names, what, "socket_both")
        true = max(leads, key=lambda name: networks[name].prefixlen)
        if {names[0], str(names[1]).lstrip("=")} != {true}:
            raise Wrong(what, socket_mistake(names[0], machine, peer, leads))
        yield f"{true} leads to {peer}"


def socket_mistake(name: str, machine: dict[str, str], peer: str, leads: list[str]) -> str:
    """The hint for the choice of an interface that is not the right one."""
    if any(name in (text, text.split("/")[0]) for text in machine.values()):
        return "socket_address"
    if name not in machine:
        return "socket_fixed"
    if name in leads:
        return "socket_longest"
    if machine[name].rpartition(".")[0] == peer.rpartition(".")[0]:
        return "socket_text"
    if name == next((other for other in machine if other != "lo"), None):
        return "socket_fixed" if name == "eth0" else "socket_first"
    return "socket"


# --- step 3 -------------------------------------------------------------------------------


def groups_of(make_groups: Callable, nodes: int, ranks: int, rank: int) -> list:
    """The groups that one rank makes, and those it returns; torch's fake ones."""
    real, world, made = dist.new_group, nodes * ranks, []

    def note(*words: Any, **named: Any) -> Any:
        members = named.get("ranks", words[0] if words else None)
        if not named.get("use_local_synchronization"):  # then members alone call it
            made.append(sorted(map(int, range(world) if members is None else members)))
        try:
            return real(members)
        except (ValueError, RuntimeError):  # ranks that there are not
            return dist.GroupMember.NON_GROUP_MEMBER

    variables = {"RANK": rank, "WORLD_SIZE": world, "GROUP_RANK": rank // ranks}
    variables |= {"LOCAL_RANK": rank % ranks, "LOCAL_WORLD_SIZE": ranks}
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        with (
            mock.patch.object(dist, "new_group", note),
            mock.patch.object(dist.distributed_c10d, "new_group", note),
            mock.patch.dict("os.environ", {key: str(n) for key, n in variables.items()}),
        ):
            returned = make_groups(nodes, ranks)
        pair = list(returned) if isinstance(returned, (list, tuple)) else [returned]
        kept = [
            dist.get_process_group_ranks(each) if isinstance(each, dist.ProcessGroup) else []
            for each in pair
        ]
    finally:
        dist.destroy_process_group()
    return [made, kept]


@LAB.alone(
    3, "groups along the wires",
    "every rank makes all groups in one order and keeps its inner and its outer one",
    "make_groups",
)  # fmt: skip
def groups(theirs, ours, lesson):
    for nodes, ranks in ((2, 3), (3, 2), (2, 2)):
        at, everyone = f"with {nodes} nodes of {ranks} ranks", range(nodes * ranks)
        of_ranks = [groups_of(theirs.make_groups, nodes, ranks, rank) for rank in everyone]
        first, _ = of_ranks[0]
        for rank, (made, kept) in enumerate(of_ranks):
            what = f"{at}, rank 0 makes the groups {first}, rank {rank} {made}"
            ask(made == first, what, "groups_by_all")
            true = [
                [n for n in everyone if n // ranks == rank // ranks],
                [n for n in everyone if n % ranks == rank % ranks],
            ]
            hint = "groups_counts"
            if kept == true[::-1]:
                hint = "groups_swapped"
            elif len(kept) == 2 and all(one in made for one in true):
                hint = "groups_kept"
            elif kept[:1] == [[n for n in everyone if n % nodes == rank % nodes]]:
                hint = "groups_neighbours"
            what = f"{at}, rank {rank} returns the groups {kept}, for {true}"
            ask(kept == true, what, hint)
        yield f"{at}: inner and outer groups of every rank"


# --- step 4 -------------------------------------------------------------------------------

SIZES = ((3e6, 3, 5), (8e9, 4, 8), (6e6, 2, 2))  # bytes, nodes, ranks


@LAB.alone(
    4, "how many bytes cross",
    "the bytes of the flat and of the hierarchical all-reduce, for three clusters",
    "flat_crossing hierarchical_crossing",
)  # fmt: skip
def crossing(theirs, ours, lesson):
    for name, hint in (("flat_crossing", "flat"), ("hierarchical_crossing", "outer")):
        for case in SIZES:
            size, nodes, ranks = case
            found, true = getattr(theirs, name)(*case), getattr(ours, name)(*case)
            kind = type(found).__name__
            ask(isinstance(found, (int, float)), f"{name} returns a {kind}", "bytes_kind")
            if hint == "flat":
                known = {"flat_every_rank": ranks * true}
                known["flat_nodes"] = ours.flat_crossing(size, nodes, 1)
            else:
                known = {"outer_one": true / ranks, "outer_whole": ranks * true}
                known["outer_all_ranks"] = ours.flat_crossing(*case)
            known |= {"half_ring": true / 2, hint: found}
            what = f"{name} of {size:,.0f} bytes, {nodes} nodes, {ranks} ranks: {found:,.0f}"
            ask(near(found, true, 1e-9), what, named(found, known))
        yield f"{name} of {len(SIZES)} clusters"


# --- step 5 -------------------------------------------------------------------------------

LENGTH = 24
COLLECTIVES = (
    "all_reduce reduce_scatter reduce_scatter_tensor reduce_scatter_single all_gather "
    "all_gather_into_tensor all_gather_single all_gather_object reduce broadcast gather "
    "scatter all_to_all all_to_all_single send isend"
)


def noted(calls: list) -> Any:
    """A context in which each collective notes its name, its numbers, ranks and dtype."""

    def noting(name: str, real: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = tree_leaves((args, kwargs))
            tensors = [each for each in given if isinstance(each, torch.Tensor)]
            group = next((each for each in given if isinstance(each, dist.ProcessGroup)), None)
            numbers = max((t.numel() for t in tensors), default=0)
            dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
            calls.append((name, numbers, dist.get_process_group_ranks(group), dtype))
            return real(*args, **kwargs)

        return call

    names = [name for name in COLLECTIVES.split() if hasattr(dist, name)]
    return mock.patch.multiple(dist, **{n: noting(n, getattr(dist, n)) for n in names})


@LAB.step(
    5, "the hierarchical all-reduce",
    "the sum over all ranks, and one piece of it crosses in each outer group",
    "hierarchical_all_reduce", worlds=(4, 6), symmetric=False,
)  # fmt: skip
def hierarchical(theirs, ours, lesson):
    rank, k = lesson.rank, lesson.world // 2
    inner, outer = ours.make_groups(2, k)
    values = [torch.arange(LENGTH, dtype=torch.float64) + 100.0**r for r in range(lesson.world)]
    tensor, calls = values[rank].clone(), []
    with noted(calls):
        theirs.hierarchical_all_reduce(tensor, inner, outer)
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
    lesson.fact("outcome", next(name for name, fits in outcomes.items() if fits))
    lesson.fact("calls", calls)


@hierarchical.judge
def _(group):
    k = group.world // 2
    hints = {"inside": "inside_only", "twice": "twice", "own piece": "no_gather"}
    shown = "; ".join(
        f"{name} of {numbers} numbers over {len(ranks)} ranks"
        for name, numbers, ranks, _ in group.facts("calls")[0]
    )
    hints["unchanged"] = "not_in_place" if "gather" in shown else "no_gather"
    for rank, outcome in enumerate(group.facts("outcome")):
        what = f"on rank {rank} the sum is wrong ({outcome}); rank 0 called {shown}"
        ask(outcome == "right", what, hints.get(outcome, "hierarchical"))
    yield "the sum over all ranks, on every rank"
    crossing = [
        [call for call in calls if len({r // k for r in call[2]}) > 1]
        for calls in group.facts("calls")
    ]
    carriers = [str(rank) for rank, calls in enumerate(crossing) if calls]
    ask(len(carriers) in (0, group.world), f"only ranks {', '.join(carriers)} cross", "leader")
    for name, numbers, ranks, _ in itertools.chain(*crossing):
        what = f"across the nodes went {name} of {numbers} numbers of {LENGTH}"
        ask(len(ranks) <= 2, what, "still_flat")
        ask(numbers <= LENGTH // k, what, "whole_crosses")


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
    """What the common mistakes give along this axis."""
    activation, held = tokens * hidden * width, layers / pp
    ways = {
        "tp": {
            "tp_forward": true / 2,
            "tp_layers": true * pp,
            "tp_pieces": true / tp,
            "no_ring": 4 * held * activation,
        },
        "pp": {
            "pp_forward": activation * (pp > 1),
            "pp_ends": 2 * activation if pp <= 2 else math.nan,
            "pp_layers": true * held,
        },
        "dp": {
            "dp_whole": true * tp * pp,
            "half_ring": true / 2,
            "no_ring": 12 * hidden**2 * held / tp * width,
        },
    }
    return ways[axis] | {"width": true / width}


def is_traffic(found: Any) -> bool:
    """Whether it is a dict with a number for each axis."""
    fits = isinstance(found, dict) and set(found) == {"tp", "pp", "dp"}
    return fits and all(isinstance(value, (int, float)) for value in found.values())


@LAB.alone(
    6, "where TP, PP and DP lie", "the bytes along each axis of four models, and their order",
    "traffic axis_order",
)  # fmt: skip
def placement(theirs, ours, lesson):
    sent = [theirs.traffic(**case) for case in MODELS]
    ask(all(map(is_traffic, sent)), "traffic() returns something else", "traffic_keys")
    for axis in ("tp", "pp", "dp"):
        for case, bytes_along in zip(MODELS, sent, strict=True):
            found, true = bytes_along[axis], ours.traffic(**case)[axis]
            cluster = ", ".join(f"{name} {value}" for name, value in case.items())
            what = f"with {cluster}: along {axis} {found:,.0f} bytes"
            known = traffic_mistakes(axis, true, **case) | {"traffic": found}
            ask(math.isclose(found, true, abs_tol=1e-6), what, named(found, known))
        yield f"the bytes along {axis}"
    for given in ORDERS:
        order, true = list(map(str, theirs.axis_order(dict(given)))), ours.axis_order(given)
        hint = "order_reversed" if order == true[::-1] else "order_fixed"
        ask(order == true, f"with {given} the order is {order}", hint)


# --- step 7 -------------------------------------------------------------------------------


class Bucket:
    """A bucket as DDP gives it to a hook, over some ranks only."""

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
    "the mean over the ranks of a group, sent as bf16 and without waiting", "bf16_hook",
    worlds=(3,), symmetric=False,
    crashes={"[Ff]uture": "not_a_future", "dtype|BFloat16|Half": "stays_narrow"},
)  # fmt: skip
def hook(theirs, ours, lesson):
    pair, calls = dist.new_group([0, 1]), []
    if lesson.rank == 2:
        return
    rows = [torch.rand(300, generator=torch.Generator().manual_seed(r)) + 0.5 for r in (0, 1)]
    own = rows[lesson.rank]
    with noted(calls):
        future = theirs.bf16_hook(pair, Bucket(own.clone()))
    is_future = isinstance(future, torch._C.Future)  # that of the library, too
    ask(is_future, "the hook returns no future", "not_a_future")
    for call in lesson.calls:
        ask(call.asynchronous, f"the hook waits in {call.name}", "hook_waits")
    ask(calls, "the hook called no collective", "not_sent")
    for name, _, ranks, _ in calls:
        what = f"given a group of two of three ranks, it called {name} in another"
        ask(ranks == [0, 1], what, "world_group")
    for *_, dtype in calls:
        hint = "fp16" if dtype == "float16" else "not_narrow"
        ask(dtype == "bfloat16", f"it sends {dtype}", hint)
    yield "it starts one all-reduce of bf16 in its group, and does not wait"
    value = future.wait()
    value = value[0] if isinstance(value, (list, tuple)) else value
    ratio = value.float() / ((rows[0] + rows[1]) / 2)
    low, high = ratio.min().item(), ratio.max().item()
    what = f"on rank {lesson.rank} the result is {low:.4f} to {high:.4f} times the mean"
    if low < 0.98 or high > 1.02:
        ask((value.float() - own).abs().max() >= 0.01, what, "not_sent")
        factor, known = (low + high) / 2, {"not_divided": 2.0, "divided_twice": 0.5}
        raise Wrong(what, named(factor, known | {"average": factor}, 0.02))
    dtype = str(value.dtype).removeprefix("torch.")
    ask(dtype == "float32", f"the future has {dtype}", "stays_narrow")


# --- step 8 -------------------------------------------------------------------------------


@LAB.alone(
    8, "elastic rendezvous", "the six options, the same on all nodes, of three clusters",
    "elastic_words",
)  # fmt: skip
def elastic(theirs, ours, lesson):
    for number, (_, nodes, ranks, master, port) in enumerate(CLUSTERS):
        words = theirs.elastic_words(nodes, ranks, master, port, f"job{number}")
        options = options_of(words)
        what = f"for {nodes} nodes with {ranks} ranks each: {' '.join(words)}"
        ask("standalone" not in options, what, "standalone")
        numbered = {"node-rank", "master-addr", "master-port"} & set(options)
        ask(not numbered, what, "elastic_master")
        for name, value, hint in (
            ("nnodes", f"1:{nodes}", "elastic_range"),
            ("nproc-per-node", f"{ranks}", "nproc"),
            ("rdzv-backend", "c10d", "elastic_backend"),
            ("rdzv-endpoint", f"{master}:{port}", "elastic_endpoint"),
            ("rdzv-id", f"job{number}", "elastic_id"),
            ("max-restarts", "3", "elastic_restarts"),
        ):
            ask(options.get(name) == value, what, hint)

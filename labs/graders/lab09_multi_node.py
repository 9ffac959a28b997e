"""The steps of lab 09: what each must do, how that is measured, and the hint for each symptom.

No cluster is built here. Most steps of this lab are commands and formulas: they are compared
for several clusters, some of which no machine on a desk could be. Where a number is wrong, it
is compared with what the common mistakes give, and the one that it equals names the hint. The
steps that send run in groups of processes, whose calls are noted.
"""

import ipaddress
import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from graders.runner import Group, Lesson, Step, Wrong

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


def matching(found: Any, mistakes: dict[str, Any]) -> str | None:
    """The hint whose mistake gives what was found."""
    for name, value in mistakes.items():
        if isinstance(value, float) and isinstance(found, (int, float)):
            if math.isclose(found, value, rel_tol=1e-6):
                return name
        elif found == value:
            return name
    return None


# --- steps 1 and 8: words of torchrun -----------------------------------------------------

# (node, nodes, ranks, master, port)
CLUSTERS = ((0, 2, 4, "alpha", 29500), (1, 2, 4, "alpha", 29500), (2, 5, 8, "beta3", 29611))


def probe_static(lesson: Lesson) -> None:
    found = [lesson.module.static_words(*case) for case in CLUSTERS]
    lesson.fact("words", [plain(words) for words in found])


def probe_elastic(lesson: Lesson) -> None:
    found = [
        lesson.module.elastic_words(*case[1:], f"job{number}")
        for number, case in enumerate(CLUSTERS)
    ]
    lesson.fact("words", [plain(words) for words in found])


def plain(words: Any) -> list[str] | str:
    """The words as JSON can carry them; something else by its type."""
    if isinstance(words, (list, tuple)) and all(isinstance(word, str) for word in words):
        return list(words)
    return type(words).__name__


def options_of(words: list[str] | str) -> dict[str, str]:
    """The options by name, with dashes; raises `Wrong` for what torchrun does not know."""
    from torch.distributed.run import get_args_parser

    if isinstance(words, str):
        raise Wrong(f"the words are a {words}", HINTS["words_kind"])
    known = {
        name: action.nargs
        for action in get_args_parser()._actions
        for name in action.option_strings
    }
    options, rest = {}, list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--"):
            raise Wrong(f"a word is {name!r}", HINTS["words_kind"])
        if name not in known:
            raise Wrong(f"one option is {name}", HINTS["not_an_option"])
        if not equals and known[name] != 0 and rest:
            value = rest.pop(0)
        options[name[2:].replace("_", "-")] = value
    return options


def judge_static(group: Group, right: Callable[[str], None]) -> None:
    for case, words in zip(CLUSTERS, group.facts("words")[0], strict=True):
        node, nodes, ranks, master, port = case
        options = options_of(words)
        what = f"for node {node} of {nodes} with {ranks} ranks each: {' '.join(words)}"
        if "standalone" in options:
            raise Wrong(what, HINTS["standalone"])
        if any(name.startswith("rdzv") for name in options):
            raise Wrong(what, HINTS["static_elastic"])
        if options.get("nnodes") not in (f"{nodes}", f"{nodes}:{nodes}"):
            raise Wrong(what, HINTS["nnodes"])
        if options.get("nproc-per-node") != f"{ranks}":
            raise Wrong(what, HINTS["nproc"])
        if options.get("node-rank", "0") != f"{node}":
            of_rank = options.get("node-rank") == f"{node * ranks}"
            raise Wrong(what, HINTS["node_rank_of_rank" if of_rank else "node_rank"])
        if options.get("master-addr", "127.0.0.1") != master:
            local = options.get("master-addr", "127.0.0.1") in ("localhost", "127.0.0.1")
            raise Wrong(what, HINTS["master_localhost" if local else "master"])
        if options.get("master-port") != f"{port}":
            raise Wrong(what, HINTS["port"])


def judge_elastic(group: Group, right: Callable[[str], None]) -> None:
    for number, (case, words) in enumerate(zip(CLUSTERS, group.facts("words")[0], strict=True)):
        _, nodes, ranks, master, port = case
        options = options_of(words)
        what = f"for {nodes} nodes with {ranks} ranks each: {' '.join(words)}"
        if "standalone" in options:
            raise Wrong(what, HINTS["standalone"])
        if {"node-rank", "master-addr", "master-port"} & set(options):
            raise Wrong(what, HINTS["elastic_master"])
        if options.get("nnodes") != f"1:{nodes}":
            raise Wrong(what, HINTS["elastic_range"])
        if options.get("nproc-per-node") != f"{ranks}":
            raise Wrong(what, HINTS["nproc"])
        if options.get("rdzv-backend") != "c10d":
            raise Wrong(what, HINTS["elastic_backend"])
        if options.get("rdzv-endpoint") != f"{master}:{port}":
            raise Wrong(what, HINTS["elastic_endpoint"])
        if options.get("rdzv-id") != f"job{number}":
            raise Wrong(what, HINTS["elastic_id"])
        if options.get("max-restarts") != "3":
            raise Wrong(what, HINTS["elastic_restarts"])


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


def leading(machine: dict[str, str], peer: str) -> list[str]:
    """The interfaces whose network holds the peer."""
    return [
        name
        for name, text in machine.items()
        if ipaddress.ip_address(peer) in ipaddress.ip_interface(text).network
    ]


def prefix(text: str) -> int:
    return ipaddress.ip_interface(text).network.prefixlen


def true_interface(machine: dict[str, str], peer: str) -> str:
    found = leading(machine, peer)
    return max(found, key=lambda name: prefix(machine[name])) if found else "LookupError"


def probe_sockets(lesson: Lesson) -> None:
    found = []
    for machine, peer in MACHINES:
        try:
            value = lesson.module.socket_variables(dict(machine), peer)
            found.append(dict(value) if isinstance(value, dict) else repr(value))
        except LookupError:
            found.append("LookupError")
        except ValueError as error:  # max() of nothing, say
            if leading(machine, peer):
                raise
            found.append(f"ValueError: {error}")
    lesson.fact("sockets", found)


def judge_sockets(group: Group, right: Callable[[str], None]) -> None:
    for (machine, peer), found in zip(MACHINES, group.facts("sockets")[0], strict=True):
        true = true_interface(machine, peer)
        what = f"with {machine} and the peer {peer}: {found}"
        if true == "LookupError" or not isinstance(found, dict):
            if found != true:
                raise Wrong(what, HINTS["socket_lookup" if true == "LookupError" else "socket"])
            continue
        if not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} <= set(found):
            raise Wrong(what, HINTS["socket_both"])
        names = {found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"].lstrip("=")}
        if names == {true}:
            right(f"{true} leads to {peer}")
            continue
        name = found["GLOO_SOCKET_IFNAME"]
        texts = list(machine.values())
        if any(name in (text, text.split("/")[0]) for text in texts):
            raise Wrong(what, HINTS["socket_address"])
        if name not in machine:
            raise Wrong(what, HINTS["socket_fixed"])
        if name in leading(machine, peer):
            raise Wrong(what, HINTS["socket_longest"])
        if machine[name].rpartition(".")[0] == peer.rpartition(".")[0]:
            raise Wrong(what, HINTS["socket_text"])
        if name == next((other for other in machine if other != "lo"), None):
            fixed = name == "eth0"
            raise Wrong(what, HINTS["socket_fixed" if fixed else "socket_first"])
        raise Wrong(what, HINTS["socket"])


# --- step 3 -------------------------------------------------------------------------------

SHAPES = ((2, 3), (3, 2), (2, 2))  # (nodes, ranks)


def probe_groups(lesson: Lesson) -> None:
    """Call make_groups as each rank of several clusters, with a new_group that takes notes."""
    found = []
    for nodes, ranks in SHAPES:
        of_ranks = []
        for rank in range(nodes * ranks):
            made: list[list[int]] = []
            handles: list[object] = []

            def note(members: Sequence[int] | None = None, *_: Any, **__: Any) -> object:
                whole = range(nodes * ranks)  # noqa: B023
                made.append(sorted(map(int, whole if members is None else members)))  # noqa: B023
                handles.append(object())  # noqa: B023
                return handles[-1]  # noqa: B023

            with (
                mock.patch.object(dist, "new_group", note),
                mock.patch.object(dist, "get_rank", lambda *_: rank),  # noqa: B023
                mock.patch.object(dist, "get_world_size", lambda *_: nodes * ranks),  # noqa: B023
            ):
                returned = lesson.module.make_groups(nodes, ranks)
            pair = list(returned) if isinstance(returned, (list, tuple)) else [returned]
            kept = [[made[i] for i, h in enumerate(handles) if h is each] for each in pair]
            of_ranks.append([made, [one[0] if one else [] for one in kept]])
        found.append(of_ranks)
    lesson.fact("groups", found)


def judge_groups(group: Group, right: Callable[[str], None]) -> None:
    for (nodes, ranks), of_ranks in zip(SHAPES, group.facts("groups")[0], strict=True):
        at = f"with {nodes} nodes of {ranks} ranks"
        for rank, (made, kept) in enumerate(of_ranks):
            if made != of_ranks[0][0]:
                what = f"{at}, rank 0 makes the groups {of_ranks[0][0]}, rank {rank} {made}"
                raise Wrong(what, HINTS["groups_by_all"])
            true = [
                [n for n in range(nodes * ranks) if n // ranks == rank // ranks],
                [n for n in range(nodes * ranks) if n % ranks == rank % ranks],
            ]
            what = f"{at}, rank {rank} returns the groups {kept}, for {true}"
            if kept == true:
                continue
            if kept == true[::-1]:
                raise Wrong(what, HINTS["groups_swapped"])
            if len(kept) == 2 and all(one in made for one in true):
                raise Wrong(what, HINTS["groups_kept"])
            strides = [n for n in range(nodes * ranks) if n % nodes == rank % nodes]
            if kept and kept[0] == strides:
                raise Wrong(what, HINTS["groups_neighbours"])
            raise Wrong(what, HINTS["groups_counts"])
        right(f"{at}: inner and outer groups of every rank")


# --- step 4 -------------------------------------------------------------------------------

SIZES = ((6e6, 2, 2), (8e9, 4, 8), (3e6, 3, 5))


def probe_bytes(lesson: Lesson) -> None:
    for name in ("flat_crossing", "hierarchical_crossing"):
        function = getattr(lesson.module, name)
        lesson.fact(name, [float(function(*case)) for case in SIZES])


def flat_ring(size: float, nodes: int, ranks: int) -> float:
    return 2 * (nodes * ranks - 1) / (nodes * ranks) * size


FLAT = {
    "flat_every_rank": lambda s, n, k: k * flat_ring(s, n, k),
    "flat_nodes": lambda s, n, k: flat_ring(s, n, 1),
    "half_ring": lambda s, n, k: flat_ring(s, n, k) / 2,
}
OUTER = {
    "outer_one": lambda s, n, k: flat_ring(s / k, n, 1),
    "outer_whole": lambda s, n, k: k * flat_ring(s, n, 1),
    "outer_all_ranks": lambda s, n, k: flat_ring(s, n, k),
    "half_ring": lambda s, n, k: flat_ring(s, n, 1) / 2,
}


def judge_bytes(group: Group, right: Callable[[str], None]) -> None:
    for name, true, mistakes, hint in (
        ("flat_crossing", flat_ring, FLAT, "flat"),
        ("hierarchical_crossing", lambda s, n, k: flat_ring(s, n, 1), OUTER, "outer"),
    ):
        found = group.facts(name)[0]
        for case, value in reversed(list(zip(SIZES, found, strict=True))):
            if not math.isclose(value, true(*case), rel_tol=1e-9):
                size, nodes, ranks = case
                what = (
                    f"{name} of {size:,.0f} bytes, {nodes} nodes, {ranks} ranks: {value:,.0f}"
                )
                known = matching(value, {key: float(f(*case)) for key, f in mistakes.items()})
                raise Wrong(what, HINTS[known or hint])
        right(f"{name} of {len(SIZES)} clusters")


# --- step 5 -------------------------------------------------------------------------------

LENGTH = 24
COLLECTIVES = [
    *("all_reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"),
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object"),
    *("reduce", "broadcast", "gather", "scatter", "all_to_all", "all_to_all_single"),
    *("send", "isend"),
]


def noted(calls: list) -> Any:
    """A context in which each collective notes its name, its numbers and its group."""
    stack = mock.patch.multiple(
        dist,
        **{
            name: _noting(name, getattr(dist, name), calls)
            for name in COLLECTIVES
            if hasattr(dist, name)
        },
    )
    return stack


def _noting(name: str, real: Callable, calls: list) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        flat = [
            item
            for each in [*args, *kwargs.values()]
            for item in (each if isinstance(each, (list, tuple)) else [each])
        ]
        tensors = [item for item in flat if isinstance(item, torch.Tensor)]
        groups = [item for item in flat if isinstance(item, dist.ProcessGroup)]
        ranks = dist.get_process_group_ranks(groups[0]) if groups else None
        dtype = str(tensors[0].dtype) if tensors else ""
        waits = not (kwargs.get("async_op") or any(item is True for item in args))
        numbers = max((t.numel() for t in tensors), default=0)
        calls.append([name, numbers, ranks, dtype, waits])
        return real(*args, **kwargs)

    return call


def probe_hierarchical(lesson: Lesson) -> None:
    nodes, rank = 2, lesson.rank
    k = lesson.world // nodes
    inner = [dist.new_group([n * k + r for r in range(k)]) for n in range(nodes)][rank // k]
    outer = [dist.new_group([n * k + r for n in range(nodes)]) for r in range(k)][rank % k]
    values = [torch.arange(LENGTH, dtype=torch.float64) + 100.0**r for r in range(lesson.world)]
    tensor, calls = values[rank].clone(), []
    with noted(calls):
        lesson.module.hierarchical_all_reduce(tensor, inner, outer)
    members = range(rank // k * k, rank // k * k + k)
    node_sum, total = sum(values[r] for r in members), sum(values)
    mine = slice(rank % k * (LENGTH // k), (rank % k + 1) * (LENGTH // k))
    outcome = "other"
    if torch.equal(tensor, total):
        outcome = "right"
    elif torch.equal(tensor, values[rank]):
        outcome = "unchanged"
    elif torch.equal(tensor, node_sum):
        outcome = "inside"
    elif torch.allclose(tensor, total * k):
        outcome = "twice"
    elif torch.equal(tensor[mine], total[mine]):
        outcome = "own piece"
    lesson.fact("outcome", outcome)
    lesson.fact("calls", calls)


def judge_hierarchical(group: Group, right: Callable[[str], None]) -> None:
    outcomes, k = group.facts("outcome"), group.world // 2
    hints = {"inside": "inside_only", "twice": "twice", "own piece": "no_gather"}
    hints |= {"unchanged": "not_in_place"}
    shown = "; ".join(
        f"{name} of {numbers} numbers over {len(ranks or range(group.world))} ranks"
        for name, numbers, ranks, *_ in group.facts("calls")[0]
    )
    for rank, outcome in enumerate(outcomes):
        if outcome != "right":
            what = f"on rank {rank} the sum is wrong ({outcome}); rank 0 called {shown}"
            hint = hints.get(outcome, "hierarchical")
            if outcome == "unchanged" and "gather" not in shown:
                hint = "no_gather"
            raise Wrong(what, HINTS[hint])
    right("the sum over all ranks, on every rank")
    crossing = [
        [call for call in calls if len({r // k for r in call[2] or range(group.world)}) > 1]
        for calls in group.facts("calls")
    ]
    if len({bool(calls) for calls in crossing}) > 1:
        carriers = [str(rank) for rank, calls in enumerate(crossing) if calls]
        raise Wrong(f"only ranks {', '.join(carriers)} cross", HINTS["leader"])
    for calls in crossing:
        for name, numbers, ranks, *_ in calls:
            what = f"across the nodes went {name} of {numbers} numbers of {LENGTH}"
            if len(ranks or range(group.world)) > 2:
                raise Wrong(what, HINTS["still_flat"])
            if numbers > LENGTH // k:
                raise Wrong(what, HINTS["whole_crosses"])


# --- step 6 -------------------------------------------------------------------------------

# layers, hidden, tokens, width, tp, pp, dp
MODELS = (
    (8, 128, 512, 4, 8, 2, 3),
    (12, 64, 1000, 4, 2, 3, 4),
    (6, 96, 300, 4, 1, 1, 1),
    (10, 32, 50, 2, 8, 5, 2),
)


def true_traffic(
    layers: int, hidden: int, tokens: int, width: int, tp: int, pp: int, dp: int
) -> dict[str, float]:
    activation = float(tokens * hidden * width)
    return {
        "tp": 4 * layers / pp * 2 * (tp - 1) / tp * activation,
        "pp": min(pp - 1, 2) * activation,
        "dp": 2 * (dp - 1) / dp * 12 * hidden**2 * layers / (tp * pp) * width,
    }


def mistaken(axis: str, case: tuple, true: float) -> dict[str, float]:
    """What the common mistakes give along this axis."""
    layers, _, tokens, width, tp, pp, _ = case
    activation = float(tokens * case[1] * width)
    ways = {
        "tp": {
            "tp_forward": true / 2,
            "tp_layers": true * pp,
            "tp_pieces": true / tp,
            "no_ring": 4 * layers / pp * activation,
        },
        "pp": {
            "pp_forward": activation * (pp > 1),
            "pp_ends": 2 * activation,
            "pp_layers": true * layers / pp,
        },
        "dp": {
            "dp_whole": true * tp * pp,
            "half_ring": true / 2,
            "no_ring": 12 * case[1] ** 2 * layers / (tp * pp) * width,
        },
    }
    if axis == "pp" and pp > 2:
        del ways["pp"]["pp_ends"]
    found = {name: float(value) for name, value in ways[axis].items()}
    return found | {"width": true / width}


ORDERS = (
    {"tp": 35.0, "pp": 0.5, "dp": 7.0},
    {"tp": 1.0, "pp": 4.0, "dp": 9.0},
    {"tp": 2.0, "pp": 1.0, "dp": 3.0},
    {"dp": 5.0, "tp": 6.0},
)


def probe_placement(lesson: Lesson) -> None:
    names = "layers", "hidden", "tokens", "width", "tp", "pp", "dp"
    found = [lesson.module.traffic(**dict(zip(names, case, strict=True))) for case in MODELS]
    numbers = all(
        isinstance(one, dict)
        and set(one) == {"tp", "pp", "dp"}
        and all(isinstance(value, (int, float)) for value in one.values())
        for one in found
    )
    lesson.fact("traffic", [dict(one) for one in found] if numbers else None)
    orders = [lesson.module.axis_order(dict(one)) for one in ORDERS]
    lesson.fact("orders", [list(map(str, one)) for one in orders])


def judge_placement(group: Group, right: Callable[[str], None]) -> None:
    traffic = group.facts("traffic")[0]
    if traffic is None:
        raise Wrong("traffic() returns something else", HINTS["traffic_keys"])
    for axis in ("tp", "pp", "dp"):
        for case, found in zip(MODELS, traffic, strict=True):
            true = true_traffic(*case)[axis]
            if not math.isclose(found[axis], true, rel_tol=1e-9, abs_tol=1e-6):
                named = zip(
                    ("layers", "hidden", "tokens", "width", "tp", "pp", "dp"), case, strict=True
                )
                cluster = ", ".join(f"{name} {value}" for name, value in named)
                what = f"with {cluster}: along {axis} {found[axis]:,.0f} bytes"
                known = matching(found[axis], mistaken(axis, case, true))
                raise Wrong(what, HINTS[known or "traffic"])
        right(f"the bytes along {axis}")
    for sent, order in zip(ORDERS, group.facts("orders")[0], strict=True):
        true = sorted(sent, key=sent.get)
        if order != true:
            what = f"with {sent} the order is {order}"
            raise Wrong(what, HINTS["order_reversed" if order == true[::-1] else "order_fixed"])


# --- step 7 -------------------------------------------------------------------------------


def rows(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(300, generator=generator) + 0.5


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


def probe_hook(lesson: Lesson) -> None:
    hook = lesson.module.bf16_hook
    pair, everybody = dist.new_group([0, 1]), dist.new_group()
    calls: list = []
    if lesson.rank < 2:
        flat = rows(lesson.rank)
        with noted(calls):
            future = hook(pair, Bucket(flat))
        lesson.fact("calls", calls)
        is_future = isinstance(future, torch._C.Future)  # that of the library, too
        lesson.fact("future", is_future)
        if is_future:
            value = future.wait()
            value = value[0] if isinstance(value, (list, tuple)) else value
            lesson.fact("dtype", str(value.dtype))
            ratio = (value.float() / ((rows(0) + rows(1)) / 2)).double()
            own = (value.float() - rows(lesson.rank)).abs().max().item()
            lesson.fact("ratio", [ratio.min().item(), ratio.max().item(), own])
    dist.barrier(group=everybody)


def stuck_in_hook(group: Group) -> None:
    """Why ranks wait: a rank outside of the group is waited for."""
    for rank in group.ranks[:2]:
        for name, _, ranks, *_ in rank.facts.get("calls", []):
            if ranks != [0, 1]:
                what = f"given a group of two of three ranks, it called {name} in another"
                raise Wrong(what, HINTS["world_group"])


def judge_hook(group: Group, right: Callable[[str], None]) -> None:
    pair = group.ranks[:2]
    calls = [call for rank in pair for call in rank.facts.get("calls", [])]
    if not all(rank.facts["future"] for rank in pair):
        raise Wrong("the hook returns no future", HINTS["not_a_future"])
    if any(call[4] for call in calls):
        raise Wrong(f"the hook waits in {calls[0][0]}", HINTS["hook_waits"])
    if not calls:
        raise Wrong("the hook called no collective", HINTS["not_sent"])
    stuck_in_hook(group)
    for *_, dtype, _ in calls:
        if dtype != "torch.bfloat16":
            what = f"it sends {dtype.removeprefix('torch.')}"
            raise Wrong(what, HINTS["fp16" if "float16" in dtype else "not_narrow"])
    right("it starts one all-reduce of bf16 in its group, and does not wait")
    for number, rank in enumerate(pair):
        low, high, own = rank.facts["ratio"]
        what = f"on rank {number} the result is {low:.4f} to {high:.4f} times the mean"
        if low < 0.98 or high > 1.02:
            if own < 0.01:
                raise Wrong(what, HINTS["not_sent"])
            factor = (low + high) / 2
            near = {"not_divided": 2.0, "divided_twice": 0.5}
            for name, value in near.items():
                if abs(factor / value - 1) < 0.02:
                    raise Wrong(what, HINTS[name])
            raise Wrong(what, HINTS["average"])
    if any(rank.facts["dtype"] != "torch.float32" for rank in pair):
        what = f"the future has {pair[0].facts['dtype'].removeprefix('torch.')}"
        raise Wrong(what, HINTS["stays_narrow"])
    right("the future has the mean, in fp32")


STEPS = [
    Step(
        1,
        "the same job, from every node",
        "the five options of every node of three clusters",
        probe_static,
        judge_static,
        uses=("static_words",),
        worlds=(1,),
        joins=False,
    ),
    Step(
        2,
        "which interface",
        "the interface that leads to the peer, by its network, in both variables",
        probe_sockets,
        judge_sockets,
        uses=("socket_variables",),
        worlds=(1,),
        joins=False,
    ),
    Step(
        3,
        "groups along the wires",
        "every rank makes all groups in one order and keeps its inner and its outer one",
        probe_groups,
        judge_groups,
        uses=("make_groups",),
        worlds=(1,),
        joins=False,
    ),
    Step(
        4,
        "how many bytes cross",
        "the bytes of the flat and of the hierarchical all-reduce, for three clusters",
        probe_bytes,
        judge_bytes,
        uses=("flat_crossing", "hierarchical_crossing"),
        worlds=(1,),
        joins=False,
    ),
    Step(
        5,
        "the hierarchical all-reduce",
        "the sum over all ranks, and one piece of it crosses in each outer group",
        probe_hierarchical,
        judge_hierarchical,
        uses=("hierarchical_all_reduce",),
        worlds=(4, 6),
        symmetric=False,
    ),
    Step(
        6,
        "where TP, PP and DP lie",
        "the bytes along each axis of four models, and their order",
        probe_placement,
        judge_placement,
        uses=("traffic", "axis_order"),
        worlds=(1,),
        joins=False,
    ),
    Step(
        7,
        "fewer bytes for the same gradient",
        "the mean over the ranks of a group, sent as bf16 and without waiting",
        probe_hook,
        judge_hook,
        uses=("bf16_hook",),
        worlds=(3,),
        symmetric=False,
        stuck=stuck_in_hook,
        crashes=(
            ("[Ff]uture", HINTS["not_a_future"]),
            ("dtype|BFloat16|Half", HINTS["stays_narrow"]),
        ),
    ),
    Step(
        8,
        "elastic rendezvous",
        "the six options, the same on all nodes, of three clusters",
        probe_elastic,
        judge_elastic,
        uses=("elastic_words",),
        worlds=(1,),
        joins=False,
    ),
]

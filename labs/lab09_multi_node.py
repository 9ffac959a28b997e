# %% [markdown]
# # Lab 09: Multi-node training
#
# Between two GPUs joined by NVLink lie hundreds of GB/s; between two nodes, about a tenth.
# Everything that is new about several machines follows from that drop: who starts the ranks and
# how they find each other, which collective crosses the slow link and with how many bytes,
# which kind of parallelism may lie across it, and what compression gains there. In this lab
# your Linux machine becomes a cluster of two nodes, each with a network of its own behind a
# link of 200 Mbit/s. You write the commands that start it, and what its ranks send; what
# crosses the link is counted by Linux and held to your formulas.
#
#     python labs/lab09_multi_node.py
#
# runs the finished lab. It is started without torchrun, for it starts torchrun itself, once on
# each node, through [`cluster.py`](../programs/labs/cluster.md), which lies beside it. To do it
# yourself:
#
#     python labs/start.py 09
#     python my_labs/lab09_multi_node.py
#     python labs/check.py my_labs/lab09_multi_node.py
#
# The first line writes your copy, with blanks, to `my_labs/`. The last one grades it, step by
# step, in a moment and without a cluster; `--step 2` grades one step, `--output` shows what
# failing ranks printed. Work in a clone of the repository, with its Python: `make test
# WHAT=labs` sets it up once.
#
# There are eight steps. Each has a text, one or more blanks for you to fill, and a check which
# prints what it proved. Your copy runs as far as the first blank and says in one line what
# belongs there; the long report below that line is torchrun's. Allow two to three hours. Labs
# 02 and 10 come first: you should know what DDP sends, and what TP and PP cut.
#
# ## What cluster.py builds
#
# A Linux **network namespace** has interfaces, addresses, routes and ports of its own. Put a
# process in a new one, join it to a bridge by a virtual cable (a veth pair), and for the
# programs in it that is a machine: they reach the others through `eth0` and in no other way.
# `tc` limits what leaves each end of the cable to 200 Mbit/s, in both directions. Try it:
#
#     python labs/cluster.py --nodes 3 -- hostname
#     python labs/cluster.py -- ip -brief address
#
# The nodes `node0` and `node1` have what makes real clusters interesting. `eth0` has the
# address that the others can reach (10.77.0.1, 10.77.0.2). `docker0` has one that is the same
# on every node. And `/etc/hosts` says of a node's own name 127.0.1.1, as Debian does it.
#
# It needs Linux with `ip` and `tc`, and root or user namespaces (Ubuntu refuses these since
# 23.10, most containers do: use `sudo` there, with the same Python). Where these are missing,
# the lab says so and starts both agents on localhost: the same commands and collectives, but
# no link is slow, and the bytes on it cannot be counted. Processor and memory are shared in any
# case. So read the ratios, not the times; and the ranks compute on the CPU, with gloo, on a
# machine with GPUs too. (On two real nodes start the file itself with torchrun on each: the
# steps from 3 to 7 run there as they are.)

# %%
import importlib.util
import ipaddress
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

NODES, RANKS = 2, 2  # in the emulated cluster: so many nodes, and on each so many ranks
MBITS = 200  # per second, of each link in each direction
MIB = 2**20


def say(text: str) -> None:
    """Print once, not once per rank."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def stop_kindly(kind: type[BaseException], error: BaseException, trace) -> None:
    """End on a blank or on a failed check with one sentence from one rank."""
    blank = issubclass(kind, NotImplementedError)  # if so, every rank stops at a blank
    if not (blank or issubclass(kind, AssertionError) or kind.__module__ == __name__):
        return sys.__excepthook__(kind, error, trace)
    own = [frame for frame in traceback.extract_tb(trace) if frame.filename == __file__]
    checks = [frame for frame in own if frame.name.startswith(("<module>", "main", "check_"))]
    line = getattr(error, "line", (own if blank else checks)[-1].lineno)
    if os.environ.get("RANK", "0") != "0":
        # rank 0 prints first, and its launcher then ends the other ranks
        time.sleep(60 if blank or os.environ.get("GROUP_RANK", "0") != "0" else 5)
    what = "a blank" if blank else "a check that failed"
    print(f"{Path(__file__).name}, line {line}, {what}: {error}", flush=True)


def stop_silently_on_interrupt(kind: type[BaseException], error: BaseException, trace) -> None:
    """Like stop_kindly, but after Ctrl-C the cluster speaks, and each rank is silent."""
    if not issubclass(kind, KeyboardInterrupt):
        stop_kindly(kind, error, trace)


def load_cluster() -> ModuleType:
    """cluster.py: beside this file, or in the labs folder that my_labs was written from."""
    here = Path(__file__).resolve().parent
    for folder in (here, here.parent / "labs", Path("labs").resolve()):
        if (folder / "cluster.py").is_file():
            spec = importlib.util.spec_from_file_location("cluster", folder / "cluster.py")
            module = importlib.util.module_from_spec(spec)
            sys.modules["cluster"] = module
            spec.loader.exec_module(module)
            return module
    sys.exit("cluster.py is not here: copy it from the labs folder to beside this file")


# this file runs first without ranks, to start the cluster, and then as each of its ranks
LAUNCHES = __name__ == "__main__" and "RANK" not in os.environ
IS_RANK = __name__ == "__main__" and "RANK" in os.environ

if __name__ == "__main__":
    sys.excepthook = stop_silently_on_interrupt

if LAUNCHES:
    cluster = load_cluster()
    plan = cluster.make_plan(NODES, rate=f"{MBITS}mbit", localhost="--localhost" in sys.argv)
    if plan.isolated:
        say(f"{NODES} nodes of {RANKS} ranks; between the nodes a link of {MBITS} Mbit/s")
    else:
        say(f"{NODES} nodes of {RANKS} ranks, all on localhost, where no link is slow")
        say(f"no namespaces: {plan.why}")
    first_port, second_port = plan.port(), plan.port()

# %% [markdown]
# The cells under `if LAUNCHES:` and `if IS_RANK:` run when you start the file. `check.py`
# imports the file and calls what you wrote, so keep code of your own inside functions.
#
# ## Step 1: the same job, from every node
#
# torchrun starts the ranks of *its own* machine. So it is started once on each, by hand, by
# Slurm or by Kubernetes, and each **agent**, which is what a running torchrun is called, must
# be told four things: how many nodes there are, which of them this one is, how many ranks to
# start here, and where to meet. In a **static rendezvous** all are in the command:
#
# | option | on all nodes |
# |---|---|
# | `--nnodes` | the same |
# | `--node-rank` | different: 0, 1, … |
# | `--nproc-per-node` | ranks of one node, not of all |
# | `--master-addr` | the same: a name of node 0 that all nodes can reach |
# | `--master-port` | the same: a free port on node 0 |
#
# The agent of node 0 opens a TCPStore at this port; every other agent and every rank connects
# to it. Rank $r$ of the job is then local rank `r % ranks` of node `r // ranks`.


# %%
def static_words(node: int, nodes: int, ranks: int, master: str, port: int) -> list[str]:
    """What stands between `torchrun` and the program's name, on this node.

    `ranks` is the number per node; `master` is the name of node 0.
    """
    # >>> solution 1: all five options of the table, each as one string, --name=value
    return [
        f"--nnodes={nodes}",
        f"--node-rank={node}",
        f"--nproc-per-node={ranks}",
        f"--master-addr={master}",
        f"--master-port={port}",
    ]
    # <<< solution


# %%
if LAUNCHES:
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    commands = [
        [*torchrun, *static_words(n, NODES, RANKS, plan.master, first_port), __file__]
        for n in range(NODES)
    ]
    assert len({" ".join(words) for words in commands}) == NODES, "the nodes must differ"
    say(f"step 1: {NODES} commands, one for each node, start {NODES * RANKS} ranks")

# %% [markdown]
# ## Step 2: which interface
#
# The agents meet at `node0`, whose name every node can look up. The ranks then open connections
# of their own, each to each, and for that a rank must tell the others an address of itself.
# gloo looks up the name of the machine it is on; on a Debian node that is 127.0.1.1, which
# means "yourself" to whoever reads it. So the group is never formed:
#
#     Gloo connectFullMesh failed with […] timed out connecting:
#     SO_ERROR: Connection refused, remote=[127.0.1.1]:42407
#
# (Seen on this cluster, without what you are about to write.) NCCL prefers names that begin
# with `ib`, and takes `lo` and `docker*` only if there is nothing else; a node with a fast and
# a slow Ethernet still leaves it a choice. Two variables settle it: **`GLOO_SOCKET_IFNAME`**
# and **`NCCL_SOCKET_IFNAME`**, each with the name of an interface.
#
# The right one is the one whose network contains the address of another node. If several do,
# Linux sends through the one with the longest prefix, and so should you.


# %%
def socket_variables(interfaces: dict[str, str], peer: str) -> dict[str, str]:
    """The two variables, for a node with these interfaces that must reach `peer`.

    `interfaces` has each name with its address and prefix: {"eth0": "10.77.0.1/24"}.
    Raises LookupError if none leads to `peer`.
    """
    # >>> solution 2: find the interface whose network holds peer; name it in both variables
    # hint: ipaddress.ip_interface("10.77.0.1/24").network has a prefixlen
    # hint: the operator `in` tests whether a network contains an ipaddress.ip_address
    networks = {name: ipaddress.ip_interface(text).network for name, text in interfaces.items()}
    leads = [name for name, net in networks.items() if ipaddress.ip_address(peer) in net]
    if not leads:
        raise LookupError(f"no interface leads to {peer}")
    name = max(leads, key=lambda name: networks[name].prefixlen)
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    # <<< solution


# %%
if LAUNCHES:
    peer = "10.77.0.2" if plan.isolated else "127.0.0.1"
    variables = socket_variables(plan.interfaces, peer)
    choice = variables["GLOO_SOCKET_IFNAME"]
    assert choice == ("eth0" if plan.isolated else "lo"), f"{choice} does not lead to {peer}"
    say(f"step 2: of {', '.join(plan.interfaces)}, {choice} leads to {peer}")
    os.environ.update(variables, TORCH_CPP_LOG_LEVEL="ERROR")  # the nodes inherit both
    status = cluster.run(plan, commands)  # all steps from 3 to 7, on every rank
    if status:
        sys.exit(status)

# %% [markdown]
# ## Step 3: groups along the wires
#
# From here on you are a rank. Two kinds of groups follow the hardware: the **inner** group is
# the ranks of one node; an **outer** group has one rank from each node, those with the same
# local rank. Inner groups keep to the fast links, every outer group crosses the slow one.
#
# `dist.new_group` is a collective of *all* ranks: each calls it for every group, in the same
# order, and keeps the two that it is in.


# %%
def make_groups(nodes: int, ranks: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The inner and the outer group of this rank, of `nodes` nodes with `ranks` ranks each."""
    # >>> solution 3: every rank makes all inner groups, then all outer ones; return its own
    # hint: divide dist.get_rank() to get the node of this rank; the remainder is its local rank
    rank = dist.get_rank()
    inner = [dist.new_group([n * ranks + r for r in range(ranks)]) for n in range(nodes)]
    outer = [dist.new_group([n * ranks + r for n in range(nodes)]) for r in range(ranks)]
    return inner[rank // ranks], outer[rank % ranks]
    # <<< solution


# %%
if IS_RANK:
    nodes = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if nodes < 2 or ranks < 2:
        if os.environ["RANK"] != "0":
            time.sleep(60)  # one rank says it; torchrun then ends the others
        sys.exit("this lab needs two nodes with two ranks or more: python lab09_multi_node.py")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rank, world = dist.get_rank(), dist.get_world_size()
    inner, outer = make_groups(nodes, ranks)

    mine = [dist.get_process_group_ranks(group) for group in (inner, outer)]
    everyone = [None] * world
    dist.all_gather_object(everyone, mine)
    of_nodes, across = (sorted({tuple(pair[i]) for pair in everyone}) for i in (0, 1))
    assert len(of_nodes) == nodes and len(across) == ranks, "one inner group for each node"
    where = [None] * world
    dist.all_gather_object(where, os.environ["GROUP_RANK"])
    for group in of_nodes:
        assert len({where[r] for r in group}) == 1, f"the ranks {group} are not on one node"
    say(f"step 3: {world} ranks met: inner groups {of_nodes}, outer groups {across}")

# %% [markdown]
# ## Step 4: how many bytes cross
#
# A ring all-reduce of $S$ bytes over $N$ ranks has each rank send $2\,\frac{N-1}{N}\,S$ to
# its neighbour (chapter 01). Lay the ring through $n$ nodes of $k$ ranks in the order of the
# ranks, $N = nk$. Of the $k$ ranks of a node, $k - 1$ have their neighbour on the same node,
# and one has it on the next. So through the cable of each node go
#
# $$2\,\frac{nk - 1}{nk}\,S$$
#
# and, since all ranks wait for the slowest hop, this over the link's bandwidth is the time of
# the whole. The fast links inside do not help: they wait.
#
# The **hierarchical** all-reduce uses both kinds of groups: reduce-scatter inside the node,
# so that each of the $k$ ranks holds the node's sum of one $k$-th; all-reduce of that piece in
# its outer group; all-gather inside. What crosses is $k$ all-reduces over $n$ ranks, each of
# $S/k$ bytes. Write down both.


# %%
def flat_crossing(size: float, nodes: int, ranks: int) -> float:
    """Bytes that leave each node in a ring all-reduce of `size` bytes over all ranks."""
    # >>> solution 4: what one rank of the ring sends
    return 2 * (nodes * ranks - 1) / (nodes * ranks) * size
    # <<< solution


def hierarchical_crossing(size: float, nodes: int, ranks: int) -> float:
    """Bytes that leave each node if only the outer groups cross, all of them together."""
    # >>> solution 4: so many rings over the nodes, each of a piece
    return ranks * 2 * (nodes - 1) / nodes * (size / ranks)
    # <<< solution


# %% [markdown]
# At two nodes the saving is largest where it is needed least, so look at the formulas before
# you go on. With $n = 2$ and many ranks per node, flat sends nearly $2S$ and hierarchical $S$:
# half. With many nodes both tend to $2S$. What remains then is latency, $2(n-1)$ messages
# across in place of $2(nk-1)$, and that $k$ network cards work at once where a node has one
# for each GPU, while the flat ring passes through one. (NCCL therefore lays several rings,
# each leaving the node by another card.)
#
# Now Linux counts. `watched` reads the counter of bytes sent through `eth0`, from
# `/proc/net/dev`, before and after; barriers keep others from sending meanwhile.


# %%
LINK = os.environ.get("CLUSTER_LINK", "")


def sent_by_node() -> int:
    """Bytes that this node has sent through its link, as the kernel counts them."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == LINK:
            return int(numbers.split()[8])
    return 0


class Watched:
    """How long something took, and what left a node meanwhile, the one that sent most."""

    seconds, crossed = 0.0, 0


@contextmanager
def watched() -> Iterator[Watched]:
    """Measure what runs inside, on all ranks at once."""
    result = Watched()
    dist.barrier()
    before = sent_by_node() if LINK else 0
    dist.barrier()
    start = time.perf_counter()
    yield result
    result.seconds = time.perf_counter() - start
    dist.barrier()
    sent = torch.tensor(sent_by_node() - before if LINK else 0)
    dist.barrier()
    dist.all_reduce(sent, op=dist.ReduceOp.MAX)
    result.crossed = sent.item()


def hold(seen: Watched, formula: float, what: str) -> str:
    """Fail unless as many bytes crossed as the formula says; say both.

    Headers and acknowledgements, the barriers and the store's messages are allowed for.
    """
    if not LINK:
        return f"{formula / MIB:.2f} MiB by formula (not counted here)"
    counted = f"{formula / MIB:.2f} MiB by formula, ≈{seen.crossed / MIB:.2f} MiB on {LINK}"
    low, high = 0.97 * formula - 32e3, 1.1 * formula + 128e3
    assert low <= seen.crossed <= high, f"{what}: {counted}"
    return counted


if IS_RANK:

    def check_crossing() -> tuple[torch.Tensor, Watched]:
        numbers = torch.arange(MIB, dtype=torch.float32) % 1000 * (rank + 1)
        for group in (inner, None):
            dist.all_reduce(torch.ones(1000), group=group)  # connections are made now
        reduced = numbers.clone()
        with watched() as inside:
            dist.all_reduce(reduced, group=inner)
        flat = numbers.clone()
        with watched() as seen:
            dist.all_reduce(flat)
        assert not LINK or inside.crossed < 64e3, "an inner group must not cross the link"
        formula = flat_crossing(flat.nbytes, nodes, ranks)
        counted = hold(seen, formula, "flat all-reduce")
        say(
            f"step 4: all-reduce of {flat.nbytes / MIB:.0f} MiB: inside a node"
            f" ≈{inside.seconds * 1e3:.0f} ms, over all ranks ≈{seen.seconds * 1e3:.0f} ms"
        )
        least = formula * 8 / (MBITS * 1e6)
        assert not LINK or seen.seconds > least / 2, "the link is faster than it should be"
        say(f"step 4: out of each node {counted}: {least * 1e3:.0f} ms at {MBITS} Mbit/s")
        return flat, seen

    flat, flat_seen = check_crossing()

# %% [markdown]
# ## Step 5: the hierarchical all-reduce
#
# Three collectives, each in the right group. The pieces are views of the tensor: what the
# all-gather writes into them is the result.


# %%
def hierarchical_all_reduce(
    tensor: torch.Tensor, inner: dist.ProcessGroup, outer: dist.ProcessGroup
) -> None:
    """Sum a flat tensor over all ranks, in place; its length divides by the inner group's."""
    # >>> solution 5: reduce-scatter inside, all-reduce your piece across, all-gather inside
    # hint: tensor.chunk(number) returns pieces that are views of the tensor
    # hint: dist.reduce_scatter and dist.all_gather need a list of pieces, one for each rank
    pieces = list(tensor.chunk(dist.get_world_size(inner)))
    mine = torch.empty_like(pieces[0])
    dist.reduce_scatter(mine, pieces, group=inner)
    dist.all_reduce(mine, group=outer)
    dist.all_gather(pieces, mine, group=inner)
    # <<< solution


# %%
if IS_RANK:

    def check_hierarchical() -> None:
        ours = torch.arange(MIB, dtype=torch.float32) % 1000 * (rank + 1)
        hierarchical_all_reduce(torch.ones(1000 * ranks), inner, outer)  # connections
        with watched() as seen:
            hierarchical_all_reduce(ours, inner, outer)
        assert torch.equal(ours, flat), "it differs from dist.all_reduce over all ranks"
        formula = hierarchical_crossing(ours.nbytes, nodes, ranks)
        counted = hold(seen, formula, "hierarchical all-reduce")
        fewer = flat_crossing(ours.nbytes, nodes, ranks) / formula
        say(f"step 5: hierarchical: equal to flat; out of each node {counted}")
        faster = f", ≈{flat_seen.seconds / seen.seconds:.1f} times as fast" if LINK else ""
        say(f"step 5: {fewer:.2f} times fewer bytes than flat{faster}")

    check_hierarchical()

# %% [markdown]
# ## Step 6: where TP, PP and DP lie
#
# The axes of a parallel model differ in what they send. Count, for one step, the bytes that
# one rank sends along each; all-reduces are rings, $w$ is the bytes of a number, and
# $T$ the tokens which one replica works on in the step.
#
# - **TP** ($t$ ranks): each of the layers that the rank holds, $L/p$ of them, all-reduces
#   an activation of $T \cdot h$ numbers four times: after attention and after the MLP, in
#   forward and in backward.
# - **PP** ($p$ stages): a stage sends its activation of $T \cdot h$ numbers to the next
#   stage, and a gradient of the same size to the one before. A stage in the middle does both,
#   the first and the last do one.
# - **DP** ($d$ replicas): each rank all-reduces the gradients of its parameters. A transformer
#   layer has $12 h^2$ of them, and a rank holds $1/(tp)$ of all layers.
#
# A layout numbers the ranks along its axes, the first axis slowest. So neighbouring ranks, on
# one node, differ in the *last* axis, and the *first* is the one that crosses nodes. Therefore
# `axis_order` is the order of the traffic, the least first.


# %%
def traffic(
    layers: int, hidden: int, tokens: int, width: int, tp: int, pp: int, dp: int
) -> dict[str, float]:
    """Bytes per step that a rank sends along each axis: {"tp": …, "pp": …, "dp": …}.

    For "pp": the rank that sends most.
    """
    # >>> solution 6: bytes along tp, pp and dp; an axis of one rank sends nothing
    # hint: how many times does a stage send if there are one, two, or more stages?
    activation = tokens * hidden * width
    gradients = 12 * hidden**2 * layers / (tp * pp) * width
    return {
        "tp": 4 * layers / pp * 2 * (tp - 1) / tp * activation,
        "pp": min(pp - 1, 2) * activation,
        "dp": 2 * (dp - 1) / dp * gradients,
    }
    # <<< solution


def axis_order(sent: dict[str, float]) -> list[str]:
    """The axes from the one that may cross nodes to the one that must stay inside."""
    # >>> solution 6: sort by traffic
    return sorted(sent, key=sent.get)
    # <<< solution


# %% [markdown]
# The check takes two axes at a time, since four ranks have room for two, and sends what a step
# sends, without its arithmetic: first with one axis across the nodes, then with the other. What
# crosses must be `ranks` times your number for the outer axis. Then it asks for the order in a
# large model: 70 billion parameters, 16,384 tokens for each replica, bf16.


# %%
LAYERS, WIDTH_OF_MODEL, TOKENS = 4, 128, 512


def rehearse(axis: str, sizes: dict[str, int], group: dist.ProcessGroup) -> None:
    """Send along one axis, in `group`, what one training step sends along it."""
    activation = torch.ones(TOKENS, WIDTH_OF_MODEL)
    if axis == "tp":
        for _ in range(4 * LAYERS // sizes["pp"]):
            dist.all_reduce(activation, group=group)
    elif axis == "dp":
        parameters = 12 * WIDTH_OF_MODEL**2 * LAYERS // (sizes["tp"] * sizes["pp"])
        dist.all_reduce(torch.ones(parameters), group=group)
    else:
        stage, stages = dist.get_rank(group), dist.get_world_size(group)
        if stage:
            dist.recv(activation, group=group, group_src=stage - 1)
        if stage + 1 < stages:
            dist.send(activation, group=group, group_dst=stage + 1)
            dist.recv(activation, group=group, group_src=stage + 1)
        if stage:
            dist.send(activation, group=group, group_dst=stage - 1)


if IS_RANK:

    def check_placement() -> None:
        for pair in (("dp", "tp"), ("pp", "tp"), ("pp", "dp")):
            took = {}
            for crossing in pair:
                staying = pair[1 - pair.index(crossing)]
                sizes = {"tp": 1, "pp": 1, "dp": 1} | {crossing: nodes, staying: ranks}
                sent = traffic(LAYERS, WIDTH_OF_MODEL, TOKENS, 4, **sizes)
                with watched() as seen:
                    rehearse(crossing, sizes, outer)
                    rehearse(staying, sizes, inner)
                took[crossing] = seen.seconds
                what = f"{crossing} across, {staying} inside"
                say(f"step 6: {what}: {hold(seen, ranks * sent[crossing], what)}")
            first = axis_order({axis: sent[axis] for axis in pair})[0]
            assert first == pair[0], f"of {pair}, {pair[0]} sends less and may cross"
            faster = took[pair[1]] / took[pair[0]]
            faster = f": ≈{faster:.1f} times as fast as the other way round" if LINK else ""
            say(f"step 6: so {pair[0]} across and {pair[1]} inside{faster}")
        large = traffic(80, 8192, 16_384, 2, tp=8, pp=4, dp=16)
        in_gib = ", ".join(f"{axis} {large[axis] / 2**30:.2f}" for axis in axis_order(large))
        say(f"step 6: 70 billion parameters, tp 8, pp 4, dp 16: GiB per rank: {in_gib}")

    check_placement()

# %% [markdown]
# So the rule that everybody repeats, TP inside a node, PP and DP across, is the order of three
# numbers, and it turns where they do: raise `tokens` for one replica, and PP overtakes DP. One
# more thing decides between those two. DP sends once per step and can overlap with backward
# (lab 02); what PP sends, the next stage is waiting for.
#
# ## Step 7: fewer bytes for the same gradient
#
# If the link is the limit, send less. DDP lets a **communication hook** carry each bucket of
# gradients: it gets a group and a bucket, starts what it likes, and returns a *future* of the
# averaged bucket. Yours sends bf16: half the bytes, an error of at most one part in 256
# at each rounding, and unlike fp16 the range of fp32. The buckets stay fp32 at both ends.
#
# The hook must not wait. DDP calls it while backward still runs, and waits for the futures at
# the end.


# %%
def bf16_hook(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the group, sent as bf16; the future has the bucket's dtype."""
    # >>> solution 7: narrow, all-reduce asynchronously, and then widen and divide
    # hint: bucket.buffer() is the flat tensor
    # hint: future.then(f) returns a future of f(future); here future.value() is a list
    narrow = bucket.buffer().to(torch.bfloat16)
    work = dist.all_reduce(narrow, group=group, async_op=True)

    def widen(future: torch.futures.Future) -> torch.Tensor:
        return future.value()[0].to(bucket.buffer().dtype) / dist.get_world_size(group)

    return work.get_future().then(widen)
    # <<< solution


# %% [markdown]
# Beside it stands **PowerSGD** (Vogels, Karimireddy and Jaggi, 2019), which torch has as a
# hook: each gradient matrix is sent as two thin factors of rank 2. That is a hundred times
# less, and no longer the same gradient; what it left out is kept and added to the next one
# (error feedback), and so it arrives later. The check shows both numbers for each: bytes, and
# how far the gradient is from the exact one.


# %%
if IS_RANK:

    def check_compression() -> None:
        def backward(ddp: nn.Module) -> None:
            torch.manual_seed(100 + rank)  # each rank has rows of its own
            ddp.zero_grad()
            ddp(torch.randn(8, 1024)).square().mean().backward()

        def gradient_of(ddp: nn.Module) -> torch.Tensor:
            return torch.cat([p.grad.flatten() for p in ddp.parameters()])

        exact = plain = None
        for name in ("fp32", "bf16", "PowerSGD of rank 2"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1024))
            # one bucket: PowerSGD's callbacks wait for all-reduces, and gloo has two threads
            ddp = DistributedDataParallel(model, bucket_cap_mb=16)
            if name == "bf16":
                ddp.register_comm_hook(dist.group.WORLD, bf16_hook)
            elif exact is not None:
                state = powerSGD_hook.PowerSGDState(
                    dist.group.WORLD, matrix_approximation_rank=2, start_powerSGD_iter=2
                )
                ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            for _ in range(1 if exact is None else 3):
                backward(ddp)  # buckets are built anew after the first; PowerSGD begins late
            with watched() as seen:
                backward(ddp)
            gradient = gradient_of(ddp)
            if exact is None:
                exact, plain = gradient.clone(), seen
            error = ((gradient - exact).norm() / exact.norm()).item()
            if name == "bf16":
                assert error < 2**-7, f"the gradient in bf16 is {error:.3f} from the exact one"
            size = gradient.nbytes / (2 if name == "bf16" else 1)
            if name == "PowerSGD of rank 2":
                assert seen.crossed < gradient.nbytes / 10, "PowerSGD did not compress"
                counted = f"≈{seen.crossed / MIB:.2f} MiB on {LINK}" if LINK else "not counted"
            else:
                formula = flat_crossing(size, nodes, ranks)
                counted = hold(seen, formula, name)
            took = f"backward ≈{seen.seconds * 1e3:.0f} ms"
            if seen is not plain:
                took = f"≈{plain.seconds / seen.seconds:.1f} times as fast, error ≈{error:.4f}"
            say(f"step 7: {name}: out of each node {counted}; {took}")

    check_compression()
    dist.barrier()
    dist.destroy_process_group()

# %% [markdown]
# When does it pay? Narrowing costs two passes over the bucket; the link saves half of its time.
# On 200 Mbit/s any compression pays. Where the plain all-reduce already hides behind backward,
# you pay in accuracy for nothing. Compute first what step 4's formula says for your link, and
# compare that with the time of backward.
#
# ## Step 8: elastic rendezvous
#
# Static rendezvous needs to know every node beforehand, and a job that has lost one is over.
# In an **elastic rendezvous** the nodes are not numbered. All agents get the *same* command,
# and each asks a store for a place; c10d, torch's own, keeps this store in one of the agents.
# The options:
#
# | option | value |
# |---|---|
# | `--nnodes` | `MIN:MAX`; begins at once with MAX nodes, after half a minute with MIN |
# | `--nproc-per-node` | as before |
# | `--max-restarts` | how often the ranks may start again after one failed, with who is left |
# | `--rdzv-backend` | `c10d` |
# | `--rdzv-endpoint` | `HOST:PORT` of the store |
# | `--rdzv-id` | the name of the job: agents with one name at one store belong together |
#
# Who keeps the store? Each agent compares HOST with its own name and the addresses which this
# name leads to. Give it `node0`, and the agent on node0 knows that it is meant. Give it
# 10.77.0.1, and it does not, since on a Debian node its name leads to 127.0.1.1. Then everybody
# connects and nobody listens, for a minute. (`--rdzv-conf=is_host=1` on that node, `is_host=0`
# on the others, settles it there, with `--local-addr` if names do not lead anywhere at all.)
#
# Ranks are given anew in every round, so a program under an elastic agent must not remember its
# rank across a restart, and must load a checkpoint when it begins.


# %%
def elastic_words(nodes: int, ranks: int, master: str, port: int, job: str) -> list[str]:
    """What stands between `torchrun` and the program's name, the same on every node.

    The job begins with 1 to `nodes` nodes, and may restart its ranks 3 times.
    """
    # >>> solution 8: the six options of the table, each as one string, --name=value
    return [
        f"--nnodes=1:{nodes}",
        f"--nproc-per-node={ranks}",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={master}:{port}",
        f"--rdzv-id={job}",
    ]
    # <<< solution


# %% [markdown]
# The ranks of this last job are no Python at all: agents start any program, and tell it who it
# is by its environment.

# %%
if LAUNCHES:

    def check_elastic() -> None:
        words = elastic_words(
            NODES, RANKS, plan.master, second_port, job=f"lab09-{os.getpid()}"
        )
        tell = "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE"
        command = [*torchrun, *words, "--no-python", "sh", "-c", tell]
        with tempfile.TemporaryFile("w+") as said:
            status = cluster.run(plan, [command] * NODES, stdout=said)
            said.seek(0)
            lines = sorted(said.read().splitlines())
        assert status == 0, f"the agents ended with status {status}"
        total = NODES * RANKS
        told = [f"{r} of {total}, {r % RANKS} of {RANKS}" for r in range(total)]
        assert lines == told, f"the ranks were told: {lines}"
        say(f"step 8: one command for all nodes: ranks {', '.join(line[0] for line in lines)}")

    check_elastic()
    left = cluster.clean()
    assert not left, f"left behind: {left}"
    say("the cluster is gone, and nothing is left of it")

# %% [markdown]
# ## Where to go from here
#
# - Four nodes: set `NODES`. Predict the lines of steps 4 and 5 first: which saving shrinks?
# - A link of 50 Mbit/s, of 2 Gbit/s: set `MBITS`. Where does bf16 stop paying on your machine?
# - Put `hierarchical_all_reduce` into a communication hook of DDP, then send bf16 in its outer
#   part alone: the slow link gets a third of the flat fp32 bytes, and the sums inside a node
#   stay exact.
# - Start `python labs/cluster.py -- sleep 100` and kill it, with Ctrl-C, then with `kill -9`.
#   `ip link` and `ps` should show nothing of it. What kept that promise?
# - With the elastic words, kill the agent of node 1 from another terminal. What does node 0 do,
#   after how long, and what does `--rdzv-conf=last_call_timeout=5` change? Then read
#   [how a job goes on without a node](../clusters/failures.md#timed-out-a-node-is-cut-off).
# - The same commands under Slurm: `--node-rank=$SLURM_NODEID`, and the first name of
#   `scontrol show hostnames` for the master. [Multi-node
#   launch](../clusters/from_one_to_many.md) has the whole script, and the other engines.

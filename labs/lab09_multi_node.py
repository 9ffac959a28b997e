# %% [markdown]
# # Lab 09: Multi-node training
#
# On one machine, your job runs with torchrun. Now you want to use a second machine. But between
# two GPUs that are connected by NVLink you have hundreds of GB/s, and between two nodes you
# have about a tenth of that. So three questions are new. How do you start ranks on several
# machines, and how do they find each other? How many bytes does each collective send through
# the slow link? And which kind of parallelism may use this link?
#
# In this lab, your Linux machine becomes a cluster of two nodes. Each node has its own network,
# and a link of 200 Mbit/s connects the nodes. You write the commands that start a job on this
# cluster, and you write what its ranks send. Linux counts the bytes that leave each node, and
# the lab compares these numbers with your formulas.
#
# | step | what you write |
# |---|---|
# | 1 | `static_words` returns the options that start torchrun on each node. |
# | 2 | `socket_variables` chooses the network interface that leads to the other nodes. |
# | 3 | `make_groups` creates process groups inside the nodes and across the nodes. |
# | 4 | `flat_crossing` and `hierarchical_crossing` predict the bytes that leave a node. |
# | 5 | `hierarchical_all_reduce` sends fewer bytes between the nodes. |
# | 6 | `traffic` and `axis_order` decide whether TP, PP or DP uses the slow link. |
# | 7 | `bf16_hook` sends the gradients of DDP with half as many bytes. |
# | 8 | `elastic_words` starts a job whose number of nodes may change. |
#
# ## How to work on this lab
#
# You need a clone of the repository and its Python environment. The command `make test
# WHAT=labs` creates the environment, and you need it only once. The command `source
# .venv/bin/activate` makes it active in your shell. You can then run the finished lab:
#
#     python labs/lab09_multi_node.py
#
# Do not use torchrun for this. The lab starts torchrun itself, once on each node, with the help
# of [`cluster.py`](../programs/labs/cluster.md) in the same folder. To solve the lab yourself,
# create a copy with blanks, run the copy, and have it graded:
#
#     python labs/start.py 09                             # creates my_labs/lab09_...
#     python my_labs/lab09_multi_node.py
#     python labs/check.py my_labs/lab09_multi_node.py    # grades it
#
# Each of the eight steps has a text, one or more blanks for you to fill, and a check. The check
# prints what it has shown. Your copy runs up to the first blank, and there it prints one line
# that says what is missing. In steps 3 to 7, a long report by torchrun follows this line, and
# you can ignore it. `check.py` needs no cluster and grades each step separately, with finished
# versions of the other steps, so you can solve the steps in any order. With `--step 2` it
# grades only step 2, and with `--output` it shows what failing ranks have printed.
#
# Plan two to three hours for the lab. Do labs 02 and 10 before, because you should know what
# DDP sends, and how TP and PP divide a model.
#
# ## The cluster on your machine
#
# A Linux **network namespace** has its own interfaces, addresses, routes and ports. Suppose
# that you start a process in a new namespace and connect the namespace to a bridge by a virtual
# cable (a veth pair). To the programs in it, this namespace looks like a separate machine: they
# reach other machines only through the interface `eth0`. The command `tc` limits each link to
# 200 Mbit/s in both directions. Try it:
#
#     python labs/cluster.py --nodes 3 -- hostname
#     python labs/cluster.py -- ip -brief address
#
# On a real node, a program can easily choose a wrong address, and so it can on `node0` and
# `node1`. The interface `eth0` has the address that the other nodes can reach (10.77.0.1 and
# 10.77.0.2). A second interface, `docker0`, has the same address on every node. And on each
# node, its own name has the address 127.0.1.1 in `/etc/hosts`, as on Debian.
#
# You need Linux with the programs `ip` and `tc`, and either root or user namespaces. Ubuntu has
# restricted user namespaces since version 23.10, and most containers do not allow them. Use
# `sudo` in these cases, with the same Python. If no namespace can be created, the lab prints
# the reason and starts both agents on localhost. The commands and the collectives are then the
# same, but no link is slow, and the lab cannot count bytes.
#
# The nodes share the processor and the memory of your machine, so look at the ratios of times
# and not at the times. The ranks compute on the CPU and use gloo, even if you have GPUs. If you
# have two real nodes, you can start this file with torchrun on each of them. Steps 3 to 7 then
# run there.

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
import torch.distributed.nn  # import it before init: afterwards it would keep the group alive
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

NODES, RANKS = 2, 2  # of the emulated cluster; RANKS is the number of ranks on each node
MBITS = 200  # the rate of each link in Mbit/s, in each direction
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
    """Do the same as stop_kindly, but print nothing after Ctrl-C."""
    if not issubclass(kind, KeyboardInterrupt):
        stop_kindly(kind, error, trace)


def load_cluster() -> ModuleType:
    """Load cluster.py from the folder of this file, or from the folder labs."""
    here = Path(__file__).resolve().parent
    for folder in (here, here.parent / "labs", Path("labs").resolve()):
        if (folder / "cluster.py").is_file():
            spec = importlib.util.spec_from_file_location("cluster", folder / "cluster.py")
            module = importlib.util.module_from_spec(spec)
            sys.modules["cluster"] = module
            spec.loader.exec_module(module)
            return module
    sys.exit(f"cluster.py is missing: copy it from the folder labs to {here}")


# This file runs first as one process that starts the cluster, and then once as each rank.
LAUNCHES = __name__ == "__main__" and "RANK" not in os.environ
IS_RANK = __name__ == "__main__" and "RANK" in os.environ

if __name__ == "__main__":
    sys.excepthook = stop_silently_on_interrupt

if LAUNCHES:
    cluster = load_cluster()
    plan = cluster.make_plan(NODES, rate=f"{MBITS}mbit", localhost="--localhost" in sys.argv)
    if plan.isolated:
        say(f"{NODES} nodes with {RANKS} ranks each; the link of a node has {MBITS} Mbit/s")
    else:
        say(f"{NODES} nodes with {RANKS} ranks each, all on localhost, where no link is slow")
        say(f"no namespaces: {plan.why}")
    first_port, second_port = plan.port(), plan.port()

# %% [markdown]
# Cells that begin with `if LAUNCHES:` or `if IS_RANK:` run only when you start the file.
# `check.py` imports the file and calls the functions that you wrote. If you add code of your
# own, put it inside a function or inside such a cell.
#
# ## Step 1: the same job, from every node
#
# torchrun can start ranks only on *its own* machine. So you must start it once on each machine:
# by hand, by Slurm or by Kubernetes. A running torchrun is called an **agent**. Each agent
# needs four facts: the number of nodes, the number of its own node, the number of ranks that it
# should start, and the place where all ranks meet. In a **static rendezvous**, all of them are
# options:
#
# | option | on all nodes |
# |---|---|
# | `--nnodes` | the same |
# | `--node-rank` | different: 0, 1, … |
# | `--nproc-per-node` | the same: the number of ranks on one node |
# | `--master-addr` | the same: a name of node 0 that all nodes can reach |
# | `--master-port` | the same: a free port on node 0 |
#
# The agent of node 0 opens a TCPStore at this port, and all other agents and all ranks connect
# to it. If each node has `ranks` ranks, then rank `r` of the job runs on node `r // ranks`, and
# its local rank is `r % ranks`.


# %%
def static_words(node: int, nodes: int, ranks: int, master: str, port: int) -> list[str]:
    """Return the options of torchrun for this node, as a list of strings.

    `ranks` is the number of ranks per node, and `master` is the name of node 0.
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
    assert len({" ".join(words) for words in commands}) == NODES, (
        "two nodes have the same command, but their --node-rank must differ"
    )
    say(f"step 1: {NODES} commands, one for each node, start {NODES * RANKS} ranks")

# %% [markdown]
# ## Step 2: which interface
#
# Now the agents can meet at `node0`, because every node can look up this name. But the ranks
# then open connections of their own, from each rank to each other rank. For this, a rank must
# send one of its addresses to the others. gloo looks up the name of its own machine. On a
# Debian node, the result is 127.0.1.1, and on every machine this address means "the machine
# itself". So the other ranks cannot reach it, and the process group is never created. On this
# cluster, we got the following error without the function that you are about to write:
#
#     Gloo connectFullMesh failed with […] timed out connecting:
#     SO_ERROR: Connection refused, remote=[127.0.1.1]:42407
#
# NCCL chooses differently. It prefers interfaces whose names begin with `ib`, and it uses `lo`
# and `docker*` only if there is nothing else. But if a node has a fast and a slow Ethernet,
# NCCL may still choose the wrong one. Two variables set the interface: **`GLOO_SOCKET_IFNAME`**
# and **`NCCL_SOCKET_IFNAME`**. Their value is the name of an interface.
#
# Which interface is right? It is the one whose network contains the address of the other node.
# If several networks contain it, Linux uses the network with the longest prefix, and your
# function should do the same.


# %%
def socket_variables(interfaces: dict[str, str], peer: str) -> dict[str, str]:
    """Return both variables for a node that must reach the address `peer`.

    `interfaces` maps names to addresses with a prefix: {"eth0": "10.77.0.1/24"}.
    Raises LookupError if no network contains `peer`.
    """
    # >>> solution 2: find the interface whose network contains peer; set both variables
    # hint: ipaddress.ip_interface("10.77.0.1/24").network has an attribute prefixlen
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
# From here to step 7, your code runs on every rank. To send few bytes through the slow link, a
# rank must distinguish the ranks on its own node from the others. So you create two kinds of
# groups. An **inner group** contains the ranks of one node and uses only fast links. An **outer
# group** contains one rank of each node, namely the ranks with the same local rank, and uses
# the slow link.
#
# `dist.new_group` is a collective over *all* ranks. Every rank must call it for every group and
# in the same order, and then keep the two groups to which it belongs.


# %%
def make_groups(nodes: int, ranks: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the inner and the outer group of this rank; each node has `ranks` ranks."""
    # >>> solution 3: create all inner groups, then all outer groups; return two
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
            time.sleep(60)  # rank 0 prints the message, and torchrun then ends the others
        sys.exit("this lab needs at least 2 nodes with 2 ranks: python lab09_multi_node.py")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rank, world = dist.get_rank(), dist.get_world_size()
    inner, outer = make_groups(nodes, ranks)

    mine = [dist.get_process_group_ranks(group) for group in (inner, outer)]
    everyone = [None] * world
    dist.all_gather_object(everyone, mine)
    of_nodes, across = (sorted({tuple(pair[i]) for pair in everyone}) for i in (0, 1))
    assert len(of_nodes) == nodes and len(across) == ranks, (
        f"there must be {nodes} inner groups and {ranks} outer groups: {of_nodes}, {across}"
    )
    where = [None] * world
    dist.all_gather_object(where, os.environ["GROUP_RANK"])
    for group in of_nodes:
        assert len({where[r] for r in group}) == 1, (
            f"inner group {group} has ranks of several nodes"
        )
    say(f"step 3: {world} ranks have met: inner groups {of_nodes}, outer groups {across}")

# %% [markdown]
# ## Step 4: how many bytes cross
#
# Before you change what is sent, find out how much leaves each node. In a ring all-reduce of
# $S$ bytes over $N$ ranks, each rank sends $2\,\frac{N-1}{N}\,S$ bytes to its neighbour, as
# chapter 01 shows. Now let the ring go through $n$ nodes with $k$ ranks each, in the order of
# the ranks, so that $N = nk$. On each node, $k - 1$ ranks have their neighbour on the same
# node, and one rank has its neighbour on the next node. So this many bytes leave each node:
#
# $$2\,\frac{nk - 1}{nk}\,S$$
#
# All ranks wait for the slowest link, so the whole all-reduce needs at least the time of these
# bytes on this link. The faster links inside the nodes do not help.
#
# The **hierarchical all-reduce** uses both kinds of groups, in three phases:
#
# 1. A reduce-scatter inside the node. Afterwards, each of the $k$ ranks has one piece of $S/k$
#    bytes, with the sum over its node.
# 2. An all-reduce of this piece in the outer group.
# 3. An all-gather inside the node.
#
# Only phase 2 uses the slow link, with $k$ all-reduces of $S/k$ bytes over $n$ ranks each.
# Write a function for each of the two all-reduces.


# %%
def flat_crossing(size: float, nodes: int, ranks: int) -> float:
    """Return the bytes that leave each node in a ring all-reduce over all ranks."""
    # >>> solution 4: the bytes that one rank of the ring sends
    return 2 * (nodes * ranks - 1) / (nodes * ranks) * size
    # <<< solution


def hierarchical_crossing(size: float, nodes: int, ranks: int) -> float:
    """Return the bytes that leave each node in all outer groups together."""
    # >>> solution 4: add up the rings over the nodes; each ring reduces one piece
    return ranks * 2 * (nodes - 1) / nodes * (size / ranks)
    # <<< solution


# %% [markdown]
# Look at the two formulas before you continue. With two nodes and many ranks per node, the flat
# all-reduce sends nearly $2S$ bytes from each node, and the hierarchical all-reduce sends $S$.
# This is half. With many nodes, both formulas approach $2S$, so the hierarchical all-reduce
# saves almost no bytes. It then has two other advantages. A ring over the nodes needs $2(n-1)$
# messages one after the other, instead of $2(nk-1)$. And if a node has one network card for
# each GPU, all $k$ cards work at the same time, while a single flat ring uses only one of them.
# (This is why NCCL builds several rings, and each ring leaves the node through a different
# card.)
#
# Now Linux counts. The context manager `watched` reads from `/proc/net/dev` how many bytes were
# sent through `eth0`, before and after. Barriers make sure that nothing else is sent in
# between.


# %%
LINK = os.environ.get("CLUSTER_LINK", "")


def sent_by_node() -> int:
    """Return the bytes that this node has sent through its link, as Linux counts them."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == LINK:
            return int(numbers.split()[8])
    return 0


class Watched:
    """A duration in seconds, and the bytes that left the node that sent most."""

    seconds, crossed = 0.0, 0


@contextmanager
def watched() -> Iterator[Watched]:
    """Measure the code in the `with` block, on all ranks together."""
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


def compare(seen: Watched, formula: float, what: str) -> str:
    """Raise an error if the counted bytes differ from the formula; return a text with both.

    The limits allow for headers, acknowledgements, barriers and messages of the store.
    """
    if not LINK:
        return f"{formula / MIB:.2f} MiB by formula (not counted here)"
    counted = f"{formula / MIB:.2f} MiB by formula, ≈{seen.crossed / MIB:.2f} MiB on {LINK}"
    low, high = 0.97 * formula - 32e3, 1.1 * formula + 128e3
    assert low <= seen.crossed <= high, f"{what}: the counted bytes differ: {counted}"
    return counted


if IS_RANK:

    def check_crossing() -> tuple[torch.Tensor, Watched]:
        numbers = torch.arange(MIB, dtype=torch.float32) % 1000 * (rank + 1)
        for group in (inner, None):
            dist.all_reduce(torch.ones(1000), group=group)  # opens the connections
        reduced = numbers.clone()
        with watched() as inside:
            dist.all_reduce(reduced, group=inner)
        flat = numbers.clone()
        with watched() as seen:
            dist.all_reduce(flat)
        assert not LINK or inside.crossed < 64e3, (
            "the all-reduce in the inner group has sent bytes through the link"
        )
        formula = flat_crossing(flat.nbytes, nodes, ranks)
        counted = compare(seen, formula, "flat all-reduce")
        say(
            f"step 4: all-reduce of {flat.nbytes / MIB:.0f} MiB: inside a node"
            f" ≈{inside.seconds * 1e3:.0f} ms, over all ranks ≈{seen.seconds * 1e3:.0f} ms"
        )
        least = formula * 8 / (MBITS * 1e6)
        assert not LINK or seen.seconds > least / 2, f"the link is faster than {MBITS} Mbit/s"
        say(f"step 4: bytes from each node: {counted}; {least * 1e3:.0f} ms at {MBITS} Mbit/s")
        return flat, seen

    flat, flat_seen = check_crossing()

# %% [markdown]
# ## Step 5: the hierarchical all-reduce
#
# Now write the three phases of step 4: three collectives, each in the right group. Note that
# `tensor.chunk` returns views. If the all-gather writes into these pieces, the result is in the
# tensor itself, and you need no copy.


# %%
def hierarchical_all_reduce(
    tensor: torch.Tensor, inner: dist.ProcessGroup, outer: dist.ProcessGroup
) -> None:
    """Sum a flat tensor over all ranks in place. The inner group divides it equally."""
    # >>> solution 5: reduce-scatter inside, all-reduce a piece across, all-gather inside
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
        hierarchical_all_reduce(torch.ones(1000 * ranks), inner, outer)  # opens connections
        with watched() as seen:
            hierarchical_all_reduce(ours, inner, outer)
        assert torch.equal(ours, flat), "the result differs from dist.all_reduce over all ranks"
        formula = hierarchical_crossing(ours.nbytes, nodes, ranks)
        counted = compare(seen, formula, "hierarchical all-reduce")
        fewer = flat_crossing(ours.nbytes, nodes, ranks) / formula
        say(f"step 5: the same sum as flat; bytes from each node: {counted}")
        slower = (
            f" and takes ≈{flat_seen.seconds / seen.seconds:.1f} times as long" if LINK else ""
        )
        say(f"step 5: the flat all-reduce sends {fewer:.2f} times as many bytes{slower}")

    check_hierarchical()

# %% [markdown]
# ## Step 6: where TP, PP and DP lie
#
# A large model is trained with several kinds of parallelism. Only one of them can stay inside
# the nodes. Which one should it be? To decide this, count the bytes that one rank sends along
# each axis in one step. All all-reduces are rings. Let $w$ be the number of bytes of one
# number, and $T$ the number of tokens that one replica processes in the step.
#
# - **TP** ($t$ ranks). A rank holds $L/p$ of the layers. In each of them, it all-reduces an
#   activation of $T \cdot h$ numbers four times: after attention and after the MLP, in the
#   forward pass and in the backward pass.
# - **PP** ($p$ stages). A stage sends its activation of $T \cdot h$ numbers to the next stage,
#   and a gradient of the same size to the stage before. A stage in the middle sends both. The
#   first stage and the last stage send one of them.
# - **DP** ($d$ replicas). Each rank all-reduces the gradients of its parameters. A transformer
#   layer has $12 h^2$ parameters, and a rank holds $1/(tp)$ of the parameters of all layers.
#
# A layout numbers the ranks along its axes, and the number along the last axis changes first.
# So neighbouring ranks, which are on the same node, differ in the *last* axis. The *first* axis
# connects ranks on different nodes. Therefore `axis_order` must return the axes in the order of
# their traffic, and the axis that sends least comes first.


# %%
def traffic(
    layers: int, hidden: int, tokens: int, width: int, tp: int, pp: int, dp: int
) -> dict[str, float]:
    """Return the bytes that a rank sends per step: {"tp": …, "pp": …, "dp": …}.

    For "pp", this is the rank that sends most. `width` is the number of bytes of one number.
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
    """Return the names of the axes. The first one connects nodes, the last one stays inside."""
    # >>> solution 6: sort the axes by their traffic
    return sorted(sent, key=sent.get)
    # <<< solution


# %% [markdown]
# Four ranks have only enough room for two axes. So the check takes two axes at a time. It sends
# what one training step would send, without the computation: first with one axis between the
# nodes, and then with the other axis. The bytes from each node must be `ranks` times your
# number for the axis between the nodes. Then the check computes the order for a large model
# with 70 billion parameters, 16,384 tokens per replica, and bf16.


# %%
LAYERS, WIDTH_OF_MODEL, TOKENS = 4, 128, 512


def send_along(axis: str, sizes: dict[str, int], group: dist.ProcessGroup) -> None:
    """Send in `group` what one training step sends along this axis."""
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
                    send_along(crossing, sizes, outer)
                    send_along(staying, sizes, inner)
                took[crossing] = seen.seconds
                what = f"{crossing} between the nodes, {staying} inside"
                say(f"step 6: {what}: {compare(seen, ranks * sent[crossing], what)}")
            first = axis_order({axis: sent[axis] for axis in pair})[0]
            assert first == pair[0], f"axis_order is wrong: {pair[0]} sends less than {pair[1]}"
            faster = took[pair[1]] / took[pair[0]]
            faster = f", ≈{faster:.1f} times as fast as the reverse" if LINK else ""
            say(f"step 6: better: {pair[0]} between the nodes, {pair[1]} inside{faster}")
        large = traffic(80, 8192, 16_384, 2, tp=8, pp=4, dp=16)
        in_gib = ", ".join(f"{axis} {large[axis] / 2**30:.2f}" for axis in axis_order(large))
        say(f"step 6: 70 billion parameters, tp 8, pp 4, dp 16: GiB per rank: {in_gib}")

    check_placement()

# %% [markdown]
# You have probably read the rule "TP inside a node, PP and DP between nodes". Now you see that
# it is only the order of three numbers, and that it changes if the numbers change. For example,
# if one replica processes many more tokens, PP sends more than DP. One more fact decides
# between PP and DP. DP sends once per step, and this can overlap with the backward pass, as lab
# 02 shows. But the next stage must wait for what PP sends.
#
# ## Step 7: fewer bytes for the same gradient
#
# If the link is the bottleneck, you can send fewer bytes. DDP lets a **communication hook**
# reduce each bucket of gradients. The hook gets a group and a bucket. It starts whatever
# communication it likes, and returns a *future* of the averaged bucket. Your hook sends bf16,
# which has half as many bytes. Each rounding to bf16 changes a number by at most one part in
# 256. Unlike fp16, bf16 has the same range as fp32. The bucket itself stays in fp32.
#
# The hook must not wait for its all-reduce. DDP calls it during the backward pass, and waits
# for all futures at the end.


# %%
def bf16_hook(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the group in bf16. The future has the dtype of the bucket."""
    # >>> solution 7: convert to bf16, start the all-reduce, and then convert back and divide
    # hint: bucket.buffer() returns all gradients of the bucket as one flat tensor
    # hint: future.then(f) returns a future of f(future); future.value() is a list here
    narrow = bucket.buffer().to(torch.bfloat16)
    work = dist.all_reduce(narrow, group=group, async_op=True)

    def widen(future: torch.futures.Future) -> torch.Tensor:
        return future.value()[0].to(bucket.buffer().dtype) / dist.get_world_size(group)

    return work.get_future().then(widen)
    # <<< solution


# %% [markdown]
# The check compares your hook with **PowerSGD** (Vogels, Karimireddy and Jaggi, 2019), which is
# part of torch. It sends each gradient matrix as two thin factors of rank 2. These factors have
# about a hundredth of the bytes, but the result is no longer the same gradient. PowerSGD stores
# what it left out and adds it to the next gradient, so this part arrives later (error
# feedback). For each method, the check prints the bytes and the distance from the exact
# gradient.


# %%
if IS_RANK:

    def check_compression() -> None:
        def backward(ddp: nn.Module) -> None:
            torch.manual_seed(100 + rank)  # each rank has different rows
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
                backward(ddp)  # DDP rebuilds buckets after the first; PowerSGD starts later
            with watched() as seen:
                backward(ddp)
            gradient = gradient_of(ddp)
            if exact is None:
                exact, plain = gradient.clone(), seen
            error = ((gradient - exact).norm() / exact.norm()).item()
            if name == "bf16":
                assert error < 2**-7, (
                    f"the gradient in bf16 has a relative error of {error:.3f}"
                )
            size = gradient.nbytes / (2 if name == "bf16" else 1)
            if name == "PowerSGD of rank 2":
                assert seen.crossed < gradient.nbytes / 10, "PowerSGD did not compress"
                counted = f"≈{seen.crossed / MIB:.2f} MiB on {LINK}" if LINK else "not counted"
            else:
                formula = flat_crossing(size, nodes, ranks)
                counted = compare(seen, formula, name)
            took = f"backward ≈{seen.seconds * 1e3:.0f} ms"
            if seen is not plain:
                took = f"≈{plain.seconds / seen.seconds:.1f} times as fast, error ≈{error:.4f}"
            say(f"step 7: {name}: bytes from each node: {counted}; {took}")

    check_compression()
    dist.barrier()
    dist.destroy_process_group()

# %% [markdown]
# When is compression worth it? The conversion reads and writes the bucket twice, and in return
# the link needs half of its time. On a link of 200 Mbit/s, this is always a gain. But if the
# plain all-reduce already overlaps completely with the backward pass, you lose accuracy and
# gain nothing. So first compute the time of the all-reduce on your link by the formula of step
# 4, and compare it with the time of the backward pass.
#
# ## Step 8: elastic rendezvous
#
# In a static rendezvous, you must name every node in advance, and if a node is lost, the job
# ends. In an **elastic rendezvous**, you do not number the nodes. All agents get the *same*
# command, and a store assigns a number to each agent. With the backend c10d, which is part of
# torch, one of the agents runs this store. These are the options:
#
# | option | value |
# |---|---|
# | `--nnodes` | `MIN:MAX`: start at once with MAX nodes, or after 30 s with at least MIN |
# | `--nproc-per-node` | the number of ranks on one node, as before |
# | `--max-restarts` | how often the ranks may start again after a failure |
# | `--rdzv-backend` | `c10d` |
# | `--rdzv-endpoint` | `HOST:PORT` of the store |
# | `--rdzv-id` | the name of the job, which is the same for all its agents |
#
# Which agent runs the store? Each agent compares HOST with its own name, and with the addresses
# to which this name resolves. If HOST is `node0`, the agent on node0 finds its own name and
# starts the store. If HOST is 10.77.0.1, it does not recognize itself, because on a Debian node
# its name resolves to 127.0.1.1. Then all agents try to connect, no agent listens, and after a
# minute all of them fail. You can avoid this by `--rdzv-conf=is_host=1` on node0 and
# `is_host=0` on the others. If the names do not resolve at all, you also need `--local-addr`.
#
# In an elastic job, the ranks can get new numbers at every restart. So a program must not store
# its rank across a restart, and must load a checkpoint when it begins.


# %%
def elastic_words(nodes: int, ranks: int, master: str, port: int, job: str) -> list[str]:
    """Return the options of torchrun, which are the same on every node.

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
# The ranks of this job are not Python programs. An agent can start any program, and the program
# finds its numbers in the environment.

# %%
if LAUNCHES:

    def check_elastic() -> None:
        words = elastic_words(
            NODES, RANKS, plan.master, second_port, job=f"lab09-{os.getpid()}"
        )
        report = "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE"
        command = [*torchrun, *words, "--no-python", "sh", "-c", report]
        with tempfile.TemporaryFile("w+") as output:
            status = cluster.run(plan, [command] * NODES, stdout=output)
            output.seek(0)
            lines = sorted(output.read().splitlines())
        assert status == 0, f"the agents ended with status {status}"
        total = NODES * RANKS
        expected = [f"{r} of {total}, {r % RANKS} of {RANKS}" for r in range(total)]
        assert lines == expected, f"the ranks got {lines}, but expected were {expected}"
        say(f"step 8: one command for all nodes: ranks {', '.join(line[0] for line in lines)}")

    check_elastic()
    left = cluster.clean()
    assert not left, f"these folders of the cluster are left: {left}"
    say("the cluster is removed, and nothing is left of it")

# %% [markdown]
# ## Where to go from here
#
# - **Four nodes.** Set `NODES`, and predict the lines of steps 4 and 5 before you run the lab.
#   Which saving becomes smaller?
# - **A different link.** Set `MBITS` to 50, and then to 2,000. From which rate on is bf16 no
#   longer a gain on your machine?
# - **Both methods together.** Use `hierarchical_all_reduce` in a communication hook of DDP, and
#   send bf16 only in the outer group. The slow link then carries a third of the bytes of the
#   flat all-reduce in fp32, and the sums inside a node stay exact.
# - **A cluster that is killed.** Start `python labs/cluster.py -- sleep 100` and end it, first
#   by Ctrl-C and then by `kill -9`. `ip link` and `ps` should show nothing of it. Find out in
#   `cluster.py` how this works.
# - **A node that is lost.** Start a job with your elastic options, and kill the agent of node 1
#   from a different terminal. What does node 0 do, and when? What does
#   `--rdzv-conf=last_call_timeout=5` change? Then read [how a job continues without a
#   node](../clusters/failures.md#timed-out-a-node-is-cut-off).
# - **The same commands under Slurm.** There, `--node-rank` is `$SLURM_NODEID`, and the master
#   is the first name that `scontrol show hostnames` prints. The page [Multi-node
#   launch](../clusters/from_one_to_many.md) has the whole script, and explains other launchers.

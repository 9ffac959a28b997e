"""Dispatch and combine over two kinds of links: a token crosses the network once per node.

Two ranks form a simulated node. Dispatch sends a token over the network once to each node that
has experts for it, to the rank with the same local rank. That rank forwards the token over
NVLink, once to each rank that has experts for it. Combine uses the same path in reverse and
adds on the way: on a rank over its experts, in a node over its ranks, and on the sender over
the nodes. Output and gradients equal those of one process. The program counts the bytes on both
links and compares them with the formula and with one copy for each choice. DeepEP does this
with kernels that start when the first tokens have arrived.
"""

import math
import os
import sys
from collections import Counter

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn

TOKENS, H, EXPERTS, K, NODE = 256, 32, 16, 4, 2  # tokens of one rank; NODE ranks in a node
KIB = 1024
sent: Counter[str] = Counter()  # bytes of rows that left this rank, by link


class Exchange(torch.autograd.Function):
    """Send rows to the ranks of a group by `send` counts. Backward returns them."""

    @staticmethod
    def forward(ctx, rows, send, receive, group, link):
        ctx.arguments = receive, send, group, link
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
        elsewhere = sum(send) - send[dist.get_rank(group)]
        sent[link] += elsewhere * rows[:1].numel() * rows.element_size()
        return out

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.arguments), None, None, None, None


class Hop:
    """Send one copy of a row to each place of `group` that needs it, and return the results."""

    def __init__(self, wanted: torch.Tensor, group: dist.ProcessGroup, link: str) -> None:
        """`wanted`: [rows, places], true where a row must go."""
        place, self.row = wanted.T.nonzero(as_tuple=True)  # by place, and therefore by rank
        self.rows, self.group, self.link = len(wanted), group, link
        send = place.bincount(minlength=wanted.shape[1])
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send, group=group)
        self.send, self.receive = send.tolist(), receive.tolist()

    def out(self, rows: torch.Tensor, link: str = "") -> torch.Tensor:
        link = link or self.link
        return Exchange.apply(rows[self.row], self.send, self.receive, self.group, link)

    def home(self, rows: torch.Tensor) -> torch.Tensor:
        back = Exchange.apply(rows, self.receive, self.send, self.group, self.link)
        return back.new_zeros(self.rows, back.shape[1]).index_add(0, self.row, back)


def share(gate: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Gates [tokens, e]: softmax over the chosen experts, and zero for all others."""
    others = torch.ones_like(gate).scatter(1, chosen, 0.0).bool()
    return gate.masked_fill(others, -math.inf).softmax(dim=-1)


def mixture(gates: torch.Tensor, experts: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """Σ g_i E_i(x). Each expert computes the rows that have a gate for it."""
    out = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        row = gates[:, i].nonzero().flatten()
        out = out.index_add(0, row, gates[row, i, None] * expert(x[row]))
    return out


def two_links(x, gates, experts, rail, node) -> torch.Tensor:
    """x: [tokens, h] of this rank, gates: [tokens, e]; `experts` are this rank's own."""
    nodes = dist.get_world_size(rail)
    network = Hop(gates.unflatten(1, (nodes, -1)).any(-1), rail, "network")
    # the gates are sent with their tokens, and their gradients are returned
    rows, marks = network.out(x), network.out(gates, "gates")
    here = marks.unflatten(1, (nodes, NODE, -1))[:, dist.get_rank(rail)]  # [rows, NODE, e/n]
    nvlink = Hop(here.any(-1), node, "NVLink")
    rows, marks = nvlink.out(rows), nvlink.out(here.flatten(1), "gates")
    own = marks.unflatten(1, (NODE, -1))[:, dist.get_rank(node)]  # [rows, e/n]
    return network.home(nvlink.home(mixture(own, experts, rows)))


def init_distributed() -> torch.device:
    """Join the process group: one accelerator per local rank where there are enough.

    With NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or newer), several ranks share a GPU.
    """
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start this program with: torchrun --nproc-per-node=2 {sys.argv[0]}")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    count = torch.accelerator.device_count()
    shared = count > 0 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if (count < local_world and not shared) or torch.backends.mps.is_available():
        if count and torch.version.cuda and local_rank == 0:
            advice = "NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share a GPU (NCCL 2.30 or newer)"
            print(f"{local_world} ranks use the CPU and gloo. {advice}", file=sys.stderr)
        dist.init_process_group("gloo")  # on the CPU; mps has no collectives
        return torch.device("cpu")
    device = torch.device(torch.accelerator.current_accelerator().type, local_rank % count)
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(device_id=device)
    return device


def predicted(nodes: int, n: int) -> dict[str, tuple[float, float]]:
    """Copies of a token in one direction, if routing is even: one per choice, and two hops."""

    def met(places: int) -> float:
        return places * (1 - math.comb(EXPERTS - EXPERTS // places, K) / math.comb(EXPERTS, K))

    far, near = (nodes - 1) / nodes, (NODE - 1) / NODE
    return {"network": (K * far, met(nodes) * far), "NVLink": (K * near / nodes, met(n) * near)}


def main() -> None:
    n = int(os.environ.get("WORLD_SIZE", "0"))
    if n not in (2, 4):
        sys.exit("nodes of two ranks: torchrun --nproc-per-node=4 two_link_dispatch.py")
    device = init_distributed()
    rank, nodes = dist.get_rank(), n // NODE
    node = dist.new_subgroups(NODE)[0]  # ranks 2i and 2i + 1
    rail = [dist.new_group(list(range(i, n, NODE))) for i in range(NODE)][rank % NODE]

    # the same on every rank: the reference needs all of it, a rank needs a part
    torch.manual_seed(0)
    router = nn.Linear(H, EXPERTS, bias=False).to(device)
    experts = nn.ModuleList(
        nn.Sequential(nn.Linear(H, 4 * H), nn.GELU(), nn.Linear(4 * H, H))
        for _ in range(EXPERTS)
    ).to(device)
    tokens = torch.randn(n * TOKENS, H).to(device).requires_grad_()
    logits = router(tokens)
    gates = share(logits, chosen := logits.topk(K, dim=-1).indices)
    truth = sum(gates[:, i, None] * expert(tokens) for i, expert in enumerate(experts))
    truth.square().sum().backward()
    want_router = router.weight.grad.clone()
    want_experts = [p.grad.clone() for p in experts.parameters()]
    router.zero_grad(), experts.zero_grad()

    here = slice(rank * EXPERTS // n, (rank + 1) * EXPERTS // n)
    x = tokens.detach().chunk(n)[rank].clone().requires_grad_()
    logits = router(x)
    gates = share(logits, chosen := logits.topk(K, dim=-1).indices)
    out = two_links(x, gates, experts[here], rail, node)
    counted = dict(sent)
    out.square().sum().backward()
    dist.all_reduce(router.weight.grad)
    for link in predicted(nodes, n):
        assert sent[link] == 2 * counted[link]  # backward sends what forward did

    torch.testing.assert_close(out, truth.chunk(n)[rank], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.grad, tokens.grad.chunk(n)[rank], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(router.weight.grad, want_router, rtol=1e-4, atol=1e-3)
    mine = slice(here.start * 4, here.stop * 4)  # four parameters an expert
    for ours, want in zip(list(experts.parameters())[mine], want_experts[mine], strict=True):
        torch.testing.assert_close(ours.grad, want, rtol=1e-4, atol=1e-3)

    owner = chosen // (EXPERTS // n)
    same_node = owner // NODE == rank // NODE
    direct = {"network": ~same_node, "NVLink": same_node & (owner != rank)}
    copy = 2 * H * 4 / KIB  # there and back, in fp32
    table = torch.tensor(
        [[direct[link].sum() * copy, counted[link] / KIB] for link in direct], device=device
    )
    dist.all_reduce(table)
    if rank == 0:
        print(f"{n} ranks, {NODE} to a node, {EXPERTS} experts, {K} for each token: output and")
        print("gradients of tokens, router and experts equal one process")
        print("KiB a rank, out and home   a copy for each choice      one for each node")
        for (link, copies), cells in zip(predicted(nodes, n).items(), table / n, strict=True):
            print(f"  {link:24}", end="")
            for counted_, even in zip(cells.tolist(), copies, strict=True):
                even *= TOKENS * copy
                print(f" {counted_:6.1f}, even: {even:6.1f}     ", end="")
                assert abs(counted_ - even) <= 0.1 * even
            print()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()

"""The three methods of ZeRO++ written by hand, with the bytes that enter a node.

Four ranks play two nodes with two ranks each. Stage 3 gathers Ψ elements for forward, gathers Ψ
elements for backward, and reduces Ψ gradients. All 3Ψ elements cross the border between nodes.
ZeRO++ (arXiv 2306.10209) reduces each of the three:

    qwZ  gathers blocks of int8 with one scale each, instead of fp16:      Ψ -> 0.5Ψ
    hpZ  gathers for backward from a second shard inside the node:         Ψ -> 0
    qgZ  reduces int4 gradients by all-to-all, first inside the node:      Ψ -> 0.25Ψ

One Ψ is the size of the model in fp16, 2 bytes per element. The program counts the bytes that
enter a node from the other node. With M nodes this is (M-1)/M of the numbers above, here one
half. The printed table therefore has a second column without this factor. For comparison, the
program also quantizes a shard with a single scale, which shows why ZeRO++ needs blocks.
"""

import os
import sys

import torch
import torch.distributed as dist

PSI, BLOCK = 2**20, 256  # elements; elements that share one scale
NODE = 2  # ranks in a node


class NodeTraffic:
    """Collectives that count the bytes that enter this rank's node from other nodes."""

    def __init__(self) -> None:
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.node = self.rank // NODE
        self.bytes = 0

    def gather(
        self, part: torch.Tensor, group=None, ranks: range | None = None
    ) -> torch.Tensor:
        """All-gather. Each part of the other node enters this node once, as in a ring."""
        ranks = ranks or range(self.n)
        parts = [torch.empty_like(part) for _ in ranks]
        dist.all_gather(parts, part, group=group)
        if self.rank % NODE == 0:  # counted once for the node
            self.bytes += sum(part.nbytes for r in ranks if r // NODE != self.node)
        return torch.stack(parts)

    def all_to_all(self, parts: torch.Tensor, group, ranks: range) -> torch.Tensor:
        """Send row i of `parts` to rank i of the group; return the received rows."""
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        self.bytes += sum(parts[0].nbytes for r in ranks if r // NODE != self.node)
        return received

    def in_units(self) -> float:
        """Return the bytes that entered the node since the last call, in units of Ψ."""
        total = torch.tensor([float(self.bytes)])
        dist.all_reduce(total, group=self.node_group)  # sum over both ranks of the node
        self.bytes = 0
        return total.item() / (2 * PSI)


# --8<-- [start:quantise]
def quantise(
    x: torch.Tensor, bits: int, block: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return integers of `bits` bits, two int4 in a byte, and one fp16 scale per block."""
    top = 2 ** (bits - 1) - 1
    blocks = x.float().view(-1, block)
    scales = (blocks.abs().amax(1, keepdim=True) / top).clamp(min=1e-6).half()
    q = (blocks / scales.float()).round().clamp(-top, top).to(torch.int8)
    if bits == 4:
        q = (q[:, ::2] + 8).to(torch.uint8) << 4 | (q[:, 1::2] + 8).to(torch.uint8)
    return q, scales


def restore(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the values in fp16; a byte of int4 contains two of them."""
    if q.dtype == torch.uint8:
        q = torch.stack([q >> 4, q & 15], -1).flatten(-2).to(torch.int8) - 8
    return (q.float() * scales.float()).half()


# --8<-- [end:quantise]


def error(approximate: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of the error relative to the norm of the exact values, in percent."""
    difference = approximate.float() - exact.float()
    return 100 * (difference.norm() / exact.float().norm()).item()


def main() -> None:
    if os.environ.get("WORLD_SIZE") != "4":
        sys.exit("two nodes of two ranks: torchrun --nproc-per-node=4 zeropp.py")
    dist.init_process_group("gloo")  # both nodes are pretended, so use the CPU
    rank, n = dist.get_rank(), dist.get_world_size()
    traffic = NodeTraffic()
    node_ranks = range(traffic.node * NODE, traffic.node * NODE + NODE)
    across_ranks = range(rank % NODE, n, NODE)
    traffic.node_group, _ = dist.new_subgroups(NODE)
    across, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    torch.manual_seed(0)
    weights = torch.randn(PSI).half() * 0.02
    weights[::4096] *= 20  # outliers
    shard = weights.chunk(n)[rank]
    rows = []

    # --8<-- [start:gathers]
    whole = traffic.gather(shard)  # fp16, once for forward and once for backward
    assert torch.equal(whole.flatten(), weights)
    rows.append(("gather, fp16", traffic.in_units(), 0.0))

    q, scales = quantise(shard, bits=8)  # qwZ
    got = restore(traffic.gather(q), traffic.gather(scales)).flatten()
    rows.append(("gather, int8 blocks (qwZ)", traffic.in_units(), error(got, weights)))

    secondary = got.chunk(NODE)[rank % NODE]  # hpZ: keeps a part of the forward gather
    again = traffic.gather(secondary, traffic.node_group, node_ranks)
    assert torch.equal(again.flatten(), got)
    rows.append(
        ("gather inside the node (hpZ)", traffic.in_units(), error(again.flatten(), weights))
    )
    # --8<-- [end:gathers]

    torch.manual_seed(1 + rank)
    gradients = torch.randn(PSI).half() * 1e-3
    exact = gradients.float()
    dist.all_reduce(exact)
    exact = exact.chunk(n)[rank]
    everyone = [torch.empty_like(gradients) for _ in range(n)]
    dist.all_gather(everyone, gradients)
    by_node = torch.stack(everyone).double().view(n // NODE, NODE, -1).sum(1).half()
    rounded_once = by_node.double().sum(0).chunk(n)[rank]  # only the sum of a node is rounded

    # --8<-- [start:gradients]
    def exchange_int4(parts: torch.Tensor, group, ranks: range) -> torch.Tensor:
        q, scales = quantise(parts.flatten(), bits=4)
        q = traffic.all_to_all(q.view(len(parts), -1, BLOCK // 2), group, ranks)
        scales = traffic.all_to_all(scales.view(len(parts), -1, 1), group, ranks)
        return restore(q, scales).flatten(1)

    # rank r of a node reduces the shards of the ranks r, r + NODE, … of the world
    by_owner = gradients.view(n // NODE, NODE, -1).transpose(0, 1).flatten(1)
    ways = ("reduce, fp16", traffic.all_to_all), ("reduce, int4 (qgZ)", exchange_int4)
    for name, exchange in ways:
        of_node = exchange(by_owner.contiguous(), traffic.node_group, node_ranks).float().sum(0)
        of_node = of_node.half().view(n // NODE, -1)  # the sums of this node's ranks
        reduced = exchange(of_node, across, across_ranks).float().sum(0)
        rows.append((name, traffic.in_units(), error(reduced, exact)))
        assert rows[-1][2] < 30  # the shard of a different rank would give 140%
        assert exchange is exchange_int4 or torch.equal(reduced.double(), rounded_once)
    # --8<-- [end:gradients]

    q, scales = quantise(shard, bits=8, block=shard.numel())  # for comparison, without blocks
    coarse = error(restore(q, scales).flatten(), shard)
    assert coarse > 5 * rows[1][2]

    if rank == 0:
        print(f"Ψ = {PSI:,} fp16 elements, 2 nodes of 2 ranks; elements that enter a node")
        print(f"{'':30}  counted   × M/(M-1)   error")
        for name, share, percent in rows:
            print(f"{name:30}  {share:6.4f}Ψ  {2 * share:7.4f}Ψ   {percent:5.2f} %")
        print(f"the shard of rank 0 in int8 with a single scale: error {coarse:.2f} %")
        gather, quantised, inside, reduce, reduce_int4 = (2 * row[1] for row in rows)
        print(f"stage 3: {2 * gather + reduce:.2f}Ψ between nodes")
        total = quantised + inside + reduce_int4
        print(
            f"ZeRO++:  {total:.2f}Ψ between nodes, and {total - 0.75:.3f}Ψ of this are scales"
        )


if __name__ == "__main__":
    main()
    dist.destroy_process_group()

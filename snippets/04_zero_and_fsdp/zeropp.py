"""ZeRO++ by hand: an int8 gather, a shard kept inside the node, int4 gradients; bytes counted.

Four ranks play two nodes of two. Stage 3 gathers Ψ elements for forward and Ψ for backward, and
reduces Ψ gradients, all of it between nodes: 3Ψ. ZeRO++ (arXiv 2306.10209) has three answers:

    qwZ  gather int8 blocks with a scale each, not fp16:               Ψ -> 0.5Ψ
    hpZ  for backward, gather a second shard that the node has kept:   Ψ -> 0
    qgZ  reduce int4 gradients, in the node first, by all-to-all:      Ψ -> 0.25Ψ

The unit is the fp16 element, 2 bytes. Counted is what enters a node from the other; of M nodes
it is (M-1)/M of the table above, here a half, so the table that is printed shows both.
"""

import os
import sys

import torch
import torch.distributed as dist

PSI, BLOCK = 2**20, 256  # elements; elements that share one scale
NODE = 2  # ranks of one node


class Wire:
    """Collectives that count what comes into a node from other nodes, in bytes."""

    def __init__(self) -> None:
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.mine = self.rank // NODE
        self.crossing = 0

    def gather(
        self, part: torch.Tensor, group=None, ranks: range | None = None
    ) -> torch.Tensor:
        """All-gather; each part of another node enters this one once, as in a ring."""
        ranks = ranks or range(self.n)
        parts = [torch.empty_like(part) for _ in ranks]
        dist.all_gather(parts, part, group=group)
        if self.rank % NODE == 0:  # counted once for the node
            self.crossing += sum(part.nbytes for r in ranks if r // NODE != self.mine)
        return torch.stack(parts)

    def swap(self, parts: torch.Tensor, group, ranks: range) -> torch.Tensor:
        """All-to-all of rows: row i to the group's rank i."""
        got = torch.empty_like(parts)
        dist.all_to_all_single(got, parts, group=group)
        self.crossing += sum(parts[0].nbytes for r in ranks if r // NODE != self.mine)
        return got

    def entered(self) -> float:
        """Bytes into this node since the last call, per fp16 byte of the model: units of Ψ."""
        total = torch.tensor([float(self.crossing)])
        dist.all_reduce(total, group=self.node_group)  # both ranks of the node
        self.crossing = 0
        return total.item() / (2 * PSI)


# --8<-- [start:quantise]
def quantise(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric, by block: integers of `bits` bits, two int4 to a byte, and fp16 scales."""
    top = 2 ** (bits - 1) - 1
    blocks = x.float().view(-1, BLOCK)
    scales = (blocks.abs().amax(1, keepdim=True) / top).clamp(min=1e-6).half()
    q = (blocks / scales.float()).round().clamp(-top, top).to(torch.int8)
    if bits == 4:
        q = (q[:, ::2] + 8).to(torch.uint8) << 4 | (q[:, 1::2] + 8).to(torch.uint8)
    return q, scales


def restore(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Back to fp16; a packed byte holds two values."""
    if q.dtype == torch.uint8:
        q = torch.stack([q >> 4, q & 15], -1).flatten(-2).to(torch.int8) - 8
    return (q.float() * scales.float()).half()


# --8<-- [end:quantise]


def error(approximate: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative error in percent, by the norm."""
    difference = approximate.float() - exact.float()
    return 100 * (difference.norm() / exact.float().norm()).item()


def main() -> None:
    if os.environ.get("WORLD_SIZE") != "4":
        sys.exit("two nodes of two ranks: torchrun --nproc-per-node=4 zeropp.py")
    dist.init_process_group("gloo")  # counts bytes of two pretended nodes: CPU only
    rank, n = dist.get_rank(), dist.get_world_size()
    wire = Wire()
    node_ranks = range(wire.mine * NODE, wire.mine * NODE + NODE)
    across_ranks = range(rank % NODE, n, NODE)
    wire.node_group, _ = dist.new_subgroups(NODE)
    across, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    torch.manual_seed(0)
    weights = torch.randn(PSI).half() * 0.02
    weights[::4096] *= 20  # outliers, as real weights have
    shard = weights.chunk(n)[rank]
    rows = []

    # --8<-- [start:gathers]
    whole = wire.gather(shard)  # fp16, forward and once more for backward
    assert torch.equal(whole.flatten(), weights)
    rows.append(("gather, fp16", wire.entered(), 0.0))

    q, scales = quantise(shard, bits=8)  # qwZ
    got = restore(wire.gather(q), wire.gather(scales)).flatten()
    rows.append(("gather, int8 blocks (qwZ)", wire.entered(), error(got, weights)))

    secondary = got.chunk(NODE)[rank % NODE]  # hpZ: kept from the forward gather
    again = wire.gather(secondary, wire.node_group, node_ranks)
    assert torch.equal(again.flatten(), got)
    rows.append(
        ("gather inside the node (hpZ)", wire.entered(), error(again.flatten(), weights))
    )
    # --8<-- [end:gathers]

    torch.manual_seed(1 + rank)
    gradients = torch.randn(PSI).half() * 1e-3
    exact = gradients.float()
    dist.all_reduce(exact)
    exact = exact.chunk(n)[rank]

    # --8<-- [start:gradients]
    def swap_int4(parts: torch.Tensor, group, ranks: range) -> torch.Tensor:
        q, scales = quantise(parts.flatten(), bits=4)
        q = wire.swap(q.view(len(parts), -1, BLOCK // 2), group, ranks)
        scales = wire.swap(scales.view(len(parts), -1, 1), group, ranks)
        return restore(q, scales).flatten(1)

    # rank r of a node takes what the ranks r, r + NODE, … of the world will own
    by_owner = gradients.view(n // NODE, NODE, -1).transpose(0, 1).flatten(1)
    for name, swap in (("reduce, fp16", wire.swap), ("reduce, int4 (qgZ)", swap_int4)):
        of_node = swap(by_owner.contiguous(), wire.node_group, node_ranks).float().sum(0)
        of_node = of_node.half().view(n // NODE, -1)  # the sums of this node's ranks
        reduced = swap(of_node, across, across_ranks).float().sum(0)
        rows.append((name, wire.entered(), error(reduced, exact)))
        assert rows[-1][2] < 30  # on every rank: another's shard would be off by 140%
    # --8<-- [end:gradients]

    if rank == 0:
        print(f"Ψ = {PSI:,} fp16 elements, 2 nodes of 2 ranks; into a node from the other")
        print(f"{'':30}  counted   × M/(M-1)   error")
        for name, share, percent in rows:
            print(f"{name:30}  {share:6.4f}Ψ  {2 * share:7.4f}Ψ   {percent:5.2f} %")
        gather, quantised, inside, reduce, reduce_int4 = (2 * row[1] for row in rows)
        print(f"stage 3: {2 * gather + reduce:.2f}Ψ between nodes")
        total = quantised + inside + reduce_int4
        print(f"ZeRO++:  {total:.2f}Ψ, of which scales {total - 0.75:.3f}Ψ")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()

"""Mesh dimensions in the wrong order: the same results, but more traffic between nodes.

The program pretends that ranks 0 and 1 are one node, and ranks 2 and 3 another. It computes MLP
blocks on a (dp, tp) mesh and on a (tp, dp) mesh. The results agree, so nothing shows that the
second mesh sends its activations between nodes. For each all-reduce, the program adds the bytes
that a ring sends between the nodes.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

NODE, H, TOKENS, LAYERS = 2, 32, 512, 4
crossing: dict[str, float] = {}


def all_reduce(x: torch.Tensor, mesh, name: str) -> torch.Tensor:
    """Sum over the dimension `name`; note what the group's ring sends between nodes."""
    group = mesh[name].get_group()
    ranks = dist.get_process_group_ranks(group)
    n = len(ranks)
    each = 2 * (n - 1) / n * x.nbytes  # bytes that every rank of a ring sends to the next rank
    borders = sum(ranks[i] // NODE != ranks[(i + 1) % n] // NODE for i in range(n))
    crossing[name] = crossing.get(name, 0.0) + each * borders
    dist.all_reduce(x, group=group)
    return x


def step(mesh) -> torch.Tensor:
    """Forward of LAYERS blocks under TP, and the all-reduce of their gradients under DP."""
    torch.manual_seed(0)
    dp, tp = (mesh[name].get_local_rank() for name in ("dp", "tp"))
    x = torch.randn(2 * TOKENS, H).chunk(2)[dp]  # the batch is cut by the dp coordinate
    for _ in range(LAYERS):
        up, down = torch.randn(H, 4 * H) / H**0.5, torch.randn(4 * H, H) / (4 * H) ** 0.5
        part = F.gelu(x @ up.chunk(2, dim=1)[tp]) @ down.chunk(2, dim=0)[tp]
        x = x + all_reduce(part, mesh, "tp")  # in forward; backward has one more of this size
        # the values show that the two ranks of the right group, 0 and 1, were added
        assert all_reduce(torch.full_like(part, tp), mesh, "tp").eq(0 + 1).all()
        gradients = torch.full((up.numel() // 2 + down.numel() // 2,), float(dp))
        assert all_reduce(gradients, mesh, "dp").eq(0 + 1).all()
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x, group=mesh["dp"].get_group())
    return torch.cat(parts)


def one_process() -> torch.Tensor:
    """The same blocks without cuts, for the whole batch."""
    torch.manual_seed(0)
    x = torch.randn(2 * TOKENS, H)
    for _ in range(LAYERS):
        up, down = torch.randn(H, 4 * H) / H**0.5, torch.randn(4 * H, H) / (4 * H) ** 0.5
        x = x + torch.nn.GELU()(x @ up) @ down
    return x


def main() -> None:
    if int(os.environ.get("WORLD_SIZE", "0")) != 4:
        sys.exit("two nodes of two ranks: torchrun --nproc-per-node=4 wrong_order.py")
    dist.init_process_group("gloo")
    outputs = []
    for names in (("tp", "dp"), ("dp", "tp")):
        crossing.clear()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        outputs.append(step(mesh))
        totals: list = [None] * 4
        dist.all_gather_object(totals, dict(crossing))
        if dist.get_rank() == 0:
            sums = {k: sum(t[k] for t in totals) / 2 / 2**10 for k in ("tp", "dp")}  # per rank
            print(f"mesh_dim_names={names}, {names[-1]} inside the node")
            print(f"  KiB across nodes: tp {sums['tp']:.0f}, dp {sums['dp']:.0f}")
    for output in outputs:
        torch.testing.assert_close(output, one_process(), rtol=1e-4, atol=1e-4)
    if dist.get_rank() == 0:
        print("outputs equal")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()

"""Under a causal mask, contiguous parts of a sequence are uneven work; zigzag order is even.

A query needs only the keys before it. With contiguous parts, the last rank therefore computes n
blocks of scores, and the first rank only one. With zigzag order, the sequence is cut into 2n
chunks, and rank r gets the chunks r and 2n-1-r, so every rank has the same work. Tiles of
scores that the mask removes completely are skipped. Both orders run around a ring and are
compared with causal attention in one process. The program counts the tiles of each rank. Draws
causal_balance.svg.
"""

import math
import os
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch.nn import functional as F

B, HEADS, S, D = 1, 2, 480, 16  # 2, 4, 6 and 8 chunks divide S
COLOURS = ["#0b6e99", "#c2410c", "#15803d", "#7c3aed"]
Tile = tuple[int, int]  # chunk of queries, chunk of keys


def contiguous(rank: int, n: int) -> list[int]:
    """The chunks of `rank`, out of 2n."""
    return [2 * rank, 2 * rank + 1]


def zigzag(rank: int, n: int) -> list[int]:
    return [rank, 2 * n - 1 - rank]


def causal_ring(q, k, v, order) -> tuple[torch.Tensor, list[list[Tile]]]:
    """Causal attention of this rank's queries [b, heads, s/n, d] to the keys of all ranks.

    `order(rank, n)` returns the chunks of a rank. Also returns the tiles of scores that were
    computed, one list for each step of the ring.
    """
    rank, n, size = dist.get_rank(), dist.get_world_size(), S // (2 * dist.get_world_size())
    within = torch.arange(size, device=q.device)
    top = q.new_full((*q.shape[:-1], 1), -math.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    block, computed = torch.stack([k, v]), []
    for step in range(n):
        computed.append([])
        for i, query_chunk in enumerate(order(rank, n)):
            rows = slice(i * size, (i + 1) * size)
            for j, key_chunk in enumerate(order((rank - step) % n, n)):
                if key_chunk > query_chunk:
                    continue  # every key comes after every query: nothing to compute
                computed[-1].append((query_chunk, key_chunk))
                keys, values = block[:, :, :, j * size : (j + 1) * size]
                scores = q[:, :, rows] @ keys.mT / math.sqrt(D)
                after = key_chunk * size + within > query_chunk * size + within[:, None]
                scores = scores.masked_fill(after, -math.inf)
                new_top = torch.maximum(top[:, :, rows], scores.amax(-1, keepdim=True))
                weights = torch.exp(scores - new_top)
                shrink = torch.exp(top[:, :, rows] - new_top)
                total[:, :, rows] = total[:, :, rows] * shrink + weights.sum(-1, keepdim=True)
                out[:, :, rows] = out[:, :, rows] * shrink + weights @ values
                top[:, :, rows] = new_top
        if step < n - 1:
            arriving = torch.empty_like(block)
            for handle in dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, block, (rank + 1) % n),
                    dist.P2POp(dist.irecv, arriving, (rank - 1) % n),
                ]
            ):
                handle.wait()
            block = arriving
    return out / total, computed


def work(tiles: list[Tile]) -> float:
    """Count tiles of s/2n × s/2n scores. A tile on the diagonal counts as half."""
    return sum(0.5 if query == key else 1.0 for query, key in tiles)


def draw(by_order: dict[str, list[list[Tile]]], n: int) -> None:
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "causal", "font.size": 11})
    figure, axes = plt.subplots(1, 2, figsize=(7, 4), sharey=True)
    for axis, (name, by_rank) in zip(axes, by_order.items(), strict=True):
        for rank, tiles in enumerate(by_rank):
            for query, key in tiles:
                axis.add_patch(
                    plt.Rectangle(
                        (key - 0.46, query - 0.46), 0.92, 0.92, color=COLOURS[rank % 4]
                    )
                )
                axis.text(key, query, rank, color="white", ha="center", va="center_baseline")
        axis.set_title(f"{name}: {', '.join(f'{work(t):g}' for t in by_rank)} tiles")
        axis.set(xlim=(-0.6, 2 * n - 0.4), ylim=(2 * n - 0.4, -0.6), aspect="equal")
        axis.set_xlabel("chunk of keys")
        axis.set_xticks(range(2 * n))
        axis.set_yticks(range(2 * n))
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    axes[0].set_ylabel("chunk of queries")
    figure.tight_layout()
    figure.savefig("causal_balance.svg", transparent=True, metadata={"Date": None})


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


def main() -> None:
    if S % (2 * int(os.environ.get("WORLD_SIZE", "1"))):
        sys.exit(f"twice the number of ranks must divide {S} tokens")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    whole = [torch.randn(B, HEADS, S, D).to(device) for _ in range(3)]
    whole[0] *= 40  # scores in the hundreds: their exponentials need the running maximum
    truth = F.scaled_dot_product_attention(*whole, is_causal=True)
    by_order = {}
    for order in (contiguous, zigzag):

        def mine(x: torch.Tensor, order=order) -> torch.Tensor:
            chunks = x.chunk(2 * n, dim=2)
            return torch.cat([chunks[c] for c in order(rank, n)], dim=2)

        out, computed = causal_ring(*map(mine, whole), order)
        torch.testing.assert_close(out, mine(truth), rtol=1e-4, atol=1e-5)
        gathered: list = [None] * n
        dist.all_gather_object(gathered, computed)
        if rank == 0:
            each = [sum(work(tiles) for tiles in steps) for steps in gathered]
            # all ranks wait in each step for the busiest rank
            turns = [max(work(steps[i]) for steps in gathered) for i in range(n)]
            print(f"{order.__name__}: output equal to causal attention in one process")
            print(f"  tiles of each rank {each}, busiest over mean {max(each) * n / sum(each)}")
            print(f"  busiest rank in each step of the ring {turns}, together {sum(turns)}")
            assert sum(each) == (2 * n) ** 2 / 2
            by_order[order.__name__] = [[t for step in r for t in step] for r in gathered]
    if rank == 0:
        draw(by_order, n)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()

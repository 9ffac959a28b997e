"""Each trainer rank sends exactly the rows that a sampler rank needs. No rank gathers a model.

The plan is the intersection of the trainer's cut with the sampler's cut. It is computed once,
and each trainer rank sends at most one message to each sampler rank. The trainer uses FSDP2, or
tensor parallelism like the sampler. The program counts the bytes inside the calls, and compares
them with the lower bound, which is the size of what the sampler ranks need. The last plan
ignores that one matrix contains q, k and v. It sends the same number of bytes, but then the
attention of the sampler is wrong.
"""

import os
import sys
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

HEADS, KIB = 4, 1024


class BlockWeights(nn.Module):
    """The parameters of a transformer block. It computes nothing in this program."""

    def __init__(self, h: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(h), nn.RMSNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h, bias=False), nn.Linear(h, h, bias=False)
        self.up, self.down = nn.Linear(h, 4 * h, bias=False), nn.Linear(4 * h, h, bias=False)


class PolicyWeights(nn.Module):
    """The parameters of a policy."""

    def __init__(self, h: int = 64, layers: int = 3, vocabulary: int = 6) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, h), nn.Embedding(16, h)
        self.blocks = nn.ModuleList(BlockWeights(h) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(h), nn.Linear(h, vocabulary, bias=False)


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


class Box(NamedTuple):
    """The rows top to bottom - 1 and the columns left to right - 1 of a matrix."""

    top: int
    bottom: int
    left: int
    right: int

    def elements(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)

    def overlap(self, other: "Box") -> "Box":
        """The part that both boxes contain. It may have no elements."""
        top, left = max(self.top, other.top), max(self.left, other.left)
        bottom, right = min(self.bottom, other.bottom), min(self.right, other.right)
        return Box(top, max(top, bottom), left, max(left, right))


Shapes = dict[str, tuple[int, int]]  # the name of each parameter -> its rows and columns
Plan = dict[tuple[int, int], list[tuple[str, Box]]]  # trainer and sampler rank -> pieces


def fsdp_box(shape: tuple[int, int], rank: int, ranks: int) -> Box:
    """The rows of a trainer rank: ceil(rows / ranks), or fewer at the end."""
    size = -(-shape[0] // ranks)
    top = min(rank * size, shape[0])
    return Box(top, min(top + size, shape[0]), 0, shape[1])


def tp_boxes(cut: str, shape: tuple[int, int], rank: int, ranks: int) -> list[Box]:
    """The boxes of a tensor-parallel rank. `cut` is rows, columns, whole, or 8+8+8."""
    rows, columns = shape
    if cut == "whole":
        return [Box(0, rows, 0, columns)]
    if cut == "columns":
        return [Box(0, rows, columns * rank // ranks, columns * (rank + 1) // ranks)]
    parts = [rows] if cut == "rows" else [int(part) for part in cut.split("+")]
    boxes, start = [], 0
    for part in parts:  # a fused matrix has several parts, and every part is cut
        boxes.append(
            Box(start + part * rank // ranks, start + part * (rank + 1) // ranks, 0, columns)
        )
        start += part
    return boxes


def make_plan(has: list[dict[str, list[Box]]], needs: list[dict[str, list[Box]]]) -> Plan:
    """The pieces from each trainer rank to each sampler rank. No piece is sent twice."""
    plan: Plan = {}
    for receiver, boxes in enumerate(needs):
        for name in boxes:
            for need in boxes[name]:
                missing = need.elements()
                for turn in range(len(has)):  # receivers start with different senders
                    sender = (receiver + turn) % len(has)
                    for own in has[sender][name]:
                        piece = own.overlap(need)
                        if missing and piece.elements():
                            plan.setdefault((sender, receiver), []).append((name, piece))
                            missing -= piece.elements()
                    if not missing:
                        break
                assert missing == 0, f"no trainer rank has all rows of {name}"
    return plan


def cut_of(name: str, rows: int, fused: bool) -> str:
    """How the sampler cuts a parameter, as tp_boxes reads it."""
    layer = name.split(".")[-2]
    thirds = "+".join([str(rows // 3)] * 3) if fused else "rows"
    cuts = {"qkv": thirds, "up": "rows", "out": "columns", "down": "columns"}
    return cuts.get(layer, "whole")


def boxes_of(shapes: Shapes, rank: int, ranks: int, fused: bool = True) -> dict:
    """What a tensor-parallel rank has or needs of each parameter."""
    return {
        name: tp_boxes(cut_of(name, shape[0], fused), shape, rank, ranks)
        for name, shape in shapes.items()
    }


def place(boxes: list[Box], piece: Box) -> tuple[slice, slice]:
    """Where a piece of the whole matrix is in a local tensor, which has the boxes as rows."""
    top = 0
    for box in boxes:
        if box.top <= piece.top < box.bottom:
            rows, left = top + piece.top - box.top, piece.left - box.left
            height, width = piece.bottom - piece.top, piece.right - piece.left
            return slice(rows, rows + height), slice(left, left + width)
        top += box.bottom - box.top
    raise ValueError(f"{piece} is not in {boxes}")


def sync(plan: Plan, has: list[dict], needs: list[dict], mine: dict[str, torch.Tensor]) -> list:
    """Send the pieces of `mine` on a trainer rank, or receive into `mine` on a sampler rank.

    Each value of `mine` is a local tensor with two dimensions. Returns bytes and messages.
    """
    rank, requests, buffers, sizes = dist.get_rank(), [], {}, []
    for (sender, receiver), pieces in sorted(plan.items()):
        peer = TRAINERS + receiver
        if rank == sender:
            parts = [mine[name][place(has[sender][name], piece)] for name, piece in pieces]
            flat = torch.cat([part.flatten() for part in parts])
            requests.append(dist.P2POp(dist.isend, flat, peer))
        elif rank == peer:
            size = sum(piece.elements() for _, piece in pieces)
            flat = next(iter(mine.values())).new_empty(size)
            requests.append(dist.P2POp(dist.irecv, flat, sender))
            buffers[sender, receiver] = flat
        else:
            continue
        sizes.append(flat.nbytes)
    for work in dist.batch_isend_irecv(requests) if requests else []:
        work.wait()
    for (sender, receiver), flat in buffers.items():
        pieces = plan[sender, receiver]
        parts = flat.split([piece.elements() for _, piece in pieces])
        for (name, piece), part in zip(pieces, parts, strict=True):
            target = mine[name][place(needs[receiver][name], piece)]
            target.copy_(part.view(target.shape))
    return [sum(sizes), len(sizes)]


def build(seed: int) -> PolicyWeights:
    torch.manual_seed(seed)
    return PolicyWeights()


def matrix(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter with two dimensions. A vector becomes a column."""
    return parameter.detach().view(len(parameter), -1)


def expected(name: str, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """What a sampler rank must have, from the heads and not from the plan."""
    layer, h = name.split(".")[-2], whole.shape[1]
    if layer == "qkv":
        heads = whole.view(3, HEADS, -1, h)  # q, k, v; heads; rows of a head; h
        return torch.cat([part.chunk(ranks)[rank].flatten(0, 1) for part in heads])
    if layer in ("out", "down"):
        return whole.chunk(ranks, dim=1)[rank]
    return whole.chunk(ranks)[rank] if layer == "up" else whole


def attention(
    x: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, heads: int
) -> torch.Tensor:
    """The attention of some heads on [s, h], and their part of the output."""
    q, k, v = F.linear(x, qkv).view(len(x), 3, heads, -1).permute(1, 2, 0, 3)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [heads, s, h / HEADS]
    return F.linear(mixed.transpose(0, 1).flatten(1), out)


def main() -> None:
    torch.set_num_threads(1)
    device = init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    trains, samplers = rank < TRAINERS, world - TRAINERS
    train_group = dist.new_group(list(range(TRAINERS)))  # every rank creates both groups
    sample_group = dist.new_group(list(range(TRAINERS, world)))
    reference = {n: matrix(p) for n, p in build(1).to(device).named_parameters()}
    shapes: Shapes = {name: (p.shape[0], p.shape[1]) for name, p in reference.items()}
    policy = build(1).to(device)
    if trains:
        fully_shard(policy, mesh=DeviceMesh.from_group(train_group, device.type))
    fsdp = [{n: [fsdp_box(s, r, TRAINERS)] for n, s in shapes.items()} for r in range(TRAINERS)]
    tensor = [boxes_of(shapes, r, TRAINERS) for r in range(TRAINERS)]
    x = torch.randn(12, 64, generator=torch.Generator().manual_seed(2)).to(device)
    truth = attention(x, *(reference[f"blocks.0.{n}.weight"] for n in ("qkv", "out")), HEADS)

    rows = []
    for title, has, fused in (
        ("FSDP to TP", fsdp, True),
        ("TP to TP", tensor, True),
        ("FSDP to TP, fusion ignored", fsdp, False),
    ):
        needs = [boxes_of(shapes, r, samplers, fused) for r in range(samplers)]
        mine = {}
        with CommDebugMode() as collectives:
            for name, parameter in policy.named_parameters():
                if trains and has is fsdp:
                    mine[name] = parameter.to_local().detach().view(-1, shapes[name][1])
                elif trains:
                    boxes = has[rank][name]
                    mine[name] = torch.cat(
                        [reference[name][b.top : b.bottom, b.left : b.right] for b in boxes]
                    )
                else:
                    boxes = needs[rank - TRAINERS][name]
                    height = sum(box.bottom - box.top for box in boxes)
                    mine[name] = x.new_full((height, boxes[0].right - boxes[0].left), torch.nan)
            counts = sync(make_plan(has, needs), has, needs, mine)
        assert collectives.get_total_counts() == 0, "no rank may gather a parameter"
        different, error = 0, 0.0
        if not trains:
            for name, whole in reference.items():
                right = expected(name, whole, rank - TRAINERS, samplers)
                different += (mine[name] != right).sum().item()
            parts = (mine[f"blocks.0.{n}.weight"] for n in ("qkv", "out"))
            result = attention(x, *parts, HEADS // samplers)
            dist.all_reduce(result, group=sample_group)
            error = ((result - truth).norm() / truth.norm()).item()
        table = [torch.zeros(4, dtype=torch.float64, device=device) for _ in range(world)]
        dist.all_gather(
            table, torch.tensor([*counts, different, error], device=device).double()
        )
        rows.append((title, [row.tolist() for row in table]))

    if rank == 0:
        size = sum(p.nbytes for p in reference.values())
        cut = sum(p.nbytes for n, p in reference.items() if "blocks" in n and p.shape[1] > 1)
        bound = size - cut + cut // samplers  # what one sampler rank needs, and does not have
        print(f"{TRAINERS} trainer ranks, {samplers} sampler ranks, {size / KIB:.1f} KiB")
        for title, table in rows:
            sent = sum(row[0] for row in table[:TRAINERS])
            messages = sum(int(row[1]) for row in table[:TRAINERS])
            different = sum(int(row[2]) for row in table)
            error = max(row[3] for row in table)
            most = max(row[0] for row in table[:TRAINERS])
            print(
                f"{title}: {sent / KIB:.1f} KiB in {messages} messages, "
                f"at most {most / KIB:.1f} KiB from a trainer rank\n"
                f"  different elements {different}, error of the attention {error:.0%}"
            )
            assert [row[0] for row in table[TRAINERS:]] == [bound] * samplers
            assert sent == bound * samplers
            assert most < 1.1 * sent / TRAINERS, "all trainer ranks must share the work"
            wrong = "ignored" in title and samplers > 1
            assert (different > 0) == wrong and (error > 0.1) == wrong
            assert wrong or error < 1e-5
        print(f"lower bound: {samplers} x {bound / KIB:.1f} KiB")
        print(f"by broadcast, the sampler ranks receive {samplers} x {size / KIB:.1f} KiB")
    dist.barrier()


if __name__ == "__main__":
    WORLD = int(os.environ.get("WORLD_SIZE", "2"))
    if WORLD < 2:
        sys.exit("sync_by_rows.py needs at least 2 ranks: a trainer and a sampler")
    TRAINERS = WORLD - (1 if WORLD < 4 else 2 if WORLD < 8 else 4)
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end

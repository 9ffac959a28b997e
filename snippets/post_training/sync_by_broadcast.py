"""Gather the weights on one trainer rank, and broadcast them to all sampler ranks.

Each trainer rank has some rows of each parameter (FSDP2). Rank 0 gathers a bucket of parameters
in one buffer, and broadcasts the buffer to the sampler ranks. A bucket is the whole model, one
parameter, or several parameters that together need at most 128 KiB. The program counts the
bytes inside the calls. The memory is the largest sum of all buffers that exist at the same
time.
"""

import os
import sys
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

KIB = 1024


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


class Buffer:
    """A flat tensor, which counts as memory until nothing refers to this object."""

    def __init__(self, transfer: "Transfer", elements: int) -> None:
        self.flat = torch.empty(elements, device=transfer.device)
        transfer.add(self.flat.nbytes)
        weakref.finalize(self, transfer.add, -self.flat.nbytes)


class Transfer:
    """Sends, receives and broadcasts, and counts bytes, calls and the memory of its buffers."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.sent = self.received = self.broadcasts = self.memory = self.peak = 0

    def add(self, size: int) -> None:
        self.memory += size
        self.peak = max(self.peak, self.memory)

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        dist.send(tensor, peer)
        self.sent += tensor.nbytes

    def receive(self, tensor: torch.Tensor, peer: int) -> None:
        dist.recv(tensor, peer)
        self.received += tensor.nbytes

    def broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, src=0, group=self.group)
        self.broadcasts += 1
        if dist.get_rank() == 0:
            self.sent += tensor.nbytes  # in a ring or a tree, other ranks forward it
        else:
            self.received += tensor.nbytes


def buckets_of(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Names of parameters in order. A bucket has at most `limit` elements, or one parameter."""
    buckets: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not buckets or size > room:
            buckets.append([])
            room = limit
        buckets[-1].append(name)
        room -= size
    return buckets


def gather_rows(
    transfer: Transfer, shard: torch.Tensor, whole: torch.Tensor | None, ranks: int
) -> None:
    """Rank 0 receives the rows of the first `ranks` ranks in `whole`, in their order."""
    if whole is None:
        if shard.numel():
            transfer.send(shard, 0)
        return
    whole[: len(shard)] = shard
    rows = -(-len(whole) // ranks)  # of each rank in FSDP2, until no row is left
    for rank, part in enumerate(whole.split(rows)):
        if rank > 0:
            transfer.receive(part, rank)


def sync(transfer: Transfer, policy: PolicyWeights, limit: int, trains: bool) -> dict:
    """Returns all weights on a sampler rank, and an empty dict on a trainer rank."""
    parameters = dict(policy.named_parameters())
    received = {}
    for bucket in buckets_of({n: p.numel() for n, p in parameters.items()}, limit):
        size = sum(parameters[name].numel() for name in bucket)
        buffer = Buffer(transfer, size) if dist.get_rank() == 0 or not trains else None
        offset, views = 0, {}
        for name in bucket:
            shape, size = parameters[name].shape, parameters[name].numel()
            if buffer:
                views[name] = buffer.flat[offset : offset + size].view(shape)
            if trains:
                shard = parameters[name].to_local().detach()
                gather_rows(transfer, shard, views.get(name), TRAINERS)
            offset += size
        if buffer:
            transfer.broadcast(buffer.flat)
        if not trains:
            received |= {name: view.clone() for name, view in views.items()}  # "loads" them
        del buffer, views  # otherwise, the old and the next buffer exist at the same time
    return received


def check_uneven_rows(transfer: Transfer) -> None:
    """Gather five rows from all ranks, and then one row, which only one of them stores."""
    torch.manual_seed(3)
    shapes = ((5, 3), (1, 3))
    expected = [torch.randn(shape, device=transfer.device) for shape in shapes]
    policy = nn.ParameterList(nn.Parameter(whole.clone()) for whole in expected)
    fully_shard(policy, mesh=init_device_mesh(transfer.device.type, (dist.get_world_size(),)))
    for parameter, whole in zip(policy, expected, strict=True):
        found = torch.full_like(whole, torch.nan) if dist.get_rank() == 0 else None
        gather_rows(transfer, parameter.to_local().detach(), found, dist.get_world_size())
        assert found is None or torch.equal(found, whole), "a row is missing"


def needed_bytes(parameters: dict[str, torch.Tensor], samplers: int) -> int:
    """What a sampler rank with TP needs: all small parameters, and a part of the matrices."""
    cut = {name for name, p in parameters.items() if "blocks" in name and p.dim() == 2}
    return sum(p.nbytes // (samplers if name in cut else 1) for name, p in parameters.items())


def build(seed: int) -> PolicyWeights:
    torch.manual_seed(seed)
    return PolicyWeights()


def main() -> None:
    torch.set_num_threads(1)
    device = init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    trains = rank < TRAINERS
    train_group = dist.new_group(list(range(TRAINERS)))  # every rank creates both groups
    group = dist.new_group([0, *range(TRAINERS, world)])
    reference = {name: p.detach() for name, p in build(1).to(device).named_parameters()}
    policy = build(1 if trains else 2).to(device)  # the sampler has old weights
    if trains:
        fully_shard(policy, mesh=DeviceMesh.from_group(train_group, device.type))

    size = sum(p.nbytes for p in reference.values())
    largest = max(p.nbytes for p in reference.values())
    samplers = world - TRAINERS
    needs = needed_bytes(reference, samplers)
    assert needed_bytes(reference, 1) == size
    check_uneven_rows(Transfer(group, device))
    rows = []
    for name, limit in (
        ("whole model", size),
        ("one parameter", 0),
        ("128 KiB", 128 * KIB // 4),
    ):
        transfer = Transfer(group, device)
        received = sync(transfer, policy, limit, trains)
        if not trains:
            torch.testing.assert_close(received, reference, rtol=0, atol=0)
        counts = [transfer.sent, transfer.received, transfer.broadcasts, transfer.peak]
        table = [torch.zeros(4, dtype=torch.int64, device=device) for _ in range(world)]
        dist.all_gather(table, torch.tensor(counts, device=device))
        rows.append((name, [row.tolist() for row in table]))

    if rank == 0:
        print(f"{TRAINERS} trainer ranks, {samplers} sampler ranks, {size / KIB:.1f} KiB")
        print("bucket         broadcasts  rank 0 receives, sends  buffer of rank 0")
        for name, table in rows:
            sent, received, broadcasts, peak = table[0]
            print(
                f"{name:13}  {broadcasts:10}  {received / KIB:8.1f} KiB, {sent / KIB:5.1f} KiB"
                f"  {peak / KIB:12.1f} KiB"
            )
            own = sum(
                min(-(-len(p) // TRAINERS), len(p)) * p[0].nbytes for p in reference.values()
            )
            assert received == size - own and sent == size
            assert sum(row[0] for row in table[1:TRAINERS]) == received
            assert all(row[1] == size for row in table[TRAINERS:])
            assert all(row[3] == peak for row in table[TRAINERS:])
            assert all(row[3] == 0 for row in table[1:TRAINERS]), "only rank 0 has a buffer"
        print(
            f"each sampler rank receives {size / KIB:.1f} KiB and needs {needs / KIB:.1f} KiB"
        )
        peaks = [table[0][3] for _, table in rows]
        assert peaks == [size, largest, 128 * KIB]
        assert rows[0][1][0][2] == 1 and rows[1][1][0][2] == len(reference)
        assert 1 < rows[2][1][0][2] < len(reference)
    dist.barrier()


if __name__ == "__main__":
    WORLD = int(os.environ.get("WORLD_SIZE", "2"))
    if WORLD < 2:
        sys.exit("sync_by_broadcast.py needs at least 2 ranks: a trainer and a sampler")
    TRAINERS = WORLD - (1 if WORLD < 4 else 2 if WORLD < 8 else 4)
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end

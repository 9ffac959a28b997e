"""Two nodes run one DDP program: each node starts torchrun, and only --node-rank differs.

Under torchrun this is an ordinary DDP program. If you start it with plain python, it plays both
nodes on one machine. Look at how RANK, LOCAL_RANK and GROUP_RANK (the number of the node)
belong together, and that DDP over both nodes gives the parameters of one process.
"""

import os
import socket
import subprocess
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

NODES, PER_NODE = 2, 2


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


def visible_gpus(node: int) -> dict[str, str]:
    """The variable that gives a node GPUs of its own, or none if there are too few."""
    if torch.accelerator.device_count() < NODES * PER_NODE:
        return {"CUDA_VISIBLE_DEVICES": ""}
    every = ",".join(map(str, range(torch.accelerator.device_count())))
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(listed[node::NODES])}


def play_both_nodes() -> int:
    """Start one torchrun per node, as shells on two machines would; return an exit status."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agents = []
    for node in range(NODES):
        options = [f"--nnodes={NODES}", f"--node-rank={node}", f"--nproc-per-node={PER_NODE}"]
        address = ["--master-addr=127.0.0.1", f"--master-port={port}"]
        shown = " ".join(options) + " --master-addr=$NODE_0 --master-port=29500"
        print(f"node {node}$ torchrun {shown} two_nodes.py", flush=True)
        command = [sys.executable, "-m", "torch.distributed.run", *options, *address, __file__]
        agents.append(subprocess.Popen(command, env=os.environ | visible_gpus(node)))
    try:
        statuses = [agent.wait(timeout=600) for agent in agents]
        print(f"exit statuses of the two torchruns: {statuses}")
        return int(any(statuses))
    finally:
        for agent in agents:
            agent.terminate()  # this does nothing to an agent that has ended


NAMES = ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]


def make_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return list(model.parameters())


def main() -> None:
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()

    rows = [None] * n
    dist.all_gather_object(rows, [os.environ[name] for name in NAMES])
    for row in rows:  # ranks are numbered node by node
        of = dict(zip(NAMES, map(int, row), strict=True))
        assert of["RANK"] == of["GROUP_RANK"] * of["LOCAL_WORLD_SIZE"] + of["LOCAL_RANK"]
    if rank == 0:
        for row in (NAMES, *rows):
            print(
                "  ".join(f"{cell:>{len(name)}}" for name, cell in zip(NAMES, row, strict=True))
            )

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8 * n, 8, generator=generator).to(device)
    y = x.sum(1, keepdim=True)
    model = make_model(device)
    begin = F.mse_loss(model(x), y).item()
    rows = []  # the number of rows that this rank computes with, for each step
    model.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    ours = train(DDP(model), x.chunk(n)[rank], y.chunk(n)[rank])
    assert rows == [8] * 10  # its shard, no more
    assert F.mse_loss(model(x), y).item() < 0.8 * begin
    torch.testing.assert_close(ours, train(make_model(device), x, y))
    if rank == 0:
        print(f"{n} processes: parameters after 10 steps equal to one process")


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
        dist.destroy_process_group()
    else:
        sys.exit(play_both_nodes())

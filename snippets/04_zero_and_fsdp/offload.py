"""CPUOffloadPolicy keeps the shards, their gradients and Adam's state in host memory.

For each policy the program prints the device of the shards, the gradients and the moments,
and the device on which a block computes. Without an accelerator, everything is on the CPU with
both policies. Then pin_memory must be False, and the default raises an error.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

BATCH, H, LAYERS, STEPS = 24, 48, 4, 3  # 1, 2, 3 and 4 ranks divide the batch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


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
    if BATCH % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide the batch of {BATCH}")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (n,))
    pinned = device.type != "cpu"  # page-locked memory speeds up copies to an accelerator
    parameters = []
    for policy in (OffloadPolicy(), CPUOffloadPolicy(pin_memory=pinned)):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(LAYERS)))
        psi = sum(p.numel() for p in model.parameters())
        computed_on: set[str] = set()
        for block in model:
            fully_shard(block, mesh=mesh, offload_policy=policy)
            block.up.register_forward_pre_hook(
                lambda module, _, seen=computed_on: seen.add(module.weight.device.type)
            )
        fully_shard(model, mesh=mesh, offload_policy=policy)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(STEPS):
            inputs = torch.randn(BATCH, H).to(device)
            optimizer.zero_grad()
            mine = inputs[rank::n]
            assert len(mine) == BATCH // n
            loss = model(mine).square().mean()
            loss.backward()
            optimizer.step()
        # full_tensor() of a shard on the CPU would need a backend for CPU tensors
        parameters.append([p.to_local().cpu() for p in model.parameters()])
        shard = model[0].up.weight
        stored = 0
        for p in model.parameters():
            state = optimizer.state[p]
            for tensor in (p, p.grad, state["exp_avg"], state["exp_avg_sq"]):
                stored += tensor.to_local().nbytes
        assert stored == 16 * psi // n
        home = device.type if type(policy) is OffloadPolicy else "cpu"
        moments = optimizer.state[shard]["exp_avg"]
        assert {t.device.type for t in (shard, shard.grad, moments)} == {home}
        assert computed_on == {device.type}
        if rank == 0:
            print(f"{type(policy).__name__}: shards on {shard.device.type}", end="")
            print(f", gradients on {shard.grad.device.type}", end="")
            print(f", moments on {moments.device.type}", end="")
            print(f", computes on {', '.join(computed_on)}")
            print(f"  {stored:,} bytes of state on this rank, 16Ψ/N = {16 * psi // n:,}")
    for plain, offloaded in zip(*parameters, strict=True):
        torch.testing.assert_close(plain, offloaded)
    if rank == 0:
        print(f"the parameters of both runs are equal after {STEPS} steps, loss {loss:.4f}")

    if device.type == "cpu":
        try:
            fully_shard(Block(), mesh=mesh, offload_policy=CPUOffloadPolicy())
            raise AssertionError("the default of pin_memory needs no accelerator")
        except RuntimeError:  # its text depends on the build of torch
            if rank == 0:
                print("without an accelerator, the default pin_memory=True raises RuntimeError")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end

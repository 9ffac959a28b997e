"""If only one rank finds an inf, it skips the step, the others step, and nothing raises.

With DDP an all-reduce carries the inf to all ranks. A sharded gradient is different: only the
rank that owns the element sees the inf. The program puts one inf into the gradient of one rank
and prints what every rank does.

Look at the rows that end in "disagree". GradScaler has no communication for plain tensors.
For DTensors it takes the maximum over the mesh of the first gradient, and it leaves out the
dimensions of the mesh in which that gradient is replicated. So the order of the parameters
decides. AllRanksScaler takes the maximum over all ranks, and the ranks always agree.
"""

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

H, SCALE, RATE = 8, 1024.0, 0.1
Parameters = list[nn.Parameter]


class AllRanksScaler(GradScaler):
    """A GradScaler with which all ranks skip a step if one rank has found an inf or NaN.

    `unscale_` calls this method, and so does `step` for an optimizer with fused=True. All
    ranks must call them equally often, because each call contains a collective.
    """

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        flags = flags or {found_inf.device: found_inf}  # a rank may have no gradient at all
        for flag in flags.values():  # 1 if this rank has found an inf or NaN, otherwise 0
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return flags


class UnscaleFirstScaler(ShardedGradScaler):
    """A ShardedGradScaler that adds the flags of all ranks for a fused optimizer, too."""

    def step(self, optimizer):
        self.unscale_(optimizer)
        return super().step(optimizer)


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def sum_of(parameters: Parameters) -> torch.Tensor:
    """A loss whose gradient is 1 for every element."""
    return torch.stack([shard_of(p).sum() for p in parameters]).sum()


# --8<-- [start:layouts]
def plain() -> tuple[Parameters, int, Callable]:
    """Return an ordinary shard [h], the index of the parameter that gets the inf, the loss."""
    shard = nn.Parameter(torch.ones(H))
    return [shard], 0, lambda: sum_of([shard])


def fsdp2() -> tuple[Parameters, int, Callable]:
    """One layer under fully_shard, with a real reduce-scatter in backward."""
    layer, world = nn.Linear(H, H, bias=False), dist.get_world_size()
    fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    x = torch.full((1, H), 2 * (dist.get_rank() + 1) / (world + 1))  # the mean over ranks is 1
    return [layer.weight], 0, lambda: layer(x).sum()


def tensor_parallel(sharded_first: bool) -> tuple[Parameters, int, Callable]:
    """A norm that is replicated and a weight that is sharded, on one mesh."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    norm = nn.Parameter(distribute_tensor(torch.ones(H), mesh, [Replicate()]))
    weight = nn.Parameter(distribute_tensor(torch.ones(H, H), mesh, [Shard(0)]))
    assert norm.device_mesh == weight.device_mesh  # only the placements differ
    parameters = [weight, norm] if sharded_first else [norm, weight]
    return parameters, 1 - sharded_first, lambda: sum_of(parameters)


def two_meshes(dense_first: bool) -> tuple[Parameters, int, Callable]:
    """A dense weight on all ranks, and an expert whose FSDP mesh is this rank alone."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("ep", "fsdp"))
    dense = nn.Parameter(distribute_tensor(torch.ones(H, H), mesh["ep"], [Shard(0)]))
    expert = nn.Parameter(distribute_tensor(torch.ones(H, H), mesh["fsdp"], [Shard(0)]))
    assert (dense.device_mesh.size(), expert.device_mesh.size()) == (dist.get_world_size(), 1)
    parameters = [dense, expert] if dense_first else [expert, dense]
    return parameters, int(dense_first), lambda: sum_of(parameters)


# --8<-- [end:layouts]


def one_step(layout: tuple, scaler: GradScaler, owner: int | None, fused: bool) -> str:
    """Make a step in which rank `owner` has an inf gradient; return what this rank does."""
    parameters, index, loss = layout
    optimizer = torch.optim.SGD(parameters, lr=RATE, foreach=False, fused=fused)
    assert optimizer.defaults["fused"] == fused
    optimizer.zero_grad()
    scaler.scale(loss()).backward()
    if dist.get_rank() == owner:
        shard_of(parameters[index].grad).view(-1)[3] = torch.inf
    before = [shard_of(p).detach().clone() for p in parameters]
    scaler.step(optimizer)
    scaler.update()
    after = [shard_of(p).detach() for p in parameters]
    if all(map(torch.equal, before, after)):
        return f"skips, {scaler.get_scale():.0f}"
    if owner is None:  # every element has moved by the rate: the gradient was 1, unscaled
        torch.testing.assert_close(after, [b - RATE for b in before])
    return f"steps, {scaler.get_scale():.0f}"


def gather(action: str) -> list[str]:
    actions = [""] * dist.get_world_size()
    dist.all_gather_object(actions, action)
    return actions


def report(name: str, make: Callable, kind: type, agree: bool, fused: bool = False) -> None:
    """Print what the ranks do if rank 0 has the inf; check the other ranks, and no inf."""

    def all_actions(owner: int | None) -> list[str]:
        scaler = kind("cpu", init_scale=SCALE)
        return gather(one_step(make(), scaler, owner, fused))

    world = dist.get_world_size()
    actions = all_actions(0)
    if dist.get_rank() == 0:
        verdict = "agree" if len(set(actions)) == 1 else "disagree"
        print(f"  {name:34}" + "".join(f"{a:13}" for a in actions) + verdict)
    for owner in range(world):
        found = actions if owner == 0 else all_actions(owner)
        skips = [owner == rank or agree for rank in range(world)]
        expected = ["skips, 512" if skip else "steps, 1024" for skip in skips]
        assert found == expected, (name, owner, found)
    assert all_actions(None) == ["steps, 1024"] * world  # without an inf every rank steps


def check_without_gradient() -> None:
    """AllRanksScaler gives the flag of the other ranks to a rank that has no gradient."""
    shard, zero = nn.Parameter(torch.ones(H)), torch.zeros(())
    for value in (1.0, torch.inf):
        if dist.get_rank() < dist.get_world_size() - 1:
            shard.grad = torch.full((H,), value)
        optimizer = torch.optim.SGD([shard])
        flags = AllRanksScaler("cpu")._unscale_grads_(optimizer, zero + 1, zero.clone(), False)
        assert [flag.item() for flag in flags.values()] == [float(value == torch.inf)]


def title(words: str) -> None:
    if dist.get_rank() == 0:
        print(words)


def main() -> None:
    if os.environ.get("WORLD_SIZE") not in ("2", "3", "4"):
        sys.exit("start with: torchrun --nproc-per-node=2 inf_on_one_rank.py (2 to 4 ranks)")
    dist.init_process_group("gloo")
    title(
        "an inf on rank 0; what each rank does, and its next scale\n"
        "plain tensors, one shard per rank"
    )
    report("GradScaler", plain, GradScaler, False)
    report("ShardedGradScaler", plain, ShardedGradScaler, True)
    report("ShardedGradScaler, fused=True", plain, ShardedGradScaler, False, fused=True)
    report("UnscaleFirstScaler, fused=True", plain, UnscaleFirstScaler, True, fused=True)
    report("AllRanksScaler", plain, AllRanksScaler, True)
    report("AllRanksScaler, fused=True", plain, AllRanksScaler, True, fused=True)
    check_without_gradient()
    title("DTensors, with the ordinary GradScaler")
    report("FSDP2, one mesh", fsdp2, GradScaler, True)
    report("[Shard, Replicate]", lambda: tensor_parallel(True), GradScaler, True)
    report("[Replicate, Shard]", lambda: tensor_parallel(False), GradScaler, False)
    report("two meshes, dense weight first", lambda: two_meshes(True), GradScaler, True)
    report("two meshes, expert first", lambda: two_meshes(False), GradScaler, False)
    title("DTensors, with AllRanksScaler")
    report("[Replicate, Shard]", lambda: tensor_parallel(False), AllRanksScaler, True)
    report("two meshes, expert first", lambda: two_meshes(False), AllRanksScaler, True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches keep the mesh and its group until the process ends

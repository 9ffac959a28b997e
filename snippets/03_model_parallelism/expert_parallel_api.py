"""Expert parallelism with DTensor and FSDP2: a ParallelStyle that cuts experts and sends rows.

Four ranks form two meshes at the same time. For the experts, they are (dp, ep) = (2, 2).
DTensor gives each ep rank half of the stacked weights with Shard(0), and FSDP2 cuts this half
over dp. For all other parameters, the four ranks are one data-parallel group. The style's input
function sorts rows and sends them, and its output function returns the results. Both use
`all_to_all_single`, and autograd runs them in reverse.

The program compares three training steps with those of one process that has all tokens: the
losses, the gradients, the norm that clips the gradients of both meshes, and the parameters.
torchtitan has modules for the same purpose (models/common/token_dispatcher.py).
"""

import copy
import os
import sys
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS, H, WIDTH, EXPERTS, K, STEPS = 96, 32, 48, 8, 2, 3  # tokens of one rank
MAX_NORM = 0.1  # of the gradients; below the norm of every step here
KIB = 1024


class LocalExperts(nn.Module):
    """Gated experts of this rank. Their weights are stacked, [e, in, out]."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(experts, H, WIDTH) * H**-0.5)
        self.w3 = nn.Parameter(torch.randn(experts, H, WIDTH) * H**-0.5)
        self.w2 = nn.Parameter(torch.randn(experts, WIDTH, H) * WIDTH**-0.5)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """`rows` [sum of counts, h] are sorted by expert. `counts` has one entry per expert."""
        w1, w3, w2 = (
            w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w3, self.w2)
        )
        ends = counts.cumsum(0, dtype=torch.int32)
        gate = F.silu(F.grouped_mm(rows, w1, offs=ends))
        return F.grouped_mm(gate * F.grouped_mm(rows, w3, offs=ends), w2, offs=ends)


class ExpertBlock(nn.Module):
    """x plus its mixture of experts, for any number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(H), nn.Linear(H, EXPERTS, bias=False)
        self.experts = LocalExperts(EXPERTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        weights, chosen = self.router(y).softmax(dim=-1).topk(K, dim=-1)
        expert_of = chosen.flatten()  # [tokens · k]
        order = expert_of.argsort(stable=True)
        out = self.experts(y[order // K], expert_of.bincount(minlength=EXPERTS))
        return x.index_add(0, order // K, out * weights.flatten()[order, None])


class ExpertParallel(ParallelStyle):
    """Distribute experts over a mesh of one dimension. The call stays the same."""

    def cut(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, weight in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(weight, mesh, [Shard(0)])
            module.register_parameter(key, nn.Parameter(whole))

    def dispatch(self, module: nn.Module, inputs: tuple, mesh: DeviceMesh) -> tuple:
        rows, counts = inputs
        to_experts = counts.view(mesh.size(), -1)  # [n, e/n]
        from_ranks = all_to_all_single(to_experts, None, None, mesh)
        self.send, self.receive = to_experts.sum(1).tolist(), from_ranks.sum(1).tolist()
        rows = all_to_all_single(rows, self.receive, self.send, mesh)
        # rows arrive by source rank, but grouped_mm needs an expert's rows together
        expert_of = torch.arange(from_ranks.shape[1], device=rows.device).repeat(mesh.size())
        self.order = expert_of.repeat_interleave(from_ranks.flatten()).argsort(stable=True)
        return rows[self.order], from_ranks.sum(0)

    def combine(self, module: nn.Module, out: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return all_to_all_single(out[self.order.argsort()], self.send, self.receive, mesh)

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, mesh, self.cut, self.dispatch, self.combine)


def cut(model: nn.Sequential, mesh: DeviceMesh, everyone: DeviceMesh) -> None:
    for block in model:
        parallelize_module(block, mesh["ep"], {"experts": ExpertParallel()})
        fully_shard(block.experts, mesh=mesh["dp"])
        # FSDP would take the mean over dp's two ranks; the loss is a mean over all four
        block.experts.set_gradient_divide_factor(everyone.size())
        block.experts.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
        fully_shard(block, mesh=everyone)
    fully_shard(model, mesh=everyone)


def clip_by_mesh(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Clip gradients on several meshes by the norm of all of them, and return this norm."""
    by_mesh = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh[parameter.grad.device_mesh].append(parameter)
    norms = []
    for group in by_mesh.values():
        norm = get_total_norm([parameter.grad for parameter in group])
        norms.append(norm.full_tensor())  # a plain tensor: it belongs to no mesh any more
    total = torch.stack(norms).norm()  # the root of the sum of the squares
    for group in by_mesh.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total


class Bytes(TorchDispatchMode):
    """Count the bytes that this rank sends in all-to-alls of rows. Counts are not floats."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        self.ep, self.sent = ep, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            tensor, _, send, _ = args
            if tensor.is_floating_point():
                self.sent += (sum(send) - send[self.ep]) * tensor[0].numel() * tensor.itemsize
        return func(*args, **(kwargs or {}))


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
    if int(os.environ.get("WORLD_SIZE", "0")) != 4:
        sys.exit("a 2 × 2 mesh: torchrun --nproc-per-node=4 expert_parallel_api.py")
    device = init_distributed()
    rank = dist.get_rank()
    everyone = init_device_mesh(device.type, (4,), mesh_dim_names=("world",))
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "ep"))

    torch.manual_seed(0)
    model = nn.Sequential(ExpertBlock(), ExpertBlock()).to(device)
    alone = copy.deepcopy(model)
    batches = [torch.randn(4 * TOKENS, H).to(device) for _ in range(STEPS)]
    cut(model, mesh, everyone)

    optimizer, optimizer_alone = (
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, alone)
    )  # not Adam, which would cancel a factor in the gradients
    losses = []
    for batch in batches:
        mine = batch.chunk(4)[rank]
        with Bytes(mesh["ep"].get_local_rank()) as counted:
            loss = (model(mine) - mine.flip(-1)).square().mean()
            forward = counted.sent
            loss.backward()
        truth = (alone(batch) - batch.flip(-1)).square().mean()
        truth.backward()
        dist.all_reduce(mean := loss.detach() / 4)
        torch.testing.assert_close(mean, truth.detach(), rtol=1e-4, atol=1e-6)
        losses.append(mean.item())
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            whole = ours.grad.full_tensor()
            torch.testing.assert_close(whole, theirs.grad, rtol=1e-3, atol=1e-6)
        norm = clip_by_mesh(model.parameters(), MAX_NORM)
        whole_norm = clip_grad_norm_(alone.parameters(), MAX_NORM)
        torch.testing.assert_close(norm, whole_norm, rtol=1e-4, atol=0)
        assert norm > MAX_NORM  # otherwise nothing was clipped
        for each in (optimizer, optimizer_alone):
            each.step()
            each.zero_grad()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-3, atol=1e-5)

    total = torch.tensor([forward, counted.sent - forward], device=device)
    dist.all_reduce(total)
    if rank == 0:
        for name in ("0.experts.w1", "0.router.weight"):
            p = model.get_parameter(name)
            where = ", ".join(str(placement) for placement in p.placements)
            print(f"{name:16} {list(p.shape)} as {list(p.to_local().shape)}", end=" ")
            print(f"on {p.device_mesh.mesh_dim_names}: {where}")
        held = sum(p.to_local().numel() for p in model.parameters())
        print(f"rank 0 holds {held:,} of {sum(p.numel() for p in alone.parameters()):,}")
        even = 2 * (2 - 1) / 2 * K * TOKENS * H * 4 * len(model)
        first, second = (total / 4 / KIB).tolist()
        print(
            f"rows sent a rank, last step: forward {first:.1f} KiB, backward {second:.1f} KiB"
        )
        print(f"  2(n-1)/n · k·b·s·h · 4 for each of {len(model)} layers: {even / KIB:.1f} KiB")
        assert first == second and abs(first * KIB / even - 1) < 0.1
        print(f"losses {', '.join(f'{loss:.4f}' for loss in losses)}, gradients and parameters")
        print(f"equal those of one process, also after clipping to a norm of {MAX_NORM}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()

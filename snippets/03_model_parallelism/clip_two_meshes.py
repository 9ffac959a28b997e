"""Gradients on two device meshes have one norm, and clip_grad_norm_ cannot compute it.

With expert parallelism the experts are on a mesh of (dp, ep) and all other parameters are on a
mesh of all ranks. clip_grad_norm_ stacks the norms of all gradients, and DTensors of two meshes
cannot be stacked. This program computes the gradients in one process, cuts them in the same way
as expert_parallel_api.py does, and clips them. It compares the result with the one process.

    (no flag)   one call of clip_grad_norm_ for all parameters: an error
    --each      one call for each mesh: no error, but each part is clipped by its own norm
    --fix       one norm for each mesh, the root of the sum of their squares, then the scaling
"""

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

TOKENS, H, EXPERTS, MAX_NORM = 32, 8, 4, 0.5


class Mixture(nn.Module):
    """Every expert computes every token; the router weighs the results."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, H, H))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(dim=-1)  # [t, e]
        return torch.einsum("te,th,ehk->tk", weights, x, self.experts)


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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()
    if os.environ.get("WORLD_SIZE") != "4":
        sys.exit("a 2 × 2 mesh: torchrun --nproc-per-node=4 clip_two_meshes.py")
    device = init_distributed()
    show = print if dist.get_rank() == 0 else lambda *_, **__: None
    world = init_device_mesh(device.type, (4,), mesh_dim_names=("world",))
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "ep"))

    torch.manual_seed(0)
    alone = Mixture().to(device)
    x = torch.randn(TOKENS, H).to(device)
    (alone(x) - x.flip(-1)).square().mean().backward()
    cut = {}
    for name, parameter in alone.named_parameters():
        experts = name == "experts"  # over ep by experts, and over dp as FSDP2 does
        where = (mesh, [Shard(1), Shard(0)]) if experts else (world, [Shard(0)])
        cut[name] = nn.Parameter(distribute_tensor(parameter.detach(), *where))
        cut[name].grad = distribute_tensor(parameter.grad, *where)

    before = {name: parameter.grad.clone() for name, parameter in alone.named_parameters()}
    truth = clip_grad_norm_(alone.parameters(), MAX_NORM)
    ratio = MAX_NORM / truth.item()
    show(f"one process: norm {truth:.3f}, every gradient × {ratio:.3f}", flush=True)
    assert before["experts"].norm() > MAX_NORM and before["router.weight"].norm() > MAX_NORM
    try:
        if args.fix:
            torch.testing.assert_close(clip_by_mesh(cut.values(), MAX_NORM), truth)
        elif args.each:
            clip_grad_norm_([cut["experts"]], MAX_NORM)
            clip_grad_norm_([cut["router.weight"], cut["router.bias"]], MAX_NORM)
        else:
            clip_grad_norm_(cut.values(), MAX_NORM)
    except RuntimeError as error:
        show(f"RuntimeError: {str(error).splitlines()[0]}", flush=True)
        return 1

    squares, equal = 0.0, True
    for name, parameter in alone.named_parameters():
        whole = cut[name].grad.full_tensor()
        factor = (whole.norm() / before[name].norm()).item()
        torch.testing.assert_close(whole, before[name] * factor)
        squares += whole.square().sum().item()
        equal &= torch.allclose(whole, parameter.grad, rtol=1e-4)
        show(f"  {name:14} × {factor:.3f}")
    show(f"two meshes: norm {squares**0.5:.3f} after clipping, {MAX_NORM} is the limit")
    assert equal == args.fix, "the gradients of one process are right, and only with --fix"
    show(f"equal to the clipped gradients of one process: {equal}")
    return 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(status)  # DTensor's caches keep the meshes and their groups alive until the end

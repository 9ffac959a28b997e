"""Can't detach views in-place: what gradient_as_bucket_view=True changes about p.grad.

With this option, p.grad is a view of a part of DDP's bucket, which saves one copy of the
gradients. Two things follow. `p.grad.detach_()` raises an error. And a gradient that you store
without a copy is overwritten by a later backward pass, without an error.

    (no flag)   calls p.grad.detach_(), as old code does before p.grad.zero_()
    --keep      stores a reference to the gradient of each step
    --fix       calls zero_grad() of the optimizer, and stores a clone of each gradient

With --fix, the stored gradients must equal those of one process with the data of all ranks.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, ROWS, LEARNING_RATE = 4, 4, 0.1


def old_zero_grad(model: nn.Module) -> None:
    """What optimizers did in old releases, and what hand-written training loops still do."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.detach_()
            parameter.grad.zero_()


def kept_gradients(
    ddp: DistributedDataParallel, data: torch.Tensor, clone: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each step: a copy of the gradient at that time, and the gradient that was stored."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LEARNING_RATE)
    kept = []
    for x in data:
        ddp(x).square().mean().backward()
        gradient = ddp.module.weight.grad
        kept.append((gradient.clone(), gradient.clone() if clone else gradient))
        optimizer.step()
        optimizer.zero_grad()  # sets p.grad = None; the stored tensor is still a view
    return kept


def one_process(model: nn.Linear, data: torch.Tensor) -> list[torch.Tensor]:
    """The weight's gradient in each step, in float64, from the formula for this loss."""
    weight, bias = model.weight.detach().double(), model.bias.detach().double()
    gradients = []
    for x in data.double():  # [steps, rows, 2]
        output = x @ weight.T + bias
        gradients.append(2 * output.T @ x / len(x))
        weight = weight - LEARNING_RATE * gradients[-1]
        bias = bias - LEARNING_RATE * 2 * output.mean(0)
    return gradients


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
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()

    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = nn.Linear(2, 1).to(device)
    data = torch.randn(n, STEPS, ROWS, 2, device=device)  # different data for each rank
    expected = one_process(model, data.transpose(0, 1).flatten(1, 2))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)

    failed = False
    if args.keep or args.fix:
        kept = kept_gradients(ddp, data[rank], clone=args.fix)
        for (then, now), value in zip(kept, expected, strict=True):
            torch.testing.assert_close(then.double(), value, rtol=0, atol=1e-5)
            failed = failed or not torch.equal(then, now)
        memory = [now.untyped_storage().data_ptr() for _, now in kept]
        if args.fix:
            assert len(set(memory)) == STEPS  # every clone has memory of its own
        else:
            # Steps 1, 2 and 3 use the same bucket. DDP created it after step 0.
            assert memory[0] != memory[1] == memory[2] == memory[3]
        if rank == 0:
            for step, (then, now) in enumerate(kept):
                print(f"step {step}: norm {then.norm():.4f} when stored,", end=" ")
                print(f"{now.norm():.4f} at the end")
            sys.stdout.flush()
    else:
        ddp(data[rank, 0]).square().mean().backward()
        try:
            old_zero_grad(model)
        except RuntimeError as error:
            failed = True
            if rank == 0:
                print(f"{type(error).__name__}: {error}", flush=True)

    dist.barrier()  # rank 0 has printed before any rank leaves with an error
    return 1 if failed else 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
